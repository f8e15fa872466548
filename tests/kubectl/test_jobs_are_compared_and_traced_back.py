"""`kubectl rlhf compare` and `kubectl rlhf lineage`, on statuses as the operator writes them."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from rlhf_api.status import Attempt, MappedPlacement, MappedPool, Metric, Output, Progress, ReadInput, Status
from rlhf_kubectl.compare import sections, slot_hours, table
from rlhf_kubectl.kubectl import KubectlError
from rlhf_kubectl.lineage import WIDTH, tree
from rlhf_operator.snapshot import ObservedJob
from rlhf_operator.times import timestamp
from tests.kubectl.test_why_a_job_waits import NOW, job

FIRST, SECOND = f"sha256:{64 * 'a'}", f"sha256:{64 * 'b'}"
SFT = {
    "algorithm": {"name": "SFT"},
    "models": {"actor": {"uri": "hf://org/base", "optimizer": {"learningRate": 0.25}}},
    "data": {"train": {"uri": "package://rlhf_examples/helpful/train.jsonl"}},
    "training": {"totalSteps": 4, "batchSize": 8},
}


def ago(hours: float) -> str:
    return timestamp(NOW - timedelta(hours=hours))


def made(name: str, spec: dict[str, Any], **fields: Any) -> ObservedJob:
    return replace(job(Status(**fields)), name=name, spec=spec)


def output(name: str, digest: str) -> Output:
    return Output(uri=f"pvc://{name}-output/{name}/model", digest=digest)


def shown(what: Any, width: int = 200) -> str:
    console = Console(file=StringIO(), width=width, highlight=False)
    console.print(what, soft_wrap=True)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


@pytest.fixture
def two() -> list[ObservedJob]:
    """Two jobs that differ in the learning rate, the data at one address, and what they took."""
    pool = MappedPool(name="all", models=("actor",), nodes=1, slots_per_node=4)
    mapping = MappedPlacement(
        input_hash="x", device="GPU", slots=4, gpus=4, pools=(pool,), sizes=(), price_per_hour=8.0
    )
    attempts = (
        Attempt(attempt=1, start_time=ago(5), end_time=ago(4), slots=8, outcome="Failed"),
        Attempt(attempt=2, start_time=ago(3), end_time=ago(1), slots=4, outcome="Succeeded"),
    )
    fields: dict[str, Any] = {"phase": "Succeeded", "start_time": ago(5), "completion_time": ago(1), "mapping": mapping}
    read = ReadInput(name="data.train", uri=SFT["data"]["train"]["uri"], digest=FIRST)  # type: ignore[index]
    metrics = Metric(name="loss/sft", value="2.5"), Metric(name="entropy", value="1")
    one = made("one", SFT, **fields, attempts=attempts, metrics=metrics, inputs=(read,))
    faster = {**SFT, "models": {"actor": {"uri": "hf://org/base", "optimizer": {"learningRate": 0.5}}}}
    status = replace(one, status=one.status.model_copy(update={"mapping": None})).status
    changes = {
        "phase": "Running",
        "completion_time": None,
        "attempts": (Attempt(attempt=3, start_time=ago(0.5), slots=2),),
        "metrics": (Metric(name="loss/sft", value="2"), Metric(name="entropy", value="1"), Metric(name="x", value="?")),
        "inputs": (read.model_copy(update={"digest": SECOND}),),
        "progress": Progress(step=2, total_steps=4, stage="SFT"),
    }
    return [one, replace(one, name="two", spec=faster, status=status.model_copy(update=changes))]


def test_two_jobs_stand_side_by_side(two: list[ObservedJob]) -> None:
    figures, values, settings = sections(two, NOW)
    assert {row.name: row.values for row in figures} == {
        "status": ["Succeeded", "Running"],
        "steps": ["", "2 of 4"],
        "median step": ["", ""],
        "in all": ["4 h 00 min", "5 h 00 min"],
        "slots": ["16 GPU hours", "1 slot hours, since attempt 3"],
        "cost": ["32", ""],
    }
    assert values == [("loss/sft", ["2.5", "2"], "\N{MINUS SIGN}0.5")]
    rows = {row.name: row.values for row in settings}
    assert rows == {
        "spec.models.actor.optimizer.learningRate": ["0.25", "0.5"],
        "inputs.data.train": [FIRST, SECOND],
    }
    assert slot_hours(two[0].status, NOW) == pytest.approx(16)
    assert shown(table(two, NOW)).splitlines()[0].split() == ["one", "two", "change"]


def test_a_spec_that_is_not_valid_is_compared_as_it_stands(two: list[ObservedJob]) -> None:
    *_, settings = sections([two[0], replace(two[1], spec={"algorithm": {"name": "Odd"}})], NOW)
    assert ["SFT", "Odd"] in [row.values for row in settings]


@pytest.fixture
def family() -> list[ObservedJob]:
    """SFT of a base model, PPO of it, and DPO of both; SFT was made again after PPO had read it."""
    base = ReadInput(name="models.actor", uri="hf://org/base", revision="0123456789abcdef")
    sft = made("sft", SFT, inputs=(base,), output=output("sft", SECOND))
    read = ReadInput(name="models.actor", uri="pvc://sft-output/sft/model", job="sft", digest=FIRST)
    gone = ReadInput(name="models.reward", uri="pvc://rm-output/rm/model", job="rm", digest=FIRST)
    ppo = made("ppo", {"algorithm": {"name": "PPO"}}, inputs=(read, gone), output=output("ppo", FIRST))
    taken = ReadInput(name="models.actor", uri="pvc://ppo-output/ppo/model", digest=FIRST)
    return [sft, ppo, made("dpo", {"algorithm": {"name": "DPO"}}, phase="Queued", inputs=(taken,))]


def test_a_model_is_traced_back_and_forth(family: list[ObservedJob]) -> None:
    lines = [line.strip("│├└─ ") for line in shown(tree(family, "ppo")).splitlines()]
    assert lines == [
        "ppo (PPO) made pvc://ppo-output/ppo/model, sha256:aaaaaaaaaaaa",
        "made from",
        "models.actor: pvc://sft-output/sft/model, sha256:aaaaaaaaaaaa; the job has made something else since",
        "sft (SFT) made pvc://sft-output/sft/model, sha256:bbbbbbbbbbbb",
        "models.actor: hf://org/base at 0123456789ab",
        "models.reward: pvc://rm-output/rm/model, sha256:aaaaaaaaaaaa; the job is gone",
        "read by",
        "models.actor",
        "dpo (DPO) is Queued",
    ]
    assert shown(tree(family, "pvc://ppo-output/ppo/model")) == shown(tree(family, "ppo"))


def test_jobs_that_read_each_other_end_the_tree() -> None:
    """A name may be used again, so statuses of jobs may form a circle."""
    read = {name: ReadInput(name="models.actor", uri=f"job://{name}", job=name) for name in "ab"}
    circle = [made(name, {}, inputs=(read[other],)) for name, other in ("ab", "ba")]
    assert shown(tree(circle, "a")).count("b (") == 2, "once in each direction"


def test_a_job_that_is_read_twice_is_shown_once() -> None:
    """Each round of an iterative DPO has the last one as its actor and as its reference."""
    rounds = [made("r0", SFT, output=output("r0", FIRST))]
    for number in range(1, 30):
        before = f"r{number - 1}"
        uri = output(before, FIRST).uri
        read = tuple(ReadInput(name=f"models.{role}", uri=uri, job=before) for role in ("actor", "reference"))
        rounds.append(made(f"r{number}", SFT, inputs=read, output=output(f"r{number}", FIRST)))
    assert len(shown(tree(rounds, "r29"), WIDTH).splitlines()) == 2 + 29 * 4 + 1
    skipping = [
        replace(
            each,
            status=each.status.model_copy(
                update={
                    "inputs": tuple(
                        ReadInput(name="models.actor", uri=output(other.name, FIRST).uri, job=other.name)
                        for other in rounds[:place]
                    )
                }
            ),
        )
        for place, each in enumerate(rounds)
    ]
    assert len(shown(tree(skipping, "r0"), WIDTH).splitlines()) < 1000


def test_a_name_that_no_status_has_is_told(family: list[ObservedJob]) -> None:
    with pytest.raises(KubectlError, match="no status of a job names pp: did you mean ppo"):
        tree(family, "pp")
