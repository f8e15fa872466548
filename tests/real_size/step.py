"""A step of PPO or GRPO at a real size: the product's workers, built and called as the controller calls them."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rlhf_api.job import Job
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.hybrid_engine import exchange, hybrid_engine
from rlhf_trainer.tensor_slice import TensorSlice, WeightSlice
from rlhf_trainer.training.distributed import device_here
from rlhf_trainer.training.saving import MOMENT
from rlhf_trainer.types import Batch
from rlhf_trainer.workers import rollout
from rlhf_trainer.workers.actor import ActorWorker
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.critic import CriticWorker
from rlhf_trainer.workers.reference import ReferenceWorker
from rlhf_trainer.workers.reward import RewardWorker
from tests.real_size.live_bytes import GENERATOR, GRADIENTS, MOMENTS, PARAMETERS, LiveBytes
from tests.real_size.model_folder import model_folder
from tests.real_size.shapes import SHAPES

GPUS_OF_NODE = 8
ROLES = {"PPO": ("actor", "critic", "reference", "reward"), "GRPO": ("actor", "reference", "reward")}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step on a cluster of GPUs that every model shares."""

    shape: str
    """Of every model; see SHAPES."""
    ranks: int
    algorithm: str = "PPO"
    scored_by_model: bool = True
    """Whether the reward is a model; False: a rule, which holds nothing."""
    rank: int = 0
    """The one whose bytes are counted; coordinates: see ParallelSizes."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    """`models.*.parallelism`, the same for every model; empty: all by data (FSDP)."""
    tensor_generation: int = 1
    """`rollout.tensorParallel`."""
    rows: int = 4
    """Responses of this rank, all in one mini-batch."""
    prompt: int = 1024
    response: int = 1024
    """Tokens of each."""
    one_prompt: bool = False
    """Whether the responses have one prompt."""
    micro_batch_tokens: int = 8192
    recompute: bool = True
    layers: int | None = None
    """Fewer than the shape has, for a quick look; None: all."""
    offload: str = "None"
    """Of the trained models."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """More of `spec.training`."""
    offload_frozen: str = "None"
    reshards: bool = True
    """Whether the generator shares these GPUs; False: it has others, and nothing of it is counted."""

    @property
    def sizes(self) -> ParallelSizes:
        """Of the actor; the other models generate nothing."""
        ranks = prod(self.layout.get(name, 1) for name in ("pipeline", "tensor", "context"))
        return ParallelSizes(
            data=self.ranks // ranks,
            **self.layout,
            generation_pipeline=1,
            generation_tensor=self.tensor_generation,
        )


def measure(case: Case, folder: Path) -> LiveBytes:
    """The phases of a step, with the bytes that each takes on the rank of the case."""
    from tests.real_size.world import rank_of_world  # it makes a device, which a process on a real one lacks

    live = LiveBytes()
    job, folders = prepared(case, folder)
    vocabulary = SHAPES[case.shape].vocab_size
    live.vocabulary = {vocabulary, -(-vocabulary // case.layout.get("tensor", 1))}
    with rank_of_world(case.ranks, live, rank=case.rank), _marked(live):
        take_step(case, job, folders, live)
    return live


def prepared(case: Case, folder: Path) -> tuple[Job, dict[str, str]]:
    """The job of a case, and the folders of its language model and its reward model."""
    config = copy.deepcopy(SHAPES[case.shape])
    config.max_position_embeddings = max(config.max_position_embeddings, case.prompt + case.response)
    if case.layers:
        kinds = getattr(config, "layer_types", None)
        config.num_hidden_layers, config.layer_types = case.layers, kinds and kinds[: case.layers]
    folders = {
        "actor": model_folder(folder / "lm", config),
        "reward": model_folder(folder / "rm", config, labels=1),
    }
    return Job.parse(manifest(case, folders)), folders


def take_step(case: Case, job: Job, folders: Mapping[str, str], live: LiveBytes) -> dict[str, Any]:
    """Build the workers and take a step with a generator of weights alone; returns the workers by role."""
    nodes = [rank // GPUS_OF_NODE for rank in range(case.ranks)]
    with (
        patch.object(rollout, "GenerationEngine", _generator(live)),
        patch.object(hybrid_engine, "_nodes", lambda: nodes),
        patch.object(exchange.Exchange, "verify", lambda *_: None),  # there are no bits to compare
    ):
        workers = {}
        for role in ROLES[case.algorithm]:
            if case.scored_by_model or role != "reward":
                workers[role] = worker_of(role, case, job, folders, live)
                _add_moments(workers[role], role, live)
        _step(workers, case, live)
    return workers


def manifest(case: Case, folders: Mapping[str, str]) -> dict[str, Any]:
    trained = {
        "parallelism": dict(case.layout),
        "gradientCheckpointing": case.recompute,
        "offload": case.offload,
    }
    frozen = {"parallelism": dict(case.layout), "offload": case.offload_frozen}
    models: dict[str, Any] = {
        "actor": {"uri": f"file://{folders['actor']}", **trained},
        "reference": {"uri": f"file://{folders['actor']}", **frozen},
        "reward": {"uri": f"file://{folders['reward']}", **frozen},
    }
    if case.algorithm == "PPO":
        models["critic"] = {"uri": f"file://{folders['reward']}", **trained}
    group = 1 if case.algorithm == "PPO" else min(8, case.rows * case.sizes.data)
    spec = {
        "algorithm": {"name": case.algorithm, "kl": {"coefficient": 0.1}},
        "models": models,
        "data": {
            "train": {"uri": "file:///prompts.jsonl"},
            "maxPromptTokens": case.prompt,
            "maxResponseTokens": case.response,
        },
        "rollout": {"tensorParallel": case.tensor_generation, "samplesPerPrompt": group},
        "training": {
            "totalSteps": 10,
            "promptBatchSize": case.rows * case.sizes.data // group,
            "microBatchTokens": case.micro_batch_tokens,
            "precision": "BF16",
            **case.training,
        },
        "resources": {
            "slotsPerNode": min(GPUS_OF_NODE, case.ranks),
            "nodes": -(-case.ranks // GPUS_OF_NODE),
            "device": "GPU",
        },
    }
    return {
        "apiVersion": "rlhf.hybridflow.io/v1alpha1",
        "kind": "RLHFJob",
        "metadata": {"name": "real-size"},
        "spec": spec,
    }


def worker_of(role: Any, case: Case, job: Job, folders: Mapping[str, str], live: LiveBytes) -> Any:
    """The worker of a role, as a slot's process builds it."""
    setting = WorkerSetting(
        job=job,
        role=role,
        model=job.models()[role],
        folder=folders["actor" if role in ("actor", "reference") else "reward"],
        total_steps=10,
        layout=case.sizes,
    )
    made: dict[str, Any] = {
        "actor": lambda: ActorWorker(setting, max_sequences=case.rows),
        "critic": lambda: CriticWorker(setting),
        "reference": lambda: ReferenceWorker(setting),
        "reward": lambda: RewardWorker(setting),
    }
    with live.measured(f"load {role}"):
        worker = made[role]()
        gc.collect()
    return worker


