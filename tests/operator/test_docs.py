"""docs/jobs.md names every phase, condition, reason and default action that the code knows, and no others."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import yaml

from rlhf_api.exit_codes import ExitCode
from rlhf_api.spec.run_policy import FailureRule, Reason, RunPolicy
from rlhf_api.status import ConditionType, Phase
from rlhf_operator import conditions, evidence, names
from rlhf_operator.evidence import CONCLUSIVE_EXIT_CODES, INCONCLUSIVE_EXIT_CODES
from rlhf_operator.failure import CLASSES
from rlhf_operator.placement import map_job
from rlhf_operator.resources import identity
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import RefusalReason
from tests.operator.rendered import changed
from tests.repo.tree import ROOT

GUIDE = (ROOT / "docs" / "jobs.md").read_text()
STORAGE = (ROOT / "docs" / "storage.md").read_text()
RECONCILE = ROOT / "operator" / "rlhf_operator" / "reconcile"
WORD = re.compile(r"[A-Z][A-Za-z]+")
DOCUMENTED_ELSEWHERE = {"Kueue's own", "a [reason](#why-attempts-fail)"}
"""Rows for the reasons that come from Kueue, and from the failure of an attempt."""


def rows(*head: str) -> list[tuple[str, ...]]:
    """The rows of the table with this head, without backquotes."""
    lines = iter(GUIDE.splitlines())
    for line in lines:
        if _cells(line)[: len(head)] == head:
            next(lines)
            return [_cells(row) for row in _until_the_end(lines)]
    raise AssertionError(f"there is no table with the head {head}")


def _until_the_end(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("|"):
            return
        yield line


def reasons_of_conditions() -> list[tuple[str, str, str]]:
    """(condition, status, reason): each condition has a section with a list of its reasons."""
    sections = re.findall(r"^### `(\w+)`\n\n.+\n\n((?:[- ] .*\n)+)", GUIDE, re.MULTILINE)
    return [
        (condition, status, reason.replace("`", ""))
        for condition, listed in sections
        for status, reason in re.findall(r"^- (\w+) (.+?): ", listed, re.MULTILINE)
    ]


def _cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip().replace("`", "") for cell in line.strip().strip("|").split("|"))


def modules() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text())) for path in sorted(RECONCILE.glob("*.py"))]


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


def test_every_phase_is_documented() -> None:
    assert sorted(row[0] for row in rows("phase")) == sorted(get_args(Phase))


def test_every_condition_is_documented() -> None:
    assert re.findall(r"^### `(\w+)`$", GUIDE, re.MULTILINE) == list(get_args(ConditionType))


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
    assert {reason for _, _, reason in documented} - DOCUMENTED_ELSEWHERE == known


def test_reasons_and_default_actions_are_documented() -> None:
    assert {row[0]: row[1] for row in rows("reason", "default")} == {
        reason: each.action for reason, each in CLASSES.items()
    }
    assert list(CLASSES) == list(get_args(Reason))


@pytest.mark.parametrize(("code", "reason"), {**CONCLUSIVE_EXIT_CODES, **INCONCLUSIVE_EXIT_CODES}.items())
def test_the_exit_code_of_a_reason_is_documented(code: int, reason: str) -> None:
    (row,) = [row for row in rows("reason", "default") if row[0] == reason]
    assert re.search(rf"\b{int(code)}\b", row[2]), f"{reason} does not name exit code {int(code)}"


def test_every_exit_code_of_a_failure_has_a_reason() -> None:
    known = {*CONCLUSIVE_EXIT_CODES, *INCONCLUSIVE_EXIT_CODES}
    assert set(ExitCode) - known == {ExitCode.OK, ExitCode.SIGINT, ExitCode.SIGTERM}


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
    assert pod["spec"]["securityContext"]["runAsUser"] == identity.USER
    (mount,) = pod["spec"]["containers"][0]["volumeMounts"]
    assert (mount["name"], mount["mountPath"]) == (volume["name"], "/claim")
    assert f"files:{mount['mountPath']}/JOB/model " in STORAGE
