"""A function's rows go the way of a file's, and a function's order is that of every epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from rlhf_api.spec.data import DataMix, OwnRows, Rows
from rlhf_api.spec.functions import EntryPoint
from rlhf_api.spec.job_spec import JobSpec
from rlhf_trainer.data.loaders import CompletionLoader, PromptLoader
from rlhf_trainer.errors import DataError, UserCodeError
from rlhf_trainer.run.worker_specs import agreed
from rlhf_trainer.workers.data import DataShape
from tests.trainer import own_points
from tests.trainer.jobs import job
from tests.trainer.unit.data.conftest import Write, spec_of

POINTS = "tests.trainer.own_points"
FIELD = "j: spec.data.order"


def own(name: str, **fields: Any) -> OwnRows:
    return OwnRows(entrypoint=f"{POINTS}:{name}", **fields)


def ordered(name: str, *, seed: int = 1) -> JobSpec:
    spec = spec_of(4, 4, seed=seed)
    order = EntryPoint(entrypoint=f"{POINTS}:{name}")
    return spec.model_copy(update={"data": spec.data.model_copy(update={"order": order})})


def same(one: CompletionLoader | PromptLoader, other: CompletionLoader | PromptLoader) -> bool:
    batches = [each.batch(2, batch_size=4) for each in (one, other)]
    return one.digest == other.digest and all(torch.equal(batches[0][name], batches[1][name]) for name in batches[0])


def test_they_are_read_as_the_same_rows_of_a_file(write: Write, plain: PreTrainedTokenizerFast) -> None:
    spec, path = spec_of(4, 4), "spec.data.train"
    more: list[dict[str, Any]] = [{"prompt": "d"}, {"prompt": "e", "chosen": "f", "level": 9}]
    file, made = write(own_points.texts(more=more)), own("texts", arguments={"more": more})
    loaders = [CompletionLoader(source, plain, path=path, spec=spec) for source in (file, made)]
    assert same(*loaders)
    assert len(loaders[0]) == len(loaders[1]) == 4
    fewer = CompletionLoader(own("texts"), plain, path=path, spec=spec)
    assert fewer.digest != loaders[1].digest, "a run that goes on would notice other rows"
    dropped, bad = loaders[1].facts()
    assert dropped == loaders[0].facts()[0]
    assert "1 of 6 rows are longer than" in dropped
    assert "1 of 6 rows are bad and were dropped, such as spec.data.train.responseKey: row 4 (counted from 0)" in bad
    prompts = [
        PromptLoader(source.model_copy(update={"columns": ("level",)}), plain, path=path, spec=spec)
        for source in (file, made)
    ]
    assert same(*prompts)
    assert prompts[1].columns(torch.tensor([2, 3])) == [{"level": 3}, {"level": None}]


def test_a_limit_ends_what_has_no_end(plain: PreTrainedTokenizerFast) -> None:
    assert len(CompletionLoader(own("endless", limit=7), plain, path="x", spec=spec_of(4, 4))) == 7


@pytest.mark.parametrize(
    ("name", "said"),
    {
        "nothing": "gave no rows",
        "words": r"gave 'one' as row 0 \(counted from 0\), expected a dict whose keys are texts",
        "numbered": r"gave {1: 'a'} as row 0 ",
        "two_types": "gave a column 'prompt' that has no one type: ",
        "breaks": r"raised ZeroDivisionError: no more \(.*own_points\.py:\d+\)",
        "missing": "cannot be imported: AttributeError: ",
        "by_level": "raised TypeError: by_level.* missing 3 required positional arguments",
    }.items(),
)
def test_what_is_wrong_with_them_is_one_sentence(name: str, said: str, plain: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserCodeError, match=f"^spec.x.entrypoint: {POINTS}:{name} {said}"):
        CompletionLoader(own(name), plain, path="spec.x", spec=spec_of(4, 4))
    with pytest.raises(DataError, match=rf"^x\.responseKey: {POINTS}:texts has no column 'no'; its columns are prompt"):
        CompletionLoader(own("texts", response_key="no"), plain, path="x", spec=spec_of(4, 4))


def examples(loader: PromptLoader, steps: int) -> list[int]:
    return [each for step in range(1, steps + 1) for each in loader.batch(step, batch_size=2)["example"].tolist()]


def prompts(source: Rows | DataMix, tokenizer: PreTrainedTokenizerFast, spec: JobSpec, *, train: bool) -> PromptLoader:
    return PromptLoader(source, tokenizer, path="x", spec=spec, ordered_by=FIELD if train else "")


def test_every_epoch_has_the_order_of_the_function(write: Write, plain: PreTrainedTokenizerFast) -> None:
    """Rows ccc (level 0), a (1), bb (3): the long one is left out, and batches of two go on over the epochs' ends."""
    source = write(own_points.texts())
    loader = prompts(source, plain, ordered("by_level"), train=True)
    assert examples(loader, 6) == [2, 1, 0, 0, 1, 2, 2, 1, 0, 0, 1, 2]
    assert loader.batch(4, batch_size=2)["example"].tolist() == [2, 1], "a run that goes on has the same"
    assert examples(prompts(source, plain, ordered("by_level", seed=0), train=True), 3) == [2, 1, 0, 2, 1, 0]
    assert examples(prompts(source, plain, ordered("shortest_only"), train=True), 3) == [1] * 6
    shuffled = prompts(source, plain, ordered("by_level"), train=False)
    assert examples(shuffled, 6) == examples(prompts(source, plain, spec_of(4, 4, seed=1), train=True), 6)


