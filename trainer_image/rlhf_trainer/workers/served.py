"""Methods of an external `vllm serve` that generates for a job, by which the server receives the actor's weights.

vllm serve MODEL --worker-extension-cls rlhf_trainer.workers.served.ServedWorker ...
"""

import secrets
import socket
import time
from collections.abc import Iterator
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.errors import NumericsError
from rlhf_trainer.generation.self_check import layout_checked
from rlhf_trainer.generation.vllm_extension import WorkerExtension
from rlhf_trainer.generation.weight_layout import locations_of
from rlhf_trainer.hybrid_engine.hybrid_engine import HybridEngine, Span
from rlhf_trainer.meeting import Meeting
from rlhf_trainer.stored_tensors import read_into
from rlhf_trainer.tensor_slice import TensorSlice, WeightSlice
from rlhf_trainer.training.loading import stored_model
from rlhf_trainer.workers.weight_links import PoolExchange

START = secrets.token_hex(8)
"""Random id of this server process. It differs after a restart, so the job sees that the server left the group."""
CHECKED = layout_checked()
CHECKED.__enter__()  # never exited: vLLM imports this module before it makes the weights of its only model


class ServedWorker(WorkerExtension):
    """One rank of an external server. Arguments and results are JSON, as calls come by POST /collective_rpc."""

    vllm_config: Any
    _has_weights = False

    @cached_property
    def _exchange(self) -> PoolExchange:  # vLLM mixes this class into its own, without a call of __init__
        return PoolExchange()

    def served_facts(self) -> dict[str, Any]:
        """Return the facts about this server that a job compares with its needs (`generation.endpoints.Facts`)."""
        model, parallel = self.vllm_config.model_config, self.vllm_config.parallel_config
        return {
            "start": START,
            "host": socket.gethostname(),
            "stages": parallel.pipeline_parallel_size * parallel.data_parallel_size,
            "dtype": str(model.dtype).removeprefix("torch."),
            "logprobs_mode": model.logprobs_mode,
            "max_model_len": model.max_model_len,
            "shapes": {name: list(location.shape) for name, location in locations_of(self.get_model()).items()},
        }

    def join_actor(self, span: dict[str, Any], config: dict[str, Any], sends_changes: bool) -> None:
        """Join the torch.distributed group of the actor's ranks and all servers; config: of the actor's model."""
        sizes = {name: ParallelSizes(**span[name]) for name in ("training", "generation")}
        receiver: Any = SimpleNamespace(load_weights=self.update_live_weights)  # the running model's weights
        self._exchange.joined = HybridEngine(
            None,
            receiver,
            config=AutoConfig.for_model(**config),
            dtype=self.vllm_config.model_config.dtype,
            trust_remote_code=False,
            span=Span(**{**span, **sizes, "meeting": Meeting(**span["meeting"])}),
            sends_changes=sends_changes,
        )
        self._has_weights = False

    def load_folder(self, folder: str) -> None:
        """Replace the weights of the running model by those of a Hugging Face folder on this machine."""
        code = self.vllm_config.model_config.trust_remote_code
        stored, holds = stored_model(folder, scores=False, trust_remote_code=code, revision=None), self.held_shards()

        def pieces() -> Iterator[WeightSlice]:
            for name, location in locations_of(self.get_model()).items():
                source = stored[name]
                whole = torch.empty(source.shape, dtype=source.dtype)
                read_into(whole, TensorSlice.whole(source.shape), source)
                index = location.shard.within(TensorSlice.whole(location.shape))
                yield name, location.shard, whole.view(location.shape)[index]  # experts have another shape in files

        self.update_live_weights(pieces(), holds)

    def take_weights(self) -> dict[str, Any]:
        """Receive the weights that the actor sends, if any; return a mapping for the job.

        version: policy version; sync: (kind, bytes, seconds) if weights came; wrong: a sentence if a checksum differs.
        """
        taken: dict[str, Any] = {"wrong": "", "sync": None}
        with self._exchange.exchanging():
            taken["version"], is_sent = self._exchange.agree(-1, is_needed=not self._has_weights)
            began = time.time()
            try:
                if is_sent:
                    stats = self._exchange.engine.to_generation()
                    kind = "full" if stats.is_whole else "delta"
                    taken["sync"] = kind, stats.received, time.time() - began
            except NumericsError as error:
                taken["wrong"] = str(error)
        self._has_weights = not taken["wrong"]
        return taken
