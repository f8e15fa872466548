"""DPO (arXiv:2305.18290, eq. 7): the actor learns from pairs of responses, from the data or chosen among its own."""

from __future__ import annotations

import torch
from torch import Tensor, inf

from rlhf_api.job import Job
from rlhf_api.spec.algorithms import Preference
from rlhf_trainer.data.loaders import PairLoader
from rlhf_trainer.ops.advantages import SIGNAL
from rlhf_trainer.ops.losses import pair_loss
from rlhf_trainer.ops.masks import row_sums
from rlhf_trainer.protocols import DP_PROTO, THREE_D_ALL_MICRO_DP, THREE_D_PROTO
from rlhf_trainer.row_groups import Outlet
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.batching import mini_batches
from rlhf_trainer.training.head import Likelihood
from rlhf_trainer.training.trainer import Trainer
from rlhf_trainer.types import Batch, Fields, concatenate, register
from rlhf_trainer.workers.base import TEXT_FIELDS, WorkerSetting, both_texts, side_log_probs
from rlhf_trainer.workers.generating_actor import GeneratingActor
from rlhf_trainer.workers.reference import ActorWithReference
from rlhf_trainer.workers.rollout import PROMPT_FIELDS, ROLLOUT_FIELDS

CHOICE_FIELDS = (*TEXT_FIELDS, "finished", "scores", "valid")
UPDATE_FIELDS = (*PairLoader.fields, "ref_chosen", "ref_rejected")


class PreferenceActorWorker(ActorWithReference):
    """One rank of an actor that learns from the data's pairs of a chosen and a rejected response."""

    def __init__(self, setting: WorkerSetting) -> None:
        super().__init__(setting, setting.trainer(setting.language_model()))

    @register(THREE_D_PROTO, reads=UPDATE_FIELDS, phase="update")
    def update_actor(self, batch: Batch) -> None:
        """Make one optimizer step on a batch of pairs."""
        recorder.add("tokens", float(batch["chosen_mask"].sum() + batch["rejected_mask"].sum()))
        learn(self.trainer, self.setting.job, batch)

    @register(THREE_D_PROTO, reads=UPDATE_FIELDS)
    def evaluate_pairs(self, batch: Batch) -> tuple[float, float]:
        """Return (number of pairs whose chosen response has the higher implicit reward, number of pairs) of a rank."""
        chosen, rejected = (
            side_log_probs(self.trainer, batch, side) - batch[f"ref_{side}"] for side in ("chosen", "rejected")
        )
        return float(((chosen > rejected) * batch["valid"]).sum()), float(batch["valid"].sum())


class OnlinePreferenceActorWorker(GeneratingActor):
    """One rank of an actor that learns from pairs of its own responses."""

    @register(THREE_D_ALL_MICRO_DP, reads=PROMPT_FIELDS, adds=ROLLOUT_FIELDS, in_groups=True)
    def generate_sequences(self, batch: Batch, *, do_sample: bool = True, outlet: Outlet | None = None) -> Fields:
        """Generate responses; after sampling free the engine's memory, as other models score the responses next."""
        fields = super().generate_sequences(batch, do_sample=do_sample, outlet=outlet)
        if do_sample:
            self.put_generator_to_sleep()
        return fields

    @register(THREE_D_PROTO, reads=UPDATE_FIELDS, phase="update")
    def update_actor(self, batch: Batch) -> None:
        """Make several epochs of mini-batch updates on the pairs that `PairChooser` formed."""
        with self.next_policy():
            learn(self.trainer, self.setting.job, batch)


class PairChooser:
    """One rank of the worker that chooses pairs; the placement puts all responses to a prompt on one rank."""

    def __init__(self, job: Job) -> None:
        self._group_size = job.spec.rollout.samples_per_prompt

    @register(DP_PROTO, reads=CHOICE_FIELDS, adds=PairLoader.fields, phase="advantage")
    def choose_pairs(self, batch: Batch) -> Fields:
        """Return the best and the worst response to each prompt as the fields of a pair (arXiv:2405.07863, section 3).

        A response cut off by a limit is worse than each finished response, and is never chosen, as its text has no end.
        The first row of a prompt holds the pair; the prompt's other rows are empty (valid 0). All rows of a prompt are
        empty if its responses are equally good or have no score.
        """
        size = self._group_size
        assert batch.start % size == batch.size % size == 0, "the responses to a prompt are on several ranks"
        valid, finished, scores = (batch[name].reshape(-1, size) for name in ("valid", "finished", "scores"))
        best = scores.masked_fill((valid == 0) | (finished == 0), -inf)
        worst = scores.masked_fill(valid == 0, inf)
        cut_off = (valid > 0) & (finished == 0)
        worst = worst.masked_fill(cut_off.any(1, keepdim=True) & ~cut_off, inf)
        first = torch.arange(0, batch.size, size)
        differ = (best.amax(1) - worst.amin(1) > SIGNAL) | (best.isfinite().any(1) & cut_off.any(1))
        recorder.mean("reward/mean", (batch["scores"] * batch["valid"]).sum(), batch["valid"].sum())
        recorder.mean("groups/with_signal", differ.sum(), batch["valid"].reshape(-1, size).amax(1).sum())
        pairs = {"valid": torch.zeros(batch.size)}
        pairs["valid"][first] = differ.float()
        for side, row in (("chosen", best.argmax(1)), ("rejected", worst.argmin(1))):
            for name, source in (("tokens", "tokens"), ("mask", "attention_mask"), ("response_mask", "response_mask")):
                field = torch.zeros_like(batch[source])
                field[first] = batch[source][first + row] * differ[:, None].to(field.dtype)
                pairs[f"{side}_{name}"] = field
        return pairs


def learn(trainer: Trainer, job: Job, batch: Batch) -> None:
    """Make the updates of a step on its pairs (the valid rows); no update if no prompt's responses differ."""
    training = job.spec.training
    pairs = training.mini_batch_size and training.mini_batch_size // job.spec.rollout.samples_per_prompt
    with trainer.offloader.in_use(moments=True):
        for chosen in mini_batches(batch["valid"] > 0, batch, training, trainer.mesh, size=pairs):
            _update(trainer, job, {name: batch[name][chosen] for name in UPDATE_FIELDS}, step=batch.step)


def _update(trainer: Trainer, job: Job, fields: Fields, *, step: int) -> None:
    """Make one optimizer step by the loss -log sigmoid(beta * (log-ratio of the chosen - that of the rejected))."""
    assert isinstance(job.spec.algorithm, Preference)
    beta, pairs = job.spec.algorithm.beta, trainer.mesh.sum([fields["valid"].sum()])[0]

    def loss(found: Likelihood, micro: Fields) -> Tensor:
        mask = concatenate([micro["chosen_response_mask"], micro["rejected_response_mask"]])
        chosen, rejected = row_sums(found.log_probs, mask).chunk(2)
        chosen, rejected = beta * (chosen - micro["ref_chosen"]), beta * (rejected - micro["ref_rejected"])
        share = pair_loss(chosen, rejected, micro["valid"], num_pairs=pairs)
        here = micro["valid"].sum()
        recorder.mean("loss/dpo", share.detach().double() * pairs, here)
        recorder.mean("accuracy/pairs", ((chosen > rejected) * micro["valid"]).sum(), here)
        recorder.mean("margin/pairs", ((chosen - rejected).detach() * micro["valid"]).sum(), here)
        return share

    norm = trainer.update(fields, both_texts, loss, step=step)
    recorder.maximum("grad_norm/dpo", norm)
