"""Models on the meta device, and a record of how their weights are drawn, so that a rank keeps only its shards."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_trainer.tensor_slice import TensorSlice

_EMPTY = torch.ops.aten.empty.memory_format
_FILLS = (torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar)


@dataclass(frozen=True)
class DrawnTensor:
    """Source of a parameter's initial values: each rank repeats the recorded initialisation, and cuts out its shard."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    writes: list[Callable[[Tensor], object]] = field(default_factory=list)
    """Functions that repeat, on the whole parameter, each in-place operation of the parameter's initialisation."""

    def parts(self, wanted: TensorSlice) -> Iterator[tuple[TensorSlice, Tensor]]:
        whole = torch.empty(self.shape, dtype=self.dtype)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for write in self.writes:
                write(whole)
        yield wanted, whole[wanted.within(TensorSlice.whole(self.shape))]


class OnMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which models are made with weights on the meta device and real buffers (rotary frequencies).

    Only `torch.empty` gives meta tensors: a tensor made from values (a norm of ones) is real.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = {"device": "meta"} if func is _EMPTY else {}
        return func(*args, **{**(kwargs or {}), **device})


class Drawing(OnMeta):  # type: ignore[no-untyped-call]
    """`OnMeta` mode that records how weights are drawn; torch's random generator advances as if they were in memory."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn: dict[int, DrawnTensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func._schema.is_mutable and args[0].is_meta:  # noqa: SLF001 there is no public name
            self._record(func, args[0], args[1:], options)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is _EMPTY:
            made = DrawnTensor(tuple(result.shape), result.dtype)
            self._drawn[result.untyped_storage()._cdata] = made  # noqa: SLF001 as above
        return result

    def _record(self, operation: Any, target: Tensor, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        drawn = self.of(target)
        shape, strides, offset = tuple(target.shape), target.stride(), int(target.storage_offset())
        draws = torch.Tag.nondeterministic_seeded in operation.tags
        if target.shape == drawn.shape and (draws or operation in _FILLS):
            drawn.writes.clear()
        generator = torch.get_rng_state() if draws else None
        if draws:
            operation(torch.empty(target.shape, dtype=target.dtype), *arguments, **options)

        def write(whole: Tensor) -> None:
            if generator is not None:
                torch.set_rng_state(generator)
            operation(whole.as_strided(shape, strides, offset), *arguments, **options)

        drawn.writes.append(write)

    def of(self, tensor: Tensor) -> DrawnTensor:
        """Return the record of how a tensor on the meta device is initialised."""
        return self._drawn[tensor.untyped_storage()._cdata]  # noqa: SLF001 as above
