"""Rules: a function for each cause of causes.yaml, which returns a job's evidence of the cause or None; thresholds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlhf_api.spec.algorithm_table import ALGORITHMS
from rlhf_api.spec.algorithms import CUSTOM
from rlhf_trainer.why.seen import Array, Row, Seen, column, median

MIN_STEPS = 5
"""Fewest steps of a series from which a rule draws a conclusion."""
MIN_ROWS = 20
"""Fewest rows from which a rule draws a conclusion."""


@dataclass(frozen=True)
class Shown:
    """Evidence of a cause in a job."""

    numbers: Mapping[str, float | str] = field(default_factory=dict)
    """Values of the cause's sentence in causes.yaml."""
    rows: Sequence[Row] = ()
    """Rows that show the cause, the clearest first."""


Rule = Callable[[Seen], Shown | None]


def stale_weights(seen: Seen) -> Shown | None:
    """Find a generator that moves away from the trainer: a KL that grows, although no option of the job causes it."""
    kl, rollout = seen.series("kl/rollout"), seen.section("rollout")
    by_design = rollout.get("maxStaleness") or rollout.get("quantization") or rollout.get("kvCache")
    replays = seen.section("algorithm").get("name") == CUSTOM and seen.series("staleness").values.any()
    if by_design or replays or len(kl) < MIN_STEPS or not kl.last > max(1e-3, 20 * float(kl.values[0])):
        return None
    step = int(kl.steps[kl.values > 1e-3][0])
    return Shown({"first": float(kl.values[0]), "last": kl.last, "step": step})


def mixed_groups(seen: Seen) -> Shown | None:
    """Find advantages whose mean over the responses to a prompt is not 0, in an algorithm that compares responses."""
    groups = [group for group in seen.groups if len(group) == seen.group_size]
    if seen.group_size < 2 or not _compares(seen) or len(groups) * seen.group_size < MIN_ROWS:
        return None
    advantages, rewards = (np.stack([column(each, name) for each in groups]) for name in ("advantage", "reward"))
    if not np.isfinite(advantages).all() or np.ptp(advantages) == 0:
        return None
    means = advantages.mean(1)
    between = float(np.var(means) / np.var(advantages))
    if between < 0.2:
        return None
    numbers = {"between": 100 * between, "groups": len(groups), "same": int((np.ptp(rewards, 1) == 0).sum())}
    return Shown(numbers, [row for place in np.argsort(-np.abs(means)) for row in groups[place]])


def _compares(seen: Seen) -> bool:
    """Whether the algorithm compares the responses to a prompt; a user's own algorithm counts if it has no critic."""
    algorithm = ALGORITHMS.get(str(seen.section("algorithm").get("name")))
    if algorithm is None:
        return not seen.section("models").get("critic")
    options = algorithm.comparing
    return options is not None and all(seen.option(name) == value for name, value in options.items())


def reward_scale(seen: Seen) -> Shown | None:
    """Find a jump of the reward's size from one step to the next, while responses stay as they are."""
    mean, spread, length = (seen.series(name) for name in ("reward/mean", "reward/std", "response_length/mean"))
    if len(mean) < 2 * MIN_STEPS or len(spread) != len(mean):
        return None
    for place in range(3, len(mean) - 2):
        before, after = slice(max(0, place - 4), place), slice(place, place + 3)
        sizes = [[median(np.abs(each.values[at])) for at in (before, after)] for each in (mean, spread)]
        ratios = [now / max(then, 1e-9) for then, now in sizes]
        longer = median(length.values[after]) / max(median(length.values[before]), 1.0)
        is_scaled = min(ratios) > 5 or 0 < max(ratios) < 0.2
        if is_scaled and 1 / 3 < ratios[0] / ratios[1] < 3 and 0.7 < longer < 1.4:
            numbers = {"before": median(spread.values[before]), "after": median(spread.values[after])}
            rows = [row for row in seen.rows if row["step"] >= mean.steps[place]]
            return Shown({**numbers, "ratio": ratios[1], "step": int(mean.steps[place])}, rows)
    return None


