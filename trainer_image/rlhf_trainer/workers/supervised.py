"""Supervised fine-tuning of the actor: next-token loss on the completions only."""

from torch import Tensor

from rlhf_trainer.ops.losses import sft_loss
from rlhf_trainer.ops.masks import masked_sum
from rlhf_trainer.protocols import THREE_D_PROTO
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.head import Likelihood
from rlhf_trainer.types import Batch, Fields, register
from rlhf_trainer.workers.base import TEXT_FIELDS, TrainedModel, WorkerSetting, log_probs_by, text_of


class SupervisedActorWorker(TrainedModel):
    """One rank of an actor in supervised fine-tuning; a model without stored weights is initialised by the seed."""

    def __init__(self, setting: WorkerSetting) -> None:
        super().__init__(setting, setting.trainer(setting.language_model(may_initialise=True)))

    @register(THREE_D_PROTO, reads=TEXT_FIELDS, phase="update")
    def update_actor(self, batch: Batch) -> None:
        """Make one optimizer step on a batch of prompts with their responses."""
        fields = {name: batch[name] for name in TEXT_FIELDS}
        tokens = self.trainer.mesh.sum([fields["response_mask"].sum()])[0]
        recorder.add("tokens", float(fields["attention_mask"].sum()))

        def loss(found: Likelihood, micro: Fields) -> Tensor:
            share = sft_loss(found.log_probs, micro["response_mask"], num_tokens=tokens)
            recorder.mean("loss/sft", share.detach().double() * tokens, micro["response_mask"].sum())
            return share

        norm = self.trainer.update(fields, lambda micro: [text_of(micro)], loss, step=batch.step)
        recorder.maximum("grad_norm/sft", norm)

    @register(THREE_D_PROTO, reads=TEXT_FIELDS)
    def evaluate_completions(self, batch: Batch) -> tuple[float, float]:
        """Return (negative log-likelihood, number of tokens) of the responses of this rank's rows."""
        log_probs = log_probs_by(self.trainer, batch)
        mask = batch["response_mask"]
        return -float(masked_sum(log_probs, mask)), float(mask.sum())
