"""One Ray for the tests of this folder."""

from collections.abc import Iterator

import pytest
import ray

from rlhf_trainer.run.session import ray_session

MOST_SLOTS = 10
"""Of what any file here holds at a time."""


@pytest.fixture(scope="package")
def own_ray() -> Iterator[None]:
    with ray_session(None, cpu_slots=MOST_SLOTS):
        yield
    assert not ray.is_initialized()
