"""Turns that a template has begun, and TRL's reward for thoughts."""

from __future__ import annotations

import os
import re

import pytest

from rlhf_importers.trl import VERIFIERS
from rlhf_trainer.rewards.verifiers import OPTIONS, score
from tests.each import each_case

TURNS = {
    "<think>\n": ("easy</think>\n<answer>4</answer>", 1.0),
    "2 + 2?<think>": ("easy</think><answer>4</answer>", 1.0),
    "2 + 2?<think>\n\n</think>\n\n": ("<answer>4</answer>", 1.0),
    "2 + 2?": ("<think>easy</think><answer>4</answer>", 1.0),
    "<think> 2 + 2?": ("easy</think><answer>4</answer>", 0.0),
    "3?<think>\n": ("<think>easy</think><answer>4</answer>", 0.0),
    "4?<think>\n": ("easy<answer>4</answer>", 0.0),
}


def scores(verifier: dict[str, object], prompts: list[str], responses: list[str]) -> list[object]:
    return [*score(prompts, responses, [True] * len(prompts), **{OPTIONS: [verifier, 60.0, 1]})]


def test_a_thought_that_the_prompt_begins_is_part_of_the_form() -> None:
    responses, expected = zip(*TURNS.values(), strict=True)
    assert scores({"name": "Format", "tags": ["think", "answer"]}, [*TURNS], [*responses]) == [*expected]


def test_an_empty_thought_is_no_part_of_other_forms() -> None:
    prompt, response = "2 + 2?<think>\n\n</think>\n\n", "<answer>4</answer>"
    assert scores({"name": "Format", "tags": ["answer"]}, [prompt], [response]) == [1.0]
    assert scores({"name": "Length", "maximum": len(response)}, [prompt], [response]) == [1.0]


ANSWERS = (
    ("72", "<think>a<think>b</think>72</think>5", 0.0),
    ("72", "a</think>72</think>5", 0.0),
    ("72", "<think>a</think>72<think>b</think>", 1.0),
    ("72", "[THINK]\\boxed{5}[/THINK]72", 1.0),
    ("72", "[THINK]\\boxed{72}[/THINK]5", 0.0),
    ("72", "\u25c1think\u25b7\\boxed{72}\u25c1/think\u25b7 It is 5.", 0.0),
    ("72", "<seed:think>\\boxed{72}</seed:think>5", 0.0),
    ("\u00a336", "\\boxed{36}", 1.0),
    ("36", "It costs \u20ac36.", 1.0),
    ("\\$32{,}348", "\\boxed{32348}", 1.0),
    ("32348", "\\$32,\\!348", 1.0),
    ("10\\,000", "\\boxed{10000}", 1.0),
    ("10\\,000", "0", 0.0),
    ("10 000", "\\boxed{10{,}000}", 1.0),
    ("3 6/7", "\\boxed{\\frac{27}{7}}", 1.0),
    ("1.5", "It is 1 1/2.", 1.0),
    ("1e-3", "\\boxed{0.001}", 1.0),
    ("2,000", "I get 2e3", 1.0),
    ("36 dollars", "\\boxed{36}", 1.0),
    ("\\text{36 dollars}", "It costs 36 dollars.", 1.0),
    ("36 dollars", "35 dollars", 0.0),
    ("2 3", "\\boxed{2 3}", 1.0),
    ("USD 36", "\\boxed{36}", 1.0),
    ("36 USD", "It costs USD 36.", 1.0),
    ("US$36", "36", 1.0),
    ("\u20b936", "36", 1.0),
    ("$36 million", "\\boxed{36,000,000}", 1.0),
    ("$36 million", "\\boxed{\\$36\\text{ million}}", 1.0),
    ("$36 million", "It is $36 million.", 1.0),
    ("$36 million", "\\boxed{36}", 0.0),
    ("36", "It is 36 million.", 1.0),
    ("36,000,000", "It is 36 million.", 1.0),
    ("$1.5 billion dollars", "1500000000", 1.0),
    ("\\text{5 thousand dollars}", "5000", 1.0),
    ("**36**", "\\boxed{36}", 1.0),
    ("36", "The answer is **36**.", 1.0),
    ("`36`", "36", 1.0),
    ("x\u00b2", "\\boxed{x^2}", 1.0),
    ("36 cm\u00b2", "\\boxed{36}", 1.0),
    ("3\u00d710\u2074", "30000", 1.0),
    ("10\u207b\u00b2", "0.01", 1.0),
    ("\u221a8", "\\boxed{2\\sqrt{2}}", 1.0),
    ("\u00bd", "0.5", 1.0),
    ("3\u00bd", "\\boxed{3.5}", 1.0),
    ("\\answer{36}", "\\boxed{36}", 1.0),
    ("36", "\\answer{36}", 1.0),
    ("36", "\\answer{63} and not 36", 0.0),
    ("pi/2", "\\boxed{\\frac{\\pi}{2}}", 1.0),
    ("2*3*4", "\\boxed{24}", 1.0),
)


def test_thoughts_and_numbers_are_read_in_many_forms() -> None:
    golds, responses, expected = zip(*ANSWERS, strict=True)
    options = {OPTIONS: [{"name": "Math"}, 300.0, 1], "answer": [*golds]}
    assert score([""] * len(golds), [*responses], [True] * len(golds), **options) == [*expected]


COMPLETIONS = (
    "<think>a</think>\n\nThe answer is 4.",
    "<think>a</think>",
    "<think></think>",
    "<think>a\nb</think>\nc\nd",
    "a <think>b</think> c",
    "\n<think>a</think> b",
    " <think>a</think>",
    "a\n<think>b</think>",
    "<think>a<think>b</think>",
    "<think>a</think><think>b</think>",
    "<think>a</think>b</think>",
    "<think>a",
    "a</think>b",
    "</think><think>",
    "<Think>a</Think>",
    "<think >a</think>",
    "<think>a</think >",
    "<thinking>a</thinking>",
    "<think>\n\n</think>\n\n",
    "",
)


def trl_think_format(completion: str) -> float:
    """TRL's `think_format_reward` for one completion (trl/rewards/format_rewards.py, 0.20 and later)."""
    pattern = r"^<think>(?!.*<think>)(.*?)</think>.*$"
    return 1.0 if re.match(pattern, completion, re.DOTALL | re.MULTILINE) else 0.0


@each_case("completion", COMPLETIONS)
def test_an_imported_reward_for_thoughts_is_trls(completion: str) -> None:
    (found,) = scores(VERIFIERS["think_format_reward"], ["?"], [completion])
    assert found == trl_think_format(completion)


@pytest.mark.parametrize("ranks", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_endless_judgements_go_on_side_by_side(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    endless, tests = "import time\ntime.sleep(60)", "assert f(1) == 1"
    options = {OPTIONS: [{"name": "Code", "seconds": 0.2}, 4.5, ranks], "tests": [tests] * 8}
    found = score(["?"] * 8, [endless] * 8, [True] * 8, **options)
    assert (None not in found) == (ranks == 1)
