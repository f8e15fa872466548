"""Ray answers to nobody without the token of its attempt, and the pods of a job take connections from few."""

from __future__ import annotations

from typing import Any

from rlhf_operator import names
from rlhf_operator.settings import JobNetworkPolicy, Settings
from tests.operator.rendered import changed, example_jobs, head, made, nodes, pod_of

PPO = "helpful-ppo"
OPERATOR, KUBERAY, PROMETHEUS = ({"podSelector": {"matchLabels": {"app": app}}} for app in ("ours", "kuberay", "prom"))
SETTINGS = Settings(
    job_network_policy=JobNetworkPolicy(operator=(OPERATOR,), kube_ray=(KUBERAY,), prometheus=(PROMETHEUS,))
)
OWN = {"matchLabels": {names.JOB_UID: f"uid-of-{PPO}"}}


def policy(settings: Settings = SETTINGS, **more: Any) -> Any:
    """That of the golden path's last job."""
    return made(example_jobs()[PPO], nodes(1), settings, **more)["NetworkPolicy"]


def doors(made_policy: Any) -> dict[tuple[int, ...], Any]:
    """Ports -> who may connect to them; no port stands for all."""
    rules = made_policy["spec"]["ingress"]
    return {tuple(port["port"] for port in rule.get("ports", ())): rule["from"] for rule in rules}


def test_ray_asks_for_a_token_that_only_kuberay_knows() -> None:
    rayjob = made(example_jobs()[PPO], nodes(1))["RayJob"]
    assert rayjob["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}, "KubeRay makes one for each attempt"
    assert "Secret" not in made(example_jobs()[PPO], nodes(1))


def test_pods_of_a_job_admit_each_other_and_few_others() -> None:
    assert policy()["spec"]["podSelector"] == OWN
    assert policy()["spec"]["policyTypes"] == ["Ingress"]
    assert doors(policy()) == {
        (): [{"podSelector": OWN}],
        (8265,): [KUBERAY],
        (names.STATUS_PORT,): [OPERATOR],
        (names.TRAINER_METRICS_PORT, 8080): [PROMETHEUS],
    }


def test_all_pods_of_a_job_are_behind_the_policy() -> None:
    rayjob = made(example_jobs()[PPO], nodes(1), SETTINGS)["RayJob"]
    groups = [head(rayjob), *rayjob["spec"]["rayClusterSpec"]["workerGroupSpecs"]]
    assert len(groups) == 2
    for group in groups:
        assert OWN["matchLabels"].items() <= group["template"]["metadata"]["labels"].items()


def test_a_port_with_nobody_to_admit_is_closed() -> None:
    assert list(doors(policy(Settings(job_network_policy=JobNetworkPolicy())))) == [()]


def test_attempts_share_a_policy_until_others_are_admitted() -> None:
    assert policy() == policy(attempt=2)
    other = Settings(job_network_policy=JobNetworkPolicy(kube_ray=(KUBERAY,)))
    assert policy(other)["metadata"]["name"] != policy()["metadata"]["name"]


def test_a_cluster_with_policies_of_its_own_gets_none() -> None:
    assert "NetworkPolicy" not in made(example_jobs()[PPO], nodes(1), Settings())


def test_workers_on_the_host_network_reach_the_head() -> None:
    job = changed(PPO, {"runtime.worker.template.spec.hostNetwork": True})
    assert "NetworkPolicy" not in made(job, nodes(1), SETTINGS)


def test_the_service_of_the_head_has_only_ports_that_ray_needs() -> None:
    """KubeRay makes it of the ports of the first container."""
    ray, log = pod_of(head(made(example_jobs()[PPO], nodes(1))["RayJob"]))["containers"]
    assert {port["containerPort"] for port in ray["ports"]} == {6379, 8265, 8080}
    assert {port["containerPort"] for port in log["ports"]} == {names.STATUS_PORT, names.TRAINER_METRICS_PORT}
