"""A chain of jobs whose first driver is killed, two operators, and jobs on GPUs that never start, seen by Prometheus.

`python -m tests.cluster.monitoring FOLDER` starts a cluster for it. It writes summary.json: which targets were up,
which queries of the dashboards and which rules gave data; and the dashboards as pictures.
"""

import copy
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tests.cluster import chart, golden_path
from tests.cluster.build import PODS_GROUPS, NotBuiltError, built, no_go
from tests.cluster.capabilities import pods_cannot_run
from tests.cluster.client import Cluster
from tests.cluster.golden_path import PPO, RM, SFT
from tests.cluster.launch import cluster
from tests.cluster.processes import FailedError
from tests.cluster.prometheus import Prometheus, no_prometheus, prometheus
from tests.cluster.settings import NODE_NET
from tests.helm.rendering import KUBERNETES

NAMESPACE = "research"
STEPS = {SFT: 40, RM: 20, PPO: 30}
GPU_NODE, PRICE = "made-up", 2.5
VALUES = {
    "replicaCount": 2,
    "cluster": {"nodeGroups": [{"matchLabels": {"made-up": "yes"}, "pricePerGpuHour": PRICE}]},
    "jobNetworkPolicy": {"prometheus": [{"ipBlock": {"cidr": NODE_NET}}]},
}
MONITORED = {
    "serviceMonitor": {"enabled": True, "interval": "2s"},
    "monitoring": {"alerts": {"enabled": True}, "dashboards": {"enabled": True}},
}
SECONDS = 1200
STEP, RATE = 2, "30s"
"""Of what is drawn, in seconds; and what Grafana would put for $__rate_interval."""
NOT_HERE = {
    "rlhf_mfu_ratio": "the peak of a CPU is not known",
    "rlhf_groups_with_signal_ratio": "only GRPO and others that compare groups have it",
    "rlhf_reward_part_mean": "only rewards with parts have it",
    "rlhf_rollout_idle_ratio": "only a rollout pool has it",
    "rlhf_trainer_idle_ratio": "only a rollout pool has it",
    "rlhf_queue_batches": "only a rollout pool has it",
    "rlhf_queue_tokens": "only a rollout pool has it",
    "rlhf_weight_sync": "only a rollout pool has it",
}
"""Metrics whose queries give nothing in this run, and why; the tests of rules give them made-up series."""


@dataclass(frozen=True)
class Observed:
    """What was seen from start to end."""

    running: Prometheus
    start: float
    end: float

    def course(self, query: str, **chosen: str) -> list[dict[str, Any]]:
        """The series of a panel's query, for the values that were chosen at the top of the dashboard."""
        span = f"{int(self.end - self.start)}s"
        known = {"__rate_interval": RATE, "__range": span, "namespace": NAMESPACE, "job": PPO, **chosen}
        for name, value in known.items():
            query = query.replace(f"${name}", value)
        return self.running.course(query, self.start, self.end, STEP)


def rendered(running: Cluster) -> list[dict[str, Any]]:
    """The chart's monitors, rules and dashboards."""
    values = running.folder / "monitored.json"
    values.write_text(json.dumps({**VALUES, **MONITORED}))
    command = ("template", chart.RELEASE, chart.CHART, "--namespace", chart.NAMESPACE, "--values", values)
    known = ("--kube-version", KUBERNETES)
    return [each for each in yaml.safe_load_all(running.helm(*command, *known)) if each]


