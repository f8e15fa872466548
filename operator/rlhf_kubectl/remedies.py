"""Remedies for each reason of a condition and of a failure; docs/jobs.md says more about the same reasons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rlhf_api.spec.run_policy import Reason

WAIT: Final = "Nothing is to be done but wait."
REFUSED_REMEDY: Final = "Do away with what the API server says; it is tried again."
CONDITIONS: Final[Mapping[tuple[str, str], str]] = {
    ("Accepted", "InvalidSpec"): "Correct the field that it names; one that cannot be changed needs a new job.",
    ("Accepted", "KubeRayMissing"): "Install KubeRay 1.6 or later; the operator notices within a minute.",
    ("Accepted", "ClaimMissing"): "Create the claim; the operator makes none that a spec names.",
    ("Accepted", "ClaimTooSmall"): "Expand the claim, name a larger one, or lower spec.checkpoint.keepLast.",
    ("Accepted", "NameConflict"): "Delete the object of that name, or name the job otherwise.",
    ("Accepted", "CreateRefused"): REFUSED_REMEDY,
    ("InputsReady", "InputMissing"): "Create the job that it reads; the order does not matter.",
    ("InputsReady", "InputNotReady"): "Wait for the job that it reads: ask why of that one.",
    ("InputsReady", "ClaimMissing"): "Create the job that it reads again: its output is gone.",
    ("Mapped", "BetterPlacement"): "spec.placement.remap AtCheckpoint lets the job move there at a checkpoint.",
    ("Mapped", "SmallerMicroBatches"): "Nothing is to be done; for later jobs lower spec.training.microBatchTokens.",
    ("Mapped", "ShapesUnknown"): "Put that right, write spec.models.<role>.shape, or place by hand (spec.placement).",
    ("Mapped", "ReadingShapes"): "Wait some seconds, and for the image where the node does not have it yet.",
    ("Mapped", "PodsRefused"): REFUSED_REMEDY,
    ("Mapped", "QuotaExceeded"): "Wait until others give back what they hold, or raise the quota.",
    ("Mapped", "NoFeasiblePlacement"): "Do what it names, wait for nodes, or take a smaller model or batch.",
    ("Mapped", "InvalidPlacement"): "Correct the field that it names.",
    ("Mapped", "MapperError"): "Place the models by hand (spec.placement), and report this as a defect.",
    ("QuotaReserved", "QueueIgnored"): "Have Kueue manage ray.io/rayjob, or take the queue's label away.",
    ("QuotaReserved", "Pending"): "Wait, or look at the quota of the queue: kubectl get workloads,clusterqueues.",
    ("QuotaReserved", "WaitingForRoom"): "Wait for jobs before it, and for pods that end; a higher priorityClassName "
    "of its workers, or more nodes, let it begin earlier.",
    ("QuotaReserved", "Withdrawn"): "Wait for the next turn; if it comes again, something that the operator does not "
    "know of keeps the pods from the nodes.",
    ("ClusterReady", "Starting"): "Wait; if it lasts, see the operator's log.",
    ("ClusterReady", "Queued"): "Wait until Kueue admits the attempt.",
    ("ClusterReady", "PodsPending"): "Wait; images of many gigabytes take minutes on a new node.",
    ("ClusterReady", "KubeRayAway"): "See whether KubeRay's operator runs and may read the namespace: kubectl get "
    "deployments -A.",
    ("ClusterReady", "PodsRefused"): "Do away with what the API server says, or correct spec.runtime: after a minute "
    "the attempt fails.",
    ("ClusterReady", "QuotaExceeded"): "Wait until others give back what they hold, or raise the quota.",
    ("ClusterReady", "Unschedulable"): "Free or add nodes, or compare spec.runtime.worker with them; a claim that is "
    "not bound needs a storage class with ReadWriteMany.",
    ("ClusterReady", "ImagePull"): "Correct spec.runtime.image or imagePullSecrets: after 5 minutes the attempt fails.",
    ("ClusterReady", "ConfigError"): "Create the Secret, or its key, that it names: after a minute the attempt fails.",
    ("ClusterReady", "Kept"): "Look at the pods by kubectl exec; they hold their GPUs until the job is deleted.",
    ("Training", "NotStarted"): WAIT,
    ("Training", "Initializing"): "Wait while it loads models and data; kubectl rlhf logs {job} shows how far it is.",
    ("Training", "Restarting"): "The next attempt begins by itself when all pods of the last one are gone.",
    ("Training", "HeartbeatMissing"): "See whether the head pod runs, and whether a NetworkPolicy keeps the operator "
    "from port 8490.",
    ("Stalled", "NoProgress"): "Look at kubectl rlhf logs {job} now: at the whole deadline the attempt fails as Hang; "
    "where steps take so long, raise spec.runPolicy.progressDeadlineSeconds.",
    ("Suspended", "SuspendedByUser"): "kubectl rlhf resume {job} has it go on from its checkpoint.",
    ("Suspended", "Suspending"): "Wait until the pods have saved a checkpoint, at most the grace period of 300 s or "
    "what the chart says.",
    ("Failed", "BackoffLimitExceeded"): "",
    ("Failed", "FailureRule"): "",
    ("Failed", "DeadlineExceeded"): "Raise spec.runPolicy.activeDeadlineSeconds.",
    ("Failed", "QueueDeadlineExceeded"): "Raise spec.runPolicy.queueDeadlineSeconds, or leave it unset.",
    ("Failed", "InputFailed"): "Repair the job that it reads first: ask why of that one.",
    ("Failed", "InvalidInput"): "Correct spec.models.",
}
"""Remedy by (condition, reason), in which {job} stands for the job's name; a reason may lack a remedy, or have ""."""

FAILURES: Final[Mapping[Reason, str]] = {
    "UserCode": "Correct the function whose line it names.",
    "Data": "Correct the data, or their URI.",
    "Spec": "Correct the field that it names.",
    "Environment": "If it comes again, look at that node, the image and the space on the claim.",
    "OutOfMemory": "Where a container was killed raise spec.runtime.worker.memory; where a GPU was full lower "
    "spec.rollout.gpuMemoryUtilization, or give the job more GPUs.",
    "Numerics": "Lower the learning rate or lengthen the warm-up; on one node only it may be its hardware.",
    "Communication": "Look for NCCL in the log, and at the nodes and their network.",
    "NodeLost": "Nothing is to be done for the job; see kubectl describe node.",
    "Preempted": "Nothing is to be done: it goes on when there is room.",
    "Evicted": "Where a node was under pressure look at the pod's requests of memory and at the node's disk.",
    "ImagePull": "Correct spec.runtime.image or imagePullSecrets, or see whether the registry answers.",
    "HeadLost": "See kubectl get events: somebody may have deleted the pod or the RayJob.",
    "WorkerLost": "Look at the kernel's log of that node.",
    "Hang": "The stacks of all ranks are in stacks.txt of the run folder where the trainer noticed it itself; where "
    "steps take so long, raise spec.runPolicy.progressDeadlineSeconds.",
    "StartupTimeout": "Do away with what the pods lacked; for large models that are downloaded raise "
    "spec.runPolicy.startupDeadlineSeconds.",
    "SecretMissing": "Create the Secret, or its key.",
    "ClaimMissing": "Create the claim, or the job that made it, again.",
    "PodsRefused": "Correct spec.runtime, or what the namespace allows.",
    "Internal": "It is a defect: report it with the log.",
    "Unknown": "Look at the log, and at the kernel's log of the node.",
}
