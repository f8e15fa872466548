"""All models of an RL job read the tokens that the actor writes."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_trainer.errors import ConfigError
from rlhf_trainer.training.models import load_tokenizer


def require_one_vocabulary(job: Job, folders: Mapping[Role, str]) -> None:
    """ConfigError when a model's tokenizer maps words to other numbers than the actor's."""
    models = job.models()
    if "actor" not in models:
        return
    words = {
        role: load_tokenizer(
            folders[role], trust_remote_code=model.trust_remote_code, revision=model.revision
        ).get_vocab()
        for role, model in models.items()
    }
    for role, mine in words.items():
        if mine != words["actor"]:
            raise ConfigError(
                f"{job.name}: spec.models.{job.spec.models.source_field(role)}: its tokenizer is not the actor's "
                f"({len(mine)} against {len(words['actor'])} entries)"
            )
