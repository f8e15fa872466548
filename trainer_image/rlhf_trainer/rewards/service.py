"""An HTTP service that scores responses: POST {"prompt", "response", "finished"} and perhaps "columns"."""

from __future__ import annotations

import json
from collections.abc import Sequence
from http import HTTPStatus

from rlhf_trainer.rewards.endpoint import Answer, Endpoint, named
from rlhf_trainer.rewards.sample import EXPECTED, Sample, Score, is_score


class ServiceClient(Endpoint):
    """Client of a service that scores responses."""

    def scores(self, samples: Sequence[Sample]) -> list[Score]:
        """Score samples; EnvironmentProblem without an answer, UserCodeError for no score, which name the sample."""
        return self.answers([(_request(sample), sample) for sample in samples], self._score)

    def _score(self, answer: Answer, about: object) -> Score:
        if answer.code != HTTPStatus.OK:
            raise self.refused(f"answered {named(answer.code)}", about)
        if len(answer.body) > self.longest:
            raise self.refused(f"answered more than {self.longest} bytes", about)
        try:
            score = json.loads(answer.body)["score"]
        except (ValueError, TypeError, KeyError, IndexError, RecursionError):
            score = None
        is_number = isinstance(score, int | float) and not isinstance(score, bool)
        if not is_number or not is_score(score):  # the message does not show the answer, which may repeat the token
            raise self.refused(f'answered something else than {{"score": {EXPECTED}}}', about)
        return Score(float(score))


def _request(sample: Sample) -> dict[str, object]:
    request = {"prompt": sample.prompt, "response": sample.response, "finished": sample.finished}
    return {**request, "columns": sample.columns} if sample.columns else {**request}
