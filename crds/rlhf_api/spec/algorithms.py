"""Options that several algorithms share, and properties that follow from the calls of a step.

An algorithm is a class in a file of its own, `rlhf_trainer/algorithms/<name>.py`: its options with the paper's
defaults, its `step`, and its `advantage`. `algorithm_table` finds these files. They need no torch.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NoReturn, Self, get_args

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from rlhf_api.contract import Count, Spec, Text, Whole, tag_of
from rlhf_api.names import PlacedRole, Role
from rlhf_api.problems import choice

Estimator = Literal["K1", "K2", "K3"]
Aggregation = Literal["TokenMean", "SequenceMean", "FixedLength"]
Ratio = Literal["Token", "Sequence"]
CorrectionLevel = Literal["Token", "Sequence", "Geometric"]
CorrectionMode = Literal["Truncate", "Mask", "Clip"]
Divergence = Literal["Sampled", "Forward", "Reverse", "JensenShannon"]
MIN_MULTIPLIER = 1e-6
"""Smallest Lagrange multiplier of the cost (`Constrained`); a smaller one could hardly grow again."""
RESPONSE_COLUMNS = frozenset({"prompt", "response", "reward", "reward_parts", "finished", "response_tokens", "sample"})
"""Columns that a job that writes data (`Writing`) fills itself in a row with one response."""
PAIR_COLUMNS = frozenset({"prompt", "chosen", "rejected", "chosen_reward", "rejected_reward"})
CUSTOM = "Custom"
"""Name by which a manifest's `algorithm` says that its class is the user's own."""
RowKind = Literal["prompts", "completions", "labelled_completions", "pairs", "safety_pairs", "layers"]
"""Kind of data rows that an algorithm may read; the first parameter of its step names one."""
OBJECTIVE_INPUTS = ("log_probs", "old_log_probs", "advantages", "mask", "token_weights")
"""Names that the parameters of an algorithm's own `objective` may have."""
Call = tuple[str, str]
"""Call of a model's method in an algorithm's step: (name of the step's parameter, name of the method)."""


class _Recorded:
    """Stand-in for a model or a batch: `Algorithm` runs a subclass's `step` on them once to record the calls."""

    def __init__(self, name: str, calls: list[Call]) -> None:
        self._name, self._calls = name, calls

    def __getattr__(self, method: str) -> Callable[..., "_Recorded"]:
        self._calls.append((self._name, method))
        return lambda *_, **__: _Recorded("batch", [])

    def __getitem__(self, name: str) -> NoReturn:
        told = "and its values are not there yet; compute with them in `advantage`, or in a method of a worker"
        raise TypeError(f"the step looks at the values of {name!r}, but a step is recorded before it runs, {told}")


