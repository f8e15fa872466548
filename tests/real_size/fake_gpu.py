"""A device `gpu` that has no memory: its tensors are fake, and the values of small ones are known all the same.

Torch's `cuda` cannot stand here: without a driver torch 2.13's autograd engine refuses fake CUDA tensors. So the device
is torch's slot for a backend of one's own (PrivateUse1), which a process can fill once and not empty: import this in a
process that does nothing else.

What the product decides from data (how many rows, which tokens) needs values. Tensors of the host are therefore real,
but for large ones; a small tensor that goes to the GPU takes its value along, and an operation on such tensors alone is
done twice: faked, and for real on the host. A value that depends on a weight is unknown; it is read as 1.0, or as 0
where it is no floating-point number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from tests.real_size.live_bytes import GPU, HOST, LiveBytes

KNOWN_ELEMENTS = 2**18
"""The most elements of a tensor on the GPU whose value is known: a micro-batch's fields."""
REAL_ELEMENTS = 2**20
"""The most elements of a tensor that is made on the host for real."""
COUNTED_BYTES = 2**20
"""The least of a real tensor on the host that is counted."""
META = "meta"
_READS = torch.ops.aten._local_scalar_dense.default
NOT_ON_HOST = ("c10d", "_c10d", "fsdp", "aten::histc")
"""Beginnings of the names of operations that are only faked: torch counts whole numbers on a GPU alone."""


class _Stream:
    """A stream or an event: nothing is ever waited for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> _Stream:
        return self

    record_event = record

    def wait(self, *_: Any) -> None:
        pass

    wait_event = wait_stream = synchronize = wait

    def query(self) -> bool:
        return True


class _Device(_DummyBackendModule):
    """What torch.cuda is for CUDA."""

    Stream = Event = _Stream

    def current_stream(self, *_: Any) -> _Stream:
        return _Stream()

    def stream(self, *_: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def device_count(self) -> int:
        return 8

    def current_device(self) -> int:
        return 0

    def is_initialized(self) -> bool:
        return True

    def set_device(self, *_: Any) -> None:
        pass

    def synchronize(self, *_: Any) -> None:
        pass

    def get_rng_state(self, *_: Any) -> Tensor:
        return torch.zeros(0, dtype=torch.uint8)

    def set_rng_state(self, *_: Any) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


_setup_privateuseone_for_python_backend(GPU, backend_module=_Device())


class FakeGpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, tensors on the GPU are fake and counted."""

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = live
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it becomes operations on local tensors first
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE):
            return func(*args, **kwargs)  # DTensor works out shapes on fake tensors of its own
        tensors = list(_tensors((args, tuple(kwargs.values()))))
        if not self._is_fake(func, tensors, args, kwargs):
            out = func(*args, **kwargs)
            self._seen(out)
            return out
        if func is _READS and tensors:
            return self._read(tensors[0])
        known = self._on_host(func, tensors, args, kwargs)
        out = self._faked(func, types, tensors, args, kwargs, known)
        self.live.called(func, out, args, kwargs)
        self._remember(func, out, args, kwargs, known)
        if isinstance(out, FakeTensor) and out.device.type == HOST:
            self.live.phase.waits += _waits(func, tensors, kwargs)
            out = out if known is None else known
        self._seen(out)
        return out

    def _seen(self, out: Any) -> None:
        for each in _tensors(out):
            if isinstance(each, FakeTensor) or (each.device.type == HOST and each.nbytes >= COUNTED_BYTES):
                self.live.seen(each)

    def _is_fake(self, func: Any, tensors: list[Tensor], args: Any, kwargs: dict[str, Any]) -> bool:
        if any(isinstance(each, FakeTensor) for each in tensors) or kwargs.get("pin_memory"):
            return True
        device = kwargs.get("device") or next((each for each in args if isinstance(each, torch.device)), None)
        kind = torch.device(device).type if device is not None else HOST
        if kind == GPU:
            return True
        if kind == META or (device is None and any(each.is_meta for each in tensors)):
            return False
        if tensors:  # a shard in host memory that was on the meta device
            return tensors[0].is_meta and tensors[0].numel() > REAL_ELEMENTS
        return _elements(func, args) > REAL_ELEMENTS

    def _read(self, tensor: Tensor) -> Any:
        """The value of a tensor of one element."""
        self.live.phase.waits += tensor.device.type == GPU
        known = _known(tensor)
        if known is not None:
            return known.item()
        return 1.0 if tensor.is_floating_point() else 0

    def _on_host(self, func: Any, tensors: list[Tensor], args: Any, kwargs: dict[str, Any]) -> Any:
        """What the operation gives on the host; None where the value of a tensor is not known."""
        values = [_known(each) for each in tensors]
        if any(value is None or value.is_meta for value in values) or func._schema.name.startswith(NOT_ON_HOST):
            return None
        if not tensors and _elements(func, args) > KNOWN_ELEMENTS:
            return None
        on_host = {**tree_map(_as_known, kwargs), **({"pin_memory": False} if kwargs.get("pin_memory") else {})}
        return func(*tree_map(_as_known, args), **on_host)

    def _faked(
        self, func: Any, types: Sequence[type], tensors: list[Tensor], args: Any, kwargs: Any, known: Any
    ) -> Any:
        if not all(isinstance(each, FakeTensor) for each in tensors):
            with self._fake:
                args, kwargs = tree_map_only(Tensor, _like, (args, kwargs))
        try:
            return self._fake.dispatch(func, types, args, kwargs)
        except DynamicOutputShapeException:
            if known is None:
                raise
            with self._fake:
                return tree_map_only(Tensor, lambda value: torch.empty_like(value, device=GPU), known)

    def _remember(self, func: Any, out: Any, args: Any, kwargs: dict[str, Any], known: Any) -> None:
        """Give results their values, and take them from what was changed by values that are not known."""
        if func in _COLLECTIVES:
            _COLLECTIVES[func](args)
        elif known is not None:
            for fake, value in zip(tree_flatten(out)[0], tree_flatten(known)[0], strict=True):
                if isinstance(fake, FakeTensor) and value.numel() <= KNOWN_ELEMENTS:
                    fake.known = value  # type: ignore[attr-defined]
        elif func._schema.is_mutable:
            for argument, given in [*zip(func._schema.arguments, args, strict=False), *_named(func, kwargs)]:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    tree_map_only(FakeTensor, _forget, given)


