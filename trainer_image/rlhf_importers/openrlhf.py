"""OpenRLHF: a shell script that calls openrlhf.cli.train_{ppo_ray, sft, rm, dpo}; flags of 0.11, and those of 0.9."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_api.spec.algorithm_table import ALGORITHMS
from rlhf_importers import several_keys as several
from rlhf_importers.shell import call, flags
from rlhf_importers.table import Draft, NoCounterpartError, Table, table, uri_of

PROGRAM = "(program)"
ESTIMATORS: dict[Any, dict[str, Any]] = {
    "gae": {"name": "PPO"},
    "reinforce": {"name": "REINFORCEPP"},
    "reinforce_baseline": {"name": "REINFORCEPP", "baseline": "Group"},
    "rloo": {"name": "RLOO"},
    "group_norm": {"name": "GRPO"},
    "dr_grpo": {"name": "GRPO", "normalizeByStd": False, "aggregation": "FixedLength"},
}
OFFLINE = {"train_sft": "SFT", "train_rm": "RewardModel", "train_dpo": "DPO"}
OPTIMIZER = """
max_norm|max_norm                                   to    models.ROLE.optimizer.maxGradNorm
adam.betas|adam_betas                               to    models.ROLE.optimizer.betas
adam.eps                                            to    models.ROLE.optimizer.epsilon
adam.weight_decay                                   to    models.ROLE.optimizer.weightDecay
lr_scheduler|lr_scheduler=cosine_with_min_lr        to    models.ROLE.optimizer.schedule (schedule)
lr_warmup_ratio|lr_warmup_ratio=0.03                with  models.ROLE.optimizer.warmupSteps
min_lr_ratio                                        lost  Cosine ends at a tenth of the peak
muon.*                                              lost  the optimizer is AdamW
optim                                               skip  the optimizer is AdamW
"""
"""Table rows for a role's optimizer. OpenRLHF 0.9's names stand for the actor's keys, so the actor's rows come last."""
COMMON = """
(program)                                           skip  says the algorithm
data.max_len|max_len=2048                           with  data.maxPromptTokens and data.maxResponseTokens
data.prompt_max_len|prompt_max_len                  with  data.maxPromptTokens and data.maxResponseTokens
data.max_samples|max_samples                        to    data.train.limit (above_zero)
data.apply_chat_template|apply_chat_template        skip  a chat template is applied where the tokenizer has one
data.input_template|input_template data.tokenizer_chat_template  lost  data.promptTemplate and data.chatTemplate say it
data.prompt_probs data.dataset_probs                lost  weights are in data.train.mix, one for each data set
train.seed|seed=42                                  to    training.seed
train.full_determinism_enable                       skip  a run is a function of its seed
train.micro_batch_size|micro_train_batch_size       skip  micro-batches are packed by tokens
train.dynamic_batch_enable|use_dynamic_batch        skip  micro-batches are packed by tokens
rollout.micro_batch_size|micro_rollout_batch_size   skip  micro-batches are packed by tokens
train.max_tokens_per_gpu|train_max_tokens_per_gpu   to    training.microBatchTokens
ckpt.save_steps|save_steps                          to    checkpoint.everySteps (above_zero)
ckpt.max_num|max_ckpt_num                           to    checkpoint.keepLast
ckpt.output_dir|save_path ckpt.path|ckpt_path       skip  the run folder (--output), or checkpoint.storage
ckpt.load_enable|load_checkpoint                    skip  a run always goes on from its last checkpoint
ckpt.save_hf|save_hf_ckpt ckpt.*                    skip  a job leaves a Hugging Face model and checkpoints by itself
eval.dataset|eval_dataset eval.split=train          with  evaluation.data
eval.steps|eval_steps                               with  evaluation.everySteps
ds.lora.rank|lora_rank ds.lora.alpha|lora_alpha=16  with  models.<role>.lora
ds.lora.target_modules|target_modules=all-linear    with  models.<role>.lora
ds.lora.dropout|lora_dropout                        lost  adapters have no dropout
ds.ring_attn_size=1                                 with  models
ds.param_dtype                                      skip  training.precision: Auto is BF16 with FP32 masters on GPUs
ds.load_in_4bit                                     lost  weights are not quantised
ds.* zero_stage adam_offload packing_samples        skip  a setting of DeepSpeed; the mapper and the trainer choose
attn_implementation param_dtype                     skip  a setting of DeepSpeed; the mapper and the trainer choose
logger.tensorboard_dir                              to    outputs.tensorboard = true
logger.wandb.project                                to    outputs.wandb.project
logger.wandb.key                                    skip  the key is WANDB_API_KEY in the environment
logger.logging_steps|logging_steps logger.*         skip  docs/metrics.md says what is written
use_wandb wandb_* use_tensorboard                   skip  docs/metrics.md says what is written
local_rank use_ms address runtime-env-json module include  skip  how it is started
*.gradient_checkpointing_reentrant                  skip  recomputation is not reentrant
*.aux_loss_coef                                     lost  the loss that balances experts is left out
"""
RL = f"""
[critic.]
model_name_or_path|critic_pretrain                  to    models.critic.uri (uri)
adam.lr|critic_learning_rate=9e-6                   to    models.critic.optimizer.learningRate
{OPTIMIZER.replace("ROLE", "critic")}
value_clip|value_clip=0.5                           to    algorithm.valueClipRange
freezing_steps|freezing_actor_steps                 to    algorithm.criticWarmupSteps (above_zero)
save_value_network                                  skip  checkpoints hold the critic

