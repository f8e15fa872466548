"""Links over which generators get the actor's weights, by where the generator runs.

    in place       InPlaceWeights   The engine reads the shards of the model beside it.
    own pool       WeightSender     --group of both pools-->  WeightReceiver.
    own pool,      WeightSender     --group of both pools-->  InterruptingReceiver: new weights also come in the
    rollout.partial                                           middle of a batch
    servers        WeightSender     --group with servers--->  ServerWeights

Sender and receivers make the same calls, and a collective joins them. `rollout.weightSync: Delta` sends changes only.

With `rollout.partial` the actor announces each exchange in the store of the group, and generators look there every few
tokens. So an exchange is made in the middle of responses or, on a rank without unfinished responses, by `receive`.
"""

import gc
import itertools
import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from transformers import PreTrainedConfig

from rlhf_trainer.errors import CommunicationError, NumericsError
from rlhf_trainer.generation.endpoints import Endpoints, Needs
from rlhf_trainer.generation.vllm_engine import GenerationEngine
from rlhf_trainer.hybrid_engine.hybrid_engine import HybridEngine, Span
from rlhf_trainer.hybrid_engine.layout import describe
from rlhf_trainer.telemetry import TRANSFER, recorder
from rlhf_trainer.training.distributed import AbortSwitch, device_here, group_on_host
from rlhf_trainer.training.models import inner
from rlhf_trainer.training.sharding import ShardedModel
from rlhf_trainer.training.trainer import ModelRunner
from rlhf_trainer.workers.base import WorkerSetting

OFFERS = "offers"
"""Key of a counter in the store of a group: how often the actor's ranks have offered weights."""
LOOK_TOKENS = 8
"""Tokens of a response between two checks for new weights: a check is a round trip to the actor's machine."""
LOOK_SECONDS = 0.005
"""Seconds between two checks for new weights on a rank whose responses have ended."""


class InPlaceWeights:
    """Link from a model's shards to the engine in the same processes."""

    def __init__(self, setting: WorkerSetting, runner: ModelRunner, engine: GenerationEngine) -> None:
        self._runner, self._engine = runner, engine
        self.held_version = -1
        """Policy version of the weights that the engine has; -1: the engine has no weights."""
        self._hybrid_engine = hybrid_engine(setting, runner.model, engine, inner(runner.model.module).config)

    def bring(self, policy_version: int) -> None:
        """Load this policy version's weights and then allocate the KV cache, unless the engine has these weights."""
        received = 0
        with recorder.span("reshard", "actor.reshard"):
            if self.held_version != policy_version:
                with self._runner.offloader.in_use():
                    received = self._hybrid_engine.to_generation().received
                self._engine.wake_cache()  # after the offload of the shards: there may be no room for both
                self.held_version = self._engine.version = policy_version
        with recorder.counting(True):
            recorder.add("bytes/reshard", received)

    def put_engine_to_sleep(self) -> None:
        """Free the engine's cache and weights until the next responses."""
        self._engine.sleep()
        self.held_version = -1
        recorder.maximum("idle_bytes/generator", self._engine.bytes_held())


class PoolExchange:
    """Exchange of weights in a group of the ranks of two pools, to which this rank belongs."""

    def __init__(self) -> None:
        self.joined: HybridEngine | None = None
        """Hybrid engine of the group that this rank has joined; None before, and after the rank has left the group."""
        self._switch = AbortSwitch()

    def join(self, build: Callable[..., HybridEngine]) -> None:
        """Join a group by `build`, which returns the group's hybrid engine; later exchanges use this group."""
        self.joined, self._switch = None, AbortSwitch()
        joined = build(switch=self._switch)
        if self._switch.is_on:  # an aborted collective of NCCL ends without an error, but with a wrong result
            raise CommunicationError(f"rank {dist.get_rank()} joined a group that had lost a rank")
        self.joined = joined

    def abort(self) -> None:
        """End the group, from another thread, also while this rank joins it."""
        self._switch.turn_on()

    @property
    def engine(self) -> HybridEngine:
        """Hybrid engine of both pools. CommunicationError where this rank is in no group."""
        if self.joined is None:
            raise CommunicationError(f"rank {dist.get_rank()} is in no group with another pool")
        return self.joined

    @property
    def notices(self) -> PrefixStore:
        """Store for small messages between the ranks of both pools; no writer waits for a reader."""
        assert self.engine.notices
        return self.engine.notices

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Exchange messages and weights with the other pool in the `with` block; leave the group if it loses a rank.

        Otherwise ranks that wait for this rank, and not for the lost one, would wait until their timeout.
        """
        problem = ""
        try:
            yield
            if self._switch.is_on:  # NCCL raised no error, see `join`
                problem, self.joined = "the group has lost a rank", None
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:  # torch raises ValueError for a group that it does not know
            problem = f"{type(error).__name__}: {error.__context__ or error}"
            traceback.clear_frames(error.__traceback__)  # the frames hold the group
            self.joined = None
        if problem:
            self._switch.group = None
            gc.collect()
            raise CommunicationError(f"weights for another pool on rank {dist.get_rank()}: {problem}")

    def agree(self, version: int, *, is_needed: bool) -> tuple[int, bool]:
        """Return (training pool's policy version, whether weights are sent): the same on all ranks of both pools."""
        told = torch.tensor([version, is_needed], dtype=torch.int64, device=device_here())
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self.engine.group)
        newest, is_sent = told.tolist()
        return newest, bool(is_sent)


