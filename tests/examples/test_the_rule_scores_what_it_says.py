"""The helpful task's rule, one merit or fault at a time, by values worked out by hand."""

import doctest

import pytest

from rlhf_examples.helpful import rule
from tests.each import each_case

KETTLE = "\n\nHuman: How do I clean my kettle?\n\nAssistant:"
SPOON = "\n\nHuman: How do I clean my spoon?\n\nAssistant:"
TWO_TURNS = "\n\nHuman: I want to sell this sofa.\n\nAssistant: Why ask me?\n\nHuman: How to fix a lamp?\n\nAssistant:"
THREE_STEPS = " First, wipe the kettle. Then, dry the kettle. Finally, look at the kettle."

# sentence: (prompt, response, finished, expected)  # noqa: ERA001
CASES: dict[str, tuple[str, str, bool, float]] = {
    "no step is worth nothing": (KETTLE, " I do not know.", True, 0),
    "one step is worth one": (KETTLE, " First, wipe the kettle.", True, 1),
    "two steps are worth two": (KETTLE, " First, wipe the kettle. Then, dry the kettle.", True, 2),
    "three steps are worth three": (KETTLE, THREE_STEPS, True, 3),
    "the best answer scores five": (KETTLE, f" Good question!{THREE_STEPS} Let me know how it goes.", True, 5),
    "the worst answer scores minus four": (KETTLE, " Why ask me? Then, lift the sofa. Then, lift the sofa.", False, -4),
    "a courteous opening adds one": (KETTLE, " Sure, let us start. First, wipe the kettle.", True, 2),
    "a closing offer adds one": (KETTLE, " First, wipe the kettle. Feel free to ask me more.", True, 2),
    "a rude opening takes one": (KETTLE, " I do not care. First, wipe the kettle.", True, 0),
    "courteous and rude cancel out": (KETTLE, " Happy to help! That is a silly question.", True, 0),
    "two courteous openings count once": (KETTLE, " Happy to help! Good question!", True, 1),
    "a step about another thing takes one": (KETTLE, " First, wipe the sofa.", True, -1),
    "two steps about other things take one": (KETTLE, " First, wipe the sofa. Then, dry the oven.", True, -1),
    "another thing spoils the right steps": (KETTLE, " First, wipe the kettle. Then, dry the sofa.", True, 0),
    "another thing need not be a noun of the task": (KETTLE, " First, wipe the moon.", True, -1),
    "an ordinal counts once": (KETTLE, " First, wipe the kettle. First, dry the kettle.", True, 1),
    "a repeated sentence takes one": (KETTLE, " First, wipe the kettle. First, wipe the kettle.", True, 0),
    "two repeated sentences take one": (KETTLE, " No. No. Yes. Yes.", True, -1),
    "an answer that did not end loses one": (KETTLE, " First, wipe the kettle. Then, dry", False, 0),
    "an unended tail is no step": (KETTLE, " First, wipe the kettle. Then, dry the kettle", True, 1),
    "the order of the ordinals is free": (KETTLE, " Finally, wipe the kettle. First, dry the kettle.", True, 2),
    "an unknown ordinal is no step": (KETTLE, " Next, wipe the kettle.", True, 0),
    "an unknown action is no step": (KETTLE, " First, eat the kettle.", True, 0),
    "a step must end in a full stop": (KETTLE, " First, wipe the kettle!", True, 0),
    "words before a step spoil it": (KETTLE, " So First, wipe the kettle.", True, 0),
    "words after the noun spoil a step": (KETTLE, " First, wipe the kettle well.", True, 0),
    "case matters": (KETTLE, " first, wipe the kettle. First, wipe the Kettle.", True, -1),
    "lines between sentences are free": (KETTLE, "First, wipe the kettle.\n\nThen, dry the kettle.", True, 2),
    "a thing the task does not know is never matched": (SPOON, " First, wipe the spoon.", True, -1),
    "the last thing asked about counts": (TWO_TURNS, " First, wipe the lamp. Then, dry the lamp.", True, 2),
    "an earlier thing is another thing": (TWO_TURNS, " First, wipe the sofa.", True, -1),
    "the empty answer scores zero": (KETTLE, "", True, 0),
    "the empty answer that did not end loses one": (KETTLE, "", False, -1),
    "the empty prompt knows no thing": ("", THREE_STEPS, True, -1),
    "bare marks are no repeated sentence": (KETTLE, "...!!!???", True, 0),
    "marks between spaces are sentences": (KETTLE, " . . ", True, -1),
    "garbage scores zero": (KETTLE, "\x00<pad>)(*[\\ufffd {noun}%s", True, 0),
    "any script is text": (KETTLE, " 漢字 🙂 é\u2028 First, wipe the Чайник.", True, 0),
    "an unknown script in a step is another thing": (KETTLE, "First, wipe the Чайник.", True, -1),
}


@each_case(("prompt", "response", "finished", "expected"), CASES.values(), ids=CASES.keys())
def test_the_rule_scores_what_it_says(prompt: str, response: str, finished: bool, expected: float) -> None:
    assert rule.score([prompt], [response], [finished]) == [expected]


def test_the_bounds_are_reached() -> None:
    scores = [expected for *_, expected in CASES.values()]
    assert (min(scores), max(scores)) == (rule.WORST, rule.BEST)


def test_each_row_is_scored_by_itself_and_in_order() -> None:
    prompts, responses, finished, expected = (list(column) for column in zip(*CASES.values(), strict=True))
    assert rule.score(prompts, responses, finished) == expected
    assert rule.score([], [], []) == []


def test_scores_are_floats() -> None:
    assert [type(score) for score in rule.score([KETTLE], [" I do not know."], [True])] == [float]


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        rule.score([KETTLE, KETTLE], [""], [True])


def test_a_very_long_answer_without_an_end_is_scored() -> None:
    assert rule.score([KETTLE], ["First, wipe the " * 200_000], [False]) == [-1]


def test_the_worked_example_is_true() -> None:
    results = doctest.testmod(rule)
    assert (results.attempted, results.failed) == (4, 0)
