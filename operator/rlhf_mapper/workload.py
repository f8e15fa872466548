"""Work of each model in a step: the sequences that it generates, reads and trains on, and their lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import exp, log, sqrt
from statistics import NormalDist

from rlhf_api.job import Job
from rlhf_api.names import Role

PAIRED = ("pairs", "safety_pairs")
"""Data whose rows are two sequences."""


CUTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99, 0.995, 1.0)
"""Shares of a sample, shortest first, between which lengths are taken to be alike: fine where the longest are."""
SAMPLE = 400
"""Numbers that stand for a distribution."""
P99 = NormalDist().inv_cdf(0.99)


@dataclass(frozen=True)
class Lengths:
    """Tokens of sequences: a sample in which each counts alike; a maximum alone is a sample of one."""

    sample: tuple[float, ...]

    @cached_property
    def mean(self) -> float:
        return sum(self.sample) / len(self.sample)

    @cached_property
    def mean_square(self) -> float:
        return sum(length**2 for length in self.sample) / len(self.sample)

    @cached_property
    def longest(self) -> float:
        return max(self.sample)

    @cached_property
    def still_running(self) -> tuple[tuple[float, float], ...]:
        """(tokens, share of the sequences that are at least about as long), shortest first."""
        ordered, count = sorted(self.sample), len(self.sample)
        places = sorted({round(cut * count) for cut in CUTS})
        parts = [(start, ordered[start:end]) for start, end in pairwise(places)]
        return tuple((sum(part) / len(part), 1 - start / count) for start, part in parts)

    def held(self, prompt: float) -> float:
        """Mean tokens of a cached sequence, prompt included, at the moment when all running sequences hold most.

        There are two candidates. All sequences grow together; or each that ends makes room for the next, and then a
        length is weighted by how long it runs.
        """
        together = max(share * (prompt + tokens) for tokens, share in self.still_running)
        return max(together, prompt + self.mean_square / (2 * self.mean))


def lognormal(mean: float, p99: float, *, most: float) -> tuple[float, ...]:
    """A sample of lengths whose logarithms are normal; those beyond `most` end there.

    p99: 99 of 100 are shorter. ValueError if no such distribution has that mean.
    """
    ratio = log(p99 / mean) if 0 < mean < p99 else -1.0
    if not 0 < ratio <= P99**2 / 2:
        raise ValueError(f"99 of 100 are shorter than a number that is 1 to {exp(P99**2 / 2):.0f} times the mean")
    sigma = P99 - sqrt(P99**2 - 2 * ratio)
    middle = log(mean) - sigma**2 / 2
    quantiles = ((number + 0.5) / SAMPLE for number in range(SAMPLE))
    return tuple(min(max(exp(middle + sigma * NormalDist().inv_cdf(each)), 1.0), most) for each in quantiles)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of one model in a step, in sequences of all its ranks together."""

    generated: float = 0.0
    passes: int = 0
    """Generation calls among which they are divided."""
    read: float = 0.0
    """Sequences of forward passes alone."""
    read_apart: bool = False
    """Whether the model makes these passes only in another pool than the actor's, without time of the actor."""
    trained: float = 0.0
    """Sequences of forward and backward passes, over all mini-batches and epochs."""
    updates: int = 0
    """Optimizer steps."""
    read_together: int = 1
    """Sequences of forward passes that have one prompt, which is computed once."""
    trained_together: int = 1
    """Sequences of a mini-batch that have one prompt."""
    trained_share: float = 1.0
    """Share of the parameters that are trained: less than 1 for an adapter."""
    steps_in_host: bool = False
    """Whether its float32 weights, gradients and moments are in host memory for good (`OptimizerInHost`)."""
    keeps_generator: bool = False
    """Whether its generator has its weights from step to step: they do not change, and it never makes room."""
    receives_weights: bool = False
    """Whether the model is only a generator, whose weights come from another pool."""
    recomputes: bool | None = False
    """Whether activations are recomputed in the backward pass; None: as it fits best."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A step of a job."""

    sequences: int
    """Responses of the step's batch, or rows of an offline algorithm's."""
    prompt: Lengths
    response: Lengths
    work: Mapping[Role, Work]
    most_response_tokens: float = 0.0
    """Longest response that may come, if it is longer than all of the sample."""
    works_ahead: bool = False
    """Whether the responses of later steps are generated while a step trains."""
    streams: bool = False
    """Whether models of other pools score the first responses while the longest are generated."""
    pool_divides: tuple[int, ...] = ()
    """Numbers of sequences that the slots of a pool must divide; none: ranks may take uneven shares."""

    @property
    def sequence_tokens(self) -> float:
        """Mean tokens of a prompt with its response."""
        return self.prompt.mean + self.response.mean

    @property
    def most_tokens(self) -> float:
        """Most tokens of a sequence, for which memory must have room."""
        return self.prompt.longest + max(self.response.longest, self.most_response_tokens)

    @property
    def held_tokens(self) -> float:
        """Mean tokens of a sequence in the KV cache when the running sequences hold most."""
        return self.response.held(self.prompt.mean)

    @property
    def tokens(self) -> float:
        """Prompt and response tokens of the batch, which throughput counts (HybridFlow section 8)."""
        return self.sequences * self.sequence_tokens


