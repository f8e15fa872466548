"""The reward and the cost model: they score whole responses in RL, and are trained on pairs of them."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from rlhf_trainer.ops.losses import pair_loss, sign_loss
from rlhf_trainer.protocols import THREE_D_PROTO
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.types import Batch, Fields, Marks, concatenate, register
from rlhf_trainer.workers.base import TEXT_FIELDS, TrainedModel, WorkerSetting, at_last_token, both_texts, whole_texts
from rlhf_trainer.workers.retokenized import Retokenized
from rlhf_trainer.workers.samples import COLUMNS, SAMPLE_FIELDS

PAIR_FIELDS = ("chosen_tokens", "chosen_mask", "rejected_tokens", "rejected_mask", "valid")
SAFE_FIELDS = ("chosen_safe", "rejected_safe")


class RewardWorker:
    """One rank of a frozen reward model."""

    scores_by: ClassVar[str] = "compute_reward"
    """Name of the scoring method that the algorithm's step calls."""

    def __init__(self, setting: WorkerSetting) -> None:
        """setting: `actor` is set if this model's tokenizer is not the actor's; then each response is encoded anew."""
        self._model = setting.frozen(setting.scorer(may_add_head=False))
        self._retokenized = Retokenized(setting) if setting.actor else None

    @classmethod
    def change_transfers(cls, marks: Marks, *, setting: WorkerSetting, **_: object) -> Marks:
        """Mark the scoring method as reading the fields that decode responses, if the model has its own tokenizer."""
        if setting.actor is None:
            return marks
        mark = marks[cls.scores_by]
        own = tuple(name for name in mark.reads if name not in TEXT_FIELDS and name not in SAMPLE_FIELDS)
        retokenizing = replace(mark, reads=(*SAMPLE_FIELDS, *own), reads_if_there=(*COLUMNS, *mark.reads_if_there))
        return {**marks, cls.scores_by: retokenizing}

    @register(THREE_D_PROTO, reads=TEXT_FIELDS, adds=("scores",), phase="scoring", row_by_row=True)
    def compute_reward(self, batch: Batch) -> Fields:
        """Return scores float32 [B]: the score head's output at the last token of each row."""
        return {"scores": self.scores(batch)}

    def scores(self, batch: Batch) -> Tensor:
        """Return the score head's output [B] at the last token of each row."""
        fields = self._retokenized.fields(batch) if self._retokenized else {name: batch[name] for name in TEXT_FIELDS}
        return at_last_token(self._model.infer(fields, whole_texts, _scores), fields["attention_mask"])


class CostWorker(RewardWorker):
    """One rank of a frozen cost model."""

    scores_by = "compute_cost"

    @register(THREE_D_PROTO, reads=TEXT_FIELDS, adds=("costs",), phase="scoring", row_by_row=True)
    def compute_cost(self, batch: Batch) -> Fields:
        """Return costs float32 [B]: the score head's output at the last token of each row; above 0 is unsafe."""
        return {"costs": self.scores(batch)}


