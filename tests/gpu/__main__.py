"""`python -m tests.gpu [--rehearse] [NAME ...]`: run the rungs that are named, or all, one after the other.

Each runs in a process of its own for so many seconds at most and prints one line of JSON. Exit code 1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import sys

from tests.gpu.ladder import RUNGS, climb


def main() -> int:
    """Run the rungs; a failure does not stop those above it."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(RUNGS)}; default: all")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with a tiny model")
    options = parser.parse_args()
    if unknown := set(options.names) - set(RUNGS):
        parser.error(f"{min(unknown)} is none of {', '.join(RUNGS)}")
    failed = False
    for name in options.names or RUNGS:
        line = climb(name, rehearse=options.rehearse)
        print(json.dumps(line), flush=True)
        failed |= not line["ok"]
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
