"""The tensors of a batch: ids from position 0, padding on the right, masks that cover what they say."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from rlhf_api.spec.data import DataSource
from rlhf_api.spec.job_spec import JobSpec
from rlhf_trainer.data.loaders import (
    CompletionLoader,
    LabelledLoader,
    Loader,
    PairLoader,
    PromptLoader,
    SafetyPairLoader,
)
from rlhf_trainer.errors import DataError
from rlhf_trainer.types import Batch
from rlhf_trainer.workers import data as data_worker
from rlhf_trainer.workers.data import DataWorker
from rlhf_trainer.workers.samples import from_bytes
from tests.api.cases import made
from tests.trainer.unit.data.conftest import spec_of

Write = Callable[[Sequence[Mapping[str, object]]], DataSource]
SPEC = spec_of(100, 100)
PAD, END = 0, 1


def ids_of(tokenizer: PreTrainedTokenizerFast, letters: str) -> list[int]:
    return list(tokenizer.convert_tokens_to_ids(list(letters)))


def prompt_of(loader: Loader, example: int, tokenizer: PreTrainedTokenizerFast) -> str:
    """The prompt of an example without special tokens."""
    return str(tokenizer.decode(loader._prompts[example].tolist(), skip_special_tokens=True))


def test_prompts(write: Write, plain: PreTrainedTokenizerFast) -> None:
    loader = PromptLoader(write([{"prompt": "abc"}, {"prompt": "z"}]), plain, path="spec.data.train", spec=SPEC)
    batch = loader.ordered(slice(0, 3))
    a, b, c, z = ids_of(plain, "abcz")
    assert batch["prompt_ids"].tolist() == [[a, b, c], [z, PAD, PAD], [a, b, c]]
    assert batch["prompt_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 1]]
    assert {name: tensor.tolist() for name, tensor in batch.items() if tensor.dim() == 1} == {
        "valid": [1, 1, 0],
        "row": [0, 1, 2],
        "example": [0, 1, 0],
    }
    integers = {name for name, tensor in batch.items() if tensor.dtype == torch.int64}
    assert integers == {"prompt_ids", "row", "example"}
    assert {tensor.dtype for name, tensor in batch.items() if name not in integers} == {torch.float32}


def test_rows_are_numbered_in_the_whole_batch(write: Write, plain: PreTrainedTokenizerFast) -> None:
    loader = PromptLoader(write([{"prompt": "abc"}]), plain, path="spec.data.train", spec=SPEC)
    assert loader.batch(5, batch_size=8, rows=slice(2, 5))["row"].tolist() == [2, 3, 4]


def test_the_mask_covers_the_text_of_the_assistant_and_the_end(write: Write, chat: PreTrainedTokenizerFast) -> None:
    talk = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "and you?"}]
    rows = [
        {"prompt": talk, "chosen": [{"role": "assistant", "content": "I am fine."}]},
        {"prompt": talk[1:], "chosen": [{"role": "assistant", "content": "  Yes: caf\u00e9!\n"}]},
    ]
    loader = CompletionLoader(write(rows), chat, path="spec.data.train", spec=SPEC)
    batch = loader.ordered()
    seen = [ids[mask > 0] for ids, mask in zip(batch["tokens"], batch["attention_mask"], strict=True)]
    assert [chat.decode(ids) for ids in seen] == [
        "<|system|>be kind</s>\n<|user|>and you?</s>\n<|assistant|>I am fine.</s>",
        "<|user|>and you?</s>\n<|assistant|>  Yes: caf\u00e9!\n</s>",
    ]
    trained = [ids[mask > 0] for ids, mask in zip(batch["tokens"], batch["response_mask"], strict=True)]
    assert [chat.decode(ids) for ids in trained] == ["I am fine.</s>", "  Yes: caf\u00e9!\n</s>"]
    assert batch["response_mask"].dtype == batch["attention_mask"].dtype == torch.float32
    assert prompt_of(loader, 1, chat) == "and you?\n"


def test_padding_trains_nothing(write: Write, plain: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": "ab", "chosen": "c"}, {"prompt": "a", "chosen": ""}]
    batch = CompletionLoader(write(rows), plain, path="spec.data.train", spec=SPEC).ordered(slice(0, 3))
    a, b, c = ids_of(plain, "abc")
    assert batch["tokens"].tolist() == [[a, b, c, END], [a, END, PAD, PAD], [a, b, c, END]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch["response_mask"].tolist() == [[0, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]]


def test_the_two_responses_of_a_pair_are_equally_wide(write: Write, plain: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": "a", "chosen": "bb", "rejected": "c"}, {"prompt": "b", "chosen": "", "rejected": "ccc"}]
    batch = PairLoader(write(rows), plain, path="spec.data.train", spec=SPEC).ordered()
    a, b, c = ids_of(plain, "abc")
    assert batch["chosen_tokens"].tolist() == [[a, b, b, END, PAD], [b, END, PAD, PAD, PAD]]
    assert batch["rejected_tokens"].tolist() == [[a, c, END, PAD, PAD], [b, c, c, c, END]]
    assert batch["chosen_mask"].sum(1).tolist() == [4, 2]
    assert batch["rejected_mask"].sum(1).tolist() == [3, 5]
    assert batch["chosen_response_mask"].tolist() == [[0, 1, 1, 1, 0], [0, 1, 0, 0, 0]]
    assert batch["rejected_response_mask"].tolist() == [[0, 1, 1, 0, 0], [0, 1, 1, 1, 1]]


def test_a_pair_says_which_response_is_safe(write: Write, plain: PreTrainedTokenizerFast) -> None:
    rows: list[dict[str, object]] = [
        {"prompt": "a", "chosen": "b", "rejected": "c", "chosen_safe": True, "rejected_safe": False},
        {"prompt": "a" * 200, "chosen": "b", "rejected": "c", "chosen_safe": True, "rejected_safe": True},
        {"prompt": "b", "chosen": "b", "rejected": "c", "chosen_safe": False, "rejected_safe": False},
    ]
    loader = SafetyPairLoader(write(rows), plain, path="spec.data.train", spec=SPEC)
    batch = loader.ordered(slice(0, 3))
    assert loader.readers[0].dropped == 1
    assert batch["chosen_safe"].tolist() == [1, 0, 1]
    assert batch["rejected_safe"].tolist() == [0, 0, 0]
    rows[0]["rejected_safe"] = "no"
    loader = SafetyPairLoader(write(rows), plain, path="spec.data.train", spec=SPEC)
    assert loader.readers[0].named[0].startswith("spec.data.train.rejectedSafeKey: ")
    assert loader.readers[0].named[0].endswith("/rows.jsonl, line 1 holds 'no', not true or false")
    assert loader.ordered()["chosen_safe"].tolist() == [0]


def labelled(write: Write, tokenizer: PreTrainedTokenizerFast, rows: Sequence[Mapping[str, object]]) -> LabelledLoader:
    source = write(rows).model_copy(update={"response_key": "completion"})
    return LabelledLoader(source, tokenizer, path="spec.data.train", spec=SPEC)


def test_a_prompt_is_also_read_with_the_next_response(write: Write, plain: PreTrainedTokenizerFast) -> None:
    """The last row gets the first one's response, and so does the row before padding."""
    rows = [
        {"prompt": "a", "completion": "b", "label": True},
        {"prompt": "cd", "completion": "ee", "label": False},
        {"prompt": "f", "completion": "", "label": True},
    ]
    loader = labelled(write, plain, rows)
    batch = loader.ordered(slice(0, 4))
    assert batch["desirable"].tolist() == [1, 0, 1, 1]
    a, b, c, d, e, f = ids_of(plain, "abcdef")
    assert batch["tokens"].tolist()[:3] == [[a, b, END, PAD, PAD], [c, d, e, e, END], [f, END, PAD, PAD, PAD]]
    assert batch["mismatched_tokens"].tolist()[:3] == [[a, e, e, END], [c, d, END, PAD], [f, b, END, PAD]]
    assert batch["mismatched_mask"].sum(1).tolist() == [4, 3, 3, 3]
    assert batch["mismatched_response_mask"].tolist() == [[0, 1, 1, 1], [0, 0, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    halves = [loader.ordered(slice(0, 2)), loader.ordered(slice(2, 4))]
    assert torch.equal(halves[1]["tokens"][0], batch["tokens"][2]), "a rank's rows are those of the whole batch"
    whole, *parts = (loader.batch(1, batch_size=3, rows=each) for each in (None, slice(0, 1), slice(1, 3)))
    for name in LabelledLoader.fields:
        assert torch.equal(torch.cat([part[name] for part in parts]), whole[name]), name


def test_a_lone_row_is_read_with_a_response_of_another(write: Write, plain: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": "a", "completion": each, "label": True} for each in "bcd"]
    source = write(rows).model_copy(update={"response_key": "completion"})
    spec = spec_of(100, 100, total_epochs=1)
    last = LabelledLoader(source, plain, path="spec.data.train", spec=spec).batch(2, batch_size=2)
    assert last["valid"].tolist() == [1, 0]
    assert last["mismatched_tokens"][0].tolist() != last["tokens"][0].tolist()


def test_a_label_may_be_a_truth_a_number_or_a_text(write: Write, plain: PreTrainedTokenizerFast) -> None:
    texts = ["true", "False", " TRUE", "0", "1"]
    loader = labelled(write, plain, [{"prompt": "a", "completion": "b", "label": each} for each in texts])
    assert loader.ordered()["desirable"].tolist() == [1, 0, 1, 0, 1]
    assert loader.facts() == ["spec.data.train: 3 of 5 rows are desirable"]
    loader = labelled(write, plain, [{"prompt": "a", "completion": "b", "label": each} for each in (1, 0, 2, None)])
    assert loader.ordered()["desirable"].tolist() == [1, 0]
    assert [fact.rpartition("line ")[2] for fact in loader.readers[0].named] == [
        "3 holds 2, not true or false",
        "4 holds None, not true or false",
    ]
    assert loader.readers[0].named[0].startswith("spec.data.train.labelKey: ")


def test_rows_of_one_label_alone_are_told(write: Write, plain: PreTrainedTokenizerFast) -> None:
    loader = labelled(write, plain, [{"prompt": "a", "completion": "b", "label": False}] * 2)
    alone = "; without rows of both labels the loss only pushes all rows one way"
    assert loader.facts() == [f"spec.data.train: 0 of 2 rows are desirable{alone}"]


def test_labelled_rows_may_be_messages(write: Write, chat: PreTrainedTokenizerFast) -> None:
    """TRL writes the prompt and the completion as lists of messages, or both as one conversation."""
    one, other = ([{"role": role, "content": text}] for role, text in (("user", "abc"), ("assistant", "d")))
    rows = [{"prompt": one, "completion": other, "label": True, "messages": [*one, *other]}] * 2
    batch = labelled(write, chat, rows).ordered()
    source = write(rows).model_copy(update={"messages_key": "messages"})
    talk = LabelledLoader(source, chat, path="spec.data.train", spec=SPEC).ordered()
    for found in (batch, talk):
        assert chat.decode(found["tokens"][0]) == "<|user|>abc</s>\n<|assistant|>d</s>"
        assert torch.equal(found["mismatched_tokens"], found["tokens"])
        assert torch.equal(found["mismatched_response_mask"], batch["response_mask"])
        assert found["desirable"].tolist() == [1, 1]


def test_a_column_may_say_which_response_is_better(write: Write, plain: PreTrainedTokenizerFast) -> None:
    rows: list[dict[str, object]] = [
        {"prompt": "a", "chosen": "bb", "rejected": "c", "better": 1, "chosen_safe": True, "rejected_safe": False},
        {"prompt": "b", "chosen": "x", "rejected": "y", "better": 0, "chosen_safe": True, "rejected_safe": False},
    ]
    source = write(rows).model_copy(update={"better_key": "better"})
    batch = SafetyPairLoader(source, plain, path="spec.data.train", spec=SPEC).ordered()
    assert [plain.decode(ids, skip_special_tokens=True) for ids in batch["chosen_tokens"]] == ["ac", "bx"]
    assert [plain.decode(ids, skip_special_tokens=True) for ids in batch["rejected_tokens"]] == ["abb", "by"]
    assert batch["chosen_safe"].tolist() == [0, 1]
    assert batch["rejected_safe"].tolist() == [1, 0]


def test_the_mask_covers_every_answer_of_a_conversation(write: Write, chat: PreTrainedTokenizerFast) -> None:
    talk = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)]
    source = write([{"messages": talk}, {"messages": talk[:2]}]).model_copy(update={"messages_key": "messages"})
    batch = CompletionLoader(source, chat, path="spec.data.train", spec=SPEC).ordered(slice(0, 3))
    learned = [ids[mask > 0] for ids, mask in zip(batch["tokens"], batch["response_mask"], strict=True)]
    assert [chat.decode(ids) for ids in learned] == ["b</s>d</s>", "b</s>", ""]
    prompts = PromptLoader(source, chat, path="spec.data.train", spec=SPEC)
    assert [prompt_of(prompts, row, chat) for row in range(2)] == ["a\nb\nc\n", "a\n"]


def test_a_tokenizer_without_padding_pads_with_the_end(write: Write, plain: PreTrainedTokenizerFast) -> None:
    plain.pad_token = None
    batch = PromptLoader(write([{"prompt": "ab"}, {"prompt": "a"}]), plain, path="x", spec=SPEC).ordered()
    assert batch["prompt_ids"][1, 1] == END
    assert batch["prompt_mask"][1].tolist() == [1, 0]


OVERLONG: dict[str, tuple[type[Loader], dict[str, str], str]] = {
    "a prompt": (
        PromptLoader,
        {"prompt": "12345"},
        "promptKey: {file}, line 2 has 5 tokens, more than the 4 of",
    ),
    "the prompt of a response": (
        CompletionLoader,
        {"prompt": "12345", "chosen": "1"},
        "promptKey: {file}, line 2 has 5 tokens, more than the 4 of spec.data.maxPromptTokens",
    ),
    "a response with its end": (
        CompletionLoader,
        {"prompt": "1234", "chosen": "123"},
        "responseKey: {file}, line 2 has 4 tokens, more than the 3 of spec.data.maxResponseTokens",
    ),
    "the better response": (
        PairLoader,
        {"prompt": "1", "chosen": "123", "rejected": "1"},
        "chosenKey: {file}, line 2 has 4 tokens, more than the 3 of spec.data.maxResponseTokens",
    ),
    "the worse response": (
        PairLoader,
        {"prompt": "1", "chosen": "12", "rejected": "1234"},
        "rejectedKey: {file}, line 2 has 5 tokens, more than the 3 of spec.data.maxResponseTokens",
    ),
}
FITS = {"prompt": "abcd", "chosen": "ab", "rejected": "cd"}


@pytest.mark.parametrize("name", OVERLONG)
def test_a_row_that_is_too_long(name: str, write: Write, plain: PreTrainedTokenizerFast) -> None:
    kind, row, sentence = OVERLONG[name]
    source = write([FITS, {**FITS, **row}, {**FITS, "prompt": "wxyz"}])
    dropping = spec_of(4, 3)
    loader = kind(source, plain, path="spec.data.train", spec=dropping)
    assert (len(loader), loader.readers[0].dropped) == (2, 1)
    assert [prompt_of(loader, example, plain) for example in range(2)] == ["abcd", "wxyz"]
    (fact,) = loader.facts()
    assert fact.startswith("spec.data.train: 1 of 3 rows are longer than spec.data.maxPromptTokens 4")
    failing = spec_of(4, 3, overlong="Fail")
    with pytest.raises(DataError) as raised:
        kind(source, plain, path="spec.data.train", spec=failing)
    file = source.uri.removeprefix("file://")
    assert str(raised.value).startswith(f"spec.data.train.{sentence.format(file=file)}")


def test_a_row_that_just_fits_does_not_fail(write: Write, plain: PreTrainedTokenizerFast) -> None:
    failing = spec_of(4, 3, overlong="Fail")
    assert len(PairLoader(write([FITS]), plain, path="x", spec=failing)) == 1


SHORT = {
    "prompt": (PromptLoader, {"prompt": "abc"}, "minPromptTokens 4"),
    "response": (CompletionLoader, {"chosen": "a"}, "minPromptTokens 4 or spec.data.minResponseTokens 3"),
    "worse response": (PairLoader, {"rejected": "a"}, "minPromptTokens 4 or spec.data.minResponseTokens 3"),
}


@pytest.mark.parametrize("name", SHORT)
def test_a_row_that_is_too_short_is_counted_and_left_out(
    name: str, write: Write, plain: PreTrainedTokenizerFast
) -> None:
    kind, row, bounds = SHORT[name]
    source = write([FITS, {**FITS, **row}, {**FITS, **row, "prompt": "too long"}, {**FITS, "prompt": "wxyz"}])
    spec = spec_of(5, 3, least_prompt_tokens=4, least_response_tokens=3)
    loader = kind(source, plain, path="spec.data.train", spec=spec)
    assert [prompt_of(loader, example, plain) for example in range(len(loader))] == ["abcd", "wxyz"]
    long, short = loader.facts()
    assert long.startswith("spec.data.train: 1 of 4 rows are longer than spec.data.maxPromptTokens 5")
    assert short == f"spec.data.train: 1 of 4 rows are shorter than spec.data.{bounds} and were dropped"


def test_no_row_is_long_enough(write: Write, plain: PreTrainedTokenizerFast) -> None:
    source = write([FITS, {**FITS, "prompt": "much too long"}])
    with pytest.raises(DataError) as raised:
        PromptLoader(source, plain, path="spec.data.train", spec=spec_of(5, 3, least_prompt_tokens=5))
    assert str(raised.value) == (
        f"spec.data.train: all 2 rows of {source.uri} are longer than spec.data.maxPromptTokens 5 or "
        "shorter than spec.data.minPromptTokens 5"
    )


def test_no_row_left(write: Write, plain: PreTrainedTokenizerFast) -> None:
    source = write([FITS, FITS])
    with pytest.raises(DataError) as raised:
        PromptLoader(source, plain, path="spec.data.train", spec=spec_of(1, 1))
    assert str(raised.value) == (
        f"spec.data.train: all 2 rows of {source.uri} are longer than spec.data.maxPromptTokens 1"
    )


def test_rows_keep_their_numbers_beyond_a_tokenizers_call(
    write: Write, plain: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_trainer.data.reading.ROWS_AT_ONCE", 2)
    rows = [{"prompt": str(number)} for number in (1, 2, 333, 4, 5)]
    loader = PromptLoader(write(rows), plain, path="x", spec=spec_of(1, 1))
    assert [prompt_of(loader, example, plain) for example in range(len(loader))] == ["1", "2", "4", "5"]
    failing = spec_of(1, 1, overlong="Fail")
    with pytest.raises(DataError, match="line 3 "):
        PromptLoader(write(rows), plain, path="x", spec=failing)
    with pytest.raises(DataError, match=r"line 4 is empty"):
        PromptLoader(write([*rows[:3], {"prompt": ""}]), plain, path="x", spec=spec_of(100, 100, on_bad_row="Fail"))


def test_a_job_may_leave_out_the_chat_template(write: Write, chat: PreTrainedTokenizerFast) -> None:
    never = spec_of(100, 100, chat_template="Never")
    loader = PromptLoader(write([{"prompt": "abc"}]), chat, path="x", spec=never)
    assert loader.ordered()["prompt_ids"].tolist() == [ids_of(chat, "abc")]


@pytest.mark.parametrize(("algorithm", "rollout"), [("Generate", {}), ("GRPO", {"agent": {"entrypoint": "own:run"}})])
def test_prompts_are_given_as_the_file_writes_them(
    algorithm: str, rollout: Mapping[str, Any], write: Write, chat: PreTrainedTokenizerFast
) -> None:
    prompt = [{"role": "user", "content": "hi"}]
    document = made(algorithm)["spec"] | {"evaluation": {"data": {"uri": "file:///held-out.jsonl"}}}
    document["rollout"] = document.get("rollout", {}) | rollout
    spec = JobSpec.model_validate(document)
    data = object.__new__(DataWorker)
    data._job = SimpleNamespace(name="g", spec=spec, rows_per_step=1)  # type: ignore[assignment]
    data._pretrain, data._samples_held_out = None, 1
    data.train = data._held_out = PromptLoader(write([{"prompt": prompt}]), chat, path="spec.data.train", spec=spec)
    for load in (data.load_batch, data.load_evaluation)[: 1 + bool(rollout)]:  # a job that makes data evaluates nothing
        (raw,) = load(Batch(step=1, start=0, size=1, fields={}))["raw_prompts"]
        assert from_bytes(raw) == {"prompt": prompt}


def test_a_prompt_that_json_cannot_hold_is_named(
    tmp_path: Path, chat: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": [{"role": "user", "content": "hi", "at": datetime(2026, 1, 1)}]}]  # noqa: DTZ001 as in files
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    source, spec = DataSource(uri=f"file://{tmp_path}/rows.parquet"), JobSpec.model_validate(made("Generate")["spec"])
    data = object.__new__(DataWorker)
    data._job = SimpleNamespace(name="g", spec=spec, rows_per_step=1)  # type: ignore[assignment]
    data._pretrain = None
    data.train = PromptLoader(source, chat, path="spec.data.train", spec=spec)
    monkeypatch.setattr(data_worker, "_repeated", lambda *_: data.train.ordered(slice(0, 1)))
    with pytest.raises(
        DataError, match=r"^g: spec.data.train: in a prompt or its tools there is a value of type datetime"
    ):
        data.load_batch(Batch(step=1, start=0, size=1, fields={}))
