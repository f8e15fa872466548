"""How many threads the process of a GPU gets, by what Ray says of its nodes."""

from typing import Any

from rlhf_trainer.controller.resource_pool import threads_per_gpu


def node(*, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"Alive": alive, "Resources": resources}


def test_gpus_share_the_cores_of_the_node_that_has_fewest_for_each() -> None:
    nodes = [node(CPU=96.0, GPU=8.0), node(CPU=90.0, GPU=8.0), node(CPU=2.0), node(alive=False, CPU=1.0, GPU=8.0)]
    assert threads_per_gpu(nodes) == 11
    assert threads_per_gpu([node(CPU=4.0, GPU=8.0)]) == 1
