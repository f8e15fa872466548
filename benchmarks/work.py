"""The work that the other benchmarks measure: models, prompts and manifests, and how a job is run.

A step has 64 responses of exactly 64 tokens to prompts of 32 tokens and makes one optimizer step: GRPO 4 to each of 16
prompts, PPO 1 to each of 64. The models are Llamas with random weights, grouped keys and an untied head; the KL to the
reference weighs 0.05, and the reward is a rule.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import yaml
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from transformers import PreTrainedTokenizerBase as Tokenizer

from rlhf_trainer.run.machine import cores

PROMPT_TOKENS, RESPONSE_TOKENS, RESPONSES, KL = 32, 64, 64, 0.05
EPISODES, TURNS, MESSAGE_TOKENS = 16, 6, 20
"""Episodes of a step of SFT, turns of each, and tokens of each question and each answer."""
SAMPLES = {"GRPO": 4, "PPO": 1}
"""Responses to a prompt."""
SIZES: dict[str, dict[str, int]] = {
    "0.7M": {
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "27M": {
        "hidden_size": 512,
        "intermediate_size": 1664,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}
PHASES = ("generation", "reshard", "scoring", "advantage", "update", "data", "transfer", "controller")
WARM_UP = {"0.7M": 4, "27M": 1}
"""First steps of a job, which are not counted: a second or more, in which new processes are slower."""
LEARNING_RATE = 1e-5
RULE = "rlhf_examples.helpful.safety:danger"
"""The reward: it differs also among responses of random weights, and its module imports little."""


class Column(NamedTuple):
    """An algorithm on models of one size."""

    algorithm: str
    size: str

    @property
    def warm_up(self) -> int:
        return WARM_UP[self.size]

    def __str__(self) -> str:
        return f"{self.algorithm}-{self.size}"


COLUMNS = {str(column): column for column in (Column(name, size) for size in SIZES for name in SAMPLES)}


def tokenizer() -> Tokenizer:
    """Return the tokenizer of the example, with 512 tokens."""
    return AutoTokenizer.from_pretrained(str(files("rlhf_examples") / "helpful" / "model"))


def make_models(folder: Path, shape: Mapping[str, int]) -> int:
    """Write an actor, and a scorer that is a critic or a reward model; returns the parameters of the actor."""
    words = tokenizer()
    config = LlamaConfig(
        **{"vocab_size": len(words), **shape},
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    actor = LlamaForCausalLM(config)
    actor.save_pretrained(folder / "actor")
    config.num_labels = 1
    LlamaForSequenceClassification(config).save_pretrained(folder / "scorer")
    for name in ("actor", "scorer"):
        words.save_pretrained(folder / name)
    return sum(parameter.numel() for parameter in actor.parameters())


def make_prompts(path: Path, count: int = RESPONSES) -> None:
    """Write prompts of exactly PROMPT_TOKENS tokens, of random words."""
    texts = _texts(PROMPT_TOKENS)
    path.write_text("".join(json.dumps({"prompt": next(texts)}) + "\n" for _ in range(count)))


def make_episodes(path: Path) -> None:
    """Write EPISODES episodes of TURNS turns: a row's prompt is all that was said before its answer, the response."""
    texts, rows = _texts(MESSAGE_TOKENS), []
    for _ in range(EPISODES):
        before = ""
        for _ in range(TURNS):
            prompt, answer = before + next(texts), next(texts)
            rows.append({"prompt": prompt, "chosen": answer})
            before = prompt + answer
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))


def _texts(tokens: int) -> Iterator[str]:
    """Yield texts of random words with exactly so many tokens."""
    words = ["How", "to", "clean", "my", "kettle", "a", "bicycle", "please", "help", "the", "I", "?", "want", "this"]
    encode, chooser = tokenizer().encode, random.Random(0)
    while True:
        text = ""
        while len(encode(text)) < tokens:
            text += " " + chooser.choice(words)
        if len(encode(text)) == tokens:
            yield text


def make_inputs(folder: Path, shape: Mapping[str, int]) -> int:
    """Write models and prompts; returns the parameters of the actor."""
    make_prompts(folder / "prompts.jsonl")
    return make_models(folder, shape)