def workload_of(job: Job, *, responses: Sequence[float] = ()) -> Workload:
    """A step of a job; responses: lengths seen so far in tokens, without which all have the longest."""
    data, training, algorithm = job.spec.data, job.spec.training, job.spec.algorithm
    lengths = Lengths(tuple(responses) or (float(data.max_response_tokens),))
    divided = [job.sequences_per_step, training.mini_batch_size]
    if algorithm.chooses_pairs:  # a rank has all responses to a prompt
        divided.append(job.rows_per_step)
    return Workload(
        sequences=job.sequences_per_step * (2 if algorithm.data in PAIRED else 1),
        prompt=Lengths((float(data.max_prompt_tokens),)),
        response=lengths,
        most_response_tokens=data.max_response_tokens,
        works_ahead=job.spec.rollout.max_staleness > 0 and not job.generates_elsewhere,
        streams=job.spec.rollout.stream,
        work={role: _work(job, role) for role in job.placed_roles()},
        pool_divides=tuple(number for number in divided if number),
    )


def _work(job: Job, role: Role) -> Work:
    """Return the work that the calls of a step give a model, in sequences; a pair counts as two."""
    calls = [(_doer(job, *call), call[1]) for call in job.spec.algorithm.calls]
    methods = [method for model, method in calls if model == role]
    passes = methods.count("generate_sequences")
    trained, updates = _updates(job, role) if any(map(_is_update, methods)) else (0.0, 0)
    read_together, trained_together = _together(job, role, updates)
    return Work(
        generated=job.sequences_per_step * passes,
        passes=passes,
        read=_read_by(job, role, calls),
        read_apart=job.values_by_update and "compute_values" in methods,
        trained=trained,
        updates=updates,
        read_together=read_together,
        trained_together=trained_together,
        keeps_generator=bool(passes) and not trained and "reward" not in job.models(),
        receives_weights=role == "rollout",
        recomputes=job.models()[role].gradient_checkpointing if trained else False,
    )


def _read_by(job: Job, role: Role, calls: Sequence[tuple[str, str]]) -> float:
    """Sequences of forward passes of a model; the actor also does the passes of a reference without own weights."""
    models = {role, "reference"} if role == "actor" and job.reference_is_actor else {role}
    return sum(_read(job, model, method) for model, method in calls if model in models)


def _doer(job: Job, model: str, method: str) -> str:
    """Return the model that does a call: a rollout pool generates for the actor."""
    return "rollout" if job.generates_apart and (model, method) == ("actor", "generate_sequences") else model


def _is_update(method: str) -> bool:
    return method.startswith("update_")


def _read(job: Job, role: str, method: str) -> float:
    """Sequences of forward passes of a call."""
    if (role, method) == ("actor", "compute_log_prob") and not job.recomputes_log_probs:
        return 0.0
    if method == "generate_sequences" or _is_update(method):
        return 0.0
    if method == "compute_loss" and not job.spec.data.pretrain:  # it reads the pretraining rows, one beside each
        return 0.0
    return 2.0 * job.rows_per_step if "pair" in method else float(job.sequences_per_step)


def _updates(job: Job, role: Role) -> tuple[float, int]:
    """(sequences trained on, optimizer steps) of a model that the step updates."""
    algorithm, training = job.spec.algorithm, job.spec.training
    kept = job.sequences_per_step // algorithm.prompts_drawn
    mini, each = min(training.mini_batch_size or kept, kept), 1
    if algorithm.chooses_pairs:  # the rows that are learned from are pairs, one a prompt
        kept, mini = job.rows_per_step, max(mini // job.spec.rollout.samples_per_prompt, 1)
    if algorithm.chooses_pairs or algorithm.data in PAIRED or (role == "actor" and job.spec.data.pretrain):
        each = 2
    return float(kept * training.update_epochs * each), training.update_epochs * -(-kept // mini)


def _together(job: Job, role: Role, updates: int) -> tuple[int, int]:
    """(sequences of forward passes, of a mini-batch) that have one prompt, of a model with so many updates."""
    algorithm, training, samples = job.spec.algorithm, job.spec.training, job.spec.rollout.samples_per_prompt
    if not training.share_prompts:
        return 1, 1
    if algorithm.chooses_pairs or (algorithm.data in PAIRED and role == "actor"):  # both sides of a pair
        return samples, 2
    if role == "actor" and job.spec.data.pretrain:  # of each sequence another one is beside it
        return 1, 1
    mini_batches = max(updates // training.update_epochs, 1)
    return samples, max(samples // mini_batches, 1)
