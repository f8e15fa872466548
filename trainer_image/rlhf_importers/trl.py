"""TRL: a configuration file (YAML) or a script for `trl grpo|rloo|sft|dpo|kto|reward`; keys of TRL 1.9."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_api.kubectl_yaml import read_one
from rlhf_api.spec.algorithm_table import ALGORITHMS
from rlhf_importers import several_keys as several
from rlhf_importers.shell import call, flags
from rlhf_importers.table import OPTION_VALUES, Change, Draft, NoCounterpartError, flag, one_of, schedule, uri_of

PROGRAM, PENALTY = "(program)", "get_soft_overlong_punishment"
PROGRAMS, AGGREGATIONS, LOSSES = (OPTION_VALUES["trl"][name] for name in ("programs", "aggregations", "losses"))
MARKS, VERIFIERS = (OPTION_VALUES["trl"][name] for name in ("marks", "verifiers"))
CALLED = r"(?:\S*/)?(?:trl|(?:scripts|open_r1)/\w+\.py)"
"""Pattern of the word by which a script calls TRL: its command, or a file of TRL or of open-r1."""
PEFT_TARGETS = ("q_proj", "v_proj")
"""Names of the layers that PEFT adapts by default in most models."""


def _scale(value: Any) -> bool:
    if value == "batch":
        raise NoCounterpartError("rewards are divided by the deviation of their prompt's, or not at all")
    return value not in (False, "none", "false", "False")


CHANGES: Mapping[str, Change] = {
    "aggregation": one_of(AGGREGATIONS),
    "scale": _scale,
    "top_k": lambda value: value or -1,
    "truncated": lambda value: "Mask" if flag(value) else "Keep",
}


def read(text: str, source: str) -> tuple[dict[str, Any], list[str]]:
    """Return (keys of a TRL file, or flags of a script's call of TRL with its name as PROGRAM; notes on guesses)."""
    if re.search(rf"(?:^|[\s\"']){CALLED}[ \t\\\"']", re.sub(r"#.*", "", text), re.MULTILINE):
        words, notes = call(text, source, CALLED)
        if not re.fullmatch(CALLED, "".join(words[:1])):
            raise NoCounterpartError("it calls no program of TRL by its name")
        found = re.search(r"--num_processes[ =](\d+)", text)  # an option of accelerate, before the program's name
        launcher = {"num_processes": int(found[1])} if found else {}
        return {PROGRAM: Path("".join(words[words[0].endswith("trl") :][:1])).stem, **launcher, **flags(words)}, notes
    document = read_one(text, f"{source}: ")
    if not isinstance(document, dict):
        raise NoCounterpartError("it is no mapping of keys to values")
    return {str(key): value for key, value in document.items()}, []


def algorithm(given: Mapping[str, Any], chosen: str | None) -> dict[str, Any]:
    """Return the manifest's algorithm for TRL's program; for a file, `chosen` or keys of only one program decide."""
    if program := given.get(PROGRAM):
        if program not in PROGRAMS:
            raise NoCounterpartError(f"trl {program} is no algorithm here; expected {', '.join(PROGRAMS)}")
        return {"name": PROGRAMS[program]}
    found = chosen or next((name for name, marks in MARKS.items() if any(key in given for key in marks)), None)
    if found not in MARKS:
        raise NoCounterpartError(f"no key tells its trainer; say --algorithm, one of {', '.join(MARKS)}")
    return {"name": found}


def combine(draft: Draft, values: Mapping[str, Any]) -> None:
    """Set the fields of the draft manifest that depend on several keys of TRL's configuration."""
    draft.name = draft.algorithm.lower()
    rank, targets = flag(values["use_peft"]) and values["lora_r"], values["lora_target_modules"] or PEFT_TARGETS
    trained = ALGORITHMS[draft.algorithm].trained
    several.adapters(draft, trained, rank=rank, alpha=values["lora_alpha"], targets=targets)
    several.outputs(draft, values["report_to"], "trl")
    _optimizer(draft, values)
    _data(draft, values)
    if draft.algorithm in ("GRPO", "RLOO"):
        _loss(draft, values)
        _reward(draft, values)
        return
    several.halve(draft, "max_length", int(values["max_length"]))
    kinds = several.as_list(values["loss_type"])
    if draft.algorithm == "DPO" and len(kinds) == 1 and kinds[0] in LOSSES:
        draft.spec["algorithm"] |= LOSSES[kinds[0]]
        draft.put("algorithm.labelSmoothing", values["label_smoothing"] if kinds == ["robust"] else None)
    elif kinds not in ([], ["nll"], ["kto"]):
        draft.checks.append(f"there is no loss {', '.join(map(str, kinds))} here")


def _optimizer(draft: Draft, values: Mapping[str, Any]) -> None:
    draft.put("models.<role>.optimizer.betas", [values["adam_beta1"], values["adam_beta2"]])
    try:
        draft.put("models.<role>.optimizer.schedule", schedule(values["lr_scheduler_type"]))
    except NoCounterpartError as why:
        draft.put("models.<role>.optimizer.schedule", "Cosine")
        draft.checks.append(f"lr_scheduler_type: {why}; Cosine was taken")
    steps, share = _steps(draft, values), values["warmup_ratio"] or values["warmup_steps"] or 0
    if share < 1:
        several.warmup(draft, draft.role, "warmup_ratio", share, steps)
    else:
        draft.put("models.<role>.optimizer.warmupSteps", int(share))


def _steps(draft: Draft, values: Mapping[str, Any]) -> int | None:
    """Set the draft manifest's batch sizes and steps or epochs; return the number of steps if it is given."""
    each, times, processes = (
        int(values[key]) for key in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_processes")
    )
    counted = f"{processes} process{'es' * (processes > 1)}"
    draft.checks.append(f"batch sizes are counted for {counted}; TRL multiplies by its number")
    steps, update = int(values["max_steps"]), each * times * processes
    if samples := draft.get("rollout.samplesPerPrompt"):
        generated = int(
            values["generation_batch_size"] or each * processes * int(values["steps_per_generation"] or times)
        )
        prompts = max(generated // samples, 1)
        draft.put("training.promptBatchSize", prompts)
        draft.put("training.miniBatchSize", min(update, prompts * samples))
        steps = steps * update // max(generated, 1) if steps > 0 else steps
    else:
        draft.put("training.batchSize", update)
    if steps > 0:
        draft.put("training.totalSteps", steps)
        return steps
    draft.put("training.totalEpochs", max(round(float(values["num_train_epochs"])), 1))
    return None


def _data(draft: Draft, values: Mapping[str, Any]) -> None:
    names = {"name": "subset", "split": "split"}
    keys = {"responseKey": "completion"} if draft.algorithm == "KTO" else {}
    if sets := values["datasets"]:
        rows = [keys | {ours: each[theirs] for theirs, ours in names.items() if theirs in each} for each in sets]
        several.train_on(draft, [{"uri": uri_of(each["path"])} | row for each, row in zip(sets, rows, strict=True)])
    elif name := values["dataset_name"]:
        subset = keys | ({"subset": values["dataset_config"]} if values["dataset_config"] else {})
        several.train_on(draft, [{"uri": uri_of(name), **subset}])
        if values["eval_strategy"] not in ("no", False):
            held_out = {"uri": uri_of(name), **subset, "split": values["dataset_test_split"]}
            several.evaluate_on(draft, held_out, values["eval_steps"])
    if draft.algorithm == "SFT":
        draft.checks.append("data.train: say messagesKey for a column of conversations, or promptKey and responseKey")


def _loss(draft: Draft, values: Mapping[str, Any]) -> None:
    in_loss = draft.algorithm == "GRPO"
    several.kl(draft, values["beta"], in_loss=in_loss)
    if not draft.get("data.maxPromptTokens"):
        draft.put("data.maxPromptTokens", 512)
        note = "TRL does not bound prompts; here longer ones than 512 tokens are left out"
        draft.checks.append(f"data.maxPromptTokens: {note}")
    if values["importance_sampling_level"] in ("sequence", "sequence_token"):
        several.whole_responses(draft)
    if clip := values["reward_clip_range"]:
        draft.put("algorithm.rewards.clip", max(map(abs, clip)))
    if flag(values["use_vllm"]) and flag(values.get("vllm_importance_sampling_correction", in_loss)):
        level, mode = str(values["vllm_importance_sampling_mode"] or "sequence_mask").split("_")
        low, high = (values[f"vllm_importance_sampling_{bound}"] for bound in ("clip_min", "clip_max"))
        high = high or values["vllm_importance_sampling_cap"] or 3.0
        mode = "Mask" if mode == "mask" else "Clip" if low else "Truncate"
        low = low or (1e-9 if mode == "Mask" else None)  # TRL masks large ratios only
        several.correction(draft, level=level.capitalize(), mode=mode, low=low, high=high)


def _reward(draft: Draft, values: Mapping[str, Any]) -> None:
    model = values["reward_model_name_or_path"]
    rewards: list[dict[str, Any]] = [{"uri": uri_of(model)}] if model else []
    rewards += _rewards_of(draft, [str(function) for function in several.as_list(values["reward_funcs"])])
    weights = values["reward_weights"] or [1.0] * len(rewards)
    parts = [(weight, reward) for weight, reward in zip(weights, rewards, strict=False) if reward]
    if len(parts) > 1:
        named = enumerate(parts, 1)
        draft.put("models.reward.sum", [{"name": f"part_{n}", "weight": w, "reward": part} for n, (w, part) in named])
    elif parts:
        draft.put("models.reward", parts[0][1])


def _rewards_of(draft: Draft, functions: list[str]) -> list[dict[str, Any]]:
    rewards = [_reward_of(draft, function) for function in functions]
    if not functions or any(rewards):
        return rewards
    draft.checks.append("models.reward: write the functions of these entry points: docs/rewards.md")
    return [{} if function == PENALTY else {"entrypoint": f"rewards:{function}"} for function in functions]


def _reward_of(draft: Draft, function: str) -> dict[str, Any]:
    """Return the reward of a function; empty for one that is an option of the algorithm, or has no counterpart."""
    module, _, name = function.rpartition(".")
    if module:
        draft.checks.append(several.FUNCTION)
        return {"entrypoint": f"{module}:{name}"}
    if function in VERIFIERS:
        return {"verifier": VERIFIERS[function]}
    if function == PENALTY:
        draft.put("algorithm.rewards.overlongPenalty", {"bufferTokens": 256})
    else:
        draft.checks.append(f"models.reward: there is no {function} here")
    return {}