class Algorithm(Spec):
    """Base of algorithms: fields are options; class attributes from `data` on follow from the code of `step`."""

    paper: ClassVar[str]
    """Source of the algorithm: `arXiv:NUMBER`, and the section."""
    step: ClassVar[Callable[..., None]]
    """One training step: a static method that takes the data and, by the names of its parameters, the models."""
    comparing: ClassVar[Mapping[str, str] | None] = None
    """Option values with which the algorithm compares the responses to a prompt; {} is always, None is never."""
    may_lack_reward: ClassVar[bool] = False
    """Whether a job may name no reward although the algorithm's step has a parameter `reward`."""
    workers: ClassVar[Mapping[str, type]] = {}
    """Parameter of the step -> the algorithm's own worker class; other parameters get the trainer's workers."""
    replayed_steps: ClassVar[Any] = 0
    """Number of earlier steps whose responses a step learns from again; perhaps a property."""

    data: ClassVar[str]
    """Kind of the data's rows: a `RowKind`."""
    parameters: ClassVar[list[str]]
    """Parameters of the step after the first: models, and workers such as `advantage`."""
    calls: ClassVar[tuple[Call, ...]]
    """Calls of models' methods in one step of the algorithm, in order."""
    offline: ClassVar[bool]
    """Whether the algorithm learns from the data alone and generates nothing."""
    trained: ClassVar[tuple[Role, ...]]
    """Roles of the models that the step updates; the first is the model that the job saves."""
    frozen: ClassVar[tuple[Role, ...]]
    """Roles of the models that the step reads and does not train; `reference` may be left out."""
    chooses_pairs: ClassVar[bool]
    """Whether the step makes pairs of the responses to a prompt. All responses to a prompt are then on one rank."""
    makes: ClassVar[Literal["model", "data"]]
    """Result of a job: a trained model, or a data set."""

    name: str
    _entrypoint: str = ""
    """Entry point by which a manifest names a user's own algorithm; empty for algorithms of this package."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if tag_of(cls) and (missing := [each for each in ("paper", "step") if not hasattr(cls, each)]):
            raise TypeError(f"the algorithm {tag_of(cls)} has no {' and no '.join(missing)}")
        if not hasattr(cls, "step"):
            return  # a base class
        data, *models = inspect.signature(cls.step).parameters
        kinds = get_args(RowKind)
        if data not in kinds:
            raise TypeError(f"the step's first parameter is {data}, expected the data's rows: {choice(kinds)}")
        calls: list[Call] = []
        cls.step(_Recorded("batch", []), **{name: _Recorded(name, calls) for name in models})
        cls.set_step(data, models, calls)
        if "advantage" in cls.parameters and not hasattr(cls, "advantage"):
            raise TypeError(f"the step of {tag_of(cls) or cls.__name__} asks for an advantage, and it has none")
        if others := cls.workers.keys() - set(cls.parameters):
            raise TypeError(f"workers has {choice(sorted(others))}, which is no parameter of the step")

    @classmethod
    def set_step(cls, data: str, models: Sequence[str], calls: Sequence[Call]) -> None:
        """Set the class attributes that follow from the step's parameters and calls."""
        cls.data, cls.parameters, cls.calls = data, [*models], tuple(calls)
        updated = {model for model, method in calls if method.startswith("update_")}
        roles: list[Role] = [role for role in get_args(PlacedRole) if role in cls.parameters]
        cls.trained = tuple(role for role in roles if role in updated)
        cls.frozen = tuple(role for role in roles if role not in cls.trained)
        cls.makes = "model" if cls.trained or data == "layers" else "data"
        called = {method for _, method in cls.calls}
        cls.offline = data != "prompts" and "generate_sequences" not in called
        cls.chooses_pairs = "choose_pairs" in called

    @property
    def is_own(self) -> bool:
        """Whether the algorithm comes from outside this package."""
        return bool(self._entrypoint)

    def with_entrypoint(self, entrypoint: str) -> Self:
        """Return self, with the entry point that the manifest gave."""
        self._entrypoint = entrypoint
        return self

    @model_serializer(mode="wrap")
    def _as_in_manifest(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = write(self)
        if not self.is_own:
            return fields
        options = {name: value for name, value in fields.items() if name != "name"}
        return {"name": CUSTOM, "entrypoint": self._entrypoint, "options": options}

    @property
    def compares_responses(self) -> bool:
        """Whether the algorithm compares the responses to a prompt, and so needs several."""
        return self.comparing is not None and all(getattr(self, name) == each for name, each in self.comparing.items())

    @property
    def prompts_drawn(self) -> int:
        """Number of prompts drawn from the data for each prompt that is trained on."""
        return 1

    @property
    def needs_reference(self) -> bool:
        """Whether loss or rewards depend on the reference model, if the step has one; not with KL coefficient 0."""
        return True

    @property
    def has_cost_critic(self) -> bool:
        """Whether the algorithm has a critic of the costs, which no manifest names."""
        return False


class Preference(Algorithm):
    """Base of algorithms whose actor learns from pairs of responses, or from responses with a label."""

    implicit_rewards: ClassVar[Callable[..., Any]]
    """Implicit rewards of one side of pairs: a pure method of log_ratios to the reference, if any, and of tokens."""
    losses: ClassVar[Callable[..., Any]]
    """Loss of each row, [B]: a pure method. Of pairs: of the rewards of the chosen and the rejected responses, and a
    function log_sigmoid. Of responses with a label: of log_ratios, desirable and reference_point. All are [B]."""

    beta: float = Field(0.1, gt=0, description="Strength (beta) by which the loss keeps the actor near the reference.")

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        is_trained = hasattr(cls, "step") and "actor" in cls.trained and "actor" not in cls.workers
        for name in ("losses", "implicit_rewards") if is_trained else ():
            if not hasattr(cls, name) and (name == "losses" or cls.data != "labelled_completions"):
                raise TypeError(f"the actor of {tag_of(cls) or cls.__name__} learns by {name}, and it has none")


class Writing(Algorithm):
    """Base of algorithms that train nothing and write responses as a data set."""

    comparing, may_lack_reward = {"rows": "Pairs"}, True

    rows: Literal["Responses", "Best", "Pairs"] = "Responses"
    """Content of a row. Responses: one response. Best: a prompt and its best finished response. Pairs: a prompt, its
    best finished response and its worst response, if the best is better.
    """
    min_reward: float | None = None
    """Lowest reward of a response, or of a pair's better response, that is written; unset writes all."""

    @property
    def own_columns(self) -> frozenset[str]:
        """Columns of the written data set that the job fills itself; a row also has columns of the prompts' data."""
        return PAIR_COLUMNS if self.rows == "Pairs" else RESPONSE_COLUMNS


class KL(Spec):
    """The penalty that keeps the actor near the reference."""

    coefficient: float = Field(0.05, ge=0, description="Weight of the KL penalty; the first one if it is steered.")
    apply_to: Literal["Reward", "Loss"] = "Reward"
    """Place of the penalty: subtracted from each token's reward, or added to the loss."""
    controller: Literal["Fixed", "Coefficient", "LearningRate", "Adaptive"] = "Fixed"
    """Scalar that steers a KL to `target` (arXiv 1909.08593, section 2.2). Coefficient (older name: Adaptive): the
    coefficient steers the KL from the reference. LearningRate: a factor, 0.1 to 10, of the actor's learning rate steers
    the KL between the policies before and after each step; measuring it takes a forward pass."""
    target: float | None = Field(None, gt=0, description="KL per response to steer to, in nats; not with Fixed.")
    horizon: Count = Field(10000, description="Number of responses over which a relative error is corrected.")
    estimator: Estimator | None = None
    """Estimator of the KL; unset is K1 in the reward and K3 in the loss. In the loss K1 is only a metric: its gradient
    is 0 on average."""

    @property
    def resolved_estimator(self) -> Estimator:
        """Estimator of the KL divergence to use, with the default filled in."""
        return self.estimator or ("K1" if self.apply_to == "Reward" else "K3")


class NoKL(KL):
    """The penalty of algorithms whose paper has none: its coefficient is 0 unless the manifest sets it."""

    coefficient: float = Field(0.0, ge=0, description="Weight of the KL penalty; the first one if it is steered.")


class OverlongPenalty(Spec):
    """DAPO's soft penalty of responses that come near the longest length (arXiv 2503.14476, eq. 13)."""

    buffer_tokens: Count = Field(description="Tokens before data.maxResponseTokens over which the penalty grows.")
    coefficient: float = Field(1.0, gt=0, description="Penalty of a response of the longest length.")


class RewardShaping(Spec):
    """Changes to a reward before the advantages use it."""

    normalization: Literal["None", "Running"] = "None"
    """Running: subtract the mean and divide by the standard deviation of all rewards so far."""
    clip: float | None = Field(None, gt=0, description="Largest magnitude of a reward; unset does not clip.")
    truncated: Literal["Keep", "Mask", "Value"] = "Keep"
    """Score of a response that was cut off: its own, none (nothing is learned from it), or truncatedValue."""
    truncated_value: float = Field(0.0, description="Score of a response that was cut off, if truncated is Value.")
    missing_end_penalty: float = Field(0.0, ge=0)
    """Penalty that is subtracted from the reward of a response without an end token."""
    overlong_penalty: OverlongPenalty | None = None
    """Penalty that is subtracted from the reward of a response that is nearly too long."""


class RolloutCorrection(Spec):
    """Importance weights of what the generator drew with another probability than the trainer gives it."""

    level: CorrectionLevel = "Token"
    """Unit of a weight, the trainer's probability over the generator's. Token: each token. Sequence: the response, the
    product of its tokens' weights. Geometric: their geometric mean, which does not depend on the length.
    """
    mode: CorrectionMode = "Truncate"
    """Truncate: weights above `high` become `high`. Clip: weights below `low` also become `low`. Mask: weights outside
    low .. high become 0, so nothing is learned from them.
    """
    low: float | None = Field(None, gt=0, lt=1, description="Smallest weight of Clip and Mask; unset is 1 / high.")
    high: float | None = Field(None, gt=1, description="Largest weight; unset is 2, with Geometric 1.001.")
    cap: float | None = Field(None, gt=1, description="Older name of `high`.")
    veto: float | None = Field(None, gt=0, lt=1)
    """Smallest ratio of a single token: a response with a smaller one gets weight 0. Unset: no veto."""
    normalize: bool = Field(False, description="Divide the weights by their mean over the step's tokens or responses.")

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest weight, with the defaults filled in; 0 without a smallest one."""
        high = self.high or self.cap or (1.001 if self.level == "Geometric" else 2.0)
        return (0.0 if self.mode == "Truncate" else self.low or 1.0 / high), high


class PolicyGradient(Algorithm):
    """Base of algorithms whose actor learns from the advantages of its own responses."""

    advantage: ClassVar[Callable[..., Any]]
    """Method that computes the advantages as the algorithm's paper defines them, without side effects.

    `workers/advantage.py` passes the arguments by the names of its parameters.
    """
    estimates: ClassVar[tuple[str, ...]] = ("advantages",)
    """Names of the batch fields that `advantage` returns; several are returned as a mapping."""

    objective: ClassVar[Callable[..., Any] | None] = None
    """Objective of each token, [B, T], to be maximised instead of PPO's clipped one; None is the clipped one.

    A pure method of log_probs, old_log_probs, advantages, mask and token_weights, or of some of them. Each is a tensor
    [B, T], 0 outside the mask. token_weights is a field that `advantage` gives by this name in `estimates`.
    """

    clip_range: float = Field(0.2, gt=0, lt=1)
    """Distance (epsilon) from 1 at which the probability ratio is clipped."""
    clip_range_high: float | None = Field(None, gt=0)
    """Clipping of the probability ratio above 1 (DAPO's clip-higher); unset is clipRange."""
    aggregation: Aggregation = "TokenMean"
    """Loss of a batch. TokenMean: mean over all tokens. SequenceMean: mean over responses of a response's mean.
    FixedLength: mean over responses of a response's sum / data.maxResponseTokens.
    """
    entropy_coefficient: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    kl: KL = Field(KL(), description="The penalty that keeps the actor near the reference.")
    rewards: RewardShaping = Field(RewardShaping(), description="Changes to a reward before the advantages use it.")
    rollout_correction: RolloutCorrection | None = None
    """Importance weights: the trainer's probability over the generator's. Unset: none or, with rollout.maxStaleness
    above 0, rollout.quantization or rollout.kvCache, the defaults."""

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        parameters = list(inspect.signature(cls.objective).parameters)[1:] if cls.objective else []
        known = [each for each in OBJECTIVE_INPUTS if each != "token_weights" or each in cls.estimates]
        if unknown := [each for each in parameters if each not in known]:
            raise TypeError(f"the objective of {cls.__name__} has the parameter {unknown[0]}, expected {choice(known)}")

    @property
    def needs_reference(self) -> bool:
        return self.kl.coefficient > 0

    @property
    def rewards_read_log_probs(self) -> bool:
        """Whether the KL penalty is in the rewards, so that they are known only with the old log-probabilities."""
        return self.kl.coefficient > 0 and self.kl.apply_to == "Reward"

    @property
    def clip_ranges(self) -> tuple[float, float]:
        """Distances below and above 1 to which PPO's loss clips the probability ratio."""
        return self.clip_range, self.clip_range_high or self.clip_range

    @property
    def resolved_ratio(self) -> Ratio:
        """Unit with a probability ratio of its own in the loss: each token, or the whole response (`Sequence`)."""
        return "Token"


class Distilling(PolicyGradient):
    """Base of algorithms whose actor learns a teacher's probabilities of the tokens of its own responses."""

    compare: ClassVar[Callable[..., Any]]
    """Divergence of each token, [n]: a pure method of the student's and the teacher's log-probabilities, [n, K]."""

    divergence: Divergence = "Sampled"
    """Divergence from the teacher. Sampled: the reverse KL of the sampled tokens, which is a part of the advantages.
    The others are a loss over the vocabulary: Forward is KL(teacher || actor), Reverse KL(actor || teacher).
    """
    top_k: Count | None = None
    """Likeliest tokens of the teacher that a divergence compares, all others as one; unset: all, if at most 1,024."""
    divergence_coefficient: float = Field(1.0, gt=0, description="Weight of the divergence beside the reward.")
    teacher_key: Text | None = None
    """Column that names a row's teacher among models.teacherEndpoints; models.teacher teaches all other rows."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the training data that the choice of a teacher reads."""
        return (self.teacher_key,) if self.teacher_key else ()

    @property
    def rewards_read_log_probs(self) -> bool:
        return self.divergence == "Sampled" or super().rewards_read_log_probs


class ActorCritic(PolicyGradient):
    """Base of PPO and of other algorithms with a critic."""

    discount: float = Field(1.0, ge=0, le=1, description="Discount of future rewards, gamma.")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="Lambda of GAE (arXiv 1506.02438).")
    value_clip_range: float | None = Field(0.2, gt=0)
    """Largest change of a critic's value in one update; null does not clip."""
    whiten_advantages: bool = Field(True, description="Give the advantages mean 0 and variance 1.")
    critic_warmup_steps: Whole = Field(0, description="Number of first steps that update only the critic.")

    pretrain_coefficient: float | None = Field(None, gt=0)
    """Weight of the loss on data.pretrain (PPO-ptx); with data.pretrain only."""


class Lagrange(Spec):
    """The multiplier that weighs cost against reward."""

    initial: float = Field(1.0, gt=0, description="Multiplier before the first step.")
    learning_rate: float = Field(0.1, gt=0, description="Learning rate of the ascent on the multiplier's logarithm.")
    maximum: float = Field(5.0, gt=0, description="Largest multiplier; not below `initial`.")


class Constrained(ActorCritic):
    """Base of actor-critic algorithms that keep the mean cost of responses below a limit."""

    cost_limit: float = Field(0.0, description="Largest mean cost of responses that is allowed.")
    lagrange: Lagrange = Field(Lagrange(), description="The multiplier that weighs cost against reward.")

    def weigh(self, gain: Any, cost: Any, multiplier: float) -> Any:
        """Return (gain - lambda * cost) / (1 + lambda) of rewards or of advantages, tensors of one shape."""
        return (gain - multiplier * cost) / (1.0 + multiplier)

    def next_multiplier(self, multiplier: float, *, cost: float) -> float:
        """Return the Lagrange multiplier after a step of this mean cost (Safe RLHF, arXiv 2310.12773, section 3.3, B).

        Its logarithm becomes ln(lambda) + learning_rate * lambda * (cost - limit), at most ln(maximum): it grows while
        the cost is above the limit. It is at least 1e-6, since a smaller multiplier could hardly grow again.
        """
        moved = math.log(multiplier) + self.lagrange.learning_rate * multiplier * (cost - self.cost_limit)
        return math.exp(min(max(moved, math.log(MIN_MULTIPLIER)), math.log(self.lagrange.maximum)))
