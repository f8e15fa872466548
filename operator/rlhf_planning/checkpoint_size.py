"""Bytes of a job's checkpoints and of its saved model, by the shapes of its models; 0 where a shape is not known."""

from collections.abc import Mapping

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.coefficients import TRAINER
from rlhf_mapper.hardware import Cluster
from rlhf_mapper.mapping import DeviceMapping, Infeasible
from rlhf_planning.numbers import number, size_text


def checkpoint_bytes(job: Job, shapes: Mapping[Role, Architecture]) -> int:
    """Return the bytes of a checkpoint: weights and moments of the trained models, or of their adapters, in float32."""
    trained, models = job.trained(), job.models()
    if not all(role in shapes for role in trained):
        return 0
    parameter_bytes = TRAINER.weight_bytes + TRAINER.optimizer_bytes
    return round(parameter_bytes * sum(shapes[role].trained_parameters(models[role].lora) for role in trained))


def bytes_at_once(job: Job, shapes: Mapping[Role, Architecture]) -> int:
    """Return the most bytes of a job's checkpoints at one time: all checkpoints that it keeps, and a new one."""
    return checkpoint_bytes(job, shapes) * (job.spec.checkpoint.kept + 1)


def bytes_of_saving(job: Job, shapes: Mapping[Role, Architecture]) -> int:
    """Return the bytes on disk while the model is saved: a trained model twice, since ranks write pieces first."""
    copies = 2 if job.saved in job.trained() else int(job.spec.algorithm.makes == "model")
    return round(copies * TRAINER.weight_bytes * shapes[job.saved].parameters) if job.saved in shapes else 0


def in_words(job: Job, shapes: Mapping[Role, Architecture]) -> str:
    """Return a sentence on the size of checkpoints; empty where a shape is not known."""
    one, at_once = (size_text(size(job, shapes)) for size in (checkpoint_bytes, bytes_at_once))
    if not checkpoint_bytes(job, shapes):
        return ""
    keep = job.spec.checkpoint.kept
    return f"A checkpoint ({', '.join(job.trained())}) takes {one}, {keep} that are kept and a new one {at_once}."


def upload_in_words(
    job: Job, shapes: Mapping[Role, Architecture], mapping: DeviceMapping | Infeasible, cluster: Cluster
) -> str:
    """Return a sentence on how an upload delays weights sent to another pool; empty without both, or a prediction."""
    is_uploaded = (job.spec.checkpoint.storage or "").startswith(("s3://", "gs://")) and job.generates_apart
    if not is_uploaded or isinstance(mapping, Infeasible) or not mapping.prediction:
        return ""
    sent, idle = mapping.prediction.phases.get("reshard", 0.0), TRAINER.efficiency.transition_seconds
    pool = next(pool for pool in mapping.pools if "actor" in pool.models)
    network = next(group.network for group in cluster.groups if group.gpu.name == pool.gpu)
    upload = checkpoint_bytes(job, shapes) / len(pool.slots_per_machine)
    moved = max(sent - idle, 0.0)
    beside = idle + moved + min(moved, upload / network)  # an upload takes half of the network while it runs
    return f"Sending weights takes {number(sent)} s, beside the upload of a checkpoint up to {number(beside)} s."
