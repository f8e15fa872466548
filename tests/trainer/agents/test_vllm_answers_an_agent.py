"""Agents on a real vLLM: many conversations, whose answers are the model's after the ids of their own branches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from rlhf_trainer.environments.of_job import environments_of
from rlhf_trainer.run.worker_specs import setting_of
from rlhf_trainer.types import Batch
from rlhf_trainer.workers.agents import AgentResponder
from rlhf_trainer.workers.episodes import EndedEpisode
from rlhf_trainer.workers.samples import as_bytes
from tests.trainer.agents.stage import PROMPT, TEMPLATE, answers_on_branches, branch_of
from tests.trainer.generation.conftest import RunRanks, vllm_ranks
from tests.trainer.generation.engines import END, build, cut
from tests.trainer.generation.models import model_of, save_config
from tests.trainer.jobs import job

__all__ = ["vllm_ranks"]

VOCAB_SIZE = 512
"""Of the tokenizer, which encodes what the program says."""
RANKS = [
    (1, 6),
    *(pytest.param(ranks, count, marks=pytest.mark.slow) for ranks, count in ((2, 12), (1, 60), (1, 200))),
]
"""Numbers of ranks of an engine, and of episodes that it plays."""


def play(folder: str, ranks: int, count: int) -> tuple[list[EndedEpisode], int, float]:
    """(episodes of this rank, answers of the engine, largest difference of a log-probability from the model's)."""
    model = model_of(folder, 1)
    with torch.no_grad():
        model.lm_head.weight[END] *= 4
    engine = build(folder, [list(range(ranks))])
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    engine.load_weights(cut(weights, holds := engine.held_shards()), holds)
    engine.wake_cache()
    engine.version = 5
    wrote, prompts, begin, step = list[Any](), dict[int, Any](), engine.begin, engine.step

    def noted_begin(number: int, prompt: Any, *arguments: Any, **options: Any) -> None:
        prompts[number] = prompt
        begin(number, prompt, *arguments, **options)

    def noted_step() -> Any:
        found = step()
        wrote.extend((prompts[number], response) for number, response in found)
        return found

    engine.begin, engine.step = noted_begin, noted_step  # type: ignore[method-assign]
    asked = talking_job(Path(folder))
    setting = setting_of(asked, "actor", {"actor": folder})
    responder = AgentResponder(setting, setting.tokenizer(), engine, environments_of(asked))
    columns = as_bytes([{"number": number} for number in range(count)])
    fields = {"valid": torch.ones(len(columns)), "columns": columns}
    batch = Batch(step=1, start=0, size=len(columns), fields=fields)
    responder.respond(batch, [PROMPT] * len(columns), greedy=False, ended=lambda *_: None)
    responder.close()
    engine.close()
    episodes = responder._episodes
    answers = answers_on_branches(episodes, wrote)
    assert answers == len(wrote)
    return episodes, answers, max(difference(model, each) for each in episodes)


def difference(model: Any, played: EndedEpisode) -> float:
    """The largest between the log-probabilities of an episode and those that the model gives on each branch alone."""
    tokens, first = torch.tensor([*played.prompt, *played.response.tokens]), len(played.prompt)
    parents = [*range(-1, first - 1), *played.response.parents]
    found = 0.0
    for leaf in {*range(first, len(tokens))} - {*parents}:
        branch = branch_of(parents, leaf)
        with torch.no_grad():
            log_probs = model(tokens[branch][None]).logits[0].log_softmax(1)
        for place, each in list(enumerate(branch))[1:]:
            if each >= first and played.response.written[each - first]:
                own = float(log_probs[place - 1, tokens[each]])
                found = max(found, abs(own - played.response.log_probs[each - first]))
    return found


def talking_job(folder: Path) -> Any:
    spec = {
        "algorithm": {"name": "GRPO", "kl": {"coefficient": 0.0}},
        "models": {"actor": {"uri": f"file://{folder}", "optimizer": {"learningRate": 1.0}}},
        "data": {
            "train": {"uri": "package://rlhf_examples/helpful/train.jsonl"},
            "maxPromptTokens": 56,
            "maxResponseTokens": 200,
            "chatTemplate": f"file://{folder}/template.jinja",
        },
        "rollout": {
            "samplesPerPrompt": 2,
            "agent": {"entrypoint": "tests.trainer.agents.plain_agent:run"},
            "stepTimeoutSeconds": 300,
        },
        "training": {"totalSteps": 1, "promptBatchSize": 1},
    }
    return job(folder, "talk", spec)


@pytest.mark.parametrize(("ranks", "count"), RANKS)
def test_answers_are_the_models_on_their_branches(ranks: int, count: int, tmp_path: Path, vllm_ranks: RunRanks) -> None:
    """The first of two ranks has the programs, and tells the other what to write."""
    folder = tmp_path / "model"
    save_config(folder, "llama")
    config = AutoConfig.from_pretrained(folder)
    config.vocab_size = VOCAB_SIZE
    config.save_pretrained(folder)
    (folder / "template.jinja").write_text(TEMPLATE)
    found: list[tuple[list[EndedEpisode], int, float]] = vllm_ranks(ranks, play, str(folder), ranks, count)
    (episodes, answers, largest), *others = found
    assert all(other == found[0] for other in others)
    assert not [each.failure for each in episodes if each.failure]
    assert largest < 1e-4
    assert answers >= 2 * len(episodes) == 2 * count
    branches = [each.facts["branches"] for each in episodes]
    assert {1, 3} < set(branches)
    written = {version for each in episodes for version in each.response.versions}
    assert written == {0, 5}