def constant_reward(seen: Seen) -> Shown | None:
    """Find a reward that is the same for all responses from the first step on."""
    mean, spread = seen.series("reward/mean"), seen.series("reward/std")
    if len(mean) < MIN_STEPS or len(spread) != len(mean):
        return None
    constant = spread.values <= 1e-6 * np.maximum(1.0, np.abs(mean.values))
    is_solved = seen.is_judged_apart and seen.series(seen.measure).last > 0.95
    if not constant[:MIN_STEPS].all() or constant.mean() < 0.9 or is_solved:
        return None
    texts = {row["response"] for row in seen.rows}
    return Shown({"reward": mean.last, "steps": int(constant.sum()), "texts": len(texts)}, seen.rows)


def repeated_prompt(seen: Seen) -> Shown | None:
    """Find a prompt that a large share of the kept groups have."""
    counts = Counter(group[0]["prompt"] for group in seen.groups)
    total = sum(counts.values())
    if total < MIN_ROWS // 2:
        return None
    (prompt, most), *_ = counts.most_common(1)
    if most / total < 0.25:
        return None
    rows = [row for row in seen.rows if row["prompt"] == prompt]
    return Shown({"share": 100 * most / total, "distinct": len(counts), "groups": total}, rows[-20:])


def no_end(seen: Seen) -> Shown | None:
    """Find responses that are cut off from the first steps on."""
    finished = seen.series("response_finished/mean")
    if len(finished) < MIN_STEPS or not max(finished.first, finished.values[0]) < 0.5:
        return None
    limit = seen.section("data").get("maxResponseTokens", 0)
    return Shown({"cut": 100 * (1 - finished.first), "limit": limit}, _cut(seen.rows))


def cut_rewarded(seen: Seen) -> Shown | None:
    """Find a higher reward of cut responses than their length explains, while their share grows."""
    finished = seen.series("response_finished/mean")
    if len(finished) < MIN_STEPS or not finished.last < finished.first - 0.2:
        return None
    is_cut = np.array([row.get("finished") is False for row in seen.rows], dtype=bool)
    if min(is_cut.sum(), (~is_cut).sum()) < MIN_ROWS // 2:
        return None
    lengths, rewards = column(seen.rows, "response_tokens"), column(seen.rows, "reward")
    unexplained = rewards - np.polyval(np.polyfit(lengths[~is_cut], rewards[~is_cut], 1), lengths)
    gap, noise = float(np.mean(unexplained[is_cut])), float(np.std(unexplained[~is_cut]))
    if not gap > 1.0 * max(noise, 1e-9):
        return None
    numbers = {"gap": gap, "first": 100 * (1 - finished.first), "last": 100 * (1 - finished.last)}
    return Shown(numbers, _cut(seen.rows))


def unlearned_values(seen: Seen) -> Shown | None:
    """Find a critic whose values explain nothing of the returns after the first steps."""
    explained = seen.series("explained_variance/value")
    if len(explained) < 3 * MIN_STEPS or not max(explained.last, median(explained.values[MIN_STEPS:])) < 0.05:
        return None
    return Shown({"last": explained.last, "steps": len(explained)})


def fast_learning(seen: Seen) -> Shown | None:
    """Find an update that clips many tokens, or moves the entropy by a factor, after which the reward is lost."""
    rewards, clipped, entropy = (seen.series(name) for name in ("reward/mean", "clip_fraction", "entropy"))
    if len(rewards) < MIN_STEPS or not len(clipped) == len(entropy) == len(rewards):
        return None
    for place in range(len(rewards) - 3):
        before, after = median(rewards.values[max(0, place - 4) : place + 1]), median(rewards.values[place + 1 :][:3])
        around = entropy.values[place : place + 3]
        is_large = clipped.values[place] > 0.1 or around.max() > 4 * max(around.min(), 1e-9)
        if is_large and before - after > 0.5 * abs(before):
            optimizer = (seen.section("models").get("actor") or {}).get("optimizer") or {}
            rate, step = float(optimizer.get("learningRate", 0.0)), int(rewards.steps[place])
            numbers = {"before": before, "after": after, "clipped": 100 * float(clipped.values[place])}
            rows = [row for row in seen.rows if row["step"] > step]
            return Shown({**numbers, "step": step, "rate": rate, "lower": rate / 10}, rows)
    return None


