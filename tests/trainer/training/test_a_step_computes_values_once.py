"""A critic beside the actor that makes one update a step has no pass for the values: that update finds them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_api.files import load
from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.protocols import THREE_D_PROTO
from rlhf_trainer.run.worker_specs import model_spec, setting_of
from rlhf_trainer.telemetry import Report, merge, recorder
from rlhf_trainer.training.trainer import ModelRunner, Trainer
from rlhf_trainer.types import Batch
from tests.examples.test_every_example_is_right import EXAMPLES, FINISHED
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.tiny import divisible_config, save_tiny
from tests.trainer.training.test_a_step_computes_log_probs_once import ONE_UPDATE, assert_same
from tests.trainer.training.test_every_algorithm_takes_a_step import steps
from tests.trainer.training.test_losses_do_not_depend_on_ranks_micro_batches_or_padding import ROWS, sequences
from tests.trainer.weights import weights_on_first_rank

PPO, SAFE = (next(path for path in EXAMPLES if name in path.name) for name in ("helpful-ppo", "safe"))
JOBS = {"PPO": (PPO, "helpful-ppo"), "SafeRLHF": (SAFE, "safe-rlhf")}


def of_the_job(name: str, overrides: Sequence[str]) -> list[str]:
    """The overrides for the example's RL job alone."""
    return [f"{JOBS[name][1]}:{each}" for each in overrides]


def job_of(name: str, *overrides: str) -> Job:
    path, job = JOBS[name]
    return next(each for each in load(path, of_the_job(name, overrides), FINISHED) if each.name == job)


