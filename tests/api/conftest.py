"""A chain of three jobs that is right, for tests to break."""

import pytest

CHAIN = """\
apiVersion: rlhf.hybridflow.io/v1alpha1
kind: RLHFJob
metadata: {name: helpful-ppo}
spec:
  algorithm: {name: PPO, kl: {coefficient: 1e-2}}
  models:
    actor: {uri: "job://helpful-sft", gradientCheckpointing: true, optimizer: {learningRate: 1e-6, betas: [0.9, 1e-1]}}
    critic: {uri: "job://helpful-reward"}
    reward: {uri: "job://helpful-reward"}
  data: {train: {uri: "package://rlhf_examples/helpful"}}
  rollout: {samplesPerPrompt: 4}
  training: {totalSteps: 3, promptBatchSize: 8, miniBatchSize: 16}
---
apiVersion: rlhf.hybridflow.io/v1alpha1
kind: RLHFJob
metadata: {name: helpful-sft}
spec:
  algorithm: {name: SFT}
  models: {actor: {uri: "hf://gpt2", revision: 1e5x}}
  data: {train: {uri: "package://rlhf_examples/helpful"}}
  training: {totalEpochs: 2, batchSize: 16}
---
apiVersion: rlhf.hybridflow.io/v1alpha1
kind: RLHFJob
metadata: {name: helpful-reward}
spec:
  algorithm: {name: RewardModel}
  models: {reward: {uri: "job://helpful-sft"}}
  data: {train: {uri: "package://rlhf_examples/helpful"}}
  training: {totalSteps: 5, batchSize: 16}
"""


@pytest.fixture
def chain() -> str:
    return CHAIN
