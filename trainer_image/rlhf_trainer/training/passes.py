"""Forward and backward passes over micro-batches: on the whole model, or on one stage of a pipeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_trainer.protocols import blocks
from rlhf_trainer.training.distributed import ModelMesh, device_here, local_shard
from rlhf_trainer.training.model_input import ModelInput, TokenBatch
from rlhf_trainer.training.models import MissingLayer, inner
from rlhf_trainer.types import Fields

if TYPE_CHECKING:  # whose module imports this one
    from rlhf_trainer.training.sharding import ShardedModel

RECEIVES_AHEAD = 3
"""Number of passes whose inputs a rank receives at a time: of the pass that it computes and of the next ones."""
TextsFunction = Callable[[Fields], Sequence[TokenBatch]]
"""Function from a micro-batch's fields to the model's input: one `TokenBatch` of b rows, or two for pairs."""
OutputFunction = Callable[[Any, Fields], Tensor]
"""Function (model output [rows, T], `Likelihood` or scores, all texts stacked; fields) -> loss, or tensor [b, t]."""
BeforeBackward = Callable[[bool], None]
"""Callback before each backward pass of an update; its argument is true before the last backward pass."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Rows of a batch that one forward pass computes, on the device, cut to the longest row."""

    fields: Fields
    """Fields of the micro-batch's rows, each [b, t] or [b]."""
    given: ModelInput
    rows: Tensor
    """Indices of the rows in the rank's batch: int64 [b]; empty for a padding micro-batch, which joins collectives."""


Passes = Callable[[Sequence[MicroBatch], OutputFunction, BeforeBackward | None], list[Tensor]]
"""Function that runs micro-batches and returns the results of `compute`; with a callback also runs backward passes."""


def run_whole(
    model: nn.Module, micros: Sequence[MicroBatch], compute: OutputFunction, before_backward: BeforeBackward | None
) -> list[Tensor]:
    """Run micro-batches (`Passes`) one after the other, on a rank that holds all pipeline stages of the model."""
    results = []
    for number, micro in enumerate(micros, start=1):
        result = compute(model(micro.given.tokens, micro.given), micro.fields)
        if before_backward:
            before_backward(number == len(micros))
            torch.autograd.backward(result)
        results.append(result.detach())
    return results


def keep_stage(model: nn.Module, mesh: ModelMesh) -> None:
    """Remove all but this rank's pipeline stage from a LanguageModel or Scorer, in place.

    A stage is a block of layers; the first also holds the embedding, the last the final norm and the head. A tied head
    stays on the last stage, as a copy of the embedding.
    """
    pretrained = inner(model)
    base: Any = pretrained.base_model
    mine = blocks(len(base.layers), mesh.layout.pipeline)[mesh.coordinate("pipeline")]
    for number in range(len(base.layers)):
        if number not in mine:
            base.layers[number] = MissingLayer()
    if not mesh.is_first_stage:
        base.embed_tokens = None
    if not mesh.is_last_stage:
        base.norm = MissingLayer()
        setattr(pretrained, "lm_head" if hasattr(pretrained, "lm_head") else "score", MissingLayer())


Received: TypeAlias = tuple[Tensor, dist.Work] | None
"""Buffer of a pass's input and the transfer that fills it; None if no other rank sends the input."""


