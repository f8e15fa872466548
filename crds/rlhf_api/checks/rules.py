"""Rules that span several fields of a spec. `rlhf validate` and a cluster's API server evaluate the same ones."""

import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import reduce
from typing import get_args

from pydantic import BaseModel
from pydantic.alias_generators import to_camel

from rlhf_api.checks.agent_rules import MAKES_DATA, MODELS_OF_SUM, REWARD_MODEL, agents, sums_over_rows
from rlhf_api.checks.code_rules import AGENT, ENVIRONMENT, SAMPLES, TOOLS, pods, user_code
from rlhf_api.checks.log_prob_rules import STALE, corrections, log_probs, steering
from rlhf_api.checks.merge_rules import MERGES, merges
from rlhf_api.checks.parallel_rules import compression, experts_of_actor, sizes_of_generation
from rlhf_api.checks.rule import NAME, Rule, algorithm
from rlhf_api.checks.speculation_rules import speculation
from rlhf_api.checks.teacher_rules import ON_SERVERS, distillation
from rlhf_api.expressions import Expression, Field
from rlhf_api.names import PlacedRole, Role
from rlhf_api.problems import Problem, choice
from rlhf_api.spec.algorithm_table import ALGORITHMS
from rlhf_api.spec.algorithms import ActorCritic, Algorithm, Distilling, PolicyGradient, Writing
from rlhf_api.spec.job_spec import JobSpec, Training
from rlhf_api.spec.rollout import Rollout

ROLES: tuple[PlacedRole, ...] = get_args(PlacedRole)


def rule_problems(spec: JobSpec) -> list[Problem]:
    """Return a spec's breaches of the rules that span several fields, with paths that start at `spec`."""
    problems = [*(problem for rule in RULES for problem in rule.problems(spec)), *_repeated(spec), *_taken(spec)]
    return [_in_manifest(problem, spec).within("spec.") for problem in problems]


def _in_manifest(problem: Problem, spec: JobSpec) -> Problem:
    """Return the problem with its manifest path: options of a user's own algorithm lie under `algorithm.options`."""
    first, _, rest = problem.path.partition(".")
    is_option = spec.algorithm.is_own and first == "algorithm"
    return Problem(f"algorithm.options.{rest}", problem.message) if is_option else problem


def used_roles(spec: JobSpec) -> tuple[Role, ...]:
    """Return the roles of the models that the algorithm trains, then of the models that it only reads."""
    roles, models = spec.algorithm.trained + spec.algorithm.frozen, spec.models
    no_model = models.reward is not None or spec.algorithm.may_lack_reward or spec.rollout.gives_reward
    is_left_out = {
        "reward": no_model and "reward" not in models.by_role(),
        "teacher": bool(models.teacher_endpoints) and models.teacher is None,
        "reference": reference_is_actor(spec) or not reads_reference(spec),
    }
    return tuple(role for role in roles if not is_left_out.get(role))


def reads_reference(spec: JobSpec) -> bool:
    """Whether the algorithm reads a reference, be it a model of its own or the actor without its adapter."""
    is_asked_for = spec.models.reference is not None or spec.algorithm.needs_reference
    return "reference" in spec.algorithm.frozen and is_asked_for


def reference_is_actor(spec: JobSpec) -> bool:
    """Whether a reference model, if the job has one, is the actor without its adapter."""
    return bool(REFERENCE_IS_ACTOR.of({"spec": spec}))


def _uses(role: str) -> Expression:
    """Return the expression that is true if the job uses this role; the reference may be the actor without adapter."""
    has = algorithm(lambda each: role in each.trained + each.frozen)
    if role != "reference":
        return has

    def asks(each: type[Algorithm]) -> bool:
        return not issubclass(each, PolicyGradient) or each.model_fields["kl"].default.coefficient > 0

    coefficient = Field("algorithm.kl.coefficient").or_else(algorithm(asks).then(1.0, 0.0))
    penal = Expression(lambda known: known["spec"].algorithm.needs_reference, (coefficient > 0.0).cel)
    return has & (Field("models.reference").is_given | penal)


