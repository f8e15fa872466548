"""Rules that span several fields of a spec; each yields every problem it finds."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from rlhf_api.algorithms import KL, ActorCritic, Constrained, PolicyGradient
from rlhf_api.names import Role
from rlhf_api.parallel_sizes import Parallelism
from rlhf_api.problems import Problem, choice
from rlhf_api.spec import JobSpec, Model, RewardSum, Rollout, Training

MIN_COMPARED = 2
"""Responses to a prompt that can be compared."""
OWN_VARIABLES = "RLHF_"


def broken(spec: JobSpec) -> list[Problem]:
    """Every problem of every rule, with paths that start at `spec`."""
    return [problem.within("spec.") for rule in RULES for problem in rule(spec)]


def used_roles(spec: JobSpec) -> tuple[Role, ...]:
    """The roles of the models that the algorithm trains, then of those it only reads."""
    roles, reward = spec.algorithm.trained + spec.algorithm.frozen, spec.models.reward
    has_reward_model = reward is None or "reward" in spec.models.given()
    return tuple(role for role in roles if role != "reward" or has_reward_model)


def _roles_are_those_of_the_algorithm(spec: JobSpec) -> Iterator[Problem]:
    name, used, given = spec.algorithm.name, used_roles(spec), spec.models.given()
    for role in given:
        if role not in used:
            yield Problem(f"models.{role}", f"{name} has no {role}; it uses {choice(used)}")
    for role in used:
        if role not in given and role != "reference":
            yield Problem(f"models.{role}", f"is missing, {name} needs it")


def _only_trained_models_say_how_to_train(spec: JobSpec) -> Iterator[Problem]:
    for role, model in spec.models.given().items():
        if role in spec.algorithm.frozen:
            path = f"models.{spec.models.field(role)}"
            yield from (Problem(f"{path}.{field}", _untrained(spec, role)) for field in _training_fields(model))
            if model.offload in ("Optimizer", "All"):
                message = f"is {model.offload}, but {_untrained(spec, role)}; expected None or Parameters"
                yield Problem(f"{path}.offload", message)


def _generation_sizes_divide_those_of_training(spec: JobSpec) -> Iterator[Problem]:
    """A rank's training shard lies in its generation shard (HybridFlow section 5.3)."""
    actor = spec.models.actor
    if spec.placement.mode == "Auto" and actor and actor.parallelism is None:
        return  # the mapper chooses sizes that go together
    asked = actor.parallelism if actor and actor.parallelism else Parallelism()
    for name, size, whole in (
        ("tensorParallel", spec.rollout.tensor_parallel or 1, asked.tensor),
        ("pipelineParallel", spec.rollout.pipeline_parallel or 1, asked.pipeline),
    ):
        if whole % size:
            field = name.removesuffix("Parallel")
            yield Problem(
                f"rollout.{name}", f"is {size}, which does not divide models.actor.parallelism.{field}, {whole}"
            )


def _the_reward_is_one_that_the_algorithm_can_use(spec: JobSpec) -> Iterator[Problem]:
    algorithm, reward = spec.algorithm, spec.models.reward
    if reward is None or isinstance(reward, Model):
        return
    if "reward" in algorithm.trained:
        yield Problem("models.reward", f"is {reward.form}; {algorithm.name} trains a model, which has a uri")
    elif "reward" not in algorithm.frozen:
        yield Problem("models.reward", f"{algorithm.name} has no reward")
    if isinstance(reward, RewardSum):
        models = [place for place, term in enumerate(reward.sum) if isinstance(term.reward, Model)]
        yield from (
            Problem(f"models.reward.sum.{place}.reward", "is the second model of the sum") for place in models[1:]
        )
        yield from _repeated("models.reward.sum", [term.name for term in reward.sum])


def _training_fields(model: Model) -> list[str]:
    return ["optimizer"] * bool(model.optimizer) + ["gradientCheckpointing"] * model.gradient_checkpointing


def _untrained(spec: JobSpec, role: Role) -> str:
    return f"{spec.algorithm.name} does not train the {role}"


def _the_kl_target_belongs_to_adaptive(spec: JobSpec) -> Iterator[Problem]:
    kl = spec.algorithm.kl if isinstance(spec.algorithm, PolicyGradient) else KL()
    if kl.controller == "Adaptive" and kl.target is None:
        yield Problem("algorithm.kl.target", "is missing, controller Adaptive needs it")
    if kl.controller == "Adaptive" and kl.apply_to == "Loss":
        yield Problem("algorithm.kl.controller", "Adaptive is for applyTo Reward only")
    if kl.controller == "Fixed" and kl.target is not None:
        yield Problem("algorithm.kl.target", "is for controller Adaptive only")


def _the_length_is_given_once(spec: JobSpec) -> Iterator[Problem]:
    if (spec.training.total_steps is None) == (spec.training.total_epochs is None):
        yield Problem("training", "expected exactly one of totalSteps and totalEpochs")


