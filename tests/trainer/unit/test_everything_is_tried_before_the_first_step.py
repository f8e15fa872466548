"""What would end a job after hours is told before any job trains: of every job of the chain, and all at once."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import CohereConfig, GPT2Config, Olmo2Config
from typer.testing import CliRunner

from rlhf_api.exit_codes import ExitCode
from rlhf_api.files import load
from rlhf_trainer.commands.cli import app
from rlhf_trainer.errors import EnvironmentProblem, UserCodeError, together
from rlhf_trainer.generation import families
from rlhf_trainer.generation.families import literals, why_not_generated
from rlhf_trainer.run import chain, deep_check
from rlhf_trainer.run.evaluation import evaluation_of
from rlhf_trainer.run_folder.folder import JobFolder
from rlhf_trainer.workers.data import DataShape
from tests.trainer.chain.conftest import MANIFEST
from tests.trainer.families import FAMILIES
from tests.trainer.rewards.test_a_reward_model_may_have_another_tokenizer import save_other
from tests.trainer.tiny import save_tiny, tiny_config

FUNCTIONS, POINTS = "tests.trainer.rewards.user_functions", "tests.trainer.own_points"
PPO = """\
apiVersion: rlhf.hybridflow.io/v1alpha1
kind: RLHFJob
metadata: {name: ppo}
spec:
  algorithm: {name: PPO}
  models:
    actor: {uri: "file://models/language"}
    critic: {uri: "file://models/reward"}
    reward: {uri: "file://models/reward"}
  data:
    train: {uri: package://rlhf_examples/helpful/train.jsonl}
    maxPromptTokens: 16
    maxResponseTokens: 8
  training: {totalSteps: 1, promptBatchSize: 4}
  resources: {slotsPerNode: 1, device: CPU}
"""
WRITTEN = """
apiVersion: rlhf.hybridflow.io/v1alpha1
kind: RLHFJob
metadata: {name: writes}
spec:
  algorithm: {name: Generate}
  models: {actor: {uri: "file://models/language"}}
  data:
    train: {uri: package://rlhf_examples/helpful/train.jsonl}
    maxPromptTokens: 16
    maxResponseTokens: 8
  training: {totalEpochs: 1, promptBatchSize: 4}
  resources: {slotsPerNode: 1, device: CPU}
---
apiVersion: rlhf.hybridflow.io/v1alpha1
kind: RLHFJob
metadata: {name: reads}
spec:
  algorithm: {name: SFT}
  models: {actor: {uri: "file://models/language"}}
  data: {train: {uri: job://writes, responseKey: response}}
  training: {totalSteps: 1, batchSize: 4}
  resources: {slotsPerNode: 1, device: CPU}
"""
JUDGE = "{url: 'http://127.0.0.1:9/v1', model: m"
Check = Callable[..., Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, labels in {"language": None, "reward": 1, "labels": 2}.items():
        save_tiny(folder / name, seed=1, labels=labels)
    sizes = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    save_tiny(folder / "cohere", seed=1, config=CohereConfig(**sizes, intermediate_size=64, pad_token_id=0))
    special = {"intermediate_size": 64, "eos_token_id": 2, "pad_token_id": 0}
    save_tiny(folder / "olmo", seed=1, config=Olmo2Config(**sizes, **special))
    save_tiny(folder / "mixture", seed=1, config=copy.deepcopy(FAMILIES["Qwen3-MoE"]))
    save_other(folder / "other", template="{{ raise_exception('no') }}", labels=1)
    return folder


@pytest.fixture
def check(tmp_path: Path, models: Path) -> Check:
    """Overrides of the PPO job (or another manifest) -> what `rlhf validate --deep` says."""
    (tmp_path / "models").symlink_to(models)

    def validate(*sets: str, manifest: str = PPO) -> Any:
        (tmp_path / "job.yaml").write_text(manifest)
        options = [f"--set={each}" for each in sets]
        return CliRunner().invoke(
            app, ["validate", "--deep", str(tmp_path / "job.yaml"), f"--output={tmp_path}/run", *options]
        )

    return validate


def test_the_demo_has_all_that_it_needs(check: Check) -> None:
    done = check(manifest=MANIFEST.read_text())
    assert (done.exit_code, done.stdout) == (0, "ok\n")
    (told,) = done.stderr.splitlines()
    assert told.startswith("helpful-sft: spec.models.actor: ")
    assert told.endswith(" has no weights; training begins with random ones")


OWN_STEP = """\
import rlhf


class Own(rlhf.Algorithm):
    @staticmethod
    def step(completions: rlhf.B, *, actor: rlhf.SupervisedActor[rlhf.B]) -> None:
        actor.update_actor(completions)
"""


def test_an_own_supervised_step_begins_with_random_weights(check: Check, tmp_path: Path) -> None:
    (tmp_path / "own_step.py").write_text(OWN_STEP)
    sft = MANIFEST.read_text().split("\n---")[0]
    done = check("algorithm={name: Custom, entrypoint: 'own_step:Own'}", manifest=sft)
    assert (done.exit_code, done.stdout) == (0, "ok\n"), done.stderr


def test_layers_without_fused_kernels_are_named(check: Check) -> None:
    uris = [f"models.{role}.uri=file://models/olmo" for role in ("actor", "reference")]
    told = "its layers have plain kernels on GPUs: fused kernels are for llama, mistral"
    assert told in check(*uris, "resources.device=GPU").stderr
    assert told not in check(*uris, "resources.device=GPU", "training.kernels=Plain").stderr
    assert told not in check(*uris).stderr


MISTAKES: dict[str, tuple[str, ExitCode, str]] = {
    "no file": (
        "data.train.uri=file://no.jsonl",
        ExitCode.DATA,
        "ppo: spec.data.train.uri: file://{tmp}/no.jsonl: there is no file or folder {tmp}/no.jsonl",
    ),
    "no column": (
        "data.train.promptKey=question",
        ExitCode.DATA,
        "ppo: spec.data.train.promptKey: package://rlhf_examples/helpful/train.jsonl has no column 'question'; ",
    ),
    "no column of the evaluation": (
        "evaluation={data: {uri: package://rlhf_examples/helpful/heldout.jsonl, promptKey: q}}",
        ExitCode.DATA,
        "ppo: spec.evaluation.data.promptKey: package://rlhf_examples/helpful/heldout.jsonl has no column 'q'; ",
    ),
    "a misspelt function": (
        f"models.reward={{entrypoint: '{FUNCTIONS}:lenghts'}}",
        ExitCode.USER_CODE,
        f"ppo: spec.models.reward: {FUNCTIONS}:lenghts cannot be imported: AttributeError: ",
    ),
    "a function that raises": (
        f"models.reward={{entrypoint: '{FUNCTIONS}:always_raises'}}",
        ExitCode.USER_CODE,
        f"ppo: spec.models.reward: {FUNCTIONS}:always_raises raised ZeroDivisionError: nothing to divide by",
    ),
    "a function that raises for an empty response": (
        f"models.reward={{entrypoint: '{FUNCTIONS}:last_letter'}}",
        ExitCode.USER_CODE,
        f"ppo: spec.models.reward: {FUNCTIONS}:last_letter raised IndexError: ",
    ),
    "a function of an evaluation": (
        (
            "evaluation={data: {uri: package://rlhf_examples/helpful/heldout.jsonl}, "
            "functions: [{name: rule, entrypoint: 'os:abort_everything'}]}"
        ),
        ExitCode.USER_CODE,
        "ppo: spec.evaluation.functions: os:abort_everything cannot be imported: AttributeError: ",
    ),
    "rows of a function that raises": (
        f"data.train={{entrypoint: '{POINTS}:breaks'}}",
        ExitCode.USER_CODE,
        f"ppo: spec.data.train.entrypoint: {POINTS}:breaks raised ZeroDivisionError: no more (",
    ),
    "an order that is none": (
        f"data.order={{entrypoint: '{POINTS}:beyond'}}",
        ExitCode.USER_CODE,
        f"ppo: spec.data.order: {POINTS}:beyond gave 64 in epoch 0, expected numbers of rows, from 0 to 63",
    ),
    "a schedule that is none": (
        f"models.critic.optimizer.schedule={POINTS}:not_a_number",
        ExitCode.USER_CODE,
        f"ppo: spec.models.critic.optimizer.schedule: {POINTS}:not_a_number returned nan for step 1 of 1, expected a ",
    ),
    "a callback that lacks an argument": (
        f"outputs.callbacks=[{{entrypoint: '{POINTS}:Told', arguments: {{}}}}]",
        ExitCode.USER_CODE,
        f"ppo: spec.outputs.callbacks.0.arguments: {POINTS}:Told: missing a required argument: 'file'",
    ),
    "a callback that is a function": (
        f"outputs.callbacks=[{{entrypoint: '{POINTS}:halved'}}]",
        ExitCode.USER_CODE,
        f"ppo: spec.outputs.callbacks.0: {POINTS}:halved has no method step",
    ),
    "a service that does not answer": (
        "models.reward={url: 'http://127.0.0.1:9/score', attempts: 1}",
        ExitCode.ENVIRONMENT,
        (
            "ppo: spec.models.reward: http://127.0.0.1:9/score cannot be reached: ConnectError (1 attempts); "
            "the sample is one that is tried before the run, prompt "
        ),
    ),
    "a judge that does not answer": (
        f"models.reward={{judge: {JUDGE}, prompt: '{{response}}', attempts: 1}}}}",
        ExitCode.ENVIRONMENT,
        (
            "ppo: spec.models.reward.judge: http://127.0.0.1:9/v1/chat/completions cannot be reached: ConnectError "
            "(1 attempts); the sample is one that is tried before the run, prompt "
        ),
    ),
    "a judge that compares and does not answer": (
        (
            f"models.reward={{judge: {JUDGE}, prompt: '{{response_a}} {{response_b}}', "
            "referenceKey: chosen, attempts: 1}}"
        ),
        ExitCode.ENVIRONMENT,
        "ppo: spec.models.reward.judge: http://127.0.0.1:9/v1/chat/completions cannot be reached: ConnectError ",
    ),
    "a judge's template with a column that is not there": (
        f"models.reward={{judge: {JUDGE}, prompt: '{{response}} {{answer}}', attempts: 1}}}}",
        ExitCode.DATA,
        (
            "ppo: spec.data.train.columns: package://rlhf_examples/helpful/train.jsonl has no column 'answer', "
            "which spec.models.reward reads; its columns are prompt, "
        ),
    ),
    "a critic with another vocabulary": (
        "models.critic.uri=file://models/other",
        ExitCode.SPEC,
        "ppo: spec.models.critic: its tokenizer is not the actor's (",
    ),
    "a draft model that is not there": (
        "rollout.speculation={method: Draft, draft: 'file://models/none'}",
        ExitCode.DATA,
        "ppo: spec.rollout.speculation.draft: file://{tmp}/models/none: there is no file or folder {tmp}/models/none",
    ),
    "a draft model with another vocabulary": (
        "rollout.speculation={method: Draft, draft: 'file://models/other'}",
        ExitCode.SPEC,
        "ppo: spec.rollout.speculation.draft: file://{tmp}/models/other has a vocabulary of ",
    ),
    "a draft model that vLLM has not": (
        "rollout.speculation={method: Draft, draft: 'file://models/cohere'}",
        ExitCode.SPEC,
        "ppo: spec.rollout.speculation.draft: file://{tmp}/models/cohere is a cohere; vLLM drafts with llama, ",
    ),
    "a reward model whose template refuses a prompt": (
        "models.reward.uri=file://models/other",
        ExitCode.DATA,
        "ppo: spec.models.reward: a prompt is refused by the tokenizer's chat template: no",
    ),
    "a model whose layout in vLLM is not known": (
        "models.actor.uri=file://models/cohere",
        ExitCode.SPEC,
        (
            "ppo: spec.models.actor: is a cohere, whose layout in vLLM this trainer does not know; "
            "it generates with llama, mistral, "
        ),
    ),
    "two labels": (
        "models.reward.uri=file://models/labels",
        ExitCode.SPEC,
        "ppo: spec.models.reward: {tmp}/models/labels has 2 labels; say by label which of them is the score",
    ),
    "no score head": (
        "models.reward.uri=file://models/language",
        ExitCode.SPEC,
        "ppo: spec.models.reward: {tmp}/models/language is a language model without a trained score head",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told(name: str, check: Check, tmp_path: Path) -> None:
    change, code, sentence = MISTAKES[name]
    done = check(change)
    assert done.exit_code == code, done.stderr
    assert not done.stderr.splitlines()[1:], done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {sentence.replace('{tmp}', str(tmp_path))}")


NINE = ("resources.slotsPerNode=9", "training.promptBatchSize=9")
THREE = ("resources.slotsPerNode=3", "training.promptBatchSize=3")
CUTS: dict[str, tuple[Sequence[str], str]] = {
    "experts": (
        ("models.actor={uri: file://models/mixture, parallelism: {expert: 3}}", *THREE),
        "models.actor.parallelism.expert: is 3, which does not divide the model's 4 experts; expected 1, 2 or 4",
    ),
    "few experts": (
        ("models.actor={uri: file://models/mixture, parallelism: {expert: 9}}", *NINE),
        "models.actor.parallelism.expert: is 9, which is more than the model's 4 experts; expected 1, 2 or 4",
    ),
    "no experts": (
        ("models.critic.parallelism={expert: 3}", *THREE),
        "models.critic.parallelism.expert: is 3, but the model has no experts",
    ),
    "heads": (
        ("models.actor.parallelism={tensor: 3}", *THREE),
        "models.actor.parallelism.tensor: is 3, which does not divide the model's 2 attention heads; expected 1",
    ),
    "vocabulary": (
        ("rollout.tensorParallel=3",),
        "rollout.tensorParallel: is 3, which does not divide the model's vocabulary of 512",
    ),
    "rows": (
        ("resources.slotsPerNode=3",),
        "training.promptBatchSize: gives 4 sequences, which do not divide by the 3 slots of pool all",
    ),
}


@pytest.mark.parametrize("name", CUTS)
def test_sizes_are_judged_as_a_run_does(name: str, check: Check) -> None:
    sets, sentence = CUTS[name]
    done = check(*sets)
    assert (done.exit_code, done.stderr) == (ExitCode.SPEC, f"error: ppo: spec.{sentence}\n")


@pytest.mark.parametrize(("extract", "is_told"), [("(.+)", False), ("#### (.+)", True)])
def test_answers_that_get_no_reward_are_told(extract: str, is_told: bool, check: Check, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "answer": "4"}))
    reward = f"models.reward={{verifier: {{name: Math, responseExtract: '{extract}'}}}}"
    done = check(reward, "data.train.uri=file://rows.jsonl")
    assert (done.exit_code, done.stdout) == (0, "ok\n")
    told = "ppo: spec.models.reward: right answers get no more than empty responses on the first 2 rows; see `rlhf "
    assert [line.startswith(told) for line in done.stderr.splitlines()] == [True] * is_told


def test_a_column_that_held_out_rows_do_not_give_is_told(check: Check, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "answer": "b"}))
    reward = f"models.reward={{entrypoint: '{FUNCTIONS}:right'}}"
    trained = (reward, "data.train={uri: file://rows.jsonl, columns: [answer]}")
    assert check(*trained).exit_code == 0
    done = check(*trained, "evaluation={data: {uri: file://rows.jsonl}}")
    assert done.exit_code == ExitCode.USER_CODE
    assert done.stderr.startswith(
        f"error: ppo: spec.models.reward: {FUNCTIONS}:right needs answer, which is no column "
    )


MEASURING = (
    (
        "evaluation={everySteps: 1, samplesPerPrompt: 2, functions: [{name: rule, entrypoint: "
        "'rlhf_examples.helpful.rule:score'}], verifiers: [{name: brief, verifier: {name: Length, maximum: 30}}], "
        "data: {sets: [{name: more, limit: 1, uri: package://rlhf_examples/helpful/heldout.jsonl}]}}"
    ),
)


def test_a_best_measure_that_is_not_measured_is_told(check: Check) -> None:
    assert check(*MEASURING, "checkpoint.keepBest=rule_part").exit_code == 0
    assert check(*MEASURING, "checkpoint.keepBest=more/rule_part").exit_code == 0
    for wrong in ("rule_", "less/rule_part"):
        assert f"{wrong} is not measured" in check(*MEASURING, f"checkpoint.keepBest={wrong}").stderr
    done = check(*MEASURING, "checkpoint.keepBest=less/brief")
    assert done.exit_code == ExitCode.SPEC
    assert done.stderr.startswith(
        "error: ppo: spec.checkpoint.keepBest: less/brief is not measured; there are reward, rule, brief, "
    )


def test_the_names_that_are_told_are_those_that_are_measured(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(PPO)
    (job,) = load(tmp_path / "job.yaml", list(MEASURING))
    assert {"reward", "more/brief_pass_at_2", "more/rule", "win_rate"} <= set(job.measures)
    assert not {"loss", "more/rewards", "brief_pass_at_3"} & set(job.measures)
    data = DataShape(rows=1, total_steps=7, evaluation_rows=2, facts=(), digests={}, evaluation_sets={"more": 1})
    nothing: Any = SimpleNamespace(models={})
    evaluation = evaluation_of(job, nothing, data)
    scores = {"reward": 1.0, "rule": 1.0, "brief": 1.0}
    row = {"prompt": "", "response": "", "finished": True, "response_tokens": 1, "scores": scores}
    evaluation.restore([[row, row]] * 2)
    assert sorted(evaluation.measures()) == sorted(job.measures)


def test_every_job_and_every_mistake_is_told_at_once(check: Check) -> None:
    done = check(
        "helpful-sft:data.train.responseKey=a",
        "helpful-ppo:data.train.promptKey=b",
        "helpful-ppo:evaluation.functions=[{name: rule, entrypoint: 'rlhf_examples.helpful.rule:scores'}]",
        manifest=MANIFEST.read_text(),
    )
    assert done.exit_code == ExitCode.DATA
    fields = ["helpful-sft: spec.data.train.responseKey", "helpful-ppo: spec.data.train.promptKey"]
    errors = [line.removeprefix("error: ") for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert [error.partition(": p")[0] for error in errors] == fields


def test_first_rows_that_are_too_long_are_no_mistake(check: Check, tmp_path: Path) -> None:
    rows = [{"prompt": "word " * 500}] * (deep_check.FIRST_ROWS + 1) + [{"prompt": "a"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert check("data.train.uri=file://rows.jsonl").exit_code == 0
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]) + "\n")
    done = check("data.train.uri=file://rows.jsonl")
    assert done.exit_code == ExitCode.DATA
    assert "are longer than spec.data.maxPromptTokens 16" in done.stderr


def test_rows_that_will_be_written_again_are_not_read(check: Check, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(WRITTEN)
    writes, _ = load(tmp_path / "job.yaml")
    folder = JobFolder(tmp_path / "run", writes)
    folder.begin(None, inputs={})
    (folder.made / "responses.jsonl").write_text('{"prompt": "a"}\n')
    folder.succeed()
    assert "no column 'response'" in check(manifest=WRITTEN).stderr
    again = check("writes:rollout.temperature=0.5", manifest=WRITTEN)
    assert (again.exit_code, again.stdout, again.stderr) == (0, "ok\n", "")


def test_a_disk_that_is_too_small(check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    done = check()
    assert done.exit_code == ExitCode.ENVIRONMENT
    assert done.stderr.startswith("error: ppo: spec.checkpoint: checkpoints and model take ")
    assert done.stderr.strip().endswith(" has 1 MB free")


def test_vllm_says_which_heads_it_generates_with() -> None:
    """A release that says it elsewhere is noticed here; a run would then not be told."""
    (sizes,) = literals(families.CPU_ATTENTION, families.HEAD_SIZES)
    assert 64 in sizes


def test_a_model_that_cannot_be_generated_with() -> None:
    config = tiny_config()
    config.head_dim = 16
    assert why_not_generated(config, on_cpu=True).startswith("has heads of size 16; on CPU vLLM generates with 32, ")
    assert not why_not_generated(config, on_cpu=False)
    assert not why_not_generated(GPT2Config(), on_cpu=True)


def test_external_servers_get_no_modules_of_transformers(check: Check) -> None:
    done = check("models.actor.uri=file://models/olmo", "rollout.endpoints=['http://127.0.0.1:9']")
    sentence = "ppo: spec.models.actor: generates only in the job's own engines, and spec.rollout.endpoints"
    assert (done.exit_code, sentence in done.stderr) == (ExitCode.SPEC, True)


def test_the_status_of_a_job_says_what_would_end_it(tmp_path: Path, models: Path) -> None:
    (tmp_path / "models").symlink_to(models)
    (tmp_path / "job.yaml").write_text(PPO)
    reward = f"models.reward={{entrypoint: '{FUNCTIONS}:always_raises'}}"
    jobs, output = load(tmp_path / "job.yaml", [reward]), tmp_path / "run"
    model = JobFolder(output, jobs[0]).made / "config.json"
    model.parent.mkdir(parents=True)
    model.write_text("{}")
    with pytest.raises(UserCodeError, match="nothing to divide by"):
        chain.require_ready(jobs, jobs, output)
    status = json.loads((JobFolder(output, jobs[0]).path / "status.json").read_text())
    assert (status["phase"], status["lastFailure"]["exitCode"]) == ("Failed", ExitCode.USER_CODE)
    assert model.is_file(), "what an earlier run has left is not lost"


def test_errors_of_several_kinds_have_the_exit_code_of_the_first() -> None:
    error = together([EnvironmentProblem("one"), UserCodeError("two")])
    assert (type(error), str(error)) == (EnvironmentProblem, "one\ntwo")
