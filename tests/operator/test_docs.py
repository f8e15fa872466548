"""The table behind docs/status.md has every phase, condition, reason, event and exit code, and no others."""

import ast
import importlib
import re
from pathlib import Path
from typing import get_args

import yaml

from rlhf_api.exit_codes import ExitCode
from rlhf_api.spec.run_policy import Action, FailureRule, Reason, RunPolicy
from rlhf_api.status import ConditionType, Phase
from rlhf_kubectl.why import TABLE
from rlhf_operator import conditions, evidence, names
from rlhf_operator.evidence import CLASSES, OF_EXIT_CODE
from rlhf_operator.placement import map_job
from rlhf_operator.resources.identity import fixed_part
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import RefusalReason
from tests.each import each_case
from tests.operator.rendered import changed
from tests.repo.tree import ROOT

GUIDE = (ROOT / "docs" / "jobs.md").read_text()
STATUS = (ROOT / "docs" / "status.md").read_text()
STORAGE = (ROOT / "docs" / "storage.md").read_text()
OPERATOR = ROOT / "operator" / "rlhf_operator"
WORD = re.compile(r"[A-Z][A-Za-z]+")
READER_LEFT = 141
"""Exit code by which a shell reports SIGPIPE; the trainer never returns it."""


def reasons_of_conditions() -> list[tuple[str, str, str]]:
    """(condition, status, reason) of each row of the table."""
    return [(kind, *_pair(key)) for kind, rows in TABLE.conditions.items() for key in rows]


def _pair(key: str) -> tuple[str, str]:
    status, reason = key.split()
    return status, reason


def modules() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text())) for path in sorted((OPERATOR / "reconcile").glob("*.py"))]


def set_conditions() -> set[tuple[str, str, str]]:
    """(condition, status, reason) of each `set_condition` in reconcile, where the reason is a constant."""
    found = set()
    for path, tree in modules():
        module = importlib.import_module(f"rlhf_operator.reconcile.{path.stem}")
        for call in ast.walk(tree):
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Attribute)
                and call.func.attr == "set_condition"
            ):
                condition, status, *rest = call.args
                reason = _text(rest[0], module)
                if reason and isinstance(condition, ast.Constant) and isinstance(status, ast.Constant):
                    found.add((str(condition.value), str(status.value), reason))
    return found


