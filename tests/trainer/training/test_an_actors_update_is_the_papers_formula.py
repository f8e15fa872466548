"""One update of the actor with each option, against the formulas of the papers written out token by token.

With epsilon 1 and learning rate 1 the first step of AdamW subtracts g / (|g| + 1), where g is the clipped gradient.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.telemetry import merge
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.tiny import save_tiny
from tests.trainer.training import test_losses_do_not_depend_on_ranks_micro_batches_or_padding as updates

LONGEST = 32
Terms = Callable[[Tensor, dict[str, Tensor]], Tensor]
"""(log-probabilities of a response's tokens, the response's other numbers, each [tokens]) -> its part of the loss."""


def surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def clip_higher_masked(log_probs: Tensor, row: dict[str, Tensor]) -> Tensor:
    """DAPO's sum over tokens, IcePop's weights between 1/2 and 2, and K2 with GRPO's coefficient."""
    weight = (row["old_log_probs"] - row["rollout_log_probs"]).exp()
    weight = weight * ((weight >= 0.5) & (weight <= 2.0))
    gain = surrogate((log_probs - row["old_log_probs"]).exp(), row["advantages"] * weight, 0.2, 0.28)
    return (-gain + 0.04 * (log_probs - row["ref_log_probs"]) ** 2 / 2).sum()


def truncated_weights(log_probs: Tensor, row: dict[str, Tensor]) -> Tensor:
    """RLOO's sum over the longest length, weights of at most 1.1."""
    weight = (row["old_log_probs"] - row["rollout_log_probs"]).exp().clamp(max=1.1)
    return -surrogate((log_probs - row["old_log_probs"]).exp(), row["advantages"] * weight, 0.2, 0.2).sum() / LONGEST


def one_ratio_a_response(log_probs: Tensor, row: dict[str, Tensor]) -> Tensor:
    """GSPO, equations 5 and 7, and GRPO's K3 with its coefficient."""
    ratio = (log_probs - row["old_log_probs"]).mean().exp()
    behind = row["ref_log_probs"] - log_probs
    return (-surrogate(ratio, row["advantages"], 3e-4, 4e-4) + 0.04 * (behind.exp() - behind - 1)).mean()


# case -> (what a response adds to the loss, what the sum over the responses is divided by: (responses, tokens) -> it)
CASES: dict[str, tuple[Terms, Callable[[int, int], int]]] = {
    "DAPO actor": (clip_higher_masked, lambda responses, tokens: tokens),
    "RLOO actor": (truncated_weights, lambda responses, tokens: responses),
    "GSPO actor": (one_ratio_a_response, lambda responses, tokens: responses),
}


def log_softmax_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Log-probabilities [T, V] of what follows each token."""
    logits: Tensor = model(tokens[None]).logits[0]
    return logits.log_softmax(1)


def responses(model: nn.Module, fields: dict[str, Tensor]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """(log-probabilities, other numbers) of each row's response tokens; rows without one are left out."""
    found = []
    for number in range(updates.ROWS):
        places = fields["response_mask"][number].nonzero()[:, 0]
        if len(places):
            tokens = fields["tokens"][number, : int(places[-1]) + 1]
            each = log_softmax_of(model, tokens)[places - 1, tokens[places]]
            found.append((each, {name: fields[name][number, places] for name in updates.NOISE}))
    return found


