"""The manifests of examples/data read data sets of exactly the columns that those of the hub have.

No test reaches the hub: the rows are made here, in the hub's schema.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import PreTrainedTokenizerFast

from rlhf_api.files import load
from rlhf_api.job import Job
from rlhf_api.spec.data import DataSource
from rlhf_trainer.data.loaders import LOADERS

MANIFESTS = {path.stem: path for path in (Path(__file__).parents[4] / "examples" / "data").glob("*.yaml")}
DIALOGUE = "\n\nHuman: What is up?\n\nAssistant:"


def talk(*texts: str) -> list[dict[str, str]]:
    return [{"content": text, "role": ("user", "assistant")[place % 2]} for place, text in enumerate(texts)]


def harm() -> dict[str, bool]:
    return {"Endangering National Security": False, "Privacy Violation": True}


ULTRA = {
    "prompt": "hi",
    "prompt_id": "0" * 64,
    "chosen": talk("hi", "hello"),
    "rejected": talk("hi", "go away"),
    "messages": talk("hi", "hello", "and you?", "fine"),
    "score_chosen": 8.5,
    "score_rejected": 2.0,
}
PKU: list[dict[str, Any]] = [
    {
        "prompt": "May I?",
        "response_0": "Yes.",
        "response_1": "No.",
        "prompt_source": "BeaverTails",
        "response_0_source": "Alpaca3-8B",
        "response_1_source": "Alpaca3-8B",
        "is_response_0_safe": False,
        "is_response_1_safe": True,
        "response_0_harm_category": harm(),
        "response_1_harm_category": harm(),
        "response_0_severity_level": 2,
        "response_1_severity_level": 0,
        "better_response_id": better,
        "safer_response_id": 1,
        "response_0_sha256": "0" * 64,
        "response_1_sha256": "1" * 64,
    }
    for better in (0, 1)
]
ROWS: dict[str, Sequence[dict[str, Any]]] = {
    "full-hh-rlhf": [{"prompt": DIALOGUE, "response": " Fine.", "chosen": " Fine.", "rejected": " Go."}],
    "gsm8k": [{"question": "What is 2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}],
    "pku-saferlhf": PKU,
    "ultrafeedback": [ULTRA],
}
LEARNED = {
    "hh-sft": {"tokens": [" Fine.</s>"]},
    "hh-rm": {"chosen_tokens": [" Fine.</s>"], "rejected_tokens": [" Go.</s>"]},
    "gsm8k-sft": {"tokens": ["2 + 3 = <<2+3=5>>5\n#### 5</s>"]},
    "beaver-rm": {"chosen_tokens": ["Yes.</s>", "No.</s>"], "rejected_tokens": ["No.</s>", "Yes.</s>"]},
    "beaver-cost": {"chosen_tokens": ["No.</s>", "No.</s>"], "rejected_tokens": ["Yes.</s>", "Yes.</s>"]},
    "ultra-sft": {"tokens": ["hello</s>fine</s>"]},
    "ultra-dpo": {"chosen_tokens": ["hello</s>"], "rejected_tokens": ["go away</s>"]},
}
"""By job what the model learns of each row, or compares."""
JOBS = [(job.name, job, name) for name, path in sorted(MANIFESTS.items()) for job in load(path)]


def local(source: DataSource, name: str, folder: Path) -> DataSource:
    """The same source, of rows that lie in a folder as the hub has them."""
    (folder / "data").mkdir()
    datasets.Dataset.from_list(list(ROWS[name])).to_parquet(folder / "data" / f"{source.split}-00000-of-00001.parquet")
    return source.model_copy(update={"uri": f"file://{folder}", "subset": None})


@pytest.mark.parametrize(("name", "job", "data_set"), JOBS, ids=[name for name, *_ in JOBS])
def test_a_manifest_reads_its_data_set(
    name: str, job: Job, data_set: str, tmp_path: Path, chat: PreTrainedTokenizerFast
) -> None:
    train = job.spec.data.train
    assert isinstance(train, DataSource)
    loader = LOADERS[job.spec.algorithm.data](
        local(train, data_set, tmp_path), chat, path="spec.data.train", spec=job.spec
    )
    batch = loader.ordered()
    assert loader.facts() == []
    for field, texts in LEARNED[name].items():
        masks = batch[f"{field.removesuffix('_tokens')}_response_mask" if field != "tokens" else "response_mask"]
        rows = zip(batch[field], masks, strict=True)
        assert [chat.decode(ids[mask > 0]) for ids, mask in rows] == texts
    if name == "beaver-cost":
        assert batch["chosen_safe"].tolist() == [1, 1]
        assert batch["rejected_safe"].tolist() == [0, 0]
    if name.startswith("hh"):
        ids = batch["tokens"] if "tokens" in batch else batch["chosen_tokens"]
        assert chat.decode(ids[0]).startswith(DIALOGUE), "no template"


def test_every_manifest_is_tried() -> None:
    assert set(MANIFESTS) == set(ROWS)
    assert {name for name, *_ in JOBS} == set(LEARNED)
