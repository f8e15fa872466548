"""Preconditions of a job; each function raises the error of a broken one."""

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

from rlhf_api.chain import ADDRESSES, data_from_jobs
from rlhf_api.checks.resume import leaves
from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.problems import Problem, SpecError
from rlhf_api.spec.job_spec import Model
from rlhf_api.spec.model_shape import KNOWN
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_mapper.config_file import made_from
from rlhf_trainer.data.uri import FILE
from rlhf_trainer.errors import ConfigError, TrainerError
from rlhf_trainer.generation.families import GENERATED, why_unknown
from rlhf_trainer.run.shapes import CLAIM, config_file
from rlhf_trainer.run_folder.folder import finished_jobs


def require_packages() -> None:
    """Raise ModuleNotFoundError for a package of the workers that is not installed; nothing is imported."""
    # they are imported after the manifest is checked, as they take seconds
    for name in ("torch", "transformers", "datasets"):
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def require_no_cluster(jobs: Sequence[Job]) -> None:
    """Raise SpecError for addresses on a cluster's volumes (`pvc://`) and for suspended jobs: no operator runs here."""
    claims = {f"{job.name}: spec.{path}": uri for job in jobs for path, uri in _addresses(job) if uri.startswith(CLAIM)}
    sentence = "is on a volume of a cluster, and no operator runs this job"
    problems = [Problem(path, f"{uri} {sentence}") for path, uri in claims.items()]
    suspended = [f"{job.name}: spec.suspend" for job in jobs if job.spec.suspend]
    problems += [Problem(path, "is true, so the job is not run") for path in suspended]
    if problems:
        raise SpecError(problems)


def require_other_folders(jobs: Sequence[Job], output: Path) -> None:
    """Raise SpecError for an input in the folder that its own job writes: a start from the first step empties it."""
    problems = [
        Problem(f"{job.name}: spec.{path}", f"{uri} is in the folder that the job writes; use another --output")
        for job in jobs
        for path, uri in _addresses(job)
        if uri.startswith(FILE) and path != "checkpoint.storage"
        if Path(unquote(uri.removeprefix(FILE))).resolve().is_relative_to((output / job.name).resolve())
    ]
    if problems:
        raise SpecError(problems)


def _addresses(job: Job) -> list[tuple[str, str]]:
    """Return (path of the field, URI) of everything that a job reads or writes."""
    fields = leaves(job.spec.model_dump(mode="json", by_alias=True, exclude={"outputs"}))
    return [(path, str(value)) for path, value in fields if path.rpartition(".")[2] in (*ADDRESSES, "storage")]


def require_possible(job: Job, sizes: Mapping[Role, ParallelSizes], models: Mapping[Role, tuple[Model, str]]) -> None:
    """Raise SpecError if a model cannot be cut into the pipeline stages, tensor, expert or context parts of `sizes`.

    A run checks the sizes of its placement, the deep check those of the manifest (`place.sizes_in`).

    sizes: by role; models: by role (model with the same shape, folder of this model).
    """
    problems = list[Problem]()
    for role, cut in sizes.items():
        follows_actor = role == "reference" and job.spec.models.reference is None
        if follows_actor or (cut.data == cut.world_size and cut.expert == 1):
            continue
        from transformers import AutoModelForCausalLM  # seconds that other sizes do not need

        from rlhf_trainer.training.attention import why_not_packed
        from rlhf_trainer.training.loading import load_config
        from rlhf_trainer.training.sharding import impossible_sizes

        model, folder = models["actor" if role == "rollout" else role]
        config = load_config(folder, trust_remote_code=model.trust_remote_code, revision=model.revision)
        known = AutoModelForCausalLM._model_mapping.get(type(config), None)  # noqa: SLF001 there is no public name
        unpacked = why_not_packed(known, config) if cut.context > 1 and isinstance(known, type) else ""
        reason = f"context is {cut.context}, but {unpacked}" if unpacked else ""
        if not reason and cut.pipeline * cut.tensor * cut.expert > 1:
            parts = {"pipeline": cut.pipeline, "tensor": cut.tensor, "expert": cut.expert}
            reason = impossible_sizes(config, **parts, generates=role == "rollout")
        if reason:
            size, _, sentence = reason.partition(" ")
            path = f"{job.name}: spec.models.{job.spec.models.field(role)}.parallelism.{size}"
            path = f"{job.name}: spec.rollout.{size}Parallel" if role == "rollout" else path
            problems.append(Problem(path, sentence))
    if problems:
        raise SpecError(problems)


