"""TRL beside ours, on the same models, prompts and forced lengths: `make bench-peers`.

    python benchmarks/peers.py [--json PATH] [--columns COLUMN ...] [--rounds N] [--steps N]

The work is that of `work`: a rule as reward, the same KL weight, one optimizer step a step. TRL generates by
transformers with all cores. Rounds of ours and of TRL alternate; a ratio is that of the medians of a round. TRL runs
in an environment of its own, by `peers.py --trl ALGORITHM FOLDER STEPS`. That prints one JSON: the version, and for
each step its seconds, tokens generated, optimizer steps and loss.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PrinterCallback, TrainerCallback
from work import (
    COLUMNS,
    KL,
    LEARNING_RATE,
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    RESPONSES,
    SAMPLES,
    SIZES,
    Column,
    host,
    make_inputs,
    manifest,
    ratio,
    records_of,
    run,
    spread,
    tokenizer,
)

from rlhf_examples.helpful.safety import danger
from rlhf_trainer.run.machine import cores

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / ".venv-peers"
WITH_PPO = PEERS / "ppo"
"""The last TRL that had PPO."""
ROWS_AT_ONCE = 16
"""Rows of a forward and backward pass; several passes make one optimizer step."""
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": ROWS_AT_ONCE,
    "gradient_accumulation_steps": RESPONSES // ROWS_AT_ONCE,
    "learning_rate": LEARNING_RATE,
    "lr_scheduler_type": "constant",
    "temperature": 1.0,
    "optim": "adamw_torch_fused",
    "gradient_checkpointing": False,
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
}


def measure(column: Column, *, rounds: int, steps: int) -> dict[str, Any]:
    """Seconds a step of both, in each round, and what TRL did in its steps."""
    found: dict[str, Any] = {"ours": [], "TRL": [], "loss": []}
    with tempfile.TemporaryDirectory() as inputs:
        make_inputs(Path(inputs), SIZES[column.size])
        for _ in range(rounds):
            found["ours"].append(our_seconds(Path(inputs), column, steps))
            of_trl = steps_of_trl(Path(inputs), column, steps)
            found["version"] = of_trl["version"]
            found["TRL"].append(median(step["seconds"] for step in of_trl["steps"]))
            found["loss"] += [step["loss"] for step in of_trl["steps"]]
    found["ratio"] = spread([ours / theirs for ours, theirs in zip(found["ours"], found["TRL"], strict=True)])
    return found


def our_seconds(inputs: Path, column: Column, steps: int) -> float:
    """Median seconds of a step of `rlhf run`."""
    with tempfile.TemporaryDirectory() as folder:
        done = run([manifest(inputs, column.algorithm, steps=column.warm_up + steps)], Path(folder))
        return median(record["time/step"] for record in records_of(done / "step", steps=steps))


def steps_of_trl(inputs: Path, column: Column, steps: int) -> dict[str, Any]:
    """Return what `run_trl` prints, without the first steps; SystemExit if TRL did other work than ours."""
    command = [PEERS / "bin" / "python", "-W", "ignore", __file__, "--trl", column.algorithm, inputs]
    done = subprocess.run(
        [*map(str, command), str(column.warm_up + steps)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(WITH_PPO) if column.algorithm == "PPO" else ""},
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for step in found["steps"]:
        if step["tokens"] != RESPONSES * RESPONSE_TOKENS or step["updates"] != 1:
            raise SystemExit(f"a step of TRL is not the work that is measured: {step}")
    return found | {"steps": found["steps"][column.warm_up :]}


def show(results: Mapping[str, Mapping[str, Any]]) -> None:
    """The table: a column each."""
    table = Table(title=f"seconds a step, medians of each round's median; {host()}")
    table.add_column("")
    for name in results:
        table.add_column(name, justify="right")
    for who in ("ours", "TRL"):
        table.add_row(who, *(f"{median(result[who]):.3f}" for result in results.values()))
    table.add_row("ours / TRL", *(ratio(result["ratio"]) for result in results.values()))
    table.add_row("TRL", *(result["version"] for result in results.values()))
    table.add_row("its tokens a step", *(f"{RESPONSES * RESPONSE_TOKENS:,}" for _ in results))
    table.add_row("its optimizer steps a step", *("1" for _ in results))
    table.add_row("its losses", *(f"{min(r['loss']):.3g} to {max(r['loss']):.3g}" for r in results.values()))
    Console(width=110).print(table)


class Watch(TrainerCallback):  # type: ignore[misc]
    """Recorder of the time and the work of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.tokens = self.updates = 0
        self._began = 0.0
        register_optimizer_step_post_hook(self._updated)

    def _updated(self, *_: Any) -> None:
        self.updates += 1

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        self.steps.append({"seconds": now - self._began, "tokens": self.tokens, "updates": self.updates})
        self._began, self.tokens, self.updates = now, 0, 0


