"""`rlhf data` and `rlhf reward`: data sets of the jobs of a manifest as workers read them, and scores for them."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
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
from rlhf_trainer.data.loaders import Loader
from rlhf_trainer.environments.of_job import environments_of, play
from rlhf_trainer.rewards.judge import JudgeClient
from rlhf_trainer.rewards.sample import Sample
from rlhf_trainer.run.deep_check import origin_of
from rlhf_trainer.run_folder.folder import with_written_data, writing
from rlhf_trainer.workers.base import TEXT_FIELDS, side_fields
from rlhf_trainer.workers.data import DataWorker
from rlhf_trainer.workers.scoring import reward_code, terms_of
from rlhf_trainer.workers.trials import made_samples, total_of, try_score, with_first_rows

EXAMPLES, BINS, MAX_BAR = 3, 8, 40
"""Numbers of example rows that are shown, of bars of a histogram, and of characters of the histogram's longest bar."""
LEARNED = [TEXT_FIELDS, *map(side_fields, ("chosen", "rejected"))]
TEXTS = {"prompt_ids": ("prompt_mask", "")} | {text: (mask, learned) for text, mask, learned in LEARNED}
"""Field of token ids in a batch -> the field that masks padding, and the field that marks trained tokens, if any."""
OPEN, CLOSE = "\u27e6", "\u27e7"


def print_data(jobs: Sequence[Job], output: Path, *, only: str | None, prompt_tokens: Path | None = None) -> None:
    """Print rows, lengths and examples of each job's data, or of one job's; of models only tokenizers are loaded.

    prompt_tokens: file for the token counts of the training prompts of one job, one a line.
    """
    names, chosen = [job.name for job in jobs], [job for job in jobs if only in (None, job.name)]
    if not chosen:
        raise SpecError([Problem("--job", f"is {only}; there are {', '.join(names)}")])
    if prompt_tokens and len(chosen) > 1:
        raise SpecError([Problem("--prompt-tokens", f"is for one job; name one of {', '.join(names)}")])
    console, by_name = Console(highlight=False, soft_wrap=True), {job.name: job for job in jobs}
    for job in chosen:
        setting, _ = origin_of(with_written_data(job, output), job.saved, by_name, output)
        tokenizer = setting.tokenizer()
        worker = DataWorker(setting, slots=1)
        console.print(Text(f"{job.name}: {worker.ends.sentence()}"))
        for loader in worker.loaders:
            _print_loader(console, job.name, loader, tokenizer)
        if prompt_tokens:
            lengths = next(iter(worker.train.lengths().values()))
            with writing(prompt_tokens):
                prompt_tokens.write_text("".join(f"{length}\n" for length in lengths.tolist()))


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
    rewarded = [job for job in jobs if terms_of(job) or job.spec.rollout.environment]
    if not (chosen := [job for job in rewarded if only in (None, job.name)]):
        raise SpecError([Problem("--job" if only else "FILE", "names no job with rewards")])
    for job in chosen:
        setting, _ = origin_of(with_written_data(job, output), job.saved, by_name, output)
        data = with_first_rows(setting, max([1, rows, *(row + 1 for row, _ in given)]))
        tried = made_samples(job, data, rows, given)
        if unknown := {row for row, _ in given}.difference(row for row, *_ in tried):
            problem = f"names the row {min(unknown)}, which is bad or missing in {job.name}"
            raise SpecError([Problem("--responses", problem)])
        found[job.name] = [*_trials(job, tried, judges=judges)]
        if not in_json:
            _print_table(job.name, data.train.facts(), found[job.name])
    if in_json:
        typer.echo(json.dumps(found, indent=2))


def _read_texts(file: Path) -> list[tuple[int, str]]:
    try:
        entries = [json.loads(line) for line in file.read_text(encoding="utf-8").rstrip("\n").split("\n")]
        return [(int(entry["row"]), str(entry["response"])) for entry in entries]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SpecError([Problem("--responses", 'has a line unlike {"row": 3, "response": "..."}')]) from error


def _trials(job: Job, tried: Sequence[tuple[int, str, Sample]], *, judges: bool) -> Iterator[dict[str, Any]]:
    """Yield the scores of each response by the rewards' code, their weighted sum, and the seconds that they took."""
    terms = terms_of(job)
    with ExitStack() as stack:
        environments = stack.enter_context(closing(environments_of(job))) if job.spec.rollout.environment else None
        codes = {path: stack.enter_context(closing(code)) for path, code in reward_code(job, ranks=1).items()}
        used = {path: code for path, code in codes.items() if judges or not isinstance(code, JudgeClient)}
        for row, kind, sample in tried:
            began, text = time.monotonic(), sample.response
            scores = {path: try_score(code, sample, [other for *_, other in tried]) for path, code in used.items()}
            trial, total = {term.name: scores.get(path) for path, term in terms.items()}, total_of(terms, scores)
            if environments:
                calls = {"reset": {"prompt": sample.prompt, **sample.columns}, "step": text}
                trial["environment"] = reward = float(play(job, environments, sample.row, calls)["step"][1])
                total = None if total is None else total + reward
            seconds = round(time.monotonic() - began, 3)
            yield {"row": row, "kind": kind, "response": text, **trial, "total": total, "seconds": seconds}


def _print_table(title: str, facts: Sequence[str], trials: Sequence[Mapping[str, Any]]) -> None:
    table = Table(*(trials[0] if trials else ()), title=title, box=None)
    for trial in trials:
        table.add_row(*(Text(f"{value!s:.40}") for value in trial.values()))
    Console(soft_wrap=True).print(*facts, table, sep="\n", markup=False)
