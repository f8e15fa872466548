"""Stands where Ray would, for sweeps: a worker is a forked process, and a folder is the object store.

Only what the controller asks of Ray is here. What runs on it is the product: pools, worker groups, slot processes,
batches of references, torch.distributed by torchrun's contract. Bytes in the controller are not counted.
"""

from __future__ import annotations

import itertools
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rlhf_trainer.controller import call_log, resource_pool
from rlhf_trainer.workers import rollout
from tests.trainer.placement.sampler import PlainSampler
from tests.trainer.ranks import FORK_SERVER

LOOK_AGAIN_SECONDS = 0.001
CALL_SECONDS, BESIDE_SECONDS = 0.002, 0.01
"""Seconds after which a worker looks for its next call, and for one beside: many workers share few cores."""
SLOTS = 64
BESIDE = "beside"


@dataclass(frozen=True)
class Reference:
    """An object that is or will be a file."""

    path: Path

    def put(self, value: object) -> None:
        """Write the value; the file appears whole."""
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_bytes(pickle.dumps(value))
        unfinished.rename(self.path)

    def get(self) -> Any:
        """The value; an error is raised as Ray does it, that of a worker in a RayTaskError."""
        ok, value = pickle.loads(self.path.read_bytes())
        if ok:
            return value
        raise value if isinstance(value, ray.exceptions.RayError) else ray.exceptions.RayTaskError("", "", value)


def no_preparation() -> None:
    """Nothing comes first."""


class LightRay:
    """Actors and objects in a folder of their own; `patched` puts it in Ray's place."""

    def __init__(
        self,
        folder: Path,
        sampler: Callable[..., PlainSampler] = PlainSampler,
        prepare: Callable[[], None] = no_preparation,
    ) -> None:
        """sampler: stands where vLLM would, in every worker; prepare: called first there."""
        self._folder, self._sampler, self._prepare = folder, sampler, prepare
        self._numbers = itertools.count()
        self.processes: list[Any] = []
        self._makers: dict[Path, Actor] = {}
        """Of the objects that are not there yet."""

    @contextmanager
    def patched(self) -> Iterator[None]:
        """The controller finds this where it looks for Ray; no process is left when the block ends."""
        self._folder.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            for name in ("remote", "get", "wait", "kill"):
                patch.setattr(ray, name, getattr(self, name))
            patch.setenv("OMP_NUM_THREADS", "1")
            patch.setattr(ray, "cluster_resources", lambda: {"CPU": SLOTS})
            patch.setattr(resource_pool, "placement_group", lambda *_, **__: SimpleNamespace(wait=lambda _: True))
            patch.setattr(resource_pool, "remove_placement_group", lambda _: None)
            meter = SimpleNamespace(watching=nullcontext, read=lambda: 0)
            patch.setattr(call_log, "PayloadMeter", lambda: meter)
            try:
                yield
            finally:
                for process in self.processes:
                    process.kill()

    def new(self, maker: Actor) -> Reference:
        reference = Reference(self._folder / f"object-{next(self._numbers)}")
        self._makers[reference.path] = maker
        return reference

    def is_there(self, reference: Reference) -> bool:
        """Whether an object is made, or never will be: then it is the error that Ray gives."""
        if reference.path not in self._makers:
            return True
        has_ended = not self._makers[reference.path].process.is_alive()
        if not reference.path.exists():
            if not has_ended:
                return False
            reference.put((False, ray.exceptions.RayActorError()))
        del self._makers[reference.path]
        return True

    def remote(self, **_: Any) -> Any:
        """`ray.remote(**options)(Class)`: what makes actors."""
        return lambda actor_class: SimpleNamespace(
            options=lambda **options: SimpleNamespace(remote=partial(self._start, actor_class, options))
        )

    def _start(self, actor_class: type, options: Mapping[str, Any], **arguments: Any) -> Actor:  # noqa: ARG002
        """Start the process of an actor; options: those that Ray would get."""
        actor = Actor(self, self._folder / f"actor-{next(self._numbers)}")
        args = (actor.inbox, actor.beside.inbox, actor_class, arguments, self._sampler, self._prepare)
        # the test's own process may have threads, after which torch refuses to train in a fork
        process: Any = FORK_SERVER.Process(target=serve, args=args, daemon=True)
        process.start()
        self.processes.append(process)
        actor.process = actor.beside.process = process
        return actor

    @staticmethod
    def kill(actor: Actor) -> None:
        actor.process.kill()
        actor.process.join()

    def get(self, references: Any, timeout: float | None = None) -> Any:
        """`ray.get`."""
        wanted = [references] if isinstance(references, Reference) else list(references)
        _, late = self.wait(wanted, num_returns=len(wanted), timeout=timeout)
        if late:
            raise ray.exceptions.GetTimeoutError
        values = [reference.get() for reference in wanted]
        return values[0] if isinstance(references, Reference) else values

    def wait(
        self, references: Sequence[Reference], *, num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Reference], list[Reference]]:
        """`ray.wait`: (those that are there, the others)."""
        until = time.monotonic() + (1e9 if timeout is None else timeout)
        while True:
            there = [reference for reference in references if self.is_there(reference)][:num_returns]
            if len(there) >= num_returns or time.monotonic() >= until:
                return there, [reference for reference in references if reference not in there]
            time.sleep(LOOK_AGAIN_SECONDS)


