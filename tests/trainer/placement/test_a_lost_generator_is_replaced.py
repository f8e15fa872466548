"""A rank of a rollout pool is killed: new ones take its place, nothing is lost or twice, and the trainers live on."""

import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from rlhf_api.names import Role
from rlhf_trainer.errors import CommunicationError
from rlhf_trainer.generation.vllm_engine import Response
from rlhf_trainer.hybrid_engine import hybrid_engine
from rlhf_trainer.meeting import Meeting
from rlhf_trainer.run import on_ray
from rlhf_trainer.tensor_slice import TensorSlice, WeightSlice
from rlhf_trainer.training.distributed import join_group
from tests.trainer.measured import SHARED
from tests.trainer.nccl_site.nccl_like import install
from tests.trainer.placement.light_ray import no_preparation
from tests.trainer.placement.sampler import PlainSampler
from tests.trainer.placement.sweep import Outcome, pools_of, run, small_job

TRAINERS, GENERATORS, STEPS = 2, 2, 4
NEW = ("bytes/reshard", "sync_bytes/")
"""What new generators change: they get all weights."""


class Mortal(PlainSampler):
    """Kills its process, the last of the generators, the first so many times that it does something."""

    def __init__(self, *given: Any, marks: Path, dies_in: str, number: int, times: int, **named: Any) -> None:
        """marks: folder with a file for each death; number: of the call of that method in a process, from 1."""
        super().__init__(*given, **named)
        self._marks, self._dies_in, self._times = marks, dies_in, times
        self._left = number

    def _reach(self, method: str) -> None:
        self._left -= method == self._dies_in
        deaths = len(list(self._marks.iterdir()))
        if self._left == 0 and deaths < self._times and dist.get_rank() == GENERATORS - 1:
            (self._marks / str(deaths)).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], **options: Any) -> list[Response]:
        self._reach("generate")
        return super().generate(prompts, seeds, **options)

    def load_weights(self, pieces: Iterable[WeightSlice], holds: Mapping[str, TensorSlice]) -> dict[str, Tensor]:
        """Dies when some of the weights are there."""

        def reached() -> Iterable[WeightSlice]:
            pieces_left = iter(pieces)
            yield next(pieces_left)
            self._reach("load_weights")
            yield from pieces_left

        return super().load_weights(reached(), holds)


def outcome(
    folder: Path,
    folders: Mapping[Role, str],
    *,
    staleness: int,
    times: int,
    dies_in: str = "generate",
    number: int = 1,
    partial_mode: str | None = None,
    prepare: Callable[[], None] = no_preparation,
) -> Outcome:
    """PPO, in which a generator dies so many times."""
    (folder / "marks").mkdir()
    changes = {
        "rollout": {"maxStaleness": staleness, "weightSync": "Delta", "partial": partial_mode},
        "training": {"totalSteps": STEPS, "promptBatchSize": 4, "callDeadlineSeconds": 60},
    }
    pools = pools_of([["actor", "critic", "reference", "reward"], ["rollout"]], slots=(TRAINERS, GENERATORS))
    sampler = partial(Mortal, marks=folder / "marks", dies_in=dies_in, number=number, times=times)
    found = run(folder, small_job(folder, "PPO", folders, pools, changes=changes), folders, sampler, prepare)
    assert len(list((folder / "marks").iterdir())) == times
    return found


