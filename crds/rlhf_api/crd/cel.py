"""The rules of `rlhf_api.rules` in CEL, which a cluster's API server evaluates, at the paths of what they read."""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from rlhf_api.algorithm_table import ALGORITHMS
from rlhf_api.algorithms import ActorCritic, Algorithm
from rlhf_api.contract import FORMS, JOB_NAME, ONE_PACKAGE, PACKAGE_URI, UPWARDS, WITHIN
from rlhf_api.functions import RewardFunction, RewardService
from rlhf_api.job import Metadata
from rlhf_api.problems import choice
from rlhf_api.rules import MIN_COMPARED, OWN_VARIABLES
from rlhf_api.runtime import ENOUGH_MEMORY, LEAST_MEMORY
from rlhf_api.spec import Rollout, Training


@dataclass(frozen=True)
class Rule:
    """What must be true of `self`, the value at a path; `field`, below it, is what the message is about."""

    rule: str
    message: str
    field: str = ""

    def document(self) -> dict[str, str]:
        """The entry of x-kubernetes-validations."""
        return {"rule": self.rule, "message": self.message} | ({"fieldPath": f".{self.field}"} if self.field else {})


LONGEST_NAME = next(each.max_length for each in Metadata.model_fields["name"].metadata if hasattr(each, "max_length"))


def _is(test: Callable[[type[Algorithm]], bool]) -> str:
    """CEL, at the spec: whether the algorithm is one of which the test is true."""
    return f"self.algorithm.name in {[name for name, each in ALGORITHMS.items() if test(each)]}"


def _names(role: str) -> str:
    return choice(name for name, each in ALGORITHMS.items() if role in each.trained + each.frozen)


def _offline(algorithm: type[Algorithm]) -> bool:
    return algorithm.offline


def _uses(role: str) -> str:
    return _is(lambda each: role in each.trained + each.frozen)


def _compares(algorithm: type[Algorithm]) -> bool:
    """Whatever its options are."""
    return algorithm.comparing == {}


OFFLINE = _is(_offline)
ACTOR_CRITIC = _is(lambda each: issubclass(each, ActorCritic))
USED = {role: _uses(role) for role in ("actor", "critic", "reward", "cost")}
REWARD_MODEL = "has(self.models.reward.uri) || has(self.models.reward.sum) && self.models.reward.sum.exists(term, {})"
HOMES = {
    **USED,
    "reference": _uses("reference"),
    "reward": f"has(self.models.reward) && ({REWARD_MODEL.format('has(term.reward.uri)')})",
}
"""Whether a role is a model of the job, and so has a place in a pool."""
UNTRAINED = (
    "(!has({0}.optimizer) && (!has({0}.gradientCheckpointing) || !{0}.gradientCheckpointing) && "
    "(!has({0}.offload) || {0}.offload in ['None', 'Parameters']))"
)
PATIENCE = (
    "(has({0}.timeoutSeconds) ? {0}.timeoutSeconds : has({0}.url) ? "
    f"{RewardService.model_fields['timeout_seconds'].default} : "
    f"{RewardFunction.model_fields['timeout_seconds'].default}) < double(self.training.callDeadlineSeconds)"
)
HUNG = "expected less than training.callDeadlineSeconds"
WEIGHT = "algorithm.pretrainCoefficient"
RL_ONLY = "is for RL only; this algorithm generates no responses"


def _roles() -> list[Rule]:
    needed = [
        Rule(
            f"has(self.models.{role}) == ({test})",
            f"is for {_names(role)}, which need it",
            f"models.{role}",
        )
        for role, test in USED.items()
    ]
    return [
        *needed,
        Rule(
            f"!has(self.models.reference) || {HOMES['reference']}",
            "the algorithm has no reference",
            "models.reference",
        ),
    ]


def _training_of_models() -> list[Rule]:
    """Only trained models say how to train; the actor and the critic always are."""
    reward, cost = "self.models.reward", "self.models.cost"
    untrained = "the algorithm does not train it: no optimizer, no gradientCheckpointing, offload None or Parameters"
    return [
        Rule(
            f"!has({reward}) || self.algorithm.name != 'RewardModel' || has({reward}.uri)",
            "RewardModel trains a model, which has a uri",
            "models.reward",
        ),
        Rule(
            f"!has({reward}) || self.algorithm.name == 'RewardModel' || {UNTRAINED.format(reward)}",
            untrained,
            "models.reward",
        ),
        Rule(
            f"!has({cost}) || self.algorithm.name == 'CostModel' || {UNTRAINED.format(cost)}", untrained, "models.cost"
        ),
    ]


