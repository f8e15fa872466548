"""Patches of vLLM: groups on given ranks, shutdown of its own groups only, in-process inspection, draft models."""

import glob
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rlhf_trainer.generation.families import has_own_class

SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def groups_on(tensor_groups: Sequence[Sequence[int]]) -> Iterator[None]:
    """Make vLLM build its process groups on these ranks, not on adjacent ones; all ranks enter the block.

    vLLM's own rank i becomes the i-th rank of `tensor_groups` (tensor-parallel ranks are consecutive, then pipeline
    stages, then engines). Shared memory of a group gets a name that is unique to the job. It is unlinked once all ranks
    have opened it, so no file stays behind however a rank ends.
    """
    from vllm.distributed import parallel_state

    ranks = [rank for group in tensor_groups for rank in group]
    original = parallel_state.init_model_parallel_group
    of_this_start = [secrets.token_hex(8)]
    dist.broadcast_object_list(of_this_start, src=0)
    job = f"rlhf-{of_this_start[0]}"

    def on_our_ranks(vllm_ranks: list[list[int]], *arguments: Any, **options: Any) -> Any:
        os.environ["VLLM_DIST_IDENT"] = job
        options["use_message_queue_broadcaster"] = False  # shared memory for a driver, which we lack
        ours = [[ranks[number] for number in group] for group in vllm_ranks]
        assert all(group == sorted(group) for group in ours), f"torch numbers the ranks of {ours} in ascending order"
        group = original(ours, *arguments, **options)
        start = f"{job}-{group.unique_name}-[{'-'.join(map(str, group.ranks))}]"
        for file in SHARED_MEMORY.glob(f"{glob.escape(start)}*"):
            file.unlink(missing_ok=True)
        return group

    with patch.object(parallel_state, "init_model_parallel_group", on_our_ranks):
        yield


@contextmanager
def other_groups_kept() -> Iterator[None]:
    """Make vLLM's shutdown in the block destroy vLLM's own groups only; unpatched it destroys all of torch's groups."""
    from vllm.distributed import parallel_state

    def destroy_its_world() -> None:
        parallel_state._WORLD.destroy()  # noqa: SLF001
        parallel_state._WORLD = parallel_state._NODE_COUNT = None  # noqa: SLF001

    with patch.object(parallel_state, "destroy_distributed_environment", destroy_its_world):
        yield


@contextmanager
def classes_inspected_here() -> Iterator[None]:
    """Make vLLM inspect a model's class in this process, not in a new one that imports all of vLLM again."""
    from vllm.model_executor.models import registry

    with patch.object(registry, "_run_in_subprocess", lambda look: look()):  # there is no public hook
        yield


@contextmanager
def modules_served(code_revision: str | None) -> Iterator[None]:
    """Make vLLM's Transformers backend use the base model of `AutoModelForCausalLM`, as the trainer does, undecorated.

    Unpatched it asks for an `AutoModel`, which a model's own code may lack. It also decorates the class for
    torch.compile, after which the trainer's models of this class fail. code_revision: of a model on the hub.
    """
    from vllm.model_executor.models.transformers import base

    def base_model(config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
        is_known = type(config) in AutoModelForCausalLM._model_mapping._extra_content  # noqa: SLF001 no public name
        is_own = has_own_class(getattr(config, "auto_map", None), trust_remote_code=options["trust_remote_code"])
        code = {"code_revision": code_revision} if is_own and not is_known else {}
        whole = AutoModelForCausalLM.from_config(config, **options, **code)
        model: PreTrainedModel = whole.base_model
        model.base_model_prefix = whole.base_model_prefix  # vLLM maps the names of stored weights by it
        return model

    served = SimpleNamespace(from_config=base_model)
    undecorated = patch.object(base.Base, "_decorate_for_torch_compile", lambda _: None)
    with patch.object(base, "AutoModel", served), undecorated:
        yield


@contextmanager
def drafts_loaded() -> Iterator[None]:
    """Make vLLM read a draft model's weights from its files; the weights of the engine come with each update.

    vLLM 0.32 ignores its own `draft_load_config` here.
    """
    from vllm.config import LoadConfig
    from vllm.v1.spec_decode import draft_model

    from_files = partial(draft_model.get_model, load_config=LoadConfig(load_format="safetensors"))
    with patch.object(draft_model, "get_model", from_files):
        yield


def mend_drafts() -> None:
    """Make speculative decoding on CPU use the temperature, top-k and top-p of each row.

    vLLM 0.32 expands these numbers into a copy, as integers, and drops the copy. So drafts are judged by uninitialised
    numbers. Steps without drafts fail with a top-k.
    """
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    def expand(values: Tensor, ends: Tensor, total: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
        counts = ends.diff(prepend=ends.new_zeros(1))
        kept = torch.where(values == replace_from, values.new_tensor(replace_to), values)
        return kept.repeat_interleave(counts, output_size=total)

    def restrict(logits: Tensor, *limits: Tensor | None) -> Tensor:
        return apply_top_k_top_p(logits, *limits) if len(logits) else logits

    rejection_sampler.expand_batch_to_tokens, rejection_sampler.apply_top_k_top_p = expand, restrict
