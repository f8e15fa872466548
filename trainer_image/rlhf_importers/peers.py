"""Command lines of verl, OpenRLHF and TRL for a mapped job: the tables of `rlhf import` the other way round."""

import re
import shlex
from collections.abc import Mapping
from typing import Any

from rlhf_api.job import Job
from rlhf_api.spec.data import DataSource
from rlhf_api.tables import read_table
from rlhf_importers.table import OPTION_VALUES, flat, table
from rlhf_mapper.mapping import DeviceMapping

SAME = re.compile(r"(?P<field>[\w.]+)(?: \((?:uri|text|flag|above_zero|below_one)\))?")
"""Text of a table's row whose value is the same in both projects, but for the scheme of a URI."""
Options = dict[str, str]
PEERS = read_table(__package__, "peers.yaml", dict[str, dict[str, Any]])


def commands_of(job: Job, mapping: DeviceMapping) -> dict[str, tuple[str, str]]:
    """Return project -> (command line with a mapped job's layout, or empty if it cannot run the job; what differs).

    Numbers, models and layout are the job's. Settings that its manifest leaves out have the project's defaults.
    """
    return {project: _command(project, peer, job, mapping) for project, peer in PEERS.items()}


def _command(project: str, peer: Mapping[str, Any], job: Job, mapping: DeviceMapping) -> tuple[str, str]:
    has, words = _features(job, mapping), _words_of(project, job.spec.algorithm.name)
    if words is None:
        return "", f"it has no {job.spec.algorithm.name}"
    if reason := next((why for feature, why in peer["cannot"].items() if feature in has), ""):
        return "", reason
    facts = _facts(job, mapping) | words
    options = peer["rl" if "rl" in has else "offline"] | _same(project, job)
    for feature in sorted(has - {"rl"}):
        options |= peer.get(feature, {})
    texts = {key: value.format(**facts) for key, value in options.items()}
    lines = (peer["option"].format(key=key, value=shlex.quote(text) if text else "") for key, text in texts.items())
    differs = "; ".join(why for feature, why in peer["differs"].items() if feature in has)
    return " \\\n  ".join([peer["start"].format(**facts), *map(str.rstrip, lines)]), differs


def _words_of(project: str, name: str) -> Options | None:
    """Return a project's program and advantage estimator for an algorithm; None if it has none."""
    tables = OPTION_VALUES[project]
    for word, algorithm in tables.get("estimators", {}).items():
        if algorithm == {"name": name}:
            return {"estimator": word, "program": "train_ppo_ray"}
    return next(({"program": word} for word, found in tables.get("programs", {}).items() if found == name), None)


def _features(job: Job, mapping: DeviceMapping) -> set[str]:
    """Return the names of the parts of peers.yaml that a mapped job needs."""
    assert mapping.prediction, "the job was sized"
    models, predicted = job.models(), mapping.prediction.models.values()
    offloads = {model.offload for model in predicted} - {"None"}
    is_cut = any(sizes.pipeline * sizes.tensor > 1 for sizes in mapping.sizes.values())
    kl = getattr(job.spec.algorithm, "kl", None)
    found = {
        "rl": not job.spec.algorithm.offline,
        "offline": job.spec.algorithm.offline,
        f"{'cut_' * is_cut}lora": any(models[role].lora for role in job.trained()),
        f"{'cut_' * is_cut}offload": bool(offloads - {"OptimizerInHost"} or (is_cut and offloads)),
        "in_host": "OptimizerInHost" in offloads and not is_cut,
        "apart": any(sizes.context * sizes.expert > 1 for sizes in mapping.sizes.values()),
        "critic": "critic" in models,
        "cut_critic": is_cut and "critic" in models,
        "cut_reward": is_cut and "reward" in models and "reward" not in job.trained(),
        "reward": "reward" in models and "reward" not in job.trained(),
        "verifier": job.has_reward and "reward" not in models,
        "recompute": any(model.recomputes for model in predicted),
        "tensor": is_cut,
        "pools": len(mapping.pools) > 1,
        "stages": any(sizes.generation_pipeline > 1 for sizes in mapping.sizes.values()),
        f"kl_{getattr(kl, 'apply_to', '')}": kl is not None and "reference" in models,
    }
    return {name for name, is_so in found.items() if is_so}


def _facts(job: Job, mapping: DeviceMapping) -> dict[str, Any]:
    """Return the objects and numbers that options of peers.yaml refer to."""
    assert mapping.prediction, "the job was sized"
    data, training, pool, role = job.spec.data, job.spec.training, mapping.pools[0], job.saved
    tokens, micro_batch = data.max_prompt_tokens + data.max_response_tokens, mapping.prediction.models[role].micro_batch
    rows, steps = job.sequences_per_step, training.total_steps or 1
    of_rank = max(rows // pool.size, 1)
    micro_rows = next(size for size in range(min(micro_batch, of_rank), 0, -1) if of_rank % size == 0)
    numbers = {"tokens": tokens, "micro_tokens": micro_batch * tokens, "micro_rows": micro_rows, "rows": rows}
    numbers |= {"accumulation": of_rank // micro_rows, "steps": steps, "updates": steps * job.updates_per_step}
    numbers |= {"all_rows": steps * (training.prompt_batch_size or rows), "nodes": len(pool.slots_per_machine)}
    uris = [source.uri for source in data.train.sources("").values() if isinstance(source, DataSource)]
    names = {"model": _place(job.models()[role].uri), "data": _place(uris[0] if uris else "YOUR_DATA")}
    objects = {"spec": job.spec, "pool": pool, "sizes": mapping.sizes[role], "lora": job.models()[role].lora}
    objects |= {other: mapping.sizes.get(other, mapping.sizes[role]) for other in ("reference", "critic")}
    share, engines = mapping.prediction.gpu_memory_utilization, pool.size // mapping.sizes[role].generation_tensor
    return {**numbers, **names, **objects, "share": share, "engines": engines}


def _same(project: str, job: Job) -> Options:
    """Return the options whose values stand in the manifest, by the project's table of keys."""
    spec, keys = job.spec.model_dump(mode="json", by_alias=True, exclude_unset=True), dict[str, str]()
    for key, (outcome, text) in table(project, job.spec.algorithm.name).rows.items():
        found = SAME.fullmatch(text.replace("<role>", job.saved)) if outcome == "to" and "*" not in key else None
        keys |= {found["field"]: key} if found and found["field"] not in keys else {}
    return {keys[field]: _place(str(value)) for field, value in flat(spec) if field in keys}


def _place(uri: str) -> str:
    return uri.removeprefix("hf://").removeprefix("file://")
