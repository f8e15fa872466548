"""Steps with real workers on episodes: only the model's own tokens have losses, log-probabilities and advantages.

In vLLM's place stands an engine that draws tokens. The optimizer is that of
test_an_actors_update_is_the_papers_formula: its first step subtracts g / (|g| + 1) with the clipped gradient g.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.errors import ConfigError
from rlhf_trainer.fields import FIELDS
from rlhf_trainer.run.step_models import connected, step_models_of
from rlhf_trainer.run.worker_specs import helper_specs, model_spec, setting_of
from rlhf_trainer.spmd import LocalModel
from rlhf_trainer.telemetry import merge, recorder
from rlhf_trainer.training.models import inner
from rlhf_trainer.types import Batch, transfers_of
from rlhf_trainer.workers import rollout, samples
from rlhf_trainer.workers.data import DataWorker
from tests.trainer.environments.scripted import END, ScriptedEngine
from tests.trainer.jobs import job
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.tiny import EXAMPLE_MODEL, save_tiny
from tests.trainer.training.test_an_actors_update_is_the_papers_formula import after_one_step, assert_same

HERE = "tests.trainer.environments.user_environments"
OBSERVED = " well done "
PROMPTS, SAMPLES = 2, 4


class Drawing(ScriptedEngine):
    """An answer is up to five tokens drawn from its seed, and the end."""

    @staticmethod
    def script(_: Sequence[int], seed: int) -> list[int]:
        drawn = random.Random(seed)
        return [*(drawn.randrange(3, 512) for _ in range(drawn.randrange(1, 6))), END]


def episodes_job(folder: Path, name: str, **changes: Any) -> Job:
    """A job whose actor makes one update with AdamW's step of g / (|g| + 1)."""
    first = {"optimizer": {"learningRate": 1.0, "epsilon": 1.0, "weightDecay": 0.0}}
    kl = {"kl": {"coefficient": 0.0}}
    critic = {"critic": {"uri": f"file://{folder / 'critic'}", **first}} if name == "PPO" else {}
    spec = {
        "algorithm": {"name": name, **kl, **({"whitenAdvantages": False} if name == "PPO" else {})},
        "models": {"actor": {"uri": f"file://{folder / 'actor'}", **first}, **critic},
        "data": {
            "train": {"uri": "package://rlhf_examples/helpful/train.jsonl", "limit": 40},
            "maxPromptTokens": 16,
            "maxResponseTokens": 24,
        },
        "rollout": {"samplesPerPrompt": SAMPLES, "environment": {"entrypoint": f"{HERE}:Judging"}},
        "training": {"totalSteps": 2, "promptBatchSize": PROMPTS},
        "resources": {"slotsPerNode": 1},
        **changes,
    }
    return job(folder, name.lower(), spec)


class Seeing:
    """The actor, which notes the batch that it learns from."""

    def __init__(self, actor: Any) -> None:
        self._actor, self.seen = actor, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name)

    def update_actor(self, batch: Any) -> Any:
        self.seen = batch
        return self._actor.update_actor(batch)


def step(asked: Job, folders: dict[Role, str]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]:
    """(the fields that one step's update has, the actor's weights after it, what was measured) on one rank."""
    setattr(rollout, "GenerationEngine", Drawing)  # noqa: B010
    alone = ParallelSizes(data=1)
    setting = setting_of(asked, asked.saved, folders)
    data = LocalModel(DataWorker(setting, slots=1), alone, transfers_of(DataWorker))
    specs = helper_specs(setting, path=Path(folders["actor"]))
    specs.pop("judge")
    for role in asked.models():
        specs[role] = model_spec(setting_of(asked, role, folders, total_steps=2), role, sequences=64)
    workers = {name: spec.build() for name, spec in specs.items()}
    models: dict[str, Any] = {name: LocalModel(each, alone, specs[name].transfers) for name, each in workers.items()}
    models["actor"] = seeing = Seeing(models["actor"])
    models = connected(asked, {**models, "data": data})
    recorder.drain()
    blank = Batch(step=1, start=0, size=asked.sequences_per_step)
    asked.spec.algorithm.step(models["data"].load_batch(blank), **step_models_of(asked, models))
    weights = {
        name: each.detach().clone() for name, each in inner(workers["actor"].trainer.model.module).named_parameters()
    }
    workers["actor"].close()
    assert seeing.seen is not None
    whole = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in weights.items()}
    return dict(seeing.seen.fields), whole, merge([recorder.drain()])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("episodes")
    save_tiny(made / "actor", seed=3)
    save_tiny(made / "critic", seed=4, labels=1)
    return made


@pytest.fixture(scope="module")
def learned(folder: Path) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]]:
    """By algorithm what `step` gave."""
    found = {}
    for name in ("GRPO", "PPO"):
        asked = episodes_job(folder, name)
        folders: dict[Role, str] = {role: str(folder / role) for role in asked.models()}
        (found[name],) = run_kept_ranks(1, step, asked, folders)
    return found


def test_tools_need_a_chat_template(folder: Path) -> None:
    actor = {"uri": f"file://{folder / 'actor'}", "optimizer": {"learningRate": 1.0}}
    models = {"actor": actor, "reward": {"entrypoint": "brief:score"}}
    rollout = {"samplesPerPrompt": SAMPLES, "tools": [f"{HERE}:add"]}
    asked = episodes_job(folder, "GRPO", models=models, rollout=rollout)
    setting = setting_of(asked, asked.saved, {"actor": str(folder / "actor")})
    with pytest.raises(ConfigError, match=r"spec\.rollout\.tools: with file://.* a result gave .* no chat template"):
        DataWorker(setting, slots=1)


