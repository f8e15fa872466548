"""Fixtures of the tests about pods."""

from tests.trainer.chain.conftest import handlers as handlers  # noqa: PLC0414 pytest looks for it here
