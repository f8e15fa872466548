"""Largest differences of rollout corrections and preference losses from verl's and TRL's own code, on random cases.

    python -m tests.accept.corrections        # in an environment that has verl, TRL, or neither

verl's are functions; TRL's corrections, DPO and KTO losses are lines of its trainers, run here as installed. A peer
that cannot be imported is replaced by plain float64 formulas, and the result says so.
"""

from __future__ import annotations

import inspect
import json
import math
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rlhf_api.spec.algorithm_table import ALGORITHMS
from rlhf_api.spec.algorithms import Preference, RolloutCorrection
from rlhf_trainer.algorithms.kto import KTO
from rlhf_trainer.ops.rollout_correction import correct_rollout, unit_weights

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".venv-peers" / "bin" / "python"
CASES, ROWS, TOKENS = 100, 8, 24
LEVELS, MODES = ("Token", "Sequence", "Geometric"), ("Truncate", "Clip", "Mask")
BOUNDS = ({"high": 2.0}, {"low": 0.5, "high": 2.0}, {"low": 0.9, "high": 1.2})
BETA, WRONG, GAMMA = 0.3, 0.2, 0.6
MAX_DIFFERENCE = 1e-6
"""verl adds 1e-8 to divisors of means, and TRL computes the odds ratio in float32."""
Weigh = Callable[[Tensor, Tensor, RolloutCorrection], Tensor | None]
"""Weights [B, T] of log-ratios, mask and options; None where a peer has no such correction."""


def compare_corrections(python: str | None = None) -> dict[str, Any]:
    """Return the largest differences by peer, measured by `.venv-peers` if it is there, else by this environment."""
    command = [python or (str(PEERS) if PEERS.exists() else sys.executable), "-m", "tests.accept.corrections"]
    found: dict[str, Any] = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
    return found


def measure() -> dict[str, Any]:
    """Largest differences of this environment's peers, and which have been read."""
    peers = {name: each for name, load in {"verl": of_verl, "TRL": of_trl}.items() if (each := load()) is not None}
    row: dict[str, Any] = {"against": sorted(peers) or ["own formulas"], "cases": CASES}
    for name, weigh in {**peers, "own formulas": by_formulas}.items():
        row[f"weights, {name}"], row[f"kinds, {name}"] = difference_of_weights(weigh)
    losses = losses_of_trl()
    row["losses"] = {**dict(difference_of_losses(losses)), "kto": difference_of_kto()} if losses else "TRL is not there"
    figures = [each for name, each in row.items() if name.startswith("weights")]
    figures += row["losses"].values() if losses else []
    row["max difference"] = max(figures)
    row["ok"] = row["max difference"] <= MAX_DIFFERENCE
    return row


def random_case(seed: int) -> tuple[Tensor, Tensor]:
    """Log-ratios and mask [ROWS, TOKENS], float64; each row has a token."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(ROWS, TOKENS, generator=generator) < 0.6).double()
    mask[:, 0] = 1.0
    return 0.3 * torch.randn(ROWS, TOKENS, generator=generator, dtype=torch.float64), mask


def options() -> Iterator[RolloutCorrection]:
    for level, mode, bounds, normalize in product(LEVELS, MODES, BOUNDS, (False, True)):
        if mode != "Truncate" or "low" not in bounds:
            yield RolloutCorrection.model_validate({"level": level, "mode": mode, **bounds, "normalize": normalize})


def difference_of_weights(weigh: Weigh) -> tuple[float, int]:
    """(Largest difference from ours, kinds of corrections that both have)."""
    largest, kinds = 0.0, 0
    for correction in options():
        compared = False
        for seed in range(CASES):
            log_ratios, mask = random_case(seed)
            ours = correct_rollout(log_ratios, mask, correction=correction).weights
            units = unit_weights(mask, correction.level)
            if not (total := (ours * units).sum()):
                continue  # verl divides by the sum of all weights
            theirs = weigh(log_ratios, mask, correction)
            if theirs is None:
                break
            ours = ours * (units.sum() / total) if correction.normalize else ours
            if theirs.dtype == torch.bool:  # a mask of what is kept, without weights
                ours, theirs = (ours > 0).double(), theirs.double()
            largest, compared = max(largest, float((ours - theirs).abs().max())), True
        kinds += compared
    return largest, kinds


def by_formulas(log_ratios: Tensor, mask: Tensor, correction: RolloutCorrection) -> Tensor | None:
    """The formulas of `ops/rollout_correction.py`, response by response."""
    if correction.normalize:
        return None
    low, high = correction.bounds
    weights = torch.zeros_like(mask)
    for row in range(len(mask)):
        chosen = mask[row] > 0
        ratios = [math.exp(each) for each in log_ratios[row, chosen].tolist()]
        whole = math.prod(ratios)
        whole = whole ** (1 / len(ratios)) if correction.level == "Geometric" else whole
        units = ratios if correction.level == "Token" else [whole] * len(ratios)
        if correction.mode == "Mask":
            units = [each if low <= each <= high else 0.0 for each in units]
        least = low if correction.mode == "Clip" else 0.0
        weights[row, chosen] = torch.tensor([min(max(each, least), high) for each in units], dtype=torch.float64)
    return weights


def of_verl() -> Weigh | None:
    """verl's importance weights and, for the geometric mean, its rejection of responses."""
    try:
        helper: Any = import_module("verl.trainer.ppo.rollout_corr_helper")
    except ImportError:
        return None

    def weigh(log_ratios: Tensor, mask: Tensor, correction: RolloutCorrection) -> Tensor | None:
        low, high = correction.bounds
        if correction.level == "Geometric":
            if correction.mode != "Mask" or correction.normalize:
                return None
            bounds = f"{1 / high!r}_{1 / low!r}"  # of the generator's probability over the trainer's
            kept, _ = helper.compute_rollout_rejection_mask(log_ratios, mask, "seq_mean_k1", bounds)
            return torch.as_tensor(kept > 0)
        if correction.mode == "Clip":
            return None
        threshold = f"{low!r}_{high!r}" if correction.mode == "Mask" else high
        level = correction.level.lower()
        weights: Tensor = helper.compute_rollout_correction_weights(
            log_ratios, mask, level, threshold, rollout_is_batch_normalize=correction.normalize
        )[0]
        return weights

    return weigh


