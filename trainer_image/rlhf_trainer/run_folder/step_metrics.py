"""Table of the metrics of a step: name in metrics.jsonl and for Prometheus, unit, section of the report, and meaning.

The metrics port, the report, the dashboards and docs/metrics.md take names, units and meanings from here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "summary"]
Section = Literal["learning", "health", ""]
SECTIONS: Mapping[str, Section] = {"learning": "learning", "health": "health", "-": ""}
"""Word in TABLE -> section of the report with the metric's plot; empty: no plot, as one step's value says little."""
PLANNED_STEPS, WARNINGS = "planned_steps", "warnings"
"""Metrics outside metrics.jsonl: status.json holds the planned steps, and events.log has a line for each warning."""
TABLE = """
step | rlhf_step | steps | -
    Latest finished step of the job.
planned_steps | rlhf_planned_steps | steps | -
    Steps of the whole job.
warnings | rlhf_warnings_total | warnings | -
    Warnings of the steps of this run.
time/step | rlhf_step_seconds | seconds | -
    Duration of a step, without evaluation.
time/<phase> | rlhf_phase_seconds | seconds | -
    Time of a step in which at least one rank was in the phase; transfer: ranks only moved or awaited data;
    controller: no rank did anything.
evaluation/<measure> | rlhf_evaluation | 1 | learning
    Latest measurement on held-out data during training (spec.evaluation.everySteps).
reward/mean | rlhf_reward_mean | 1 | learning
    Mean score of the reward over the step's responses.
reward/std | rlhf_reward_std | 1 | learning
    Standard deviation of the reward over the step's responses.
reward/greedy | rlhf_reward_greedy | 1 | learning
    Mean score of the reward over the step's greedy responses (ReMax).
reward/left_out | rlhf_responses_left_out_total | responses | learning
    Sampled responses to which some part of the reward gave no score (None); nothing is learned from them.
data/unlearned_messages | rlhf_unlearned_messages_total | messages | -
    Answers in training conversations that are not found whole in the chat template's rendering; only in step 1.
cost/mean | rlhf_cost_mean | 1 | learning
    Mean score of the cost model over the step's responses; above costLimit the multiplier grows.
lagrange/multiplier | rlhf_lagrange_multiplier | 1 | learning
    Lagrange multiplier, which weighs the cost against the reward.
kl/reference | rlhf_kl_reference_nats | nats per response | learning
    KL divergence of the actor from the reference, mean over the step's responses.
response_length/mean | rlhf_response_length_tokens | tokens | learning
    Mean length of the step's responses.
accuracy/pairs | rlhf_pair_accuracy_ratio | ratio | learning
    Share of the step's pairs whose responses are scored in the right order.
accuracy/safety | rlhf_safety_accuracy_ratio | ratio | learning
    Share of the step's responses whose cost has the sign of their safety label: below 0 for a safe one.
margin/pairs | rlhf_pair_margin | 1 | learning
    Chosen response's implicit reward minus the rejected response's, mean over the step's pairs (DPO).
margin/labels | rlhf_label_margin | 1 | learning
    Mean implicit reward of the step's desirable responses minus that of its undesirable ones (KTO).
implicit_reward/<label> | rlhf_implicit_reward | 1 | learning
    Mean over the step's desirable or undesirable responses of beta times the log-ratio to the reference (KTO).
kl/mismatched | rlhf_kl_mismatched_nats | nats per response | learning
    KTO's reference point z0: KL divergence from the reference, estimated on responses to other prompts; at least 0.
loss/<objective> | rlhf_loss | 1 | learning
    Mean loss over the step's updates; in nats for sft, pretrain and the losses on pairs.
skipped_updates | rlhf_skipped_updates_total | updates | health
    Updates that were skipped because loss or gradient was not finite; should be 0.
entropy | rlhf_entropy_nats | nats per token | health
    Mean entropy of the actor's next token; near 0 the actor tries nothing new.
