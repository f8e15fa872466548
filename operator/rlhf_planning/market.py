"""Market of GPUs: dated prices of GPU types, their usual nodes, and clouds' instance types."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from rlhf_api import kubectl_yaml
from rlhf_api.files import read_text
from rlhf_api.problems import Problem, SpecError
from rlhf_api.tables import read_table
from rlhf_mapper.hardware import NodeGroup, gpu_of_product, require_gpu

Amount = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]


class Offer(NamedTuple):
    """Row of prices.yaml, which says what the columns are; prices are in USD for a GPU and an hour."""

    on_demand: Amount | None = None
    spot: Amount | None = None
    source: str = ""


class Market(NamedTuple):
    """Offers by GPU type, and the month or the file that the prices are from."""

    date: str
    gpus: Mapping[str, Offer]

    def offer(self, gpu: str) -> Offer:
        """Return the prices of a GPU type; None where the market has none."""
        return self.gpus.get(gpu, Offer())


class Instance(NamedTuple):
    """Row of instances.yaml, which says what the columns are."""

    provider: str
    product: str
    gpus: int
    host_memory: float
    network: float | None


PRICES = read_table(__package__, "prices.yaml", Market)
INSTANCES: Mapping[str, Instance] = read_table(__package__, "instances.yaml", dict[str, Instance])


def usual_nodes(gpu: str, count: int) -> NodeGroup:
    """Return `count` GPUs of a type as equal nodes: the largest size, at most the usual one, that divides `count`."""
    kind = require_gpu(gpu, "--gpus")
    of_node = next(size for size in range(min(kind.node_size, count), 0, -1) if count % size == 0)
    return NodeGroup(gpu=kind, count=count // of_node, gpus_per_node=of_node)


def market_of(file: Path | None) -> Market:
    """Return the market of prices.yaml, or of a user's file: lines `h100: 2.5` or, with spot, `h100: [2.5, 0.9]`."""
    if file is None:
        return PRICES
    document = kubectl_yaml.read_one(read_text(file, path := f"--prices {file}"), f"{file}: ")
    try:
        found = TypeAdapter(dict[str, Amount | tuple[Amount, Amount]]).validate_python(document)
    except ValidationError:
        message = "is no list of prices; write lines such as `h100: 2.5` or, with spot, `h100: [2.5, 0.9]`"
        raise SpecError([Problem(path, message)]) from None
    prices = {name: each if isinstance(each, tuple) else (each, None) for name, each in found.items()}
    gpus = {require_gpu(name, path).name: Offer(*each) for name, each in prices.items()}
    if len(gpus) < len(found):
        raise SpecError([Problem(path, "has several prices of one GPU type, such as of h100 and h100-80g")])
    return Market(str(file), gpus)


def instances_with(gpu: str, count: int, held: float) -> list[str]:
    """Return the instance types that are one node of `count` GPUs: `AWS p5.48xlarge (2048 GiB, 3200 Gb/s)`.

    held: bytes of host memory that are needed for each GPU.
    """
    return [
        f"{each.provider} {name} ({each.host_memory:g} GiB{'' if each.network is None else f', {each.network:g} Gb/s'})"
        for name, each in INSTANCES.items()
        if each.gpus == count and each.host_memory * 2**30 >= held * count
        if (found := gpu_of_product(each.product)) and found.name == gpu
    ]
