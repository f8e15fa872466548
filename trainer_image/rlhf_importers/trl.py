"""TRL: a configuration file (YAML) or a script for `trl grpo|rloo|sft|dpo|kto|reward`; keys of TRL 1.9."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_api.spec.algorithm_table import ALGORITHMS
from rlhf_importers import several_keys as several
from rlhf_importers.shell import call, flags, only_document
from rlhf_importers.table import Draft, NoCounterpartError, Table, flag, one_of, sampling_rows, schedule, table, uri_of

PROGRAM = "(program)"
PROGRAMS = {"grpo": "GRPO", "rloo": "RLOO", "sft": "SFT", "dpo": "DPO", "kto": "KTO"}
PROGRAMS |= dict.fromkeys(("reward", "reward_modeling"), "RewardModel")
CALLED = r"(?:\S*/)?(?:trl|(?:scripts|open_r1)/\w+\.py)"
"""Pattern of the word by which a script calls TRL: its command, or a file of TRL or of open-r1."""
MARKS = {
    "RLOO": ("normalize_advantages", "reward_clip_range"),
    "GRPO": ("num_generations", "max_completion_length", "reward_funcs", "epsilon", "scale_rewards"),
    "SFT": ("assistant_only_loss", "completion_only_loss", "packing", "dataset_text_field"),
    "RewardModel": ("center_rewards_coefficient",),
    "KTO": ("desirable_weight", "undesirable_weight"),
    "DPO": ("precompute_ref_log_probs", "ld_alpha", "label_smoothing", "loss_weights", "beta"),
}
"""Algorithm -> keys that only its TRL program has; a configuration file is for the first algorithm with such a key."""
AGGREGATIONS = {"grpo": "SequenceMean", "dapo": "TokenMean", "dr_grpo": "FixedLength"}
PEFT_TARGETS = ("q_proj", "v_proj")
"""Names of the layers that PEFT adapts by default in most models."""
VERIFIERS: Mapping[str, dict[str, Any]] = {
    **{name: {"name": "Math", "answerKey": "solution"} for name in ("accuracy_reward", "accuracy")},
    "think_format_reward": {"name": "Regex", "pattern": r"(?s)\A<think>(?!.*<think>).*?</think>"},
    "format": {"name": "Format", "tags": ["think", "answer"]},
}
COMMON = """
(program)                               skip  says the algorithm
model_name_or_path                      to    models.<role>.uri (uri)
model_revision                          to    models.<role>.revision (text)
trust_remote_code                       to    models.<role>.trustRemoteCode (flag)
gradient_checkpointing                  to    models.<role>.gradientCheckpointing (flag)
dtype torch_dtype                       skip  models are read in their own type; training.precision is how they compute
bf16 fp16                               skip  training.precision: Auto is BF16 with FP32 masters on GPUs
attn_implementation use_liger_kernel torch_compile model_init_kwargs  skip  kernels and loading are the trainer's
tf32 gradient_checkpointing_kwargs disable_dropout padding_free       skip  kernels and loading are the trainer's
use_peft lora_r=16 lora_alpha=32 lora_target_modules  with  models.<role>.lora
lora_dropout use_rslora use_dora        lost  adapters are plain ones, without dropout
lora_*                                  skip  beside an adapter the head of a reward model is trained
load_in_* bnb_* use_bnb_*               lost  weights are not quantised
dataset_name dataset_config datasets    with  data.train
dataset_train_split=train               to    data.train.split
dataset_test_split=test                 with  evaluation.data
shuffle_dataset train_sampling_strategy  skip  rows are shuffled by training.seed
dataset_num_proc dataset_streaming dataset_kwargs dataloader_*  skip  rows are read once
chat_template_path chat_template        lost  name a file with the template in data.chatTemplate
dataset_mixture                         lost  write its data sets into data.train.mix
config                                  lost  its keys are not read: import that file, too
per_device_train_batch_size=8 gradient_accumulation_steps=1 num_processes=1  with  training
num_train_epochs=3.0 max_steps=-1       with  training
per_device_eval_batch_size auto_find_batch_size  skip  micro-batches are packed by tokens
weight_decay                            to    models.<role>.optimizer.weightDecay
adam_beta1=0.9 adam_beta2=0.999         with  models.<role>.optimizer.betas
adam_epsilon                            to    models.<role>.optimizer.epsilon
max_grad_norm                           to    models.<role>.optimizer.maxGradNorm
lr_scheduler_type=linear                with  models.<role>.optimizer.schedule
warmup_steps warmup_ratio               with  models.<role>.optimizer.warmupSteps
lr_scheduler_kwargs                     lost  Cosine ends at a tenth of the peak
optim                                   skip  the optimizer is AdamW
seed=42                                 to    training.seed
data_seed                               skip  training.seed shuffles the rows, too
save_steps                              to    checkpoint.everySteps (above_zero)
save_total_limit                        to    checkpoint.keepLast
output_dir                              skip  the run folder (--output), or checkpoint.storage
save_* resume_from_checkpoint load_best_model_at_end  skip  checkpoints are whole; runs go on
eval_strategy=no eval_steps do_eval     with  evaluation
eval_* metric_for_best_model            skip  spec.evaluation says what is measured
report_to                               with  outputs
run_name logging_* log_* num_completions_to_print  skip  see docs/metrics.md
push_to_hub hub_*                       lost  a job uploads nothing; its model is in the run folder
deepspeed fsdp* ddp_* accelerator_config parallelism_config  skip  the mapper places it
env config_file use_vllm vllm_mode  skip  a setting of vLLM, which is in the trainer's own processes
remove_unused_columns local_rank        skip  the trainer reads the columns that it needs
activation_offloading                   skip  layers are recomputed where that fits better
eos_token pad_token pad_to_multiple_of truncation_mode  skip  the tokenizer's; nothing is cut
router_aux_loss_coef                    lost  the loss that balances experts is left out
"""
RL = f"""
{sampling_rows({"top_p": "", "top_k": "(top_k)", "min_p": "", "repetition_penalty": "", "generation_kwargs": ""})}
num_generations_eval                    to    evaluation.samplesPerPrompt
dataset_prompt_column                   to    data.train.promptKey
system_prompt                           to    data.systemPrompt
max_completion_length=512               to    data.maxResponseTokens
max_prompt_length                       to    data.maxPromptTokens
generation_batch_size steps_per_generation  with  training
num_iterations                          to    training.updateEpochs
temperature                             to    rollout.temperature
epsilon                                 to    algorithm.clipRange
epsilon_high                            to    algorithm.clipRangeHigh
delta                                   lost  the loss is clipped on one side, as in PPO
importance_sampling_level               with  algorithm.ratio
entropy_coef                            to    algorithm.entropyCoefficient
reward_clip_range                       with  algorithm.rewards.clip
normalize_advantages                    lost  RLOO's advantages are not whitened
mask_truncated_completions              to    algorithm.rewards.truncated (truncated)
sync_ref_model ref_model_*              lost  the reference stays as it is
reward_funcs reward_weights reward_model_name_or_path  with  models.reward
vllm_gpu_memory_utilization             to    rollout.gpuMemoryUtilization
vllm_importance_sampling_*              with  algorithm.rolloutCorrection
vllm_*                                  skip  a setting of vLLM, which is in the trainer's own processes
max_tool_calling_iterations             lost  responses are one turn; there are no tools
"""
OFFLINE = """
max_length=1024                         with  data.maxPromptTokens and data.maxResponseTokens
beta                                    to    algorithm.beta
loss_type                               with  algorithm
label_smoothing loss_weights ld_alpha f_divergence_type use_weighting  lost  DPO and KTO have their own loss only
desirable_weight                        to    algorithm.desirableWeight
undesirable_weight                      to    algorithm.undesirableWeight
precompute_ref_*                        skip  the reference scores each batch; it may be offloaded
packing packing_strategy eval_packing   skip  texts are always packed
completion_only_loss                    skip  only responses are learned
assistant_only_loss                     skip  every answer of a conversation is learned, and nothing else
dataset_text_field                      lost  a row is a prompt with a response, or a conversation
center_rewards_coefficient              lost  the loss is -log sigmoid of the difference
"""
GRPO = """
num_generations=8                       to    rollout.samplesPerPrompt
beta=0.0                                with  algorithm.kl
loss_type=dapo                          to    algorithm.aggregation (aggregation)
scale_rewards                           to    algorithm.normalizeByStd (scale)
"""
RLOO = """
num_generations=2                       to    rollout.samplesPerPrompt
beta=0.05                               with  algorithm.kl
"""
RATE = "learning_rate={}                      to    models.<role>.optimizer.learningRate"
TABLES = {
    "GRPO": COMMON + RL + GRPO + RATE.format("1e-6"),
    "RLOO": COMMON + RL + RLOO + RATE.format("1e-6"),
    "SFT": COMMON + OFFLINE + RATE.format("2e-5"),
    "DPO": COMMON + OFFLINE + RATE.format("1e-6"),
    "KTO": COMMON + OFFLINE + RATE.format("1e-6"),
    "RewardModel": COMMON + OFFLINE + RATE.format("1e-4"),
}


def table_of(name: str) -> Table:
    """Return the table of keys of the TRL program that trains by an algorithm."""
    changes: dict[str, Any] = {"aggregation": one_of(AGGREGATIONS), "scale": _scale}
    changes |= {"top_k": lambda value: value or -1, "truncated": lambda value: "Mask" if flag(value) else "Keep"}
    return table(TABLES[name], **changes)


def _scale(value: Any) -> bool:
    if value == "batch":
        raise NoCounterpartError("rewards are divided by the deviation of their prompt's, or not at all")
    return value not in (False, "none", "false", "False")


def read(text: str, source: str) -> tuple[dict[str, Any], list[str]]:
    """Return the keys of a TRL file, or the flags of a script's call of TRL with PROGRAM, and what was guessed."""
    if re.search(rf"(?:^|\s){CALLED}[ \t\\]", re.sub(r"#.*", "", text), re.MULTILINE):
        words, notes = call(text, source, CALLED)
        if not re.fullmatch(CALLED, "".join(words[:1])):
            raise NoCounterpartError("it calls no program of TRL by its name")
        return {PROGRAM: Path("".join(words[words[0].endswith("trl") :][:1])).stem, **flags(words)}, notes
    document = only_document(text, source)
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
    if values["loss_type"] not in (None, "sigmoid", ["sigmoid"], "nll", "kto"):
        draft.checks.append(f"there is no loss {values['loss_type']} here")


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
    draft.checks.append(
        f"batch sizes are counted for {processes} process{'es' * (processes > 1)}; TRL multiplies by its number"
    )
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
        draft.checks.append(
            "data.maxPromptTokens: TRL does not bound prompts; here longer ones than 512 tokens are left out"
        )
    if values["importance_sampling_level"] in ("sequence", "sequence_token"):
        several.whole_responses(draft)
    if clip := values["reward_clip_range"]:
        draft.put("algorithm.rewards.clip", max(map(abs, clip)))
    if flag(values["use_vllm"]) and flag(values.get("vllm_importance_sampling_correction", in_loss)):
        most = values["vllm_importance_sampling_clip_max"] or values["vllm_importance_sampling_cap"] or 3.0
        mode = "Mask" if "mask" in str(values["vllm_importance_sampling_mode"] or "sequence_mask") else "Truncate"
        draft.put("algorithm.rolloutCorrection", {"mode": mode, "cap": most})
        draft.checks.append("rolloutCorrection weighs tokens, not whole responses")


