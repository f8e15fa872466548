"""Every example but 01, shortened, on the models of the shortened example 01: what each algorithm leaves behind.

The documents of several examples run in one `rlhf run`, so that they share a Ray; they are the examples' own bytes.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_api.files import load
from rlhf_api.job import Job
from rlhf_trainer.algorithms.safe_rlhf import SafeRLHF
from tests.examples.test_every_example_is_right import EXAMPLES, FINISHED
from tests.trainer.chain.conftest import only_ppo_left, records, rlhf
from tests.trainer.rewards.stub_server import Handler, served

pytestmark = pytest.mark.slow

STEPS = 2
SHORT = [f"--set=training.totalSteps={STEPS}", "--set=data.train.limit=200", "--set=evaluation.data.limit=6"]
DEFAULT = ("02-helpful-grpo", "09-safe-rlhf")
"""Four algorithms' jobs; one step of each of the others runs in test_every_algorithm_takes_a_step.py."""
ELSEWHERE = ("16-best-of-n-sft", "20-distillation", "22-rounds-dpo", "23-merge")
"""They write data sets (test_responses_become_a_data_set.py), merge, or need no reward (placement, of a teacher)."""
ALWAYS = {"reward/mean", "response_length/mean"}
POLICY = ALWAYS | {"kl/reference", "kl/rollout", "ratio/first_max_deviation", "loss/policy", "entropy"}
OF = {
    "CostModel": {"loss/cost_model", "accuracy/pairs", "accuracy/safety"},
    "DPO": {"loss/dpo", "accuracy/pairs", "margin/pairs"},
    "ORPO": {"loss/orpo", "accuracy/pairs", "margin/pairs"},
    "SimPO": {"loss/simpo", "accuracy/pairs", "margin/pairs"},
    "GRPO": POLICY | {"groups/with_signal"},
    "KTO": {"loss/kto", "kl/mismatched", "implicit_reward/desirable", "implicit_reward/undesirable"},
    "OnlineDPO": ALWAYS | {"loss/dpo", "margin/pairs", "groups/with_signal"},
    "PPO": POLICY | {"loss/value"},
    "ReMax": POLICY | {"reward/greedy"},
    "SFT": {"loss/sft"},
    "SafeRLHF": POLICY | {"loss/value", "loss/cost_value", "cost/mean", "lagrange/multiplier"},
}
"""Metrics of every step, by algorithm; POLICY of others."""
OPTIONAL = {
    "agent-grpo": {"episodes/turns", "episodes/failed"},
    "arithmetic-two-rewards": {"reward_part/right", "reward_part/short"},
    "calculator-grpo": {"episodes/turns", "episodes/failed"},
    "helpful-dapo": {"corrected_fraction"},
    "helpful-judged": {"judge/questions", "judge/unread"},
    "helpful-ppo-ptx": {"loss/pretrain"},
}
"""Metrics of every step that an example's options add."""
LEFT_OUT = {
    "agent-grpo": {"kl/reference", "ratio/first_max_deviation"},
    "arithmetic-grpo": {"kl/reference"},
    "arithmetic-two-rewards": {"kl/reference"},
    "calculator-alone": {"kl/reference", "ratio/first_max_deviation"},
    "calculator-grpo": {"kl/reference", "ratio/first_max_deviation"},
    "helpful-dapo": {"kl/reference"},
    "helpful-judged": {"kl/reference", "ratio/first_max_deviation"},
    "helpful-opo": {"ratio/first_max_deviation"},
}
"""All but the last have no reference; the only update of a step of five of them finds the old log-probabilities."""
NEVER_RIGHT = ("agent-grpo", "arithmetic-grpo", "arithmetic-two-rewards", "calculator-alone", "calculator-grpo")
"""After two steps of SFT no answer is."""

