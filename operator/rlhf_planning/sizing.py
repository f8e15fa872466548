"""Hardware for a job: GPU types and numbers with enough memory, the seconds, hours and money, and the best row."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from rlhf_api.job import Job
from rlhf_api.problems import Problem, SpecError
from rlhf_mapper.auto_map import auto_map, mapping_of, task_of
from rlhf_mapper.hardware import Cluster, require_gpu
from rlhf_mapper.mapping import PLACED_WITH, STAGES, DeviceMapping, Infeasible, Prediction
from rlhf_mapper.search.tables import ALONE
from rlhf_mapper.simulate.memory import HOST_SHARE
from rlhf_planning.machines import in_worker_pods
from rlhf_planning.market import Market, Offer, instances_with, usual_nodes
from rlhf_planning.sized_job import shapes_of

MAX_GPUS, MOST_GPUS = 256, 16384
"""Largest number of GPUs of a type that is tried if the user names no number, and that a user may name."""
SLACK = 1.1
"""Factor by which hardware may be dearer and slower than the front and is still searched for a better layout."""
RESTART_MINUTES = 10.0
"""Assumed minutes from the loss of a node to the next step: a new node, its image, the weights."""
TIGHT = 0.1
"""Share of a GPU's usable memory below which free memory is called tight."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the job in USD and seconds, and of a step in seconds; infinite without a limit."""

    budget: float = math.inf
    deadline: float = math.inf
    step: float = math.inf

    def __str__(self) -> str:
        parts = [f"{self.budget:,.0f} USD"] * math.isfinite(self.budget)
        hours, minutes = f"{self.deadline / 3600:g} h", f"{self.deadline / 60:g} min"
        parts += [hours if self.deadline >= 3600 else minutes] * math.isfinite(self.deadline)
        return " and ".join(parts + [f"{self.step:g} s a step"] * math.isfinite(self.step))


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """Hardware on which the job fits, with its prediction for the job; prices are in USD for a GPU and an hour."""

    gpu: str
    gpus: int
    nodes: int
    mapping: DeviceMapping
    steps: int
    offer: Offer

    @property
    def prediction(self) -> Prediction:
        assert self.mapping.prediction, "the shapes are known"
        return self.mapping.prediction

    @property
    def instances(self) -> list[str]:
        """Instance types that are one of the row's nodes, with the host memory that the layout needs."""
        held = max(self.prediction.host_memory.values()) / HOST_SHARE
        return instances_with(self.gpu, self.gpus // self.nodes, held)

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Seconds of a step: low, predicted, high."""
        return self.prediction.low, self.prediction.step_seconds, self.prediction.high

    @property
    def hours(self) -> tuple[float, float, float]:
        """Hours of all steps: low, predicted, high."""
        low, middle, high = (self.steps * seconds / 3600 for seconds in self.seconds)
        return low, middle, high

    def cost(self, hours: float | None = None, *, spot: bool = False) -> float | None:
        """Return the USD for all GPUs, idle ones too, over some hours, or else the predicted ones; None: no price."""
        price = self.offer.spot if spot else self.offer.on_demand
        return None if price is None else price * self.gpus * (self.hours[1] if hours is None else hours)

    @property
    def money(self) -> float:
        """Number by which rows are ordered: USD, or an infinite number without a price."""
        return math.inf if (cost := self.cost()) is None else cost

    @property
    def idle(self) -> int:
        """Number of GPUs that are paid, but that the mapping leaves unused."""
        return self.gpus - sum(pool.size for pool in self.mapping.pools)

    @property
    def room(self) -> tuple[float, str, str]:
        """(free bytes, stage, largest part) of the fullest GPU at its fullest moment; the KV cache counts as free."""
        found = []
        for pool, stage in product(self.mapping.pools, STAGES):
            parts = self.prediction.peak(pool.models, stage)
            if used := {part: size for part, size in parts.items() if part != "kv_cache"}:
                free = self.prediction.memory_limit[pool.name] - sum(used.values())
                found.append((free, stage, max(used, key=lambda part: used[part])))
        return min(found)

    @property
    def tight(self) -> str:
        """Words on scarce memory: how much is free, what waits in host memory, whether layers are recomputed."""
        models, (free, stage, part) = self.prediction.models.values(), self.room
        limit, offloads = min(self.prediction.memory_limit.values()), {model.offload for model in models} - {"None"}
        notes = [f"memory in {stage} ({part})"] * (free < TIGHT * limit)
        notes += ["optimizer on host"] * ("OptimizerInHost" in offloads)
        notes += ["idle states on host"] * bool(offloads - {"OptimizerInHost"})
        notes += ["recomputes layers"] * any(model.recomputes for model in models)
        return ", ".join(notes + [f"{self.idle} GPU{'s' * (self.idle > 1)} idle"] * bool(self.idle))

    @property
    def slowest(self) -> tuple[str, float]:
        """(phase, share of the step) of the phase that takes longest."""
        phase, seconds = max(self.prediction.phases.items(), key=lambda each: each[1])
        return phase, seconds / self.prediction.step_seconds

    def excess(self, limits: Limits, *, case: int = 1) -> float:
        """Return the largest factor by which the row exceeds a limit; case 0, 1, 2: low, predicted, high seconds."""
        factor = self.seconds[case] / self.seconds[1]
        needs = (self.money / limits.budget, self.hours[1] * 3600 / limits.deadline, self.seconds[1] / limits.step)
        return max(need * factor for need in needs if not math.isnan(need))

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON; money in USD, memory in bytes."""
        (low, seconds, high), (free, stage, part), (phase, share) = self.seconds, self.room, self.slowest
        answer: dict[str, Any] = {"gpu": self.gpu, "gpus": self.gpus, "nodes": self.nodes, "idle_gpus": self.idle}
        answer |= {"step_seconds": seconds, "low": low, "high": high}
        answer |= zip(("hours_low", "hours", "hours_high"), self.hours, strict=True)
        answer |= {"price_per_gpu_hour": self.offer.on_demand, "cost": self.cost(), "spot_cost": self.cost(spot=True)}
        answer |= {"free_bytes": free, "fullest": f"{stage}: {part}", "tight": self.tight}
        return answer | {"slowest": {"phase": phase, "share": share}, "instances": self.instances}


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """Answer of `rlhf size`: rows of hardware, cheapest first, the chosen one, and sentences on what does not fit."""

    rows: tuple[Row, ...]
    chosen: Row | None
    why: str
    smallest: Row | None
    """Row with the fewest GPUs, the cheapest of several."""
    unfit: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the answer as JSON, with the same keys in every case."""
        one, smallest = (row and row.as_json() for row in (self.chosen, self.smallest))
        rows, unfit = [row.as_json() for row in self.rows], list(self.unfit)
        return {"rows": rows, "chosen": one, "why": self.why, "smallest": smallest, "unfit": unfit}


def requested_gpus(text: str) -> list[tuple[str, int | None]]:
    """Parse `--gpus`, such as `h100,a100=16`, into (GPU type, number or None); `any` gives no entries. SpecError."""
    found: list[tuple[str, int | None]] = []
    for each in text.split(",") if text.strip().lower() != "any" else ():
        name, equals, count = each.partition("=")
        if equals and not (count.strip().isdecimal() and 0 < int(count) <= MOST_GPUS):
            raise SpecError([Problem("--gpus", f"{each.strip()} has no number of GPUs from 1 to {MOST_GPUS}")])
        if name.strip().lower() == "any":
            raise SpecError([Problem("--gpus", f"is {text}; any stands alone, and means all GPU types with a price")])
        found.append((require_gpu(name, "--gpus").name, int(count) if equals else None))
    return found


def size_job(
    job: Job, requested: Sequence[tuple[str, int | None]], market: Market, limits: Limits, responses: Sequence[float]
) -> Sizing:
    """Return hardware for a job: the requested numbers of GPUs, and the Pareto front of cost and time by GPU type.

    requested: the result of `requested_gpus`; if empty, the front of all GPU types with a price. responses: sampled
    lengths in tokens; if empty, they are assumed (`workload_of`). Raises SpecError.
    """
    if not (steps := job.spec.training.total_steps):
        raise SpecError([Problem("spec.training.totalSteps", "is missing, and hours and money are those of all steps")])
    priced = [gpu for gpu, offer in market.gpus.items() if offer.on_demand is not None]
    search = _Search(job, steps, market, responses, list(dict(requested)) or priced)
    rows, unfit = search.rows_of(requested) if requested else (search.front(priced), [])
    chosen, why = choose(rows, limits)
    ordered = tuple(sorted(dict.fromkeys(rows), key=lambda row: (row.money, row.hours[1])))
    return Sizing(rows=ordered, chosen=chosen, why=why, smallest=search.smallest(), unfit=tuple(unfit))


def nodes_for(job: Job, gpu: str, count: int) -> Cluster:
    """Return `count` GPUs of a type in their usual nodes, as a job's worker pods see them."""
    return in_worker_pods(Cluster((usual_nodes(gpu, count),)), job)


class _Search:
    """Search for layouts of a job on hardware; each is searched once."""

    def __init__(self, job: Job, steps: int, market: Market, responses: Sequence[float], gpus: Sequence[str]) -> None:
        """Screen the GPU types; steps: of the whole job."""
        self._job, self._steps, self._shapes = job, steps, shapes_of(job)
        self._market, self._responses = market, responses
        self._task = task_of(job, self._shapes, device="GPU", responses=responses)
        self._rows: dict[tuple[str, int], Row | None] = {}
        self.fits = {gpu: self._screened(gpu) for gpu in gpus}
        """GPU type -> number of GPUs -> seconds of a step with all models in one pool, where they fit."""

    def front(self, gpus: Sequence[str]) -> list[Row]:
        """Return the Pareto front of cost and time of some GPU types together."""
        points = [(gpu, count, seconds) for gpu in gpus for count, seconds in self.fits[gpu].items()]
        return _front([row for point in _near_front(points, self._market) if (row := self._row_of(*point))])

    def rows_of(self, requested: Sequence[tuple[str, int | None]]) -> tuple[list[Row], list[str]]:
        """Return (rows, sentences on what does not fit); a type without a number gives the rows of its Pareto front."""
        rows, unfit = list[Row](), list[str]()
        for gpu, count in requested:
            found, why = self._exactly(gpu, count) if count else (self.front([gpu]), "")
            rows += found
            unfit += [why] if why else [] if found else [f"{gpu}: does not fit on up to {MAX_GPUS}"]
        return rows, unfit

    def _exactly(self, gpu: str, count: int) -> tuple[list[Row], str]:
        """Return ([row of `count` GPUs, or else of the next number that fits], sentence if `count` does not fit)."""
        if row := self._row_of(gpu, count):
            return [row], ""
        nodes = nodes_for(self._job, gpu, count)
        found = auto_map(self._job, nodes, self._shapes, device="GPU", responses=self._responses)
        assert isinstance(found, Infeasible), "the same search gave no mapping before"
        enough = min((other for other in self.fits[gpu] if other > count), default=0)
        sufficient = " or ".join([*found.options, *[f"{enough} x {gpu}"] * bool(enough)])
        why = f"{count} x {gpu}: does not fit: {found.reason}" + f"; {sufficient} would do" * bool(sufficient)
        row = self._row_of(gpu, enough) if enough else None
        return [row] if row else [], why

    def smallest(self) -> Row | None:
        """Return the row with the fewest GPUs, the cheapest of several."""
        least = {gpu: min(counts) for gpu, counts in self.fits.items() if counts}

        def key(gpu: str) -> tuple[int, float, str]:
            price = self._market.offer(gpu).on_demand or math.inf
            return least[gpu], price * self.fits[gpu][least[gpu]], gpu

        fewest = min(least, key=key, default=None)
        return self._row_of(fewest, least[fewest]) if fewest else None

    def _row_of(self, gpu: str, gpus: int) -> Row | None:
        """Return the fastest layout on some GPUs of a type; None if the job does not fit."""
        if (gpu, gpus) not in self._rows:
            nodes, row = nodes_for(self._job, gpu, gpus), None
            if mapping := mapping_of(self._task, nodes):
                offer, count = self._market.offer(gpu), nodes.groups[0].count
                row = Row(gpu=gpu, gpus=gpus, nodes=count, mapping=mapping, steps=self._steps, offer=offer)
            self._rows[gpu, gpus] = row
        return self._rows[gpu, gpus]

    def _screened(self, gpu: str) -> dict[int, float]:
        """Return number of GPUs -> seconds of a step with all models in one pool, for powers of two where they fit."""
        nodes = nodes_for(self._job, gpu, MAX_GPUS)
        costs = self._task.costs(nodes)
        together = frozenset(role for role in self._task.requests if role not in (*PLACED_WITH, ALONE))
        found: dict[int, float] = {}
        for place, sizes in enumerate(costs.sizes):
            whole = costs.settings[place].nodes.gpus_per_node == nodes.groups[0].gpus_per_node
            for gpus in (size for size in sizes.tolist() if whole and size.bit_count() == 1):
                seconds = float(costs.seconds(together, place, gpus).sum())
                found |= {gpus: seconds} if math.isfinite(seconds) else {}
        return found


def _near_front(points: Sequence[tuple[str, int, float]], market: Market) -> list[tuple[str, int]]:
    """Return (GPU type, number) near the Pareto front; points: GPU type, number, seconds of a step in one pool."""
    dear = [(gpu, count, took, took * count * (market.offer(gpu).on_demand or 1.0)) for gpu, count, took in points]
    return [
        (gpu, count)
        for gpu, count, took, cost in dear
        if not any(took > SLACK * other_took and cost > SLACK * other for _, _, other_took, other in dear)
    ]


def _front(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that no other one beats in both money (or GPU hours, without a price) and time."""
    keys = {row: (row.gpus * row.hours[1] if row.cost() is None else row.money, row.hours[1]) for row in rows}
    return [
        row
        for row, (money, hours) in keys.items()
        if not any(other[0] <= money and other[1] <= hours and other != (money, hours) for other in keys.values())
    ]


def choose(rows: Sequence[Row], limits: Limits) -> tuple[Row | None, str]:
    """Return the best row within the limits, or else the nearest one, and the reason in words.

    With only a budget the fastest row is best, with only a limit of a step the fewest GPUs, else the cheapest row.
    Rows whose high seconds are within the limits go before rows of which only the predicted seconds are.
    """
    if not rows:
        return None, ""
    sure = [row for row in rows if row.excess(limits, case=2) <= 1]
    within = sure or [row for row in rows if row.excess(limits) <= 1]
    if not within:
        nearest = min(rows, key=lambda row: row.excess(limits))
        unpriced = ", as without a price none meets a budget" * math.isinf(nearest.excess(limits))
        return nearest, f"the nearest to {limits}, which nothing here meets{unpriced}"
    hedge = ", its whole interval too" if sure else ", by the prediction; the high end of its interval is not"
    where = f" within {limits}{hedge}" * (limits != Limits())
    by_money = min(within, key=lambda row: (row.money, row.gpus * row.hours[1]))
    best, word = by_money, "the fewest GPU hours" if by_money.cost() is None else "the cheapest"
    if len(rows) == 1:
        word = "what fits"
    elif limits != Limits() and limits == Limits(budget=limits.budget):
        best, word = min(within, key=lambda row: row.hours[1]), "the fastest"
    elif limits != Limits() and limits == Limits(step=limits.step):
        best, word = min(within, key=lambda row: (row.gpus, row.money)), "the fewest GPUs"
    return best, word + where
