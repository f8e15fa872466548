"""New weights come while vLLM writes: each token has the log-probability that the weights of its version give it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tests.trainer.generation.conftest import RunRanks, vllm_ranks
from tests.trainer.generation.engines import build, cut
from tests.trainer.generation.models import model_of, prompts, save_config

pytestmark = pytest.mark.slow

__all__ = ["vllm_ranks"]

LONGEST, TOKENS_BEFORE = 24, 9
VERSIONS = 3
"""Others come twice."""


def write(
    folder: str, groups: list[list[int]], stages: tuple[int, ...], partial: Literal["Continue", "Restart"]
) -> list[list[dict[str, Any]]]:
    """Two batches of responses: one that meets other weights, and one that the last of them write by themselves."""
    models = [model_of(folder, seed) for seed in range(VERSIONS)]
    engine = build(folder, groups, stages, partial=partial)
    holds, calls = engine.held_shards(), 0

    def load(version: int) -> None:
        weights = {name: weight.detach() for name, weight in models[version].named_parameters()}
        engine.load_weights(cut(weights, holds), holds)
        engine.version = version

    def before_token() -> None:
        nonlocal calls
        calls += 1
        if calls % TOKENS_BEFORE == 0 and engine.version < VERSIONS - 1:
            load(engine.version + 1)
            assert engine.weights_replaced(engine.version - 1) > 0

    load(0)
    engine.wake_cache()
    engine.before_token = before_token
    found = []
    for _ in range(2):
        asked = prompts(0)
        responses = engine.generate(asked, list(range(len(asked))), max_tokens=LONGEST)
        found.append([vars(each) for each in responses])
        for prompt, response in zip(asked, found[-1], strict=True):
            tokens = torch.tensor([[*prompt, *response["tokens"]]])
            with torch.no_grad():
                spreads = [model(tokens).logits[0].log_softmax(1) for model in models]
            response["expected"] = [
                float(spreads[version][len(prompt) - 1 + place, token])
                for place, (token, version) in enumerate(zip(response["tokens"], response["versions"], strict=True))
            ]
    engine.close()
    return found


@pytest.mark.parametrize(
    ("partial", "groups", "stages"),
    [("Continue", [[0]], ()), ("Continue", [[0, 1]], ()), ("Continue", [[0], [1]], (2, 1)), ("Restart", [[0]], ())],
    ids=["goes on", "goes on, two shards", "goes on, two stages", "begins again"],
)
def test_each_token_is_of_the_weights_that_it_says(
    partial: Literal["Continue", "Restart"],
    groups: list[list[int]],
    stages: tuple[int, ...],
    tmp_path: Path,
    vllm_ranks: RunRanks,
) -> None:
    """With Continue a response is of all versions that came meanwhile, with Restart of one: the last."""
    folder = save_config(tmp_path / "model", "llama")
    one, *others = vllm_ranks(sum(map(len, groups)), write, folder, groups, stages, partial)
    assert all(other == one for other in others)
    meeting, alone = one
    for response in (*meeting, *alone):
        assert response["log_probs"] == pytest.approx(response["expected"], abs=1e-4)
    assert {version for each in alone for version in each["versions"]} == {VERSIONS - 1}
    long = [each for each in meeting if len(each["tokens"]) == LONGEST]
    if partial == "Continue":
        assert long
        assert all(each["versions"] == sorted(each["versions"]) for each in long)
        assert all(set(each["versions"]) == set(range(VERSIONS)) for each in long)
        if not stages:  # then each step of the engine is a token of every response
            before = TOKENS_BEFORE - 1
            tokens = [0] * before + [1] * TOKENS_BEFORE + [2] * (LONGEST - before - TOKENS_BEFORE)
            assert all(each["versions"] == tokens for each in long)
    else:
        whole = [number for number, each in enumerate(meeting) if set(each["versions"]) == {VERSIONS - 1}]
        assert whole
        assert all(meeting[number] == alone[number] for number in whole)
        assert all(len(set(each["versions"])) == 1 for each in meeting)
