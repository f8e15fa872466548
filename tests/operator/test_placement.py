"""Where the models of a job live, on the nodes that there are."""

from __future__ import annotations

import dataclasses
import random
import tracemalloc
from typing import Any

import pytest

from rlhf_api.job import Job
from rlhf_mapper import place as mapper
from rlhf_operator.placement.map_job import input_hash, map_job
from rlhf_operator.settings import Pod, Settings
from rlhf_operator.snapshot import ObservedNode
from tests.each import each_case
from tests.operator.rendered import A100, SETTINGS, changed, example_jobs, mapped, node, nodes, place, snapshot

PPO = "helpful-ppo"
GPUS = nodes(2, 8, A100)
H100 = "NVIDIA-H100-80GB-HBM3"
MOST = 100_000
WORKER = "runtime.worker.template.spec"
OBJECTIVES = ("throughput", "fewest-gpus=1000")


@each_case("name", example_jobs)
def test_every_example_is_mapped_onto_cpu_slots(name: str) -> None:
    job = example_jobs()[name]
    answer = place(job, nodes(1))
    assert answer.mapping, answer
    assert answer.mapping.device == "CPU"
    if job.spec.algorithm.name == "Merge":  # one slot whatever the models, and no step of training to predict
        assert (answer.reason, answer.mapping.slots, answer.mapping.gpus) == ("ManualPlacement", 1, 0)
        assert "a step merges one layer" in answer.message
        return
    assert answer.reason == "Mapped", answer
    assert answer.mapping.slots == job.spec.resources.slots_per_node
    assert answer.mapping.predicted_step_seconds


def test_on_cpu_the_golden_paths_models_share_a_pool() -> None:
    (pool,) = mapped(example_jobs()[PPO], nodes(1)).pools
    assert (pool.name, pool.nodes, pool.slots_per_node) == ("all", 1, 2)
    assert pool.models == ("actor", "critic", "reference", "reward")


def test_auto_takes_gpus_where_matching_nodes_have_some() -> None:
    job = example_jobs()[PPO]
    mapping = mapped(job, GPUS)
    assert mapping.device == "GPU"
    assert {pool.gpu for pool in mapping.pools} == {"a100-80g"}
    assert mapping.slots <= 2
    assert mapping.gpu_memory_utilization
    elsewhere = changed(PPO, {f"{WORKER}.nodeSelector": {"zone": "a"}})
    assert place(elsewhere, (*GPUS, node("c", labels={"zone": "a"}))).reason == "GPUNodesUnusable"
    assert mapped(changed(PPO, {"resources.device": "CPU"}), GPUS).device == "CPU"


def test_without_slots_per_node_a_job_takes_all_gpus_of_a_node() -> None:
    job = changed(PPO, {"resources.slotsPerNode": None, "resources.nodes": 2})
    assert 8 <= mapped(job, GPUS).slots <= 16
    assert not mapped(changed(PPO, {"resources.slotsPerNode": None}), nodes(1)).slots > 1


def test_the_objective_of_a_job_is_followed() -> None:
    wide = {"resources.slotsPerNode": None, "resources.nodes": 2}
    fast, small = (mapped(changed(PPO, wide | {"placement.objective": text}), GPUS) for text in OBJECTIVES)
    assert small.slots == 1 < fast.slots
    late = place(changed(PPO, wide | {"placement.objective": "fewest-gpus=0.001"}), GPUS)
    assert late.reason == "NoFeasiblePlacement"
    assert "no mapping takes 1 ms a step or less; the fastest takes" in late.message
    unpriced = place(changed(PPO, wide | {"placement.objective": "lowest-cost"}), GPUS)
    assert unpriced.reason == "InvalidPlacement"
    assert unpriced.message.startswith("spec.placement.objective: lowest-cost needs the pricePerGpuHour of all nodes")


@pytest.mark.parametrize(("price", "expected"), [(1, "a100-80g"), (1000, "h100-80g")])
def test_the_least_price_is_that_of_the_chart(price: float, expected: str) -> None:
    there = [node("a", gpus=8, product=A100, labels={"type": "a"}), node("h", gpus=8, product=H100)]
    groups = [{"matchLabels": {"type": "a"}, "pricePerGpuHour": price}, {"matchLabels": {}, "pricePerGpuHour": 30}]
    priced = Settings.model_validate({"nodeGroups": groups}, by_alias=True, by_name=False)
    cheap = {"placement.objective": "lowest-cost", "resources.slotsPerNode": None}
    assert {pool.gpu for pool in mapped(changed(PPO, cheap), there, priced).pools} == {expected}
    fast = {"resources.slotsPerNode": None}
    assert {pool.gpu for pool in mapped(changed(PPO, fast), there, priced).pools} == {"h100-80g"}