@pytest.fixture(scope="module")
def undisturbed(folders: Mapping[Role, str], tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return outcome(tmp_path_factory.mktemp("undisturbed"), folders, staleness=0, times=0)


def measured(record: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in record.items() if not name.startswith((*SHARED, *NEW))}


def replacements(found: Outcome) -> int:
    """How often the generators were replaced; the trainers never are."""
    times = int(sum(record["rollout_replacements"] for record in found.records))
    assert found.processes == TRAINERS + GENERATORS * (1 + times)
    assert found.ended == GENERATORS * times
    return times


def require_same(found: Outcome, undisturbed: Outcome) -> None:
    assert [measured(record) for record in found.records] == [measured(record) for record in undisturbed.records]
    assert all(found.weights[name].equal(weight) for name, weight in undisturbed.weights.items())


@pytest.mark.parametrize(
    ("dies_in", "number", "times"),
    [
        pytest.param("generate", 2, 1, id="during generation"),
        pytest.param("load_weights", 2, 1, id="during an exchange of weights", marks=pytest.mark.slow),
        pytest.param("generate", 1, 3, id="three times in a row", marks=pytest.mark.slow),
    ],
)
def test_the_losses_are_those_of_a_run_without_it(
    folders: Mapping[Role, str], undisturbed: Outcome, tmp_path: Path, dies_in: str, number: int, times: int
) -> None:
    """To the bit, as are the weights; each step is there once."""
    found = outcome(tmp_path, folders, staleness=0, dies_in=dies_in, number=number, times=times)
    assert replacements(found) == times
    require_same(found, undisturbed)
    assert replacements(undisturbed) == 0


@pytest.mark.parametrize(
    ("dies_in", "number"),
    [
        pytest.param("generate", 3, id="during generation", marks=pytest.mark.slow),
        pytest.param("load_weights", 2, id="during an exchange of weights", marks=pytest.mark.slow),
    ],
)
def test_what_was_generated_ahead_is_generated_again(
    folders: Mapping[Role, str], tmp_path: Path, dies_in: str, number: int
) -> None:
    """By newer weights: the responses of step 3, which are asked for in step 2."""
    found = outcome(tmp_path, folders, staleness=1, dies_in=dies_in, number=number, times=1)
    assert replacements(found) == 1
    assert [record["staleness"] for record in found.records] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("dies_in", "number"),
    [
        pytest.param("generate", 3, id="during generation", marks=pytest.mark.slow),
        pytest.param("load_weights", 2, id="during an exchange of weights", marks=pytest.mark.slow),
    ],
)
def test_responses_with_new_weights_are_generated_again(
    folders: Mapping[Role, str], tmp_path: Path, dies_in: str, number: int
) -> None:
    """An exchange that the actor has begun, in the middle of responses or not, is given up and made anew."""
    found = outcome(tmp_path, folders, staleness=2, dies_in=dies_in, number=number, times=1, partial_mode="Continue")
    assert replacements(found) == 1
    assert all(record["staleness"] <= 2 for record in found.records)


@pytest.mark.parametrize(
    ("staleness", "prepare"),
    [
        pytest.param(0, install, id="waited for", marks=pytest.mark.slow),
        pytest.param(2, install, id="ahead", marks=pytest.mark.slow),
        pytest.param(0, partial(install, sees_losses=True), id="over a network", marks=pytest.mark.slow),
    ],
)
def test_an_exchange_without_a_rank_is_aborted_on_nccl(
    folders: Mapping[Role, str], undisturbed: Outcome, tmp_path: Path, staleness: int, prepare: Callable[[], None]
) -> None:
    """Nothing there ends it but an abort; ahead: the controller waits for calls that are behind it on the trainers.

    Over a network NCCL's own watchdog sees the loss, and ends the group instead of the trainers.
    """
    found = outcome(tmp_path, folders, staleness=staleness, dies_in="load_weights", number=2, times=1, prepare=prepare)
    assert replacements(found) == 1
    assert len(found.records) == STEPS
    if not staleness:
        require_same(found, undisturbed)


def die_while_joining(marks: Path) -> None:
    """Have the last of the new generators end its process on its way to the group, once."""
    install()

    def joined(meeting: Meeting, rank: int, size: int, *given: Any) -> Any:
        if rank == size - 1 and len(list(marks.iterdir())) == 1:
            (marks / "joining").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return join_group(meeting, rank, size, *given)

    setattr(hybrid_engine, "join_group", joined)  # noqa: B010


@pytest.mark.slow
def test_a_group_that_a_new_rank_never_joins_is_given_up(
    folders: Mapping[Role, str], undisturbed: Outcome, tmp_path: Path
) -> None:
    """The trainers are in the group already, and wait."""
    prepare = partial(die_while_joining, tmp_path / "marks")
    found = outcome(tmp_path, folders, staleness=0, number=2, times=2, prepare=prepare)
    assert replacements(found) == 2
    require_same(found, undisturbed)


def test_one_that_always_dies_ends_the_attempt(
    folders: Mapping[Role, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_ray, "MAX_REPLACEMENTS", 1)
    with pytest.raises(CommunicationError, match=r"rank 1 of pool pool-1, process .* died in rollout.generate"):
        outcome(tmp_path, folders, staleness=0, times=2)