def rewarded_kl(seen: Seen) -> Shown | None:
    """Find a growing KL whose penalty is larger than the gain of the reward."""
    kl, coefficient = seen.series("kl/reference"), seen.series("kl/coefficient").last
    rewards, spread = seen.series("reward/mean"), seen.series("reward/std")
    if len(kl) < 2 * MIN_STEPS or not coefficient > 0:
        return None
    unit = max(spread.first, 1e-9) if seen.option("rewards.normalization") == "Running" else 1.0
    gain = max(rewards.last - rewards.first, 0.0) / unit
    penalty = coefficient * kl.last
    grows = kl.last > 1.3 * median(kl.values[-15:-5])
    if not (grows and penalty > max(1.5 * gain, 1.0)):
        return None
    return Shown({"first": kl.first, "last": kl.last, "coefficient": coefficient, "penalty": penalty, "gain": gain})


def length_hacking(seen: Seen) -> Shown | None:
    """Find responses that grow because the reward follows their length, while a measure apart from it does not gain."""
    length = seen.series("response_length/mean")
    if len(length) < MIN_STEPS or not length.last > 1.15 * length.first or len(seen.rows) < MIN_ROWS:
        return None
    related = _correlation(column(seen.rows, "response_tokens"), column(seen.rows, "reward"))
    measured = seen.series(seen.measure)
    is_lost = seen.is_judged_apart and len(measured) > 1 and measured.values[-1] < 0.95 * measured.values[0]
    if related < (0.5 if is_lost else 0.85):
        return None
    rows = sorted(seen.rows, key=lambda row: -row.get("response_tokens", 0))
    return Shown({"first": length.first, "last": length.last, "correlation": related}, rows)


def free_of_reference(seen: Seen) -> Shown | None:
    """Find held-out responses whose reward rises while a measure apart from the reward falls."""
    measured, rewards = seen.series(seen.measure), seen.series("evaluation/reward")
    is_free = not float(seen.option("kl.coefficient", 0.0)) > 0
    if not (is_free and seen.is_judged_apart and len(measured) > 1 and len(rewards) == len(measured)):
        return None
    best = np.maximum.accumulate(measured.values)
    place = int(np.argmax(best - measured.values))
    peak = int(np.argmax(measured.values[: place + 1]))
    fell, kept = measured.values[place], measured.values[peak]
    if not (kept - fell > 0.08 * abs(kept) and rewards.values[place] > rewards.values[peak]):
        return None
    first, last, step = rewards.values[peak], rewards.values[place], int(measured.steps[place])
    numbers = {"measure": seen.measure, "step": step, "peak": kept, "fell": fell, "first": first, "last": last}
    return Shown(numbers, sorted(seen.rows, key=lambda row: -row["reward"]))


RULES: Mapping[str, Rule] = {
    "StaleWeights": stale_weights,
    "MixedGroups": mixed_groups,
    "RewardScale": reward_scale,
    "ConstantReward": constant_reward,
    "RepeatedPrompt": repeated_prompt,
    "NoEnd": no_end,
    "CutRewarded": cut_rewarded,
    "UnlearnedValues": unlearned_values,
    "FastLearning": fast_learning,
    "RewardedKL": rewarded_kl,
    "LengthHacking": length_hacking,
    "NoKLPenalty": free_of_reference,
}


def _cut(rows: Sequence[Row]) -> list[Row]:
    return sorted((row for row in rows if row.get("finished") is False), key=lambda row: -row["reward"])


def _correlation(one: Array, other: Array) -> float:
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])
