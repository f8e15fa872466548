"""Memory as the mapper says it beside what the product's own modules and workers take under fake tensors."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from rlhf_api.spec.job_spec import Attention
from rlhf_mapper.architecture import Architecture, architecture_of
from rlhf_mapper.coefficients import software_for
from rlhf_mapper.simulate import generation, layer, layouts, memory
from rlhf_mapper.simulate.layouts import Layouts
from rlhf_mapper.simulate.passes import Passes
from tests.each import each_case
from tests.mapper.planned_jobs import cluster_of
from tests.real_size.cases import CASES, MAPPED
from tests.real_size.layer import COUNTED, FAMILIES, ONE_RANK, TYPES, Precision, config_of, counted, shape_of
from tests.real_size.shapes import GPU_BYTES, SHAPES
from tests.real_size.step import ROLES, Case
from tests.repo.tree import ROOT

OFF = 0.05
WHOLE = (
    "qwen2.5-7b-8",
    "llama-3-8b-8",
    "qwen3-32b-32",
    "qwen3-32b-32-first-stage",
    "llama-3-70b-64",
)
"""Of real shapes with all their layers, too."""
SHORT = "four-layers-of-qwen3-235b-a22b"
LARGE = (
    "four-layers-of-qwen3-30b-a3b",
    "four-layers-of-qwen3-30b-a3b-32k",
    "six-layers-of-deepseek-v3",
    "four-layers-of-qwen3-8b-131k",
    "four-layers-of-llama-3-70b-65k",
    "qwen3-30b-a3b-16",
    "qwen3-235b-a22b-128",
    "qwen3-8b-8-131k",
    "deepseek-v3-256",
)
"""Mixtures whose experts lie on several ranks, and rows on several ranks."""


@each_case("changes", [{}, {"hidden": 896}, {"ffn": 5120}, {"heads": 8}, {"kv_heads": 16}], ids=str)
@each_case(("family", "attention", "precision"), COUNTED)
def test_a_layer_keeps_what_the_mapper_says(
    family: str, attention: Attention, precision: Precision, changes: dict[str, int]
) -> None:
    config = config_of(family, **changes)
    model, sums = shape_of(config)
    said = layer.kept(model, software_for("GPU", precision, attention)).on(model, ONE_RANK)
    assert counted(config, attention, TYPES[precision]).kept == pytest.approx(float(said) + sums, rel=0.01)


@each_case("family", FAMILIES)
def test_a_layer_moves_and_starts_what_the_mapper_says(family: str) -> None:
    config = config_of(family)
    model, _ = shape_of(config)
    found, software = counted(config, "Flash", TYPES["BF16"]), software_for("GPU", "BF16", "Flash")
    said = float(layer.moved(model, software).on(model, ONE_RANK))
    assert found.moved == pytest.approx(said, rel=0.01)
    assert found.kernels == layer.kernels(model, software)


def test_these_are_six_shapes_in_three_layouts() -> None:
    shapes = {case.shape for case in MAPPED.values()}
    layouts = {(case.ranks, *sorted(case.layout.items())) for case in MAPPED.values()}
    assert (len(shapes), len(layouts), len(MAPPED)) == (6, 3, 18)


@cache
def peaks(*names: str) -> dict[str, Any]:
    """What is counted of cases, in one process."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.real_size", "--json", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr[-3000:]
    rows: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return rows


def said(case: Case) -> dict[str, float]:
    """GB at the fullest moment of each phase that the mapper knows, for models that share all GPUs."""
    software = replace(software_for("GPU", "BF16"), attention="SDPA")  # torch's fake device is no cuda
    sizes = case.sizes
    axes = (sizes.pipeline, sizes.tensor, sizes.data, sizes.context, sizes.expert)
    cut = Layouts(*(np.array(float(size)) for size in axes))
    roles = [role for role in ROLES[case.algorithm] if case.scored_by_model or role != "reward"]
    shapes = {role: shape(case, scores=role in ("critic", "reward")) for role in roles}
    states = sum(
        sum(memory.states(model, software, trains=role in ("actor", "critic")).values())
        for role, model in shapes.items()
    )
    held = states / case.ranks
    row = case.prompt + case.response
    tokens = min(case.rows * row // sizes.context, max(case.micro_batch_tokens, row // sizes.context))
    longest = tokens - tokens * sizes.context / row * case.prompt  # the first rank of a row holds its prompt
    several = case.rows * row > case.micro_batch_tokens * sizes.context
    how = memory.Update(recomputes=case.recompute, accumulates=several, gpu_memory=GPU_BYTES)
    (nodes,) = cluster_of(("h100-80g", max(case.ranks // 8, 1), 8)).groups
    generator = Layouts(np.array(1.0), np.array(float(case.tensor_generation)), np.array(1.0))
    copy = generation.weights_of_gpu(Passes(shapes["actor"], nodes, software), generator)
    phases = {"reshard": copy + memory.reshard_bytes(software, copy)}
    for role, model in shapes.items():
        phases[f"{role} scores"] = memory.fullest(memory.reading(model, software, cut, longest), tokens)
        if role in ("actor", "critic"):
            moments = memory.updating(model, software, cut, longest, how)
            phases[f"{role} update"] = memory.fullest(moments, tokens)
    return {phase: (held + float(size)) / 1e9 for phase, size in phases.items()}


def shape(case: Case, *, scores: bool) -> Architecture:
    model = architecture_of(SHAPES[case.shape].to_dict(), scores=scores)
    return replace(model, layers=case.layers or model.layers)


def check(name: str, case: Case, row: dict[str, Any]) -> None:
    """The fullest phase, and each phase that is no less than four fifths of it, within 5 %.

    Left out: the actor's scores, which begin while the generator still has its weights.
    """
    found = {phase: each["peak"] for phase, each in row["phases"].items() if not phase.startswith("load")}
    found.pop("actor scores")
    mapper = said(case)
    off = {phase: mapper[phase] / peak - 1 for phase, peak in found.items() if peak > 0.8 * max(found.values())}
    assert all(abs(each) <= OFF for each in off.values()), (name, off, found)
    assert max(mapper[phase] for phase in found) == pytest.approx(max(found.values()), rel=OFF)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MAPPED)
def test_a_step_of_few_layers_holds_what_the_mapper_says(name: str) -> None:
    check(name, MAPPED[name], peaks(*MAPPED)[name])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_step_holds_what_the_mapper_says(name: str) -> None:
    check(name, CASES[name], peaks(name)[name])


def check_balanced(name: str) -> None:
    """Compare the mapper with a count in which each expert gets equally many tokens."""
    with patch.object(layouts, "UNEVEN_EXPERTS", 1.0):
        check(name, CASES[name], peaks(name)[name])


@pytest.mark.slow
def test_experts_over_ranks_hold_what_the_mapper_says() -> None:
    check_balanced(SHORT)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", LARGE)
def test_large_and_long_steps_hold_what_the_mapper_says(name: str) -> None:
    check_balanced(name)
