"""Every metric of a step: its name in metrics.jsonl and for Prometheus, type, labels and meaning; and their port.

docs/metrics.md is this table for people, with units. A name that ends in `/*` is a family, whose star is a label.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary, disable_created_metrics, start_http_server

from rlhf_api.job import Job
from rlhf_api.status import Phase
from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.telemetry import StepReport

PLANNED_STEPS, WARNINGS = "planned_steps", "warnings"
"""Not in metrics.jsonl: the first is in status.json, the second are lines of events.log."""
TABLE = """
step                       rlhf_step
    Latest finished step of the job.
planned_steps              rlhf_planned_steps
    Steps of the whole job.
warnings                   rlhf_warnings_total
    Warnings of the steps of this run.
time/step                  rlhf_step_seconds
    Duration of a step, without evaluation.
time/<phase>               rlhf_phase_seconds
    Time of a step in which at least one rank was in the phase; transfer: ranks only moved or awaited data;
    controller: no rank did anything.
tokens_per_second          rlhf_tokens_per_second
    Prompt and response tokens of the step's batch by its duration, over all ranks.
mfu                        rlhf_mfu_ratio
    FLOPs of the step's models by what its GPUs could do in that time at their peak; only of known GPUs.
flops/<phase>              rlhf_model_flops_total
    FLOPs of the models, without what is computed again; of generation those of response tokens.
busy/<pool>                rlhf_pool_busy_seconds_total
    Time of all slots of a pool in which they were in a phase of a step, added up.
idle/<pool>                rlhf_pool_idle_seconds_total
    Time of all slots of a pool in which they waited in a step, for other pools or for data, added up.
staleness                  rlhf_staleness_steps
    Policy versions between the weights that sampled the step's responses and those that learn from them, at
    most; 0 where each step learns from its own.
staleness_rows/<versions>  rlhf_staleness_rows_total
    Rows that were learned from, by the policy versions between the weights that sampled them and those that
    learned.
rollout_interrupted        rlhf_rollout_interrupted_responses_total
    Responses that new weights met while they were written (rollout.partial), once for each time.
queue/batches              rlhf_queue_batches
    Batches that the rollout pool had finished ahead, and that no step had trained on, at the end of the step.
queue/tokens               rlhf_queue_tokens
    Prompt and response tokens that the rollout pool's ranks had finished ahead then.
rollout_idle               rlhf_rollout_idle_ratio
    Share of the step's time in which the slots of the rollout pool waited; with rollout.endpoints, in which the
    process that asks the servers did.
trainer_idle               rlhf_trainer_idle_ratio
    Share of the step's time in which the slots of the actor's pool waited, beside a rollout pool.
sync_bytes/<kind>          rlhf_weight_sync_bytes_total
    Bytes of weights that a rollout pool received; full: of all weights, delta: of those that had changed.
sync_seconds/<kind>        rlhf_weight_sync_seconds
    Time in which it received them, of the slowest rank, without waiting for the actor.
policy_version             rlhf_policy_version
    Steps that trained the weights with which the responses were sampled.
loss/<objective>           rlhf_loss
    Loss over the step's updates: sft, pretrain and those of preference models in nats, others as in PPO.
grad_norm/<objective>      rlhf_grad_norm
    Largest norm of the gradient in the step's updates, before clipping.
accuracy/pairs             rlhf_pair_accuracy_ratio
    Share of the step's pairs whose responses are scored in the right order.
margin/pairs               rlhf_pair_margin
    Mean of the step's pairs of the chosen response's implicit reward less the rejected one's (DPO).
accuracy/safety            rlhf_safety_accuracy_ratio
    Share of the step's responses whose cost has the sign that says whether they are safe.
reward/mean                rlhf_reward_mean
    Mean score of the reward over the step's responses.
reward_part/<part>         rlhf_reward_part_mean
    Mean score of a part of a reward, of a sum or named by a function, before its weight, over sampled
    responses.
reward_part_std/<part>     rlhf_reward_part_std
    Standard deviation of the same scores.
reward/left_out            rlhf_responses_left_out_total
    Sampled responses that some part of the reward gave no score (None), and that nothing is learned from.
judge/questions            rlhf_judge_questions_total
    Questions that a judge was asked; one that has a verdict is not asked again.
judge/unread               rlhf_judge_unread_total
    Answers of a judge without a verdict.
reward/greedy              rlhf_reward_greedy
    Mean score of the reward over the step's greedy responses (ReMax).
cost/mean                  rlhf_cost_mean
    Mean score of the cost model over the step's responses.
lagrange/multiplier        rlhf_lagrange_multiplier
    Weight of the cost against the reward.
groups/with_signal         rlhf_groups_with_signal_ratio
    Share of the step's prompts whose responses differ in reward.
response_length/mean       rlhf_response_length_tokens
    Mean length of the step's responses.
response_finished/mean     rlhf_finished_responses_ratio
    Share of the step's responses that end by themselves, not at the longest length.
episodes/turns rlhf_episode_turns
    Mean number of the model's answers in an episode.
episodes/failed rlhf_episodes_failed_total
    Episodes whose environment failed or was too slow, and that nothing is learned from.
kl/reference               rlhf_kl_reference_nats
    Divergence of the actor from the reference, mean of the step's responses.
kl/coefficient             rlhf_kl_coefficient
    Weight of that divergence in the rewards or the loss.
kl/rollout                 rlhf_kl_rollout_nats
    Divergence of the generator's log-probabilities from the trainer's; about 0 unless sampling is restricted.
