"""OpenRLHF: a shell script that calls openrlhf.cli.train_{ppo_ray, sft, rm, dpo}; flags of 0.11, and those of 0.9."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_trainer.importers.openrlhf_names import NAMES, RL_NAMES
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
    schedule,
    uri_of,
    warmup,
)

PROGRAM = "(program)"
ESTIMATORS: dict[Any, dict[str, Any]] = {
    "gae": {"name": "PPO"},
    "reinforce": {"name": "REINFORCEPP"},
    "reinforce_baseline": {"name": "REINFORCEPP", "baseline": "Group"},
    "rloo": {"name": "RLOO"},
    "group_norm": {"name": "GRPO"},
    "dr_grpo": {"name": "GRPO", "normalizeByStd": False},
}
OFFLINE = {"train_sft": "SFT", "train_rm": "RewardModel", "train_dpo": "DPO"}
RL_DEFAULTS: Mapping[str, Any] = {
    "algo.advantage.estimator": "gae",
    "algo.advantage.gamma": 1.0,
    "algo.advantage.lambd": 1.0,
    "algo.kl.init_coef": 0.01,
    "actor.eps_clip": 0.2,
    "critic.value_clip": 0.5,
    "reward.clip_range": [-10, 10],
    "actor.adam.lr": 1e-6,
    "actor.lr_scheduler": "cosine_with_min_lr",
    "critic.adam.lr": 9e-6,
    "critic.lr_scheduler": "cosine_with_min_lr",
    "rollout.batch_size": 1024,
    "train.batch_size": 128,
    "train.max_epochs": 1,
    "train.num_episodes": 1,
    "train.seed": 42,
    "data.max_len": 2048,
    "data.prompt_split": "train",
    "data.input_key": "input",
}
DEFAULTS: Mapping[str, Any] = {
    "train.batch_size": 128,
    "train.max_epochs": 1,
    "train.seed": 42,
    "lr_scheduler": "cosine_with_min_lr",
    "data.max_len": 2048,
}
"""Those defaults of OpenRLHF that are not the defaults here."""

ENGINE = NotNeeded("a setting of DeepSpeed, Ray or vLLM; the mapper and the trainer choose their own")
FITS = NotNeeded("micro-batches are packed by tokens; training.microBatchTokens or the mapper says what fits")
LENGTHS = Read("data.maxPromptTokens and data.maxResponseTokens")
REWARD = Read("models.reward")


def _optimizer(prefix: str, role: str, only: tuple[str, ...] = ()) -> Table:
    place = f"models.{role}.optimizer."
    return {
        prefix + "adam.lr": To(place + "learningRate", only=only),
        prefix + "adam.betas": To(place + "betas", only=only),
        prefix + "adam.eps": To(place + "epsilon", only=only),
        prefix + "adam.weight_decay": To(place + "weightDecay", only=only),
        prefix + "max_norm": To(place + "maxGradNorm", only=only),
        prefix + "lr_scheduler": To(place + "schedule", schedule, only=only),
        prefix + "lr_warmup_ratio": Read(place + "warmupSteps"),
        prefix + "min_lr_ratio": Lost("Cosine ends at a tenth of the peak"),
        prefix + "muon.*": Lost("the optimizer is AdamW"),
        prefix + "optim": NotNeeded("the optimizer is AdamW"),
    }


_COMMON: Table = {
    PROGRAM: NotNeeded("says the algorithm"),
    "data.max_len": LENGTHS,
    "data.prompt_max_len": LENGTHS,
    "data.max_samples": To("data.train.limit", above_zero),
    "data.apply_chat_template": NotNeeded("a chat template is applied where the tokenizer has one"),
    **all_of(
        ("data.input_template", "data.tokenizer_chat_template"), Lost("a template comes with the tokenizer, or none")
    ),
    **all_of(("data.prompt_probs", "data.dataset_probs"), Lost("weights are in data.train.mix, one for each data set")),
    "train.batch_size": Read("training"),
    "train.max_epochs": Read("training"),
    "train.seed": To("training.seed"),
    "train.full_determinism_enable": NotNeeded("a run is a function of its seed"),
    **all_of(("train.micro_batch_size", "train.dynamic_batch_enable", "rollout.micro_batch_size"), FITS),
    "train.max_tokens_per_gpu": To("training.microBatchTokens"),
    "ckpt.save_steps": To("checkpoint.everySteps", above_zero),
    "ckpt.max_num": To("checkpoint.keepLast"),
    **all_of(("ckpt.output_dir", "ckpt.path"), NotNeeded("the run folder (--output), or checkpoint.storage")),
    "ckpt.load_enable": NotNeeded("a run always goes on from its last checkpoint"),
    "ckpt.*": NotNeeded("a job leaves a Hugging Face model and checkpoints by itself"),
    "eval.dataset": Read("evaluation.data"),
    "eval.split": Read("evaluation.data"),
    "eval.steps": Read("evaluation.everySteps"),
    "ds.lora.rank": Read("models"),
    "ds.param_dtype": NotNeeded("training.precision: Auto is BF16 with FP32 masters on GPUs"),
    "ds.ring_attn_size": Read("models"),
    "ds.load_in_4bit": Lost("weights are not quantised"),
    **all_of(("ds.*", "zero_stage", "adam_offload", "packing_samples", "attn_implementation", "param_dtype"), ENGINE),
    "logger.tensorboard_dir": To("outputs.tensorboard", lambda _: True),
    "logger.wandb.project": To("outputs.wandb.project"),
    "logger.wandb.key": NotNeeded("the key is WANDB_API_KEY in the environment"),
    **all_of(
        ("logger.*", "use_wandb", "wandb_*", "use_tensorboard"), NotNeeded("docs/metrics.md says what is written")
    ),
    **all_of(
        ("local_rank", "use_ms", "address", "runtime-env-json", "module", "include"), NotNeeded("how it is started")
    ),
    "*.gradient_checkpointing_reentrant": NotNeeded("recomputation is not reentrant"),
    "*.aux_loss_coef": Lost("the loss that balances experts is left out"),
}
_RL: Table = {
    "algo.advantage.estimator": Read("algorithm"),
    "algo.advantage.gamma": To("algorithm.discount", only=("PPO",)),
    "algo.advantage.lambd": To("algorithm.gaeLambda", only=("PPO",)),
    "algo.advantage.no_std_norm": To("algorithm.normalizeByStd", lambda on: not on, only=("GRPO",)),
    **all_of(("algo.kl.*",), Read("algorithm.kl")),
    **all_of(
        ("algo.advantage.is_correction_enable", "algo.advantage.is_correction_type"),
        Read("algorithm.rolloutCorrection"),
    ),
    "algo.advantage.is_correction_threshold": Read("algorithm.rolloutCorrection"),
    "algo.dynamic_filtering_enable": To("algorithm.oversampling", lambda _: 2, only=("GRPO",)),
    "algo.dynamic_filtering_range": Lost("groups whose responses score alike are left out, whatever the score"),
    "actor.model_name_or_path": To("models.actor.uri", uri_of),
    "actor.gradient_checkpointing_enable": To("models.actor.gradientCheckpointing", flag),
    "actor.eps_clip": To("algorithm.clipRange"),
    "actor.eps_clip_low_high": Read("algorithm.clipRange"),
    "actor.dual_clip": Lost("there is no dual clip, a bound on the ratio where advantages are negative"),
    "actor.entropy_coef": To("algorithm.entropyCoefficient"),
    "actor.policy_loss_type": Read("algorithm.ratio"),
    "critic.model_name_or_path": Read("models.critic.uri"),
    "critic.value_clip": To("algorithm.valueClipRange", only=("PPO",)),
    "critic.freezing_steps": To("algorithm.criticWarmupSteps", above_zero, only=("PPO",)),
    "critic.save_value_network": NotNeeded("checkpoints hold the critic"),
    **_optimizer("actor.", "actor"),
    **_optimizer("critic.", "critic", ("PPO",)),
    **all_of(("reward.model_name_or_path", "reward.remote_url", "data.label_key", "train.agent_func_path"), REWARD),
    "reward.normalize_enable": To("algorithm.rewards.normalization", lambda _: "Running"),
    "reward.clip_range": Read("algorithm.rewards.clip"),
    "reward.overlong_buffer_len": To("algorithm.rewards.overlongPenalty.bufferTokens", int),
    "reward.overlong_penalty_factor": To("algorithm.rewards.overlongPenalty.coefficient"),
    "reward.stop_properly_penalty_coef": Lost("algorithm.rewards.missingEndPenalty subtracts a constant instead"),
    **all_of(("rollout.batch_size", "train.num_episodes"), Read("training")),
    "rollout.n_samples_per_prompt": To("rollout.samplesPerPrompt"),
    "rollout.temperature": To("rollout.temperature"),
    "rollout.top_p": To("rollout.topP"),
    "rollout.max_new_tokens": LENGTHS,
    "rollout.*": FITS,
    "data.prompt_dataset": Read("data.train.uri"),
    "data.prompt_split": To("data.train.split"),
    "data.input_key": To("data.train.promptKey"),
    "data.*": NotNeeded("how OpenRLHF reads rows; models read text only"),
    **all_of(
        ("eval.temperature", "eval.n_samples_per_prompt"),
        Lost("evaluation.samplesPerPrompt, at training's temperature"),
    ),
    **all_of(("train.async_enable", "train.partial_rollout_enable"), Lost("a step waits for its responses")),
    "train.enable_ema": Lost("no moving average of the weights is kept"),
    "actor.num_nodes": To("resources.nodes"),
    "actor.num_gpus_per_node": To("resources.slotsPerNode"),
    **all_of(("*.num_nodes", "*.num_gpus_per_node", "train.colocate_*"), NotNeeded("the mapper places the models")),
    **all_of(("*_num_nodes", "*_num_gpus_per_node", "colocate_*"), NotNeeded("the mapper places the models")),
    **all_of(
        ("ref.offload", "reward.offload", "ref_reward_offload"), NotNeeded("models.<role>.offload, or the mapper")
    ),
    "vllm.gpu_memory_utilization": To("rollout.gpuMemoryUtilization"),
    "vllm.enforce_eager": To("rollout.enforceEager", flag),
    **all_of(("vllm.*", "vllm_*", "train.*", "deepspeed_enable_sleep"), ENGINE),
}
_OFFLINE: Table = {
    "model.model_name_or_path": Read("models"),
    "ref.model_name_or_path": To("models.reference.uri", uri_of, only=("DPO",)),
    "ref.offload": NotNeeded("models.reference.offload, or the mapper"),
    "model.gradient_checkpointing_enable": Read("models"),
    "model.beta": To("algorithm.beta", only=("DPO",)),
    **all_of(("model.ipo_enable", "model.label_smoothing", "model.nll_loss_coef"), Lost("DPO has its own loss only")),
    **all_of(("model.margin_loss_enable", "model.loss_type"), Lost("the loss is -log sigmoid of the difference")),
    "model.*": NotNeeded("the trainer's own way of computing losses"),
    "data.dataset": Read("data.train.uri"),
    "data.dataset_split": To("data.train.split"),
    "data.input_key": To("data.train.promptKey", only=("SFT",)),
    "data.output_key": To("data.train.responseKey", only=("SFT",)),
    "data.prompt_key": To("data.train.promptKey"),
    "data.chosen_key": To("data.train.chosenKey"),
    "data.rejected_key": To("data.train.rejectedKey"),
    "data.multiturn": NotNeeded("data.train.messagesKey: every answer of a conversation is learned"),
    "data.*": NotNeeded("how OpenRLHF reads rows"),
    **_optimizer("", "reward", ("RewardModel",)),
}
TABLE: Table = {**_COMMON, **_RL}
OFFLINE_TABLE: Table = {**_COMMON, **_OFFLINE}


def read_values(text: str, source: str) -> dict[str, Any]:
    """Flags of the call, by their names of 0.11, and under PROGRAM which program it is."""
    script = words(text, source)
    programs = [word.rsplit(".", 1)[-1] for word in script if word.startswith("openrlhf.cli.train_")]
    if not programs:
        raise NoCounterpartError("it calls no openrlhf.cli.train_... program")
    begin = max(number for number, word in enumerate(script) if word.startswith("openrlhf.cli.train_"))
    names = {**NAMES, **(RL_NAMES if programs[-1] == "train_ppo_ray" else {})}
    given = {names.get(key, key): value for key, value in flags(script[begin:]).items()}
    return {PROGRAM: programs[-1], **given}


def table_of(algorithm: str) -> Table:
    """The table of a program; the optimizer of an offline job is that of the model that it trains."""
    if algorithm not in OFFLINE.values():
        return TABLE
    return OFFLINE_TABLE if algorithm == "RewardModel" else {**OFFLINE_TABLE, **_optimizer("", "actor")}


def algorithm(values: Mapping[str, Any], _: str | None) -> dict[str, Any]:
    """The algorithm of the program or, in RL, of the advantage estimator."""
    if (program := values[PROGRAM]) in OFFLINE:
        return {"name": OFFLINE[program]}
    estimator = values.get("algo.advantage.estimator", "gae")
    if program != "train_ppo_ray" or estimator not in ESTIMATORS:
        raise NoCounterpartError(f"{program} with the estimator {estimator} is no algorithm here")
    return dict(ESTIMATORS[estimator])


def combine(draft: Draft, values: Mapping[str, Any]) -> None:
    """What several keys say together."""
    draft.name = draft.algorithm.lower()
    if int(values.get("ds.lora.rank") or 0):
        draft.checks.append("there is no LoRA here: all weights are trained, which takes more memory")
    if int(values.get("ds.ring_attn_size") or 1) > 1:
        draft.checks.append("there is no sequence parallelism here: a text is read by one data-parallel rank")
    dataset = values.get("data.prompt_dataset", values.get("data.dataset"))
    if dataset:
        draft.put("data.train", {"uri": uri_of(dataset), **draft.spec.get("data", {}).get("train", {})})
        if "," in str(dataset):
            draft.checks.append("data.train: several data sets with a comma between; write them into data.train.mix")
    if held_out := values.get("eval.dataset"):
        draft.put("evaluation.data", {"uri": uri_of(held_out), "split": values.get("eval.split", "train")})
        if int(values.get("eval.steps", -1)) > 0:
            draft.put("evaluation.everySteps", int(values["eval.steps"]))
    _lengths(draft, values)
    if draft.algorithm in OFFLINE.values():
        _offline(draft, values)
    else:
        _rl(draft, values)


def _lengths(draft: Draft, values: Mapping[str, Any]) -> None:
    """OpenRLHF bounds prompt and response together; here each has a bound."""
    total = int(values["data.max_len"])
    response = int(values.get("rollout.max_new_tokens") or total // 2)
    prompt = int(values.get("data.prompt_max_len") or max(total - response, 1))
    draft.put("data.maxPromptTokens", prompt)
    draft.put("data.maxResponseTokens", response)
    if not values.get("rollout.max_new_tokens"):
        sentence = f"data.max_len {total} bounded both together; here half is for the prompt, half for the response"
        draft.checks.append(sentence)


def _offline(draft: Draft, values: Mapping[str, Any]) -> None:
    role = "reward" if draft.algorithm == "RewardModel" else "actor"
    draft.put(f"models.{role}.uri", uri_of(values.get("model.model_name_or_path", "")))
    if flag(values.get("model.gradient_checkpointing_enable")):
        draft.put(f"models.{role}.gradientCheckpointing", True)
    draft.put("training.batchSize", int(values["train.batch_size"]))
    draft.put("training.totalEpochs", int(values["train.max_epochs"]))
    warmup(draft, role, "lr_warmup_ratio", values.get("lr_warmup_ratio", 0.03), None)


def _rl(draft: Draft, values: Mapping[str, Any]) -> None:
    draft.put("training.promptBatchSize", int(values["rollout.batch_size"]))
    draft.put("training.miniBatchSize", int(values["train.batch_size"]))
    draft.put("training.updateEpochs", int(values["train.max_epochs"]))
    draft.put("training.totalEpochs", int(values["train.num_episodes"]))
    draft.put(
        "algorithm.aggregation", "FixedLength" if values["algo.advantage.estimator"] == "dr_grpo" else "TokenMean"
    )
    if draft.algorithm == "PPO":
        start = values.get("reward.model_name_or_path") or values.get("actor.model_name_or_path", "")
        draft.put("models.critic.uri", uri_of(values.get("critic.model_name_or_path") or str(start).split(",")[0]))
    for role in ("actor", "critic"):
        if role in draft.spec.get("models", {}):
            warmup(draft, role, f"{role}.lr_warmup_ratio", values.get(f"{role}.lr_warmup_ratio", 0.03), None)
    _loss(draft, values)
    _reward(draft, values)


def _loss(draft: Draft, values: Mapping[str, Any]) -> None:
    kl = {"coefficient": values["algo.kl.init_coef"], "applyTo": "Loss" if values.get("algo.kl.use_loss") else "Reward"}
    kl["estimator"] = str(values.get("algo.kl.estimator", "k1")).upper()
    if target := values.get("algo.kl.target"):
        kl |= {"controller": "Adaptive", "target": target, "horizon": values.get("algo.kl.horizon", 10000)}
    draft.put("algorithm.kl", kl)
    if both := values.get("actor.eps_clip_low_high"):
        draft.spec["algorithm"] |= {"clipRange": both[0], "clipRangeHigh": both[1]}
    if values.get("actor.policy_loss_type") == "gspo":
        if draft.algorithm == "GRPO":
            draft.spec["algorithm"] |= {"ratio": "Sequence", "aggregation": "SequenceMean"}
        else:
            draft.checks.append("GSPO's ratio of whole responses is an option of GRPO only")
    if values.get("algo.advantage.is_correction_enable"):
        kind = values.get("algo.advantage.is_correction_type", "tis")
        cap = (values.get("algo.advantage.is_correction_threshold") or [0.5, 5.0])[1]
        draft.put("algorithm.rolloutCorrection", {"mode": "Truncate" if kind == "tis" else "Mask", "cap": cap})
        draft.checks.append(f"rolloutCorrection has one cap, {cap}; there is no bound of its own below 1")


def _reward(draft: Draft, values: Mapping[str, Any]) -> None:
    low, high = values["reward.clip_range"]
    draft.put("algorithm.rewards.clip", max(abs(low), abs(high)))
    remote = str(values.get("reward.remote_url") or values.get("train.agent_func_path") or "").split(",")[0]
    if remote.endswith(".py"):
        draft.put("models.reward", {"entrypoint": f"{remote.rsplit('/', 1)[-1].removesuffix('.py')}:reward_func"})
        draft.checks.append("models.reward: a function gets prompts, responses and columns by name: docs/rewards.md")
        if label := values.get("data.label_key"):
            draft.put("data.train.columns", [str(label)])
    elif remote:
        draft.put("models.reward", {"url": remote})
        draft.checks.append("models.reward.url: requests and answers are those of docs/rewards.md")
    elif model := values.get("reward.model_name_or_path"):
        draft.put("models.reward", {"uri": uri_of(str(model).split(",")[0])})
        if "," in str(model):
            draft.checks.append("models.reward: a sum has one model at most; the first was taken")
