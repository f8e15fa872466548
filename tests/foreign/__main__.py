"""Table of the inputs of other people that are tried, and whether each gives the right result.

python -m tests.foreign [FOLDER...]   # folders with copies of other projects, whose scripts are imported too
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from rlhf_trainer.generation.families import GENERATED
from tests.foreign.scripts.count import FRAGMENT, VALID, count
from tests.foreign.turns.families import FAMILIES
from tests.foreign.turns.test_each_template_of_trl_is_taken_or_refused import EXPECTED

ROOT = Path(__file__).parent.parent.parent
CASES = {
    "options in bash arrays": "test_options_in_arrays_become_a_manifest",
    "tests that test nothing": "test_only_right_programs_pass_the_tests_of_each_form",
    "an end of the turn that is not the tokenizer's": "test_ends_are_the_templates_and_the_files",
    "a generation config that cannot be saved": "test_a_generation_config_is_saved_as_it_is",
    "an escaped dollar": "test_bad_expectations_are_found_and_no_others",
    "several turns": "test_both_answers_of_two_turns_are_learned_or_told",
    "calls of tools": "test_a_call_is_the_same_in_any_form",
    "a message that a template leaves out": "test_what_a_tool_says_is_not_lost",
    "a model's own code": "test_a_models_own_code_is_loaded_twice_and_saved",
    "top-k beside a correction": "test_restricted_samples_are_not_weighed",
    "thoughts and answers": "test_every_answer_of_its_table_gets_its_score",
    "a thought that the prompt begins": "test_a_thought_that_the_prompt_begins_is_part_of_the_form",
    "a token beyond the vocabulary": "test_a_token_beyond_the_vocabulary_is_told",
    "reward models of others": "test_a_trained_head_is_found_by_its_tensor",
    "what was told too late": "test_a_response_beyond_the_context_is_told",
    "weights that are missing": "test_a_folder_is_refused_with_job_field_and_file",
    "no signal": "test_three_steps_without_signal_are_told_with_their_cause",
    "code that changed": "test_a_sign_that_was_flipped_in_an_imported_module_is_told",
}
"""Kind of input -> the test with its right result."""
PLACES = (
    "tests/foreign",
    "tests/api/test_what_restricts_sampling_is_said_once.py",
    "tests/trainer/rewards/test_a_verifier_is_not_fooled.py",
    "tests/trainer/generation/test_vllm_reads_and_ends_as_the_trainer.py",
)


def outcomes() -> dict[str, Counter[bool]]:
    """Run the tests; name of a test -> how many of its inputs gave the right result, and how many did not."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", "-m", "not slow", f"--junitxml={report}"]
        subprocess.run([sys.executable, "-m", "pytest", *options, *PLACES], cwd=ROOT, stdout=sys.stderr, check=False)
        found: dict[str, Counter[bool]] = {}
        for case in ET.parse(report).iter("testcase"):
            name = case.attrib["name"].partition("[")[0]
            found.setdefault(name, Counter())[case.find("failure") is None and case.find("error") is None] += 1
    return found


def row(folders: list[Path]) -> dict[str, Any]:
    """The counts of `make accept`: kinds and inputs with the right result, templates, scripts and families."""
    found = outcomes()
    right = {kind: test in found and not found[test][False] for kind, test in CASES.items()}
    scripts = {}
    for folder in folders:
        for project, kinds in count(folder).items():
            total = sum(len(names) for kind, names in kinds.items() if kind != FRAGMENT)
            scripts[f"{folder.name} {project}"] = f"{len(kinds.get(VALID, []))} of {total} valid"
    return {
        "cases": f"{sum(right.values())} of {len(right)}",
        "wrong_cases": [kind for kind, is_right in right.items() if not is_right],
        "inputs": f"{sum(each[True] for each in found.values())} of {sum(map(Counter.total, found.values()))}",
        "templates": f"{len(FAMILIES)} made by hand, {len(EXPECTED)} of TRL",
        "scripts": scripts or "give folders with copies of other projects",
        "families": len(GENERATED),
    }


if __name__ == "__main__":
    print(json.dumps(row([Path(each) for each in sys.argv[1:]]), indent=2))
