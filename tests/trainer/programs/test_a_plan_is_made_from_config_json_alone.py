"""`rlhf plan` reads a manifest and config.json, and answers in text, JSON and pictures; no torch, weight or data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from transformers import DeepseekV3Config
from typer.testing import CliRunner

from rlhf_api.exit_codes import ExitCode
from rlhf_api.files import dump, load
from rlhf_api.problems import SpecError
from rlhf_mapper.hardware import GPUS, Cluster, FoundGpu, NodeGroup, figures_of
from rlhf_mapper.mapping import PHASES, STAGES
from rlhf_planning.job_plan import objective_of
from rlhf_planning.lengths import lengths_of
from rlhf_planning.machines import UnknownGpuError, device_of, local_cluster
from rlhf_trainer.commands import plan as plan_command
from rlhf_trainer.commands.cli import app
from rlhf_trainer.errors import DataError, EnvironmentProblem
from rlhf_trainer.run import placement
from rlhf_trainer.run.placement import place_job
from rlhf_trainer.run.shapes import shapes_of
from tests.each import each_case
from tests.examples.test_every_example_is_right import EXAMPLES
from tests.trainer.chain.mistakes import LLAMA_7B, MISTAKES, PLAN
from tests.trainer.chain.test_mistakes_end_with_a_sentence_and_their_exit_code import told, written

JOB = """\
apiVersion: rlhf.hybridflow.io/v1alpha1
kind: RLHFJob
metadata: {name: ppo}
spec:
  algorithm: {name: PPO}
  models:
    actor: {uri: "file://llama", optimizer: {learningRate: 1e-6}}
    critic: {uri: "file://llama", optimizer: {learningRate: 1e-5}}
    reward: {uri: "file://llama"}
  data: {train: {uri: "file://nowhere.jsonl"}, maxPromptTokens: 1024, maxResponseTokens: 1024}
  training: {totalSteps: 1, promptBatchSize: 1024, miniBatchSize: 128}
"""
SAFE = JOB.replace("name: PPO", "name: SafeRLHF").replace(
    '    reward: {uri: "file://llama"}\n', '    reward: {uri: "file://llama"}\n    cost: {uri: "file://llama"}\n'
)
TWO_NODES = ("--nodes=2", "--gpus-per-node=8", "--gpu=a100-80g")
MODELS = ("models.actor", "models.critic", "models.reward", "models.cost")
NOT_NEEDED = ("torch", "ray", "vllm", "transformers", "datasets", "huggingface_hub", "safetensors", "matplotlib")


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """PPO of Llama-7B, of which there is a config.json only."""
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(LLAMA_7B)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path / "job.yaml"


@pytest.fixture
def no_earlier_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan where there is no folder `runs`, such as that of `make demo`, whose lengths a plan would take."""
    monkeypatch.chdir(tmp_path)


def plan(*arguments: object) -> tuple[int, str]:
    """Exit code and stdout of `rlhf plan`."""
    done = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    return done.exit_code, done.stdout


def planned(*arguments: object) -> Any:
    """What `rlhf plan --json` prints."""
    code, shown = plan(*arguments, "--json")
    assert code == 0, shown
    return json.loads(shown)


@pytest.mark.parametrize("name", PLAN)
def test_a_mistake_is_told(name: str, tmp_path: Path) -> None:
    mistake = MISTAKES[name]
    manifest, options = written(mistake, tmp_path)
    done = CliRunner().invoke(app, ["plan", str(manifest), *options])
    assert done.exit_code == mistake.code
    assert told(done.stderr, mistake), done.stderr


@pytest.mark.parametrize("place", ["config.json", "shape"])
@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3"])
def test_no_plan_is_made_for_a_family_that_cannot_generate(kind: str, place: str, manifest: Path) -> None:
    config = {**json.loads(LLAMA_7B), "model_type": kind}
    if kind == "deepseek_v3":
        config = DeepseekV3Config().to_dict()
    shape = []
    if place == "config.json":
        (manifest.parent / "llama" / "config.json").write_text(json.dumps(config))
    else:
        name = "deepseek-v3" if kind == "deepseek_v3" else f"llama-2-7b, modelType: {kind}"
        shape = [f"--set=models.actor.shape={{name: {name}}}"]
    done = CliRunner().invoke(app, ["plan", str(manifest), *TWO_NODES, *shape])
    assert (done.exit_code, done.stdout) == (ExitCode.SPEC, "")
    assert f"ppo: spec.models.actor: is a {kind}, whose layout in vLLM this trainer does not know" in done.stderr


