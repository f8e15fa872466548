"""Documents and changes of them, and what becomes of each: `rlhf validate` and a cluster's API server judge alike."""

import copy
from typing import Any, NamedTuple

from rlhf_api import kubectl_yaml
from rlhf_api.files import apply
from rlhf_api.spec.algorithm_table import ALGORITHMS
from rlhf_api.spec.algorithms import Algorithm, Distilling

HEAD = "apiVersion: rlhf.hybridflow.io/v1alpha1\nkind: RLHFJob\nmetadata: {name: job}\n"
RL = "training: {totalSteps: 3, promptBatchSize: 8}"
OFFLINE = "training: {totalSteps: 3, batchSize: 8}"
DATA = "data: {train: {uri: hf://data}}"
MERGE = "algorithm: {name: Merge, models: [{uri: hf://a}, {uri: hf://b, weight: 2}]}"
SEVERAL = "rollout: {samplesPerPrompt: 4}"
URIS = {"actor": "hf://a", "critic": "hf://c", "reward": "hf://r", "cost": "hf://k", "teacher": "hf://t"}


def small_spec(algorithm: type[Algorithm]) -> list[str]:
    """The models that it needs, how long, and several responses to a prompt where they are compared."""
    models = (f"{role}: {{uri: {URIS[role]}}}" for role in algorithm.trained + algorithm.frozen if role in URIS)
    several = [SEVERAL] if algorithm.comparing == {} or issubclass(algorithm, Distilling) else []
    return [f"models: {{{', '.join(models)}}}", OFFLINE if algorithm.offline else RL, *several]


SPECS = {name: small_spec(algorithm) for name, algorithm in ALGORITHMS.items() if name != "Merge"} | {"Merge": []}
"""A small right spec of each algorithm."""

ROLES = ("actor", "critic", "reference", "reward", "cost", "teacher")
ALONE = "models.reward="
TEACHER_POOL = (
    "placement={mode: Manual, pools: [{name: a, models: [actor], slotsPerNode: 2}, "
    "{name: b, models: [teacher], slotsPerNode: 1}]}"
)
ALL = "{name: all, models: [actor, critic, reference, reward], slotsPerNode: 1}"
POOLS = f"placement={{mode: Manual, pools: [{ALL}]}}"
FUNCTION = "models.reward={entrypoint: a.b:c}"
ENVIRONMENT, TOOLS = "rollout.environment={entrypoint: 'a:Env', arguments: {n: 1}}", "rollout.tools=['a:add']"
AGENT, COMMAND = "rollout.agent={entrypoint: 'a:run', arguments: {n: 1}}", "rollout.agent={command: [python, a.py]}"
CODE_OF_A_MINUTE = "models.reward={verifier: {name: Code, seconds: 60}}"
VERIFIERS = "evaluation={data: {uri: hf://x}, samplesPerPrompt: 8, verifiers: [{name: right, verifier: {name: Math}}]}"
JUDGE = "{judge: {url: 'http://c/v1', model: m, prompt: 'Rate {response}', arguments: {seed: 1}}}"
PAIRWISE = "{judge: {url: 'http://c/v1', model: m, prompt: '{response_a} or {response_b}'}}"
EVALUATION = "evaluation={data: {uri: hf://x}, functions: [{name: rule, entrypoint: a.b:c}]}"


COMPRESSED, REPLICAS = "training.gradientCompression=TopK", "models.{role}.parallelism={{data: 4, replicas: 2}}"
SETS = "evaluation={data: {sets: [{name: a, uri: hf://x, columns: [answer]}, {name: b, uri: hf://y}]}}"
SHAPE = "{hiddenSize: 8, numHiddenLayers: 2, numAttentionHeads: 2, intermediateSize: 16, vocabSize: 32}"


class Case(NamedTuple):
    """A document and the field at which it is wrong; no field: it is right."""

    base: str
    overrides: tuple[str, ...]
    path: str = ""

    def document(self) -> dict[str, Any]:
        """The base with the overrides, as a fresh mapping."""
        return made(self.base, self.overrides)


class Update(NamedTuple):
    """A document before and after, the field that must not change so, and whether a laptop refuses it too."""

    base: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    path: str = ""
    on_a_laptop: bool = True


