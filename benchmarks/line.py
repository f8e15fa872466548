"""Cost of a long queue of jobs for the operator while it drains: status writes, passes, and their CPU time.

    python benchmarks/line.py [--jobs N] [--room M]

Of N jobs M have room at once, and all M end a minute after they began. Cache, observer and decisions are the
operator's; API server, KubeRay and scheduler are played (tests/operator/shared_cluster.py) and not measured.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests is not installed

from rlhf_api.status import Status
from rlhf_operator.actions import Plan
from rlhf_operator.cluster.cache import Key, KindName
from tests.operator.shared_cluster import SharedCluster, node, spec


class Measured(SharedCluster):
    """Counts what the operator does."""

    calls = writes = depth = 0
    cpu_seconds = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        self.depth += 1
        begun = time.process_time()
        try:
            yield
        finally:
            self.depth -= 1
            self.cpu_seconds += 0.0 if self.depth else time.process_time() - begun

    def operate(self, key: Key) -> Plan | None:
        self.calls += 1
        with self.measured():
            return super().operate(key)

    def put(self, kind: KindName, document: Mapping[str, Any]) -> None:
        with self.measured():
            super().put(kind, document)

    def write(self, key: Key, status: Status) -> None:
        self.writes += self.job(key[1]).status != status
        super().write(key, status)

    def pass_over_all(self) -> None:
        while self.queue:
            self.operate(min(self.queue))


def main() -> None:
    parser = argparse.ArgumentParser(description="What a long line of jobs costs the operator.")
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--room", type=int, default=10)
    options = parser.parse_args()
    cluster = Measured([node(f"node-{number}", 2.05) for number in range(options.room)])
    for number in range(options.jobs):
        cluster.submit(f"job-{number:05}", spec())
    cluster.settle()
    joined, rounds = (cluster.writes, cluster.calls, cluster.cpu_seconds), 0
    while cluster.end_one():
        while cluster.end_one():
            pass
        cluster.settle()
        cluster.wait(60)
        rounds += 1
    assert len(cluster.begun) == options.jobs, "each job has begun once"
    for what, (writes, calls, seconds) in (
        ("joining", joined),
        ("draining", (cluster.writes - joined[0], cluster.calls - joined[1], cluster.cpu_seconds - joined[2])),
    ):
        each = f"{writes / options.jobs:.1f} status writes, {calls / options.jobs:.1f} passes"
        print(f"{what}: {each}, {1000 * seconds / options.jobs:.0f} ms of CPU a job; {writes} writes in all")
    print(f"{rounds} rounds")


if __name__ == "__main__":
    main()
