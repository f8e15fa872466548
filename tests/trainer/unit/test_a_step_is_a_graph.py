"""The graph of a step: its levels and bytes, worked out by hand, and the drawings that `rlhf plan --graph` makes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
from typer.testing import CliRunner

from rlhf_api.files import load
from rlhf_api.job import Job
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_mapper.place import place
from rlhf_planning.graph_text import mermaid_of, text_of
from rlhf_planning.step_graph import Graph
from rlhf_trainer.commands.cli import app
from rlhf_trainer.controller.graph import ShapeFuture, Tracer
from rlhf_trainer.controller.worker_spec import WorkerSpec
from rlhf_trainer.fields import Width, require_declared
from rlhf_trainer.protocols import THREE_D_PROTO, AxisPlacement, sbp_protocol
from rlhf_trainer.report.plan_pictures import graph_svg
from rlhf_trainer.run.graph import graph_of, scorers_of
from rlhf_trainer.types import register
from tests.each import each_case
from tests.examples.test_every_example_is_right import DISTINCT, EXAMPLES, FINISHED, jobs_of

LEFT, RIGHT = "{name: left, models: [actor, reference]", "{name: right, models: [critic, reward]"
SPLIT = [
    "helpful-ppo:placement.mode=Manual",
    f"helpful-ppo:placement.pools=[{LEFT}, slotsPerNode: 2}}, {RIGHT}, slotsPerNode: 2}}]",
]
ALL = [job for path in DISTINCT for job in jobs_of(path)]
DRAWN = [*ALL[:3], *(pytest.param(job, marks=pytest.mark.slow) for job in ALL[3:])]
PARTIAL = sbp_protocol(
    "PARTIAL", takes={"data": AxisPlacement.SPLIT}, gives={"data": AxisPlacement.SPLIT, "tensor": AxisPlacement.PARTIAL}
)
SVG = "{http://www.w3.org/2000/svg}"
PICTURE = EXAMPLES[0].parents[1] / "docs" / "images" / "ppo-step.svg"
ROW = 16 * 8
"""Bytes of 16 tokens."""


def ppo(*overrides: str) -> Job:
    return next(job for job in load(EXAMPLES[0], overrides) if job.name == "helpful-ppo")


def traced(job: Job) -> Graph:
    return graph_of(job, place(job, (0,)))


def levels(graph: Graph) -> list[set[str]]:
    """The calls of each level."""
    return [
        {call.name for call in graph.calls if call.level == level} for level in {call.level for call in graph.calls}
    ]


def test_calls_of_one_pool_are_one_after_another() -> None:
    graph = traced(ppo())
    assert [call.level for call in graph.calls] == list(range(11))
    assert [call.name for call in graph.calls][-3:] == [
        "advantage.compute_advantage",
        "actor.compute_loss",
        "actor.update_actor",
    ]


def test_calls_of_independent_pools_share_a_level() -> None:
    assert levels(traced(ppo(*SPLIT))) == [
        {"data.load_batch"},
        {"actor.generate_sequences"},
        {"actor.compute_log_prob", "critic.compute_values"},
        {"reference.compute_log_prob", "reward.compute_reward"},
        {"advantage.compute_rewards"},
        {"advantage.compute_advantage", "critic.update_critic"},
        {"actor.compute_loss"},
        {"actor.update_actor"},
    ]


def test_an_edge_holds_the_bytes_of_full_rows() -> None:
    job = ppo("data.maxPromptTokens=10", "data.maxResponseTokens=30")
    graph, rows = traced(job), job.sequences_per_step
    (edge,) = [edge for edge in graph.edges if (edge.producer, edge.consumer) == (1, 3)]
    assert {moved.name: moved.bytes for moved in edge.fields} == {
        "tokens": rows * 40 * 8,
        "attention_mask": rows * 40 * 4,
        "response_mask": rows * 40 * 4,
    }
    assert graph.calls[0].adds == {"prompt_ids": rows * 10 * 8, "prompt_mask": rows * 10 * 4, "valid": rows * 4}


class Sharded:
    """A model of any layout."""

    @register(THREE_D_PROTO, adds=("tokens",))
    def make(self) -> None: ...

    @register(PARTIAL, adds=("tokens",))
    def make_addends(self) -> None: ...

    @register(THREE_D_PROTO, reads=("tokens",))
    def read(self) -> None: ...


SHARDED = WorkerSpec(Sharded, {})


@pytest.mark.parametrize(
    ("made_by", "typed_as", "copies"),
    [("make", "S(0)/2 data, B*2 pipeline", 2), ("make_addends", "S(0)/2 data, B*2 pipeline, P+2 tensor", 4)],
)
def test_an_edge_between_layouts_is_typed_and_counted(made_by: str, typed_as: str, copies: int) -> None:
    """Actor (1,2,3) -> critic (2,1,2): two blocks, each for both stages; addends of two tensor ranks come twice."""
    tracer = Tracer(rows=6, widths={Width.TEXT: 16})
    actor = tracer.model("actor", SHARDED, "left", ParallelSizes(pipeline=1, tensor=2, data=3))
    critic = tracer.model("critic", SHARDED, "right", ParallelSizes(pipeline=2, tensor=1, data=2))
    critic.read(getattr(actor, made_by)(ShapeFuture()))
    (edge,) = tracer.graph().edges
    assert edge.spread == typed_as
    assert tracer.graph().bytes == copies * 6 * ROW
    assert [line.split()[-2:] for line in text_of(tracer.graph(), title="").splitlines() if "0 -> 1" in line] == [
        [f"{copies * 6 * ROW:,}", "tokens"]
    ]


def test_a_step_that_looks_at_a_value_has_no_static_graph() -> None:
    model = Tracer(rows=1, widths={Width.TEXT: 1}).model("actor", SHARDED, "all", ParallelSizes(data=1))
    value: Any = model.read(model.make(ShapeFuture()))
    with pytest.raises(TypeError, match="waits for a value"):
        value.result()


def test_a_call_that_reads_what_nobody_added_is_named() -> None:
    model = Tracer(rows=1, widths={Width.TEXT: 1}).model("critic", SHARDED, "all", ParallelSizes(data=1))
    with pytest.raises(KeyError, match=r"critic\.read( \(.*\))? reads tokens; the batch holds nothing"):
        model.read(ShapeFuture())


def test_a_field_in_another_form_than_declared_is_refused() -> None:
    mine = torch.zeros(2, 5, dtype=torch.bool)
    require_declared({"scores": torch.zeros(2), "mine": mine}, ("mine", "scores"), rows=2)
    for wrong in (torch.zeros(2, dtype=torch.float64), torch.zeros(2, 1), torch.zeros(3)):
        with pytest.raises(ValueError, match=r"scores of 2 rows is torch\.float.*, declared as float32 \[B\]"):
            require_declared({"scores": wrong}, ("scores",), rows=2)
    with pytest.raises(ValueError, match=r"^mine is \[2, 5\], expected 3 rows$"):
        require_declared({"mine": mine}, ("mine",), rows=3)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"mine": torch.zeros(2)}, "gave mine; registered are scores"),
        (None, "gave NoneType; registered are scores"),
        ({"scores": [1.0, 2.0]}, "scores is list, expected a tensor"),
    ],
)
def test_other_fields_than_registered_are_refused(given: object, sentence: str) -> None:
    with pytest.raises(TypeError, match=f"^{sentence}$"):
        require_declared(given, ("scores",), rows=2)


@pytest.mark.parametrize("job", DRAWN, ids=[job.name for job in ALL])
def test_the_drawings_show_every_call_and_every_field(job: Job) -> None:
    graph = traced(job)
    text = text_of(graph, title=job.name)
    assert max(map(len, text.splitlines())) <= 100
    assert [line.split()[0] for line in text.splitlines() if " all " in line] == [
        str(call.number) for call in graph.calls
    ]
    assert text.count(" -> ") == len(graph.edges)
    drawn = ET.fromstring(graph_svg(graph, title=job.name, pools=["all"]))
    said = [str(title.text) for title in drawn.iter(f"{SVG}title")]
    assert len([what for what in said if " adds " in what]) == sum(len(call.adds) for call in graph.calls)
    assert len([what for what in said if " reads " in what]) == sum(len(edge.fields) for edge in graph.edges)


@each_case("job", ALL, ids=[job.name for job in ALL])
def test_the_flowchart_has_every_call_in_its_pool(job: Job) -> None:
    graph = traced(job)
    lines = [line.strip() for line in mermaid_of(graph).splitlines()]
    assert lines[0] == "flowchart TD"
    box = lines[lines.index('subgraph pool0["all"]') + 1 : lines.index("end")]
    assert box == [f'call{call.number}["{call.label}"]' for call in graph.calls]
    arrows = [(line.split()[0], line.split()[-1]) for line in lines if " -->|" in line]
    assert arrows == [(f"call{edge.producer}", f"call{edge.consumer}") for edge in graph.edges]


def words_of(picture: Path) -> list[str]:
    """Texts and hover texts of a picture."""
    root = ET.parse(picture).getroot()
    return [str(each.text) for each in root.iter() if each.tag in (f"{SVG}text", f"{SVG}title")]


def plan(*arguments: object) -> tuple[int, str]:
    """Exit code and all output of `rlhf plan`."""
    done = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    return done.exit_code, done.output


def test_plan_prints_the_graph_and_draws_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    svg = tmp_path / "ppo.svg"
    sets = [each for override in SPLIT for each in ("--set", override)]
    code, shown = plan(EXAMPLES[0], "helpful-ppo", "--graph", "--svg", svg, *sets)
    assert code == 0, shown
    assert "helpful-sft" not in shown
    assert "left: 2 CPU slots (actor, reference)" in " ".join(shown.split())
    assert words_of(svg) == words_of(PICTURE), "docs/architecture.md names the command that draws it"
    assert plan(EXAMPLES[0], "--graph")[1].count(", a step of ") == 3
    mermaid = tmp_path / "ppo.mmd"
    monkeypatch.setitem(sys.modules, graph_svg.__module__, None)  # as without matplotlib, which mermaid does not need
    assert plan(EXAMPLES[0], "helpful-ppo", "--graph", "--svg", mermaid, *sets)[0] == 0
    assert mermaid.read_text().startswith("flowchart TD\n")


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["nobody", "--graph"], 2, "error: JOB: is nobody; the manifest has helpful-sft, helpful-rm, helpful-ppo"),
        (["--graph", "--svg", "x.svg"], 2, "error: --svg: draws one job; name one of helpful-sft, helpful-rm"),
        (["helpful-sft", "--graph", "--svg", "/nowhere/x.svg"], 4, "error: /nowhere/x.svg: cannot be written: No such"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[Any], code: int, sentence: str) -> None:
    found, shown = plan(EXAMPLES[0], *arguments)
    assert found == code
    assert sentence in shown


TRAINERS = "{name: left, models: [actor, critic, reference, reward], slotsPerNode: 1}"
WRITERS = "{name: right, models: [rollout], slotsPerNode: 1}"
APART = [
    "helpful-ppo:resources=",
    "helpful-ppo:placement.mode=Manual",
    f"helpful-ppo:placement.pools=[{TRAINERS}, {WRITERS}]",
]


@pytest.mark.parametrize(
    ("places", "scorers"),
    [
        ([], []),
        (SPLIT, ["critic.compute_values", "reward.compute_reward"]),
        (
            APART,
            ["actor.compute_log_prob", "critic.compute_values", "reference.compute_log_prob", "reward.compute_reward"],
        ),
    ],
    ids=["one pool", "two pools", "a rollout pool"],
)
def test_scoring_elsewhere_may_begin_before_the_last_row(places: list[str], scorers: list[str]) -> None:
    assert scorers_of(traced(ppo(*places))) == [[tuple(each.split(".")) for each in scorers]]


def test_each_generation_of_a_step_has_its_own_scorers() -> None:
    """ReMax scores greedy responses, too; those of prompts and rules of a pool that generates wait for nothing."""
    (path,) = (path for path in EXAMPLES if "remax" in path.name)
    (name,) = (job.name for job in jobs_of(path) if job.spec.algorithm.name == "ReMax")
    left, right = ("{name: left, models: [actor]", "{name: right, models: [reference, reward]")
    pools = f"[{left}, slotsPerNode: 1}}, {right}, slotsPerNode: 1}}]"
    places = [f"{name}:resources=", f"{name}:placement={{mode: Manual, pools: {pools}}}"]
    job = next(job for job in load(path, places, FINISHED) if job.name == name)
    first, second = scorers_of(traced(job))
    assert ("reward", "compute_reward") in first
    assert ("reward", "compute_reward") in second
    assert ("reference", "compute_log_prob") in {*first, *second}
