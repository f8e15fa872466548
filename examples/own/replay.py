"""Learns in each step from the last batches: a replay buffer, with importance weights for what older policies wrote."""

from typing import Any

from pydantic import Field
from torch.nn.utils.rnn import pad_sequence

import rlhf.workers

KEPT = ("tokens", "attention_mask", "response_mask", "rollout_log_probs", "policy_version", "advantages")


class ReplayingActor(rlhf.workers.ActorWorker):
    @rlhf.register(rlhf.ONE_TO_ALL, reads=KEPT)
    def remember(self, batch: rlhf.Batch) -> None:
        place = (batch.step - 1) % (self.setting.job.spec.algorithm.replayed_steps + 1)
        self.own_tensors.update({f"{place}/{name}": batch[name].clone() for name in KEPT})  # rows of all ranks

    @rlhf.register(rlhf.THREE_D_PROTO, reads=("response_mask",), phase="update")
    def update_actor(self, batch: rlhf.Batch, **_: Any) -> None:
        mine, count = slice(batch.start, batch.start + batch.size), len(self.own_tensors) // len(KEPT)
        rows = {name: [row for n in range(count) for row in self.own_tensors[f"{n}/{name}"][mine]] for name in KEPT}
        fields = {name: pad_sequence(each, batch_first=True) for name, each in rows.items()}
        joined = rlhf.Batch(step=batch.step, start=count * batch.start, size=count * batch.size, fields=fields)
        super().update_actor(joined.with_fields(self.compute_log_prob(joined)))


class Replay(rlhf.PolicyGradient):
    workers, comparing = {"actor": ReplayingActor}, {}
    batches: int = Field(3, ge=1, description="Batches that a step learns from; the newest is its own.")
    replayed_steps = property(lambda self: self.batches - 1)

    @staticmethod
    def step(prompts: rlhf.B, *, actor: Any, reward: rlhf.Reward[rlhf.B], advantage: rlhf.Advantage[rlhf.B]) -> None:
        batch = advantage.compute_advantage(reward.compute_reward(actor.generate_sequences(prompts)))
        actor.remember(batch)
        actor.update_actor(batch)

    def advantage(self, returns: rlhf.Tensor, *, group_size: int) -> rlhf.Tensor:
        return (returns - returns.view(-1, group_size).nanmean(1).repeat_interleave(group_size)).nan_to_num()
