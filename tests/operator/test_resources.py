"""What is made for an attempt: the claim, the job file, and a RayJob with a group a pool."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from rlhf_api.checks.pod_template import CONTAINERS
from rlhf_api.job import Job
from rlhf_api.quantities import amount
from rlhf_operator import names
from rlhf_operator.resources import workers
from rlhf_operator.settings import Pod, Settings
from tests.operator.rendered import (
    A100,
    SETTINGS,
    changed,
    example_jobs,
    groups,
    head,
    limits,
    made,
    node,
    nodes,
    pod_of,
    variables,
)

PPO = "helpful-ppo"
CPUS, GPUS = nodes(1), nodes(2, 8, A100)
POOLS = [
    {"name": "head", "models": ["actor", "reference"], "nodes": 2, "slotsPerNode": 4},
    {"name": "7b", "models": ["critic", "reward"], "nodes": 1, "slotsPerNode": 2},
]
TWO_POOLS = {"placement": {"mode": "Manual", "pools": POOLS}}


def rayjob(changes: Mapping[str, object] | None = None, there: Any = CPUS, **more: Any) -> Any:
    """That of the golden path's last job."""
    return made(changed(PPO, changes or {}), there, **more)["RayJob"]


def worker(changes: Mapping[str, object] | None = None, there: Any = CPUS, **more: Any) -> dict[str, Any]:
    """The pod of its first group."""
    return pod_of(next(iter(groups(rayjob(changes, there, **more)).values())))


def test_things_are_made_in_the_order_of_their_needs() -> None:
    found = made(example_jobs()[PPO], CPUS, attempt=3)
    shown = {kind: each["metadata"]["name"] for kind, each in found.items()}
    assert re.fullmatch("helpful-ppo-[0-9a-f]{10}", shown.pop("ConfigMap"))
    assert shown == {"PersistentVolumeClaim": "helpful-ppo-output", "RayJob": "helpful-ppo-a3"}
    assert list(found) == ["PersistentVolumeClaim", "ConfigMap", "RayJob"]


def test_everything_says_whose_it_is() -> None:
    job = changed(PPO, {"storage.retain": "Never"})
    for kind, each in made(job, CPUS, attempt=2, namespace="lab").items():
        metadata = each["metadata"]
        (owner,) = metadata["ownerReferences"]
        assert metadata["namespace"] == "lab"
        assert (owner["kind"], owner["name"], owner["uid"]) == ("RLHFJob", PPO, "uid-of-helpful-ppo")
        assert owner.get("controller", False) is (kind != "PersistentVolumeClaim")
        assert metadata["labels"][names.JOB_UID] == "uid-of-helpful-ppo"
        assert metadata["labels"].get(names.ATTEMPT) == ("2" if kind == "RayJob" else None)


def test_all_pods_have_the_job_file_of_their_mapping() -> None:
    """An attempt that was named may be mapped anew before its RayJob is made; its old ConfigMap is still there."""
    job = example_jobs()[PPO]
    first, again, other = made(job, CPUS), made(job, CPUS, attempt=2), made(job, GPUS)
    assert first["ConfigMap"] == again["ConfigMap"], "thousands of attempts need not leave thousands"
    assert first["ConfigMap"]["metadata"]["name"] != other["ConfigMap"]["metadata"]["name"]
    for found in (first, other):
        pods = [pod_of(each) for each in (head(found["RayJob"]), *groups(found["RayJob"]).values())]
        (named,) = {each["configMap"]["name"] for pod in pods for each in pod["volumes"] if each["name"] == "job"}
        assert named == found["ConfigMap"]["metadata"]["name"]


def test_a_rollout_pool_has_pods_of_its_own() -> None:
    pools = [
        {"name": "train", "models": ["actor", "critic", "reference", "reward"], "slotsPerNode": 2},
        {"name": "writers", "models": ["rollout"], "nodes": 2, "slotsPerNode": 2},
    ]
    job = changed(PPO, {"placement": {"mode": "Manual", "pools": pools}, "rollout.tensorParallel": 2})
    found = made(job, nodes(3, 2, A100))
    hosts = {name: group["replicas"] * group["numOfHosts"] for name, group in groups(found["RayJob"]).items()}
    assert hosts == {"train": 1, "writers": 2}
    (text,) = found["ConfigMap"]["data"].values()
    spec = next(yaml.safe_load_all(text))["spec"]
    assert [(pool["name"], pool["models"]) for pool in spec["placement"]["pools"]] == [
        (pool["name"], pool["models"]) for pool in pools
    ]
    assert spec["rollout"]["tensorParallel"] == 2
    assert spec["training"]["microBatchTokens"] > 64, "a pool that reads nothing must not make micro-batches small"