def lines_of(function: Callable[..., Any], first: str, last: str) -> str:
    """The lines of an installed function from the one that begins with `first` to the one before `last`."""
    lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    start = next(number for number, line in enumerate(lines) if line.strip().startswith(first))
    end = next(number for number, line in enumerate(lines) if number > start and line.strip().startswith(last))
    return textwrap.dedent("\n".join(lines[start:end]))


def of_trl() -> Weigh | None:
    """TRL's `vllm_importance_sampling_mode` of GRPOTrainer."""
    try:
        from trl.trainer import grpo_trainer
    except ImportError:
        return None
    trainer = grpo_trainer.GRPOTrainer._generate_and_score_completions
    code = compile(lines_of(trainer, "per_token_logps_diff = (old", "# Compute the per-token log prob"), "TRL", "exec")

    def weigh(log_ratios: Tensor, mask: Tensor, correction: RolloutCorrection) -> Tensor | None:
        low, high = correction.bounds
        if correction.level == "Geometric" or correction.normalize:
            return None
        kind = "mask" if correction.mode == "Mask" else "truncate"
        prefix = "vllm_importance_sampling_"
        given = {"mode": f"{correction.level.lower()}_{kind}", "clip_min": low or None, "clip_max": high}
        names = {
            "self": SimpleNamespace(**{prefix + name: value for name, value in given.items()}),
            "old_per_token_logps": log_ratios,
            "sampling_per_token_logps": torch.zeros_like(log_ratios),
            "mask": mask,
            "torch": torch,
            "math": math,
        }
        exec(code, names)
        found: Tensor = names[f"{prefix}ratio"]  # type: ignore[assignment]
        return found * mask

    return weigh


Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Loss [N] of log-ratios (chosen, rejected) [N] and of token masks (chosen, rejected) [N, T]."""
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "sigmoid": {"name": "DPO"},
    "sigmoid_norm": {"name": "DPO", "lengthNormalized": True},
    "ipo": {"name": "DPO", "loss": "IPO", "lengthNormalized": True},
    "robust": {"name": "DPO", "loss": "Robust", "labelSmoothing": WRONG},
    "simpo": {"name": "SimPO", "margin": GAMMA},
    "odds ratio": {"name": "ORPO"},
}


def losses_of_trl() -> dict[str, Loss] | None:
    """TRL's loss of each of OPTIONS; for ORPO the part of the odds ratio, as its other part also reads the prompts."""
    try:
        from trl.experimental.cpo.cpo_trainer import CPOTrainer
        from trl.experimental.orpo.orpo_trainer import ORPOTrainer
        from trl.trainer.dpo_trainer import DPOTrainer
    except ImportError:
        return None
    lines = lines_of(DPOTrainer._compute_loss, "chosen_logratios = chosen_logps", "if self.use_weighting:")
    code = compile(lines, "TRL", "exec")

    def dpo(kind: str) -> Loss:
        def loss(chosen: Tensor, rejected: Tensor, one: Tensor, other: Tensor) -> Tensor:
            none = torch.zeros_like(chosen)
            settings = {"f_divergence_type": "reverse_kl", "loss_types": [kind], "loss_weights": [1.0]}
            names = {
                "self": SimpleNamespace(**settings, beta=BETA, label_smoothing=WRONG),
                "chosen_logps": chosen,
                "rejected_logps": rejected,
                "completion_mask": torch.cat([one, other]),
                "ref_chosen_logps": none,
                "ref_rejected_logps": none,
                "torch": torch,
                "math": math,
                "F": functional,
            }
            exec(code, names)
            return names["per_sequence_loss"]  # type: ignore[return-value]

        return loss

    alone = SimpleNamespace(device="cpu")
    cpo = SimpleNamespace(
        alpha=0.0, loss_type="simpo", simpo_gamma=GAMMA, beta=BETA, label_smoothing=0.0, accelerator=alone
    )

    def simpo(chosen: Tensor, rejected: Tensor, one: Tensor, other: Tensor) -> Tensor:
        return CPOTrainer.cpo_loss(cpo, chosen / one.sum(1), rejected / other.sum(1))[0]  # type: ignore[no-any-return]

    def odds(chosen: Tensor, rejected: Tensor, one: Tensor, other: Tensor) -> Tensor:
        means = chosen / one.sum(1), rejected / other.sum(1)
        found = ORPOTrainer.odds_ratio_loss(SimpleNamespace(beta=BETA, accelerator=alone), *means)
        return torch.as_tensor(-found[0] - means[0])  # TRL takes the losses off the cross-entropy

    return {
        **{kind: dpo(kind) for kind in ("sigmoid", "sigmoid_norm", "ipo", "robust")},
        "simpo": simpo,
        "odds ratio": odds,
    }


