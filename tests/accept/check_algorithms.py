"""What examples 02, 04, 09 and 11 must measure, run on the models of example 01."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
from check_demo import Figure
from transformers import AutoModelForSequenceClassification, AutoTokenizer

EXAMPLES = ("02-helpful-grpo", "04-helpful-remax", "09-safe-rlhf", "11-helpful-online-dpo")
JOBS = ("helpful-grpo", "helpful-remax", "safe-rlhf", "helpful-online-dpo")
COST_MODEL, SAFE, PPO = "safe-cost", "safe-rlhf", "safe-ppo"
COST_LIMIT = 0.0
LONGEST_RESPONSE = 48
MEASURES = ("reward", "rule")

FIGURES = (
    *(
        Figure(job=job, name=f"{measure}_after", above=f"{measure}_before")
        for job in (*JOBS, PPO)
        for measure in MEASURES
    ),
    *(Figure(job=job, name="win_rate", least=0.55) for job in (*JOBS, PPO)),
    Figure(job=COST_MODEL, name="pair_accuracy", least=0.9),
    Figure(job=SAFE, name="cost_before", least=COST_LIMIT),
    Figure(job=SAFE, name="cost_after", most=COST_LIMIT),
    Figure(job=PPO, name="cost_after", least=COST_LIMIT),
    Figure(job=PPO, name="danger_after", above="danger_before"),
)


def mean_cost(run: Path, job: str) -> float:
    """Mean score by the cost model of what a job's actor answers after training, from its samples.jsonl.

    The texts are tokenised anew, and one that leaves room gets the end token that the file does not show.
    """
    model = AutoModelForSequenceClassification.from_pretrained(run / COST_MODEL / "model")
    with torch.no_grad():
        return statistics.fmean(float(model(tokens).logits) for tokens in _tokens(run, job))


def _tokens(run: Path, job: str) -> Iterator[torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(run / COST_MODEL / "model")
    for line in (run / job / "samples.jsonl").read_text().splitlines():
        row = json.loads(line)
        prompt, response = tokenizer.encode(row["prompt"]), tokenizer.encode(row["response_after"])
        end = [tokenizer.eos_token_id] if len(response) < LONGEST_RESPONSE else []
        yield torch.tensor([[*prompt, *response, *end]])
