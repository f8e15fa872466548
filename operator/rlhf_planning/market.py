"""Market of GPUs: short names, usual nodes and dated prices of GPU types, and clouds' instance types."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, TypeAdapter

from rlhf_api import kubectl_yaml
from rlhf_api.files import read_text
from rlhf_api.problems import Problem, SpecError, suggestion
from rlhf_api.tables import read_table
from rlhf_mapper.hardware import CPU_SLOT, GB, GPUS, Gpu, NodeGroup, gpu_of_product

Amount = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]


class Offer(NamedTuple):
    """Row of prices.yaml, which says what the columns are; prices are in USD for a GPU and an hour."""

    names: tuple[str, ...]
    node: int
    host: float | None
    on_demand: float | None
    spot: float | None
    source: str


class Market(NamedTuple):
    """Offers by GPU type, and the month or the file that the prices are from."""

    date: str
    gpus: Mapping[str, Offer]

    def nodes(self, gpu: str, count: int) -> NodeGroup:
        """Return `count` GPUs of a type as equal nodes: the largest up to the usual one that leave no GPU over."""
        offer = self.gpus.get(gpu, UNKNOWN)
        of_node = next(size for size in range(min(offer.node, count), 0, -1) if count % size == 0)
        host = None if offer.host is None else offer.host * GB
        return NodeGroup(gpu=GPUS[gpu], count=count // of_node, gpus_per_node=of_node, host_memory=host)


class Instance(NamedTuple):
    """Row of instances.yaml, which says what the columns are."""

    provider: str
    product: str
    gpus: int
    host_memory: float
    network: float | None


class OwnPrice(NamedTuple):
    """Price of a GPU type in a user's file, if it has one for spot, too."""

    on_demand: Amount
    spot: Amount | None = None


UNKNOWN = Offer((), 8, None, None, None, "")
"""Offer of a GPU type that the table lacks."""
PRICES = read_table(__package__, "prices.yaml", Market)
INSTANCES: Mapping[str, Instance] = read_table(__package__, "instances.yaml", dict[str, Instance])


def named_gpu(text: str, path: str = "--gpus") -> str:
    """Return the GPU type of a short name such as H100, or of its own name. Raises SpecError with close names."""
    name = text.strip().lower()
    short = {each: gpu for gpu, offer in PRICES.gpus.items() for each in offer.names}
    known = {**{gpu: gpu for gpu in GPUS if gpu != CPU_SLOT.name}, **short}
    if name not in known:
        raise SpecError([Problem(path, f"{text.strip() or 'empty'} is no known GPU; {suggestion(name, known)}")])
    return known[name]


def market_of(file: Path | None) -> Market:
    """Return the table's market, or with a user's prices instead: `h100: 2.5`, or `h100: [2.5, 0.9]` with spot."""
    if file is None:
        return PRICES
    text = read_text(file, path := f"--prices {file}")
    try:
        (document,) = kubectl_yaml.read(text, f"{file}: ")
        found = TypeAdapter(dict[str, Amount | OwnPrice]).validate_python(document)
    except SpecError:
        raise
    except ValueError:  # of pydantic, too
        message = "is no list of prices; write lines such as `h100: 2.5` or, with spot, `h100: [2.5, 0.9]`"
        raise SpecError([Problem(path, message)]) from None
    gpus = {gpu: offer._replace(on_demand=None, spot=None, source="") for gpu, offer in PRICES.gpus.items()}
    if len({named_gpu(name, path) for name in found}) < len(found):
        raise SpecError([Problem(path, "has several prices of one GPU type, such as of h100 and h100-80g")])
    for name, price in found.items():
        gpu, own = named_gpu(name, path), price if isinstance(price, OwnPrice) else OwnPrice(price)
        gpus[gpu] = gpus.get(gpu, UNKNOWN)._replace(**own._asdict(), source=str(file))
    return Market(str(file), gpus)


def instances_with(gpu: Gpu, count: int) -> list[str]:
    """Return the instance types that are one node of `count` GPUs: `AWS p5.48xlarge (2048 GiB, 3200 Gb/s)`."""
    return [
        f"{each.provider} {name} ({each.host_memory:g} GiB{'' if each.network is None else f', {each.network:g} Gb/s'})"
        for name, each in INSTANCES.items()
        if each.gpus == count and gpu_of_product(each.product) == gpu
    ]
