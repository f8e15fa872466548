"""`make cluster-demo`: example 01 from `kubectl apply` to a trained model, on a Kubernetes that is started for it."""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from typing import Any

from tests.cluster import chart, golden_path
from tests.cluster.build import PODS_GROUPS, NotBuiltError, built, no_go
from tests.cluster.capabilities import pods_cannot_run
from tests.cluster.client import Cluster
from tests.cluster.golden_path import EXAMPLE, NAMES, PPO
from tests.cluster.launch import cluster
from tests.cluster.processes import FailedError
from tests.cluster.settings import ROOT

NAMESPACE = "demo"
VOLUMES = 10
"""For the jobs of the example, and for others on a cluster that stays."""
SECONDS = 3600
"""That a job may take, on a machine that has other things to do."""
SAVED_EVERY, KILLED_AFTER = 5, 5
"""Steps of PPO, where the driver is to be killed: without a checkpoint the next attempt would begin anew."""
TITLE, AGE = "NAME", -1
"""Of `kubectl get`: the first word of the title, and the column that changes all the time."""


def main() -> int:
    """Run it; what stops it is one sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.demo", description=__doc__)
    parser.add_argument("--kill-driver", action="store_true", help=f"SIGKILL for the driver of {PPO}, once")
    parser.add_argument("--keep", action="store_true", help="leave the cluster there at the end, until Ctrl-C")
    parser.add_argument("--output", type=Path, required=True, help="folder for summary.json and the model of PPO")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        run(arguments.output, kill_driver=arguments.kill_driver, kept=arguments.keep)
    except (FailedError, NotBuiltError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the cluster is gone", file=sys.stderr)
        return 130
    return 0


def run(output: Path, *, kill_driver: bool, kept: bool) -> None:
    """Start a cluster, install the chart, apply the example and wait; FailedError. kept: stay until Ctrl-C."""
    if reason := pods_cannot_run() or no_go():
        raise FailedError(reason)
    built(PODS_GROUPS)
    began = time.monotonic()
    seconds = {}
    print("starting Kubernetes, with KubeRay", flush=True)
    with cluster("pods") as running:
        seconds["cluster"] = time.monotonic() - began
        print(f"{seconds['cluster']:.0f} s; installing helm/rlhf-operator", flush=True)
        chart.install(running)
        seconds["chart"] = time.monotonic() - began - seconds["cluster"]
        running.offer_volumes(VOLUMES)
        running.make_namespace(NAMESPACE)
        running.kubectl("config", "set-context", "--current", "--namespace", NAMESPACE)
        print(f"look at it from another terminal:\n\n    {terminal(running)}\n")
        change = f", with a checkpoint every {SAVED_EVERY} steps of {PPO}" if kill_driver else ""
        print(f"{seconds['chart']:.0f} s; kubectl apply -f {EXAMPLE.relative_to(ROOT)}{change}", flush=True)
        measured = train(running, kill_driver=kill_driver)
        measured["seconds"] = {**seconds, **measured["seconds"], "all": time.monotonic() - began}
        keep(running, measured, output)
        print()
        for name, each in measured["seconds"].items():
            print(f"{name:<12} {each:6.0f} s")
        for name, each in measured["jobs"].items():
            print(
                "{:<12} started in {:.0f} s of pods and Ray, {:.0f} s of the trainer".format(
                    name, *each["start"].values()
                )
            )
        print(f"the model of {PPO}, {measured['model']}, was copied to {output / 'model'}")
        if kept:
            print("the cluster stays until Ctrl-C", flush=True)
            signal.pause()


def terminal(running: Cluster) -> str:
    """What gives a shell this cluster, in the demo's namespace, with kubectl, helm and `kubectl rlhf`."""
    folders = f"{running.programs}:{Path(sys.executable).parent}"
    return f'export KUBECONFIG={running.environment()["KUBECONFIG"]} PATH="{folders}:$PATH"'


