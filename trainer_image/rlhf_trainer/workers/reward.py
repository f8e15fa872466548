"""The reward and the cost model: they score whole responses in RL, and are trained on pairs of responses."""

from collections.abc import Callable
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
COST_FIELDS = (*PAIR_FIELDS, "chosen_safe", "rejected_safe")


class FrozenScorer:
    """One rank of a frozen model with a score head; each subclass has the scoring method of its role."""

    def __init__(self, setting: WorkerSetting) -> None:
        """setting: `actor` is set if this model's tokenizer is not the actor's; then each response is encoded anew."""
        self._model = setting.frozen(setting.scorer(may_add_head=False))
        self._retokenized = Retokenized(setting) if setting.actor else None

    @classmethod
    def change_transfers(cls, marks: Marks, *, setting: WorkerSetting, **_: object) -> Marks:
        """Declare that scoring reads the fields for decoding responses, if the model has its own tokenizer."""
        if setting.actor is None:
            return marks
        changed = dict(marks)
        for name in marks.keys() & {"compute_reward", "compute_cost"}:
            mark = marks[name]
            reads = tuple(dict.fromkeys((*SAMPLE_FIELDS, *mark.reads)))
            changed[name] = replace(mark, reads=reads, reads_if_there=(*COLUMNS, *mark.reads_if_there))
        return changed

    def scores(self, batch: Batch) -> Tensor:
        """Return the score head's output [B] at the last token of each row."""
        fields = self._retokenized.fields(batch) if self._retokenized else {each: batch[each] for each in TEXT_FIELDS}
        found = self._model.infer(fields, whole_texts, lambda output, _: output)
        return at_last_token(found, fields["attention_mask"])


class RewardWorker(FrozenScorer):
    """One rank of a frozen reward model."""

    @register(THREE_D_PROTO, reads=TEXT_FIELDS, adds=("scores",), phase="scoring", row_by_row=True)
    def compute_reward(self, batch: Batch) -> Fields:
        """Return scores float32 [B]: the score head's output at the last token of each row."""
        return {"scores": self.scores(batch)}


class CostWorker(FrozenScorer):
    """One rank of a frozen cost model."""

    @register(THREE_D_PROTO, reads=TEXT_FIELDS, adds=("costs",), phase="scoring", row_by_row=True)
    def compute_cost(self, batch: Batch) -> Fields:
        """Return costs float32 [B]: the score head's output at the last token of each row; above 0 is unsafe."""
        return {"costs": self.scores(batch)}


class ScorerTrainer(TrainedModel):
    """One rank of a scorer that learns from pairs; each subclass has the update of its role."""

    _is_cost: ClassVar[bool] = False

    def __init__(self, setting: WorkerSetting) -> None:
        super().__init__(setting, setting.trainer(setting.scorer(may_add_head=True)))

    @register(THREE_D_PROTO, reads=PAIR_FIELDS)
    def evaluate_pairs(self, batch: Batch) -> tuple[float, float]:
        """Return (number of pairs whose chosen response has the higher reward or lower cost, number of pairs)."""
        fields = {name: batch[name] for name in PAIR_FIELDS}
        is_right = self.trainer.infer(
            fields, both_texts, lambda *given: self._are_right(*_pair_scores(*given))[:, None]
        )
        return float((is_right[:, 0] * fields["valid"]).sum()), float(fields["valid"].sum())

    def _update(self, fields: Fields, loss_of: Callable[..., Tensor], *, step: int) -> float:
        """Make one optimizer step by `reward_loss` or `cost_loss`; return the gradient's norm."""
        pairs = self.trainer.mesh.sum([fields["valid"].sum()])[0]
        recorder.add("tokens", float(fields["chosen_mask"].sum() + fields["rejected_mask"].sum()))

        def loss(output: Tensor, micro: Fields) -> Tensor:
            chosen, rejected = _pair_scores(output, micro)
            right = (self._are_right(chosen, rejected) * micro["valid"]).sum()
            recorder.mean("accuracy/pairs", right, micro["valid"].sum())
            return loss_of(chosen, rejected, micro, num_pairs=pairs)

        return self.trainer.update(fields, both_texts, loss, step=step)

    def _are_right(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return 1.0 for each pair whose chosen response has the higher reward or the lower cost, else 0.0: [b]."""
        return (chosen < rejected if self._is_cost else chosen > rejected).float()


class RewardTrainer(ScorerTrainer):
    """One rank of a reward model in training (Ouyang et al., arXiv:2203.02155, eq. 1)."""

    @register(THREE_D_PROTO, reads=PAIR_FIELDS, phase="update")
    def update_reward(self, batch: Batch) -> None:
        """Make one optimizer step on a batch of pairs."""
        norm = self._update({name: batch[name] for name in PAIR_FIELDS}, reward_loss, step=batch.step)
        recorder.maximum("grad_norm/reward_model", norm)


class CostTrainer(ScorerTrainer):
    """One rank of a cost model in training; the rejected response of a pair is the more harmful one."""

    _is_cost = True

    @register(THREE_D_PROTO, reads=COST_FIELDS, phase="update")
    def update_cost(self, batch: Batch) -> None:
        """Make one optimizer step on a batch of pairs."""
        norm = self._update({name: batch[name] for name in COST_FIELDS}, cost_loss, step=batch.step)
        recorder.maximum("grad_norm/cost_model", norm)


def reward_loss(chosen: Tensor, rejected: Tensor, micro: Fields, *, num_pairs: float) -> Tensor:
    """Return a micro-batch's part of a reward model's loss, from the scores [b] of both responses of each pair."""
    share = pair_loss(chosen, rejected, micro["valid"], num_pairs=num_pairs)
    recorder.mean("loss/reward_model", share.detach().double() * num_pairs, micro["valid"].sum())
    return share


def cost_loss(chosen: Tensor, rejected: Tensor, micro: Fields, *, num_pairs: float) -> Tensor:
    """Return a micro-batch's part of a cost model's loss, from the costs [b] of both responses of each pair."""
    valid = micro["valid"]
    share = pair_loss(rejected, chosen, valid, num_pairs=num_pairs)
    for costs, safe in ((chosen, micro["chosen_safe"]), (rejected, micro["rejected_safe"])):
        share = share + sign_loss(costs, safe, valid, num_pairs=num_pairs)
        recorder.mean("accuracy/safety", (((costs < 0) == (safe > 0)) * valid).sum(), valid.sum())
    recorder.mean("loss/cost_model", share.detach().double() * num_pairs, valid.sum())
    return share


def _pair_scores(output: Tensor, micro: Fields) -> tuple[Tensor, Tensor]:
    """Return (scores of the chosen, scores of the rejected responses), each [b], from the output on `both_texts`."""
    mask = concatenate([micro["chosen_mask"], micro["rejected_mask"]])
    chosen, rejected = at_last_token(output, mask).chunk(2)
    return chosen, rejected
