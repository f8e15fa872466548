"""Helm, as the test cluster builds it."""

from pathlib import Path

import pytest

from tests.cluster.build import NotBuiltError, built, no_go
from tests.cluster.capabilities import required
from tests.helm.rendering import Helm


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Skips where helm cannot be built; fails where it could be and is not."""
    if (reason := no_go()) and not required():
        pytest.skip(reason)
    try:
        folder: Path = built(["helm"])
    except NotBuiltError as error:
        pytest.fail(str(error), pytrace=False)
    return Helm(folder / "helm", tmp_path_factory.mktemp("helm"))
