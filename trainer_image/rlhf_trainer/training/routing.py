"""Routing replay: a mixture's layers send tokens to the experts that the generator chose.

The experts of a packed row are an argument of each decoder layer. So the layer gets the same experts if the backward
pass recomputes it. The experts' weights come from the router's own scores, so the router learns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.expert_rows import REMEDY, ExpertRows
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.distributed import sum_over_ranks
from rlhf_trainer.training.experts import own_tokens
from rlhf_trainer.types import concatenate

if TYPE_CHECKING:  # `model_input` imports this module
    from rlhf_trainer.training.model_input import TokenBatch

ROUTERS = ("Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "OlmoeTopKRouter", "MixtralTopKRouter")
"""Classes of routers that return (logits, weights, experts), and whose weights are a softmax of all logits."""


class RoutingReplay:
    """Hooks that replay the generator's experts in a model's routers, and count where the routers' choices differ."""

    def __init__(self, model: Any, *, tensor: tuple[int, int] = (0, 1)) -> None:
        """model: LanguageModel of a type in `REPLAYED`, or this rank's pipeline stage, which may have no routers.

        tensor: (index of this tensor-parallel rank, number of these ranks).
        """
        self._tensor = tensor
        self._rows = ExpertRows.of(model.causal_lm.config)
        self._differing: list[Tensor] | None = None
        """Numbers of (differing choices, choices) of each router and measured pass; None: nothing is measured."""
        for name, layer in model.named_modules():
            if place := re.search(r"\blayers\.(\d+)$", name):
                self._attach(layer, int(place[1]))

    def _attach(self, layer: nn.Module, number: int) -> None:
        """Hook a decoder layer and its routers; the hooks of routers run before those of `ExpertBalance`."""
        routers: list[Any] = [each for each in layer.modules() if type(each).__name__ in ROUTERS]

        def give(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
            experts = options.pop("experts", None)
            for router in routers:
                router.replayed = experts
            return args, options

        layer = getattr(layer, "_checkpoint_wrapped_module", layer)  # else a recomputed pass would not call the hook
        disable: Any = torch.compiler.disable  # the arguments of a hook change with each pass
        layer.register_forward_pre_hook(disable(give), with_kwargs=True)
        for router in routers:
            router.register_forward_hook(disable(partial(self._replay, number)), prepend=True)

    def _replay(
        self, number: int, router: Any, _: Any, chosen: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a router's (logits, weights, experts), with the generator's experts for the tokens that have some."""
        if router.replayed is None:
            return chosen
        logits, own_weights, own = chosen
        given = self._rows.decode(router.replayed, number)
        given = given[own_tokens(len(given), *self._tensor)]
        assert len(given) == len(own), "the router sees other tokens than those of the packed row"
        is_given = given[:, :1] >= 0
        if self._differing is not None:
            differ = (given.sort(1).values != own.sort(1).values).any(1, keepdim=True) & is_given
            self._differing.append(torch.stack([differ.sum(), is_given.sum()]))
        experts = torch.where(is_given, given, own)
        weights = logits.softmax(-1, dtype=torch.float32).gather(1, experts)
        if getattr(router, "norm_topk_prob", True):  # Mixtral lacks this option, and always normalises
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(own_weights.dtype), experts

    @contextmanager
    def measured(self, *, limit: float) -> Iterator[None]:
        """Record `routing/differs`, the share of differing choices in the block; EnvironmentProblem above `limit`.

        A collective of the pool: the share is that of all ranks, which hold other rows, tokens or layers.
        """
        self._differing = found = list[Tensor]()
        yield
        self._differing = None
        differing, pairs = sum_over_ranks(torch.stack(found).sum(0).tolist() if found else (0, 0))
        recorder.mean("routing/differs", differing, pairs)
        if differing > limit * pairs:
            share = f"for {differing / pairs:.0%} of tokens and layers the generator chose other experts"
            raise EnvironmentProblem(f"{share} than the trainer's routers, so they are those of other tokens; {REMEDY}")


def packed_experts(
    texts: Sequence[TokenBatch], source: Tensor, packed: Tensor, *, shared: int, total: int
) -> Tensor | None:
    """Pack the experts of texts as `ModelInput` packs the tokens: uint8 [total, E]; None if no text has any.

    source, packed: int64 [m], the index of each text's tokens among the rows * T positions and in the packed row. A
    token that texts share has the experts of the first of them that has any; a text's last token has none.
    `routing/prompts_differ` is the share of the `shared` tokens, computed in another text, whose own experts differ.
    """
    given = next((text.experts for text in texts if text.experts is not None), None)
    if given is None:
        return None
    none = given.new_zeros(1, 1, given.shape[2])
    every = (none.expand(*each.tokens.shape, -1) if each.experts is None else each.experts for each in texts)
    experts = concatenate(list(every)).flatten(0, 1)
    is_known = (experts > 0).any(1)[source]
    known, places = experts[source[is_known]], packed[is_known]
    first = torch.full((total,), len(known)).scatter_reduce(0, places, torch.arange(len(known)), "amin")
    found = torch.cat([known, none[0]])[first]
    recorder.mean("routing/prompts_differ", (known != found[places]).any(1).sum(), shared)
    return found
