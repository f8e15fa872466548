"""Example 01 with fewer steps, from `helm install` to a trained model on real pods.

The operator runs from the image that is built of this tree. The first driver is killed, and the reward model trains on
two hosts.
"""

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from images import build as images
from tests.cluster import chart, golden_path
from tests.cluster.client import Cluster
from tests.cluster.conftest import need
from tests.cluster.golden_path import NAMES, PPO, RM, SFT, Document
from tests.cluster.plugin import rlhf, served, told
from tests.cluster.settings import ROOT
from tests.patience import PATIENCE_SECONDS

STEPS = {SFT: 240, RM: 4, PPO: 2}
SAVED_EVERY = 5
TOLD = {
    "why": rf"step \d+ of {STEPS[SFT]}",
    "logs": f"/{STEPS[SFT]}",
    "save-now": r"step \d+ is saved|every step of attempt 2 is saved",
}
"""What commands of `kubectl rlhf` say of SFT while it runs."""
TWO_HOSTS = {"nodes": 2, "slotsPerNode": 1}
NAMESPACE = "golden-path"
COLUMNS = ["NAME", "ALGORITHM", "PHASE", "STEP", "TOTAL", "REWARD", "GPUS", "AGE"]
COMPLETE = f"""
import httpx, json
asked = {{"model": "{PPO}", "prompt": "Hello", "max_tokens": 4, "ignore_eos": True}}
answer = httpx.post("http://127.0.0.1:8000/v1/completions", json=asked, trust_env=False, timeout=60).json()
print(json.dumps([answer["model"], answer["usage"]["completion_tokens"]]))
"""
"""Program in the pod of a server: prints the served model and the number of tokens of a response."""
MOST_EVENTS = 8
"""Of a job whose first attempt succeeds, besides those that tell of checkpoints."""


