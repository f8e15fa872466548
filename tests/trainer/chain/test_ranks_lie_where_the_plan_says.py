"""Machines of a pool over two zones: those that hold the places of its ranks, as the operator's pods tell Ray."""

from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster

from rlhf_trainer.controller.resource_pool import ResourcePool
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    yield made
    ray.shutdown()
    made.shutdown()


def test_each_machine_of_a_pool_is_one_that_holds_its_place(cluster: Cluster) -> None:
    places = {"a": (1, 2), "b": (0,), "c": (1, 2)}
    nodes = {
        name: cluster.add_node(
            num_cpus=1, resources={"rlhf-pool-all": 1, **{f"rlhf-pool-all:{place}": 1 for place in held}}
        ).node_id
        for name, held in places.items()
    }
    ray.init(address=cluster.address, log_to_driver=False)
    pool = ResourcePool([1, 1, 1], name="all", device="CPU")
    pool.reserve(deadline=PATIENCE_SECONDS)
    first, *others = (machine for machine, _ in pool.machines())
    assert first == nodes["b"]
    assert set(others) == {nodes["a"], nodes["c"]}
    pool.release()
