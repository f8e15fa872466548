"""Steps with and without a feature: python benchmarks/features.py FEATURE.

`checkpoint`: the PPO job of `work` with a checkpoint every third step, for two sizes of Llama. In step 3n the ranks
copy their state, in step 3n + 1 it is written in the background, in step 3n + 2 nothing of it goes on.

`overlap`: updates of actor and critic on two pools of one CPU slot each, alone and at the same time. One PPO step runs
up to its advantages; then come, in turn, the actor's update, the critic's, and both. Each pool needs a free core.

`streaming`: PPO with and without `rollout.stream`, on two pools of one CPU slot each: an actor of 0.7M parameters, and
critic, reference and reward model, of which the last two have 6M. The actor's weights are made so that it counts from
the prompt's number down to 0. So the data decide how long responses are: log-normal with a median of 24 tokens, and a
tenth has 8 times that. Both jobs run one after the other. The prediction is the mapper's for the phases of the job that
does not stream.

`lengths`: an update on responses of very different lengths, for two sizes of Llama, of which one has Qwen2.5's
vocabulary. Each part is undone in turn: rows are padded to the longest, ranks keep the rows that they are given, or all
logits are there at once. Two ranks of one thread each train by the worker of SFT, whose micro-batches, packing, load
balancing and head are those of every algorithm. Nothing is generated: 64 made-up responses to prompts of 32 tokens have
the lengths of a log-normal distribution with a median of 32 tokens, of which a tenth is cut at 8 times that.

All else is real (Ray, vLLM, FSDP2); the figures are medians of one run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import NormalDist, median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
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
from work import (
    PROMPT_TOKENS,
    RESPONSES,
    SIZES,
    changed,
    host,
    make_inputs,
    make_models,
    manifest,
    ratio,
    records_of,
    run,
    spread,
)

from rlhf_api.job import Job
from rlhf_mapper.place import place
from rlhf_mapper.search.objective import Objective
from rlhf_mapper.simulate.overlap import groups_of
from rlhf_mapper.workload import workload_of
from rlhf_trainer.run.on_ray import RayRuntime
from rlhf_trainer.run.session import ray_session
from rlhf_trainer.run.slots import Slots
from rlhf_trainer.run_folder.folder import model_folders
from rlhf_trainer.training import batching, distributed, head
from rlhf_trainer.types import Batch
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.supervised import SupervisedActorWorker

KIND = {"apiVersion": "rlhf.hybridflow.io/v1alpha1", "kind": "RLHFJob"}
CHECKPOINT_STEPS, WARM_UP = 3, 2
POOLS = [
    {"name": "left", "models": ["actor", "reference"], "slotsPerNode": 1},
    {"name": "right", "models": ["critic"], "slotsPerNode": 1},
]
MEDIAN, LONGEST, SIGMA, STEPS = 24, 192, 0.5, 9
"""Tokens of the streamed responses, their spread, and steps of these jobs."""
SPECIAL = ("<pad>", "<s>", "</s>")
SCORERS = {**SIZES["0.7M"], "hidden_size": 256, "intermediate_size": 832, "num_hidden_layers": 8}


def measure_checkpoints(output: Path) -> dict[str, dict[str, float]]:  # noqa: ARG001
    """Table of the copy's seconds and of what the copy and the write add to a step, by size of the actor."""
    results = {size: steps_with_checkpoints(size) for size in SIZES}
    table = Table(title=f"medians of PPO steps with a checkpoint every {CHECKPOINT_STEPS}")
    for column in ("actor", "step alone", "copy", "step with copy", "step while writing"):
        table.add_column(column, justify="right")
    for name, result in results.items():
        alone = result["step_alone"]
        shares = [
            f"{result[key]:.2f} s ({result[key] / alone - 1:+.1%})" for key in ("step_with_copy", "step_while_writing")
        ]
        copy = f"{result['copy']:.3f} s ({result['copy'] / alone:.1%})"
        table.add_row(f"{name} ({result['parameters'] / 1e6:.1f} M)", f"{alone:.2f} s", copy, *shares)
    Console(width=110).print(table)
    return results


def steps_with_checkpoints(size: str, *, steps: int = 15) -> dict[str, float]:
    """Median seconds of the copy and of each kind of step; the first three steps, which warm up, are left out."""
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_inputs(Path(folder), SIZES[size])
        job = changed(manifest(Path(folder), "PPO", steps=steps), {"checkpoint": {"everySteps": CHECKPOINT_STEPS}})
        records = records_of(run([job], Path(folder)) / "step", steps=steps - CHECKPOINT_STEPS)
    kinds: dict[int, list[dict[str, float]]] = {0: [], 1: [], 2: []}
    for record in records:
        kinds[int(record["step"]) % CHECKPOINT_STEPS].append(record)
    return {
        "parameters": parameters,
        "copy": median(record["time/checkpoint"] for record in kinds[0]),
        "step_with_copy": median(record["time/step"] for record in kinds[0]),
        "step_while_writing": median(record["time/step"] for record in kinds[1]),
        "step_alone": median(record["time/step"] for record in kinds[2]),
    }


