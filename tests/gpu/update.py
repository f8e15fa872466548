"""Updates of a model on one GPU, with plain and fused kernels: seconds, memory, share of the GPU's peak, kernels.

The variant is `1.5b`, `7b` (8 of its 28 layers) or `others`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from rlhf_api.spec.job_spec import Training
from rlhf_mapper.architecture import Architecture, architecture_of
from rlhf_mapper.hardware import CPU_SLOT, figures_of
from rlhf_trainer.device import gpus_here
from rlhf_trainer.training.distributed import device_here
from tests.gpu.actors import largest_difference, read
from tests.gpu.device_bytes import DeviceBytes, randomise
from tests.gpu.predicted import predict_update
from tests.gpu.rung import Rung, main
from tests.gpu.summary import COMPARED, MAPPER
from tests.real_size.cases import ALONE, CASES
from tests.real_size.shapes import SHAPES
from tests.real_size.step import Case, batch_of, prepared, take_step

TIMED = 3
HAS_KERNELS = "kernels" in Training.model_fields
"""Whether the spec has `training.kernels`."""
ROUNDING = 0.1
"""How far two log-probabilities of one token may differ by the kernels, in bfloat16."""
KINDS = {
    "optimizer": r"adam|multi_tensor",
    "attention": r"flash|fmha|attention|attn",
    "products": r"gemm|nvjet|cutlass|cublas|aten::(add)?mm\b|aten::bmm",
    "copies": r"memcpy|memset|copy|aten::to\b",
    "elementwise": r"elementwise|vectorized|reduce|triton|liger|aten::(add|mul|silu|pow|mean|exp|sub|div)",
}
"""Kernels by their names, the first that fits; on CPU operators of torch."""


def measure(rung: Rung) -> None:
    """Each case: a step as the simulation takes it, then timed and profiled updates."""
    if rung.variant == "others":
        cases = {"rehearsal": CASES["rehearsal"]} if rung.rehearse else _others()
        for name, case in cases.items():
            with rung.part(name) as found:
                _measured(rung, _with_kernels(case, "Auto"), found)
        return
    name = "rehearsal" if rung.rehearse else COMPARED[rung.variant]
    with rung.part("plain") as found:
        found["case"] = name
        plain = _measured(rung, _with_kernels(CASES[name], "Plain"), found)
    if not HAS_KERNELS:
        rung.skipped["fused"] = "spec.training.kernels is not there"
    elif rung.rehearse:
        rung.skipped["fused"] = "Triton's kernels need a GPU"
    else:
        with rung.part("fused") as found:
            fused = _measured(rung, _with_kernels(CASES[name], "Fused"), found)
            found["log_probs_differ_by"] = largest_difference(plain, fused)
            assert found["log_probs_differ_by"] < ROUNDING, f"fused kernels score otherwise by more than {ROUNDING}"


def _others() -> Mapping[str, Case]:
    """The cases that are not compared, and compiled layers."""
    compiled = replace(ALONE[COMPARED["7b"]], training={"compile": True})
    return {name: case for name, case in ALONE.items() if name not in COMPARED.values()} | {"7b compiled": compiled}


def _with_kernels(case: Case, kernels: str) -> Case:
    """The case with `training.kernels`, where the spec has such a field."""
    return replace(case, training={**case.training, "kernels": kernels}) if HAS_KERNELS else case


def _measured(rung: Rung, case: Case, found: dict[str, Any]) -> Tensor:
    """Put the figures of a case into `found`; returns the log-probabilities of its rows before the updates."""
    live = DeviceBytes()
    job, folders = prepared(case, rung.folder / "models")
    actor = take_step(case, job, folders, live)["actor"]
    torch.manual_seed(0)
    randomise(actor.trainer.model)
    batch = batch_of(case)
    scored = read(batch.with_fields(actor.compute_log_prob(batch))).cpu()
    for _ in range(1 + TIMED):
        with live.measured("timed update"):
            actor.update_actor(batch)
    seconds, tokens = live.seconds["timed update"], case.rows * (case.prompt + case.response)
    found["update_seconds"], found["tokens_per_second"] = round(seconds, 4), round(tokens / seconds, 1)
    found["mfu"] = round(_flops(case) / seconds / _peak_flops(), 4)
    found["phase_seconds"] = {phase: round(value, 3) for phase, value in live.seconds.items()}
    found[MAPPER] = {"update_seconds": predict_update(case)}
    found["profile"] = _profiled(lambda: actor.update_actor(batch))
    found["gb"] = {name: round(phase.peak / 1e9, 2) for name, phase in live.phases.items()}
    return scored


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
