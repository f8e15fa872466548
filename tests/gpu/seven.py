"""A 7B actor with its generator on one large GPU: build, reshard, generate, score, and update where that fits."""

from __future__ import annotations

import os
from typing import Any

import torch

from rlhf_mapper.architecture import architecture_of
from rlhf_trainer.generation.vllm_engine import bytes_used, response_seed
from rlhf_trainer.training.distributed import device_here
from tests.gpu.actors import actor_of, engine_of
from tests.gpu.device_bytes import DeviceBytes, randomise
from tests.gpu.rung import Rung, main
from tests.real_size.model_folder import model_folder
from tests.real_size.shapes import SHAPES
from tests.real_size.step import Case, batch_of

TRAINED_BYTES = 16
"""Of a parameter in an update: float32 weight, gradient and two moments."""
ROOM = 1.12
"""For activations, gathered layers and what is not counted."""


def measure(rung: Rung) -> None:
    """A step in its order, each phase timed."""
    shape, prompt, response = ("Llama-1M", 16, 16) if rung.rehearse else ("Qwen2.5-7B", 512, 512)
    offload = _offload(shape)
    case = Case(
        shape=shape,
        ranks=1,
        algorithm="GRPO",
        rows=8,
        prompt=prompt,
        response=response,
        micro_batch_tokens=4096,
        offload=offload or "None",
        training={"precision": rung.precision},
    )
    live = DeviceBytes()
    with rung.part("start") as found:
        folder = model_folder(rung.folder / "model", SHAPES[shape])
        share = {} if rung.rehearse else {"gpuMemoryUtilization": 0.35}
        folders = {"actor": folder, "reward": folder}
        actor = actor_of(case, folders, learning_rate=1e-6, rollout=share, live=live)
        with actor.trainer.offloader.in_use():
            randomise(actor.trainer.model)
        found.update(offload=case.offload, device_bytes=bytes_used(device_here()))
    if rung.failed:
        return
    batch = batch_of(case)
    for turn in ("first", "second"):
        with rung.part(f"{turn} reshard") as found, live.measured(f"{turn} reshard"):
            actor.put_generator_to_sleep()
            actor.reshard()
            found["bytes_of_generator"] = engine_of(actor).bytes_held()
    with rung.part("generate") as found, live.measured("generate"):
        asked = batch["tokens"][:, :prompt].repeat(8, 1).tolist()
        seeds = [response_seed(0, 1, row) for row in range(len(asked))]
        found["tokens"] = sum(len(each.tokens) for each in engine_of(actor).generate(asked, seeds, max_tokens=response))
    for turn in ("first", "second"):
        with rung.part(f"{turn} score"), live.measured(f"{turn} score"):
            batch = batch.with_fields(actor.compute_log_prob(batch))
    if offload is None:
        rung.skipped["update"] = f"needs {_needed(shape) / 1e9:.0f} GB of a GPU, or of a host that has a fifth more"
    else:
        for turn in ("first", "second"):
            with rung.part(f"{turn} update") as found, live.measured(f"{turn} update"):
                actor.update_actor(batch)
                found["tokens"] = batch["tokens"].numel()
    for name, phase in live.phases.items():
        rung.figures.setdefault(name, {}).update(
            peak_gb=round(phase.peak / 1e9, 2), phase_seconds=round(live.seconds[name], 3)
        )


def _needed(shape: str) -> float:
    """Bytes of an update on one device."""
    return ROOM * TRAINED_BYTES * architecture_of(SHAPES[shape].to_dict()).parameters


def _offload(shape: str) -> Any:
    """`models.actor.offload` with which an update fits beside a generator that sleeps; None if none does."""
    if device_here().type == "cpu" or torch.cuda.mem_get_info()[0] > _needed(shape):
        return "Optimizer"
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return "OptimizerInHost" if host > 1.2 * _needed(shape) else None


if __name__ == "__main__":
    main(measure)
