"""What several keys say together, where more than one project says it: the pieces of their `combine`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_importers.table import Draft, uri_of

FUNCTION = "models.reward: a function gets prompts, responses and columns by name: docs/rewards.md"


def adapters(draft: Draft, roles: Sequence[str], *, rank: Any, alpha: Any, targets: Any) -> None:
    """Adapters of all linear layers, or of some, where there is a rank."""
    names = [targets] if isinstance(targets, str) else list(targets)
    every = names == ["all-linear"]
    for role in roles if rank else ():
        draft.put(f"models.{role}.lora", {"rank": int(rank), "alpha": int(alpha), "targets": [] if every else names})


def no_ring(draft: Draft, ring: int) -> None:
    """What is not here: texts that several ranks share."""
    if ring != 1:
        draft.checks.append("there is no sequence parallelism here: a text is read by one data-parallel rank")


def outputs(draft: Draft, loggers: Any, project: str) -> None:
    """Curves in Weights & Biases and TensorBoard; `loggers` is a list of names, or one."""
    if "wandb" in (loggers or ()):
        draft.put("outputs.wandb.project", project)
    if "tensorboard" in (loggers or ()):
        draft.put("outputs.tensorboard", True)


def train_on(draft: Draft, sets: Sequence[dict[str, Any]]) -> None:
    """One data set, with what the table says of its rows, or a mix of several."""
    if len(sets) == 1:
        draft.put("data.train", sets[0] | (draft.get("data.train") or {}))
    elif sets:
        draft.put("data.train", {"mix": [{**each, "weight": 1.0} for each in sets]})
        draft.checks.append("data.train.mix draws the same share of each data set; set the weights")


def evaluate_on(draft: Draft, held_out: dict[str, Any], every: Any) -> None:
    """Held-out data, and after how many steps it is measured; 0 and less are never."""
    draft.put("evaluation.data", held_out)
    if every and int(every) > 0:
        draft.put("evaluation.everySteps", int(every))


def halve(draft: Draft, key: str, total: int) -> None:
    """Prompt and response bounded together."""
    draft.put("data.maxPromptTokens", total // 2)
    draft.put("data.maxResponseTokens", total // 2)
    draft.checks.append(f"{key} {total} bounded both together; here half is for the prompt, half for the response")


def kl(draft: Draft, coefficient: Any, *, in_loss: bool, target: Any = None, horizon: Any = None) -> None:
    """The penalty; with a target its coefficient is steered."""
    draft.put("algorithm.kl", {"coefficient": coefficient, "applyTo": "Loss" if in_loss else "Reward"})
    if target:
        draft.spec["algorithm"]["kl"] |= {"controller": "Adaptive", "target": target, "horizon": horizon or 10000}


def whole_responses(draft: Draft) -> None:
    """GSPO's ratio."""
    if draft.has("algorithm.ratio"):
        draft.spec["algorithm"] |= {"ratio": "Sequence", "aggregation": "SequenceMean"}
    else:
        draft.checks.append("GSPO's ratio of whole responses is an option of GRPO only")


def warmup(draft: Draft, role: str, key: str, ratio: Any, steps: int | None) -> None:
    """Warm-up as a share of the steps, where their number is known."""
    place = f"models.{role}.optimizer.warmupSteps"
    if ratio and steps:
        draft.put(place, round(float(ratio) * steps))
    elif ratio:
        draft.checks.append(f"{key} is a share of the steps, whose number is not said: set {place}")


def entrypoint(file: Any, function: str) -> str:
    """A function of a Python file."""
    return f"{str(file).rsplit('/', 1)[-1].removesuffix('.py')}:{function}"


def listed(value: Any) -> list[Any]:
    """A list as it is, one value as a list, nothing as none."""
    return value if isinstance(value, list) else [value] if value else []


def critic_from(draft: Draft, model: Any) -> None:
    """Where nothing says what the critic starts from."""
    if draft.has("models.critic") and not draft.get("models.critic.uri") and model:
        draft.put("models.critic.uri", uri_of(model))