ONE_SLOT = "--set=resources.slotsPerNode=1"
"""For those that always run: a job's processes start in half the time."""
GRPO, LORA = "helpful-grpo", "helpful-lora"
ROWS = "uri: package://rlhf_examples/helpful/heldout.jsonl"
THRICE = [
    f"--set={GRPO}:evaluation.samplesPerPrompt=3",
    f"--set={GRPO}:evaluation.verifiers=[{{name: brief, verifier: {{name: Length, maximum: 30}}}}]",
    f"--set={GRPO}:evaluation.everySteps=1",
    f"--set={GRPO}:checkpoint.keepBest=more/brief",
    f"--set={GRPO}:evaluation.data={{sets: [{{name: few, limit: 2, {ROWS}}}, {{name: more, limit: 4, {ROWS}}}]}}",
]
"""Three responses to each of the six prompts of two data sets to evaluate on, judged by a verifier too."""


Run = tuple[Path, list[Job], Path]


def is_default(path: Path) -> bool:
    return path.stem in DEFAULT


def by_length(handler: Handler, call: dict[str, Any]) -> None:
    """Judge a response by its length."""
    handler.say(f"It has its length. [[{1 + len(call['messages'][0]['content']) % 10}]]")


@pytest.fixture(
    scope="module",
    params=[pytest.param(True, id="four algorithms"), pytest.param(False, id="the others", marks=pytest.mark.slow)],
)
def run(request: pytest.FixtureRequest, chain: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """(run folder, its jobs, that of example 01) of some of the examples."""
    paths = [path for path in EXAMPLES[1:] if is_default(path) == request.param and path.stem not in ELSEWHERE]
    folder = tmp_path_factory.mktemp("examples")
    manifest, output = folder / "examples.yaml", only_ppo_left(chain, folder / "run")
    manifest.write_text("---\n".join(path.read_text() for path in paths))
    with served(by_length) as url:
        more = [ONE_SLOT, *THRICE] if request.param else [f"--set=helpful-judged:models.reward.judge.url={url}"]
        done = rlhf("run", manifest, f"--output={output}", *SHORT, *more)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stdout
    return output, load(manifest, finished=FINISHED), chain[0]


def test_every_step_measures_what_the_algorithm_is_about(run: Run) -> None:
    for job in run[1]:
        lines = records(run[0] / job.name)
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
        for line in lines:
            measured = OF.get(job.spec.algorithm.name, POLICY) | OPTIONAL.get(job.name, set())
            assert not measured - line.keys() - LEFT_OUT.get(job.name, set()), job.name
            assert all(math.isfinite(value) for value in line.values()), job.name
            assert line["bytes/controller"] == line["skipped_updates"] == 0, job.name
            assert line.get("ratio/first_max_deviation", 0.0) < 1e-3, job.name
            assert line.get("kl/rollout", 0.0) < 1e-6, job.name


def test_the_actor_starts_as_the_reference_and_leaves_it(run: Run) -> None:
    for job in run[1]:
        first, second = records(run[0] / job.name)
        if "loss/dpo" in first:
            assert first["loss/dpo"] == pytest.approx(math.log(2), abs=1e-4), job.name
            assert abs(first["margin/pairs"]) < 1e-3 < abs(second["margin/pairs"]), job.name
        elif "kl/reference" in first:
            assert abs(first["kl/reference"]) < 1e-3 < abs(second["kl/reference"]), job.name
        if "groups/with_signal" in first and job.name not in NEVER_RIGHT:
            assert 0 < first["groups/with_signal"] <= 1, job.name


def test_the_multiplier_rises_while_the_cost_is_above_its_limit(run: Run) -> None:
    for job in run[1]:
        algorithm = job.spec.algorithm
        if not isinstance(algorithm, SafeRLHF):
            continue
        before, limit = algorithm.lagrange.initial, algorithm.cost_limit
        for line in records(run[0] / job.name):
            assert (line["lagrange/multiplier"] > before) == (line["cost/mean"] > limit)
            before = line["lagrange/multiplier"]


def test_what_is_measured_on_held_out_data_is_in_the_summary(run: Run) -> None:
    summary: dict[str, dict[str, Any]] = json.loads((run[0] / "summary.json").read_text())
    assert list(summary) == [job.name for job in run[1]]
    for job in run[1]:
        measured = summary[job.name]
        if job.spec.algorithm.offline:
            is_sft = job.spec.algorithm.name == "SFT"
            assert measured["loss"] > 0 if is_sft else 0 <= measured["pair_accuracy"] <= 1
            continue
        assert job.spec.evaluation
        scores = ["reward", *(function.name for function in job.spec.evaluation.functions)]
        scores += ["cost"] if job.spec.models.cost else []
        assert measured.keys() >= {f"{score}_{when}" for score in scores for when in ("before", "after")}
        assert 0 <= measured["win_rate"] <= 1


def test_an_evaluation_may_take_several_responses_to_a_prompt(run: Run) -> None:
    if GRPO not in [job.name for job in run[1]]:
        return
    measured = json.loads((run[0] / "summary.json").read_text())[GRPO]
    samples = [json.loads(line) for line in (run[0] / GRPO / "samples.jsonl").read_text().splitlines()]
    prompts = [sample["prompt"] for sample in samples]
    assert prompts == [prompts[place] for place in range(0, 18, 3) for _ in range(3)]
    assert [sample["set"] for sample in samples] == ["few"] * 6 + ["more"] * 12
    assert len({sample["response_after"] for sample in samples[:3]}) > 1, "each is drawn anew"
    passed = [sample["brief_after"] == 1 for sample in samples]
    assert measured["brief_after"] == pytest.approx(sum(passed) / 18)
    of_three = sum(any(passed[place : place + 3]) for place in range(0, 18, 3)) / 6
    assert measured["brief_pass_at_3_after"] == pytest.approx(of_three)
    assert measured["brief_after"] <= measured["brief_pass_at_2_after"] <= of_three
    assert measured["few/brief_after"] == pytest.approx(sum(passed[:6]) / 6)
    assert measured["more/brief_after"] == pytest.approx(sum(passed[6:]) / 12)
    wins = measured["few/win_rate"] * 6 + measured["more/win_rate"] * 12
    assert measured["win_rate"] * 18 == pytest.approx(wins)
    first = records(run[0] / GRPO)[0]
    assert {"evaluation/brief_pass_at_3", "evaluation/more/brief_pass_at_3"} <= first.keys()
    assert measured["best_step"] == (1 if first["evaluation/more/brief"] >= measured["more/brief_after"] else STEPS)
    kept = sorted(folder.name for folder in (run[0] / GRPO / "checkpoints").iterdir())
    assert kept == [f"step-{step:06}" for step in (1, STEPS)], "the first measured one is the best so far"


def test_the_saved_model_loads_and_is_not_the_one_it_began_with(run: Run) -> None:
    tokens = torch.tensor([[5, 6, 7]])
    start = AutoModelForCausalLM.from_pretrained(run[2] / "helpful-sft" / "model")(tokens).logits
    for job in run[1]:
        folder = run[0] / job.name / "model"
        if job.spec.algorithm.name == "CostModel":
            cost = AutoModelForSequenceClassification.from_pretrained(folder)
            assert cost(tokens).logits.shape == (1, 1)
        else:
            assert not torch.equal(AutoModelForCausalLM.from_pretrained(folder)(tokens).logits, start), job.name


def test_an_adapter_is_exported_alone_or_merged(run: Run, tmp_path: Path) -> None:
    """As the job leaves both: PEFT reads the one, transformers the other, and they answer alike."""
    if LORA not in [job.name for job in run[1]]:
        return
    checkpoint = run[0] / LORA / "checkpoints" / f"step-{STEPS:06}"
    for folder, options in (("adapter", []), ("model", ["--merge"])):
        done = rlhf("export", checkpoint, tmp_path / folder, *options)
        assert done.returncode == 0, done.stderr
        files = {path.name: path.read_bytes() for path in (tmp_path / folder).glob("*.safetensors")}
        assert files == {path.name: path.read_bytes() for path in (run[0] / LORA / folder).glob("*.safetensors")}
    tokens = torch.tensor([[5, 6, 7]])
    adapted = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "adapter"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(adapted(input_ids=tokens).logits, merged(tokens).logits, rtol=0, atol=1e-4)
    assert "adapter_config.json" not in {path.name for path in (tmp_path / "model").iterdir()}
    whole = next(job.name for job in run[1] if job.name != LORA and job.trained())
    done = rlhf("export", run[0] / whole / "checkpoints" / f"step-{STEPS:06}", tmp_path / "whole", "--merge")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.endswith("is of a job without an adapter, so there is nothing to merge\n")
