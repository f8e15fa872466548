"""Work of each model in a step: the sequences that it generates, reads and trains on, and their lengths."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heapreplace
from itertools import pairwise
from math import ceil, exp, log, sqrt
from statistics import NormalDist
from typing import Literal

from rlhf_api.job import Job
from rlhf_api.names import Role

PAIRED = ("pairs", "safety_pairs")
"""Kinds of data whose rows are two sequences each."""
CUTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99, 0.995, 1.0)
"""Quantiles that cut a sorted sample of lengths into parts of similar lengths; the parts of the longest are narrow."""
SAMPLE, PACKED_SAMPLE = 400, 100
"""Numbers of lengths that stand for a distribution, and of those that are packed into micro-batches."""
P99 = NormalDist().inv_cdf(0.99)
ASSUMED_SHARE = 0.5
"""Mean response as a share of `data.maxResponseTokens` if nothing is known. Of published runs with both numbers it is
0.27 (Llama-3.1-8B) and 0.82 (Qwen3-32B, both NeMo RL), and 0.51 (R1-Distill-1.5B, RLinf)."""
P99_OVER_MEAN = 2.0
"""99th percentile of response lengths over their mean, if only the mean is known."""


@dataclass(frozen=True)
class Lengths:
    """Lengths of sequences in tokens: a sample with equal weights; if only a maximum is known, a sample of one."""

    sample: tuple[float, ...]
    source: str = ""
    """Source of the lengths, in words."""

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
        """Points (tokens, share of the sequences that have about this number of tokens or more), shortest first."""
        ordered, count = sorted(self.sample), len(self.sample)
        places = sorted({round(cut * count) for cut in CUTS})
        parts = [(start, ordered[start:end]) for start, end in pairwise(places)]
        return tuple((sum(part) / len(part), 1 - start / count) for start, part in parts)

    def held(self, prompt: float) -> float:
        """Return the mean tokens of a sequence in the KV cache, prompt included, at the time when the cache is fullest.

        The larger of two cases counts. All sequences grow together; or the next sequence replaces each that ends, and
        then a length is weighted by how long it runs.
        """
        together = max(share * (prompt + tokens) for tokens, share in self.still_running)
        return max(together, prompt + self.mean_square / (2 * self.mean))


def lognormal(mean: float, p99: float, *, most: float) -> tuple[float, ...]:
    """Return evenly spaced quantiles of log-normal lengths in tokens, nothing random; longer ones are cut at `most`.

    p99: 99th percentile. Raises ValueError if no log-normal distribution has both numbers.
    """
    ratio = log(p99 / mean) if 0 < mean < p99 else -1.0
    if not 0 < ratio <= P99**2 / 2:
        raise ValueError(f"99 of 100 are shorter than a number that is 1 to {exp(P99**2 / 2):.0f} times the mean")
    sigma = P99 - sqrt(P99**2 - 2 * ratio)
    middle = log(mean) - sigma**2 / 2
    quantiles = ((number + 0.5) / SAMPLE for number in range(SAMPLE))
    return tuple(min(max(exp(middle + sigma * NormalDist().inv_cdf(each)), 1.0), most) for each in quantiles)


def lengths_around(mean: float, most: float) -> tuple[float, ...]:
    """Return lengths of which only the mean is known: log-normal, and 99 of 100 below P99_OVER_MEAN times the mean."""
    return lognormal(mean, min(P99_OVER_MEAN * mean, most), most=most) if mean < most else (most,)


def packed_rows(lengths: Sequence[float], budget: float) -> float:
    """Return how many rows a micro-batch holds on average, as the trainer packs them.

    budget: most tokens of a micro-batch, unless one row is longer. Packing is that of `rlhf_trainer.training.batching`:
    the longest row first, into the micro-batch with the fewest tokens.
    """
    if len(lengths) == 1:
        return max(budget // lengths[0], 1.0)
    ordered = sorted(lengths, reverse=True)[:: max(len(lengths) // PACKED_SAMPLE, 1)]
    count = ceil(sum(min(length, budget) for length in ordered) / budget)
    while count < len(ordered) and not _fits_packed(ordered, count, budget):
        count += 1
    return len(ordered) / min(count, len(ordered))


def _fits_packed(ordered: Sequence[float], count: int, budget: float) -> bool:
    """Whether rows, longest first, fit into `count` micro-batches; a row above the budget has one of its own."""
    filled = [0.0] * count
    for length in ordered:
        if filled[0] and filled[0] + length > budget:
            return False
        heapreplace(filled, filled[0] + length)
    return True


@lru_cache(maxsize=2**10)
def _rows_within(prompt: float, response: Lengths, budgets: Sequence[float], together: int) -> tuple[float, ...]:
    """Return how many sequences a micro-batch holds, for each of the ascending token budgets; prompt: mean length."""
    rows = [1.0]
    for budget in budgets:
        shared = min(together, max(budget // (prompt + response.mean), 1))
        found = packed_rows([prompt / shared + length for length in response.sample], budget)
        rows.append(max(rows[-1], found))  # packing is greedy: a larger budget may hold fewer rows
    return tuple(rows[1:])


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of one model in a step, in sequences of all its ranks together."""

    generated: float = 0.0
    passes: int = 0
    """Number of generation calls among which the generated sequences are divided."""
    read: float = 0.0
    """Number of sequences in forward passes without a backward pass, as in scoring."""
    read_apart: bool = False
    """Whether the `read` passes are left out if the model shares the actor's pool."""
    trained: float = 0.0
    """Sequences that the model is trained on in a step, over all mini-batches and epochs."""
    updates: int = 0
    """Number of optimizer steps of the model in one step of the job."""
    read_together: int = 1
    """Number of sequences that share a prompt in forward passes; the shared prompt is computed once."""
    trained_together: int = 1
    """Number of sequences that share a prompt in a mini-batch; the shared prompt is computed once."""
    trained_share: float = 1.0
    """Trained share of the model's parameters: less than 1 with an adapter (LoRA)."""
    replicas: int = 1
    """Copies of the weights among the data-parallel ranks (HSDP)."""
    compression: Literal["Auto", "None", "TopK"] = "Auto"
    """Whether replicas compress what they send each other (`training.gradientCompression`)."""
    steps_in_host: bool = False
    """Whether float32 weights, gradients and moments are always in host memory (`OptimizerInHost`)."""
    keeps_generator: bool = False
    """Whether the generator keeps the weights between steps: they never change, and nothing else needs the memory."""
    receives_weights: bool = False
    """Whether the model is only a generator, whose weights come from another pool."""
    recomputes: bool | None = False
    """Whether activations are recomputed in the backward pass; None: the mapper decides."""

    def compresses(self, *, over_thin_link: bool) -> bool:
        """Whether replicas send each other compressed steps; each then keeps what it has not sent, in float32."""
        return self.replicas > 1 and (self.compression == "TopK" or (self.compression == "Auto" and over_thin_link))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Work of one step of a job: number and lengths of sequences, and the work of each model."""

    sequences: int
    """Number of responses in the step's batch, or of sequences for an offline algorithm."""
    prompt: Lengths
    response: Lengths
    work: Mapping[Role, Work]
    most_prompt_tokens: float = 0.0
    most_response_tokens: float = 0.0
    """Length in tokens of the longest possible response, which the sample need not contain."""
    works_ahead: bool = False
    """Whether the responses of later steps are generated while a step trains."""
    streams: bool = False
    """Whether models of other pools score the first responses while the longest are generated."""
    may_fuse_updates: bool = False
    """Whether the updates of actor and critic may run as one (`Job.may_fuse_updates`)."""
    pool_divides: tuple[int, ...] = ()
    """Batch sizes in sequences that each pool's number of slots must divide; empty: uneven shares are allowed."""

    @property
    def most_tokens(self) -> float:
        """Largest number of tokens in a sequence, for which memory must have room."""
        return max(self.prompt.longest, self.most_prompt_tokens) + self.most_read_tokens

    @property
    def most_read_tokens(self) -> float:
        """Largest number of tokens in a response; the head computes no others."""
        return max(self.response.longest, self.most_response_tokens)

    def rows_within(self, budgets: Sequence[float], together: int) -> tuple[float, ...]:
        """Return the sequences that a micro-batch holds, by its budget of tokens; `together` share a prompt."""
        return _rows_within(self.prompt.mean, self.response, tuple(budgets), together)

    @property
    def held_tokens(self) -> float:
        """Mean tokens of a sequence in the KV cache when the cache is fullest."""
        return self.response.held(self.prompt.mean)

    @property
    def tokens(self) -> float:
        """Prompt and response tokens of the batch, which throughput counts (HybridFlow section 8)."""
        return self.sequences * (self.prompt.mean + self.response.mean)