def made(base: str, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """A document of the base algorithm with `--set` overrides."""
    first = [MERGE] if base == "Merge" else [f"algorithm: {{name: {base}}}", DATA]
    body = "\n".join(f"  {line}" for line in [*first, *SPECS[base]])
    (document,) = kubectl_yaml.read(f"{HEAD}spec:\n{body}\n", "")
    return copy.deepcopy(apply(overrides, [document])[0])


def _sum(*parts: str) -> str:
    return f"models.reward={{sum: [{', '.join(parts)}]}}"


def _part(name: str, reward: str, more: str = "") -> str:
    return f"{{name: {name}, reward: {reward}{more}}}"


def _pools(*pools: str) -> str:
    return f"placement={{mode: Manual, pools: [{', '.join(pools)}]}}"


def _pool(name: str, models: str, slots: object = 1) -> str:
    return f"{{name: {name}, models: [{models}], slotsPerNode: {slots}}}"


def _server(name: str) -> str:
    return f"{{name: {name}, url: 'http://t:8000/v1', model: m}}"


SERVER = f"models.teacherEndpoints=[{_server('it')}]"
ELASTIC = _pool("writers", "rollout").replace("name:", "maxNodes: 3, name:")
DRAFTS = "rollout.speculation={method: NGram, tokens: 3}"
APART = _pools(ALL, _pool("writers", "rollout", 3))
ELSEWHERE = "rollout.endpoints=['http://a:8000', 'https://b/vllm']"


def _functions(*functions: str) -> str:
    return f"evaluation={{data: {{uri: hf://x}}, functions: [{', '.join(functions)}]}}"


def _policy(*rules: str) -> str:
    return f"runPolicy.failureRules=[{', '.join(rules)}]"


HEAD_TEMPLATE = """{
    metadata: {labels: {team: a}, annotations: {example.com/b: 'c d'}},
    spec: {priorityClassName: high, initContainers: [{name: wait, image: busybox}]}}"""
WORKER_TEMPLATE = """{spec: {
    nodeSelector: {zone: a}, tolerations: [{operator: Exists}, {key: d}], hostNetwork: true,
    resourceClaims: [{name: nic, resourceClaimTemplateName: nics}],
    containers: [
        {name: ray-worker, resources: {limits: {rdma/hca: 4}, claims: [{name: nic}]}, env: [{name: A, value: b}],
         volumeMounts: [{name: data, mountPath: /tmp/data}]},
        {name: mine, image: x, command: [sleep]}]}}"""
BASED = ("algorithm.method=TIES", "algorithm.base=hf://s", "algorithm.density=0.5")
TWO_SLOTS = _pools(_pool("a", "actor", 2))
RIGHT: dict[str, Case] = {
    "a merge from a base": Case("Merge", (*BASED, "training.seed=3", "training.callDeadlineSeconds=9")),
    "a merge as a run has it": Case(
        "Merge", ("training={batchSize: 1, totalEpochs: 1}", "resources={device: CPU}", _pools(_pool("a", "actor")))
    ),
    **{f"a small {name}": Case(name, ()) for name in SPECS},
    "null is unset where there is a default": Case("PPO", ("algorithm.discount=", "training.seed=", "rollout=")),
    "null is unset where there is none": Case("PPO", ("data.train.limit=", "evaluation=", "models.reference=")),
    "null for a field of another algorithm": Case("SFT", ("algorithm.clipRange=", "algorithm.valueClipRange=")),
    "null for a field of another form of reward": Case("PPO", ("models.reward.url=", "models.reward.sum=")),
    "null does not clip values": Case("PPO", ("algorithm.valueClipRange=",)),
    "null in a template": Case("PPO", ("runtime.worker.template={spec: {nodeSelector: {a: null}, affinity: null}}",)),
    "null as an argument": Case("PPO", (FUNCTION, "models.reward.arguments={a: null}")),
    "a whole number with a point": Case("PPO", ("training.totalSteps=3.0",)),
    "a whole number with an exponent": Case("PPO", ("training.totalSteps=1e3", "training.seed=4e9")),
    "a whole number for a number": Case("PPO", ("algorithm.discount=1", "checkpoint.everyMinutes=5")),
    "the longest name": Case("PPO", (f"metadata.name={'a' * 40}",)),
    "labels": Case("SFT", ("metadata.labels={kueue.x-k8s.io/queue-name: team-a, plain: ''}",)),
    "annotations": Case("SFT", ("metadata.annotations={example.com/note: 'any text, 100 %'}",)),
    "the older name of a steered coefficient": Case("PPO", ("algorithm.kl={controller: Adaptive, target: 6}",)),
    "a steered coefficient for GRPO": Case(
        "GRPO", ("algorithm.kl={controller: Coefficient, target: 6, applyTo: Reward}",)
    ),
    "a steered learning rate": Case("GRPO", ("algorithm.kl={controller: LearningRate, target: 0.1, coefficient: 0}",)),
    "empty mappings": Case("PPO", ("algorithm.kl={}", "algorithm.rewards={}", "models.actor.optimizer={}")),
    "masks of responses": Case(
        "GRPO",
        ("algorithm.rolloutCorrection={level: Geometric, mode: Mask, low: 0.99, high: 1.01, veto: 1e-4}",),
    ),
    "a warning of a mismatch": Case("PPO", ("watch.mismatch={kl: 0.1}", "training.oldLogProbs=Generator")),
    "a loss of pairs": Case("OnlineDPO", ("algorithm.loss=Robust", "algorithm.labelSmoothing=0.1")),
    "a reference": Case("DPO", ("models.reference={uri: hf://a, offload: Parameters}",)),
    "an adapter": Case("PPO", ("models.actor.lora={}", "models.critic.lora={rank: 8, alpha: 8, targets: [q_proj]}")),
    "an adapter of a reward model": Case("RewardModel", ("models.reward.lora={initial: hf://a/b}",)),
    "an actor that is its own reference": Case(
        "PPO", ("models.actor.lora={}", "models.reference={uri: hf://a}", _pools(_pool("a", "actor, critic, reward")))
    ),
    "an adapter beside another reference": Case(
        "PPO", ("models.actor.lora={}", "models.reference={uri: hf://b}", POOLS)
    ),
    "an adapter beside a reference of another revision": Case(
        "PPO", ("models.actor.lora={}", "models.reference={uri: hf://a, revision: x}", POOLS)
    ),
    "an optimizer in host memory": Case("PPO", ("models.actor.offload=OptimizerInHost",)),
    "a known shape": Case("PPO", ("models.actor.shape={name: llama-3-8b, vocabSize: 128264}",)),
    "a shape in numbers": Case("PPO", (f"models.critic.shape={SHAPE}",)),
    "betas": Case("SFT", ("models.actor.optimizer={betas: [0, 0.999], schedule: Cosine, learningRate: 1e-6}",)),
    "a function as reward": Case("PPO", (FUNCTION, "models.reward.arguments={deep: [1, {x: y}], f: 1.5}")),
    "a schedule of one's own": Case("SFT", ("models.actor.optimizer.schedule=a.b:factor",)),
    "rows of one's own in an order of one's own": Case(
        "SFT",
        (
            "data.train={entrypoint: 'a:rows', arguments: {n: 1}, responseKey: r, limit: 9}",
            "data.order={entrypoint: 'a:order'}",
        ),
    ),
    "held-out rows of one's own": Case("PPO", ("evaluation={data: {entrypoint: 'a:rows', columns: [answer]}}",)),
    "callbacks": Case("PPO", ("outputs.callbacks=[{entrypoint: 'a:One', arguments: {n: 1}}, {entrypoint: 'a:One'}]",)),
    "trackers": Case(
        "PPO",
        (
            "outputs={tensorboard: true, wandb: {project: a}, mlflow: {uri: 'http://h:1', experiment: b}}",
            "outputs.otel.endpoint='http://collector:4318'",
        ),
    ),
    "a service as reward": Case("PPO", ("models.reward={url: 'http://[::1]:8000/x', tokenVariable: T}",)),
    "a sum as reward": Case(
        "PPO",
        (
            _sum(
                _part("a", "{entrypoint: a:b}", ", weight: -0.5"),
                _part("b", "{url: 'http://c'}"),
                _part("d", "{uri: job://rm}"),
            ),
        ),
    ),
    "a judge as reward": Case("PPO", (f"models.reward={JUDGE}",)),
    "a judge of groups": Case("GRPO", (f"models.reward={PAIRWISE}",)),
    "a judge with a reference": Case("PPO", (f"models.reward={PAIRWISE}", "models.reward.judge.referenceKey=chosen")),
    "a verifier as reward": Case(
        "GRPO", ("models.reward={verifier: {name: Math, answerKey: gold, answerExtract: '#### (.+)'}}",)
    ),
    "verifiers in a sum": Case(
        "PPO",
        (
            _sum(
                _part("a", "{verifier: {name: Code, seconds: 2}}"),
                _part(
                    "b", "{verifier: {name: Format, tags: [think, answer]}}", ", weight: 0.2, normalization: Running"
                ),
                _part("c", "{verifier: {name: JSONSchema, jsonSchema: {type: object, $defs: {a: [1]}}}}"),
                _part("d", "{verifier: {name: Length, maximum: 100}, timeoutSeconds: 10}"),
                _part("e", "{uri: job://rm}"),
            ),
        ),
    ),
    "pretraining": Case("PPO", ("algorithm.pretrainCoefficient=0.5", "data.pretrain={uri: hf://x}")),
    "one critic of both": Case("SafeRLHF", ("algorithm.separateCostCritic=no", "algorithm.lagrange={initial: 5}")),
    "a mix of all rows": Case("SFT", ("data.train={mix: [{uri: hf://x}, {uri: hf://y}]}",)),
    "a mix in shares": Case("SFT", ("data.train={mix: [{uri: hf://x, weight: 2}, {uri: hf://y, weight: 0.5}]}",)),
    "data from a job": Case("SFT", ("data.train.uri=job://other",)),
    "responses of best of n": Case(
        "Generate", ("algorithm={name: Generate, rows: Best, minReward: 0.5}", "rollout.samplesPerPrompt=8")
    ),
    "responses without a reward": Case("Generate", ("models.reward=",)),
    "columns for functions": Case(
        "GRPO", ("data.train.columns=[answer, 'a b']", "evaluation={data: {uri: hf://x, columns: [answer]}}")
    ),
    "an environment instead of a reward": Case("GRPO", (ENVIRONMENT, "models.reward=")),
    "an environment on pools": Case(
        "GRPO", (ENVIRONMENT, "models.reward=", POOLS.replace("critic, ", "").replace(", reward", ""))
    ),
    "an environment and a reward": Case("PPO", (ENVIRONMENT, "rollout.maxTurns=2", "rollout.stepTimeoutSeconds=0.5")),
    "tools": Case("GRPO", (TOOLS,)),
    "an agent instead of a reward": Case("GRPO", (AGENT, "models.reward=")),
    "an agent and a reward": Case("RLOO", (COMMAND, FUNCTION, "rollout.maxTurns=2", "rollout.routing=Recompute")),
    "tools in sandboxes": Case(
        "GRPO", (TOOLS, "sandbox={image: 'python:3.12', network: Egress, warm: 64, seconds: 60}")
    ),
    "an environment in sandboxes": Case("PPO", (ENVIRONMENT, "sandbox={cpu: 250m, memory: 512Mi}")),
    "code in sandboxes for as long as it takes": Case("GRPO", (CODE_OF_A_MINUTE, "sandbox={seconds: 330}")),
    "code in sandboxes": Case("GRPO", ("models.reward={verifier: {name: Code}}", "sandbox={}")),
    "code of a sum in sandboxes": Case(
        "GRPO", (_sum(_part("a", "{verifier: {name: Code}}"), _part("b", "{uri: hf://r}")), "sandbox={network: None}")
    ),
    "code of an evaluation in sandboxes": Case("PPO", (VERIFIERS.replace("Math", "Code"), "sandbox={}")),
    "GSPO": Case("GRPO", ("algorithm.ratio=Sequence",)),
    "distillation": Case("Distillation", (ALONE, VERIFIERS, "algorithm.divergence=Forward", "algorithm.topK=8")),
    "distillation with a reward": Case("Distillation", ("rollout.keep=0.5", EVALUATION)),
    "a teacher on a pool of its own": Case("Distillation", (ALONE, TEACHER_POOL)),
    "a penalty beside a teacher": Case("Distillation", (ALONE, "algorithm.kl={coefficient: 0.1, applyTo: Loss}")),
    "a penalty of a reward beside a teacher": Case("Distillation", ("algorithm.kl.coefficient=0.1", FUNCTION)),
    "a teacher on a server": Case("Distillation", (ALONE, SERVER, "models.teacher=")),
    "a teacher on a server beside a pool": Case(
        "Distillation", (ALONE, SERVER, "models.teacher=", _pools(_pool("a", "actor")))
    ),
    "a teacher on a server and one of the job": Case("Distillation", (ALONE, SERVER, "algorithm.teacherKey=domain")),
    "the likeliest tokens of a server": Case(
        "Distillation", (ALONE, SERVER, "models.teacher=", "algorithm.divergence=Reverse", "algorithm.topK=8")
    ),
    "DAPO": Case("GRPO", ("algorithm.oversampling=2", "algorithm.rewards.overlongPenalty={bufferTokens: 1024}")),
    "a group baseline": Case("REINFORCEPP", ("algorithm.baseline=Group", "rollout.samplesPerPrompt=2")),
    "no baseline": Case("REINFORCEPP", ("algorithm.baseline=None",)),
    "epochs": Case("SFT", ("training.totalSteps=", "training.totalEpochs=2")),
    "rows of one length": Case("SFT", ("data.minPromptTokens=1024", "data.minResponseTokens=1024")),
    "a shortest response of pretraining": Case(
        "PPO", ("data.pretrain={uri: hf://x}", "algorithm.pretrainCoefficient=1", "data.minResponseTokens=2")
    ),
    "mini-batches": Case("PPO", ("training.miniBatchSize=4", "training.updateEpochs=2")),
    "updates that are not fused": Case("PPO", ("training.fuseUpdates=Never",)),
    "mini-batches of whole pairs": Case("OnlineDPO", ("training.miniBatchSize=8",)),
    "the defaults of sampling, written": Case("SFT", ("rollout={samplesPerPrompt: 1, topK: -1, temperature: 1}",)),
    "no functions for SFT": Case("SFT", ("evaluation={data: {uri: hf://x}, functions: []}",)),
    "evaluation": Case("PPO", (EVALUATION, "evaluation.everySteps=2")),
    "the best checkpoint": Case("PPO", (EVALUATION, "evaluation.everySteps=2", "checkpoint.keepBest=rule")),
    "evaluation by verifiers": Case("GRPO", (VERIFIERS,)),
    "several sets to measure on": Case("GRPO", (SETS, "evaluation.everySteps=1", "checkpoint.keepBest=a/reward")),
    "a greedy evaluation": Case("PPO", (EVALUATION, "evaluation.greedy=true")),
    "experts over ranks": Case("PPO", ("models.actor.parallelism={expert: 4, data: 4, tensor: 2, replicas: 2}",)),
    "replicas that send a part": Case("PPO", (REPLICAS.format(role="critic"), COMPRESSED)),
    "experts over unknown ranks": Case("PPO", ("models.reward.parallelism={expert: 3}",)),
    "generation cut in fewer shards": Case("PPO", ("models.actor.parallelism={tensor: 4}", "rollout.tensorParallel=2")),
    "rows cut over ranks": Case("PPO", ("models.actor.parallelism={context: 2, tensor: 2}",)),
    "generation cut by the mapper": Case("PPO", ("rollout.tensorParallel=3",)),
    "manual placement": Case("PPO", (POOLS,)),
    "the least price": Case("PPO", ("placement.objective=lowest-cost",)),
    "the fewest GPUs for a step of so many seconds": Case("PPO", ("placement.objective=fewest-gpus=2.5",)),
    "a better placement at a checkpoint": Case("PPO", ("placement.remap=AtCheckpoint",)),
    "generation in a pool of its own": Case("PPO", (APART, "rollout.tensorParallel=3", "rollout.weightSync=Delta")),
    "responses that may be stale, placed by the mapper": Case(
        "PPO", ("rollout.maxStaleness=1", "rollout.weightSync=Delta")
    ),
    "responses that may be stale": Case("GRPO", (APART.replace("critic, ", ""), "rollout.maxStaleness=2")),
    "a pool that grows": Case("PPO", (_pools(ALL, ELASTIC),)),
    "drafts for responses": Case("PPO", (DRAFTS,)),
    "responses that go on over new weights": Case("PPO", ("rollout.maxStaleness=2", "rollout.partial=Continue")),
    "experts of the generator": Case("GRPO", ("rollout.routing=Replay",)),
    "experts of the trainer": Case("OnlineDPO", ("rollout.routing=Recompute",)),
    "generation elsewhere": Case("PPO", (ELSEWHERE, "rollout.maxStaleness=1", "rollout.weightSync=Delta")),
    "weights for readers elsewhere": Case("PPO", ("rollout.weightStore='s3://bucket/weights'",)),
    "manual placement in two pools": Case(
        "PPO", (_pools(_pool("a", "actor, reference"), _pool("b", "critic, reward", 2)),)
    ),
    "a pool without the reward that is a function": Case(
        "PPO", (FUNCTION, _pools(_pool("a", "actor, critic, reference")))
    ),
    "more nodes": Case("PPO", ("resources={device: GPU, nodes: 2, maxNodes: 4, slotsPerNode: 8}",)),
    "a checkpoint on a claim": Case("PPO", ("checkpoint={storage: 'pvc://claim/a', keepLast: 1, everyMinutes: 0.5}",)),
    "a limit of uploads": Case("PPO", ("checkpoint={storage: 's3://bucket/a', uploadMBps: 2.5}",)),
    "a model on a claim": Case("PPO", ("models.actor.uri=pvc://claim/model",)),
    "suspended": Case("PPO", ("suspend=true",)),
    "failure rules": Case(
        "PPO",
        (
            _policy(
                "{name: a, action: Ignore, reasons: [NodeLost, Preempted]}",
                "{name: b, action: Fail, exitCodes: [3], messageContains: x}",
            ),
        ),
    ),
    "a run policy": Case("PPO", ("runPolicy={backoffLimit: 0, ttlSecondsAfterFinished: 0, activeDeadlineSeconds: 9}",)),
    "variables": Case("PPO", ("runtime.env=[{name: A, value: ''}, {name: B, secret: {name: s, key: k.x}}]",)),
    "the most slots": Case("PPO", ("resources={device: CPU, nodes: 100000, slotsPerNode: 1024}",)),
    "a package as a whole": Case(
        "PPO", ("models.actor.uri=package://examples", "data.train.uri=package://a_1/b..c/..d")
    ),
    "a folder above the file": Case("PPO", ("models.actor.uri=file://../model",)),
    "the least memory": Case("PPO", ("runtime.worker={cpu: 1m, memory: 1Mi}", "runtime.sharedMemory='1048576'")),
    "a variable with a name like the operator's": Case("PPO", ("runtime.env=[{name: MY_RLHF_ATTEMPT, value: a}]",)),
    "arguments as deep as may be": Case("PPO", (FUNCTION, f"models.reward.arguments={{a: {'[' * 16}{']' * 16}}}")),
    "pods": Case(
        "PPO",
        (
            "runtime={image: 'example.com/trainer:1', sharedMemory: 16Gi}",
            "runtime.worker={cpu: 500m, memory: 1.5Gi}",
            "runtime.imagePullSecrets=[a.b, c]",
        ),
    ),
    "what Kubernetes may be told of pods": Case(
        "PPO", (f"runtime.controller.template={HEAD_TEMPLATE}", f"runtime.worker.template={WORKER_TEMPLATE}")
    ),
}

WRONG: dict[str, Case] = {
    "a merge of one model": Case("Merge", ("algorithm.models=[{uri: hf://a}]",), "spec.algorithm.models"),
    "an arc between three models": Case(
        "Merge",
        ("algorithm.method=SLERP", "algorithm.models=[{uri: hf://a}, {uri: hf://b}, {uri: hf://c}]"),
        "spec.algorithm.models",
    ),
    "a weight of nothing": Case("Merge", ("algorithm.models.0.weight=0",), "spec.algorithm.models.0.weight"),
    "changes without a base": Case("Merge", ("algorithm.method=DARE",), "spec.algorithm.base"),
    "a base without changes": Case("Merge", ("algorithm.base=hf://s",), "spec.algorithm.base"),
    "a density without changes": Case("Merge", ("algorithm.density=0.5",), "spec.algorithm.density"),
    "data of a merge": Case("Merge", (DATA.replace(": ", "=", 1),), "spec.data.train"),
    "another model of a merge": Case("Merge", ("models.actor={uri: hf://a}",), "spec.models.actor"),
    "an evaluation of a merge": Case("Merge", ("evaluation={data: {uri: hf://x}}",), "spec.evaluation"),
    "steps of a merge": Case("Merge", ("training.totalSteps=3",), "spec.training.totalSteps"),
    "a batch of layers": Case("Merge", ("training.batchSize=2",), "spec.training.batchSize"),
    "a merge twice": Case("Merge", ("training.totalEpochs=2",), "spec.training.totalEpochs"),
    "a merge on GPUs": Case("Merge", ("resources.device=GPU",), "spec.resources.device"),
    "a merge on two nodes": Case("Merge", ("resources.nodes=2",), "spec.resources.nodes"),
    "a merge on two slots": Case("Merge", ("resources.slotsPerNode=2",), "spec.resources.slotsPerNode"),
    "a merge in a pool of two nodes": Case(
        "Merge", (_pools("{name: a, models: [actor], nodes: 2, slotsPerNode: 1}"),), "spec.placement.pools.0.nodes"
    ),
    "a merge in a pool of two slots": Case("Merge", (TWO_SLOTS,), "spec.placement.pools.0.slotsPerNode"),
    "no data at all": Case("SFT", ("data=",), "spec.data.train"),
    "several sets for SFT": Case(
        "SFT", ("evaluation={data: {sets: [{name: a, uri: hf://x}]}}",), "spec.evaluation.data.sets"
    ),
    "no set to measure on": Case("PPO", ("evaluation={data: {sets: []}}",), "spec.evaluation.data.sets"),
    "a set without a name": Case(
        "PPO", ("evaluation={data: {sets: [{uri: hf://x}]}}",), "spec.evaluation.data.sets.0.name"
    ),
    "two sets of one name": Case(
        "PPO",
        ("evaluation={data: {sets: [{name: a, uri: hf://x}, {name: a, uri: hf://y}]}}",),
        "spec.evaluation.data.sets.1.name",
    ),
    "a set beside sets": Case(
        "PPO", ("evaluation={data: {uri: hf://x, sets: [{name: a, uri: hf://x}]}}",), "spec.evaluation.data.uri"
    ),
    "the best without a reward": Case("Generate", ("models.reward=", "algorithm.rows=Best"), "spec.algorithm.rows"),
    "a least reward without one": Case(
        "Generate", ("models.reward=", "algorithm.minReward=0"), "spec.algorithm.minReward"
    ),
    "a pair of one response": Case("Generate", ("algorithm.rows=Pairs",), "spec.rollout.samplesPerPrompt"),
    "mini-batches where nothing is trained": Case(
        "Generate", ("training.miniBatchSize=8",), "spec.training.miniBatchSize"
    ),
    "update epochs where nothing is trained": Case(
        "Generate", ("training.updateEpochs=2",), "spec.training.updateEpochs"
    ),
    "an evaluation where nothing is trained": Case("Generate", (EVALUATION,), "spec.evaluation"),
    "rollouts of what is written anyway": Case("Generate", ("rollout.keep=0.5",), "spec.rollout.keep"),
    "the best of what is not trained": Case("Generate", ("checkpoint.keepBest=reward",), "spec.checkpoint.keepBest"),
    "an adapter of a generator": Case("Generate", ("models.actor.lora={}",), "spec.models.actor.lora"),
    "an adapter without rows": Case("SFT", ("models.actor.lora={rank: 0}",), "spec.models.actor.lora.rank"),
    "a job's output as an adapter": Case(
        "SFT", ("models.actor.lora={initial: 'job://x'}",), "spec.models.actor.lora.initial"
    ),
    "dropout of an adapter": Case("SFT", ("models.actor.lora={dropout: 0.1}",), "spec.models.actor.lora.dropout"),
    "an actor that is its own reference, which has a pool": Case(
        "PPO", ("models.actor.lora={}", POOLS), "spec.placement.pools.0.models"
    ),
    "an adapter without a pool for another reference": Case(
        "PPO",
        ("models.actor.lora={}", "models.reference={uri: hf://b}", _pools(_pool("a", "actor, critic, reward"))),
        "spec.placement.pools",
    ),
    "an optimizer of a generator": Case("Generate", ("models.actor.optimizer={}",), "spec.models.actor.optimizer"),
    "recomputation of a generator": Case(
        "Generate", ("models.actor.gradientCheckpointing=true",), "spec.models.actor.gradientCheckpointing"
    ),
    "moments of a generator": Case("Generate", ("models.actor.offload=All",), "spec.models.actor.offload"),
    # what each field may hold
    "a misspelt field": Case("PPO", ("algorithm.clipRnage=0.1",), "spec.algorithm.clipRnage"),
    "an unknown field that is null": Case("PPO", ("algorithm.clipRnage=",), "spec.algorithm.clipRnage"),
    "a field in snake case": Case("PPO", ("training.total_steps=1",), "spec.training.total_steps"),
    "an unknown field of the spec": Case("PPO", ("modles={}",), "spec.modles"),
    "a rollout beside a model": Case(
        "PPO", (_pools(_pool("a", "actor, critic, reference, reward, rollout")),), "spec.placement.pools.0.models"
    ),
    "two pools of rollout": Case(
        "PPO",
        (_pools(ALL, _pool("b", "rollout"), _pool("c", "rollout")),),
        "spec.placement.pools",
    ),
    "a pool of models that grows": Case(
        "PPO", (_pools(ALL.replace("name:", "maxNodes: 2, name:")),), "spec.placement.pools.0.maxNodes"
    ),
    "a pool that grows, and streams": Case(
        "PPO", (_pools(ALL, ELASTIC), "rollout.stream=true"), "spec.placement.pools.1.maxNodes"
    ),
    "most nodes that are fewer": Case(
        "PPO", (_pools(ALL, ELASTIC.replace("name:", "nodes: 4, name:")),), "spec.placement.pools.1.maxNodes"
    ),
    "a rollout of SFT": Case(
        "SFT", (_pools(_pool("a", "actor"), _pool("b", "rollout")),), "spec.placement.pools.1.models"
    ),
    "a rollout of a data set": Case(
        "Generate", (_pools(_pool("a", "actor"), _pool("b", "rollout")),), "spec.placement.pools.1.models"
    ),
    "stale responses without a pool of their own": Case(
        "PPO", (_pools(ALL), "rollout.maxStaleness=1"), "spec.rollout.maxStaleness"
    ),
    "stale responses of what trains nothing": Case(
        "Generate", ("rollout.maxStaleness=1",), "spec.rollout.maxStaleness"
    ),
    "drafts and new weights": Case(
        "PPO", (APART, DRAFTS, "rollout.maxStaleness=2", "rollout.partial=Continue"), "spec.rollout.partial"
    ),
    "responses that no weights meet": Case("PPO", (APART, "rollout.partial=Restart"), "spec.rollout.partial"),
    "responses of engines elsewhere that begin again": Case(
        "PPO", (ELSEWHERE, "rollout.maxStaleness=1", "rollout.partial=Restart"), "spec.rollout.partial"
    ),
    "generation elsewhere and in a pool": Case("PPO", (APART, ELSEWHERE), "spec.rollout.endpoints"),
    "generation elsewhere of SFT": Case("SFT", (ELSEWHERE,), "spec.rollout"),
    "generation elsewhere of a data set": Case("Generate", (ELSEWHERE,), "spec.rollout.endpoints"),
    "experts over too few ranks": Case(
        "PPO", ("models.actor.parallelism={expert: 4, data: 4, replicas: 2}",), "spec.models.actor.parallelism.expert"
    ),
    "one replica that sends a part": Case("PPO", (COMPRESSED,), "spec.training.gradientCompression"),
    "replicas of an untrained model that send a part": Case(
        "PPO", (REPLICAS.format(role="reward"), COMPRESSED), "spec.training.gradientCompression"
    ),
    "more ranks than experts": Case(
        "PPO",
        (f"models.actor.shape={SHAPE[:-1]}, numExperts: 4}}", "models.actor.parallelism={expert: 8}"),
        "spec.models.actor.parallelism.expert",
    ),
    "shards of engines elsewhere": Case("PPO", (ELSEWHERE, "rollout.tensorParallel=1"), "spec.rollout.tensorParallel"),
    "stages of engines elsewhere": Case(
        "PPO", (ELSEWHERE, "rollout.pipelineParallel=1"), "spec.rollout.pipelineParallel"
    ),
    "memory of engines elsewhere": Case(
        "PPO", (ELSEWHERE, "rollout.gpuMemoryUtilization=0.5"), "spec.rollout.gpuMemoryUtilization"
    ),
    "rounded engines elsewhere": Case("PPO", (ELSEWHERE, "rollout.quantization=Int8"), "spec.rollout.quantization"),
    "a rounded cache elsewhere": Case("PPO", (ELSEWHERE, "rollout.kvCache=FP8"), "spec.rollout.kvCache"),
    "rounded engines that restrict sampling": Case(
        "PPO", ("rollout.quantization=Int8", "rollout.topP=0.5"), "spec.rollout.quantization"
    ),
    "invariant engines elsewhere": Case(
        "PPO", (ELSEWHERE, "rollout.batchInvariant=true"), "spec.rollout.batchInvariant"
    ),
    "drafts of engines elsewhere": Case("PPO", (ELSEWHERE, DRAFTS), "spec.rollout.endpoints"),
    "drafts beside minP": Case("PPO", (DRAFTS, "rollout.minP=0.1"), "spec.rollout.minP"),
    "drafts of stages": Case("PPO", (DRAFTS, "rollout.pipelineParallel=2"), "spec.rollout.pipelineParallel"),
    "drafts of rounded engines": Case("PPO", (DRAFTS, "rollout.quantization=Int8"), "spec.rollout.quantization"),
    "drafts with a rounded cache": Case("PPO", (DRAFTS, "rollout.kvCache=FP8"), "spec.rollout.kvCache"),
    "weights of a rounded cache under topP": Case(
        "PPO", ("rollout.kvCache=FP8", "rollout.topP=0.5"), "spec.rollout.kvCache"
    ),
    "drafts by no model": Case("PPO", ("rollout.speculation={method: Draft}",), "spec.rollout.speculation"),
    "drafts by a model still to make": Case(
        "PPO", ("rollout.speculation={method: Draft, draft: 'job://d'}",), "spec.rollout.speculation.draft"
    ),
    "a model without drafts": Case(
        "PPO", ("rollout.speculation={method: NGram, draft: 'hf://d'}",), "spec.rollout.speculation.draft"
    ),
    "drafts and experts": Case("PPO", (DRAFTS, "rollout.routing=Replay"), "spec.rollout.routing"),
    "eager engines elsewhere": Case("PPO", (ELSEWHERE, "rollout.enforceEager=true"), "spec.rollout.enforceEager"),
    "episodes elsewhere": Case(
        "PPO", (ELSEWHERE, "rollout.environment={entrypoint: 'a:b'}"), "spec.rollout.environment"
    ),
    "experts of stages": Case(
        "GRPO",
        ("rollout.routing=Replay", "rollout.pipelineParallel=2", "models.actor.parallelism.pipeline=2"),
        "spec.rollout.pipelineParallel",
    ),
    "experts of engines elsewhere": Case("PPO", (ELSEWHERE, "rollout.routing=Replay"), "spec.rollout.routing"),
    "experts of texts": Case("OnlineDPO", ("rollout.routing=Replay",), "spec.rollout.routing"),
    "experts of SFT": Case("SFT", ("rollout.routing=Replay",), "spec.rollout"),
    "tools elsewhere": Case("PPO", (ELSEWHERE, "rollout.tools=['a:b']"), "spec.rollout.tools"),
    "a server that is named twice": Case(
        "PPO", ("rollout.endpoints=['http://a', 'http://a']",), "spec.rollout.endpoints"
    ),
    "a server that is no URL": Case("PPO", ("rollout.endpoints=['a:8000']",), "spec.rollout.endpoints.0"),
    "a password in the URL of a server": Case(
        "PPO", ("rollout.endpoints=['http://me:secret@a']",), "spec.rollout.endpoints.0"
    ),
    "weights of a policy that does not change": Case(
        "Generate", ("rollout.weightStore='s3://bucket/w'",), "spec.rollout.weightStore"
    ),
    "weights of texts for readers": Case("SFT", ("rollout.weightStore='s3://bucket/w'",), "spec.rollout"),
    "weights on a claim": Case("PPO", ("rollout.weightStore='pvc://claim/w'",), "spec.rollout.weightStore"),
    "changes of weights in place": Case("PPO", ("rollout.weightSync=Delta",), "spec.rollout.weightSync"),
    "stale responses of ReMax": Case(
        "ReMax", (APART.replace("critic, ", ""), "rollout.maxStaleness=1"), "spec.rollout.maxStaleness"
    ),
    "an unknown field of a pool": Case("SFT", (_pools("{nam: a}"),), "spec.placement.pools.0.nam"),
    "no spec": Case("PPO", ("spec=",), "spec"),
    "no algorithm": Case("PPO", ("algorithm=",), "spec.algorithm"),
    "no algorithm name": Case("PPO", ("algorithm={}",), "spec.algorithm.name"),
    "an unknown algorithm": Case("PPO", ("algorithm.name=SGD",), "spec.algorithm.name"),
    "no data": Case("PPO", ("data={}",), "spec.data.train"),
    "data that is null": Case("PPO", ("data.train=",), "spec.data.train"),
    "no models": Case("PPO", ("models=",), "spec.models.actor"),
    "no training": Case("PPO", ("training=",), "spec.training"),
    "a model without a source": Case("PPO", ("models.actor={}",), "spec.models.actor.uri"),
    "text for a whole number": Case("PPO", ('training.seed="3"',), "spec.training.seed"),
    "a fraction for a whole number": Case("PPO", ("training.seed=1.5",), "spec.training.seed"),
    "a boolean for a number": Case("PPO", ("algorithm.discount=yes",), "spec.algorithm.discount"),
    "a number for a boolean": Case("PPO", ("algorithm.whitenAdvantages=1",), "spec.algorithm.whitenAdvantages"),
    "text for a boolean": Case("PPO", ("suspend='true'",), "spec.suspend"),
    "a number for text": Case("PPO", ("data.train.split=1",), "spec.data.train.split"),
    "a mapping for text": Case("PPO", ("data.train.split={}",), "spec.data.train.split"),
    "a list for a mapping": Case("PPO", ("data=[]",), "spec.data"),
    "text for a mapping": Case("PPO", ("algorithm.kl=no-kl",), "spec.algorithm.kl"),
    "text for a list": Case("PPO", ("placement.pools=all",), "spec.placement.pools"),
    "a mapping for a list": Case("PPO", ("runtime.env={A: b}",), "spec.runtime.env"),
    "text among numbers": Case(
        "SFT", ("models.actor.optimizer.betas=[0.9, x]",), "spec.models.actor.optimizer.betas.1"
    ),
    "null among numbers": Case(
        "SFT", ("models.actor.optimizer.betas=[0.9, null]",), "spec.models.actor.optimizer.betas.1"
    ),
    "three betas": Case("SFT", ("models.actor.optimizer.betas=[0.9, 0.9, 0.9]",), "spec.models.actor.optimizer.betas"),
    "one beta": Case("SFT", ("models.actor.optimizer.betas=[0.9]",), "spec.models.actor.optimizer.betas.1"),
    "a beta of one": Case("SFT", ("models.actor.optimizer.betas=[0.9, 1]",), "spec.models.actor.optimizer.betas.1"),
    "no steps": Case("PPO", ("training.totalSteps=0",), "spec.training.totalSteps"),
    "a negative seed": Case("PPO", ("training.seed=-1",), "spec.training.seed"),
    "a seed beyond 32 bits": Case("PPO", ("training.seed=4294967296",), "spec.training.seed"),
    "a whole number beyond all": Case("PPO", ("training.totalSteps=2147483648",), "spec.training.totalSteps"),
    "a huge whole number": Case("PPO", ("training.totalSteps=1e30",), "spec.training.totalSteps"),
    "a rate of zero": Case(
        "PPO", ("models.actor.optimizer.learningRate=0",), "spec.models.actor.optimizer.learningRate"
    ),
    "a clip range of one": Case("PPO", ("algorithm.clipRange=1",), "spec.algorithm.clipRange"),
    "a clip range of zero": Case("PPO", ("algorithm.clipRange=0",), "spec.algorithm.clipRange"),
    "a discount above one": Case("PPO", ("algorithm.discount=1.1",), "spec.algorithm.discount"),
    "values clipped to nothing": Case("PPO", ("algorithm.valueClipRange=0",), "spec.algorithm.valueClipRange"),
    "a cap that is no cap": Case(
        "PPO", ("algorithm.rolloutCorrection={cap: 1}",), "spec.algorithm.rolloutCorrection.cap"
    ),
    "two names of one bound": Case(
        "PPO", ("algorithm.rolloutCorrection={cap: 2, high: 3}",), "spec.algorithm.rolloutCorrection.cap"
    ),
    "a lower bound that truncation lacks": Case(
        "PPO", ("algorithm.rolloutCorrection={low: 0.5}",), "spec.algorithm.rolloutCorrection.low"
    ),
    "a lower bound above 1": Case(
        "PPO", ("algorithm.rolloutCorrection={mode: Clip, low: 2}",), "spec.algorithm.rolloutCorrection.low"
    ),
    "a mismatch without a generator": Case("DPO", ("watch.mismatch={kl: 0.1}",), "spec.watch.mismatch"),
    "a mismatch that is not known before the update": Case(
        "GRPO",
        ("watch.mismatch={action: SkipUpdate}", "training.oldLogProbs=Generator"),
        "spec.watch.mismatch.action",
    ),
    "a label that is wrong more often than right": Case(
        "DPO", ("algorithm.labelSmoothing=0.5",), "spec.algorithm.labelSmoothing"
    ),
    "wrong labels of a loss without them": Case(
        "OnlineDPO", ("algorithm.loss=IPO", "algorithm.labelSmoothing=0.1"), "spec.algorithm.labelSmoothing"
    ),
    "a negative coefficient": Case("PPO", ("algorithm.kl.coefficient=-1",), "spec.algorithm.kl.coefficient"),
    "a temperature of zero": Case("PPO", ("rollout.temperature=0",), "spec.rollout.temperature"),
    "a top-k of zero": Case("PPO", ("rollout.topK=0",), "spec.rollout.topK"),
    "a top-k of minus two": Case("PPO", ("rollout.topK=-2",), "spec.rollout.topK"),
    "all memory for generation": Case("PPO", ("rollout.gpuMemoryUtilization=1",), "spec.rollout.gpuMemoryUtilization"),
    "a word that is no choice": Case("PPO", ("training.precision=FP8",), "spec.training.precision"),
    "a word in another case": Case("PPO", ("resources.device=gpu",), "spec.resources.device"),
    "an estimator that is not there": Case("PPO", ("algorithm.kl.estimator=K4",), "spec.algorithm.kl.estimator"),
    "an offload that is a boolean": Case("PPO", ("models.actor.offload=yes",), "spec.models.actor.offload"),
    "empty text": Case("SFT", ("data.train.split=''",), "spec.data.train.split"),
    "text that is too long": Case("SFT", (f"data.train.split={'a' * 1025}",), "spec.data.train.split"),
    "a column that every function gets": Case(
        "PPO", ("data.train.columns=[a, finished]",), "spec.data.train.columns.1"
    ),
    "a column without a name": Case("PPO", ("data.train.columns=['']",), "spec.data.train.columns.0"),
    "columns for nobody": Case("SFT", ("data.train.columns=[answer]",), "spec.data.train.columns"),
    "columns of a mix for nobody": Case(
        "SFT", ("data.train={mix: [{uri: hf://x}, {uri: hf://y, columns: [a]}]}",), "spec.data.train.mix.1.columns"
    ),
    "a weight of one data set of a mix": Case(
        "SFT", ("data.train={mix: [{uri: hf://x, weight: 2}, {uri: hf://y}]}",), "spec.data.train.mix"
    ),
    "columns of held-out rows for nobody": Case(
        "DPO", ("evaluation={data: {uri: hf://x, columns: [answer]}}",), "spec.evaluation.data.columns"
    ),
    "columns of pretraining rows": Case(
        "PPO",
        ("algorithm.pretrainCoefficient=0.5", "data.pretrain={uri: hf://x, columns: [answer]}"),
        "spec.data.pretrain.columns",
    ),
    "a verifier that is none": Case(
        "PPO", ("models.reward={verifier: {name: Maths}}",), "spec.models.reward.verifier.name"
    ),
    "an option of another verifier": Case(
        "PPO", ("models.reward={verifier: {name: Math, tags: [a]}}",), "spec.models.reward.verifier.tags"
    ),
    "a verifier without what it needs": Case(
        "PPO", ("models.reward={verifier: {name: Regex}}",), "spec.models.reward.verifier.pattern"
    ),
    "a judge that compares a single response": Case(
        "PPO", (f"models.reward={PAIRWISE}",), "spec.models.reward.judge.prompt"
    ),
    "a judge in a sum that compares a single response": Case(
        "PPO", (f"models.reward={{sum: [{_part('a', PAIRWISE)}]}}",), "spec.models.reward.sum.0.reward.judge.prompt"
    ),
    "a judge that may take longer than a call": Case(
        "PPO",
        (f"models.reward={JUDGE}", "training.callDeadlineSeconds=120"),
        "spec.models.reward.judge.timeoutSeconds",
    ),
    "a judge in a sum that may take longer than a call": Case(
        "PPO",
        (f"models.reward={{sum: [{_part('a', JUDGE)}]}}", "training.callDeadlineSeconds=120"),
        "spec.models.reward.sum.0.reward.judge.timeoutSeconds",
    ),
    "a verifier that may take longer than a call": Case(
        "PPO",
        ("models.reward={verifier: {name: Math}}", "training.callDeadlineSeconds=300"),
        "spec.models.reward.timeoutSeconds",
    ),
    "a scheme that is not known": Case("SFT", ("models.actor.uri=s3://bucket/x",), "spec.models.actor.uri"),
    "a claim without a path": Case("SFT", ("models.actor.uri=pvc://claim",), "spec.models.actor.uri"),
    "storage on a web server": Case("SFT", ("checkpoint.storage=http://host/x",), "spec.checkpoint.storage"),
    "the best of what is never measured": Case("PPO", ("checkpoint.keepBest=reward",), "spec.checkpoint.keepBest"),
    "a limit of what is not uploaded": Case("SFT", ("checkpoint.uploadMBps=2",), "spec.checkpoint.uploadMBps"),
    "a limit of uploads to a claim": Case(
        "SFT", ("checkpoint={storage: 'pvc://c/a', uploadMBps: 2}",), "spec.checkpoint.uploadMBps"
    ),
    "checkpoints that are all deleted": Case("SFT", ("checkpoint.keepLast=0",), "spec.checkpoint.keepLast"),
    "a package within a package": Case("SFT", ("models.actor.uri=package://a.b/c",), "spec.models.actor.uri"),
    "a package with a name that is none": Case("SFT", ("data.train.uri=package://a-b/c",), "spec.data.train.uri"),
    "a package without a name": Case("SFT", ("models.actor.uri=package:///c",), "spec.models.actor.uri"),
    "a part from a package within a package": Case(
        "PPO", (_sum(_part("a", "{uri: 'package://a.b/c'}")),), "spec.models.reward.sum.0.reward.uri"
    ),
    "a way out of a package": Case("SFT", ("models.actor.uri=package://a/../b",), "spec.models.actor.uri"),
    "a way out of a claim": Case("SFT", ("models.actor.uri=pvc://c/a/..",), "spec.models.actor.uri"),
    "data out of a claim": Case("PPO", ("evaluation={data: {uri: 'pvc://c/../x'}}",), "spec.evaluation.data.uri"),
    "checkpoints out of a claim": Case("SFT", ("checkpoint.storage=pvc://c/../x",), "spec.checkpoint.storage"),
    # names
    "a name with capitals": Case("PPO", ("metadata.name=Helpful",), "metadata.name"),
    "a name that starts with a digit": Case("PPO", ("metadata.name=1st",), "metadata.name"),
    "a name with a dot": Case("PPO", ("metadata.name=a.b",), "metadata.name"),
    "a name that is too long": Case("PPO", (f"metadata.name={'a' * 41}",), "metadata.name"),
    "a label that is no label": Case("PPO", ("metadata.labels={a: b c}",), "metadata.labels.a"),
    "a label with a name that is none": Case("PPO", ("metadata.labels={a b: c}",), "metadata.labels.a b"),
    # the models of an algorithm
    "a role the algorithm has not": Case("SFT", ("models.critic={uri: hf://x}",), "spec.models.critic"),
    "a cost for PPO": Case("PPO", ("models.cost={uri: hf://x}",), "spec.models.cost"),
    "a reference for SFT": Case("SFT", ("models.reference={uri: hf://x}",), "spec.models.reference"),
    "an actor for a reward model": Case("RewardModel", ("models.actor={uri: hf://x}",), "spec.models.actor"),
    "a critic for GRPO": Case("GRPO", ("models.critic={uri: hf://x}",), "spec.models.critic"),
    "a critic of a reward model that is a function": Case(
        "RewardModel", (FUNCTION, "models.critic={uri: hf://x}"), "spec.models.critic"
    ),
    "no actor": Case("PPO", ("models.actor=",), "spec.models.actor"),
    "no critic": Case("PPO", ("models.critic=",), "spec.models.critic"),
    "no reward": Case("GRPO", ("models.reward=",), "spec.models.reward"),
    "sandboxes without code of the model": Case("GRPO", ("sandbox={}",), "spec.sandbox"),
    "sandboxes of another verifier": Case("PPO", (VERIFIERS, "sandbox={}"), "spec.sandbox"),
    "sandboxes of SFT": Case("SFT", ("sandbox={warm: 2}",), "spec.sandbox"),
    "no sandbox": Case("GRPO", (TOOLS, "sandbox={warm: 0}"), "spec.sandbox.warm"),
    "too many sandboxes": Case("GRPO", (TOOLS, "sandbox={warm: 1001}"), "spec.sandbox.warm"),
    "a sandbox without CPUs": Case("GRPO", (TOOLS, "sandbox={cpu: '0'}"), "spec.sandbox.cpu"),
    "a sandbox without memory": Case("GRPO", (TOOLS, "sandbox={memory: 1Ki}"), "spec.sandbox.memory"),
    "an unknown network of sandboxes": Case("GRPO", (TOOLS, "sandbox={network: Host}"), "spec.sandbox.network"),
    "an image of sandboxes with a space": Case("GRPO", (TOOLS, "sandbox={image: 'a b'}"), "spec.sandbox.image"),
    "sandboxes for less time than code": Case(
        "GRPO", (CODE_OF_A_MINUTE, "sandbox={seconds: 329}"), "spec.models.reward.verifier.seconds"
    ),
    "sandboxes for less time than code of a sum": Case(
        "GRPO",
        (_sum(_part("a", "{verifier: {name: Code}}"), _part("b", "{uri: hf://r}")), "sandbox={seconds: 54}"),
        "spec.models.reward.sum.0.reward.verifier.seconds",
    ),
    "sandboxes for less time than code of an evaluation": Case(
        "PPO",
        (VERIFIERS.replace("Math", "Code"), "sandbox={seconds: 54}"),
        "spec.evaluation.verifiers.0.verifier.seconds",
    ),
    "sandboxes for no time": Case("GRPO", (TOOLS, "sandbox={seconds: 0}"), "spec.sandbox.seconds"),
    "tools and no reward": Case("GRPO", (TOOLS, "models.reward="), "spec.models.reward"),
    "tools and an environment": Case("GRPO", (TOOLS, ENVIRONMENT), "spec.rollout.tools"),
    "tools of the job and of the rows": Case("GRPO", (TOOLS, "data.train.toolsKey=t"), "spec.data.train.toolsKey"),
    "tools of the job and of a mix": Case(
        "GRPO",
        (TOOLS, "data.train={mix: [{uri: hf://a}, {uri: hf://b, toolsKey: t}]}"),
        "spec.data.train.mix.1.toolsKey",
    ),
    "tools of the job and of the held-out rows": Case(
        "GRPO", (TOOLS, "evaluation={data: {uri: hf://x, toolsKey: t}}"), "spec.evaluation.data.toolsKey"
    ),
    "tools of the job and of a held-out set": Case(
        "GRPO",
        (TOOLS, "evaluation={data: {sets: [{name: a, uri: hf://x, toolsKey: t}]}}"),
        "spec.evaluation.data.sets.0.toolsKey",
    ),
    "no tools": Case("GRPO", ("rollout.tools=[]",), "spec.rollout.tools"),
    "a tool that is no entry point": Case("GRPO", ("rollout.tools=[add]",), "spec.rollout.tools.0"),
    "an environment of SFT": Case("SFT", (ENVIRONMENT,), "spec.rollout"),
    "an environment of a data set": Case("Generate", (ENVIRONMENT,), "spec.rollout.environment"),
    "an order of what is not trained on": Case("Generate", ("data.order={entrypoint: 'a:order'}",), "spec.data.order"),
    "rows of a file and of a function": Case(
        "SFT", ("data.train={uri: hf://x, entrypoint: 'a:rows'}",), "spec.data.train.uri"
    ),
    "a split of rows of one's own": Case(
        "SFT", ("data.train={entrypoint: 'a:rows', split: test}",), "spec.data.train.split"
    ),
    "rows of one's own in a mix": Case(
        "SFT", ("data.train={mix: [{uri: hf://a, entrypoint: 'a:rows'}]}",), "spec.data.train.mix.0.entrypoint"
    ),
    "an order that is no entry point": Case("SFT", ("data.order={entrypoint: a}",), "spec.data.order.entrypoint"),
    "a schedule that is no entry point": Case(
        "SFT", ("models.actor.optimizer.schedule=cosine",), "spec.models.actor.optimizer.schedule"
    ),
    "a callback without a class": Case("PPO", ("outputs.callbacks=[{}]",), "spec.outputs.callbacks.0.entrypoint"),
    "tools of a data set": Case("Generate", (TOOLS,), "spec.rollout.tools"),
    "an agent of nothing": Case("GRPO", ("rollout.agent={}", ALONE), "spec.rollout.agent"),
    "an agent of two programs": Case(
        "GRPO", ("rollout.agent={entrypoint: 'a:run', command: [python]}", ALONE), "spec.rollout.agent"
    ),
    "an agent that is no entry point": Case(
        "GRPO", ("rollout.agent={entrypoint: run}", ALONE), "spec.rollout.agent.entrypoint"
    ),
    "a command without a program": Case("GRPO", ("rollout.agent={command: []}", ALONE), "spec.rollout.agent.command"),
    "arguments of a command": Case(
        "GRPO", ("rollout.agent={command: [python], arguments: {n: 1}}", ALONE), "spec.rollout.agent.arguments"
    ),
    "an agent and tools": Case("GRPO", (AGENT, TOOLS, FUNCTION), "spec.rollout.agent"),
    "an agent and an environment": Case("GRPO", (AGENT, ENVIRONMENT, ALONE), "spec.rollout.agent"),
    "an agent of PPO": Case("PPO", (AGENT, ALONE), "spec.rollout.agent"),
    "an agent of VAPO": Case("VAPO", (AGENT, ALONE), "spec.rollout.agent"),
    "an agent of ReMax": Case("ReMax", (AGENT, ALONE), "spec.rollout.agent"),
    "an agent of REINFORCE++": Case("REINFORCEPP", (AGENT, ALONE), "spec.rollout.agent"),
    "an agent of OnlineDPO": Case("OnlineDPO", (AGENT, FUNCTION), "spec.rollout.agent"),
    "an agent of SFT": Case("SFT", (AGENT,), "spec.rollout"),
    "an agent of a data set": Case("Generate", (AGENT,), "spec.rollout.agent"),
    "an agent elsewhere": Case("GRPO", (ELSEWHERE, AGENT, ALONE), "spec.rollout.agent"),
    "a reward model of an agent": Case("GRPO", (AGENT,), "spec.models.reward"),
    "experts of an agent": Case("GRPO", (AGENT, ALONE, "rollout.routing=Replay"), "spec.rollout.routing"),
    "a system prompt of an agent": Case(
        "GRPO", (AGENT, ALONE, "data.systemPrompt=Be brief."), "spec.data.systemPrompt"
    ),
    "a template of an agent's prompts": Case(
        "GRPO", (AGENT, ALONE, "data.promptTemplate='{{ prompt }}?'"), "spec.data.promptTemplate"
    ),
    "a program without end": Case(
        "GRPO", (AGENT, ALONE, "rollout.stepTimeoutSeconds=1800"), "spec.rollout.stepTimeoutSeconds"
    ),
    "no turns": Case("GRPO", (TOOLS, "rollout.maxTurns=0"), "spec.rollout.maxTurns"),
    "a step without end": Case("GRPO", (TOOLS, "rollout.stepTimeoutSeconds=1800"), "spec.rollout.stepTimeoutSeconds"),
    "the reward of an environment on a pool": Case(
        "GRPO", (ENVIRONMENT, "models.reward=", POOLS.replace("critic, ", "")), "spec.placement.pools.0.models"
    ),
    "no cost": Case("SafeRLHF", ("models.cost=",), "spec.models.cost"),
    "a teacher of GRPO on a server": Case("GRPO", (SERVER,), "spec.models.teacherEndpoints"),
    "two teachers for each row": Case("Distillation", (ALONE, SERVER), "spec.algorithm.teacherKey"),
    "a column for one teacher": Case(
        "Distillation", (ALONE, "algorithm.teacherKey=domain"), "spec.algorithm.teacherKey"
    ),
    "two teachers of one name": Case(
        "Distillation",
        (ALONE, SERVER.replace("[", f"[{_server('it')}, "), "algorithm.teacherKey=domain"),
        "spec.models.teacherEndpoints.1.name",
    ),
    "the whole vocabulary of a server": Case(
        "Distillation", (ALONE, SERVER, "models.teacher=", "algorithm.divergence=Reverse"), "spec.algorithm.topK"
    ),
    "a server at another temperature": Case(
        "Distillation", (ALONE, SERVER, "models.teacher=", "rollout.temperature=0.5"), "spec.rollout.temperature"
    ),
    "a teacher on a server that is in a pool": Case(
        "Distillation", (ALONE, SERVER, "models.teacher=", TEACHER_POOL), "spec.placement.pools.1.models"
    ),
    "a server slower than a call may be": Case(
        "Distillation",
        (ALONE, SERVER.replace("}", ", timeoutSeconds: 1800}"), "models.teacher="),
        "spec.models.teacherEndpoints.0.timeoutSeconds",
    ),
    "no teacher": Case("Distillation", (ALONE, "models.teacher="), "spec.models.teacher"),
    "a teacher of GRPO": Case("GRPO", ("models.teacher={uri: hf://x}",), "spec.models.teacher"),
    "a teacher that is a function": Case(
        "Distillation", (ALONE, "models.teacher={entrypoint: a:b}"), "spec.models.teacher"
    ),
    "one response to compare": Case("Distillation", ("rollout.samplesPerPrompt=1",), "spec.rollout.samplesPerPrompt"),
    "nobody who judges": Case("Distillation", (ALONE, "evaluation={data: {uri: hf://x}}"), "spec.evaluation"),
    "no reward to keep": Case("Distillation", (ALONE, "rollout.keep=0.5"), "spec.rollout.keep"),
    "a penalty without a reward": Case(
        "Distillation", (ALONE, "algorithm.kl={coefficient: 0.1}"), "spec.algorithm.kl.applyTo"
    ),
    "the likeliest of sampled tokens": Case("Distillation", (ALONE, "algorithm.topK=8"), "spec.algorithm.topK"),
    "a share in a divergence without a mixture": Case(
        "Distillation",
        (ALONE, "algorithm.divergence=Reverse", "algorithm.teacherShare=0.1"),
        "spec.algorithm.teacherShare",
    ),
    "a teacher in no pool": Case(
        "Distillation",
        (ALONE, "placement={mode: Manual, pools: [{name: all, models: [actor], slotsPerNode: 1}]}"),
        "spec.placement.pools",
    ),
    **{
        f"{setting} of a {place} that is only read": Case(
            "Distillation" if place == "teacher" else "SafeRLHF",
            (f"models.{place}={{uri: hf://x, {setting}}}",),
            f"spec.models.{place}.{setting.split(':')[0]}",
        )
        for place in ("reference", "reward", "cost", "teacher")
        for setting in (
            "optimizer: {}",
            "gradientCheckpointing: true",
            "offload: Optimizer",
            "offload: OptimizerInHost",
            "lora: {}",
        )
    },
    **{
        f"{setting} of a part that is only read": Case(
            "PPO",
            (_sum(_part("a", f"{{uri: hf://a, {setting}}}")),),
            f"spec.models.reward.sum.0.reward.{setting.split(':')[0]}",
        )
        for setting in ("optimizer: {}", "gradientCheckpointing: true", "offload: All", "lora: {}")
    },
    **{
        f"a shape of the {role} without all its numbers": Case(
            "SafeRLHF", (f"models.{role}={{uri: hf://x, shape: {{hiddenSize: 8}}}}",), f"spec.models.{role}.shape"
        )
        for role in ROLES
    },
    "a shape of a part without all its numbers": Case(
        "PPO", (_sum(_part("a", "{uri: hf://a, shape: {headDim: 2}}")),), "spec.models.reward.sum.0.reward.shape"
    ),
    "a shape that nobody knows": Case("SFT", ("models.actor.shape={name: gpt-5}",), "spec.models.actor.shape.name"),
    "a shape of no layers": Case(
        "SFT", ("models.actor.shape={name: llama-3-8b, numHiddenLayers: 0}",), "spec.models.actor.shape.numHiddenLayers"
    ),
    "a reward model for SFT": Case("SFT", ("models.reward={uri: hf://x}",), "spec.models.reward"),
    # the algorithm
    "a field of another algorithm": Case("SFT", ("algorithm.clipRange=0.1",), "spec.algorithm.clipRange"),
    "an empty mapping of another algorithm": Case("SFT", ("algorithm.kl={}",), "spec.algorithm.kl"),
    "a multiplier for PPO": Case("PPO", ("algorithm.lagrange={}",), "spec.algorithm.lagrange"),
    "a discount for GRPO": Case("GRPO", ("algorithm.discount=1",), "spec.algorithm.discount"),
    "a beta for SFT": Case("SFT", ("algorithm.beta=1",), "spec.algorithm.beta"),
    "a ratio for PPO": Case("PPO", ("algorithm.ratio=Token",), "spec.algorithm.ratio"),
    "a steered coefficient without a target": Case(
        "PPO", ("algorithm.kl.controller=Coefficient",), "spec.algorithm.kl.target"
    ),
    "a steered learning rate without a target": Case(
        "PPO", ("algorithm.kl.controller=LearningRate",), "spec.algorithm.kl.target"
    ),
    "a rate steered by the generator's log-probabilities": Case(
        "GRPO",
        ("algorithm.kl={controller: LearningRate, target: 0.1}", "training.oldLogProbs=Generator"),
        "spec.algorithm.kl.controller",
    ),
    "a target for a fixed coefficient": Case("PPO", ("algorithm.kl.target=6",), "spec.algorithm.kl.target"),
    "a steered coefficient of a loss": Case(
        "PPO", ("algorithm.kl={controller: Coefficient, target: 6, applyTo: Loss}",), "spec.algorithm.kl.controller"
    ),
    "a steered coefficient of GRPO's loss": Case(
        "GRPO", ("algorithm.kl={controller: Adaptive, target: 6}",), "spec.algorithm.kl.controller"
    ),
    "a ratio that needs another mean": Case(
        "GRPO", ("algorithm={name: GRPO, ratio: Sequence, aggregation: TokenMean}",), "spec.algorithm.aggregation"
    ),
    "a multiplier above its largest": Case(
        "SafeRLHF", ("algorithm.lagrange={initial: 10}",), "spec.algorithm.lagrange.initial"
    ),
    "a shortest prompt above the longest": Case("PPO", ("data.minPromptTokens=1025",), "spec.data.minPromptTokens"),
    "a shortest response above the longest": Case(
        "SFT", ("data.minResponseTokens=1025",), "spec.data.minResponseTokens"
    ),
    "a shortest response where none is read": Case("PPO", ("data.minResponseTokens=2",), "spec.data.minResponseTokens"),
    "a shortest prompt of no tokens": Case("PPO", ("data.minPromptTokens=0",), "spec.data.minPromptTokens"),
    "a buffer longer than the response": Case(
        "PPO",
        ("algorithm.rewards.overlongPenalty={bufferTokens: 2000}",),
        "spec.algorithm.rewards.overlongPenalty.bufferTokens",
    ),
    "a penalty without a buffer": Case(
        "PPO", ("algorithm.rewards.overlongPenalty={}",), "spec.algorithm.rewards.overlongPenalty.bufferTokens"
    ),
    "pretraining rows without a weight": Case(
        "PPO", ("data.pretrain={uri: hf://x}",), "spec.algorithm.pretrainCoefficient"
    ),
    "a weight without pretraining rows": Case("PPO", ("algorithm.pretrainCoefficient=1",), "spec.data.pretrain"),
    "pretraining rows for SFT": Case("SFT", ("data.pretrain={uri: hf://x}",), "spec.data.pretrain"),
    # sizes
    "steps and epochs": Case("PPO", ("training.totalEpochs=1",), "spec.training"),
    "neither steps nor epochs": Case("PPO", ("training.totalSteps=",), "spec.training"),
    "RL without prompts": Case("PPO", ("training.promptBatchSize=",), "spec.training.promptBatchSize"),
    "rows for RL": Case("PPO", ("training.batchSize=8",), "spec.training.batchSize"),
    "prompts for SFT": Case("SFT", ("training.promptBatchSize=8",), "spec.training.promptBatchSize"),
    "SFT without rows": Case("SFT", ("training.batchSize=",), "spec.training.batchSize"),
    "one response with a label": Case("KTO", ("training.batchSize=1",), "spec.training.batchSize"),
    "mini-batches for SFT": Case("SFT", ("training.miniBatchSize=8",), "spec.training.miniBatchSize"),
    "fused updates without a critic": Case("GRPO", ("training.fuseUpdates=Never",), "spec.training.fuseUpdates"),
    "update epochs for SFT": Case("SFT", ("training.updateEpochs=2",), "spec.training.updateEpochs"),
    "sampling for a reward model": Case("RewardModel", ("rollout.temperature=0.5",), "spec.rollout"),
    "shards of generation for DPO": Case("DPO", ("rollout.tensorParallel=1",), "spec.rollout"),
    "functions for SFT": Case("SFT", (EVALUATION,), "spec.evaluation.functions"),
    "verifiers for SFT": Case("SFT", (VERIFIERS, "evaluation.samplesPerPrompt=1"), "spec.evaluation.verifiers"),
    "samples of an evaluation of SFT": Case(
        "SFT", (VERIFIERS, "evaluation.verifiers=[]"), "spec.evaluation.samplesPerPrompt"
    ),
    "a greedy evaluation of SFT": Case(
        "SFT", ("evaluation={data: {uri: hf://x}, greedy: true}",), "spec.evaluation.greedy"
    ),
    "greedy samples": Case("PPO", (VERIFIERS, "evaluation.greedy=true"), "spec.evaluation.samplesPerPrompt"),
    "a verifier that is named as the reward": Case(
        "PPO", (VERIFIERS, "evaluation.verifiers.0.name=reward"), "spec.evaluation.verifiers.0.name"
    ),
    "a verifier that is named as a function": Case(
        "PPO",
        (EVALUATION, "evaluation.verifiers=[{name: rule, verifier: {name: Math}}]"),
        "spec.evaluation.verifiers.0.name",
    ),
    "a verifier longer than a call": Case(
        "PPO", (VERIFIERS, "training.callDeadlineSeconds=300"), "spec.evaluation.verifiers.0.timeoutSeconds"
    ),
    "mini-batches that do not divide": Case("PPO", ("training.miniBatchSize=3",), "spec.training.miniBatchSize"),
    "mini-batches that cut pairs": Case("OnlineDPO", ("training.miniBatchSize=2",), "spec.training.miniBatchSize"),
    **{
        f"one response to compare with {name}": Case(name, ("rollout=",), "spec.rollout.samplesPerPrompt")
        for name, algorithm in ALGORITHMS.items()
        if algorithm.comparing == {}
    },
    "one response in a group": Case("REINFORCEPP", ("algorithm.baseline=Group",), "spec.rollout.samplesPerPrompt"),
    "a shortest response longer than the longest": Case(
        "PPO", ("rollout.minResponseTokens=2000",), "spec.rollout.minResponseTokens"
    ),
    "old log-probabilities that nothing reads": Case(
        "OnlineDPO", ("training.oldLogProbs=Recompute",), "spec.training.oldLogProbs"
    ),
    "old log-probabilities of a generator that does not sample from all tokens": Case(
        "PPO", ("training.oldLogProbs=Generator", "rollout.topP=0.9"), "spec.training.oldLogProbs"
    ),
    "the generator compared with itself": Case(
        "PPO",
        ("training.oldLogProbs=Generator", "algorithm.rolloutCorrection={cap: 2}"),
        "spec.algorithm.rolloutCorrection",
    ),
    "weights of tokens that were not sampled from all": Case(
        "GRPO", ("algorithm.rolloutCorrection={cap: 2}", "rollout.topK=5"), "spec.algorithm.rolloutCorrection"
    ),
    "stale responses that were not sampled from all tokens": Case(
        "GRPO",
        (APART.replace("critic, ", ""), "rollout.maxStaleness=1", "rollout.minP=0.1"),
        "spec.rollout.maxStaleness",
    ),
    "rewards of turns that are not shaped": Case(
        "PPO",
        ("algorithm.rewards={clip: 5.0}", "rollout.environment={entrypoint: 'a.b:C'}"),
        "spec.algorithm.rewards",
    ),
    "turns of which one is given a value": Case(
        "PPO",
        ("algorithm.rewards={truncated: Value}", "rollout.environment={entrypoint: 'a.b:C'}"),
        "spec.algorithm.rewards",
    ),
    "a value of truncated responses that nothing reads": Case(
        "PPO", ("algorithm.rewards={truncatedValue: -1.0}",), "spec.algorithm.rewards.truncatedValue"
    ),
    "a reference in a pool, which is in no manifest and for no penalty": Case(
        "GRPO",
        ("algorithm.kl.coefficient=0", "placement.mode=Manual", _pools(_pool("a", "actor, reward, reference"))),
        "spec.placement.pools.0.models",
    ),
    "generation in shards that do not divide": Case(
        "PPO", ("models.actor.parallelism.tensor=2", "rollout.tensorParallel=3"), "spec.rollout.tensorParallel"
    ),
    "generation in stages that do not divide": Case(
        "PPO", ("models.actor.parallelism.pipeline=3", "rollout.pipelineParallel=2"), "spec.rollout.pipelineParallel"
    ),
    "rows cut over no ranks": Case(
        "PPO", ("models.actor.parallelism.context=0",), "spec.models.actor.parallelism.context"
    ),
    "shards of generation with manual placement": Case(
        "PPO", (POOLS, "rollout.tensorParallel=2"), "spec.rollout.tensorParallel"
    ),
    "fewer nodes at most than at least": Case("PPO", ("resources={nodes: 2, maxNodes: 1}",), "spec.resources.maxNodes"),
    "more nodes with manual placement": Case("PPO", (POOLS, "resources.maxNodes=2"), "spec.resources.maxNodes"),
    "nodes with manual placement": Case("PPO", (POOLS, "resources.nodes=2"), "spec.resources.nodes"),
    "more nodes than there are": Case("PPO", ("resources.nodes=100001",), "spec.resources.nodes"),
    "more nodes at most than there are": Case("PPO", ("resources.maxNodes=100001",), "spec.resources.maxNodes"),
    "more slots than a node has": Case("PPO", ("resources.slotsPerNode=1025",), "spec.resources.slotsPerNode"),
    # pools
    "a pool of more nodes than there are": Case(
        "SFT",
        (_pools("{name: a, models: [actor], nodes: 100001, slotsPerNode: 1}"),),
        "spec.placement.pools.0.nodes",
    ),
    "a pool of more slots than a node has": Case(
        "SFT", (_pools(_pool("a", "actor", 1025)),), "spec.placement.pools.0.slotsPerNode"
    ),
    "manual placement without pools": Case("PPO", ("placement.mode=Manual",), "spec.placement.pools"),
    "an objective without a meaning": Case("PPO", ("placement.objective=fastest",), "spec.placement.objective"),
    "the least price by hand": Case("PPO", (POOLS, "placement.objective=lowest-cost"), "spec.placement.objective"),
    "another placement than by hand": Case("PPO", (POOLS, "placement.remap=AtCheckpoint"), "spec.placement.remap"),
    "pools with automatic placement": Case(
        "SFT", (f"placement.pools=[{_pool('a', 'actor')}]",), "spec.placement.pools"
    ),
    "a pool without models": Case("SFT", (_pools(_pool("a", "")),), "spec.placement.pools.0.models"),
    "an unknown role": Case("SFT", (_pools(_pool("a", "rolout")),), "spec.placement.pools.0.models.0"),
    **{
        f"a {role} in no pool": Case(
            "SafeRLHF",
            (_pools(_pool("a", ", ".join(other for other in ROLES[:-1] if other != role))),),
            "spec.placement.pools",
        )
        for role in ROLES[:-1]
    },
    "a model in two pools": Case("SFT", (_pools(_pool("a", "actor"), _pool("b", "actor")),), "spec.placement.pools"),
    **{
        f"a pool for a {role} that is not there": Case(
            "CostModel" if role == "actor" else "SFT",
            (_pools(_pool("a", role)),),
            "spec.placement.pools.0.models",
        )
        for role in ROLES
    },
    "a model twice in one pool": Case("SFT", (_pools(_pool("a", "actor, actor")),), "spec.placement.pools.0.models"),
    "a function in a pool": Case("PPO", (FUNCTION, POOLS), "spec.placement.pools.0.models"),
    "a pool without slots": Case("SFT", (_pools(_pool("a", "actor", 0)),), "spec.placement.pools.0.slotsPerNode"),
    "two pools of one name": Case(
        "PPO",
        (_pools(_pool("a", "actor, critic"), _pool("a", "reward, reference")),),
        "spec.placement.pools.1.name",
    ),
    "a pool without a name": Case(
        "SFT", (_pools("{models: [actor], slotsPerNode: 1}"),), "spec.placement.pools.0.name"
    ),
    # rewards
    "a reward without any form": Case("PPO", ("models.reward={}",), "spec.models.reward.uri"),
    "two forms of reward": Case("PPO", ("models.reward={entrypoint: a:b, uri: hf://x}",), "spec.models.reward.uri"),
    "a revision of a function": Case("PPO", (FUNCTION, "models.reward.revision=a"), "spec.models.reward.revision"),
    "attempts of a function": Case("PPO", (FUNCTION, "models.reward.attempts=2"), "spec.models.reward.attempts"),
    "arguments of a model": Case("PPO", ("models.reward.arguments={}",), "spec.models.reward.arguments"),
    "arguments that are a list": Case("PPO", (FUNCTION, "models.reward.arguments=[]"), "spec.models.reward.arguments"),
    "a function as cost": Case("SafeRLHF", ("models.cost={entrypoint: a:b}",), "spec.models.cost"),
    "a function for a reward model to be": Case("RewardModel", (FUNCTION,), "spec.models.reward"),
    "a function for SFT": Case("SFT", (FUNCTION,), "spec.models.reward"),
    "an entry point without a function": Case(
        "PPO", ("models.reward={entrypoint: a.b}",), "spec.models.reward.entrypoint"
    ),
    "a service that is no URL": Case("PPO", ("models.reward={url: localhost}",), "spec.models.reward.url"),
    "a password in a URL": Case("PPO", ("models.reward={url: 'http://me:x@host'}",), "spec.models.reward.url"),
    "a query in a URL": Case("PPO", ("models.reward={url: 'http://host/a?b=c'}",), "spec.models.reward.url"),
    "a password in the URL of a tracker": Case(
        "PPO", ("outputs.mlflow={uri: 'http://me:x@host', experiment: a}",), "spec.outputs.mlflow.uri"
    ),
    "a collector without a scheme": Case(
        "PPO", ("outputs.otel={endpoint: 'collector:4318'}",), "spec.outputs.otel.endpoint"
    ),
    "a project with a character that W&B refuses": Case(
        "PPO", ("outputs.wandb={project: team/a}",), "spec.outputs.wandb.project"
    ),
    "a tracker without an experiment": Case(
        "PPO", ("outputs.mlflow={uri: 'http://h'}",), "spec.outputs.mlflow.experiment"
    ),
    "a port beyond all": Case("PPO", ("models.reward={url: 'http://host:70000'}",), "spec.models.reward.url"),
    "a port of zero": Case("PPO", ("models.reward={url: 'http://host:0'}",), "spec.models.reward.url"),
    "two models in a sum": Case(
        "PPO", (_sum(_part("a", "{uri: hf://a}"), _part("b", "{uri: hf://b}")),), "spec.models.reward.sum.1.reward"
    ),
    "a sum in a sum": Case("PPO", (_sum(_part("a", "{sum: []}")),), "spec.models.reward.sum.0.reward"),
    "an empty sum": Case("PPO", (_sum(),), "spec.models.reward.sum"),
    "a part that counts for nothing": Case(
        "PPO", (_sum(_part("a", "{entrypoint: a:b}", ", weight: 0")),), "spec.models.reward.sum.0.weight"
    ),
    "two parts of one name": Case(
        "PPO",
        (_sum(_part("a", "{entrypoint: a:b}"), _part("a", "{entrypoint: a:c}")),),
        "spec.models.reward.sum.1.name",
    ),
    "a part with a name that is none": Case(
        "PPO", (_sum(_part("a-b", "{entrypoint: a:b}")),), "spec.models.reward.sum.0.name"
    ),
    "a function longer than a call": Case(
        "PPO", (FUNCTION, "models.reward.timeoutSeconds=1800"), "spec.models.reward.timeoutSeconds"
    ),
    "a function longer than a short call, by default": Case(
        "PPO", (FUNCTION, "training.callDeadlineSeconds=60"), "spec.models.reward.timeoutSeconds"
    ),
    "a service longer than a short call, by default": Case(
        "PPO",
        ("models.reward={url: 'http://host'}", "training.callDeadlineSeconds=30"),
        "spec.models.reward.timeoutSeconds",
    ),
    "a part longer than a call": Case(
        "PPO",
        (_sum(_part("a", "{entrypoint: a:b, timeoutSeconds: 1800}")),),
        "spec.models.reward.sum.0.reward.timeoutSeconds",
    ),
    "an evaluation longer than a call": Case(
        "PPO",
        (_functions("{name: f, entrypoint: a:b, timeoutSeconds: 1800}"),),
        "spec.evaluation.functions.0.timeoutSeconds",
    ),
    "two functions of one name": Case(
        "PPO",
        (_functions("{name: f, entrypoint: a:b}", "{name: f, entrypoint: a:c}"),),
        "spec.evaluation.functions.1.name",
    ),
    "a function with a name that is taken": Case(
        "PPO", (_functions("{name: reward, entrypoint: a:b}"),), "spec.evaluation.functions.0.name"
    ),
    # how a cluster runs it
    "an unknown way to keep": Case("PPO", ("storage={retain: Sometimes}",), "spec.storage.retain"),
    "a negative limit": Case("PPO", ("runPolicy.backoffLimit=-1",), "spec.runPolicy.backoffLimit"),
    "a deadline of zero": Case(
        "PPO", ("runPolicy.progressDeadlineSeconds=0",), "spec.runPolicy.progressDeadlineSeconds"
    ),
    "an unknown reason": Case(
        "PPO", (_policy("{name: a, action: Fail, reasons: [Bad]}"),), "spec.runPolicy.failureRules.0.reasons.0"
    ),
    "an unknown action": Case("PPO", (_policy("{name: a, action: Stop}"),), "spec.runPolicy.failureRules.0.action"),
    "a rule without an action": Case("PPO", (_policy("{name: a}"),), "spec.runPolicy.failureRules.0.action"),
    "an exit code of success": Case(
        "PPO", (_policy("{name: a, action: Fail, exitCodes: [0]}"),), "spec.runPolicy.failureRules.0.exitCodes.0"
    ),
    "two rules of one name": Case(
        "PPO", (_policy("{name: a, action: Fail}", "{name: a, action: Remap}"),), "spec.runPolicy.failureRules.1.name"
    ),
    "a variable without a value": Case("PPO", ("runtime.env=[{name: A}]",), "spec.runtime.env.0"),
    "a variable with two values": Case(
        "PPO", ("runtime.env=[{name: A, value: b, secret: {name: s, key: k}}]",), "spec.runtime.env.0"
    ),
    "a variable with a name that is none": Case(
        "PPO", ("runtime.env=[{name: A-B, value: c}]",), "spec.runtime.env.0.name"
    ),
    "a variable that is a number": Case("PPO", ("runtime.env=[{name: A, value: 1}]",), "spec.runtime.env.0.value"),
    "two variables of one name": Case(
        "PPO", ("runtime.env=[{name: A, value: b}, {name: A, value: c}]",), "spec.runtime.env.1.name"
    ),
    "a variable of the operator's": Case(
        "PPO", ("runtime.env=[{name: A, value: b}, {name: RLHF_ATTEMPT, value: c}]",), "spec.runtime.env.1.name"
    ),
    "a secret without a key": Case(
        "PPO", ("runtime.env=[{name: A, secret: {name: s}}]",), "spec.runtime.env.0.secret.key"
    ),
    "a template that is no mapping": Case("PPO", ("runtime.worker.template=[]",), "spec.runtime.worker.template"),
    "memory that is no quantity": Case("PPO", ("runtime.worker.memory=16 GB",), "spec.runtime.worker.memory"),
    "memory that is a number": Case("PPO", ("runtime.worker.memory=16",), "spec.runtime.worker.memory"),
    **{
        f"{memory} of memory": Case("PPO", (f"runtime.worker.memory='{memory}'",), "spec.runtime.worker.memory")
        for memory in ("0", "100m", "1Ki", "1048575")
    },
    "no memory of the head": Case("PPO", ("runtime.controller.memory=0Gi",), "spec.runtime.controller.memory"),
    "no shared memory": Case("PPO", ("runtime.sharedMemory='0'",), "spec.runtime.sharedMemory"),
    **{
        f"{cpu} CPUs": Case("PPO", (f"runtime.worker.cpu='{cpu}'",), "spec.runtime.worker.cpu")
        for cpu in ("0", "0.0", "0m", "4Gi", "4k")
    },
    "no CPU of the head": Case("PPO", ("runtime.controller.cpu='0'",), "spec.runtime.controller.cpu"),
    "a service account with capitals": Case(
        "PPO", ("runtime.serviceAccountName=Me",), "spec.runtime.serviceAccountName"
    ),
    "an empty image": Case("PPO", ("runtime.image=''",), "spec.runtime.image"),
    "an image with a space": Case("PPO", ("runtime.image='my image:1'",), "spec.runtime.image"),
    "an image with a line break": Case("PPO", ('runtime.image="image:1\\n"',), "spec.runtime.image"),
}

TEMPLATE = "spec.runtime.worker.template"


def _template(text: str, path: str) -> Case:
    """A template of workers that is wrong at a path of it."""
    return Case("PPO", (f"runtime.worker.template={text}",), f"{TEMPLATE}.{path}")


def _container(text: str, path: str) -> Case:
    """The same of Ray's container."""
    return _template(f"{{spec: {{containers: [{{name: ray-worker, {text}}}]}}}}", f"spec.containers.0.{path}")


ONLY_VALIDATE: dict[str, Case] = {
    "a part of a template that is none": _template("{spec: {}, status: {}}", "status"),
    "a template's owner": _template("{metadata: {ownerReferences: []}}", "metadata.ownerReferences"),
    "a label of the operator's": _template(
        "{metadata: {labels: {rlhf.hybridflow.io/attempt: '7'}}}", "metadata.labels.rlhf.hybridflow.io/attempt"
    ),
    "a selector that is no label": _template("{spec: {nodeSelector: {a: b c}}}", "spec.nodeSelector.a"),
    "a selector with a name that is none": _template("{spec: {nodeSelector: {a b: c}}}", "spec.nodeSelector.a b"),
    "an effect that is not there": _template(
        "{spec: {tolerations: [{key: a, effect: Never}]}}", "spec.tolerations.0.effect"
    ),
    "pods that start again": _template("{spec: {restartPolicy: Always}}", "spec.restartPolicy"),
    "a token": _template("{spec: {automountServiceAccountToken: true}}", "spec.automountServiceAccountToken"),
    "a container without a name": _template("{spec: {containers: [{image: x}]}}", "spec.containers.0.name"),
    "containers that are no list": _template("{spec: {containers: {name: a}}}", "spec.containers"),
    "the container of other pods": _template("{spec: {containers: [{name: ray-head}]}}", "spec.containers.0.name"),
    "the operator's volume": _template("{spec: {volumes: [{name: claim-0}]}}", "spec.volumes.0.name"),
    "the trainer's command": _container("command: [sleep]", "command"),
    "the trainer's ports": _container("ports: []", "ports"),
    "the image in a template": _container("image: x", "image"),
    "a mount over the run folder": _container(
        "volumeMounts: [{name: a, mountPath: /rlhf/output}]", "volumeMounts.0.mountPath"
    ),
    "the number of the attempt": _container("env: [{name: RLHF_ATTEMPT, value: '7'}]", "env.0.name"),
    "memory in a template": _container("resources: {limits: {memory: 1Gi}}", "resources.limits.memory"),
    "GPUs in a template": _container("resources: {requests: {nvidia.com/gpu: 9}}", "resources.requests.nvidia.com/gpu"),
    "a claim without a name": _container("resources: {claims: [{request: a}]}", "resources.claims.0"),
    "an argument that every function gets": Case(
        "PPO", (FUNCTION, "models.reward.arguments={prompts: 1}"), "spec.models.reward.arguments.prompts"
    ),
    "an argument that is too deep": Case(
        "PPO", (FUNCTION, f"models.reward.arguments={{a: {'[' * 17}{']' * 17}}}"), "spec.models.reward.arguments"
    ),
    "an argument that is no name": Case(
        "PPO", (FUNCTION, "models.reward.arguments={x-y: 1}"), "spec.models.reward.arguments.x-y"
    ),
}
"""What a structural schema cannot look into, arguments and templates being any JSON; the operator says it."""

STOPPED = "suspend=true"
TERM = "{name: a, reward: {%s}}"
UPDATES: dict[str, Update] = {
    "nothing": Update("PPO", (), ()),
    "a label": Update("PPO", (), ("metadata.labels={a: b}",)),
    "a stop": Update("PPO", (), (STOPPED,)),
    "going on": Update("PPO", (STOPPED,), ()),
    "the run policy": Update("PPO", (), ("runPolicy.backoffLimit=9",)),
    "what is kept": Update("PPO", (), ("storage={retain: Never}",)),
    "the cadence of checkpoints": Update("PPO", (), ("checkpoint={everySteps: 3, keepLast: 5}",)),
    "the cadence of evaluation": Update("PPO", (EVALUATION,), (EVALUATION, "evaluation.everySteps=2")),
    "who is told": Update("PPO", (), ("outputs={wandb: {project: a, mode: Offline}}",)),
    "the tokens of a pass": Update("PPO", (), ("training.microBatchTokens=64", "training.maxSkippedUpdates=0")),
    "the kernels of attention": Update("PPO", (), ("training.attention=SDPA", "training.compile=true")),
    "the kernels of layers": Update("PPO", (), ("training.kernels=Plain",)),
    "what replicas send": Update("PPO", (), ("training.gradientCompression=None",)),
    "the deadline of a call": Update("PPO", (), ("training.callDeadlineSeconds=99",)),
    "how generation starts": Update("PPO", (), ("rollout.enforceEager=true",)),
    "how generation rounds": Update("PPO", (), ("rollout.batchInvariant=true",)),
    "the memory of generation": Update("PPO", (), ("rollout.gpuMemoryUtilization=0.5",)),
    "what the mapper is told": Update("PPO", (), (f"models.actor.shape={SHAPE}", f"models.reward.shape={SHAPE}")),
    "memory saved": Update("PPO", (), ("models.actor.gradientCheckpointing=true", "models.critic.offload=All")),
    "the patience with a function": Update("PPO", (FUNCTION,), (FUNCTION, "models.reward.timeoutSeconds=9")),
    "the patience with a part": Update(
        "PPO",
        (_sum(TERM % "entrypoint: a:b"),),
        (_sum(TERM % "entrypoint: a:b, timeoutSeconds: 9"),),
    ),
    "the patience with an evaluation": Update(
        "PPO", (EVALUATION,), (_functions("{name: rule, entrypoint: a.b:c, timeoutSeconds: 9}"),)
    ),
    "the attempts of a service": Update(
        "PPO", ("models.reward={url: 'http://h'}",), ("models.reward={url: 'http://h', attempts: 9, concurrency: 2}",)
    ),
    "more steps": Update("PPO", (), ("training.totalSteps=9",)),
    "fewer steps": Update("PPO", (), ("training.totalSteps=1",)),
    "more steps under a schedule of one's own": Update(
        "SFT",
        ("models.actor.optimizer={schedule: 'a:b'}",),
        ("models.actor.optimizer={schedule: 'a:b'}", "training.totalSteps=9"),
        "spec.training.totalSteps",
    ),
    "another callback": Update("PPO", (), ("outputs.callbacks=[{entrypoint: 'a:b'}]",)),
    "another order": Update("PPO", (), ("data.order={entrypoint: 'a:b'}",), "spec.data.order"),
    "epochs for steps": Update("PPO", (), ("training.totalSteps=", "training.totalEpochs=1")),
    "more steps under a schedule that depends on them": Update(
        "PPO",
        ("models.critic.optimizer={schedule: Cosine}",),
        ("models.critic.optimizer={schedule: Cosine}", "training.totalSteps=9"),
        "spec.training.totalSteps",
    ),
    "the algorithm": Update("RLOO", (), ("algorithm={name: GRPO}",), "spec.algorithm"),
    "a number of the algorithm": Update("PPO", (), ("algorithm.clipRange=0.3",), "spec.algorithm.clipRange"),
    "a number of the algorithm's penalty": Update(
        "PPO", (), ("algorithm.kl.coefficient=0.3",), "spec.algorithm.kl.coefficient"
    ),
    "clipping of values no more": Update("PPO", (), ("algorithm.valueClipRange=",), "spec.algorithm.valueClipRange"),
    "another actor": Update("PPO", (), ("models.actor.uri=hf://b",), "spec.models.actor.uri"),
    "another revision": Update("PPO", (), ("models.actor.revision=b",), "spec.models.actor.revision"),
    "a reference added": Update("PPO", (), ("models.reference={uri: hf://a}",), "spec.models.reference"),
    "another rate": Update(
        "PPO",
        ("models.actor.optimizer={}",),
        ("models.actor.optimizer={learningRate: 1}",),
        "spec.models.actor.optimizer.learningRate",
    ),
    "another rank": Update(
        "PPO", ("models.actor.lora={}",), ("models.actor.lora={rank: 8}",), "spec.models.actor.lora.rank"
    ),
    "another form of reward": Update("PPO", (), (FUNCTION,), "spec.models.reward"),
    "another function": Update(
        "PPO", (FUNCTION,), ("models.reward={entrypoint: a:d}",), "spec.models.reward.entrypoint"
    ),
    "other arguments": Update(
        "PPO",
        (FUNCTION, "models.reward.arguments={a: [1]}"),
        (FUNCTION, "models.reward.arguments={a: [2]}"),
        "spec.models.reward.arguments",
    ),
    "another weight": Update(
        "PPO",
        (_sum(TERM % "entrypoint: a:b"),),
        (_sum(_part("a", "{entrypoint: a:b}", ", weight: 2")),),
        "spec.models.reward.sum.0.weight",
    ),
    "a part added": Update(
        "PPO",
        (_sum(TERM % "entrypoint: a:b"),),
        (_sum(TERM % "entrypoint: a:b", _part("c", "{entrypoint: a:b}")),),
        "spec.models.reward.sum",
    ),
    "other data": Update("PPO", (), ("data.train.uri=hf://b",), "spec.data.train.uri"),
    "fewer rows": Update("PPO", (), ("data.train.limit=7",), "spec.data.train.limit"),
    "longer responses": Update("PPO", (), ("data.maxResponseTokens=7",), "spec.data.maxResponseTokens"),
    "another temperature": Update("PPO", (), ("rollout.temperature=0.5",), "spec.rollout.temperature"),
    "more responses": Update("GRPO", (), ("rollout.samplesPerPrompt=8",), "spec.rollout.samplesPerPrompt"),
    "another seed": Update("PPO", (), ("training.seed=1",), "spec.training.seed"),
    "another batch": Update("PPO", (), ("training.promptBatchSize=4",), "spec.training.promptBatchSize"),
    "mini-batches": Update("PPO", (), ("training.miniBatchSize=4",), "spec.training.miniBatchSize"),
    "another precision": Update("PPO", (), ("training.precision=BF16",), "spec.training.precision"),
    "an evaluation added": Update("PPO", (), (EVALUATION,), "spec.evaluation"),
    "other rows to evaluate": Update(
        "PPO", (EVALUATION,), (EVALUATION, "evaluation.data.uri=hf://y"), "spec.evaluation.data.uri"
    ),
    "another evaluation": Update(
        "PPO", (EVALUATION,), (_functions("{name: other, entrypoint: a.b:c}"),), "spec.evaluation.functions"
    ),
    "other resources, running": Update("PPO", (), ("resources.nodes=2",), "spec.resources", on_a_laptop=False),
    "other resources, stopped": Update("PPO", (STOPPED,), (STOPPED, "resources.nodes=2")),
    "other resources and going on": Update("PPO", (STOPPED,), ("resources.nodes=2",)),
    "other resources and a stop": Update("PPO", (), (STOPPED, "resources.nodes=2")),
    "another placement, running": Update("PPO", (), (POOLS,), "spec.placement", on_a_laptop=False),
    "another placement, stopped": Update("PPO", (STOPPED,), (STOPPED, POOLS)),
    "other pods, running": Update("PPO", (), ("runtime.image=b",), "spec.runtime", on_a_laptop=False),
    "other pods, stopped": Update("PPO", (STOPPED,), (STOPPED, "runtime.image=b")),
    "other shards, running": Update(
        "PPO", (), ("models.actor.parallelism={tensor: 2}",), "spec.models.actor", on_a_laptop=False
    ),
    "other shards, stopped": Update("PPO", (STOPPED,), (STOPPED, "models.actor.parallelism={tensor: 2}")),
    "other shards of generation, running": Update(
        "PPO", (), ("rollout.tensorParallel=2",), "spec.rollout.tensorParallel", on_a_laptop=False
    ),
    "other storage": Update(
        "PPO", (), ("checkpoint.storage=s3://bucket",), "spec.checkpoint.storage", on_a_laptop=False
    ),
    "other storage, stopped": Update(
        "PPO", (STOPPED,), (STOPPED, "checkpoint.storage=s3://bucket"), "spec.checkpoint.storage", on_a_laptop=False
    ),
}
