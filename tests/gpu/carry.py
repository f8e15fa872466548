"""`python -m tests.gpu.carry`: prepare .gpu/ with vLLM, Ray and the packages that a machine with torch lacks.

It is for a machine with Python 3.12, torch, transformers and a GPU, but without a network, that takes a folder of so
many bytes with each command. There are three parts; it prints the command of each.
"""

from __future__ import annotations

import argparse
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.gpu.summary import COMPARED, COUNTED
from tests.gpu.unpack import FIRST, PIECE, SITE
from tests.repo.tree import ROOT, tracked_files

PARTS = ROOT / ".gpu"
LOCK = ROOT / "requirements" / "gpu.lock"
COUNT = 3
LIMIT = 64 * 2**20
"""Most bytes that travel with a command: a part and the repository itself."""
PACKAGES = """
    annotated-types anthropic antlr4-python3-runtime apache-tvm-ffi astor blake3 cachetools cbor2 cffi
    compressed-tensors cryptography datasets depyf dill dnspython docstring-parser email-validator fastapi
    googleapis-common-protos httpcore2 httpx2 ijson interegular jaxtyping jiter jmespath jsonschema
    jsonschema-specifications lark latex2sympy2-extended liger-kernel llguidance lm-format-enforcer loguru math-verify
    mcp mcp-types mistral-common model-hosting-container-standards msgspec multiprocess openai opentelemetry-api
    opentelemetry-exporter-http-transport opentelemetry-exporter-otlp opentelemetry-exporter-otlp-common
    opentelemetry-exporter-otlp-proto-common opentelemetry-exporter-otlp-proto-grpc
    opentelemetry-exporter-otlp-proto-http opentelemetry-exporter-prometheus opentelemetry-proto opentelemetry-sdk
    opentelemetry-semantic-conventions opentelemetry-semantic-conventions-ai oss-harmony outlines-core
    partial-json-parser prometheus-fastapi-instrumentator pybase64 pycountry pycparser pydantic pydantic-core
    pydantic-extra-types pydantic-settings pyjwt python-dotenv python-json-logger python-multipart pyzmq referencing
    rpds-py sentry-sdk setproctitle sniffio sse-starlette starlette supervisor truststore typing-inspection uvicorn
    wadler-lindig watchfiles websockets xgrammar
"""
"""Packages that vLLM's engine and the trainer import, and such a machine lacks; the lock has their versions."""
LIBRARIES = re.compile(r"(^|/)(_C_stable_libtorch|_vllm_fa3_C|cumem_allocator|fs_io_C|spinloop)\.\S*so$")
"""The compiled parts of vLLM that a Hopper GPU and a dense model need; they load on torch 2.11 too."""
UNUSED = (
    r"^vllm/.*\.so$|^vllm/vllm-rs$|^bin/|\.lock$|__pycache__|^pycountry/locales/|^mistral_common/data/"
    r"|^ray/(cpp|data|jars|llm|rllib|serve|train|tune)/|^ray/dashboard/client/"
)
LEFT_OUT = re.compile(UNUSED)
LATER = re.compile(r"^(ray|vllm)[/-]")
"""Files that trainer steps do without."""


def install(names: Sequence[str], folder: Path) -> None:
    """Unpack the wheels of packages for Python 3.12, from the registry that uv is configured for."""
    versions = dict(re.findall(r"^([\w.-]+)==(\S+)$", LOCK.read_text(), re.MULTILINE))
    machine = ["--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_35", "--only-binary", ":all:"]
    wanted = [f"{name}=={versions[name]}" if name in versions else name for name in names]
    uv = Path(sys.executable).with_name("uv")
    command = [str(uv), "pip", "install", "--quiet", "--no-deps", *machine, "--target", str(folder), *wanted]
    subprocess.run(command, check=True)


def write_metadata(site: Path) -> None:
    """Write the installed metadata of this project, whose entry point names the package of the algorithms."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    about = site / f"rlhf_operator-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    group, entries = next(iter(project["entry-points"].items()))
    (about / "entry_points.txt").write_text("\n".join([f"[{group}]", *(f"{k} = {v}" for k, v in entries.items())]))


def is_carried(name: str) -> bool:
    """Whether a file of the installed packages travels."""
    return bool(LIBRARIES.search(name)) or not LEFT_OUT.search(name)


def compress(site: Path, names: Iterable[str], archive: Path) -> None:
    """Write files as .tar.xz, with a dictionary that finds the repeated code of vLLM's kernels."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": 32 * 2**20}]
    with lzma.open(archive, "wb", filters=filters) as packed, tarfile.open(fileobj=packed, mode="w|") as files:
        for name in names:
            files.add(site / name, name)


