"""Models that an algorithm's step is called with: the handles of a job's workers, some with replaced calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

from rlhf_api.job import Job
from rlhf_trainer.errors import CommunicationError

if TYPE_CHECKING:  # a graph of a step, and torchrun, need no Ray
    from rlhf_trainer.controller.dispatch import Streams

Handle: TypeAlias = Any  # its methods are the marked methods of a worker class, which may be the user's
Rows: TypeAlias = Any  # a batch of references on the controller, of tensors under torchrun, of shapes in a graph
Scorers = Sequence[Sequence[tuple[str, str]]]
"""Scoring calls (model, method) in other pools, for each generating call of a step in order."""
MAY_BE_LEFT_OUT = ("reference", "reward")
"""Models that a job may lack; each call of a missing model returns the batch unchanged."""


class RolloutPool:
    """Processes that generate responses outside of the actor's pool; the loss of one ends the attempt.

    A `ReplaceablePool` of `on_ray` replaces lost processes instead.
    """

    repeated_rows = 0
    """Number of rows that were generated again since the last reset to 0."""

    def calls(self) -> AbstractContextManager[None]:
        """Return a context for calls on these processes, and for calls that wait for them."""
        return nullcontext()

    def settle(self, step: int | None = None) -> None:
        """Wait for the calls made in `calls`, all or up to the last of `step`; CommunicationError if a rank is lost."""

    def gather(self) -> None:
        """Join the actor's ranks and all processes that get the actor's weights in one torch.distributed group."""

    def copy(self, responses: Rows) -> None:
        """Start to copy responses, once they are finished, to the controller's machine, which outlives generators."""

    def has_lost(self, responses: Rows) -> bool:  # noqa: ARG002
        """Whether finished responses are lost, as the machine that held them has gone."""
        return False

    def replace(self, error: CommunicationError) -> None:
        """Restart all processes, alive or dead; unfinished calls must be repeated. Raise `error` if that is no help."""
        raise error


class ApartRollout:
    """Generation calls of an actor whose responses are generated in another pool.

    Generators do not change the actor's state, so if one is lost, its calls are simply repeated.
    """

    def __init__(self, actor: Handle, rollout: Handle, pool: RolloutPool, *, interrupts: bool = False) -> None:
        """interrupts: whether generators get new weights in the middle of a batch, too (`rollout.partial`)."""
        self._actor, self._rollout, self._pool, self._interrupts = actor, rollout, pool, interrupts
        self._requests: dict[int, tuple[Rows, Mapping[str, object]]] = {}
        """Step -> (prompts, options of their generation), until the step has taken the responses."""
        self._responses: dict[int, Rows] = {}
        """Step -> batch with the requested responses, complete or still being generated."""
        self._settled: set[int] = set()
        """Steps whose responses are complete, so that the loss of a generator does not affect them."""

    def generate_ahead(self, batch: Rows, **options: object) -> None:
        """Send the newest weights to the generators, which generate the responses of `batch.step`, maybe in advance."""
        self._requests[batch.step] = batch, options
        self._call_until_done()

    def generate_sequences(self, batch: Rows, **options: object) -> Rows:
        """Return the responses that `generate_ahead` requested for this step; if it did not, request them now."""
        if batch.step not in self._requests:
            self.generate_ahead(batch, **options)
        self._call_until_done(batch.step)
        del self._requests[batch.step]
        return self._responses.pop(batch.step)

    def _call_until_done(self, step: int | None = None) -> None:
        """Make all pending generating calls, and wait for a step's responses; repeat both after a loss."""
        while True:
            try:
                self._make_calls()
                if step is None or self._has_responses(step):
                    return
            except CommunicationError as error:
                self._drop(self._responses.keys() - self._settled)
                self._pool.replace(error)

    def _has_responses(self, step: int) -> bool:
        """Wait for a step's responses and return True; drop them and return False if they are lost."""
        self._pool.settle(step)
        is_lost = self._pool.has_lost(self._responses[step])
        self._drop({step} if is_lost else ())
        return not is_lost

    def _drop(self, steps: Iterable[int]) -> None:
        """Drop the responses of steps, so that they are generated again."""
        for step in steps:
            self._settled.discard(step)
            self._pool.repeated_rows += self._responses.pop(step).size

    def _make_calls(self) -> None:
        """Send the newest weights to the generators, and then make the generating calls of all pending requests."""
        if not (steps := [step for step in self._requests if step not in self._responses]):
            return
        if not self._interrupts:
            self._pool.settle()
            self._settled = set(self._responses)
        self._pool.gather()
        with self._pool.calls():
            self._actor.send_weights()
            self._rollout.receive_weights()
        with self._pool.calls():
            for step in steps:
                batch, options = self._requests[step]
                self._responses[step] = self._rollout.generate_sequences(batch, **options)
                self._pool.copy(self._responses[step])


