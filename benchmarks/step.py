"""Seconds of a step beside the limit of this machine, and the effect of each change.

    python benchmarks/step.py [--json PATH] [--columns COLUMN ...] [--changes CHANGE ...] [--rounds N] [--steps N]
                              [--precision BF16] [--episodes]

`benchmarks/work.py` defines the work; everything is real (Ray, FSDP2, vLLM). In each round `rlhf run` trains one job
with the defaults and one job without each change; then the limit is measured. A ratio is the median over the rounds,
with its range. The table is printed after each round.

The limit is the time of the unavoidable work: generation by vLLM alone, the reference's forward pass, and the actor's
(for PPO also the critic's) training pass in bare transformers with as many rows at once as are fastest. Each part has
all cores. Shared prompts save a part of the work.

--episodes measures SFT on episodes of several turns instead, of which each row begins with the whole row before it:
tokens that go through the model and seconds of a step without and with `training.sharePrompts`, in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from work import (
    COLUMNS,
    EPISODES,
    LEARNING_RATE,
    PHASES,
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    RESPONSES,
    SIZES,
    TURNS,
    WARM_UP,
    Column,
    apart,
    changed,
    episodes_manifest,
    host,
    make_episodes,
    make_inputs,
    make_models,
    manifest,
    medians,
    ratio,
    records_of,
    run,
    spread,
    tokenizer,
)

from rlhf_trainer.run.machine import cores

DEFAULT = "default"
WITHOUT: dict[str, dict[str, dict[str, Any]]] = {
    "one-slot": {"resources": {"slotsPerNode": 2}},
    "small-micro-batches": {"training": {"microBatchTokens": 16384}},
    "one-scoring": {"training": {"oldLogProbs": "Recompute"}},
    "shared-prompts": {"training": {"sharePrompts": False}},
}
"""Fields of a manifest that undo each change: 2 slots of a thread each instead of one slot with a thread a
core; a forward pass over all rows of a step; old log-probabilities computed a second time; the prompt of a group
computed for each of its responses.
"""
NOT_IN = {"one-scoring": "PPO", "shared-prompts": "PPO", "small-micro-batches": "0.7M"}
"""Changes, and the algorithm or size without them: PPO's rewards need the old log-probabilities, it has one response to
a prompt here, and the micro-batches of the small models have room for all rows.
"""
Round = dict[str, list[dict[str, float]]]
"""The records of each job."""


def measure(
    columns: Sequence[Column], changes: Sequence[str], *, rounds: int, steps: int, precision: str
) -> Iterator[dict[str, dict[str, Any]]]:
    """After each round, the figures of the columns in all rounds so far."""
    sizes = {column.size: [each.algorithm for each in columns if each.size == column.size] for column in columns}
    with tempfile.TemporaryDirectory() as root:
        found: dict[str, dict[str, Any]] = {}
        for size in sizes:
            (Path(root) / size).mkdir()
            found[size] = {"parameters": make_inputs(Path(root) / size, SIZES[size]), "rounds": [], "limits": []}
        for _ in range(rounds):
            for size, algorithms in sizes.items():
                inputs = Path(root) / size
                found[size]["rounds"].append(
                    {
                        name: one_round(inputs, Column(name, size), changes, steps=steps, precision=precision)
                        for name in algorithms
                    }
                )
                found[size]["limits"].append(limit_of(inputs, precision))
            yield {str(column): column_of(found[column.size], column) for column in columns}


def one_round(inputs: Path, column: Column, changes: Sequence[str], *, steps: int, precision: str) -> Round:
    """Train the job with the defaults, and without each of the changes."""
    taken_back = [name for name in changes if NOT_IN.get(name) not in column]
    variants = {DEFAULT: {}, **{name: WITHOUT[name] for name in taken_back}}
    jobs = [
        changed(
            changed(
                manifest(inputs, column.algorithm, steps=column.warm_up + steps, name=name),
                {"training": {"precision": precision}, "resources": {"slotsPerNode": 1}},
            ),
            change,
        )
        for name, change in variants.items()
    ]
    with tempfile.TemporaryDirectory() as folder:
        done = run(jobs, Path(folder))
        return {name: records_of(done / name, steps=steps) for name in variants}


def column_of(found: Mapping[str, Any], column: Column) -> dict[str, Any]:
    """The figures of a column: seconds, and ratios as (median, lowest, highest) of the rounds."""
    rounds: list[Round] = [each[column.algorithm] for each in found["rounds"]]
    limits = [unavoidable(column.algorithm, each) for each in found["limits"]]
    seconds = [{name: medians(records)["step"] for name, records in each.items()} for each in rounds]
    return {
        "parameters": found["parameters"],
        "steps": sum(len(each[DEFAULT]) for each in rounds),
        "seconds": medians([record for each in rounds for record in each[DEFAULT]]),
        "limit": median(limits),
        "of_limit": spread([each[DEFAULT] / limit for each, limit in zip(seconds, limits, strict=True)]),
        "without": {
            name: spread([each[name] / each[DEFAULT] for each in seconds]) for name in seconds[0] if name != DEFAULT
        },
    }


def show(results: Mapping[str, Mapping[str, Any]], precision: str) -> None:
    """The table: a column each."""
    work = f"{RESPONSES} responses, prompt {PROMPT_TOKENS}, response {RESPONSE_TOKENS} tokens, {precision}; {host()}"
    table = Table(title=f"seconds a step, medians; {work}")
    table.add_column("")
    for name, result in results.items():
        table.add_column(f"{name}\n{result['parameters'] / 1e6:.1f} M, {result['steps']} steps", justify="right")
    for phase in (*PHASES, "step"):
        table.add_row(phase, *(f"{result['seconds'][phase]:.3f}" for result in results.values()))
    table.add_section()
    table.add_row("limit", *(f"{result['limit']:.3f}" for result in results.values()))
    table.add_row("step / limit", *(ratio(result["of_limit"]) for result in results.values()))
    table.add_section()
    for change in WITHOUT:
        found = [result["without"].get(change) for result in results.values()]
        if any(found):
            table.add_row(f"without {change} / step", *(ratio(each) if each else "-" for each in found))
    Console(width=120).print(table)


def measure_episodes(sizes: Sequence[str], *, rounds: int, steps: int, precision: str) -> dict[str, dict[str, Any]]:
    """Tokens of a step that are computed without and with sharing, and (median, lowest, highest) of seconds' ratio."""
    found: dict[str, dict[str, Any]] = {}
    for size in sizes:
        with tempfile.TemporaryDirectory() as root:
            inputs = Path(root)
            make_models(inputs, SIZES[size])
            make_episodes(inputs / "episodes.jsonl")
            jobs = [
                changed(
                    episodes_manifest(inputs, steps=WARM_UP[size] + steps, name=name),
                    {"training": {"precision": precision, "sharePrompts": shares}, "resources": {"slotsPerNode": 1}},
                )
                for name, shares in (("whole", False), ("shared", True))
            ]
            done = []
            for number in range(rounds):
                (inputs / str(number)).mkdir()
                done.append(run(jobs, inputs / str(number)))
            records = {name: [_records(each / name, steps) for each in done] for name in ("whole", "shared")}
        seconds = {name: [medians(each)["step"] for each in rounds] for name, rounds in records.items()}
        found[size] = {
            "tokens": {name: rounds[0][0]["computed_tokens"] for name, rounds in records.items()},
            "seconds": {name: median(each) for name, each in seconds.items()},
            "whole / shared": spread([one / other for one, other in zip(*seconds.values(), strict=True)]),
        }
    return found


