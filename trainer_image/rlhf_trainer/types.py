"""Types that most packages share: one rank's rows of a batch, and the transfer declaration of a worker method."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from rlhf_trainer.protocols import TransferProtocol

if TYPE_CHECKING:  # torch: seconds that the controller does not wait for
    from torch import Tensor

Fields = Mapping[str, "Tensor"]
Method = TypeVar("Method", bound=Callable[..., Any])
Value = TypeVar("Value")

TRANSFER_MARK = "transfer"
PARENTS = "parents"
"""Batch field of rows that are trees: int64 [B, T], the index in the row of the token before each token in its branch.

It is less than the token's own index, and -1 at the first token of a tree. Padding has any value. A row of a batch
without the field is a text: each token follows the one before it.
"""


@dataclass(frozen=True, kw_only=True)
class HasFields(Generic[Value]):
    """Batch with named fields: of tensors on a rank, of references in the controller, of types in a recorded step."""

    step: int
    """Number of the step, from 1; 0 and below are the draws of an evaluation."""
    fields: Mapping[str, Value] = field(default_factory=dict)

    def with_fields(self, added: Mapping[str, Value]) -> Self:
        return replace(self, fields={**self.fields, **added})

    def with_prefixed(self, **others: Self) -> Self:
        """Return this batch with the fields of other batches of the same rows added as `<name>_<field>`."""
        return self.with_fields({f"{name}_{key}": each for name in others for key, each in others[name].fields.items()})


@dataclass(frozen=True, kw_only=True)
class Batch(HasFields["Tensor"]):
    """The rows [start, start + size) of a step's batch, as one rank holds them.

    Every field is a tensor [size, ...]. Fields [size, T] are aligned to tokens: prompt and response lie contiguous from
    position 0 and are padded on the right, so `log_probs[b, t]` belongs to token t given the tokens before it.
    """

    start: int
    """Index of this rank's first row in the step's batch."""
    size: int
    """Count of this rank's rows."""

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.fields:
            held = ", ".join(self.fields) or "nothing"
            raise LookupError(f"the batch holds no {name}, only what the call reads: {held}")
        return self.fields[name]

    @property
    def rows(self) -> Tensor:
        """Indices of this rank's rows in the step's batch, int64 [size]."""
        import torch

        return torch.arange(self.start, self.start + self.size)


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Declaration of a worker method, by `register`: its transfer protocol, and the fields that it reads and adds."""

    protocol: TransferProtocol
    reads: tuple[str, ...]
    reads_if_there: tuple[str, ...]
    adds: tuple[str, ...] | None
    """Names of the fields that the method returns; None: the method returns a small value, no fields of the batch."""
    phase: str
    row_by_row: bool = False
    in_groups: bool = False
    beside: str = ""
    """Role of a worker in the same process, which the method gets as an argument of this name; empty: none."""

    def fields_read(self, fields: Collection[str]) -> tuple[str, ...]:
        """Return the names of the fields that the method reads from a batch with `fields`."""
        return (*self.reads, *(name for name in self.reads_if_there if name in fields))


def register(
    protocol: TransferProtocol,
    *,
    reads: Sequence[str] = (),
    reads_if_there: Sequence[str] = (),
    adds: Sequence[str] | None = None,
    phase: str = "",
    row_by_row: bool = False,
    in_groups: bool = False,
) -> Callable[[Method], Method]:
    """Bind a worker method to a transfer protocol (HybridFlow section 4.1).

    reads, reads_if_there: the fields that a call waits for; the latter only if the batch has them.
    adds: the fields that the method returns, exactly; None for a method that returns a small value instead.
    phase: the part of the step to which the method's time counts; a method without a phase times its own parts.
    row_by_row: a row's result depends on that row alone, so groups of rows may be scored early (`rollout.stream`).
    in_groups: the method puts finished rows into its argument `outlet`, if the call has that argument.
    Raises TypeError if `protocol` is no TransferProtocol.
    """

    if not isinstance(protocol, TransferProtocol):
        raise TypeError(f"register got {protocol!r}, expected a protocol, such as rlhf.DP_PROTO")

    def mark(method: Method) -> Method:
        transfer = Transfer(
            protocol=protocol,
            reads=tuple(reads),
            reads_if_there=tuple(reads_if_there),
            adds=None if adds is None else tuple(adds),
            phase=phase,
            row_by_row=row_by_row,
            in_groups=in_groups,
        )
        setattr(method, TRANSFER_MARK, transfer)
        return method

    return mark


Marks = dict[str, Transfer]
"""Transfer declarations of a worker's methods, by name of the method."""


def transfers_of(worker_class: type, arguments: Mapping[str, Any] | None = None) -> Marks:
    """Return the transfer declarations of a worker's methods, by name of the method.

    arguments: those of the worker's constructor. If declarations depend on the arguments, the class has a class
    method `change_transfers(marks, **arguments)`, which gets and returns all declarations.
    """
    found = {name: getattr(getattr(worker_class, name), TRANSFER_MARK, None) for name in dir(worker_class)}
    marks = {name: mark for name, mark in found.items() if mark is not None}
    change: Callable[..., Marks] | None = getattr(worker_class, "change_transfers", None)
    return marks if change is None or arguments is None else change(marks, **arguments)


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Join the rows of all parts into one tensor; parts [b, T, ...] of different T are padded with zeros after T."""
    import torch
    from torch.nn.functional import pad

    if parts[0].dim() < 2:
        return torch.cat(list(parts))
    width = max(part.shape[1] for part in parts)
    return torch.cat([pad(part, (0, 0) * (part.dim() - 2) + (0, width - part.shape[1])) for part in parts])