def manifest(folder: Path, algorithm: str, *, steps: int, name: str = "step") -> dict[str, Any]:
    """A job on what `make_inputs` wrote; it says nothing of slots."""
    trained = {"optimizer": {"learningRate": LEARNING_RATE}}
    actor = {"uri": f"file://{folder}/actor"}
    models = {"actor": actor | trained, "reference": actor, "reward": {"entrypoint": RULE}}
    if algorithm == "PPO":
        models["critic"] = {"uri": f"file://{folder}/scorer", **trained}
    return {
        "apiVersion": "rlhf.hybridflow.io/v1alpha1",
        "kind": "RLHFJob",
        "metadata": {"name": name},
        "spec": {
            "algorithm": {"name": algorithm, "kl": {"coefficient": KL}},
            "models": models,
            "data": {
                "train": {"uri": f"file://{folder}/prompts.jsonl"},
                "maxPromptTokens": PROMPT_TOKENS,
                "maxResponseTokens": RESPONSE_TOKENS,
            },
            "rollout": {"samplesPerPrompt": SAMPLES[algorithm], "minResponseTokens": RESPONSE_TOKENS},
            "training": {"totalSteps": steps, "promptBatchSize": RESPONSES // SAMPLES[algorithm]},
        },
    }


def episodes_manifest(folder: Path, *, steps: int, name: str) -> dict[str, Any]:
    """Return the manifest of SFT on all turns of all episodes a step; `make_models` and `make_episodes` wrote them."""
    job = manifest(folder, "GRPO", steps=steps, name=name)
    data = {"train": {"uri": f"file://{folder}/episodes.jsonl"}, "maxPromptTokens": 224, "maxResponseTokens": 32}
    training = {"totalSteps": steps, "batchSize": EPISODES * TURNS}
    models = {"actor": job["spec"]["models"]["actor"]}
    return {**job, "spec": {"algorithm": {"name": "SFT"}, "models": models, "data": data, "training": training}}


def changed(job: Mapping[str, Any], change: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The manifest with some fields of parts of its spec set."""
    spec = job["spec"]
    return {**job, "spec": spec | {part: spec.get(part, {}) | fields for part, fields in change.items()}}


def run(jobs: Sequence[Mapping[str, Any]], folder: Path, *, environment: Mapping[str, str] | None = None) -> Path:
    """`rlhf run` of these jobs, one after the other; returns the folder of the run. CalledProcessError if it fails."""
    (folder / "jobs.yaml").write_text(yaml.safe_dump_all(jobs))
    command = [sys.executable, "-m", "rlhf_trainer", "run", str(folder / "jobs.yaml")]
    subprocess.run(
        [*command, "--output", str(folder / "run")],
        check=True,
        stdout=sys.stderr,
        env={**os.environ, **(environment or {})},
    )
    return folder / "run"


def records_of(job: Path, *, steps: int) -> list[dict[str, float]]:
    """The lines of the last steps in metrics.jsonl in the folder of a job.

    ValueError if the responses were not as long as they had to be, or an update was left out.
    """
    records = [json.loads(line) for line in (job / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        if record["response_length/mean"] != RESPONSE_TOKENS or record["skipped_updates"]:
            raise ValueError(f"step {record['step']} of {job.name} is not the work that is measured: {record}")
    return records[-steps:]


def medians(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Median seconds of a step, by phase, and `step`."""
    return {phase: median(record.get(f"time/{phase}", 0.0) for record in records) for phase in (*PHASES, "step")}


def spread(ratios: Sequence[float]) -> tuple[float, float, float]:
    """(median, lowest, highest)."""
    return median(ratios), min(ratios), max(ratios)


def ratio(figures: Sequence[float]) -> str:
    """A spread as people read it."""
    middle, lowest, highest = figures
    return f"{middle:.2f} ({lowest:.2f}-{highest:.2f})"


def apart(work: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process of its own, whose memory is free again afterwards."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def host() -> str:
    """Return a description of this machine's CPU."""
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    return f"{cores()} cores, {'with' if 'amx_bf16' in flags else 'without'} AMX"
