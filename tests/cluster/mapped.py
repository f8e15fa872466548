"""PPO of a 7B model, of which a claim has the config.json, mapped by the operator onto made-up nodes with GPUs.

`python -m tests.cluster.mapped FILE` starts a cluster for it, and writes what operator and `rlhf plan` said as JSON.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_api import kubectl_yaml
from tests.cluster.api_world import write_measured
from tests.cluster.client import Cluster
from tests.cluster.lifecycle import SECONDS, Document, Jobs
from tests.cluster.stage import stage

CLAIM, FOLDER = "models", "llama 7b"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}
ROLES = ("actor", "critic", "reward")
NODES: Mapping[str, tuple[int, int, str, str]] = {
    "large": (2, 8, "NVIDIA-A100-SXM4-80GB", "a100-80g"),
    "small": (1, 1, "NVIDIA-A10", "a10-24g"),
}
"""Value of the label `pool` -> nodes, GPUs of each, what their label says, and what `rlhf plan` calls them."""
POOL, NAMESPACE = "pool", "mapped"
MEMORY = 64
"""GiB of a worker pod: too little for models to wait there."""


def ppo(pool: str) -> Document:
    """The job on the nodes of a pool."""
    models: Document = {role: {"uri": f"pvc://{CLAIM}/{FOLDER}"} for role in ROLES}
    spec = {
        "algorithm": {"name": "PPO"},
        "models": models,
        "data": {
            "train": {"uri": f"pvc://{CLAIM}/prompts.jsonl"},
            "maxPromptTokens": 1024,
            "maxResponseTokens": 1024,
        },
        "training": {"totalSteps": 1000, "promptBatchSize": 1024, "miniBatchSize": 128},
        "resources": {"device": "GPU", "maxNodes": NODES[pool][0]},
        "runtime": {
            "worker": {"memory": f"{MEMORY}Gi", "template": {"spec": {"nodeSelector": {POOL: pool}}}},
        },
    }
    metadata = {"name": f"ppo-{pool}"}
    return {"apiVersion": "rlhf.hybridflow.io/v1alpha1", "kind": "RLHFJob", "metadata": metadata, "spec": spec}


def tight() -> Document:
    """The job on the large nodes, with checkpoints on the small claim of the models."""
    job = ppo("large")
    job["metadata"]["name"] = "ppo-tight"
    job["spec"]["checkpoint"] = {"storage": f"pvc://{CLAIM}/runs"}
    return job


def planned(pool: str) -> Document:
    """What `rlhf plan --json` says of it for the same nodes."""
    count, gpus, _, gpu = NODES[pool]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        (folder / "job.yaml").write_text(kubectl_yaml.write(ppo(pool)))
        uris = [f"--set=models.{role}.uri={(folder / FOLDER).as_uri()}" for role in ROLES]
        nodes = {"gpu": gpu, "count": count, "gpusPerNode": gpus, "hostMemoryGB": MEMORY * 2**30 / 1e9}
        (folder / "nodes.yaml").write_text(kubectl_yaml.write({"nodes": [nodes]}))
        told = ("--json", "--inventory", folder / "nodes.yaml")
        command = [Path(sys.executable).with_name("rlhf"), "plan", folder / "job.yaml", *told, *uris]
        done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, check=False)
    document: Document = json.loads(done.stdout)
    return document


def write_model(folder: Path) -> None:
    """A model of which there is a config.json only."""
    (folder / FOLDER).mkdir()
    (folder / FOLDER / "config.json").write_text(json.dumps(CONFIG))


@contextmanager
def gpu_nodes(server: Cluster) -> Iterator[None]:
    """The nodes are there meanwhile."""
    names = []
    for pool, (count, gpus, product, _) in NODES.items():
        for number in range(count):
            names.append(f"{pool}-{number}")
            labels = {POOL: pool, "nvidia.com/gpu.product": product}
            server.add_node(names[-1], {"nvidia.com/gpu": str(gpus)}, labels)
    try:
        yield
    finally:
        for name in names:
            server.remove_node(name)


def measure(server: Cluster, namespace: str, folder: Path) -> Document:
    """The statuses of both jobs once the operator has answered: by pool, and what `rlhf plan` says.

    Of the large nodes also the size of the claim that is made, and why a job with a claim too small for it waits.
    """
    claim = {
        "metadata": {"name": CLAIM},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    server.offer_volumes()
    server.expect("POST", f"/api/v1/namespaces/{namespace}/persistentvolumeclaims", claim)
    write_model(server.folder_of_claim(namespace, CLAIM))
    with gpu_nodes(server), stage(server, namespace, folder) as (lives, _):
        lives.apply(*(ppo(pool) for pool in NODES), tight())
        statuses = {pool: answered(lives.jobs, f"ppo-{pool}") for pool in NODES}
        made = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/ppo-large-output"
        size = server.expect("GET", made)["spec"]["resources"]["requests"]["storage"]
        waits = server.until(lambda: refused(lives.jobs, "ppo-tight"), SECONDS, "ppo-tight is refused")
        for name in (*(f"ppo-{pool}" for pool in NODES), "ppo-tight"):
            lives.jobs.delete(name)
    found = {pool: {"status": status, "plan": planned(pool)} for pool, status in statuses.items()}
    return {"large": found["large"] | {"claim": size, "tight": waits}, "small": found["small"]}


def refused(jobs: Jobs, name: str) -> str:
    """Why a job is not accepted; empty while it is, as before the shapes of its models are read."""
    accepted = jobs.condition(name, "Accepted")
    return f"{accepted['reason']}: {accepted['message']}" if accepted.get("status") == "False" else ""


def answered(jobs: Jobs, name: str) -> Document:
    """The status of a job as soon as the operator has mapped it, or said that it cannot."""

    def found() -> Document:
        mapped = jobs.condition(name, "Mapped")
        return jobs.status(name) if mapped.get("reason") not in (None, "ReadingShapes") else {}

    return jobs.server.until(found, SECONDS, f"{name} is mapped or refused")


def by_operator(status: Mapping[str, Any]) -> Document:
    """Pools, sizes and seconds of a status."""
    mapping = status["mapping"]
    sizes = {each["role"]: [each[name] for name in ("pipeline", "tensor", "data")] for each in mapping["sizes"]}
    actor = next(each for each in mapping["sizes"] if each["role"] == "actor")
    return {
        "pools": [[pool["models"], pool["gpu"], pool["nodes"]] for pool in mapping["pools"]],
        "sizes": sizes,
        "generation": [actor["generationPipeline"], actor["generationTensor"]],
        "step_seconds": mapping["predictedStepSeconds"],
    }


def by_plan(plan: Mapping[str, Any]) -> Document:
    """The same of what `rlhf plan` says."""
    actor = plan["models"]["actor"]
    return {
        "pools": [[pool["models"], pool["gpu"], pool["nodes"]] for pool in plan["pools"]],
        "sizes": {role: [model[name] for name in ("p", "t", "d")] for role, model in plan["models"].items()},
        "generation": [actor["p_g"], actor["t_g"]],
        "step_seconds": plan["predicted"]["step_seconds"],
    }


def condition(status: Mapping[str, Any]) -> Document:
    """The condition Mapped."""
    found: Document = next(each for each in status["conditions"] if each["type"] == "Mapped")
    return found


def summary(found: Mapping[str, Any]) -> Document:
    """The reasons of both answers, what was mapped and what was refused."""
    large, small = found["large"], found["small"]
    is_mapped = "mapping" in large["status"]
    return {
        "reasons": [condition(each["status"])["reason"] for each in (large, small)],
        "operator": by_operator(large["status"]) if is_mapped else None,
        "plan": by_plan(large["plan"]),
        "refused": condition(small["status"])["message"],
    }


def measure_summary(server: Cluster, folder: Path) -> Document:
    """Return the summary of what operator and `rlhf plan` said."""
    return summary(measure(server, NAMESPACE, folder))


if __name__ == "__main__":
    sys.exit(write_measured(measure_summary, NAMESPACE))