OFFLINE, ONLINE = algorithm(lambda each: each.offline), algorithm(lambda each: not each.offline)
MAY_LACK_REWARD = algorithm(lambda each: each.may_lack_reward)
REWARD = Field("models.reward").is_given
FORM = {"form": Field("models.reward.form").or_else("an episode's")}
MODE = Field("placement.mode")
SAME_SOURCE = (
    Field(f"models.reference.{field}").or_else("") == Field(f"models.actor.{field}").or_else("")
    for field in ("uri", "revision")
)
REFERENCE_IS_ACTOR = Field("models.actor.lora").is_given & (
    ~Field("models.reference").is_given | reduce(operator.and_, SAME_SOURCE)
)
ROLLOUT_POOLS = Field("placement.pools").where(Field("models", "one").contains("rollout")).size()
ELSEWHERE = Field("rollout.endpoints").is_given
APART = (ROLLOUT_POOLS > 0) | ((MODE == "Auto") & STALE) | ELSEWHERE
OF_OWN_ENGINES = ("tensorParallel", "pipelineParallel", "gpuMemoryUtilization", "partial", "quantization", "kvCache")
NO_TURNS = {"rollout.environment": ~ENVIRONMENT, "rollout.tools": ~TOOLS, "rollout.agent": ~AGENT}
TRAIN_COLUMNS = ("data.train.columns", "data.train.mix[].columns")


def _models() -> Iterator[Rule]:
    used = {"used": Expression(lambda known: choice(used_roles(known["spec"]) or known["spec"].algorithm.trained), str)}
    for role in ROLES:
        given = REWARD_MODEL if role == "reward" else Field(f"models.{role}").is_given
        yield Rule(f"models.{role}", given.implies(_uses(role)), f"{{name}} has no {role}; it uses {{used}}", used)
    for role in ROLES:
        given = Field(f"models.{role}").is_given
        if role != "reference":
            elsewhere = {"reward": MAY_LACK_REWARD | ENVIRONMENT | AGENT, "teacher": ON_SERVERS}
            needed = _uses(role) & ~elsewhere.get(role, MERGES)
            yield Rule(f"models.{role}", needed.implies(given), "is missing, {name} needs it")
    rows, least = Field("algorithm.rows"), Field("algorithm.minReward")
    for option, asks in (("rows", rows.is_given & ~(rows == "Responses")), ("minReward", least.is_given)):
        yield Rule(f"algorithm.{option}", asks.implies(REWARD), "is {value}, but models.reward is missing")
    trains = algorithm(lambda each: "reward" in each.trained)
    message = "is {form}; {name} trains a model, which has a uri"
    yield Rule("models.reward", (trains & REWARD).implies(Field("models.reward.uri").is_given), message, FORM)
    yield Rule("models.reward", (REWARD & ~REWARD_MODEL).implies(_uses("reward")), "{name} has no reward")
    model, name = Field("models.reward.sum[].reward.uri"), Field("models.reward.sum[].name")
    is_first = model.is_given.implies(MODELS_OF_SUM.first_name() == name)
    yield Rule("models.reward.sum[].reward", is_first, "is the second model of the sum")
    for path in (*(f"models.{role}" for role in ROLES if role != "critic"), "models.reward.sum[].reward"):
        yield from _only_read(path, path.rpartition(".")[2])


def _only_read(path: str, role: str) -> Iterator[Rule]:
    read, untrained = algorithm(lambda each: role in each.frozen), f"{{name}} does not train the {role}"
    for part in ("optimizer", "lora"):
        yield Rule(f"{path}.{part}", read.implies(~Field(f"{path}.{part}").is_given), untrained)
    yield Rule(f"{path}.gradientCheckpointing", read.implies(~Field(f"{path}.gradientCheckpointing")), untrained)
    kept = Field(f"{path}.offload").one_of(("None", "Parameters"))
    message = f"is {{value}}, but {untrained}; expected None or Parameters"
    yield Rule(f"{path}.offload", read.implies(kept), message)


def _shapes() -> Iterator[Rule]:
    needed = ("hiddenSize", "numHiddenLayers", "numAttentionHeads", "intermediateSize", "vocabSize")
    for path in (*(f"models.{role}.shape" for role in ROLES), "models.reward.sum[].reward.shape"):
        numbers = reduce(operator.and_, (Field(f"{path}.{number}").is_given for number in needed))
        whole = Field(path).is_given.implies(Field(f"{path}.name").is_given | numbers)
        yield Rule(path, whole, f"expected a name, or {', '.join(needed[:-1])} and {needed[-1]}")


