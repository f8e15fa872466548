"""Zones of nodes with a slow link: the mapper is told of them, and the pods of a pool go where it says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from rlhf_api.status import MappedPlacement
from rlhf_mapper.hardware import NodeGroup
from rlhf_operator.placement.capacity import capacity_for, cluster_of, machine_choices
from rlhf_operator.placement.map_job import map_job, still_fits
from rlhf_operator.placement.review import predicted
from rlhf_operator.resources.job_file import placed
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import ObservedNode
from tests.each import each_case
from tests.operator.rendered import changed, groups, made, mapped, node, place, pod_of, snapshot

ZONE = "topology.kubernetes.io/zone"
A100 = "NVIDIA-A100-SXM4-40GB"
LARGE = changed(
    "helpful-sft",
    {
        "models.actor.shape": {"name": "qwen3-32b"},
        "training.batchSize": 64,
        "resources": {"device": "GPU", "nodes": 1, "maxNodes": 4, "slotsPerNode": None},
    },
)
"""Needs all GPUs of four nodes."""
SMALL = changed("helpful-ppo", {"resources": {"device": "GPU", "nodes": 1, "maxNodes": 4, "slotsPerNode": None}})


def zoned(gbps: float = 25) -> Settings:
    return Settings.model_validate({"topology": [{"label": ZONE, "gbps": gbps}]}, by_alias=True, by_name=False)


def there(zones: str) -> list[ObservedNode]:
    """Nodes of 4 GPUs, a letter each for their zones; - for none."""
    return [
        node(f"n{place}", gpus=4, product=A100, labels={ZONE: zone} if zone != "-" else {})
        for place, zone in enumerate(zones)
    ]


def told(zones: str, given: Settings) -> list[tuple[NodeGroup, ...]]:
    """What the mapper is told of nodes, for each choice."""
    capacity = capacity_for(LARGE, snapshot(LARGE, there(zones)), given)
    clusters = [cluster_of(each, "GPU", LARGE, given) for each in machine_choices(capacity, LARGE)]
    return [cluster.groups for cluster in clusters if cluster]


def required(group: dict[str, Any]) -> list[dict[str, Any]]:
    """What its pods ask of the zone of their nodes."""
    (term,) = pod_of(group)["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    return [each for each in term["matchExpressions"] if each["key"] == ZONE]


def resources(group: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = json.loads(group["rayStartParams"]["resources"].strip("'"))
    return found


def test_nodes_are_told_with_their_zones() -> None:
    (group,) = told("abab", zoned())[-1]
    assert (group.count, sorted(group.zones), group.zone_bandwidth) == (4, list("aabb"), 25e9 / 8)
    (alike,) = told("abab", Settings())[-1]
    assert (alike.count, alike.zones, alike.zone_bandwidth) == (4, (), None)


def test_nodes_of_one_kind_in_several_zones_are_a_choice() -> None:
    """Else nodes of another kind could take their places among the most that a job may have."""
    others = [node(f"h{place}", gpus=4, product="NVIDIA-H100-80GB-HBM3", labels={ZONE: "a"}) for place in range(3)]
    job, given = LARGE, zoned()
    capacity = capacity_for(job, snapshot(job, [*there("aabb"), *others]), given)
    products = [[(each.product, each.zone, each.count) for each in offer] for offer in machine_choices(capacity, job)]
    assert [(A100, "a", 2), (A100, "b", 2)] in products


def pools_of(zones: str, given: Settings) -> MappedPlacement:
    return mapped(LARGE, there(zones), given)


def test_workers_of_a_pool_over_two_zones_are_two_groups() -> None:
    (pool,) = pools_of("abab", zoned()).pools
    assert pool.zones
    assert sorted(pool.zones) == list("aabb")
    found = groups(made(LARGE, there("abab"), zoned())["RayJob"])
    assert sorted(found) == ["all-0", "all-1"]
    for group in found.values():
        (where,) = required(group)
        (zone,) = where["values"]
        places = [place for place, each in enumerate(pool.zones) if each == zone]
        assert group["numOfHosts"] == len(places) == 2
        assert resources(group) == dict.fromkeys(["rlhf-pool-all", *(f"rlhf-pool-all:{each}" for each in places)], 4)


def test_a_pool_that_fits_in_a_zone_is_kept_there() -> None:
    result = place(SMALL, there("abab"), zoned(1))
    assert result.mapping
    assert " in zones " in result.message
    for pool in result.mapping.pools:
        assert pool.zones
        assert len(pool.zones) == pool.nodes
    for group in groups(made(SMALL, there("abab"), zoned(1))["RayJob"]).values():
        (where,) = required(group)
        assert where["operator"] == "In"
        assert len(where["values"]) == 1
        assert len(resources(group)) == 1


def test_without_a_topology_pods_ask_for_no_zone() -> None:
    (pool,) = pools_of("abab", Settings()).pools
    assert pool.zones is None
    (group,) = groups(made(LARGE, there("abab"))["RayJob"]).values()
    assert not required(group)


def test_nodes_without_the_label_are_apart() -> None:
    """Nobody says what links them to the zones: no pool spans both."""
    given = zoned()
    assert place(LARGE, there("aa--"), given).reason == "NoFeasiblePlacement"
    (pool,) = pools_of("----", given).pools
    assert pool.zones is None
    (group,) = groups(made(LARGE, there("----"), given)["RayJob"]).values()
    assert required(group) == [{"key": ZONE, "operator": "DoesNotExist"}]


@each_case(("zones", "fits"), [("baab", True), ("aaab", False), ("aaabb", True), ("aa--bb", True)])
def test_a_mapping_is_kept_while_its_zones_have_room(zones: str, fits: bool) -> None:
    given, mapping = zoned(), pools_of("aabb", zoned())
    assert still_fits(LARGE, mapping, snapshot(LARGE, there(zones)), given) is fits


def test_a_placement_by_hand_keeps_to_no_zone() -> None:
    pools = [{"name": "all", "models": ["actor"], "nodes": 4, "slotsPerNode": 4}]
    job = changed(
        "helpful-sft",
        {"training.batchSize": 64, "placement": {"mode": "Manual", "pools": pools}, "resources.device": "GPU"},
    )
    seen, given = snapshot(job, there("abab")), zoned()
    found = map_job(job, seen, given)
    assert found.mapping
    assert found.mapping.pools[0].zones is None
    assert still_fits(job, found.mapping, seen, given)
    (group,) = groups(made(job, there("abab"), given)["RayJob"]).values()
    assert "affinity" not in pod_of(group)


@each_case(
    ("asked", "gbps", "chosen"),
    [("Auto", 0.016, "TopK"), ("Auto", 25, "Auto"), ("None", 0.5, "None"), ("TopK", 25, "TopK")],
)
def test_replicas_compress_over_a_thin_link(asked: str, gbps: float, chosen: str) -> None:
    """Two copies of the weights, which need both zones."""
    copies = {"models.actor.shape": {"name": "mistral-nemo-12b"}, "models.actor.parallelism": {"replicas": 2}}
    slots = {"training.batchSize": 64, "resources": {"device": "GPU", "nodes": 4}}
    job = changed("helpful-sft", {**copies, **slots, "training.gradientCompression": asked})
    mapping = mapped(job, there("abab"), zoned(gbps))
    assert mapping.pools[0].zones in (tuple("aabb"), tuple("bbaa"))
    assert placed(job, mapping, {})["spec"]["training"]["gradientCompression"] == chosen


def test_what_was_mapped_is_predicted_as_it_lies() -> None:
    """Measured steps are compared with the prediction of the nodes' own order."""
    seen, given = snapshot(LARGE, there("aabb")), zoned()
    mapping = pools_of("aabb", given)

    def again(have: MappedPlacement) -> float:
        found = predicted(LARGE, have, seen, given)
        assert found
        assert found.prediction
        return found.prediction.step_seconds

    def turned(zones: Sequence[str]) -> MappedPlacement:
        (pool,) = mapping.pools
        return mapping.model_copy(update={"pools": (pool.model_copy(update={"zones": tuple(zones)}),)})

    assert again(mapping) == pytest.approx(mapping.predicted_step_seconds)
    assert mapping.pools[0].zones
    ways = [again(turned(zones)) for zones in ("aabb", "abab", "abba")]
    assert again(mapping) == pytest.approx(min(ways))
    assert max(ways) > min(ways)
