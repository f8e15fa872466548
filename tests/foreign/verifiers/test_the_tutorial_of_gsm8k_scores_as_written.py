"""The manifest of docs/tutorials/verifiable-rewards.md, with local stand-ins for its URIs and nothing else changed."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
import yaml
from transformers import PreTrainedTokenizerFast

from rlhf_api.job import Job
from rlhf_trainer.data.loaders import PromptLoader
from rlhf_trainer.rewards.sample import Sample
from rlhf_trainer.workers.expectations import find_faults
from rlhf_trainer.workers.scoring import reward_code
from tests.trainer.jobs import job
from tests.trainer.unit.data.conftest import cache, chat, plain  # noqa: F401 fixtures

PAGE = Path(__file__).parents[3] / "docs/tutorials/verifiable-rewards.md"
ROWS = [
    {"question": "6 times 12?", "answer": "It is 6 * 12 = <<6*12=72>>72.\n#### 72"},
    {"question": "1,000 and 80?", "answer": "So 1000 + 80 = 1080.\n#### 1,080"},
    {"question": "Nothing?", "answer": "Nobody knows."},
]
RESPONSES = {
    "So it is \\boxed{72}.": 1.0,
    "6 * 12 = 72": 1.0,
    "<think>It may be 71.</think>The answer is 72.": 1.0,
    "#### 72": 1.0,
    "\\boxed{71}": 0.0,
    "<think>72</think>": 0.0,
    "": 0.0,
}


@pytest.fixture
def tutorial(tmp_path: Path) -> Job:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    spec = yaml.safe_load(text)["spec"]
    for part in ("train", "test"):
        folder = tmp_path / "gsm8k" / "main"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    spec["data"]["train"] = {"uri": f"file://{folder}/train.jsonl", "promptKey": "question"}
    spec["evaluation"]["data"] = {"uri": f"file://{folder}/test.jsonl", "promptKey": "question", "limit": 500}
    return job(tmp_path, "gsm8k-grpo", spec)


def test_a_right_answer_scores_in_any_form(tutorial: Job) -> None:
    (code,) = reward_code(tutorial, ranks=1).values()
    samples = [
        Sample(step=1, row=row, prompt="?", response=response, finished=True, columns={"answer": ROWS[0]["answer"]})
        for row, response in enumerate(RESPONSES)
    ]
    try:
        found = [score.value for score in code.scores(samples)]
    finally:
        code.close()
    assert dict(zip(RESPONSES, found, strict=True)) == RESPONSES


def test_prompts_have_the_instruction_and_bad_rows_a_name(
    tutorial: Job,
    chat: PreTrainedTokenizerFast,  # noqa: F811 a fixture
) -> None:
    check = partial(find_faults, tutorial)
    loader = PromptLoader(tutorial.spec.data.train, chat, path="spec.data.train", spec=tutorial.spec, check=check)
    assert len(loader) == 2
    (fact,) = loader.facts()
    assert "line 3 holds 'Nobody knows.' as answer, which holds no match of answerExtract" in fact
    prompts = chat.batch_decode(loader.ordered()["prompt_ids"])
    instruction = "Reason step by step, and put the final answer in \\boxed{}."
    assert prompts[0].startswith(f"<|user|>6 times 12?\n{instruction}</s>")
