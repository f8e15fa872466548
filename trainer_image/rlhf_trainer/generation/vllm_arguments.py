"""Environment variables and engine arguments of vLLM, made without an import of vLLM."""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from rlhf_api.spec.rollout import Rollout
from rlhf_api.tables import read_table
from rlhf_mapper.architecture import positions_of
from rlhf_trainer.errors import ConfigError, MemoryProblem
from rlhf_trainer.generation.families import must_quantize, uses_modules

SETTINGS = read_table(__package__, "vllm_settings.yaml", dict[str, dict[str, Any]])
"""Environment variables and engine arguments by the case in which vLLM gets them."""
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
"""Environment variable of vLLM; its effect on a process also lasts for the next job of a chain."""
STAGE_LAYERS = "VLLM_PP_LAYER_PARTITION"
"""Environment variable of vLLM with the number of layers of each pipeline stage."""
CPU_BLOCK_TOKENS = 128
CPU_STEP_TOKENS, GPU_STEP_TOKENS = 4096, 8192
"""Lower bound for vLLM's limit on the tokens that an engine reads or writes in a step on CPU; the limit on a GPU with a
draft model."""
MAX_SEQUENCES = {"CPU": 256, "GPU": 1024}
"""Most responses that an engine generates at a time.

On CPU the cache has room for that many full-length ones. On a GPU the free blocks of the cache limit vLLM first; the
bound is vLLM's own for large GPUs, and costs 0.6 GB of float32 logits at a vocabulary of 152,000.
"""
UNMAPPED_SHARE = 0.4
"""Share of a GPU's memory for vLLM where neither the manifest nor the mapper sets it."""
GIB = 1024**3


def environment(rollout: Rollout | None = None, *, on_gpu: bool, stage_layers: Sequence[int] = ()) -> dict[str, str]:
    """Return environment variables to set for vLLM: those that the user has not set, and the layers of stages."""
    wanted: dict[str, str] = SETTINGS["environment"] | SETTINGS["gpu_environment" if on_gpu else "cpu_environment"]
    if on_gpu and rollout and rollout.batch_invariant:
        wanted = {**wanted, BATCH_INVARIANT: "1"}
    if on_gpu and rollout and rollout.routing == "Replay":
        wanted = {**wanted, **SETTINGS["returns_experts_environment"]}
    stages = {STAGE_LAYERS: ",".join(map(str, stage_layers))} if stage_layers else {}
    return {name: value for name, value in wanted.items() if name not in os.environ} | stages


def sampling_arguments(
    rollout: Rollout, *, ends: list[int], seed: int, max_tokens: int, greedy: bool
) -> dict[str, Any]:
    """Return the arguments of vLLM's `SamplingParams`, as JSON types, for a response that ends with one of `ends`."""
    return {
        "max_tokens": max_tokens,
        "min_tokens": min(rollout.min_response_tokens, max_tokens),
        "temperature": 0.0 if greedy else rollout.temperature,
        **rollout.sampling_parameters(greedy=greedy),
        "seed": seed,
        "logprobs": 0,
        "stop_token_ids": ends,
        "ignore_eos": True,  # vLLM would add end tokens of its own; stop_token_ids has all
        "detokenize": False,
    }


def engine_arguments(
    *,
    config: PreTrainedConfig,
    rollout: Rollout,
    max_tokens: int,
    max_sequences: int,
    on_gpu: bool,
    dtype: torch.dtype,
    shards: int,
    stage_layers: Sequence[int],
    trust_remote_code: bool = False,
    draft: str | None = None,
) -> dict[str, Any]:
    """Return the arguments of vLLM's engine that follow from the job.

    max_sequences: most responses asked for at once; shards: tensor-parallel ranks of an engine; draft: folder or hub
    name of the draft model. MemoryProblem if the cache cannot fit; ConfigError for stages of unequal length on GPUs,
    for stages with routing replay, and for weights that cannot be quantised.
    """
    returns_experts = rollout.routing == "Replay"
    must_quantize(rollout, config, on_cpu=not on_gpu)
    if returns_experts and len(stage_layers) > 1:
        raise ConfigError("spec.rollout.routing: is Replay, but a pipeline stage of a generator knows its experts only")
    if on_gpu and len(set(stage_layers)) > 1:  # stages would have room for unequal numbers of cached tokens
        raise ConfigError("spec.rollout.pipelineParallel: on GPUs the stages must have equally many layers")
    sequences = min(max_sequences, MAX_SEQUENCES["GPU" if on_gpu else "CPU"])
    models = [config, AutoConfig.from_pretrained(draft)] if draft else [config]
    share = rollout.gpu_memory_utilization or UNMAPPED_SHARE
    device: dict[str, Any] = (
        {"gpu_memory_utilization": share, "enable_sleep_mode": True, **SETTINGS["nccl_only"]}
        if on_gpu
        else _cache_on_cpu(models, rollout, max_tokens, sequences, stages=stage_layers, shards=shards)
    )
    if draft:  # a draft model reads one more token per row; vLLM 0.32 would write them beyond its buffer
        step = device.get("max_num_batched_tokens", GPU_STEP_TOKENS)
        device |= {"max_num_scheduled_tokens": step, "max_num_batched_tokens": step + sequences}
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "load_format": "dummy",
        "enforce_eager": rollout.enforce_eager or not on_gpu,
        "max_model_len": max_tokens,
        "max_num_seqs": sequences,
        "seed": 0,
        "logprobs_mode": "processed_logprobs",
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": shards,
        "pipeline_parallel_size": max(len(stage_layers), 1),
        "worker_extension_cls": "rlhf_trainer.generation.vllm_extension.WorkerExtension",
        **_overrides(config, rollout),
        **({"kv_cache_dtype": "fp8"} if rollout.kv_cache else {}),
        **device,
        **(SETTINGS["returns_experts"] if on_gpu and returns_experts else {}),
        **_drafts(rollout, draft, heads=models[-1].num_attention_heads, stages=len(stage_layers), shards=shards),
        **(SETTINGS["backend"] if uses_modules(config, trust_remote_code=trust_remote_code) else {}),
    }