def test_the_chain_of_the_example_is_planned_for_this_machine() -> None:
    code, shown = plan(EXAMPLES[0])
    assert code == 0, shown
    titles = [line for line in shown.splitlines() if ", a step of " in line]
    assert titles == [
        "helpful-sft, a step of SFT",
        "helpful-rm, a step of RewardModel",
        "helpful-ppo, a step of PPO",
    ]
    assert max(map(len, shown.splitlines())) <= 100
    assert [each["job"] for each in planned(EXAMPLES[0])] == ["helpful-sft", "helpful-rm", "helpful-ppo"]


def test_every_model_is_placed_once_and_predicted(manifest: Path) -> None:
    answer = planned(manifest, *TWO_NODES)
    placed = [model for pool in answer["pools"] for model in pool["models"]]
    assert sorted(placed) == ["actor", "critic", "reference", "reward"] == sorted(answer["models"])
    assert sum(pool["gpus"] for pool in answer["pools"]) <= 16
    assert {pool["gpu"] for pool in answer["pools"]} == {"a100-80g"}
    sizes = {pool["name"]: pool["gpus"] for pool in answer["pools"]}
    for pool in answer["pools"]:
        for cut in (answer["models"][model] for model in pool["models"]):
            assert cut["p"] * cut["t"] * cut["d"] == sizes[pool["name"]]
    assert set(answer["predicted"]["phases"]) == set(PHASES)
    assert sum(answer["predicted"]["stages"].values()) == pytest.approx(answer["predicted"]["step_seconds"])
    assert set(answer["predicted"]["stages"]) == set(STAGES)
    assert answer["infeasible"] is None


def test_pools_by_hand_are_predicted_as_they_are(manifest: Path) -> None:
    halves = "[{name: left, models: [actor, reference], nodes: 1, slotsPerNode: 8}, "
    halves += "{name: right, models: [critic, reward], nodes: 1, slotsPerNode: 8}]"
    answer = planned(manifest, *TWO_NODES, "--set=placement.mode=Manual", f"--set=placement.pools={halves}")
    assert [(pool["name"], pool["gpus"]) for pool in answer["pools"]] == [("left", 8), ("right", 8)]
    assert answer["predicted"]["step_seconds"] > 0


@pytest.mark.parametrize(
    ("lengths", "mean"),
    [("fixed(100)", 100), ("lognormal(300,1000)", 300), ("lognormal(300, 1000)", 300), ("300,1000", 300), ("200", 200)],
)
def test_lengths_of_responses_may_be_named(manifest: Path, lengths: str, mean: float) -> None:
    every, some = (planned(manifest, *TWO_NODES, f"--response-tokens={each}") for each in ("fixed(1024)", lengths))
    assert every["predicted"]["response_tokens"] == 1024
    assert some["predicted"]["response_tokens"] == pytest.approx(mean, rel=0.05)
    assert some["predicted"]["step_seconds"] < every["predicted"]["step_seconds"]


def test_without_lengths_half_of_the_limit_is_assumed_and_said(manifest: Path) -> None:
    assert planned(manifest, *TWO_NODES)["predicted"]["response_tokens"] == pytest.approx(512, rel=0.01)
    shown = " ".join(plan(manifest, *TWO_NODES)[1].split())
    assert "tokens/s, with responses of 511 tokens (assumed: 50% of the limit)" in shown
    assert "prompts of 1,024 tokens (the limit)" in shown


def test_short_prompts_take_less_time(manifest: Path) -> None:
    longest, short = (planned(manifest, *TWO_NODES, *each) for each in ((), ("--prompt-tokens=100",)))
    assert (longest["predicted"]["prompt_tokens"], longest["predicted"]["prompt_source"]) == (1024, "the limit")
    assert short["predicted"]["prompt_tokens"] == pytest.approx(100, rel=0.01)
    assert short["predicted"]["step_seconds"] < longest["predicted"]["step_seconds"]


@pytest.mark.parametrize("option", ["--prompt-tokens", "--response-tokens"])
def test_lengths_of_past_texts_are_a_file(manifest: Path, option: str) -> None:
    file = manifest.parent / "lengths.txt"
    file.write_text("100\n300\n")
    name = option.removeprefix("--").replace("-", "_")
    assert planned(manifest, *TWO_NODES, option, file)["predicted"][name] == 200


@pytest.mark.parametrize(
    "lengths",
    ["fixed(5000)", "fixed(10,20)", "lognormal(300)", "lognormal(300,200)", "lognormal(10,1000)", "nowhere", "5000"],
)
def test_lengths_that_cannot_be_are_refused(manifest: Path, lengths: str) -> None:
    for option in ("--response-tokens", "--prompt-tokens"):
        assert plan(manifest, *TWO_NODES, f"{option}={lengths}")[0] == 2
    with pytest.raises(SpecError, match=r"is no MEAN, MEAN,P99 or fixed|99 of 100"):
        lengths_of(lengths, "--response-tokens", most=1024)


