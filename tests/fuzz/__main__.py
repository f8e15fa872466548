"""`python -m tests.fuzz`: damages what users, pods and the API server hand in, at random, and looks for tracebacks.

Prints how often each outcome came, and for each defect the number of the first case that shows it: with `--first NUMBER
--cases 1` it comes again.
"""

from __future__ import annotations

import argparse
import sys

from tests.cluster.conftest import learn_rlhfjobs
from tests.cluster.launch import cluster
from tests.fuzz.server import server
from tests.fuzz.targets import TARGETS, Findings, tried, tried_in_a_folder


def main() -> int:
    """1 where a defect was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--target", choices=[*TARGETS, "server"], action="append", help="default: all but server")
    parser.add_argument("--cases", type=int, default=300, help="of each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    asked = parser.parse_args()
    has_defects = False
    for name in asked.target or TARGETS:
        found = _tried(name, asked.cases, asked.seed, asked.first)
        print(
            f"{name}, {asked.cases} cases from {asked.first}, seed {asked.seed}: {dict(found.outcomes.most_common())}"
        )
        for where, (number, shown) in found.defects.items():
            print(f"\ncase {number}: {where}\n{shown}")
        has_defects |= bool(found.defects)
    return int(has_defects)


def _tried(name: str, cases: int, seed: int, first: int) -> Findings:
    if name != "server":
        return tried_in_a_folder(TARGETS[name], cases=cases, seed=seed, first=first)
    with cluster("api") as running:
        learn_rlhfjobs(running)
        return tried(server(running), cases=cases, seed=seed, first=first)


if __name__ == "__main__":
    sys.exit(main())