def _batches() -> list[Rule]:
    sequences = "(self.training.promptBatchSize * self.rollout.samplesPerPrompt)"
    mini = "!has(self.training.miniBatchSize)"
    return [
        Rule(
            f"has(self.training.promptBatchSize) == !({OFFLINE})",
            "promptBatchSize is needed in RL and refused otherwise",
            "training.promptBatchSize",
        ),
        Rule(
            f"has(self.training.batchSize) == ({OFFLINE})",
            "batchSize is refused in RL and needed otherwise",
            "training.batchSize",
        ),
        Rule(
            f"{mini} || !has(self.training.promptBatchSize) || {sequences} % self.training.miniBatchSize == 0",
            "does not divide the sequences of a step (promptBatchSize times samplesPerPrompt)",
            "training.miniBatchSize",
        ),
        Rule(
            f"self.algorithm.name != 'OnlineDPO' || {mini} || "
            "self.training.miniBatchSize % self.rollout.samplesPerPrompt == 0",
            "OnlineDPO makes a pair of the responses to a prompt, expected a multiple of rollout.samplesPerPrompt",
            "training.miniBatchSize",
        ),
        Rule(f"{mini} || !({OFFLINE})", RL_ONLY, "training.miniBatchSize"),
        Rule(
            f"self.training.updateEpochs == {Training.model_fields['update_epochs'].default} || !({OFFLINE})",
            RL_ONLY,
            "training.updateEpochs",
        ),
    ]


def _sampling() -> list[Rule]:
    compares = f"{_is(_compares)} || has(self.algorithm.baseline) && self.algorithm.baseline == 'Group'"
    defaults = " && ".join(
        f"!has(self.rollout.{field.alias})"
        if field.default is None
        else f"self.rollout.{field.alias} == {field.default}"
        for field in Rollout.model_fields.values()
    )
    penalty = "self.algorithm.rewards.overlongPenalty"
    return [
        Rule(f"!({OFFLINE}) || {defaults}", RL_ONLY, "rollout"),
        Rule(
            f"!({OFFLINE}) || !has(self.evaluation) || self.evaluation.functions.size() == 0",
            RL_ONLY,
            "evaluation.functions",
        ),
        Rule(
            f"!({compares}) || self.rollout.samplesPerPrompt >= {MIN_COMPARED}",
            f"the algorithm compares the responses to a prompt, expected at least {MIN_COMPARED}",
            "rollout.samplesPerPrompt",
        ),
        Rule(
            "self.rollout.minResponseTokens <= self.data.maxResponseTokens",
            "is more than data.maxResponseTokens",
            "rollout.minResponseTokens",
        ),
        Rule(
            f"!has(self.algorithm.rewards) || !has({penalty}) || {penalty}.bufferTokens <= self.data.maxResponseTokens",
            "is more than data.maxResponseTokens",
            "algorithm.rewards.overlongPenalty.bufferTokens",
        ),
        *(_divides(f"{size}Parallel", size) for size in ("tensor", "pipeline")),
    ]


def _divides(field: str, size: str) -> Rule:
    """A rank's training shard lies in its generation shard (HybridFlow section 5.3)."""
    whole = f"(has(self.models.actor.parallelism) ? self.models.actor.parallelism.{size} : 1)"
    mapped = "self.placement.mode == 'Auto' && !has(self.models.actor.parallelism)"
    return Rule(
        f"!has(self.models.actor) || !has(self.rollout.{field}) || {mapped} || {whole} % self.rollout.{field} == 0",
        f"does not divide models.actor.parallelism.{size}",
        f"rollout.{field}",
    )


def _pretraining() -> list[Rule]:
    data, weight = "has(self.data.pretrain)", f"has(self.{WEIGHT})"
    return [
        Rule(f"!{data} || {ACTOR_CRITIC}", "is for PPO and SafeRLHF only", "data.pretrain"),
        Rule(f"!{data} || !({ACTOR_CRITIC}) || {weight}", "is missing, data.pretrain needs it", WEIGHT),
        Rule(f"{data} || !{weight}", f"is missing, {WEIGHT} needs it", "data.pretrain"),
    ]


def _placement() -> list[Rule]:
    homes = [
        Rule(
            "self.placement.pools.size() == 0 || "
            f"self.placement.pools.filter(pool, '{role}' in pool.models).size() == ({test} ? 1 : 0)",
            f"the {role} belongs in exactly one pool if it is a model of the job, and otherwise in none",
            "placement.pools",
        )
        for role, test in HOMES.items()
    ]
    return [
        *homes,
        Rule(
            "!has(self.resources.maxNodes) || self.placement.mode == 'Auto'",
            "is for placement.mode Auto only",
            "resources.maxNodes",
        ),
    ]


def _patience() -> list[Rule]:
    reward = "self.models.reward"
    return [
        Rule(
            f"!has({reward}) || has({reward}.uri) || has({reward}.sum) || {PATIENCE.format(reward)}",
            f"timeoutSeconds: {HUNG}",
            "models.reward",
        ),
        Rule(
            f"!has({reward}) || !has({reward}.sum) || "
            f"{reward}.sum.all(term, has(term.reward.uri) || {PATIENCE.format('term.reward')})",
            f"timeoutSeconds: {HUNG}",
            "models.reward.sum",
        ),
        Rule(
            "!has(self.evaluation) || self.evaluation.functions.all(each, "
            "each.timeoutSeconds < double(self.training.callDeadlineSeconds))",
            f"timeoutSeconds: {HUNG}",
            "evaluation.functions",
        ),
    ]


