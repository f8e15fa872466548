"""One process that has imported vLLM, from which ranks are forked; the tests' own process stays as it is."""

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from rlhf_trainer.generation.vllm_arguments import environment
from tests.trainer.ranks import RankServer

RunRanks = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def vllm_ranks() -> RunRanks:
    """`run_ranks`, from the process that has imported vLLM."""
    return _server().run


@cache
def _server() -> RankServer:
    """One for all folders: pytest makes a session fixture again for each module that imports it."""
    return RankServer(import_vllm)


def import_vllm() -> None:
    os.environ.update(environment(on_gpu=False))
    import vllm.distributed.elastic_ep.elastic_execute
    import vllm.entrypoints.launchers.cli_args
    import vllm.entrypoints.llm
    import vllm.model_executor.layers.quantization.online.base
    import vllm.model_executor.models.llama
    import vllm.model_executor.models.qwen2
    import vllm.model_executor.models.qwen3
    import vllm.v1.attention.backends.cpu_attn
    import vllm.v1.core.sched.scheduler
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging
    from vllm.platforms.cpu import CpuPlatform

    from rlhf_trainer.generation import vllm_extension  # noqa: F401

    get_checkpoint_conversion_mapping("llama")
    configure_logging(LoggingConfig())
    CpuPlatform.register_triton_kernel_overrides()  # it looks through all modules, a third of an engine's start
    CpuPlatform.register_triton_kernel_overrides = staticmethod(lambda: None)