def _algorithm() -> Iterator[Rule]:
    default = algorithm(
        lambda each: issubclass(each, PolicyGradient) and each.model_fields["kl"].default.apply_to == "Loss"
    ).then("Loss", "Reward")
    in_reward = Field("algorithm.kl.applyTo").or_else(default) == "Reward"
    steers = Field("algorithm.kl.controller").one_of(("Coefficient", "Adaptive"))
    yield Rule("algorithm.kl.controller", steers.implies(in_reward), "{value} is for applyTo Reward only")
    penal = algorithm(lambda each: issubclass(each, Distilling)) & (Field("algorithm.kl.coefficient") > 0.0)
    message = "is {value}, but without models.reward there is no reward to subtract the penalty from; expected Loss"
    yield Rule("algorithm.kl.applyTo", (penal & in_reward).implies(REWARD | ENVIRONMENT), message)
    is_read = (Field("algorithm.loss") == "IPO").implies(Field("algorithm.labelSmoothing").or_else(0.0) == 0.0)
    yield Rule("algorithm.labelSmoothing", is_read, "is {value}, but the loss IPO does not use it")
    whole = (Field("algorithm.ratio") == "Sequence").implies(Field("algorithm.aggregation") == "SequenceMean")
    yield Rule("algorithm.aggregation", whole, "is {value}; ratio Sequence needs SequenceMean")
    first, most = Field("algorithm.lagrange.initial"), Field("algorithm.lagrange.maximum")
    yield Rule("algorithm.lagrange.initial", first <= most, "is {value}, more than maximum ({most})", {"most": most})


def _batches() -> Iterator[Rule]:
    one_length = Field("training.totalSteps").is_given != Field("training.totalEpochs").is_given
    yield Rule("training", MERGES | one_length, "expected exactly one of totalSteps and totalEpochs")
    for size, other, used in (("promptBatchSize", "batchSize", ONLINE), ("batchSize", "promptBatchSize", OFFLINE)):
        given = Field(f"training.{size}").is_given
        yield Rule(f"training.{size}", (used & ~MERGES).implies(given), "is missing, {name} needs it")
        yield Rule(f"training.{size}", given.implies(used), f"is not for {{name}}; use {other}")
    fused = Field("training.fuseUpdates") == Training.model_fields["fuse_updates"].default
    with_critic = algorithm(lambda each: issubclass(each, ActorCritic))
    yield Rule("training.fuseUpdates", fused | with_critic, "is {value}, but {name} has no critic to update")
    several = algorithm(lambda each: each.data == "labelled_completions").implies(Field("training.batchSize") >= 2)
    yield Rule("training.batchSize", several, "is {value}; {name} reads other rows' responses, expected at least 2")
    mini, sequences = Field("training.miniBatchSize"), Field("training.promptBatchSize") * SAMPLES
    whole = sequences % mini == 0
    message = "is {value}, which does not divide the {sequences} sequences of a step"
    message += " (promptBatchSize times samplesPerPrompt)"
    yield Rule("training.miniBatchSize", whole, message, {"sequences": sequences})
    message = "is {value}; {name} makes a pair of the {samples} responses to a prompt, expected a multiple of that"
    in_pairs = (whole & algorithm(lambda each: each.chooses_pairs)).implies(mini % SAMPLES == 0)
    yield Rule("training.miniBatchSize", in_pairs, message, {"samples": SAMPLES})


