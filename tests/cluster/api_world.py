"""A cluster of level api for one measurement, whose result is written to the file that the command line names."""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.cluster.build import API_GROUPS, NotBuiltError, built, no_go
from tests.cluster.capabilities import api_cannot_run
from tests.cluster.client import Cluster
from tests.cluster.conftest import learn_rlhfjobs
from tests.cluster.launch import cluster
from tests.cluster.lifecycle import Document
from tests.cluster.processes import FailedError


def write_measured(measure: Callable[[Cluster, Path], Document], namespace: str) -> int:
    """Measure with a folder on a cluster that knows RLHFJobs; what stops it is one sentence on stderr."""
    try:
        if reason := api_cannot_run() or no_go():
            raise FailedError(reason)
        built(API_GROUPS)
        with cluster("api") as server, tempfile.TemporaryDirectory() as folder:
            learn_rlhfjobs(server)
            server.make_namespace(namespace)
            found = measure(server, Path(folder))
    except (FailedError, NotBuiltError, AssertionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    Path(sys.argv[1]).write_text(json.dumps(found))
    return 0
