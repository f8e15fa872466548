"""The digest of what a job reads or makes: of all bytes where files are small, else of a part of them."""

import hashlib
from pathlib import Path

import pytest

from rlhf_trainer.run_folder.lineage import BLOCK_BYTES, LABELS, WHOLE_BYTES, digest_of, recorded_inputs
from tests.trainer.jobs import job
from tests.trainer.outputs.conftest import DATA

LARGE = WHOLE_BYTES + 5


def test_a_small_file_has_the_digest_of_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    assert digest_of(tmp_path / "rows.jsonl") == f"sha256:{hashlib.sha256(b'{}' + bytes([10])).hexdigest()}"


@pytest.mark.parametrize("place", [0, BLOCK_BYTES - 1, LARGE - 1])
def test_a_large_file_is_read_in_part(tmp_path: Path, place: int) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(LARGE))
    before = digest_of(tmp_path)
    assert before.startswith("sampled:")
    changed = bytearray(LARGE)
    changed[place] = 1
    file.write_bytes(changed)
    assert digest_of(tmp_path) != before
    file.write_bytes(bytes(LARGE + 1))
    assert digest_of(tmp_path) != before


def test_a_folder_counts_names_but_no_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    before = digest_of(tmp_path)
    (tmp_path / LABELS).write_text("{}")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x").write_text("")
    assert digest_of(tmp_path) == before
    (tmp_path / "a").rename(tmp_path / "b")
    assert digest_of(tmp_path) != before


def test_a_model_of_the_hub_has_the_commit_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--org--small" / "refs").mkdir(parents=True)
    (tmp_path / "models--org--small" / "refs" / "main").write_text("abc123")
    spec = {"algorithm": {"name": "DPO"}, "training": {"totalSteps": 1, "batchSize": 2}}
    models = {"actor": {"uri": "hf://org/small"}, "reference": {"uri": "hf://org/other", "revision": "v1"}}
    train = {"uri": "file:///nowhere/rows.jsonl"}
    made = job(tmp_path, "dpo", {**spec, "models": models, "data": {**DATA, "train": train}})
    read = {each.name: (each.uri, each.revision, each.digest) for each in recorded_inputs(made, tmp_path)}
    assert read == {
        "models.actor": ("hf://org/small", "abc123", None),
        "models.reference": ("hf://org/other", "v1", None),
        "data.train": ("file:///nowhere/rows.jsonl", None, None),
    }