def _sampling() -> Iterator[Rule]:
    one_update = {
        "training.miniBatchSize": ~Field("training.miniBatchSize").is_given,
        "training.updateEpochs": Field("training.updateEpochs") == Training.model_fields["update_epochs"].default,
    }
    for path, unused in {
        **one_update,
        "rollout": _has_its_defaults("rollout", Rollout),
        "evaluation.functions": Field("evaluation.functions").size() == 0,
        "evaluation.verifiers": Field("evaluation.verifiers").size() == 0,
        "evaluation.samplesPerPrompt": Field("evaluation.samplesPerPrompt") == 1,
        "evaluation.greedy": ~(Field("evaluation.greedy") == True),  # noqa: E712 an expression
        **{path: Field(path).size() == 0 for path in (*TRAIN_COLUMNS, "evaluation.data.columns")},
        "evaluation.data.sets": Field("evaluation.data.sets").size() == 0,
    }.items():
        yield Rule(path, OFFLINE.implies(unused), "is for RL only, {name} generates no responses")
    for path, unused in {
        **one_update,
        "evaluation": ~Field("evaluation").is_given,
        "rollout.keep": Field("rollout.keep") == 0.0,
        "checkpoint.keepBest": ~Field("checkpoint.keepBest").is_given,
        "rollout.endpoints": ~ELSEWHERE,
        "rollout.weightStore": ~Field("rollout.weightStore").is_given,
        **NO_TURNS,
        "data.order": ~Field("data.order").is_given,
    }.items():
        yield Rule(path, MAKES_DATA.implies(unused), "is not for {name}, which trains nothing and keeps what it writes")
    alone = (Field("evaluation.greedy") == True).implies(Field("evaluation.samplesPerPrompt") == 1)  # noqa: E712
    yield Rule("evaluation.samplesPerPrompt", alone, "is {value}, but the responses of evaluation.greedy are the same")
    message = "is {value}, but {name} compares the responses to a prompt; expected at least 2"
    yield Rule("rollout.samplesPerPrompt", _compares().implies(SAMPLES >= 2), message)
    longest = Field("data.maxResponseTokens")
    for path in ("algorithm.rewards.overlongPenalty.bufferTokens", "rollout.minResponseTokens"):
        message = "is {value}, more than data.maxResponseTokens ({longest})"
        yield Rule(path, Field(path) <= longest, message, {"longest": longest})
    measured = MAKES_DATA | Field("checkpoint.keepBest").is_given.implies(Field("evaluation.everySteps").is_given)
    yield Rule("checkpoint.keepBest", measured, "is {value}, but evaluation.everySteps is missing")
    storage = Field("checkpoint.storage").or_else("")
    is_uploaded = storage.starts_with("s3:") | storage.starts_with("gs:")
    message = "is {value}, but only checkpoints in s3:// or gs:// are uploaded"
    yield Rule("checkpoint.uploadMBps", Field("checkpoint.uploadMBps").is_given.implies(is_uploaded), message)
    by_turn = algorithm(sums_over_rows)
    by_value = Field("algorithm.rewards.truncated") == "Value"
    plain = (Field("algorithm.rewards.normalization") == "None") & ~Field("algorithm.rewards.clip").is_given & ~by_value
    message = "has a normalization, clip or truncated: Value, but {name} learns from the rewards of single turns"
    yield Rule("algorithm.rewards", (ENVIRONMENT & by_turn).implies(plain), message)
    is_used = (Field("algorithm.rewards.truncatedValue") == 0.0) | by_value
    yield Rule("algorithm.rewards.truncatedValue", is_used, "is {value}, which is only for truncated: Value")
    mapped = (MODE == "Auto") & Field("models.actor").is_given & ~Field("models.actor.parallelism").is_given
    yield from sizes_of_generation(unless=mapped | APART)


def _compares() -> Expression:
    compares = algorithm(lambda each: each.comparing == {})
    for name, each in ALGORITHMS.items():
        if options := each.comparing:
            fields = {Field(f"algorithm.{to_camel(option)}").or_else(""): word for option, word in options.items()}
            compares |= reduce(operator.and_, (value == word for value, word in fields.items()), name == NAME)
    return Expression(lambda known: known["spec"].algorithm.compares_responses, compares.cel, compares.needs)


def _has_its_defaults(path: str, model: type[BaseModel]) -> Expression:
    fields = ((Field(f"{path}.{info.alias}"), info.default) for info in model.model_fields.values())
    return reduce(operator.and_, (~each.is_given if default is None else each == default for each, default in fields))


def _lengths() -> Iterator[Rule]:
    for kind in ("Prompt", "Response"):
        least, longest = f"data.min{kind}Tokens", Field(f"data.max{kind}Tokens")
        message = f"is {{value}}, more than data.max{kind}Tokens ({{longest}})"
        yield Rule(least, Field(least) <= longest, message, {"longest": longest})
    reads = OFFLINE | Field("data.pretrain").is_given | (Field("data.minResponseTokens") == 1)
    message = "is for responses that are read, {name} reads none; use rollout.minResponseTokens"
    yield Rule("data.minResponseTokens", reads, message)
    mix = Field("data.train.mix")
    weighted = mix.where(Field("weight", "one").is_given).size()
    all_or_none = (weighted == 0) | (weighted == mix.size())
    yield Rule("data.train.mix", all_or_none, "has a weight for some data sets, expected one for all or for none")


