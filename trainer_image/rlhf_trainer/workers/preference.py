"""Actors that learn from pairs of responses (DPO and its kin) or from labels (KTO, arXiv:2402.01306)."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, inf
from torch.nn.functional import logsigmoid

from rlhf_api.job import Job
from rlhf_api.spec.algorithms import Preference
from rlhf_trainer.data.loaders import LabelledLoader, PairLoader
from rlhf_trainer.ops.advantages import SIGNAL
from rlhf_trainer.ops.masks import keep, masked_sum, row_sums
from rlhf_trainer.protocols import DP_PROTO, THREE_D_ALL_MICRO_DP, THREE_D_PROTO
from rlhf_trainer.row_groups import Outlet
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.batching import mini_batches
from rlhf_trainer.training.head import Likelihood
from rlhf_trainer.training.trainer import Trainer
from rlhf_trainer.types import Batch, Fields, concatenate, register
from rlhf_trainer.workers.base import TEXT_FIELDS, both_texts, log_probs_by, side_log_probs, text_of
from rlhf_trainer.workers.generating_actor import GeneratingActor
from rlhf_trainer.workers.reference import PAIR_REFERENCE_FIELDS, ActorWithReference
from rlhf_trainer.workers.rollout import PROMPT_FIELDS, ROLLOUT_FIELDS

CHOICE_FIELDS = (*TEXT_FIELDS, "finished", "scores", "valid")
SIDES = ("chosen", "rejected")
MISMATCHED_FIELDS = (*LabelledLoader.mismatched, "ref_mismatched", "valid")
LABELLED_FIELDS = (*TEXT_FIELDS, "valid", "desirable", "ref_log_probs", "reference_point")


class PreferenceActorWorker(ActorWithReference):
    """One rank of an actor that learns from the data's pairs of a chosen and a rejected response."""

    @register(THREE_D_PROTO, reads=PairLoader.fields, reads_if_there=PAIR_REFERENCE_FIELDS, phase="update")
    def update_actor(self, batch: Batch) -> None:
        """Make one optimizer step on a batch of pairs."""
        recorder.add("tokens", float(batch["chosen_mask"].sum() + batch["rejected_mask"].sum()))
        learn(self.trainer, self.setting.job, batch)

    @register(THREE_D_PROTO, reads=PairLoader.fields, reads_if_there=PAIR_REFERENCE_FIELDS)
    def evaluate_pairs(self, batch: Batch) -> tuple[float, float]:
        """Return (number of pairs whose chosen response has the higher implicit reward, number of pairs) of a rank."""
        log_probs = (side_log_probs(self.trainer, batch, side) for side in SIDES)
        chosen, rejected = rewards_of_pairs(self.setting.job, log_probs, batch.fields)
        return float(((chosen > rejected) * batch["valid"]).sum()), float(batch["valid"].sum())


class LabelledActorWorker(ActorWithReference):
    """One rank of an actor that learns from responses with a label."""

    @register(THREE_D_PROTO, reads=MISMATCHED_FIELDS, adds=("reference_point",), phase="scoring")
    def compute_reference_point(self, batch: Batch) -> Fields:
        """Return reference_point float32 [B], KTO's z0: the batch's mean log-ratio of mismatched texts, at least 0."""
        ratios = side_log_probs(self.trainer, batch, "mismatched") - batch["ref_mismatched"]
        total, rows = self.trainer.mesh.sum([masked_sum(ratios, batch["valid"]), batch["valid"].sum()])
        return {"reference_point": torch.full((batch.size,), max(total / rows, 0.0))}

    @register(THREE_D_PROTO, reads=LABELLED_FIELDS, phase="update")
    def update_actor(self, batch: Batch) -> None:
        """Make one optimizer step on a batch of responses with labels."""
        rows, good = self.trainer.mesh.sum([batch["valid"].sum(), (batch["valid"] * batch["desirable"]).sum()])
        recorder.add("tokens", float(batch["attention_mask"].sum()))
        recorder.mean("kl/mismatched", (batch["reference_point"] * batch["valid"]).sum(), batch["valid"].sum())

        def loss(found: Likelihood, micro: Fields) -> Tensor:
            rewards, losses = self._rewards_and_losses(found.log_probs, micro)
            labels = (("desirable", micro["desirable"], good), ("undesirable", 1 - micro["desirable"], good - rows))
            for label, chosen, divisor in labels:
                total, here = (rewards * chosen).sum(), (micro["valid"] * chosen).sum()
                recorder.mean(f"implicit_reward/{label}", total, here)
                if 0 < good < rows:  # the divisor of undesirable ones is negative, so the parts add up to the margin
                    recorder.mean("margin/labels", total / divisor, here / rows)
            recorder.mean("loss/kto", losses.detach().sum(), micro["valid"].sum())
            return losses.sum() / rows

        fields = {name: batch[name] for name in LABELLED_FIELDS}
        norm = self.trainer.update(fields, lambda micro: [text_of(micro)], loss, step=batch.step)
        recorder.maximum("grad_norm/kto", norm)

    @register(THREE_D_PROTO, reads=LABELLED_FIELDS)
    def evaluate_completions(self, batch: Batch) -> tuple[float, float]:
        """Return (sum of the losses, number of rows) of a rank."""
        _, losses = self._rewards_and_losses(log_probs_by(self.trainer, batch), batch.fields)
        return float(losses.sum()), float(batch["valid"].sum())

    def _rewards_and_losses(self, log_probs: Tensor, rows: Fields) -> tuple[Tensor, Tensor]:
        """Return (implicit rewards without gradient, losses) [B], 0 on padding; log_probs: [B, T], of responses."""
        algorithm, valid = self.setting.job.spec.algorithm, rows["valid"]
        assert isinstance(algorithm, Preference)
        ratios = row_sums(log_probs - rows["ref_log_probs"], rows["response_mask"])
        losses = algorithm.losses(ratios, rows["desirable"], rows["reference_point"])
        return keep(algorithm.beta * ratios.detach(), valid), keep(losses, valid)


