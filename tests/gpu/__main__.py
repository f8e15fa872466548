"""`python -m tests.gpu [--rehearse] [LETTER ...]`: climb the ladder, or take the steps that are named.

Each step is a process with a time box. A step that has a result is not run again, unless it failed and is named.
Exit code 1 if a step fails.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.gpu.ladder import STEPS, Ladder
from tests.gpu.unpack import RESULTS


def main() -> int:
    """Take the steps; a failure stops none of those that follow."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    known = ", ".join(f"{letter} {step.name}" for letter, step in STEPS.items())
    parser.add_argument("letters", nargs="*", metavar="LETTER", help=f"default: all of {known}")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with a tiny model")
    parser.add_argument("--seconds", type=int, default=86_400, help="for all steps together")
    parser.add_argument("--output", type=Path, help="folder of the results, in which a later call goes on")
    options = parser.parse_args()
    if unknown := set(options.letters) - set(STEPS):
        parser.error(f"{min(unknown)} is no letter of {known}")
    usual = RESULTS.with_name("rlhf-rehearsal") if options.rehearse else RESULTS
    ladder = Ladder(options.output or usual, rehearse=options.rehearse)
    letters = options.letters or list(STEPS)
    return int(not ladder.climb(letters, seconds=options.seconds, repeats_failed=bool(options.letters)))


if __name__ == "__main__":
    sys.exit(main())
