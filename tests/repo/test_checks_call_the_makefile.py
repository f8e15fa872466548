"""What checks a change outside of `make` (CI on GitHub, pre-commit) calls the same programs and fetches no others."""

import shlex

import yaml

from tests.each import each_case
from tests.repo.tree import ROOT

REPOS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
HOOKS = [hook for repo in REPOS for hook in repo["hooks"]]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
PUBLISHED = yaml.safe_load((ROOT / ".github/workflows/publish.yml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()


@each_case("hook", HOOKS, ids=lambda hook: hook["id"])
def test_a_hook_runs_what_make_install_has_installed(hook: dict[str, str]) -> None:
    program, argument, *_ = shlex.split(hook["entry"])
    assert hook["language"] == "system"
    assert (ROOT / program).is_file() or (program == "make" and f"\n{argument}: " in MAKEFILE)


def test_hooks_come_from_this_repository() -> None:
    assert [repo["repo"] for repo in REPOS] == ["local"]


def test_the_workflow_runs_ci_run_and_nothing_else() -> None:
    commands = [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]
    assert [shlex.split(command)[-1] for command in commands] == [".ci/run"]


def test_what_is_published_is_what_make_builds() -> None:
    jobs = PUBLISHED["jobs"]
    for each in jobs["images"]["strategy"]["matrix"]["include"]:
        text = (ROOT / each["file"]).read_text()
        assert all(f"\nARG {line.partition('=')[0]}=" in text for line in each["arguments"].split())
    commands = [step["run"] for step in jobs["wheel"]["steps"] if "run" in step]
    assert [word for line in commands for word in shlex.split(line) if f"\n{word}: " in MAKEFILE] == ["wheel"]


def test_the_page_for_agents_is_short() -> None:
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= 80
