"""Alignment of two models by optimal transport (Singh and Jaggi, arXiv:1910.05653), layer by layer.

A layer computes the same in any order of the MLP's neurons, of key and value heads, and of the query heads of each key
head. So the units of the second model are put in the order in which both models are most alike. Heads move as a whole,
and the residual stream keeps its order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_api.tables import read_table
from rlhf_trainer.errors import ConfigError

UNITS = read_table(__package__, "alignment.yaml", dict[str, dict[str, str]])
OUTPUTS, INPUTS = UNITS["outputs"], UNITS["inputs"]
Orders = Mapping[str, Tensor]
"""Kind of unit -> for each unit of the first model the index of its match in the second model: int64 [units]."""


class Cut(NamedTuple):
    """Dim of a parameter along which units lie."""

    dim: int
    blocks: Sequence[tuple[str, int, int]]
    """(kind: m, q or k as in alignment.yaml; number of units; elements of a unit) of each block, in order."""

    def units(self, values: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield (kind, [units, features]) of each block."""
        parts = torch.split(values.movedim(self.dim, 0), [count * width for _, count, width in self.blocks])
        yield from ((kind, part.reshape(count, -1)) for (kind, count, _), part in zip(self.blocks, parts, strict=True))

    def ordered(self, values: Tensor, orders: Orders) -> Tensor:
        """Return a parameter of the second model in the order of the first."""
        places = Cut(0, self.blocks).units(torch.arange(values.shape[self.dim]))
        return values.index_select(self.dim, torch.cat([units[orders[kind]].flatten() for kind, units in places]))


def cut_of(model: PreTrainedModel, name: str, values: Tensor) -> Cut | None:
    """Return how a parameter of a layer is cut into units; None if it has no units. ConfigError if they are unknown."""
    config: Any = model.config
    module, is_matrix, heads = name.rpartition(".")[0], values.ndim > 1, config.num_attention_heads
    above, leaf = module.split(".")[-2:]
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    is_input_first = "Conv1D" in str(type(model.get_submodule(module)))  # GPT-2's matrices are [in, out]
    kinds, dim = OUTPUTS.get(leaf, ""), int(is_matrix and is_input_first)
    if is_matrix and not kinds:
        kinds, dim = INPUTS.get(leaf) or INPUTS.get(f"{above}.{leaf}", ""), int(not is_input_first)
    if is_matrix and not kinds:
        raise ConfigError(f"OT does not know the order of {name}; take another method for a {config.model_type}")
    if not kinds or ("norm" in leaf and len(values) == width):  # a norm that all heads share
        return None
    sizes = {"q": (heads, width), "m": (values.shape[dim] // len(kinds), 1)}
    sizes["k"] = (getattr(config, "num_key_value_heads", heads), width)
    return Cut(dim, [(kind, *sizes[kind]) for kind in kinds])


def align(cuts: Mapping[str, Cut], first: Callable[[str], Tensor], second: Callable[[str], Tensor]) -> Orders:
    """Return the orders of the second model's units with the least squared difference between both models' weights.

    cuts: by name of the parameters; first, second: read a parameter. The likeness of two units is the inner product of
    all their weights. To the likeness of two key and value heads that of their query heads, best matched, is added.
    """
    likeness: dict[str, Any] = dict.fromkeys("mqk", 0.0)
    for name, cut in cuts.items():
        for (kind, one), (_, other) in zip(cut.units(first(name)), cut.units(second(name)), strict=True):
            likeness[kind] += one.double() @ other.double().T
    groups, size = len(likeness["k"]), len(likeness["q"]) // len(likeness["k"])
    queries = likeness["q"].view(groups, size, groups, size).transpose(1, 2)
    within = torch.stack([matched(pair) for pair in queries.flatten(0, 1)]).view(groups, groups, size)
    keys = matched(likeness["k"] + queries.gather(-1, within[..., None]).sum((-2, -1)))
    inner = within[torch.arange(groups), keys]
    return {"m": matched(likeness["m"]), "k": keys, "q": (keys[:, None] * size + inner).flatten()}


def matched(likeness: Tensor) -> Tensor:
    """Match rows and columns of [units, units] so that the sum is largest; return each row's column: int64 [units]."""
    return torch.from_numpy(linear_sum_assignment(likeness.double().numpy(), maximize=True)[1])
