"""Each algorithm's step, run with its workers' declarations alone: no field is read that nobody has added."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from rlhf_api.spec.algorithm_table import ALGORITHMS
from rlhf_api.spec.algorithms import PolicyGradient
from rlhf_trainer.run.worker_specs import workers_of
from rlhf_trainer.types import HasFields, Transfer, transfers_of
from rlhf_trainer.workers.advantage import AdvantageWorker, advantage_transfers
from rlhf_trainer.workers.critic import CriticWorker
from rlhf_trainer.workers.data import batch_fields
from tests.each import each_case


@dataclass(frozen=True, kw_only=True)
class Names(HasFields[str]):
    """A batch of which only the fields' names are known: name -> the call that added it."""

    step: int = 1


class Declared:
    """A model whose methods do what their marks say, and are written down."""

    def __init__(self, name: str, marks: Mapping[str, Transfer], calls: list[str]) -> None:
        for method, transfer in marks.items():
            setattr(self, method, partial(self._call, f"{name}.{method}", transfer, calls))

    @staticmethod
    def _call(name: str, transfer: Transfer, calls: list[str], batch: Names, **options: Any) -> Names | None:
        missing = set(transfer.reads) - batch.fields.keys()
        assert not missing, f"{name} reads {missing}"
        calls.append(name + (f"({options})" if options else ""))
        return batch.with_fields(dict.fromkeys(transfer.adds, name)) if transfer.adds is not None else None


def marks_of(role: str, worker_class: type, algorithm: type) -> dict[str, Transfer]:
    """The marks of a worker; those of a critic follow from its role, and of an advantage from its parameters."""
    if worker_class is CriticWorker:
        return transfers_of(worker_class, {"setting": SimpleNamespace(role=role, fuses_updates=False)})
    if worker_class is not AdvantageWorker:
        return transfers_of(worker_class)
    assert issubclass(algorithm, PolicyGradient)
    return advantage_transfers(algorithm)


def calls_of(name: str, *, has_pretrain: bool = False, without: tuple[str, ...] = ()) -> list[str]:
    """The calls that one step of an algorithm makes."""
    algorithm = ALGORITHMS[name]
    calls: list[str] = []
    workers = workers_of(algorithm).items()
    models = {name: Declared(name, marks_of(name, each, algorithm), calls) for name, each in workers}
    fields = ("layer",) if algorithm.data == "layers" else batch_fields(algorithm, has_pretrain=has_pretrain)
    loaded = Names(fields=dict.fromkeys(fields, "data"))
    algorithm.step(loaded, **{name: model for name, model in models.items() if name not in without})
    return calls


@each_case("name", ALGORITHMS)
def test_every_field_that_is_read_was_added_before(name: str) -> None:
    asked = {call.partition(".")[0] for call in calls_of(name)}
    assert asked == set(ALGORITHMS[name].parameters)


def test_safe_rlhf_with_one_critic_and_ppo_with_pretraining() -> None:
    assert "cost_critic.update_critic" not in calls_of("SafeRLHF", without=("cost_critic",))
    assert calls_of("PPO", has_pretrain=True) == calls_of("PPO")


def test_safe_rlhf_is_ppo_and_what_costs() -> None:
    ppo, safe = (calls_of(name) for name in ("PPO", "SafeRLHF"))
    assert [call for call in safe if call not in ppo] == [
        "cost_critic.compute_values",
        "cost.compute_cost",
        "cost_critic.update_critic",
    ]
    assert [call for call in safe if call in ppo] == ppo


def test_remax_generates_and_scores_twice() -> None:
    calls = calls_of("ReMax")
    assert calls.count("reward.compute_reward") == 2
    assert [call for call in calls if "generate" in call] == [
        "actor.generate_sequences",
        "actor.generate_sequences({'do_sample': False})",
    ]


@each_case("name", ALGORITHMS)
def test_a_worker_class_is_sent_to_other_processes_by_its_name(name: str) -> None:
    """Else a copy of its module's names would go along, the recorder of measurements among them."""
    for each in workers_of(ALGORITHMS[name]).values():
        assert pickle.loads(pickle.dumps(each)) is each