def test_the_mapper_gives_what_works_ahead_pods_of_its_own() -> None:
    job = changed(PPO, {"rollout.maxStaleness": 1, "resources.slotsPerNode": None})
    found = made(job, nodes(1, 4, A100))
    (text,) = found["ConfigMap"]["data"].values()
    spec = next(yaml.safe_load_all(text))["spec"]
    (writers,) = (pool for pool in spec["placement"]["pools"] if "rollout" in pool["models"])
    assert writers["models"] == ["rollout"]
    assert groups(found["RayJob"]).keys() == {pool["name"] for pool in spec["placement"]["pools"]}
    shards, stages = spec["rollout"]["tensorParallel"], spec["rollout"]["pipelineParallel"]
    assert writers["nodes"] * writers["slotsPerNode"] % (shards * stages) == 0
    job_in_pods = Job.parse(next(yaml.safe_load_all(text)))
    assert job_in_pods.generates_apart


@pytest.mark.parametrize("there", [CPUS, GPUS], ids=["CPUs", "GPUs"])
def test_a_job_that_generates_elsewhere_is_accepted_in_its_pods(there: Any) -> None:
    job = changed(PPO, {"rollout.endpoints": ["http://a:8000"]})
    (text,) = made(job, there)["ConfigMap"]["data"].values()
    in_pods = Job.parse(yaml.safe_load(text))
    assert in_pods.generates_elsewhere
    assert in_pods.spec.resources.device == ("CPU" if there is CPUS else "GPU")


