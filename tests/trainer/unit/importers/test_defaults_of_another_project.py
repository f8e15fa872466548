"""What a configuration means that says as little as possible: the defaults of the other project, as it documents them.

verl: trainer/config/ppo_trainer.yaml. OpenRLHF: the arguments of openrlhf/cli. TRL: its configuration classes.
"""

from __future__ import annotations

from rlhf_api.checks.resume import leaves
from rlhf_importers.command import convert
from tests.each import each_case

VERL = "python3 -m verl.trainer.main_ppo data.train_files=a.parquet actor_rollout_ref.model.path=org/sft "
OPENRLHF = "deepspeed --module openrlhf.cli."
LEAST = {
    "verl PPO": (
        "verl",
        VERL + "algorithm.adv_estimator=gae critic.model.path=org/sft "
        "reward_model.enable=True reward_model.model.path=org/rm",
    ),
    "verl GRPO with LoRA": (
        "verl",
        VERL + "algorithm.adv_estimator=grpo custom_reward_function.path=mine.py actor_rollout_ref.model.lora_rank=8",
    ),
    "verl GRPO with a KL loss": (
        "verl",
        VERL
        + "algorithm.adv_estimator=grpo custom_reward_function.path=mine.py actor_rollout_ref.actor.use_kl_loss=True",
    ),
    "OpenRLHF PPO": (
        "openrlhf",
        (
            "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path org/sft "
            "--reward.model_name_or_path org/rm --data.prompt_dataset org/prompts"
        ),
    ),
    "OpenRLHF SFT": (
        "openrlhf",
        OPENRLHF + "train_sft --model.model_name_or_path org/base --data.dataset org/texts --ds.lora.rank 8",
    ),
    "OpenRLHF RewardModel": (
        "openrlhf",
        OPENRLHF + "train_rm --model.model_name_or_path org/base --data.dataset org/pairs",
    ),
    "OpenRLHF DPO": ("openrlhf", OPENRLHF + "train_dpo --model.model_name_or_path org/base --data.dataset org/pairs"),
    "TRL GRPO": (
        "trl",
        "trl grpo --model_name_or_path org/sft --dataset_name org/prompts --reward_funcs accuracy_reward",
    ),
    "TRL RLOO": (
        "trl",
        "trl rloo --model_name_or_path org/sft --dataset_name org/prompts --reward_funcs accuracy_reward",
    ),
    "TRL SFT with LoRA": ("trl", "trl sft --model_name_or_path org/base --dataset_name org/texts --use_peft"),
    "TRL DPO": ("trl", "trl dpo --model_name_or_path org/base --dataset_name org/pairs"),
    "TRL KTO": ("trl", "trl kto --model_name_or_path org/base --dataset_name org/rows --desirable_weight 1.5"),
    "TRL RewardModel": ("trl", "trl reward --model_name_or_path org/base --dataset_name org/pairs"),
}

