"""An upload beside steps takes its bytes from a bucket that all processes of a node share."""

import fcntl
import math
from pathlib import Path
from typing import Self

import pytest

from rlhf_trainer.checkpoint import Checkpoint, UploadFolder
from rlhf_trainer.run.checkpoints import KeptCheckpoints
from rlhf_trainer.run.resume import Start, from_the_start
from rlhf_trainer.run.stopping import StopSignals
from rlhf_trainer.run_folder.evidence import EMPTY
from rlhf_trainer.run_folder.folder import JobFolder
from rlhf_trainer.storage import open_storage
from rlhf_trainer.training.link_probe import Speeds, slowest_network
from rlhf_trainer.upload_pace import UploadPace
from rlhf_trainer.workers.data import DataShape
from tests.trainer.unit.test_what_is_left_to_do_in_a_run_folder import jobs

RATE = 1e6
"""Bytes per second of the bucket."""


class Played:
    """Time that passes only where somebody waits for tokens; nobody else may take any meanwhile."""

    def __init__(self, bucket: Path) -> None:
        self.seconds, self.bucket = 0.0, bucket

    def wait(self, seconds: float) -> None:
        with self.bucket.open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.seconds += seconds


def test_processes_of_a_node_share_a_bucket(tmp_path: Path) -> None:
    time = Played(tmp_path / "bucket")
    paces = [UploadPace(RATE, time.bucket, time.wait) for _ in range(4)]
    for pace in paces * 50:
        pace.take(1000)
    assert time.seconds == pytest.approx(200 * 1000 / RATE)
    paces[0].lift()
    paces[0].take(10**9)
    assert time.seconds == pytest.approx(200 * 1000 / RATE), "what somebody waits for is not held back"


def test_a_file_arrives_whole_and_at_its_pace(s3: str, tmp_path: Path) -> None:
    """Two parts of a file, by a real S3 client."""
    time, content = Played(tmp_path / "bucket"), bytes(range(256)) * 23_000
    uri = f"{s3}/paced/step-000001/actor"
    upload = UploadFolder(uri, UploadPace(RATE, time.bucket, time.wait))
    (upload.folder / "random").mkdir()
    (upload.folder / "random" / "shard").write_bytes(content)
    upload.upload()
    files, path = open_storage(uri)
    assert files.cat_file(f"{path}/random/shard") == content
    assert time.seconds == pytest.approx(len(content) / RATE)


@pytest.mark.parametrize(("where", "speed"), [("aabb", 2**18 / 0.5), ("aaaa", math.inf)])
def test_only_links_between_machines_count(where: str, speed: float) -> None:
    taken = [0.25, 0.001, 0.5, 0.001]  # from the rank before: 3 -> 0 and 1 -> 2 may be between machines
    ranks = [
        Speeds(rank=rank, where=where[rank], seconds={}, links={"data": ((rank - 1) % 4, taken[rank])})
        for rank in range(4)
    ]
    assert slowest_network(ranks, device="CPU") == speed


def start_at(checkpoint: Checkpoint | None) -> Start:
    return Start(checkpoint=checkpoint, inputs={}, evidence=EMPTY, begin_hashing=lambda _: lambda _: None)


class Uploading:
    """A model whose upload has ended after a number of looks, or when somebody waits for it."""

    def __init__(self, looks: int) -> None:
        self.looks, self.paces, self.waited = looks, list[float](), list[bool]()
        self._ended = ["0a1b2c3d"]

    def begin_checkpoint(self, *, bytes_per_second: float, **_: object) -> Self:
        self.paces.append(bytes_per_second)
        self._left = self.looks
        return self

    def end_checkpoint(self, *, waits: bool) -> Self:
        self.waited.append(waits)
        self._left = 0 if waits else self._left - 1
        self._ended = ["0a1b2c3d" * (self._left <= 0)]
        return self

    def result(self) -> list[str]:
        return self._ended


@pytest.mark.parametrize(
    ("given", "network", "waited", "pace"),
    [
        ("", 1e8, [False, False, True, True], 5e6),  # steps 1 and 2 go on beside the upload, 3 begins the next one
        ("uploadMBps: 2, ", math.inf, [False, False, True, True], 2e6),
        ("", math.inf, [True, True], 0.0),  # nothing to keep free: as fast as it goes, until the next step has ended
    ],
)
def test_a_step_waits_for_no_paced_upload(
    s3: str, tmp_path: Path, given: str, network: float, waited: list[bool], pace: float
) -> None:
    job = jobs(f"helpful-sft:checkpoint={{{given}everySteps: 3, storage: '{s3}/{tmp_path.name}'}}")[0]
    folder, model = JobFolder(tmp_path, job), Uploading(looks=9)
    folder.begin(None, inputs=from_the_start([job], tmp_path)[job.name].inputs)
    data = DataShape(rows=1, total_steps=7, evaluation_rows=0, facts=())
    stop = StopSignals(lambda message: None)
    kept = KeptCheckpoints(
        job,
        folder,
        {"actor": model},
        ["actor"],
        data=data,
        stop=stop,
        start=start_at(None),
    )
    kept.set_pace(network)
    for step in range(1, 7):
        kept.end_step(step, dict)
        folder.record({"step": step}, total_steps=7, stage="SFT")
    kept.after_record(6, dict, is_last=True)
    assert model.paces == [pace, pace]
    assert model.waited == waited
    assert [each.step for each in folder.checkpoints.all() if each.is_whole] == [3, 6]
