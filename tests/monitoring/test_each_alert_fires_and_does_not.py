"""Each alert of the chart fires for the series of what is wrong and for no others, as promtool evaluates it."""

from pathlib import Path

import pytest

from tests.helm.rendering import Helm
from tests.monitoring.rules import ALERTS, Series, alerts, alerts_of, file_of_tests, input_of, promtool
from tests.repo.tree import ROOT

TOLD = 'namespace="team",name="ppo",pod="operator-a"'
OWN = 'namespace="team",job="ppo",algorithm="PPO",pod="ppo-head"'
OLD = {
    f'rlhf_job_phase{{{TOLD},phase="Running"}}': "1x200",
    f"rlhf_job_checkpoint_interval_seconds{{{TOLD}}}": "600x200",
    f"rlhf_job_step_seconds{{{TOLD}}}": "60x200",
}
"""A running job; its checkpoint may be 22 minutes old."""


def phase(name: str) -> str:
    """The series of a phase of the job."""
    return f'rlhf_job_phase{{{TOLD},phase="{name}"}}'


def condition(kind: str, status: str, reason: str) -> str:
    """The series of a condition of the job."""
    return f'rlhf_job_condition{{{TOLD},condition="{kind}",status="{status}",reason="{reason}"}}'


CASES: dict[str, tuple[Series, Series]] = {
    "RLHFJobSlow": (
        {f'rlhf_job_condition{{{TOLD},condition="Slow",status="True",reason="NoProgress"}}': "1x200"},
        {f'rlhf_job_condition{{{TOLD},condition="Slow",status="False",reason="Progressing"}}': "1x200"},
    ),
    "RLHFRewardCollapsed": (
        {f"rlhf_reward_mean{{{OWN}}}": "1 1.1 0.9 1 " * 45 + "-2x20"},
        {f"rlhf_reward_mean{{{OWN}}}": "1 1.1 0.9 1 " * 50},
    ),
    "RLHFCauseFound": (
        {f'rlhf_cause{{{OWN},cause="FastLearning"}}': "1x200"},
        {f"rlhf_reward_mean{{{OWN}}}": "1x200"},
    ),
    "RLHFKLExploded": (
        {f"rlhf_kl_reference_nats{{{OWN}}}": "60x200", f"rlhf_response_length_tokens{{{OWN}}}": "100x200"},
        {f"rlhf_kl_reference_nats{{{OWN}}}": "40x200", f"rlhf_response_length_tokens{{{OWN}}}": "100x200"},
    ),
    "RLHFUpdatesSkipped": (
        {f"rlhf_skipped_updates_total{{{OWN}}}": "0x190 1x10"},
        {f"rlhf_skipped_updates_total{{{OWN}}}": "0x20 3x180"},
    ),
    "RLHFRolloutMismatch": (
        {f"rlhf_kl_rollout_nats{{{OWN}}}": "0.05x200"},
        {f"rlhf_kl_rollout_nats{{{OWN}}}": "0.005x200"},
    ),
    "RLHFMemoryNearLimit": (
        {f"rlhf_memory_used_ratio{{{OWN}}}": "0.97x200"},
        {f"rlhf_memory_used_ratio{{{OWN}}}": "0.9x200"},
    ),
    "RLHFCheckpointTooOld": (
        {**OLD, f"rlhf_job_checkpoint_age_seconds{{{TOLD}}}": "0+60x200"},
        {**OLD, f"rlhf_job_checkpoint_age_seconds{{{TOLD}}}": "0+60x19 " * 10},
    ),
    "RLHFJobRestarting": (
        {f"rlhf_job_attempts_total{{{TOLD}}}": "1x160 2x10 3x10 4x20"},
        {f"rlhf_job_attempts_total{{{TOLD}}}": "1x20 2x10 3x170"},
    ),
    "RLHFQueueStuck": (
        {f"rlhf_job_queue_seconds{{{TOLD}}}": "9000+60x200"},
        {f"rlhf_job_queue_seconds{{{TOLD}}}": "0+60x200"},
    ),
    "RLHFJobFailed": (
        {condition("Failed", "True", "UserCode"): "_x190 1x10", phase("Failed"): "0x189 1x11"},
        {condition("Failed", "True", "UserCode"): "_x100 1x100", phase("Failed"): "0x99 1x101"},
    ),
    "RLHFJobUnmapped": ({phase("Mapping"): "1x200"}, {phase("Mapping"): "0x150 1x50"}),
    "RLHFJobUnschedulable": (
        {condition("ClusterReady", "False", "Unschedulable"): "1x200", phase("Provisioning"): "1x200"},
        {condition("ClusterReady", "False", "Unschedulable"): "1x200", phase("Provisioning"): "0x150 1x50"},
    ),
    "RLHFJobProvisioning": (
        {condition("ClusterReady", "False", "PodsPending"): "1x200", phase("Provisioning"): "1x200"},
        {condition("ClusterReady", "False", "Unschedulable"): "1x200", phase("Provisioning"): "1x200"},
    ),
    "RLHFPodsDoNotEnd": ({phase("Suspending"): "0x170 1x30"}, {phase("Suspending"): "0x185 1x15"}),
    "RLHFPassesFail": (
        {f"rlhf_job_failed_passes{{{TOLD}}}": "0+1x200"},
        {f"rlhf_job_failed_passes{{{TOLD}}}": "0+1x12 " * 15},
    ),
    "RLHFKubeRayAway": (
        {f'rlhf_job_condition{{{TOLD},condition="ClusterReady",status="False",reason="KubeRayAway"}}': "1x200"},
        {f'rlhf_job_condition{{{TOLD},condition="ClusterReady",status="False",reason="PodsPending"}}': "1x200"},
    ),
    "RLHFOperatorNoLeader": (
        {'rlhf_operator_leader{pod="a"}': "0x200", 'rlhf_operator_leader{pod="b"}': "0x200"},
        {'rlhf_operator_leader{pod="a"}': "0x200", 'rlhf_operator_leader{pod="b"}': "1x200"},
    ),
}
"""Alert -> series after 200 minutes of which it fires, and of which it does not."""
MORE = {
    "no checkpoint at all": (
        "RLHFCheckpointTooOld",
        {**OLD, f'rlhf_job_phase_seconds_total{{{TOLD},phase="Running"}}': "0+60x200"},
    ),
    "KubeRay is not installed": (
        "RLHFKubeRayAway",
        {f'rlhf_job_condition{{{TOLD},condition="Accepted",status="False",reason="KubeRayMissing"}}': "1x200"},
    ),
    "a job that fails before it is scraped": (
        "RLHFJobFailed",
        {condition("Failed", "True", "InvalidInput"): "_x190 1x10", phase("Failed"): "_x190 1x10"},
    ),
    "attempts that are withdrawn again and again": (
        "RLHFJobUnschedulable",
        {
            condition("ClusterReady", "False", "Unschedulable"): "1x1 _x8 " * 20,
            condition("QuotaReserved", "False", "Withdrawn"): "_x1 1x8 " * 20,
            phase("Provisioning"): "1x1 0x8 " * 20,
            phase("Queued"): "0x1 1x8 " * 20,
        },
    ),
    "an autoscaler that never adds nodes": (
        "RLHFJobUnschedulable",
        {
            condition("QuotaReserved", "False", "WaitingForNodes"): "1x29 _x1 " * 7,
            condition("QuotaReserved", "False", "Withdrawn"): "_x29 1x1 " * 7,
            phase("WaitingForNodes"): "1x29 0x1 " * 7,
            phase("Queued"): "0x29 1x1 " * 7,
        },
    ),
    "an attempt whose pods stay": ("RLHFPodsDoNotEnd", {phase("Restarting"): "1x200"}),
    "skipped in the first step": ("RLHFUpdatesSkipped", {f"rlhf_skipped_updates_total{{{OWN}}}": "_x195 2x5"}),
    "no operator is scraped": ("RLHFOperatorNoLeader", {"up": "1x200"}),
}
QUIET = {
    "a job that failed long ago, after the leader changed": (
        "RLHFJobFailed",
        {
            condition("Failed", "True", "UserCode"): "1x135 _x65",
            condition("Failed", "True", "UserCode").replace("-a", "-b"): "_x140 1x60",
            phase("Failed"): "1x135 _x65",
            phase("Failed").replace("-a", "-b"): "_x140 1x60",
        },
    ),
    "pods that wait for an autoscaler's nodes": (
        "RLHFJobUnschedulable",
        {condition("ClusterReady", "False", "Unschedulable"): "1x200", phase("WaitingForNodes"): "1x200"},
    ),
    "nodes that come for the second attempt": (
        "RLHFJobUnschedulable",
        {
            condition("QuotaReserved", "False", "Withdrawn"): "_x129 1x1 _x70",
            phase("WaitingForNodes"): "1x129 0x1 1x25 0x45",
            phase("Queued"): "0x129 1x1 0x70",
            phase("Running"): "0x155 1x45",
        },
    ),
    "a job that stands in line after it was withdrawn once": (
        "RLHFJobUnschedulable",
        {
            condition("QuotaReserved", "False", "Withdrawn"): "_x100 1x1 _x100",
            phase("WaitingForNodes"): "1x99 0x101",
            phase("Queued"): "0x99 1x101",
        },
    ),
    "pods that wait for nodes and are none that start": (
        "RLHFJobProvisioning",
        {phase("WaitingForNodes"): "1x200", phase("Provisioning"): "0x200"},
    ),
    "pods that save a checkpoint as long as they may": ("RLHFPodsDoNotEnd", {phase("Suspending"): "0x181 1x19"}),
    "a suspended job": (
        "RLHFCheckpointTooOld",
        {
            **{name: values for name, values in OLD.items() if "phase" not in name},
            f'rlhf_job_phase{{{TOLD},phase="Running"}}': "0x200",
            f"rlhf_job_checkpoint_age_seconds{{{TOLD}}}": "0+60x200",
        },
    ),
    "a change of the leader": (
        "RLHFJobRestarting",
        {
            f"rlhf_job_attempts_total{{{TOLD}}}": "2x150 _x50",
            f"rlhf_job_attempts_total{{{TOLD.replace('-a', '-b')}}}": "_x149 2x51",
        },
    ),
    "a reward that rises": ("RLHFRewardCollapsed", {f"rlhf_reward_mean{{{OWN}}}": "0+0.01x200"}),
    "a reward as noisy as before": (
        "RLHFRewardCollapsed",
        {f"rlhf_reward_mean{{{OWN}}}": " ".join(["0 1"] * 92) + " 0x15"},
    ),
    "a reward that has just begun": ("RLHFRewardCollapsed", {f"rlhf_reward_mean{{{OWN}}}": "_x180 1x5 -9x15"}),
}


