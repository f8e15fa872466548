"""vLLM in this process: one engine a rank, fed with the actor's weights, seeded per response."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from rlhf_api.spec import Rollout
from rlhf_trainer.errors import EnvironmentProblem, MemoryProblem

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process, beside the trained weights
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
CPU_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",  # else the first call with log-probs on CPU compiles C++ for 20 s
}
CPU_BLOCK_TOKENS = 128
MAX_SEQUENCES = 256
GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class Response:
    """What the engine wrote for one prompt."""

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
    """vLLM with tensor parallel size 1 on this rank. Needs torch.distributed to be initialised."""

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
    ) -> None:
        """folder: the model's config (weights come with `load_weights`); max_tokens: of prompt and response.

        Raises EnvironmentProblem without vLLM and MemoryProblem when its cache does not fit.
        """
        on_gpu = device.type == "cuda"
        wanted = ENVIRONMENT if on_gpu else {**ENVIRONMENT, **CPU_ENVIRONMENT}
        os.environ.update({name: value for name, value in wanted.items() if name not in os.environ})
        try:
            import vllm  # takes seconds, and only the actor of an RL job needs it
        except ImportError as error:
            raise EnvironmentProblem(f"vLLM cannot be imported: {error}") from error
        self._vllm = vllm
        self._rollout = rollout
        self._eos_token = eos_token
        sequences = min(max_sequences, MAX_SEQUENCES)
        memory: dict[str, Any] = (
            {"gpu_memory_utilization": rollout.gpu_memory_utilization}
            if on_gpu
            else {"kv_cache_memory_bytes": _cache_bytes(config, max_tokens, sequences)}
        )
        field = "spec.rollout.gpuMemoryUtilization" if on_gpu else "spec.data.maxResponseTokens"
        with torch.random.fork_rng():  # vLLM seeds the process's generator
            try:
                self._engine = vllm.LLM(
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
                    worker_extension_cls="rlhf_trainer.generation.vllm_extension.WeightUpdate",
                    **memory,
                )
            except (MemoryError, RuntimeError, ValueError) as error:
                if not isinstance(error, MemoryError) and "memory" not in str(error).lower():
                    raise
                reason = " ".join(str(error).split())[:300]
                raise MemoryProblem(f"{field}: vLLM's cache does not fit: {reason}") from error

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights in place and forget cached prefixes; all ranks call it together."""
        with torch.random.fork_rng():
            self._engine.collective_rpc("load_hf_weights", args=(weights,))
        self._engine.reset_prefix_cache()

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, max_tokens: int, greedy: bool = False
    ) -> list[Response]:
        """One response a prompt, in order; `max_tokens` of response at most."""
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


def _cache_bytes(config: PreTrainedConfig, max_tokens: int, sequences: int) -> int:
    """Bytes, with float32, of a key and value cache in which `sequences` responses of full length fit at once.

    MemoryProblem when the machine has less memory than that.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    blocks = sequences * -(-max_tokens // CPU_BLOCK_TOKENS) + 1
    needed = blocks * CPU_BLOCK_TOKENS * 2 * int(config.num_hidden_layers) * int(heads) * int(width) * 4
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise MemoryProblem(
            f"spec.data.maxResponseTokens: vLLM's cache for {sequences} responses of {max_tokens} tokens with their "
            f"prompts takes {needed / GIB:.0f} GiB, and this machine has {there / GIB:.0f} GiB"
        )
    return needed
