"""Each alert of the chart fires for the series of what is wrong and for no others, as promtool evaluates it."""

from pathlib import Path

import pytest

from tests.helm.rendering import Helm
from tests.monitoring.rules import Series, alerts, file_of_tests, input_of, promtool
from tests.repo.tree import ROOT

TOLD = 'namespace="team",name="ppo",pod="operator-a"'
OWN = 'namespace="team",job="ppo",algorithm="PPO",pod="ppo-head"'
OLD = {
    f'rlhf_job_phase{{{TOLD},phase="Running"}}': "1x200",
    f"rlhf_job_checkpoint_interval_seconds{{{TOLD}}}": "600x200",
    f"rlhf_job_step_seconds{{{TOLD}}}": "60x200",
}
"""A running job; its checkpoint may be 22 minutes old."""

CASES: dict[str, tuple[Series, Series]] = {
    "RLHFJobSlow": (
        {f'rlhf_job_condition{{{TOLD},condition="Slow",status="True",reason="NoProgress"}}': "1x200"},
        {f'rlhf_job_condition{{{TOLD},condition="Slow",status="False",reason="Progressing"}}': "1x200"},
    ),
    "RLHFRewardCollapsed": (
        {f"rlhf_reward_mean{{{OWN}}}": "1 1.1 0.9 1 " * 45 + "-2x20"},
        {f"rlhf_reward_mean{{{OWN}}}": "1 1.1 0.9 1 " * 50},
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
    "skipped in the first step": ("RLHFUpdatesSkipped", {f"rlhf_skipped_updates_total{{{OWN}}}": "_x195 2x5"}),
    "no operator is scraped": ("RLHFOperatorNoLeader", {"up": "1x200"}),
}
QUIET = {
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
    assert {name: rule["annotations"]["runbook"] for name, rule in found.items()} == {
        name: f"docs/runbooks.md#{name.lower()}" for name in found
    }
    assert {rule["labels"]["severity"] for rule in found.values()} == {"warning", "critical"}