def firing(helm: Helm, alert: str, series: Series, folder: Path, *, fires: bool) -> None:
    """FailedError unless promtool finds the alert so after 200 minutes."""
    rule = alerts(helm)[alert]
    query = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)'
    wanted = {"expr": query, "eval_time": "200m", "exp_samples": [{"labels": "{}", "value": int(fires)}]}
    tests = [{"interval": "1m", "input_series": input_of(series), "promql_expr_test": [wanted]}]
    promtool("test rules", file_of_tests(folder, [rule], tests))


def test_each_alert_has_a_case(helm: Helm) -> None:
    assert set(alerts(helm)) == set(CASES)


@pytest.mark.parametrize("alert", CASES)
def test_it_fires_and_does_not(helm: Helm, alert: str, tmp_path: Path) -> None:
    wrong, right = CASES[alert]
    firing(helm, alert, wrong, tmp_path, fires=True)
    firing(helm, alert, right, tmp_path, fires=False)


@pytest.mark.parametrize("case", MORE)
def test_it_fires_also_for(helm: Helm, case: str, tmp_path: Path) -> None:
    firing(helm, *MORE[case], tmp_path, fires=True)


@pytest.mark.parametrize("case", QUIET)
def test_it_does_not_fire_for(helm: Helm, case: str, tmp_path: Path) -> None:
    firing(helm, *QUIET[case], tmp_path, fires=False)


def test_each_alert_has_its_section_in_the_runbooks(helm: Helm) -> None:
    sections = {
        line.removeprefix("## ")
        for line in (ROOT / "docs/runbooks.md").read_text().splitlines()
        if line.startswith("## ")
    }
    found = alerts(helm)
    assert sections == set(found)
    assert {rule["labels"]["severity"] for rule in found.values()} == {"warning", "critical"}


def test_each_alert_links_to_its_section_on_the_users_site(helm: Helm) -> None:
    page = "https://docs.example.com/rlhf/runbooks.html"
    linked = alerts(helm, runbookUrl=page)
    assert {name: rule["annotations"].pop("runbook_url") for name, rule in linked.items()} == {
        name: f"{page}#{name.lower()}" for name in linked
    }
    assert linked == alerts(helm), "without a page there is no link"


def test_pods_may_take_the_grace_period_of_the_chart_to_end(helm: Helm) -> None:
    values = {**ALERTS, "trainer": {"gracePeriodSeconds": 3600}}
    assert alerts_of(helm, values)["RLHFPodsDoNotEnd"]["for"] == "4500s"