def dashboards(manifests: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """As Grafana would read them."""
    for each in manifests:
        if each["metadata"].get("labels", {}).get("grafana_dashboard") == "1":
            yield from (json.loads(text) for text in each["data"].values())


def panels(dashboard: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those that draw something."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def jobs() -> dict[str, golden_path.Document]:
    """The chain, and two jobs that want all GPUs of the made-up node: one gets them and never starts, one waits."""
    made = golden_path.shortened(STEPS, every_steps=5, rows=8)
    made[PPO]["spec"]["evaluation"]["everySteps"] = 5
    for each in made.values():
        each["spec"]["resources"]["device"] = "CPU"
    for name in ("on-gpus", "in-line"):
        made[name] = copy.deepcopy(made[SFT])
        made[name]["metadata"]["name"] = name
        made[name]["spec"]["resources"] = {"device": "GPU", "nodes": 1, "slotsPerNode": 8}
    return made


def add_gpus(running: Cluster) -> None:
    """A node with eight GPUs and no kubelet: pods that are put there never start, and after a while it is lost."""
    labels = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "made-up": "yes"}
    running.add_node(GPU_NODE, {"nvidia.com/gpu": "8"}, labels)
    taint = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    running.expect("PATCH", f"/api/v1/nodes/{GPU_NODE}", {"spec": {"taints": [taint]}})


def observe(running: Cluster, folder: Path) -> dict[str, Any]:
    """Run the jobs, and ask Prometheus for all that the dashboards show; draw it."""
    manifests = rendered(running)
    chart.install(running, VALUES)
    running.offer_volumes(len(jobs()))
    running.make_namespace(NAMESPACE)
    with prometheus(manifests, running, folder / "prometheus") as seen:
        start = time.time()
        add_gpus(running)
        golden_path.apply(running, NAMESPACE, jobs())
        golden_path.until(running, NAMESPACE, SFT, lambda found: golden_path.step(found) > 5, SECONDS)
        golden_path.kill_driver(running, NAMESPACE, SFT)
        golden_path.until(running, NAMESPACE, PPO, lambda found: golden_path.step(found) > 3, SECONDS)
        targets = seen.targets()
        golden_path.succeeded(running, NAMESPACE, PPO, SECONDS)
        observed = Observed(seen, start, time.time())
        found = {
            "targets": targets,
            "jobs": seen.value("sum(rlhf_job_info)"),
            "series": seen.value('count(last_over_time({__name__=~"rlhf_.+"}[1h]))'),
            "rules": [rule for group in seen.get("rules")["groups"] for rule in told(group)],
            "queries": dict(answers(observed, manifests)),
        }
        draw_all(observed, manifests, folder)
    (folder / "summary.json").write_text(json.dumps(found, indent=2))
    return found


def told(group: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What Prometheus says of the rules of a group."""
    for rule in group["rules"]:
        yield {"name": rule["name"], "health": rule["health"], "state": rule["state"]}


def answers(observed: Observed, manifests: list[dict[str, Any]]) -> Iterator[tuple[str, int]]:
    """Each query of the dashboards, and the number of its series; one about a job for all jobs."""
    for dashboard in dashboards(manifests):
        for panel in panels(dashboard):
            for target in panel["targets"]:
                names = jobs() if "$job" in target["expr"] else (PPO,)
                yield target["expr"], sum(len(observed.course(target["expr"], job=name)) for name in names)


def fell_short(found: Mapping[str, Any]) -> list[str]:
    """What should have been seen and was not, in sentences."""
    up = [job for job, _, health in found["targets"] if health == "up"]
    short = [] if up.count(chart.RELEASE) == VALUES["replicaCount"] else ["not both replicas are scraped"]
    short += [] if f"{chart.NAMESPACE}/{chart.RELEASE}-jobs" in up else ["no job is scraped"]
    short += [] if found["jobs"] == len(jobs()) else [f"{found['jobs']} series of {len(jobs())} jobs"]
    short += [f"rule {rule['name']} is {rule['health']}" for rule in found["rules"] if rule["health"] != "ok"]
    return short + [
        f"no data: {query}"
        for query, series in found["queries"].items()
        if not series and not any(metric in query for metric in NOT_HERE)
    ]


def draw_all(observed: Observed, manifests: list[dict[str, Any]], folder: Path) -> None:
    """The dashboards as PNG files in the folder; that of the job from its first step on."""
    from tests.cluster.drawing import drawn

    (steps,) = observed.course(f'rlhf_step{{job="{PPO}"}}')
    trained = replace(observed, start=steps["values"][0][0])
    for dashboard in dashboards(manifests):
        shown = trained if "$job" in json.dumps(dashboard) else observed
        file = folder / f"{dashboard['uid']}.png"
        drawn(dashboard, shown.course, file, start=shown.start, end=shown.end)


def main() -> int:
    """Observe a cluster of its own; what stops it is one sentence on stderr."""
    folder = Path(sys.argv[1]).absolute()
    try:
        if reason := pods_cannot_run() or no_go() or no_prometheus():
            raise FailedError(reason)
        built(PODS_GROUPS)
        with cluster("pods") as running:
            found = observe(running, folder)
    except (FailedError, NotBuiltError, AssertionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for each in fell_short(found):
        print(each, file=sys.stderr)
    return bool(fell_short(found))


if __name__ == "__main__":
    sys.exit(main())
