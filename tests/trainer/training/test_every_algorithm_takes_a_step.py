"""Each algorithm's step with its real workers on two ranks; in the generator's place stands one that draws tokens."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from rlhf_api.chain import data_from_jobs
from rlhf_api.files import load
from rlhf_api.names import Role
from rlhf_api.spec.judges import RewardJudge
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.generation.vllm_engine import Response
from rlhf_trainer.protocols import blocks
from rlhf_trainer.run.step_models import connected, step_models_of
from rlhf_trainer.run.worker_specs import helper_specs, model_spec, setting_of
from rlhf_trainer.run_folder.step_metrics import metric_of
from rlhf_trainer.spmd import LocalModel
from rlhf_trainer.telemetry import Report, merge, recorder
from rlhf_trainer.types import Batch, transfers_of
from rlhf_trainer.workers import rollout
from rlhf_trainer.workers.data import DataWorker
from rlhf_trainer.workers.generating_actor import GeneratingActor
from tests.examples.test_every_example_is_right import EXAMPLES, FINISHED, jobs_of
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.stand_in import GeneratorStandIn
from tests.trainer.tiny import divisible_config, save_tiny

END = 2
SMALL = ["data.train.limit=40", "training.totalSteps=2", "training.totalEpochs="]
NOT_IN_THE_TABLE = {"tokens", "peak_flops", "correction/squared_weight"} | {
    f"{what}/{model}"
    for what in ("errors", "errors_square", "returns", "returns_square")
    for model in ("value", "cost_value")
}


class Drawing(GeneratorStandIn):
    """Stands where vLLM would: a response is up to six tokens drawn from its seed."""

    def generate(self, _: Sequence[Sequence[int]], seeds: Sequence[int], **options: Any) -> list[Response]:
        return [self._response(0 if options["greedy"] else seed) for seed in seeds]

    def _response(self, seed: int) -> Response:
        drawn = random.Random(seed)
        tokens = [*(drawn.randrange(3, 512) for _ in range(drawn.randrange(1, 6))), END]
        return Response(
            tokens=tokens, log_probs=[-6.0] * len(tokens), finished=True, versions=[self.version] * len(tokens)
        )


def steps(
    path: Path, name: str, folders: dict[Role, str], overrides: Sequence[str] = (), *, apart: bool = False
) -> tuple[list[Report], list[Any]]:
    """Two steps of a job on this rank's rows: what each measured, and the counters after them.

    apart: with the workers of models that have pools of their own.
    """
    import torch.distributed as dist

    setattr(rollout, "GenerationEngine", Drawing)  # noqa: B010
    world = dist.get_world_size()
    job = next(job for job in load(path, [*SMALL, *overrides], FINISHED) if job.name == name)
    by_data, setting = ParallelSizes(data=world), setting_of(job, job.saved, folders)
    marks = transfers_of(DataWorker, {"setting": setting})
    data = LocalModel(DataWorker(setting, slots=world), by_data, marks)
    specs = helper_specs(setting, path=path)
    specs.pop("judge", None)
    for role in job.models():
        of_role = setting_of(job, role, folders, total_steps=2)
        specs[role] = model_spec(of_role, role, beside=[role] if apart else list(job.models()), sequences=64)
    models: dict[str, Any] = {
        name: LocalModel(spec.build(), ParallelSizes(data=world), spec.transfers) for name, spec in specs.items()
    }
    models = connected(job, {**models, "data": data})
    rows = blocks(job.sequences_per_step, world)[dist.get_rank()]
    reports = []
    for step in (1, 2):
        recorder.drain()
        blank = Batch(step=step, start=rows.start, size=len(rows))
        job.spec.algorithm.step(models["data"].load_batch(blank), **step_models_of(job, models))
        reports.append(recorder.drain())
    return reports, [model.counters().result() for model in models.values() if hasattr(model, "counters")]


OWN_TESTS = ("agent-sft", "agent-grpo", "calculator-sft", "calculator-grpo", "mixture-sft", "mixture-grpo")
"""Those of the calculator learn conversations and have tools, for which the tokenizer of these tests has no template;
tests/trainer/environments takes steps on episodes. Those of the mixture need experts, which the models here lack.
"""
JOBS = [
    (path, job.name)
    for path in EXAMPLES
    for job in jobs_of(path)
    if job.trained() and not data_from_jobs(job) and not isinstance(job.spec.models.reward, RewardJudge)
    if job.name not in OWN_TESTS
]
"""The jobs that learn, whose data are there and whose reward is no judge, which is somewhere else."""
ALIKE = (
    "sums-teacher",
    "sums-student",
    "arithmetic-sft",
    "arithmetic-grpo",
    "arithmetic-two-rewards",
    "beginner",
    "safe-ppo",
    "calculator-alone",
    "helpful-lora",
    "helpful-ppo-ptx",
    "arithmetic-cispo",
)
"""Jobs whose algorithm and options those of other jobs, or the tests of adapters, show too."""
FEW = ("training.promptBatchSize=4", "training.miniBatchSize=32")
OVERRIDES = {
    "arithmetic-cispo": FEW,
    "arithmetic-vapo": (*FEW, "algorithm.criticWarmupSteps=0"),
    "helpful-grpo": ("algorithm.kl={controller: LearningRate, target: 0.1, horizon: 64}",),
    "sums-distilled": ("sums-distilled:training.promptBatchSize=64",),
}
"""Fewer rows than in the examples, a learning rate that is steered, and changes with which the actor learns at once."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Role, str]:
    root = tmp_path_factory.mktemp("models")
    language, scorer = save_tiny(root / "language", seed=3), save_tiny(root / "scorer", seed=4, labels=1)
    found = {role: language if role in ("actor", "reference") else scorer for role in get_args(Role)}
    return {**found, "teacher": save_tiny(root / "teacher", seed=5, config=divisible_config())}