class Rule(nn.Module):
    """The rule in the shape in which PPOTrainer asks for a reward model."""

    base_model_prefix = "rule"

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch, self._decode = watch, tokenizer().batch_decode

    def rule(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        """The score of each text, at every token."""
        responses = input_ids[:, PROMPT_TOKENS:]
        self._watch.tokens += responses.numel()
        texts = self._decode(responses)
        scores = torch.tensor(danger([""] * len(texts), texts, [False] * len(texts)))
        return SimpleNamespace(hidden_states=[scores[:, None, None].expand(*input_ids.shape, 1)])

    def score(self, hidden: Tensor) -> Tensor:
        return hidden


def grpo(folder: Path, steps: int, watch: Watch) -> Any:
    """GRPOTrainer, with generation by transformers."""
    import trl

    def reward(completions: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        watch.tokens += sum(map(len, completion_ids))
        return danger([""] * len(completions), list(completions), [False] * len(completions))

    texts = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    return trl.GRPOTrainer(
        model=str(folder / "actor"),
        reward_funcs=reward,
        processing_class=tokenizer(),
        train_dataset=Dataset.from_list(texts),
        callbacks=[watch],
        args=trl.GRPOConfig(
            **COMMON,
            output_dir=str(folder / "trl"),
            max_steps=steps,
            num_generations=SAMPLES["GRPO"],
            max_completion_length=RESPONSE_TOKENS,
            generation_kwargs={"min_new_tokens": RESPONSE_TOKENS},
            beta=KL,
        ),
    )


def ppo(folder: Path, steps: int, watch: Watch) -> Any:
    """PPOTrainer, which asks for a reward model and gets the rule as one."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    words = tokenizer()
    texts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    return PPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "actor"),
        ref_model=AutoModelForCausalLM.from_pretrained(folder / "actor"),
        reward_model=Rule(watch),
        value_model=AutoModelForSequenceClassification.from_pretrained(folder / "scorer"),
        processing_class=words,
        # at the end of its data accelerate steps after each pass, whatever the accumulation: the data must not end
        train_dataset=Dataset.from_dict({"input_ids": [words.encode(text) for text in texts] * (steps + 1)}),
        eval_dataset=Dataset.from_dict({"input_ids": [words.encode(texts[0])]}),
        callbacks=[watch],
        args=PPOConfig(
            **COMMON,
            output_dir=str(folder / "trl"),
            total_episodes=steps * RESPONSES,
            num_ppo_epochs=1,
            num_mini_batches=1,
            num_sample_generations=0,
            local_rollout_forward_batch_size=ROWS_AT_ONCE,
            response_length=RESPONSE_TOKENS,
            kl_coef=KL,
        ),
    )


def run_trl(algorithm: str, folder: Path, steps: int) -> None:
    """Train by TRL, and print its steps as JSON."""
    import trl

    torch.set_num_threads(cores())
    watch = Watch()
    trainer = {"GRPO": grpo, "PPO": ppo}[algorithm](folder, steps, watch)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    losses = [each.get("loss", each.get("loss/policy_avg")) for each in trainer.state.log_history]
    found = [step | {"loss": loss} for step, loss in zip(watch.steps, losses, strict=False)]
    print(json.dumps({"version": trl.__version__, "steps": found}))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of each round, after the first ones")
    parser.add_argument("--trl", nargs=3, metavar=("ALGORITHM", "FOLDER", "STEPS"), help="TRL's steps alone, as JSON")
    options = parser.parse_args(arguments)
    if options.trl:
        algorithm, folder, count = options.trl
        run_trl(algorithm, Path(folder), int(count))
        return
    results = {name: measure(COLUMNS[name], rounds=options.rounds, steps=options.steps) for name in options.columns}
    show(results)
    if options.json:
        options.json.write_text(json.dumps({"host": host(), "columns": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
