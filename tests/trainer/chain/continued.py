"""Runs that are disturbed, and what is compared with one that was not."""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_trainer.checkpoint import CheckpointStore
from tests.patience import PATIENCE_SECONDS
from tests.trainer.chain.conftest import ROOT, records
from tests.trainer.chain.leftovers import MARK, marked
from tests.trainer.measured import MACHINE
from tests.trainer.weights import whole_weights

FAULT_SITE, NCCL_SITE = Path(__file__).parent / "fault_site", Path(__file__).parents[1] / "nccl_site"
RUN = (*MACHINE, "kv_cache_used", "bytes/reshard", "sync_bytes/")
"""Metrics about the machine, not the job; a resumed generator is given weights that the other one had already."""


@contextmanager
def running(
    manifest: Path, output: Path, *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """`rlhf run` of a manifest; whatever a killed controller leaves is ended with the block."""
    command = [sys.executable, "-m", "rlhf_trainer", "run", str(manifest), f"--output={output}", *options]
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, MARK: mark, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for member in marked(mark):
            member.kill()


def wait_until(happened: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def numbers(job_folder: Path) -> list[dict[str, float]]:
    """What each step measured, without what is about the machine."""
    return [
        {name: value for name, value in record.items() if not name.startswith(RUN)} for record in records(job_folder)
    ]


def assert_same_bits(job_folder: Path, whole: Path) -> None:
    """The model, and critic and optimizer of the last checkpoint; and the samples, if there are any."""
    saved, other = (
        {path.name: path.read_bytes() for path in (folder / "model").iterdir()} for folder in (job_folder, whole)
    )
    assert "model.safetensors" in saved
    assert saved == other
    last = [CheckpointStore(str(folder / "checkpoints")).newest() for folder in (job_folder, whole)]
    for role in ("actor", "critic"):
        mine, theirs = (whole_weights(f"{found.uri}/{role}") for found in last if found)
        assert mine
        assert all(mine[name].equal(theirs[name]) for name in theirs)
    samples = [file.read_text() for folder in (job_folder, whole) for file in folder.glob("samples.jsonl")]
    assert samples[:1] == samples[1:]


def status_of(job_folder: Path) -> dict[str, Any]:
    status: dict[str, Any] = json.loads((job_folder / "status.json").read_text())
    return status