clip_fraction | rlhf_clipped_tokens_ratio | ratio | health
    Share of the response tokens at which the policy loss is clipped.
response_finished/mean | rlhf_finished_responses_ratio | ratio | health
    Share of the step's responses that end with an end token, not at the longest length.
grad_norm/<objective> | rlhf_grad_norm | 1 | health
    Largest norm of the gradient in the step's updates, before clipping.
kl/coefficient | rlhf_kl_coefficient | 1 | health
    Weight of the KL divergence from the reference, in the rewards or in the loss.
kl/rollout | rlhf_kl_rollout_nats | nats per token | health
    KL divergence of the generator's distribution from the trainer's; about 0 unless sampling is restricted.
ratio/first_max_deviation | rlhf_first_ratio_deviation_max | 1 | health
    Largest distance from 1 of the probability ratio in the first mini-batch; should be about 0. Measured only where old
    log-probabilities are recomputed.
ratio/rollout_max | rlhf_rollout_ratio_max | 1 | health
    Largest ratio of the trainer's to the generator's probability of a token.
tokens_per_second | rlhf_tokens_per_second | tokens per second | health
    Prompt and response tokens of the step's batch, over all ranks, divided by the step's duration.
rollout_idle | rlhf_rollout_idle_ratio | ratio | health
    Share of the step's time in which the slots of the rollout pool waited; with rollout.endpoints, in which the
    process that asks the servers waited.
trainer_idle | rlhf_trainer_idle_ratio | ratio | health
    Share of the step's time in which the slots of the actor's pool waited; only with a rollout pool.
bytes/controller | rlhf_controller_payload_bytes_total | bytes | health
    Tensor bytes that the controller serialised or deserialised; 0 by design.
bytes/reshard | rlhf_reshard_bytes_total | bytes | health
    Bytes of weights that the ranks handed to their generators.
bytes/transfer | rlhf_transfer_bytes_total | bytes | health
    Bytes of batch fields that all ranks got for their calls, from their own process or another.
corrected_fraction | rlhf_corrected_tokens_ratio | ratio | health
    Share of the response tokens whose rollout correction is truncated or masked.
episodes/failed | rlhf_episodes_failed_total | episodes | health
    Episodes whose environment failed or was too slow; nothing is learned from them.
episodes/turns | rlhf_episode_turns | answers | health
    Mean number of the model's answers in an episode.
groups/with_signal | rlhf_groups_with_signal_ratio | ratio | health
    Share of the step's prompts whose responses differ in reward.
idle_bytes/<model> | rlhf_idle_model_bytes | bytes | health
    Most bytes of a model's shard and moments that a rank's device held after a use of the model.
judge/questions | rlhf_judge_questions_total | questions | health
    Questions to a judge; a question that has a verdict is not asked again.
judge/unread | rlhf_judge_unread_total | answers | health
    Answers of a judge in which no verdict was found.
kv_cache_used | rlhf_kv_cache_used_ratio | ratio | health
    Largest share of the generator's KV cache that was in use during the step.
memory_bytes/<phase> | rlhf_memory_used_bytes | bytes | health
    Most memory of a rank's GPU, or on CPU of its limited container or its process, at the end of a phase's calls.
memory_used | rlhf_memory_used_ratio | ratio | health
    Largest share of a rank's GPU memory in use at the end of a phase's calls; on CPU, its container's share of its
    limit, or without a limit the process's share of the machine.
mfu | rlhf_mfu_ratio | ratio | health
    FLOPs of the step's models divided by the peak FLOPs of its GPUs in the step's time; measured only on known GPUs.
padding/waste | rlhf_padding_tokens_ratio | ratio | health
    Share of padding among the tokens that went through the models.
queue/batches | rlhf_queue_batches | batches | health
    Batches that the rollout pool had finished ahead and no step had trained on yet, at the end of the step; if
    always 0, training waits for generation.
queue/tokens | rlhf_queue_tokens | tokens | health
    Prompt and response tokens of the rows that the rollout pool had finished ahead, at the end of the step.
