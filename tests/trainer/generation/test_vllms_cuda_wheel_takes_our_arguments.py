"""vLLM's CUDA wheel on a machine without a GPU: it loads, and our arguments make a configuration that it accepts.

The wheel comes from the package registry, once, into the user's cache. Its extensions link to libcuda, so a library of
that name is compiled which has their functions and no device. What kernels do is not seen here.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from tests.patience import PATIENCE_SECONDS
from tests.trainer.generation import fake_cuda_node

ROOT = Path(__file__).parents[3]
LOCK = ROOT / "requirements" / "gpu.lock"
UV = Path(sys.executable).with_name("uv")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhf-operator"
SIZES = [(1, 1), (2, 1), (4, 1), (1, 2)]
"""(t_g, p_g)"""
QWEN_7B: dict[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE."""
DRIVER_FUNCTIONS = """
    cuInit cuCtxGetCurrent cuCtxSetCurrent cuDeviceGetAttribute cuDevicePrimaryCtxRetain cuGetErrorString
    cuGetProcAddress_v2 cuMemAddressFree cuMemAddressReserve cuMemCreate cuMemGetAllocationGranularity cuMemMap
    cuMemRelease cuMemSetAccess cuMemUnmap cuPointerGetAttribute cuTensorMapEncodeTiled
"""

pytestmark = pytest.mark.slow


def uv(*arguments: str | Path) -> str:
    done = subprocess.run(
        [UV, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def wheel() -> Path:
    """The folder with the vLLM of the lock, without its dependencies; torch is the same in both locks."""
    (version,) = re.findall(r"^vllm==(\S+)$", LOCK.read_text(), re.MULTILINE)
    folder = CACHE / f"vllm-cuda-{version}"
    if not folder.exists():
        unfinished = CACHE / f"vllm-cuda-{version}.{os.getpid()}"
        python = ("--python", sys.executable)
        uv("pip", "install", *python, "--no-deps", "--target", unfinished, f"vllm=={version}")
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    return folder


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks saw that have a GPU of their own each, as Ray starts them."""
    folder = tmp_path_factory.mktemp("node")
    source = "".join(f"int {name}() {{ return {NO_DEVICE}; }}\n" for name in DRIVER_FUNCTIONS.split())
    compiler = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / "libcuda.so.1")]
    subprocess.run(compiler, input=source, text=True, check=True)
    Qwen2Config(**QWEN_7B, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    variables = {
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": f"{wheel()}:{ROOT}",
        "LOCAL_RANK": "0",
        "TRITON_INTERPRET": "1",
    }
    command = [sys.executable, "-m", fake_cuda_node.__name__, str(folder), str(folder / "meeting"), json.dumps(SIZES)]
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | variables | {"RANK": str(rank), "CUDA_VISIBLE_DEVICES": str(rank + 3)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [rank.communicate(timeout=PATIENCE_SECONDS) for rank in ranks]
    assert not any(rank.returncode for rank in ranks), said[0][1] + said[1][1]
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def test_a_node_of_gpus_is_recognised_and_all_modules_import(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert answer["platform"] == "NvmlCudaPlatform"
        assert answer["modules"] > 100


def test_our_arguments_are_accepted(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert [(made["shards"], made["stages"]) for made in answer["configurations"]] == SIZES
        for made in answer["configurations"]:
            assert made["sleeps"]
            assert made["sequences"] == 1024
            assert (made["compiles"], made["graphs"]) == ("VLLM_COMPILE", "FULL_AND_PIECEWISE")


def test_weights_and_a_cache_of_fp8_are_accepted(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert answer["in 8 bits"] == ["compressed-tensors", "fp8"]
        assert all(made["types"] == [None, "auto"] for made in answer["configurations"])


def test_ranks_that_see_one_gpu_each_add_up_by_nccl(answers: list[dict[str, Any]]) -> None:
    """vLLM's own all-reduce asks whether a device is reached that the process does not see."""
    for answer in answers:
        assert answer["custom all-reduce"] == "list index out of range"
        assert all(made["other all-reduces"] == [] for made in answer["configurations"])


def test_seeded_responses_are_drawn_all_at_once_but_in_pipelines(answers: list[dict[str, Any]]) -> None:
    """By vLLM's second model runner; the first, which p_g > 1 needs, loops over the rows that have a seed."""
    for answer in answers:
        drawn = [made["vectorised sampler"] for made in answer["configurations"]]
        assert drawn == [stages == 1 for _, stages in SIZES]
        whole, last, first, later = answer["drawn"]
        assert whole == [*first, *reversed(last)], "the noise of a row is its own, whatever rows are beside it"
        assert all(token != other for token, other in zip(whole, later, strict=True))


def test_the_lock_is_what_the_packages_resolve_to() -> None:
    inputs = ["pyproject.toml", "requirements/gpu.in", *(f"--extra={name}" for name in ("trainer", "gpu", "s3", "gs"))]
    plain = ["--quiet", "--no-annotate", "--no-header"]
    machine = ["--python-version=3.11", "--python-platform=x86_64-manylinux_2_28"]
    resolved = uv("pip", "compile", *inputs, *plain, *machine, f"--constraint={LOCK}")
    locked = {line for line in LOCK.read_text().splitlines() if not line.lstrip().startswith("#")}
    assert set(resolved.splitlines()) == locked
