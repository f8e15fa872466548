"""The machine and its GPU: names, driver, attention kernels, collectives, pinned memory, ceilings and the head."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import attention as torch_attention
from torch.nn.attention.varlen import varlen_attn

from rlhf_trainer.device import gpus_here, peak_flops
from rlhf_trainer.meeting import Meeting
from rlhf_trainer.training import attention, head
from rlhf_trainer.training.distributed import AbortSwitch, device_here, join_group
from rlhf_trainer.training.model_input import Documents
from tests.gpu.rung import COLLECTIVE_SECONDS, Rung, free_port, main

SMI = "name,driver_version,memory.total,clocks.sm,power.limit"
OFF = 2e-2
"""Largest difference of two attention kernels, as a share of the largest value."""
PINNED_BYTES = 3584 * 18944 * 4
"""Bytes of the largest matrix of a layer of Qwen2.5-7B in float32."""
HEAD = (16384, 3584, 152064)
"""Tokens, hidden size and vocabulary of a head of Qwen2.5-7B."""


def measure(rung: Rung) -> None:
    """Each fact is a part."""
    on_gpu = device_here().type == "cuda"
    with rung.part("machine") as found:
        _machine(found, on_gpu=on_gpu)
    with rung.part("varlen attention") as found:
        for window in (None, 64):
            found[f"window {window}"] = off = _attention_differs(window, on_gpu=on_gpu)
            assert max(off) < OFF, f"Flash and SDPA differ by {max(off):.2g} of the largest value"
    with rung.part("collectives of one rank") as found:
        found["sum"] = _collectives()
    with rung.part("head") as found:
        found["ms"] = _head_ms(HEAD if on_gpu else (64, 64, 512))
    if not on_gpu:
        rung.skipped["GPU"] = "attention implementations, pinned memory and ceilings need a GPU"
        return
    with rung.part("attention implementations") as found:
        _time_implementations(found)
    with rung.part("pinned memory") as found:
        _pin(found)
    with rung.part("ceilings") as found:
        one = torch.randn(8192, 8192, device=device_here(), dtype=torch.bfloat16)
        found["tflops"] = round(2 * 8192**3 / _seconds(lambda: one @ one, 10) / 1e12)
        source = torch.empty(2**32, dtype=torch.uint8, device=device_here())
        target = torch.empty_like(source)
        found["copy_tb_s"] = round(2 * 2**32 / _seconds(lambda: target.copy_(source), 5) / 1e12, 2)


def _machine(found: dict[str, Any], *, on_gpu: bool) -> None:
    found["host"] = socket.gethostname()
    try:
        found["resolves"] = socket.gethostbyname(found["host"])
    except OSError as error:
        found["resolves"] = str(error)
    found["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    found["cores"] = os.cpu_count()
    found["gpus"], found["peak_flops"] = [str(gpu) for gpu in gpus_here()], peak_flops(torch.bfloat16)
    if on_gpu:
        command = ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv,noheader"]
        found["smi"] = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _seconds(call: Callable[[], Any], times: int) -> float:
    """Seconds of a call, the mean of so many after two that are not timed."""
    for _ in range(2):
        call()
    _wait()
    began = time.perf_counter()
    for _ in range(times):
        call()
    _wait()
    return (time.perf_counter() - began) / times


def _wait() -> None:
    if device_here().type == "cuda":
        torch.cuda.synchronize()


def _attention_differs(window: int | None, *, on_gpu: bool) -> list[float]:
    """Largest differences of output and gradients of both kernels, as shares; the last text sees a foreign prompt."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    module: Any = nn.Module()
    module.num_key_value_groups, module.is_causal, module.training = 7, True, False
    sizes = torch.tensor([[200, 130, 1, 90], [200, 130, 1, 150]])
    seen = torch.cat([torch.arange(331), torch.arange(60), torch.arange(331, 421)])
    documents = Documents.of(sizes, seen).to(device_here())
    inputs = [torch.randn(1, heads, 421, 128, generator=generator) for heads in (28, 4, 4)]
    query, key, value = (each.to(device_here(), dtype).requires_grad_() for each in inputs)
    options: Any = {"documents": documents, "scaling": 128**-0.5, "sliding_window": window}
    found: list[list[Tensor]] = []
    for kernel in (attention._by_sdpa, attention._by_flash if on_gpu else attention._by_sdpa):
        output = kernel(module, query, key, value, None, **options)[0]
        found.append([output, *torch.autograd.grad(output.float().square().sum(), (query, key, value))])
    return [
        float((one.float() - other.float()).abs().max() / other.float().abs().max())
        for one, other in zip(*found, strict=True)
    ]


