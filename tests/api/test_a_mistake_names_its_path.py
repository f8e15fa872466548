"""Each mistake of a user is reported with its path and one clear sentence."""

import re

import pytest

from rlhf_api.exit_codes import ExitCode
from rlhf_api.files import load
from rlhf_api.job import Job
from rlhf_api.problems import SpecError, choice
from rlhf_api.spec.algorithm_table import ALGORITHMS
from tests.api.cases import FUNCTION, made
from tests.each import each_case

PPO, SFT, REWARD = "helpful-ppo", "helpful-sft", "helpful-reward"
ACTORS = choice(name for name, each in ALGORITHMS.items() if "actor" in each.trained and name != "SFT")
MAKERS = ACTORS.replace(" or ", ", ") + " or Merge"
BETAS = choice(name for name, each in ALGORITHMS.items() if "beta" in each.model_fields)
KINDS = choice([*ALGORITHMS, "Custom"])
MINI = f"{PPO}:training.miniBatchSize=8"
SAMPLED = (f"{PPO}:models.critic=", f"{PPO}:rollout.samplesPerPrompt=4", f"{PPO}:training.miniBatchSize=8")
POOLS = "placement={mode: Manual, pools: ["
URI = "expected a URI that starts with"
MORE_MEMORY = "{name: ray-worker, resources: {limits: {memory: 1Gi}}}"
DEEP = f"{{a: {'[' * 17}{']' * 17}}}"