def test_own_gpus_may_cost_nothing(manifest: Path) -> None:
    inventory, group = manifest.parent / "inventory.yaml", "{gpu: %s, count: 1, gpusPerNode: %d, pricePerGpuHour: %d}"
    inventory.write_text(f"nodes: [{group % ('b300-288g', 1, 0)}, {group % ('h100-80g', 8, 3)}]")
    found = planned(manifest, f"--inventory={inventory}", "--objective=lowest-cost")
    assert {each["reason"] for each in found["rejected"]} == {"costs something, and the best nothing"}


def test_what_fits_nowhere_is_an_answer_in_json_too(manifest: Path) -> None:
    code, shown = plan(manifest, "--nodes=1", "--gpus-per-node=1", "--gpu=t4-16g", "--json")
    assert code == 4
    answer = json.loads(shown)
    assert answer["predicted"] is None
    assert answer["infeasible"]["short_bytes"] > 0
    assert all(each["gpus"] > 1 for each in answer["infeasible"]["smallest"])
    assert "nothing fits" in plan(manifest, "--nodes=1", "--gpus-per-node=1", "--gpu=t4-16g")[1]


def test_objectives_differ(manifest: Path) -> None:
    inventory = manifest.parent / "cluster.yaml"
    inventory.write_text("nodes: [{gpu: a100-80g, count: 8, gpusPerNode: 8, pricePerGpuHour: 2}]")

    def answer(objective: str) -> tuple[float, float]:
        """GPUs, and seconds of a step."""
        found = planned(manifest, "--inventory", inventory, "--objective", objective)
        return sum(pool["gpus"] for pool in found["pools"]), found["predicted"]["step_seconds"]

    (most, fastest), (fewest, slowest), cheapest = map(answer, ("throughput", "fewest-gpus=100000", "lowest-cost"))
    assert fewest < most
    assert fastest < slowest
    assert cheapest[0] * cheapest[1] <= min(most * fastest, fewest * slowest)
    written = manifest.read_text()
    manifest.write_text(written.replace("spec:\n", "spec:\n  placement: {objective: lowest-cost}\n"))
    assert manifest.read_text() != written
    told = planned(manifest, "--inventory", inventory)
    assert (sum(pool["gpus"] for pool in told["pools"]), told["predicted"]["step_seconds"]) == cheapest


def test_where_prices_are_known_a_step_has_one(manifest: Path) -> None:
    inventory = manifest.parent / "cluster.yaml"
    inventory.write_text("nodes: [{gpu: a100-80g, count: 2, gpusPerNode: 8, pricePerGpuHour: 2}]")
    answer = planned(manifest, "--inventory", inventory, "--objective=lowest-cost")
    for each in (answer, *answer["rejected"]):
        gpus = sum(pool["gpus"] for pool in each["pools"])
        assert each["predicted"]["price"] == pytest.approx(gpus * 2 * each["predicted"]["step_seconds"] / 3600)
        assert each["predicted"]["price"] >= answer["predicted"]["price"]
    assert answer["rejected"]
    shown = plan(manifest, "--inventory", inventory)[1]
    assert shown.count("price ") == 1 + len(planned(manifest, "--inventory", inventory)["rejected"])
    assert not [line for line in shown.splitlines() if line.endswith(" ")]
    assert "price" not in planned(manifest, *TWO_NODES)["predicted"]


def test_the_plan_says_which_network_it_counts_on(manifest: Path) -> None:
    usual = "Nodes of a100-80g send 1,600 Gb/s, as is usual with them; an --inventory can say otherwise."
    assert usual in " ".join(plan(manifest, *TWO_NODES)[1].split())
    inventory = manifest.parent / "cluster.yaml"
    inventory.write_text("nodes: [{gpu: a100-80g, count: 2, gpusPerNode: 8, interNodeGbps: 400}]")
    assert "Nodes of a100-80g send 400 Gb/s." in plan(manifest, "--inventory", inventory)[1]
    assert "Gb/s" not in plan(manifest, "--nodes=1", "--gpus-per-node=8", "--gpu=h200-141g")[1]


@pytest.mark.parametrize(
    ("encoding", "options"),
    [("ascii", []), pytest.param("latin-1", ["--objective=fewest-gpus=0.000000001"], marks=pytest.mark.slow)],
)
def test_a_terminal_without_such_characters_is_told_all_the_same(
    manifest: Path, options: list[str], encoding: str
) -> None:
    command = [sys.executable, "-m", "rlhf_trainer", "plan", str(manifest), *TWO_NODES, *options]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, env=environment, capture_output=True, encoding="latin-1", check=False)
    assert done.returncode == (4 if options else 0), done.stderr
    assert "Traceback" not in done.stderr
    assert ("1e-06 ms" in done.stderr) if options else ("best rejected placements" in done.stdout)