def _named(func: Any, kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    return [(each, kwargs[each.name]) for each in func._schema.arguments if each.name in kwargs]


def _tensors(given: Any) -> Iterator[Tensor]:
    """The tensors among arguments or results."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, list | tuple):
        for each in given:
            yield from _tensors(each)


def _waits(func: Any, tensors: list[Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether the host waits for what it copies from the GPU."""
    copies = func._schema.name in ("aten::_to_copy", "aten::copy_")
    return copies and tensors[-1].device.type == GPU and not kwargs.get("non_blocking")


def _elements(func: Any, args: Any) -> int:
    """How many elements an operation without tensors makes, as its sizes or its end say."""
    flat = [number for each in args for number in (each if isinstance(each, list | tuple) else (each,))]
    numbers = [each for each in flat if isinstance(each, int) and not isinstance(each, bool)]
    if "arange" in func._schema.name:
        return max(numbers, default=0)
    product = 1
    for number in numbers:
        product *= number
    return product


def _known(tensor: Tensor) -> Tensor | None:
    return getattr(tensor, "known", None) if isinstance(tensor, FakeTensor) else tensor


def _as_known(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _known(value)
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == GPU else value


def _like(tensor: Tensor) -> Tensor:
    """A fake tensor in place of a real one, whose values torch would otherwise compute with."""
    if isinstance(tensor, FakeTensor):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _forget(tensor: FakeTensor) -> None:
    tensor.known = None  # type: ignore[attr-defined]


def _sum_over_ranks(args: Any) -> None:
    """All ranks of an all-reduce hold the same in the fake world."""
    size = dist.ProcessGroup.unbox(args[1]).size()
    if args[2].op() == int(dist.ReduceOp.RedOpType.SUM):  # type: ignore[attr-defined]
        for tensor in args[0]:
            if (value := _known(tensor)) is not None:
                value *= size


def _flash_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
) -> Tensor:
    """What CUDA does in scaled_dot_product_attention; a device of one's own would get a matrix [heads, T, T].

    FlashAttention takes keys and values of fewer heads as they are, but no mask and no values of another size than
    keys (DeepSeek); the kernel for those does not.
    """
    groups, is_flash = query.shape[1] // key.shape[1], attn_mask is None and query.shape[-1] == value.shape[-1]
    if groups > 1 and not is_flash:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if is_flash:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        output = kernel(query, key, value, is_causal=options["is_causal"], scale=options["scale"])[0]
    else:
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        mask = None if attn_mask is None else attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
        causal = attn_mask is None and options["is_causal"]
        output = kernel(query, key, value, mask, True, is_causal=causal, scale=options["scale"])[0]
    assert isinstance(output, Tensor)
    return output


def _gather_from_ranks(outputs: Sequence[Tensor], given: Tensor) -> None:
    """The same for a gather; an output has room for one rank's tensor or for those of all ranks."""
    value = _known(given)
    for output in outputs:
        mine = _known(output)
        if mine is not None and value is not None:
            mine.view(-1, value.numel()).copy_(value.view(1, -1))
        elif isinstance(output, FakeTensor):
            _forget(output)


def _vote_of_another_stage(args: Any) -> None:
    """A small number that one stage sends another is its vote that shapes are known before a schedule runs: 1."""
    for tensor in args[0]:
        if (value := _known(tensor)) is not None:
            value.fill_(1)


def _exchange_counts(args: Any) -> None:
    """Each rank sends this one what it sends itself. Only numbers of tokens are known that far."""
    arriving, sent = _known(args[0]), _known(args[1])
    if arriving is None or sent is None or arriving.shape != sent.shape:
        tree_map_only(FakeTensor, _forget, args[0])
        return
    group = dist.ProcessGroup.unbox(args[2])
    own = sent.chunk(group.size())[group.rank()]
    arriving.copy_(own.repeat(group.size(), *[1] * (own.dim() - 1)))


_COLLECTIVES: Mapping[Any, Callable[[Any], None]] = {
    torch.ops.c10d.allreduce_.default: _sum_over_ranks,
    torch.ops.c10d.recv_.default: _vote_of_another_stage,
    torch.ops.c10d._allgather_base_.default: lambda args: _gather_from_ranks([args[0]], args[1]),
    torch.ops.c10d.alltoall_base_.default: _exchange_counts,
    torch.ops.c10d.allgather_.default: lambda args: _gather_from_ranks(args[0][0], args[1][0]),
}
"""The collectives of small tensors whose values the product reads."""


def _not_copied(storage: torch.UntypedStorage, _: torch.UntypedStorage, **__: Any) -> torch.UntypedStorage:
    """Offload copies storages; those of fake tensors have no bytes."""
    return storage


@contextmanager
def fake_gpu(live: LiveBytes) -> Iterator[None]:
    """The block runs with a fake GPU, whose tensors `live` counts."""
    resize = torch.UntypedStorage.resize_

    def counted(storage: torch.UntypedStorage, size: int) -> Any:
        done = resize(storage, size)
        live.resized(storage)
        return done

    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=gpu) goes by way of the host
    try:
        with (
            patch.multiple(torch.UntypedStorage, resize_=counted, copy_=_not_copied),
            patch.object(torch.nn.functional, "scaled_dot_product_attention", _flash_attention),
            FakeGpu(live),
        ):
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)
