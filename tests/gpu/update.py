"""Updates of a 1.5B model on one GPU: memory against the count on fake tensors, share of the GPU's peak, kernels."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from rlhf_mapper.architecture import Architecture, architecture_of
from rlhf_mapper.hardware import CPU_SLOT, figures_of
from rlhf_trainer.device import gpus_here
from rlhf_trainer.training.distributed import device_here
from tests.gpu.device_bytes import DeviceBytes, randomise
from tests.gpu.rung import Rung, main
from tests.real_size.cases import ALONE, CASES
from tests.real_size.shapes import SHAPES
from tests.real_size.step import Case, batch_of, prepared, take_step
from tests.repo.tree import ROOT

AGREES = 0.05
"""How far the peak of an update may be from the count, as a share."""
TIMED = 3
KINDS = {
    "optimizer": r"adam|multi_tensor",
    "attention": r"flash|fmha|attention|attn",
    "products": r"gemm|nvjet|cutlass|cublas|aten::(add)?mm\b|aten::bmm",
    "copies": r"memcpy|memset|copy|aten::to\b",
    "elementwise": r"elementwise|vectorized|reduce|triton|aten::(add|mul|silu|pow|mean|exp|sub|div)",
}
"""Kernels by their names, the first that fits; on CPU operators of torch."""


def measure(rung: Rung) -> None:
    """Each case: a step as the simulation takes it, then timed and profiled updates."""
    names = ["rehearsal"] if rung.rehearse else list(ALONE)
    counts = {name: _counting(name) for name in names}
    for name in names:
        with rung.part(name) as found:
            _measured(rung, name, counts[name], found)
    for process in counts.values():
        process.kill()


def _counting(name: str) -> subprocess.Popen[str]:
    """`python -m tests.real_size` on a case, which needs a process that sees no GPU."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.real_size", "--json", name]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def _measured(rung: Rung, name: str, counting: subprocess.Popen[str], found: dict[str, Any]) -> None:
    case, live = CASES[name], DeviceBytes()
    job, folders = prepared(case, rung.folder / name)
    actor = take_step(case, job, folders, live)["actor"]
    randomise(actor.trainer.model)
    batch = batch_of(case)
    for _ in range(1 + TIMED):
        with live.measured("timed update"):
            actor.update_actor(batch)
    seconds, tokens = live.seconds["timed update"], case.rows * (case.prompt + case.response)
    found["update_seconds"], found["tokens_per_second"] = round(seconds, 4), round(tokens / seconds, 1)
    found["mfu"] = _flops(case) / seconds / _peak_flops()
    found["phase_seconds"] = {phase: round(value, 3) for phase, value in live.seconds.items()}
    found["profile"] = _profiled(lambda: actor.update_actor(batch))
    said, _ = counting.communicate()
    counted = json.loads(said.splitlines()[-1])[name]["phases"]
    found["gb"] = {phase: [round(live.phases[phase].peak / 1e9, 2), counted[phase]["peak"]] for phase in counted}
    ratio = live.phases["actor update"].peak / 1e9 / counted["actor update"]["peak"]
    found["measured_over_counted"] = round(ratio, 4)
    if device_here().type == "cuda":
        assert abs(ratio - 1) < AGREES, f"an update takes {ratio:.3f} times what was counted"


def _flops(case: Case) -> float:
    """Of an update, without what is computed again: products with weights, and causal attention over half the square.

    The head is multiplied with the hidden states of the responses only.
    """
    model: Architecture = architecture_of(SHAPES[case.shape].to_dict())
    length = case.prompt + case.response
    layer = 2 * model.active_layer_parameters * length + 2 * model.heads * model.head_size * length**2
    head = 2 * model.head_parameters * case.response
    return 3.0 * case.rows * ((case.layers or model.layers) * layer + head)


def _peak_flops() -> float:
    """Of the device in bf16, by the mapper's table; not a number where it knows nothing of the GPU."""
    if device_here().type == "cpu":
        return CPU_SLOT.bf16
    gpu = figures_of(gpus_here()[0])
    return gpu.bf16 if gpu else float("nan")


def _profiled(update: Any) -> dict[str, Any]:
    """Milliseconds of an update by kind of kernel, the longest kernels, and how often the host waited."""
    on_gpu = device_here().type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        update()
    rows = profiler.key_averages()
    attribute = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    kernels = {row.key: (getattr(row, attribute) / 1e3, row.count) for row in rows}
    if on_gpu:  # operators have the time of their kernels too
        kernels = {row.key: kernels[row.key] for row in rows if row.device_type == DeviceType.CUDA}
    kinds = dict.fromkeys([*KINDS, "other"], 0.0)
    for key, (milliseconds, _) in kernels.items():
        kinds[next((kind for kind, words in KINDS.items() if re.search(words, key.lower())), "other")] += milliseconds
    longest = sorted(kernels, key=lambda key: -kernels[key][0])[:12]
    waits = sum(row.count for row in rows if row.key in ("cudaStreamSynchronize", "cudaDeviceSynchronize"))
    return {
        "milliseconds": {kind: round(total, 2) for kind, total in kinds.items()},
        "longest": [[key[:80], round(kernels[key][0], 2), kernels[key][1]] for key in longest],
        "waits": waits,
    }


if __name__ == "__main__":
    main(measure)