# sentence -> the overrides that plant the mistake, the expected path, the expected message
MISTAKES = {
    "a misspelt field": (
        [f"{PPO}:algorithm.clipRnage=0.1"],
        f"{PPO}: spec.algorithm.clipRnage",
        "unknown field; did you mean clipRange?",
    ),
    "a field in snake case": (
        [f"{PPO}:algorithm.clip_range=0.1"],
        f"{PPO}: spec.algorithm.clip_range",
        "unknown field; did you mean clipRange?",
    ),
    "a field like no other": (
        [f"{SFT}:models.xyz={{}}"],
        f"{SFT}: spec.models.xyz",
        "unknown field; expected actor, cost, critic, reference, reward, teacher or teacherEndpoints",
    ),
    "GPUs of a pod": (
        [f"{PPO}:runtime.worker.gpu=2"],
        f"{PPO}: spec.runtime.worker.gpu",
        "unknown field; spec.resources.slotsPerNode says how many GPUs a worker gets",
    ),
    "resources as a pod has them": (
        [f"{PPO}:runtime.resources={{cpu: 2}}"],
        f"{PPO}: spec.runtime.resources",
        "unknown field; CPUs and memory are runtime.worker, GPUs are spec.resources.slotsPerNode",
    ),
    "a selector that is no field of its own": (
        [f"{PPO}:runtime.nodeSelector={{zone: a}}"],
        f"{PPO}: spec.runtime.nodeSelector",
        "unknown field; write worker: {template: {spec: {nodeSelector: ...}}}",
    ),
    "memory in a template": (
        [f"{PPO}:runtime.worker.template={{spec: {{containers: [{MORE_MEMORY}]}}}}"],
        f"{PPO}: spec.runtime.worker.template.spec.containers.0.resources.limits.memory",
        "is the operator's; write spec.runtime.worker.memory",
    ),
    "a secret as a pod has it": (
        [f"{PPO}:runtime.env=[{{name: A, value: b, valueFrom: {{}}}}]"],
        f"{PPO}: spec.runtime.env.0.valueFrom",
        "unknown field; write secret: {name: ..., key: ...}",
    ),
    "a field of another algorithm": (
        [f"{SFT}:algorithm.clipRange=0.1"],
        f"{SFT}: spec.algorithm.clipRange",
        f"unknown field for SFT; it is for {ACTORS.removeprefix('DPO, KTO, ORPO, OnlineDPO, SimPO, ')} only",
    ),
    "a field with the name of its algorithm": (
        [f"{SFT}:algorithm.SFT=1"],
        f"{SFT}: spec.algorithm.SFT",
        "unknown field; expected name",
    ),
    "a number of responses that YAML reads as false": (
        [f"{PPO}:rollout={{n: 8}}"],
        f"{PPO}: spec.rollout.false",
        "unknown field; YAML reads n as false; did you mean samplesPerPrompt?",
    ),
    "a word of TRL": (
        [f"{PPO}:rollout.num_generations=8"],
        f"{PPO}: spec.rollout.num_generations",
        "unknown field; did you mean spec.rollout.samplesPerPrompt?",
    ),
    "a word of verl at another place": (
        [f"{PPO}:training.lr=1e-6"],
        f"{PPO}: spec.training.lr",
        "unknown field; did you mean spec.models.<role>.optimizer.learningRate?",
    ),
    "a word of TRL that another algorithm has": (
        [f"{PPO}:algorithm.beta=0.1"],
        f"{PPO}: spec.algorithm.beta",
        f"unknown field for PPO; it is for {BETAS} only; did you mean spec.algorithm.kl.coefficient?",
    ),
    "an unknown algorithm": (
        [f"{SFT}:algorithm.name=SGD"],
        f"{SFT}: spec.algorithm.name",
        f'is "SGD" (text), expected {KINDS}',
    ),
    "no algorithm name": (
        [f"{SFT}:algorithm={{}}"],
        f"{SFT}: spec.algorithm.name",
        f"is missing, expected {KINDS}",
    ),
    "an algorithm that is text": (
        [f"{SFT}:algorithm=SFT"],
        f"{SFT}: spec.algorithm",
        'is "SFT" (text), expected a mapping',
    ),
    "a missing field": ([f"{SFT}:data={{}}"], f"{SFT}: spec.data.train", "is missing, SFT needs it"),
    "text for a whole number": (
        [f'{PPO}:training.totalSteps="3"'],
        f"{PPO}: spec.training.totalSteps",
        'is "3" (text), expected a whole number',
    ),
    "a fraction for a whole number": (
        [f"{PPO}:training.totalSteps=1.5"],
        f"{PPO}: spec.training.totalSteps",
        "is 1.5 (a number), expected a whole number",
    ),
    "a boolean for a number": (
        [f"{PPO}:algorithm.discount=yes"],
        f"{PPO}: spec.algorithm.discount",
        "is true (true or false), expected a number",
    ),
    "a number for a boolean": (
        [f"{PPO}:algorithm.whitenAdvantages=1"],
        f"{PPO}: spec.algorithm.whitenAdvantages",
        "is 1 (a number), expected true or false",
    ),
    "nothing for a number": (
        [f"{PPO}:models.actor.optimizer.betas=[0.9, null]"],
        f"{PPO}: spec.models.actor.optimizer.betas.1",
        "is empty, expected a number",
    ),
    "a mapping for text": (
        [f"{PPO}:data.train.split={{}}"],
        f"{PPO}: spec.data.train.split",
        "is a mapping, expected text",
    ),
    "a list for a mapping": ([f"{SFT}:data=[]"], f"{SFT}: spec.data", "is a list, expected a mapping"),
    "text for a list": (
        [f"{PPO}:placement.pools=all"],
        f"{PPO}: spec.placement.pools",
        'is "all" (text), expected a list',
    ),
    "text inside a pair of numbers": (
        [f"{PPO}:models.actor.optimizer.betas=[0.9, x]"],
        f"{PPO}: spec.models.actor.optimizer.betas.1",
        'is "x" (text), expected a number',
    ),
    "three numbers for a pair": (
        [f"{PPO}:models.actor.optimizer.betas=[0.9, 0.9, 0.9]"],
        f"{PPO}: spec.models.actor.optimizer.betas",
        "has 3 entries, expected at most 2",
    ),
    "not a number": (
        [f"{PPO}:algorithm.kl.coefficient=.nan"],
        f"{PPO}: spec.algorithm.kl.coefficient",
        "is nan (a number), expected a finite number",
    ),
    "infinity": (
        [f"{PPO}:models.actor.optimizer.maxGradNorm=.inf"],
        f"{PPO}: spec.models.actor.optimizer.maxGradNorm",
        "is inf (a number), expected a finite number",
    ),
    "a number below its bound": (
        [f"{PPO}:training.totalSteps=0"],
        f"{PPO}: spec.training.totalSteps",
        "is 0, expected at least 1",
    ),
    "a number on its open bound": (
        [f"{PPO}:algorithm.clipRange=1"],
        f"{PPO}: spec.algorithm.clipRange",
        "is 1, expected less than 1",
    ),
    "a top-k of zero": (
        [f"{PPO}:rollout.topK=0"],
        f"{PPO}: spec.rollout.topK",
        "is 0, expected -1 (all tokens) or at least 1",
    ),
    "a word that is no choice": (
        [f"{PPO}:training.precision=FP8"],
        f"{PPO}: spec.training.precision",
        'is "FP8" (text), expected Auto, FP32 or BF16',
    ),
    "another kind of object": ([f"{SFT}:kind=Pod"], f"{SFT}: kind", 'is "Pod" (text), expected RLHFJob'),
    "a name that is no DNS label": (
        [f"{PPO}:metadata.name=Helpful_PPO"],
        "Helpful_PPO: metadata.name",
        (
            "is \"Helpful_PPO\" (text), expected lower-case letters, digits and '-', with a letter first and a letter "
            "or digit last"
        ),
    ),
    "a name that is too long": (
        [f"{PPO}:metadata.name={'a' * 41}"],
        f"{'a' * 41}: metadata.name",
        "has 41 characters, expected at most 40",
    ),
    "empty text": ([f"{SFT}:data.train.split=''"], f"{SFT}: spec.data.train.split", "is empty"),
    "a scheme that is not known": (
        [f"{SFT}:models.actor.uri=s3://bucket/x"],
        f"{SFT}: spec.models.actor.uri",
        f'is "s3://bucket/x" (text), {URI} hf://, job://, package://, file:// or pvc://claim/',
    ),
    "a package within a package": (
        [f"{SFT}:models.actor.uri=package://a.b/model"],
        f"{SFT}: spec.models.actor.uri",
        'is "package://a.b/model"; expected one package, which is in no other, as in package://name/path',
    ),
    "a way out of a claim": (
        [f"{SFT}:models.actor.uri=pvc://claim/../x"],
        f"{SFT}: spec.models.actor.uri",
        'holds "..", expected a path within the package or the claim',
    ),
    "no memory to speak of": (
        [f"{PPO}:runtime.worker.memory=100m"],
        f"{PPO}: spec.runtime.worker.memory",
        'is "100m", expected at least 1Mi; a number without a unit is bytes',
    ),
    "no CPU": (
        [f"{PPO}:runtime.worker.cpu='0'"],
        f"{PPO}: spec.runtime.worker.cpu",
        'is "0", expected more than 0',
    ),
    "memory for CPUs": (
        [f"{PPO}:runtime.worker.cpu=4Gi"],
        f"{PPO}: spec.runtime.worker.cpu",
        'is "4Gi" (text), expected a number of CPUs such as 500m or 4',
    ),
    "a variable of the operator's": (
        [f"{PPO}:runtime.env=[{{name: RLHF_ATTEMPT, value: '7'}}]"],
        f"{PPO}: spec.runtime.env.0.name",
        'is "RLHF_ATTEMPT"; names that begin with RLHF_ are the operator\'s own',
    ),
    "an argument that is too deep": (
        [f"{PPO}:evaluation={{data: {{uri: hf://x}}, functions: [{{name: f, entrypoint: a:b, arguments: {DEEP}}}]}}"],
        f"{PPO}: spec.evaluation.functions.0.arguments",
        "holds more than 16 mappings and lists within each other",
    ),
    "data from a job": (
        [f"{SFT}:data.train.uri=job://helpful-ppo"],
        f"{SFT}: spec.data.train.uri",
        '"helpful-ppo" is a job of PPO, expected Generate',
    ),
    "a project that W&B refuses": (
        [f"{PPO}:outputs={{wandb: {{project: 'a%b'}}}}"],
        f"{PPO}: spec.outputs.wandb.project",
        'is "a%b" (text), expected a name without / \\ # ? % :',
    ),
    "an entry point without a function": (
        [f"{PPO}:evaluation={{data: {{uri: hf://x}}, functions: [{{name: rule, entrypoint: a.b}}]}}"],
        f"{PPO}: spec.evaluation.functions.0.entrypoint",
        'is "a.b" (text), expected module.path:function',
    ),
    "a label that is a number": (
        [f"{SFT}:metadata.labels={{1: 2}}"],
        f"{SFT}: metadata.labels.1",
        "is 2 (a number), expected text",
    ),
    "a role the algorithm has not": (
        [f"{SFT}:models.critic={{uri: hf://x}}"],
        f"{SFT}: spec.models.critic",
        "SFT has no critic; it uses actor",
    ),
    "a role that is missing": ([f"{PPO}:models.critic="], f"{PPO}: spec.models.critic", "is missing, PPO needs it"),
    "an optimizer for the reward model of PPO": (
        [f"{PPO}:models.reward.optimizer={{}}"],
        f"{PPO}: spec.models.reward.optimizer",
        "PPO does not train the reward",
    ),
    "gradient checkpointing for the reference": (
        [f"{PPO}:models.reference={{uri: hf://x, gradientCheckpointing: true}}"],
        f"{PPO}: spec.models.reference.gradientCheckpointing",
        "PPO does not train the reference",
    ),
    "an adaptive controller without a target": (
        [f"{PPO}:algorithm.kl.controller=Adaptive"],
        f"{PPO}: spec.algorithm.kl.target",
        "is missing, controller Adaptive needs it",
    ),
    "a target for a fixed coefficient": (
        [f"{PPO}:algorithm.kl.target=6"],
        f"{PPO}: spec.algorithm.kl.target",
        "is not for controller Fixed",
    ),
    "pretraining rows without a weight": (
        [f"{PPO}:data.pretrain={{uri: hf://x}}"],
        f"{PPO}: spec.algorithm.pretrainCoefficient",
        "is missing, data.pretrain needs it",
    ),
    "a weight without pretraining rows": (
        [f"{PPO}:algorithm.pretrainCoefficient=1.0"],
        f"{PPO}: spec.data.pretrain",
        "is missing, algorithm.pretrainCoefficient needs it",
    ),
    "pretraining rows where there is no such loss": (
        [f"{SFT}:data.pretrain={{uri: hf://x}}"],
        f"{SFT}: spec.data.pretrain",
        "is for PPO, SafeRLHF or VAPO only, not for SFT",
    ),
    "a reward model as cost model": (
        [f"{PPO}:algorithm.name=SafeRLHF", f"{PPO}:models.cost={{uri: job://helpful-reward}}"],
        f"{PPO}: spec.models.cost.uri",
        '"helpful-reward" is a job of RewardModel, expected CostModel',
    ),
    "one response to compare": (
        [f"{PPO}:algorithm.name=GRPO", f"{PPO}:models.critic=", f"{PPO}:rollout.samplesPerPrompt=1", MINI],
        f"{PPO}: spec.rollout.samplesPerPrompt",
        "is 1, but GRPO compares the responses to a prompt; expected at least 2",
    ),
    "a ratio of the sequence where tokens have advantages of their own": (
        [f"{PPO}:algorithm.ratio=Sequence"],
        f"{PPO}: spec.algorithm.ratio",
        "unknown field for PPO; it is for GRPO only",
    ),
    "a ratio of the response whose tokens are averaged over the batch": (
        [f"{PPO}:algorithm={{name: GRPO, ratio: Sequence, aggregation: TokenMean}}", *SAMPLED],
        f"{PPO}: spec.algorithm.aggregation",
        "is TokenMean; ratio Sequence needs SequenceMean",
    ),
    "a mini-batch that cuts the responses to a prompt": (
        [f"{PPO}:algorithm={{name: OnlineDPO}}", *SAMPLED, f"{PPO}:training.miniBatchSize=2"],
        f"{PPO}: spec.training.miniBatchSize",
        "is 2; OnlineDPO makes a pair of the 4 responses to a prompt, expected a multiple of that",
    ),
    "a multiplier that begins above its largest": (
        [f"{PPO}:algorithm={{name: SafeRLHF, lagrange: {{initial: 10}}}}", f"{PPO}:models.cost={{uri: hf://cost}}"],
        f"{PPO}: spec.algorithm.lagrange.initial",
        "is 10.0, more than maximum (5.0)",
    ),
    "a buffer longer than the response": (
        [f"{PPO}:algorithm.rewards.overlongPenalty={{bufferTokens: 2000}}"],
        f"{PPO}: spec.algorithm.rewards.overlongPenalty.bufferTokens",
        "is 2000, more than data.maxResponseTokens (1024)",
    ),
    "a cap that is no cap": (
        [f"{PPO}:algorithm.rolloutCorrection={{cap: 1}}"],
        f"{PPO}: spec.algorithm.rolloutCorrection.cap",
        "is 1, expected more than 1",
    ),
    "steps and epochs": (
        [f"{PPO}:training.totalEpochs=1"],
        f"{PPO}: spec.training",
        "expected exactly one of totalSteps and totalEpochs",
    ),
    "neither steps nor epochs": (
        [f"{PPO}:training.totalSteps="],
        f"{PPO}: spec.training",
        "expected exactly one of totalSteps and totalEpochs",
    ),
    "RL without prompts": (
        [f"{PPO}:training.promptBatchSize="],
        f"{PPO}: spec.training.promptBatchSize",
        "is missing, PPO needs it",
    ),
    "rows for RL": (
        [f"{PPO}:training.batchSize=8"],
        f"{PPO}: spec.training.batchSize",
        "is not for PPO; use promptBatchSize",
    ),
    "prompts for SFT": (
        [f"{SFT}:training.promptBatchSize=8"],
        f"{SFT}: spec.training.promptBatchSize",
        "is not for SFT; use batchSize",
    ),
    "mini-batches for SFT": (
        [f"{SFT}:training.miniBatchSize=8"],
        f"{SFT}: spec.training.miniBatchSize",
        "is for RL only, SFT generates no responses",
    ),
    "update epochs for SFT": (
        [f"{SFT}:training.updateEpochs=2"],
        f"{SFT}: spec.training.updateEpochs",
        "is for RL only, SFT generates no responses",
    ),
    "sampling for a reward model": (
        [f"{REWARD}:rollout.temperature=0.5"],
        f"{REWARD}: spec.rollout",
        "is for RL only, RewardModel generates no responses",
    ),
    "functions for SFT": (
        [f"{SFT}:evaluation={{data: {{uri: hf://x}}, functions: [{{name: rule, entrypoint: a.b:c}}]}}"],
        f"{SFT}: spec.evaluation.functions",
        "is for RL only, SFT generates no responses",
    ),
    "mini-batches that do not divide": (
        [f"{PPO}:training.miniBatchSize=24"],
        f"{PPO}: spec.training.miniBatchSize",
        "is 24, which does not divide the 32 sequences of a step (promptBatchSize times samplesPerPrompt)",
    ),
    "a shortest response longer than the longest": (
        [f"{PPO}:rollout.minResponseTokens=2000"],
        f"{PPO}: spec.rollout.minResponseTokens",
        "is 2000, more than data.maxResponseTokens (1024)",
    ),
    "generation cut in more shards than training": (
        [f"{PPO}:models.actor.parallelism.tensor=2", f"{PPO}:rollout.tensorParallel=3"],
        f"{PPO}: spec.rollout.tensorParallel",
        "is 3, which does not divide models.actor.parallelism.tensor, 2",
    ),
    "generation cut in other stages than training": (
        [f"{PPO}:models.actor.parallelism.pipeline=3", f"{PPO}:rollout.pipelineParallel=2"],
        f"{PPO}: spec.rollout.pipelineParallel",
        "is 2, which does not divide models.actor.parallelism.pipeline, 3",
    ),
    "manual placement without pools": (
        [f"{PPO}:placement.mode=Manual"],
        f"{PPO}: spec.placement.pools",
        "is missing, mode Manual needs it",
    ),
    "pools with automatic placement": (
        [f"{SFT}:placement.pools=[{{name: a, models: [actor], slotsPerNode: 1}}]"],
        f"{SFT}: spec.placement.pools",
        "is for mode Manual only",
    ),
    "a pool without models": (
        [f"{SFT}:{POOLS}{{name: a, models: [], slotsPerNode: 1}}]}}"],
        f"{SFT}: spec.placement.pools.0.models",
        "is empty",
    ),
    "an unknown role in a pool": (
        [f"{SFT}:{POOLS}{{name: a, models: [rolout], slotsPerNode: 1}}]}}"],
        f"{SFT}: spec.placement.pools.0.models.0",
        'is "rolout" (text), expected actor, critic, reference, reward, cost, teacher or rollout',
    ),
    "a model in no pool": (
        [f"{PPO}:{POOLS}{{name: a, models: [actor, critic, reward], slotsPerNode: 1}}]}}"],
        f"{PPO}: spec.placement.pools",
        "reference is in no pools, expected exactly one",
    ),
    "a model in two pools": (
        [
            (
                f"{SFT}:{POOLS}{{name: a, models: [actor], slotsPerNode: 1}}, "
                "{name: b, models: [actor], slotsPerNode: 1}]}"
            )
        ],
        f"{SFT}: spec.placement.pools",
        "actor is in 2 pools, expected exactly one",
    ),
    "a pool for a role the algorithm has not": (
        [f"{SFT}:{POOLS}{{name: a, models: [actor, critic], slotsPerNode: 1}}]}}"],
        f"{SFT}: spec.placement.pools.0.models",
        "SFT has no critic",
    ),
    "a model twice in one pool": (
        [f"{SFT}:{POOLS}{{name: a, models: [actor, actor], slotsPerNode: 1}}]}}"],
        f"{SFT}: spec.placement.pools.0.models",
        "has the actor more than once",
    ),
    "the cost critic in a pool": (
        [f"{SFT}:{POOLS}{{name: a, models: [actor, cost_critic], slotsPerNode: 1}}]}}"],
        f"{SFT}: spec.placement.pools.0.models.1",
        'is "cost_critic" (text), expected actor, critic, reference, reward, cost, teacher or rollout',
    ),
    "a reward without a model in a pool": (
        [
            f"{PPO}:models.reward={{entrypoint: a.b:c}}",
            f"{PPO}:{POOLS}{{name: a, models: [actor, critic, reference, reward], slotsPerNode: 1}}]}}",
        ],
        f"{PPO}: spec.placement.pools.0.models",
        "the reward is a function, and only models live in pools",
    ),
    "a pool without slots": (
        [f"{SFT}:{POOLS}{{name: a, models: [actor], slotsPerNode: 0}}]}}"],
        f"{SFT}: spec.placement.pools.0.slotsPerNode",
        "is 0, expected at least 1",
    ),
    "moments of a model that has none": (
        [f"{PPO}:models.reward.offload=All"],
        f"{PPO}: spec.models.reward.offload",
        "is All, but PPO does not train the reward; expected None or Parameters",
    ),
    "an offload that is no choice": (
        [f"{PPO}:models.actor.offload=yes"],
        f"{PPO}: spec.models.actor.offload",
        "is true (true or false), expected None, Parameters, Optimizer, All or OptimizerInHost",
    ),
    "two pools of one name": (
        [
            (
                f"{PPO}:{POOLS}{{name: a, models: [actor, critic], slotsPerNode: 1}}, "
                "{name: a, models: [reward, reference], slotsPerNode: 1}]}"
            )
        ],
        f"{PPO}: spec.placement.pools.1.name",
        '"a" is used twice',
    ),
    "two functions of one name": (
        [
            (
                f"{PPO}:evaluation={{data: {{uri: hf://x}}, functions: "
                "[{name: f, entrypoint: a:b}, {name: f, entrypoint: a:c}]}"
            )
        ],
        f"{PPO}: spec.evaluation.functions.1.name",
        '"f" is used twice',
    ),
    "a job that is not there": (
        [f"{PPO}:models.actor.uri=job://helpful-stf"],
        f"{PPO}: spec.models.actor.uri",
        'no job of this file, or finished in the run folder, is named "helpful-stf"; did you mean helpful-sft?',
    ),
    "a job that reads itself": (
        [f"{SFT}:models.actor.uri=job://helpful-sft"],
        f"{SFT}: spec.models.actor.uri",
        "refers to its own job",
    ),
    "an SFT as reward": (
        [f"{PPO}:models.reward.uri=job://helpful-sft"],
        f"{PPO}: spec.models.reward.uri",
        '"helpful-sft" is a job of SFT, expected RewardModel',
    ),
    "a reward model as actor": (
        [f"{PPO}:models.actor.uri=job://helpful-reward"],
        f"{PPO}: spec.models.actor.uri",
        f'"helpful-reward" is a job of RewardModel, expected SFT, {MAKERS}',
    ),
    "an actor as critic": (
        [f"{REWARD}:models.reward.uri=job://helpful-ppo"],
        f"{REWARD}: spec.models.reward.uri",
        '"helpful-ppo" is a job of PPO, expected RewardModel or SFT',
    ),
    "jobs that wait for each other": (
        [f"{SFT}:models.actor.uri=job://helpful-ppo"],
        f"{PPO}: spec",
        "jobs wait for each other: helpful-ppo -> helpful-sft -> helpful-ppo",
    ),
    "a name that is used twice": (
        [f"{SFT}:metadata.name=helpful-ppo"],
        f"{PPO}: metadata.name",
        "is used by 2 documents",
    ),
    "an override for a job that is not there": (
        ["helpful-pppo:training.seed=1"],
        "--set helpful-pppo:training.seed=1",
        'no job is named "helpful-pppo"; did you mean helpful-ppo?',
    ),
    "an override of a path that cannot be": (
        ["kind.seed=1"],
        "--set kind.seed=1",
        "there is no such path",
    ),
    "an override without a value": (
        ["training.seed"],
        "--set training.seed",
        "expected path=value or NAME:path=value",
    ),
    "an override without a path": (["=1"], "--set =1", "expected path=value or NAME:path=value"),
    "an override with two values": (
        ["training.seed=1\n---\n2"],
        "--set training.seed=1\n---\n2",
        "holds 2 YAML documents, expected one",
    ),
}

