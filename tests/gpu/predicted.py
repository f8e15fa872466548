"""Seconds that the mapper predicts for what a step measures, on a node with this process's GPU alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from transformers import PreTrainedConfig

from rlhf_mapper.architecture import architecture_of
from rlhf_mapper.coefficients import software_for
from rlhf_mapper.hardware import CPU_SLOT, NodeGroup, figures_of
from rlhf_mapper.kernels import Numbers
from rlhf_mapper.simulate import generation, training
from rlhf_mapper.simulate.layouts import Layouts
from rlhf_mapper.simulate.passes import Passes
from rlhf_mapper.workload import Lengths, Work, Workload
from rlhf_trainer.device import gpus_here
from tests.real_size.shapes import SHAPES
from tests.real_size.step import Case

ALONE = Layouts(*(np.array(1.0) for _ in range(3)))


def predict_update(case: Case) -> float | None:
    """Seconds of an update of a case; None on a GPU that the mapper does not know."""
    if (passes := _passes(SHAPES[case.shape], case.layers)) is None:
        return None
    work = Work(trained=case.rows, updates=1, recomputes=case.recompute)
    size = np.array(float(max(case.micro_batch_tokens // (case.prompt + case.response), 1)))
    load = _load(case.rows, case.prompt, case.response)
    return _rounded(training.training_seconds(passes, work, load, ALONE, size))


def predict_generation(
    config: PreTrainedConfig, rows: int, prompt: int, response: int, *, memory_share: float
) -> float | None:
    """Seconds of a batch of responses; memory_share: of the GPU, for weights and cache."""
    if (passes := _passes(config)) is None:
        return None
    cache = memory_share * passes.nodes.gpu.memory - generation.weights_of_gpu(passes, ALONE)
    work, load = Work(generated=rows, passes=1), _load(rows, prompt, response)
    return _rounded(generation.generation_seconds(passes, work, load, ALONE, cache))


def predict_reshard(config: PreTrainedConfig) -> float | None:
    """Seconds in which new weights come to the generator on the same GPU."""
    if (passes := _passes(config)) is None:
        return None
    return _rounded(generation.transition_seconds(passes, Work(), ALONE, ALONE))


def _passes(config: PreTrainedConfig, layers: int | None = None) -> Passes | None:
    """The mapper's simulator of a model; layers: where they are fewer than the config's."""
    found = gpus_here()
    if (gpu := figures_of(found[0]) if found else CPU_SLOT) is None:
        return None
    model = architecture_of(config.to_dict())
    nodes = NodeGroup(gpu=gpu, count=1, gpus_per_node=1)
    software = software_for("GPU" if found else "CPU", "Auto")
    return Passes(replace(model, layers=layers or model.layers), nodes, software)


def _load(rows: int, prompt: int, response: int) -> Workload:
    lengths = [Lengths((float(each),)) for each in (prompt, response)]
    return Workload(sequences=rows, prompt=lengths[0], response=lengths[1], work={})


def _rounded(seconds: Numbers) -> float:
    return round(float(seconds), 4)