class WeightSender:
    """Actor's end of the link to generators in another pool or to external servers."""

    def __init__(self, setting: WorkerSetting, runner: ModelRunner) -> None:
        self._setting, self._runner, self.exchange = setting, runner, PoolExchange()
        self.sent_version = -1
        """Policy version of the weights that were sent last; -1: none were sent."""

    def span_pools(self, span: Span) -> None:
        """Join the torch.distributed group of both pools."""
        model = self._runner.model
        self.exchange.join(partial(hybrid_engine, self._setting, model, None, inner(model.module).config, span))

    def send(self, policy_version: int) -> None:
        """Send the weights, which are of this policy version, unless all generators have them."""
        if dist.get_rank() == 0:
            self.exchange.notices.add(OFFERS, 1)
        with recorder.span(TRANSFER, "actor.send_weights: wait"), self.exchange.exchanging():
            _, is_sent = self.exchange.agree(policy_version, is_needed=self.sent_version != policy_version)
        if is_sent:
            sending = recorder.span("reshard", "actor.send_weights")
            with sending, self.exchange.exchanging(), self._runner.offloader.in_use():
                self.exchange.engine.to_generation()
        self.sent_version = policy_version


class WeightReceiver:
    """Generator's end of the link from an actor in another pool."""

    def __init__(self, setting: WorkerSetting, engine: GenerationEngine, config: PreTrainedConfig) -> None:
        self._setting, self._engine, self._config = setting, engine, config
        self.exchange = PoolExchange()
        self.policy_version, self._held_version = 0, -1

    def span_pools(self, span: Span) -> None:
        """Join the torch.distributed group of both pools."""
        self.exchange.join(partial(hybrid_engine, self._setting, None, self._engine, self._config, span))

    def receive(self) -> None:
        """Receive the weights that the actor sends, if it sends any."""
        received = 0
        with recorder.span(TRANSFER, "rollout.receive_weights: wait"), self.exchange.exchanging():
            self.policy_version, is_sent = self.exchange.agree(-1, is_needed=self._held_version < 0)
        if is_sent:
            began = time.time()
            with recorder.span("reshard", "rollout.receive_weights"), self.exchange.exchanging():
                stats = self.exchange.engine.to_generation()
                self._engine.wake_cache()
            received = stats.received
            record_sync("full" if stats.is_whole else "delta", received, time.time() - began)
        self._held_version = self._engine.version = self.policy_version
        with recorder.counting(True):
            recorder.add("bytes/reshard", received)


class ServerWeights:
    """Weight link to external servers, which receive the weights from the actor's ranks."""

    def __init__(self, setting: WorkerSetting, servers: Endpoints, config: PreTrainedConfig) -> None:
        self._setting, self._servers, self._config = setting, servers, config

    def span_pools(self, span: Span) -> None:
        """Have the servers join the group of the actor's ranks; the next exchange brings all weights."""
        ranks, tensor = span.generation.world_size, span.generation.tensor
        config = json.loads(self._config.to_json_string(use_diff=False))
        sends_changes = self._setting.job.spec.rollout.weight_sync == "Delta"
        spans = (asdict(replace(span, before=before)) for before in range(0, ranks, tensor))
        arguments = [{"span": each, "config": config, "sends_changes": sends_changes} for each in spans]
        self._servers.call("join_actor", arguments)

    def receive(self) -> None:
        """Have the servers receive the actor's weights. NumericsError if a server keeps other bits than were sent."""
        with recorder.span(TRANSFER, "rollout.receive_weights: wait"):  # the actor's ranks measure the exchange
            ranks = self._servers.call("take_weights")
        for wrong in filter(None, (rank["wrong"] for rank in ranks)):
            raise NumericsError(f"{self._setting.job.name}: spec.rollout.endpoints: {wrong}")
        self._servers.version = ranks[0]["version"]
        syncs = [rank["sync"] for rank in ranks if rank["sync"]]
        for kind, received, seconds in syncs:
            record_sync(kind, received, seconds)
        with recorder.counting(True):
            recorder.add("bytes/reshard", sum(received for _, received, _ in syncs))


