"""Faults of a run, and what each costs: the list behind `make test-chaos`.

`python -m tests.trainer.chain.faults` prints it as a table; docs/troubleshooting.md says the same for users.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rlhf_api.exit_codes import ExitCode
from tests.trainer.chain.mistakes import MISTAKES, PPO, matches

STEP, LAST_STEP = 3, 3
"""In which a fault happens by default, and the last one."""
MANIFEST = (
    PPO.replace("resources: {slotsPerNode: 1}", "checkpoint: {everySteps: 1}")
    .replace("totalSteps: 1", f"totalSteps: {LAST_STEP}")
    .replace("package://rlhf_examples/helpful/train.jsonl", "file://train.jsonl")
) + "  placement: {mode: Manual, pools: [{name: all, models: [actor, critic, reference, reward], slotsPerNode: 2}]}\n"
JOB = "ppo"
IN_A_STEP = ("generation", "reshard", "scoring", "update", "checkpoint")
AGAIN = "The same command, or the next attempt, goes on from the last whole checkpoint."
KILLED = -9


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that happens to a run, at several places, and what the user is told."""

    kind: str
    """As `fault_site` knows it."""
    places: tuple[tuple[str, int], ...]
    """(phase, step)."""
    seconds: int
    """From the fault until the last process of the run has ended, at most; `make test-chaos` prints what it took."""
    code: int
    sentence: str = ""
    """Stands on stderr after `error: `; `…` is anything. Empty where nobody is left to say it."""
    then: str = AGAIN
    sets: tuple[str, ...] = ()
    on_nccl: bool = False
    """Whether the ranks are joined by the backend that ends as NCCL does (`nccl_site`)."""

    def is_told(self, errors: str) -> bool:
        """Whether stderr is the sentence and nothing else."""
        return matches(self.sentence and f"error: {self.sentence}\n", errors)


def at(*phases: str, steps: tuple[int, ...] = (STEP,)) -> tuple[tuple[str, int], ...]:
    """The phases of each of the steps."""
    return tuple((phase, step) for phase in phases for step in steps)


FAULTS: dict[str, Fault] = {
    "a worker is killed": Fault(
        kind="end the worker",
        places=at(*IN_A_STEP),
        seconds=5,
        code=ExitCode.COMMUNICATION,
        sentence=MISTAKES["a worker that dies"].sentence,
    ),
    "a worker is stopped (SIGSTOP)": Fault(
        kind="stop the worker",
        places=at("generation", "scoring", "update"),
        sets=("training.callDeadlineSeconds=60",),
        seconds=95,
        code=ExitCode.COMMUNICATION,
        sentence=MISTAKES["a worker that hangs"].sentence,
    ),
    "the controller is killed": Fault(kind="end the controller", places=at(*IN_A_STEP), seconds=10, code=KILLED),
    "Ray's GCS is killed": Fault(
        kind="end gcs_server",
        places=at("generation", "scoring", "update", "checkpoint"),
        seconds=10,
        code=ExitCode.ENVIRONMENT,
        sentence=MISTAKES["a Ray that ends"].sentence,
    ),
    "Ray's raylet is killed": Fault(
        kind="end raylet",
        places=at("generation", "scoring", "update"),
        seconds=10,
        code=ExitCode.ENVIRONMENT,
        sentence=MISTAKES["a Ray that ends"].sentence,
    ),
    "a worker has no memory": Fault(
        kind="no memory",
        places=at("generation", "scoring", "update"),
        seconds=5,
        code=ExitCode.OUT_OF_MEMORY,
        sentence=MISTAKES["a worker without memory"].sentence,
        then=f"{AGAIN} On a cluster that has micro-batches of half as many tokens.",
    ),
    "a weight becomes NaN": Fault(
        kind="no number",
        places=at("generation", "scoring", "update"),
        sets=("training.maxSkippedUpdates=0",),
        seconds=5,
        code=ExitCode.NUMERICS,
        sentence="ppo: spec.models.…: step 3: the … is nan, and 1 updates in a row failed, more than the 0 of …",
    ),
    "a checksum is wrong after the reshard": Fault(
        kind="wrong checksum",
        places=at("reshard", steps=(1, 2, 3)),
        seconds=5,
        code=ExitCode.NUMERICS,
        sentence="…: what rank … received of it is not what rank … sent (checksum)",
    ),
    "the disk is full in a checkpoint": Fault(
        kind="no disk",
        places=at("checkpoint", steps=(1, 2, 3)),
        seconds=5,
        code=ExitCode.ENVIRONMENT,
        sentence=MISTAKES["no disk space for a checkpoint"].sentence,
    ),
}
ON_NCCL = {
    "a worker is killed": 3,
    "a worker is stopped (SIGSTOP)": 95,
    "a worker has no memory": 2,
    "a checksum is wrong after the reshard": 2,
}
"""Faults that leave the other ranks in a collective, which on NCCL nothing but an abort ends -> their seconds."""
FAULTS |= {f"{name}, on NCCL": replace(FAULTS[name], on_nccl=True, seconds=ON_NCCL[name]) for name in ON_NCCL}
SERVICE_SECONDS, SERVICE_PHASES = 30, ("generation", "scoring", "update")


