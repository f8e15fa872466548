"""The process through which a job generates with engines elsewhere: it holds no weights and takes no slot."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from transformers import PreTrainedConfig

from rlhf_api.job import Job
from rlhf_trainer.data.tokens import Ids
from rlhf_trainer.errors import NumericsError
from rlhf_trainer.generation.endpoints import Endpoints, Needs
from rlhf_trainer.generation.vllm_engine import Response
from rlhf_trainer.hybrid_engine.hybrid_engine import Span
from rlhf_trainer.hybrid_engine.layout import describe
from rlhf_trainer.protocols import ONE_TO_ALL
from rlhf_trainer.telemetry import TRANSFER, recorder
from rlhf_trainer.training.models import inner
from rlhf_trainer.types import Batch, Fields, register
from rlhf_trainer.workers.across_pools import record_sync
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.leaving import Ended
from rlhf_trainer.workers.rollout import Generating


class EndpointsWorker(Generating):
    """Asks the servers of `rollout.endpoints` for responses, and to take part when the actor sends its weights."""

    called = "rollout"

    def __init__(self, setting: WorkerSetting, *, on_gpu: bool) -> None:
        """on_gpu: whether the actor is on GPUs, and so are the servers."""
        self.setting, self.tokenizer = setting, setting.tokenizer()
        self.config = inner(setting.language_model()).config
        self._servers = servers_of(setting, self.config, eos_token=int(self.tokenizer.eos_token_id), on_gpu=on_gpu)

    def close(self) -> None:
        """The servers are not ours to end."""

    @register(ONE_TO_ALL)
    def found(self) -> list[tuple[str, int]]:
        """See `Endpoints.found`."""
        return self._servers.found()

    @register(ONE_TO_ALL)
    def span_pools(self, *, span: Span) -> None:
        """Have the servers join the group of the actor's ranks; the next exchange brings all weights."""
        ranks, tensor = span.generation.world_size, span.generation.tensor
        config = json.loads(self.config.to_json_string(use_diff=False))
        sends_changes = self.setting.job.spec.rollout.weight_sync == "Delta"
        spans = (asdict(replace(span, before=before)) for before in range(0, ranks, tensor))
        self._servers.call(
            "join_actor", [{"span": each, "config": config, "sends_changes": sends_changes} for each in spans]
        )

    @register(ONE_TO_ALL)
    def receive_weights(self) -> None:
        """Have the servers receive what the actor sends. NumericsError if one keeps other bits than were sent."""
        with recorder.span(TRANSFER, "rollout.receive_weights: wait"):  # the actor's ranks tell what is no waiting
            ranks = self._servers.call("take_weights")
        for wrong in filter(None, (rank["wrong"] for rank in ranks)):
            self.wrong_weights = f"{self.setting.job.name}: spec.rollout.endpoints: {wrong}"
            raise NumericsError(self.wrong_weights)
        self.policy_version = self._servers.version = ranks[0]["version"]
        syncs = [rank["sync"] for rank in ranks if rank["sync"]]
        for kind, received, seconds in syncs:
            record_sync(kind, received, seconds)
        with recorder.counting(True):
            recorder.add("bytes/reshard", sum(received for _, received, _ in syncs))

    def respond(
        self, batch: Batch, prompts: list[Ids], *, greedy: bool, ended: Ended
    ) -> tuple[list[Ids], list[Response]]:
        responses = self._servers.generate(
            prompts,
            self.seeds(batch),
            max_tokens=self.setting.job.spec.data.max_response_tokens,
            greedy=greedy,
            ended=lambda row, response: ended(row, prompts[row], response),
        )
        for path, sentence in self._servers.news().items() if batch.step > 0 else ():  # evaluations show no warnings
            recorder.warn(path, sentence)
        return prompts, responses

    def _measure_generation(self, fields: Fields) -> None:
        """Neither the FLOPs nor the cache are of the job's devices."""


def servers_of(setting: WorkerSetting, config: PreTrainedConfig, *, eos_token: int, on_gpu: bool | None) -> Endpoints:
    """The servers of a job, and what its actor, of this configuration, needs of them.

    on_gpu: None where that is not known yet; a type that depends on it is then not asked for.
    """
    job: Job = setting.job
    shapes = {each.name: each.shape for each in describe(config, trust_remote_code=setting.model.trust_remote_code)}
    is_known = on_gpu is not None or job.spec.training.precision != "Auto"
    dtype = str(setting.dtype(on_gpu=bool(on_gpu))).removeprefix("torch.") if is_known else None
    tokens = job.spec.data.max_prompt_tokens + job.spec.data.max_response_tokens
    return Endpoints(job, Needs(shapes=shapes, dtype=dtype, tokens=tokens), eos_token=eos_token)
