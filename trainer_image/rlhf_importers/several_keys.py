"""Conversions that need several keys of a configuration at once; shared by the `combine` functions of the projects."""

from collections.abc import Sequence
from typing import Any

from rlhf_importers.table import Draft, uri_of

FUNCTION = "models.reward: a function gets prompts, responses and columns by name: docs/rewards.md"


def adapters(draft: Draft, roles: Sequence[str], *, rank: Any, alpha: Any, targets: Any) -> None:
    """Set `models.<role>.lora` of the draft manifest for each role, if rank > 0; targets: layers, or all-linear."""
    names = [targets] if isinstance(targets, str) else list(targets)
    every = names == ["all-linear"]
    for role in roles if rank else ():
        draft.put(f"models.{role}.lora", {"rank": int(rank), "alpha": int(alpha), "targets": [] if every else names})


def outputs(draft: Draft, loggers: Any, project: str) -> None:
    """Switch on the draft's outputs to Weights & Biases and TensorBoard that `loggers` names (a list, or one name)."""
    if "wandb" in (loggers or ()):
        draft.put("outputs.wandb.project", project)
    if "tensorboard" in (loggers or ()):
        draft.put("outputs.tensorboard", True)


def train_on(draft: Draft, sets: Sequence[dict[str, Any]]) -> None:
    """Set the draft's data.train: one data set, beside fields set there before, or a mix of several data sets."""
    if len(sets) == 1:
        draft.put("data.train", sets[0] | (draft.get("data.train") or {}))
    elif sets:
        draft.put("data.train", {"mix": list(sets)})


def evaluate_on(draft: Draft, held_out: dict[str, Any], every: Any) -> None:
    """Set the held-out data, and the steps between two evaluations; 0 and less mean never during training."""
    draft.put("evaluation.data", held_out)
    if every and 0 < float(every) < 1:
        draft.checks.append(f"evaluation.everySteps: {every} is a share of the run; write a number of steps")
    elif every and int(every) > 0:
        draft.put("evaluation.everySteps", int(every))


def halve(draft: Draft, key: str, total: int) -> None:
    """Set the token limits of prompt and response to half of `total`, the limit of both; add a note for the user."""
    draft.put("data.maxPromptTokens", total // 2)
    draft.put("data.maxResponseTokens", total // 2)
    draft.checks.append(f"{key} {total} bounded both together; here half is for the prompt, half for the response")


def kl(draft: Draft, coefficient: Any, *, in_loss: bool, target: Any = None, horizon: Any = None) -> None:
    """Set the KL penalty of the draft manifest; with a target its coefficient is steered."""
    draft.put("algorithm.kl", {"coefficient": coefficient, "applyTo": "Loss" if in_loss else "Reward"})
    if target:
        draft.spec["algorithm"]["kl"] |= {"controller": "Coefficient", "target": target, "horizon": horizon or 10000}


def whole_responses(draft: Draft) -> None:
    """Set GSPO's ratio and aggregation of whole responses, or add a note for the user if the algorithm lacks them."""
    if draft.has("algorithm.ratio"):
        draft.spec["algorithm"] |= {"ratio": "Sequence", "aggregation": "SequenceMean"}
    else:
        draft.checks.append("GSPO's ratio of whole responses is an option of GRPO only")


def warmup(draft: Draft, role: str, key: str, ratio: Any, steps: int | None) -> None:
    """Set a model's warm-up steps to a share of all steps, or add a note for the user if that number is unknown."""
    place = f"models.{role}.optimizer.warmupSteps"
    if ratio and steps:
        draft.put(place, round(float(ratio) * steps))
    elif ratio:
        draft.checks.append(f"{key} is a share of the steps, whose number is not said: set {place}")


def entrypoint(file: Any, function: str) -> str:
    """Return the entry point `module:function` of a function in a Python file."""
    return f"{str(file).rsplit('/', 1)[-1].removesuffix('.py')}:{function}"


def as_list(value: Any) -> list[Any]:
    """Return a configuration's value as a list: a single value as a list of one, nothing as an empty list."""
    return value if isinstance(value, list) else [value] if value else []


def critic_from(draft: Draft, model: Any) -> None:
    """Set the critic's initial model, if the algorithm has a critic and the draft manifest gives it none."""
    if draft.has("models.critic") and not draft.get("models.critic.uri") and model:
        draft.put("models.critic.uri", uri_of(model))


def correction(draft: Draft, *, low: Any, high: Any, **options: Any) -> None:
    """Set the importance weights of a draft manifest; a low bound not below 1, or a high one below 1, gets a check."""
    for name, bound in (("low", low), ("high", high)):
        if bound not in (None, "") and (float(bound) < 1.0) == (name == "low"):
            options[name] = float(bound)
        elif bound not in (None, ""):
            draft.checks.append(f"algorithm.rolloutCorrection.{name}: {bound} is not on its side of 1")
    draft.put("algorithm.rolloutCorrection", {name: value for name, value in options.items() if value is not None})