def _drafts(rollout: Rollout, draft: str | None, *, heads: int, stages: int, shards: int) -> dict[str, Any]:
    """Return vLLM's configuration of speculative decoding. ConfigError for an untried option, or a missing package.

    draft: folder or hub name of the draft model; heads: its attention heads; it has the generator's number of shards.
    """
    if not rollout.speculation:
        return {}
    if rollout.routing == "Replay" or stages > 1:
        why = "the generator has pipeline stages" if stages > 1 else "rollout.routing is Replay"
        raise ConfigError(f"spec.rollout.speculation: is given, but {why}, which was not tried with drafts")
    method, tokens = rollout.speculation.method, rollout.speculation.tokens
    if method == "Suffix" and find_spec("arctic_inference") is None:
        raise ConfigError("spec.rollout.speculation.method: is Suffix, which needs the package of the extra suffix")
    if heads % shards:
        why = f"has {heads} attention heads, which {shards} tensor-parallel shards do not divide"
        raise ConfigError(f"spec.rollout.speculation.draft: {why}")
    model = {"model": draft, "draft_tensor_parallel_size": shards} if draft else {}
    return {"speculative_config": {"num_speculative_tokens": tokens, **model, **SETTINGS[f"speculation_{method}"]}}


def _overrides(config: PreTrainedConfig, rollout: Rollout) -> dict[str, Any]:
    """Return overrides of config.json for vLLM: types of linear layers, and the scaled length limit of a YaRN model.

    vLLM expects the scaled limit there, but Qwen's config.json has the unscaled one.
    """
    found: dict[str, Any] = {}
    if rollout.quantization:
        found["quantization_config"] = SETTINGS["quantization"][rollout.quantization]
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "yarn":
        found["max_position_embeddings"] = positions_of(config.to_dict())
    return {"hf_overrides": found} if found else {}


def _cache_on_cpu(
    models: Sequence[PreTrainedConfig], rollout: Rollout, tokens: int, rows: int, *, stages: Sequence[int], shards: int
) -> dict[str, Any]:
    """Return vLLM's options for a KV cache that holds `rows` full-length responses at once.

    models: the actor and perhaps a draft model; stages: layers by pipeline stage; shards: tensor-parallel ranks. The
    options fix the number of blocks, which all stages must share, and the tokens of a step, so that no draft is cut.
    MemoryProblem when the machine has less memory.
    """
    size, drafted = 1 if rollout.kv_cache else 4, rollout.speculation.tokens if rollout.speculation else 0
    blocks = rows * -(-tokens // CPU_BLOCK_TOKENS) + 1
    needed = 0
    for config in models:
        layers = max(stages, default=int(config.num_hidden_layers))
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        needed += blocks * CPU_BLOCK_TOKENS * 2 * layers * max(int(heads) // shards, 1) * int(width) * size
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise MemoryProblem(
            f"spec.data.maxResponseTokens: vLLM's cache for {rows} responses of {tokens} tokens with their "
            f"prompts takes {needed / GIB:.0f} GiB, and this machine has {there / GIB:.0f} GiB"
        )
    # With a prompt cut over two steps vLLM rewinds the request's random generator, which torch can on GPUs only.
    most = max(tokens + rows * (1 + drafted), CPU_STEP_TOKENS)
    whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": most}
    return {"kv_cache_memory_bytes": needed, "num_gpu_blocks_override": blocks, **whole}
