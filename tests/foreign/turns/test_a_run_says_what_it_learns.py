"""`rlhf run` names the end tokens, and counts the answers that are not learned in the record of its first step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trainer.chain.conftest import records, rlhf
from tests.trainer.tiny import save_tiny

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last else m.content.split('</think>')[-1] }}<pad>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
MANIFEST = """
apiVersion: rlhf.hybridflow.io/v1alpha1
kind: RLHFJob
metadata: {{name: talks}}
spec:
  algorithm: {{name: SFT}}
  models: {{actor: {{uri: "file://{folder}/model"}}}}
  data: {{train: {{uri: "file://{folder}/talks.jsonl", messagesKey: messages}}}}
  training: {{totalSteps: 2, batchSize: 2}}
"""


@pytest.mark.slow
def test_the_first_record_counts_what_is_not_learned(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", seed=0)
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    contents = ["How are you?", "<think>well</think>I am fine.", "And now?", "<think>still</think>I am fine."]
    talk = [{"role": role, "content": each} for role, each in zip(("user", "assistant") * 2, contents, strict=True)]
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    (tmp_path / "job.yaml").write_text(MANIFEST.format(folder=tmp_path))
    done = rlhf("run", tmp_path / "job.yaml", f"--output={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    first, second = records(tmp_path / "run" / "talks")
    assert first["data/unlearned_messages"] == 1
    assert "data/unlearned_messages" not in second
    shown = " ".join(done.stdout.split())
    assert "a response ends with <pad> (0) or </s> (2)" in shown.replace("<|endoftext|>", "</s>")
    assert "an answer is not learned, as it cannot be found whole" in shown
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["talks"]
    assert sorted(summary["end_tokens"].values()) == [0, 2]
    saved = json.loads((tmp_path / "run" / "talks" / "model" / "generation_config.json").read_text())
    assert sorted(saved["eos_token_id"]) == [0, 2]
