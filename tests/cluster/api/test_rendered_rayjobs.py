"""What the operator makes for an attempt is accepted by a real API server and turned into pods by the real KubeRay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlhf_api.job import Job
from rlhf_api.quantities import amount
from rlhf_operator import names
from rlhf_operator.actions import Manifest
from rlhf_operator.overlay import REQUIRED, TERMS
from rlhf_operator.snapshot import ObservedNode
from tests.cluster.client import Cluster
from tests.cluster.conftest import fresh_namespace
from tests.examples.test_every_example_is_right import EXAMPLES, jobs_of
from tests.operator.rendered import (
    A100,
    changed,
    groups,
    head,
    made,
    node,
    nodes,
    pod_of,
    variables,
)
from tests.operator.test_pools_keep_to_their_zones import LARGE, there, zoned

PATHS = {
    "PersistentVolumeClaim": "/api/v1/namespaces/{}/persistentvolumeclaims",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "RayJob": "/apis/ray.io/v1/namespaces/{}/rayjobs",
}
JOBS = "/apis/rlhf.hybridflow.io/v1alpha1/namespaces/{}/rlhfjobs"
STRICT = "?fieldValidation=Strict"
CPUS = nodes(1)
NODES = {"cpu": CPUS, "gpu": nodes(2, 8, A100)}
AT_ONCE = 4


def applied(server: Cluster, namespace: str, job: Job, there: Sequence[ObservedNode], **more: Any) -> Manifest:
    """The RayJob of a job's first attempt; it is in the cluster, and everything else that the attempt needs."""
    document = job.model_dump(mode="json", by_alias=True, exclude_unset=True)
    document["metadata"]["namespace"] = namespace
    uid = server.expect("POST", JOBS.format(namespace) + STRICT, document)["metadata"]["uid"]
    manifests = made(job, there, namespace=namespace, uid=uid, **more)
    for kind, manifest in manifests.items():
        server.expect("POST", PATHS[kind].format(namespace) + STRICT, manifest)
    return manifests["RayJob"]


def pods_of(server: Cluster, namespace: str, rayjob: Manifest) -> dict[str, list[dict[str, Any]]]:
    """The pods that KubeRay has made of a RayJob, all of them, by pool; the head's is named after its role."""
    job = rayjob["metadata"]["labels"][names.JOB_NAME]
    expected = 1 + sum(group["numOfHosts"] for group in groups(rayjob).values())
    path = f"/api/v1/namespaces/{namespace}/pods?labelSelector={names.JOB_NAME}={job}"
    log = server.folder / "log" / "kuberay-operator.log"

    def all_of_them() -> list[dict[str, Any]]:
        found = server.items(path)
        return found if len(found) == expected else []

    found: dict[str, list[dict[str, Any]]] = {}
    for pod in server.until(all_of_them, 60, f"{expected} pods of {job}; see {log}"):
        labels = pod["metadata"]["labels"]
        found.setdefault(labels.get(names.POOL, labels[names.ROLE]), []).append(pod)
    return found


def limits(pod: Mapping[str, Any]) -> dict[str, str]:
    """Of the container in which Ray runs."""
    found: dict[str, str] = pod["spec"]["containers"][0]["resources"]["limits"]
    return found


def mounts(pod: Mapping[str, Any]) -> dict[str, str]:
    """Folder -> volume, in the container in which Ray runs."""
    return {each["mountPath"]: each["name"] for each in pod["spec"]["containers"][0]["volumeMounts"]}