def test_the_timeline_or_the_graph_is_drawn(manifest: Path, tmp_path: Path) -> None:
    for options in ([], ["--graph"]):
        svg = tmp_path / f"{len(options)}.svg"
        assert plan(manifest, *TWO_NODES, "--svg", svg, *options)[0] == 0
        assert svg.read_text().startswith("<svg")
    assert (tmp_path / "0.svg").read_text() != (tmp_path / "1.svg").read_text()
    assert plan(EXAMPLES[0], "--svg", tmp_path / "2.svg")[0] == 2, "there are three jobs"
    assert plan(manifest, *TWO_NODES, "--json", "--graph")[0] == 2
    assert plan(manifest, *TWO_NODES, "--svg", "/nowhere/x.svg")[0] == 4
    assert plan(manifest, "nobody", *TWO_NODES)[0] == 2


@pytest.mark.parametrize("options", [[], pytest.param(list(TWO_NODES), marks=pytest.mark.slow)])
def test_neither_torch_nor_ray_nor_vllm_is_needed(options: list[str]) -> None:
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({NOT_NEEDED!r})); "
        f"sys.argv = ['rlhf', 'plan', {str(EXAMPLES[0])!r}, 'helpful-ppo', '--json', *{options!r}]; "
        "from rlhf_trainer.commands.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (gpu,) = {pool["gpu"] for pool in json.loads(done.stdout)["pools"]}
    assert gpu == ("a100-80g" if options else "cpu-slot")


def run_folder(run: Path, mapping: dict[str, Any], *, factor: float) -> Path:
    """A run of example 01's PPO in which every phase took `factor` times what its mapping predicts."""
    folder = run / "helpful-ppo"
    folder.mkdir(parents=True)
    (job,) = (job for job in load(EXAMPLES[0]) if job.name == "helpful-ppo")
    (folder / "job.yaml").write_text(dump(job))
    (folder / "mapping.json").write_text(json.dumps(mapping))
    times = {f"time/{phase}": factor * seconds for phase, seconds in mapping["predicted"]["phases"].items()}
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": n, **times}) + "\n" for n in (1, 2, 3)))
    return run


@pytest.mark.usefixtures("no_earlier_runs")
def test_measured_times_correct_the_prediction(tmp_path: Path) -> None:
    before = planned(EXAMPLES[0], "helpful-ppo")
    slow = run_folder(tmp_path / "slow", before, factor=2)
    after = planned(EXAMPLES[0], "helpful-ppo", "--calibrate", slow)
    assert after["predicted"]["step_seconds"] == pytest.approx(2 * before["predicted"]["step_seconds"], rel=0.02)
    assert after["predicted"]["correction"] == pytest.approx(dict.fromkeys(PHASES, 2))
    shown = plan(EXAMPLES[0], "helpful-ppo", "--calibrate", slow)[1]
    said = "corrected by helpful-ppo, where measured over predicted seconds were: reshard 2, generation 2, scoring 2"
    assert said in shown
    pools = "[{name: all, models: [actor, critic, reference, reward], slotsPerNode: 2}]"
    by_hand = ("--set=helpful-ppo:placement.mode=Manual", f"--set=helpful-ppo:placement.pools={pools}")
    kept = planned(EXAMPLES[0], "helpful-ppo", "--calibrate", slow, *by_hand)
    assert kept["predicted"]["correction"] == after["predicted"]["correction"]
    right = run_folder(tmp_path / "right", after, factor=1)
    again = planned(EXAMPLES[0], "helpful-ppo", "--calibrate", right)
    assert again["predicted"]["correction"] == pytest.approx(after["predicted"]["correction"])


@pytest.mark.usefixtures("no_earlier_runs")
def test_several_runs_correct_together_and_each_is_left_out(tmp_path: Path) -> None:
    before = planned(EXAMPLES[0], "helpful-ppo")
    runs = [run_folder(tmp_path / str(factor), before, factor=factor) for factor in (2, 8)]
    both = [word for run in runs for word in ("--calibrate", run)]
    after = planned(EXAMPLES[0], "helpful-ppo", *both)
    assert after["predicted"]["correction"] == pytest.approx(dict.fromkeys(PHASES, 4)), "the geometric mean"
    shown = " ".join(plan(EXAMPLES[0], "helpful-ppo", *both)[1].split())
    assert "scoring 2, update 2; left out, it is predicted +300% off corrected by helpful-ppo" in shown
    assert "scoring 8, update 8; left out, it is predicted -75% off" in shown


