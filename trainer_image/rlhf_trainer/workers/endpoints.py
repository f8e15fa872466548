"""Generation by external servers: the process that calls the servers holds no weights and takes no slot."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from transformers import PreTrainedConfig

from rlhf_trainer.errors import NumericsError
from rlhf_trainer.generation.endpoints import Endpoints, Needs
from rlhf_trainer.hybrid_engine.hybrid_engine import Span
from rlhf_trainer.hybrid_engine.layout import describe
from rlhf_trainer.telemetry import TRANSFER, recorder
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.weight_links import record_sync


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
        self._servers.call(
            "join_actor", [{"span": each, "config": config, "sends_changes": sends_changes} for each in spans]
        )

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


def servers_of(setting: WorkerSetting, config: PreTrainedConfig, *, eos_token: int, on_gpu: bool | None) -> Endpoints:
    """Return the external servers of a job, with the requirements that its actor's configuration sets.

    on_gpu: None where the device is not known yet; a type that depends on the device is then not required.
    """
    job = setting.job
    shapes = {each.name: each.shape for each in describe(config, trust_remote_code=setting.model.trust_remote_code)}
    is_known = on_gpu is not None or job.spec.training.precision != "Auto"
    dtype = str(setting.dtype(on_gpu=bool(on_gpu))).removeprefix("torch.") if is_known else None
    tokens = job.spec.data.max_prompt_tokens + job.spec.data.max_response_tokens
    return Endpoints(job, Needs(shapes=shapes, dtype=dtype, tokens=tokens), eos_token=eos_token)