@pytest.mark.parametrize(
    ("path", "name"),
    [pytest.param(path, name, id=name, marks=pytest.mark.slow if name in ALIKE else ()) for path, name in JOBS],
)
def test_a_step_learns_and_measures_what_is_documented(path: Path, name: str, folders: dict[Role, str]) -> None:
    (first, counters), (second, others) = run_kept_ranks(2, steps, path, name, folders, OVERRIDES.get(name, ()))
    assert counters == others
    compares = next(job for job in jobs_of(path) if job.name == name).spec.algorithm.compares_responses
    for pair in zip(first, second, strict=True):
        record = merge(pair)
        assert not [measured for measured in record.keys() - NOT_IN_THE_TABLE if metric_of(measured) is None]
        norms = [value for measured, value in record.items() if measured.startswith("grad_norm/")]
        assert norms
        some_right = not compares or record["reward/mean"] != 0  # random tokens are never the sum of an example
        has_signal = record.get("groups/with_signal", float(some_right)) > 0
        assert all((norm > 0) == has_signal for norm in norms)
        assert record["skipped_updates"] == 0


def drawn(path: Path, folder: str) -> list[list[float]]:
    """Which responses of a batch say that they were sampled, of a sampled batch and of a greedy one."""
    setattr(rollout, "GenerationEngine", Drawing)  # noqa: B010
    (job,) = load(path, SMALL, FINISHED)
    actor = GeneratingActor(setting_of(job, "actor", {"actor": folder}), max_sequences=2)
    fields = {
        "prompt_ids": torch.ones(2, 3, dtype=torch.int64),
        "prompt_mask": torch.ones(2, 3),
        "valid": torch.ones(2),
    }
    batch = Batch(step=1, start=0, size=2, fields=fields)
    return [actor.generate_sequences(batch, do_sample=do_sample)["sampled"].tolist() for do_sample in (True, False)]


def test_a_response_says_whether_it_was_sampled(tmp_path: Path) -> None:
    path = next(path for path in EXAMPLES if "remax" in path.name)
    assert run_kept_ranks(1, drawn, path, save_tiny(tmp_path, seed=3)) == [[[1.0, 1.0], [0.0, 0.0]]]
