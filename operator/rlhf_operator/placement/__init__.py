"""Where the models of a job will live: the auto-mapper, asked about the nodes that there are.

It reads nothing but the snapshot and the config.json of models that come with an installed package.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Literal

from rlhf_api.job import Job
from rlhf_api.problems import SpecError
from rlhf_api.status import MappedPlacement
from rlhf_mapper.mapping import DeviceMapping, Infeasible
from rlhf_operator.placement.devices import Devices, devices_for
from rlhf_operator.placement.mapped import NoPlaceError, auto, have_room, manual
from rlhf_operator.placement.shapes import origins_of
from rlhf_operator.placement.told import told
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import Snapshot

Reason = Literal["Mapped", "ManualPlacement", "ShapesUnknown", "NoFeasiblePlacement", "InvalidPlacement", "MapperError"]
FORMAT = 1
"""Of what input_hash covers; another one makes every job be mapped anew on its next attempt."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """The answer, for the condition Mapped."""

    mapping: MappedPlacement | None
    """None where there is no place; the message says what would do."""
    reason: Reason
    message: str


def placed(job: Job, snapshot: Snapshot, settings: Settings) -> Placed:
    """Where the models of a job live in an attempt that begins now."""
    try:
        devices = devices_for(job, snapshot, settings)
        by_hand = job.spec.placement.mode == "Manual"
        answer, without = (manual if by_hand else auto)(job, devices, snapshot, settings)
        if isinstance(answer, Infeasible):
            return Placed(mapping=None, reason="NoFeasiblePlacement", message=_nothing_fits(answer, devices))
        mapping = told(job, answer, input_hash(job, snapshot, settings))
    except NoPlaceError as error:
        return Placed(mapping=None, reason="NoFeasiblePlacement", message=str(error))
    except SpecError as error:
        message = "; ".join(str(problem).removeprefix(f"{job.name}: ") for problem in error.problems)
        return Placed(mapping=None, reason="InvalidPlacement", message=message)
    except Exception as error:  # noqa: BLE001 - a fault in here is one job's trouble, not the operator's
        return Placed(mapping=None, reason="MapperError", message=f"{type(error).__name__}: {error}"[:1000])
    reason: Reason = "ManualPlacement" if by_hand else "ShapesUnknown" if without else "Mapped"
    return Placed(mapping=mapping, reason=reason, message=_sentence(answer, devices, without))


def input_hash(job: Job, snapshot: Snapshot, settings: Settings) -> str:
    """Digests of all that the answer depends on: `<spec and where models come from>-<matching nodes by group>`."""
    spec = job.spec
    matters = {
        "format": FORMAT,
        "spec": {
            name: getattr(spec, name).model_dump(mode="json")
            for name in ("algorithm", "models", "data", "rollout", "training", "resources", "placement")
        },
        "worker": spec.runtime.worker.memory or settings.worker.memory,
        "origins": origins_of(job, snapshot),
    }
    return f"{_digest(matters)}-{_digest(asdict(devices_for(job, snapshot, settings)))}"


def still_fits(job: Job, have: MappedPlacement, snapshot: Snapshot, settings: Settings) -> bool:
    """Whether only the nodes differ from those that a mapping was made for, if anything, and these have room for it."""
    devices = devices_for(job, snapshot, settings)
    asked, _, _ = input_hash(job, snapshot, settings).partition("-")
    if not have.input_hash.startswith(f"{asked}-") or have.device != devices.device:
        return False
    if have.device == "CPU" or not devices.seen:  # one node may have several worker pods
        return bool(devices.machines)
    return have_room(devices, [(pool.nodes, pool.slots_per_node, pool.gpu) for pool in have.pools])


def _digest(matters: object) -> str:
    return hashlib.sha256(json.dumps(matters, sort_keys=True).encode()).hexdigest()[:32]


def _nothing_fits(answer: Infeasible, devices: Devices) -> str:
    return f"no mapping onto {devices} fits: {answer}"


def _sentence(answer: DeviceMapping, devices: Devices, without: str) -> str:
    pools = "; ".join(f"pool {pool.name}: {answer.described(pool)}" for pool in answer.pools)
    unseen = "" if devices.seen else "; the nodes are not known, spec.resources was believed"
    if without:
        return f"{pools}{unseen}; not predicted: {without}"
    assert answer.prediction, "the mapper was asked"
    return f"{pools}{unseen}; a step is predicted to take {answer.prediction.step_seconds:.3g} s"
