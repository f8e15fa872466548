"""Workers on rows that are trees: updates and references are those of the branches as rows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from rlhf_api.names import Role
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.telemetry import Report, merge, recorder
from rlhf_trainer.types import Batch, Fields, transfers_of
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.reference import ReferenceWorker
from tests.trainer.jobs import job
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.tiny import divisible_config, save_tiny
from tests.trainer.training import test_losses_do_not_depend_on_ranks_micro_batches_or_padding as losses
from tests.trainer.trees import VOCABULARY, as_rows, distinct_prefixes, trees
from tests.trainer.weights import weights_on_first_rank

Learnt = tuple[dict[str, float], dict[str, Tensor]]
"""(measurements, weights)."""
MEASURES = ("loss/policy", "grad_norm/policy", "entropy", "clip_fraction", "corrected_fraction", "kl/teacher")


def learned_fields(seed: int = 1) -> dict[str, Tensor]:
    """Trees with everything that an actor's update may read."""
    fields, generator = trees(seed), torch.Generator().manual_seed(seed)
    shape, mask = fields["tokens"].shape, fields["response_mask"]
    noise = {name: torch.randn(shape, generator=generator) * mask for name in losses.NOISE}
    for name in ("old_log_probs", "ref_log_probs"):
        noise[name] = (noise[name] * 0.3 - 6.0) * mask
    noise["rollout_log_probs"] = noise["old_log_probs"] + 0.5 * noise["rollout_log_probs"]
    likeliest = torch.randn(*shape, VOCABULARY, generator=generator).log_softmax(2).topk(5)
    tokens = torch.cat([likeliest.indices.float(), likeliest.values], 2) * mask[:, :, None]
    return {**fields, **noise, "teacher_tokens": tokens}


def update(case: str, folder: str, fields: dict[str, Tensor], layout: ParallelSizes, budget: int, share: bool) -> Any:
    """One update on this rank's rows: what was measured, and on rank 0 the whole weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "sequences", lambda *_: dict(fields))
        patch.setattr(losses, "ROWS", len(fields["tokens"]))
        worker, update_once = losses.worker_of(case, folder, layout, budget=budget, share=share, mini_batch=None)
    recorder.drain()
    update_once(1)
    return recorder.drain(), weights_on_first_rank(worker.trainer.model)


def learnt(case: str, folder: str, fields: Fields, layout: ParallelSizes, budget: int, share: bool) -> Learnt:
    found = run_kept_ranks(layout.world_size, update, case, folder, fields, layout, budget, share)
    reports: list[Report] = [report for report, _ in found]
    return merge(reports), found[0][1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"), seed=3, config=divisible_config())


CASES = ("PPO actor", "distilled actor")


@pytest.fixture(scope="module")
def of_rows(folder: str) -> Mapping[str, Learnt]:
    """What one rank learns from the branches as rows, by case."""
    rows, _ = as_rows(learned_fields())
    return {case: learnt(case, folder, rows, ParallelSizes(data=1), 100_000, False) for case in CASES}


@pytest.mark.parametrize(
    ("case", "layout", "budget", "share"),
    [
        ("PPO actor", ParallelSizes(data=1), 100_000, True),
        ("PPO actor", ParallelSizes(data=1), 1, False),
        ("distilled actor", ParallelSizes(data=1), 40, True),
        ("PPO actor", ParallelSizes(data=2), 40, True),
        ("distilled actor", ParallelSizes(data=1, context=2), 40, True),
        pytest.param("PPO actor", ParallelSizes(data=1, tensor=2, pipeline=2), 40, True, marks=pytest.mark.slow),
        pytest.param("PPO actor", ParallelSizes(data=2, context=2), 40, False, marks=pytest.mark.slow),
    ],
    ids=lambda value: losses.named(value) if isinstance(value, ParallelSizes) else str(value),
)
def test_an_update_on_trees_is_that_on_their_branches(
    case: str, layout: ParallelSizes, budget: int, share: bool, folder: str, of_rows: Mapping[str, Learnt]
) -> None:
    fields = learned_fields()
    record, weights = learnt(case, folder, fields, layout, budget, share)
    expected, expected_weights = of_rows[case]
    for name in {*MEASURES} & expected.keys():
        assert record[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    for name, weight in expected_weights.items():
        assert_close(weights[name], weight, rtol=0, atol=2e-6, msg=name)
    if layout.world_size == 1 and share and budget > 1000:
        learned = fields["response_mask"].any(1)
        assert record["computed_tokens"] == distinct_prefixes({name: each[learned] for name, each in fields.items()})
    assert 0.0 <= record["shared_tokens"] < 1.0


def setting_of(folder: str, role: Role, name: str) -> WorkerSetting:
    """Of a role in a job of an algorithm."""
    model = {"uri": f"file://{folder}"}
    models: dict[str, Any] = {key: {**model, "optimizer": {}} for key in losses.TRAINED.get(name, ("actor",))}
    models |= dict.fromkeys({*losses.FROZEN[name], role} - models.keys(), model)
    spec = {
        "algorithm": {"name": name},
        "models": models,
        "data": losses.DATA,
        "training": {"totalSteps": 1, "promptBatchSize": 4},
    }
    made = job(Path(folder), role.replace("_", "-"), spec)
    return WorkerSetting(job=made, role=role, model=made.models()[role], folder=folder, total_steps=1)


def batch_of(worker: Any, method: str, fields: Fields, setting: WorkerSetting) -> Batch:
    """The fields that the method's call reads."""
    reads = transfers_of(type(worker), {"setting": setting})[method].fields_read(fields)
    return Batch(step=1, start=0, size=len(fields["tokens"]), fields={name: fields[name] for name in reads})


def reference_log_probs(folder: str, fields: Fields) -> Tensor:
    setting = setting_of(folder, "reference", "PPO")
    worker = ReferenceWorker(setting)
    return worker.compute_log_prob(batch_of(worker, "compute_log_prob", fields, setting))["ref_log_probs"]


def require_same_values(trees_: Tensor, rows: Tensor, at: Tensor) -> None:
    assert_close(trees_.flatten(0, 1)[at[at >= 0]], rows[at >= 0], rtol=0, atol=2e-5)
    assert int((trees_ != 0).sum()) == int((rows[at >= 0] != 0).sum())


def test_reference_log_probs_are_those_of_the_branches(tmp_path: Path) -> None:
    folder, fields = save_tiny(tmp_path / "model", seed=3), trees(4)
    rows, at = as_rows(fields)
    (found,), (expected,) = (run_kept_ranks(1, reference_log_probs, folder, each) for each in (fields, rows))
    require_same_values(found, expected, at)
