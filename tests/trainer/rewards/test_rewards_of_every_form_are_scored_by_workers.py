"""The worker that an algorithm calls: a sum of a model, a function and a service, the same on any number of ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_api.files import load
from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_trainer.errors import TrainerError
from rlhf_trainer.protocols import blocks
from rlhf_trainer.run.worker_specs import model_spec
from rlhf_trainer.telemetry import Report, merge, recorder
from rlhf_trainer.types import Batch
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.reward import RewardWorker
from rlhf_trainer.workers.scoring import JudgeWorker, ScoringWorker
from tests.trainer.chain.mistakes import FUNCTIONS, MISTAKES, PPO, Mistake
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.rewards.stub_server import Server
from tests.trainer.tiny import save_tiny

ROWS, WIDTH, PROMPT = 5, 8, 3
FIELDS = {
    "tokens": torch.arange(20, 20 + ROWS * WIDTH).reshape(ROWS, WIDTH),
    "attention_mask": torch.ones(ROWS, WIDTH),
    "response_mask": torch.cat([torch.zeros(ROWS, PROMPT), torch.ones(ROWS, WIDTH - PROMPT)], dim=1),
    "finished": torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0]),
    "valid": torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]),
    "sampled": torch.ones(ROWS),
}
LENGTHS = f"entrypoint: '{FUNCTIONS}:lengths'"
ANSWERING = pytest.mark.parametrize("ranks", [1, 2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A manifest's folder with tiny models."""
    made = tmp_path_factory.mktemp("rewards")
    for name, labels in {"language": None, "reward": 1}.items():
        save_tiny(made / "models" / name, seed=1, labels=labels)
    return made


def job_with(folder: Path, *sets: str) -> Job:
    path = folder / "job.yaml"
    path.write_text(PPO)
    return load(path, sets)[0]


def setting(job: Job, folder: Path, role: Role) -> WorkerSetting:
    model = "language" if role == "actor" else "reward"
    given: Any = job.models()
    return WorkerSetting(job=job, role=role, model=given[role], folder=str(folder / "models" / model), total_steps=1)


