"""Environments of the package `verifiers` (0.4): their own programs call the model, at the base URL of the episode.

The arguments configure an environment, such as {"taskset": {"id": package}, "agent": {"harness": ...}}.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import verifiers.v1 as vf


def rows(**config: Any) -> Iterator[dict[str, Any]]:
    """Yield a row for each task of the taskset: `prompt` is its prompt as text, `task` the whole task as JSON."""
    for task in vf.load_environment(vf.resolve_env_config(config)).taskset:
        yield {"prompt": task.data.prompt_text, "task": task.data.model_dump_json()}


async def run(row: Mapping[str, Any], **config: Any) -> float:
    """Play the environment's episode of a row's `task`; returns the mean reward of the agents that it trains.

    Raises RuntimeError if the environment says that the episode failed.
    """
    environment = vf.load_environment(vf.resolve_env_config(config))
    kind = type(environment.taskset).task_type()
    task = kind(kind.data_type().model_validate_json(row["task"]), environment.config.taskset.task)
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with environment.serving():
        context = vf.ModelContext(model=os.environ["OPENAI_MODEL"], client=client)
        episode = await environment.run_episode(task, context)
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError(f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode is not ok")
    rewards = [trace.reward for trace in episode.traces if trace.agent.trainable]
    return float(sum(rewards)) / len(rewards)
