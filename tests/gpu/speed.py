"""How fast the generator starts and generates: a 1.5B model on a GPU."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any

import torch

from rlhf_api.spec.rollout import Rollout
from rlhf_trainer.generation.vllm_engine import GenerationEngine, response_seed
from rlhf_trainer.tensor_slice import TensorSlice, WeightSlice
from rlhf_trainer.training.distributed import device_here
from tests.gpu.device_bytes import STD
from tests.gpu.predicted import predict_generation
from tests.gpu.rung import Rung, main
from tests.gpu.summary import MAPPER
from tests.real_size.model_folder import model_folder
from tests.real_size.shapes import SHAPES

END = 2
MEMORY_SHARE = 0.8
"""`rollout.gpuMemoryUtilization`."""


def measure(rung: Rung) -> None:
    """Start, and batches of several sizes, the second of each size timed."""
    if not rung.can_generate():
        return
    shape, sizes, prompt, response = _REHEARSED if rung.rehearse else _REAL
    if rung.is_eager:  # twice as slow
        sizes = sizes[1:2]
    config = copy.deepcopy(SHAPES[shape])
    dtype = torch.float32 if rung.rehearse else torch.bfloat16
    with rung.part("start") as found:
        engine = GenerationEngine(
            model_folder(rung.folder / "model", config),
            config=config,
            rollout=Rollout(
                gpu_memory_utilization=None if rung.rehearse else MEMORY_SHARE, enforce_eager=rung.is_eager
            ),
            max_tokens=prompt + response,
            max_sequences=max(sizes),
            ends=[END],
            device=device_here(),
            dtype=dtype,
            trust_remote_code=False,
            revision=None,
            tensor_groups=[[0]],
        )
        found["bytes_asleep"] = engine.bytes_held()
    if rung.failed:
        return
    with rung.part("weights") as found:
        holds = engine.held_shards()
        engine.load_weights(_random(holds, dtype), holds)
        engine.wake_cache()
        found["bytes_awake"] = engine.bytes_held()
    for sequences in sizes:
        for greedy in (False, True):
            with rung.part(f"{sequences} {'greedy' if greedy else 'sampled'}") as found:
                found.update(_timed(engine, sequences, prompt, response, greedy=greedy))
                seconds = predict_generation(config, sequences, prompt, response, memory_share=MEMORY_SHARE)
                found[MAPPER] = {"batch_seconds": seconds}


_REHEARSED: tuple[str, tuple[int, ...], int, int] = ("Llama-1M", (4, 8), 16, 16)
_REAL: tuple[str, tuple[int, ...], int, int] = ("Qwen2.5-1.5B", (64, 256, 512), 256, 512)
"""Shape, responses at once, tokens of a prompt and of a response."""


def _random(holds: dict[str, TensorSlice], dtype: torch.dtype) -> Iterator[WeightSlice]:
    """Random weights; norms scale by 1."""
    for name, part in holds.items():
        weight = torch.empty(part.shape, dtype=dtype, device=device_here())
        yield name, part, weight.fill_(1.0) if weight.ndim == 1 else weight.normal_(0.0, STD)


def _timed(engine: GenerationEngine, sequences: int, prompt: int, response: int, *, greedy: bool) -> dict[str, Any]:
    """Tokens and seconds of a batch; the first one warms up, with other prompts, for the cache keeps theirs."""
    began, tokens = 0.0, 0
    for turn in range(2):
        generator = torch.Generator().manual_seed(turn * 1000 + sequences + greedy)
        asked = torch.randint(3, 500, (sequences, prompt), generator=generator).tolist()
        seeds = [response_seed(turn, 1, row) for row in range(sequences)]
        began = time.perf_counter()
        tokens = sum(len(each.tokens) for each in engine.generate(asked, seeds, max_tokens=response, greedy=greedy))
    seconds = time.perf_counter() - began
    return {"tokens": tokens, "batch_seconds": round(seconds, 3), "tokens_per_second": round(tokens / seconds, 1)}


if __name__ == "__main__":
    main(measure)
