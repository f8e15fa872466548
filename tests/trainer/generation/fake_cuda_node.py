"""vLLM's CUDA wheel in a process that takes this machine for a node of H100 and sees one of them, as under Ray.

The test beside it runs this module twice, as ranks that meet at a file, and reads one line of JSON from each.
NVML's answers stand here, a libcuda that knows no device is in LD_LIBRARY_PATH; everything else is vLLM's own.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig

import rlhf_trainer
from rlhf_api.spec.rollout import Rollout
from rlhf_trainer.generation.vllm_arguments import engine_arguments, environment
from rlhf_trainer.generation.vllm_engine import response_seed

GPUS = 8
ROWS = 4
ANSWERS: dict[str, Any] = {
    "nvmlInit": None,
    "nvmlShutdown": None,
    "nvmlDeviceGetCount": GPUS,
    "nvmlDeviceGetHandleByIndex": 1,
    "nvmlDeviceGetCudaComputeCapability": (9, 0),
    "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
    "nvmlDeviceGetUUID": "GPU-0",
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=85 * 10**9, free=85 * 10**9, used=0),
    "nvmlDeviceGetP2PStatus": 0,
}


def stand_in_for_the_driver() -> None:
    """NVML and the number of devices; vLLM asks for both while it is imported."""
    from vllm.third_party import pynvml

    for name, value in ANSWERS.items():
        setattr(pynvml, name, lambda *_, value=value: value)
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
    torch.accelerator.device_count = torch.cuda.device_count


def accepted(folder: str, shards: int, stages: int, rollout: Rollout | None = None) -> dict[str, Any]:
    """What vLLM makes of the product's arguments."""
    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs

    config = AutoConfig.from_pretrained(folder)
    arguments = engine_arguments(
        config=config,
        rollout=rollout or Rollout(),
        max_tokens=2048,
        max_sequences=4096,
        on_gpu=True,
        dtype=torch.bfloat16,
        shards=shards,
        stage_layers=[config.num_hidden_layers // stages] * stages if stages > 1 else [],
    )
    made = EngineArgs(model=folder, **arguments).create_engine_config()
    return {
        "types": (made.model_config.quantization, made.cache_config.cache_dtype),
        "shards": made.parallel_config.tensor_parallel_size,
        "stages": made.parallel_config.pipeline_parallel_size,
        "sequences": made.scheduler_config.max_num_seqs,
        "sleeps": made.model_config.enable_sleep_mode,
        "graphs": made.compilation_config.cudagraph_mode.name,
        "compiles": made.compilation_config.mode.name,
        "vectorised sampler": made.use_v2_model_runner,
        "other all-reduces": [
            name
            for name, used in {
                "custom": not made.parallel_config.disable_custom_all_reduce,
                "fused": made.compilation_config.pass_config.fuse_allreduce_rms,
                "symmetric memory": envs.VLLM_ALLREDUCE_USE_SYMM_MEM,
                "FlashInfer": envs.VLLM_ALLREDUCE_USE_FLASHINFER,
            }.items()
            if used
        ],
    }


def drawn(rows: list[int], *, later: int = 0) -> list[int]:
    """The tokens that the sampler's kernel draws for these rows of a batch, by Triton's interpreter."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    count, vocabulary = len(rows), 3000
    logits = torch.randn(ROWS, vocabulary, generator=torch.Generator().manual_seed(0))[rows]
    seeds = torch.tensor([response_seed(7, 1, row) for row in rows])
    positions = torch.tensor(rows) + 10 + later
    places = torch.arange(count, dtype=torch.int32)
    alike = {"apply_temperature": False, "is_drafting": False}
    tokens: list[int] = gumbel_sample(logits, places, torch.ones(count), seeds, positions, **alike).tolist()
    return tokens


def imported() -> int:
    """The number of the trainer's modules, all of which are imported."""
    names = [module.name for module in pkgutil.walk_packages(rlhf_trainer.__path__, "rlhf_trainer.")]
    return len([importlib.import_module(name) for name in names])


def custom_all_reduce(meeting: str) -> str:
    """The error of vLLM's own all-reduce between two ranks that see one GPU each."""
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce, custom_ar

    assert custom_ar, "the kernels of the wheel did not load"
    dist.init_process_group("gloo", f"file://{meeting}", rank=int(os.environ["RANK"]), world_size=2)
    try:
        CustomAllreduce(dist.group.WORLD, torch.device("cuda:0"))
        return ""
    except (IndexError, RuntimeError) as error:
        return str(error)


def main() -> None:
    folder, meeting, sizes = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    os.environ.update(environment(on_gpu=True))
    stand_in_for_the_driver()
    from vllm.platforms import current_platform

    answer = {
        "platform": type(current_platform).__name__,
        "configurations": [accepted(folder, shards, stages) for shards, stages in sizes],
        "in 8 bits": accepted(folder, 1, 1, Rollout(quantization="FP8", kv_cache="FP8"))["types"],
        "modules": imported(),
        "drawn": [drawn([0, 1, 2, 3]), drawn([3, 2]), drawn([0, 1]), drawn([0, 1, 2, 3], later=1)],
        "custom all-reduce": custom_all_reduce(meeting),
    }
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
