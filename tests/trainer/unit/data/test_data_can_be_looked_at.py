"""`rlhf data` shows what a job reads: rows, lengths, what is left out and why, and what is learned of some examples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rlhf_trainer.commands.cli import app
from rlhf_trainer.commands.data import histogram
from tests.trainer.chain.conftest import MANIFEST


def shown(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["data", *map(str, arguments)])
    assert done.exit_code == 0, done.stderr
    return done.stdout


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    rows = [
        {"prompt": "How are you?", "chosen": "I am fine.", "rejected": "No."},
        {"prompt": "word " * 500, "chosen": "a", "rejected": "b"},
        {"prompt": None, "chosen": "a", "rejected": "b"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "job.yaml").write_text(MANIFEST.read_text())
    return tmp_path / "job.yaml"


def test_a_job_tells_rows_lengths_and_what_it_learns(manifest: Path) -> None:
    text = shown(manifest, "--job=helpful-sft", "--set=data.train.uri=file://rows.jsonl")
    file = manifest.parent / "rows.jsonl"
    assert "helpful-sft: spec.data.train: file://" in text
    assert "1 rows are read, 2 are left out" in text
    assert "1 of 3 rows are longer than spec.data.maxPromptTokens 16" in text
    assert f"{file}, line 3 holds nothing" in " ".join(text.split())
    assert "tokens by promptKey: " in text
    assert "tokens: How are you?\u27e6I am fine.</s>\u27e7" in text.replace("<|endoftext|>", "</s>")
    assert "helpful-sft: spec.evaluation.data: " in text
    assert "helpful-rm" not in text


def test_every_job_of_a_chain_is_told_before_its_models(manifest: Path) -> None:
    text = shown(manifest)
    assert "helpful-rm: spec.data.train: package://" in text
    assert "chosen_tokens: " in text
    assert "rejected_tokens: " in text
    assert "prompt_ids: " in text


def test_lengths_of_prompts_are_written_for_a_plan(manifest: Path) -> None:
    file = manifest.parent / "lengths.txt"
    data = ("--set=data.train.uri=file://rows.jsonl", f"--prompt-tokens={file}")
    assert "1 rows are read" in shown(manifest, "--job=helpful-sft", *data)
    assert file.read_text() == "8\n"
    done = CliRunner().invoke(app, ["plan", str(manifest), "helpful-sft", "--json", f"--prompt-tokens={file}"])
    assert json.loads(done.stdout)["predicted"]["prompt_tokens"] == 8
    several = CliRunner().invoke(app, ["data", str(manifest), *data])
    assert (several.exit_code, several.stderr.count("--prompt-tokens: is for one job")) == (2, 1)


def test_a_job_that_is_not_there(manifest: Path) -> None:
    done = CliRunner().invoke(app, ["data", str(manifest), "--job=nope"])
    assert done.exit_code == 2
    assert "--job: is nope; there are helpful-sft, helpful-rm, helpful-ppo" in done.stderr


def test_a_histogram_has_a_bar_for_each_range() -> None:
    lines = list(histogram(torch.tensor([1, 1, 1, 1, 2, 9, 16])))
    assert lines[0] == f" 1 -  2 {'#' * 40} 5"
    assert lines[4] == f" 9 - 10 {'#' * 8} 1"
    assert lines[-1] == f"15 - 16 {'#' * 8} 1"
    assert len(lines) == 8
    assert list(histogram(torch.tensor([7, 7]))) == [f"7 - 7 {'#' * 40} 2"]
