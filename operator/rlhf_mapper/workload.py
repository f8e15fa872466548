"""What each model of a job does in a step: the sequences it generates, reads and trains on, and how long they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_api.algorithms import DPO, GRPO, ActorCritic, CostModel, OnlineDPO, PolicyGradient, ReMax, RewardModel
from rlhf_api.job import Job
from rlhf_api.names import Role


@dataclass(frozen=True)
class Lengths:
    """Tokens of sequences: a sample in which each counts alike; a maximum alone is a sample of one."""

    sample: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.sample) / len(self.sample)

    @property
    def longest(self) -> float:
        return max(self.sample)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one model does in a step, in sequences of all its ranks together."""

    generated: float = 0.0
    passes: int = 0
    """Generation calls among which they are divided."""
    read: float = 0.0
    """Sequences of forward passes alone."""
    trained: float = 0.0
    """Sequences of forward and backward passes, over all mini-batches and epochs."""
    updates: int = 0
    """Optimizer steps."""
    recomputes: bool = False
    """Whether activations are recomputed in the backward pass."""


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
    micro_batch_tokens: int = 16384
    """Most tokens of a forward pass."""
    pool_divides: tuple[int, ...] = ()
    """Numbers of sequences that the slots of a pool must divide; none: ranks may take uneven shares."""

    @property
    def sequence_tokens(self) -> float:
        """Mean tokens of a prompt with its response."""
        return self.prompt.mean + self.response.mean

    @property
    def most_tokens(self) -> float:
        """Of a sequence, which memory must have room for."""
        return self.prompt.longest + max(self.response.longest, self.most_response_tokens)

    @property
    def tokens(self) -> float:
        """Prompt and response tokens of the batch, which throughput counts (HybridFlow section 8)."""
        return self.sequences * self.sequence_tokens


PAIRED = (RewardModel, CostModel, DPO)
"""Algorithms whose rows are pairs of sequences."""


def workload_of(job: Job, *, responses: Sequence[float] = ()) -> Workload:
    """A step of a job; responses: lengths seen so far in tokens, without which all have the longest."""
    data, training = job.spec.data, job.spec.training
    lengths = Lengths(tuple(responses) or (float(data.max_response_tokens),))
    divided = [job.sequences_per_step, training.mini_batch_size]
    if isinstance(job.spec.algorithm, OnlineDPO):  # a rank has all responses to a prompt
        divided.append(job.rows_per_step)
    pairs = 2 if isinstance(job.spec.algorithm, PAIRED) else 1
    return Workload(
        sequences=job.sequences_per_step * pairs,
        prompt=Lengths((float(data.max_prompt_tokens),)),
        response=lengths,
        most_response_tokens=data.max_response_tokens,
        work={role: _work(job, role) for role in job.models()},
        micro_batch_tokens=training.micro_batch_tokens,
        pool_divides=tuple(number for number in divided if number),
    )


def _work(job: Job, role: Role) -> Work:
    """Sequences of a model; a pair of the data is two."""
    algorithm, rows = job.spec.algorithm, job.sequences_per_step
    recomputes = job.models()[role].gradient_checkpointing
    if algorithm.offline:
        each = rows * 2 if isinstance(algorithm, PAIRED) else rows
        trains = role in algorithm.trained
        return Work(
            read=0 if trains else each, trained=each if trains else 0, updates=int(trains), recomputes=recomputes
        )
    twice = 2 if isinstance(algorithm, ReMax) and role in ("actor", "reward") else 1
    trained, updates = _updates(job, role)
    return Work(
        generated=rows * twice if role == "actor" else 0,
        passes=twice if role == "actor" else 0,
        read=_read(job, role),
        trained=trained,
        updates=updates,
        recomputes=recomputes,
    )


def _read(job: Job, role: Role) -> float:
    """Sequences of forward passes of a model of an RL algorithm."""
    rows = job.sequences_per_step
    match job.spec.algorithm, role:
        case OnlineDPO(), "actor":
            return 0.0  # its loss reads what the update computes
        case OnlineDPO(), "reference":
            return 2.0 * job.rows_per_step
        case ReMax(), "reward":
            return 2.0 * rows
    return rows * (2.0 if _pretrains(job, role) else 1.0)


def _updates(job: Job, role: Role) -> tuple[float, int]:
    """(sequences trained on, optimizer steps) of a model of an RL algorithm."""
    if role not in job.trained():
        return 0.0, 0
    algorithm, training = job.spec.algorithm, job.spec.training
    kept = job.sequences_per_step // ((algorithm.oversampling or 1) if isinstance(algorithm, GRPO) else 1)
    mini = min(training.mini_batch_size or kept, kept)
    if isinstance(algorithm, OnlineDPO):  # of each prompt's responses two are learned from
        kept, mini = 2 * job.rows_per_step, 2 * max(mini // job.spec.rollout.samples_per_prompt, 1)
    epochs = training.update_epochs if isinstance(algorithm, PolicyGradient | OnlineDPO) else 1
    return float(kept * epochs * (2 if _pretrains(job, role) else 1)), epochs * -(-kept // mini)


def _pretrains(job: Job, role: Role) -> bool:
    """Whether the model also learns from pretraining rows, one beside each sequence (PPO-ptx)."""
    algorithm = job.spec.algorithm
    return role == "actor" and isinstance(algorithm, ActorCritic) and bool(algorithm.pretrain_coefficient)