JARGON = re.compile(r"Input should|pydantic|https?://|validation|union|literal\[|constrained", re.IGNORECASE)


@each_case(("overrides", "path", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_names_its_path(chain: str, overrides: list[str], path: str, message: str) -> None:
    with pytest.raises(SpecError) as raised:
        load(chain, overrides)
    assert [(problem.path, problem.message) for problem in raised.value.problems] == [(path, message)]
    assert str(raised.value) == f"{path}: {message}".replace("\n", " ")
    assert not JARGON.search(message)
    assert raised.value.exit_code is ExitCode.SPEC


WRITES = """
---
apiVersion: rlhf.hybridflow.io/v1alpha1
kind: RLHFJob
metadata: {name: written}
spec:
  algorithm: {name: Generate}
  models: {actor: {uri: "hf://gpt2"}, reward: {verifier: {name: Math, answerKey: answer}}}
  data: {train: {uri: "hf://sums", promptKey: question, toolsKey: tools, columns: [level]}}
  rollout: {samplesPerPrompt: 4}
  training: {totalEpochs: 1, promptBatchSize: 8}
"""


def test_columns_that_another_job_will_not_write_are_told(chain: str) -> None:
    def told(changes: str, data: str, job: str = SFT) -> list[tuple[str, str]]:
        mix = f"{job}:data.train={{mix: [{{uri: hf://a}}, {{uri: job://written, {data}}}]}}"
        sets = [f"written:{each}" for each in changes.split() if each]
        try:
            load(chain + WRITES, [*sets, mix])
        except SpecError as error:
            return [(each.path, each.message) for each in error.problems]
        return []

    first, there = "spec.data.train.mix.1", "answer, finished, level, prompt, response, response_tokens, reward"
    lacks = f"expected {there}, reward_parts, sample or tools"
    assert told("", "") == [
        (f"{SFT}: {first}.responseKey", f'"written" with rows: Responses writes no column "chosen", {lacks}')
    ]
    assert told("", "responseKey: level, promptKey: answer, toolsKey: tools") == []
    assert told("", "responseKey: response, promptKey: question") == [
        (f"{SFT}: {first}.promptKey", f'"written" with rows: Responses writes no column "question", {lacks}')
    ]
    assert [path for path, _ in told("", "messagesKey: talk")] == [f"{SFT}: {first}.messagesKey"]
    assert [path for path, _ in told("", "", REWARD)] == [
        f"{REWARD}: {first}.{key}" for key in ("chosenKey", "rejectedKey")
    ]
    assert told("algorithm.rows=Pairs", "", REWARD) == []
    assert [path for path, _ in told("algorithm.rows=Pairs", "rejectedKey: worse", REWARD)] == [
        f"{REWARD}: {first}.rejectedKey"
    ]


def test_every_mistake_is_reported_at_once(chain: str) -> None:
    with pytest.raises(SpecError) as raised:
        load(chain, [f"{PPO}:training.miniBatchSize=24", f"{PPO}:algorithm.kl.target=6", f"{SFT}:training.seed=-1"])
    assert [problem.path for problem in raised.value.problems] == [
        "helpful-ppo: spec.algorithm.kl.target",
        "helpful-ppo: spec.training.miniBatchSize",
        "helpful-sft: spec.training.seed",
    ]


def test_the_best_of_what_is_not_trained_is_refused_once_for_all() -> None:
    with pytest.raises(SpecError) as raised:
        Job.parse(made("Generate", ("checkpoint.keepBest=reward",)))
    refused = "is not for Generate, which trains nothing and keeps what it writes"
    assert str(raised.value) == f"spec.checkpoint.keepBest: {refused}"


def test_no_argument_is_too_deep_to_be_refused() -> None:
    deep: object = 1
    for _ in range(100_000):
        deep = [deep]
    document = made("PPO", (FUNCTION,))
    document["spec"]["models"]["reward"]["arguments"] = {"a": deep}
    with pytest.raises(SpecError, match="within each other"):
        Job.parse(document)