def test_each_data_set_of_a_mix_is_ordered_by_itself(write: Write, plain: PreTrainedTokenizerFast) -> None:
    uri = write(own_points.texts()).uri
    mix = DataMix.model_validate({"mix": [{"uri": uri}, {"uri": uri, "limit": 2}]})
    found = examples(prompts(mix, plain, ordered("by_level"), train=True), 5)
    assert [each for each in found if each < 3][:3] == [2, 1, 0]
    assert [each for each in found if each >= 3][:2] == [4, 3]


@pytest.mark.parametrize(
    ("name", "said"),
    {
        "too_few": "gave 1 numbers in epoch 0, expected one for each of the 3 rows",
        "beyond": "gave 3 in epoch 0, expected numbers of rows, from 0 to 2",
        "missing": "cannot be imported: ",
        "halved": "raised TypeError: ",
    }.items(),
)
def test_an_order_that_is_none_is_one_sentence(
    name: str, said: str, write: Write, plain: PreTrainedTokenizerFast
) -> None:
    loader = prompts(write(own_points.texts()), plain, ordered(name), train=True)
    with pytest.raises(UserCodeError, match=f"^{FIELD}: {POINTS}:{name} {said}"):
        loader.batch(1, batch_size=2)


def test_another_order_is_other_data_and_ranks_must_agree(
    write: Write, tmp_path: Path, plain: PreTrainedTokenizerFast
) -> None:
    source = write([{"prompt": str(number), "chosen": "x"} for number in range(99)])
    names = ("never_the_same", "never_the_same", "shortest_only", "shortest_only")
    one, again, other, same = (prompts(source, plain, ordered(name), train=True).digest for name in names)
    assert len({one, again, other}) == 3
    assert other == same
    shapes = [
        DataShape(rows=99, total_steps=7, evaluation_rows=0, facts=(), digests={"spec.data.train": each})
        for each in (one, again)
    ]
    spec = spec_of(4, 4, total_epochs=1).model_dump(mode="json", by_alias=True, exclude_unset=True)
    made = job(tmp_path, "job", spec)
    assert agreed(made, [shapes[0]] * 2) is shapes[0]
    with pytest.raises(
        DataError, match=r"^job: spec\.data\.train: has not the same rows, in the same order, for every"
    ):
        agreed(made, shapes)
