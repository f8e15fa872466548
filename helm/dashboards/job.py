"""One job, for who trains a model."""

from __future__ import annotations

from helm.dashboards.model import Dashboard, Panel, Variable

OWN = '{namespace="$namespace", job="$job"}'
"""Series of the trainer."""
TOLD = '{namespace="$namespace", name="$job"}'
"""Series of the operator; after a change of its leader there are two for a while."""
RATE = "[$__rate_interval]"

NOW = (
    Panel(
        title="Phase",
        about="Where the job is in its life; docs/operations.md lists the phases.",
        queries={"{{phase}}": f"max by (phase) (rlhf_job_phase{TOLD}) == 1"},
        kind="stat",
        named=True,
    ),
    Panel(title="Step", about="Steps done.", queries={"step": f"max(rlhf_job_step{TOLD})"}, kind="stat"),
    Panel(title="Of", about="Steps planned.", queries={"steps": f"max(rlhf_job_total_steps{TOLD})"}, kind="stat"),
    Panel(
        title="Left",
        about="At the pace of the latest step.",
        queries={
            "left": f"(max(rlhf_job_total_steps{TOLD}) - max(rlhf_job_step{TOLD})) * max(rlhf_job_step_seconds{TOLD})"
        },
        unit="s",
        kind="stat",
    ),
    Panel(
        title="Attempt", about="1: none has failed.", queries={"": f"max(rlhf_job_attempts_total{TOLD})"}, kind="stat"
    ),
    Panel(
        title="Cost",
        about="In the shown time; nothing where GPUs have no price (cluster.nodeGroups of the chart).",
        queries={"cost": f"sum(increase(rlhf_job_cost_total{TOLD}[$__range]))"},
        kind="stat",
    ),
)
LEARNING = (
    Panel(
        title="Reward",
        about="Mean score of the step's responses, and its parts. It should rise.",
        queries={"reward": f"rlhf_reward_mean{OWN}", "{{part}}": f"rlhf_reward_part_mean{OWN}"},
    ),
    Panel(
        title="On held-out data",
        about="Measured every spec.evaluation.everySteps.",
        queries={"{{measure}}": f"rlhf_evaluation{OWN}"},
    ),
    Panel(title="Loss", about="By objective.", queries={"{{objective}}": f"rlhf_loss{OWN}"}),
    Panel(
        title="From the reference",
        about="Nats a response. A steep rise beside a rising reward is a reward that is being cheated.",
        queries={"kl": f"rlhf_kl_reference_nats{OWN}", "coefficient": f"rlhf_kl_coefficient{OWN}"},
    ),
    Panel(
        title="Response length",
        about="Mean tokens.",
        queries={"tokens": f"rlhf_response_length_tokens{OWN}"},
    ),
    Panel(
        title="Shares of responses and pairs",
        about="Responses that end by themselves; prompts whose responses differ in reward; pairs in the right order.",
        queries={
            "finished": f"rlhf_finished_responses_ratio{OWN}",
            "with signal": f"rlhf_groups_with_signal_ratio{OWN}",
            "pairs": f"rlhf_pair_accuracy_ratio{OWN}",
        },
        unit="percentunit",
    ),
)
HEALTH = (
    Panel(
        title="Gradient norm",
        about="Before clipping, largest of the step.",
        queries={"{{objective}}": f"rlhf_grad_norm{OWN}"},
    ),
    Panel(
        title="Entropy",
        about="Nats a token; near 0 nothing new is tried.",
        queries={"entropy": f"rlhf_entropy_nats{OWN}"},
    ),
    Panel(
        title="Clipped, padded",
        about="Share of response tokens at which the loss is clipped, and of padding among all tokens.",
        queries={"clipped": f"rlhf_clipped_tokens_ratio{OWN}", "padding": f"rlhf_padding_tokens_ratio{OWN}"},
        unit="percentunit",
    ),
    Panel(
        title="Generator against trainer",
        about="KL in nats a token; about 0 unless sampling is restricted.",
        queries={"kl": f"rlhf_kl_rollout_nats{OWN}"},
    ),
    Panel(
        title="Staleness",
        about="Policy versions between the weights that sampled and those that learn.",
        queries={"versions": f"rlhf_staleness_steps{OWN}"},
    ),
    Panel(
        title="Skipped updates, warnings",
        about="Updates whose loss or gradient was not finite. Both should be 0.",
        queries={"skipped": f"rlhf_skipped_updates_total{OWN}", "warnings": f"rlhf_warnings_total{OWN}"},
    ),
)
SPEED = (
    Panel(
        title="Seconds of a step by phase",
        about="Phases of several pools may overlap. Reshard brings the weights to the generator.",
        queries={
            "{{phase}}": f"sum by (phase) (rate(rlhf_phase_seconds_sum{OWN}{RATE}))"
            f" / on () group_left () sum(rate(rlhf_step_seconds_count{OWN}{RATE}))"
        },
        unit="s",
        stacked=True,
    ),
    Panel(
        title="Step, measured and predicted",
        about="The mapper's prediction is for the placement of this attempt.",
        queries={
            "measured": f"max(rlhf_job_step_seconds{TOLD})",
            "predicted": f"max(rlhf_job_predicted_step_seconds{TOLD})",
        },
        unit="s",
    ),
    Panel(title="Tokens a second", about="Of all ranks.", queries={"tokens": f"rlhf_tokens_per_second{OWN}"}),
    Panel(
        title="Model FLOP/s",
        about="Without what is computed again.",
        queries={"{{phase}}": f"sum by (phase) (rate(rlhf_model_flops_total{OWN}{RATE}))"},
        stacked=True,
    ),
    Panel(
        title="MFU",
        about="Of the GPUs' peak; nothing on CPU.",
        queries={"mfu": f"rlhf_mfu_ratio{OWN}"},
        unit="percentunit",
    ),
    Panel(
        title="Idle slots in a step",
        about="Share of the time in which slots of a pool wait for others or for data.",
        queries={
            "{{pool}}": f"sum by (pool) (rate(rlhf_pool_idle_seconds_total{OWN}{RATE})) / (sum by (pool)"
            f" (rate(rlhf_pool_idle_seconds_total{OWN}{RATE})) + sum by (pool)"
            f" (rate(rlhf_pool_busy_seconds_total{OWN}{RATE})))"
        },
        unit="percentunit",
    ),
    Panel(
        title="Weights to the generator",
        about="Bytes of a step; its seconds are the phase reshard.",
        queries={
            "bytes": f"sum(rate(rlhf_reshard_bytes_total{OWN}{RATE})) / sum(rate(rlhf_step_seconds_count{OWN}{RATE}))"
        },
        unit="bytes",
    ),
    Panel(
        title="Memory by phase",
        about="In use at its end, of the fullest rank.",
        queries={"{{phase}}": f"rlhf_memory_used_bytes{OWN}"},
        unit="bytes",
    ),
    Panel(
        title="Memory and KV cache in use",
        about="Largest share. With a full cache responses wait on GPUs; on CPU it is as large as a batch may need.",
        queries={"memory": f"rlhf_memory_used_ratio{OWN}", "kv cache": f"rlhf_kv_cache_used_ratio{OWN}"},
        unit="percentunit",
    ),
)
RELIABILITY = (
    Panel(
        title="Age of the checkpoint",
        about="What a failure would cost, beside the age at which the next one is due.",
        queries={
            "age": f"max(rlhf_job_checkpoint_age_seconds{TOLD})",
            "due": f"max(rlhf_job_checkpoint_interval_seconds{TOLD})",
        },
        unit="s",
    ),
    Panel(
        title="Seconds in each phase of its life",
        about="Queued: in line. Provisioning, Initializing, Restarting: pods without training.",
        queries={"{{phase}}": f"max by (phase) (rlhf_job_phase_seconds_total{TOLD})"},
        unit="s",
        stacked=True,
    ),
    Panel(
        title="Attempts and counted failures",
        about="See status.attempts.",
        queries={
            "attempts": f"max(rlhf_job_attempts_total{TOLD})",
            "failures": f"max(rlhf_job_failed_attempts{TOLD})",
        },
    ),
)
JOB = Dashboard(
    uid="rlhf-job",
    title="RLHF / Job",
    about="One RLHFJob: does it learn, is it healthy, where does its time go.",
    variables=(
        Variable(name="namespace", query="label_values(rlhf_job_info, namespace)"),
        Variable(name="job", query='label_values(rlhf_job_info{namespace="$namespace"}, name)'),
    ),
    rows={"Now": NOW, "Learning": LEARNING, "Health": HEALTH, "Speed": SPEED, "Reliability": RELIABILITY},
)