@dataclass(frozen=True)
class Chain:
    """The three jobs at their end."""

    cluster: Cluster
    ended: dict[str, Document]
    """The status of each."""
    log: str
    """What `kubectl logs` shows of PPO in its first step."""
    asked: dict[str, str]
    """What each command of TOLD says of SFT."""
    image: str
    """Of the operator."""

    def folder(self, name: str) -> Path:
        """A job's folder on its claim."""
        return self.cluster.folder_of_claim(NAMESPACE, f"{name}-output") / name

    def records(self, name: str) -> list[dict[str, float]]:
        """The steps of a job, as its trainer wrote them down."""
        return [json.loads(line) for line in (self.folder(name) / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def chain(pods_cluster: Cluster) -> Iterator[Chain]:
    """The jobs applied at once; SFT loses its driver when it has a checkpoint and steps after it."""

    def is_past_checkpoint(found: Document) -> bool:
        return golden_path.step(found) > golden_path.saved_step(found) > 0

    need(images.cannot_build())
    image = chart.install_built(pods_cluster)
    pods_cluster.offer_volumes(len(NAMES))
    pods_cluster.make_namespace(NAMESPACE)
    jobs = golden_path.shortened(STEPS, every_steps=SAVED_EVERY)
    jobs[RM]["spec"]["resources"] = TWO_HOSTS
    golden_path.apply(pods_cluster, NAMESPACE, jobs)
    golden_path.until(pods_cluster, NAMESPACE, SFT, is_past_checkpoint, 300)
    with ThreadPoolExecutor() as at_once:
        running = {command: at_once.submit(ask_until_told, pods_cluster, command) for command in ("why", "logs")}
        golden_path.kill_driver(pods_cluster, NAMESPACE, SFT)
        running["save-now"] = at_once.submit(ask_until_told, pods_cluster, "save-now")
    asked = {command: each.result() for command, each in running.items()}
    ended = {SFT: golden_path.succeeded(pods_cluster, NAMESPACE, SFT)}
    pods_cluster.until(lambda: has_three_addresses(pods_cluster, RM), 300, "a head and two hosts of RM")
    ended[RM] = golden_path.succeeded(pods_cluster, NAMESPACE, RM)
    golden_path.until(pods_cluster, NAMESPACE, PPO, golden_path.step, 600)
    log = pods_cluster.logs(NAMESPACE, golden_path.head(pods_cluster, NAMESPACE, PPO), golden_path.DRIVER_LOG)
    ended[PPO] = golden_path.succeeded(pods_cluster, NAMESPACE, PPO)
    yield Chain(pods_cluster, ended, log, asked, image)
    pods_cluster.drop_namespace(NAMESPACE)


def ask(cluster: Cluster, command: str, *words: object) -> str:
    """What `kubectl rlhf COMMAND` prints."""
    return told(cluster, command, *words, "-n", NAMESPACE)


def ask_until_told(cluster: Cluster, command: str) -> str:
    """What `kubectl rlhf COMMAND` prints of SFT as soon as it is what TOLD says; an attempt may be short."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        answer = rlhf(cluster, command, SFT, "-n", NAMESPACE).stdout
        if re.search(TOLD[command], answer) or f"{SFT} succeeded" in answer:
            break
    return answer


def has_three_addresses(cluster: Cluster, name: str) -> bool:
    """Whether the pods of a job have."""
    statuses = [pod["status"] for pod in golden_path.pods(cluster, NAMESPACE, name)]
    return len({status["podIP"] for status in statuses if "podIP" in status}) == 3


def test_the_operator_was_its_image_and_nothing_of_this_machine(chain: Chain) -> None:
    own = ("--namespace", chart.NAMESPACE, "deployment/rlhf-operator")
    assert chain.cluster.kubectl("get", *own, "-o", "jsonpath={..image}") == chain.image
    materials = json.loads(chain.cluster.kubectl("exec", *own, "--", "cat", "/usr/share/rlhf/sbom.cdx.json"))
    names = {component["name"] for component in materials["components"]}
    assert {"kopf", "kubernetes"} <= names
    assert not names & {"torch", "ray", "vllm"}
    seen = chain.cluster.kubectl("exec", *own, "--", "sh", "-c", f"id -u; ls -d {ROOT} || echo absent")
    assert seen.split() == ["65532", "absent"]


def test_the_jobs_run_in_order(chain: Chain) -> None:
    for name, reads in ((RM, SFT), (PPO, RM)):
        assert chain.ended[name]["attempts"][0]["startTime"] >= chain.ended[reads]["completionTime"]


def test_the_reward_model_was_trained_on_two_hosts(chain: Chain) -> None:
    (pool,) = chain.ended[RM]["mapping"]["pools"]
    assert (pool["nodes"], pool["slotsPerNode"]) == (2, 1)


def test_a_job_with_a_killed_driver_goes_on_from_its_save(chain: Chain) -> None:
    first, second = chain.ended[SFT]["attempts"]
    assert (first["outcome"], first["counted"]) == ("Failed", True)
    assert first["message"]
    assert second["outcome"] == "Succeeded"
    assert SAVED_EVERY <= second["firstStep"] <= first["lastStep"] < STEPS[SFT]
    assert second["firstStep"] % SAVED_EVERY == 0
    assert chain.ended[SFT]["failedAttempts"] == 1


@pytest.mark.parametrize("name", NAMES)
def test_every_step_is_made_once(chain: Chain, name: str) -> None:
    assert [record["step"] for record in chain.records(name)] == list(range(1, STEPS[name] + 1))


@pytest.mark.parametrize("name", NAMES)
def test_the_status_carries_the_trainers_own_numbers(chain: Chain, name: str) -> None:
    found, last = chain.ended[name], chain.records(name)[-1]
    assert (found["progress"]["step"], found["progress"]["totalSteps"]) == (STEPS[name], STEPS[name])
    assert found["attempts"][-1]["outcome"] == "Succeeded"
    shown = {each["name"]: float(each["value"]) for each in found["metrics"]}
    of_steps = {metric: value for metric, value in shown.items() if not metric.startswith("evaluation/")}
    assert of_steps == pytest.approx({metric: last[metric] for metric in of_steps}, rel=1e-4)
    assert of_steps != shown, "an ended job also shows the measures of its last evaluation"
    assert ("reward/mean" in shown) == (name == PPO)


def test_the_status_says_where_the_models_lived(chain: Chain) -> None:
    mapping = chain.ended[PPO]["mapping"]
    assert (mapping["device"], mapping["slots"]) == ("CPU", 2)
    assert {model for pool in mapping["pools"] for model in pool["models"]} == {
        "actor",
        "critic",
        "reference",
        "reward",
    }
    assert mapping["predictedStepSeconds"] > 0


def test_the_logs_of_ray_are_on_the_claim(chain: Chain) -> None:
    logs = chain.folder(PPO).parent / "ray-logs" / f"a{chain.ended[PPO]['attempt']}"
    written = {pod.name: {file.name for file in pod.rglob("*")} for pod in logs.iterdir()}
    assert len(written) == 2, "head and worker"
    assert all({"raylet.out", "raylet.err"} & files for files in written.values()), written


def test_the_model_is_on_the_claim_and_loads(chain: Chain) -> None:
    from transformers import AutoModelForCausalLM

    assert chain.ended[PPO]["output"]["uri"] == f"pvc://{PPO}-output/{PPO}/model"
    model = AutoModelForCausalLM.from_pretrained(chain.folder(PPO) / "model")
    assert sum(parameter.numel() for parameter in model.parameters()) > 0


def test_kubectl_get_shows_the_jobs(chain: Chain) -> None:
    header, *rows = chain.cluster.kubectl("get", "rlhf", "-n", NAMESPACE).splitlines()
    assert header.split() == COLUMNS
    row = next(each.split() for each in rows if each.startswith(PPO))
    assert row[1:5] == ["PPO", "Succeeded", str(STEPS[PPO]), str(STEPS[PPO])]
    assert float(row[5]) == pytest.approx(chain.records(PPO)[-1]["reward/mean"], rel=1e-3)


def test_kubectl_logs_shows_what_the_trainer_says(chain: Chain) -> None:
    assert f"{PPO}: PPO on 2 CPU slots (actor, critic, reference, reward)" in chain.log
    assert f"1/{STEPS[PPO]}" in chain.log


def test_the_log_of_each_attempt_is_kept_on_the_claim(chain: Chain) -> None:
    for attempt in (1, 2):
        log = (chain.folder(SFT).parent / f"driver-a{attempt}.log").read_text()
        assert f"/{STEPS[SFT]}" in log


def test_the_plugin_shows_and_saves_a_running_job(chain: Chain) -> None:
    for command, words in TOLD.items():
        assert re.search(words, chain.asked[command]), command


def test_the_plugin_shows_finished_jobs(chain: Chain) -> None:
    shown = ask(chain.cluster, "top")
    lines = sorted(line.split()[:3] for line in shown.splitlines()[1:])
    assert lines == sorted([name, "Succeeded", f"{STEPS[name]}/{STEPS[name]}"] for name in NAMES)
    assert f"pvc://{PPO}-output/{PPO}/model" in ask(chain.cluster, "why", PPO)


def test_the_plugin_shows_the_log_of_an_earlier_attempt(chain: Chain) -> None:
    assert ask(chain.cluster, "logs", SFT, "--attempt", 1) == (chain.folder(SFT).parent / "driver-a1.log").read_text()


def test_the_plugin_copies_the_model(chain: Chain, tmp_path: Path) -> None:
    said = ask(chain.cluster, "fetch", PPO, tmp_path / "model")
    claim, here = chain.folder(PPO) / "model", tmp_path / "model"
    names = sorted(path.name for path in claim.iterdir())
    assert names == sorted(path.name for path in here.iterdir())
    assert all((claim / name).read_bytes() == (here / name).read_bytes() for name in names)
    assert f"{len(names)} files" in said


def test_the_plugin_serves_pages_about_finished_jobs(chain: Chain) -> None:
    """Their files come from the claims, by pods; the last job's report has its curves."""
    with served(chain.cluster, "ui", "-n", NAMESPACE) as address:
        listed = _page(address)
        assert all(f"/runs/{name}/report.html" in listed for name in NAMES)

        def has_curves() -> bool:
            return "<svg" in (text := _page(f"{address}/runs/{PPO}/report.html")) and "reward/mean" in text

        chain.cluster.until(has_curves, PATIENCE_SECONDS, "curves of PPO")


def _page(address: str) -> str:
    with urllib.request.urlopen(address, timeout=PATIENCE_SECONDS) as answer:
        return str(answer.read().decode())


def test_the_plugin_compares_jobs_and_names_what_they_read(chain: Chain) -> None:
    compared = ask(chain.cluster, "compare", SFT, RM)
    assert "algorithm.name" in compared
    lineage = ask(chain.cluster, "lineage", PPO)
    assert all(name in lineage for name in NAMES)


@pytest.mark.slow
def test_a_pod_serves_the_model(chain: Chain, tmp_path: Path) -> None:
    """The pod is ready once vLLM answers the kubelet's probe; then it completes a prompt by the job's name."""
    manifests, deployment = tmp_path / "served.yaml", f"deployment/{PPO}-serve"
    manifests.write_text(ask(chain.cluster, "serve", PPO))
    chain.cluster.kubectl("apply", "-n", NAMESPACE, "-f", manifests)
    chain.cluster.kubectl("rollout", "status", "-n", NAMESPACE, deployment, f"--timeout={PATIENCE_SECONDS:g}s")
    said = chain.cluster.kubectl("exec", "-n", NAMESPACE, deployment, "--", "python", "-c", COMPLETE)
    assert json.loads(said) == [PPO, 4]
    chain.cluster.kubectl("delete", "-n", NAMESPACE, "-f", manifests, "--wait=true")


def test_nothing_runs_any_more(chain: Chain) -> None:
    kinds = "rayjobs,rayclusters,pods,services"
    chain.cluster.until(
        lambda: not chain.cluster.kubectl("get", kinds, "-n", NAMESPACE, "-o", "name").strip(), 120, "all is gone"
    )


def test_events_are_one_a_change(chain: Chain) -> None:
    events: list[Any] = chain.cluster.items(f"/api/v1/namespaces/{NAMESPACE}/events")
    told = {name: [each["reason"] for each in events if each["involvedObject"]["name"] == name] for name in NAMES}
    assert "Running" in told[SFT], "the few steps of the others may lie between two readings of the trainer's status"
    for name in (RM, PPO):
        assert {"Mapped", "Provisioning", "Initializing", "Succeeded"} <= set(told[name])
        assert len(told[name]) <= MOST_EVENTS