@dataclass(eq=False)
class StageRun:
    """Passes of one model through the pipeline stage that this rank holds; arguments as of `Passes`."""

    model: ShardedModel
    micros: Sequence[MicroBatch]
    compute: OutputFunction
    before_backward: BeforeBackward | None

    def __post_init__(self) -> None:
        self.results: list[Tensor] = []
        """Results of `compute`, on the last stage."""
        self._mesh, self._ways = self.model.mesh, self.model.mesh.pipeline_ways
        self._held: deque[tuple[Tensor, Tensor]] = deque()
        """Input and output of each micro-batch between its forward and its backward pass."""
        self._sent: dict[bool, deque[tuple[Tensor, dist.Work]]] = {False: deque(), True: deque()}
        """Tensors of the last forward and backward passes, until the next rank has them."""

    def receive(self, *, is_backward: bool) -> Received:
        """Begin to receive the input of a pass: hidden states, or their gradient, [1, N / t, H]."""
        if self._mesh.is_last_stage if is_backward else self._mesh.is_first_stage:
            return None
        tokens, config = self.micros[0].given.tokens.shape[1], inner(self.model.module).config
        shape = 1, tokens // self._mesh.layout.tensor, config.hidden_size
        buffer = torch.empty(shape, dtype=self.model.compute_dtype, device=device_here())
        work = dist.irecv(buffer, self._neighbour(from_next=is_backward), self._ways[is_backward])
        assert work is not None, "this rank is in the group"
        return buffer, work

    def run(self, number: int, received: Received, *, is_backward: bool) -> None:
        """Compute the pass of micro-batch `number` once its input has arrived, and begin to send its output."""
        if received:
            received[1].wait()
        output = self._backward(number, received) if is_backward else self._forward(number, received)
        if self._mesh.is_first_stage if is_backward else self._mesh.is_last_stage:
            return
        work = dist.isend(output, self._neighbour(from_next=not is_backward), self._ways[is_backward])
        assert work is not None, "this rank is in the group"
        sent = self._sent[is_backward]
        sent.append((output, work))
        if len(sent) > self._mesh.layout.pipeline:  # no rank is so many micro-batches ahead in an update
            sent.popleft()[1].wait()

    def end(self) -> None:
        """Wait until the neighbours have all that was sent."""
        for sent in self._sent.values():
            for _, work in sent:
                work.wait()

    def _forward(self, number: int, received: Received) -> Tensor:
        micro = self.micros[number]
        given = received[0].requires_grad_() if received else micro.given.tokens
        output: Tensor = self.model.module(given, micro.given)
        if self._mesh.is_last_stage:
            output = self.compute(output, micro.fields)
            self.results.append(output.detach())
        if self.before_backward:
            self._held.append((given, output))
        return output.detach()

    def _backward(self, number: int, received: Received) -> Tensor:
        given, output = self._held.popleft()
        assert self.before_backward, "else there are no backward passes"
        self.before_backward(number + 1 == len(self.micros))
        torch.autograd.backward(output, received[0] if received else None)
        return given if given.grad is None else given.grad

    def _neighbour(self, *, from_next: bool) -> int:
        return self._mesh.rank_of_stage(self._mesh.coordinate("pipeline") + (1 if from_next else -1))


StagePass: TypeAlias = tuple[StageRun, bool, int]
"""(passes of a model, whether the pass is a backward one, index of the micro-batch)."""


def run_passes(passes: Sequence[StagePass]) -> None:
    """Run passes in order, of one model or of several that share a pipeline; inputs are received ahead."""
    inputs: deque[Received] = deque()
    for place, (run, is_backward, number) in enumerate(passes):
        for later, is_later_backward, _ in passes[place + len(inputs) : place + RECEIVES_AHEAD]:
            inputs.append(later.receive(is_backward=is_later_backward))
        run.run(number, inputs.popleft(), is_backward=is_backward)
    for run in {run for run, *_ in passes}:
        run.end()


def run_stage(
    model: ShardedModel,
    micros: Sequence[MicroBatch],
    compute: OutputFunction,
    before_backward: BeforeBackward | None,
) -> list[Tensor]:
    """Run micro-batches (`Passes`) on a rank that holds one of several stages: scoring in order, training by 1F1B.

    Only the last stage returns tensors.
    """
    run, passes = StageRun(model, micros, compute, before_backward), list[StagePass]()
    ahead = model.mesh.layout.pipeline - model.mesh.coordinate("pipeline")
    for number in range(len(micros) + ahead):
        if before_backward and number >= ahead:
            passes.append((run, True, number - ahead))
        if number < len(micros):
            passes.append((run, False, number))
    run_passes(passes)
    return run.results


def sum_tied_gradients(parameter: nn.Parameter | None, mesh: ModelMesh) -> None:
    """Give both copies of a tied embedding, on the first and the last stage, the sum of their gradients."""
    if parameter is None:
        return
    gradient = parameter.grad
    assert gradient is not None, "both uses of the embedding have a gradient"
    mine = local_shard(gradient)
    sent = mine.to(device_here())
    other = torch.empty_like(sent)
    group = mesh.pipeline_group
    peer = mesh.rank_of_stage(mesh.layout.pipeline - 1 if mesh.is_first_stage else 0)
    exchange = [dist.P2POp(dist.isend, sent, peer, group), dist.P2POp(dist.irecv, other, peer, group)]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    mine += other.to(mine.device)
