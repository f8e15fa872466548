"""Pods of an elastic pool come and go one by one, and may be evicted; other pods may not."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_api import kubectl_yaml
from rlhf_api.job import Job
from rlhf_operator import names
from rlhf_operator.resources.attempt import disruption_budget
from rlhf_operator.snapshot import ObservedRayJob
from tests.operator.elastic_cluster import POOL, elastic
from tests.operator.rendered import THEN, groups, made, mapped, node, snapshot

DO_NOT_DISRUPT, SAFE_TO_EVICT = "karpenter.sh/do-not-disrupt", "cluster-autoscaler.kubernetes.io/safe-to-evict"
NODES = tuple(node(f"n{place}", labels={"for": "workers"}) for place in range(3))


def job() -> Job:
    spec = elastic(2, 4)
    del spec["runtime"]["controller"]["template"]
    document = {"apiVersion": "rlhf.hybridflow.io/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "e"}, "spec": spec}
    return Job.parse(document)


def of_pool(name: str) -> dict[str, Any]:
    return groups(made(job(), NODES)["RayJob"])[name]


def annotated(name: str) -> dict[str, str]:
    found: dict[str, str] = of_pool(name)["template"]["metadata"]["annotations"]
    return found


def script(name: str) -> str:
    """Command that a pod runs before it ends."""
    container = of_pool(name)["template"]["spec"]["containers"][0]
    return str(container["lifecycle"]["preStop"]["exec"]["command"][-1])


def test_kuberay_may_make_and_end_its_pods_one_by_one() -> None:
    sizes = ("numOfHosts", "replicas", "minReplicas", "maxReplicas")
    assert [of_pool(POOL)[each] for each in sizes] == [1, 2, 2, 4]
    assert [of_pool("train")[each] for each in sizes] == [1, 1, 1, 1]


def test_autoscalers_may_take_its_nodes_and_no_others() -> None:
    assert annotated(POOL) == {SAFE_TO_EVICT: "true"}
    assert annotated("train") == {SAFE_TO_EVICT: "false", DO_NOT_DISRUPT: "true"}


@pytest.mark.parametrize(
    ("name", "when", "saves"), [("train", "never", True), (POOL, "never", False), (POOL, "later", True)]
)
def test_a_pod_saves_before_its_end_if_others_save(tmp_path: Path, name: str, when: str, saves: bool) -> None:
    """A pod of the pool that leaves alone saves nothing; at the end of all it waits, as long as the others do."""
    for program, does in {"timeout": 'shift; "$@"', "python": "", "rlhf": f'echo "$@" >> {tmp_path}/said'}.items():
        (tmp_path / program).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / program).chmod(0o755)
    waits = f"[ -e {tmp_path}/later ] && touch {tmp_path}/save-now; touch {tmp_path}/{when}"
    (tmp_path / "sleep").write_text(f"#!/bin/sh\n{waits}\n")
    (tmp_path / "sleep").chmod(0o755)
    command = script(name).replace(names.OUTPUT_FOLDER, str(tmp_path))
    subprocess.run(["sh", "-c", command], env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=True)
    assert (tmp_path / "said").exists() == saves


def test_the_trainer_is_told_both_bounds() -> None:
    (text,) = made(job(), NODES)["ConfigMap"]["data"].values()
    (document,) = kubectl_yaml.read(text, "")
    pools = {each["name"]: (each["nodes"], each.get("maxNodes")) for each in document["spec"]["placement"]["pools"]}
    assert pools == {"train": (1, None), POOL: (2, 4)}


def test_a_drain_waits_for_the_other_pods_alone() -> None:
    seen = snapshot(job(), NODES).job
    seen = replace(seen, status=seen.status.model_copy(update={"mapping": mapped(job(), NODES)}))
    rayjob = ObservedRayJob(name="e-a1", uid="u", attempt=1, owned=True, created=THEN, deleting=False)
    spec = disruption_budget(seen, rayjob, 2)["spec"]
    assert spec["selector"]["matchExpressions"] == [{"key": names.POOL, "operator": "NotIn", "values": [POOL]}]
    assert spec["minAvailable"] == 2
