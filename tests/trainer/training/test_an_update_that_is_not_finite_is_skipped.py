"""A loss or gradient that is not finite changes nothing and is counted; too many in a row end the run."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_trainer.errors import NumericsError
from rlhf_trainer.telemetry import Report, merge, recorder
from rlhf_trainer.training.head import Likelihood
from rlhf_trainer.types import Fields
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.supervised import SupervisedActorWorker
from tests.trainer.jobs import job
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.reading import all_tokens
from tests.trainer.tiny import save_tiny
from tests.trainer.weights import full_weights

TOKENS = torch.arange(3, 19).reshape(2, 8)
DATA = {"train": {"uri": "package://rlhf_examples/helpful/train.jsonl"}}


def loss_of(kind: str, rank: int) -> Any:
    """A loss that is right, whose value is NaN on rank 1 only, or whose value is right and its gradient is NaN."""

    def loss(found: Likelihood, _: Fields) -> Tensor:
        share: Tensor = found.log_probs.square().mean()
        if kind == "loss" and rank == 1:
            return share * float("nan")
        if kind == "gradient":
            return share + (share * 0).sqrt()  # at 0 the value is 0 and the slope is infinite
        return share

    return loss


def updates(folder: str, kinds: list[str], most: int) -> tuple[list[Report], dict[str, Tensor], str]:
    """Do the updates on this rank: what each measured, the weights after them, and the error that ended them."""
    import torch.distributed as dist

    spec = {
        "algorithm": {"name": "SFT"},
        "models": {"actor": {"uri": f"file://{folder}", "optimizer": {"learningRate": 0.1}}},
        "data": DATA,
        "training": {"totalSteps": 9, "batchSize": 4, "maxSkippedUpdates": most},
    }
    made = job(Path(folder), f"job-{dist.get_rank()}", spec)
    setting = WorkerSetting(job=made, role="actor", model=made.models()["actor"], folder=folder, total_steps=9)
    trainer = SupervisedActorWorker(setting).trainer
    recorder.drain()
    reports, ended = [], ""
    try:
        for step, kind in enumerate(kinds, start=1):
            trainer.update({"tokens": TOKENS}, all_tokens, loss_of(kind, dist.get_rank()), step=step)
            reports.append(recorder.drain())
    except NumericsError as error:
        ended = str(error)
    return reports, full_weights(trainer.model), ended


def run(folder: str, kinds: list[str], most: int = 1) -> tuple[list[float], dict[str, Tensor], list[str], list[str]]:
    """(updates skipped in each step, weights, warnings, how each rank ended) of two ranks."""
    (first, weights, ended), (second, _, also) = run_kept_ranks(2, updates, folder, kinds, most)
    skipped = [merge(pair)["skipped_updates"] for pair in zip(first, second, strict=True)]
    warnings = [warning for report in first for warning in report.warnings.values()]
    return skipped, weights, warnings, [ended, also]


def test_what_is_skipped_leaves_weights_and_optimizer(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", seed=3)
    skipped, weights, warnings, ended = run(folder, ["right", "loss", "right", "gradient", "right"])
    _, expected, _, _ = run(folder, ["right", "right", "right"])
    assert (skipped, ended) == ([0, 1, 0, 1, 0], ["", ""])
    for name, weight in expected.items():
        assert torch.equal(weights[name], weight), name
    assert warnings == [
        "job-0: spec.models.actor: the loss is nan, so an update was skipped",
        "job-0: spec.models.actor: the gradient norm is nan, so an update was skipped",
    ]


def test_too_many_in_a_row_end_the_run_on_every_rank(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", seed=3)
    skipped, _, _, ended = run(folder, ["loss", "loss", "right", "loss", "gradient", "loss", "right"], most=2)
    assert skipped == [1, 1, 0, 1, 1]
    for rank, message in enumerate(ended):
        assert message == (
            f"job-{rank}: spec.models.actor: step 6: the loss is nan, and 3 updates in a row failed, more "
            "than the 2 of spec.training.maxSkippedUpdates; a lower optimizer.learningRate (0.1) is the usual remedy"
        )
