"""A judge: a model behind an OpenAI-compatible endpoint that scores responses, or compares them in pairs.

The forms of its verdicts, [[7]] and [[A]], and that each pair is asked about in both orders, are those of MT-Bench
(Zheng et al., arXiv:2306.05685).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, ClassVar

from rlhf_api.spec.judges import RESPONSE_A, RESPONSE_B, Judge
from rlhf_trainer.rewards.endpoint import Answer, Endpoint, named
from rlhf_trainer.rewards.sample import Sample, Score

VERDICT = re.compile(r"\[\[\s*([^\[\]]*?)\s*\]\]")
WINS = {"A": 1.0, "B": 0.0, "C": 0.5}
"""Share of a comparison that the first response wins, by the verdict."""
NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]+)?")
REFUSED = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY)
"""Answers to a question that is too long, or whose content the server does not take: others may be answered."""


@dataclass
class Counts:
    """Of one call."""

    questions: int = 0
    """That the judge was asked."""
    unread: int = 0
    """Of them, those whose answer has no verdict."""


@dataclass(frozen=True, kw_only=True)
class JudgeClient(Endpoint):
    """Asks the judge, and remembers every verdict: this process asks no question again that had one."""

    longest: ClassVar[int] = 2**20

    judge: Judge
    verdicts: dict[bytes, float] = field(default_factory=dict, repr=False)
    """By the hash of the question: the number from 0 to 1, or the share that the first response wins."""
    counts: Counts = field(default_factory=Counts, repr=False)

    @property
    def compares_groups(self) -> bool:
        """Whether responses are compared with the others to their prompt."""
        return self.judge.compares and self.judge.reference_key is None

    def scores(self, samples: Sequence[Sample], among: Sequence[Sample] = ()) -> list[Score]:
        """A score from 0 to 1 for each sample, or None: no verdict, or nobody to compare with.

        among: what else is compared, where the samples are only a part. EnvironmentProblem if the server stays away;
        UserCodeError if it refuses, or if more answers have no verdict than may be.
        """
        if not self.judge.compares:
            found = self._verdicts([(self._question(sample, response=sample.response), sample) for sample in samples])
            return [Score(verdict) for verdict in found]
        pairs = [(sample, other) for sample in samples for other in self._others(sample, [*samples, *among])]
        differ = [(sample, other) for sample, other in pairs if other != sample.response]
        found = self._verdicts([question for pair in differ for question in self._both_orders(*pair)])
        verdicts = iter(found)
        won: dict[int, list[float]] = {}
        for sample, other in pairs:
            first, second = (0.5, 0.5) if other == sample.response else (next(verdicts), next(verdicts))
            if first is not None and second is not None:
                won.setdefault(id(sample), []).extend([first, 1.0 - second])
        shares = [won.get(id(sample)) for sample in samples]
        return [Score(sum(share) / len(share) if share else None) for share in shares]

    def _others(self, sample: Sample, everyone: Sequence[Sample]) -> Iterator[str]:
        """The responses that one is compared with."""
        if key := self.judge.reference_key:
            yield _text(sample.columns[key])
            return
        rows = {each.row: each for each in everyone if each.prompt == sample.prompt and each.row != sample.row}
        yield from (rows[row].response for row in sorted(rows))

    def _both_orders(self, sample: Sample, other: str) -> Iterator[tuple[str, Sample]]:
        """The two questions on a pair; the response comes first in the first."""
        for one, two in ((sample.response, other), (other, sample.response)):
            yield self._question(sample, **{RESPONSE_A: one, RESPONSE_B: two}), sample

    def _question(self, sample: Sample, **responses: str) -> str:
        texts = {name: _text(sample.columns[name]) for name in self.judge.columns}
        return self.judge.asked(**texts, prompt=sample.prompt, **responses)

    def _verdicts(self, questions: Sequence[tuple[str, Sample]]) -> list[float | None]:
        """The verdict on each question; None where the answer has none."""
        asked = {_key(question): (question, sample) for question, sample in questions}
        new = {key: each for key, each in asked.items() if key not in self.verdicts}
        found = self.answers([(self._request(question), sample) for question, sample in new.values()], self._verdict)
        self.verdicts.update((key, verdict) for key, verdict in zip(new, found, strict=True) if verdict is not None)
        self.counts.questions, self.counts.unread = len(found), found.count(None)
        if self.counts.unread > self.judge.max_unread_share * len(asked):
            wanted = "[[A]], [[B]] or [[C]]" if self.judge.compares else f"[[{self._range}]]"
            about = next(sample for (_, sample), verdict in zip(new.values(), found, strict=True) if verdict is None)
            told = f"gave no verdict, {wanted}, on {self.counts.unread} of {len(asked)} questions"
            raise self.refused(told, about)
        return [self.verdicts.get(_key(question)) for question, _ in questions]

    @property
    def _range(self) -> str:
        return f"a number from {self.judge.minimum:g} to {self.judge.maximum:g}"

    def _request(self, question: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": question}]
        return {"model": self.judge.model, "messages": messages, **self.judge.arguments}

    def _verdict(self, answer: Answer, about: object) -> float | None:
        """The verdict in an answer; UserCodeError for one that no question would get another of."""
        if answer.code in REFUSED or len(answer.body) > self.longest:
            return None
        if answer.code != HTTPStatus.OK:
            raise self.refused(f"answered {named(answer.code)}", about)
        said = content_of(answer.body)
        if said is None:
            return None
        verdict = (VERDICT.findall(said) or [said.strip()])[-1]
        if self.judge.compares:
            return WINS.get(verdict)
        low, high = self.judge.minimum, self.judge.maximum
        number = float(verdict) if NUMBER.fullmatch(verdict) else None
        return None if number is None or not low <= number <= high else (number - low) / (high - low)


def content_of(body: bytes) -> str | None:
    """The text of a chat completion; None for anything else."""
    try:
        content = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return None
    return content if isinstance(content, str) else None


def _key(question: str) -> bytes:
    return hashlib.blake2b(question.encode(errors="replace"), digest_size=16).digest()


def _text(value: Any) -> str:
    """A column as text: of messages the last one, of other lists and mappings JSON."""
    last = value[-1] if isinstance(value, list) and value else value
    if isinstance(last, dict) and isinstance(last.get("content"), str):
        return str(last["content"])
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