class StreamingRollout:
    """Generation call that has models of other pools score the first responses while further ones are generated."""

    def __init__(
        self, generate: Callable[..., Rows], models: Mapping[str, Handle], scorers: Scorers, streams: Streams
    ) -> None:
        """generate: `generate_sequences` of the actor; models: the handles of the worker groups."""
        self._generate, self._models, self._scorers, self._streams = generate, models, scorers, streams
        self._step = 0
        self._pending_scorers: list[Sequence[tuple[str, str]]] = []
        """Scoring calls for the generating calls that this step has still to make."""

    def generate_sequences(self, batch: Rows, **options: object) -> Rows:
        """Generate responses, and have each group of finished ones scored; an evaluation's batch is only generated."""
        if batch.step <= 0:
            return self._generate(batch, **options)
        if batch.step != self._step:
            self._step, self._pending_scorers = batch.step, list(self._scorers)
            self._streams.forget()
        # the step of a user's algorithm may make more generating calls than its recorded graph has
        scorers = self._pending_scorers.pop(0) if self._pending_scorers else ()
        batch = self._generate(batch, **options)
        for groups in self._streams.groups(batch):
            for model, method in scorers:
                self._models[model].call_on_groups(method, batch, groups)
        return batch


def with_calls(handle: Handle, **calls: Callable[..., object]) -> Handle:
    """Return a copy of a handle, or of a pool, in which the given functions replace the methods of the same names."""
    changed = object.__new__(type(handle))  # `copy` would look up methods that a stand-in lacks
    vars(changed).update(vars(handle) | calls)
    return changed


def connected(
    job: Job,
    handles: Mapping[str, Handle],
    pool: RolloutPool | None = None,
    *,
    scorers: Scorers = (),
    streams: Streams | None = None,
) -> dict[str, Handle]:
    """Return the models of a job: handles of its workers, some with calls replaced as the job's options require.

    pool: processes that generate outside of the actor's pool; scorers: calls on finished responses (`streams`).
    """
    models = dict(handles)
    if job.reference_is_actor:
        actor, calls = handles["actor"], (call for model, call in job.spec.algorithm.calls if model == "reference")
        without_adapter = {call: getattr(actor, call.replace("compute_", "compute_ref_", 1)) for call in calls}
        models["reference"] = with_calls(actor, **without_adapter)
    if job.generates_apart:
        is_partial = job.spec.rollout.partial is not None
        apart = ApartRollout(handles["actor"], handles["rollout"], pool or RolloutPool(), interrupts=is_partial)
        models["actor"] = with_calls(
            handles["actor"], generate_sequences=apart.generate_sequences, generate_ahead=apart.generate_ahead
        )
    if streams and any(scorers):
        rollout = StreamingRollout(models["actor"].generate_sequences, handles, scorers, streams)
        models["actor"] = with_calls(models["actor"], generate_sequences=rollout.generate_sequences)
    return models


def step_models_of(job: Job, models: Mapping[str, Handle]) -> dict[str, Handle]:
    """Return the models that the algorithm's step takes, by parameter: all its arguments but the batch."""
    algorithm = job.spec.algorithm
    inputs: dict[str, Handle] = {}
    for name in [each for each in MAY_BE_LEFT_OUT if each in algorithm.parameters]:
        methods = [method for model, method in algorithm.calls if model == name]
        inputs[name] = SimpleNamespace(**dict.fromkeys(methods, lambda batch, **_: batch))
    inputs |= {name: models[name] for name in algorithm.parameters if name in models}
    if "rollouts" in models:
        actor, rollouts = inputs["actor"], models["rollouts"]

        def keep_and_update(batch: Rows) -> Rows:
            """Write the kept share of the responses to a file, and then train the actor."""
            rollouts.keep(batch)
            return actor.update_actor(batch)

        inputs["actor"] = with_calls(actor, update_actor=keep_and_update)
    return inputs
