"""For every run of tests: which share a process, and at the end the seconds of each folder and of the slowest files."""

from collections import defaultdict
from pathlib import PurePosixPath

import pytest

MOST_ROWS = 25
"""Of the table of folders and of the table of files."""
TRAINER = PurePosixPath("tests/trainer")
WORLDS = {
    "mistakes": [TRAINER / "chain/test_mistakes_end_with_a_sentence_and_their_exit_code.py"],
    "chain": [TRAINER / "chain"],
    "api server": [PurePosixPath("tests/cluster/api")],
    "pods": [PurePosixPath("tests/cluster/pods")],
    "ranks": [TRAINER / "training", TRAINER / "hybrid_engine", TRAINER / "generation", TRAINER / "rewards"],
}
"""What is costly to make and shared: a run of the chain, a cluster, a server of ranks. The first match counts."""


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
    for table in (folders, files):
        for path in sorted(table, key=lambda path: -table[path])[:MOST_ROWS]:
            terminalreporter.write_line(f"{table[path]:7.1f} s  {path}")
        terminalreporter.write_line("")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For `--dist loadgroup`: tests of a world run in one process, and the worlds begin before all other files."""
    if config.getoption("dist", "no") != "loadgroup":
        return
    groups = {item: group_of(PurePosixPath(item.nodeid.partition("::")[0])) for item in items}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    order = {world: number for number, world in enumerate(WORLDS)}
    items.sort(key=lambda item: order.get(groups[item], len(order)))


def group_of(file: PurePosixPath) -> str:
    """The world of a file of tests; a file that shares none is a group of its own."""
    for world, places in WORLDS.items():
        if any(file.is_relative_to(place) for place in places):
            return world
    return str(file)
