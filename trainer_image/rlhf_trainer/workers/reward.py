"""The reward model: scores whole responses in RL, and is trained on pairs by the Bradley-Terry loss."""

from __future__ import annotations

from torch import Tensor, nn

from rlhf_trainer.ops.losses import pair_loss
from rlhf_trainer.protocols import DP_PROTO
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.distributed import sum_over_ranks
from rlhf_trainer.training.models import Scorer, load_scorer
from rlhf_trainer.types import Batch, Fields, concatenate, register
from rlhf_trainer.workers.base import TrainedModel, WorkerSetting, at_last_token, lengths_of

PAIR_FIELDS = ("chosen_tokens", "chosen_mask", "rejected_tokens", "rejected_mask", "valid")


class RewardWorker:
    """One rank of a frozen reward model."""

    def __init__(self, setting: WorkerSetting) -> None:
        self._engine = setting.engine(_scorer(setting, may_add_head=False))

    @register(DP_PROTO, reads=("tokens", "attention_mask"), adds=("scores",), phase="scoring")
    def compute_reward(self, batch: Batch) -> Fields:
        """scores float32 [B]: the score head after the last token of each row."""
        scores = self._engine.infer({"tokens": batch["tokens"]}, lengths_of(batch), _scores)
        return {"scores": at_last_token(scores, batch["attention_mask"])}


class RewardTrainer(TrainedModel):
    """One rank of a reward model in training (Ouyang et al., arXiv:2203.02155, eq. 1)."""

    def __init__(self, setting: WorkerSetting) -> None:
        budget = max(1, setting.job.spec.training.micro_batch_tokens // 2)  # a row of a micro-batch is two responses
        super().__init__(setting, setting.trainer(_scorer(setting, may_add_head=True), token_budget=budget))

    @register(DP_PROTO, reads=PAIR_FIELDS, phase="update")
    def update_reward(self, batch: Batch) -> None:
        """One optimizer step on a batch of pairs."""
        fields, lengths = _pairs(batch)
        pairs = sum_over_ranks([fields["valid"].sum()])[0]
        recorder.add("tokens", float(fields["chosen_mask"].sum() + fields["rejected_mask"].sum()))

        def loss(model: nn.Module, micro: Fields) -> Tensor:
            chosen, rejected = _pair_scores(model, micro)
            share = pair_loss(chosen, rejected, micro["valid"], num_pairs=pairs)
            here = float(micro["valid"].sum())
            recorder.mean("loss/reward_model", float(share.detach()) * pairs, here)
            recorder.mean("accuracy/pairs", float(((chosen > rejected) * micro["valid"]).sum()), here)
            return share

        norm = self.trainer.update(fields, lengths, loss, step=batch.step)
        recorder.maximum("grad_norm/reward_model", norm)

    @register(DP_PROTO, reads=PAIR_FIELDS)
    def evaluate_pairs(self, batch: Batch) -> tuple[float, float]:
        """(pairs whose chosen response scores higher, pairs) of this rank's rows."""
        fields, lengths = _pairs(batch)

        def right(model: nn.Module, micro: Fields) -> Tensor:
            chosen, rejected = _pair_scores(model, micro)
            return (chosen > rejected).float()[:, None]

        is_right = self.trainer.infer({**fields, "tokens": fields["chosen_tokens"]}, lengths, right)[:, 0]
        return float((is_right * fields["valid"]).sum()), float(fields["valid"].sum())


def _scorer(setting: WorkerSetting, *, may_add_head: bool) -> Scorer:
    return load_scorer(
        setting.folder,
        seed=setting.job.spec.training.seed,
        trust_remote_code=setting.model.trust_remote_code,
        revision=setting.model.revision,
        path=setting.path,
        may_add_head=may_add_head,
    )


def _scores(model: nn.Module, micro: Fields) -> Tensor:
    scores: Tensor = model(micro["tokens"])
    return scores


def _pairs(batch: Batch) -> tuple[Fields, Tensor]:
    """The fields of a batch of pairs, and the longer length of each pair: int64 [B]."""
    fields = {name: batch[name] for name in PAIR_FIELDS}
    lengths = [fields[name].sum(1).long() for name in ("chosen_mask", "rejected_mask")]
    return fields, lengths[0].maximum(lengths[1])


def _pair_scores(model: nn.Module, micro: Fields) -> tuple[Tensor, Tensor]:
    """(scores of the chosen, of the rejected responses), each [b], from one forward pass."""
    tokens = concatenate([micro["chosen_tokens"], micro["rejected_tokens"]])
    mask = concatenate([micro["chosen_mask"], micro["rejected_mask"]])
    scores = at_last_token(model(tokens), mask)
    half = len(scores) // 2
    return scores[:half], scores[half:]