def restricted(server: Cluster, namespace: str) -> None:
    """No pod may ask for more than the restricted profile; the API server itself refuses it."""
    labels = {
        "pod-security.kubernetes.io/enforce": "restricted",
        "pod-security.kubernetes.io/enforce-version": "latest",
    }
    server.expect("PATCH", f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": labels}})


@pytest.fixture(scope="module")
def examples_there(rlhf_server: Cluster) -> Iterator[dict[tuple[str, str], tuple[str, list[Manifest]]]]:
    """(kind of nodes, example) -> namespace and RayJobs: all at once, for KubeRay works while this waits."""
    with ExitStack() as stack, ThreadPoolExecutor(AT_ONCE) as threads:
        applying = {}
        for kind, there in NODES.items():
            namespace = stack.enter_context(contextmanager(fresh_namespace)(rlhf_server))
            restricted(rlhf_server, namespace)
            for example in EXAMPLES:
                jobs = jobs_of(example)
                applying[kind, example.stem] = (
                    namespace,
                    [threads.submit(applied, rlhf_server, namespace, job, there) for job in jobs],
                )
        yield {key: (namespace, [each.result() for each in futures]) for key, (namespace, futures) in applying.items()}


@pytest.mark.parametrize("kind", NODES)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_examples_pods_obey_the_restricted_profile(
    rlhf_server: Cluster,
    examples_there: dict[tuple[str, str], tuple[str, list[Manifest]]],
    example: Path,
    kind: str,
) -> None:
    namespace, rayjobs = examples_there[kind, example.stem]
    for rayjob in rayjobs:
        found = pods_of(rlhf_server, namespace, rayjob)
        (controller,) = found.pop(names.CONTROLLER)
        assert [each["name"] for each in controller["spec"]["containers"]] == ["ray-head", "driver-log"]
        assert "nvidia.com/gpu" not in limits(controller)
        assert len(found) == len(groups(rayjob))
        for group in groups(rayjob).values():
            pool = group["template"]["metadata"]["labels"][names.POOL]
            assert len(found[pool]) == group["numOfHosts"]
            for pod in found[pool]:
                asked_is_there(pod, group)
                gpus = group["rayStartParams"]["num-gpus"] if kind == "gpu" else "0"
                assert limits(pod).get("nvidia.com/gpu", "0") == gpus, "0 of a merge"


def asked_is_there(pod: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    """A pod has what its template asks for, and KubeRay has not put another /dev/shm in its place."""
    asked = pod_of(group)
    assert variables(pod["spec"]["containers"][0]).items() >= variables(asked["containers"][0]).items()
    assert limits(pod) == asked["containers"][0]["resources"]["limits"]
    assert (
        mounts(pod).items()
        >= {each["mountPath"]: each["name"] for each in asked["containers"][0]["volumeMounts"]}.items()
    )
    volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
    assert [_comparable(volumes[each["name"]]) for each in asked["volumes"]] == list(map(_comparable, asked["volumes"]))
    in_memory = [each for each in volumes.values() if each.get("emptyDir", {}).get("medium") == "Memory"]
    assert [each["name"] for each in in_memory] == [mounts(pod)["/dev/shm"]]
    assert pod["spec"]["terminationGracePeriodSeconds"] == asked["terminationGracePeriodSeconds"]
    started = " ".join(pod["spec"]["containers"][0]["args"])
    for flag, value in group["rayStartParams"].items():
        assert f"--{flag}={value}" in started


def _comparable(volume: Mapping[str, Any]) -> tuple[object, ...]:
    """What a volume is, however its size is written."""
    empty = volume.get("emptyDir", {})
    size = amount(empty["sizeLimit"]) if "sizeLimit" in empty else None
    return (empty.get("medium"), size, volume.get("configMap", {}).get("name"), volume.get("persistentVolumeClaim"))


AS_GIVEN = ("schedulerName", "resourceClaims")
POOLS = [
    {"name": "head", "models": ["actor", "reference"], "nodes": 2, "slotsPerNode": 4},
    {"name": "7b", "models": ["critic", "reward"], "nodes": 1, "slotsPerNode": 2},
]
NEAR = {"topologyKey": "topology.kubernetes.io/rack", "labelSelector": {"matchLabels": {names.ROLE: names.WORKER}}}
TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {"team": "a"}, "annotations": {"example.com/b": "c"}},
    "spec": {
        "nodeSelector": {"zone": "a"},
        "tolerations": [{"key": "maintenance", "operator": "Exists"}],
        "affinity": {"podAffinity": {REQUIRED: [NEAR]}},
        "schedulerName": "mine",
        "hostNetwork": True,
        "volumes": [{"name": "data", "emptyDir": {}}],
        "initContainers": [{"name": "first", "image": "busybox"}],
        "resourceClaims": [{"name": "nic", "resourceClaimTemplateName": "nics"}],
        "containers": [
            {
                "name": names.WORKER_CONTAINER,
                "resources": {"limits": {"rdma/hca": "4", "ephemeral-storage": "9Gi"}, "claims": [{"name": "nic"}]},
                "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            }
        ],
    },
}
EVERYTHING = {
    "placement": {"mode": "Manual", "pools": POOLS},
    "checkpoint.storage": "pvc://shared/runs",
    "data.train.uri": "pvc://sets.v2/train.jsonl",
    "runtime": {
        "image": "example.com/trainer:1",
        "imagePullSecrets": ["registry"],
        "env": [
            {"name": "HF_TOKEN", "secret": {"name": "hub", "key": "token"}},
            {"name": "NCCL_DEBUG", "value": "INFO"},
        ],
        "sharedMemory": "3Gi",
        "worker": {"cpu": "4", "memory": "32Gi", "template": TEMPLATE},
    },
}  # fmt: skip


def test_what_a_job_says_of_its_pods_reaches_them(rlhf_server: Cluster, namespace: str) -> None:
    there = [node(f"n{place}", gpus=8, product=A100, labels={"zone": "a"}) for place in range(3)]
    rayjob = applied(rlhf_server, namespace, changed("helpful-ppo", EVERYTHING), there, avoided=("bad", "worse"))
    found = pods_of(rlhf_server, namespace, rayjob)
    for pod in (pod for pods in found.values() for pod in pods):
        (term,) = pod["spec"]["affinity"]["nodeAffinity"][REQUIRED][TERMS]
        assert [(each["operator"], *each["values"]) for each in term["matchFields"]] == [
            ("NotIn", "bad"),
            ("NotIn", "worse"),
        ]
    assert {pool: len(pods) for pool, pods in found.items()} == {names.CONTROLLER: 1, "head": 2, "7b": 1}
    assert {pod["metadata"]["labels"]["ray.io/group"] for pod in found["head"]} == {"pool-head"}
    assert [limits(pod)["nvidia.com/gpu"] for pod in (*found["head"], *found["7b"])] == ["4", "4", "2"]
    for pod in (*found["head"], *found["7b"]):
        spec = pod["spec"]
        assert (spec["hostNetwork"], spec["nodeSelector"], limits(pod)["rdma/hca"]) == (True, {"zone": "a"}, "4")
        given = TEMPLATE["spec"]
        assert {field: spec[field] for field in AS_GIVEN} == {field: given[field] for field in AS_GIVEN}
        assert pod["metadata"]["labels"]["team"] == "a"
        assert spec["containers"][0]["resources"]["claims"] == [{"name": "nic"}]
        assert spec["containers"][0]["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
        assert variables(spec["containers"][0])["NCCL_DEBUG"] == "INFO"
        assert "podAffinity" in spec["affinity"]
    output = {
        each["mountPath"]: each.get("subPath") for each in found["7b"][0]["spec"]["containers"][0]["volumeMounts"]
    }
    assert output["/rlhf/output"] == "runs/helpful-ppo"
    assert "/rlhf/claims/sets.v2" in output
    assert "hostNetwork" not in pod_of(head(rayjob))


def test_a_pool_over_two_zones_becomes_pods_of_both(rlhf_server: Cluster, namespace: str) -> None:
    rayjob = applied(rlhf_server, namespace, LARGE, there("abab"), settings=zoned())
    found = pods_of(rlhf_server, namespace, rayjob)["all"]
    zones: dict[str, set[str]] = {}
    for pod in found:
        terms = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        *_, zone = terms["nodeSelectorTerms"][0]["matchExpressions"]
        zones.setdefault(zone["values"][0], set()).add(pod["metadata"]["name"])
        asked_is_there(pod, groups(rayjob)[pod["metadata"]["labels"]["ray.io/group"]])
    assert {zone: len(pods) for zone, pods in zones.items()} == {"a": 2, "b": 2}


def test_the_cluster_of_an_attempt_keeps_its_head_for_one_life(rlhf_server: Cluster, namespace: str) -> None:
    (job, *_) = jobs_of(EXAMPLES[0])
    rayjob = applied(rlhf_server, namespace, job, CPUS)
    pods_of(rlhf_server, namespace, rayjob)
    (cluster,) = rlhf_server.items(f"/apis/ray.io/v1/namespaces/{namespace}/rayclusters")
    assert cluster["metadata"]["annotations"]["ray.io/disable-provisioned-head-restart"] == "true"
    live = rlhf_server.expect("GET", f"{PATHS['RayJob'].format(namespace)}/{rayjob['metadata']['name']}")
    assert live["status"]["jobId"] == rayjob["metadata"]["name"]


def test_kuberay_makes_a_token_that_goes_with_the_attempt(rlhf_server: Cluster, namespace: str) -> None:
    (job, *_) = jobs_of(EXAMPLES[0])
    pods = pods_of(rlhf_server, namespace, applied(rlhf_server, namespace, job, CPUS))
    (cluster,) = rlhf_server.items(f"/apis/ray.io/v1/namespaces/{namespace}/rayclusters")
    (secret,) = rlhf_server.items(f"/api/v1/namespaces/{namespace}/secrets")
    assert [each["uid"] for each in secret["metadata"]["ownerReferences"]] == [cluster["metadata"]["uid"]]
    token = {"secretKeyRef": {"name": cluster["metadata"]["name"], "key": "auth_token"}}
    for pod in (each for found in pods.values() for each in found):
        told = {each["name"]: each for each in pod["spec"]["containers"][0]["env"]}
        assert told["RAY_AUTH_MODE"]["value"] == "token"
        assert told["RAY_AUTH_TOKEN"]["valueFrom"] == token
