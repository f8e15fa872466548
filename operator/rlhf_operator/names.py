"""Names of the objects that the operator makes, and folders and ports in pods that the trainer uses too."""

from collections.abc import Mapping
from hashlib import sha256
from typing import Final

OPERATOR: Final = "rlhf-operator"

MANAGED_BY: Final = "app.kubernetes.io/managed-by"
JOB_NAME: Final = "rlhf.hybridflow.io/job-name"
JOB_UID: Final = "rlhf.hybridflow.io/job-uid"
ATTEMPT: Final = "rlhf.hybridflow.io/attempt"
ROLE: Final = "rlhf.hybridflow.io/role"
TUNE: Final = "rlhf.hybridflow.io/tune"
"""Label of a trial, an RLHFJob that `kubectl rlhf tune` creates: the name of the job that is tuned."""
POOL: Final = "rlhf.hybridflow.io/pool"
CONTROLLER: Final = "controller"
WORKER: Final = "worker"
READER: Final = "reader"  # a pod that reads model shapes and belongs to no attempt
SANDBOX: Final = "sandbox"  # a pod that runs code of the model for one response or episode

SIZE_IS_NOMINAL: Final = "rlhf.hybridflow.io/size-is-nominal"  # true on a claim whose size is no limit, as with NFS

OF_GROUP: Final = "/"
"""Separator of group and number in the name of a node that does not exist yet; names of nodes have no slash."""

QUEUE: Final = "kueue.x-k8s.io/queue-name"
QUEUE_PRIORITY: Final = "kueue.x-k8s.io/priority-class"
"""Label of Kueue with a priority class; a job passes this label and QUEUE on to its RayJobs."""

HEAD_CONTAINER, WORKER_CONTAINER, LOG_CONTAINER = "ray-head", "ray-worker", "driver-log"
FOLDER_CONTAINER: Final = "run-folder"  # makes the run folder on the claim of checkpoint.storage, and ends

# Folders in the pods.
JOB_FOLDER: Final = "/rlhf/job"  # the ConfigMap with job.yaml
OUTPUT_FOLDER: Final = "/rlhf/output"  # the claim with the run folder
WHOLE_CLAIM: Final = "/rlhf/claim"  # the claim of checkpoint.storage, in FOLDER_CONTAINER alone
INPUTS_FOLDER: Final = "/rlhf/inputs"  # the claims of the input jobs, read-only, by the input job's name
CLAIMS_FOLDER: Final = "/rlhf/claims"  # the claims of pvc:// URIs, by the claim's name

# Ports of the head pod; RAY_METRICS_PORT is a port of each pod.
STATUS_PORT: Final = 8490  # the trainer's /status.json
TRAINER_METRICS_PORT: Final = 8491  # the trainer's /metrics
DASHBOARD_PORT: Final = 8265  # Ray's dashboard, where KubeRay submits the job and reads its state
RAY_METRICS_PORT: Final = 8080
SANDBOX_PORT: Final = 8492  # of a sandbox, where the trainer's request comes in

GPU_PRODUCTS: Final = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
)
"""Node labels of vendors, GKE and Karpenter with the GPU product; the first one that a node has counts."""
GPU_SLICE: Final = "cloud.google.com/gke-gpu-partition-size"
"""Node label of GKE with the size of MIG slices, such as 1g.5gb, if nvidia.com/gpu are slices on the node."""
GPU_MEMORY: Final = "karpenter.k8s.aws/instance-gpu-memory"
"""Node label of Karpenter with a GPU's memory in MiB; both A100 products of AWS are named a100."""
GPU_DETAILS: Final = (GPU_SLICE, GPU_MEMORY)
"""Node labels that distinguish GPUs of one product."""
GPU_SHARING: Final = ("nvidia.com/gpu.sharing-strategy", "cloud.google.com/gke-gpu-sharing-strategy")
"""Node labels that say how pods share a GPU: none, time-slicing, time-sharing or mps."""
NETWORKS: Final = ("karpenter.k8s.aws/instance-network-bandwidth", "eks.amazonaws.com/instance-network-bandwidth")
"""Node labels of Karpenter and EKS with the node's network bandwidth in Mb/s."""


def group_of(node: str) -> str:
    """Return the group of a node that does not exist yet, by its name; empty for the name of a real node."""
    return node.rpartition(OF_GROUP)[0]


def is_gpu_resource(resource: str) -> bool:
    """Whether a resource is GPUs or slices of GPUs, by its name: nvidia.com/gpu, nvidia.com/mig-1g.5gb."""
    return resource.endswith("/gpu") or "/mig-" in resource


def gpu_label(labels: Mapping[str, str]) -> str:
    """Return the label in which a node names its GPU product; empty if it has no such label."""
    return next((label for label in GPU_PRODUCTS if label in labels), "")


def gpu_product(labels: Mapping[str, str], resource: str) -> str:
    """Return the GPU product of a node, or the product of its slices; empty without a label.

    resource: name of the GPU resource; nvidia.com/mig-1g.10gb stands for slices, as GKE's label does.
    """
    product = labels.get(gpu_label(labels), "")
    if product == "a100" and (memory := labels.get(GPU_MEMORY, "")).isdecimal():
        product += f"-{round(int(memory) / 1024)}gb"
    profile = resource.partition("/mig-")[2] or labels.get(GPU_SLICE, "")
    is_named = not profile or "-MIG-" in product.upper()
    return product if is_named or not product else f"{product}-MIG-{profile}"


def rayjob_name(job: str, attempt: int) -> str:
    return f"{job}-a{attempt}"


def sandboxes_name(rayjob: str) -> str:
    """Return the name of an attempt's Service and NetworkPolicy of sandboxes; the names of the pods begin with it."""
    return f"{rayjob}-sandbox"


def by_content(job: str, content: str) -> str:
    """Return the name of an object by a hash of its content, so that attempts with equal content share the object."""
    return f"{job}-{sha256(content.encode()).hexdigest()[:10]}"


def output_claim_name(job: str) -> str:
    """Return the name of the claim that is made for a job whose checkpoint.storage names no claim (pvc://)."""
    return f"{job}-output"