def workload_of(job: Job, *, responses: Sequence[float] = (), prompts: Sequence[float] = ()) -> Workload:
    """Return the work of a job's step. responses, prompts: known lengths in tokens, in any number and order.

    Without known lengths, prompts and the responses of data sets are at their limits, and generated responses are
    log-normal with a mean of ASSUMED_SHARE of the limit. None is below the manifest's minimum.
    """
    data, training, algorithm = job.spec.data, job.spec.training, job.spec.algorithm
    most = float(data.max_response_tokens)
    response = Lengths((most,), "the limit")
    if not algorithm.offline:
        least = job.spec.rollout.min_response_tokens
        usual = lengths_around(max(ASSUMED_SHARE * most, least), most)
        assumed = tuple(max(tokens, float(least)) for tokens in usual)
        response = Lengths(assumed, f"assumed: {ASSUMED_SHARE:.0%} of the limit" + f", at least {least}" * (least > 0))
    divided = [job.sequences_per_step, training.mini_batch_size]
    if algorithm.chooses_pairs:  # a rank has all responses to a prompt
        divided.append(job.rows_per_step)
    return Workload(
        sequences=job.sequences_per_step * (2 if algorithm.data in PAIRED else 1),
        prompt=Lengths(tuple(prompts), "known") if prompts else Lengths((float(data.max_prompt_tokens),), "the limit"),
        response=Lengths(tuple(responses), "known") if responses else response,
        most_prompt_tokens=data.max_prompt_tokens,
        most_response_tokens=data.max_response_tokens,
        works_ahead=job.spec.rollout.max_staleness > 0 and not job.generates_elsewhere,
        streams=job.spec.rollout.stream,
        may_fuse_updates=job.may_fuse_updates,
        work={role: _work(job, role) for role in job.placed_roles()},
        pool_divides=tuple(number for number in divided if number),
    )


