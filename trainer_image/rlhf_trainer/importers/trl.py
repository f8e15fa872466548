"""TRL: a configuration file (YAML) or a script for `trl grpo|rloo|sft|dpo|reward`; keys of TRL 1.9."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlhf_api.kubectl_yaml import read
from rlhf_trainer.importers.shell import flags, words
from rlhf_trainer.importers.table import (
    Draft,
    Lost,
    NoCounterpartError,
    NotNeeded,
    Read,
    Table,
    To,
    above_zero,
    all_of,
    flag,
    one_of,
    schedule,
    uri_of,
    warmup,
)

PROGRAM = "(program)"
PROGRAMS = {"grpo": "GRPO", "rloo": "RLOO", "sft": "SFT", "dpo": "DPO", "reward": "RewardModel"}
MARKS = {
    "RLOO": ("normalize_advantages", "reward_clip_range"),
    "GRPO": ("num_generations", "max_completion_length", "reward_funcs", "epsilon", "scale_rewards"),
    "SFT": ("assistant_only_loss", "completion_only_loss", "packing", "dataset_text_field"),
    "RewardModel": ("center_rewards_coefficient",),
    "DPO": ("precompute_ref_log_probs", "ld_alpha", "label_smoothing", "loss_weights", "beta"),
}
"""Keys that only one of the programs has, the first that fits decides."""
AGGREGATIONS = {"grpo": "SequenceMean", "dapo": "TokenMean", "dr_grpo": "FixedLength"}
VERIFIERS = {
    "accuracy_reward": {"name": "Math", "answerKey": "solution"},
    "think_format_reward": {"name": "Format", "tags": ["think"]},
}
RL = ("GRPO", "RLOO")
DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "linear",
    "seed": 42,
    "dataset_train_split": "train",
    "dataset_test_split": "test",
}
OF_PROGRAM: Mapping[str, Mapping[str, Any]] = {
    "GRPO": {
        "num_generations": 8,
        "max_completion_length": 512,
        "beta": 0.0,
        "loss_type": "dapo",
        "learning_rate": 1e-6,
    },
    "RLOO": {"num_generations": 2, "max_completion_length": 512, "beta": 0.05, "learning_rate": 1e-6},
    "SFT": {"max_length": 1024, "learning_rate": 2e-5},
    "DPO": {"max_length": 1024, "learning_rate": 1e-6},
    "RewardModel": {"max_length": 1024, "learning_rate": 1e-4},
}
"""Those defaults of TRL that are not the defaults here."""

BATCH = Read("training")
ENGINE = NotNeeded("a setting of vLLM, which is in the trainer's own processes")
KERNELS = NotNeeded("kernels and loading are the trainer's")
PREFERENCE = Lost("DPO has its own loss only")


def _scale(value: Any) -> bool:
    if value == "batch":
        raise NoCounterpartError("rewards are divided by the deviation of their prompt's, or not at all")
    return value not in (False, "none", "false", "False")


_COMMON: Table = {
    PROGRAM: NotNeeded("says the algorithm"),
    "model_name_or_path": Read("models"),
    "model_revision": Read("models"),
    "trust_remote_code": Read("models"),
    "gradient_checkpointing": Read("models"),
    "dtype": NotNeeded("models are read in their own type; training.precision says how they are computed"),
    "torch_dtype": NotNeeded("models are read in their own type; training.precision says how they are computed"),
    **all_of(("bf16", "fp16"), NotNeeded("training.precision: Auto is BF16 with FP32 masters on GPUs")),
    **all_of(("attn_implementation", "use_liger_kernel", "torch_compile", "model_init_kwargs", "tf32"), KERNELS),
    **all_of(("gradient_checkpointing_kwargs", "disable_dropout", "padding_free"), KERNELS),
    **all_of(("use_peft", "lora_*", "use_rslora", "use_dora"), Read("models")),
    **all_of(("load_in_*", "bnb_*", "use_bnb_*"), Lost("weights are not quantised")),
    **all_of(("dataset_name", "dataset_config", "datasets", "dataset_test_split"), Read("data.train")),
    "dataset_train_split": To("data.train.split"),
    "shuffle_dataset": NotNeeded("rows are shuffled by training.seed"),
    **all_of(
        ("dataset_num_proc", "dataset_streaming", "dataset_kwargs", "dataloader_*"), NotNeeded("rows are read once")
    ),
    "chat_template_path": Lost("a chat template comes with the tokenizer"),
    **all_of(("per_device_train_batch_size", "gradient_accumulation_steps", "num_processes"), BATCH),
    **all_of(("num_train_epochs", "max_steps"), BATCH),
    **all_of(("per_device_eval_batch_size", "auto_find_batch_size"), NotNeeded("micro-batches are packed by tokens")),
    **all_of(("learning_rate", "weight_decay", "adam_beta1", "adam_beta2"), Read("models.<role>.optimizer")),
    **all_of(("adam_epsilon", "max_grad_norm", "lr_scheduler_type"), Read("models.<role>.optimizer")),
    **all_of(("warmup_steps", "warmup_ratio"), Read("models.<role>.optimizer.warmupSteps")),
    "lr_scheduler_kwargs": Lost("Cosine ends at a tenth of the peak"),
    "optim": NotNeeded("the optimizer is AdamW"),
    "seed": To("training.seed"),
    "data_seed": NotNeeded("training.seed shuffles the rows, too"),
    "save_steps": To("checkpoint.everySteps", above_zero),
    "save_total_limit": To("checkpoint.keepLast"),
    "output_dir": NotNeeded("the run folder (--output), or checkpoint.storage"),
    **all_of(
        ("save_*", "resume_from_checkpoint", "load_best_model_at_end"), NotNeeded("checkpoints are whole; runs go on")
    ),
    **all_of(("eval_strategy", "eval_steps", "do_eval"), Read("evaluation")),
    **all_of(("eval_*", "metric_for_best_model"), NotNeeded("spec.evaluation says what is measured")),
    "report_to": Read("outputs"),
    **all_of(("run_name", "logging_*", "log_*", "num_completions_to_print"), NotNeeded("see docs/metrics.md")),
    **all_of(("push_to_hub", "hub_*"), Lost("a job uploads nothing; its model is in the run folder")),
    **all_of(
        ("deepspeed", "fsdp*", "ddp_*", "accelerator_config", "parallelism_config"), NotNeeded("the mapper places it")
    ),
    **all_of(("env", "config", "config_file", "use_vllm", "vllm_mode", "remove_unused_columns", "local_rank"), ENGINE),
    "activation_offloading": NotNeeded("layers are recomputed where that fits better"),
    **all_of(
        ("eos_token", "pad_token", "pad_to_multiple_of", "truncation_mode"),
        NotNeeded("the tokenizer's; nothing is cut"),
    ),
    "router_aux_loss_coef": Lost("the loss that balances experts is left out"),
}
_RL_KEYS: Table = {
    "num_generations": To("rollout.samplesPerPrompt"),
    "num_generations_eval": To("evaluation.samplesPerPrompt"),
    "max_completion_length": To("data.maxResponseTokens"),
    "max_prompt_length": To("data.maxPromptTokens"),
    **all_of(("generation_batch_size", "steps_per_generation"), BATCH),
    "num_iterations": To("training.updateEpochs"),
    "temperature": To("rollout.temperature"),
    "top_p": To("rollout.topP"),
    "top_k": To("rollout.topK", lambda value: value or -1),
    **all_of(("min_p", "repetition_penalty", "generation_kwargs"), Lost("sampling has temperature, topP and topK")),
    "beta": Read("algorithm.kl"),
    "epsilon": To("algorithm.clipRange"),
    "epsilon_high": To("algorithm.clipRangeHigh"),
    "delta": Lost("the loss is clipped on one side, as in PPO"),
    "loss_type": To("algorithm.aggregation", one_of(AGGREGATIONS), only=("GRPO",)),
    "scale_rewards": To("algorithm.normalizeByStd", _scale, only=("GRPO",)),
    "importance_sampling_level": Read("algorithm.ratio"),
    "entropy_coef": To("algorithm.entropyCoefficient"),
    "reward_clip_range": Read("algorithm.rewards.clip"),
    "normalize_advantages": Lost("RLOO's advantages are not whitened"),
    "mask_truncated_completions": Lost("algorithm.rewards.missingEndPenalty lowers the reward of unfinished responses"),
    **all_of(("sync_ref_model", "ref_model_*"), Lost("the reference stays as it is")),
    **all_of(("reward_funcs", "reward_weights", "reward_model_name_or_path"), Read("models.reward")),
    "vllm_gpu_memory_utilization": To("rollout.gpuMemoryUtilization"),
    **all_of(
        ("vllm_importance_sampling_correction", "vllm_importance_sampling_*"), Read("algorithm.rolloutCorrection")
    ),
    "vllm_*": ENGINE,
    "max_tool_calling_iterations": Lost("responses are one turn; there are no tools"),
}
_OFFLINE: Table = {
    "max_length": Read("data.maxPromptTokens and data.maxResponseTokens"),
    "beta": To("algorithm.beta", only=("DPO",)),
    "loss_type": Read("algorithm"),
    **all_of(("label_smoothing", "loss_weights", "ld_alpha", "f_divergence_type", "use_weighting"), PREFERENCE),
    "precompute_ref_log_probs": NotNeeded("the reference scores each batch; it may be offloaded"),
    **all_of(("packing", "packing_strategy", "eval_packing"), NotNeeded("texts are always packed")),
    "completion_only_loss": NotNeeded("only responses are learned"),
    "assistant_only_loss": NotNeeded("every answer of a conversation is learned, and nothing else"),
    "dataset_text_field": Lost("a row is a prompt with a response, or a conversation"),
    "center_rewards_coefficient": Lost("the loss is -log sigmoid of the difference"),
}


def table_of(algorithm: str) -> Table:
    """The table of a program."""
    return {**_COMMON, **(_RL_KEYS if algorithm in RL else _OFFLINE)}


def read_values(text: str, source: str) -> dict[str, Any]:
    """Keys of a configuration file, or flags of a script that calls `trl`, with the program under PROGRAM."""
    called = re.search(r"\btrl\s+(\w+)", re.sub(r"#.*", "", text))
    if called:
        return {PROGRAM: called[1], **flags(words(text, source))}
    (document,) = read(text, f"{source}: ") or [None]
    if not isinstance(document, dict):
        raise NoCounterpartError("it is no mapping of keys to values")
    return {str(key): value for key, value in document.items()}


def algorithm(values: Mapping[str, Any], chosen: str | None) -> dict[str, Any]:
    """The algorithm of the program; in a file the keys that only one program has tell it."""
    if program := values.get(PROGRAM):
        if program not in PROGRAMS:
            raise NoCounterpartError(f"trl {program} is no algorithm here; expected {', '.join(PROGRAMS)}")
        return {"name": PROGRAMS[program]}
    found = chosen or next((name for name, marks in MARKS.items() if any(key in values for key in marks)), None)
    if found not in PROGRAMS.values():
        raise NoCounterpartError(f"no key tells its trainer; say --algorithm, one of {', '.join(PROGRAMS.values())}")
    return {"name": found}


def combine(draft: Draft, values: Mapping[str, Any]) -> None:
    """What several keys say together."""
    draft.name = draft.algorithm.lower()
    role = "reward" if draft.algorithm == "RewardModel" else "actor"
    model: dict[str, Any] = {"uri": uri_of(values.get("model_name_or_path", ""))}
    if revision := values.get("model_revision"):
        model["revision"] = str(revision)
    if flag(values.get("trust_remote_code")):
        model["trustRemoteCode"] = True
    if "gradient_checkpointing" in values:
        model["gradientCheckpointing"] = flag(values["gradient_checkpointing"])
    draft.put(f"models.{role}", model | {"optimizer": _optimizer(draft, values)})
    if flag(values.get("use_peft")):
        draft.checks.append("there is no LoRA here: all weights are trained, which takes more memory")
    if "tensorboard" in (values.get("report_to") or []):
        draft.put("outputs.tensorboard", True)
    if "wandb" in (values.get("report_to") or []):
        draft.put("outputs.wandb.project", "trl")
    _steps(draft, values, role)
    _data(draft, values)
    if draft.algorithm in RL:
        _rl(draft, values)
        _reward(draft, values)
    else:
        half = int(values["max_length"]) // 2
        draft.spec["data"] |= {"maxPromptTokens": half, "maxResponseTokens": half}
        draft.checks.append(
            f"max_length {2 * half} bounded both together; here half is for the prompt, half for the response"
        )
        if values.get("loss_type") not in (None, "sigmoid", ["sigmoid"], "nll"):
            draft.checks.append(f"there is no loss {values['loss_type']} here")


def _optimizer(draft: Draft, values: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"learningRate": values["learning_rate"]}
    try:
        made["schedule"] = schedule(values["lr_scheduler_type"])
    except NoCounterpartError as why:
        made["schedule"] = "Cosine"
        draft.checks.append(f"lr_scheduler_type: {why}; Cosine was taken")
    names = {"weight_decay": "weightDecay", "adam_epsilon": "epsilon", "max_grad_norm": "maxGradNorm"}
    made |= {ours: values[theirs] for theirs, ours in names.items() if values.get(theirs) is not None}
    made["betas"] = [values.get("adam_beta1", 0.9), values.get("adam_beta2", 0.999)]
    if (values.get("warmup_steps") or 0) >= 1:
        made["warmupSteps"] = int(values["warmup_steps"])
    return made


def _steps(draft: Draft, values: Mapping[str, Any], role: str) -> None:
    processes = int(values.get("num_processes", 1))
    update = int(values["per_device_train_batch_size"]) * int(values["gradient_accumulation_steps"]) * processes
    draft.checks.append(
        f"batch sizes are counted for {processes} process{'es' * (processes > 1)}; TRL multiplies by its number"
    )
    steps = int(values.get("max_steps", -1))
    if draft.algorithm in RL:
        samples = int(values["num_generations"])
        generated = int(values.get("generation_batch_size") or 0)
        per_generation = int(values.get("steps_per_generation") or values["gradient_accumulation_steps"])
        generated = generated or int(values["per_device_train_batch_size"]) * processes * per_generation
        draft.put("training.promptBatchSize", max(generated // samples, 1))
        draft.put("training.miniBatchSize", min(update, max(generated // samples, 1) * samples))
        steps = steps * update // max(generated, 1) if steps > 0 else steps
    else:
        draft.put("training.batchSize", update)
    if steps > 0:
        draft.put("training.totalSteps", steps)
    else:
        draft.put("training.totalEpochs", max(round(float(values["num_train_epochs"])), 1))
    share = values.get("warmup_ratio") or values.get("warmup_steps")
    if share and share < 1:
        warmup(draft, role, "warmup_ratio", share, steps if steps > 0 else None)


def _data(draft: Draft, values: Mapping[str, Any]) -> None:
    train = draft.spec["data"].setdefault("train", {})
    sets = values.get("datasets")
    if sets:
        mix = [{"uri": uri_of(each["path"]), "weight": 1.0, **_rows(each)} for each in sets]
        draft.put("data.train", {"mix": mix})
        draft.checks.append("data.train.mix draws the same share of each data set; set the weights")
    elif name := values.get("dataset_name"):
        subset = {"subset": values["dataset_config"]} if values.get("dataset_config") else {}
        draft.put("data.train", {"uri": uri_of(name), **subset, **train})
        if values.get("eval_strategy", "no") not in ("no", False):
            draft.put("evaluation.data", {"uri": uri_of(name), **subset, "split": values["dataset_test_split"]})
            if values.get("eval_steps"):
                draft.put("evaluation.everySteps", int(values["eval_steps"]))
    if draft.algorithm == "SFT":
        draft.checks.append("data.train: say messagesKey for a column of conversations, or promptKey and responseKey")


def _rows(one: Mapping[str, Any]) -> dict[str, Any]:
    names = {"name": "subset", "split": "split"}
    return {ours: one[theirs] for theirs, ours in names.items() if one.get(theirs)}


def _rl(draft: Draft, values: Mapping[str, Any]) -> None:
    in_loss = draft.algorithm == "GRPO"
    draft.put("algorithm.kl", {"coefficient": values["beta"], "applyTo": "Loss" if in_loss else "Reward"})
    if "max_prompt_length" not in values:
        draft.put("data.maxPromptTokens", 512)
        draft.checks.append(
            "data.maxPromptTokens: TRL does not bound prompts; here longer ones than 512 tokens are left out"
        )
    if values.get("importance_sampling_level") in ("sequence", "sequence_token"):
        draft.spec["algorithm"] |= {"ratio": "Sequence", "aggregation": "SequenceMean"}
    if clip := values.get("reward_clip_range"):
        draft.put("algorithm.rewards.clip", max(map(abs, clip)))
    if flag(values.get("use_vllm")) and flag(values.get("vllm_importance_sampling_correction", in_loss)):
        most = values.get("vllm_importance_sampling_clip_max") or values.get("vllm_importance_sampling_cap") or 3.0
        mode = "Mask" if "mask" in str(values.get("vllm_importance_sampling_mode", "sequence_mask")) else "Truncate"
        draft.put("algorithm.rolloutCorrection", {"mode": mode, "cap": most})
        draft.checks.append("rolloutCorrection weighs tokens, not whole responses")


def _reward(draft: Draft, values: Mapping[str, Any]) -> None:
    functions = values.get("reward_funcs") or []
    functions = functions if isinstance(functions, list) else [functions]
    parts: list[dict[str, Any]]
    parts = [{"uri": uri_of(values["reward_model_name_or_path"])}] if values.get("reward_model_name_or_path") else []
    for function in map(str, functions):
        if function == "get_soft_overlong_punishment":
            draft.put("algorithm.rewards.overlongPenalty", {"bufferTokens": 256})
        elif function in VERIFIERS:
            parts.append({"verifier": VERIFIERS[function]})
        elif "." in function:
            module, _, name = function.rpartition(".")
            parts.append({"entrypoint": f"{module}:{name}"})
            draft.checks.append(
                "models.reward: a function gets prompts, responses and columns by name: docs/rewards.md"
            )
        else:
            draft.checks.append(f"models.reward: there is no {function} here")
    weights = values.get("reward_weights") or [1.0] * len(parts)
    if len(parts) > 1:
        named = zip(parts, weights, strict=False)
        draft.put(
            "models.reward.sum", [{"name": f"part_{n}", "weight": w, "reward": p} for n, (p, w) in enumerate(named, 1)]
        )
    elif parts:
        draft.put("models.reward", parts[0])