def train(running: Cluster, *, kill_driver: bool) -> dict[str, Any]:
    """The jobs from apply to their end."""
    if kill_driver:
        jobs = golden_path.example()
        jobs[PPO]["spec"]["checkpoint"] = {"everySteps": SAVED_EVERY}
        golden_path.apply(running, NAMESPACE, jobs)
    else:
        running.kubectl("apply", "-n", NAMESPACE, "-f", EXAMPLE)
    began = time.monotonic()
    seconds: dict[str, float] = {}
    ended: dict[str, golden_path.Document] = {}
    starts: dict[str, dict[str, float]] = {}
    with shown(running):
        for name in NAMES:
            begun = golden_path.until(running, NAMESPACE, name, golden_path.step, SECONDS)
            starts[name] = start_of(running, name, begun)
            if kill_driver and name == PPO:
                disturb(running)
            ended[name] = golden_path.succeeded(running, NAMESPACE, name, SECONDS)
            seconds[name] = time.monotonic() - began - sum(seconds.values())
    return {
        "seconds": seconds,
        "jobs": {name: figures(each) | {"start": starts[name]} for name, each in ended.items()},
        "model": ended[PPO]["output"]["uri"],
    }


def start_of(running: Cluster, name: str, begun: golden_path.Document) -> dict[str, float]:
    """Seconds of a job's start: until its trainer has begun (pods and Ray), and from there until a step is seen.

    begun: status of the job with a step. A cluster that stays for the next job could save the first part only.
    """
    own = running.folder_of_claim(NAMESPACE, f"{name}-output") / name / "status.json"
    trainer = since(json.loads(own.read_text())["startTime"])
    attempt = since(begun["attempts"][-1]["startTime"])
    return {"pods_and_ray": attempt - trainer, "trainer": trainer}


def since(timestamp: str) -> float:
    """Seconds that have passed since a time of a status."""
    return (datetime.now(UTC) - datetime.fromisoformat(timestamp)).total_seconds()


def keep(running: Cluster, measured: dict[str, Any], output: Path) -> None:
    """Copy the trained model out of its claim, which goes with the cluster, and write summary.json beside it."""
    claim, _, path = measured["model"].removeprefix("pvc://").partition("/")
    shutil.rmtree(output / "model", ignore_errors=True)
    shutil.copytree(running.folder_of_claim(NAMESPACE, claim) / path, output / "model")
    (output / "summary.json").write_text(json.dumps(measured, indent=2))


def disturb(running: Cluster) -> None:
    """Kill the driver of PPO as soon as it has steps behind it that are not saved."""

    def is_past_checkpoint(found: golden_path.Document) -> bool:
        return golden_path.step(found) > golden_path.saved_step(found) >= KILLED_AFTER

    golden_path.until(running, NAMESPACE, PPO, is_past_checkpoint, SECONDS)
    golden_path.kill_driver(running, NAMESPACE, PPO)
    print(f"SIGKILL for the driver of {PPO}", flush=True)


def figures(found: golden_path.Document) -> dict[str, Any]:
    """What a job says of itself at its end."""
    metrics = {each["name"]: float(each["value"]) for each in found["metrics"]}
    attempts = [
        {name: each[name] for name in ("attempt", "outcome", "reason", "firstStep", "lastStep") if name in each}
        for each in found["attempts"]
    ]
    reward = {"reward": metrics["reward/mean"]} if "reward/mean" in metrics else {}
    return {"attempts": attempts, "steps": golden_path.step(found), **reward}


@contextmanager
def shown(running: Cluster) -> Iterator[None]:
    """`kubectl get rlhf --watch` on stdout meanwhile, without the lines in which nothing but the age is new."""
    ended = Event()
    teller = Thread(target=_tell_news, args=(running, ended), daemon=True)
    teller.start()
    try:
        yield
        time.sleep(1)  # for the last line
    finally:
        ended.set()
        teller.join()


def _tell_news(running: Cluster, ended: Event) -> None:
    command = [str(running.programs / "kubectl"), "get", "rlhf", "--namespace", NAMESPACE, "--watch"]
    last: dict[str, list[str]] = {}
    while not ended.is_set():  # on a machine that is too busy, kubectl loses its connection
        watch = subprocess.Popen(
            command, env=running.environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        Thread(target=_end_with, args=(watch, ended), daemon=True).start()
        for line in watch.stdout or ():
            words = line.split()
            if words[:1] and words[0] in (TITLE, *NAMES) and last.get(words[0]) != words[:AGE]:
                last[words[0]] = words[:AGE]
                print(line, end="", flush=True)
        watch.wait()
        ended.wait(1)


def _end_with(watch: "subprocess.Popen[str]", ended: Event) -> None:
    ended.wait()
    watch.terminate()


if __name__ == "__main__":
    sys.exit(main())
