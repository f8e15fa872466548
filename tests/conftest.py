"""For every run of tests: which share a process, and at the end the seconds of each folder and of the slowest files."""

import gc
import os
import signal
from collections import defaultdict
from pathlib import PurePosixPath
from typing import Any

import pytest

UNIT_TESTS = "RLHF_UNIT_TESTS"
"""Variable with the folders of `make test-unit`, whose seconds `make test` prints together."""
MOST_ROWS = 25
"""Of the table of folders and of the table of files."""
TRAINER = PurePosixPath("tests/trainer")
OF_RANKS = (
    "rewards/test_a_reward_model_may_have_another_tokenizer.py",
    "rewards/test_rewards_of_every_form_are_scored_by_workers.py",
    "rewards/test_rollouts_are_kept.py",
    "environments/test_what_an_environment_says_is_not_learned.py",
    "programs/test_a_stand_in_ends_as_nccl_does.py",
    "unit/test_strangers_do_not_reach_torchs_store.py",
)
"""Tests of other folders that run on ranks."""
WORLDS = {
    "engines": [TRAINER / folder for folder in ("generation", "environments", "agents")],
    "ranks": [
        *(TRAINER / each for each in ("training", "hybrid_engine", "checkpoint")),
        *(TRAINER / file for file in OF_RANKS),
        PurePosixPath("tests/foreign/models"),
    ],
    "Ray": [TRAINER / "chain", TRAINER / "controller"],
    "pods": [PurePosixPath("tests/cluster/pods")],
    "api server": [PurePosixPath("tests/cluster/api")],
    "placement": [TRAINER / "placement", TRAINER / "elastic"],
}
"""Folders whose tests share what is costly to make: a run of the chain, a cluster, a server of ranks; longest first."""
WORLDS_AT_ONCE = 2
"""Each world starts many processes: with more of them on two cores, programs that wait for each other give up."""


def pytest_configure() -> None:
    """Heed Ctrl-C, also in a shell's background job, whose programs ignore it: tests send it to what they start."""
    gc.disable()  # until all is imported
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print both tables, from pytest's reports: set-up, test and tear-down, with those of other processes."""
    files: defaultdict[PurePosixPath, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                files[PurePosixPath(report.nodeid.partition("::")[0])] += report.duration
    folders: defaultdict[PurePosixPath, float] = defaultdict(float)
    for file, seconds in files.items():
        folders[file.parent] += seconds
    terminalreporter.section("seconds by folder and by file", sep="=")
    if unit := [PurePosixPath(folder) for folder in os.environ.get(UNIT_TESTS, "").split()]:
        seconds = sum(each for file, each in files.items() if any(file.is_relative_to(folder) for folder in unit))
        terminalreporter.write_line(f"{seconds:7.1f} s  the tests of make test-unit, here beside others\n")
    for table in (folders, files):
        for path in sorted(table, key=lambda path: -table[path])[:MOST_ROWS]:
            terminalreporter.write_line(f"{table[path]:7.1f} s  {path}")
        terminalreporter.write_line("")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `-n`: run the tests of a world in one process, as those of each other file, and few worlds at once."""
    from xdist.scheduler import LoadScopeScheduling

    class Worlds(LoadScopeScheduling):  # type: ignore[misc]
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._hosts: set[Any] = set()
            """Processes that run worlds, one after the other."""

        def _split_scope(self, nodeid: str) -> str:
            return group_of(PurePosixPath(nodeid.partition("::")[0]))

        def _assign_work_unit(self, node: Any) -> None:
            is_host = node in self._hosts or len(self._hosts) < WORLDS_AT_ONCE
            allowed = [group for group in self.workqueue if is_host or group not in WORLDS]
            if not allowed:
                node.shutdown()
                return
            if allowed[0] in WORLDS:
                self._hosts.add(node)
            self.workqueue.move_to_end(allowed[0], last=False)
            super()._assign_work_unit(node)

        def remove_node(self, node: Any) -> Any:
            self._hosts.discard(node)
            return super().remove_node(node)

    return Worlds(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In the processes of `-n` the worlds come before all other files."""
    if hasattr(config, "workerinput"):
        order = {world: number for number, world in enumerate(WORLDS)}
        items.sort(key=lambda item: order.get(group_of(PurePosixPath(item.nodeid.partition("::")[0])), len(order)))


def pytest_collection_finish() -> None:
    """What was imported stays until the end, and tests leave little in cycles: the collector need not look often."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 50)


def group_of(file: PurePosixPath) -> str:
    """The world of a file of tests, by its own path or its nearest folder; else it is a group of its own."""
    worlds = {place: world for world, places in WORLDS.items() for place in places}
    found = [place for place in worlds if file.is_relative_to(place)]
    return worlds[max(found, key=lambda place: len(place.parts))] if found else str(file)
