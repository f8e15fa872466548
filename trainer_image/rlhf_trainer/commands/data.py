"""`rlhf data` and `rlhf reward`: data sets of the jobs of a manifest as workers read them, and scores for them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer
from pydantic.alias_generators import to_camel
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_api.job import Job
from rlhf_api.problems import Problem, SpecError
from rlhf_api.spec.verifiers import Code
from rlhf_trainer.data.loaders import Loader
from rlhf_trainer.environments.of_job import try_environment
from rlhf_trainer.rewards.judge import JudgeClient
from rlhf_trainer.run.deep_check import origin_of
from rlhf_trainer.run_folder.folder import with_written_data
from rlhf_trainer.workers.data import DataWorker
from rlhf_trainer.workers.scoring import reward_code, terms_of

EXAMPLES, BINS, MAX_BAR = 3, 8, 40
"""Numbers of example rows that are shown, of bars of a histogram, and of characters of the histogram's longest bar."""
TEXTS = {
    "prompt_ids": ("prompt_mask", None),
    "tokens": ("attention_mask", "response_mask"),
    "chosen_tokens": ("chosen_mask", "chosen_response_mask"),
    "rejected_tokens": ("rejected_mask", "rejected_response_mask"),
}
"""Field of token ids in a batch -> the field that masks padding, and the field that marks trained tokens."""
OPEN, CLOSE = "\u27e6", "\u27e7"


def print_data(jobs: Sequence[Job], output: Path, *, only: str | None) -> None:
    """Print rows, lengths and examples of each job's data, or of one job's; of models only tokenizers are loaded."""
    chosen = [job for job in jobs if only in (None, job.name)]
    if not chosen:
        raise SpecError([Problem("--job", f"is {only}; there are {', '.join(job.name for job in jobs)}")])
    console, by_name = Console(highlight=False, soft_wrap=True), {job.name: job for job in jobs}
    for job in chosen:
        setting, _ = origin_of(with_written_data(job, output), job.saved, by_name, output)
        tokenizer = setting.tokenizer()
        worker = DataWorker(setting, slots=1)
        console.print(Text(f"{job.name}: {worker.ends.sentence()}"))
        for loader in worker.loaders:
            _print_loader(console, job.name, loader, tokenizer)


def _print_loader(console: Console, title: str, loader: Loader, tokenizer: PreTrainedTokenizerBase) -> None:
    uris = ", ".join(reader.source.address for reader in loader.readers)
    console.print(Text(f"{title}: {loader.path}: {uris}", style="bold"))
    left_out = sum(reader.dropped + reader.short + reader.bad for reader in loader.readers)
    lines = [f"{len(loader)} rows are read, {left_out} are left out", *loader.facts()]
    for key, lengths in loader.lengths().items():
        middle, most = int(lengths.median()), int(lengths.max())
        lines.append(f"tokens by {to_camel(key)}: {int(lengths.min())} to {most}, median {middle}")
        lines += histogram(lengths)
    for line in lines:
        console.print(Text(f"  {line}"))
    count = min(EXAMPLES, len(loader))
    batch = loader.ordered(slice(0, count))
    for row in range(count):
        console.print(Text(f"  example {row}"))
        for name, (there, learned) in TEXTS.items():
            if name in batch:
                ids = batch[name][row][batch[there][row] > 0]
                marks = batch[learned][row][: len(ids)] > 0 if learned else ids < 0
                console.print(Text.assemble((f"  {name}: ", "dim"), *_runs(ids, marks, tokenizer)))


