"""Each command's help ends with an example that its own parser takes, and docs/cli.md shows all commands with it."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer import Typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

import rlhf_kubectl.cli
import rlhf_trainer.commands.cli
from tests.each import each_case
from tests.repo.tree import ROOT

PROGRAMS = {"rlhf": rlhf_trainer.commands.cli.app, "kubectl rlhf": rlhf_kubectl.cli.app}
EXAMPLE = "Example: "


def group(app: Typer) -> TyperGroup:
    found = get_command(app)
    assert isinstance(found, TyperGroup)
    return found


def commands() -> Iterator[tuple[str, str, TyperCommand]]:
    for program, app in PROGRAMS.items():
        for name, command in group(app).commands.items():
            assert isinstance(command, TyperCommand)
            yield program, name, command


COMMANDS = list(commands())


def example(command: TyperCommand) -> str:
    return (command.epilog or "").removeprefix(EXAMPLE)


@each_case(("program", "name", "command"), COMMANDS, ids=[f"{p} {n}" for p, n, _ in COMMANDS])
def test_the_example_parses(program: str, name: str, command: TyperCommand) -> None:
    assert (command.epilog or "").startswith(EXAMPLE)
    words = shlex.split(example(command))
    assert words[: len(program.split()) + 1] == [*program.split(), name]
    context = command.make_context(name, words[len(program.split()) + 1 :])
    assert context.params
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(PROGRAMS[program], [name, "--help"])
    assert " ".join(example(command).split()) in " ".join(shown.output.split())


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_page_shows_every_command(program: str) -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    shown = re.findall(rf"^    {program} [a-z-]+.*$", page, re.MULTILINE)
    wanted = [f"    {example(command)}" for owner, _, command in COMMANDS if owner == program]
    assert [line for line in wanted if line not in shown] == [], "docs/cli.md lacks the example of a command's help"
    described = " ".join(page.split())
    for owner, name, command in COMMANDS:
        sentence = " ".join(str(command.help).split())
        assert sentence in described, f"docs/cli.md has another sentence than the help of {owner} {name}: {sentence}"


@pytest.mark.parametrize(
    ("module", "program"), [("rlhf_trainer.commands.cli", "rlhf"), ("rlhf_kubectl.cli", "kubectl-rlhf")]
)
def test_help_and_version_need_nothing_heavy(module: str, program: str) -> None:
    heavy = {"torch", "ray", "vllm", "transformers", "kubernetes", "kopf", "numpy", "matplotlib"}
    text = f"import sys, {module} as m; sys.exit(', '.join({heavy} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = CliRunner().invoke(PROGRAMS[program.replace("-", " ")], ["--version"])
    assert re.fullmatch(rf"{program} \d+\.\d+\.\d+\n", shown.output)


def test_kubectl_can_complete_commands_of_the_plugin() -> None:
    program = Path(sys.executable).with_name("kubectl_complete-rlhf")
    done = subprocess.run([program, "s"], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["suspend", "save-now", "serve", ":4"], done.stderr


def test_shells_can_complete_commands() -> None:
    environment = {"_RLHF_COMPLETE": "complete_bash", "COMP_WORDS": "rlhf sa", "COMP_CWORD": "1", "PATH": "/usr/bin"}
    command = [
        sys.executable,
        "-c",
        "import sys; sys.argv[0] = 'rlhf'; from rlhf_trainer.commands.cli import main; main()",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["save-now", "samples"]
