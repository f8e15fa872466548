"""job.yaml for the trainer in the pods: with the mapping as a manual placement, and local folders as inputs."""

from collections.abc import Mapping
from typing import Any

from rlhf_api import kubectl_yaml
from rlhf_api.chain import ADDRESSES, SCHEME
from rlhf_api.job import Job
from rlhf_api.spec.parallel_sizes import Parallelism
from rlhf_api.status import MappedPlacement
from rlhf_operator import names
from rlhf_operator.actions import Manifest
from rlhf_operator.resources import identity, storage
from rlhf_operator.snapshot import ObservedJob, Snapshot

KEY = "job.yaml"


def config_map(snapshot: Snapshot, job: Job, mapping: MappedPlacement) -> Manifest:
    """Return the ConfigMap with job.yaml for a mapping; its name holds a hash, as later mappings may differ."""
    text = kubectl_yaml.write(placed(job, mapping, snapshot.inputs))
    metadata = identity.metadata(snapshot.job, names.by_content(job.name, text))
    return identity.document("v1", "ConfigMap", metadata, immutable=True, data={KEY: text})


def placed(job: Job, mapping: MappedPlacement, inputs: Mapping[str, ObservedJob]) -> dict[str, Any]:
    """Return the document of job.yaml; the experiment in it is the same in every attempt, whatever the mapping."""
    document: dict[str, Any] = job.model_dump(mode="json", by_alias=True)
    document["metadata"] = {"name": job.name, "namespace": job.metadata.namespace}
    spec = document["spec"]
    for part in ("suspend", "runPolicy", "runtime", "storage"):  # only the operator uses them
        del spec[part]
    spec["resources"] = {"device": mapping.device}
    spec["placement"] = {
        "mode": "Manual",
        "pools": [
            {
                "name": pool.name,
                "models": list(pool.models),
                "nodes": pool.nodes,
                **({"maxNodes": pool.max_nodes} if pool.max_nodes else {}),
                "slotsPerNode": pool.slots_per_node,
            }
            for pool in mapping.pools
        ],
    }
    spec["checkpoint"]["storage"] = storage.of_checkpoints(job)
    _tell_models(job, mapping, spec)
    if actor := next((sizes for sizes in mapping.sizes if sizes.generation_tensor), None):
        spec["rollout"]["tensorParallel"] = actor.generation_tensor
        spec["rollout"]["pipelineParallel"] = actor.generation_pipeline
    if mapping.gpu_memory_utilization is not None:
        spec["rollout"]["gpuMemoryUtilization"] = mapping.gpu_memory_utilization
    if mapping.micro_batch_tokens is not None:
        spec["training"]["microBatchTokens"] = mapping.micro_batch_tokens
    if mapping.gradient_compression:
        spec["training"]["gradientCompression"] = mapping.gradient_compression
    _tell_uris(spec, inputs)
    return document


def _tell_models(job: Job, mapping: MappedPlacement, spec: dict[str, Any]) -> None:
    used = job.models()
    for sizes in mapping.sizes if job.spec.algorithm.data != "layers" else ():  # a merge names no roles
        models: Any = spec["models"]
        *parents, last = job.spec.models.field(sizes.role).split(".")
        for name in parents:
            models = models[int(name) if isinstance(models, list) else name]
        if models[last] is None:  # a reference model is written always, as its sizes may differ from the actor's
            models[last] = used[sizes.role].model_dump(mode="json", by_alias=True)
        models[last]["parallelism"] = sizes.model_dump(include=set(Parallelism.model_fields))
        if sizes.offload is not None:
            models[last]["offload"] = sizes.offload
        if sizes.gradient_checkpointing is not None:
            models[last]["gradientCheckpointing"] = sizes.gradient_checkpointing


def _tell_uris(found: Any, inputs: Mapping[str, ObservedJob]) -> None:
    """Replace job:// and pvc:// URIs by folders in the pod, in place, in each field of ADDRESSES."""
    if isinstance(found, list):
        for each in found:
            _tell_uris(each, inputs)
    elif isinstance(found, dict):
        for name, value in found.items():
            is_address = name in ADDRESSES and isinstance(value, str)
            if is_address and value.startswith((SCHEME, storage.PVC)):
                found[name] = storage.in_pod(value, inputs)
            else:
                _tell_uris(value, inputs)
