"""The verifier Code on a cluster with sandboxes: each response is judged in a sandbox of its own."""

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from rlhf_api.spec.verifiers import Code
from rlhf_trainer.rewards.code_tests import read_tests
from rlhf_trainer.rewards.sample import LOST, SCORE, STOPPED, UNSERVED
from rlhf_trainer.rewards.sandboxes import LostSandboxError, NoSandboxError, Sandboxes, sources
from rlhf_trainer.rewards.supervision import MEBIBYTE, WAIT_FACTOR
from rlhf_trainer.rewards.verifiers import JUDGING_SHARE, OPTIONS, VerifierScore, code_in

JUDGE = "rlhf_trainer.rewards.judged_code"
MODULES = ("rlhf_api.sandbox_server", "rlhf_trainer.rewards.code_tests", JUDGE, "rlhf_trainer.rewards.supervision")
MAX_LOST, START_SECONDS = 2, 30.0
"""Number of lost sandboxes after which a response gets no further one; seconds for Python to start in a sandbox."""


def score(prompts: list[str], responses: list[str], finished: list[bool], /, **given: Any) -> list[VerifierScore]:
    """Return the score of each response, with the share of tests that it passes.

    The score is None if no sandbox was free in time. A response that loses two sandboxes counts as wrong; but if no
    response was judged, the sandboxes may be at fault, and the score is None.

    given: as in `verifiers.score`, with the fields of `Sandboxes` as a fourth value under OPTIONS.
    """
    options, seconds, _, pods = given.pop(OPTIONS)
    verifier, sandboxes = Code.model_validate(options), Sandboxes(**pods)
    tests, until = given[verifier.tests_key], time.monotonic() + JUDGING_SHARE * seconds
    places = [place for place, is_finished in enumerate(finished) if is_finished]
    items = [(code_in(verifier, prompts[place], responses[place]), tests[place]) for place in places]
    scores: list[VerifierScore] = [0.0] * len(responses)
    with ThreadPoolExecutor(sandboxes.warm) as pool:
        found = [*pool.map(partial(_judged, sandboxes, verifier, until), items)]
    is_one_judged = any(each[SCORE] is not None for each in found)
    for place, each in zip(places, found, strict=True):
        scores[place] = {**each, SCORE: 0.0} if is_one_judged and each.get(LOST) == MAX_LOST else each
    return scores


def _judged(sandboxes: Sandboxes, verifier: Code, until: float, item: tuple[str, Any]) -> dict[str, float | None]:
    """Return the score of (code, tests). If the sandbox is lost, perhaps by the code, the code gets another one."""
    code, tests = item
    limits = [verifier.seconds, verifier.memory_mebibytes * MEBIBYTE]
    files = {**sources(MODULES), "item.json": json.dumps([code, tests, *limits])}
    longest, lost = WAIT_FACTOR * verifier.seconds + START_SECONDS, 0
    while lost < MAX_LOST:
        marks = {LOST: float(lost)} if lost else {}
        try:
            done = sandboxes.run(["python3", "-m", JUDGE], files=files, seconds=longest, until=until)
        except NoSandboxError:
            return {SCORE: None, UNSERVED: 1.0, **marks}
        except LostSandboxError:
            lost += 1
            continue
        if done.late and time.monotonic() >= until:
            return {SCORE: None, UNSERVED: 1.0, **marks}
        if done.code < 0 and not done.late:  # the kernel has ended the judge, as memory was short
            lost += 1
            continue
        if done.code and not done.late:
            last = done.output.strip().rpartition("\n")[2]
            raise RuntimeError(f"cannot judge in the image of spec.sandbox: {last}")
        if done.late or math.isnan(passed := float(done.output)):
            return {SCORE: 0.0, STOPPED: 1.0, **marks}
        count = len(read_tests(tests))
        return {SCORE: float(passed == count), "tests": passed / count, **marks}
    return {SCORE: None, LOST: float(lost)}