def test_a_mapping_says_its_price_where_all_have_one() -> None:
    there = [node("a", gpus=8, product=A100, labels={"type": "a"})]
    groups = [{"matchLabels": {"type": "a"}, "pricePerGpuHour": 1.5}]
    priced = Settings.model_validate({"nodeGroups": groups}, by_alias=True, by_name=False)
    job = changed(PPO, {"resources.slotsPerNode": None})
    found = mapped(job, there, priced)
    assert found.price_per_hour == 1.5 * found.gpus
    assert mapped(job, there).price_per_hour is None
    dearer = {"matchLabels": {"type": "b"}, "pricePerGpuHour": 2.0}
    two = Settings.model_validate({"nodeGroups": [*groups, dearer]}, by_alias=True, by_name=False)
    alike = [*there, node("b", gpus=8, product=A100, labels={"type": "b"})]
    assert mapped(job, alike, two).price_per_hour is None
    assert mapped(changed(PPO, {"resources.device": "CPU"}), there, priced).price_per_hour is None


@each_case(
    "other",
    [
        {"ready": False},
        {"schedulable": False},
        {"taints": (("maintenance", "", "NoSchedule"),)},
        {"taints": (("maintenance", "yes", "NoExecute"),)},
        {"labels": {"pool": "other"}},
    ],
    ids=str,
)
def test_a_node_that_does_not_suit_does_not_count(other: dict[str, Any]) -> None:
    job = changed(PPO, {f"{WORKER}.nodeSelector": {"pool": "mine"}, "resources.device": "GPU"})
    suits = node("suits", gpus=8, product=A100, labels={"pool": "mine"})
    assert place(job, [suits]).mapping
    answer = place(job, [node("other", gpus=8, product=A100, **({"labels": {"pool": "mine"}} | other))])
    assert (answer.reason, answer.mapping) == ("GPUNodesUnusable", None)


@each_case(
    "toleration",
    [
        {"operator": "Exists"},
        {"key": "maintenance", "operator": "Exists"},
        {"key": "maintenance", "value": "yes"},
        {"key": "maintenance", "value": "yes", "effect": "NoSchedule"},
    ],
    ids=str,
)
def test_a_tolerated_node_counts(toleration: dict[str, str]) -> None:
    taints = (("maintenance", "yes", "NoSchedule"), ("nice", "", "PreferNoSchedule"))
    tainted = [node("n", gpus=8, product=A100, taints=taints)]
    assert place(changed(PPO, {f"{WORKER}.tolerations": [toleration], "resources.device": "GPU"}), tainted).mapping
    other = {"key": "maintenance", "value": "no"}
    assert not place(changed(PPO, {f"{WORKER}.tolerations": [other], "resources.device": "GPU"}), tainted).mapping


def requires(*terms: dict[str, Any]) -> Job:
    """The job with a node affinity."""
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}
    affinity = {"nodeAffinity": required, "podAntiAffinity": {"anything": []}}
    return changed(PPO, {f"{WORKER}.affinity": affinity, "resources.device": "GPU"})


@each_case(
    ("key", "operator", "values", "suits"),
    [
        ("zone", "In", ["b", "a"], True),
        ("zone", "In", ["b"], False),
        ("zone", "NotIn", ["a"], False),
        ("rack", "NotIn", ["a"], True),
        ("zone", "Exists", [], True),
        ("rack", "Exists", [], False),
        ("rack", "DoesNotExist", [], True),
        ("cards", "Gt", ["7"], True),
        ("cards", "Lt", ["8"], False),
        ("zone", "Gt", ["1"], False),
        ("rack", "Lt", ["1"], False),
    ],
)
def test_a_node_left_out_by_the_affinity_does_not_count(
    key: str, operator: str, values: list[str], suits: bool
) -> None:
    there = [node("n", gpus=8, product=A100, labels={"zone": "a", "cards": "8"})]
    expression = {"key": key, "operator": operator, "values": values}
    assert bool(place(requires({"matchExpressions": [expression]}), there).mapping) == suits
    assert bool(place(requires({}, {"matchExpressions": [expression]}), there).mapping) == suits, "one term is enough"