def _batches_fit_the_algorithm(spec: JobSpec) -> Iterator[Problem]:
    training, name = spec.training, spec.algorithm.name
    needed, refused = ("promptBatchSize", "batchSize")
    if spec.algorithm.offline:
        needed, refused = refused, needed
    sizes = {"promptBatchSize": training.prompt_batch_size, "batchSize": training.batch_size}
    if sizes[needed] is None:
        yield Problem(f"training.{needed}", f"is missing, {name} needs it")
    if sizes[refused] is not None:
        yield Problem(f"training.{refused}", f"is not for {name}; use {needed}")


def _offline_algorithms_sample_nothing(spec: JobSpec) -> Iterator[Problem]:
    evaluation = spec.evaluation
    for_rl_only = {
        "training.miniBatchSize": spec.training.mini_batch_size is not None,
        "training.updateEpochs": spec.training.update_epochs != Training().update_epochs,
        "rollout": spec.rollout != Rollout(),
        "evaluation.functions": evaluation is not None and evaluation.functions != (),
    }
    if spec.algorithm.offline:
        message = f"is for RL only, {spec.algorithm.name} generates no responses"
        yield from (Problem(path, message) for path, given in for_rl_only.items() if given)


def _pretraining_has_data_and_a_weight(spec: JobSpec) -> Iterator[Problem]:
    if not isinstance(spec.algorithm, ActorCritic):
        if spec.data.pretrain:
            yield Problem("data.pretrain", f"is for PPO and SafeRLHF only, not for {spec.algorithm.name}")
        return
    weight = spec.algorithm.pretrain_coefficient
    if spec.data.pretrain and weight is None:
        yield Problem("algorithm.pretrainCoefficient", "is missing, data.pretrain needs it")
    if weight is not None and not spec.data.pretrain:
        yield Problem("data.pretrain", "is missing, algorithm.pretrainCoefficient needs it")


def _comparing_takes_several_responses(spec: JobSpec) -> Iterator[Problem]:
    samples = spec.rollout.samples_per_prompt
    if spec.algorithm.compares_responses and samples < MIN_COMPARED:
        message = f"is {samples}, but {spec.algorithm.name} compares the responses to a prompt"
        yield Problem("rollout.samplesPerPrompt", f"{message}; expected at least {MIN_COMPARED}")


def _the_overlong_buffer_fits(spec: JobSpec) -> Iterator[Problem]:
    penalty = spec.algorithm.rewards.overlong_penalty if isinstance(spec.algorithm, PolicyGradient) else None
    longest = spec.data.max_response_tokens
    if penalty and penalty.buffer_tokens > longest:
        message = f"is {penalty.buffer_tokens}, more than data.maxResponseTokens ({longest})"
        yield Problem("algorithm.rewards.overlongPenalty.bufferTokens", message)


def _the_ratio_of_a_response_belongs_to_means_of_responses(spec: JobSpec) -> Iterator[Problem]:
    algorithm = spec.algorithm
    if not isinstance(algorithm, PolicyGradient) or algorithm.aggregation == "SequenceMean":
        return
    if algorithm.resolved_ratio == "Sequence":
        yield Problem("algorithm.aggregation", f"is {algorithm.aggregation}; ratio Sequence needs SequenceMean")


def _the_multiplier_begins_within_its_bounds(spec: JobSpec) -> Iterator[Problem]:
    lagrange = spec.algorithm.lagrange if isinstance(spec.algorithm, Constrained) else None
    if lagrange and lagrange.initial > lagrange.maximum:
        yield Problem("algorithm.lagrange.initial", f"is {lagrange.initial}, more than maximum ({lagrange.maximum})")


def _the_batch_divides_into_mini_batches(spec: JobSpec) -> Iterator[Problem]:
    mini, prompts = spec.training.mini_batch_size, spec.training.prompt_batch_size
    if mini is None or prompts is None:
        return
    sequences = prompts * spec.rollout.samples_per_prompt
    if sequences % mini:
        message = f"is {mini}, which does not divide the {sequences} sequences of a step"
        yield Problem("training.miniBatchSize", f"{message} (promptBatchSize times samplesPerPrompt)")
    elif spec.algorithm.chooses_pairs and mini % spec.rollout.samples_per_prompt:
        several = f"the {spec.rollout.samples_per_prompt} responses to a prompt"
        message = f"is {mini}; {spec.algorithm.name} makes a pair of {several}"
        yield Problem("training.miniBatchSize", f"{message}, expected a multiple of that")


def _the_shortest_response_fits(spec: JobSpec) -> Iterator[Problem]:
    shortest, longest = spec.rollout.min_response_tokens, spec.data.max_response_tokens
    if shortest > longest:
        yield Problem("rollout.minResponseTokens", f"is {shortest}, more than data.maxResponseTokens ({longest})")


def _nodes_may_be_more_with_auto_only(spec: JobSpec) -> Iterator[Problem]:
    most, fewest = spec.resources.max_nodes, spec.resources.nodes
    if most is not None and most < fewest:
        yield Problem("resources.maxNodes", f"is {most}, fewer than resources.nodes ({fewest})")
    if most is not None and spec.placement.mode == "Manual":
        yield Problem("resources.maxNodes", "is for placement.mode Auto only")