[actor.]
model_name_or_path|pretrain                         to    models.actor.uri (uri)
gradient_checkpointing_enable|gradient_checkpointing  to  models.actor.gradientCheckpointing (flag)
adam.lr|actor_learning_rate=1e-6                    to    models.actor.optimizer.learningRate
{OPTIMIZER.replace("ROLE", "actor")}
eps_clip|eps_clip=0.2                               to    algorithm.clipRange
eps_clip_low_high|eps_clip_low_high                 with  algorithm.clipRange
dual_clip                                           lost  there is no dual clip, a bound where advantages are negative
entropy_coef|entropy_loss_coef                      to    algorithm.entropyCoefficient
policy_loss_type|policy_loss_type                   with  algorithm.ratio
num_nodes|actor_num_nodes                           to    resources.nodes
num_gpus_per_node|actor_num_gpus_per_node           to    resources.slotsPerNode

[algo.]
advantage.estimator|advantage_estimator             with  algorithm
advantage.gamma|gamma=1.0                           to    algorithm.discount
advantage.lambd|lambd=1.0                           to    algorithm.gaeLambda
advantage.no_std_norm|no_advantage_std_norm         to    algorithm.normalizeByStd (opposite)
kl.init_coef|init_kl_coef=0.01                      with  algorithm.kl
kl.use_loss|use_kl_loss kl.estimator|kl_estimator=k1  with  algorithm.kl
kl.target|kl_target kl.horizon|kl_horizon kl.*      with  algorithm.kl
advantage.is_correction_type=tis                    with  algorithm.rolloutCorrection
advantage.is_correction_enable|enable_vllm_is_correction       with  algorithm.rolloutCorrection
advantage.is_correction_threshold|vllm_is_truncated_threshold=[0.5,5.0]  with  algorithm.rolloutCorrection
dynamic_filtering_enable|dynamic_filtering          to    algorithm.oversampling = 2
dynamic_filtering_range                             lost  groups whose responses score alike are left out

[reward.]
model_name_or_path|reward_pretrain                  with  models.reward
remote_url|remote_rm_url                            with  models.reward
normalize_enable|normalize_reward                   to    algorithm.rewards.normalization = Running
clip_range|reward_clip_range=[-10,10]               with  algorithm.rewards.clip
overlong_buffer_len|overlong_buffer_len             to    algorithm.rewards.overlongPenalty.bufferTokens
overlong_penalty_factor|overlong_penalty_factor     to    algorithm.rewards.overlongPenalty.coefficient
stop_properly_penalty_coef                          lost  algorithm.rewards.missingEndPenalty subtracts a constant

[rollout.]
batch_size|rollout_batch_size=1024                  to    training.promptBatchSize
n_samples_per_prompt|n_samples_per_prompt           to    rollout.samplesPerPrompt
temperature|temperature                             to    rollout.temperature
top_p|top_p                                         to    rollout.topP
max_new_tokens|max_new_tokens|generate_max_len      with  data.maxPromptTokens and data.maxResponseTokens
*                                                   skip  micro-batches are packed by tokens

