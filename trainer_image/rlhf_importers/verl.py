"""verl: a Hydra configuration (YAML) or a script with overrides of verl.trainer.main_ppo; keys of v0.4 to v0.9."""

import re
from collections.abc import Mapping
from typing import Any

from rlhf_api.kubectl_yaml import read_one
from rlhf_importers import several_keys as several
from rlhf_importers.scalars import UNKNOWN, scalar
from rlhf_importers.shell import call
from rlhf_importers.table import OPTION_VALUES, Change, Draft, NoCounterpartError, flag, flat, one_of, uri_of

ESTIMATORS, KL, AGGREGATIONS, REJECTIONS = (
    OPTION_VALUES["verl"][name] for name in ("estimators", "kl", "aggregations", "rejections")
)
ACTOR, ROLLOUT, REF, MODEL = (f"actor_rollout_ref.{part}." for part in ("actor", "rollout", "ref", "model"))
CHANGES: Mapping[str, Change] = {"aggregation": one_of(AGGREGATIONS), "below_one": lambda bound: min(bound, 0.99)}
CORRECTIONS = ("is", "is_threshold", "is_batch_normalize", "rs", "rs_threshold", "token_veto_threshold")
KL_CTRL, OVERLONG = "algorithm.kl_ctrl.", "reward.reward_kwargs.overlong_buffer_cfg."


def read(text: str, source: str) -> tuple[dict[str, Any], list[str]]:
    """Return (dotted keys and values of a Hydra configuration file or of a script's overrides, notes on guesses)."""
    if re.search(r"^\s*[+~]*[\w.]+=", text.replace("\\\n", "\n"), re.MULTILINE) or re.search("main_ppo|-m verl", text):
        words, notes = call(text, source, r"[\w./]*\b(?:main_(?!gen|eval)\w+|fully_async_main)(?:\.py)?")
        if others := [word for word in words if re.fullmatch(r"[\w./]*(?:sft_trainer|main_gen\w*|main_eval)", word)]:
            raise NoCounterpartError(f"of verl's programs main_ppo is read, not {others[0]}")
        notes += [f"{word.strip(UNKNOWN)}: is not read" for word in words if word.startswith(("--config", UNKNOWN))]
        pairs = (word.lstrip("+").partition("=") for word in words if re.match(r"\+{0,2}[A-Za-z_][\w.]*=", word))
        return {key: scalar(value) for key, _, value in pairs}, notes
    kept = re.sub(r"(^\s*|[{,]\s*)n(?=\s*:)", r"\1'n'", text, flags=re.MULTILINE)  # kubectl's YAML takes n for no
    values = dict(flat(read_one(kept, f"{source}: ")))
    return {key: _resolved(value, values) for key, value in values.items()}, []


def _resolved(value: Any, values: Mapping[str, Any]) -> Any:
    """Return a value of a Hydra configuration; for `${key}` or `${key,default}` the value of the key, or the default.

    None stands for `???`, and for an unknown key without a default.
    """
    named = re.fullmatch(r"\$\{(?:oc\.select:)?\s*([\w.]+)\s*(?:,(.*))?\}", value) if isinstance(value, str) else None
    if not named:
        return None if value == "???" else value
    return values.get(named[1], scalar(named[2]) if named[2] else None)


def algorithm(given: Mapping[str, Any], _: str | None) -> dict[str, Any]:
    """Return the manifest's algorithm for verl's advantage estimator."""
    estimator = given.get("algorithm.adv_estimator", "gae")
    if estimator not in ESTIMATORS:
        raise NoCounterpartError(f"algorithm.adv_estimator {estimator} is no algorithm here")
    return dict(ESTIMATORS[estimator])