def test_a_node_may_be_left_out_by_its_name() -> None:
    there = [node("n", gpus=8, product=A100)]
    for names, suits in ((["n"], False), (["m"], True)):
        fields = [{"key": "metadata.name", "operator": "NotIn", "values": names}]
        assert bool(place(requires({"matchFields": fields}), there).mapping) == suits


def test_the_installation_s_template_holds_for_all_jobs() -> None:
    there = [node("n", gpus=8, product=A100, taints=(("team", "a", "NoSchedule"),))]
    template: dict[str, Any] = {"spec": {"tolerations": [{"key": "team", "operator": "Exists"}]}}
    tolerant = Settings(worker=Pod(cpu="8", memory="64Gi", template=template))
    job = changed(PPO, {"resources.device": "GPU"})
    assert not place(job, there).mapping
    assert place(job, there, tolerant).mapping


def test_the_taint_of_gpu_nodes_needs_no_toleration() -> None:
    taints = (("nvidia.com/gpu", "present", "NoSchedule"),)
    assert mapped(example_jobs()[PPO], [node("n", gpus=8, product=A100, taints=taints)]).device == "GPU"


def test_gpus_of_another_name_count_where_it_is_said() -> None:
    there = [node("n", gpus=8, product=A100, resource="example.com/gpu")]
    assert place(example_jobs()[PPO], there).reason == "GPUNodesUnusable"
    assert mapped(changed(PPO, {"runtime.gpuResourceName": "example.com/gpu"}), there).device == "GPU"
    assert mapped(example_jobs()[PPO], there, Settings(gpu_resource_name="example.com/gpu")).device == "GPU"


def test_too_few_nodes_are_said_with_what_would_do() -> None:
    answer = place(changed(PPO, {"resources.nodes": 3, "resources.slotsPerNode": 8}), GPUS)
    assert answer.reason == "NoFeasiblePlacement"
    expected = "spec.resources asks for 3 nodes with 8 GPUs, but there are 2 nodes with 8 NVIDIA-A100-SXM4-80GB"
    assert answer.message == f"{expected}; add nodes, or ask for fewer or smaller ones"


LESS = "add nodes, or set spec.resources.slotsPerNode to 1"
NO_NODE = "no node that is ready, schedulable and matches spec.runtime"
EIGHT = f"there are 8 nodes with 1 {A100}, none with 2; {LESS}"
NONE = "there are 3 nodes with no GPU slots, none with 2; add nodes, or ask for fewer or smaller ones"
MIXED = (*nodes(1, 2, A100, "a"), *nodes(4, 1, A100, "b"))


@each_case(
    ("changes", "there", "message"),
    [
        ({}, nodes(8, 1, A100), f"1 node with 2 GPUs, but {EIGHT} or spec.resources.device to CPU"),
        ({"resources.device": "GPU"}, nodes(8, 1, A100), f"1 node with 2 GPUs, but {EIGHT}"),
        ({"resources.device": "GPU"}, nodes(3), f"1 node with 2 GPUs, but {NONE}"),
        (
            {"resources.nodes": 2, "resources.device": "GPU"},
            MIXED,
            f"2 nodes with 2 GPUs, but there is 1 node with 2 {A100} and 4 nodes with 1 {A100}; {LESS}",
        ),
        (
            {"resources.device": "CPU"},
            [node("n", ready=False)],
            f"1 node with 2 CPU slots, but there is {NO_NODE}; add nodes, or ask for fewer or smaller ones",
        ),
    ],
    ids=["one GPU each", "and no CPU slots", "no GPUs", "too few that are large enough", "no node"],
)
def test_what_is_too_small_is_said(changes: dict[str, Any], there: Any, message: str) -> None:
    answer = place(changed(PPO, changes), there)
    assert answer.reason == "NoFeasiblePlacement"
    assert answer.message == f"spec.resources asks for {message}"


def test_pools_by_hand_without_any_gpu_are_refused_for_that() -> None:
    job = changed(PPO, {"placement": {"mode": "Manual", "pools": POOLS}, "resources.device": "GPU"})
    assert place(job, nodes(3)).message == "there are 3 nodes with no GPU slots"