class PairTrainer(TrainedModel):
    """One rank of a scorer that learns from pairs of responses."""

    fields: ClassVar[tuple[str, ...]] = PAIR_FIELDS

    def __init__(self, setting: WorkerSetting) -> None:
        super().__init__(setting, setting.trainer(setting.scorer(may_add_head=True)))

    def update(self, batch: Batch) -> float:
        """Make one optimizer step on a batch of pairs; return the gradient's norm."""
        fields = {name: batch[name] for name in self.fields}
        pairs = self.trainer.mesh.sum([fields["valid"].sum()])[0]
        recorder.add("tokens", float(fields["chosen_mask"].sum() + fields["rejected_mask"].sum()))

        def loss(output: Tensor, micro: Fields) -> Tensor:
            chosen, rejected = _pair_scores(output, micro)
            right = (self.is_right(chosen, rejected) * micro["valid"]).sum()
            recorder.mean("accuracy/pairs", right, micro["valid"].sum())
            return self.loss(chosen, rejected, micro, num_pairs=pairs)

        return self.trainer.update(fields, both_texts, loss, step=batch.step)

    def loss(self, chosen: Tensor, rejected: Tensor, micro: Fields, *, num_pairs: float) -> Tensor:
        """Return this micro-batch's share of the loss, from the scores [b] of both responses."""
        raise NotImplementedError

    def is_right(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return 1.0 for each pair whose two scores are in the right order, else 0.0: [b]."""
        raise NotImplementedError

    def accuracy(self, batch: Batch) -> tuple[float, float]:
        """Return (number of pairs whose scores are in the right order, number of pairs) on this rank."""
        fields = {name: batch[name] for name in self.fields}

        def right(output: Tensor, micro: Fields) -> Tensor:
            return self.is_right(*_pair_scores(output, micro))[:, None]

        is_right = self.trainer.infer(fields, both_texts, right)[:, 0]
        return float((is_right * fields["valid"]).sum()), float(fields["valid"].sum())


class RewardTrainer(PairTrainer):
    """One rank of a reward model in training (Ouyang et al., arXiv:2203.02155, eq. 1)."""

    @register(THREE_D_PROTO, reads=PAIR_FIELDS, phase="update")
    def update_reward(self, batch: Batch) -> None:
        """Make one optimizer step on a batch of pairs."""
        recorder.maximum("grad_norm/reward_model", self.update(batch))

    @register(THREE_D_PROTO, reads=PAIR_FIELDS)
    def evaluate_pairs(self, batch: Batch) -> tuple[float, float]:
        """Return (number of pairs whose chosen response scores higher, number of pairs) on this rank."""
        return self.accuracy(batch)

    def loss(self, chosen: Tensor, rejected: Tensor, micro: Fields, *, num_pairs: float) -> Tensor:
        share = pair_loss(chosen, rejected, micro["valid"], num_pairs=num_pairs)
        recorder.mean("loss/reward_model", share.detach().double() * num_pairs, micro["valid"].sum())
        return share

    def is_right(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return (chosen > rejected).float()


class CostTrainer(PairTrainer):
    """One rank of a cost model in training; the rejected response of a pair is the more harmful one."""

    fields = (*PAIR_FIELDS, *SAFE_FIELDS)

    @register(THREE_D_PROTO, reads=fields, phase="update")
    def update_cost(self, batch: Batch) -> None:
        """Make one optimizer step on a batch of pairs."""
        recorder.maximum("grad_norm/cost_model", self.update(batch))

    @register(THREE_D_PROTO, reads=fields)
    def evaluate_pairs(self, batch: Batch) -> tuple[float, float]:
        """Return (number of pairs whose rejected response costs more, number of pairs) on this rank."""
        return self.accuracy(batch)

    def loss(self, chosen: Tensor, rejected: Tensor, micro: Fields, *, num_pairs: float) -> Tensor:
        valid = micro["valid"]
        share = pair_loss(rejected, chosen, valid, num_pairs=num_pairs)
        for costs, safe in ((chosen, micro["chosen_safe"]), (rejected, micro["rejected_safe"])):
            share = share + sign_loss(costs, safe, valid, num_pairs=num_pairs)
            recorder.mean("accuracy/safety", (((costs < 0) == (safe > 0)) * valid).sum(), valid.sum())
        recorder.mean("loss/cost_model", share.detach().double() * num_pairs, valid.sum())
        return share

    def is_right(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return (chosen < rejected).float()


def _scores(output: Tensor, _: Fields) -> Tensor:
    return output


def _pair_scores(output: Tensor, micro: Fields) -> tuple[Tensor, Tensor]:
    """Return (scores of the chosen, scores of the rejected responses), each [b], from the output on `both_texts`."""
    mask = concatenate([micro["chosen_mask"], micro["rejected_mask"]])
    chosen, rejected = at_last_token(output, mask).chunk(2)
    return chosen, rejected