def after_one_step(folder: str, loss_of: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """The weights after AdamW's first step on a loss."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.autograd.backward(loss_of(model))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    return {
        name: (weight - gradients[name] / (gradients[name].abs() + 1.0)).detach()
        for name, weight in model.named_parameters()
    }


def assert_same(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=3e-6, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_an_option_of_the_policy_loss(case: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", seed=3)
    fields = updates.sequences(1, 0)
    if case != "RLOO actor":
        fields["response_mask"][5] = 0.0  # a response that dynamic sampling leaves out, as in `updates`
    terms, divisor = CASES[case]

    def loss_of(model: nn.Module) -> Tensor:
        found = responses(model, fields)
        parts = torch.stack([terms(log_probs, row) for log_probs, row in found])
        return parts.sum() / divisor(len(found), sum(len(log_probs) for log_probs, _ in found))

    _, weights = updates.measured(case, folder, ranks=1, budget=100_000, mini_batch=None)
    assert_same(weights, after_one_step(folder, loss_of))


def test_the_pretraining_loss_is_added(tmp_path: Path) -> None:
    """PPO-ptx: the clipped loss, entropy and KL terms of `updates.PPO`, and twice the cross-entropy of the text."""
    folder = save_tiny(tmp_path / "model", seed=3)
    fields, text = updates.sequences(1, 0), updates.sequences(7, 0)

    def loss_of(model: nn.Module) -> Tensor:
        tokens = fields["response_mask"].sum()
        total = torch.zeros(())
        for log_probs, row in responses(model, fields):
            behind = row["ref_log_probs"] - log_probs
            clipped = surrogate((log_probs - row["old_log_probs"]).exp(), row["advantages"], 0.2, 0.2)
            total = total + (-clipped + 0.1 * (behind.exp() - behind - 1)).sum() / tokens
        entropies = [entropy_of(model, fields, number) for number in range(updates.ROWS)]
        written = torch.cat([log_probs for log_probs, _ in responses(model, text)])
        return total - 0.01 * torch.cat(entropies).sum() / tokens - 2.0 * written.mean()

    _, weights = updates.measured("PPO-ptx actor", folder, ranks=1, budget=100_000, mini_batch=None)
    assert_same(weights, after_one_step(folder, loss_of))


def test_the_divergence_from_a_teacher_is_added(tmp_path: Path) -> None:
    """The clipped loss, and twice GKD's Jensen-Shannon divergence over the teacher's 5 tokens and all others as one."""
    folder = save_tiny(tmp_path / "model", seed=3)
    fields = updates.sequences(1, 0)

    def distance(model: nn.Module, number: int) -> Tensor:
        places = fields["response_mask"][number].nonzero()[:, 0]
        tokens = fields["tokens"][number, : int(places[-1]) + 1]
        ids, teacher = fields["teacher_tokens"][number, places].chunk(2, 1)
        student = log_softmax_of(model, tokens)[places - 1].gather(1, ids.long())
        q, p = (torch.cat([each.exp(), 1.0 - each.exp().sum(1, keepdim=True)], 1) for each in (student, teacher))
        middle = (p + q) / 2
        return (p * (p / middle).log() + q * (q / middle).log()).sum() / 2

    def loss_of(model: nn.Module) -> Tensor:
        found = responses(model, fields)
        ratios = [((log_probs - row["old_log_probs"]).exp(), row["advantages"]) for log_probs, row in found]
        gain = torch.cat([surrogate(ratio, advantages, 0.2, 0.2) for ratio, advantages in ratios])
        divergences = torch.stack([distance(model, number) for number in range(updates.ROWS)])
        return -gain.mean() + 2.0 * divergences.sum() / fields["response_mask"].sum()

    _, weights = updates.measured("distilled actor", folder, ranks=1, budget=100_000, mini_batch=None)
    assert_same(weights, after_one_step(folder, loss_of))


@pytest.mark.parametrize(("case", "learns_at"), [("actor that waits", {3, 4}), ("critic that warms up", {1, 2, 3, 4})])
def test_the_actor_waits_for_its_critic(case: str, learns_at: set[int], tmp_path: Path) -> None:
    """With criticWarmupSteps 2 the actor learns from step 3 on."""
    labels = 1 if "critic" in case else None
    folder = save_tiny(tmp_path / "model", seed=3, labels=labels)
    found = set()
    for step in range(1, 5):
        arguments = (case, folder, 100_000, 0, False, None, ParallelSizes(data=1), True, step)
        (report, _), *_ = run_kept_ranks(1, updates.update, *arguments)
        found |= {step} if any(name.startswith("grad_norm/") for name in merge([report])) else set()
    assert found == learns_at


def entropy_of(model: nn.Module, fields: dict[str, Tensor], number: int) -> Tensor:
    places = fields["response_mask"][number].nonzero()[:, 0]
    tokens = fields["tokens"][number, : int(places[-1]) + 1]
    log_probs = log_softmax_of(model, tokens)[places - 1]
    return -(log_probs.exp() * log_probs).sum(1)


def test_dpo(tmp_path: Path) -> None:
    """-log sigmoid(beta (ln pi/ref of the chosen - ln pi/ref of the rejected)), the mean over the real pairs."""
    folder = save_tiny(tmp_path / "model", seed=3)
    fields = updates.pairs(0)

    def side(model: nn.Module, name: str, number: int) -> Tensor:
        places = fields[f"{name}_response_mask"][number].nonzero()[:, 0]
        tokens = fields[f"{name}_tokens"][number, : int(places[-1]) + 1]
        log_probs = log_softmax_of(model, tokens)[places - 1, tokens[places]]
        return log_probs.sum() - fields[f"ref_{name}"][number]

    def loss_of(model: nn.Module) -> Tensor:
        margins = [side(model, "chosen", number) - side(model, "rejected", number) for number in range(7)]
        return torch.stack([(1 + (-0.1 * margin).exp()).log() for margin in margins]).mean()

    _, weights = updates.measured("DPO actor", folder, ranks=1, budget=100_000, mini_batch=None)
    assert_same(weights, after_one_step(folder, loss_of))
