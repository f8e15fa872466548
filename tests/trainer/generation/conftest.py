"""One process that has imported vLLM, from which ranks are forked; the tests' own process stays as it is."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from rlhf_trainer.generation.engine import CPU_ENVIRONMENT, ENVIRONMENT
from tests.trainer.ranks import run_ranks

RunRanks = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def vllm_ranks() -> Iterator[RunRanks]:
    """`run_ranks`, from the process that has imported vLLM."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,))
    process.start()

    def run(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        here.send((world_size, function, arguments))
        error, results = here.recv()
        assert not error, error
        return list(results)

    yield run
    here.send(None)
    process.join(timeout=10)
    process.kill()


def _serve(door: Connection) -> None:
    os.environ.update(ENVIRONMENT | CPU_ENVIRONMENT)
    import vllm.model_executor.models.llama
    import vllm.model_executor.models.qwen2
    import vllm.model_executor.models.qwen3
    import vllm.v1.attention.backends.cpu_attn
    import vllm.v1.core.sched.scheduler
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401

    from rlhf_trainer.generation import vllm_extension  # noqa: F401

    while job := door.recv():
        world_size, function, arguments = job
        try:
            door.send(("", run_ranks(world_size, function, *arguments)))
        except BaseException as error:  # noqa: BLE001 it is told to the test
            door.send((str(error) or repr(error), []))
