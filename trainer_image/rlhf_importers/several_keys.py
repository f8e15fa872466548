"""Conversions of several keys together that more than one project's `combine` uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_importers.table import Draft, uri_of

FUNCTION = "models.reward: a function gets prompts, responses and columns by name: docs/rewards.md"


def adapters(draft: Draft, roles: Sequence[str], *, rank: Any, alpha: Any, targets: Any) -> None:
    """Put adapters of all linear layers, or of `targets`, if there is a rank."""
    names = [targets] if isinstance(targets, str) else list(targets)
    every = names == ["all-linear"]
    for role in roles if rank else ():
        draft.put(f"models.{role}.lora", {"rank": int(rank), "alpha": int(alpha), "targets": [] if every else names})


def no_ring(draft: Draft, ring: int) -> None:
    """Add a check for ring attention, which shares a text between ranks and has no counterpart here."""
    if ring != 1:
        draft.checks.append("there is no sequence parallelism here: a text is read by one data-parallel rank")


def outputs(draft: Draft, loggers: Any, project: str) -> None:
    """Put the outputs Weights & Biases and TensorBoard; `loggers` is a list of names, or one name."""
    if "wandb" in (loggers or ()):
        draft.put("outputs.wandb.project", project)
    if "tensorboard" in (loggers or ()):
        draft.put("outputs.tensorboard", True)


def train_on(draft: Draft, sets: Sequence[dict[str, Any]]) -> None:
    """Put one data set, with the fields of its rows that the table has set, or a mix of several."""
    if len(sets) == 1:
        draft.put("data.train", sets[0] | (draft.get("data.train") or {}))
    elif sets:
        draft.put("data.train", {"mix": [{**each, "weight": 1.0} for each in sets]})
        draft.checks.append("data.train.mix draws the same share of each data set; set the weights")


def evaluate_on(draft: Draft, held_out: dict[str, Any], every: Any) -> None:
    """Put held-out data, and the steps between two measurements; 0 and less mean never."""
    draft.put("evaluation.data", held_out)
    if every and int(every) > 0:
        draft.put("evaluation.everySteps", int(every))


def halve(draft: Draft, key: str, total: int) -> None:
    """Put half of a common bound of prompt and response to each."""
    draft.put("data.maxPromptTokens", total // 2)
    draft.put("data.maxResponseTokens", total // 2)
    draft.checks.append(f"{key} {total} bounded both together; here half is for the prompt, half for the response")


def kl(draft: Draft, coefficient: Any, *, in_loss: bool, target: Any = None, horizon: Any = None) -> None:
    """Put the KL penalty; with a target its coefficient is adaptive."""
    draft.put("algorithm.kl", {"coefficient": coefficient, "applyTo": "Loss" if in_loss else "Reward"})
    if target:
        draft.spec["algorithm"]["kl"] |= {"controller": "Adaptive", "target": target, "horizon": horizon or 10000}


def whole_responses(draft: Draft) -> None:
    """Put GSPO's ratio of whole responses."""
    if draft.has("algorithm.ratio"):
        draft.spec["algorithm"] |= {"ratio": "Sequence", "aggregation": "SequenceMean"}
    else:
        draft.checks.append("GSPO's ratio of whole responses is an option of GRPO only")


def warmup(draft: Draft, role: str, key: str, ratio: Any, steps: int | None) -> None:
    """Put the warm-up steps for a share of all steps, if the number of steps is known."""
    place = f"models.{role}.optimizer.warmupSteps"
    if ratio and steps:
        draft.put(place, round(float(ratio) * steps))
    elif ratio:
        draft.checks.append(f"{key} is a share of the steps, whose number is not said: set {place}")


def entrypoint(file: Any, function: str) -> str:
    """Return the entry point of a function in a Python file."""
    return f"{str(file).rsplit('/', 1)[-1].removesuffix('.py')}:{function}"


def as_list(value: Any) -> list[Any]:
    """Return a list unchanged, a value as a list of one, and nothing as an empty list."""
    return value if isinstance(value, list) else [value] if value else []


def critic_from(draft: Draft, model: Any) -> None:
    """Put the critic's initial model, if the draft has none."""
    if draft.has("models.critic") and not draft.get("models.critic.uri") and model:
        draft.put("models.critic.uri", uri_of(model))
