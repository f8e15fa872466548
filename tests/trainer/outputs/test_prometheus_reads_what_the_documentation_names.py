"""The metrics port: a real server on a real port, scraped as Prometheus does, against docs/metrics.md."""

import ast
import socket
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from helm.dashboards.reference import pages
from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.outputs.display import Display
from rlhf_trainer.outputs.opening import OutputOptions, open_listeners
from rlhf_trainer.run.publisher import Publisher
from rlhf_trainer.run_folder.step_metrics import METRICS, PLANNED_STEPS, WARNINGS, metric_of
from tests.repo.tree import ROOT
from tests.trainer.outputs.conftest import step_report

TRAINER = ROOT / "trainer_image" / "rlhf_trainer"
RENAMED = {
    "tokens": "tokens_per_second",
    "peak_flops": "mfu",
    "correction/squared_weight": "correction/effective_size",
    **dict.fromkeys(
        (f"{of}{what}/part" for of in ("errors", "returns") for what in ("", "_square")), "explained_variance/part"
    ),
}


@pytest.fixture
def port() -> int:
    """A port that nobody uses."""
    with socket.socket() as free:
        free.bind(("", 0))
        number: int = free.getsockname()[1]
        return number


def scraped(port: int) -> dict[str, Metric]:
    """What the port answers: name of each family (a counter's ends in _total) -> family."""
    with urlopen(f"http://localhost:{port}/metrics") as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {f"{family.name}_total" if family.type == "counter" else family.name: family for family in families}


def samples(family: Metric) -> dict[tuple[str, ...], float]:
    """(sample's name, its own labels in order) -> value; job and algorithm are the same everywhere."""
    assert all((s.labels["job"], s.labels["algorithm"]) == ("tiny-sft", "SFT") for s in family.samples)
    return {
        (s.name, *(value for label, value in s.labels.items() if label not in ("job", "algorithm"))): s.value
        for s in family.samples
    }


def documented() -> list[tuple[str, ...]]:
    """The rows of the table in docs/metrics.md, without backquotes."""
    lines = (ROOT / "docs" / "metrics.md").read_text().splitlines()
    rows = [line.strip("|").replace("`", "").split("|") for line in lines if line.startswith("|")]
    return [tuple(cell.strip() for cell in row) for row in rows[2:]]


def test_the_port_serves_the_steps_of_a_publisher(
    port: int, publisher_with: Callable[..., Publisher], tmp_path: Path
) -> None:
    with open_listeners(OutputOptions(metrics_port=port), tmp_path / "run", print) as outputs:
        publisher = publisher_with(Display(Console(file=StringIO())), outputs)
        publisher.begin(first_step=1, total_steps=4)
        publisher.step(step_report(1, "odd", loss__sft=3.0, time__step=2.0, time__update=1.5, bytes__reshard=100))
        publisher.step(step_report(2, loss__sft=2.5, time__step=1.0, time__update=0.5, bytes__reshard=100))
        families = scraped(port)
    assert samples(families["rlhf_step"]) == {("rlhf_step",): 2}
    assert samples(families["rlhf_planned_steps"]) == {("rlhf_planned_steps",): 4}
    assert samples(families["rlhf_loss"]) == {("rlhf_loss", "sft"): 2.5}
    assert samples(families["rlhf_warnings_total"]) == {("rlhf_warnings_total",): 1}
    assert samples(families["rlhf_reshard_bytes_total"]) == {("rlhf_reshard_bytes_total",): 200}
    assert samples(families["rlhf_step_seconds"]) == {
        ("rlhf_step_seconds_count",): 2,
        ("rlhf_step_seconds_sum",): 3.0,
    }
    assert samples(families["rlhf_phase_seconds"]) == {
        ("rlhf_phase_seconds_count", "update"): 2,
        ("rlhf_phase_seconds_sum", "update"): 2.0,
    }
    with pytest.raises(OSError, match="refused"):
        scraped(port)


def test_the_documentation_names_exactly_what_is_exported(
    port: int, publisher_with: Callable[..., Publisher], tmp_path: Path
) -> None:
    with open_listeners(OutputOptions(metrics_port=port), tmp_path / "run", print) as outputs:
        publisher = publisher_with(Display(Console(file=StringIO())), outputs)
        publisher.begin(first_step=1, total_steps=4)
        names = [metric.recorded.replace("*", "x") for metric in METRICS if metric.recorded != "step"]
        publisher.step(step_report(1, "odd", **dict.fromkeys(names, 1.0)))
        families = scraped(port)
    exported = {}
    for name, family in families.items():
        (labels,) = {tuple(sorted(sample.labels)) for sample in family.samples}
        exported[name] = (family.type, labels, family.documentation)
    rows = documented()
    assert {row[1]: (row[2], tuple(sorted(row[4].split(", "))), row[5]) for row in rows} == exported
    assert [row[0] for row in rows] == [
        "" if metric.recorded in (PLANNED_STEPS, WARNINGS) else metric.recorded for metric in METRICS
    ]


def test_the_pages_of_metrics_are_as_generated() -> None:
    for page, text in pages().items():
        assert page.read_text() == text, f"{page.name}: make generate"


def recorded_names() -> Iterator[str]:
    """The names under which the trainer records measurements."""
    for path in TRAINER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("mean", "maximum", "add")
                and ast.unparse(node.func.value) == "recorder"
            ):
                yield written_name(node.args[0], f"{path}:{node.lineno}")


def written_name(name: ast.expr, where: str) -> str:
    """A name as it is written; of `family/{part}` the family with a part."""
    if isinstance(name, ast.JoinedStr):
        family = ast.literal_eval(name.values[0])
        assert family.endswith("/"), f"{where} records under a name made up"
        return f"{family}part"
    assert isinstance(name, ast.Constant), f"{where} records under a name made up"
    return str(name.value)


def test_everything_that_is_recorded_is_documented() -> None:
    names = {RENAMED.get(name, name) for name in recorded_names()}
    assert len(names) > 15
    assert not [name for name in sorted(names) if metric_of(name) is None]


def test_a_port_in_use_is_one_sentence(port: int, tmp_path: Path) -> None:
    options = OutputOptions(metrics_port=port)
    sentence = f"--metrics-port {port}: cannot be opened: Address already in use"
    refused = pytest.raises(EnvironmentProblem, match=sentence)
    with open_listeners(options, tmp_path, print), refused, open_listeners(options, tmp_path, print):
        pytest.fail("two servers on one port")
