"""The contract reads every algorithm's file, on machines without torch, Ray and vLLM; whichever module comes first."""

import subprocess
import sys

from rlhf_api.spec.algorithm_table import ALGORITHMS
from tests.each import each_case

FIRST = (
    "rlhf",
    "rlhf_api",
    "rlhf_api.spec.algorithms",
    "rlhf_api.spec.algorithm_table",
    "rlhf_trainer.algorithms.models",
)
SCRIPT = """
import importlib, sys
sys.modules.update(dict.fromkeys(("torch", "ray", "vllm", "transformers")))
importlib.import_module(sys.argv[1])
from rlhf_api.spec.algorithm_table import ALGORITHMS
print(*ALGORITHMS)
"""


@each_case("first", [*FIRST, ALGORITHMS["GRPO"].__module__, ALGORITHMS["SFT"].__module__])
def test_the_table_is_whole_whichever_module_comes_first(first: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, first], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(ALGORITHMS)
