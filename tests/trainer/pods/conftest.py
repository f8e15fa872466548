"""Fixtures of the tests about pods."""

import pytest

from tests.trainer.chain.conftest import handlers as handlers  # noqa: PLC0414 pytest looks for it here
from tests.trainer.pods.become import Become


@pytest.fixture
def attempt(monkeypatch: pytest.MonkeyPatch) -> Become:
    return Become(monkeypatch)
