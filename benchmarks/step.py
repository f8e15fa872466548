"""Where the time of a PPO step goes, for two sizes of Llama on CPU: python benchmarks/step.py [--json PATH].

64 samples a step (16 prompts x 4), prompt 32 and response 64 tokens, all lengths forced; weights are random. Everything
is real (Ray, FSDP2, vLLM); the first step is left out of the means.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from transformers import PreTrainedTokenizerBase as Tokenizer

PROMPT_TOKENS, RESPONSE_TOKENS, PROMPTS, SAMPLES = 32, 64, 16, 4
SIZES: dict[str, dict[str, int]] = {
    "0.7 M": {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 4, "num_attention_heads": 4},
    "27 M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8},
}
PHASES = ("generation", "reshard", "scoring", "advantage", "update", "data", "transfer", "controller")


def make_models(folder: Path, size: dict[str, int], tokenizer: Tokenizer) -> int:
    """Write an actor and a reward model with random weights; returns the parameters of the actor."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        num_key_value_heads=size["num_attention_heads"],
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **size,
    )
    torch.manual_seed(0)
    actor = LlamaForCausalLM(config)
    actor.save_pretrained(folder / "actor")
    config.num_labels = 1
    LlamaForSequenceClassification(config).save_pretrained(folder / "reward")
    for name in ("actor", "reward"):
        tokenizer.save_pretrained(folder / name)
    return sum(parameter.numel() for parameter in actor.parameters())


def make_prompts(path: Path, tokenizer: Tokenizer, count: int) -> None:
    """Write prompts of exactly PROMPT_TOKENS tokens, of random words."""
    words = ["How", "to", "clean", "my", "kettle", "a", "bicycle", "please", "help", "the", "I", "?", "want", "this"]
    chooser = random.Random(0)
    rows: list[str] = []
    while len(rows) < count:
        text = ""
        while len(tokenizer.encode(text)) < PROMPT_TOKENS:
            text += " " + chooser.choice(words)
        if len(tokenizer.encode(text)) == PROMPT_TOKENS:
            rows.append(json.dumps({"prompt": text}))
    path.write_text("\n".join(rows) + "\n")


def manifest(folder: Path, *, steps: int, slots: int, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A PPO job on the made models."""
    actor, reward = f"file://{folder}/actor", f"file://{folder}/reward"
    return {
        "apiVersion": "rlhf.hybridflow.io/v1alpha1",
        "kind": "RLHFJob",
        "metadata": {"name": "step"},
        "spec": {
            "algorithm": {"name": "PPO"},
            "models": {
                "actor": {"uri": actor},
                "critic": {"uri": reward},
                "reference": {"uri": actor},
                "reward": {"uri": reward},
            },
            "data": {
                "train": {"uri": f"file://{folder}/prompts.jsonl"},
                "maxPromptTokens": PROMPT_TOKENS,
                "maxResponseTokens": RESPONSE_TOKENS,
            },
            "rollout": {"samplesPerPrompt": SAMPLES, "minResponseTokens": RESPONSE_TOKENS},
            "training": {"totalSteps": steps, "promptBatchSize": PROMPTS, "miniBatchSize": 32},
            "resources": {"slotsPerNode": slots},
            "checkpoint": checkpoint,
        },
    }


def records_of(
    size: dict[str, int], *, steps: int, slots: int, checkpoint: dict[str, Any]
) -> tuple[int, list[dict[str, float]]]:
    """Run the job: the parameters of the actor, and the lines of metrics.jsonl."""
    tokenizer = AutoTokenizer.from_pretrained(str(files("rlhf_examples") / "helpful" / "model"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        parameters = make_models(folder, size, tokenizer)
        make_prompts(folder / "prompts.jsonl", tokenizer, 64)
        job = manifest(folder, steps=steps, slots=slots, checkpoint=checkpoint)
        (folder / "job.yaml").write_text(yaml.safe_dump(job))
        command = [sys.executable, "-m", "rlhf_trainer.cli", "run", str(folder / "job.yaml"), "--output"]
        subprocess.run([*command, str(folder / "run")], check=True, stdout=sys.stderr)
        lines = (folder / "run" / "step" / "metrics.jsonl").read_text().splitlines()
    return parameters, [json.loads(line) for line in lines]


def measure(size: dict[str, int], *, steps: int, slots: int) -> dict[str, float]:
    """Mean seconds of each phase of a step, and the parameters of the actor."""
    parameters, records = records_of(size, steps=steps, slots=slots, checkpoint={})
    means = {name: sum(record[name] for record in records[1:]) / len(records[1:]) for name in records[0]}
    return {"parameters": parameters, **means}


def show(results: dict[str, dict[str, float]]) -> None:
    """The table of seconds and shares."""
    table = Table(title=f"{PROMPTS} prompts x {SAMPLES}, prompt {PROMPT_TOKENS}, response {RESPONSE_TOKENS} tokens")
    table.add_column("phase")
    for name, result in results.items():
        table.add_column(f"{name} ({result['parameters'] / 1e6:.1f} M parameters)", justify="right")
    for phase in (*PHASES, "step"):
        cells = [
            f"{result.get(f'time/{phase}', 0.0):.3f} s {result.get(f'time/{phase}', 0.0) / result['time/step']:6.1%}"
            for result in results.values()
        ]
        table.add_row(phase, *cells)
    table.add_row("tokens/s", *(f"{result['tokens_per_second']:,.0f}" for result in results.values()))
    Console(width=100).print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--slots", type=int, default=2)
    options = parser.parse_args(arguments)
    results = {name: measure(size, steps=options.steps, slots=options.slots) for name, size in SIZES.items()}
    show(results)
    for name, result in results.items():
        share = (result["time/controller"] + result["time/transfer"]) / result["time/step"]
        print(f"{name}: controller and data movement take {share:.1%} of a step")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