class InterruptingReceiver:
    """Receiver whose engine also gets new weights while it writes responses (`rollout.partial`).

    All ranks of an engine look for weights and receive them together, when the engine's first rank says so. Ranks of
    different engines wait for each other only in exchanges of weights, which some engines may reach earlier.
    """

    def __init__(self, receiver: WeightReceiver, engine: GenerationEngine) -> None:
        """Have the engine look for weights every `LOOK_TOKENS` tokens. All ranks of the pool must call it."""
        self._receiver, self._engine, self._group = receiver, engine, group_on_host()
        self._calls = self._exchanges = 0
        tokens = itertools.count(1)
        engine.before_token = lambda: None if next(tokens) % LOOK_TOKENS else self._take_offer()

    def span_pools(self, span: Span) -> None:
        """Join a new group of both pools, and count its exchanges from 0."""
        self._receiver.span_pools(span)
        self._calls = self._exchanges = 0

    def receive(self) -> None:
        """Receive the weights that the actor sends, unless they came while responses were written."""
        self._calls += 1
        if self._exchanges < self._calls:
            self._make_exchange()

    def agree_on_width(self, longest: int) -> int:
        """Return the largest text width of all ranks; receive offered weights until all ranks have called this."""
        recorder.add("rollout_interrupted", 0.0)  # so that each step records this metric
        width = torch.tensor(longest)
        agreement = dist.all_reduce(width, dist.ReduceOp.MAX, group=self._group, async_op=True)
        while not self._engine.agreed(agreement.is_completed()):
            self._take_offer()
            time.sleep(LOOK_SECONDS)
        agreement.wait()
        return int(width)

    def _take_offer(self) -> None:
        """Receive weights in the middle of responses, if the actor is about to send some."""
        is_offered = self._engine.is_first and self._receiver.exchange.notices.add(OFFERS, 0) > self._exchanges
        if self._engine.agreed(is_offered):
            self._make_exchange()

    def _make_exchange(self) -> None:
        older = self._receiver.policy_version
        self._exchanges += 1
        self._receiver.receive()
        if self._receiver.policy_version != older:
            recorder.add("rollout_interrupted", self._engine.weights_replaced(older))


def hybrid_engine(
    setting: WorkerSetting,
    model: ShardedModel | None,
    generator: GenerationEngine | None,
    config: PreTrainedConfig,
    span: Span | None = None,
    switch: AbortSwitch | None = None,
) -> HybridEngine:
    """Return the hybrid engine of this rank's trained model or generation engine; span: group of both pools to join."""
    return HybridEngine(
        model,
        generator,
        config=config,
        dtype=setting.compute_dtype,
        trust_remote_code=setting.model.trust_remote_code,
        span=span,
        sends_changes=span is not None and setting.job.spec.rollout.weight_sync == "Delta",
        switch=switch,
    )


def servers_of(setting: WorkerSetting, config: PreTrainedConfig, *, on_gpu: bool | None) -> Endpoints:
    """Return the external servers of a job, with the requirements that its actor's configuration sets.

    on_gpu: None if the device is not known yet; then a weight type that depends on the device is not required.
    """
    job = setting.job
    shapes = {each.name: each.shape for each in describe(config, trust_remote_code=setting.model.trust_remote_code)}
    is_known = on_gpu is not None or job.spec.training.precision != "Auto"
    dtype = str(setting.dtype(on_gpu=bool(on_gpu))).removeprefix("torch.") if is_known else None
    tokens = job.spec.data.max_prompt_tokens + job.spec.data.max_response_tokens
    ends = setting.end_tokens(setting.tokenizer()).ids
    return Endpoints(job, Needs(shapes=shapes, dtype=dtype, tokens=tokens), ends=ends)


def record_sync(kind: str, received: int, seconds: float) -> None:
    """Record the bytes and seconds of an exchange on a rank that generates; kind: full or delta."""
    recorder.maximum(f"sync_seconds/{kind}", seconds)
    with recorder.counting(True):
        recorder.add(f"sync_bytes/{kind}", received)
