"""`kubectl rlhf tune` has trials run as jobs with a label; a cluster in this process trains them at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlhf_api.exit_codes import ExitCode
from rlhf_kubectl import cli, submit, tune
from rlhf_kubectl.kubectl import Kubectl, KubectlError

SPEC: dict[str, Any] = {
    "algorithm": {"name": "GRPO"},
    "models": {"actor": {"uri": "job://sft"}, "reward": {"uri": "hf://a/r"}},
    "data": {"train": {"uri": "hf://a/c"}, "maxPromptTokens": 8, "maxResponseTokens": 8},
    "rollout": {"samplesPerPrompt": 2},
    "training": {"totalSteps": 90, "promptBatchSize": 4},
    "evaluation": {"data": {"uri": "hf://a/c"}, "everySteps": 20},
}
SFT: dict[str, Any] = {
    "algorithm": {"name": "SFT"},
    "models": {"actor": {"uri": "hf://a/b"}},
    "data": {**SPEC["data"], "train": {"uri": "hf://a/c", "responseKey": "response"}},
    "training": {"totalSteps": 9, "batchSize": 4},
}
MANIFEST = "\n---\n".join(
    json.dumps(
        {"apiVersion": "rlhf.hybridflow.io/v1alpha1", "kind": "RLHFJob", "metadata": {"name": name}, "spec": spec}
    )
    for name, spec in (("sft", SFT), ("grpo", SPEC))
)
RATES = {0.001: 0.2, 0.01: 0.5, 0.1: 0.9, 1.0: None}
"""Learning rate -> the measure of a trial with it; with the last one it fails."""


class Cluster(Kubectl):
    """Jobs that have run to their next pause as soon as they are applied; `limit`: applied documents before a fault."""

    def __init__(self, limit: int = 100) -> None:
        super().__init__(None, "team")
        self.jobs: dict[str, dict[str, Any]] = {}
        self.steps: list[tuple[str, int]] = []
        self.faults: list[KubectlError] = []
        self.suspending: set[str] = set()
        vars(self)["limit"] = limit

    def get(self, _: str) -> dict[str, Any]:
        if self.faults and self.steps[-1:] == [("grpo-t4", 30)]:
            raise self.faults.pop(0)
        return {"items": [*map(self._shown, self.jobs.values())]}

    def _shown(self, job: dict[str, Any]) -> dict[str, Any]:
        """A job as a look finds it: the first one after its pause comes before its pods have ended."""
        if job["metadata"]["name"] not in self.suspending:
            return job
        self.suspending.remove(job["metadata"]["name"])
        return {**job, "status": {**job["status"], "phase": "Suspending", "metrics": []}}

    def apply(self, manifest: Mapping[str, Any], *options: str) -> dict[str, Any]:
        if len(self.steps) == vars(self)["limit"]:
            raise KubectlError("no route")
        name, spec = manifest["metadata"]["name"], manifest["spec"]
        old = self.jobs.get(name, {"metadata": {"generation": 0}, "spec": None, "status": {}})
        generation = old["metadata"]["generation"] + (spec != old["spec"])
        metadata = {**manifest["metadata"], "namespace": "team", "uid": name, "generation": generation}
        job = {**manifest, "metadata": metadata, "status": old["status"]}
        if spec != old["spec"] and not options:
            job["status"] = self._run(name, spec, generation)
        self.jobs[name] = job
        return job

    def _run(self, name: str, spec: Mapping[str, Any], generation: int) -> dict[str, Any]:
        total = spec["training"]["totalSteps"]
        step = (spec.get("checkpoint") or {}).get("pauseAfterStep", total)
        self.steps.append((name, step))
        value = RATES.get(spec["models"]["actor"].get("optimizer", {}).get("learningRate"), 0.0)
        if value is None:
            failure = {"reason": "Numerics", "message": "the loss is nan", "attempt": 1}
            return {"phase": "Failed", "lastFailure": failure}
        progress = {"step": step, "totalSteps": total, "stage": "GRPO"}
        measured = {"progress": progress, "metrics": [{"name": "evaluation/reward", "value": str(value)}]}
        if step == total:
            return {**measured, "phase": "Succeeded"}
        self.suspending.add(name)
        return {**measured, "phase": "Suspended", "pausedGeneration": generation}


def search(cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    monkeypatch.setattr(cli, "Kubectl", lambda *_: cluster)
    monkeypatch.setattr(submit, "entry_points", lambda group: [])
    monkeypatch.setattr(tune, "REFRESH_SECONDS", 0)
    (folder / "job.yaml").write_text(MANIFEST)
    asked = {
        "--measure": "evaluation/reward",
        "--budget": "280",
        "--vary": f"models.actor.optimizer.learningRate={RATE_LIST}",
    }
    asked |= dict(zip(words[::2], words[1::2], strict=True))
    return CliRunner().invoke(
        cli.app, ["tune", str(folder / "job.yaml"), *(word for each in asked.items() for word in each)]
    )


RATE_LIST = ",".join(map(str, RATES))


def test_the_best_trials_go_on_and_a_second_call_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(limit=5)
    first = search(cluster, tmp_path, monkeypatch)
    assert (first.exit_code, "no route" in first.stderr) == (ExitCode.ENVIRONMENT, True), first.output
    assert cluster.steps == [("sft", 9), *((f"grpo-t{number}", 30) for number in (1, 2, 3, 4))]
    vars(cluster)["limit"] = 100
    done = search(cluster, tmp_path, monkeypatch)
    assert done.exit_code == 0, done.output
    assert cluster.steps[5:] == [("grpo-t3", 90), ("grpo-t2", 90)]
    assert {each["metadata"].get("labels", {}).get("rlhf.hybridflow.io/tune") for each in cluster.jobs.values()} == {
        None,
        "grpo",
    }
    best = cluster.jobs["grpo-t3"]["spec"]
    assert (best["evaluation"]["everySteps"], best.get("checkpoint")) == (20, None)
    assert "t4 failed: the loss is nan" in done.output
    assert done.output.splitlines()[-1] == "best: grpo-t3 --set grpo:models.actor.optimizer.learningRate=0.1"
    again = search(cluster, tmp_path, monkeypatch)
    assert (again.exit_code, len(cluster.steps)) == (0, 7)


def test_the_search_waits_for_a_cluster_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    cluster.faults += [KubectlError("no route"), KubectlError("too many requests", reason="TooManyRequests")]
    done = search(cluster, tmp_path, monkeypatch)
    assert (done.exit_code, len(cluster.steps)) == (0, 7), done.output
    assert "grpo: not up to date: no route\ngrpo: not up to date: too many requests\n" in done.output


def test_a_larger_budget_leaves_a_failed_trial_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    assert search(cluster, tmp_path, monkeypatch).exit_code == 0
    done = search(cluster, tmp_path, monkeypatch, "--budget", "400")
    assert (done.exit_code, cluster.steps[7:]) == (0, [("grpo-t1", 90)]), done.output
    assert "t4 failed: the loss is nan" in done.output


def test_the_search_ends_when_jobs_cannot_be_read_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    cluster.faults += [KubectlError("jobs are forbidden", reason="Forbidden")]
    found = search(cluster, tmp_path, monkeypatch)
    assert (found.exit_code, "jobs are forbidden" in found.stderr) == (ExitCode.ENVIRONMENT, True), found.output


def test_mistakes_are_told_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    for words, sentence in {
        ("--vary", "models.actor.optimizer.lr=1,2"): "grpo-t1: spec.models.actor.optimizer.lr",
        ("--vary", "sft:training.seed=1,2"): "all trials share sft",
        ("--budget", "100"): "--budget: is 100 steps; 4 trials of 90 steps need 180 or more (4 to step 30, 1 to",
        ("--measure", "reward"): "--measure: is reward, which grpo does not write; did you mean evaluation/reward?",
        ("--vary", "metadata=a,b"): "--vary metadata=a,b: names the job, expected a field of its spec",
        (
            "--vary",
            "models.actor.uri=job://sft,file://./other",
        ): "grpo-t2: spec.models.actor.uri: file://./other is beside",
        (
            "--vary",
            "models.actor.uri=job://sft,job://grpo",
        ): "--vary: has a value that reads grpo, the job to tune",
        ("--measure", "evaluation/rewards"): "which grpo does not write; did you mean evaluation/reward?",
    }.items():
        found = search(cluster, tmp_path, monkeypatch, *words)
        assert (found.exit_code, sentence in found.stderr, cluster.jobs) == (ExitCode.SPEC, True, {}), found.stderr


def test_a_job_that_is_no_trial_of_this_search_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(limit=5)
    assert search(cluster, tmp_path, monkeypatch).exit_code == ExitCode.ENVIRONMENT
    before, vars(cluster)["limit"] = dict(cluster.jobs), 100
    other = search(cluster, tmp_path, monkeypatch, "--vary", "models.actor.optimizer.learningRate=0.01,0.001")
    remedy = "is not that of the cluster's job; `kubectl delete rlhf grpo-t1`, or rename grpo"
    field = "grpo-t1: spec.models.actor.optimizer.learningRate"
    assert (other.exit_code, other.stderr) == (ExitCode.SPEC, f"error: {field}: {remedy}\n")
    del cluster.jobs["grpo-t1"]["metadata"]["labels"]
    foreign = search(cluster, tmp_path, monkeypatch)
    assert (foreign.exit_code, foreign.stderr) == (ExitCode.SPEC, f"error: grpo-t1: metadata.labels: {remedy}\n")
    assert cluster.jobs == before


def test_a_search_of_an_own_algorithm_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples" / "own")
    own = json.dumps({"name": "Custom", "entrypoint": "curious:Curious"})
    monkeypatch.setitem(globals(), "MANIFEST", MANIFEST.replace('{"name": "GRPO"}', own))
    cluster = Cluster(limit=5)
    assert search(cluster, tmp_path, monkeypatch).exit_code == ExitCode.ENVIRONMENT
    vars(cluster)["limit"] = 100
    again = search(cluster, tmp_path, monkeypatch)
    assert (again.exit_code, cluster.steps[5:]) == (0, [("grpo-t3", 90), ("grpo-t2", 90)]), again.stderr
