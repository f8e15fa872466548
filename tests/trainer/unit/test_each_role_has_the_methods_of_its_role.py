"""Methods that a step may call on each model, by role: the recorded step and the run refuse every other method."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import get_args
from unittest.mock import Mock

import pytest

from rlhf_api.names import Role
from rlhf_api.problems import suggestion
from rlhf_api.spec.algorithm_table import ALGORITHMS
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_mapper.mapping import DeviceMapping, MappedPool
from rlhf_trainer.controller.graph import Tracer
from rlhf_trainer.controller.worker_group import ModelHandle
from rlhf_trainer.controller.worker_spec import WorkerSpec
from rlhf_trainer.protocols import THREE_D_PROTO
from rlhf_trainer.run.worker_specs import worker_specs
from rlhf_trainer.types import Batch, Fields, register
from rlhf_trainer.workers.data import DataShape
from rlhf_trainer.workers.reward import RewardWorker
from tests.each import each_case
from tests.mapper.planned_jobs import job_of

SAVED = {"save", "begin_checkpoint", "end_checkpoint", "counters", "set_counters", "restore", "probe_links"}
OWN_REFERENCE = {"compute_ref_log_prob", "compute_ref_pair_log_prob", "compute_ref_mismatched_log_prob"}
GENERATES = (
    SAVED
    | OWN_REFERENCE
    | {"generate_sequences", "compute_log_prob"}
    | {"span_pools", "send_weights", "publish_weights"}
)
CRITIC = SAVED | {"compute_values", "update_critic"}
REFERENCE = {"compute_log_prob", "compute_pair_log_prob", "compute_mismatched_log_prob"}
ADVANTAGE = {"compute_advantage", "counters", "set_counters"}
RL = {
    "actor": GENERATES | {"update_actor", "compute_loss"},
    "reference": REFERENCE,
    "reward": {"compute_reward"},
    "advantage": ADVANTAGE,
}
WITH_CRITIC = {**RL, "critic": CRITIC, "advantage": ADVANTAGE | {"compute_rewards"}}
METHODS: Mapping[str, Mapping[str, set[str]]] = {
    "SFT": {"actor": SAVED | {"update_actor", "evaluate_completions"}},
    "RewardModel": {"reward": SAVED | {"update_reward", "evaluate_pairs"}},
    "CostModel": {"cost": SAVED | {"update_cost", "evaluate_pairs"}},
    "DPO": {"actor": SAVED | OWN_REFERENCE | {"update_actor", "evaluate_pairs"}, "reference": REFERENCE},
    **{each: {"actor": SAVED | OWN_REFERENCE | {"update_actor", "evaluate_pairs"}} for each in ("SimPO", "ORPO")},
    "KTO": {
        "actor": SAVED | OWN_REFERENCE | {"compute_reference_point", "update_actor", "evaluate_completions"},
        "reference": REFERENCE,
    },
    "OnlineDPO": {
        "actor": GENERATES | {"update_actor"},
        "reference": REFERENCE,
        "reward": {"compute_reward"},
        "pairs": {"choose_pairs"},
    },
    "PPO": WITH_CRITIC,
    "SafeRLHF": {**WITH_CRITIC, "cost_critic": CRITIC, "cost": {"compute_cost"}},
    "VAPO": WITH_CRITIC,
    "Distillation": {**RL, "teacher": {"compute_log_prob"}},
    "Merge": {"actor": {"merge"}},
    "Generate": {
        "actor": {"generate_sequences"},
        "reward": {"compute_reward"},
        "responses": {"write", "summary", "counters", "set_counters"},
    },
}
LEFT_OUT = {(name, "reference") for name in ("VAPO", "OPO", "CISPO", "Distillation")}
"""Models that a job without a KL penalty does without."""
ROLES = sorted({(name, role) for name, each in ALGORITHMS.items() for role in each.parameters} - LEFT_OUT)
ALL = set().union(*(methods for roles in METHODS.values() for methods in roles.values()))
SAMPLES = {"rollout": {"samplesPerPrompt": 4}}
ALONE = ParallelSizes(data=1)


def spec_of(name: str, role: str) -> WorkerSpec:
    """The spec of a role's worker in a job of the algorithm, with all models in one pool."""
    has_groups = ALGORITHMS[name].comparing is not None or name == "Distillation"
    job = job_of(name, **(SAMPLES if has_groups else {}))
    sizes = dict.fromkeys(job.models(), ALONE)
    placed = DeviceMapping(
        device="CPU",
        pools=(MappedPool(name="all", models=tuple(job.models()), slots_per_machine=(1,)),),
        sizes=sizes,
    )
    folders: dict[Role, str] = dict.fromkeys(get_args(Role), "model")
    shape = DataShape(rows=640, total_steps=7, evaluation_rows=10, facts=())
    return worker_specs(job, placed, folders, shape, path=Path("run/job"))["all"][role]


@each_case(("name", "role"), ROLES)
def test_a_role_has_exactly_its_methods(name: str, role: str) -> None:
    assert spec_of(name, role).transfers.keys() == METHODS.get(name, RL)[role]


@each_case(("name", "role"), ROLES)
def test_a_record_refuses_methods_of_other_roles(name: str, role: str) -> None:
    spec, own = spec_of(name, role), METHODS.get(name, RL)[role]
    model = Tracer(rows=1, widths={}).model(role, spec, "all", ALONE)
    for method in sorted(ALL - own):
        with pytest.raises(AttributeError) as raised:
            getattr(model, method)
        unknown = f"{role} has no method {method}; {suggestion(method, own)}"
        assert str(raised.value) in (unknown, f"{role}.{method} is not marked by register")


@each_case(("name", "role"), ROLES)
def test_a_run_has_no_methods_of_other_roles(name: str, role: str) -> None:
    spec, group = spec_of(name, role), Mock(layout=ALONE)
    for transfers in (spec.transfers, None):
        handle = ModelHandle(group, role, spec.worker_class, transfers=transfers)
        assert not [method for method in ALL - METHODS.get(name, RL)[role] if hasattr(handle, method)]


@pytest.mark.parametrize(
    ("name", "role", "method", "known"),
    [
        ("SafeRLHF", "reward", "compute_cost", "did you mean compute_reward?"),
        ("SafeRLHF", "cost", "compute_reward", "did you mean compute_cost?"),
        ("RewardModel", "reward", "update_cost", "expected begin_checkpoint, counters, end_checkpoint, "),
    ],
)
def test_the_refusal_names_role_and_method(name: str, role: str, method: str, known: str) -> None:
    model = Tracer(rows=1, widths={}).model(role, spec_of(name, role), "all", ALONE)
    with pytest.raises(AttributeError, match=re.escape(f"{role} has no method {method}; {known}")):
        getattr(model, method)


def test_an_own_reward_model_may_give_costs_too() -> None:
    class Both(RewardWorker):
        @register(THREE_D_PROTO, adds=("costs",))
        def compute_cost(self, batch: Batch) -> Fields:
            return {"costs": self.scores(batch)}

    own = replace(spec_of("GRPO", "reward"), worker_class=Both)
    assert own.transfers.keys() == {"compute_reward", "compute_cost"}
