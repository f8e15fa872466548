"""A reward function, tokenizer or template that changed between two attempts of a job is told by field and file."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from rlhf_api.files import document_of
from rlhf_api.problems import SpecError
from rlhf_trainer.checkpoint import STATE, Checkpoint
from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.outputs.display import Display
from rlhf_trainer.run import resume
from rlhf_trainer.run.publisher import Publisher
from rlhf_trainer.run.resume import unfinished
from rlhf_trainer.run_folder.evidence import RUN
from rlhf_trainer.run_folder.folder import JOB_FILE, JobFolder
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


def changes(folder: Path, run: str = "run") -> list[str]:
    """Return the sentences on changed files for an attempt that begins now, and save a checkpoint of it."""
    kept = JobFolder(folder / run, jobs.job(folder, "grpo", SPEC))
    checkpoint = kept.newest_checkpoint()
    start = resume.start_of(jobs.job(folder, "grpo", SPEC), folder / run, checkpoint, {})
    kept.begin(checkpoint, inputs={}, evidence=start.evidence)
    kept.record({"step": 1}, total_steps=9, stage="GRPO")
    kept.checkpoints.complete(kept.checkpoints.begin(1), {STATE: '{"rows": 4}', **kept.texts_for_checkpoint(up_to=1)})
    return list(start.warnings)


def test_nothing_is_told_of_the_first_attempt_or_the_same_files(folder: Path) -> None:
    assert changes(folder) == []
    assert changes(folder) == []
    assert "mine_other.py" not in (folder / "run" / "grpo" / RUN).read_text()


def test_a_sign_that_was_flipped_in_an_imported_module_is_told(folder: Path) -> None:
    changes(folder)
    (folder / "mine_parts.py").write_text("import os\nsign = -1.0\n")
    (told,) = changes(folder)
    assert told.startswith("spec.models.reward.entrypoint: mine_parts.py is not what it was at the checkpoint; ")
    assert changes(folder) == [], "it is told once"


def test_a_template_that_changed_or_came_is_told(folder: Path) -> None:
    changes(folder)
    (folder / "model" / "chat_template.jinja").write_text("{{ messages[0] }}")
    (folder / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    told = [line.split(" is not ")[0] for line in changes(folder)]
    assert told == [f"spec.models.actor: {file}" for file in ("chat_template.jinja", "generation_config.json")]


def test_modules_are_found_and_not_imported(folder: Path) -> None:
    (folder / "mine_scores.py").write_text("import mine_parts\nraise SystemExit\n")
    changes(folder)
    assert "mine_parts.py" in (folder / "run" / "grpo" / RUN).read_text()


def test_a_run_in_another_place_compares_with_its_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on another pod has the checkpoints of storage, and the same files in other folders."""
    changes(folder)
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    for file in ("mine_scores.py", "mine_parts.py"):
        (folder / file).rename(elsewhere / file)
    monkeypatch.syspath_prepend(str(elsewhere))
    (folder / "run").rename(folder / "other")
    (folder / "other" / "grpo" / RUN).unlink()
    assert changes(folder, "other") == []
    (elsewhere / "mine_parts.py").write_text("import os\nsign = -1.0\n")
    assert [line.split(" is not ")[0] for line in changes(folder, "other")] == [
        "spec.models.reward.entrypoint: mine_parts.py"
    ]


def test_the_output_of_another_job_is_no_change(folder: Path) -> None:
    """The model of an earlier job is made after the chain begins, and before the later job does."""
    job = jobs.job(folder, "grpo", SPEC)
    assert job.spec.models.actor
    actor = job.spec.models.actor.model_copy(update={"uri": "job://sft"})
    models = job.spec.models.model_copy(update={"actor": actor})
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"models": models})})
    before = resume.start_of(job, folder / "run", None, {}).evidence["read"]
    (folder / "run" / "sft" / "model").mkdir(parents=True)
    (folder / "run" / "sft" / "model" / "config.json").write_text("{}")
    assert resume.start_of(job, folder / "run", None, {}).evidence["read"] == before


def test_a_checkpoint_of_an_earlier_version_tells_nothing(folder: Path) -> None:
    changes(folder)
    (found,) = (folder / "run" / "grpo" / "checkpoints").rglob(RUN)
    found.unlink()
    (folder / "mine_parts.py").write_text("import os\nsign = -1.0\n")
    checkpoint = Checkpoint(step=1, uri=str(found.parent))
    assert resume.start_of(jobs.job(folder, "grpo", SPEC), folder / "run", checkpoint, {}).warnings == []
    found.mkdir()
    with pytest.raises(EnvironmentProblem):
        resume.start_of(jobs.job(folder, "grpo", SPEC), folder / "run", checkpoint, {})


@pytest.mark.parametrize("reaction", ["Off", "Fail"])
def test_a_job_says_what_is_done_about_a_change(reaction: str, folder: Path) -> None:
    changes(folder)
    for name in ("mine_scores.py", "mine_parts.py"):
        (folder / name).write_text((folder / name).read_text() + "more = 1\n")
    job = jobs.job(folder, "grpo", {**SPEC, "watch": {"changedCode": reaction}})
    if reaction == "Off":
        assert unfinished([job], folder / "run")["grpo"].warnings == ()
        return
    with pytest.raises(SpecError) as raised:
        unfinished([job], folder / "run")
    found = [str(each).partition(" is not what")[0] for each in raised.value.problems]
    field = "grpo: spec.watch.changedCode: spec.models.reward.entrypoint"
    assert found == [f"{field}: mine_parts.py", f"{field}: mine_scores.py"]


def test_a_change_is_in_the_status_and_the_events(folder: Path) -> None:
    kept = JobFolder(folder / "run", jobs.job(folder, "grpo", SPEC))
    kept.begin(None, inputs={})
    console = Console(file=StringIO(), width=200)
    Publisher(jobs.job(folder, "grpo", SPEC), kept, Display(console)).warn("a file changed")
    kept.record({"step": 1}, total_steps=9, stage="GRPO")
    assert json.loads((kept.path / "status.json").read_text())["warnings"] == ["a file changed"]
    assert (kept.path / "events.log").read_text().endswith(" a file changed\n")


def test_a_module_of_a_module_is_told(folder: Path) -> None:
    (folder / "mine_parts.py").write_text("import mine_other\n")
    changes(folder)
    (folder / "mine_other.py").write_text("limit = 2\n")
    assert [line.split(" is not ")[0] for line in changes(folder)] == ["spec.models.reward.entrypoint: mine_other.py"]


def test_fields_that_an_earlier_version_lacks_are_no_change(folder: Path) -> None:
    job = jobs.job(folder, "grpo", SPEC)
    document = document_of(job)
    for part, field in ((document["spec"], "watch"), (document["spec"]["rollout"], "minP")):
        del part[field]
    kept = JobFolder(folder, job)
    kept.path.mkdir()
    (kept.path / JOB_FILE).write_text(json.dumps(document))
    assert resume.changed(job, kept, None) == ([], [])
