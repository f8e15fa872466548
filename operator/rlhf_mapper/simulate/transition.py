"""Bytes and seconds of the way from the training to the generation layout (HybridFlow section 5, Table 2)."""

from __future__ import annotations

import numpy as np

from rlhf_mapper.simulate.generation import weights_of_gpu
from rlhf_mapper.simulate.layouts import Layouts, Numbers
from rlhf_mapper.simulate.passes import Passes


def received_bytes(passes: Passes, training: Layouts, generator: Layouts) -> Numbers:
    """Bytes that a GPU receives: its generation shard less the part of it that it trains."""
    whole = passes.model.parameters * passes.software.compute_bytes
    own = training.gpus if passes.software.shards_weights else training.p * training.t
    return np.maximum(weights_of_gpu(passes, generator) - whole / own, 0.0)


def transition_seconds(passes: Passes, training: Layouts, generator: Layouts) -> Numbers:
    """Seconds of a transition; the way back moves nothing."""
    span = training.gpus if passes.software.shards_weights else training.p * training.t
    moved = received_bytes(passes, training, generator)
    return moved / passes.network.of(span) + passes.software.efficiency.transition_seconds