def difference_of_losses(losses: Mapping[str, Loss]) -> Iterator[tuple[str, float]]:
    """Yield (TRL's name, largest difference over all cases) of each loss."""
    for name, options_ in OPTIONS.items():
        algorithm = ALGORITHMS[options_["name"]].model_validate({**options_, "beta": BETA})
        assert isinstance(algorithm, Preference)
        largest = 0.0
        for seed in range(CASES):
            one, other = random_case(seed)[1], random_case(seed + CASES)[1]
            generator = torch.Generator().manual_seed(seed)
            draws = torch.rand(2, ROWS, generator=generator, dtype=torch.float64)
            chosen, rejected = -draws[0] * one.sum(1), -draws[1] * other.sum(1)
            rewards = algorithm.implicit_rewards(chosen, one.sum(1)), algorithm.implicit_rewards(rejected, other.sum(1))
            ours = algorithm.losses(*rewards, functional.logsigmoid)
            largest = max(largest, float((ours - losses[name](chosen, rejected, one, other)).abs().max()))
        yield name, largest


def difference_of_kto() -> float:
    """Largest difference from TRL's KTO loss, with weights, of rows with labels and rows of which none is desirable."""
    trainer: Any = import_module("trl.trainer.kto_trainer")
    parts = (("kl = (KL_logps", "else:"), ("# Chosen losses", "self._metrics"))
    lines = [lines_of(trainer.KTOTrainer._compute_loss, *each) for each in parts]
    code = compile("\n".join(lines), "TRL", "exec")
    options_ = {"beta": BETA, "desirable_weight": 1.5, "undesirable_weight": 0.75}
    algorithm = KTO(name="KTO", **options_)
    largest = 0.0
    for seed in range(CASES):
        generator = torch.Generator().manual_seed(seed)
        ratios, mismatched = 4.0 * torch.randn(2, ROWS, generator=generator, dtype=torch.float64)
        desirable = torch.rand(ROWS, generator=generator) < seed % 4 / 3.0
        none = torch.zeros(ROWS, dtype=torch.float64)
        accelerator = SimpleNamespace(gather_for_metrics=lambda kl: kl, device="cpu")
        settings = {"loss_type": "kto", "accelerator": accelerator}
        names: dict[str, Any] = {
            "self": SimpleNamespace(**settings, **options_),
            "KL_logps": mismatched,
            "ref_KL_logps": none,
            "chosen_logps": ratios[desirable],
            "ref_chosen_logps": none[desirable],
            "rejected_logps": ratios[~desirable],
            "ref_rejected_logps": none[~desirable],
            "torch": torch,
            "F": functional,
        }
        exec(code, names)
        found = algorithm.losses(ratios, desirable.double(), mismatched.mean().clamp(min=0.0))
        ours = torch.cat([found[desirable], found[~desirable]])
        largest = max(largest, float((ours - names["losses"]).abs().max()))
    return largest


if __name__ == "__main__":
    print(json.dumps(measure()))
