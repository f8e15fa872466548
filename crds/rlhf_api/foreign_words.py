"""Words of verl, OpenRLHF and TRL for fields below spec, for "did you mean"; `<role>` is a trained model."""

FIELDS = """
algorithm.name: adv_estimator advantage_estimator
algorithm.kl.coefficient: beta kl_coef init_kl_coef kl_loss_coef
algorithm.clipRange: epsilon clip_ratio eps_clip
algorithm.aggregation: loss_agg_mode loss_type
algorithm.normalizeByStd: scale_rewards norm_adv_by_std_in_grpo
algorithm.discount: gamma
models.<role>.uri: model model_path model_name_or_path pretrain
models.<role>.optimizer.learningRate: lr learning_rate actor_lr
models.reward: reward_funcs reward_model
data.train: train_files dataset_name prompt_data dataset
data.maxPromptTokens: max_prompt_length prompt_max_len
data.maxResponseTokens: max_completion_length max_response_length max_new_tokens generate_max_len
evaluation.everySteps: test_freq eval_steps
rollout.samplesPerPrompt: n num_generations n_samples_per_prompt
rollout.temperature: temperature
training.promptBatchSize: train_batch_size rollout_batch_size
training.miniBatchSize: ppo_mini_batch_size
training.totalEpochs: epochs num_train_epochs num_episodes
training.totalSteps: max_steps total_training_steps
training.precision: bf16 fp16 dtype torch_dtype
training.microBatchTokens: micro_train_batch_size per_device_train_batch_size gradient_accumulation_steps
training.updateEpochs: ppo_epochs num_iterations max_epochs
checkpoint.everySteps: save_freq save_steps
resources.slotsPerNode: n_gpus_per_node
resources.nodes: nnodes num_nodes
"""

ROWS = (line.partition(":") for line in FIELDS.strip().splitlines())
MEANT = {word: field for field, _, words in ROWS for word in words.split()}
"""Name of a field elsewhere -> the field below spec."""
