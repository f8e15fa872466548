"""Of any first rows each data set has its share, in an order of its own; a run goes on anywhere in it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from rlhf_api.spec.data import DataMix
from rlhf_trainer.data.loaders import CompletionLoader, PromptLoader
from rlhf_trainer.data.order import Order, shares
from rlhf_trainer.errors import DataError
from tests.trainer.unit.data.conftest import spec_of

Rows = dict[str, list[dict[str, object]]]
WEIGHTS = {
    "a half each": (1.0, 1.0),
    "7 to 3": (0.7, 0.3),
    "a third": (2.0, 1.0),
    "one of a thousand": (1.0, 999.0),
    "odd numbers": (0.1, 0.0737, 3.3),
    "many": tuple(float(number) for number in range(1, 12)),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_any_first_rows_have_the_shares(name: str) -> None:
    weights = WEIGHTS[name]
    sources, turns = shares(np.arange(3000), weights)
    for source, weight in enumerate(weights):
        counts = np.cumsum(sources == source)
        wanted = np.arange(1, 3001) * weight / sum(weights)
        assert np.abs(counts - wanted).max() < len(weights)
        assert turns[sources == source].tolist() == list(range(counts[-1])), "each takes its rows one after the other"


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("start", [1, 17, 1000, 123_456_789])
def test_a_part_is_what_it_is_in_the_whole(name: str, start: int) -> None:
    weights = WEIGHTS[name]
    alone = shares(np.arange(start, start + 50), weights)
    with_more = shares(np.arange(start - 1, start + 80), weights)
    for one, other in zip(alone, with_more, strict=True):
        assert one.tolist() == other[1:51].tolist()


def test_each_data_set_has_a_permutation_of_its_own() -> None:
    order = Order(counts=(50, 50), weights=(1.0, 1.0), seed=3)
    examples = order.at(np.arange(100))
    first, second = examples[examples < 50], examples[examples >= 50] - 50
    assert sorted(first) == sorted(second) == list(range(50))
    assert first.tolist() != second.tolist()


def test_one_data_set_is_ordered_as_without_a_mix() -> None:
    one = Order(counts=(7,), weights=(2.0,), seed=3)
    assert sorted(one.at(np.arange(7))) == sorted(one.at(np.arange(7, 14))) == list(range(7))


def test_shares_of_their_rows_give_each_row_once_an_epoch() -> None:
    for counts in ((3, 9), (1, 1, 1), (7, 400, 1), (64, 63), (1000, 999, 1001)):
        order, total = Order(counts=counts, weights=counts, seed=3), sum(counts)
        for epoch in (0, 1, 5000):
            examples = order.at(np.arange(epoch * total, (epoch + 1) * total))
            assert sorted(examples) == list(range(total))


def mix_of(folder: Path, weights: dict[str, float | None], rows: Rows) -> DataMix:
    for name, found in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    parts = [{"uri": f"file://{folder}/{name}.jsonl", "weight": weight} for name, weight in weights.items()]
    return DataMix.model_validate({"mix": parts})


def test_a_small_data_set_is_repeated_and_an_epoch_is_all_rows(tmp_path: Path, plain: PreTrainedTokenizerFast) -> None:
    rows: Rows = {
        name: [{"prompt": name * (number + 1)} for number in range(count)] for name, count in (("a", 3), ("b", 9))
    }
    mix = mix_of(tmp_path, {"a": 0.5, "b": 0.5}, rows)
    loader = PromptLoader(mix, plain, path="spec.data.train", spec=spec_of(50, 50, total_epochs=1))
    assert len(loader) == 12
    batches = [loader.batch(step, batch_size=4) for step in (1, 2, 3)]
    seen = Counter(plain.decode(ids, skip_special_tokens=True) for batch in batches for ids in batch["prompt_ids"])
    assert {text: count for text, count in seen.items() if "a" in text} == {"a": 2, "aa": 2, "aaa": 2}
    assert sum(count for text, count in seen.items() if "b" in text) == 6
    whole = PromptLoader(
        mix_of(tmp_path, {"a": None, "b": None}, rows), plain, path="spec.data.train", spec=spec_of(50, 50)
    )
    texts = [plain.decode(ids, skip_special_tokens=True) for ids in whole.batch(1, batch_size=12)["prompt_ids"]]
    assert sorted(texts) == sorted(str(row["prompt"]) for each in rows.values() for row in each)
    with pytest.raises(ValueError, match="no step 4"):
        loader.batch(4, batch_size=4)


def test_conversations_and_pairs_of_texts_are_mixed(tmp_path: Path, chat: PreTrainedTokenizerFast) -> None:
    talk = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)]
    mix = mix_of(tmp_path, {"one": 1, "two": 1}, {"one": [{"prompt": "x", "chosen": "y"}], "two": [{"talk": talk}]})
    parts = (mix.mix[0], mix.mix[1].model_copy(update={"messages_key": "talk"}))
    both = mix.model_copy(update={"mix": parts})
    batch = CompletionLoader(both, chat, path="spec.data.train", spec=spec_of(50, 50)).ordered()
    learned = [ids[mask > 0] for ids, mask in zip(batch["tokens"], batch["response_mask"], strict=True)]
    assert [chat.decode(ids) for ids in learned] == ["y</s>", "b</s>d</s>"]
    assert "<|user|>c</s>" in chat.decode(batch["tokens"][1]), "what is not learned is read"


def test_a_mistake_names_the_part(tmp_path: Path, plain: PreTrainedTokenizerFast) -> None:
    mix = mix_of(tmp_path, {"a": 1, "b": 1}, {"a": [{"prompt": "x"}], "b": [{"question": "x"}]})
    with pytest.raises(DataError, match=r"^spec\.data\.train\.mix\.1\.promptKey: .* has no column 'prompt'"):
        PromptLoader(mix, plain, path="spec.data.train", spec=spec_of(50, 50))