def _pools_are_given_with_manual(spec: JobSpec) -> Iterator[Problem]:
    placement = spec.placement
    if placement.mode == "Auto" and placement.pools:
        yield Problem("placement.pools", "is for mode Manual only")
    if placement.mode == "Manual" and not placement.pools:
        yield Problem("placement.pools", "is missing, mode Manual needs it")


def _every_model_has_one_pool(spec: JobSpec) -> Iterator[Problem]:
    pools, used = spec.placement.pools, used_roles(spec)
    homes: Counter[Role] = Counter(role for pool in pools for role in set(pool.models))
    for role in used if pools else ():
        if homes[role] != 1:
            yield Problem("placement.pools", f"{role} is in {homes[role] or 'no'} pools, expected exactly one")
    for index, pool in enumerate(pools):
        path = f"placement.pools.{index}.models"
        strangers = [role for role in dict.fromkeys(pool.models) if role not in used]
        yield from (Problem(path, _homeless(spec, role)) for role in strangers)
        twice = [role for role, count in Counter(pool.models).items() if count > 1]
        yield from (Problem(path, f"has the {role} more than once") for role in twice)


def _homeless(spec: JobSpec, role: Role) -> str:
    """Why a role has no place in a pool."""
    reward = spec.models.reward
    if role == "reward" and reward and role in spec.algorithm.frozen:
        return f"the reward is {reward.form}, and only models live in pools"
    return f"{spec.algorithm.name} has no {role}"


def _user_code_ends_before_a_call_counts_as_hung(spec: JobSpec) -> Iterator[Problem]:
    deadline, functions = spec.training.call_deadline_seconds, spec.evaluation.functions if spec.evaluation else ()
    code = {f"models.{field}": part for field, part in spec.models.rewards().items() if not isinstance(part, Model)}
    for path, each in [
        *code.items(),
        *((f"evaluation.functions.{place}", each) for place, each in enumerate(functions)),
    ]:
        if each and each.timeout_seconds >= deadline:
            message = f"is {each.timeout_seconds:g}, expected less than training.callDeadlineSeconds ({deadline})"
            yield Problem(f"{path}.timeoutSeconds", message)


def _names_are_unique(spec: JobSpec) -> Iterator[Problem]:
    functions = spec.evaluation.functions if spec.evaluation else ()
    yield from _repeated("placement.pools", [pool.name for pool in spec.placement.pools])
    yield from _repeated("runPolicy.failureRules", [rule.name for rule in spec.run_policy.failure_rules])
    yield from _repeated("runtime.env", [variable.name for variable in spec.runtime.env])
    taken = ["reward", "cost"]
    yield from _repeated("evaluation.functions", [*taken, *(each.name for each in functions)], first=len(taken))


def _variables_and_tolerations_are_whole(spec: JobSpec) -> Iterator[Problem]:
    for place, variable in enumerate(spec.runtime.env):
        if (variable.value is None) == (variable.secret is None):
            yield Problem(f"runtime.env.{place}", "expected exactly one of value and secret")
        if variable.name.startswith(OWN_VARIABLES):
            message = f'is "{variable.name}"; names that begin with {OWN_VARIABLES} are the operator\'s own'
            yield Problem(f"runtime.env.{place}.name", message)
    for place, toleration in enumerate(spec.runtime.tolerations):
        if toleration.operator == "Exists" and toleration.value is not None:
            yield Problem(f"runtime.tolerations.{place}.value", "is for operator Equal only")
        if toleration.operator == "Equal" and toleration.key is None:
            yield Problem(f"runtime.tolerations.{place}.key", "is missing, operator Equal needs it")


def _repeated(path: str, names: list[str], *, first: int = 0) -> Iterator[Problem]:
    """A name that was used before; the names before `first` are not in the manifest."""
    for index, name in enumerate(names):
        if name in names[:index]:
            taken = "is taken" if name in names[:first] else "is used twice"
            yield Problem(f"{path}.{index - first}.name", f'"{name}" {taken}')


RULES: tuple[Callable[[JobSpec], Iterable[Problem]], ...] = (
    _roles_are_those_of_the_algorithm,
    _the_reward_is_one_that_the_algorithm_can_use,
    _only_trained_models_say_how_to_train,
    _the_kl_target_belongs_to_adaptive,
    _the_length_is_given_once,
    _batches_fit_the_algorithm,
    _offline_algorithms_sample_nothing,
    _pretraining_has_data_and_a_weight,
    _comparing_takes_several_responses,
    _the_overlong_buffer_fits,
    _the_ratio_of_a_response_belongs_to_means_of_responses,
    _the_multiplier_begins_within_its_bounds,
    _the_batch_divides_into_mini_batches,
    _the_shortest_response_fits,
    _generation_sizes_divide_those_of_training,
    _nodes_may_be_more_with_auto_only,
    _pools_are_given_with_manual,
    _every_model_has_one_pool,
    _user_code_ends_before_a_call_counts_as_hung,
    _variables_and_tolerations_are_whole,
    _names_are_unique,
)