def combine(draft: Draft, values: Mapping[str, Any]) -> None:
    """Set the fields of the draft manifest that depend on several keys of verl's configuration."""
    draft.name = dns_label(values["trainer.experiment_name"] or "")
    several.critic_from(draft, values[MODEL + "path"])
    rank, alpha, targets = (values[MODEL + key] for key in ("lora.rank", "lora.alpha", "target_modules"))
    several.adapters(draft, ("actor",), rank=rank, alpha=alpha, targets=targets)
    several.outputs(draft, values["trainer.logger"], str(values["trainer.project_name"]))
    _steps(draft, values)
    _kl(draft, values)
    _loss(draft, values)
    _data(draft, values)
    _evaluation(draft, values)
    _reward(draft, values)
    _offload(draft, values)


def _steps(draft: Draft, values: Mapping[str, Any]) -> None:
    samples = int(draft.get("rollout.samplesPerPrompt") or 1)
    draft.put("training.miniBatchSize", int(values[ACTOR + "ppo_mini_batch_size"]) * samples)
    if steps := values["trainer.total_training_steps"]:
        draft.spec["training"].pop("totalEpochs", None)
        draft.put("training.totalSteps", int(steps))
    for role, prefix in {"actor": ACTOR, "critic": "critic."}.items():
        if role in draft.spec["models"]:
            key = prefix + "optim.lr_warmup_steps_ratio"
            several.warmup(draft, role, key, values[key], steps)


def _kl(draft: Draft, values: Mapping[str, Any]) -> None:
    in_loss, in_reward = flag(values[ACTOR + "use_kl_loss"]), flag(values["algorithm.use_kl_in_reward"])
    if in_loss and in_reward:
        draft.checks.append("KL is in the reward and in the loss there; here it is in one of them, so in the loss")
    if in_loss:
        kind = values[ACTOR + "kl_loss_type"]
        several.kl(draft, values[ACTOR + "kl_loss_coef"], in_loss=True)
    elif in_reward:
        kind = values["algorithm.kl_penalty"]
        coefficient, target, horizon = (values[KL_CTRL + key] for key in ("kl_coef", "target_kl", "horizon"))
        steered = (target or 0.1) if values[KL_CTRL + "type"] == "adaptive" else None
        several.kl(draft, coefficient, in_loss=False, target=steered, horizon=horizon)
    else:
        draft.put("algorithm.kl.coefficient", 0.0)
        return
    estimator = KL.get(str(kind).rstrip("+"))
    draft.put("algorithm.kl.estimator", estimator)
    if not estimator:
        draft.checks.append(f"there is no KL estimator {kind} here; algorithm.kl.estimator is K1, K2 or K3")


def _loss(draft: Draft, values: Mapping[str, Any]) -> None:
    if draft.has("algorithm.oversampling") and flag(values["algorithm.filter_groups.enable"]):
        most = int(values["algorithm.filter_groups.max_num_gen_batches"] or 0)
        draft.put("algorithm.oversampling", max(most, 2))
        note = "dynamic sampling draws algorithm.oversampling times the prompts once, not until enough are found"
        draft.checks.append(note)
    if float(values[ACTOR + "clip_ratio"] or 0) >= 1:
        draft.checks.append("algorithm.clipRange is below 1 here: 0.99")
    if (mode := values[ACTOR + "policy_loss.loss_mode"]) == "gspo":
        several.whole_responses(draft)
    elif mode != "vanilla":
        draft.checks.append(f"there is no policy loss {mode} here; the usual clipped loss is used")
    _correction(draft, {key: values[f"algorithm.rollout_correction.rollout_{key}"] for key in CORRECTIONS})
    if flag(values[OVERLONG + "enable"]):
        penalty = {"bufferTokens": values[OVERLONG + "len"], "coefficient": values[OVERLONG + "penalty_factor"]}
        draft.put("algorithm.rewards.overlongPenalty", penalty)


