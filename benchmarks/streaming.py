"""A step with and without `rollout.stream`: python benchmarks/streaming.py [--json PATH] [--output FOLDER].

PPO on two pools of one CPU slot each: an actor of 0.7M parameters, and critic, reference and reward model, of which the
last two have 6M. The actor's weights are made so that it counts from the prompt's number down to 0. So the data decide
how long responses are: log-normal with a median of 24 tokens, and a tenth has 8 times that. Everything else is real
(Ray, vLLM, FSDP2). Both jobs run one after the other; the medians of their steps are compared. The prediction is the
mapper's for the phases of the job that does not stream.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from work import SIZES, run

from rlhf_api.job import Job
from rlhf_mapper.simulate.overlap import left_to_score
from rlhf_mapper.workload import workload_of

MEDIAN, LONGEST, SPREAD, ROWS, STEPS, WARM_UP = 24, 192, 0.5, 64, 9, 2
SPECIAL = ("<pad>", "<s>", "</s>")
SCORERS = {**SIZES["0.7M"], "hidden_size": 256, "intermediate_size": 832, "num_hidden_layers": 8}


def lengths() -> list[int]:
    """Tokens of the responses of a step, in the order of chance."""
    long = ROWS // 10
    levels = [NormalDist().inv_cdf((place + 0.5) / (ROWS - long)) for place in range(ROWS - long)]
    found = [min(LONGEST, max(2, round(MEDIAN * math.exp(SPREAD * level)))) for level in levels] + [LONGEST] * long
    random.Random(0).shuffle(found)
    return found


def make_inputs(folder: Path) -> None:
    """Write the models and the data."""
    words = {word: number for number, word in enumerate([*SPECIAL, *map(str, range(LONGEST))])}
    plain = Tokenizer(WordLevel(words, unk_token=SPECIAL[0]))
    plain.pre_tokenizer = Whitespace()
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, **names)
    torch.manual_seed(0)
    for name, kind, shape in (
        ("actor", LlamaForCausalLM, SIZES["0.7M"]),
        ("critic", LlamaForSequenceClassification, SIZES["0.7M"]),
        ("reference", LlamaForCausalLM, SCORERS),
        ("reward", LlamaForSequenceClassification, SCORERS),
    ):
        ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        config = LlamaConfig(vocab_size=len(words), max_position_embeddings=256, num_labels=1, **ids, **shape)
        model = kind(config)
        if name == "actor":
            count_down(model)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rows = [json.dumps({"prompt": str(length - 2)}) for length in lengths()]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")


@torch.no_grad()
def count_down(model: PreTrainedModel) -> None:
    """After the token of a number comes that of the number before it, and after 0 the end."""
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    known = torch.nn.functional.normalize(torch.randn_like(model.model.embed_tokens.weight), dim=1)
    model.model.embed_tokens.weight.copy_(known)
    zero = len(SPECIAL)
    model.lm_head.weight.zero_()
    model.lm_head.weight[zero:-1] = known[zero + 1 :] * 4
    model.lm_head.weight[SPECIAL.index("</s>")] = known[zero] * 4


def manifest_of(folder: Path, *, stream: bool) -> dict[str, Any]:
    """The job."""
    models: dict[str, Any] = {role: {"uri": f"file://{folder / role}"} for role in ("reference", "reward")}
    models |= {
        role: {"uri": f"file://{folder / role}", "optimizer": {"learningRate": 1e-7}} for role in ("actor", "critic")
    }
    pools = {"write": ["actor"], "score": ["critic", "reference", "reward"]}
    spec = {
        "algorithm": {"name": "PPO", "kl": {"coefficient": 0.01}},
        "models": models,
        "data": {
            "train": {"uri": f"file://{folder / 'prompts.jsonl'}"},
            "maxPromptTokens": 4,
            "maxResponseTokens": LONGEST + 4,
        },
        "rollout": {"stream": stream},
        "training": {"totalSteps": STEPS, "promptBatchSize": ROWS},
        "placement": {
            "mode": "Manual",
            "pools": [{"name": name, "models": roles, "slotsPerNode": 1} for name, roles in pools.items()],
        },
    }
    kind = {"apiVersion": "rlhf.hybridflow.io/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "skewed"}}
    return {**kind, "spec": spec}


def measure(output: Path) -> dict[str, Any]:
    """Seconds of a step off and on, what was predicted, and whether the losses are the same."""
    make_inputs(output / "inputs")
    records: dict[bool, list[Mapping[str, float]]] = {}
    for stream in (False, True):
        folder = output / f"stream-{stream}"
        folder.mkdir()
        done = run([manifest_of(output / "inputs", stream=stream)], folder)
        lines = (done / "skewed" / "metrics.jsonl").read_text().splitlines()
        records[stream] = [json.loads(line) for line in lines]
    steps = {stream: median(each["time/step"] for each in found[WARM_UP:]) for stream, found in records.items()}
    off = {
        phase: median(each[f"time/{phase}"] for each in records[False][WARM_UP:]) for phase in ("generation", "scoring")
    }
    load = workload_of(Job.parse(manifest_of(output, stream=True)), responses=lengths())
    hidden = off["scoring"] - left_to_score(off["generation"], off["scoring"], load)
    apart = [
        max(abs(one[name] / other[name] - 1) for one, other in zip(*records.values(), strict=True))
        for name in ("loss/value", "grad_norm/value", "reward/mean", "kl/reference")
    ]
    return {
        "seconds off": steps[False],
        "seconds on": steps[True],
        "on / off": steps[True] / steps[False],
        "predicted on / off": 1 - hidden / steps[False],
        **{f"{phase} off": seconds for phase, seconds in off.items()},
        "response tokens": {"median": median(lengths()), "longest": max(lengths())},
        "largest relative difference of a loss": max(apart),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.output or Path(folder))
    text = json.dumps(found, indent=2) + "\n"
    print(text, end="")
    if options.json:
        options.json.write_text(text)


if __name__ == "__main__":
    main()