def _reward(draft: Draft, values: Mapping[str, Any]) -> None:
    model = values["reward_model_name_or_path"]
    rewards: list[dict[str, Any]] = [{"uri": uri_of(model)}] if model else []
    rewards += [_reward_of(draft, str(function)) for function in several.as_list(values["reward_funcs"])]
    weights = values["reward_weights"] or [1.0] * len(rewards)
    parts = [(weight, reward) for weight, reward in zip(weights, rewards, strict=False) if reward]
    if len(parts) > 1:
        named = enumerate(parts, 1)
        draft.put("models.reward.sum", [{"name": f"part_{n}", "weight": w, "reward": part} for n, (w, part) in named])
    elif parts:
        draft.put("models.reward", parts[0][1])


def _reward_of(draft: Draft, function: str) -> dict[str, Any]:
    """Return the reward of a function; empty for one that is an option of the algorithm, or has no counterpart."""
    module, _, name = function.rpartition(".")
    if module:
        draft.checks.append(several.FUNCTION)
        return {"entrypoint": f"{module}:{name}"}
    if function in VERIFIERS:
        return {"verifier": VERIFIERS[function]}
    if function == "get_soft_overlong_punishment":
        draft.put("algorithm.rewards.overlongPenalty", {"bufferTokens": 256})
    else:
        draft.checks.append(f"models.reward: there is no {function} here")
    return {}