def split(first: int, rest: int, count: int) -> list[int]:
    """Return sizes of the pieces of `rest` that make all parts about equal; `first` bytes are in the first part."""
    share = -(-(first + rest) // count)
    sizes = [max(0, share - first)]
    others = rest - sizes[0]
    return sizes + [
        others * (number + 1) // (count - 1) - others * number // (count - 1) for number in range(count - 1)
    ]


def count(case: str, folder: Path) -> None:
    """Count the memory of a case on fake tensors, here: torch 2.11 reads no weights there."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.real_size", "--json", case]
    with (folder / COUNTED.format(case=case)).open("w") as file:
        subprocess.run(command, cwd=ROOT, stdout=file, check=True)


def prepare() -> list[Path]:
    """Fill .gpu/ anew; returns its parts in the order in which they must go. Trainer steps need the first one only."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        install([*PACKAGES.split(), "ray", "vllm"], folder / "site")
        write_metadata(folder / "site")
        paths = sorted(path for path in (folder / "site").rglob("*") if path.is_file())
        carried = [name for path in paths if is_carried(name := str(path.relative_to(folder / "site")))]
        groups = (
            [name for name in carried if not LATER.search(name)],
            [name for name in carried if LATER.search(name)],
        )
        archives = [folder / "first", folder / "rest"]
        with ThreadPoolExecutor() as threads:  # xz leaves Python's lock
            list(threads.map(compress, [folder / "site"] * 2, groups, archives))
        shutil.rmtree(PARTS, ignore_errors=True)
        parts = [PARTS / str(number) for number in range(1, COUNT + 1)]
        pieces = split(archives[0].stat().st_size, archives[1].stat().st_size, COUNT)
        with archives[1].open("rb") as rest:
            for number, (part, size) in enumerate(zip(parts, pieces, strict=True), 1):
                part.mkdir(parents=True)
                (part / PIECE.format(number=number, count=COUNT)).write_bytes(rest.read(size))
        shutil.move(archives[0], parts[0] / FIRST)
    return parts


def commands(parts: Sequence[str]) -> list[tuple[str, str, int]]:
    """(command, the folder that goes with it, its seconds), in order: the ladder goes on after the last part."""
    path = ":".join(
        [str(SITE), *(f"$PWD/{folder}" for folder in ("crds", "operator", "trainer_image", "examples", "."))]
    )
    names = "OMP_NUM_THREADS=8 HF_HUB_OFFLINE=1 GLOO_SOCKET_IFNAME=lo VLLM_HOST_IP=127.0.0.1 RAY_USAGE_STATS_ENABLED=0"
    climb = "python3 -m tests.gpu"
    export = f"export PYTHONPATH={path} {names}; "
    unpacking = [f"python3 -m tests.gpu.unpack {part}" for part in parts]
    return [
        (f"{export}{unpacking[0]} && {climb} --seconds 280 A B C", parts[0], 330),
        *((command, part, 60) for command, part in zip(unpacking[1:-1], parts[1:-1], strict=True)),
        (f"{export}{unpacking[-1]} && {climb} --seconds 540", parts[-1], 600),
    ]


def main() -> None:
    """Prepare the parts and print the commands."""
    argparse.ArgumentParser(prog="python -m tests.gpu.carry", description=__doc__).parse_args()
    tree = sum(path.stat().st_size for path in tracked_files())
    parts = prepare()
    for case in COMPARED.values():
        count(case, parts[0])
    for part in parts:
        size = sum(path.stat().st_size for path in part.iterdir())
        print(f"{part.relative_to(ROOT)}: {size / 1e6:.1f} MB, with the repository {(size + tree) / 1e6:.1f} MB")
        assert size + tree < LIMIT, f"more than the {LIMIT / 1e6:.1f} MB of a command"
    for command, carried, seconds in commands([str(part.relative_to(ROOT)) for part in parts]):
        print(f"\n# carry {carried}, timeout_s {seconds}\n{command}")


if __name__ == "__main__":
    main()
