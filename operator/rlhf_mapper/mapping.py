"""Answer of the mapper: pools, parallel sizes of each model, and the prediction. `as_json` returns it as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, product
from typing import Any, Literal, Self

from rlhf_api.job import Job
from rlhf_api.names import Role, slots_text
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_mapper.fused_schedule import FusedUpdates
from rlhf_mapper.hardware import THIN

Device = Literal["CPU", "GPU"]
Stage = Literal["generation", "preparation", "training"]
STAGES: tuple[Stage, ...] = ("generation", "preparation", "training")
"""Stages of a step, one after the other; within a stage, pools work at the same time (HybridFlow Algorithm 1)."""
Phase = Literal["generation", "reshard", "scoring", "update"]
PHASES: tuple[Phase, ...] = ("reshard", "generation", "scoring", "update")
"""Phases of a step that a run measures as the metrics time/<phase>."""
FUSED: tuple[Role, Role] = ("actor", "critic")
"""Models whose updates may run as one schedule of a pipeline."""
PLACED_WITH: Mapping[Role, Role] = {"cost_critic": "critic"}
"""Models that are always placed in the pool of another model: model -> that other model."""
STAGE_OF: Mapping[Phase, Stage] = {
    "reshard": "generation",
    "generation": "generation",
    "scoring": "preparation",
    "update": "training",
}


@dataclass(frozen=True, kw_only=True)
class MappedPool:
    """Pool of slots (GPUs or CPU workers) for some models, which run in turn; different pools run at the same time."""

    name: str
    models: tuple[Role, ...]
    slots_per_machine: tuple[int, ...]
    gpu: str = ""
    """Name of the pool's GPU type; empty if unknown."""
    zones: tuple[str, ...] = ()
    """Zone of each machine in the order of ranks; empty if unknown."""
    zone_bandwidth: float | None = None
    """Bytes/s of the link between the pool's zones; None if it has one zone, or the link is unknown."""
    allowed_machine_counts: tuple[int, ...] = ()
    """Numbers of machines that an elastic pool may have, ascending; empty if the pool keeps its size."""

    @property
    def size(self) -> int:
        """Number of slots of the pool on all machines."""
        return sum(self.slots_per_machine)

    def has_thin_link(self, sizes: ParallelSizes) -> bool:
        """Whether each of a model's replicas lies in one zone, and the link between the zones is known to be thin."""
        if sizes.replicas == 1 or not self.zone_bandwidth or self.zone_bandwidth >= THIN:
            return False
        zones = [zone for zone, slots in zip(self.zones, self.slots_per_machine, strict=True) for _ in range(slots)]
        size = len(zones) // sizes.replicas
        return all(len(set(zones[start : start + size])) == 1 for start in range(0, len(zones), size))

    @property
    def where(self) -> str:
        """Machines by zone in the order of ranks: `8 a`, `4 a + 4 b`, or `2 x (3 a + 1 b)`; empty if unknown."""
        zones, many = self.zones, len(self.zones)
        period = next((n for n in range(1, many) if zones == zones[:n] * (many // n)), many)
        runs = [(zone, len(list(run))) for zone, run in groupby(zones[:period])]
        if len(runs) == 1:
            return f"{many} {zones[0]}"
        named = " + ".join(f"{count} {zone}" for zone, count in runs)
        return f"{many // period} x ({named})" if many > period else named


@dataclass(frozen=True, kw_only=True)
class ModelPrediction:
    """Prediction for one model in its pool."""

    micro_batch: int
    """Number of sequences in one forward pass of the model."""
    offload: str
    """States that wait in host memory while the model is idle, named as in `models.<role>.offload`."""
    recomputes: bool = False
    """Whether layers are computed again in the backward pass (`models.<role>.gradientCheckpointing`)."""
    seconds: Mapping[Phase, float]
    """Seconds of the model in a step by phase; phases without work are left out."""
    memory: Mapping[Stage, Mapping[str, float]]
    """Bytes of a GPU that the model fills while it has its turn in each stage, by part: weights, gradients, optimizer,
    activations, generator (its copy of the weights) and kv_cache."""

    def resident(self, stage: Stage) -> dict[str, float]:
        """Bytes of this model, by part, that stay on the GPU in a stage while another model has its turn."""
        parts = self.memory.get(stage, {}) if self.offload == "None" else {}
        # gradients exist only in the update
        return {part: size for part, size in parts.items() if part in ("weights", "optimizer")}


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Prediction of a step under a mapping."""

    step_seconds: float
    low: float
    """Lower end of the interval of `step_seconds`; `rlhf_mapper.prediction.error_kind` says what it promises."""
    high: float
    tokens_per_second: float
    """Prompt and response tokens of the batch over the time of a step."""
    phases: Mapping[Phase, float]
    """Seconds of each phase in a step; those of the slowest pool where pools work at the same time."""
    stages: Mapping[Stage, float]
    """Seconds of each stage; their sum is `step_seconds`, unless `works_ahead`."""
    models: Mapping[Role, ModelPrediction]
    memory_limit: Mapping[str, float]
    """Usable bytes of a GPU's memory, by pool."""
    host_memory: Mapping[str, float] = field(default_factory=dict)
    """Bytes of host memory for each GPU's states that are kept there, by pool."""
    gpu_memory_utilization: float
    """Share of a GPU's memory for the generator's weights and KV cache."""
    correction: Mapping[Phase, float] = field(default_factory=dict)
    """Correction factors by phase that the predicted seconds contain; empty if nothing was measured before."""
    coefficients: str = ""
    """Name of the software whose coefficients the predicted seconds are computed with."""
    response_tokens: float = 0.0
    """Mean length of the responses that the prediction assumes, in tokens."""
    prompt_tokens: float = 0.0
    response_source: str = ""
    """Source of the response lengths, in words; `prompt_source` is that of the prompts."""
    prompt_source: str = ""
    works_ahead: bool = False
    """Whether the responses of a later step are generated during preparation and training."""
    fused_updates: FusedUpdates | None = None
    """Optimizer step of actor and critic, if their updates run as one."""

    def peak(self, models: Sequence[Role], stage: Stage) -> dict[str, float]:
        """Bytes of a GPU by part at the fullest moment of a stage, in a pool where `models` take turns."""
        moments: dict[Role, dict[str, float]] = {role: {} for role in models}
        fused = FUSED if self.fused_updates and stage == "training" else ()
        for role, other in product(models, repeat=2):
            works = other == role or {role, other} <= set(fused)
            held = self.models[other].memory.get(stage, {}) if works else self.models[other].resident(stage)
            moments[role] |= {part: moments[role].get(part, 0.0) + size for part, size in held.items()}
        return max(moments.values(), key=lambda moment: sum(moment.values()))


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """Placement that is worse than the chosen mapping: its pools as (models, GPU type, GPU count), and the reason."""

    pools: tuple[tuple[tuple[Role, ...], str, int], ...]
    step_seconds: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class Infeasible:
    """Answer of the mapper if no mapping fits: the reason, the missing bytes, and clusters that are large enough."""

    reason: str
    short_bytes: float = 0.0
    """Bytes that all GPUs together lack for the model states that they must hold at once."""
    smallest: tuple[tuple[str, int], ...] = ()
    """(GPU type, number of GPUs) of the smallest cluster of each type that is large enough."""
    options: tuple[str, ...] = ()
    """Remedies in words, such as a changed field of the manifest, each of which would make the job fit."""

    def __str__(self) -> str:
        would_do = " or ".join(dict.fromkeys([*self.options, *(f"{gpus} x {gpu}" for gpu, gpus in self.smallest)]))
        return f"{self.reason}; {would_do} would do" if would_do else self.reason


@dataclass(frozen=True, kw_only=True)
class DeviceMapping:
    """Answer of the mapper: pools of models; every model of the job is in exactly one pool."""

    device: Device
    pools: tuple[MappedPool, ...]
    sizes: dict[Role, ParallelSizes]
    prediction: Prediction | None = None
    """Predicted step; None if the shapes of the models are unknown."""
    rejected: tuple[Rejected, ...] = ()
    """Best placements that lost against this mapping, best first."""

    def fuses_updates(self, job: Job) -> bool:
        """Whether the job's updates of actor and critic run as one schedule of a pipeline."""
        if self.prediction:
            return self.prediction.fused_updates is not None
        return job.may_fuse_updates and share_stages(self.pools, self.sizes)

    def compresses_gradients(self, job: Job) -> bool:
        """Whether replicas compress gradients: TopK in the manifest, or Auto and a slow link between zones."""
        homes = ((pool, self.sizes[role]) for pool in self.pools for role in pool.models if role in job.trained())
        chosen = job.spec.training.gradient_compression
        return chosen == "TopK" or (chosen == "Auto" and any(pool.has_thin_link(sizes) for pool, sizes in homes))

    def described(self, pool: MappedPool) -> str:
        """Return a pool in a few words: `2 CPU slots (actor 1-2-1, critic)`, with the sizes of models that are cut."""
        zones = f" in zones {pool.where}" if pool.zones else ""
        sizes = {role: self.sizes[role] for role in pool.models}
        only_data = {role: each.data == each.world_size and each.expert == 1 for role, each in sizes.items()}
        named = (role if only_data[role] else f"{role} {each}" for role, each in sizes.items())
        return f"{slots_text(pool.size, self.device)} ({', '.join(named)}){zones}"

    def with_machines(self, name: str, count: int) -> Self:
        """Return this mapping with `count` machines in the pool `name`, which only generates."""
        pools = {pool.name: pool for pool in self.pools}
        pools[name] = replace(pools[name], slots_per_machine=pools[name].slots_per_machine[:1] * count, zones=())
        size = self.sizes["rollout"]
        engines = replace(size, data=pools[name].size // (size.pipeline * size.tensor))
        return replace(self, pools=tuple(pools.values()), sizes={**self.sizes, "rollout": engines})


def share_stages(pools: Sequence[MappedPool], sizes: Mapping[Role, ParallelSizes]) -> bool:
    """Whether actor and critic have the same pipeline stages, of the same sizes, in one pool."""
    if not any(set(FUSED) <= set(pool.models) for pool in pools):
        return False
    actor, critic = (replace(sizes[role], generation_pipeline=0, generation_tensor=0) for role in FUSED)
    return actor == critic and actor.pipeline > 1


def as_json(mapping: DeviceMapping | Infeasible) -> dict[str, Any]:
    """Return the mapper's answer as the JSON object of `rlhf plan --json`, with the same keys in every case.

    Times are in seconds; memory is in bytes of one GPU, except `short_bytes`, which is of all GPUs. If nothing fits,
    `pools` is empty and `infeasible` says why. Without a prediction `predicted` is null, and `models` is empty.
    """
    answer: dict[str, Any] = {"schema_version": 1, "predicted": None, "pools": [], "models": {}, "rejected": []}
    if isinstance(mapping, Infeasible):
        smallest = [{"gpu": gpu, "gpus": gpus} for gpu, gpus in mapping.smallest]
        short = {"reason": mapping.reason, "short_bytes": mapping.short_bytes, "smallest": smallest}
        return answer | {"infeasible": short | {"options": list(mapping.options)}}
    answer |= {
        "pools": [
            {
                "name": pool.name,
                "models": list(pool.models),
                "gpu": pool.gpu,
                "gpus": pool.size,
                "nodes": len(pool.slots_per_machine),
                "zones": list(pool.zones),
                "memory_limit": mapping.prediction and mapping.prediction.memory_limit[pool.name],
                "host_memory": mapping.prediction and mapping.prediction.host_memory.get(pool.name, 0.0),
            }
            for pool in mapping.pools
        ],
        "rejected": [
            {
                "pools": [{"models": list(models), "gpu": gpu, "gpus": gpus} for models, gpu, gpus in each.pools],
                "predicted": {"step_seconds": each.step_seconds},
                "reason": each.reason,
            }
            for each in mapping.rejected
        ],
        "infeasible": None,
    }
    if prediction := mapping.prediction:
        roles = [role for pool in mapping.pools for role in pool.models]
        answer["models"] = {role: _model(mapping.sizes[role], prediction.models[role]) for role in roles}
        answer["predicted"] = asdict(prediction)
        for name in ("models", "memory_limit", "host_memory", "works_ahead"):  # elsewhere in the answer, or left out
            del answer["predicted"][name]
    return answer


def _model(sizes: ParallelSizes, model: ModelPrediction) -> dict[str, Any]:
    cut = {"p": sizes.pipeline, "t": sizes.tensor, "d": sizes.data, "c": sizes.context, "e": sizes.expert}
    if "generation" in model.seconds:
        cut |= {"p_g": sizes.generation_pipeline, "t_g": sizes.generation_tensor, "d_g": sizes.micro}
    return cut | asdict(model)