@pytest.mark.usefixtures("no_earlier_runs")
def test_responses_are_as_long_as_in_an_earlier_run(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", planned(EXAMPLES[0], "helpful-ppo"), factor=1)
    rows = [{"step": step, "response_length/mean": mean} for step, mean in ((1, 5.0), (2, 6.0), (3, 100.0))]
    (run / "helpful-ppo" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assumed, known = (planned(EXAMPLES[0], "helpful-ppo", *each) for each in ((), (f"--output={run}",)))
    assert known["predicted"]["response_tokens"] == pytest.approx(6, rel=0.1)
    assert known["predicted"]["response_source"] == "known"
    assert assumed["predicted"]["response_source"] == "assumed: 50% of the limit"
    given = planned(EXAMPLES[0], "helpful-ppo", f"--output={run}", "--response-tokens=fixed(3)")
    assert given["predicted"]["response_tokens"] == 3


@pytest.mark.usefixtures("no_earlier_runs")
def test_lengths_are_of_any_run_that_has_measured_them(tmp_path: Path) -> None:
    before = planned(EXAMPLES[0], "helpful-ppo")
    runs = [run_folder(tmp_path / name, before, factor=1) for name in ("without", "with")]
    metrics = runs[1] / "helpful-ppo" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("}", ', "response_length/mean": 6.0}'))
    after = planned(EXAMPLES[0], "helpful-ppo", *(word for run in runs for word in ("--calibrate", run)))
    assert after["predicted"]["response_tokens"] == pytest.approx(6, rel=0.1)


@pytest.mark.parametrize(
    ("damaged", "sentence"),
    [
        ({"correction": None}, "mapping.json is damaged: predicted.correction: Input should be a valid dictionary"),
        ({"correction": {"update": 1e300}}, "mapping.json is damaged: predicted.correction.update: "),
        ({"phases": {"update": "long"}}, "mapping.json is damaged: predicted.phases.update: "),
        ({"phases": {"update": 1e-12}}, "metrics.jsonl: update took "),
        ({"phases": {}}, "metrics.jsonl has no time/<phase> of a phase that was predicted"),
    ],
)
def test_a_damaged_mapping_corrects_nothing(tmp_path: Path, damaged: dict[str, Any], sentence: str) -> None:
    mapping = planned(EXAMPLES[0], "helpful-ppo")
    run = run_folder(tmp_path / "run", mapping, factor=1)
    changed = {**mapping, "predicted": {**mapping["predicted"], **damaged}}
    (run / "helpful-ppo" / "mapping.json").write_text(json.dumps(changed))
    refused(run, sentence)
    (run / "helpful-ppo" / "mapping.json").write_text(json.dumps({"predicted": mapping["predicted"]}))
    refused(run, "mapping.json is damaged: pools: Field required")


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ('"time/update": NaN', "time/update of step 2 is nan, expected seconds"),
        ('"time/update": Infinity', "time/update of step 2 is inf, expected seconds"),
        ('"time/update": 1e300', "time/update of step 2 is 1e+300, expected seconds"),
        ('"time/update": -1', "time/update of step 2 is -1, expected seconds"),
        ('"time/update": 1e8', "update took "),
    ],
)
def test_damaged_times_correct_nothing(tmp_path: Path, row: str, sentence: str) -> None:
    run = run_folder(tmp_path / "run", planned(EXAMPLES[0], "helpful-ppo"), factor=1)
    (run / "helpful-ppo" / "metrics.jsonl").write_text(f'{{"step": 2, {row}}}\n')
    refused(run, f"metrics.jsonl: {sentence}")


