"""`rlhf data`: data sets of the jobs of a manifest, as their workers read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from pydantic.alias_generators import to_camel
from rich.console import Console
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_api.job import Job
from rlhf_api.problems import Problem, SpecError
from rlhf_trainer.data.loaders import Loader
from rlhf_trainer.run.deep_check import origin_of
from rlhf_trainer.run_folder.folder import with_written_data
from rlhf_trainer.workers.data import DataWorker

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
