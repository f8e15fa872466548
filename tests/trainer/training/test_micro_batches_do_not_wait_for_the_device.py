"""How often the host reads what is on the device: each reading waits until the device has caught up."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.training import model_input
from rlhf_trainer.training.trainer import ModelRunner
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.tiny import save_tiny
from tests.trainer.training.test_losses_do_not_depend_on_ranks_micro_batches_or_padding import ALIKE, CASES, update


class Readings(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what would be read from the device: single values, and tensors copied to the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self.on_host = 0, False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.read(function._schema.name == "aten::_local_scalar_dense")
        return function(*args, **(kwargs or {}))

    def read(self, times: int) -> None:
        self.count += times * (not self.on_host)

    def counted(self, method: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def read(tensor: Tensor) -> Any:
            self.read(1)
            return method(tensor)

        return read

    def not_counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method that only reads what is on the host anyway."""

        def run(*arguments: Any, **options: Any) -> Any:
            self.on_host = True
            try:
                return method(*arguments, **options)
            finally:
                self.on_host = False

        return run


@contextmanager
def readings() -> Iterator[Readings]:
    seen = Readings()
    with (
        patch.multiple(Tensor, cpu=seen.counted(Tensor.cpu), tolist=seen.counted(Tensor.tolist)),
        patch.multiple(
            ModelRunner,
            split=seen.not_counted(ModelRunner.split),
            assign_rows=seen.not_counted(ModelRunner.assign_rows),
        ),
        seen,
    ):
        yield seen


def readings_of(case: str, folder: str) -> list[int]:
    """Of an update with one micro-batch, and with one for each of its eight rows."""
    counts = []
    for budget in (100_000, 1):
        with readings() as seen:
            update(case, folder, budget, 0, False, None, ParallelSizes(data=1))
        counts.append(seen.count)
    return counts


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case in ALIKE else ()) for case in CASES]
)
def test_any_number_of_micro_batches_is_read_as_often(case: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", seed=3, labels=None if CASES[case][1] == "actor" else 1)
    one, eight = run_kept_ranks(1, readings_of, case, folder)[0]
    assert one == eight > 0


def test_only_fields_that_are_read_go_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[Tensor] = []

    def copy(tensor: Tensor, device: torch.device) -> Tensor:
        copied.append(tensor)
        return tensor.to(device)

    monkeypatch.setattr(model_input, "to_device", copy)
    mask = torch.ones(2)
    fields = model_input.FieldsOnDevice({"mask": mask, "tokens": torch.ones(2)}, torch.device("meta"))
    assert list(fields) == ["mask", "tokens"]
    assert fields["mask"].is_meta
    assert fields.get("mask") is fields["mask"]
    assert [each is mask for each in copied] == [True]