class Actor:
    """Handle of a worker: `actor.method.remote(...)` and `actor.method.options(...).remote(...)` return references."""

    process: Any

    def __init__(self, light: LightRay, inbox: Path, *, is_beside: bool = False) -> None:
        self._light, self.inbox = light, inbox
        self._calls = itertools.count()
        inbox.mkdir()
        self.beside = self if is_beside else Actor(light, inbox / BESIDE, is_beside=True)
        """For the calls of concurrency groups, which another thread runs."""

    def __getattr__(self, method: str) -> Any:
        send = partial(self._send, method)

        def options(num_returns: int = 1, concurrency_group: str = "") -> SimpleNamespace:
            actor = self.beside if concurrency_group else self
            return SimpleNamespace(remote=partial(actor._send, method, num_returns))

        return SimpleNamespace(remote=partial(send, 1), options=options)

    def _send(self, method: str, num_returns: int, *arguments: Any, **named: Any) -> Any:
        references = [self._light.new(self) for _ in range(num_returns)]
        Reference(self.inbox / str(next(self._calls))).put((method, arguments, named, references))
        return references[0] if num_returns == 1 else references


def resolved(argument: Any) -> Any:
    """An argument, or the value that it refers to; waits until that is there."""
    if not isinstance(argument, Reference):
        return argument
    while not argument.path.exists():
        time.sleep(LOOK_AGAIN_SECONDS)
    return argument.get()


def serve(inbox: Path, beside: Path, actor_class: type, arguments: Any, sampler: Any, prepare: Any) -> None:
    """The process of an actor, with a plain sampler in vLLM's place."""
    prepare()
    setattr(rollout, "GenerationEngine", sampler)  # noqa: B010
    actor = actor_class(**arguments)
    threading.Thread(target=answer, args=(beside, actor, BESIDE_SECONDS), daemon=True).start()
    answer(inbox, actor, CALL_SECONDS)


def answer(inbox: Path, actor: Any, look_again_seconds: float) -> None:
    """Run the calls that come, one at a time, in order."""
    for number in itertools.count():
        letter = inbox / str(number)
        while not letter.exists():
            time.sleep(look_again_seconds)
        method, given, named, references = pickle.loads(letter.read_bytes())
        try:
            value = getattr(actor, method)(*map(resolved, given), **named)
        except BaseException as error:  # noqa: BLE001 it is told to whoever asks
            error.add_note(traceback.format_exc())
            for reference in references:
                reference.put((False, error))
            continue
        for reference, part in zip(references, value if len(references) > 1 else [value], strict=True):
            reference.put((True, part))
