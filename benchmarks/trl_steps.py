"""Steps of TRL on what `work` made; `peers` runs it in TRL's own environment.

    python benchmarks/trl_steps.py GRPO|PPO FOLDER STEPS

Prints one JSON: the version, and for each step its seconds, tokens generated, optimizer steps and loss.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from datasets import Dataset
from rule import score
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PrinterCallback, TrainerCallback
from work import KL, LEARNING_RATE, PROMPT_TOKENS, RESPONSE_TOKENS, RESPONSES, SAMPLES, tokenizer

from rlhf_trainer.run.machine import cores

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
        scores = torch.tensor(score([""] * len(texts), texts, [False] * len(texts)))
        return SimpleNamespace(hidden_states=[scores[:, None, None].expand(*input_ids.shape, 1)])

    def score(self, hidden: Tensor) -> Tensor:
        return hidden


def grpo(folder: Path, steps: int, watch: Watch) -> Any:
    """GRPOTrainer, with generation by transformers."""

    def reward(completions: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        watch.tokens += sum(map(len, completion_ids))
        return score([""] * len(completions), list(completions), [False] * len(completions))

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


def main() -> None:
    algorithm, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(cores())
    watch = Watch()
    trainer = {"GRPO": grpo, "PPO": ppo}[algorithm](folder, steps, watch)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    losses = [each.get("loss", each.get("loss/policy_avg")) for each in trainer.state.log_history]
    found = [step | {"loss": loss} for step, loss in zip(watch.steps, losses, strict=False)]
    print(json.dumps({"version": trl.__version__, "steps": found}))


if __name__ == "__main__":
    main()
