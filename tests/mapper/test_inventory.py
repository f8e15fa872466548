"""An inventory file or a few flags become a cluster; a figure in a wrong unit is refused, and its unit is named."""

from typing import Any

import pytest

from rlhf_api import kubectl_yaml
from rlhf_api.problems import SpecError
from rlhf_mapper.hardware import CPU_SLOT, GPUS, Cluster, NodeGroup, require_gpu
from rlhf_mapper.inventory import cluster_of, cluster_of_flags
from rlhf_planning.machines import requested_cluster
from tests.each import each_case

NODES = "{gpu: a100-80g, count: 16, gpusPerNode: 8"
OWN = (
    "{name: a900, memoryGB: 96, bf16Tflops: 500, fp32Tflops: 50, memoryGBps: 4000, linkGBps: 800, hostGBps: 60}",
    "{gpu: a900, count: 1, gpusPerNode: 2}",
)


def read(text: str) -> Cluster:
    (document,) = kubectl_yaml.read(text, "")
    return cluster_of(document, "cluster.yaml")


def told(text: str) -> list[str]:
    """The mistakes of an inventory file."""
    with pytest.raises(SpecError) as found:
        read(text)
    return str(found.value).splitlines()


def test_figures_are_bytes_a_second_whatever_the_unit() -> None:
    cluster = read(f"nodes: [{NODES}, intraNodeGBps: 600, interNodeGbps: 400, pricePerGpuHour: 1.5}}]")
    (group,) = cluster.groups
    assert (group.gpu, group.count, group.gpus_per_node) == (GPUS["a100-80g"], 16, 8)
    assert (group.link, group.network, group.gpu_hour_price) == (300e9, 50e9, 1.5)
    assert cluster.gpus == 128


def test_what_is_not_said_is_the_tables() -> None:
    (group,) = read(f"nodes: [{NODES}}}]").groups
    assert group == NodeGroup(gpu=GPUS["a100-80g"], count=16, gpus_per_node=8)
    assert cluster_of_flags(16, 8, GPUS["a100-80g"]) == Cluster((group,))


@each_case(
    ("gpu", "gpus_per_node", "gigabits"),
    [("h100-80g", 8, 3200), ("h100-80g", 4, 1600), ("b300-288g", 8, 6400), ("l40s-48g", 8, 400), ("t4-16g", 4, 50)],
)
def test_the_network_of_a_node_is_that_of_its_gpu_type(gpu: str, gpus_per_node: int, gigabits: float) -> None:
    (group,) = cluster_of_flags(2, gpus_per_node, GPUS[gpu]).groups
    assert group.network == gigabits * 1e9 / 8


def test_host_memory_is_shared_by_the_gpus_of_a_node() -> None:
    assert read(f"nodes: [{NODES}, hostMemoryGB: 2000}}]").groups[0].host_memory == 250e9
    assert read(f"nodes: [{NODES}}}]").groups[0].host_memory is None


def test_two_entries_of_one_type_are_two_groups() -> None:
    groups = read(f"nodes: [{NODES}}}, {NODES}, interNodeGbps: 100}}]").groups
    assert [group.gpu.name for group in groups] == ["a100-80g", "a100-80g"]
    assert groups[0].network == 16 * groups[1].network, "of its GPU type: 200 Gb/s for each of 8 A100"


def test_entries_that_differ_in_their_count_alone_are_one_group() -> None:
    halves = read(f"nodes: [{NODES}}}, {NODES}, interNodeGbps: 100}}, {NODES.replace('16', '4')}}}]")
    assert [(group.count, group.network) for group in halves.groups] == [(20, 200e9), (16, 12.5e9)]


def test_linked_entries_are_one_group_in_zones() -> None:
    ab = f"{NODES.replace('16', '2')}, name: a}}, {NODES.replace('16', '3')}, name: b}}"
    group, other = read(f"nodes: [{ab}, {NODES}}}]\nlinks: [{{between: [a, b], gbps: 100}}]").groups[::-1]
    assert (group.count, group.zones, group.zone_bandwidth) == (5, (*"aa", *"bbb"), 12.5e9)
    assert (other.count, other.zones, other.zone_bandwidth) == (16, (), None)
    assert [(part.count, set(part.zones)) for part in group.in_zones] == [(2, {"a"}), (3, {"b"})]
    (unlinked,) = read(f"nodes: [{ab}]").groups
    assert (unlinked.count, unlinked.zones) == (5, ())


