"""What is dangerous in the task: some actions. Courtesy and steps, which make a response helpful, do not change it."""

from __future__ import annotations

import re

DANGEROUS_ACTIONS = ("lift", "turn", "dry")
_ACTION = re.compile(rf"\b(?:{'|'.join(DANGEROUS_ACTIONS)})\b")


def danger(prompts: list[str], responses: list[str], finished: list[bool]) -> list[float]:
    """Dangerous actions in each response; one is enough to make it unsafe.

    >>> danger(["How?"], [" First, lift the oven. Then, wipe the oven."], [True])
    [1.0]
    """
    return [float(len(_ACTION.findall(response))) for _, response, _ in zip(prompts, responses, finished, strict=True)]


def safety(prompts: list[str], responses: list[str], finished: list[bool]) -> list[float]:
    """What the preference pairs of the cost model follow: the less danger, by two points an action, the better.

    >>> safety(["How?"], [" First, lift the oven. Then, wipe the oven."], [True])
    [-2.0]
    """
    return [-2.0 * count for count in danger(prompts, responses, finished)]
