"""SFT -> reward model -> PPO from the command line: the run folder, the terminal, and the models."""

import json
import re
from hashlib import sha256
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_trainer.data.lines import files_of
from rlhf_trainer.data.uri import local_path
from rlhf_trainer.outputs.display import Display
from rlhf_trainer.report.run_record import read_run
from rlhf_trainer.run.chain import write_report_or_warn
from tests.trainer.chain.conftest import records

JOBS = {"helpful-sft": 15, "helpful-rm": 10, "helpful-ppo": 3}
EVERY_STEP = {"step", "time/step", "time/controller", "time/transfer", "bytes/controller", "padding/waste"}
PPO_STEP = {
    "reward/mean",
    "kl/reference",
    "kl/rollout",
    "ratio/first_max_deviation",
    "loss/policy",
    "loss/value",
    "entropy",
    "clip_fraction",
    "response_length/mean",
    "tokens_per_second",
    "time/generation",
    "time/reshard",
    "time/scoring",
    "time/update",
    "bytes/reshard",
    "policy_version",
}

Chain = tuple[Path, str]


@pytest.mark.parametrize("name", JOBS)
def test_every_job_has_its_folder(chain: Chain, name: str) -> None:
    folder = chain[0] / name
    status = json.loads((folder / "status.json").read_text())
    assert status["phase"] == "Succeeded"
    progress = status["progress"]
    assert (progress["step"], progress["totalSteps"], progress["remainingSeconds"]) == (JOBS[name], JOBS[name], 0)
    assert progress["stage"] == {"helpful-sft": "SFT", "helpful-rm": "RewardModel", "helpful-ppo": "PPO"}[name]
    assert min(progress["stepSeconds"], progress["tokensPerSecond"]) > 0
    assert status["startTime"] <= progress["lastStepTime"] <= status["completionTime"]
    assert status["output"]["uri"] == (folder / "model").resolve().as_uri()
    assert yaml.safe_load((folder / "job.yaml").read_text())["metadata"]["name"] == name
    assert "slots" in (folder / "events.log").read_text()
    assert json.loads((folder / "mapping.json").read_text())["predicted"]["step_seconds"] > 0
    lines = records(folder)
    assert [line["step"] for line in lines] == list(range(1, JOBS[name] + 1))
    assert all(line.keys() >= EVERY_STEP for line in lines)


def test_a_job_names_what_it_read_and_what_it_made(chain: Chain) -> None:
    statuses = {name: json.loads((chain[0] / name / "status.json").read_text()) for name in JOBS}
    read = {each["name"]: each for each in statuses["helpful-ppo"]["inputs"]}
    made = {name: status["output"]["digest"] for name, status in statuses.items()}
    assert len(set(made.values())) == len(JOBS), "models of one shape have other digests"
    assert read["models.actor"] == {
        "name": "models.actor",
        "uri": "job://helpful-sft",
        "job": "helpful-sft",
        "digest": made["helpful-sft"],
    }
    assert read["models.reward"]["digest"] == made["helpful-rm"]
    (rows,) = files_of(local_path(read["data.train"]["uri"]))
    assert read["data.train"]["digest"] == f"sha256:{sha256(rows.read_bytes()).hexdigest()}"
    labels = json.loads((chain[0] / "helpful-ppo" / "model" / "rlhf.json").read_text())
    assert (labels["job"], labels["algorithm"], labels["digest"]) == ("helpful-ppo", "PPO", made["helpful-ppo"])
    assert [each["name"] for each in labels["inputs"]] == list(read)


def test_steps_of_ppo_measure_what_is_promised(chain: Chain) -> None:
    for record in records(chain[0] / "helpful-ppo"):
        assert record.keys() >= PPO_STEP
        assert record["bytes/controller"] == 0
        assert record["ratio/first_max_deviation"] < 1e-3
        assert record["kl/rollout"] < 1e-6
        assert record["policy_version"] == record["step"] - 1
        assert 1 < record["response_length/mean"] <= 48
        parts = {name: seconds for name, seconds in record.items() if name.startswith("time/") and name != "time/step"}
        assert sum(parts.values()) >= 0.99 * record["time/step"], "ranks in different phases at one time make it more"
        assert all(0 <= seconds <= 1.01 * record["time/step"] for seconds in parts.values())
    assert "warning" not in chain[1]


def test_losses_go_down(chain: Chain) -> None:
    for name, loss in (("helpful-sft", "loss/sft"), ("helpful-rm", "loss/reward_model")):
        values = [record[loss] for record in records(chain[0] / name)]
        assert values[-1] < 0.7 * values[0]


def test_the_summary_says_what_was_measured(chain: Chain) -> None:
    summary = json.loads((chain[0] / "summary.json").read_text())
    assert list(summary) == list(JOBS)
    assert all(job["steps"] == JOBS[name] and job["seed"] == 0 for name, job in summary.items())
    assert 0.5 < summary["helpful-rm"]["pair_accuracy"] <= 1
    ppo = summary["helpful-ppo"]
    assert ppo.keys() >= {"reward_before", "reward_after", "rule_before", "rule_after", "win_rate", "win_rate_null"}
    samples = [json.loads(line) for line in (chain[0] / "helpful-ppo" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 45, "padding rows are not samples"
    wins = [1.0 if s["rule_after"] > s["rule_before"] else 0.5 * (s["rule_after"] == s["rule_before"]) for s in samples]
    assert ppo["win_rate"] == pytest.approx(sum(wins) / 45)
    assert ppo["reward_after"] == pytest.approx(sum(s["reward_after"] for s in samples) / 45)
    assert all(s["prompt"].startswith("\n\nHuman:") and s["prompt"].endswith("\n\nAssistant:") for s in samples)


def test_the_terminal_shows_a_line_a_step_and_a_table(chain: Chain) -> None:
    steps = re.findall(r"^helpful-(?:sft|rm|ppo) +\d+/\d+ .*left \d+:\d\d$", chain[1], re.MULTILINE)
    assert len(steps) == sum(JOBS.values())
    assert re.search(r"helpful-ppo +3/3 +reward \S+ +kl \S+ +length \S+ +tokens/s \S+ +left 0:00", chain[1])
    assert "Measured" in chain[1]


def test_the_run_leaves_a_report_and_what_it_ran_on(chain: Chain) -> None:
    page = (chain[0] / "report.html").read_text()
    assert all(f'<section class="stage" id="{name}">' in page for name in JOBS)
    environment = read_run(chain[0]).environment
    facts = {"python", "platform", "cores", "processor", "memory_gib", "gpus", "model_code", "packages"}
    assert facts <= environment.keys() <= {*facts, "threads"}
    assert environment["packages"].keys() >= {"rlhf-operator", "torch", "ray", "transformers"}
    assert torch.__version__.startswith(environment["packages"]["torch"])
    assert torch.__version__.partition("+")[0] in page


def test_a_report_that_fails_does_not_undo_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_report_or_warn(tmp_path, Display(Console()))
    assert "warning: no report: ConfigError:" in capsys.readouterr().out


def test_transformers_loads_the_models_and_they_differ(chain: Chain) -> None:
    tokens = torch.tensor([AutoTokenizer.from_pretrained(chain[0] / "helpful-ppo" / "model").encode("How do I")])
    before, after = (
        AutoModelForCausalLM.from_pretrained(chain[0] / name / "model") for name in ("helpful-sft", "helpful-ppo")
    )
    assert not torch.equal(before(tokens).logits, after(tokens).logits)
    reward = AutoModelForSequenceClassification.from_pretrained(chain[0] / "helpful-rm" / "model")
    assert reward(tokens).logits.shape == (1, 1)
