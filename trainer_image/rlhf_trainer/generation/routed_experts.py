"""The experts that vLLM's routers chose for each token of a response, from one of two sources.

On GPUs vLLM returns them with the response (by its V2 runner; not tested). Its runner for CPUs does not. There each
router writes its choices into a buffer indexed by KV cache slot. When a request ends, its rows are read by its cache
blocks. So a token has the experts of the pass that computed its keys and values, also in a cached prefix or after a
preemption.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.expert_rows import REMEDY, ExpertRows


class SlotExperts:
    """Chosen experts by slot of the KV cache, written by the routers of the model in this process."""

    def __init__(self, runner: Any, rows: ExpertRows) -> None:
        """runner: vLLM's model runner. EnvironmentProblem for several groups of KV caches, or without known routers."""
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        groups = runner.kv_cache_config.kv_cache_groups
        layers = [each for each in runner.get_model().modules() if isinstance(each, MoERunner)]
        routers = {each.layer_id: each.router for each in layers if isinstance(each.router, BaseRouter)}
        if len(groups) > 1 or len(routers) != len(layers) or not layers:  # one of several groups may forget tokens
            raise EnvironmentProblem(f"vLLM keeps no experts of this model's tokens; {REMEDY}")
        self._attention, self._block = groups[0].layer_names[0], int(groups[0].kv_cache_spec.block_size)
        slots = runner.kv_cache_config.num_blocks * self._block
        self.buffer = torch.zeros(slots, rows.layers, rows.chosen, dtype=rows.dtype)
        for layer, router in routers.items():
            router.set_capture_fn(partial(self._write, layer))

    def _write(self, layer: int, experts: Tensor) -> None:
        from vllm.forward_context import get_forward_context

        slots = get_forward_context().slot_mapping[self._attention][: len(experts)]
        used = slots >= 0  # padding has no slot
        self.buffer[slots[used], layer] = experts[used].to(self.buffer.dtype)

    def read(self, blocks: list[int], tokens: int) -> Tensor:
        """Return the experts [tokens, layers, chosen] of a request's first tokens."""
        starts = torch.tensor(blocks, dtype=torch.int64)[:, None] * self._block
        return self.buffer[(starts + torch.arange(self._block)).flatten()[:tokens]]


class ReturnedExperts:
    """Experts of finished responses: those that vLLM returned, or those read from `SlotExperts`."""

    def __init__(self, rows: ExpertRows) -> None:
        self.rows = rows
        self._ended: dict[str, Tensor] = {}

    def watch(self, scheduler: Any, slots: SlotExperts) -> None:
        """Read the experts of each request from `slots` before the scheduler frees the request's blocks."""
        free: Callable[..., Any] = scheduler._free_request  # noqa: SLF001 there is no public hook

        def read_and_free(request: Any, *arguments: Any, **options: Any) -> Any:
            (blocks,) = scheduler.kv_cache_manager.get_block_ids(request.request_id)
            number = request.request_id.partition("-")[0]  # vLLM adds a random suffix
            self._ended[number] = slots.read(blocks, request.num_tokens - 1)
            return free(request, *arguments, **options)

        scheduler._free_request = read_and_free  # noqa: SLF001

    def take(self, number: str, output: Any, *, tokens: int) -> Tensor:
        """Return and forget a finished request's experts, uint8 [tokens, E]. EnvironmentProblem if some are missing."""
        found = self._ended.pop(number, None)
        if found is None and output.routed_experts is not None:
            found = torch.from_numpy(output.routed_experts)
        expected = (tokens, self.rows.layers, self.rows.chosen)
        if found is None or found.shape != expected:
            what = "no experts" if found is None else f"experts {tuple(found.shape)}"
            raise EnvironmentProblem(f"vLLM returns {what} of a response's tokens, expected {expected}; {REMEDY}")
        return self.rows.encode(found)
