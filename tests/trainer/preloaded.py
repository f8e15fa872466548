"""What the fork server of `tests.trainer.ranks` imports before it forks."""

from rlhf_trainer.collector import collector_off

with collector_off():
    import datasets  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import rlhf_trainer.run.worker_specs
    import rlhf_trainer.training.trainer  # noqa: F401
    import tests.trainer.placement.light_ray  # noqa: F401