def test_gpus_are_told_apart_from_cpu_slots() -> None:
    assert mapped(example_jobs()[PPO], nodes(1)).gpus == 0
    on_gpus = mapped(example_jobs()[PPO], GPUS)
    assert on_gpus.gpus == on_gpus.slots > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"resources.device": "CPU", "resources.nodes": MOST},
        {"resources.device": "CPU", "resources.nodes": MOST, "resources.slotsPerNode": 1024},
        {"resources.device": "GPU", "resources.maxNodes": MOST, "models.actor.uri": "hf://a/b"},
        {
            "resources.device": "CPU",
            "resources.maxNodes": MOST,
            "models.actor.uri": "hf://a/b",
            "training.promptBatchSize": 2**31 - 1,
            "training.miniBatchSize": None,
        },
    ],
    ids=["CPU slots", "a hundred million", "unknown shapes", "a prime batch"],
)
def test_the_most_nodes_take_little_memory_and_few_tries(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def counted(*arguments: Any) -> Any:
        tries.append(1)
        return mapper.place(*arguments)

    monkeypatch.setattr("rlhf_operator.placement.ask_mapper.place", counted)
    job = changed(PPO, changes)
    seen = snapshot(job, None)
    tracemalloc.start()
    try:
        assert map_job(job, seen, SETTINGS).reason != "MapperError"
        assert tracemalloc.get_traced_memory()[1] < 30e6
    finally:
        tracemalloc.stop()
    assert len(tries) < 100


def test_pools_by_hand_fit_where_the_widest_goes_first() -> None:
    def fit(*sizes: tuple[int, int], nodes: tuple[ObservedNode, ...]) -> bool:
        names = (["actor"], ["critic"], ["reference", "reward"])
        pools = [
            {"name": f"p{place}", "models": names[place], "nodes": count, "slotsPerNode": slots}
            for place, (count, slots) in enumerate(sizes)
        ]
        job = changed(PPO, {"placement": {"mode": "Manual", "pools": pools}, "resources.device": "GPU"})
        return not place(job, nodes).message.startswith("the pools of spec.placement need")

    two = nodes(2, 8, A100)
    assert fit((2, 3), (1, 5), (1, 4), nodes=two)
    assert fit((8, 1), (1, 8), (2, 4), nodes=nodes(3, 8, A100))
    assert not fit((1, 1), (3, 5), (1, 1), nodes=two)
    assert not fit((MOST, 1), (1, 1), (1, 1), nodes=two)
    assert fit((4, 2), (2, 4), (1, 1), nodes=(*two, *nodes(1, 1, H100, "h")))
    assert not fit((4, 2), (2, 4), (2, 1), nodes=(*two, *nodes(1, 1, H100, "h")))


def test_max_nodes_lets_a_job_take_the_nodes_that_there_are() -> None:
    pair = changed(PPO, {"resources.nodes": 1, "resources.maxNodes": 4, "models.actor.parallelism": {"data": 16},
                         "models.critic.parallelism": {"data": 16}, "models.reference.parallelism": {"data": 16},
                         "models.reward.parallelism": {"data": 16}, "resources.slotsPerNode": 8})  # fmt: skip
    assert place(pair, nodes(1, 8, A100)).reason == "NoFeasiblePlacement"
    assert mapped(pair, nodes(2, 8, A100)).slots == 16
    assert mapped(pair, nodes(3, 8, A100)).slots == 16


def test_nodes_of_two_types_are_both_used() -> None:
    job = changed(PPO, {"resources.nodes": 2, "resources.slotsPerNode": None})
    mixed = (*nodes(1, 8, A100, "a"), *nodes(1, 8, H100, "h"))
    mapping = mapped(job, mixed)
    assert {pool.gpu for pool in mapping.pools} <= {"a100-80g", "h100-80g"}
    for pool in mapping.pools:
        assert pool.nodes * pool.slots_per_node <= 8, "a pool lies in one group"
    assert mapped(job, (*mixed, *nodes(1, 8, H100, "i"))).predicted_step_seconds == pytest.approx(
        mapped(job, nodes(2, 8, H100)).predicted_step_seconds
    ), "two of the faster type are there"


def test_a_product_not_in_the_table_has_no_prediction() -> None:
    answer = place(changed(PPO, {"resources.slotsPerNode": 8}), nodes(1, 8, "NVIDIA-X9000"))
    assert answer.reason == "ShapesUnknown"
    assert answer.mapping
    assert [(pool.name, pool.nodes, pool.slots_per_node) for pool in answer.mapping.pools] == [("all", 1, 8)]
    assert answer.mapping.predicted_step_seconds is None
    assert "the figures of GPU NVIDIA-X9000 are not known" in answer.message


def test_an_unknown_product_is_named_among_others() -> None:
    job = changed(PPO, {"resources.nodes": 2, "resources.slotsPerNode": 8})
    mixed = (*nodes(1, 8, A100, "a"), *nodes(1, 8, "NVIDIA-X9000", "x"))
    assert "GPU NVIDIA-X9000 are not known; cluster.gpus" in place(job, mixed).message
    by_hand = changed(PPO, {"placement": {"mode": "Manual", "pools": POOLS}, "resources.device": "GPU"})
    assert "GPU NVIDIA-X9000 are not known" in place(by_hand, nodes(2, 8, "NVIDIA-X9000")).message


CPU_SLOTS = {"resources.device": "CPU", "resources.slotsPerNode": 2}


def test_models_of_the_hub_live_together() -> None:
    job = changed("helpful-sft", {"models.actor.uri": "hf://someone/model", "resources.nodes": 2} | CPU_SLOTS)
    answer = place(job, nodes(2))
    assert answer.reason == "ShapesUnknown"
    assert answer.mapping
    assert answer.mapping.slots == 4
    assert "spec.models.actor.uri: hf://someone/model: its config.json has not been read" in answer.message


def test_with_unknown_shapes_the_most_fitting_nodes_are_taken() -> None:
    job = changed("helpful-sft", {"models.actor.uri": "hf://someone/model", "resources.maxNodes": 3} | CPU_SLOTS)
    assert mapped(job, nodes(3)).slots == 4, "6 slots do not divide the batch of 32"
    odd = changed("helpful-sft", {"models.actor.uri": "hf://someone/model"} | CPU_SLOTS | {"resources.slotsPerNode": 3})
    answer = place(odd, nodes(1))
    assert answer.reason == "InvalidPlacement"
    assert answer.message.startswith("spec.training.batchSize: gives 32 sequences, which do not divide by the 3 slots")


def test_an_input_that_is_not_there_leaves_shapes_unknown() -> None:
    job = example_jobs()["helpful-rm"]
    seen = dataclasses.replace(snapshot(job, nodes(1)), inputs={})
    assert map_job(job, seen, SETTINGS).reason == "ShapesUnknown"


def test_without_rights_to_nodes_the_manifest_is_believed() -> None:
    answer = place(changed(PPO, {"resources.device": "GPU", "resources.slotsPerNode": 4, "resources.nodes": 2}), None)
    assert answer.mapping
    assert answer.mapping.device == "GPU"
    assert answer.mapping.slots == 8
    assert "the nodes are not known, spec.resources was believed" in answer.message
    assert mapped(changed(PPO, {"resources.device": "CPU"}), None).device == "CPU"


def test_without_rights_to_nodes_the_manifest_says_the_device() -> None:
    for job in (example_jobs()[PPO], changed(PPO, {"placement": {"mode": "Manual", "pools": POOLS}})):
        answer = place(job, None)
        assert answer.reason == "NoFeasiblePlacement"
        assert answer.message == "the operator may not read nodes: write spec.resources.device, CPU or GPU"


POOLS = [
    {"name": "left", "models": ["actor", "reference"], "nodes": 1, "slotsPerNode": 2},
    {"name": "right", "models": ["critic", "reward"], "nodes": 2, "slotsPerNode": 1},
]


def test_pools_by_hand_stay_as_they_are() -> None:
    job = changed(PPO, {"placement": {"mode": "Manual", "pools": POOLS}})
    unseen = changed(PPO, {"placement": {"mode": "Manual", "pools": POOLS}, "resources.device": "CPU"})
    for each, there in ((job, nodes(1)), (job, nodes(2, 2, A100)), (unseen, None)):
        answer = place(each, there)
        assert answer.reason == "ManualPlacement", answer
        assert answer.mapping
        shown = [(pool.name, list(pool.models), pool.nodes, pool.slots_per_node) for pool in answer.mapping.pools]
        assert shown == [tuple(each.values()) for each in POOLS]


def test_pools_by_hand_take_what_slots_of_a_node_they_say() -> None:
    wide = [{**POOLS[0], "slotsPerNode": 8}, POOLS[1]]
    assert mapped(changed(PPO, {"placement": {"mode": "Manual", "pools": wide}}), nodes(2, 8, A100)).slots == 10


def test_pools_by_hand_that_no_node_can_take_are_refused() -> None:
    wide = [{**POOLS[0], "slotsPerNode": 4}, POOLS[1]]
    answer = place(changed(PPO, {"placement": {"mode": "Manual", "pools": wide}}), nodes(4, 2, A100))
    assert answer.reason == "NoFeasiblePlacement"
    assert "1 x 4 GPUs for pool left" in answer.message
    assert "4 nodes with 2 NVIDIA-A100-SXM4-80GB" in answer.message
    assert place(changed(PPO, {"placement": {"mode": "Manual", "pools": POOLS}}), ()).reason == "NoFeasiblePlacement"


def test_nodes_are_told_where_more_of_them_would_do() -> None:
    large = {f"models.{role}.shape": {"name": "llama-3-70b"} for role in ("actor", "critic", "reward")}
    asked = {"resources.slotsPerNode": 8, "training.promptBatchSize": 256, "training.miniBatchSize": None}
    job = changed(PPO, {**large, **asked})
    answer = place(job, nodes(8, 8, A100))
    assert answer.reason == "NoFeasiblePlacement"
    why = "the states of actor, critic, reference, reward take 1,819.7 GB, but 8 x a100-80g hold 645.7 GB, and half of"
    assert answer.message.startswith(f"no mapping onto 1 node with 8 {A100} fits: {why} the host memory, ")
    assert "spec.resources.maxNodes 4 lets it have 32 x a100-80g" in answer.message
    assert "maxNodes" not in place(job, nodes(1, 8, A100)).message


def test_a_model_that_fits_nowhere_is_told_what_would_do() -> None:
    job = changed(PPO, {"runtime.worker": {"cpu": "1", "memory": "2Mi"}})
    answer = place(job, nodes(1))
    assert answer.reason == "NoFeasiblePlacement"
    assert answer.message.startswith("no mapping onto 1 node with 2 CPU slots fits: the states of")


def test_sizes_that_cannot_be_are_the_user_s_mistake() -> None:
    job = changed(PPO, {"models.actor.parallelism": {"tensor": 7}})
    answer = place(job, nodes(1))
    assert answer.reason == "InvalidPlacement"
    assert answer.message.startswith("spec.models.actor.parallelism.tensor: is 7, which does not divide")


def test_a_fault_of_the_mapper_is_one_job_s_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of the test")

    monkeypatch.setattr("rlhf_operator.placement.ask_mapper.plan_job", fail)
    answer = map_job(example_jobs()[PPO], snapshot(example_jobs()[PPO], nodes(1)), SETTINGS)
    assert (answer.reason, answer.message) == ("MapperError", "ZeroDivisionError: of the test")


def test_answer_and_hash_depend_on_no_order_or_names() -> None:
    job = changed(PPO, {"resources.nodes": 2, "resources.slotsPerNode": None})
    there = [*nodes(2, 8, A100, "a"), *nodes(2, 4, H100, "h"), *nodes(3, 0, "", "c")]
    first = mapped(job, there)
    random.Random(0).shuffle(there)
    renamed = [dataclasses.replace(each, name=f"other-{each.name}") for each in there]
    assert mapped(job, renamed) == first
    assert first.input_hash == input_hash(job, snapshot(job, renamed), SETTINGS)


def test_the_hash_changes_with_what_matters_only() -> None:
    job = example_jobs()[PPO]
    base = input_hash(job, snapshot(job, GPUS), SETTINGS)
    same = changed(
        PPO, {"suspend": True, "runPolicy": {"backoffLimit": 9}, "runtime.env": [{"name": "A", "value": "b"}]}
    )
    assert input_hash(same, snapshot(same, nodes(3, 8, H100)), Settings(status_interval_seconds=3)) == base
    others = [
        changed(PPO, {"resources.slotsPerNode": 4}),
        changed(PPO, {"data.maxResponseTokens": 47}),
        changed(PPO, {"models.critic.uri": "hf://a/b"}),
    ]
    hashes = {input_hash(each, snapshot(each, GPUS), SETTINGS) for each in others}
    assert base not in hashes
    assert len(hashes) == len(others)
