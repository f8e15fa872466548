"""`python -m tests.gpu.carry`: prepares .gpu/, vLLM and the packages that a machine with torch lacks, in parts.

For a machine with Python 3.12, torch, transformers and a GPU, but without a network, that takes a folder of so many
bytes with each command. Prints the commands, one a part, and last the ladder. What they unpack lies outside of the
repository and has to stay there from one command to the next.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.repo.tree import ROOT

PARTS = ROOT / ".gpu"
LOCK = ROOT / "requirements" / "gpu.lock"
LIMIT = 58 * 10**6
"""Bytes of a part; the repository itself travels with each."""
SITE = "/tmp/rlhf-site"
PACKAGES = """
    annotated-types anthropic antlr4-python3-runtime apache-tvm-ffi astor blake3 cachetools cbor2 cffi
    compressed-tensors cryptography datasets depyf dill dnspython docstring-parser email-validator fastapi
    googleapis-common-protos httpcore2 httpx2 ijson interegular jaxtyping jiter jmespath jsonschema
    jsonschema-specifications lark latex2sympy2-extended llguidance lm-format-enforcer loguru math-verify mcp
    mcp-types mistral-common model-hosting-container-standards msgspec multiprocess openai opentelemetry-api
    opentelemetry-exporter-http-transport opentelemetry-exporter-otlp opentelemetry-exporter-otlp-common
    opentelemetry-exporter-otlp-proto-common opentelemetry-exporter-otlp-proto-grpc
    opentelemetry-exporter-otlp-proto-http opentelemetry-exporter-prometheus opentelemetry-proto opentelemetry-sdk
    opentelemetry-semantic-conventions opentelemetry-semantic-conventions-ai oss-harmony outlines-core
    partial-json-parser prometheus-fastapi-instrumentator pybase64 pycountry pycparser pydantic pydantic-core
    pydantic-extra-types pydantic-settings pyjwt python-dotenv python-json-logger python-multipart pyzmq referencing
    rpds-py sentry-sdk setproctitle sniffio sse-starlette starlette supervisor truststore typing-inspection uvicorn
    wadler-lindig watchfiles websockets xgrammar
"""
"""What vLLM's engine and the trainer import, and such a machine lacks; their versions are those of the lock."""
LIBRARIES = re.compile(r"(^|/)(_C_stable_libtorch|_vllm_fa3_C|cumem_allocator|fs_io_C|spinloop)\.\S*so$")
"""The compiled parts of vLLM that a Hopper GPU and a dense model need; they load on torch 2.11 too."""
LEFT_OUT = re.compile(r"^vllm/.*\.so$|^vllm/vllm-rs$|^bin/|\.lock$|__pycache__")


def split(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """The names in their order, cut into as few parts of at most `limit` bytes as that order allows.

    ValueError names one that is larger than a part.
    """
    parts: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if size > limit:
            raise ValueError(f"{name} has {size:,} bytes, more than the {limit:,} of a part")
        if not parts or size > room:
            parts.append([])
            room = limit
        parts[-1].append(name)
        room -= size
    return parts


def install(names: Sequence[str], folder: Path) -> None:
    """Unpack the wheels of packages for Python 3.12, from the registry that uv is configured for."""
    versions = dict(re.findall(r"^([\w.-]+)==(\S+)$", LOCK.read_text(), re.MULTILINE))
    machine = ["--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_35", "--only-binary", ":all:"]
    wanted = [f"{name}=={versions[name]}" for name in names]
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


def pack(site: Path, folder: Path) -> list[Path]:
    """The folder's files as archives: small packages and Python first, then each library of vLLM for itself."""
    every = sorted(str(path.relative_to(site)) for path in site.rglob("*") if path.is_file())
    kept = [name for name in every if not LEFT_OUT.search(name)]
    of_vllm = [name for name in kept if name.startswith("vllm")]
    groups = {"packages.zip": sorted(set(kept) - set(of_vllm)), "vllm.zip": of_vllm}
    groups |= {f"{Path(name).name}.zip": [name] for name in every if LIBRARIES.search(name)}
    archives = []
    for archive, names in groups.items():
        archives.append(folder / archive)
        with zipfile.ZipFile(archives[-1], "w", zipfile.ZIP_DEFLATED) as packed:
            for name in names:
                packed.write(site / name, name)
    return archives


def prepare() -> list[Path]:
    """Fill .gpu/ anew; returns its parts in the order in which they must go. The trainer needs the first one only."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        install([*PACKAGES.split(), "vllm"], folder / "site")
        write_metadata(folder / "site")
        archives = {path.name: path for path in pack(folder / "site", folder)}
        dealt = split({name: path.stat().st_size for name, path in archives.items()}, LIMIT)
        shutil.rmtree(PARTS, ignore_errors=True)
        parts = []
        for number, names in enumerate(dealt):
            parts.append(PARTS / chr(ord("a") + number))
            parts[-1].mkdir(parents=True)
            for name in names:
                shutil.move(archives[name], parts[-1] / name)
    return parts


def commands(parts: Sequence[str]) -> list[tuple[str, str]]:
    """(command, the folder that goes with it), in order: each part is unpacked, then the ladder is climbed."""
    path = f"{SITE}:crds:operator:trainer_image:examples:."
    ladder = f"export PYTHONPATH={path} OMP_NUM_THREADS=8; python3 -m tests.gpu {{}} | tee $OUT/ladder.jsonl"
    unpack = f"for f in {{}}/*.zip; do python3 -m zipfile -e $f {SITE} || exit; done"
    after = {parts[0]: "trainer", parts[-1]: "generation generation-float32"}
    told = [
        (unpack.format(part) + (f"; {ladder.format(after[part])}" if part in after else ""), part) for part in parts
    ]
    return [*told, (ladder.format("speed update"), ""), (ladder.format("seven speed-eager"), "")]


def main() -> None:
    """Prepare the parts and print the commands."""
    argparse.ArgumentParser(prog="python -m tests.gpu.carry", description=__doc__).parse_args()
    parts = prepare()
    for part in parts:
        size = sum(path.stat().st_size for path in part.iterdir())
        print(f"{part.relative_to(ROOT)}: {size / 1e6:.1f} MB")
    for command, carried in commands([str(part.relative_to(ROOT)) for part in parts]):
        print(f"\n# carry: {carried or 'nothing'}\n{command}")


if __name__ == "__main__":
    main()