MEANS = {
    "verl PPO": """
        algorithm.name=PPO algorithm.discount=1.0 algorithm.gaeLambda=1.0 algorithm.aggregation=TokenMean
        algorithm.valueClipRange=0.5 algorithm.kl.coefficient=0.0 models.actor.optimizer.learningRate=1e-06
        models.actor.optimizer.weightDecay=0.01 models.actor.optimizer.betas.0=0.9
        models.actor.optimizer.betas.1=0.999 models.actor.uri=hf://org/sft
        models.critic.optimizer.learningRate=1e-05 models.critic.optimizer.weightDecay=0.01
        models.critic.optimizer.betas.0=0.9 models.critic.optimizer.betas.1=0.999 models.critic.uri=hf://org/sft
        models.reward.uri=hf://org/rm data.train.uri=file://a.parquet data.train.promptKey=prompt
        data.maxPromptTokens=512 data.maxResponseTokens=512 data.overlong=Fail training.promptBatchSize=1024
        training.totalEpochs=30 training.miniBatchSize=256
    """,
    "verl GRPO with LoRA": """
        algorithm.name=GRPO algorithm.aggregation=TokenMean algorithm.kl.coefficient=0.0
        models.actor.optimizer.learningRate=1e-06 models.actor.optimizer.weightDecay=0.01
        models.actor.optimizer.betas.0=0.9 models.actor.optimizer.betas.1=0.999 models.actor.uri=hf://org/sft
        models.actor.lora.rank=8 models.actor.lora.alpha=16 models.actor.lora.targets=[]
        models.reward.entrypoint=mine:compute_score data.train.uri=file://a.parquet data.train.promptKey=prompt
        data.maxPromptTokens=512 data.maxResponseTokens=512 data.overlong=Fail training.promptBatchSize=1024
        training.totalEpochs=30 training.miniBatchSize=256
    """,
    "verl GRPO with a KL loss": """
        algorithm.name=GRPO algorithm.aggregation=TokenMean algorithm.kl.coefficient=0.001
        algorithm.kl.applyTo=Loss algorithm.kl.estimator=K3 models.actor.optimizer.learningRate=1e-06
        models.actor.optimizer.weightDecay=0.01 models.actor.optimizer.betas.0=0.9
        models.actor.optimizer.betas.1=0.999 models.actor.uri=hf://org/sft
        models.reward.entrypoint=mine:compute_score data.train.uri=file://a.parquet data.train.promptKey=prompt
        data.maxPromptTokens=512 data.maxResponseTokens=512 data.overlong=Fail training.promptBatchSize=1024
        training.totalEpochs=30 training.miniBatchSize=256
    """,
    "OpenRLHF PPO": """
        algorithm.aggregation=TokenMean algorithm.name=PPO algorithm.valueClipRange=0.5 algorithm.clipRange=0.2
        algorithm.discount=1.0 algorithm.gaeLambda=1.0 algorithm.kl.coefficient=0.01 algorithm.kl.applyTo=Reward
        algorithm.kl.estimator=K1 algorithm.rewards.clip=10 models.critic.optimizer.learningRate=9e-06
        models.critic.optimizer.schedule=Cosine models.critic.uri=hf://org/rm
        models.actor.optimizer.learningRate=1e-06 models.actor.optimizer.schedule=Cosine
        models.actor.uri=hf://org/sft models.reward.uri=hf://org/rm data.train.uri=hf://org/prompts
        data.train.split=train data.train.promptKey=input data.maxPromptTokens=1024 data.maxResponseTokens=1024
        training.seed=42 training.promptBatchSize=1024 training.miniBatchSize=128 training.updateEpochs=1
        training.totalEpochs=1
    """,
    "OpenRLHF SFT": """
        algorithm.name=SFT models.actor.optimizer.schedule=Cosine models.actor.uri=hf://org/base
        models.actor.lora.rank=8 models.actor.lora.alpha=16 models.actor.lora.targets=[]
        data.train.uri=hf://org/texts data.maxPromptTokens=1024 data.maxResponseTokens=1024 training.seed=42
        training.batchSize=128 training.totalEpochs=1
    """,
    "OpenRLHF RewardModel": """
        algorithm.name=RewardModel models.reward.optimizer.schedule=Cosine models.reward.uri=hf://org/base
        data.train.uri=hf://org/pairs data.maxPromptTokens=1024 data.maxResponseTokens=1024 training.seed=42
        training.batchSize=128 training.totalEpochs=1
    """,
    "OpenRLHF DPO": """
        algorithm.name=DPO models.actor.optimizer.schedule=Cosine models.actor.uri=hf://org/base
        data.train.uri=hf://org/pairs data.maxPromptTokens=1024 data.maxResponseTokens=1024 training.seed=42
        training.batchSize=128 training.totalEpochs=1
    """,
    "TRL GRPO": """
        algorithm.name=GRPO algorithm.aggregation=TokenMean algorithm.kl.coefficient=0.0
        algorithm.kl.applyTo=Loss models.actor.optimizer.learningRate=1e-06 models.actor.optimizer.betas.0=0.9
        models.actor.optimizer.betas.1=0.999 models.actor.optimizer.schedule=Cosine
        models.actor.uri=hf://org/sft models.reward.verifier.name=Math models.reward.verifier.answerKey=solution
        data.train.uri=hf://org/prompts data.train.split=train data.maxResponseTokens=512
        data.maxPromptTokens=512 rollout.samplesPerPrompt=8 training.seed=42 training.promptBatchSize=1
        training.miniBatchSize=8 training.totalEpochs=3
    """,
    "TRL RLOO": """
        algorithm.name=RLOO algorithm.kl.coefficient=0.05 algorithm.kl.applyTo=Reward
        models.actor.optimizer.learningRate=1e-06 models.actor.optimizer.betas.0=0.9
        models.actor.optimizer.betas.1=0.999 models.actor.optimizer.schedule=Cosine
        models.actor.uri=hf://org/sft models.reward.verifier.name=Math models.reward.verifier.answerKey=solution
        data.train.uri=hf://org/prompts data.train.split=train data.maxResponseTokens=512
        data.maxPromptTokens=512 rollout.samplesPerPrompt=2 training.seed=42 training.promptBatchSize=4
        training.miniBatchSize=8 training.totalEpochs=3
    """,
    "TRL SFT with LoRA": """
        algorithm.name=SFT models.actor.optimizer.learningRate=2e-05 models.actor.optimizer.betas.0=0.9
        models.actor.optimizer.betas.1=0.999 models.actor.optimizer.schedule=Cosine
        models.actor.uri=hf://org/base models.actor.lora.rank=16 models.actor.lora.alpha=32
        models.actor.lora.targets.0=q_proj models.actor.lora.targets.1=v_proj data.train.uri=hf://org/texts
        data.train.split=train data.maxPromptTokens=512 data.maxResponseTokens=512 training.seed=42
        training.batchSize=8 training.totalEpochs=3
    """,
    "TRL DPO": """
        algorithm.name=DPO models.actor.optimizer.learningRate=1e-06 models.actor.optimizer.betas.0=0.9
        models.actor.optimizer.betas.1=0.999 models.actor.optimizer.schedule=Cosine
        models.actor.uri=hf://org/base data.train.uri=hf://org/pairs data.train.split=train
        data.maxPromptTokens=512 data.maxResponseTokens=512 training.seed=42 training.batchSize=8
        training.totalEpochs=3
    """,
    "TRL KTO": """
        algorithm.name=KTO algorithm.desirableWeight=1.5 models.actor.optimizer.learningRate=1e-06
        models.actor.optimizer.betas.0=0.9 models.actor.optimizer.betas.1=0.999
        models.actor.optimizer.schedule=Cosine models.actor.uri=hf://org/base data.train.uri=hf://org/rows
        data.train.split=train data.train.responseKey=completion data.maxPromptTokens=512
        data.maxResponseTokens=512 training.seed=42 training.batchSize=8 training.totalEpochs=3
    """,
    "TRL RewardModel": """
        algorithm.name=RewardModel models.reward.optimizer.learningRate=0.0001
        models.reward.optimizer.betas.0=0.9 models.reward.optimizer.betas.1=0.999
        models.reward.optimizer.schedule=Cosine models.reward.uri=hf://org/base data.train.uri=hf://org/pairs
        data.train.split=train data.maxPromptTokens=512 data.maxResponseTokens=512 training.seed=42
        training.batchSize=8 training.totalEpochs=3
    """,
}
"""Field and value of what each configuration becomes."""


@each_case("case", LEAST)
def test_what_is_not_said_is_the_default(case: str) -> None:
    project, text = LEAST[case]
    draft = convert(f"{text}\n", project, source="FILE")
    found = [f"{path}={str(value).replace(' ', '')}" for path, value in leaves(draft.document()["spec"])]
    assert sorted(found) == sorted(MEANS[case].split())
