"""Pages name files, modules, identifiers, make targets, commands, flags and links that exist.

Decisions (docs/adr) and the change log tell what was so when they were written: of them only the links are checked.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from typer.core import TyperGroup
from typer.main import get_command

from rlhf_mapper.hardware import GPUS
from rlhf_trainer.commands.cli import app
from tests.each import each_case
from tests.repo import documents
from tests.repo.documents import Line, lines
from tests.repo.tree import ROOT, tracked_files

PAGES = [path for path in tracked_files() if path.suffix == ".md"]
OF_TODAY = [path for path in PAGES if "adr" not in path.parts and path.name != "CHANGELOG.md"]
OF_USERS = {
    "my_module",
    "HEAD_POD",
    "adapter/",
    "model/",
    "checkpoints/",
    "runs/01-helpful-ppo/",
    "llama-7b/",
    "actor/huggingface/",
}
"""What a page names that is the reader's own, or lies in a run folder."""
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def relative(path: Path) -> str:
    """A path as a test's id."""
    return str(path.relative_to(ROOT))


def read(page: Path) -> list[Line]:
    return list(lines(relative(page), page.read_text()))


def not_there(page: list[Line]) -> list[str]:
    """A sentence for every file, module and identifier of a page that the repository lacks."""
    checks = (documents.missing_paths, documents.missing_modules, documents.missing_identifiers)
    missing = ((line.place, name) for line in page for check in checks for name in check(line))
    return [f"{place}: there is no {name}" for place, name in missing if name not in OF_USERS]


@cache
def targets() -> set[str]:
    """The targets of the Makefile."""
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@cache
def subcommands() -> dict[str, set[str]]:
    """The commands of rlhf, each with its flags."""
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    return {name: {flag for each in command.params for flag in each.opts} for name, command in group.commands.items()}


def wrong_commands(page: list[Line]) -> Iterator[str]:
    """A sentence for every make target, command of rlhf and flag in the code of a page that does not exist."""
    for place, text in documents.commands(page):
        for name in wrong_names(text):
            yield f"{place}: there is no {name}"


def wrong_names(text: str) -> Iterator[str]:
    """What a command calls by a name that does not exist."""
    known = subcommands()
    yield from (f"make {name}" for name in re.findall(r"(?:^|&& )make ([a-z][\w-]*)", text) if name not in targets())
    for name, rest in re.findall(r"(?:^|&& |/bin/)rlhf ([a-z][\w-]*)([^|&#]*)", text):
        if name not in known:
            yield f"rlhf {name}"
        yield from (f"rlhf {name} {flag}" for flag in FLAG.findall(rest) if flag not in known.get(name, {flag}))
    for program, rest in re.findall(r"python ([\w/]+\.py)([^|&#]*)", text):
        options = FLAG.findall((ROOT / program).read_text()) if (ROOT / program).is_file() else ()
        yield from (f"{program} {flag}" for flag in FLAG.findall(rest) if flag not in options)
    if text.startswith("--"):
        yield from (flag for flag in FLAG.findall(text) if flag not in documents.flags().union(*known.values()))


def no_floors(page: list[Line]) -> list[str]:
    """A sentence for every module and folder in a drawing of the tree that does not exist."""
    drawn = documents.floors(page)
    return [f"{at}: there is no {name}" for at, name in drawn if not any(map(documents.exists, (name, f"{name}.py")))]


@each_case("page", OF_TODAY, ids=relative)
def test_files_modules_and_identifiers_exist(page: Path) -> None:
    assert not not_there(read(page))


@each_case("page", OF_TODAY, ids=relative)
def test_make_targets_commands_and_flags_exist(page: Path) -> None:
    assert not list(wrong_commands(read(page)))


@each_case("page", PAGES, ids=relative)
def test_links_lead_somewhere(page: Path) -> None:
    broken = ((line.place, target) for line in read(page) for target in documents.broken_links(page, line))
    assert not [f"{place}: there is no {target}" for place, target in broken]


def test_the_architecture_page_has_the_trees_floors() -> None:
    page = read(ROOT / "docs/architecture.md")
    assert len(list(documents.floors(page))) > 30
    assert not no_floors(page)


def test_the_page_about_mapping_names_every_gpu_of_the_table() -> None:
    page = " ".join((ROOT / "docs/auto-mapping.md").read_text().split())
    (listed,) = re.findall(r"`--gpu` takes (.+?):", page)
    assert re.split(r", | or ", listed) == list(GPUS)


def test_a_floor_that_is_gone_is_found() -> None:
    drawing = "    rlhf_api      the contract\n      spec/ gone   two\n        data gone    in\n        rules   not in"
    gone = ["a.md:2: there is no rlhf_api/gone", "a.md:3: there is no rlhf_api/spec/gone"]
    assert no_floors(list(lines("a.md", drawing))) == [*gone, "a.md:4: there is no rlhf_api/spec/rules"]


@each_case(
    ("text", "complaint"),
    [
        ("see ops/gone.py", "ops/gone.py"),
        ("see gone.md.", "gone.md"),
        ("the chart is in `helm/gone`", "helm/gone"),
        ("`gone/` holds it", "gone/"),
        ("`python -m rlhf_trainer.gone`", "rlhf_trainer.gone"),
        ("`rlhf_api.exit_codes.Gone`", "rlhf_api.exit_codes.Gone"),
        ("calls `" + "gone" + "_for_good`", "gone" + "_for_good"),
        ("    x = " + "Gone" + "ForGood()", "Gone" + "ForGood"),
        ("`make gone`", "make gone"),
        ("    cd x && make gone", "make gone"),
        ("`rlhf gone FILE`", "rlhf gone"),
        ("`rlhf run FILE --gone`", "rlhf run --gone"),
        ("    rlhf run FILE \\\n      --gone", "rlhf run --gone"),
        ("`--gone` does", "--gone"),
        ("`python benchmarks/runs.py --gone`", "benchmarks/runs.py --gone"),
    ],
)
def test_what_is_gone_is_found(text: str, complaint: str) -> None:
    page = list(lines("a.md", text))
    last = text.count("\n") + 1
    assert [*not_there(page), *wrong_commands(page)] == [f"a.md:{last}: there is no {complaint}"]


@each_case(
    "text",
    [
        "ops/losses.py, `cli.py`, `tests/repo/`, README.md, `crds/rlhfjobs.yaml`",
        "a run leaves job.yaml and metrics.jsonl, here `<job>/trace.json`, there https://example.com/a.md",
        "`rlhf_api.exit_codes`, `rlhf_api.exit_codes.ExitCode`, `training.totalSteps`, `ExitCode`",
        "`make test`, `rlhf run FILE --seed 1`, `--metrics-port 9400`; make sure that rlhf makes sense",
    ],
)
def test_what_exists_is_not_complained_about(text: str) -> None:
    page = list(lines("a.md", text))
    assert not [*not_there(page), *wrong_commands(page)]


@each_case(
    ("link", "broken"),
    [
        ("[a](../README.md#try-it)", False),
        ("[a](https://example.com)", False),
        ("[a](../README.md#gone)", True),
        ("[a](gone.md)", True),
    ],
)
def test_a_broken_link_is_found(link: str, broken: bool) -> None:
    (line,) = lines("a.md", link)
    assert bool(list(documents.broken_links(ROOT / "docs/architecture.md", line))) == broken