def test_rows_without_times_correct_nothing(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", planned(EXAMPLES[0], "helpful-ppo"), factor=1)
    (run / "helpful-ppo" / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 1.0}\n')
    refused(run, "metrics.jsonl has no time/<phase> of a phase that was predicted")


def refused(run: Path, sentence: str) -> None:
    """`--calibrate` with this run ends with the sentence."""
    done = CliRunner().invoke(app, ["plan", str(EXAMPLES[0]), "helpful-ppo", "--calibrate", str(run)])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: --calibrate {run}: helpful-ppo/{sentence}")
    assert done.stderr.count("\n") == 1


def test_a_run_on_other_gpus_or_of_other_jobs_corrects_nothing(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", planned(EXAMPLES[0], "helpful-ppo"), factor=1)
    calibrate = ("--calibrate", str(run))
    other = CliRunner().invoke(app, ["plan", str(EXAMPLES[0]), "helpful-ppo", *calibrate, *TWO_NODES])
    assert (other.exit_code, other.stderr) == (
        2,
        f"error: --calibrate {run}: helpful-ppo ran on cpu-slot, and this plan is for a100-80g\n",
    )
    other = CliRunner().invoke(app, ["plan", str(EXAMPLES[0]), "helpful-sft", *calibrate])
    assert other.exit_code == 2
    assert other.stderr.startswith(f"error: --calibrate {run}: has no job named helpful-sft or of SFT with a pred")
    assert plan(EXAMPLES[0], "--calibrate", tmp_path / "nowhere")[0] == 2


def test_an_objective_is_one_of_three() -> None:
    free = Cluster((NodeGroup(gpu=GPUS["t4-16g"], count=1, gpus_per_node=1),))
    for wrong in (
        "fastest",
        "throughput=3",
        "throughput=",
        "lowest-cost=",
        "",
        "fewest-gpus",
        "fewest-gpus=-1",
        "fewest-gpus=nan",
        "lowest-cost",
    ):
        with pytest.raises(SpecError, match=r"^--objective: "):
            objective_of(wrong, free)
    with pytest.raises(SpecError, match=r"^--objective: is empty, expected throughput, "):
        objective_of("", free)
    assert objective_of("fewest-gpus=2.5", free).most_seconds == 2.5


def test_models_that_score_have_a_head_of_one_value(manifest: Path) -> None:
    (job,) = load(SAFE, [f"{field}.uri=file://{manifest.parent}/llama" for field in MODELS])
    shapes = shapes_of([job], job, manifest.parent)
    assert {role: shape.scores for role, shape in shapes.items()} == {
        "actor": False,
        "reference": False,
        "critic": True,
        "cost_critic": True,
        "reward": True,
        "cost": True,
    }
    assert shapes["actor"].parameters == 6_738_415_616, "as published, 6.7B"


def test_a_shape_in_the_manifest_replaces_config_json(tmp_path: Path) -> None:
    known = [f"{field}.shape.name=llama-3-8b" for field in MODELS[:3]]
    uris = [f"{field}.uri=hf://no/{field}" for field in MODELS[:3]]
    (job,) = load(JOB, [*uris, *known])
    assert {role: shape.layers for role, shape in shapes_of([job], job, tmp_path).items()} == {
        "actor": 32,
        "critic": 32,
        "reference": 32,
        "reward": 32,
    }
    (job,) = load(JOB, [*uris, *known, "models.critic.shape.numAttentionHeads=7"])
    with pytest.raises(SpecError, match=r"^ppo: spec\.models\.critic\.shape: num_attention_heads is 7, which does not"):
        shapes_of([job], job, tmp_path)


def test_a_model_on_a_claim_is_planned_for_by_its_shape(tmp_path: Path) -> None:
    on_claims = [f"{field}.uri=pvc://models/llama" for field in MODELS[:3]]
    (job,) = load(JOB, on_claims)
    with pytest.raises(DataError, match=r"^ppo: spec\.models\.actor\.uri: pvc://models/llama: is on a claim.*\.shape"):
        shapes_of([job], job, tmp_path)
    (job,) = load(JOB, [*on_claims, *(f"{field}.shape.name=llama-2-7b" for field in MODELS[:3])])
    assert shapes_of([job], job, tmp_path)["actor"].parameters == 6_738_415_616


def test_a_plan_and_a_check_say_what_checkpoints_take(manifest: Path) -> None:
    sentence = "A checkpoint (actor, critic) takes 160 GB, 2 that are kept and a new one 480 GB."
    assert sentence in plan(manifest, *TWO_NODES)[1].splitlines()
    shapes = [f"--set={field}.shape.name=llama-2-7b" for field in MODELS[:2]]
    assert CliRunner().invoke(app, ["validate", str(manifest), *shapes]).stdout == f"ok\nppo: {sentence}\n"
    assert CliRunner().invoke(app, ["validate", str(manifest), shapes[0]]).stdout == "ok\n", "not all is known"


def test_a_setting_that_changes_a_part_is_not_called_unused(manifest: Path) -> None:
    sets = ("--set=checkpoint.keepLast=7", "--set=training.seed=3")
    done = CliRunner().invoke(app, ["plan", str(manifest), *TWO_NODES, *sets])
    assert "7 that are kept and a new one" in done.stdout
    assert done.stderr == "--set training.seed=3 changes nothing of this answer\n"
    done = CliRunner().invoke(app, ["plan", str(manifest), *TWO_NODES, "--graph", *sets])
    assert (done.exit_code, done.stderr) == (0, "")


def test_a_job_that_reads_another_has_its_told_shape(tmp_path: Path) -> None:
    chain = load(EXAMPLES[0], ["helpful-sft:models.actor.shape.name=qwen2.5-0.5b"])
    assert shapes_of(chain, chain[1], tmp_path)["reward"].layers == 24
    assert shapes_of(chain, chain[2], tmp_path)["actor"].layers == 24


def test_a_chain_of_jobs_ends_at_the_model_that_it_began_with(tmp_path: Path) -> None:
    jobs = load(EXAMPLES[0])
    first, second, third = (shapes_of(jobs, job, tmp_path) for job in jobs)
    assert third["actor"] == third["reference"] == first["actor"]
    assert third["critic"] == third["reward"] == second["reward"]
    assert second["reward"].layers == first["actor"].layers


def test_a_job_of_another_manifest_is_read_from_the_folder(tmp_path: Path) -> None:
    (job,) = load(JOB, [f"{field}.uri=job://before" for field in MODELS[:1]], finished={"before": "SFT"})
    with pytest.raises(DataError, match=r"^ppo: spec\.models\.actor\.uri: .*before/model: is not there$"):
        shapes_of([job], job, tmp_path)
    (tmp_path / "before" / "model").mkdir(parents=True)
    (tmp_path / "before" / "model" / "config.json").write_text(LLAMA_7B)
    (tmp_path / "llama").symlink_to(tmp_path / "before" / "model")
    others = [f"{field}.uri=file://{tmp_path}/llama" for field in MODELS[1:3]]
    (job,) = load(JOB, ["models.actor.uri=job://before", *others], finished={"before": "SFT"})
    assert shapes_of([job], job, tmp_path)["actor"].hidden == 4096


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ("{", "cannot be read: Expecting property name"),
        ("[]", "is no mapping"),
        ('{"hidden_size": 8}', "has no num_attention_heads, which the shape of a model needs"),
        (LLAMA_7B.replace("4096", "0"), "hidden_size is 0, expected a positive whole number"),
        (LLAMA_7B.replace("11008", '"wide"'), 'intermediate_size is "wide", expected a positive whole number'),
        (LLAMA_7B.replace("32000", "null"), "has no vocab_size, which the shape of a model needs"),
        (LLAMA_7B.replace("4096", "1" + 400 * "0"), "hidden_size is beyond 10,000,000, which no model has"),
        (LLAMA_7B.replace("4096", "1"), "num_attention_heads is 32, which does not divide hidden_size, 1"),
        (
            LLAMA_7B.replace('_value_heads": 32', '_value_heads": 5'),
            "num_key_value_heads is 5, which does not divide num_attention_heads, 32",
        ),
        (
            LLAMA_7B.replace("{", '{"num_experts": 4, "num_experts_per_tok": 8, '),
            "num_experts_per_tok is 8, but there are 4 experts",
        ),
        ('{"architectures": 5}', "architectures is 5, expected a list of names"),
        ('{"architectures": [5]}', "architectures is [5], expected a list of names"),
        ('{"architectures": "LlamaForCausalLM"}', 'architectures is "LlamaForCausalLM", expected a list of names'),
        ('{"architectures": ["BertForMaskedLM"]}', "BertForMaskedLM is no decoder"),
        ('{"model_type": "roberta", "type_vocab_size": 1}', "roberta is no decoder"),
    ],
)
def test_a_config_that_says_no_shape_is_refused(manifest: Path, config: str, sentence: str) -> None:
    (manifest.parent / "llama" / "config.json").write_text(config)
    (job,) = load(manifest)
    with pytest.raises(DataError) as found:
        shapes_of([job], job, manifest.parent)
    assert str(found.value).startswith("ppo: spec.models.actor.uri: /")
    assert f"config.json: {sentence}" in str(found.value)