@dataclass(frozen=True, kw_only=True)
class Damage:
    """Something that happens to files between two runs."""

    ways: dict[str, Callable[[Path], object]]
    """Each does it to the folder of the manifest, in which `run` is the run folder."""
    code: int = ExitCode.OK
    """Of the next run."""
    sentence: str = ""
    goes_on_after: int
    """Step after which the run goes on that does."""
    then: str


def changed(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Writes a file of a folder anew."""

    def write(folder: Path) -> None:
        (folder / file).write_bytes(change((folder / file).read_bytes()))

    return write


NEWEST = "run/ppo/checkpoints/step-000002"
PARTS = ("actor/shard-0.safetensors", "actor/shard-1.safetensors", "critic/shard-1.safetensors")


def cut(content: bytes) -> bytes:
    return content[:-100]


def flipped(content: bytes) -> bytes:
    """With one bit flipped in the last tensor."""
    return content[:-5] + bytes([content[-5] ^ 16]) + content[-4:]


def edited(content: bytes) -> bytes:
    """The rows of a file, in the first of which a word is another."""
    first, *others = content.splitlines(keepends=True)
    return b"".join([first.replace(b': "', b': "Say: ', 1), *others])


def swapped(content: bytes) -> bytes:
    """The rows of a file, of which the first two have changed places."""
    first, second, *others = content.splitlines(keepends=True)
    return b"".join([second, first, *others])


def shortened(content: bytes) -> bytes:
    """The rows of a file without the first."""
    return b"".join(content.splitlines(keepends=True)[1:])


DAMAGES: dict[str, Damage] = {
    "a checkpoint is cut off": Damage(
        ways={part: changed(f"{NEWEST}/{part}", cut) for part in PARTS},
        goes_on_after=1,
        then="The run goes on from the checkpoint before it, or from the start; `rlhf checkpoints` says what is wrong.",
    ),
    "a bit of a checkpoint flips": Damage(
        ways={part: changed(f"{NEWEST}/{part}", flipped) for part in PARTS},
        code=ExitCode.NUMERICS,
        sentence=MISTAKES["a checkpoint that is damaged"].sentence,
        goes_on_after=1,
        then="It is never chosen again: the same command, or the next attempt, goes on from the one before.",
    ),
    "the data change between two attempts": Damage(
        ways={
            "a row is another": changed("train.jsonl", edited),
            "two rows change places": changed("train.jsonl", swapped),
            "a row is gone": changed("train.jsonl", shortened),
        },
        code=ExitCode.DATA,
        sentence=MISTAKES["data that change between two runs"].sentence,
        goes_on_after=2,
        then="Put the rows back, and the same command goes on; on a cluster the job fails.",
    ),
}


def table() -> str:
    """A row for each fault: where it happens, how soon it is found, how the run ends and what follows."""
    rows = [
        f"| {name} | {places(fault)} | {fault.seconds} s | {fault.code if fault.sentence else '-'} | "
        f"{f'`{fault.sentence}`' if fault.sentence else 'Nobody is left to say it.'} | {fault.then} |\n"
        for name, fault in FAULTS.items()
    ]
    rows += [
        f"| {name} | {', '.join(damage.ways)} | the next start | {int(damage.code) or '-'} | "
        f"{f'`{damage.sentence}`' if damage.sentence else '-'} | {damage.then} |\n"
        for name, damage in DAMAGES.items()
    ]
    return HEAD + "".join(rows)


def places(fault: Fault) -> str:
    """The places of a fault in words."""
    phases = list(dict.fromkeys(phase for phase, _ in fault.places))
    return ", ".join(phases) if len(phases) > 1 else f"{phases[0]} of {len(fault.places)} steps"


HEAD = """\
| what happens | where | found within | exit code | the sentence | then |
|---|---|---|---|---|---|
"""
"""Head of the table; `found within` is the time from the fault until the run has reported it and no process is left.

It is the longest of the places on two cores, rounded up. To ask a rank that hangs for its stack takes up to 30 seconds
after the deadline.
"""


if __name__ == "__main__":
    print(table(), end="")  # noqa: T201 it is what this is for
