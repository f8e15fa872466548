"""`python -m tests.cluster api|pods FOLDER [--nodes N]`: a cluster in the foreground, until Ctrl-C."""

import argparse
import shutil
import sys
from pathlib import Path

from tests.cluster.api_level import run as run_api_level
from tests.cluster.build import API_GROUPS, PODS_GROUPS, NotBuiltError, built
from tests.cluster.capabilities import api_cannot_run, pods_cannot_run
from tests.cluster.node import run_node
from tests.cluster.pods_level import run as run_pods_level
from tests.cluster.processes import FailedError
from tests.cluster.settings import MAX_NODES, ROOT, new_settings


def main() -> int:
    """Run one; what stops it is one sentence on stderr."""
    if sys.argv[1:2] == ["_node"]:
        run_node(Path(sys.argv[2]), int(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("level", choices=["api", "pods"])
    parser.add_argument("folder", type=Path, help="everything goes there; it is emptied first")
    parser.add_argument("--nodes", type=int, default=1, choices=range(1, MAX_NODES + 1), help="level pods only")
    arguments = parser.parse_args()
    try:
        run(arguments.level, arguments.folder.resolve(), arguments.nodes)
    except (FailedError, NotBuiltError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run(level: str, folder: Path, nodes: int) -> None:
    """Run a cluster of a level until it is asked to end."""
    reason = pods_cannot_run() if level == "pods" else api_cannot_run()
    if reason:
        raise FailedError(reason)
    if ROOT in (folder, *folder.parents) or folder in ROOT.parents:
        raise FailedError(
            f"{folder} must be outside {ROOT}: containers see the repository, and the tokens are in there"
        )
    if folder.exists() and any(folder.iterdir()) and not (folder / "cluster.json").exists():
        raise FailedError(f"{folder} holds something that is not a cluster")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    if level == "pods":
        run_pods_level(new_settings("pods", folder, built(PODS_GROUPS), nodes))
    else:
        run_api_level(new_settings("api", folder, built(API_GROUPS)))


if __name__ == "__main__":
    sys.exit(main())
