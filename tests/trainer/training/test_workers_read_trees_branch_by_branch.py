"""Workers on rows that are trees: updates, references, teachers and scores are those of the branches as rows."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from rlhf_api.names import Role
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.telemetry import Report, merge, recorder
from rlhf_trainer.types import PARENTS, Batch, Fields, transfers_of
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.reference import ReferenceWorker
from rlhf_trainer.workers.reward import CostWorker, RewardWorker
from rlhf_trainer.workers.scoring import ScoringWorker
from rlhf_trainer.workers.teacher import TeacherWorker
from tests.trainer.jobs import job
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.teachers import teaching
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


def setting_of(folder: str, role: Role, name: str, *, urls: Sequence[str] = (), **options: Any) -> WorkerSetting:
    """Of a role in a job of an algorithm; urls: of the teachers, instead of a model."""
    model = {"uri": f"file://{folder}"}
    models: dict[str, Any] = {key: {**model, "optimizer": {}} for key in losses.TRAINED.get(name, ("actor",))}
    models |= dict.fromkeys({*losses.FROZEN[name], role} - models.keys(), model)
    if urls:
        del models["teacher"]
        models["teacherEndpoints"] = [{"name": "t", "url": url, "model": "x", "timeoutSeconds": 30} for url in urls]
    spec = {
        "algorithm": {"name": name, **options},
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


def teacher_log_probs(folder: str, fields: Fields, options: dict[str, Any], *urls: str) -> Tensor:
    os.environ["NO_PROXY"] = "127.0.0.1"
    setting = setting_of(folder, "actor" if urls else "teacher", "Distillation", urls=urls, **options)
    worker = TeacherWorker(setting)
    (found,) = worker.compute_log_prob(batch_of(worker, "compute_log_prob", fields, setting)).values()
    return found


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="sampled", marks=pytest.mark.slow),
        pytest.param({"divergence": "Reverse", "topK": 4}, id="likeliest"),
    ],
)
def test_a_teacher_reads_the_branches(options: dict[str, Any], tmp_path: Path) -> None:
    folder, fields = save_tiny(tmp_path / "model", seed=3), trees(4)
    fields["valid"] = torch.ones(len(fields["tokens"]))
    rows, at = as_rows({name: field for name, field in fields.items() if name != "valid"})
    (expected,) = run_kept_ranks(1, teacher_log_probs, folder, rows, options)
    (found,) = run_kept_ranks(1, teacher_log_probs, folder, fields, options)
    require_same_values(found, expected, at)
    with teaching(folder) as (teacher, url):
        (served,) = run_kept_ranks(1, teacher_log_probs, folder, fields, options, url)
    learned = fields["response_mask"] > 0
    assert_close(served[learned], found[learned], rtol=0, atol=2e-4)
    sizes = rows["attention_mask"].sum(1).int().tolist()
    branches = {tuple(row[:size].tolist()) for row, size in zip(rows["tokens"], sizes, strict=True)}
    assert {tuple(each) for each in teacher.asked} <= branches


def scores(folder: str, fields: Fields, kind: str) -> Tensor:
    if kind == "cost":
        setting = setting_of(folder, "cost", "SafeRLHF")
        worker: Any = CostWorker(setting)
        costs: Tensor = worker.compute_cost(batch_of(worker, "compute_cost", fields, setting))["costs"]
        return costs
    setting = setting_of(folder, "reward", "PPO")
    worker = (RewardWorker if kind == "reward" else ScoringWorker)(setting)
    found: Tensor = worker.compute_reward(batch_of(worker, "compute_reward", fields, setting))["scores"]
    return found


@pytest.mark.parametrize("kind", ["reward", "cost", "part of a sum"])
def test_a_score_is_that_of_the_last_branch(kind: str, tmp_path: Path) -> None:
    folder, fields = save_tiny(tmp_path / "model", seed=4, labels=1), trees(5)
    rows, at = as_rows(fields)
    width = fields["tokens"].shape[1]
    last = [at_row * width + size - 1 for at_row, size in enumerate(fields["attention_mask"].sum(1).int().tolist())]
    chosen = [int((at == place).any(1).int().argmax()) for place in last]
    there = fields["attention_mask"].any(1)
    alone = {name: field[chosen] for name, field in rows.items()}
    for each in (fields, alone):
        each |= {name: there.float() for name in ("valid", "finished", "sampled")}
    (found,), (expected,) = (run_kept_ranks(1, scores, folder, each, kind) for each in (fields, alone))
    assert PARENTS in fields
    assert_close(found[there], expected[there], rtol=0, atol=2e-5)
    assert len(set(found[there].tolist())) == int(there.sum())