def _add_moments(worker: Any, role: str, live: LiveBytes) -> None:
    """Make the moments of a trained model, and say what is what."""
    runner = worker.trainer if hasattr(worker, "trainer") else worker._model
    if hasattr(worker, "trainer"):
        with live.measured(f"load {role}'s moments"):  # as for a checkpoint, so that the update is not the first one
            moments = worker.trainer.state._tensors()
            live.mark((value for name, value in moments.items() if name.startswith(MOMENT)), MOMENTS)
            del moments
    for parameter in runner.model.module.parameters():
        live.mark([parameter], PARAMETERS)
        live.weight_shapes.add(tuple(parameter.shape))
        live.weight_shapes.add(tuple(parameter._local_tensor.shape))


def _step(workers: Mapping[str, Any], case: Case, live: LiveBytes) -> None:
    """What the algorithm's file calls, in its order, on the longest responses there can be."""
    batch = batch_of(case)
    actor = workers["actor"]

    def call(name: str, role: str, method: str) -> None:
        if role not in workers:
            return
        nonlocal batch
        with live.measured(name):
            added = getattr(workers[role], method)(batch)
            gc.collect()
        if added:
            assert not any(each.is_meta or type(each) is not Tensor for each in added.values()), added

    if case.reshards:
        with live.measured("reshard"):
            actor.reshard()
            gc.collect()
    call("actor scores", "actor", "compute_log_prob")
    call("reference scores", "reference", "compute_log_prob")
    call("reward scores", "reward", "compute_reward")
    call("critic scores", "critic", "compute_values")
    call("critic update", "critic", "update_critic")
    call("actor update", "actor", "update_actor")


def batch_of(case: Case) -> Batch:
    """This rank's rows."""
    width = case.prompt + case.response
    shape = (case.rows, width)
    response = torch.zeros(shape)
    response[:, case.prompt :] = 1.0
    # Ids below 3 are special: at the padding token, whose random embedding is 0, each RMSNorm multiplies gradients.
    tokens = (3 + torch.arange(case.rows * width) % 497).reshape(shape)
    if case.one_prompt:
        tokens[:, : case.prompt] = tokens[0, : case.prompt].clone()
    log_probs = dict.fromkeys(("rollout_log_probs", "old_log_probs", "ref_log_probs"), -response)
    fields = {
        "tokens": tokens,
        "attention_mask": torch.ones(shape),
        "response_mask": response,
        **log_probs,
        **{name: response.clone() for name in ("advantages", "values", "token_rewards")},
        "policy_version": torch.zeros(shape),
        "valid": torch.ones(case.rows),
    }
    start = case.rows * case.sizes.coordinates(case.rank)["data"]
    return Batch(step=1, start=start, size=case.rows, fields=fields)


@contextmanager
def _marked(live: LiveBytes) -> Iterator[None]:
    """Optimizer steps say which tensors are gradients and moments."""

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        live.mark((each.grad for group in optimizer.param_groups for each in group["params"]), GRADIENTS)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        live.mark((each for state in optimizer.state.values() for each in state.values()), MOMENTS)

    hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _generator(live: LiveBytes) -> type:
    """A generator that holds its weights while it is awake, and no cache."""

    class Generator:
        def __init__(self, *_: Any, **__: Any) -> None:
            self._weights: dict[str, Tensor] = {}

        def sleep(self) -> None:
            self._weights = {}

        def wake_cache(self) -> None:
            pass

        def bytes_held(self) -> int:
            return sum(each.nbytes for each in self._weights.values())

        def load_weights(self, pieces: Iterable[WeightSlice], holds: Mapping[str, TensorSlice]) -> dict[str, Tensor]:
            for name, part in holds.items():
                self._weights[name] = torch.empty(part.shape, dtype=torch.bfloat16, device=device_here())
            live.mark(self._weights.values(), GENERATOR)
            for _ in pieces:
                pass
            return {}

    return Generator