def _records(job: Path, steps: int) -> list[dict[str, float]]:
    return [json.loads(line) for line in (job / "metrics.jsonl").read_text().splitlines()][-steps:]


def show_episodes(results: Mapping[str, Mapping[str, Any]], precision: str) -> None:
    """Print a table with a row for each size."""
    table = Table(title=f"SFT on {EPISODES} episodes of {TURNS} turns, a row each, {precision}; {host()}")
    for title in ("", "tokens, each row whole", "shared", "seconds", "shared", "whole / shared"):
        table.add_column(title, justify="right")
    for size, each in results.items():
        tokens, seconds = each["tokens"].values(), each["seconds"].values()
        table.add_row(
            size,
            *(f"{count:,.0f}" for count in tokens),
            *(f"{one:.2f}" for one in seconds),
            ratio(each["whole / shared"]),
        )
    Console(width=120).print(table)


ROWS_AT_ONCE = (4, 8, 16)
REPEATS = 3
UNAVOIDABLE = {
    "GRPO": ("generation", "forward", "training"),
    "PPO": ("generation", "forward", "training", "critic's training"),
}
Work = Callable[[int], object]
"""Function that does the work with so many rows at once."""
Loss = Callable[[Tensor], Tensor]


def limit_of(folder: Path, precision: str) -> dict[str, float]:
    """Seconds of each part on the models and prompts in this folder."""
    parts: list[dict[str, float]] = [apart(each, folder, precision) for each in (_generation, _passes)]
    return parts[0] | parts[1]


