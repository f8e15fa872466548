"""What a user may ask of each algorithm; the defaults are those of its paper."""

from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from rlhf_api.contract import Count, Spec, Whole
from rlhf_api.names import Role

Estimator = Literal["K1", "K2", "K3"]
Aggregation = Literal["TokenMean", "SequenceMean", "FixedLength"]
Ratio = Literal["Token", "Sequence"]
CorrectionMode = Literal["Truncate", "Mask"]


class Algorithm(Spec):
    """What every algorithm says about the models it needs."""

    offline: ClassVar[bool]
    """Learns from the data alone; nothing is generated."""
    trained: ClassVar[tuple[Role, ...]]
    frozen: ClassVar[tuple[Role, ...]] = ()
    """Roles that are read and not trained; `reference` may be left out."""

    name: str

    @property
    def compares_responses(self) -> bool:
        """Whether it learns from how the responses to one prompt differ, and so needs several."""
        return False


class SFT(Algorithm):
    """Supervised fine-tuning on prompts and responses."""

    offline = True
    trained = ("actor",)

    name: Annotated[Literal["SFT"], Field(description="Supervised fine-tuning of the actor.")]


class RewardModel(Algorithm):
    """A reward model from pairs of responses (Bradley-Terry)."""

    offline = True
    trained = ("reward",)

    name: Annotated[Literal["RewardModel"], Field(description="Training of a reward model on preference pairs.")]


class CostModel(Algorithm):
    """A cost model from pairs of responses and whether each is safe (Safe RLHF, arXiv 2310.12773)."""

    offline = True
    trained = ("cost",)

    name: Annotated[Literal["CostModel"], Field(description="Training of a cost model on pairs and safety labels.")]


class DPO(Algorithm):
    """Direct preference optimisation on the pairs of the data (arXiv 2305.18290)."""

    offline = True
    trained = ("actor",)
    frozen = ("reference",)

    name: Annotated[Literal["DPO"], Field(description="The actor learns from preference pairs, without a reward.")]
    beta: Annotated[float, Field(gt=0, description="How strongly the actor is kept near the reference.")] = 0.1


class OnlineDPO(Algorithm):
    """Online iterative DPO: pairs of the actor's own responses (RLHF Workflow, arXiv 2405.07863)."""

    offline = False
    trained = ("actor",)
    frozen = ("reference", "reward")

    name: Annotated[Literal["OnlineDPO"], Field(description="DPO on the best and the worst response to each prompt.")]
    beta: Annotated[float, Field(gt=0, description="How strongly the actor is kept near the reference.")] = 0.1

    @property
    def compares_responses(self) -> bool:
        return True


class KL(Spec):
    """The penalty that keeps the actor near the reference."""

    coefficient: Annotated[float, Field(ge=0, description="Weight of the penalty; the first one with Adaptive.")] = 0.05
    apply_to: Annotated[
        Literal["Reward", "Loss"], Field(description="Subtract it from each token's reward, or add it to the loss.")
    ] = "Reward"
    controller: Annotated[
        Literal["Fixed", "Adaptive"],
        Field(description="Keep the coefficient, or steer it to `target` (arXiv 1909.08593, section 2.2)."),
    ] = "Fixed"
    target: Annotated[
        float | None, Field(gt=0, description="KL per response that Adaptive steers to, in nats; only with Adaptive.")
    ] = None
    horizon: Annotated[Count, Field(description="Sequences over which Adaptive corrects the coefficient.")] = 10000
    estimator: Annotated[
        Estimator | None,
        Field(
            description="Estimator of the KL; unset is K1 in the reward and K3 in the loss. K1 has no "
            "gradient on average: in the loss it only reports."
        ),
    ] = None

    @property
    def resolved_estimator(self) -> Estimator:
        """The estimator to use, the default filled in."""
        return self.estimator or ("K1" if self.apply_to == "Reward" else "K3")


class LossKL(KL):
    """The penalty as GRPO has it."""

    coefficient: Annotated[float, Field(ge=0, description="Weight of the penalty; the first one with Adaptive.")] = 0.04
    apply_to: Annotated[
        Literal["Reward", "Loss"], Field(description="Subtract it from each token's reward, or add it to the loss.")
    ] = "Loss"