def batch_here(step: int = 1) -> Batch:
    """This rank's rows."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rows = blocks(ROWS, world)[rank]
    fields = {name: field[rows.start : rows.stop].clone() for name, field in FIELDS.items()}
    return Batch(step=step, start=rows.start, size=len(rows), fields=fields)


def score(job: Job, folder: Path, sampled: float = 1.0) -> tuple[list[float], dict[str, tuple[float, float]]]:
    """(scores of this rank's rows, what was measured)."""
    role: Role = "reward" if "reward" in job.models() else "actor"
    worker = model_spec(setting(job, folder, role), "reward").build()
    batch = batch_here()
    batch = batch.with_fields({"sampled": torch.full((batch.size,), sampled)})
    scores = worker.compute_reward(batch)["scores"].tolist()
    return scores, recorder.drain().means


def all_scores(ranks: int, job: Job, folder: Path) -> list[float]:
    return [value for scores, _ in run_kept_ranks(ranks, score, job, folder) for value in scores]


def test_a_bare_model_keeps_its_own_worker(folder: Path) -> None:
    bare, function = job_with(folder), job_with(folder, f"models.reward={{{LENGTHS}}}")
    found = [model_spec(setting(each, folder, "actor"), "reward").worker_class for each in (bare, function)]
    assert found == [RewardWorker, ScoringWorker]


@ANSWERING
def test_a_function_scores_the_real_rows(folder: Path, ranks: int) -> None:
    job = job_with(folder, f"models.reward={{{LENGTHS}, arguments: {{scale: 0.5}}}}")
    scores = all_scores(ranks, job, folder)
    assert scores[-1] == 0.0, "padding"
    assert all(value >= 2.5 for value in scores[:-1])
    assert [value % 0.5 for value in scores] == [0.0] * ROWS


def with_columns(batch: Batch) -> Batch:
    """With two columns, of which `size` is the number of the row."""
    texts = [json.dumps({"size": row, "more": "x"}).ljust(30, "\0") for row in batch.rows.tolist()]
    return batch.with_fields({"columns": torch.tensor([list(text.encode()) for text in texts], dtype=torch.uint8)})


def score_by_column(job: Job, folder: Path) -> tuple[dict[str, Any], Report]:
    """(what is added to this rank's rows, what was measured)."""
    worker = model_spec(setting(job, folder, "actor"), "reward").build()
    found = worker.compute_reward(with_columns(batch_here()))
    return {name: field.tolist() for name, field in found.items()}, recorder.drain()


@ANSWERING
def test_a_function_gets_the_columns_of_its_ranks_rows(folder: Path, ranks: int) -> None:
    job = job_with(folder, f"models.reward={{entrypoint: '{FUNCTIONS}:sizes'}}", "data.train.columns=[size, more]")
    results = run_kept_ranks(ranks, score_by_column, job, folder)
    assert [value for found, _ in results for value in found["scores"]] == [0.0, 1.0, 2.0, 3.0, 0.0]


@ANSWERING
def test_a_sum_weighs_its_parts(folder: Path, ranks: int) -> None:
    model = all_scores(1, job_with(folder), folder)
    function = all_scores(1, job_with(folder, f"models.reward={{{LENGTHS}}}"), folder)
    terms = "[{name: model, weight: 2, reward: {uri: 'file://models/reward'}}, "
    terms += f"{{name: length, weight: -0.1, reward: {{{LENGTHS}}}}}]"
    job = job_with(folder, f"models.reward={{sum: {terms}}}")
    results = run_kept_ranks(ranks, score, job, folder)
    valid = FIELDS["valid"].tolist()
    expected = [ok * (2 * one - 0.1 * other) for ok, one, other in zip(valid, model, function, strict=True)]
    assert [value for scores, _ in results for value in scores] == pytest.approx(expected, abs=1e-4)
    measured = [means["reward_part/length"] for _, means in results]
    assert sum(total for total, _ in measured) == pytest.approx(sum(function[:-1]), abs=1e-4)
    assert sum(weight for _, weight in measured) == ROWS - 1


def score_thrice(job: Job, folder: Path) -> tuple[list[list[float]], list[float]]:
    """Scores of this rank's rows in two steps, the second after a resume, and in an evaluation."""
    made = model_spec(setting(job, folder, "actor"), "reward").build
    first, second = made(), made()

    def scores(worker: Any, step: int) -> list[float]:
        found: list[float] = worker.compute_reward(with_columns(batch_here(step=step)))["scores"].tolist()
        return found

    before = scores(first, 1)
    second.set_counters(counters=json.loads(json.dumps(first.counters())))
    return [before, scores(second, 2), scores(second, 0)], scores(first, 2)


@ANSWERING
def test_a_part_is_normalised_by_all_of_its_scores_so_far(folder: Path, ranks: int) -> None:
    """The part's scores are 0, 1, 2, 3 (mean 1.5, deviation sqrt(1.25)) in each step; the weight comes after."""
    term = f"name: a, weight: 2, normalization: Running, reward: {{entrypoint: '{FUNCTIONS}:sizes'}}"
    results = run_kept_ranks(ranks, score_thrice, job_with(folder, f"models.reward={{sum: [{{{term}}}]}}"), folder)
    first, second, evaluated = ([value for scores, _ in results for value in scores[call]] for call in range(3))
    expected = [2 * (size - 1.5) / 1.25**0.5 for size in range(4)]
    assert first == pytest.approx([*expected, 0.0], abs=1e-5)
    assert second == pytest.approx(first, abs=1e-5)
    assert [value for _, scores in results for value in scores] == second, "a resumed run goes on the same"
    assert evaluated == [0.0, 2.0, 4.0, 6.0, 0.0]


def test_parts_of_greedy_responses_are_scored_and_not_reported(folder: Path) -> None:
    job = job_with(
        folder, f"models.reward={{sum: [{{name: a, reward: {{{LENGTHS}}}}}, {{name: b, reward: {{{LENGTHS}}}}}]}}"
    )
    ((sampled, measured),), ((greedy, nothing),) = (
        run_kept_ranks(1, score, job, folder),
        run_kept_ranks(1, score, job, folder, 0.0),
    )
    assert greedy == sampled
    assert measured["reward_part/a"] == (sum(sampled) / 2, ROWS - 1)
    assert nothing["reward_part/a"] == nothing["reward_part/b"] == (0.0, 0.0)


def test_a_message_about_a_sums_model_names_its_field(folder: Path) -> None:
    terms = f"[{{name: length, reward: {{{LENGTHS}}}}}, {{name: model, reward: {{uri: 'file://models/language'}}}}]"
    job = job_with(folder, f"models.reward={{sum: {terms}}}")
    made = WorkerSetting(
        job=job, role="reward", model=job.models()["reward"], folder=str(folder / "models" / "language"), total_steps=1
    )
    with pytest.raises(
        TrainerError, match=r"^ppo: spec\.models\.reward\.sum\.1\.reward: .* without a trained score head"
    ):
        made.scorer(may_add_head=False)


def judge(job: Job, folder: Path, *without: int) -> list[dict[str, float | None]]:
    """The scores of each row; `without`: rows that got no reward."""
    assert job.spec.evaluation is not None
    worker = JudgeWorker(setting(job, folder, "actor"))
    batch = batch_here(step=0)
    given = torch.tensor([float(row not in without) for row in batch.rows.tolist()])
    scored = {"scored_scores": torch.ones(batch.size), "scored_valid": given}
    return [row.scores for row in worker.judge(with_columns(batch).with_fields(scored))]


def test_an_evaluation_function_runs_by_the_same_means(folder: Path) -> None:
    evaluation = f"{{data: {{uri: hf://x}}, functions: [{{name: rule, {LENGTHS}, arguments: {{scale: 2}}}}]}}"
    job = job_with(folder, f"evaluation={evaluation}")
    function = all_scores(1, job_with(folder, f"models.reward={{{LENGTHS}}}"), folder)
    rows = [row for part in run_kept_ranks(2, judge, job, folder) for row in part]
    assert rows == [{"reward": 1.0, "rule": 2 * value} for value in function[:-1]]


def test_a_verifier_of_an_evaluation_reads_its_column(folder: Path) -> None:
    """The number of the row: the responses, of other tokens, hold none of them."""
    verifiers = "[{name: right, verifier: {name: Math, answerKey: size}}, {name: brief, verifier: {name: Length}}]"
    verifiers = verifiers.replace("Length", "Length, maximum: 10000")
    job = job_with(folder, f"evaluation={{data: {{uri: hf://x}}, verifiers: {verifiers}}}")
    rows = [row for part in run_kept_ranks(2, judge, job, folder) for row in part]
    finished = FIELDS["finished"][: len(rows)].tolist()
    assert rows == [{"reward": 1.0, "right": 0.0, "brief": ended} for ended in finished]


def test_an_evaluation_keeps_the_responses_that_have_no_score(folder: Path) -> None:
    evaluation = f"{{data: {{uri: hf://x}}, functions: [{{name: rule, entrypoint: '{FUNCTIONS}:every_other'}}]}}"
    ((first, second, *_),) = run_kept_ranks(1, judge, job_with(folder, f"evaluation={evaluation}"), folder, 1)
    assert first == {"reward": 1.0, "rule": None, "rule_size": None}
    assert second == {"reward": None, "rule": 1.0, "rule_size": 3.0}


def score_one_group(job: Job, folder: Path) -> tuple[list[float], list[float], Report]:
    """(scores of this rank's rows, which got one, what was measured) of responses to one prompt, cut over the ranks."""
    batch = batch_here()
    batch["tokens"][:, :PROMPT] = 20
    found = model_spec(setting(job, folder, "actor"), "reward").build().compute_reward(batch)
    return found["scores"].tolist(), found["valid"].tolist(), recorder.drain()


@ANSWERING
def test_a_judge_compares_the_responses_of_all_ranks(folder: Path, ranks: int, server: Server) -> None:
    server.behave = lambda handler, call: handler.say(alphabetic(call["messages"][0]["content"]))
    url = f"http://127.0.0.1:{server.server_port}/v1"
    judge = f"{{url: '{url}', model: m, prompt: '{{response_a}}<or>{{response_b}}'}}"
    job = job_with(folder, f"models.reward={{judge: {judge}}}", "rollout.samplesPerPrompt=4")
    results = run_kept_ranks(ranks, score_one_group, job, folder)
    scores = [value for scores, _, _ in results for value in scores]
    assert sorted(scores[:-1]) == pytest.approx([0.0, 1 / 3, 2 / 3, 1.0])
    assert [value for _, valid, _ in results for value in valid] == FIELDS["valid"].tolist()
    record = merge(report for *_, report in results)
    assert record["judge/unread"] == 0.0
    assert record["judge/questions"] == len(server.seen) >= 4 * 3


def alphabetic(question: str) -> str:
    """Prefer what comes first by its characters."""
    one, two = question.split("<or>")
    return "[[A]]" if one < two else "[[B]]"


@ANSWERING
def test_a_response_without_a_score_becomes_padding(folder: Path, ranks: int) -> None:
    """Every other response has none; the last row is padding anyway."""
    job = job_with(folder, f"models.reward={{entrypoint: '{FUNCTIONS}:every_other'}}")
    results = run_kept_ranks(ranks, score_by_column, job, folder)
    found: dict[str, list[Any]] = {name: [] for name in results[0][0]}
    for fields, _ in results:
        for name, values in fields.items():
            found[name] += values
    assert found["scores"] == [0.0, 1.0, 0.0, 1.0, 0.0]
    assert found["valid"] == [0.0, 1.0, 0.0, 1.0, 0.0]
    assert [any(row) for row in found["response_mask"]] == [False, True, False, True, False]
    record = merge(report for _, report in results)
    assert record == {"reward/left_out": 2.0, "reward_part/size": 3.0, "reward_part_std/size": 0.0}


def test_a_judgement_that_was_ended_is_counted_and_told(folder: Path) -> None:
    job = job_with(folder, f"models.reward={{entrypoint: '{FUNCTIONS}:stopped_twice'}}")
    ((found, report),) = run_kept_ranks(1, score_by_column, job, folder)
    assert found["scores"] == [0.0, 0.0, 1.0, 1.0, 0.0]
    assert report.sums == {"reward/left_out": 0.0, "reward/stopped": 2.0}
    assert ["2 responses" in warning for warning in report.warnings.values()] == [True]
    assert not [name for name in report.means if name.startswith("reward_part")]


def test_a_sum_leaves_out_a_response_without_a_score(folder: Path) -> None:
    terms = f"[{{name: a, reward: {{{LENGTHS}}}}}, {{name: b, reward: {{entrypoint: '{FUNCTIONS}:every_other'}}}}]"
    ((found, report),) = run_kept_ranks(1, score_by_column, job_with(folder, f"models.reward={{sum: {terms}}}"), folder)
    assert [score > 0 for score in found["scores"]] == [False, True, False, True, False]
    assert report.means["reward_part/a"][1] == ROWS - 1, "each part is measured where it has a score"
    assert report.means["reward_part/b"] == (2.0, 2.0)
    assert report.means["reward_part/b_size"] == (6.0, 2.0)


def sentence(job: Job, folder: Path) -> tuple[str, int]:
    """(sentence, exit code) with which scoring ends."""
    try:
        score(job, folder)
    except TrainerError as error:
        return str(error), error.exit_code
    return "", 0


def is_cheap(mistake: Mistake) -> bool:
    return mistake.how == "run" and any(change.startswith("models.reward={") for change in mistake.sets)


@pytest.mark.parametrize("name", [name for name, mistake in MISTAKES.items() if is_cheap(mistake)])
def test_mistakes_of_rewards_are_told_as_the_page_says(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole runs of tests/trainer/chain take a minute each; this is the part of them that tells."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    mistake = MISTAKES[name]
    ((told, code),) = run_kept_ranks(1, sentence, job_with(folder, *mistake.sets), folder)
    assert mistake.matches(told), told
    assert code == mistake.code


def test_there_are_such_mistakes() -> None:
    assert sum(map(is_cheap, MISTAKES.values())) >= 6


CUT = {
    "Keep": ([1.0, 1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0, 0.0]),
    "Value": ([1.0, -2.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0, 0.0]),
    "Mask": ([1.0, 0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 1.0, 1.0, 0.0]),
}


@pytest.mark.parametrize("truncated", CUT)
def test_a_response_that_was_cut_off_counts_as_asked(truncated: str, folder: Path) -> None:
    """Row 1 was cut off, row 4 is padding; each response gets 1 by its own."""
    value = ", truncatedValue: -2.0" if truncated == "Value" else ""
    shaping = f"algorithm.rewards={{truncated: {truncated}{value}}}"
    one = job_with(folder, f"models.reward={{entrypoint: '{FUNCTIONS}:sizes'}}", "data.train.columns=[size]", shaping)
    function = job_with(folder, "models.reward={verifier: {name: Length, maximum: 1000}}", shaping)
    scores, valid = CUT[truncated]
    ((found, _),) = run_kept_ranks(1, score_by_column, function, folder)
    cut_gets = {"Keep": 0.0, "Value": -2.0, "Mask": 0.0}[truncated]
    assert (found["scores"], found["valid"]) == ([1.0, cut_gets, 1.0, 1.0, 0.0], valid)
    ((found, report),) = run_kept_ranks(1, score_by_column, one, folder)
    assert found["scores"] == [valid[row] * (-2.0 if scores[row] < 0 else row) for row in range(ROWS)]
    assert report.sums["reward/left_out"] == float(truncated == "Mask")


def test_a_model_alone_also_minds_responses_that_were_cut_off(folder: Path) -> None:
    job = job_with(folder, "algorithm.rewards={truncated: Mask}")
    assert model_spec(setting(job, folder, "reward"), "reward").worker_class is ScoringWorker
    plain = run_kept_ranks(1, score, job_with(folder), folder)[0][0]
    masked = run_kept_ranks(1, score, job, folder)[0][0]
    assert masked[1] == 0.0
    assert masked[0] == pytest.approx(plain[0])