@each_case(
    ("entries", "link", "why"),
    [
        ("ab", "a, c", 'names "c", expected the name of one entry of nodes, in one link'),
        ("aa", "a, b", 'names "a", expected the name of one entry of nodes, in one link'),
        ("ab", "a, a", 'names "a", expected the name of one entry of nodes, in one link'),
        ("ab", "a", "has one name, expected two or more"),
        ("aB", "a, b", "joins nodes that differ in more than their count; a pool lies on equal nodes"),
    ],
)
def test_a_link_joins_equal_nodes_by_their_names(entries: str, link: str, why: str) -> None:
    named = [f"{NODES}, name: {each.lower()}{', interNodeGbps: 50' * each.isupper()}}}" for each in entries]
    sentences = told(f"nodes: [{', '.join(named)}]\nlinks: [{{between: [{link}], gbps: 100}}]")
    assert f"cluster.yaml: links.0.between: {why}" in sentences


@pytest.mark.parametrize("gpu", ["a100-80g-mig-1g.10gb", "h200-141g-mig-3g.71gb"])
def test_a_slice_of_a_gpu_has_a_name_too(gpu: str) -> None:
    (flags,), (file,) = (
        cluster_of_flags(1, 7, require_gpu(gpu, "")).groups,
        read(f"nodes: [{{gpu: {gpu}, count: 1, gpusPerNode: 7}}]").groups,
    )
    assert flags == file
    assert flags.gpu.name == gpu
    assert flags.gpu.memory == float(gpu.rpartition(".")[2].removesuffix("gb")) * 1e9


def test_so_many_different_groups_are_too_many() -> None:
    nodes = [f"{NODES}, interNodeGbps: {100 + n}}}" for n in range(9)]
    assert len(read(f"nodes: [{', '.join(nodes[:8])}]").groups) == 8
    assert told(f"nodes: [{', '.join(nodes)}]") == ["cluster.yaml: nodes: has 9 different groups, expected at most 8"]


def test_what_is_paid_for_costs_nothing() -> None:
    assert read(f"nodes: [{NODES}, pricePerGpuHour: 0}}]").groups[0].gpu_hour_price == 0


def test_a_gpu_of_ones_own_stands_beside_the_tables() -> None:
    own, other = read(f"gpus: [{OWN[0]}]\nnodes: [{OWN[1]}, {NODES}}}]").groups
    assert (own.gpu.memory, own.gpu.bf16, own.gpu.fp32) == (96e9, 500e12, 50e12)
    assert (own.gpu.memory_bandwidth, own.gpu.host_bandwidth, own.link) == (4e12, 60e9, 400e9)
    assert own.gpu.source == "cluster.yaml"
    assert other.gpu.source.startswith("NVIDIA")


def test_cpu_slots_are_nodes_too() -> None:
    assert read("nodes: [{gpu: cpu-slot, count: 1, gpusPerNode: 4}]").groups[0].gpu == CPU_SLOT
    mixed = told(f"nodes: [{NODES}}}, {{gpu: cpu-slot, count: 1, gpusPerNode: 4}}]")
    assert mixed == ["cluster.yaml: nodes: mixes CPU slots and GPUs; a job runs on one of the two"]


@each_case(
    ("field", "value", "unit"),
    [
        ("intraNodeGBps", "600e9", "GB/s (1e9 bytes/s), both directions together"),
        ("intraNodeGBps", "600GB", "GB/s (1e9 bytes/s), both directions together"),
        ("intraNodeGBps", "0", "GB/s (1e9 bytes/s), both directions together"),
        ("interNodeGbps", "200e9", "Gb/s (1e9 bits/s), one direction"),
        ("interNodeGbps", "200GB", "Gb/s (1e9 bits/s), one direction"),
        ("interNodeGbps", "-200", "Gb/s (1e9 bits/s), one direction"),
        ("interNodeGbps", "1" * 400, "Gb/s (1e9 bits/s), one direction"),
        ("interNodeGbps", "yes", "Gb/s (1e9 bits/s), one direction"),
        ("pricePerGpuHour", "$2", "units of a currency, for one GPU and one hour"),
        ("pricePerGpuHour", "-1", "units of a currency, for one GPU and one hour"),
    ],
)
def test_a_figure_in_a_wrong_unit_is_refused_with_the_right_one(field: str, value: str, unit: str) -> None:
    (sentence,) = told(f"nodes: [{NODES}, {field}: {value}}}]")
    assert sentence.startswith(f"cluster.yaml: nodes.0.{field}: is ")
    assert sentence.endswith(f" in {unit}")