def _pretraining() -> Iterator[Rule]:
    def can(each: type[Algorithm]) -> bool:
        return "pretrain_coefficient" in each.model_fields

    rows, weight = Field("data.pretrain").is_given, Field("algorithm.pretrainCoefficient").is_given
    names = choice(name for name, each in ALGORITHMS.items() if can(each))
    yield Rule("data.pretrain", rows.implies(algorithm(can)), f"is for {names} only, not for {{name}}")
    needed = (rows & algorithm(can)).implies(weight)
    yield Rule("algorithm.pretrainCoefficient", needed, "is missing, data.pretrain needs it")
    yield Rule("data.pretrain", weight.implies(rows), "is missing, algorithm.pretrainCoefficient needs it")
    unread = Field("data.pretrain.columns").size() == 0
    yield Rule("data.pretrain.columns", unread, "is for prompts only; no function gets these rows")


def _placement() -> Iterator[Rule]:
    most, fewest, pools = Field("resources.maxNodes"), Field("resources.nodes"), Field("placement.pools")
    auto = MODE == "Auto"
    yield Rule("resources.maxNodes", most >= fewest, "is {value}, fewer than resources.nodes ({few})", {"few": fewest})
    yield Rule("resources.maxNodes", most.is_given.implies(auto), "is for placement.mode Auto only")
    yield Rule("resources.nodes", auto | (fewest == 1), "is for placement.mode Auto only; pools have their own")
    yield Rule("placement.pools", auto.implies(pools.size() == 0), "is for mode Manual only")
    yield Rule("placement.pools", auto | (pools.size() > 0), "is missing, mode Manual needs it")
    any_speed = Field("placement.objective") == "throughput"
    yield Rule("placement.objective", auto | any_speed, "is for mode Auto only")
    yield Rule("placement.remap", auto | (Field("placement.remap") == "Never"), "is for mode Auto only")
    modelled = (~REWARD & ~ENVIRONMENT & ~AGENT & ~MAY_LACK_REWARD) | REWARD_MODEL
    lives_apart = {"reward": modelled, "reference": ~REFERENCE_IS_ACTOR, "teacher": Field("models.teacher").is_given}
    for role in ROLES:
        placed = (pools.size() > 0) & _uses(role)
        homes = pools.where(Field("models", "one").contains(role)).size()
        count = {"count": (homes == 0).then("no", homes)}
        message = f"{role} is in {{count}} pools, expected exactly one"
        if role in lives_apart:
            placed &= lives_apart[role]
        yield Rule("placement.pools", placed.implies(homes == 1), message, count)
    models = Field("placement.pools[].models")
    for role in ROLES:
        lives, message = models.contains(role), f"{{name}} has no {role}"
        if role == "reference":
            message = "{name} has no reference; without a KL penalty there is one only if models.reference is given"
        yield Rule("placement.pools[].models", lives.implies(_uses(role)), message)
    lives = Field("placement.pools[].models").contains("reference") & _uses("reference")
    message = "the reference is the actor without its adapter, and lives where the actor does"
    yield Rule("placement.pools[].models", lives.implies(~REFERENCE_IS_ACTOR), message)
    lives = Field("placement.pools[].models").contains("reward")
    message = "the reward is {form}, and only models live in pools"
    yield Rule("placement.pools[].models", (lives & _uses("reward")).implies(modelled), message, FORM)


