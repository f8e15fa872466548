"""What is carried to a machine without a network fits into parts, in the order in which it is needed."""

import pytest

from tests.gpu.carry import LEFT_OUT, LIBRARIES, commands, split


def test_names_stay_in_order_and_parts_within_the_limit() -> None:
    assert split({"a": 30, "b": 30, "c": 40, "d": 1}, 60) == [["a", "b"], ["c", "d"]]


def test_a_file_that_fits_no_part_is_named() -> None:
    with pytest.raises(ValueError, match="large has 61 bytes"):
        split({"small": 1, "large": 61}, 60)


@pytest.mark.parametrize(
    ("name", "carried"),
    [
        ("vllm/_C_stable_libtorch.abi3.so", True),
        ("vllm/_moe_C_stable_libtorch.abi3.so", False),
        ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", True),
        ("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", False),
        ("vllm/cumem_allocator.abi3.so", True),
    ],
)
def test_of_vllm_only_a_dense_models_libraries_are_carried(name: str, carried: bool) -> None:
    assert LEFT_OUT.search(name)
    assert bool(LIBRARIES.search(name)) == carried


def test_each_part_is_unpacked_before_vllm_is_used() -> None:
    told = commands([".gpu/a", ".gpu/b", ".gpu/c"])
    assert [part for _, part in told] == [".gpu/a", ".gpu/b", ".gpu/c", "", ""]
    climbed = [command.partition("tests.gpu ")[2].partition(" |")[0] for command, _ in told]
    assert climbed == ["trainer", "", "generation generation-float32", "speed update", "seven speed-eager"]
