"""vLLM against transformers on the same float32 weights, after updates in place, with prompts long enough to be cached.

Greedy tokens must be equal, except from a position on where the two best logits are closer than 1e-4: such rows are
printed and may be 2 % at most. Log-probabilities of sampled tokens must agree within 1e-4.
"""

import sys
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_trainer.generation.vllm_engine import Response, response_seed
from rlhf_trainer.training.loading import load_language_model
from rlhf_trainer.training.sharding import shard
from tests.trainer.generation.conftest import RunRanks
from tests.trainer.generation.engines import build
from tests.trainer.tiny import save_tiny
from tests.trainer.weights import full_weights

NEW_TOKENS, END = 24, 2
TOO_CLOSE = 1e-4


def prompts() -> list[list[int]]:
    """48 short prompts, and 16 that share a long beginning, which vLLM's prefix cache keeps."""
    generator = torch.Generator().manual_seed(0)
    long = torch.randint(3, 512, (180,), generator=generator).tolist()
    ends = torch.randint(3, 512, (64, 5), generator=generator).tolist()
    return ends[:48] + [long + end for end in ends[48:]]


def generate_with_updates(folders: list[str]) -> dict[str, Any]:
    """Greedy and sampled responses under each model's weights, loaded one after the other into one engine."""
    engine = build(folders[0], [[0]], max_sequences=64)
    responses = {}
    for place, folder in enumerate(folders):
        model = load_language_model(folder, seed=0, trust_remote_code=False, revision=None)
        before = torch.random.get_rng_state()
        sharded = shard(model, compute_dtype=torch.float32, recompute_activations=False)
        holds = engine.held_shards()
        engine.load_weights(((name, holds[name], weight) for name, weight in full_weights(sharded).items()), holds)
        engine.wake_cache()
        seeds = [response_seed(7, 1, row) for row in range(64)]
        responses[f"{place} greedy"] = engine.generate(prompts(), seeds, max_tokens=NEW_TOKENS, greedy=True)
        responses[f"{place} sampled"] = engine.generate(prompts(), seeds, max_tokens=NEW_TOKENS)
        responses[f"{place} part"] = engine.generate(prompts()[10:20], seeds[10:20], max_tokens=NEW_TOKENS)
        assert torch.equal(torch.random.get_rng_state(), before), "generation moved the trainer's random state"
    return responses


@pytest.fixture(scope="module", params=["tied", "untied"])
def generated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, vllm_ranks: RunRanks) -> Any:
    """(folders of three sets of weights: first, second, first again; responses under each)."""
    base = tmp_path_factory.mktemp(request.param)
    tied = request.param == "tied"
    first, second = (save_tiny(base / str(seed), seed=seed, tied=tied) for seed in (1, 2))
    folders = [first, second, first]
    return folders, vllm_ranks(1, generate_with_updates, folders)[0]


@pytest.mark.parametrize("place", [0, 1, 2], ids=["first weights", "updated", "updated back"])
def test_greedy_tokens_are_those_of_transformers(generated: Any, place: int) -> None:
    folders, responses = generated
    model = AutoModelForCausalLM.from_pretrained(folders[place], dtype=torch.float32).eval()
    close = 0
    for prompt, response in zip(prompts(), responses[f"{place} greedy"], strict=True):
        gap = first_difference_gap(model, prompt, response)
        if gap is None:
            continue
        sys.stdout.write(f"differs where the two best logits are {gap:.1e} apart\n")
        assert gap < TOO_CLOSE
        close += 1
    assert close <= 0.02 * len(prompts())


def first_difference_gap(model: Any, prompt: list[int], response: Response) -> float | None:
    """Gap of the two best logits where transformers would first have chosen another token; None if nowhere."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response.tokens]])).logits[0, len(prompt) - 1 : -1]
    wrong = (logits.argmax(-1) != torch.tensor(response.tokens)).nonzero()
    if not len(wrong):
        return None
    best = logits[int(wrong[0])].topk(2).values
    return float(best[0] - best[1])


@pytest.mark.parametrize("place", [0, 1, 2], ids=["first weights", "updated", "updated back"])
def test_log_probs_are_those_of_the_trainer(generated: Any, place: int) -> None:
    folders, responses = generated
    model = AutoModelForCausalLM.from_pretrained(folders[place], dtype=torch.float32).eval()
    for prompt, response in zip(prompts(), responses[f"{place} sampled"], strict=True):
        tokens = torch.tensor(response.tokens)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response.tokens]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(response.log_probs), expected, rtol=0, atol=1e-4)


def test_new_weights_write_something_else(generated: Any) -> None:
    """Else equality after the update would prove nothing."""
    _, responses = generated
    first, second = ([list(r.tokens) for r in responses[f"{place} greedy"]] for place in (0, 1))
    assert sum(a != b for a, b in zip(first, second, strict=True)) > 60


def test_a_response_depends_on_its_seed_and_not_on_its_batch(generated: Any) -> None:
    _, responses = generated
    whole, part = responses["0 sampled"], responses["0 part"]
    assert [list(r.tokens) for r in whole[10:20]] == [list(r.tokens) for r in part]
    assert len({tuple(r.tokens) for r in whole}) == len(whole)


def test_a_response_ends_at_the_end_token_or_the_limit(generated: Any) -> None:
    _, responses = generated
    for response in responses["0 sampled"]:
        assert response.finished == (response.tokens[-1] == END)
        assert END not in response.tokens[:-1]
        assert response.finished or len(response.tokens) == NEW_TOKENS
        assert len(response.log_probs) == len(response.tokens)


def test_seeds_of_responses_are_all_different() -> None:
    seeds = {response_seed(seed, step, row) for seed in range(3) for step in range(-1, 20) for row in range(50)}
    assert len(seeds) == 3 * 21 * 50
