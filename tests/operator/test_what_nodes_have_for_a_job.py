"""The nodes of a cluster as the mapper is told of them: free GPUs, slices, networks, host memory, GPUs of one's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rlhf_api.job import Job
from rlhf_mapper.hardware import Cluster, NodeGroup
from rlhf_operator.placement.capacity import Capacity, capacity_for, cluster_of, machine_choices
from rlhf_operator.placement.map_job import MappingResult, map_job
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import ObservedNode
from tests.each import each_case
from tests.operator.rendered import A100, SETTINGS, changed, example_jobs, groups, made, mapped, node, pod_of, snapshot

PPO = "helpful-ppo"
GPU, SLICE = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb"
ALL_OF_A_NODE = {"resources.slotsPerNode": None}
OWN = {
    "name": "mine-96g",
    "product": "NVIDIA-X9000",
    "memoryGB": 96,
    "bf16Tflops": 148,
    "fp32Tflops": 44,
    "memoryGBps": 4000,
    "linkGBps": 900,
    "hostGBps": 64,
}
PRODUCT = {"key": "nvidia.com/gpu.product", "operator": "In"}
Taken = Mapping[str, Mapping[str, int]]


def settings(**document: Any) -> Settings:
    """Those of an installation, as the chart writes them."""
    return Settings.model_validate(document, by_alias=True, by_name=False)


def seen(job: Job, there: Sequence[ObservedNode], taken: Taken | None = None) -> Capacity:
    """What the nodes have for a job; taken: by node, what pods of others request there."""
    return capacity_for(job, dataclasses.replace(snapshot(job, there), taken=taken or {}), SETTINGS)


def answer(job: Job, there: Sequence[ObservedNode], taken: Taken) -> MappingResult:
    return map_job(job, dataclasses.replace(snapshot(job, there), taken=taken), SETTINGS)


def nodes_of(there: Sequence[ObservedNode], given: Settings = SETTINGS) -> tuple[NodeGroup, ...]:
    """What the mapper is told of nodes all of whose GPUs a job may have."""
    job = changed(PPO, ALL_OF_A_NODE)
    capacity = capacity_for(job, snapshot(job, there), given)
    cluster = cluster_of(capacity.machines, capacity.device, job, given)
    assert cluster
    return cluster.groups


def expressions(manifests: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the workers of an attempt ask of the labels of their nodes."""
    found: list[list[dict[str, Any]]] = []
    for worker in groups(manifests["RayJob"]).values():
        required = pod_of(worker)["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        (term,) = required["nodeSelectorTerms"]
        found.append(term["matchExpressions"])
    assert all(each == found[0] for each in found)
    return found[0]


@each_case(
    ("labels", "said", "gigabits"),
    [
        ({}, [], 1600),
        ({"karpenter.k8s.aws/instance-network-bandwidth": "400000"}, [], 400),
        ({"eks.amazonaws.com/instance-network-bandwidth": "400000"}, [], 400),
        ({"karpenter.k8s.aws/instance-network-bandwidth": "fast"}, [], 1600),
        ({"pool": "a"}, [{"matchLabels": {"pool": "a"}, "interNodeGbps": 100}], 100),
        ({"pool": "b"}, [{"matchLabels": {"pool": "a"}, "interNodeGbps": 100}], 1600),
        ({"pool": "b"}, [{"matchLabels": {"pool": "b"}}, {"matchLabels": {}, "interNodeGbps": 100}], 1600),
        (
            {"pool": "a", "karpenter.k8s.aws/instance-network-bandwidth": "400000"},
            [{"matchLabels": {}, "interNodeGbps": 100}],
            100,
        ),
    ],
    ids=["GPU type", "Karpenter", "EKS", "no number", "settings", "of others", "the first match", "settings first"],
)
def test_labels_settings_or_gpu_type_give_a_nodes_network(
    labels: dict[str, str], said: list[dict[str, Any]], gigabits: float
) -> None:
    there = [node(name, gpus=8, product=A100, labels=labels) for name in ("a", "b")]
    (found,) = nodes_of(there, settings(nodeGroups=said))
    assert found.network == pytest.approx(gigabits * 1e9 / 8)


def test_a_part_of_a_nodes_gpus_has_its_part_of_the_network() -> None:
    labels = {"karpenter.k8s.aws/instance-network-bandwidth": "400000"}
    job = changed(PPO, {"resources.slotsPerNode": 2})
    without = node("o", labels=labels)
    (group,) = seen(job, [node("n", gpus=8, product=A100, labels=labels), without]).machines
    assert (group.count, group.slots) == (4, 2)
    assert group.network == pytest.approx(400e9 / 8 / 8)


def test_links_are_what_the_settings_say() -> None:
    (found,) = nodes_of(
        [node("n", gpus=8, product=A100)], settings(nodeGroups=[{"matchLabels": {}, "intraNodeGBps": 400}])
    )
    assert found.link == 200e9


def test_nodes_with_other_networks_are_other_groups() -> None:
    labels = {"karpenter.k8s.aws/instance-network-bandwidth": "400000"}
    there = [node("a", gpus=8, product=A100), node("b", gpus=8, product=A100, labels=labels)]
    assert sorted(group.network for group in nodes_of(there)) == [50e9, 200e9]


def test_a_product_not_in_the_table_is_known_from_settings() -> None:
    there, given = [node("n", gpus=8, product="NVIDIA-X9000")], settings(gpus=[OWN])
    (found,) = nodes_of(there, given)
    assert (found.gpu.name, found.gpu.memory, found.gpu.bf16) == ("mine-96g", 96e9, 148e12)
    mapping = mapped(changed(PPO, ALL_OF_A_NODE), there, given)
    assert {pool.gpu for pool in mapping.pools} == {"mine-96g"}
    assert mapping.predicted_step_seconds
    made_of = made(changed(PPO, ALL_OF_A_NODE), there, given)
    assert expressions(made_of) == [{**PRODUCT, "values": ["NVIDIA-X9000"]}]


@pytest.mark.parametrize(
    ("label", "product", "gpu"),
    [
        ("amd.com/gpu.product-name", "AMD_Instinct_MI300X_OAM", "mi300x-192g"),
        ("cloud.google.com/gke-accelerator", "nvidia-h100-80gb", "h100-80g"),
        ("karpenter.k8s.aws/instance-gpu-name", "l40s", "l40s-48g"),
    ],
)
def test_the_labels_of_others_say_what_gpu_a_node_has(label: str, product: str, gpu: str) -> None:
    (found,) = nodes_of([node("n", gpus=8, labels={label: product})])
    assert found.gpu.name == gpu
    (first,) = nodes_of([node("n", gpus=8, product=A100, labels={label: product})])
    assert first.gpu.name == "a100-80g"


def test_figures_of_the_settings_come_before_the_tables() -> None:
    (found,) = nodes_of([node("n", gpus=8, product=A100)], settings(gpus=[{**OWN, "product": A100}]))
    assert found.gpu.name == "mine-96g"


def test_gpus_that_pods_of_others_hold_do_not_count() -> None:
    job, there = changed(PPO, ALL_OF_A_NODE), [node("n", gpus=8, product=A100)]
    (group,) = seen(job, there, {"n": {GPU: 6}, "other": {GPU: 8}}).machines
    assert (group.count, group.slots) == (1, 2)
    found = answer(job, there, {"n": {GPU: 6}})
    assert found.mapping
    assert found.mapping.slots <= 2
    full = answer(example_jobs()[PPO], there, {"n": {GPU: 7}})
    assert full.reason == "NoFeasiblePlacement"
    assert f"there is 1 node with 1 {A100} (pods of others hold 7 GPUs), none with 2" in full.message


@pytest.mark.parametrize("asked", [ALL_OF_A_NODE, {"resources.slotsPerNode": 1}], ids=["all", "one"])
def test_a_node_has_no_more_gpus_than_a_job_may_ask_for(asked: dict[str, Any]) -> None:
    capacity = seen(changed(PPO, asked), [node("n0", gpus=2**62, product=A100)])
    assert sum(group.count * group.slots for group in capacity.machines) <= 1024


def test_a_queued_job_is_mapped_onto_gpus_others_still_hold() -> None:
    """Else no RayJob of it would be made, and Kueue could not have it wait for its turn."""
    job, there = changed(PPO, ALL_OF_A_NODE), [node("n", gpus=8, product=A100)]
    labelled = dataclasses.replace(
        snapshot(job, there, labels={"kueue.x-k8s.io/queue-name": "q"}), taken={"n": {GPU: 8, "memory": 2**39}}
    )
    assert not capacity_for(job, labelled, SETTINGS).machines, "a label alone holds nobody back"
    queued = dataclasses.replace(labelled, capabilities=frozenset({"kuberay", "kueue"}))
    (group,) = capacity_for(job, queued, SETTINGS).machines
    assert (group.count, group.slots) == (1, 8)


def test_of_many_node_kinds_the_largest_are_mapped() -> None:
    small = {"runtime.worker": {"memory": "1Gi"}}
    job = changed(PPO, {**ALL_OF_A_NODE, **small, "resources.nodes": 2, "resources.maxNodes": 16})
    there = [node(f"n{gpus}", gpus=gpus, product=A100) for gpus in range(1, 17)]
    *_, together = machine_choices(seen(job, there), job)
    assert [each.slots for each in together] == [16, 15, 14, 13, 12, 11, 10, 9]


def test_nodes_with_more_free_gpus_are_used_as_those_with_fewer() -> None:
    job = changed(PPO, {**ALL_OF_A_NODE, "resources.nodes": 2})
    there = [node(name, gpus=8, product=A100) for name in ("a", "b")]
    offers = machine_choices(seen(job, there, {"a": {GPU: 4}}), job)
    assert [[(each.count, each.slots) for each in offer] for offer in offers] == [[(2, 4)], [(1, 8), (1, 4)]]


@each_case(
    ("free", "slots", "parts"),
    [
        ("528Gi", None, [(1, 8)]),
        ("512Gi", None, [(1, 7)]),
        ("216Gi", None, [(1, 3)]),
        ("12Gi", None, []),
        ("316Gi", 2, [(2, 2)]),
        (None, 2, [(4, 2)]),
    ],
)
def test_a_node_needs_memory_for_worker_pods(free: str | None, slots: int | None, parts: list[tuple[int, int]]) -> None:
    """64Gi a slot and 16Gi for the head pod, which has no other node, unless job or settings say something else."""
    job = changed(PPO, {"resources.slotsPerNode": slots})
    allocatable = {GPU: "8", **({"memory": free} if free else {})}
    capacity = seen(job, [dataclasses.replace(node("n", product=A100), allocatable=allocatable)])
    assert [(group.count, group.slots) for group in capacity.machines] == parts
    short = "1 node short of memory for workers on all free GPUs" in str(capacity)
    assert short == (sum(count * slots for count, slots in parts) < 8)


def test_the_head_pod_goes_to_another_node_where_there_is_one() -> None:
    job, full = changed(PPO, ALL_OF_A_NODE), {GPU: "8", "memory": "512Gi"}
    there = [dataclasses.replace(node("n", product=A100), allocatable=full), node("other")]
    (group,) = seen(job, there).machines
    assert group.slots == 8


def test_a_mapping_says_which_gpus_were_left_out() -> None:
    job, there = changed(PPO, ALL_OF_A_NODE), [node("n", gpus=8, product=A100)]
    assert " (pods of others hold 6 GPUs); a step is predicted" in answer(job, there, {"n": {GPU: 6}}).message


def test_nodes_that_differ_only_in_network_are_told_together() -> None:
    labels = {"karpenter.k8s.aws/instance-network-bandwidth": "400000"}
    there = [node("a", gpus=8, product=A100), node("b", gpus=8, product=A100, labels=labels)]
    assert str(seen(changed(PPO, ALL_OF_A_NODE), there)) == f"2 nodes with 8 {A100}"


def test_what_would_do_is_sought_once_for_all_node_kinds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes many searches, and the job asks again every minute."""
    asked: list[Cluster] = []

    def watched(_: Job, cluster: Cluster, __: Any) -> tuple[str, ...]:
        asked.append(cluster)
        return ()

    monkeypatch.setattr("rlhf_mapper.auto_map.remedies_of", watched)
    large = {f"models.{role}.shape": {"name": "llama-3-70b"} for role in ("actor", "critic", "reference", "reward")}
    there = [
        node(product, gpus=8, product=product) for product in (A100, "NVIDIA-A100-SXM4-40GB", "NVIDIA-A10", "Tesla-T4")
    ]
    assert answer(changed(PPO, {**ALL_OF_A_NODE, **large}), there, {}).reason == "NoFeasiblePlacement"
    assert [group.gpu.name for cluster in asked for group in cluster.groups] == ["a100-80g"], "the largest"


def test_the_network_of_a_single_node_makes_no_difference() -> None:
    (found,) = nodes_of(
        [node("a", gpus=8, product=A100, labels={"karpenter.k8s.aws/instance-network-bandwidth": "100"})]
    )
    assert found.node_bandwidth is None


@each_case(
    ("wrong", "why"),
    [
        ({"gpus": [OWN, {**OWN, "product": "other", "memoryGB": 48}]}, "one name for GPUs with different figures"),
        ({"gpus": [{"name": "mine", "product": "X"}]}, "memoryGB"),
        ({"nodeGroups": [{"matchLabels": {}, "interNodeGbps": 25e9}]}, "it is in Gb/s"),
        ({"nodeGroups": [{"matchLabels": {"a": None}, "interNodeGbps": 100}]}, "valid string"),
    ],
)
def test_settings_that_mean_other_figures_are_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        settings(**wrong)
    assert settings(gpus=[OWN, {**OWN, "product": "other"}]).gpus


def test_memory_that_pods_of_others_asked_for_does_not_count() -> None:
    job, there = changed(PPO, ALL_OF_A_NODE), [node("n", gpus=8, product=A100)]
    (group,) = seen(job, there, {"n": {"memory": 384 * 2**30}}).machines
    assert group.slots == 2


def test_what_offload_may_fill_is_the_memory_of_a_worker_pod() -> None:
    (found,) = nodes_of([node("n", gpus=8, product=A100)])
    assert found.host_memory == 64 * 2**30


@each_case(
    ("product", "labels"),
    [
        ("NVIDIA-L4-SHARED", {}),
        ("NVIDIA-L4", {"nvidia.com/gpu.sharing-strategy": "time-slicing"}),
        ("NVIDIA-L4", {"nvidia.com/gpu.sharing-strategy": "mps"}),
        ("NVIDIA-L4", {"cloud.google.com/gke-gpu-sharing-strategy": "time-sharing"}),
    ],
)
def test_gpus_that_pods_use_in_turn_are_refused_for_that(product: str, labels: dict[str, str]) -> None:
    there = [node("n", gpus=4, product=product, labels=labels)]
    found = answer(example_jobs()[PPO], there, {})
    assert found.reason == "NoFeasiblePlacement"
    assert "(4 GPUs that pods would share by time-slicing or MPS do not count)" in found.message
    assert mapped(changed(PPO, {"resources.device": "CPU"}), there).device == "CPU"
    beside = [*there, node("own", gpus=2, product="NVIDIA-L4", labels={"nvidia.com/gpu.sharing-strategy": "none"})]
    assert mapped(example_jobs()[PPO], beside).device == "GPU"
    kept_off = [{"key": label, "operator": "NotIn", "values": [way]} for label, way in labels.items()]
    assert expressions(made(example_jobs()[PPO], beside)) == [{**PRODUCT, "values": ["NVIDIA-L4"]}, *kept_off]


@pytest.mark.parametrize(
    ("resource", "product"), [(SLICE, A100), (GPU, f"{A100}-MIG-1g.10gb")], ids=["mixed strategy", "single strategy"]
)
def test_slices_are_gpus_of_their_own_size(resource: str, product: str) -> None:
    job = changed(PPO, {"runtime.gpuResourceName": resource})
    there = [node("n", gpus=7, product=product, resource=resource)]
    capacity = capacity_for(job, snapshot(job, there), SETTINGS)
    cluster = cluster_of(capacity.machines, "GPU", job, SETTINGS)
    assert cluster
    (group,) = cluster.groups
    assert group.gpu.name == "a100-80g-mig-1g.10gb"
    assert group.gpu.memory == pytest.approx(10e9)
    assert {pool.gpu for pool in mapped(job, there).pools} == {"a100-80g-mig-1g.10gb"}
    worker = next(iter(groups(made(job, there)["RayJob"]).values()))
    (container,) = pod_of(worker)["containers"]
    assert container["resources"]["limits"][resource]
    assert expressions(made(job, there)) == [{**PRODUCT, "values": [product]}]


def test_gpus_of_one_name_are_told_apart_by_other_labels() -> None:
    """GKE cuts GPUs into slices beside whole ones; Karpenter calls both A100 of AWS a100."""
    accelerator, name = "cloud.google.com/gke-accelerator", "karpenter.k8s.aws/instance-gpu-name"
    size, memory = "cloud.google.com/gke-gpu-partition-size", "karpenter.k8s.aws/instance-gpu-memory"
    whole, part = {accelerator: "nvidia-tesla-a100"}, {accelerator: "nvidia-tesla-a100", size: "3g.20gb"}
    small, large = {name: "a100", memory: "40960"}, {name: "a100", memory: "81920"}
    job = changed(PPO, {"resources.device": "GPU"})
    for labels, other, gpu, detail in (
        (whole, part, "a100-40g", {"key": size, "operator": "DoesNotExist"}),
        (part, whole, "a100-40g-mig-3g.20gb", {"key": size, "operator": "In", "values": ["3g.20gb"]}),
        (small, large, "a100-40g", {"key": memory, "operator": "In", "values": ["40960"]}),
        (large, small, "a100-80g", {"key": memory, "operator": "In", "values": ["81920"]}),
    ):
        there = [node("n", gpus=8, labels=labels), node("full", labels=other)]
        (found,) = nodes_of(there)
        assert found.gpu.name == gpu
        assert detail in expressions(made(job, there))