def histogram(lengths: Tensor) -> Iterator[str]:
    """Yield the lines of a histogram of lengths int64 [N]: equal ranges, each with a bar and its number of lengths."""
    least, most = int(lengths.min()), int(lengths.max())
    size = -(-(most - least + 1) // BINS)
    starts = range(least, most + 1, size)
    counts = [int(((lengths >= start) & (lengths < start + size)).sum()) for start in starts]
    width = len(str(starts[-1] + size - 1))
    for start, count in zip(starts, counts, strict=True):
        last = min(start + size - 1, most)
        bar = "#" * -(-MAX_BAR * count // max(counts))
        yield f"{start:>{width}} - {last:>{width}} {bar} {count}"


def _runs(ids: Tensor, learned: Tensor, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, str]]:
    """Yield (text, style) of each stretch of consecutive tokens that are all trained, or all not trained."""
    starts = [0, *((learned[1:] != learned[:-1]).nonzero()[:, 0] + 1).tolist(), len(ids)]
    for start, end in pairwise(starts):
        text = str(tokenizer.decode(ids[start:end]))
        yield (f"{OPEN}{text}{CLOSE}", "green") if learned[start] else (text, "")


def print_rewards(
    jobs: Sequence[Job], output: Path, *, only: str | None, rows: int, texts: Path | None, judges: bool, in_json: bool
) -> None:
    """Print what the rewards of each job, or of one job, give to responses; of models only tokenizers are loaded."""
    given, by_name, found = _read_texts(texts) if texts else [], {job.name: job for job in jobs}, {}
    for job in [job for job in jobs if only in (None, job.name) and (terms_of(job) or job.spec.rollout.environment)]:
        setting, _ = origin_of(with_written_data(job, output), job.saved, by_name, output)
        data = DataWorker(setting, slots=1)
        found[job.name] = _trials(job, data, [*_responses(job, data, rows), *given], judges=judges)
        if not in_json:
            _print_table(job.name, data.train.facts(), found[job.name])
    if not found:
        raise SpecError([Problem("--job" if only else "FILE", "names no job with rewards")])
    if in_json:
        typer.echo(json.dumps(found, indent=2))


def _read_texts(file: Path) -> list[tuple[int, str, str]]:
    try:
        entries = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        return [(int(entry["row"]), "given", str(entry["response"])) for entry in entries]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SpecError([Problem("--responses", 'has a line unlike {"row": 3, "response": "..."}')]) from error


def _responses(job: Job, data: DataWorker, rows: int) -> Iterator[tuple[int, str, str]]:
    """Yield (row, kind, text): an empty response, and the right answer alone and as the chat template writes it."""
    readers = [reader for _, reader in job.spec.column_readers(job.spec.data.train)]
    keys = [each.solution_key if isinstance(each, Code) else next(iter(each.columns), None) for each in readers]
    for row in range(min(rows, len(data.train))):
        yield row, "empty", ""
        columns = data.sample(data.train, row, "").columns
        for answer in [columns[key] for key in keys if key and columns.get(key)][:1]:
            text = str(answer[0] if isinstance(answer, list) else answer)
            yield from ((row, "gold", text), (row, "gold's turn", data.turn(data.train, row, text)))


def _trials(
    job: Job, data: DataWorker, responses: Sequence[tuple[int, str, str]], *, judges: bool
) -> list[dict[str, Any]]:
    """Return the scores of responses by the rewards' code, their weighted sum, and the seconds that they took."""
    terms, codes, found = terms_of(job), reward_code(job, ranks=1), []
    for row, kind, text in responses:
        if row not in range(len(data.train)):
            raise SpecError([Problem("--responses", f"names the row {row}; there are {len(data.train)}")])
        began, sample, trial = time.monotonic(), data.sample(data.train, row, text), dict[str, Any]()
        trial |= {term.name: None for term in terms.values()}  # a model, or a judge that is not asked, gives none
        for path, code in codes.items():
            if judges or not isinstance(code, JudgeClient):
                trial[terms[path].name] = code.scores([sample])[0].value
        values = [(term.weight, trial[term.name]) for term in terms.values()]
        total = None if any(value is None for _, value in values) else sum(weight * value for weight, value in values)
        if job.spec.rollout.environment:
            calls = {"reset": {"prompt": sample.prompt, **sample.columns}, "step": text}
            trial["environment"] = float(try_environment(job, calls)["step"][1])
            total = None if total is None else total + trial["environment"]
        seconds = round(time.monotonic() - began, 3)
        found.append({"row": row, "kind": kind, "response": text, **trial, "total": total, "seconds": seconds})
    return found


def _print_table(title: str, facts: Sequence[str], trials: Sequence[Mapping[str, Any]]) -> None:
    table = Table(*(trials[0] if trials else ()), title=title, box=None)
    for trial in trials:
        table.add_row(*(Text(f"{value!s:.40}") for value in trial.values()))
    Console(soft_wrap=True).print(*facts, table, sep="\n", markup=False)
