"""The store of checkpoints, in a folder and on an S3 server of this machine."""

import uuid
from pathlib import Path
from typing import Any

import pytest

from rlhf_trainer.checkpoint import COMPLETE, CheckpointStore, UploadFolder
from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.storage import open_storage


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    """An empty store of each kind."""
    where = str(tmp_path) if request.param == "folder" else f"{request.getfixturevalue('s3')}/{uuid.uuid4()}"
    return CheckpointStore(f"{where}/job")


def write(store: CheckpointStore, step: int, *, complete: bool = True) -> str:
    """A checkpoint of two ranks' files, as workers and controller write it."""
    uri = store.begin(step)
    for rank in range(2):
        staging = UploadFolder(f"{uri}/actor")
        (staging.folder / "random").mkdir(parents=True, exist_ok=True)
        (staging.folder / "random" / f"rank-{rank}").write_text("x" * step)
        staging.upload()
    if complete:
        store.complete(uri, {"state.json": f'{{"step": {step}}}', "metrics.jsonl": "line\n"})
    return uri


def files_below(uri: str) -> dict[str, bytes]:
    files, folder = open_storage(uri)
    return {path.removeprefix(f"{folder}/"): files.cat_file(path) for path in files.find(folder)}


def damage(store: CheckpointStore, uri: str, name: str, content: bytes | None) -> None:
    """Overwrite a file of a checkpoint, or delete it."""
    path = f"{uri.removeprefix('s3://')}/{name}"
    if content is None:
        store._files.rm_file(path)
    else:
        store._files.pipe_file(path, content)


def begin_upload(files: Any, path: str) -> None:
    """What a rank leaves that is killed while it uploads a large file: one part, and no end."""
    bucket, key, _ = files.split_path(path)
    upload = files.call_s3("create_multipart_upload", Bucket=bucket, Key=key)["UploadId"]
    files.call_s3("upload_part", Bucket=bucket, Key=key, UploadId=upload, PartNumber=1, Body=b"x")


def unfinished(files: Any, folder: str) -> list[str]:
    """Uploads below a folder that have not ended."""
    bucket, key, _ = files.split_path(folder)
    found = files.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/").get("Uploads", ())
    return [each["Key"].removeprefix(f"{key}/") for each in found]


def test_the_newest_whole_one_is_chosen(store: CheckpointStore) -> None:
    assert store.newest() is None
    write(store, 5)
    write(store, 10)
    write(store, 15, complete=False)
    newest = store.newest()
    assert newest is not None
    assert (newest.step, newest.state(), newest.text("metrics.jsonl")) == (10, {"step": 10}, "line\n")
    assert [(found.step, found.is_whole) for found in store.all()] == [(5, True), (10, True), (15, False)]
    assert newest.bytes == len('{"step": 10}' + "line\n") + 2 * 10


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("actor/random/rank-1", None, "actor/random/rank-1 is missing"),
        ("actor/random/rank-1", b"short", "actor/random/rank-1 has 5 bytes, not 10"),
        (COMPLETE, b"", "COMPLETE cannot be read"),
        (COMPLETE, None, "not finished"),
    ],
)
def test_a_damaged_one_is_not_chosen_and_says_why(
    store: CheckpointStore, name: str, content: bytes | None, words: str
) -> None:
    write(store, 5)
    damage(store, write(store, 10), name, content)
    newest = store.newest()
    assert newest is not None
    assert newest.step == 5
    assert words in store.all()[-1].problem


def test_one_that_was_found_to_be_damaged_is_never_chosen_again(store: CheckpointStore) -> None:
    write(store, 5)
    write(store, 10)
    newest = store.newest()
    assert newest is not None
    newest.condemn("a weight is not what was written")
    assert [(found.step, found.problem) for found in store.all()] == [(5, ""), (10, "a weight is not what was written")]
    write(store, 10)
    assert [found.is_whole for found in store.all()] == [True, True]


def test_a_step_saved_again_forgets_what_a_torn_one_left(store: CheckpointStore) -> None:
    uri = write(store, 5, complete=False)
    damage(store, uri, "actor/shard-of-a-third-rank", b"old")
    write(store, 5)
    assert store.newest() is not None
    assert sorted(files_below(f"{uri}/actor")) == ["random/rank-0", "random/rank-1"]


def test_pruning_keeps_the_last_whole_and_the_written_one(store: CheckpointStore) -> None:
    for step in (1, 2, 4, 5):
        write(store, step)
    write(store, 3, complete=False)
    write(store, 6, complete=False)
    store.prune(keep_last=2)
    assert [found.step for found in store.all()] == [4, 5, 6]
    store.prune(keep_last=1, best=4)
    assert [found.step for found in store.all()] == [4, 5, 6]
    write(store, 1_000_000)
    store.prune(keep_last=1)
    assert [found.step for found in store.all()] == [1_000_000]
    store.clear()
    assert store.all() == []


def test_a_ranks_files_come_back_from_wherever_they_are(store: CheckpointStore) -> None:
    uri = write(store, 7)
    assert files_below(f"{uri}/actor") == {"random/rank-0": b"x" * 7, "random/rank-1": b"x" * 7}


def test_parts_of_killed_ranks_are_forgotten_others_stay(s3: str) -> None:
    place = f"{s3}/{uuid.uuid4()}"
    files, folder = open_storage(place)
    for key in ("job/step-000005/actor/shard-0", "job/step-000006/actor/shard-0", "job-2/step-000005/actor/shard-0"):
        begin_upload(files, f"{folder}/{key}")
    store = CheckpointStore(f"{place}/job")
    write(store, 10)
    assert [found.step for found in store.all()] == [10]
    assert unfinished(files, folder) == ["job-2/step-000005/actor/shard-0"]


def test_a_store_that_lists_no_uploads_takes_checkpoints(
    s3: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(f"{s3}/{uuid.uuid4()}/job")
    called = store._files.call_s3

    def call_s3(method: str, **options: Any) -> Any:
        if method == "list_multipart_uploads":
            raise PermissionError("Access Denied")
        return called(method, **options)

    monkeypatch.setattr(store._files, "call_s3", call_s3)
    write(store, 5)
    newest = store.newest()
    assert newest is not None
    assert newest.step == 5
    assert "Access Denied" in caplog.text


def test_nothing_stays_on_this_machine_of_what_was_delivered(s3: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path))
        store = CheckpointStore(f"{s3}/{uuid.uuid4()}")
        write(store, 3)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("uri", "words"),
    [("gs://bucket/x", "gcsfs"), ("s3://no-such-bucket-here/x", "no-such-bucket-here"), ("ftp9://x/y", "ftp9")],
)
def test_storage_that_does_not_work_is_named(s3: str, uri: str, words: str) -> None:
    assert s3
    with pytest.raises(EnvironmentProblem, match=words):
        CheckpointStore(uri).try_writing()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(EnvironmentProblem, match=str(file)):
        CheckpointStore(f"{file}/job").try_writing()