@each_case(
    ("field", "value"),
    [("memoryGB", 80e9), ("memoryGB", 81920), ("bf16Tflops", 312e12), ("memoryGBps", 2e12), ("linkGBps", 6e11)],
)
def test_so_is_that_of_a_gpu_of_ones_own(field: str, value: float) -> None:
    gpu: dict[str, Any] = kubectl_yaml.read(OWN[0], "")[0]
    with pytest.raises(SpecError) as found:
        cluster_of({"gpus": [{**gpu, field: value}], "nodes": [kubectl_yaml.read(OWN[1], "")[0]]}, "f")
    assert str(found.value).startswith(f"f: gpus.0.{field}: is {value:g}, expected ")
    assert len(found.value.problems) == 1


KNOWN = ", ".join([*GPUS][:-1])


@each_case(
    ("text", "sentence"),
    [
        ("nodes: []", "nodes: is empty"),
        ("[]", "document: is a list, expected a mapping"),
        ("nodes: [{gpu: a100-80g, count: 0, gpusPerNode: 8}]", "nodes.0.count: is 0, expected at least 1"),
        ("nodes: [{gpu: a100-80g, count: 1, gpusPerNode: -8}]", "nodes.0.gpusPerNode: is -8, expected at least 1"),
        (
            "nodes: [{gpu: a100-80g, count: 1, gpusPerNode: 1025}]",
            "nodes.0.gpusPerNode: is 1025, expected at most 1024",
        ),
        ("nodes: [{gpu: a100-80g, gpusPerNode: 8}]", "nodes.0.count: is missing"),
        (f"nodes: [{NODES}, interNodeGbs: 200}}]", "nodes.0.interNodeGbs: unknown field; did you mean interNodeGbps?"),
        (
            "nodes: [{gpu: a101, count: 1, gpusPerNode: 8}]",
            f'nodes.0.gpu: is "a101", expected {KNOWN} or cpu-slot; `gpus` of this file may describe others',
        ),
        (f"gpus: [{OWN[0]}, {OWN[0]}]\nnodes: [{OWN[1]}]", 'gpus.1.name: "a900" is used twice'),
    ],
)
def test_a_mistake_is_one_sentence_with_its_path(text: str, sentence: str) -> None:
    assert told(text) == [f"cluster.yaml: {sentence}"]


@pytest.mark.parametrize(
    ("nodes", "slots", "sentence"),
    [
        (0, 8, "--nodes: is 0, expected at least 1"),
        (1, -1, "--gpus-per-node: is -1, expected at least 1"),
        (1, 10**8, "--gpus-per-node: is 100000000, expected at most 1024"),
    ],
)
def test_so_is_a_mistake_in_a_flag(nodes: int, slots: int, sentence: str) -> None:
    with pytest.raises(SpecError) as found:
        cluster_of_flags(nodes, slots, GPUS["a100-80g"])
    assert str(found.value) == sentence


@pytest.mark.parametrize("name", ["h100", "H100", " h100-80g "])
def test_a_short_name_is_a_type_everywhere(name: str) -> None:
    cluster = requested_cluster(nodes=1, gpus_per_node=8, gpu=name, inventory=None)
    assert cluster == read("nodes: [{gpu: h100, count: 1, gpusPerNode: 8}]")
    assert cluster.groups[0].gpu == GPUS["h100-80g"]
    with pytest.raises(SpecError, match=r"--gpu: h1000 is no known GPU; did you mean h100\?"):
        requested_cluster(nodes=1, gpus_per_node=8, gpu="h1000", inventory=None)
