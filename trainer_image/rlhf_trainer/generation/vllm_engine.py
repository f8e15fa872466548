"""vLLM in this process: this rank's part of an engine, which gets the actor's weights and a seed per response."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig

from rlhf_api.spec import Rollout
from rlhf_trainer.errors import ConfigError, EnvironmentProblem, MemoryProblem, TrainerError
from rlhf_trainer.generation.vllm_groups import groups_on
from rlhf_trainer.tensor_slice import TensorSlice, WeightSlice

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process, which also trains
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
CPU_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",  # else the first call with log-probs on CPU compiles C++ for 20 s
}
CPU_BLOCK_TOKENS = 128
MAX_SEQUENCES = 256
UNMAPPED_SHARE = 0.4
"""Share of a GPU's memory for vLLM where neither the manifest nor the mapper sets it."""
GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class Response:
    """What the engine generated for one prompt."""

    tokens: Sequence[int]
    """Token ids, with the end-of-text token if it was reached."""
    log_probs: Sequence[float]
    """Log-probability of each token under the distribution it was drawn from."""
    finished: bool
    """Whether the response ended with end-of-text (False: cut at the length limit)."""


def response_seed(seed: int, step: int, row: int) -> int:
    """Seed of one response: a function of (seed, step, row) alone, never of ranks, pools or batching."""
    digest = hashlib.blake2b(f"{seed}/{step}/{row}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


class GenerationEngine:
    """vLLM with tensor and pipeline parallelism over ranks of torch.distributed, which must be initialised.

    All ranks of an engine are given the same prompts and seeds, and return the same responses.
    """

    def __init__(
        self,
        folder: str,
        *,
        config: PreTrainedConfig,
        rollout: Rollout,
        max_tokens: int,
        max_sequences: int,
        eos_token: int,
        device: torch.device,
        dtype: torch.dtype,
        trust_remote_code: bool,
        revision: str | None,
        tensor_groups: Sequence[Sequence[int]],
        stage_layers: Sequence[int] = (),
    ) -> None:
        """Build this rank's part; all ranks of the world do so together.

        folder: the model's config (weights come with `load_weights`); max_tokens: of prompt and response;
        tensor_groups: every rank of the world once, the p_g stages of an engine one after the other;
        stage_layers: the layers of each of the p_g stages, or nothing for one stage.
        Raises EnvironmentProblem if vLLM is missing or lays out weights in a way that is not known, MemoryProblem when
        its cache does not fit, and ConfigError for stages of unequal length on GPUs.
        """
        on_gpu = device.type == "cuda"
        shards, stages = len(tensor_groups[0]), max(len(stage_layers), 1)
        if on_gpu and len(set(stage_layers)) > 1:  # each would have room for another number of cached tokens
            raise ConfigError("spec.rollout.pipelineParallel: on GPUs the stages must have equally many layers")
        self._vllm = _import_vllm(on_gpu=on_gpu, stage_layers=stage_layers)
        self._rollout, self._eos_token = rollout, eos_token
        self._on_gpu, self._asleep = on_gpu, False
        sequences = min(max_sequences, MAX_SEQUENCES)
        layers = max(stage_layers, default=int(config.num_hidden_layers))
        memory: dict[str, Any] = (
            {"gpu_memory_utilization": rollout.gpu_memory_utilization or UNMAPPED_SHARE, "enable_sleep_mode": True}
            if on_gpu
            else _cache_on_cpu(config, max_tokens, sequences, layers=layers, shards=shards)
        )
        field = "spec.rollout.gpuMemoryUtilization" if on_gpu else "spec.data.maxResponseTokens"
        with _start_of_vllm(tensor_groups, field):
            self._engine = self._vllm.LLM(
                folder,
                dtype=str(dtype).removeprefix("torch."),
                trust_remote_code=trust_remote_code,
                revision=revision,
                tokenizer_revision=revision,
                load_format="dummy",
                enforce_eager=not on_gpu,
                max_model_len=max_tokens,
                max_num_seqs=sequences,
                seed=0,
                logprobs_mode="processed_logprobs",
                distributed_executor_backend="external_launcher",
                tensor_parallel_size=shards,
                pipeline_parallel_size=stages,
                worker_extension_cls="rlhf_trainer.generation.vllm_extension.WorkerExtension",
                **memory,
            )
        if stages > 1:
            self._call("allocate_stage_input")

    def held_shards(self) -> dict[str, TensorSlice]:
        """Which slice of each Hugging Face parameter this rank holds, in the order of the model."""
        held: dict[str, TensorSlice] = self._call("held_shards")
        return held

    def load_weights(self, pieces: Iterable[WeightSlice], holds: Mapping[str, TensorSlice]) -> dict[str, int]:
        """Replace the weights in place and drop cached prefixes; wakes the engine.

        `pieces` come in layer order; `holds` says which slice of each parameter this rank shall hold. Returns the
        `bit_sum` of what was written, by parameter. TrainerError names a parameter of which an element is missing or
        comes twice.
        """
        if self._asleep:
            self._wake("weights")
        with torch.random.fork_rng():
            sums: dict[str, int] = self._call("update_live_weights", pieces, holds)
        if self._asleep:
            self._wake("kv_cache")
            self._asleep = False
        self._engine.reset_prefix_cache()
        return sums

    def sleep(self) -> int:
        """Free cache and weights until the next `load_weights`; returns how many bytes that freed."""
        if self._asleep:
            return 0
        before = self.bytes_held()
        if self._on_gpu:
            self._engine.sleep(level=2)
        else:
            self._call("free_memory")
        self._asleep = True
        return before - self.bytes_held()

    def bytes_held(self) -> int:
        """Bytes of this rank's cache and weights on the device."""
        held: int = 0 if self._asleep and self._on_gpu else self._call("bytes_held")
        return held

    def _wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Allocate the weights or the cache again; the cache comes last, so it takes no memory during the reshard."""
        if self._on_gpu:
            self._engine.wake_up(tags=[part])
        else:
            self._call("allocate_weights" if part == "weights" else "allocate_cache")

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of vLLM's worker, which runs in this process."""
        (result,) = self._engine.collective_rpc(method, args=arguments)
        return result

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, max_tokens: int, greedy: bool = False
    ) -> list[Response]:
        """One response a prompt, in order; `max_tokens` of response at most.

        TrainerError while the engine sleeps.
        """
        if self._asleep:
            raise TrainerError("the generator sleeps; load_weights wakes it")
        rollout = self._rollout
        sampling = [
            self._vllm.SamplingParams(
                max_tokens=max_tokens,
                min_tokens=rollout.min_response_tokens,
                temperature=0.0 if greedy else rollout.temperature,
                top_p=1.0 if greedy else rollout.top_p,
                top_k=-1 if greedy else rollout.top_k,
                seed=seed,
                logprobs=0,
                stop_token_ids=[self._eos_token],
                ignore_eos=True,  # generation_config.json may name further end tokens, which the trainer does not know
                detokenize=False,
            )
            for seed in seeds
        ]
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        with torch.random.fork_rng():
            outputs = self._engine.generate(requests, sampling, use_tqdm=False)
        return [self._response(output.outputs[0]) for output in outputs]

    def _response(self, output: Any) -> Response:
        tokens = list(output.token_ids)
        log_probs = [chosen[token].logprob for token, chosen in zip(tokens, output.logprobs, strict=True)]
        return Response(tokens=tokens, log_probs=log_probs, finished=tokens[-1] == self._eos_token)


