"""Weights of the actor for generators in another pool. Both make the same calls, and a collective joins them."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from rlhf_trainer.errors import CommunicationError, NumericsError
from rlhf_trainer.generation.vllm_engine import GenerationEngine
from rlhf_trainer.hybrid_engine.hybrid_engine import HybridEngine, Span
from rlhf_trainer.hybrid_engine.notices import Notices
from rlhf_trainer.protocols import ONE_TO_ALL
from rlhf_trainer.telemetry import TRANSFER, recorder
from rlhf_trainer.training.distributed import device_here
from rlhf_trainer.training.models import inner
from rlhf_trainer.training.sharding import ShardedModel
from rlhf_trainer.training.trainer import ModelRunner
from rlhf_trainer.types import register
from rlhf_trainer.workers.base import WorkerSetting


class AcrossPools:
    """One rank of either pool."""

    setting: WorkerSetting
    policy_version: int
    generator_version: int
    _across: HybridEngine | None = None

    @register(ONE_TO_ALL)
    def span_pools(self, *, span: Span) -> None:
        """Join the group of both pools."""
        model, generator, config = self.ends()
        self._across = HybridEngine(
            model,
            generator,
            config=config,
            dtype=self.setting.compute_dtype,
            trust_remote_code=self.setting.model.trust_remote_code,
            span=span,
            sends_changes=self.setting.job.spec.rollout.weight_sync == "Delta",
        )

    @property
    def across(self) -> HybridEngine:
        """Of both pools. CommunicationError where this rank has left it, or has not joined."""
        if self._across is None:
            raise CommunicationError(f"rank {dist.get_rank()} is in no group with another pool")
        return self._across

    @property
    def notices(self) -> Notices:
        """Of the ranks of both pools."""
        assert self.across.notices
        return self.across.notices

    def ends(self) -> tuple[ShardedModel | None, GenerationEngine | None, PreTrainedConfig]:
        """The model that this rank trains, or what it generates with; and the configuration of both."""
        raise NotImplementedError

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """The block talks to the other pool. If a rank is lost meanwhile, this one leaves the group.

        Else ranks that wait for this one, and not for the lost one, would wait until their time is over.
        """
        problem = ""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:  # the latter is torch's, which knows no group like this one
            problem = f"{type(error).__name__}: {error.__context__ or error}"
            traceback.clear_frames(error.__traceback__)  # they hold the group
            self._across = None
        if problem:
            gc.collect()
            raise CommunicationError(f"weights for another pool on rank {dist.get_rank()}: {problem}")

    def agreed(self, version: int, *, is_needed: bool) -> tuple[int, bool]:
        """(version of the pool that trains, whether weights are sent): the same on all ranks of both pools."""
        told = torch.tensor([version, is_needed], dtype=torch.int64, device=device_here())
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self.across.group)
        newest, is_sent = told.tolist()
        return newest, bool(is_sent)


class WeightSender(AcrossPools):
    """One rank of the actor."""

    runner: ModelRunner

    def ends(self) -> tuple[ShardedModel | None, GenerationEngine | None, PreTrainedConfig]:
        return self.runner.model, None, inner(self.runner.model.module).config

    @register(ONE_TO_ALL)
    def send_weights(self) -> None:
        """Send the weights of the current policy version, unless all generators have them."""
        self.notices.offer()
        with recorder.span(TRANSFER, "actor.send_weights: wait"), self.exchanging():
            is_new = self.generator_version != self.policy_version
            _, is_sent = self.agreed(self.policy_version, is_needed=is_new)
        if is_sent:
            sending = recorder.span("reshard", "actor.send_weights")
            with sending, self.exchanging(), self.runner.offloader.in_use():
                self.across.to_generation()
        self.generator_version = self.policy_version


class WeightReceiver(AcrossPools):
    """One rank of the generators."""

    config: PreTrainedConfig
    wrong_weights: str
    _generator: GenerationEngine

    def ends(self) -> tuple[ShardedModel | None, GenerationEngine | None, PreTrainedConfig]:
        return None, self._generator, self.config

    @register(ONE_TO_ALL)
    def receive_weights(self) -> None:
        """Receive what the actor sends."""
        with recorder.span(TRANSFER, "rollout.receive_weights: wait"), self.exchanging():
            self.policy_version, is_sent = self.agreed(-1, is_needed=self.generator_version < 0)
        received = self._receive() if is_sent else 0
        self.generator_version = self._generator.version = self.policy_version
        with recorder.counting(True):
            recorder.add("bytes/reshard", received)

    def _receive(self) -> int:
        """The bytes of what came."""
        began = time.time()
        with recorder.span("reshard", "rollout.receive_weights"), self.exchanging():
            try:
                stats = self.across.to_generation()
            except NumericsError as error:
                self.wrong_weights = str(error)
                raise
            self._generator.wake_cache()
        record_sync("full" if stats.is_whole else "delta", stats.received, time.time() - began)
        return stats.received


def record_sync(kind: str, received: int, seconds: float) -> None:
    """Record what an exchange of weights brought to a rank that generates."""
    recorder.maximum(f"sync_seconds/{kind}", seconds)
    with recorder.counting(True):
        recorder.add(f"sync_bytes/{kind}", received)
