"""The example and the picture of docs/size.md; `python -m tests.planning.page` writes them anew."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from textwrap import indent

from tests.repo.tree import ROOT

PAGE, PICTURE = ROOT / "docs/size.md", ROOT / "docs/images/size.svg"
DRAWN = "7b --response 4k --mean 1500 --gpus h100,a100"


def printed(question: str) -> str:
    """What `rlhf size` prints of a question, in a process of its own, without a terminal."""
    program = Path(sys.executable).with_name("rlhf")
    done = subprocess.run([program, "size", *question.split()], capture_output=True, text=True, check=True)
    return done.stdout


def example() -> tuple[str, str, str]:
    """The question of the page, what stands below it, and what has to stand there."""
    text = PAGE.read_text()
    (question,) = re.findall(r"^    rlhf size (.*)$", text, re.MULTILINE)
    shown = text[text.index("It prints\n\n") + len("It prints\n\n") : text.index("\nMODEL: ")]
    return question, shown, indent(printed(question), "    ")


def words_of(svg: str) -> list[str]:
    """The texts of a picture."""
    return re.findall(r">([^<>]*\w[^<>]*)</text>", svg)


def main() -> None:
    """Write both anew."""
    _, shown, expected = example()
    PAGE.write_text(PAGE.read_text().replace(shown, expected))
    printed(f"{DRAWN} --svg {PICTURE}")


if __name__ == "__main__":
    main()
