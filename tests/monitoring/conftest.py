"""Helm and a job."""

from tests.helm.conftest import helm
from tests.trainer.outputs.conftest import sft

__all__ = ["helm", "sft"]