def turns_of(fields: dict[str, Tensor], row: int) -> list[tuple[int, int]]:
    """(first token, last token) of each run of the row's own tokens."""
    own = (fields["response_mask"][row] > 0).tolist()
    starts = [at for at, here in enumerate(own) if here and not own[at - 1]]
    stops = [at for at, here in enumerate(own) if here and not [*own, False][at + 1]]
    return list(zip(starts, stops, strict=True))


@pytest.mark.parametrize("name", ["GRPO", "PPO"])
def test_a_row_is_prompt_answer_observation_answer(learned: Any, name: str) -> None:
    fields, _, measured = learned[name]
    tokenizer = AutoTokenizer.from_pretrained(str(EXAMPLE_MODEL))
    observed = tokenizer(OBSERVED, add_special_tokens=False)["input_ids"]
    for row in range(PROMPTS * SAMPLES):
        (first, end), (start, last) = turns_of(fields, row)
        assert int(fields["tokens"][row, end]) == int(fields["tokens"][row, last]) == END
        assert fields["tokens"][row, end + 1 : start].tolist() == observed
        assert int(fields["attention_mask"][row].sum()) == last + 1
        assert first == int(fields["prompt_mask"][row].sum())
    assert (measured["episodes/turns"], measured["episodes/failed"]) == (2.0, 0.0)


@pytest.mark.parametrize("name", ["GRPO", "PPO"])
def test_nothing_that_is_learned_from_is_on_other_tokens(learned: Any, name: str) -> None:
    fields, _, _ = learned[name]
    others = fields["response_mask"] == 0
    checked = {"rollout_log_probs", "old_log_probs", "advantages", "token_rewards", "turn_rewards"}
    for each in checked & fields.keys() & FIELDS.keys():
        assert not fields[each][others].any(), each
    assert fields["advantages"].any()


def test_a_turn_is_rewarded_on_its_last_token(learned: Any) -> None:
    fields, _, _ = learned["PPO"]
    for row in range(PROMPTS * SAMPLES):
        (_, one), (_, two) = turns_of(fields, row)
        rewards = fields["token_rewards"][row]
        assert rewards.nonzero()[:, 0].tolist() == [one, two]
        assert 1.0 <= rewards[one] < 2.0 <= rewards[two] < 3.0
        assert fields["scores"][row] == pytest.approx(float(rewards.sum()))


def test_the_gradient_is_that_of_the_models_own_tokens(learned: Any, folder: Path) -> None:
    """GRPO written out: A_i = (R_i - mean) / std of the group, on each own token, the mean of a row, then of rows."""
    fields, weights, _ = learned["GRPO"]
    groups = fields["scores"].view(PROMPTS, SAMPLES)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()
    assert advantages.abs().min() > 1e-3, "each row teaches something"

    def loss_of(model: nn.Module) -> Tensor:
        total = torch.zeros(())
        for row, advantage in enumerate(advantages.tolist()):
            length = int(fields["attention_mask"][row].sum())
            tokens = fields["tokens"][row, :length]
            log_probs = model(tokens[None]).logits[0].log_softmax(1)
            own = [at for first, last in turns_of(fields, row) for at in range(first, last + 1)]
            chosen = log_probs[torch.tensor(own) - 1, tokens[own]]
            total = total - advantage * (chosen - chosen.detach()).exp().mean()
        return total / (PROMPTS * SAMPLES)

    assert_same(weights, after_one_step(str(folder / "actor"), loss_of))


def test_values_go_on_over_what_the_environment_said(learned: Any) -> None:
    """GAE on a row without its observation gives the same advantages as on the row (gamma 1, lambda as the job's)."""
    from rlhf_trainer.ops.advantages import gae

    fields, _, _ = learned["PPO"]
    for row in range(PROMPTS * SAMPLES):
        own = fields["response_mask"][row] > 0
        rewards, values = (fields[name][row, own][None] for name in ("token_rewards", "values"))
        expected, _ = gae(rewards, values, torch.ones_like(rewards), gamma=1.0, lam=0.95)
        torch.testing.assert_close(fields["advantages"][row, own], expected[0], rtol=1e-5, atol=1e-6)


def test_an_episode_is_kept_as_a_conversation(learned: Any) -> None:
    fields, _, _ = learned["PPO"]
    tokenizer = AutoTokenizer.from_pretrained(str(EXAMPLE_MODEL))
    batch = Batch(step=1, start=0, size=PROMPTS * SAMPLES, fields=fields)
    for row in range(batch.size):
        (first, end), (start, last) = turns_of(fields, row)
        spans = [fields["tokens"][row, one : other + 1] for one, other in ((first, end), (start, last))]
        answers = [tokenizer.decode(each, skip_special_tokens=True) for each in spans]
        one, observed, two = samples.turns_of(batch, row, tokenizer)
        assert [one["text"], observed["text"], two["text"]] == [answers[0], OBSERVED, answers[1]]
        assert [each["written"] for each in (one, observed, two)] == [True, False, True]
        assert (observed["reward"], one["reward"] + two["reward"]) == (0.0, pytest.approx(float(fields["scores"][row])))
        sample = samples.sample_of(batch, row, tokenizer)
        assert sample.response == answers[1], "what is scored is the last answer"
        assert sample.prompt.endswith(answers[0] + OBSERVED)