def passes(
    path: Path, name: str, folders: dict[Role, str], overrides: Sequence[str], apart: bool
) -> tuple[list[Report], list[Any], int]:
    """What two steps measured, the counters after them, and the passes of trained models that taught them nothing."""
    counted: list[int] = []
    infer = ModelRunner.infer

    def counting(model: ModelRunner, *given: Any) -> Tensor:
        counted.extend([1] * isinstance(model, Trainer))
        return infer(model, *given)

    setattr(ModelRunner, "infer", counting)  # noqa: B010
    try:
        return *steps(path, name, folders, overrides, apart=apart), len(counted)
    finally:
        setattr(ModelRunner, "infer", infer)  # noqa: B010


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of a language model and of a scorer."""
    root = tmp_path_factory.mktemp("models")
    return save_tiny(root / "language", seed=3), save_tiny(root / "scorer", seed=4, labels=1)


def measured(
    name: str, models: tuple[str, str], overrides: Sequence[str], *, ranks: int = 2, apart: bool = False
) -> tuple[list[dict[str, float]], Any, int]:
    """The records of two steps, the counters after them, and the passes of a rank."""
    language, scorer = models
    folders = {role: language if role in ("actor", "reference") else scorer for role in job_of(name).models()}
    found = run_kept_ranks(ranks, passes, *JOBS[name], folders, of_the_job(name, overrides), apart)
    records = [merge(reports) for reports in zip(*(reports for reports, *_ in found), strict=True)]
    return records, found[0][1], found[0][2]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    ("name", "more", "critics"),
    [
        pytest.param("PPO", (), 1, id="PPO", marks=pytest.mark.slow),
        pytest.param("SafeRLHF", (), 2, id="SafeRLHF"),
        pytest.param(
            "SafeRLHF",
            ("algorithm.separateCostCritic=false",),
            1,
            id="SafeRLHF with one critic",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_only_update_of_a_step_finds_the_values(
    name: str, more: tuple[str, ...], critics: int, ranks: int, models: tuple[str, str]
) -> None:
    overrides = (ONE_UPDATE, *more)
    records, counters, count = measured(name, models, overrides, ranks=ranks)
    expected, expected_counters, count_by_pass = measured(name, models, overrides, ranks=ranks, apart=True)
    assert count_by_pass - count == 2 * critics, "one pass less a step for each critic"
    assert counters == expected_counters
    for one, other in zip(records, expected, strict=True):
        assert one["grad_norm/value"] > 0
        assert_same(one, other)


def learned(
    folder: str, beside: Sequence[str], name: str, role: Role, layout: ParallelSizes
) -> tuple[dict[str, Tensor], Report, dict[str, Tensor]]:
    """The fields that a critic adds to this rank's rows in a step, what it measured, and on rank 0 its weights."""
    import torch.distributed as dist

    job = job_of(name, ONE_UPDATE, "training.microBatchTokens=40")
    worker = model_spec(
        setting_of(job, role, {role: folder}, total_steps=2, layout=layout), role, beside=beside
    ).build()
    fields = {key: field for key, field in sequences(1, 3).items() if "values" not in key}
    fields["response_mask"][5] = 0.0  # a row that nothing is learned from
    rows = THREE_D_PROTO.distribute(layout, ROWS)[dist.get_rank()]
    batch = Batch(step=1, start=rows.start, size=len(rows)).with_fields(
        {key: field[rows.start : rows.stop] for key, field in fields.items()}
    )
    recorder.drain()
    with recorder.counting((dist.get_rank(),) in THREE_D_PROTO.collect(layout)):
        for call in (worker.compute_values, worker.update_critic):
            batch = batch.with_fields(call(batch))
    added = {key: field * batch["response_mask"] for key, field in batch.fields.items() if key not in fields}
    return added, recorder.drain(), weights_on_first_rank(worker.trainer.model)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(ParallelSizes(data=1), id="1"),
        pytest.param(ParallelSizes(data=2), id="2", marks=pytest.mark.slow),
        pytest.param(ParallelSizes(data=1, pipeline=2), id="2 stages"),
        pytest.param(ParallelSizes(data=1, pipeline=2, tensor=2), id="2 stages on 2", marks=pytest.mark.slow),
        pytest.param(
            ParallelSizes(data=2, pipeline=2, tensor=2), id="2 stages of 2 shards on 2", marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.parametrize(
    ("name", "role"), [("PPO", "critic"), pytest.param("SafeRLHF", "cost_critic", marks=pytest.mark.slow)]
)
def test_values_and_weights_are_those_of_a_pass_and_an_update(
    name: str, role: Role, layout: ParallelSizes, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path / "model", seed=3, labels=1, config=divisible_config())
    plain, single = (
        run_kept_ranks(layout.world_size, learned, folder, pool, name, role, layout)
        for pool in ([role], ["actor", role])
    )
    for (added, _, _), (expected, _, _) in zip(single, plain, strict=True):
        assert added.keys() == expected.keys() == {"values" if role == "critic" else "cost_values"}
        torch.testing.assert_close(added, expected, rtol=1e-5, atol=1e-6)
    records = [merge(report for _, report, _ in found) for found in (single, plain)]
    assert_same(*records)
    torch.testing.assert_close(single[0][2], plain[0][2], rtol=0, atol=1e-5)


def test_several_updates_and_pools_of_their_own_need_a_pass() -> None:
    once = job_of("PPO", ONE_UPDATE)
    everywhere = list(once.models())
    for several in ("training.updateEpochs=2", "training.miniBatchSize=32"):
        assert added(job_of("PPO", ONE_UPDATE, several), "critic", everywhere) == [("values",), ()]
    assert added(once, "critic", ["critic", "reward"]) == [("values",), ()]
    assert added(once, "critic", everywhere) == [(), ("values",)]
    safe = job_of("SafeRLHF", ONE_UPDATE)
    assert added(safe, "cost_critic", list(safe.models())) == [(), ("cost_values",)]


def added(job: Job, role: Role, beside: Sequence[str]) -> list[Any]:
    """The fields that a critic adds by its two calls."""
    marks = model_spec(setting_of(job, role, {role: ""}), role, beside=beside).transfers
    return [marks[call].adds for call in ("compute_values", "update_critic")]
