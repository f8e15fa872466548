"""Group relative policy optimisation (DeepSeekMath, arXiv:2402.03300, Algorithm 1 and equation 3), and its kin.

A_i = (R_i - mean(R_1 .. R_G)) / std(R_1 .. R_G) for all tokens of response i of the G to a prompt; no critic. Dr. GRPO
(arXiv:2503.20783), DAPO (arXiv:2503.14476) and GSPO (arXiv:2507.18071) are options of the advantage and of the loss.
"""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.contract import Count
from rlhf_api.spec.algorithms import KL, Aggregation, PolicyGradient, Ratio
from rlhf_trainer.algorithms.models import Tensor, sample_and_learn

STD_EPS = 1e-6
"""Number added to the standard deviation of a prompt's returns before dividing by it."""


class LossKL(KL):
    """KL penalty with the defaults of GRPO's paper: weight 0.04, added to the loss."""

    coefficient: Annotated[float, Field(ge=0, description="KL penalty's weight; the first one if steered.")] = 0.04
    apply_to: Literal["Reward", "Loss"] = "Loss"
    """Place of the KL penalty: the rewards or the loss."""


class GRPO(PolicyGradient):
    paper, comparing = "arXiv:2402.03300", {}
    step = staticmethod(sample_and_learn)
    estimates = ("advantages", "response_mask")
    name: Annotated[Literal["GRPO"], Field(description="RLHF without a critic; a prompt's responses are compared.")]
    aggregation: Annotated[Aggregation, Field(description="Loss of a batch; Dr. GRPO: FixedLength.")] = "SequenceMean"
    kl: Annotated[LossKL, Field(description="The penalty that keeps the actor near the reference.")] = LossKL()
    normalize_by_std: bool = True
    """Divide advantages by the standard deviation of the prompt's rewards; Dr. GRPO: false."""
    ratio: Ratio = "Token"
    """Unit with one probability ratio: a token or, as in GSPO (arXiv 2507.18071), the whole response. Sequence needs
    aggregation SequenceMean.
    """
    oversampling: Count | None = None
    """Factor of DAPO's dynamic sampling: so many times promptBatchSize prompts are drawn. The first promptBatchSize of
    them whose responses differ in reward are trained on. Unset: all drawn prompts are.
    """

    @property
    def resolved_ratio(self) -> Ratio:
        return self.ratio

    @property
    def prompts_drawn(self) -> int:
        return self.oversampling or 1

    def advantage(
        self, returns: Tensor, signal: Tensor, mask: Tensor, *, rows: slice, group_size: int, prompts: int
    ) -> dict[str, Tensor]:
        """Return the group-relative advantages of the step's N responses, [N], and the response_mask [B, T].

        With oversampling the mask keeps the first `prompts` prompts whose responses differ in score.
        """
        advantages = compare_in_groups(returns, group_size, normalize_by_std=self.normalize_by_std)
        if self.oversampling:
            differ = signal.reshape(-1, group_size)[:, :1]
            kept = differ & (differ.cumsum(dim=0) <= prompts)
            mask = mask * kept.expand(-1, group_size).flatten()[rows, None]
        return {"advantages": advantages, "response_mask": mask}


def compare_in_groups(returns: Tensor, group_size: int, *, normalize_by_std: bool = True) -> Tensor:
    """Return advantages [N]: returns less their prompt's mean; normalize_by_std: divided by the standard deviation.

    NaN returns do not count; the standard deviation has G - 1 in its denominator (arXiv:2402.03300, section 4.1.2).
    """
    groups = returns.reshape(-1, group_size)
    advantages = groups - groups.nanmean(dim=1, keepdim=True)
    if normalize_by_std:
        others = (groups.isfinite().sum(dim=1, keepdim=True) - 1).clamp(min=1)
        std = ((advantages**2).nansum(dim=1, keepdim=True) / others) ** 0.5
        advantages = advantages / (std + STD_EPS)
    return advantages.flatten()
