"""docs/size.md shows what the command prints and draws now."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_api.spec.model_shape import HUB_IDS, KNOWN
from rlhf_mapper.hardware import GPUS, SHORT_NAMES, gpu_of_product
from rlhf_planning.market import INSTANCES, PRICES
from tests.planning.page import DRAWN, PICTURE, example, printed, words_of


def test_the_example_is_what_the_command_prints() -> None:
    _, shown, expected = example()
    assert shown == expected, "python -m tests.planning.page writes it anew; then read the page"


@pytest.mark.slow
def test_the_picture_is_what_the_command_draws(tmp_path: Path) -> None:
    printed(f"{DRAWN} --svg {tmp_path / 'drawn.svg'} --png {tmp_path / 'drawn.png'}")
    drawn = (tmp_path / "drawn.svg").read_text()
    assert len(words_of(drawn)) > 15
    assert words_of(drawn) == words_of(PICTURE.read_text()), "python -m tests.planning.page draws it anew"
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")


def test_a_plain_installation_is_enough() -> None:
    missing = [
        "torch",
        "ray",
        "vllm",
        "transformers",
        "tree_sitter",
        "jinja2",
        "matplotlib",
        "huggingface_hub",
        "httpx",
    ]
    text = (
        f"import sys; sys.modules.update(dict.fromkeys({missing})); sys.argv = ['rlhf', 'size', '7b', '--json'];"
        "from rlhf_trainer.commands.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["files"]["trl.sh"]["text"]


def test_the_tables_name_what_exists() -> None:
    assert HUB_IDS.keys() == KNOWN.keys()
    assert sum(map(len, HUB_IDS.values())) >= 60
    assert not PRICES.gpus.keys() - GPUS.keys()
    assert not {*SHORT_NAMES.values()} - GPUS.keys()
    assert not SHORT_NAMES.keys() & GPUS.keys()
    assert [name for name, each in INSTANCES.items() if not gpu_of_product(each.product)] == []
