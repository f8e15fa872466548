"""PPO from Python: SFT, a reward model and PPO, as in examples/01-helpful-ppo.yaml, and what PPO measured.

python examples/python/ppo.py [FOLDER] [JOB:PATH=VALUE ...]
"""

import sys

import rlhf

MODEL, DATA = "package://rlhf_examples/helpful/model", "package://rlhf_examples/helpful/train.jsonl"


def job(name: str, algorithm: str, models: dict[str, object], **training: int) -> dict[str, object]:
    data = {"train": {"uri": DATA}, "maxPromptTokens": 16, "maxResponseTokens": 48}
    return {
        "apiVersion": "rlhf.hybridflow.io/v1alpha1",
        "kind": "RLHFJob",
        "metadata": {"name": name},
        "spec": {"algorithm": {"name": algorithm}, "models": models, "data": data, "training": training},
    }


def learning(uri: str, rate: float) -> dict[str, object]:
    return {"uri": uri, "optimizer": {"learningRate": rate}}


models = {"actor": learning("job://sft", 2e-4), "critic": learning("job://rm", 5e-4), "reward": {"uri": "job://rm"}}
chain = [
    job("sft", "SFT", {"actor": learning(MODEL, 3e-3)}, totalSteps=150, batchSize=32),
    job("rm", "RewardModel", {"reward": learning("job://sft", 1e-3)}, totalSteps=200, batchSize=32),
    job("ppo", "PPO", models, totalSteps=25, promptBatchSize=64, miniBatchSize=32),
]
if __name__ == "__main__":
    run = rlhf.run(chain, output=[*sys.argv, "runs/python"][1], sets=sys.argv[2:])
    print(run["ppo"].metrics()[["reward/mean", "kl/reference", "response_length/mean"]])
