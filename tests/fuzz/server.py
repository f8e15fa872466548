"""Damaged RLHFJobs, judged by a real API server and by `rlhf validate`."""

from __future__ import annotations

import json
import random
from typing import Any

from rlhf_api import kubectl_yaml
from rlhf_api.job import Job
from rlhf_api.problems import SpecError
from tests.cluster.client import Cluster
from tests.fuzz.commands import EXAMPLES, Case
from tests.fuzz.damage import damaged

JOBS = "/apis/rlhf.hybridflow.io/v1alpha1/namespaces/default/rlhfjobs?dryRun=All&fieldValidation=Strict"


def server(running: Cluster) -> Case:
    """The server answers each, and takes what `rlhf validate` takes."""
    right = [each for path in EXAMPLES for each in kubectl_yaml.read(path.read_text(), "") if each]

    def case(dice: random.Random) -> str:
        document = dict(dice.choice(right))
        document["spec"] = _as_sent(damaged(dice, document["spec"]))
        status, answer = running.request("POST", JOBS, document)
        assert status in (201, 400, 422), (status, answer)
        try:
            Job.parse(json.loads(json.dumps(document)))
        except SpecError:
            return "refused by both" if status != 201 else "refused by validate only"
        assert status == 201, (answer, document)
        return "taken by both"

    return case


def _as_sent(value: Any) -> Any:
    """JSON as kubectl sends it: a number without a fraction has no point, and there is no NaN."""
    if isinstance(value, dict):
        return {key: _as_sent(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_as_sent(each) for each in value]
    if not isinstance(value, float):
        return value
    return None if value != value or abs(value) > 1e300 else int(value) if value.is_integer() else value