def _import_vllm(*, on_gpu: bool, stage_layers: Sequence[int]) -> Any:
    """vLLM, with the environment that it reads; it takes seconds, and only the actor of an RL job needs it."""
    wanted = ENVIRONMENT if on_gpu else {**ENVIRONMENT, **CPU_ENVIRONMENT}
    os.environ.update({name: value for name, value in wanted.items() if name not in os.environ})
    if stage_layers:
        os.environ["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, stage_layers))
    try:
        import vllm
    except ImportError as error:
        raise EnvironmentProblem(f"vLLM cannot be imported: {error}") from error
    return vllm


@contextmanager
def _start_of_vllm(tensor_groups: Sequence[Sequence[int]], field: str) -> Iterator[None]:
    """In this block vLLM starts: on these groups, with a check of its layout, without touching torch's random state.

    An error about memory becomes a MemoryProblem that names the field of the manifest.
    """
    from rlhf_trainer.generation.self_check import layout_checked  # it imports vLLM

    try:
        with torch.random.fork_rng(), groups_on(tensor_groups), layout_checked():
            yield
    except (MemoryError, RuntimeError, ValueError) as error:
        if not isinstance(error, MemoryError) and "memory" not in str(error).lower():
            raise
        reason = " ".join(str(error).split())[:300]
        raise MemoryProblem(f"{field}: vLLM's cache does not fit: {reason}") from error


def _cache_on_cpu(
    config: PreTrainedConfig, max_tokens: int, sequences: int, *, layers: int, shards: int
) -> dict[str, int]:
    """vLLM's options for a float32 KV cache that holds `sequences` full-length responses at once.

    layers: of this rank's stage; shards: tensor-parallel ranks. The number of blocks is given too, as all stages must
    use the same. MemoryProblem when the machine has less memory than that.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    blocks = sequences * -(-max_tokens // CPU_BLOCK_TOKENS) + 1
    needed = blocks * CPU_BLOCK_TOKENS * 2 * layers * max(int(heads) // shards, 1) * int(width) * 4
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise MemoryProblem(
            f"spec.data.maxResponseTokens: vLLM's cache for {sequences} responses of {max_tokens} tokens with their "
            f"prompts takes {needed / GIB:.0f} GiB, and this machine has {there / GIB:.0f} GiB"
        )
    return {"kv_cache_memory_bytes": needed, "num_gpu_blocks_override": blocks}
