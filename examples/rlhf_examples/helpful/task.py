"""Templates of the helpful task, and a seeded generator of prompts, responses and preference pairs.

Standard library only. Who prefers what is not decided here: `draw_pairs` takes the judge as an argument.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

NOUNS = (
    "kettle", "bicycle", "garden", "laptop", "sofa", "window", "carpet", "oven", "mirror", "guitar", "jacket", "fridge",
    "boat", "fence", "camera", "clock", "drum", "engine", "piano", "radio", "table", "tent", "violin", "lamp",
)  # fmt: skip
VERBS = (
    "clean", "fix", "store", "paint", "move", "sell", "test", "repair", "polish", "check", "measure", "wrap",
)  # fmt: skip
QUESTIONS = (
    "How do I {verb} my {noun}?",
    "How to {verb} a {noun}?",
    "I want to {verb} this {noun}.",
    "Please help me {verb} my {noun}.",
)
DIALOGUE = "\n\nHuman: {question}\n\nAssistant:"

COURTEOUS_OPENINGS = ("Happy to help!", "Good question!", "Sure, let us start.")
RUDE_OPENINGS = ("That is a silly question.", "Why ask me?", "I do not care.")
ORDINALS = ("First", "Then", "Finally")
ACTIONS = ("wipe", "check", "hold", "lift", "dry", "turn", "look at", "brush")
NO_STEPS = ("I do not know.", "You could look it up.", "Just buy a new one.")
CLOSING_OFFERS = ("Let me know how it goes.", "Feel free to ask me more.")

COURTEOUS_SHARE = 0.35
RUDE_SHARE = 0.25
CLOSING_SHARE = 0.3
OTHER_NOUN_SHARE = 0.05
STEP_COUNTS = (0, 1, 1, 2, 2, 3, 3)
"""A response's number of steps is one of these, each as likely as the next."""

HELD_OUT_TOPICS = 60
MIN_MARGIN = 2
"""Pairs scored closer are dropped: keeping a margin of 1 costs the reward model accuracy (0.83 instead of 0.96)."""

Judge = Callable[[list[str], list[str], list[bool]], list[float]]
"""(prompts, responses, whether each response ended) -> scores; the higher the better."""


class Topic(NamedTuple):
    """What a prompt asks about; the training and held-out sets share no topic."""

    verb: str
    noun: str


class Row(NamedTuple):
    """One line of the data, in the columns of Dahoas/full-hh-rlhf; `response` is `chosen`."""

    prompt: str
    response: str
    chosen: str
    rejected: str


def split_topics(rng: random.Random) -> tuple[list[Topic], list[Topic]]:
    """Every (verb, noun), shuffled and split into (training, held out)."""
    topics = [Topic(verb, noun) for verb in VERBS for noun in NOUNS]
    rng.shuffle(topics)
    return topics[HELD_OUT_TOPICS:], topics[:HELD_OUT_TOPICS]


def draw_prompt(rng: random.Random, topic: Topic) -> str:
    """A question about `topic` as one turn of a dialogue, up to and including "Assistant:"."""
    question = rng.choice(QUESTIONS).format(verb=topic.verb, noun=topic.noun)
    return DIALOGUE.format(question=question)


def draw_response(rng: random.Random, noun: str) -> str:
    """An answer of any quality to a question about `noun`: opening, steps and closing offer, each perhaps missing.

    It starts with a space, as the continuation of "Assistant:" does.
    """
    sentences = [*_draw_opening(rng), *_draw_steps(rng, noun)]
    if rng.random() < CLOSING_SHARE:
        sentences.append(rng.choice(CLOSING_OFFERS))
    return " " + " ".join(sentences)


def _draw_opening(rng: random.Random) -> list[str]:
    mood = rng.random()
    if mood < COURTEOUS_SHARE:
        return [rng.choice(COURTEOUS_OPENINGS)]
    if mood < COURTEOUS_SHARE + RUDE_SHARE:
        return [rng.choice(RUDE_OPENINGS)]
    return []


def _draw_steps(rng: random.Random, asked_noun: str) -> list[str]:
    actions = rng.sample(ACTIONS, rng.choice(STEP_COUNTS))
    if not actions:
        return [rng.choice(NO_STEPS)]
    noun = rng.choice(NOUNS) if rng.random() < OTHER_NOUN_SHARE else asked_noun
    return [f"{ordinal}, {action} the {noun}." for ordinal, action in zip(ORDINALS, actions, strict=False)]


def draw_pairs(rng: random.Random, topics: Sequence[Topic], judge: Judge) -> Iterator[Row]:
    """Preference pairs without end: two responses to one prompt, kept if the judge sees a margin of `MIN_MARGIN`."""
    while True:
        topic = rng.choice(topics)
        prompt = draw_prompt(rng, topic)
        one, other = draw_response(rng, topic.noun), draw_response(rng, topic.noun)
        score_one, score_other = judge([prompt, prompt], [one, other], [True, True])
        if abs(score_one - score_other) < MIN_MARGIN:
            continue
        chosen, rejected = (one, other) if score_one > score_other else (other, one)
        yield Row(prompt=prompt, response=chosen, chosen=chosen, rejected=rejected)