ratio/rollout_max          rlhf_rollout_ratio_max
    Largest ratio of the trainer's to the generator's probability of a token.
corrected_fraction         rlhf_corrected_tokens_ratio
    Share of the response tokens whose rollout correction is truncated or masked.
ratio/first_max_deviation  rlhf_first_ratio_deviation_max
    Largest distance from 1 of the probability ratio in the first mini-batch; about 0. Only where old
    log-probabilities are recomputed.
entropy                    rlhf_entropy_nats
    Mean entropy of the actor's next token.
clip_fraction              rlhf_clipped_tokens_ratio
    Share of the response tokens at which the policy loss is clipped.
padding/waste              rlhf_padding_tokens_ratio
    Share of padding among the tokens that went through the models.
skipped_updates            rlhf_skipped_updates_total
    Updates that were skipped because loss or gradient was not finite.
bytes/controller           rlhf_controller_payload_bytes_total
    Tensor bytes that the controller (de)serialised; 0 by design.
bytes/transfer             rlhf_transfer_bytes_total
    Bytes of fields that all ranks were given for their calls, from their own process or another.
bytes/reshard              rlhf_reshard_bytes_total
    Bytes of weights that the ranks handed to their generators.
rollout_replacements       rlhf_rollout_replacements_total
    How often the processes of a rollout pool were replaced, because one of them was lost.
kv_cache_used              rlhf_kv_cache_used_ratio
    Largest share of the generator's KV cache that was in use during the step.
memory_bytes/<phase>       rlhf_memory_used_bytes
    Most memory in use at the end of a phase's calls: of a rank's GPU, on CPU of a rank's container.
memory_used                rlhf_memory_used_ratio
    Largest share of a rank's GPU, on CPU of its container or machine, that was in use then.
idle_bytes/<model>         rlhf_idle_model_bytes
    Most bytes of a model's shard and moments that a rank's device held after a use of the model.
evaluation/<measure>       rlhf_evaluation
    Latest measurement on held-out data during training (spec.evaluation.everySteps).
"""
"""The name in metrics.jsonl, that for Prometheus, and the meaning. `<phase>` is the label of a family."""


@dataclass(frozen=True)
class StepMetric:
    """One row of the table.

    A gauge holds the value of the latest step, a counter (`_total`) the sum over the steps of this run, a summary
    (`_seconds`) their sum and number.
    """

    recorded: str
    """Its name in metrics.jsonl; `*` stands for the value of the label of a family."""
    name: str
    """Its name for Prometheus."""
    meaning: str
    part: str
    """Label of a family, else empty."""

    @property
    def kind(self) -> type[Gauge | Counter | Summary]:
        """What Prometheus is told that it is."""
        return Counter if self.name.endswith("_total") else Summary if self.name.endswith("_seconds") else Gauge

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels."""
        return ("job", "algorithm", *([self.part] if self.part else []))


def _metrics() -> Iterator[StepMetric]:
    for row in re.split(r"\n(?=\S)", TABLE.strip()):
        recorded, name, *meaning = row.split()
        family, _, part = recorded.rstrip(">").partition("<")
        yield StepMetric(f"{family}*" if part else recorded, name, " ".join(meaning), part)


METRICS = tuple(_metrics())
_ROWS = {metric.recorded: metric for metric in METRICS}


def metric_of(recorded: str) -> tuple[StepMetric, tuple[str, ...]] | None:
    """The row of a name in metrics.jsonl and, of a family, the value of its own label; None if the table lacks it."""
    if recorded in _ROWS:
        return _ROWS[recorded], ()
    family, _, part = recorded.partition("/")
    metric = _ROWS.get(f"{family}/*")
    return (metric, (part,)) if metric else None


class PrometheusMetrics:
    """The families of METRICS, filled step by step."""

    def __init__(self, registry: CollectorRegistry) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # no second series that says when each began
        self._families = {
            metric.name: metric.kind(metric.name, metric.meaning, metric.labels, registry=registry)
            for metric in METRICS
        }
        self._job = ("", "")

    def begin(self, job: Job, *, first_step: int, total_steps: int) -> None:  # noqa: ARG002 `step` says it
        self._job = (job.name, job.spec.algorithm.name)
        self._put(PLANNED_STEPS, total_steps)
        self._put(WARNINGS, 0)

    def step(self, report: StepReport) -> None:
        self._put(WARNINGS, len(report.warnings))
        for name, value in report.record.items():
            self._put(name, value)

    def end(self, phase: Phase) -> None:
        """The last values stay until the run ends."""

    def _put(self, name: str, value: float) -> None:
        """Count the value of a metric of metrics.jsonl in its family; one that METRICS lacks is left out."""
        if not (found := metric_of(name)):
            return
        metric, part = found
        child = self._families[metric.name].labels(*self._job, *part)
        if isinstance(child, Gauge):
            child.set(value)
        elif isinstance(child, Counter):
            child.inc(value)
        else:
            child.observe(value)


@contextmanager
def metrics_served(port: int) -> Iterator[PrometheusMetrics]:
    """Serve metrics on a port of every address while the block runs; EnvironmentProblem if the port cannot be had."""
    registry = CollectorRegistry()
    try:
        server, thread = start_http_server(port, registry=registry)
    except OSError as error:
        raise EnvironmentProblem(f"--metrics-port {port}: cannot be opened: {error.strerror}") from error
    try:
        yield PrometheusMetrics(registry)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