def _text(node: ast.expr, module: object) -> str:
    """What an expression is, if it is a text or the name of one."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Name | ast.Attribute):
        value = module
        for part in ast.unparse(node).split("."):
            value = getattr(value, part, None)
        return value if isinstance(value, str) else ""
    return ""


def returned_reasons() -> set[str]:
    """The reasons of pairs (reason, sentence) in reconcile."""
    return {
        reason
        for _, tree in modules()
        for pair in ast.walk(tree)
        if isinstance(pair, ast.Tuple) and len(pair.elts) == 2 and _is_sentence(pair.elts[1])
        if isinstance(pair.elts[0], ast.Constant) and isinstance(reason := pair.elts[0].value, str)
        if WORD.fullmatch(reason)
    }


def _is_sentence(node: ast.expr) -> bool:
    """Whether an expression is a text of several words, or one that is only known when it is said."""
    return isinstance(node, ast.JoinedStr | ast.Attribute) or (
        isinstance(node, ast.Constant) and " " in str(node.value)
    )


def reasons_of_fail() -> set[str]:
    """The reasons for which a job fails besides those of an attempt."""
    return {
        word
        for _, tree in modules()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func).split(".")[-1] == "fail" and len(call.args) == 3
        for part in ast.walk(call.args[1])
        if isinstance(part, ast.Constant) and WORD.fullmatch(word := str(part.value))
    }


def events() -> set[str]:
    """Reasons of the events that the operator records, where the reason is a constant."""
    found = set()
    for path in [*(OPERATOR / "reconcile").glob("*.py"), *(OPERATOR / "cluster").glob("*.py")]:
        module = importlib.import_module(f"rlhf_operator.{'.'.join(path.relative_to(OPERATOR).with_suffix('').parts)}")
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func).split(".")[-1] == "add_event":
                found.add(_text(call.args[1], module))
            elif isinstance(call, ast.Call) and ast.unparse(call.func) == "Event":
                found |= {_text(each.value, module) for each in call.keywords if each.arg == "reason"}
    return found - {""}


def test_every_word_of_a_status_is_explained() -> None:
    assert list(TABLE.phases) == list(get_args(Phase))
    assert list(TABLE.about) == list(TABLE.conditions) == list(get_args(ConditionType))
    assert list(TABLE.failures) == list(CLASSES) == list(get_args(Reason))
    assert list(TABLE.actions) == list(get_args(Action))
    assert list(TABLE.exit_codes) == sorted({*ExitCode, READER_LEFT})


def test_every_reason_of_a_condition_is_told_and_no_other() -> None:
    documented = set(reasons_of_conditions())
    assert len(set_conditions()) > 20
    assert not set_conditions() - documented
    known = (
        {reason for _, _, reason in set_conditions()}
        | returned_reasons()
        | reasons_of_fail()
        | set(get_args(map_job.MappingReason))
    )
    known |= {*get_args(RefusalReason), *get_args(conditions.Kstatus)} | {conditions.SLOW_START}
    known |= {*evidence.START_SECONDS, *evidence.AWAITED} - {"QuotaTooSmall"}  # which the condition calls QuotaExceeded
    assert {reason for _, _, reason in documented} == known


def test_every_event_is_told_and_no_other() -> None:
    assert len(events()) > 5
    assert set(TABLE.events) == events() | set(get_args(RefusalReason))


@each_case("reason", CLASSES)
def test_a_failure_has_its_action_and_exit_codes(reason: str) -> None:
    (row,) = re.findall(
        rf"^\| `{reason}` \| (\w+) \| ([\d, ]*) \|", STATUS.split("## Why attempts fail")[1], re.MULTILINE
    )
    expected = CLASSES[reason].action, [*CLASSES[reason].exit_codes]
    assert (row[0], [int(code) for code in re.findall(r"\d+", row[1])]) == expected


def test_every_exit_code_of_a_failure_has_a_reason() -> None:
    assert set(ExitCode) - OF_EXIT_CODE.keys() == {ExitCode.OK, ExitCode.PAUSED, ExitCode.SIGINT, ExitCode.SIGTERM}


def test_the_example_of_rules_is_right() -> None:
    from rlhf_api import kubectl_yaml

    (text,) = re.findall(r"```yaml\n(runPolicy:.*?)```", GUIDE, re.DOTALL)
    policy = RunPolicy.model_validate(kubectl_yaml.read(text, "")[0]["runPolicy"], by_alias=True, by_name=False)
    assert [rule.action for rule in policy.failure_rules] == ["Ignore", "Fail", "Remap", "Fail"]
    assert all(isinstance(rule, FailureRule) for rule in policy.failure_rules)


def test_the_example_of_templates_is_right() -> None:
    (text,) = re.findall(r"```yaml\n(runtime:.*?)```", GUIDE, re.DOTALL)
    job = changed("helpful-ppo", {"runtime": yaml.safe_load(text)["runtime"]})
    made = Settings().pod_of(job.spec.runtime, names.WORKER)
    assert (made.node_selector, made.host_network) == ({"example.com/pool": "h100"}, True)


def test_the_pod_that_hands_out_files_mounts_the_jobs_claim() -> None:
    (text,) = re.findall(r"```yaml\n(apiVersion:.*?)```", STORAGE, re.DOTALL)
    pod = yaml.safe_load(text)
    (volume,) = pod["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == names.output_claim_name("JOB")
    assert pod["spec"]["securityContext"]["runAsUser"] == fixed_part("pod_security")["securityContext"]["runAsUser"]
    (mount,) = pod["spec"]["containers"][0]["volumeMounts"]
    assert (mount["name"], mount["mountPath"]) == (volume["name"], "/claim")
    assert f"files:{mount['mountPath']}/JOB/model " in STORAGE