def unavoidable(algorithm: str, parts: Mapping[str, float]) -> float:
    """Seconds of the work that a step of this algorithm cannot do without."""
    return sum(parts[part] for part in UNAVOIDABLE[algorithm])


def _passes(folder: Path, precision: str) -> dict[str, float]:
    actor = AutoModelForCausalLM.from_pretrained(folder / "actor")
    scorer = AutoModelForSequenceClassification.from_pretrained(folder / "scorer")
    tokens = torch.randint(3, actor.config.vocab_size, (RESPONSES, PROMPT_TOKENS + RESPONSE_TOKENS))

    def policy_loss(rows: Tensor) -> Tensor:
        logits = actor(rows, use_cache=False, logits_to_keep=RESPONSE_TOKENS + 1).logits[:, :-1]
        return cross_entropy(logits.flatten(0, 1), rows[:, PROMPT_TOKENS:].flatten())

    def value_loss(rows: Tensor) -> Tensor:
        hidden = scorer.model(rows, use_cache=False).last_hidden_state[:, PROMPT_TOKENS:]
        loss: Tensor = scorer.score(hidden).square().mean()
        return loss

    torch.set_num_threads(cores())
    return {
        "forward": _best(partial(_forward, policy_loss, tokens, precision)),
        "training": _best(partial(_train, policy_loss, _optimizer(actor), tokens, precision)),
        "critic's training": _best(partial(_train, value_loss, _optimizer(scorer), tokens, precision)),
    }


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def _computing(precision: str) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "BF16")


@torch.no_grad()
def _forward(loss: Loss, tokens: Tensor, precision: str, at_once: int) -> None:
    with _computing(precision):
        for rows in torch.split(tokens, at_once):
            loss(rows)


def _train(loss: Loss, optimizer: torch.optim.Optimizer, tokens: Tensor, precision: str, at_once: int) -> None:
    for rows in torch.split(tokens, at_once):
        with _computing(precision):
            share = loss(rows)
        torch.autograd.backward(share)
    optimizer.step()
    optimizer.zero_grad()


def _best(work: Work) -> float:
    """Seconds of the work with as many rows at once as are fastest; there the median of some repeats."""
    work(max(ROWS_AT_ONCE))  # warms up
    seconds = {at_once: _seconds(work, at_once) for at_once in ROWS_AT_ONCE}
    at_once = min(seconds, key=lambda each: seconds[each])
    return median([seconds[at_once], *(_seconds(work, at_once) for _ in range(REPEATS - 1))])


def _seconds(work: Callable[..., object], *arguments: Any) -> float:
    began = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - began


def _generation(folder: Path, precision: str) -> dict[str, float]:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    torch.set_num_threads(cores())
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(folder / "actor"),
        dtype="bfloat16" if precision == "BF16" else "float32",
        max_model_len=PROMPT_TOKENS + RESPONSE_TOKENS,
        max_num_seqs=RESPONSES,
        kv_cache_memory_bytes=2**30,
        enable_prefix_caching=False,
    )
    sampling = SamplingParams(max_tokens=RESPONSE_TOKENS, ignore_eos=True, detokenize=False)
    encode = tokenizer().encode
    texts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    prompts: list[Any] = [{"prompt_token_ids": encode(text)} for text in texts[:RESPONSES]]

    def generate() -> None:
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        assert {len(each.outputs[0].token_ids) for each in outputs} == {RESPONSE_TOKENS}

    generate()
    return {"generation": median(_seconds(generate) for _ in range(REPEATS))}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--changes", nargs="*", choices=WITHOUT, default=list(WITHOUT))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of each job and round, after the first ones")
    parser.add_argument("--precision", choices=("FP32", "BF16"), default="FP32")
    parser.add_argument("--episodes", action="store_true", help="SFT on episodes of several turns instead")
    options = parser.parse_args(arguments)
    if options.episodes:
        sizes = list(dict.fromkeys(COLUMNS[name].size for name in options.columns))
        rounds, precision = options.rounds, options.precision
        found = measure_episodes(sizes, rounds=rounds, steps=options.steps, precision=precision)
        show_episodes(found, precision)
        if options.json:
            options.json.write_text(json.dumps({"host": host(), "episodes": found}, indent=2) + "\n")
        return
    columns = [COLUMNS[name] for name in options.columns]
    for results in measure(
        columns, options.changes, rounds=options.rounds, steps=options.steps, precision=options.precision
    ):
        show(results, options.precision)
        if options.json:
            options.json.write_text(json.dumps({"host": host(), "columns": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
