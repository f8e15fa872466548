"""Sequence parallelism: between cut modules, each tensor-parallel rank holds a part of the tokens (arXiv:2205.05198).

The tokens [1, N, H] are gathered before attention and MLP, and their outputs are reduce-scattered, so that norms and
residuals have N / t tokens. N must be a multiple of t.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel

TOKENS = Shard(1)
"""Placement of hidden states [1, N, H] of which each rank holds a part of the tokens."""
SummedOutput: Callable[[], ParallelStyle] = partial(RowwiseParallel, output_layouts=TOKENS)
"""Style of the last linear layer of attention or MLP: its output is reduce-scattered over the tokens."""


def cut_tokens(base: Any, axis: DeviceMesh, planned: Collection[str]) -> set[str]:
    """Make the layers and the final norm of a base model, in place, keep their rank's part of the tokens only.

    planned: names of the modules that tensor parallelism cuts. Returns the names of the attentions and MLPs that take
    all tokens and must give a part of them, by `SummedOutput`. Other cut blocks get and give all tokens, on every rank.
    """
    summed = set()
    for number, layer in enumerate(base.layers):
        for child, module in layer.named_children():
            name = f"layers.{number}.{child}"
            inside = [each.removeprefix(f"{name}.") for each in planned if each.startswith(f"{name}.")]
            if not inside and not hasattr(module, "layer_idx"):  # it computes each token by itself, unlike attention
                _take_part(module, axis)
                continue
            is_summed = bool(inside) and not any("." in each for each in inside)
            module.register_forward_pre_hook(partial(_gather_input, axis, keeps=is_summed), with_kwargs=True)
            if is_summed:
                summed.add(name)
            else:
                module.register_forward_hook(partial(_place_output, axis, Replicate(), TOKENS))
    if next(base.norm.parameters(), None) is not None:  # else another pipeline stage has the norm
        _take_part(base.norm, axis)
        base.norm.register_forward_hook(partial(_place_output, axis, TOKENS, Replicate()))
    return summed


def _gather_input(
    axis: DeviceMesh, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, keeps: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gather the hidden states of all ranks before a block.

    keeps: whether they stay a DTensor, so that the gradients of all matrices are added up before they are scattered.
    """
    given = args[0] if args else kwargs["hidden_states"]
    whole = DTensor.from_local(given, axis, [TOKENS], run_check=False).redistribute(placements=[Replicate()])
    hidden = whole if keeps else whole.to_local()
    return ((hidden, *args[1:]), dict(kwargs)) if args else ((), {**kwargs, "hidden_states": hidden})


def _place_output(
    axis: DeviceMesh, before: Placement, after: Placement, module: nn.Module, given: object, output: Any
) -> Any:
    if isinstance(output, tuple):  # attention's
        return (_place_output(axis, before, after, module, given, output[0]), *output[1:])
    return DTensor.from_local(output, axis, [before], run_check=False).redistribute(placements=[after]).to_local()


def _take_part(module: nn.Module, axis: DeviceMesh) -> None:
    """Make a module compute this rank's part of the tokens; its weights' gradients are summed over the ranks."""
    for each in (part for part in module.modules() if not hasattr(part, "is_transposed")):  # experts are cut otherwise
        for name, parameter in list(each.named_parameters(recurse=False)):
            whole = nn.Parameter(distribute_tensor(parameter.data, axis, [Replicate()]), parameter.requires_grad)
            each.register_parameter(name, whole)
        each.register_forward_pre_hook(_use_local_weights)
        each.register_forward_hook(_use_own_weights, always_call=True)


def _use_local_weights(module: nn.Module, _: object) -> None:
    """Let plain tensors hide a module's parameters during a forward pass, for fused kernels know no DTensor."""
    for name, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, DTensor):
            vars(module)[name] = parameter.to_local(grad_placements=[Partial()])


def _use_own_weights(module: nn.Module, _: object, __: object) -> None:
    for name in dict(module.named_parameters(recurse=False)):
        vars(module).pop(name, None)
