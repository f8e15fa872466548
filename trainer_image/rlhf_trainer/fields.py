"""Type and shape of each field of a batch; workers' results are checked by it, and step graphs count bytes by it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class Width(Enum):
    """Number of values in a row of a batch's field."""

    ONE = "[B]"
    PROMPT = "[B, P]"
    """One value per token of the longest prompt of the batch (P)."""
    TEXT = "[B, T]"
    """One value per token of the longest prompt with its response (T)."""
    BYTES = "[B, C]"
    """One value per byte of the batch's longest JSON text (C), such as a row's data columns; a plan does not know C."""


Widths = Mapping[Width, int]


@dataclass(frozen=True)
class FieldType:
    """Type and shape of a field of a batch."""

    dtype: torch.dtype
    width: Width

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.width.value}"

    def row_bytes(self, widths: Widths) -> int:
        """Bytes of a row of the field; `widths`: the number of values of each Width."""
        return self.dtype.itemsize * widths[self.width]

    def fits(self, tensor: Tensor, *, rows: int) -> bool:
        """Whether a tensor has the field's type and number of dims, and `rows` rows."""
        dims = 1 if self.width is Width.ONE else 2
        return tensor.dtype == self.dtype and tensor.dim() == dims and len(tensor) == rows


NUMBER = FieldType(torch.float32, Width.ONE)
PER_TOKEN = FieldType(torch.float32, Width.TEXT)
TOKENS = FieldType(torch.int64, Width.TEXT)

FIELDS: Mapping[str, FieldType] = {
    "prompt_ids": FieldType(torch.int64, Width.PROMPT),
    "prompt_mask": FieldType(torch.float32, Width.PROMPT),
    **dict.fromkeys(("columns", "reward_parts", "raw_prompts"), FieldType(torch.uint8, Width.BYTES)),
    **dict.fromkeys(("tokens", "pretrain_tokens", "chosen_tokens", "rejected_tokens", "mismatched_tokens"), TOKENS),
    **dict.fromkeys(("attention_mask", "pretrain_attention_mask", "chosen_mask", "rejected_mask"), PER_TOKEN),
    **dict.fromkeys(("response_mask", "pretrain_response_mask"), PER_TOKEN),
    **dict.fromkeys(("chosen_response_mask", "rejected_response_mask"), PER_TOKEN),
    **dict.fromkeys(("rollout_log_probs", "old_log_probs", "ref_log_probs", "policy_version"), PER_TOKEN),
    **dict.fromkeys(("values", "cost_values", "advantages", "token_rewards", "token_costs"), PER_TOKEN),
    **dict.fromkeys(("token_weights", "turn_rewards", "mismatched_mask", "mismatched_response_mask"), PER_TOKEN),
    **dict.fromkeys(("played", "ref_mismatched", "reference_point", "desirable"), NUMBER),
    **dict.fromkeys(("valid", "finished", "sampled", "scores", "costs"), NUMBER),
    **dict.fromkeys(("ref_chosen", "ref_rejected", "chosen_safe", "rejected_safe"), NUMBER),
}
"""Name -> type of the fields of all algorithms. Of a field that is not listed only the number of rows is checked."""
UNDECLARED = FieldType(torch.float32, Width.BYTES)
"""The type that a step graph assumes for a field without a declaration."""


def require_declared(added: object, names: Collection[str], *, rows: int) -> None:
    """Raise TypeError or ValueError unless a worker's method added fields of these names, of declared type and shape.

    A rank may add none of them: a stage of a pipeline that is not the last has no output.
    """
    if not isinstance(added, Mapping) or (added and added.keys() != set(names)):
        found = ", ".join(added) if isinstance(added, Mapping) else type(added).__name__
        raise TypeError(f"gave {found}; registered are {', '.join(names) or 'none'}")
    for name, tensor in added.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is {type(tensor).__name__}, expected a tensor")
        if name in FIELDS and not FIELDS[name].fits(tensor, rows=rows):
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{name} of {rows} rows is {found}, declared as {FIELDS[name]}")
        if not tensor.dim() or len(tensor) != rows:
            raise ValueError(f"{name} is {list(tensor.shape)}, expected {rows} rows")