[]
data.prompt_dataset|prompt_data                     with  data.train.uri
data.prompt_split|prompt_split=train                to    data.train.split
data.input_key|input_key=input                      to    data.train.promptKey
data.label_key|label_key                            with  models.reward
data.*                                              skip  how OpenRLHF reads rows; models read text only
train.batch_size|train_batch_size=128               to    training.miniBatchSize
train.max_epochs|max_epochs=1                       to    training.updateEpochs
train.num_episodes|num_episodes=1                   to    training.totalEpochs
train.agent_func_path|agent_func_path               with  models.reward
train.async_enable|async_train                      lost  set rollout.maxStaleness, by which responses may be older
train.partial_rollout_enable                        lost  set rollout.partial beside rollout.maxStaleness
train.enable_ema                                    lost  no moving average of the weights is kept
eval.temperature eval.n_samples_per_prompt          lost  evaluation.samplesPerPrompt, at training's temperature
*.num_nodes *.num_gpus_per_node train.colocate_*    skip  the mapper places the models
*_num_nodes *_num_gpus_per_node colocate_*          skip  the mapper places the models
ref.offload reward.offload ref_reward_offload       skip  models.<role>.offload, or the mapper
vllm.gpu_memory_utilization|vllm_gpu_memory_utilization  to  rollout.gpuMemoryUtilization
vllm.enforce_eager|enforce_eager                    to    rollout.enforceEager (flag)
vllm.* vllm_* train.* deepspeed_enable_sleep        skip  a setting of Ray or vLLM; the trainer chooses its own
"""
OFFLINE_KEYS = f"""
adam.lr|learning_rate                               to    models.<role>.optimizer.learningRate
{OPTIMIZER.replace("ROLE", "<role>")}
model.model_name_or_path|pretrain                   to    models.<role>.uri (uri)
model.gradient_checkpointing_enable|gradient_checkpointing  to  models.<role>.gradientCheckpointing (flag)
ref.model_name_or_path|ref_pretrain                 to    models.reference.uri (uri)
ref.offload                                         skip  models.reference.offload, or the mapper
model.beta|beta                                     to    algorithm.beta
model.ipo_enable model.label_smoothing model.nll_loss_coef  lost  DPO has its own loss only
model.margin_loss_enable model.loss_type            lost  the loss is -log sigmoid of the difference
model.*                                             skip  the trainer's own way of computing losses
data.dataset|dataset                                with  data.train.uri
data.dataset_split|train_split                      to    data.train.split
data.input_key|input_key data.prompt_key|prompt_key  to   data.train.promptKey
data.output_key|output_key                          to    data.train.responseKey
data.chosen_key|chosen_key                          to    data.train.chosenKey
data.rejected_key|rejected_key                      to    data.train.rejectedKey
data.multiturn|multiturn                            skip  data.train.messagesKey: all answers are learned
data.*                                              skip  how OpenRLHF reads rows
train.batch_size|train_batch_size=128               to    training.batchSize
train.max_epochs|max_epochs=1                       to    training.totalEpochs
"""


def read(text: str, source: str) -> tuple[dict[str, Any], list[str]]:
    """Return the flags of the last OpenRLHF program that a script calls, its name as PROGRAM, and what was guessed."""
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


def table_of(name: str) -> Table:
    """Return the table of keys of the OpenRLHF program that trains by an algorithm."""
    return table(COMMON + (OFFLINE_KEYS if name in OFFLINE.values() else RL))


def combine(draft: Draft, values: Mapping[str, Any]) -> None:
    """Set the fields of the draft manifest that depend on several keys of OpenRLHF's configuration."""
    draft.name = draft.algorithm.lower()
    rank, alpha, targets = (values[f"ds.lora.{key}"] for key in ("rank", "alpha", "target_modules"))
    several.adapters(draft, ALGORITHMS[draft.algorithm].trained, rank=rank, alpha=alpha, targets=targets)
    several.no_ring(draft, values["ds.ring_attn_size"])
    _data(draft, values)
    if draft.algorithm in OFFLINE.values():
        several.warmup(draft, draft.role, "lr_warmup_ratio", values["lr_warmup_ratio"], None)
        return
    several.critic_from(
        draft, str(values["reward.model_name_or_path"] or values["actor.model_name_or_path"]).split(",")[0]
    )
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
        kind, cap = values["algo.advantage.is_correction_type"], values["algo.advantage.is_correction_threshold"][1]
        draft.put("algorithm.rolloutCorrection", {"mode": "Truncate" if kind == "tis" else "Mask", "cap": cap})
        draft.checks.append(f"rolloutCorrection has one cap, {cap}; there is no bound of its own below 1")


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
