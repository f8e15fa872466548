"""verl: a Hydra configuration (YAML) or a script with overrides of verl.trainer.main_ppo; keys of v0.4 to v0.9."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    dns_label,
    flag,
    one_of,
    schedule,
    uri_of,
    warmup,
)

ESTIMATORS: dict[Any, dict[str, Any]] = {
    "gae": {"name": "PPO"},
    "grpo": {"name": "GRPO"},
    "rloo": {"name": "RLOO"},
    "remax": {"name": "ReMax"},
    "opo": {"name": "OPO"},
    "reinforce_plus_plus": {"name": "REINFORCEPP"},
    "reinforce_plus_plus_baseline": {"name": "REINFORCEPP", "baseline": "Group"},
}
KL = {"kl": "K1", "k1": "K1", "mse": "K2", "k2": "K2", "low_var_kl": "K3", "k3": "K3"}
AGGREGATIONS = {
    "token-mean": "TokenMean",
    "seq-mean-token-mean": "SequenceMean",
    "seq-mean-token-sum-norm": "FixedLength",
}
ACTOR, ROLLOUT, REF, MODEL = (f"actor_rollout_ref.{part}." for part in ("actor", "rollout", "ref", "model"))
FITS = NotNeeded("micro-batches are packed by tokens; training.microBatchTokens or the mapper says what fits")
MAPPED = NotNeeded("the mapper chooses sizes, sharding and offload, or models.<role>.{parallelism, offload} do")
ENGINE = NotNeeded("a setting of the generator, which is vLLM in the trainer's own processes")
REWARD = Read("models.reward")

DEFAULTS: Mapping[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "data.prompt_key": "prompt",
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.train_batch_size": 1024,
    ACTOR + "ppo_mini_batch_size": 256,
    ACTOR + "loss_agg_mode": "token-mean",
    ACTOR + "kl_loss_coef": 0.001,
    ACTOR + "kl_loss_type": "low_var_kl",
    ACTOR + "optim.lr": 1e-6,
    ACTOR + "optim.weight_decay": 0.01,
    ACTOR + "optim.betas": [0.9, 0.999],
    "critic.optim.lr": 1e-5,
    "critic.optim.weight_decay": 0.01,
    "critic.optim.betas": [0.9, 0.999],
    "critic.cliprange_value": 0.5,
    "trainer.total_epochs": 30,
}
"""Those defaults of verl that are not the defaults here."""


def _optimizer(prefix: str, role: str, only: tuple[str, ...]) -> Table:
    place = f"models.{role}.optimizer."
    return {
        prefix + "optim.lr": To(place + "learningRate", only=only),
        prefix + "optim.weight_decay": To(place + "weightDecay", only=only),
        prefix + "optim.betas": To(place + "betas", only=only),
        prefix + "optim.clip_grad": To(place + "maxGradNorm", only=only),
        prefix + "grad_clip": To(place + "maxGradNorm", only=only),
        prefix + "optim.lr_warmup_steps": To(place + "warmupSteps", above_zero, only=only),
        prefix + "optim.lr_warmup_steps_ratio": Read(place + "warmupSteps"),
        prefix + "optim.lr_scheduler_type": To(place + "schedule", schedule, only=only),
        prefix + "optim.warmup_style": To(place + "schedule", schedule, only=only),
        prefix + "optim.optimizer": NotNeeded("the optimizer is AdamW"),
        prefix + "optim.*": NotNeeded("training.totalSteps and the schedule say it"),
    }


_ALGORITHM: Table = {
    "algorithm.adv_estimator": Read("algorithm"),
    "algorithm.gamma": To("algorithm.discount", only=("PPO",)),
    "algorithm.lam": To("algorithm.gaeLambda", only=("PPO",)),
    "algorithm.norm_adv_by_std_in_grpo": To("algorithm.normalizeByStd", only=("GRPO",)),
    "algorithm.filter_groups.enable": Read("algorithm.oversampling"),
    "algorithm.filter_groups.max_num_gen_batches": Read("algorithm.oversampling"),
    "algorithm.filter_groups.*": NotNeeded("groups are compared by their scores"),
    "algorithm.rollout_correction.rollout_is": Read("algorithm.rolloutCorrection"),
    "algorithm.rollout_correction.rollout_is_threshold": Read("algorithm.rolloutCorrection"),
    "algorithm.rollout_correction.*": Lost("algorithm.rolloutCorrection has a mode and a cap, no more"),
    "algorithm.use_pf_ppo": Lost("there is no reweighting of samples (PF-PPO)"),
    "algorithm.pf_ppo.*": NotNeeded("for use_pf_ppo"),
    **all_of(("algorithm.use_kl_in_reward", "algorithm.kl_penalty", "algorithm.kl_ctrl.*"), Read("algorithm.kl")),
    **all_of((ACTOR + "use_kl_loss", ACTOR + "kl_loss_coef", ACTOR + "kl_loss_type"), Read("algorithm.kl")),
    **all_of((ACTOR + "clip_ratio", ACTOR + "clip_ratio_low"), To("algorithm.clipRange")),
    ACTOR + "clip_ratio_high": To("algorithm.clipRangeHigh"),
    ACTOR + "clip_ratio_c": Lost("there is no dual clip, a bound on the ratio where advantages are negative"),
    ACTOR + "entropy_coeff": To("algorithm.entropyCoefficient"),
    ACTOR + "loss_agg_mode": To("algorithm.aggregation", one_of(AGGREGATIONS)),
    ACTOR + "policy_loss.loss_mode": Read("algorithm.ratio"),
    "critic.cliprange_value": To("algorithm.valueClipRange", only=("PPO",)),
    "trainer.critic_warmup": To("algorithm.criticWarmupSteps", only=("PPO",)),
}
_DATA: Table = {
    "data.train_files": Read("data.train"),
    "data.val_files": Read("evaluation.data"),
    "data.prompt_key": To("data.train.promptKey"),
    "data.max_prompt_length": To("data.maxPromptTokens"),
    "data.max_response_length": To("data.maxResponseTokens"),
    "data.train_batch_size": To("training.promptBatchSize"),
    "data.train_max_samples": To("data.train.limit", above_zero),
    "data.val_max_samples": Read("evaluation.data.limit"),
    "data.seed": To("training.seed"),
    "data.filter_overlong_prompts": Read("data.overlong"),
    "data.truncation": Read("data.overlong"),
    "data.trust_remote_code": To("models.actor.trustRemoteCode", flag),
    "data.reward_fn_key": NotNeeded("data.train.columns says which columns a reward gets"),
    "data.shuffle": NotNeeded("rows are shuffled by training.seed"),
    **all_of(("data.image_key", "data.video_key", "data.audio_key"), NotNeeded("models read text only")),
    **all_of(("data.custom_cls.*", "data.sampler.*", "data.datagen.*"), Lost("no code of yours reads the data")),
    "data.apply_chat_template_kwargs*": Lost("the chat template gets no further arguments"),
    "data.*": NotNeeded("how verl hands rows on"),
}
_MODELS: Table = {
    MODEL + "path": Read("models.actor.uri"),
    MODEL + "trust_remote_code": To("models.actor.trustRemoteCode", flag),
    MODEL + "enable_gradient_checkpointing": To("models.actor.gradientCheckpointing", flag),
    **all_of((MODEL + "lora_rank", MODEL + "lora.rank"), Read("models.actor")),
    **all_of((MODEL + "custom_chat_template", MODEL + "override_config*"), Lost("the model's own is taken")),
    MODEL + "*": NotNeeded("kernels and loading are the trainer's"),
    **_optimizer(ACTOR, "actor", ()),
    ACTOR + "ppo_mini_batch_size": Read("training.miniBatchSize"),
    ACTOR + "ppo_epochs": To("training.updateEpochs"),
    ACTOR + "ppo_max_token_len_per_gpu": To("training.microBatchTokens"),
    **all_of((ACTOR + "ppo_micro_batch_size*", ACTOR + "use_dynamic_bsz", REF + "log_prob_*"), FITS),
    ACTOR + "ulysses_sequence_parallel_size": Read("models.actor"),
    **all_of(
        (ACTOR + "fsdp_config.param_offload", ACTOR + "fsdp_config.optimizer_offload"), Read("models.actor.offload")
    ),
    REF + "fsdp_config.param_offload": Read("models.reference.offload"),
    **all_of((ACTOR + "fsdp_config.*", ACTOR + "megatron.*", ACTOR + "strategy", REF + "*"), MAPPED),
    ACTOR + "*": NotNeeded("the trainer's own way of computing losses"),
    "critic.model.path": Read("models.critic.uri"),
    "critic.model.trust_remote_code": To("models.critic.trustRemoteCode", flag, only=("PPO",)),
    "critic.model.enable_gradient_checkpointing": To("models.critic.gradientCheckpointing", flag, only=("PPO",)),
    **_optimizer("critic.", "critic", ("PPO",)),
    **all_of(("critic.*fsdp*", "critic.megatron.*", "critic.strategy"), MAPPED),
    "critic.*": NotNeeded("as the actor's, or the trainer's own"),
}
_ROLLOUT: Table = {
    ROLLOUT + "n": To("rollout.samplesPerPrompt"),
    ROLLOUT + "temperature": To("rollout.temperature"),
    ROLLOUT + "top_p": To("rollout.topP"),
    ROLLOUT + "top_k": To("rollout.topK"),
    ROLLOUT + "gpu_memory_utilization": To("rollout.gpuMemoryUtilization"),
    ROLLOUT + "enforce_eager": To("rollout.enforceEager", flag),
    ROLLOUT + "tensor_model_parallel_size": NotNeeded("the mapper chooses; here it divides the training's tensor size"),
    **all_of((ROLLOUT + "val_kwargs.n", ROLLOUT + "val_kwargs.do_sample"), Read("evaluation")),
    ROLLOUT + "val_kwargs.*": Lost("evaluations sample as training does, or are greedy"),
    ROLLOUT + "multi_turn.enable": Lost("responses are one turn; there are no tools"),
    **all_of((ROLLOUT + "multi_turn.*", ROLLOUT + "agent.*"), NotNeeded("responses are one turn")),
    ROLLOUT + "log_prob_*": FITS,
    ROLLOUT + "*": ENGINE,
}
_REWARD: Table = {
    **all_of(("custom_reward_function.*", "reward.custom_reward_function.*"), REWARD),
    **all_of(("reward_model.enable", "reward_model.model.path", "reward_model.reward_manager"), REWARD),
    **all_of(("reward.reward_model.enable", "reward.reward_model.model_path", "reward.reward_manager.name"), REWARD),
    **all_of(
        ("reward_model.overlong_buffer.*", "reward.reward_kwargs.overlong_buffer_cfg.*"),
        Read("algorithm.rewards.overlongPenalty"),
    ),
    **all_of(
        ("reward_model.*", "reward.*", "reward_manager.*"), NotNeeded("the reward lives in a pool like any model")
    ),
    "sandbox_fusion.*": Lost("code is judged by the verifier Code, in a closed process"),
}
_TRAINER: Table = {
    "trainer.total_epochs": To("training.totalEpochs"),
    "trainer.total_training_steps": Read("training.totalSteps"),
    "trainer.nnodes": To("resources.nodes"),
    "trainer.n_gpus_per_node": To("resources.slotsPerNode"),
    "trainer.save_freq": To("checkpoint.everySteps", above_zero),
    "trainer.max_actor_ckpt_to_keep": To("checkpoint.keepLast"),
    "trainer.test_freq": Read("evaluation.everySteps"),
    "trainer.experiment_name": Read("metadata.name"),
    "trainer.rollout_data_dir": To("rollout.keep", lambda _: 1.0),
    **all_of(("trainer.logger", "trainer.project_name"), Read("outputs")),
    **all_of(("trainer.val_before_train", "trainer.balance_batch", "trainer.resume_*"), NotNeeded("is always done")),
    "distillation.enabled": Lost("there is no distillation from a teacher's probabilities"),
    **all_of(("distillation.*", "trainer.v1.*"), NotNeeded("a step waits for its responses; there is no teacher")),
    **all_of(
        ("actor_rollout_ref.hybrid_engine", "actor_rollout_ref.nccl_timeout", "skip.*"), NotNeeded("set-up of verl")
    ),
    "trainer.*": NotNeeded("the run folder and the operator take care of it"),
    **all_of(
        ("ray_kwargs.*", "ray_init.*", "global_profiler.*", "transfer_queue.*"), NotNeeded("set-up of verl and Ray")
    ),
    **all_of(("defaults*", "hydra*"), NotNeeded("is Hydra's")),
}
TABLE: Table = {
    "*_target_": NotNeeded("is Hydra's"),
    **_ALGORITHM,
    **_DATA,
    **_MODELS,
    **_ROLLOUT,
    **_REWARD,
    **_TRAINER,
}


def algorithm(values: Mapping[str, Any], _: str | None) -> dict[str, Any]:
    """The algorithm of an advantage estimator."""
    estimator = values["algorithm.adv_estimator"]
    if estimator not in ESTIMATORS:
        raise NoCounterpartError(f"algorithm.adv_estimator {estimator} is no algorithm here")
    return dict(ESTIMATORS[estimator])


def combine(draft: Draft, values: Mapping[str, Any]) -> None:
    """What several keys say together."""
    draft.name = dns_label(values.get("trainer.experiment_name", "imported"))
    draft.put("models.actor.uri", uri_of(values.get(MODEL + "path", "")))
    if draft.algorithm == "PPO":
        draft.put("models.critic.uri", uri_of(values.get("critic.model.path", values.get(MODEL + "path", ""))))
    if values.get(MODEL + "lora_rank") or values.get(MODEL + "lora.rank"):
        draft.checks.append("there is no LoRA here: all weights are trained, which takes more memory")
    if values.get(ACTOR + "ulysses_sequence_parallel_size", 1) != 1:
        draft.checks.append("there is no sequence parallelism here: a text is read by one data-parallel rank")
    _outputs(draft, values)
    _lengths(draft, values)
    _kl(draft, values)
    _groups(draft, values)
    _data(draft, values)
    _reward(draft, values)
    _offload(draft, values)


def _outputs(draft: Draft, values: Mapping[str, Any]) -> None:
    logger = values.get("trainer.logger") or []
    if "wandb" in logger:
        draft.put("outputs.wandb.project", str(values.get("trainer.project_name", "verl_examples")))
    if "tensorboard" in logger:
        draft.put("outputs.tensorboard", True)


def _lengths(draft: Draft, values: Mapping[str, Any]) -> None:
    samples = int(draft.get("rollout.samplesPerPrompt") or 1)
    draft.put("training.miniBatchSize", int(values[ACTOR + "ppo_mini_batch_size"]) * samples)
    if steps := values.get("trainer.total_training_steps"):
        draft.spec["training"].pop("totalEpochs", None)
        draft.put("training.totalSteps", int(steps))
    for role, prefix in {"actor": ACTOR, "critic": "critic."}.items():
        if role in draft.spec["models"]:
            key = prefix + "optim.lr_warmup_steps_ratio"
            warmup(draft, role, key, values.get(key), steps)


def _kl(draft: Draft, values: Mapping[str, Any]) -> None:
    in_loss, in_reward = flag(values.get(ACTOR + "use_kl_loss")), flag(values.get("algorithm.use_kl_in_reward"))
    if in_loss and in_reward:
        draft.checks.append("KL is in the reward and in the loss there; here it is in one of them, so in the loss")
    draft.put("algorithm.kl.coefficient", 0.0)
    if in_loss:
        kind = str(values[ACTOR + "kl_loss_type"]).rstrip("+")
        draft.put("algorithm.kl", {"coefficient": values[ACTOR + "kl_loss_coef"], "applyTo": "Loss"})
    elif in_reward:
        kind = str(values.get("algorithm.kl_penalty", "kl")).rstrip("+")
        draft.put("algorithm.kl", {"coefficient": values["algorithm.kl_ctrl.kl_coef"], "applyTo": "Reward"})
        if values.get("algorithm.kl_ctrl.type") == "adaptive":
            target, horizon = (values.get(f"algorithm.kl_ctrl.{key}") for key in ("target_kl", "horizon"))
            draft.spec["algorithm"]["kl"] |= {
                "controller": "Adaptive",
                "target": target or 0.1,
                "horizon": horizon or 10000,
            }
    else:
        return
    if kind in KL:
        draft.put("algorithm.kl.estimator", KL[kind])
    else:
        draft.checks.append(f"there is no KL estimator {kind} here; algorithm.kl.estimator is K1, K2 or K3")


def _groups(draft: Draft, values: Mapping[str, Any]) -> None:
    if draft.algorithm == "GRPO" and flag(values.get("algorithm.filter_groups.enable")):
        most = int(values.get("algorithm.filter_groups.max_num_gen_batches") or 0)
        draft.put("algorithm.oversampling", max(most, 2))
        draft.checks.append(
            "dynamic sampling draws algorithm.oversampling times the prompts once, not until enough are found"
        )
    if (mode := values.get(ACTOR + "policy_loss.loss_mode", "vanilla")) == "gspo" and draft.algorithm == "GRPO":
        draft.spec["algorithm"] |= {"ratio": "Sequence", "aggregation": "SequenceMean"}
    elif mode != "vanilla":
        draft.checks.append(f"there is no policy loss {mode} here; the usual clipped loss is used")
    if values.get("algorithm.rollout_correction.rollout_is") == "token":
        cap = values.get("algorithm.rollout_correction.rollout_is_threshold", 2.0)
        draft.put("algorithm.rolloutCorrection", {"mode": "Truncate", "cap": cap})
    for prefix in ("reward_model.overlong_buffer.", "reward.reward_kwargs.overlong_buffer_cfg."):
        if flag(values.get(prefix + "enable")):
            factor = values.get(prefix + "penalty_factor", 1.0)
            draft.put(
                "algorithm.rewards.overlongPenalty", {"bufferTokens": values[prefix + "len"], "coefficient": factor}
            )


def _data(draft: Draft, values: Mapping[str, Any]) -> None:
    files = values.get("data.train_files")
    files = files if isinstance(files, list) else [files] if files else []
    train = draft.spec["data"].setdefault("train", {})
    if len(files) == 1:
        draft.put("data.train", {"uri": uri_of(files[0]), **train})
    elif files:
        rows = {key: value for key, value in train.items() if key == "promptKey"}
        draft.put("data.train", {"mix": [{"uri": uri_of(each), "weight": 1.0, **rows} for each in files]})
        draft.checks.append("data.train.mix draws the same share of each file; set the weights")
    if flag(values.get("data.filter_overlong_prompts")) or values.get("data.truncation", "error") != "error":
        draft.put("data.overlong", "Drop")
        if values.get("data.truncation", "error") != "error":
            draft.checks.append("prompts are never cut here: those that are too long are left out and counted")
    else:
        draft.put("data.overlong", "Fail")
    held_out = values.get("data.val_files")
    if not held_out:
        return
    held_out = held_out if isinstance(held_out, list) else [held_out]
    rows = {"promptKey": values["data.prompt_key"]}
    sets = [{"name": _set_name(each), "uri": uri_of(each), **rows} for each in held_out]
    limit = values.get("data.val_max_samples", -1)
    one = {key: value for key, value in sets[0].items() if key != "name"} | ({"limit": limit} if limit > 0 else {})
    draft.put("evaluation.data", one if len(sets) == 1 else {"sets": sets})
    if (steps := values.get("trainer.test_freq", -1)) > 0:
        draft.put("evaluation.everySteps", steps)
    if (samples := values.get(ROLLOUT + "val_kwargs.n", 1)) > 1:
        draft.put("evaluation.samplesPerPrompt", samples)
    elif not flag(values.get(ROLLOUT + "val_kwargs.do_sample", False)):
        draft.put("evaluation.greedy", True)


def _reward(draft: Draft, values: Mapping[str, Any]) -> None:
    def either(old: str, new: str) -> Any:
        return values.get(new, values.get(old))

    path = either("custom_reward_function.path", "reward.custom_reward_function.path")
    name = either("custom_reward_function.name", "reward.custom_reward_function.name") or "compute_score"
    model = either("reward_model.model.path", "reward.reward_model.model_path")
    if path:
        draft.put("models.reward.entrypoint", f"{str(path).rsplit('/', 1)[-1].removesuffix('.py')}:{name}")
        sentence = "a reward function gets all responses of a rank and its columns by name: docs/rewards.md"
    elif flag(either("reward_model.enable", "reward.reward_model.enable")) and model:
        draft.put("models.reward.uri", uri_of(model))
        return
    else:
        draft.put("models.reward.verifier", {"name": "Math", "answerKey": "answer"})
        sentence = (
            "verl chose the score by the column data_source; here it is the verifier Math, which reads a column answer"
        )
    draft.checks.append(
        f"models.reward: {sentence}; a right answer within reward_model.ground_truth needs a column of its own"
    )


def _offload(draft: Draft, values: Mapping[str, Any]) -> None:
    away = [flag(values.get(f"{ACTOR}fsdp_config.{part}_offload")) for part in ("param", "optimizer")]
    if any(away):
        draft.put("models.actor.offload", "All" if all(away) else "Parameters" if away[0] else "Optimizer")
    if flag(values.get(REF + "fsdp_config.param_offload")) and draft.get("algorithm.kl.coefficient"):
        draft.put("models.reference", {"uri": draft.get("models.actor.uri"), "offload": "Parameters"})


def _set_name(file: Any) -> str:
    """Folder and file, as in gsm8k_test."""
    return dns_label("-".join(str(file).split(".")[0].split("/")[-2:])).replace("-", "_")
