"""Which content of the operator and the test cluster has passed the tests of the cluster on this machine.

`python -m tests.cluster.passed` prints the hash of all that these tests are about, or nothing, and a sentence on
stderr, if that content has passed them before; where tests of the cluster are required, always the hash.
`python -m tests.cluster.passed HASH` notes that it has passed. `make test` asks before it runs them.
"""

import hashlib
import sys

from tests.cluster.build import CACHE, folder
from tests.cluster.capabilities import api_cannot_run, pods_cannot_run, required
from tests.cluster.settings import ROOT

PASSED = CACHE / "passed"
"""A folder with an empty file for each content."""
ABOUT = (
    "crds",
    "operator",
    "helm",
    "examples",
    "requirements",
    "Dockerfile",
    "images",
    "tests/cluster",
    "tests/helm",
    "tests/operator",
    "tests/api/cases.py",
    "pyproject.toml",
    "trainer_image/rlhf_trainer/algorithms",
    "trainer_image/rlhf_trainer/pods",
    "trainer_image/rlhf_trainer/run/shapes.py",
    "trainer_image/rlhf_trainer/run_folder",
)
"""Files and folders of the repository."""


def content() -> str:
    """A hash of the files, the programs of the cluster and the levels that can run here."""
    digest = hashlib.sha256(f"{folder().name} {bool(api_cannot_run())} {bool(pods_cannot_run())}".encode())
    for place in ABOUT:
        for path in sorted([ROOT / place, *(ROOT / place).rglob("*")]):
            if path.is_file() and not ("__pycache__" in path.parts or ".egg-info/" in str(path)):
                digest.update(f"\0{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def main() -> int:
    """Tell or note."""
    if sys.argv[1:]:
        PASSED.mkdir(parents=True, exist_ok=True)
        (PASSED / sys.argv[1]).touch()
        return 0
    now = content()
    if (PASSED / now).exists() and not required():
        print(
            "tests/cluster is skipped: nothing has changed since it passed (make test-cluster runs it)", file=sys.stderr
        )
    else:
        print(now)
    return 0


if __name__ == "__main__":
    sys.exit(main())