def _apart() -> Iterator[Rule]:
    """Yield the rules for responses that are generated in a pool of their own, or by servers outside the job."""
    message = "rollout is in {count} pools, expected one"
    yield Rule("placement.pools", ROLLOUT_POOLS <= 1, message, {"count": ROLLOUT_POOLS})
    models = Field("placement.pools[].models")
    lives = models.contains("rollout")
    yield Rule("placement.pools[].models", lives.implies(models.size() == 1), "rollout has a pool of its own")
    path, fewest = "placement.pools[].maxNodes", Field("placement.pools[].nodes")
    can_grow = lives & ~(Field("rollout.stream") == True)  # noqa: E712 an expression
    yield Rule(path, Field(path).is_given.implies(can_grow), "is for a pool of the rollout, without rollout.stream")
    yield Rule(path, Field(path) >= fewest, "is {value}, fewer than nodes ({few})", {"few": fewest})
    generates = ONLINE & ~MAKES_DATA
    yield Rule("placement.pools[].models", lives.implies(generates), "{name} has no rollout beside its actor")
    message = "and a pool of placement.pools that holds the rollout; expected one of the two"
    yield Rule("rollout.endpoints", ~(ELSEWHERE & (ROLLOUT_POOLS > 0)), message)
    own = {
        **{f"rollout.{name}": ~Field(f"rollout.{name}").is_given for name in OF_OWN_ENGINES},
        "rollout.enforceEager": ~(Field("rollout.enforceEager") == True),  # noqa: E712 an expression
        "rollout.batchInvariant": ~(Field("rollout.batchInvariant") == True),  # noqa: E712 an expression
        **NO_TURNS,
    }
    for path, unused in own.items():
        yield Rule(path, ELSEWHERE.implies(unused), "is for engines of the job's own, not for rollout.endpoints")
    replays, learns = Field("rollout.routing") == "Replay", algorithm(lambda each: issubclass(each, PolicyGradient))
    yield Rule("rollout.routing", replays.implies(learns & ~ELSEWHERE), "is for policy gradients with own engines")
    message = "is {value}, but no pool of placement.pools holds the rollout, which works ahead"
    yield Rule("rollout.maxStaleness", STALE.implies(APART), message)
    yield Rule("rollout.maxStaleness", STALE.implies(~MAKES_DATA), "is {value}, but {name} trains nothing meanwhile")
    message = "is {value}, but with rollout.maxStaleness 0 no weights come while responses are written"
    yield Rule("rollout.partial", Field("rollout.partial").is_given.implies(STALE), message)
    message = "is Delta, but no pool of placement.pools holds the rollout, and a shard in place is whole"
    yield Rule("rollout.weightSync", (Field("rollout.weightSync") == "Delta").implies(APART), message)
    message = "is {value}, but {name} generates twice a step, and compares responses of one policy"
    generates_once = algorithm(lambda each: each.calls.count(("actor", "generate_sequences")) <= 1)
    yield Rule("rollout.maxStaleness", (STALE & ONLINE).implies(generates_once), message)


PARTS = (
    *(_models, _shapes, experts_of_actor, compression, _algorithm, steering, _batches, _sampling, log_probs),
    *(corrections, _lengths, _pretraining, _placement, _apart, distillation, user_code, agents, pods, speculation),
    merges,
)
RULES = tuple(rule for part in PARTS for rule in part())


def _taken(spec: JobSpec) -> Iterator[Problem]:
    """Yield a problem for each column of the training data with the name of a column that the job itself writes."""
    if not isinstance(spec.algorithm, Writing):
        return
    sources = spec.data.train.sources("data.train")
    own = spec.algorithm.own_columns
    taken = [(f"{path}.toolsKey", source.tools_key) for path, source in sources.items() if source.tools_key in own]
    if {source.messages_key or source.prompt_key for source in sources.values()} == {"prompt"}:
        own -= {"prompt"}  # the output's `prompt` is that column
    columns = {name: path.removeprefix("spec.") for name, path in spec.reader_columns(spec.data.train).items()}
    for path, source in sources.items():
        columns |= dict.fromkeys(source.columns, f"{path}.columns")
    taken += [(path, name) for name, path in columns.items() if name in own]
    yield from (Problem(path, f"{name} is a column of what {spec.algorithm.name} writes") for path, name in taken)


NAMED_LISTS = (
    *("models.reward.sum", "models.teacherEndpoints", "placement.pools", "runPolicy.failureRules", "runtime.env"),
    *("evaluation.data.sets", "evaluation.functions", "evaluation.verifiers"),
)
"""Lists of the spec whose entries have names, which must all differ within a list."""


def _repeated(spec: JobSpec) -> Iterator[Problem]:
    """Yield a problem for each repeated list entry. The CRD's schema refuses repeats, too."""
    for index, pool in enumerate(spec.placement.pools):
        for role in _repeated_values(pool.models):
            yield Problem(f"placement.pools.{index}.models", f"has the {role} more than once")
    for url in _repeated_values(url.rstrip("/") for url in spec.rollout.endpoints or ()):
        yield Problem("rollout.endpoints", f"has {url} more than once")
    for path in NAMED_LISTS:
        names = [entry.name for entry in Field(path).of({"spec": spec}) or ()]
        for index, name in enumerate(names):
            if name in names[:index]:
                yield Problem(f"{path}.{index}.name", f'"{name}" is used twice')


def _repeated_values(values: Iterable[str]) -> list[str]:
    return [value for value, count in Counter(values).items() if count > 1]
