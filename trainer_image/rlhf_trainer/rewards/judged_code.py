"""Program that judges a response's code in a sandbox, by the same rules as the verifier Code in the trainer's pod.

`python3 -m rlhf_trainer.rewards.judged_code` reads [code, tests, CPU seconds, bytes of memory] from item.json, and
prints the number of tests that the code passes, or NaN if the limits have ended the judgement. It needs pytest.
"""

import json
import math
import os
from pathlib import Path

from rlhf_api.sandbox_server import hide_memory
from rlhf_trainer.rewards.code_tests import passed_tests, read_tests
from rlhf_trainer.rewards.supervision import ChildLimits, judge_in_children, require_sandbox


def main() -> None:
    """Judge the code of item.json and print the answer; the code itself cannot write to standard output."""
    item = Path("item.json")
    code, tests, seconds, memory = json.loads(item.read_text())
    item.unlink()  # so that the code cannot read its tests there
    hide_memory()
    require_sandbox()
    judged, limits = (code, read_tests(tests)), ChildLimits(seconds=seconds, memory=memory, is_sandboxed=True)
    answer = os.dup(1)
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    (passed,) = judge_in_children(lambda each: float(passed_tests(*each)), [judged], limits, until=math.inf)
    os.write(answer, json.dumps(passed).encode())


if __name__ == "__main__":
    main()
