"""Balance of a mixture's experts in updates: routers' choices are measured, and an auxiliary loss evens them out."""

import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_trainer.expert_rows import expert_count
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.distributed import ModelMesh, device_here, sum_over_ranks
from rlhf_trainer.training.experts import own_tokens, sparse_blocks, tokens_by_expert
from rlhf_trainer.training.model_input import ModelInput
from rlhf_trainer.training.models import inner

LAYER = re.compile(r"\.layers\.(\d+)\.")


class ExpertBalance:
    """Meter of a mixture's routers in the forward passes of updates, which also adds the auxiliary loss to gradients.

    The loss is transformers' `load_balancing_loss_func` (Switch Transformer, arXiv:2101.03961, equations 4 to 6), over
    the tokens that a rank routes in a micro-batch and the layers of a pipeline stage. Losses are weighted by their
    tokens. On one rank with one micro-batch the loss is transformers'; each of several ranks balances its own tokens.
    """

    def __init__(self, model: nn.Module, mesh: ModelMesh, *, coefficient: float) -> None:
        """coefficient: factor of the auxiliary loss; 0: routers are measured only."""
        pretrained = inner(model)
        self._mesh, self._config, self._coefficient = mesh, pretrained.config, coefficient
        self._is_on, self._is_open, self._tokens, self._scale = False, False, slice(0), 0.0
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._counts, self._entropy, self._places = torch.empty(0), torch.empty(0), torch.empty(0)
        routers = [each for block in sparse_blocks(model) for each in block.children() if hasattr(each, "top_k")]
        self._routers = len(routers)
        if mesh.layout.pipeline > 1:
            self._routers = int(sum_over_ranks([self._routers], mesh.pipeline_group)[0])
        names = {module: name for name, module in model.named_modules()}
        self._layers = [int(found[1]) for each in routers if (found := LAYER.search(names[each]))]
        for router in routers:
            router.register_forward_hook(self._see)
        if expert_count(self._config) > 1:
            model.register_forward_pre_hook(self._open)
            pretrained.base_model.register_forward_hook(self._close)

    def begin(self, inputs: Sequence[ModelInput]) -> None:
        """Begin an update of these micro-batches; a collective if there is an auxiliary loss."""
        experts, layers, layout = expert_count(self._config), self._config.num_hidden_layers, self._mesh.layout
        if experts < 2:
            return
        self._is_on = True
        self._counts = torch.zeros(layers, experts, dtype=torch.float64, device=device_here())
        self._places = torch.tensor(self._layers, device=device_here())
        self._entropy = torch.zeros(2, dtype=torch.float64, device=device_here())
        if self._coefficient:
            tokens = self._mesh.sum([sum(each.tokens.numel() - each.padding for each in inputs)])[0]
            if layout.context > 1:  # context-parallel ranks count their parts of the tokens
                tokens = sum_over_ranks([tokens], self._mesh.context_group)[0]
            self._scale = self._coefficient * layout.data * layout.context / max(tokens, 1.0)

    def record(self) -> None:
        """End the update and record the load of the experts over all ranks; a collective of the pool."""
        if not self._is_on:
            return
        self._is_on = False
        total = torch.cat([self._counts.flatten(), self._entropy])
        dist.all_reduce(total)
        *loads, entropy, tokens = total.tolist()
        every = torch.tensor(loads).view(self._counts.shape)
        used = every[every.sum(1) > 0]
        recorder.mean("experts/load_max_over_mean", float((used.amax(1) / used.mean(1)).sum()), float(len(used)))
        recorder.mean("experts/routing_entropy", entropy, tokens)
        recorder.mean("experts/dropped", 0.0, 1.0)

    def _open(self, _: nn.Module, given: tuple[Tensor, ModelInput]) -> None:
        text = given[1]
        self._is_open = self._is_on  # recomputation, outside of the model's forward pass, is not counted
        own = own_tokens(text.tokens.shape[1], self._mesh.coordinate("tensor"), self._mesh.layout.tensor)
        real = text.tokens.shape[1] - text.padding
        self._tokens = slice(0, max(0, min(own.stop, real) - own.start))

    def _see(self, _: nn.Module, __: Any, found: tuple[Tensor, Tensor, Tensor]) -> None:
        if self._is_open:
            self._seen.append((found[0][self._tokens], found[2][self._tokens]))

    def _close(self, _: nn.Module, __: Any, output: Any) -> None:
        """Count the experts chosen in the forward pass that ends, and add the auxiliary loss to its backward pass."""
        seen, self._seen, self._is_open = self._seen, [], False
        if not seen:
            return
        (every, chosen), experts = zip(*seen, strict=True), self._counts.shape[1]
        counts = torch.stack([tokens_by_expert(index, experts) for index in chosen])
        with torch.no_grad():
            self._counts.index_add_(0, self._places, counts.double())
            for logits in every:
                chances = logits.float().log_softmax(-1)
                self._entropy[0] -= (chances.exp() * chances).sum()
                self._entropy[1] += len(logits)
        if self._scale and len(every[0]):
            sums = torch.stack([logits.float().softmax(-1).sum(0) for logits in every]).sum(0)
            rows = sum(map(len, every))
            loss = experts * (counts.sum(0) / rows * sums / rows).sum() * (self._scale * rows / self._routers)
            output.last_hidden_state = _WithLoss.apply(output.last_hidden_state, loss)  # type: ignore[no-untyped-call]


class _WithLoss(torch.autograd.Function):
    """Identity on hidden states, whose backward pass also begins the backward pass of a loss."""

    @staticmethod
    def forward(_: Any, hidden: Tensor, __: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones((), device=gradient.device)
