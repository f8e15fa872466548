"""Names of the measures of a job's evaluation; a step's record has them as `evaluation/<name>`."""

from rlhf_api.job import Job
from rlhf_api.spec.data import DataSets
from rlhf_api.spec.verifiers import RewardVerifier


def measures_of(job: Job) -> list[str]:
    """Return the names of a job's evaluation measures, without parts that functions name only when they are called."""
    asked = job.spec.evaluation
    if asked is None:
        return []
    if job.spec.algorithm.offline:
        return ["loss" if "completions" in job.spec.algorithm.data else "pair_accuracy"]
    scores = [*["reward"] * job.has_reward, *["cost"] * ("cost" in job.models())]
    scores += [*(function.name for function in asked.functions), *(verifier.name for verifier in asked.verifiers)]
    passes = [f"{measure}_pass_at_{k}" for measure in verified(job) for k in pass_sizes(asked.samples_per_prompt)]
    sets = ["", *(of_set.name for of_set in asked.data.sets)] if isinstance(asked.data, DataSets) else [""]
    names = [*scores, "response_tokens", "response_finished", *passes, "win_rate"]
    return [measure_of(name, measure) for name in sets for measure in names]


def is_measured(job: Job, name: str) -> bool:
    """Whether a job's evaluation has a measure of this name, or may have it as a part of a function's score."""
    functions = job.spec.evaluation.functions if job.spec.evaluation else ()
    parts = tuple(f"{function.name}_" for function in functions)
    return name in measures_of(job) or name.rpartition("/")[2].startswith(parts)


def measure_of(name: str, measure: str) -> str:
    """Return the full name of a measure over the data set `name`, or over all rows for the empty name."""
    return f"{name}/{measure}" if name else measure


def verified(job: Job) -> list[str]:
    """Return the names of an evaluation's pass-or-fail measures (verifiers), which also give a pass@k."""
    assert job.spec.evaluation, "the job has an evaluation"
    names = [verifier.name for verifier in job.spec.evaluation.verifiers]
    return [*names, "reward"] if isinstance(job.spec.models.reward, RewardVerifier) else names


def pass_sizes(samples: int) -> list[int]:
    """Return the k for which pass@k is measured: 2, 4, ... up to `samples`, and `samples` itself."""
    return sorted({*(2**power for power in range(1, samples.bit_length())), samples} - {1})