def _correction(draft: Draft, values: Mapping[str, Any]) -> None:
    """Set the importance weights: by verl's weights or, without them, by its rejection of tokens or responses."""
    rejects, options = values["rs"], {"normalize": flag(values["is_batch_normalize"]) or None}
    options["veto"] = values["token_veto_threshold"]
    if values["is"]:
        low, _, high = str(values["is_threshold"]).rpartition("_")
        mode = "Mask" if low else "Truncate"
        several.correction(draft, level=str(values["is"]).capitalize(), mode=mode, low=low, high=high, **options)
    elif level := REJECTIONS.get(str(rejects)):
        low, _, high = str(values["rs_threshold"]).rpartition("_")  # inverse: generator's probability over trainer's
        bounds = {"low": 1 / float(high), "high": 1 / float(low) if low else high}
        several.correction(draft, level=level, mode="Mask", **bounds, **options)
        draft.checks.append("rolloutCorrection weighs what is kept by its ratio, too; verl's rollout_rs alone does not")
        rejects = None
    if rejects:
        draft.checks.append(f"rolloutCorrection has one pair of bounds: rollout_rs {rejects} is left out")


def _data(draft: Draft, values: Mapping[str, Any]) -> None:
    files = [{"uri": uri_of(each)} for each in several.as_list(values["data.train_files"])]
    rows = {"promptKey": values["data.prompt_key"]} if len(files) > 1 else {}
    several.train_on(draft, [each | rows for each in files])
    is_cut = values["data.truncation"] != "error"
    draft.put("data.overlong", "Drop" if is_cut or flag(values["data.filter_overlong_prompts"]) else "Fail")
    if is_cut:
        draft.checks.append("prompts are never cut here: those that are too long are left out and counted")


def _evaluation(draft: Draft, values: Mapping[str, Any]) -> None:
    files = several.as_list(values["data.val_files"])
    if not files:
        return
    rows = [{"uri": uri_of(each), "promptKey": values["data.prompt_key"]} for each in files]
    limit = values["data.val_max_samples"]
    one = rows[0] | ({"limit": limit} if limit > 0 else {})
    names = (dns_label("-".join(str(file).split(".")[0].split("/")[-2:])).replace("-", "_") for file in files)
    sets = [{"name": name, **row} for name, row in zip(names, rows, strict=True)]  # such as gsm8k_test
    several.evaluate_on(draft, one if len(files) == 1 else {"sets": sets}, values["trainer.test_freq"])
    if (samples := values[ROLLOUT + "val_kwargs.n"]) > 1:
        draft.put("evaluation.samplesPerPrompt", samples)
    elif not flag(values[ROLLOUT + "val_kwargs.do_sample"]):
        draft.put("evaluation.greedy", True)


def _reward(draft: Draft, values: Mapping[str, Any]) -> None:
    model = values["reward.reward_model.model_path"]
    if path := values["reward.custom_reward_function.path"]:
        function = values["reward.custom_reward_function.name"] or "compute_score"
        draft.put("models.reward.entrypoint", several.entrypoint(path, function))
        sentence = "a reward function gets all responses of a rank and its columns by name: docs/rewards.md"
    elif flag(values["reward.reward_model.enable"]) and model:
        draft.put("models.reward.uri", uri_of(model))
        return
    else:
        draft.put("models.reward.verifier", {"name": "Math", "answerKey": "answer"})
        here = "here it is the verifier Math, which reads a column answer"
        sentence = f"verl chose the score by the column data_source; {here}"
    answer = "a right answer within reward_model.ground_truth needs a column of its own"
    draft.checks.append(f"models.reward: {sentence}; {answer}")


def _offload(draft: Draft, values: Mapping[str, Any]) -> None:
    parameters, optimizer = (flag(values[f"{ACTOR}fsdp_config.{part}_offload"]) for part in ("param", "optimizer"))
    if parameters or optimizer:
        draft.put("models.actor.offload", "Optimizer" if not parameters else "All" if optimizer else "Parameters")
    if flag(values[REF + "fsdp_config.param_offload"]) and draft.get("algorithm.kl.coefficient"):
        draft.put("models.reference", {"uri": draft.get("models.actor.uri"), "offload": "Parameters"})


def dns_label(name: Any) -> str:
    """Turn a name into a valid job name: lower-case letters, digits and dashes, a letter first, up to 40 characters."""
    kept = "".join(each if each.isascii() and each.isalnum() else "-" for each in str(name).lower())
    return kept.strip("-0123456789")[:40].rstrip("-") or "imported"