def test_the_golden_path_is_one_head_and_one_host_with_two_slots() -> None:
    found = rayjob()
    assert found["spec"]["entrypoint"] == "rlhf run /rlhf/job/job.yaml --output /rlhf/output --metrics-port 8491"
    assert head(found)["rayStartParams"]["num-cpus"] == "0"
    assert head(found)["rayStartParams"]["no-monitor"] == "true"
    assert set(groups(found)) == {"all"}
    group = groups(found)["all"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"], group["numOfHosts"]) == (1, 1, 1, 1)
    assert group["rayStartParams"]["num-cpus"] == "2"
    assert group["rayStartParams"]["resources"] == """'{"rlhf-pool-all": 2}'"""
    assert not limits(pod_of(group)["containers"], "nvidia.com/gpu")


def test_an_attempt_is_submitted_once_and_ends_with_its_head() -> None:
    found = rayjob(attempt=4)
    spec = found["spec"]
    assert found["metadata"]["annotations"]["ray.io/disable-provisioned-head-restart"] == "true"
    assert (spec["submissionMode"], spec["jobId"], spec["backoffLimit"]) == ("HTTPMode", "helpful-ppo-a4", 0)
    assert (spec["shutdownAfterJobFinishes"], spec["ttlSecondsAfterFinished"]) == (True, 300)
    kept = rayjob({"runPolicy.keepPodsOnFailure": True})["spec"]
    assert (kept["shutdownAfterJobFinishes"], kept["ttlSecondsAfterFinished"]) == (True, 2**31 - 1)
    assert "suspend" not in spec
    for pod in (pod_of(head(found)), *map(pod_of, groups(found).values())):
        assert pod["restartPolicy"] == "Never"
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            told = variables(container)
            assert (told["RLHF_ATTEMPT"], told["RLHF_JOB_UID"]) == ("4", "uid-of-helpful-ppo")


def test_each_pool_is_a_group_with_its_gpus_and_name() -> None:
    found = groups(rayjob(TWO_POOLS, nodes(4, 8, A100)))
    shown = {
        name: (
            group["numOfHosts"],
            *limits(pod_of(group)["containers"], "nvidia.com/gpu"),
            group["rayStartParams"]["num-gpus"],
        )
        for name, group in found.items()
    }
    assert shown == {"pool-head": (2, "4", "4"), "pool-7b": (1, "2", "2")}
    labels = found["pool-7b"]["template"]["metadata"]["labels"]
    assert (labels[names.ROLE], labels[names.POOL]) == (names.WORKER, "7b")


def test_two_pools_never_share_a_group() -> None:
    assert workers.group_names(["head", "pool-head", "7b", "a"]) == [
        "pool-pool-head",
        "pool-head",
        "pool-7b",
        "a",
    ]


def test_rays_containers_come_first_the_log_beside_the_head() -> None:
    pod = pod_of(head(rayjob()))
    assert [each["name"] for each in pod["containers"]] == [names.HEAD_CONTAINER, names.LOG_CONTAINER]
    ray, log = pod["containers"]
    assert log["command"] == ["python", "-m", "rlhf_trainer.pods.sidecar", "/rlhf/output/helpful-ppo", "--port", "8490"]
    shared = {each["name"] for each in ray["volumeMounts"]} & {each["name"] for each in log["volumeMounts"]}
    assert shared == {"scratch", "claim-0"}
    (keeps,) = (each for each in log["volumeMounts"] if not each.get("readOnly"))
    assert keeps["mountPath"] == names.OUTPUT_FOLDER, "where it keeps the log"
    assert worker()["containers"][0]["name"] == names.WORKER_CONTAINER


def test_pods_save_before_they_end_within_their_grace_period() -> None:
    found = rayjob(settings=Settings(grace_period_seconds=90))
    for pod in (pod_of(head(found)), *map(pod_of, groups(found).values())):
        command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        keeps_logs = "timeout 15 python -m rlhf_trainer.pods.ray_logs /rlhf/output"
        assert command == ["sh", "-c", f"{keeps_logs} & timeout 75 rlhf save-now /rlhf/output; wait"]
        assert pod["terminationGracePeriodSeconds"] == 90


def test_pods_obey_the_restricted_profile() -> None:
    found = rayjob({"resources.device": "GPU"}, GPUS)
    for pod in (pod_of(head(found)), *map(pod_of, groups(found).values())):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 1000
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert "hostNetwork" not in pod
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
            assert variables(container)["HOME"] == "/tmp"
            assert variables(container)["VLLM_CACHE_ROOT"] == "/rlhf/output/.cache/vllm", "/tmp is gone with the pod"


RDMA = {
    "hostNetwork": True,
    "containers": [
        {
            "name": "ray-worker",
            "resources": {"limits": {"rdma/hca": 4, "ephemeral-storage": "9Gi"}},
            "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
            "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
        },
        {"name": "mine", "image": "x"},
    ],
}


def test_a_template_of_workers_is_laid_over_ours() -> None:
    found = rayjob({"resources.device": "GPU", "runtime.worker.template": {"spec": RDMA}}, GPUS)
    (group, *_) = map(pod_of, groups(found).values())
    ray, own = group["containers"]
    assert (ray["resources"]["limits"]["rdma/hca"], ray["resources"]["limits"]["ephemeral-storage"]) == (4, "9Gi")
    assert ray["resources"]["limits"]["nvidia.com/gpu"] == ray["resources"]["requests"]["nvidia.com/gpu"]
    assert ray["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert (variables(ray)["NCCL_DEBUG"], variables(ray)["HOME"], own) == (
        "INFO",
        "/tmp",
        {"name": "mine", "image": "x"},
    )
    assert (group["hostNetwork"], group["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert "NCCL_SOCKET_IFNAME" not in variables(ray), "it has another name on the node"
    pod = pod_of(head(found))
    assert "hostNetwork" not in pod
    assert pod["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_job_s_template_comes_before_the_installation_s() -> None:
    ours: dict[str, Any] = {"metadata": {"labels": {"team": "a", "cost": "b"}}, "spec": {"priorityClassName": "low"}}
    settings = Settings(controller=Pod(cpu="4", memory="16Gi", template=ours))
    own = {"metadata": {"labels": {"team": "c"}}, "spec": {"runtimeClassName": "gvisor"}}
    template = head(rayjob({"runtime.controller.template": own}, settings=settings))["template"]
    assert template["metadata"]["labels"].items() >= {"team": "c", "cost": "b", names.ROLE: names.CONTROLLER}.items()
    assert (template["spec"]["priorityClassName"], template["spec"]["runtimeClassName"]) == ("low", "gvisor")
    assert template["spec"]["restartPolicy"] == "Never"


def test_the_containers_are_those_that_templates_may_name() -> None:
    pods = {"controller": pod_of(head(rayjob())), "worker": worker()}
    assert {role: tuple(each["name"] for each in pod["containers"]) for role, pod in pods.items()} == CONTAINERS


def test_variables_of_nccl_are_for_gpus() -> None:
    on_gpus = variables(worker({"resources.device": "GPU"}, GPUS)["containers"][0])
    assert (on_gpus["NCCL_SOCKET_IFNAME"], on_gpus["NCCL_DEBUG"]) == ("eth0", "WARN")
    assert "NCCL_CUMEM_ENABLE" not in on_gpus
    assert "PYTORCH_CUDA_ALLOC_CONF" not in on_gpus
    assert not [name for name in variables(worker()["containers"][0]) if "NCCL" in name]


def test_the_users_variables_come_first_in_all_containers() -> None:
    env = [
        {"name": "NCCL_DEBUG", "value": "INFO"},
        {"name": "HF_TOKEN", "secret": {"name": "hub", "key": "token"}},
    ]
    found = rayjob({"runtime.env": env, "resources.device": "GPU"}, GPUS)
    containers = [each for pod in (head(found), *groups(found).values()) for each in pod_of(pod)["containers"]]
    assert len(containers) >= 3
    for container in containers:
        assert variables(container)["NCCL_DEBUG"] == "INFO"
        assert len({each["name"] for each in container["env"]}) == len(container["env"])
        secret = next(each for each in container["env"] if each["name"] == "HF_TOKEN")
        assert secret["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}


def test_sizes_come_from_the_job_or_grow_with_the_slots() -> None:
    settings = Settings(worker=SETTINGS.worker.model_copy(update={"cpu": "1500m", "memory": "3Gi"}))
    requests = worker(settings=settings)["containers"][0]["resources"]
    assert requests["limits"] == requests["requests"] == {"cpu": "3000m", "memory": "6Gi"}
    own = {"runtime.worker": {"cpu": "5", "memory": "7Gi"}, "runtime.controller": {"cpu": "2"}}
    assert worker(own)["containers"][0]["resources"]["limits"] == {"cpu": "5", "memory": "7Gi"}
    assert pod_of(head(rayjob(own)))["containers"][0]["resources"]["limits"] == {"cpu": "2", "memory": "16Gi"}


@pytest.mark.parametrize(("cpu", "threads"), [(None, "8"), ("5", "2"), ("1500m", "1")])
def test_slots_of_a_pod_share_cores_unless_the_user_says(cpu: str | None, threads: str) -> None:
    changes: dict[str, object] = {"runtime.worker": {"cpu": cpu}}
    (container,) = worker(changes)["containers"]
    assert variables(container)["OMP_NUM_THREADS"] == threads
    assert variables(container)["RAY_worker_niceness"] == "0"
    own = [{"name": "OMP_NUM_THREADS", "value": "3"}, {"name": "RAY_worker_niceness", "value": "5"}]
    (container,) = worker({**changes, "runtime.env": own})["containers"]
    assert variables(container)["OMP_NUM_THREADS"] == "3"
    assert variables(container)["RAY_worker_niceness"] == "5"


def test_a_pod_told_to_end_does_not_wait_for_used_slots() -> None:
    """By Ray's own reading of the variables: it waits 30 seconds by default."""
    asked = "from ray._private.ray_constants import RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S as seconds; print(seconds)"
    for pod in (pod_of(head(rayjob())), worker()):
        given = {**os.environ, **variables(pod["containers"][0])}
        said = subprocess.run([sys.executable, "-c", asked], env=given, capture_output=True, text=True, check=True)
        assert float(said.stdout) == 0


@pytest.mark.parametrize(
    ("asked", "memory", "expected"), [(None, "64Gi", "16384Mi"), ("8Gi", "64Gi", "8192Mi"), ("64Gi", "8Gi", "4096Mi")]
)
def test_shared_memory_fits_the_pod_and_the_object_store_it(asked: str | None, memory: str, expected: str) -> None:
    found = groups(rayjob({"runtime.sharedMemory": asked, "runtime.worker": {"memory": memory}}))["all"]
    volume = next(each for each in pod_of(found)["volumes"] if each["name"] == "shared-memory")
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": expected}
    mounted = {each["name"]: each["mountPath"] for each in pod_of(found)["containers"][0]["volumeMounts"]}
    assert mounted["shared-memory"] == "/dev/shm"
    assert int(found["rayStartParams"]["object-store-memory"]) < amount(expected)


ZONE = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
WHERE = {
    "nodeSelector": {"zone": "a"},
    "tolerations": [{"key": "maintenance", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [ZONE]}}},
}


def test_workers_go_where_the_job_says() -> None:
    changes: dict[str, object] = {
        "resources.device": "GPU",
        "runtime.worker.template": {"spec": WHERE},
        "runtime.serviceAccountName": "trainer",
        "runtime.imagePullSecrets": ["registry"],
        "runtime.image": "example.com/own:1",
    }
    found = rayjob(changes, [node("n", gpus=8, product=A100, labels={"zone": "a"})])
    pod, controller = pod_of(next(iter(groups(found).values()))), pod_of(head(found))
    assert pod["nodeSelector"] == {"zone": "a"}
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "maintenance", "operator": "Exists"},
    ]
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [each["key"] for each in term["matchExpressions"]] == ["nvidia.com/gpu.product", "zone"], "both hold"
    assert not {"nodeSelector", "tolerations", "affinity"} & controller.keys(), "they are for workers"
    for each in (pod, controller):
        assert (each["serviceAccountName"], each["imagePullSecrets"]) == ("trainer", [{"name": "registry"}])
        assert {container["image"] for container in each["containers"]} == {"example.com/own:1"}


def test_a_pool_goes_to_the_type_of_gpu_that_it_was_mapped_to() -> None:
    there = (*nodes(2, 8, A100, "a"), *nodes(2, 8, "NVIDIA-H100-80GB-HBM3", "h"))
    found = made(changed(PPO, {"resources.nodes": 2, "resources.slotsPerNode": None}), there)["RayJob"]
    for group in groups(found).values():
        required = pod_of(group)["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        (term,) = required["nodeSelectorTerms"]
        assert term["matchExpressions"] == [
            {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-H100-80GB-HBM3"]}
        ]


def test_labels_of_kueue_go_on_to_the_rayjob_only() -> None:
    labels = {names.QUEUE: "lab", names.QUEUE_PRIORITY: "high"}
    found = made(example_jobs()[PPO], CPUS, labels=labels)
    assert found["RayJob"]["metadata"]["labels"].items() >= labels.items()
    assert names.QUEUE not in found["ConfigMap"]["metadata"]["labels"]


def test_a_users_labels_reach_rayjob_and_pods_but_not_a_tools() -> None:
    tools = dict.fromkeys(
        (
            *("argocd.argoproj.io/instance", "helm.sh/chart", "app.kubernetes.io/instance"),
            *("kustomize.toolkit.fluxcd.io/name", "helm.toolkit.fluxcd.io/name", "ray.io/cluster"),
        ),
        "theirs",
    )
    labels = {"team": "x", "example.com/cost-centre": "7", names.MANAGED_BY: "Helm", **tools}
    found = made(example_jobs()[PPO], CPUS, labels=labels)
    pods = [group["template"] for group in (head(found["RayJob"]), *groups(found["RayJob"]).values())]
    for each in (found["RayJob"], *pods):
        got = each["metadata"]["labels"]
        assert got.items() >= {"team": "x", "example.com/cost-centre": "7", names.MANAGED_BY: names.OPERATOR}.items()
        assert not got.keys() & tools.keys()


def test_the_claim_is_what_the_installation_says() -> None:
    storage = SETTINGS.storage.model_copy(update={"size": "9Gi", "storage_class_name": "fast"})
    claim = made(example_jobs()[PPO], CPUS, Settings(storage=storage))["PersistentVolumeClaim"]
    assert claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "9Gi"}},
    }
    assert "storageClassName" not in made(example_jobs()[PPO], CPUS)["PersistentVolumeClaim"]["spec"]
