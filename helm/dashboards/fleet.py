"""All jobs and the operator, for the platform team."""

from __future__ import annotations

from helm.dashboards.model import Dashboard, Panel, Variable

THESE = '{namespace=~"$namespace"}'
ONE = "max by (namespace, name)"
"""One series a job: after a change of the operator's leader there are two for a while."""
RATE = "[$__rate_interval]"


def jobs_in(phase: str) -> str:
    """Their number."""
    selector = f'{{namespace=~"$namespace", phase="{phase}"}}'
    return f"sum({ONE} (rlhf_job_phase{selector}))"


NOW = (
    Panel(title="Running", about="Jobs.", queries={"": jobs_in("Running")}, kind="stat"),
    Panel(title="In line", about="Jobs.", queries={"": jobs_in("Queued")}, kind="stat"),
    Panel(title="Failed", about="Jobs that are still there.", queries={"": jobs_in("Failed")}, kind="stat"),
    Panel(
        title="GPUs held",
        about="By jobs with pods.",
        queries={"": f"sum({ONE} (rlhf_job_gpus{THESE}))"},
        kind="stat",
    ),
    Panel(
        title="Cost an hour",
        about="Nothing where GPUs have no price (cluster.nodeGroups of the chart).",
        queries={"": f"sum(rate(rlhf_job_cost_total{THESE}{RATE})) * 3600"},
        kind="stat",
    ),
    Panel(
        title="Replicas that lead",
        about="1; 0: nobody starts or ends jobs.",
        queries={"": "sum(rlhf_operator_leader)"},
        kind="stat",
    ),
)
JOBS = (
    Panel(
        title="Jobs by phase",
        about="docs/operations.md lists the phases.",
        queries={"{{phase}}": f"sum by (phase) (max by (namespace, name, phase) (rlhf_job_phase{THESE})) > 0"},
        stacked=True,
    ),
    Panel(
        title="Longest waits in line",
        about="Five jobs.",
        queries={"{{namespace}}/{{name}}": f"topk(5, {ONE} (rlhf_job_queue_seconds{THESE}))"},
        unit="s",
    ),
    Panel(
        title="Reasons of the latest failures",
        about="Jobs by the reason in status.lastFailure.",
        queries={"{{reason}}": f"count by (reason) (max by (namespace, name, reason) (rlhf_job_last_failure{THESE}))"},
        stacked=True,
    ),
    Panel(
        title="New attempts within an hour",
        about="By job.",
        queries={"{{namespace}}/{{name}}": f"changes({ONE} (rlhf_job_attempts_total{THESE})[1h:1m])"},
    ),
    Panel(
        title="Oldest checkpoints",
        about="Five jobs: what a failure would cost them.",
        queries={"{{namespace}}/{{name}}": f"topk(5, {ONE} (rlhf_job_checkpoint_age_seconds{THESE}))"},
        unit="s",
    ),
    Panel(
        title="Fullest memory",
        about="Largest share of a rank's GPU, on CPU of its container.",
        queries={"{{namespace}}/{{job}}": f"topk(5, max by (namespace, job) (rlhf_memory_used_ratio{THESE}))"},
        unit="percentunit",
    ),
)
GPUS = (
    Panel(
        title="GPUs by phase of their jobs",
        about="All but Running is idle: Queued and Restarting jobs wait for GPUs, the others hold them.",
        queries={"{{phase}}": f"sum by (phase) (rate(rlhf_job_gpu_seconds_total{THESE}{RATE}))"},
        stacked=True,
    ),
    Panel(
        title="GPUs held by namespace",
        about="By jobs with pods.",
        queries={"{{namespace}}": f"sum by (namespace) ({ONE} (rlhf_job_gpus{THESE}))"},
        stacked=True,
    ),
    Panel(
        title="Cost by job",
        about="In the shown time, the ten dearest.",
        queries={
            "{{namespace}}/{{name}}": "topk(10, sum by (namespace, name)"
            f" (increase(rlhf_job_cost_total{THESE}[$__range])))"
        },
    ),
    Panel(
        title="Idle slots in steps",
        about="Share of the time of all slots of a job; high: another placement may be better (rlhf plan).",
        queries={
            "{{namespace}}/{{job}}": f"sum by (namespace, job) (rate(rlhf_pool_idle_seconds_total{THESE}{RATE})) / ("
            f"sum by (namespace, job) (rate(rlhf_pool_idle_seconds_total{THESE}{RATE}))"
            f" + sum by (namespace, job) (rate(rlhf_pool_busy_seconds_total{THESE}{RATE})))"
        },
        unit="percentunit",
    ),
    Panel(
        title="MFU",
        about="Of the GPUs' peak; nothing on CPU.",
        queries={"{{namespace}}/{{job}}": f"max by (namespace, job) (rlhf_mfu_ratio{THESE})"},
        unit="percentunit",
    ),
    Panel(
        title="Steps: measured by predicted",
        about="Above 1: slower than the mapper predicted.",
        queries={
            "{{namespace}}/{{name}}": f"{ONE} (rlhf_job_step_seconds{THESE})"
            f" / {ONE} (rlhf_job_predicted_step_seconds{THESE})"
        },
    ),
)
OPERATOR = (
    Panel(
        title="Leader by replica",
        about="One is 1, the others 0.",
        queries={"{{pod}}": "rlhf_operator_leader"},
    ),
    Panel(
        title="Passes over jobs, by second",
        about="error: tried again later.",
        queries={"{{result}}": f"sum by (result) (rate(rlhf_operator_reconcile_total{RATE}))"},
        stacked=True,
    ),
    Panel(
        title="Duration of passes",
        about="Of half of them at most, and of 95 in 100.",
        queries={
            name: f"histogram_quantile({share}, sum by (le)"
            f" (rate(rlhf_operator_reconcile_duration_seconds_bucket{RATE})))"
            for name, share in (("median", 0.5), ("95 %", 0.95))
        },
        unit="s",
    ),
    Panel(
        title="Jobs that wait for a pass",
        about="More than a few for long: the operator does not keep up.",
        queries={"{{pod}}": "rlhf_operator_queue_depth"},
    ),
    Panel(
        title="Requests to the API server, by second",
        about="By code; 0: no answer.",
        queries={"{{code}}": f"sum by (code) (rate(rlhf_operator_api_requests_total{RATE}))"},
        stacked=True,
    ),
    Panel(
        title="Memory of the operator",
        about="By replica.",
        queries={
            "{{pod}}": "process_resident_memory_bytes and on (namespace, pod) rlhf_operator_build_info",
        },
        unit="bytes",
    ),
)
FLEET = Dashboard(
    uid="rlhf-fleet",
    title="RLHF / Fleet",
    about="All RLHFJobs, what they hold and wait for, and the operator.",
    variables=(Variable(name="namespace", query="label_values(rlhf_job_info, namespace)", all=True),),
    rows={"Now": NOW, "Jobs": JOBS, "GPUs": GPUS, "Operator": OPERATOR},
)
