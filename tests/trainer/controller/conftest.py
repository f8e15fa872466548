"""One Ray for the tests of this folder."""

from collections.abc import Iterator

import pytest
import ray

from rlhf_trainer.run.session import ray_session


@pytest.fixture(scope="module")
def own_ray() -> Iterator[None]:
    with ray_session(None, cpu_slots=4):
        yield
    assert not ray.is_initialized()
