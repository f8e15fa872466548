"""Helm, a job, and promtool where it is installed."""

import shutil

import pytest

from tests.cluster.capabilities import required
from tests.helm.conftest import helm
from tests.trainer.outputs.conftest import sft

__all__ = ["helm", "sft"]


@pytest.fixture(scope="session", autouse=True)
def promtool_is_there() -> None:
    """Skips without the package prometheus; fails where tests of the cluster are required."""
    if not shutil.which("promtool"):
        (pytest.fail if required() else pytest.skip)("promtool is missing; install the package prometheus")
