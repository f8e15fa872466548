"""What the machine takes for the work of a step and nothing else: python benchmarks/limit.py [--json PATH] [SIZE ...].

Generation by vLLM alone; a forward pass, and a pass forward and backward with an AdamW step, in bare transformers with
so many rows at once as are fastest. Each has all cores. A step cannot do without generation, the reference's forward
pass and the actor's training pass, but for what shared prompts save of them; PPO adds the critic's.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
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
    LEARNING_RATE,
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    RESPONSES,
    SIZES,
    apart,
    host,
    make_inputs,
    tokenizer,
)

from rlhf_trainer.run.machine import cores

ROWS_AT_ONCE = (4, 8, 16)
REPEATS = 3
UNAVOIDABLE = {
    "GRPO": ("generation", "forward", "training"),
    "PPO": ("generation", "forward", "training", "critic's training"),
}
Work = Callable[[int], object]
"""What is done with so many rows at once."""
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", metavar="SIZE", help=f"{' or '.join(SIZES)}; default: both")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--precision", choices=("FP32", "BF16"), default="FP32")
    options = parser.parse_args(arguments)
    if unknown := set(options.sizes) - set(SIZES):
        parser.error(f"{min(unknown)} is neither {' nor '.join(SIZES)}")
    results = {}
    for size in options.sizes or SIZES:
        with tempfile.TemporaryDirectory() as folder:
            make_inputs(Path(folder), SIZES[size])
            parts = limit_of(Path(folder), options.precision)
        results[size] = parts | {name: unavoidable(name, parts) for name in UNAVOIDABLE}
    table = Table("seconds", *results, title=f"{options.precision}, {host()}")
    for row in next(iter(results.values())):
        table.add_row(row, *(f"{result[row]:.3f}" for result in results.values()))
    Console(width=100).print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
