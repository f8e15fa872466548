"""What is carried to a machine without a network comes in parts of equal size and is put together there."""

from pathlib import Path

import pytest

from tests.gpu.carry import COUNT, commands, compress, is_carried, split
from tests.gpu.unpack import FIRST, PIECE, unpack

COMMAND_CHARACTERS = 2000


@pytest.mark.parametrize("first", [0, 10, 40, 90])
def test_parts_are_about_equal_and_lose_nothing(first: int) -> None:
    pieces = split(first, 110, COUNT)
    assert sum(pieces) == 110
    sizes = [first + pieces[0], *pieces[1:]]
    assert max(sizes[1:]) - min(sizes[1:]) <= 1
    assert sizes[0] == max(first, *sizes)


@pytest.mark.parametrize(
    ("name", "carried"),
    [
        ("vllm/_C_stable_libtorch.abi3.so", True),
        ("vllm/_moe_C_stable_libtorch.abi3.so", False),
        ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", True),
        ("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", False),
        ("vllm/cumem_allocator.abi3.so", True),
        ("ray/_raylet.so", True),
        ("ray/jars/ray_dist.jar", False),
        ("math_verify/parser.py", True),
    ],
)
def test_only_what_a_dense_model_needs_is_carried(name: str, carried: bool) -> None:
    assert is_carried(name) == carried


def test_pieces_of_an_archive_are_joined_and_unpacked(tmp_path: Path) -> None:
    for name in ("early", "late"):
        (tmp_path / name).write_text(name * 1000)
        compress(tmp_path, [name], tmp_path / f"{name}.tar.xz")
    rest = (tmp_path / "late.tar.xz").read_bytes()
    for number, piece in enumerate((rest[:40], rest[40:60], rest[60:]), 1):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / PIECE.format(number=number, count=3)).write_bytes(piece)
    (tmp_path / "early.tar.xz").rename(tmp_path / "1" / FIRST)
    (tmp_path / "1" / "counted-x.json").write_text("{}")
    site, results = tmp_path / "site", tmp_path / "results"
    unpack(tmp_path / "1", site, results)
    assert [path.name for path in results.iterdir()] == ["counted-x.json"]
    assert (site / "early").read_text() == "early" * 1000
    assert not (site / "late").exists()
    unpack(tmp_path / "2", site, results)
    unpack(tmp_path / "3", site, results)
    assert (site / "late").read_text() == "late" * 1000
    assert sorted(path.name for path in site.iterdir()) == ["early", "late"]


def test_trainer_steps_come_first_and_the_ladder_last() -> None:
    made = commands([".gpu/1", ".gpu/2", ".gpu/3"])
    assert [part for _, part, _ in made] == [".gpu/1", ".gpu/2", ".gpu/3"]
    climbed = [command.partition("tests.gpu --")[2] for command, _, _ in made]
    assert climbed == ["seconds 280 A B C", "", "seconds 540"]
    assert max(len(command) for command, _, _ in made) < COMMAND_CHARACTERS
