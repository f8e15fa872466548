"""Client of a judge: of a model behind an OpenAI-compatible endpoint that scores or compares responses.

The forms of verdicts, [[7]] and [[A]], and the two questions on each pair, one in each order, are those of MT-Bench
(Zheng et al., arXiv:2306.05685).
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, ClassVar

from rlhf_api.spec.judges import RESPONSE_A, RESPONSE_B, Judge
from rlhf_trainer.http_client import Answer, named
from rlhf_trainer.rewards.endpoint import Endpoint
from rlhf_trainer.rewards.sample import Sample, Score

VERDICT = re.compile(r"\[\[\s*([^\[\]]*?)\s*\]\]")
NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]+)?")
REFUSED = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY)
"""HTTP statuses by which a judge's server refuses one question, as too long or for its content."""


@dataclass(kw_only=True)
class JudgeClient(Endpoint[Judge]):
    """Client of the judge that remembers verdicts: this process repeats no question that has got a verdict."""

    longest: ClassVar[int] = 2**20

    verdicts: dict[bytes, float] = field(default_factory=dict, repr=False)
    """Verdicts so far: hash of a question -> score from 0 to 1, or share that the first of two responses wins."""
    questions: int = 0
    unread: int = 0
    """Numbers of questions and of unreadable answers in the last call of `scores`."""

    def scores(self, samples: Sequence[Sample], among: Sequence[Sample] = ()) -> list[Score]:
        """Return a score from 0 to 1 for each sample; None without a verdict or a response to compare with.

        among: further samples to compare with. EnvironmentProblem if the server does not answer; UserCodeError if it
        refuses, or if the share of answers without a verdict exceeds the judge's limit.
        """
        if not self.settings.compares:
            found = self._verdicts([(self._question(sample, response=sample.response), sample) for sample in samples])
            return [Score(verdict) for verdict in found]
        pairs = [(sample, other) for sample in samples for other in self._others(sample, [*samples, *among])]
        shares: dict[int, list[float]] = {}
        for (sample, _), won in zip(pairs, self._compare(pairs), strict=True):
            shares.setdefault(id(sample), []).extend(won)
        won_by = [shares.get(id(sample)) for sample in samples]
        return [Score(sum(won) / len(won) if won else None) for won in won_by]

    def _compare(self, pairs: Sequence[tuple[Sample, str]]) -> Iterator[list[float]]:
        """Yield per pair the shares that its sample wins, one for each order; empty unless both have a verdict."""
        questions = [
            (self._question(sample, **{RESPONSE_A: one, RESPONSE_B: two}), sample)
            for sample, other in pairs
            for one, two in ((sample.response, other), (other, sample.response))
            if one != two
        ]
        verdicts = iter(self._verdicts(questions))
        for sample, other in pairs:
            first, second = (0.5, 0.5) if other == sample.response else (next(verdicts), next(verdicts))
            yield [] if first is None or second is None else [first, 1.0 - second]

    def _others(self, sample: Sample, everyone: Sequence[Sample]) -> Iterator[str]:
        """Yield the responses to compare with a sample's: the reference, or the other responses to its prompt."""
        if key := self.settings.reference_key:
            yield _text(sample.columns[key])
            return
        rows = {each.row: each for each in everyone if each.prompt == sample.prompt and each.row != sample.row}
        yield from (rows[row].response for row in sorted(rows))

    def _question(self, sample: Sample, **responses: str) -> str:
        texts = {name: _text(sample.columns[name]) for name in self.settings.columns}
        return self.settings.fill_prompt(**texts, prompt=sample.prompt, **responses)

    def _verdicts(self, questions: Sequence[tuple[str, Sample]]) -> list[float | None]:
        keys = [hashlib.blake2b(each.encode(errors="replace"), digest_size=16).digest() for each, _ in questions]
        distinct = dict(zip(keys, questions, strict=True))
        new = {key: each for key, each in distinct.items() if key not in self.verdicts}
        found = self.answers([(self._request(question), sample) for question, sample in new.values()], self._verdict)
        self.verdicts.update((key, verdict) for key, verdict in zip(new, found, strict=True) if verdict is not None)
        self.questions, self.unread = len(found), found.count(None)
        if self.unread > self.settings.max_unread_share * len(distinct):
            span = f"[[a number from {self.settings.minimum:g} to {self.settings.maximum:g}]]"
            expected = "[[A]], [[B]] or [[C]]" if self.settings.compares else span
            about = next(sample for (_, sample), verdict in zip(new.values(), found, strict=True) if verdict is None)
            sentence = f"gave no verdict, {expected}, on {self.unread} of {len(distinct)} questions"
            raise self.refused(sentence, about)
        return list(map(self.verdicts.get, keys))

    def _request(self, question: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": question}]
        return {"model": self.settings.model, "messages": messages, **self.settings.arguments}

    def _verdict(self, answer: Answer, about: object) -> float | None:
        """Return the verdict in a judge's answer, or None; UserCodeError for an HTTP error that is no refusal."""
        if answer.code in REFUSED or len(answer.body) > self.longest:
            return None
        if answer.code != HTTPStatus.OK:
            raise self.refused(f"answered {named(answer.code)}", about)
        try:
            content = json.loads(answer.body)["choices"][0]["message"]["content"]
        except (ValueError, TypeError, KeyError, IndexError, RecursionError):
            content = None
        if not isinstance(content, str):
            return None
        verdict = (VERDICT.findall(content) or [content.strip()])[-1]
        if self.settings.compares:
            return {"A": 1.0, "B": 0.0, "C": 0.5}.get(verdict)  # a tie is half a win
        low, high = self.settings.minimum, self.settings.maximum
        number = float(verdict) if NUMBER.fullmatch(verdict) else None
        return None if number is None or not low <= number <= high else (number - low) / (high - low)


def _text(value: Any) -> str:
    """Return a column's value as text: the content of the last message in a list, other lists and mappings as JSON."""
    last = value[-1] if isinstance(value, list) and value else value
    if isinstance(last, dict) and isinstance(last.get("content"), str):
        return str(last["content"])
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
