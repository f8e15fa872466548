"""Weights of the actor for generators in another pool. Both make the same calls, and a collective joins them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from rlhf_trainer.generation.vllm_engine import GenerationEngine
from rlhf_trainer.hybrid_engine.hybrid_engine import HybridEngine, Span
from rlhf_trainer.protocols import ONE_TO_ALL
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.distributed import device_here
from rlhf_trainer.training.models import inner
from rlhf_trainer.training.trainer import ModelRunner
from rlhf_trainer.types import register
from rlhf_trainer.workers.base import WorkerSetting


class WeightSender:
    """One rank of the actor."""

    setting: WorkerSetting
    runner: ModelRunner
    policy_version: int
    generator_version: int

    @register(ONE_TO_ALL)
    def span_pools(self, *, span: Span) -> None:
        """Join the group of both pools."""
        model, trusts = self.runner.model, self.setting.model.trust_remote_code
        config = inner(model.module).config
        self._hybrid_engine = HybridEngine(
            model, None, config=config, dtype=model.compute_dtype, trust_remote_code=trusts, span=span
        )

    @register(ONE_TO_ALL)
    def send_weights(self) -> None:
        """Send the weights of the current policy version, unless all generators have them."""
        with recorder.span("reshard", "actor.send_weights"):
            is_new = self.generator_version != self.policy_version
            _, is_sent = _agreed(self._hybrid_engine, self.policy_version, is_new)
            if is_sent:
                with self.runner.offloader.in_use():
                    self._hybrid_engine.to_generation()
            self.generator_version = self.policy_version


class WeightReceiver:
    """One rank of the generators."""

    setting: WorkerSetting
    config: PreTrainedConfig
    policy_version: int
    generator_version: int
    _generator: GenerationEngine

    @register(ONE_TO_ALL)
    def span_pools(self, *, span: Span) -> None:
        """Join the group of both pools."""
        dtype, trusts = self.setting.compute_dtype, self.setting.model.trust_remote_code
        self._hybrid_engine = HybridEngine(
            None, self._generator, config=self.config, dtype=dtype, trust_remote_code=trusts, span=span
        )

    @register(ONE_TO_ALL)
    def receive_weights(self) -> None:
        """Receive what the actor sends."""
        received = 0
        with recorder.span("reshard", "rollout.receive_weights"):
            self.policy_version, is_sent = _agreed(self._hybrid_engine, -1, self.generator_version < 0)
            if is_sent:
                received = self._hybrid_engine.to_generation().received
                self._generator.wake_cache()
            self.generator_version = self.policy_version
        with recorder.counting(True):
            recorder.add("bytes/reshard", received)


def _agreed(engine: HybridEngine, version: int, is_needed: bool) -> tuple[int, bool]:
    """(the version of the pool that trains, whether weights are sent): the same on all ranks of both pools."""
    told = torch.tensor([version, is_needed], dtype=torch.int64, device=device_here())
    dist.all_reduce(told, op=dist.ReduceOp.MAX, group=engine.group)
    newest, is_sent = told.tolist()
    return newest, bool(is_sent)
