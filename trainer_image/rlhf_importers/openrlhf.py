"""OpenRLHF: a shell script that calls openrlhf.cli.train_{ppo_ray, sft, rm, dpo}; flags of 0.11, and those of 0.9."""

from collections.abc import Mapping
from typing import Any

from rlhf_api.spec.algorithm_table import ALGORITHMS
from rlhf_importers import several_keys as several
from rlhf_importers.shell import call, flags
from rlhf_importers.table import OPTION_VALUES, Change, Draft, NoCounterpartError, flag, uri_of

PROGRAM = "(program)"
CHANGES: Mapping[str, Change] = {}
"""Functions besides those of `table` that convert values of OpenRLHF's flags."""
ESTIMATORS, OFFLINE, CORRECTIONS = (
    OPTION_VALUES["openrlhf"][name] for name in ("estimators", "programs", "corrections")
)


def read(text: str, source: str) -> tuple[dict[str, Any], list[str]]:
    """Return (flags of the last OpenRLHF program that a script calls, with its name as PROGRAM; notes on guesses)."""
    words, notes = call(text, source, r"openrlhf\.cli\.train_\w+")
    if not words or not words[0].startswith("openrlhf.cli.train_"):
        raise NoCounterpartError("it calls no openrlhf.cli.train_... program")
    return {PROGRAM: words[0].rsplit(".", 1)[-1], **flags(words)}, notes


def algorithm(given: Mapping[str, Any], _: str | None) -> dict[str, Any]:
    """Return the manifest's algorithm for OpenRLHF's program or, in RL, for the advantage estimator."""
    if (program := given[PROGRAM]) in OFFLINE:
        return {"name": OFFLINE[program]}
    estimator = given.get("algo.advantage.estimator", given.get("advantage_estimator", "gae"))
    if program != "train_ppo_ray" or estimator not in ESTIMATORS:
        raise NoCounterpartError(f"{program} with the estimator {estimator} is no algorithm here")
    return {"aggregation": "TokenMean", **ESTIMATORS[estimator]}


def combine(draft: Draft, values: Mapping[str, Any]) -> None:
    """Set the fields of the draft manifest that depend on several keys of OpenRLHF's configuration."""
    draft.name = draft.algorithm.lower()
    rank, alpha, targets = (values[f"ds.lora.{key}"] for key in ("rank", "alpha", "target_modules"))
    several.adapters(draft, ALGORITHMS[draft.algorithm].trained, rank=rank, alpha=alpha, targets=targets)
    _data(draft, values)
    if draft.algorithm == "DPO" and flag(values["model.ipo_enable"]):
        draft.put("algorithm.loss", "IPO")
    if draft.algorithm in OFFLINE.values():
        several.warmup(draft, draft.role, "lr_warmup_ratio", values["lr_warmup_ratio"], None)
        return
    model = str(values["reward.model_name_or_path"] or values["actor.model_name_or_path"])
    several.critic_from(draft, model.partition(",")[0])
    for role in draft.spec.get("models", {}):
        several.warmup(draft, role, f"{role}.lr_warmup_ratio", values[f"{role}.lr_warmup_ratio"], None)
    _loss(draft, values)
    _reward(draft, values)


def _data(draft: Draft, values: Mapping[str, Any]) -> None:
    if dataset := values["data.prompt_dataset"] or values["data.dataset"]:
        several.train_on(draft, [{"uri": uri_of(dataset)}])
        if "," in str(dataset):
            draft.checks.append("data.train: several data sets with a comma between; write them into data.train.mix")
    if held_out := values["eval.dataset"]:
        several.evaluate_on(draft, {"uri": uri_of(held_out), "split": values["eval.split"]}, values["eval.steps"])
    total, response = int(values["data.max_len"]), int(values["rollout.max_new_tokens"] or 0)
    if not response:
        several.halve(draft, "data.max_len", total)
    draft.put("data.maxResponseTokens", response or None)
    draft.put("data.maxPromptTokens", values["data.prompt_max_len"] or (max(total - response, 1) if response else None))


def _loss(draft: Draft, values: Mapping[str, Any]) -> None:
    target, horizon = values["algo.kl.target"], values["algo.kl.horizon"]
    several.kl(draft, values["algo.kl.init_coef"], in_loss=values["algo.kl.use_loss"], target=target, horizon=horizon)
    draft.put("algorithm.kl.estimator", str(values["algo.kl.estimator"]).upper())
    if both := values["actor.eps_clip_low_high"]:
        draft.spec["algorithm"] |= {"clipRange": both[0], "clipRangeHigh": both[1]}
    if values["actor.policy_loss_type"] == "gspo":
        several.whole_responses(draft)
    if values["algo.advantage.is_correction_enable"]:
        kind = values["algo.advantage.is_correction_type"]
        low, high = values["algo.advantage.is_correction_threshold"]
        several.correction(draft, low=low, high=high, **CORRECTIONS[kind])
        if kind == "seq-mask-tis":
            draft.checks.append("rolloutCorrection weighs what is kept by the response's ratio, not by each token's")


def _reward(draft: Draft, values: Mapping[str, Any]) -> None:
    draft.put("algorithm.rewards.clip", max(map(abs, values["reward.clip_range"])))
    remote = str(values["reward.remote_url"] or values["train.agent_func_path"] or "").split(",")[0]
    if remote.endswith(".py"):
        draft.put("models.reward.entrypoint", several.entrypoint(remote, "reward_func"))
        draft.checks.append(several.FUNCTION)
        if label := values["data.label_key"]:
            draft.put("data.train.columns", [str(label)])
    elif remote:
        draft.put("models.reward.url", remote)
        draft.checks.append("models.reward.url: requests and answers are those of docs/rewards.md")
    elif model := values["reward.model_name_or_path"]:
        draft.put("models.reward.uri", uri_of(str(model).split(",")[0]))
        if "," in str(model):
            draft.checks.append("models.reward: a sum has one model at most; the first was taken")