def require_generating(jobs: Sequence[Job], job: Job, output: Path) -> None:
    """Raise SpecError if a job generates with a model of an unknown family; jobs: all of the manifest.

    A config.json that cannot be read is left to the deep check.
    """
    if job.spec.algorithm.offline or "actor" not in job.models():
        return
    maker, made = made_from(job, "actor", {each.name: each for each in jobs})
    model, auto_map = maker.models()[made], None
    if model.shape:
        model_type = model.shape.model_type or KNOWN.get(model.shape.name or "", {}).get("model_type", GENERATED[0])
    else:
        try:
            found = json.loads(config_file(model.uri, model.revision, output).read_text(encoding="utf-8"))
            model_type, auto_map = found["model_type"], found.get("auto_map")
        except (TrainerError, OSError, ValueError, LookupError, TypeError):
            return
    if reason := why_unknown(model_type, auto_map, trust_remote_code=model.trust_remote_code):
        raise SpecError([Problem(f"{job.name}: spec.models.{job.spec.models.source_field('actor')}", reason)])


def require_mixtures(job: Job, experts: Mapping[Role, int]) -> None:
    """Raise SpecError for settings of mixtures of experts if the job's first trained model is dense.

    experts: number of experts in a layer, by role; below 2 if the model is dense. A missing role is not checked.
    """
    replays, balances = job.spec.rollout.routing == "Replay", bool(job.spec.training.router_aux_loss)
    asked = {"rollout.routing": replays, "training.routerAuxLoss": balances}
    dense = [role for role in job.trained()[:1] if experts.get(role, 2) < 2]
    sentence = "is for mixtures of experts, and models.{} has none"
    paths = [path for path in asked if asked[path]]
    problems = [Problem(f"{job.name}: spec.{path}", sentence.format(role)) for role in dense for path in paths]
    if problems:
        raise SpecError(problems)


def other_vocabularies(job: Job, models: Mapping[Role, Model], folders: Mapping[Role, str]) -> set[Role]:
    """Return the reward and cost models whose tokenizer is not the actor's; ConfigError if another model's is not.

    models: all of the job by role; folders: their local folders or hub names.
    """
    if "actor" not in models:
        return set()
    origins = {role: (folders[role], model.trust_remote_code, model.revision) for role, model in models.items()}
    if len(set(origins.values())) == 1:
        return set()
    from rlhf_trainer.training.loading import load_tokenizer

    words = {
        origin: load_tokenizer(origin[0], trust_remote_code=origin[1], revision=origin[2]).get_vocab()
        for origin in set(origins.values())
    }
    actors = words[origins["actor"]]
    others = {role for role, origin in origins.items() if words[origin] != actors}
    for role in sorted(others - {"reward", "cost"}):
        raise ConfigError(
            f"{job.name}: spec.models.{job.spec.models.source_field(role)}: its tokenizer is not the actor's "
            f"({len(words[origins[role]])} against {len(actors)} entries)"
        )
    return others


def is_written(job: Job, output: Path, made: Mapping[str, str]) -> bool:
    """Whether all data sets that other jobs write for this job exist; `made`: identity that each job must have."""
    written = {name: finished.identity for name, finished in finished_jobs(output).items()}
    return all(name in written and written[name] == made[name] for name in data_from_jobs(job).values())