def test_of_a_model_on_the_hub_only_config_json_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the hub's cache on this machine, in which nothing else is."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (job,) = load(JOB, [f"{field}.uri=hf://org/llama" for field in MODELS[:3]])
    with pytest.raises(DataError, match=r"^ppo: spec\.models\.actor\.uri: hf://org/llama: its config\.json cannot be"):
        shapes_of([job], job, tmp_path)
    commit, model = "0" * 40, tmp_path / "models--org--llama"
    for path, text in {"refs/main": commit, f"snapshots/{commit}/config.json": LLAMA_7B}.items():
        (model / path).parent.mkdir(parents=True)
        (model / path).write_text(text)
    assert shapes_of([job], job, tmp_path)["actor"].hidden == 4096
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(EnvironmentProblem, match=r"needs the package huggingface_hub$"):
        shapes_of([job], job, tmp_path)


@each_case(
    ("name", "memory", "gpu"),
    [
        ("NVIDIA A100-SXM4-80GB", 84.99e9, "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", 42.3e9, "a100-40g"),
        ("NVIDIA H100 80GB HBM3", 85.0e9, "h100-80g"),
        ("NVIDIA A10", 24.1e9, "a10-24g"),
        ("Tesla T4", 15.6e9, "t4-16g"),
    ],
)
def test_gpus_of_this_machine_are_found_in_the_table(name: str, memory: float, gpu: str) -> None:
    def gpus() -> list[FoundGpu]:
        return [FoundGpu(name=name, memory=memory)] * 4

    (job,) = load(JOB)
    here = local_cluster(job, gpus)
    assert [(group.gpu.name, group.gpus) for group in here.groups] == [(gpu, 4)]
    assert device_of(job, here) == "GPU"
    assert local_cluster(load(JOB, ["resources.slotsPerNode=2"])[0], gpus).gpus == 2
    with pytest.raises(SpecError, match=r"ppo: spec\.resources: asks for 8 GPUs, but the machines have 4"):
        local_cluster(load(JOB, ["resources.slotsPerNode=8"])[0], gpus)


