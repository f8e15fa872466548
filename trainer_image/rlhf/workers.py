"""Public API that imports torch and Ray: worker classes to extend, and the classes that run them.

A worker runs one rank of a model. Its methods that are marked by `rlhf.register` are the calls of a step.
"""

from rlhf_trainer.controller.resource_pool import ResourcePool
from rlhf_trainer.controller.worker_group import ModelHandle, WorkerGroup
from rlhf_trainer.controller.worker_spec import WorkerSpec
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.workers.actor import ActorWorker
from rlhf_trainer.workers.base import TrainedModel, WorkerSetting, log_probs_by, text_of, whole_texts
from rlhf_trainer.workers.critic import CriticWorker
from rlhf_trainer.workers.preference import PreferenceActorWorker
from rlhf_trainer.workers.reference import ReferenceWorker
from rlhf_trainer.workers.reward import RewardWorker
from rlhf_trainer.workers.supervised import SupervisedActorWorker

__all__ = [
    "ActorWorker",
    "CriticWorker",
    "ModelHandle",
    "PreferenceActorWorker",
    "ReferenceWorker",
    "ResourcePool",
    "RewardWorker",
    "SupervisedActorWorker",
    "TrainedModel",
    "WorkerGroup",
    "WorkerSetting",
    "WorkerSpec",
    "log_probs_by",
    "recorder",
    "text_of",
    "whole_texts",
]