def _work(job: Job, role: Role) -> Work:
    """Return the work that the calls of a step give a model, in sequences; a pair counts as two."""
    calls = _calls(job)
    methods = [method for model, method in calls if model == role]
    passes = methods.count("generate_sequences")
    trained, updates = _updates(job, role, methods)
    # The actor also runs the forward passes of a reference with its weights.
    readers = {role, "reference"} if role == "actor" and job.reference_is_actor else {role}
    read_together, trained_together = _together(job, role, updates)
    return Work(
        generated=job.sequences_per_step * passes,
        passes=passes,
        read=sum(_read(job, model, method) for model, method in calls if model in readers),
        read_apart=job.values_by_update and "compute_values" in methods,
        trained=trained,
        updates=updates,
        read_together=read_together,
        trained_together=trained_together,
        keeps_generator=bool(passes) and not trained and role != "rollout" and "reward" not in job.models(),
        receives_weights=role == "rollout",
        recomputes=job.models()[role].gradient_checkpointing if trained else False,
    )


def _calls(job: Job) -> Sequence[tuple[str, str]]:
    """Return (model, method) of each call of a step; a rollout in its own pool generates instead of the actor."""
    if not job.generates_apart:
        return job.spec.algorithm.calls
    generation = {("actor", "generate_sequences"): ("rollout", "generate_sequences")}
    return [generation.get(call, call) for call in job.spec.algorithm.calls]


def _read(job: Job, role: str, method: str) -> float:
    """Return the sequences of forward passes in one call of a model's method; 0 for generation and updates."""
    if (role, method) == ("actor", "compute_log_prob") and not job.recomputes_log_probs:
        return 0.0
    if method == "generate_sequences" or method.startswith("update_"):
        return 0.0
    if method == "compute_loss" and not job.spec.data.pretrain:  # it reads a pretraining row for each sequence
        return 0.0
    return 2.0 * job.rows_per_step if "pair" in method else float(job.sequences_per_step)


def _updates(job: Job, role: Role, methods: Sequence[str]) -> tuple[float, int]:
    """Return (sequences trained on, optimizer steps) of a model in a step that calls these methods of the model."""
    if not any(each.startswith("update_") for each in methods):
        return 0.0, 0
    algorithm, training = job.spec.algorithm, job.spec.training
    kept = job.sequences_per_step // algorithm.prompts_drawn
    mini, each = min(training.mini_batch_size or kept, kept), 1
    if algorithm.chooses_pairs:  # it learns from pairs, one for each prompt
        kept, mini = job.rows_per_step, max(mini // job.spec.rollout.samples_per_prompt, 1)
    if algorithm.chooses_pairs or algorithm.data in PAIRED or (role == "actor" and job.spec.data.pretrain):
        each = 2
    return float(kept * training.update_epochs * each), training.update_epochs * -(-kept // mini)


def _together(job: Job, role: Role, updates: int) -> tuple[int, int]:
    """Return how many sequences share a prompt in (forward passes, a mini-batch); updates: of the model in a step."""
    algorithm, training, samples = job.spec.algorithm, job.spec.training, job.spec.rollout.samples_per_prompt
    if not training.share_prompts:
        return 1, 1
    if algorithm.chooses_pairs or (algorithm.data in PAIRED and updates):  # both sides of a pair
        return samples, 2
    if role == "actor" and job.spec.data.pretrain:  # a pretraining row is beside each sequence
        return 1, 1
    mini_batches = max(updates // training.update_epochs, 1)
    return samples, max(samples // mini_batches, 1)
