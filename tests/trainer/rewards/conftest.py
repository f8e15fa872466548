"""A server for rewards that are asked over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from rlhf_trainer.rewards import endpoint
from tests.trainer.rewards.stub_server import LOOK_SECONDS, Server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(endpoint, "FIRST_PAUSE_SECONDS", 0.01)
    made = Server()
    threading.Thread(target=made.serve_forever, args=[LOOK_SECONDS], daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()