URIS = (
    *(f"spec.models.{role}.uri" for role in ("actor", "critic", "reference", "reward", "cost")),
    "spec.models.reward.sum[].reward.uri",
    *(f"spec.{place}.uri" for place in ("data.train", "data.pretrain", "evaluation.data")),
)
OF_ONE_PACKAGE = Rule(f"!self.startsWith('package://') || self.matches(r'{PACKAGE_URI}')", ONE_PACKAGE)
WITHIN_ITSELF = Rule(f"!self.matches(r'{UPWARDS}')", WITHIN)
SOME_CPUS = Rule("quantity(self).isGreaterThan(quantity('0'))", "expected more than 0")
SOME_MEMORY = Rule(f"quantity(self).compareTo(quantity('{LEAST_MEMORY}')) >= 0", ENOUGH_MEMORY)


CEL: MappingProxyType[str, list[Rule]] = MappingProxyType(
    {
        "": [
            Rule(
                f"size(self.metadata.name) <= {LONGEST_NAME} && self.metadata.name.matches('{JOB_NAME}')",
                f"metadata.name: expected at most {LONGEST_NAME} characters: {FORMS[JOB_NAME]}",
            )
        ],
        "spec": [
            *_roles(),
            *_training_of_models(),
            *_batches(),
            *_sampling(),
            *_pretraining(),
            *_placement(),
            *_patience(),
        ],
        "spec.algorithm": [
            Rule(
                "!has(self.kl) || self.kl.controller != 'Adaptive' || "
                "(has(self.kl.applyTo) ? self.kl.applyTo == 'Reward' : self.name != 'GRPO')",
                "Adaptive is for applyTo Reward only",
                "kl.controller",
            ),
            Rule(
                "!has(self.ratio) || self.ratio != 'Sequence' || !has(self.aggregation) || "
                "self.aggregation == 'SequenceMean'",
                "ratio Sequence needs SequenceMean",
                "aggregation",
            ),
        ],
        "spec.algorithm.kl": [
            Rule("(self.controller == 'Adaptive') == has(self.target)", "target goes with controller Adaptive")
        ],
        "spec.algorithm.lagrange": [Rule("self.initial <= self.maximum", "is more than maximum", "initial")],
        "spec.models.reference": [
            Rule(UNTRAINED.format("self"), "is not trained: no optimizer, no gradientCheckpointing, no such offload")
        ],
        "spec.models.reward": [
            Rule(
                "!has(self.sum) || self.sum.filter(term, has(term.reward.uri)).size() <= 1",
                "a sum has one model at most",
                "sum",
            )
        ],
        "spec.models.reward.sum[].weight": [Rule("self != 0.0", "expected another number than 0")],
        "spec.models.reward.sum[].reward": [Rule(UNTRAINED.format("self"), "the reward is not trained")],
        "spec.rollout.topK": [Rule("self != 0", "expected -1 (all tokens) or at least 1")],
        "spec.training": [
            Rule("has(self.totalSteps) != has(self.totalEpochs)", "expected exactly one of totalSteps and totalEpochs")
        ],
        "spec.evaluation.functions[].name": [
            Rule("!(self in ['reward', 'cost'])", "reward and cost are taken; choose another name")
        ],
        "spec.resources": [
            Rule("!has(self.maxNodes) || self.maxNodes >= self.nodes", "is fewer than resources.nodes", "maxNodes")
        ],
        "spec.placement": [
            Rule(
                "(self.mode == 'Manual') == (self.pools.size() > 0)",
                "pools are needed with mode Manual and refused with Auto",
                "pools",
            )
        ],
        "spec.runtime.env[]": [
            Rule("has(self.value) != has(self.secret)", "expected exactly one of value and secret"),
            Rule(
                f"!self.name.startsWith('{OWN_VARIABLES}')",
                f"names that begin with {OWN_VARIABLES} are the operator's own",
                "name",
            ),
        ],
        "spec.runtime.sharedMemory": [SOME_MEMORY],
        **{f"spec.runtime.{pod}.cpu": [SOME_CPUS] for pod in ("controller", "worker")},
        **{f"spec.runtime.{pod}.memory": [SOME_MEMORY] for pod in ("controller", "worker")},
        **{uri: [OF_ONE_PACKAGE, WITHIN_ITSELF] for uri in URIS},
        "spec.checkpoint.storage": [WITHIN_ITSELF],
        "spec.runtime.tolerations[]": [
            Rule("self.operator == 'Equal' || !has(self.value)", "is for operator Equal only", "value"),
            Rule("self.operator == 'Exists' || has(self.key)", "is missing, operator Equal needs it", "key"),
        ],
    }
)
"""Path in the custom resource (`[]`: each entry of a list) -> rules."""