RTX_5090 = FoundGpu(
    name="NVIDIA GeForce RTX 5090",
    memory=34.2e9,
    capability=(12, 0),
    multiprocessors=170,
    clock=2.41e9,
    memory_bandwidth=1792e9,
)


def test_a_gpu_in_no_table_is_planned_by_its_driver(manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (plan_command, placement):
        monkeypatch.setattr(module, "gpus_here", lambda: [RTX_5090] * 64)
    config = json.loads(LLAMA_7B) | {"model_type": "llama"}
    (manifest.parent / "llama" / "config.json").write_text(json.dumps(config))
    (job,) = load(manifest)
    placed = place_job(job, (64,), [job], manifest.parent)
    assert (placed.mapping.prediction is not None, placed.unmapped) == (True, "")
    assert {pool.gpu for pool in placed.mapping.pools} == {"NVIDIA GeForce RTX 5090 (estimated)"}
    code, shown = plan(manifest)
    assert code == 0
    assert "its speed is estimated from its multiprocessors and clocks" in " ".join(shown.split())
    assert "estimated" not in plan(manifest, *TWO_NODES)[1]


@each_case(
    ("gpu", "capability", "multiprocessors", "clock"),
    [
        ("a100-80g", (8, 0), 108, 1.41e9),
        ("h100-80g", (9, 0), 132, 1.98e9),
        ("b200-180g", (10, 0), 148, 1.965e9),
        ("l40s-48g", (8, 9), 142, 2.52e9),
        ("a10-24g", (8, 6), 72, 1.695e9),
        ("t4-16g", (7, 5), 40, 1.59e9),
    ],
)
def test_estimates_come_near_the_datasheets(
    gpu: str, capability: tuple[int, int], multiprocessors: int, clock: float
) -> None:
    known = GPUS[gpu]
    found = figures_of(
        FoundGpu(
            name="another",
            memory=known.memory,
            capability=capability,
            multiprocessors=multiprocessors,
            clock=clock,
            memory_bandwidth=known.memory_bandwidth,
        )
    )
    assert found is not None
    assert found.bf16 == pytest.approx(known.bf16, rel=0.1)
    assert found.fp32 == pytest.approx(known.fp32, rel=0.02)


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_gpu_that_says_nothing_of_itself_runs_without_a_plan(
    by_hand: bool, manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = FoundGpu(name="Another Vendor's GPU", memory=25.3e9)
    monkeypatch.setattr(placement, "gpus_here", lambda: [unknown] * 4)
    pools = "[{name: all, models: [actor, critic, reference, reward], slotsPerNode: 4}]"
    (job,) = load(manifest, ["placement.mode=Manual", f"placement.pools={pools}"] if by_hand else [])
    placed = place_job(job, (4,), [job], manifest.parent)
    assert [pool.slots_per_machine for pool in placed.mapping.pools] == [(4,)]
    assert placed.unmapped.endswith("Another Vendor's GPU of 25 GB, are not known; give --inventory")
    with pytest.raises(UnknownGpuError) as refused:
        local_cluster(job, lambda: [unknown] * 4)
    assert refused.value.exit_code == 4


def test_a_machine_without_gpus_has_cpu_slots() -> None:
    here = local_cluster(load(JOB)[0], list)
    assert device_of(load(JOB)[0], here) == "CPU"
    with pytest.raises(SpecError, match=r"ppo: spec\.resources\.device: is GPU, but there is no GPU here"):
        device_of(load(JOB, ["resources.device=GPU"])[0], here)


def test_a_job_for_cpu_slots_is_not_planned_for_gpus(manifest: Path) -> None:
    assert plan(manifest, *TWO_NODES, "--set=resources.device=CPU")[0] == 2


def test_cpu_slots_of_a_node_share_the_machines_memory() -> None:
    one, four = (local_cluster(load(JOB, [f"resources.slotsPerNode={slots}"])[0], list) for slots in (1, 4))
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert one.groups[0].gpu.memory == 4 * four.groups[0].gpu.memory == there
    assert device_of(load(JOB)[0], four) == "CPU"


def test_why_the_mapper_was_not_used_is_known(manifest: Path) -> None:
    (job,) = load(manifest, ["resources.device=CPU"])
    here = (0,)
    (manifest.parent / "llama" / "config.json").write_text('{"hidden_size": 8}')
    placed = place_job(job, here, [job], manifest.parent)
    assert placed.mapping.prediction is None
    assert placed.unmapped.endswith("has no num_attention_heads, which the shape of a model needs")
    (ppo,) = (job for job in load(EXAMPLES[0]) if job.name == "helpful-ppo")
    placed = place_job(ppo, here, load(EXAMPLES[0]), manifest.parent)
    assert (placed.mapping.prediction is not None, placed.unmapped) == (True, "")