class OverlongPenalty(Spec):
    """DAPO's soft penalty of responses that come near the longest length (arXiv 2503.14476, eq. 13)."""

    buffer_tokens: Annotated[Count, Field(description="Last tokens before data.maxResponseTokens, where it grows.")]
    coefficient: Annotated[float, Field(gt=0, description="The penalty at the longest length.")] = 1.0


class RewardShaping(Spec):
    """What happens to a reward before the advantages see it."""

    normalization: Annotated[
        Literal["None", "Running"],
        Field(description="Running: subtract the mean and divide by the standard deviation of all rewards so far."),
    ] = "None"
    clip: Annotated[float | None, Field(gt=0, description="Largest magnitude of a reward; unset does not clip.")] = None
    missing_end_penalty: Annotated[
        float, Field(ge=0, description="Subtracted from the reward of a response without an end token.")
    ] = 0.0
    overlong_penalty: Annotated[
        OverlongPenalty | None, Field(description="Subtracted from the reward of a response that is nearly too long.")
    ] = None


class RolloutCorrection(Spec):
    """Importance weights of tokens that the generator drew with another probability than the trainer gives them."""

    mode: Annotated[
        CorrectionMode,
        Field(description="Truncate: weights above the cap become the cap. Mask: tokens beyond it are left out."),
    ] = "Truncate"
    cap: Annotated[float, Field(gt=1, description="Largest weight; Mask also leaves out those below 1 / cap.")] = 2.0


class PolicyGradient(Algorithm):
    """What all algorithms have in common whose actor learns from the advantages of its own responses."""

    offline = False
    trained: ClassVar[tuple[Role, ...]] = ("actor",)
    frozen: ClassVar[tuple[Role, ...]] = ("reference", "reward")

    clip_range: Annotated[float, Field(gt=0, lt=1, description="Clipping of the probability ratio, epsilon.")] = 0.2
    clip_range_high: Annotated[
        float | None, Field(gt=0, description="Clipping above 1 (DAPO's clip-higher); unset is clipRange.")
    ] = None
    aggregation: Annotated[
        Aggregation,
        Field(
            description="The loss is the mean over all tokens, over responses of each one's mean, or over responses of "
            "each one's sum / data.maxResponseTokens."
        ),
    ] = "TokenMean"
    entropy_coefficient: Annotated[float, Field(ge=0, description="Weight of the entropy bonus.")] = 0.0
    kl: Annotated[KL, Field(description="The penalty that keeps the actor near the reference.")] = KL()
    rewards: Annotated[RewardShaping, Field(description="What happens to a reward before it is used.")] = (
        RewardShaping()
    )
    rollout_correction: Annotated[
        RolloutCorrection | None, Field(description="Weigh tokens by trainer over generator; unset does not.")
    ] = None

    @property
    def clip_ranges(self) -> tuple[float, float]:
        """How far the ratio may go below and above 1."""
        return self.clip_range, self.clip_range_high or self.clip_range


class ActorCritic(PolicyGradient):
    """What PPO and its kin have in common."""

    trained: ClassVar[tuple[Role, ...]] = ("actor", "critic")

    discount: Annotated[float, Field(ge=0, le=1, description="Discount of future rewards, gamma.")] = 1.0
    gae_lambda: Annotated[float, Field(ge=0, le=1, description="Lambda of GAE (arXiv 1506.02438).")] = 0.95
    value_clip_range: Annotated[
        float | None, Field(gt=0, description="Largest change of a value in one update; null does not clip.")
    ] = 0.2
    whiten_advantages: Annotated[bool, Field(description="Give the advantages mean 0 and variance 1.")] = True
    critic_warmup_steps: Annotated[Whole, Field(description="First steps that update the critic only.")] = 0

    pretrain_coefficient: Annotated[
        float | None, Field(gt=0, description="Weight of the loss on data.pretrain (PPO-ptx); with data.pretrain only.")
    ] = None


