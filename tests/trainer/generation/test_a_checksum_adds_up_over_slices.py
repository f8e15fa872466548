"""The checksum of a parameter is that of its slices added up, and every bit counts."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from rlhf_trainer.generation.checksum import bit_sum

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slices_add_up_to_the_whole(dtype: torch.dtype) -> None:
    whole = torch.randn(6, 10).to(dtype)
    slices = [whole[:2], whole[2:, 3:], whole[2:, :3]]
    assert sum(int(bit_sum(part)) for part in slices) == bit_sum(whole) == bit_sum(whole.T.flip(0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_smallest_difference_shows(dtype: torch.dtype) -> None:
    whole = torch.randn(6, 10).to(dtype)
    other = whole.clone()
    other[3, 3] = torch.nextafter(other[3, 3], other[3, 3] + 1)
    assert bit_sum(whole) != bit_sum(other)


def test_a_sign_of_zero_shows() -> None:
    assert bit_sum(torch.zeros(3)) != bit_sum(-torch.zeros(3))


def test_a_large_tensor_does_not_overflow() -> None:
    assert bit_sum(torch.full((1 << 20,), torch.inf)) == (1 << 20) * 0x7F800000


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_can_leave_its_memory_afterwards(dtype: torch.dtype) -> None:
    """As the weights of a sleeping engine do, and those of a model that is away."""
    weight = torch.nn.Parameter(torch.randn(6, 10).to(dtype))
    bit_sum(weight)
    weight.data.untyped_storage().resize_(0)


def test_a_sum_on_a_gpu_is_not_waited_for() -> None:
    """A fake tensor of a GPU has no value that could be read."""
    with FakeTensorMode():
        total = bit_sum(torch.empty(6, 10, dtype=torch.bfloat16, device="cuda"))
    assert (total.device.type, total.dtype, total.shape) == ("cuda", torch.int64, ())
