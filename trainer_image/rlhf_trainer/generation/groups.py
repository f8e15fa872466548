"""vLLM's parallel groups on ranks of our choice."""

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
    """While this block runs, vLLM builds its groups on these ranks instead of adjacent ones; all ranks enter it.

    vLLM counts places: tensor-parallel ones are consecutive, then pipeline stages, then engines. The rank at place i
    is the i-th of `tensor_groups`. What the ranks of a group share on CPU gets a name that no other job has, and
    none once all have opened it, so nothing is left behind however a rank ends.
    """
    from vllm.distributed import parallel_state

    ranks = [rank for group in tensor_groups for rank in group]
    original = parallel_state.init_model_parallel_group
    job = _name_of_this_start()

    def on_our_ranks(places: list[list[int]], *arguments: Any, **options: Any) -> Any:
        os.environ["VLLM_DIST_IDENT"] = job
        options["use_message_queue_broadcaster"] = False  # shared memory for a driver that sends work; here is none
        ours = [[ranks[place] for place in group] for group in places]
        assert all(group == sorted(group) for group in ours), f"torch numbers the ranks of {ours} in ascending order"
        group = original(ours, *arguments, **options)
        _forget(f"{job}-{group.unique_name}-[{'-'.join(map(str, group.ranks))}]")
        return group

    parallel_state.init_model_parallel_group = on_our_ranks
    try:
        yield
    finally:
        parallel_state.init_model_parallel_group = original


def _name_of_this_start() -> str:
    name = [secrets.token_hex(8)]
    dist.broadcast_object_list(name, src=0)
    return f"rlhf-{name[0]}"


def _forget(start: str) -> None:
    """Take the names from the shared memory of a group of this name; its ranks have it open."""
    for file in SHARED_MEMORY.glob("rlhf-*"):
        if file.name.startswith(start):
            file.unlink(missing_ok=True)