class PPO(ActorCritic):
    """Proximal policy optimisation with a critic (arXiv 1707.06347)."""

    name: Annotated[Literal["PPO"], Field(description="RLHF with an actor, a critic, a reference and a reward model.")]


class Lagrange(Spec):
    """The multiplier that weighs cost against reward."""

    initial: Annotated[float, Field(gt=0, description="Multiplier before the first step.")] = 1.0
    learning_rate: Annotated[float, Field(gt=0, description="Of the ascent on the multiplier's logarithm.")] = 0.1
    maximum: Annotated[float, Field(gt=0, description="Largest multiplier; not below `initial`.")] = 5.0


class SafeRLHF(ActorCritic):
    """PPO whose mean cost is kept below a limit (arXiv 2310.12773)."""

    frozen: ClassVar[tuple[Role, ...]] = ("reference", "reward", "cost")

    name: Annotated[Literal["SafeRLHF"], Field(description="PPO with a cost model and a Lagrange multiplier.")]
    cost_limit: Annotated[float, Field(description="Mean cost of a response that is allowed.")] = 0.0
    lagrange: Annotated[Lagrange, Field(description="The multiplier that weighs cost against reward.")] = Lagrange()
    separate_cost_critic: Annotated[
        bool,
        Field(
            description="A critic of the costs beside the critic, with its optimizer, that starts from the cost model; "
            "false: one critic of both."
        ),
    ] = True


class ReMax(PolicyGradient):
    """REINFORCE whose baseline is the score of the greedy response (arXiv 2310.10505)."""

    name: Annotated[Literal["ReMax"], Field(description="RLHF without a critic; generates each response twice.")]
    aggregation: Annotated[Aggregation, Field(description="As for PPO; the paper sums over a response's tokens.")] = (
        "FixedLength"
    )


class GRPO(PolicyGradient):
    """Group relative policy optimisation (arXiv 2402.03300)."""

    name: Annotated[Literal["GRPO"], Field(description="RLHF without a critic; a prompt's responses are compared.")]
    aggregation: Annotated[Aggregation, Field(description="As for PPO; Dr. GRPO takes FixedLength.")] = "SequenceMean"
    kl: Annotated[LossKL, Field(description="The penalty that keeps the actor near the reference.")] = LossKL()
    normalize_by_std: Annotated[
        bool, Field(description="Divide by the standard deviation of the prompt's rewards; false for Dr. GRPO.")
    ] = True
    ratio: Annotated[
        Ratio,
        Field(
            description="Probability ratio of each token, or GSPO's of the whole response (arXiv 2507.18071), "
            "which needs aggregation SequenceMean."
        ),
    ] = "Token"
    oversampling: Annotated[
        Count | None,
        Field(
            description="DAPO's dynamic sampling: draw so many times promptBatchSize prompts, and train on the first "
            "promptBatchSize of them whose responses differ in reward; unset trains on all.",
        ),
    ] = None

    @property
    def compares_responses(self) -> bool:
        return True


class RLOO(PolicyGradient):
    """REINFORCE leave-one-out (arXiv 2402.14740)."""

    name: Annotated[Literal["RLOO"], Field(description="RLHF without a critic; a response's baseline are the others.")]
    aggregation: Annotated[Aggregation, Field(description="As for PPO; the paper sums over a response's tokens.")] = (
        "FixedLength"
    )

    @property
    def compares_responses(self) -> bool:
        return True


class REINFORCEPP(PolicyGradient):
    """REINFORCE++ (arXiv 2501.03262)."""

    name: Annotated[Literal["REINFORCEPP"], Field(description="RLHF without a critic; normalised over the batch.")]
    baseline: Annotated[
        Literal["None", "Group"],
        Field(description="Group: subtract the mean reward of the prompt's responses (REINFORCE++-baseline)."),
    ] = "None"

    @property
    def compares_responses(self) -> bool:
        return self.baseline == "Group"


AnyAlgorithm: TypeAlias = (
    SFT | RewardModel | CostModel | DPO | OnlineDPO | PPO | ReMax | SafeRLHF | GRPO | RLOO | REINFORCEPP
)