def _collectives() -> int:
    """Bytes that a rank sends to itself, by the first group and by one of its own."""
    sent = torch.ones(8, dtype=torch.uint8, device=device_here())
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent)
    dist.barrier()
    group, _ = join_group(Meeting(address="127.0.0.1", port=free_port()), 0, 1, COLLECTIVE_SECONDS, AbortSwitch())
    dist.all_to_all_single(came, sent, group=group)
    return int(came.sum())


def _head_ms(sizes: tuple[int, int, int]) -> float:
    """Milliseconds of the head forward and backward, in chunks as the product cuts them."""
    tokens, hidden, words = sizes
    dtype = torch.bfloat16 if device_here().type == "cuda" else torch.float32
    states = torch.randn(tokens, hidden, device=device_here(), dtype=dtype, requires_grad=True)
    weight = (torch.randn(words, hidden, device=device_here(), dtype=dtype) * 0.02).requires_grad_()
    targets = torch.randint(words, (tokens,), device=device_here())
    temperature = torch.ones(tokens, device=device_here())
    return round(1e3 * _seconds(lambda: _of_head(states, weight, targets, temperature), 2), 1)


def _of_head(states: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor) -> None:
    head.likelihood(states, weight, targets, temperature, entropy=False).log_probs.sum().backward()  # type: ignore[no-untyped-call]


def _time_implementations(found: dict[str, Any]) -> None:
    """Milliseconds of Flash forward and backward on eight texts of 2,048 tokens, by what torch can load for it."""
    lengths = torch.arange(0, 16385, 2048, device=device_here(), dtype=torch.int32)
    inputs = [torch.randn(16384, heads, 128, device=device_here(), dtype=torch.bfloat16) for heads in (28, 4, 4)]
    query, key, value = (each.requires_grad_() for each in inputs)

    def attend() -> None:
        output: Any = varlen_attn(query, key, value, lengths, lengths, 2048, 2048, **attention.FEWER_KEYS, **causal)
        output.sum().backward()

    causal: dict[str, Any] = {"window_size": (-1, 0)}
    found["default_ms"] = round(1e3 * _seconds(attend, 5), 2)
    for name in getattr(torch_attention, "list_flash_attention_impls", list)():
        try:
            torch_attention.activate_flash_attention_impl(name)
        except (ImportError, RuntimeError) as error:
            found[name] = f"not there: {str(error)[:150]}"
            continue
        found[f"{name}_ms"] = round(1e3 * _seconds(attend, 5), 2)
        torch_attention.restore_flash_attention_impl()


def _pin(found: dict[str, Any]) -> None:
    """What a pinned block takes of the host, and its speed to the GPU."""
    began = time.monotonic()
    host = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    found["pin_gb_s"] = round(PINNED_BYTES / 1e9 / (time.monotonic() - began), 2)
    sizes = torch.cuda.host_memory_stats().items()
    found["taken_over_asked"] = max(size for name, size in sizes if "bytes" in name) / PINNED_BYTES
    device = torch.empty_like(host, device=device_here())
    found["to_gpu_gb_s"] = round(PINNED_BYTES / 1e9 / _seconds(lambda: device.copy_(host), 2), 1)


if __name__ == "__main__":
    main(measure)