class OnlinePreferenceActorWorker(GeneratingActor):
    """One rank of an actor that learns from pairs of its own responses."""

    @register(THREE_D_ALL_MICRO_DP, reads=PROMPT_FIELDS, adds=ROLLOUT_FIELDS, in_groups=True)
    def generate_sequences(self, batch: Batch, *, do_sample: bool = True, outlet: Outlet | None = None) -> Fields:
        """Generate responses; after sampling free the engine's memory, as other models score the responses next."""
        fields = super().generate_sequences(batch, do_sample=do_sample, outlet=outlet)
        if do_sample:
            self.put_generator_to_sleep()
        return fields

    @register(THREE_D_PROTO, reads=PairLoader.fields, reads_if_there=PAIR_REFERENCE_FIELDS, phase="update")
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
    names = [name for name in (*PairLoader.fields, *PAIR_REFERENCE_FIELDS) if name in batch.fields]
    with trainer.offloader.in_use(moments=True):
        for chosen in mini_batches(batch["valid"] > 0, batch, training, trainer.mesh, size=pairs):
            _update(trainer, job, {name: batch[name][chosen] for name in names}, step=batch.step)


def rewards_of_pairs(job: Job, log_probs: Iterable[Tensor], rows: Fields) -> Iterator[Tensor]:
    """Yield the implicit rewards [B] of the chosen and of the rejected responses, 0 on padding.

    log_probs: sums over the tokens of each response, [B], of the two sides.
    """
    assert isinstance(job.spec.algorithm, Preference)
    for side, sums in zip(SIDES, log_probs, strict=True):
        tokens = rows[f"{side}_response_mask"].sum(1).clamp(min=1.0)
        yield keep(job.spec.algorithm.implicit_rewards(sums - rows.get(f"ref_{side}", 0.0), tokens), rows["valid"])


def _update(trainer: Trainer, job: Job, fields: Fields, *, step: int) -> None:
    """Make one optimizer step by the algorithm's loss of pairs."""
    algorithm, pairs = job.spec.algorithm, trainer.mesh.sum([fields["valid"].sum()])[0]
    assert isinstance(algorithm, Preference)
    objective = algorithm.name.lower().removeprefix("online")

    def loss(found: Likelihood, micro: Fields) -> Tensor:
        mask = concatenate([micro["chosen_response_mask"], micro["rejected_response_mask"]])
        chosen, rejected = rewards_of_pairs(job, row_sums(found.log_probs, mask).chunk(2), micro)
        share: Tensor = (micro["valid"] * algorithm.losses(chosen, rejected, logsigmoid)).sum() / pairs
        here = micro["valid"].sum()
        recorder.mean(f"loss/{objective}", share.detach().double() * pairs, here)
        recorder.mean("accuracy/pairs", ((chosen > rejected) * micro["valid"]).sum(), here)
        recorder.mean("margin/pairs", ((chosen - rejected).detach() * micro["valid"]).sum(), here)
        return share

    norm = trainer.update(fields, both_texts, loss, step=step)
    recorder.maximum(f"grad_norm/{objective}", norm)
