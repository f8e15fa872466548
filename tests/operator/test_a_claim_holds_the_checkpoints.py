"""The claim of a run folder has room for the checkpoints that are there at once, or the job is told before."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_api.status import Status
from rlhf_operator.placement.claim_size import claim_size
from rlhf_operator.snapshot import ObservedClaim
from tests.each import each_case
from tests.operator.rendered import A100, changed, made, nodes, snapshot
from tests.operator.simulated import SFT, World

LLAMA = {"name": "llama-2-7b"}
OF_7B = {"resources.slotsPerNode": 8, **{f"models.{role}.shape": LLAMA for role in ("actor", "critic", "reward")}}
GPUS = nodes(2, 8, A100)
NEW = Status()
BY_HAND = 12 * 3 * (6_738_415_616 + 6_607_347_712) / 2**30
"""Gi of three checkpoints of an actor and a critic, which has one output and not 32,000."""


def size(changes: dict[str, Any]) -> str:
    """Of the claim that is made for PPO of the example."""
    claim = made(changed("helpful-ppo", changes), GPUS)["PersistentVolumeClaim"]
    return str(claim["spec"]["resources"]["requests"]["storage"])


def test_a_claim_is_made_as_large_as_the_checkpoints_need() -> None:
    assert size({}) == "50Gi", "what the chart says is enough for a small model"
    assert int(size(OF_7B).removesuffix("Gi")) == pytest.approx(1.1 * BY_HAND, abs=1)
    assert int(size({**OF_7B, "checkpoint.keepLast": 1}).removesuffix("Gi")) == pytest.approx(
        1.1 * BY_HAND * 2 / 3, abs=1
    )


def test_checkpoints_in_a_bucket_leave_the_claim_to_the_model() -> None:
    twice = 2 * 4 * 6_738_415_616 / 2**30
    assert int(size({**OF_7B, "checkpoint.storage": "s3://bucket/x"}).removesuffix("Gi")) == pytest.approx(
        1.1 * twice, abs=1
    )


def world(claim: ObservedClaim, *, status: Status = NEW, **checkpoint: Any) -> World:
    """SFT of a 7B model; what it may take is not a matter of nodes here."""
    models = {"actor": {**SFT["models"]["actor"], "shape": LLAMA}}
    spec = {**SFT, "models": models, "checkpoint": checkpoint}
    found = World(spec=spec, claims={claim.name: claim}, status=status)
    found.settle()
    return found


@pytest.mark.parametrize(
    ("claim", "checkpoint"),
    [
        (ObservedClaim(name="mine", size="50Gi"), {"storage": "pvc://mine/runs"}),
        (ObservedClaim(name="job-output", size="50Gi", owned=True), {}),
    ],
    ids=["its own", "the one that was made"],
)
def test_a_claim_that_is_too_small_is_told_what_would_do(claim: ObservedClaim, checkpoint: dict[str, Any]) -> None:
    small = world(claim, **checkpoint)
    accepted = next(each for each in small.status.conditions if each.type == "Accepted")
    assert (small.phase, accepted.reason) == ("Pending", "ClaimTooSmall")
    assert accepted.message == (
        f"spec.checkpoint.storage: PersistentVolumeClaim {claim.name} has 50Gi, but 226Gi are taken by the 2 "
        "checkpoints that are kept and a new one; give it 249Gi, or lower spec.checkpoint.keepLast"
    )
    small.claims[claim.name] = ObservedClaim(name=claim.name, size="249Gi", owned=claim.owned)
    small.settle()
    assert next(each for each in small.status.conditions if each.type == "Accepted").status == "True"


def test_a_job_that_has_begun_in_a_claim_goes_on_in_it() -> None:
    begun = world(ObservedClaim(name="mine", size="50Gi"), status=Status(attempt=1), storage="pvc://mine")
    assert next(each for each in begun.status.conditions if each.type == "Accepted").status == "True"


@each_case(
    ("size", "checkpoint"),
    [
        ("", {"storage": "pvc://mine"}),
        ("0.23Ti", {"storage": "pvc://mine"}),
        ("152Gi", {"storage": "pvc://mine", "keepLast": 1}),
        ("1Mi", {"storage": "s3://bucket"}),
    ],
    ids=["a size that nobody can read", "large enough", "fewer are kept", "another place"],
)
def test_other_claims_are_taken(size: str, checkpoint: dict[str, Any]) -> None:
    taken = world(ObservedClaim(name="mine", size=size), **checkpoint)
    assert next(each for each in taken.status.conditions if each.type == "Accepted").status == "True"


def test_nothing_is_asked_of_a_claim_where_no_shape_is_known() -> None:
    job = changed("helpful-ppo", {"models.actor.uri": "hf://a/b"})
    assert claim_size(job, snapshot(job, GPUS)) == "0Gi"
