"""A reward function, tokenizer or template that changed between two attempts of a job is told by field and file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest

from rlhf_api.files import document_of
from rlhf_trainer.checkpoint import Checkpoint
from rlhf_trainer.errors import ConfigError
from rlhf_trainer.run import resume
from rlhf_trainer.run_folder.folder import FILES, JOB_FILE, JobFolder
from tests.trainer import jobs

SPEC = {
    "algorithm": {"name": "GRPO"},
    "models": {"actor": {"uri": "file://model"}, "reward": {"entrypoint": "mine_scores:score"}},
    "data": {"train": {"uri": "hf://a/b"}},
    "rollout": {"samplesPerPrompt": 2},
    "training": {"promptBatchSize": 4, "totalSteps": 1},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a reward function in two modules, and a model's tokenizer."""
    (tmp_path / "mine_scores.py").write_text("from mine_parts import sign\n\ndef score(samples):\n    return [sign]\n")
    (tmp_path / "mine_parts.py").write_text("import os\nsign = 1.0\n")
    (tmp_path / "mine_other.py").write_text("sign = 2.0\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def changes(folder: Path) -> list[str]:
    """Return the sentences on changed files for an attempt that begins now, from a checkpoint."""
    output = folder / "run"
    (output / "grpo").mkdir(parents=True, exist_ok=True)
    start = resume._start(jobs.job(folder, "grpo", SPEC), output, cast("Checkpoint", object()), {})
    (output / "grpo" / FILES).write_text(start.files)
    return list(start.changed)


def test_nothing_is_told_of_the_first_attempt_or_the_same_files(folder: Path) -> None:
    assert changes(folder) == []
    assert changes(folder) == []
    assert "mine_other.py" not in (folder / "run" / "grpo" / FILES).read_text()


def test_a_sign_that_was_flipped_in_an_imported_module_is_told(folder: Path) -> None:
    changes(folder)
    (folder / "mine_parts.py").write_text("import os\nsign = -1.0\n")
    (told,) = changes(folder)
    assert told.startswith(
        f"spec.models.reward.entrypoint: {folder}/mine_parts.py is not as the last attempt read it; "
    )
    assert changes(folder) == [], "it is told once"


def test_a_template_that_changed_or_came_is_told(folder: Path) -> None:
    changes(folder)
    (folder / "model" / "chat_template.jinja").write_text("{{ messages[0] }}")
    (folder / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    told = [line.split(" is not ")[0] for line in changes(folder)]
    files = [f"{folder}/model/{name}" for name in ("chat_template.jinja", "generation_config.json")]
    assert told == [f"spec.models.actor: {file}" for file in files]


def test_modules_are_found_and_not_imported(folder: Path) -> None:
    (folder / "mine_scores.py").write_text("import mine_parts\nraise SystemExit\n")
    changes(folder)
    assert "mine_parts.py" in (folder / "run" / "grpo" / FILES).read_text()


@pytest.mark.parametrize(("reaction", "told"), [("Warn", ["a file changed"]), ("Off", [])])
def test_a_job_says_what_is_done_about_a_change(reaction: str, told: list[str], folder: Path) -> None:
    kept = JobFolder(folder, jobs.job(folder, "grpo", {**SPEC, "watch": {"changedCode": reaction}}))
    kept.path.mkdir()
    assert kept.keep_code("{}", ["a file changed"], first_step=1) == told
    assert (kept.path / FILES).read_text() == "{}"


def test_a_change_that_ends_the_run_is_told_at_each_attempt(folder: Path) -> None:
    kept = JobFolder(folder, jobs.job(folder, "grpo", {**SPEC, "watch": {"changedCode": "Fail"}}))
    kept.path.mkdir()
    with pytest.raises(ConfigError, match=r"^grpo: spec\.watch\.changedCode: a file changed$"):
        kept.keep_code("{}", ["a file changed"], first_step=1)
    assert not (kept.path / FILES).exists(), "the next attempt compares with the same files"


def test_a_module_of_a_module_is_told(folder: Path) -> None:
    (folder / "mine_parts.py").write_text("import mine_other\n")
    changes(folder)
    (folder / "mine_other.py").write_text("limit = 2\n")
    assert [line.split(" is not ")[0].rpartition("/")[2] for line in changes(folder)] == ["mine_other.py"]


def test_fields_that_an_earlier_version_lacks_are_no_change(folder: Path) -> None:
    job = jobs.job(folder, "grpo", SPEC)
    document = document_of(job)
    for part, field in ((document["spec"], "watch"), (document["spec"]["rollout"], "minP")):
        del part[field]
    kept = JobFolder(folder, job)
    kept.path.mkdir()
    (kept.path / JOB_FILE).write_text(json.dumps(document))
    assert resume.changed(job, kept, None) == ([], [])
