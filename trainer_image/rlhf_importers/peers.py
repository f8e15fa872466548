"""Command lines of verl, OpenRLHF and TRL for a mapped job: the tables of `rlhf import` the other way round."""

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rlhf_api.job import Job
from rlhf_api.tables import read_table
from rlhf_importers.command import PROJECTS
from rlhf_importers.table import OPTION_VALUES
from rlhf_mapper.mapping import DeviceMapping

Options = dict[str, str]
SAME = re.compile(r"(?P<field>[\w.]+)(?: \((?:uri|text|flag|above_zero|below_one)\))?")
"""Text of a table's row whose value is the same in both projects, but for the scheme of a URI."""


class Peer(NamedTuple):
    """Row of peers.yaml, which says what the columns are."""

    start: str
    option: str
    rl: Options
    kl: dict[str, Options]
    lora: Options
    reward: Options
    recompute: Options
    offload: Options
    in_host: Options
    cannot: dict[str, str]
    differs: dict[str, str]
    offline: Options = {}  # noqa: RUF012 nothing changes it
    critic: Options = {}  # noqa: RUF012
    verifier: Options = {}  # noqa: RUF012
    tensor: Options = {}  # noqa: RUF012
    cut_offload: Options = {}  # noqa: RUF012
    cut_lora: Options = {}  # noqa: RUF012


PEERS = read_table(__package__, "peers.yaml", dict[str, Peer])


def commands_of(job: Job, mapping: DeviceMapping) -> dict[str, tuple[str, str]]:
    """Return project -> (command line with a mapped job's layout, what differs); an empty command: it cannot.

    Numbers, models and layout are the job's; all else, such as learning rates, is the project's own.
    """
    return {project: _command(project, peer, job, mapping) for project, peer in PEERS.items()}


def _command(project: str, peer: Peer, job: Job, mapping: DeviceMapping) -> tuple[str, str]:
    has, words = _features(job, mapping), _words_of(project, job.spec.algorithm.name)
    if words is None:
        return "", f"it has no {job.spec.algorithm.name}"
    if reason := next((why for feature, why in peer.cannot.items() if feature in has), ""):
        return "", reason
    facts = _facts(job, mapping) | words
    options = (peer.offline if "offline" in has else peer.rl) | _same(project, job)
    for feature, further in peer._asdict().items():
        options |= further if feature in has - {"offline"} else {}
    options |= peer.kl.get(str(facts["kl_place"]), {})
    texts = {key: value.format(**facts) for key, value in options.items()}
    lines = [
        peer.option.format(key=key, value=shlex.quote(text) if text else "").rstrip() for key, text in texts.items()
    ]
    differs = "; ".join(why for feature, why in peer.differs.items() if feature in has)
    return " \\\n  ".join([peer.start.format(**facts), *lines]), differs


def _words_of(project: str, name: str) -> Options | None:
    """Return a project's program and advantage estimator for an algorithm; None if it has none."""
    tables = OPTION_VALUES[project]
    for word, algorithm in tables.get("estimators", {}).items():
        if algorithm == {"name": name}:
            return {"estimator": word, "program": "train_ppo_ray"}
    return next(({"program": word} for word, found in tables.get("programs", {}).items() if found == name), None)


def _features(job: Job, mapping: DeviceMapping) -> set[str]:
    """Return the names of the parts of peers.yaml that a mapped job needs."""
    trained = [job.models()[role] for role in job.trained()]
    predicted = mapping.prediction.models.values() if mapping.prediction else ()
    offloads = {model.offload for model in predicted} - {"None"}
    cuts = [sizes.pipeline * sizes.tensor for sizes in mapping.sizes.values()]
    is_cut, has_lora = max(cuts) > 1, any(model.lora for model in trained)
    found = {
        "offline": job.spec.algorithm.offline,
        "lora": has_lora and not is_cut,
        "cut_lora": has_lora and is_cut,
        "critic": "critic" in job.models(),
        "reward": "reward" in job.models() and "reward" not in job.trained(),
        "recompute": any(model.recomputes for model in predicted),
        "verifier": job.has_reward and "reward" not in job.models(),
        "in_host": "OptimizerInHost" in offloads,
        "offload": bool(offloads - {"OptimizerInHost"}) and not is_cut,
        "cut_offload": bool(offloads) and is_cut,
        "tensor": is_cut,
        "pools": len(mapping.pools) > 1,
        "stages": any(sizes.generation_pipeline > 1 for sizes in mapping.sizes.values()),
    }
    return {name for name, is_so in found.items() if is_so}


def _facts(job: Job, mapping: DeviceMapping) -> dict[str, Any]:
    """Return the numbers and names that options of peers.yaml refer to."""
    data, training, pool = job.spec.data, job.spec.training, mapping.pools[0]
    assert mapping.prediction, "the job was sized"
    role = job.saved
    sizes, model = mapping.sizes[role], mapping.prediction.models[role]
    tokens, rows = data.max_prompt_tokens + data.max_response_tokens, job.sequences_per_step
    kl, lora = getattr(job.spec.algorithm, "kl", None), job.models()[role].lora
    has_kl = kl is not None and "reference" in job.models()
    of_rank = max(rows // pool.size, 1)
    micro_rows = next(size for size in range(min(model.micro_batch, of_rank), 0, -1) if of_rank % size == 0)
    return {
        "nodes": len(pool.slots_per_machine),
        "slots": pool.slots_per_machine[0],
        "gpus": pool.size,
        "prompts": training.prompt_batch_size,
        "responses": rows,
        "response": data.max_response_tokens,
        "tokens": tokens,
        "micro_tokens": model.micro_batch * tokens,
        "micro_rows": micro_rows,
        "accumulation": of_rank // micro_rows,
        "steps": training.total_steps,
        "all_rows": (training.total_steps or 1) * (training.prompt_batch_size or rows),
        "updates": (training.total_steps or 1) * job.updates_per_step,
        "engines": pool.size // sizes.generation_tensor,
        "generation_tensor": sizes.generation_tensor,
        "tensor": sizes.tensor,
        "pipeline": sizes.pipeline,
        "generator_share": f"{mapping.prediction.gpu_memory_utilization:.2f}",
        "kl": kl.coefficient if has_kl else 0.0,
        "kl_place": kl.apply_to if has_kl else "",
        "rank": lora and lora.rank,
        "alpha": lora and lora.alpha,
        "model": _place(job.models()[role].uri),
        "data": _place(next(iter(data.train.sources("").values())).uri),
    }


def _same(project: str, job: Job) -> Options:
    """Return the options whose values stand in the manifest, by the project's table of keys."""
    spec, keys = job.spec.model_dump(mode="json", by_alias=True, exclude_unset=True), dict[str, str]()
    for key, (outcome, text) in PROJECTS[project].table_of(job.spec.algorithm.name).rows.items():
        found = SAME.fullmatch(text.replace("<role>", job.saved)) if outcome == "to" and "*" not in key else None
        keys |= {found["field"]: key} if found and found["field"] not in keys else {}
    return {keys[field]: _place(str(value)) for field, value in _flat(spec, "") if field in keys}


def _flat(part: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in part.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _place(uri: str) -> str:
    return uri.removeprefix("hf://").removeprefix("file://")
