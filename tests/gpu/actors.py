"""Actors with random weights, as the rungs build them: by the product's worker, from a manifest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_api.job import Job
from rlhf_trainer.types import Batch
from rlhf_trainer.workers.actor import ActorWorker
from tests.real_size.live_bytes import LiveBytes
from tests.real_size.shapes import SHAPES
from tests.real_size.step import Case, batch_of, manifest, worker_of
from tests.trainer.tiny import save_tiny


def random_model(case: Case, folder: Path) -> dict[str, str]:
    """Folders of a language model of the case's shape, drawn from a seed."""
    return {"actor": save_tiny(folder, seed=3, config=SHAPES[case.shape]), "reward": str(folder)}


def actor_of(
    case: Case,
    folders: Mapping[str, str],
    *,
    learning_rate: float,
    rollout: Mapping[str, Any] | None = None,
    live: LiveBytes | None = None,
) -> ActorWorker:
    """The actor of a case. rollout: more of `spec.rollout`; live: measures what building it takes."""
    document = manifest(case, folders)
    document["spec"]["models"]["actor"]["optimizer"] = {"learningRate": learning_rate}
    document["spec"]["rollout"].update(rollout or {})
    worker = worker_of("actor", case, Job.parse(document), folders, live or LiveBytes())
    assert isinstance(worker, ActorWorker)
    return worker


def scored(actor: ActorWorker, case: Case) -> Batch:
    """The rows of the case with the actor's own log-probabilities."""
    batch = batch_of(case)
    return batch.with_fields(actor.compute_log_prob(batch))


def read(batch: Batch) -> Tensor:
    """The log-probabilities of the responses' tokens, one after the other."""
    return batch["old_log_probs"][batch["response_mask"] > 0]


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Of two tensors, elementwise."""
    return float((one - other).abs().max()) if len(one) else torch.nan


def engine_of(actor: ActorWorker) -> Any:
    """The generation engine beside an actor."""
    assert actor.generation, "another pool generates"
    return actor.generation.engine