reward_part/<part> | rlhf_reward_part_mean | 1 | health
    Mean score of a part of a reward (of a sum, or named by a function) before its weight, over sampled responses.
reward_part_std/<part> | rlhf_reward_part_std | 1 | health
    Standard deviation of the score of a part of a reward, over sampled responses.
rollout_interrupted | rlhf_rollout_interrupted_responses_total | responses | health
    Responses interrupted by new weights (rollout.partial); each interruption counts.
rollout_replacements | rlhf_rollout_replacements_total | replacements | health
    Number of times that a rollout pool's processes were replaced, since one of them was lost; should be 0.
staleness | rlhf_staleness_steps | steps | health
    Largest number of policy versions between the weights that sampled a response and those trained on it; 0 where
    each step learns from its own responses.
sync_bytes/<kind> | rlhf_weight_sync_bytes_total | bytes | health
    Bytes of weights that a rollout pool received; full: all weights, delta: only those that had changed.
sync_seconds/<kind> | rlhf_weight_sync_seconds | seconds | health
    Time that the slowest rank of a rollout pool took to receive weights, without waiting for the actor.
policy_version | rlhf_policy_version | steps | -
    Policy version that sampled the step's responses: the number of steps that had trained its weights.
flops/<phase> | rlhf_model_flops_total | FLOPs | -
    FLOPs of the models without recomputation; generation counts response tokens only.
busy/<pool> | rlhf_pool_busy_seconds_total | seconds | -
    Time in which slots of a pool were in a phase of a step, summed over the slots.
idle/<pool> | rlhf_pool_idle_seconds_total | seconds | -
    Time in which slots of a pool waited in a step, for other pools or for data, summed over the slots.
staleness_rows/<versions> | rlhf_staleness_rows_total | rows | -
    Rows that were trained on, by the number of policy versions between sampling and training.
"""
"""Metrics of a step in the order of the report: recorded name, name in Prometheus, unit, section; below, the meaning.

A metric family has a series for each value of a label; its recorded name ends in the label, such as `<phase>`.
"""


@dataclass(frozen=True)
class StepMetric:
    """A metric of a step: one row of TABLE.

    A gauge holds the value of the latest step, a counter (`_total`) the sum over the steps of this run, a summary
    (`_seconds`) their sum and number.
    """

    recorded: str
    """Name of the metric in metrics.jsonl; in a metric family `*` stands for the value of the label."""
    name: str
    """Name of the metric for Prometheus."""
    unit: str
    section: Section
    meaning: str
    part: str
    """Name of a metric family's label, such as `phase`; empty for a metric with one series."""

    @property
    def kind(self) -> Kind:
        """Return the metric's type for Prometheus, which the ending of its name tells."""
        return "counter" if self.name.endswith("_total") else "summary" if self.name.endswith("_seconds") else "gauge"

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of the metric's labels for Prometheus."""
        return ("job", "algorithm", *([self.part] if self.part else []))


def _metrics() -> Iterator[StepMetric]:
    for row in re.split(r"\n(?=\S)", TABLE.strip()):
        head, *lines = row.split("\n")
        recorded, name, unit, section = head.split(" | ")
        family, _, part = recorded.rstrip(">").partition("<")
        meaning = " ".join(line.strip() for line in lines)
        yield StepMetric(f"{family}*" if part else recorded, name, unit, SECTIONS[section], meaning, part)


METRICS = tuple(_metrics())
_ROWS = {metric.recorded: metric for metric in METRICS}


def metric_of(recorded: str) -> tuple[StepMetric, tuple[str, ...]] | None:
    """Return the metric of a name in metrics.jsonl and, in a metric family, the label's value; None for other names."""
    if recorded in _ROWS:
        return _ROWS[recorded], ()
    family, _, part = recorded.partition("/")
    metric = _ROWS.get(f"{family}/*")
    return (metric, (part,)) if metric else None
