"""The rule behind the preferences: what a perfect reward model would have learnt. Training never sees it."""

from __future__ import annotations

import re

from rlhf_examples.helpful.task import ACTIONS, CLOSING_OFFERS, COURTEOUS_OPENINGS, NOUNS, ORDINALS, RUDE_OPENINGS

BEST = 5.0
"""Three steps about the asked thing, a courteous opening and a closing offer."""
WORST = -4.0
"""No such step, rude, about another thing, repetitive and cut off."""

_WORD = re.compile(r"\w+")
_SENTENCE_END = re.compile(r"(?<=[.!?])")
_STEP = re.compile(rf"(?P<ordinal>{'|'.join(ORDINALS)}), (?:{'|'.join(ACTIONS)}) the (?P<noun>\w+)\.")


def score(prompts: list[str], responses: list[str], finished: list[bool]) -> list[float]:
    """How helpful each response is to its prompt, a whole number from `WORST` to `BEST`.

    +1  for each of First, Then, Finally used in a step: "First, <known action> the <asked thing>."
    +1  if it contains a courteous opening,  -1  if it contains a rude one
    +1  if it contains a closing offer,      -1  if it repeats a sentence
    -1  if any step is about another thing,  -1  if it is not finished (no end of text within the length limit)

    The asked thing is the last noun of the task that the prompt names; a prompt without one makes every step a step
    about another thing. Any text has a score: what the rule does not recognise counts nothing.

    >>> prompt = "\\n\\nHuman: How do I clean my kettle?\\n\\nAssistant:"
    >>> helpful = " Good question! First, wipe the kettle. Then, dry the kettle. Let me know how it goes."
    >>> unhelpful = " Why ask me? First, wipe the sofa."
    >>> score([prompt, prompt], [helpful, unhelpful], [True, False])
    [4.0, -3.0]

    The first has two steps, the opening and the closing offer; the second is rude, about a sofa, and was cut off.

    Raises ValueError if the three lists differ in length.
    """
    return [_score_one(*row) for row in zip(prompts, responses, finished, strict=True)]


def _score_one(prompt: str, response: str, finished: bool) -> float:
    asked_noun = _find_noun(prompt)
    sentences = _split_sentences(response)
    steps = [step for step in map(_STEP.fullmatch, sentences) if step]
    ordinals_used = {step["ordinal"] for step in steps if step["noun"] == asked_noun}
    merits = (
        _contains_any(response, COURTEOUS_OPENINGS),
        _contains_any(response, CLOSING_OFFERS),
    )
    faults = (
        _contains_any(response, RUDE_OPENINGS),
        any(step["noun"] != asked_noun for step in steps),
        len(set(sentences)) < len(sentences),
        not finished,
    )
    return float(len(ordinals_used) + sum(merits) - sum(faults))


def _find_noun(prompt: str) -> str | None:
    nouns = [word for word in _WORD.findall(prompt) if word in NOUNS]
    return nouns[-1] if nouns else None


def _split_sentences(text: str) -> list[str]:
    """The sentences that end in . ! or ?; a bare mark and an unended tail are none."""
    pieces = _SENTENCE_END.split(text)
    return [piece.strip() for piece in pieces[:-1] if len(piece) > 1]


def _contains_any(text: str, phrases: tuple[str, ...]) -> bool:
    return any(phrase in text for phrase in phrases)