def measure_overlap(output: Path) -> dict[str, float]:
    """Table of the seconds of each update alone, and of both."""
    with ray_session(None, cpu_slots=len(POOLS)):
        make_inputs(output, SIZES["0.7M"])
        document = manifest(output, "PPO", steps=1000)
        job = Job.parse(changed(document, {"placement": {"mode": "Manual", "pools": POOLS}}))
        folders = model_folders(job, output)
        runtime = RayRuntime(job, place(job, (0,)), folders, slots=Slots(), path=output)
        with runtime.running():
            seconds = seconds_of_updates(runtime, job)
    longer, total = max(seconds["actor"], seconds["critic"]), seconds["actor"] + seconds["critic"]
    results = {**seconds, "of_max": seconds["both"] / longer, "of_sum": seconds["both"] / total}
    table = Table(title="updates on two pools of one slot, medians")
    for column in ("actor alone", "critic alone", "both", "both / max", "both / sum"):
        table.add_column(column, justify="right")
    cells = [f"{seconds[name]:.3f} s" for name in ("actor", "critic", "both")]
    table.add_row(*cells, f"{results['of_max']:.2f}", f"{results['of_sum']:.2f}")
    Console(width=100).print(table)
    return results


def seconds_of_updates(runtime: RayRuntime, job: Job, repeats: int = 9) -> dict[str, float]:
    """Median seconds of each update of running models."""
    models: dict[str, Any] = runtime.models
    batch = models["data"].load_batch(runtime.blank(1, job.sequences_per_step))
    batch = models["actor"].compute_log_prob(models["actor"].generate_sequences(batch))
    batch = models["reference"].compute_log_prob(models["critic"].compute_values(batch))
    batch = models["advantage"].compute_rewards(models["reward"].compute_reward(batch))
    batch = models["advantage"].compute_advantage(batch)
    updates: dict[str, list[Callable[[Any], Any]]] = {
        "actor": [models["actor"].update_actor],
        "critic": [models["critic"].update_critic],
        "both": [models["critic"].update_critic, models["actor"].update_actor],
    }
    runtime.drain()
    found: dict[str, list[float]] = {name: [] for name in updates}
    for _ in range(WARM_UP + repeats):
        for name, calls in updates.items():
            began = time.perf_counter()
            for call in calls:
                call(batch)
            runtime.drain()
            found[name].append(time.perf_counter() - began)
    return {name: median(seconds[WARM_UP:]) for name, seconds in found.items()}


def lengths(middle: int, longest: int, sigma: float, *, tail: int = 0) -> list[int]:
    """Tokens of the responses of a step, log-normal, in the order of chance; `tail` of them are the longest."""
    levels = [NormalDist().inv_cdf((place + 0.5) / (RESPONSES - tail)) for place in range(RESPONSES - tail)]
    found = [min(longest, max(1, round(middle * math.exp(sigma * level)))) for level in levels] + [longest] * tail
    random.Random(0).shuffle(found)
    return found


STREAMED = lengths(MEDIAN, LONGEST, SIGMA, tail=RESPONSES // 10)


def make_counters(folder: Path) -> None:
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
    rows = [json.dumps({"prompt": str(length - 2)}) for length in STREAMED]
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
        "training": {"totalSteps": STEPS, "promptBatchSize": RESPONSES},
        "placement": {
            "mode": "Manual",
            "pools": [{"name": name, "models": roles, "slotsPerNode": 1} for name, roles in pools.items()],
        },
    }
    return {**KIND, "metadata": {"name": "skewed"}, "spec": spec}


def measure_streaming(output: Path) -> dict[str, Any]:
    """Seconds of a step off and on, what was predicted, and whether the losses are the same."""
    make_counters(output / "inputs")
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
    load = workload_of(Job.parse(manifest_of(output, stream=True)), responses=STREAMED)
    stages = np.array([off["generation"], 0.0, off["scoring"], 0.0])
    hidden = off["scoring"] - float(Objective(streams=groups_of(load)).three(stages)[1])
    apart = [
        max(abs(one[name] / other[name] - 1) for one, other in zip(*records.values(), strict=True))
        for name in ("loss/value", "grad_norm/value", "reward/mean", "kl/reference")
    ]
    found = {
        "seconds off": steps[False],
        "seconds on": steps[True],
        "on / off": steps[True] / steps[False],
        "predicted on / off": 1 - hidden / steps[False],
        **{f"{phase} off": seconds for phase, seconds in off.items()},
        "response tokens": {"median": median(STREAMED), "longest": max(STREAMED)},
        "largest relative difference of a loss": max(apart),
    }
    print(json.dumps(found, indent=2))
    return found


