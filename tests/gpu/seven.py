"""An actor of 7B's widths with its generator on one GPU: build, reshard, generate, score and update.

It has all 28 layers where an update of them fits without offload, and fewer on a smaller GPU. Moments in the host's
memory are not tried: 61 GB of them took 116 GB of pinned memory.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from transformers import PreTrainedConfig

from rlhf_mapper.architecture import architecture_of
from rlhf_trainer.generation.vllm_engine import bytes_used, response_seed
from rlhf_trainer.training.distributed import device_here
from tests.gpu.actors import actor_of, engine_of
from tests.gpu.device_bytes import DeviceBytes, randomise
from tests.gpu.predicted import predict_generation, predict_reshard, predict_update
from tests.gpu.rung import Rung, main
from tests.gpu.summary import MAPPER
from tests.real_size.model_folder import model_folder
from tests.real_size.shapes import SHAPES
from tests.real_size.step import Case, batch_of

TRAINED_BYTES = 16
"""Of a parameter in an update: float32 weight, gradient and two moments."""
MEMORY_SHARE = 0.35
"""`rollout.gpuMemoryUtilization`."""
ROOM = 1.2
"""For activations, gathered layers and what vLLM keeps asleep, as a factor."""


def measure(rung: Rung) -> None:
    """A step in its order, each phase timed."""
    if not rung.can_generate():
        return
    shape, prompt, response = ("Llama-1M", 16, 16) if rung.rehearse else ("Qwen2.5-7B", 512, 512)
    config = _config_that_fits(shape)
    case = Case(
        shape=shape,
        ranks=1,
        algorithm="GRPO",
        rows=8,
        prompt=prompt,
        response=response,
        micro_batch_tokens=4096,
        training={"precision": rung.precision},
    )
    live = DeviceBytes()
    with rung.part("start") as found:
        folder = model_folder(rung.folder / "model", config)
        share = rung.rollout | ({} if rung.rehearse else {"gpuMemoryUtilization": MEMORY_SHARE})
        folders = {"actor": folder, "reward": folder}
        actor = actor_of(case, folders, learning_rate=1e-6, rollout=share, live=live)
        with actor.trainer.offloader.in_use():
            randomise(actor.trainer.model)
        found.update(layers=config.num_hidden_layers, device_bytes=bytes_used(device_here()))
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
    for turn in ("first", "second"):
        with rung.part(f"{turn} update") as found, live.measured(f"{turn} update"):
            actor.update_actor(batch)
            found["tokens"] = batch["tokens"].numel()
    predicted = {
        "second reshard": predict_reshard(config),
        "generate": predict_generation(config, 8 * case.rows, prompt, response, memory_share=MEMORY_SHARE),
        "second update": predict_update(replace(case, layers=config.num_hidden_layers)),
    }
    for name, phase in live.phases.items():
        rung.figures.setdefault(name, {}).update(
            peak_gb=round(phase.peak / 1e9, 2), phase_seconds=round(live.seconds[name], 3)
        )
        if name in predicted:
            rung.figures[name][MAPPER] = {"phase_seconds": predicted[name]}


def _config_that_fits(shape: str) -> PreTrainedConfig:
    """The shape with as many layers, at most its own, as an update on this device has room for."""
    config = copy.deepcopy(SHAPES[shape])
    if device_here().type == "cpu":
        return config
    free, _ = torch.cuda.mem_get_info()
    while ROOM * TRAINED_BYTES * architecture_of(config.to_dict()).parameters > free:
        config.num_hidden_layers -= 1
        config.layer_types = config.layer_types and config.layer_types[:-1]
    return config


if __name__ == "__main__":
    main(measure)
