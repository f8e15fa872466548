"""Patches of vLLM: its parallel groups are built on given ranks, and it destroys no other groups."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def groups_on(tensor_groups: Sequence[Sequence[int]]) -> Iterator[None]:
    """Make vLLM build its groups on these ranks instead of adjacent ones during the block; all ranks enter it.

    vLLM's own rank i becomes the i-th rank of `tensor_groups` (tensor-parallel ranks are consecutive, then pipeline
    stages, then engines). Shared memory of a group gets a name that is unique to the job. It is unlinked once all ranks
    have opened it, so no file stays behind however a rank ends.
    """
    from vllm.distributed import parallel_state

    ranks = [rank for group in tensor_groups for rank in group]
    original = parallel_state.init_model_parallel_group
    job = _name_of_this_start()

    def on_our_ranks(vllm_ranks: list[list[int]], *arguments: Any, **options: Any) -> Any:
        os.environ["VLLM_DIST_IDENT"] = job
        options["use_message_queue_broadcaster"] = False  # shared memory for a driver, which we lack
        ours = [[ranks[number] for number in group] for group in vllm_ranks]
        assert all(group == sorted(group) for group in ours), f"torch numbers the ranks of {ours} in ascending order"
        group = original(ours, *arguments, **options)
        _unlink(f"{job}-{group.unique_name}-[{'-'.join(map(str, group.ranks))}]")
        return group

    parallel_state.init_model_parallel_group = on_our_ranks
    try:
        yield
    finally:
        parallel_state.init_model_parallel_group = original


@contextmanager
def other_groups_kept() -> Iterator[None]:
    """Make a vLLM that ends during the block destroy its own groups only; unpatched it destroys all of torch's."""
    from vllm.distributed import parallel_state

    original = parallel_state.destroy_distributed_environment

    def destroy_its_world() -> None:
        parallel_state._WORLD.destroy()  # noqa: SLF001
        parallel_state._WORLD = parallel_state._NODE_COUNT = None  # noqa: SLF001

    parallel_state.destroy_distributed_environment = destroy_its_world
    try:
        yield
    finally:
        parallel_state.destroy_distributed_environment = original


def _name_of_this_start() -> str:
    name = [secrets.token_hex(8)]
    dist.broadcast_object_list(name, src=0)
    return f"rlhf-{name[0]}"


def _unlink(start: str) -> None:
    """Unlink a group's files in shared memory by the start of their names; its ranks have the files open."""
    for file in SHARED_MEMORY.glob("rlhf-*"):
        if file.name.startswith(start):
            file.unlink(missing_ok=True)