RANKS, ROUNDS = 2, 3
UNEVEN = lengths(32, 256, math.log(256 / 32) / NormalDist().inv_cdf(0.9))
BODIES = {"27M, 512 tokens": SIZES["27M"], "0.7M, 151,936 tokens": SIZES["0.7M"] | {"vocab_size": 151_936}}
"""Qwen2.5's vocabulary on the smaller body."""
DEFAULT = "as it is"
WITHOUT: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    DEFAULT: nullcontext,
    "padded": nullcontext,
    "not balanced": lambda: patch.object(
        batching, "assign_bundles", lambda costs: [[at] * len(own) for at, own in enumerate(costs)]
    ),
    "logits at once": lambda: patch.object(head, "CPU_CHUNK_LOGITS", 2**60),
}


def measure_lengths(output: Path) -> dict[str, Any]:
    """Table of the seconds of an update, and the ratios to it of what is undone, by size of the actor."""
    results: dict[str, dict[str, Any]] = {}
    for number, (name, shape) in enumerate(BODIES.items()):
        folder = output / str(number)
        make_models(folder, shape)
        with socket.create_server(("127.0.0.1", 0)) as reserved:
            port = reserved.getsockname()[1]
        with ProcessPoolExecutor(RANKS, mp_context=get_context("spawn")) as pool:
            found, *_ = pool.map(partial(updates_on_rank, port=port, folder=folder / "actor"), range(RANKS))
        own = found.pop(DEFAULT)
        ratios = {each: spread([a / b for a, b in zip(taken, own, strict=True)]) for each, taken in found.items()}
        results[name] = {"seconds": median(own), "ratios": ratios}
    table = Table("", *results, title=f"an update on answers of 1 to {max(UNEVEN)} tokens; {RANKS} ranks, {host()}")
    table.add_row(f"{DEFAULT}, seconds", *(f"{result['seconds']:.2f}" for result in results.values()))
    for name in [name for name in WITHOUT if name != DEFAULT]:
        table.add_row(f"{name} / {DEFAULT}", *(ratio(result["ratios"][name]) for result in results.values()))
    Console(width=100).print(table)
    return results


def updates_on_rank(rank: int, port: int, folder: Path) -> dict[str, list[float]]:
    """Seconds of an update in each round, by what is undone."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    distributed.start("CPU", 600)
    spec = {
        "algorithm": {"name": "SFT"},
        "models": {"actor": {"uri": f"file://{folder}"}},
        "data": {"train": {"uri": "file:///none"}},
        "training": {"totalSteps": 1, "batchSize": RESPONSES},
    }
    job = Job.parse({**KIND, "metadata": {"name": "lengths"}, "spec": spec})
    model = job.models()["actor"]
    worker = SupervisedActorWorker(WorkerSetting(job=job, role="actor", model=model, folder=str(folder), total_steps=1))
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    found: dict[str, list[float]] = {name: [] for name in WITHOUT}
    for _ in range(1 + ROUNDS):
        for name, without in WITHOUT.items():
            batch = batch_of(rank, vocabulary, padded=name == "padded")
            with without():
                dist.barrier()
                began = time.perf_counter()
                worker.update_actor(batch)
                dist.barrier()
                found[name].append(time.perf_counter() - began)
    return {name: seconds[1:] for name, seconds in found.items()}


def batch_of(rank: int, vocabulary: int, *, padded: bool) -> Batch:
    """The rows of a rank; padded: what pads a row to the longest is computed like text, and not read."""
    own = torch.tensor(UNEVEN).view(RANKS, -1)[rank]
    places = torch.arange(PROMPT_TOKENS + max(UNEVEN))
    inside = places < (PROMPT_TOKENS + own)[:, None]
    tokens = torch.randint(3, vocabulary, inside.shape, generator=torch.Generator().manual_seed(rank)) * inside
    fields = {
        "tokens": tokens,
        "attention_mask": torch.ones_like(tokens) if padded else inside.long(),
        "response_mask": (inside & (places >= PROMPT_TOKENS)).float(),
    }
    return Batch(step=1, start=rank * len(own), size=len(own), fields=fields)


FEATURES = {
    "checkpoint": measure_checkpoints,
    "overlap": measure_overlap,
    "streaming": measure_streaming,
    "lengths": measure_lengths,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("feature", choices=FEATURES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = FEATURES[options.feature](Path(folder))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
