"""What the chart's values give the pods of every job: registry, account, variables, authorities, a cache of models."""

from typing import Any

from rlhf_operator.resources import reader
from rlhf_operator.settings import Settings
from tests.operator.rendered import changed, groups, head, made, nodes, pod_of, snapshot, variables

PPO = "helpful-ppo"
GIVEN = Settings.model_validate(
    {
        "imagePullSecrets": ["registry"],
        "serviceAccountName": "trainer",
        "env": [
            {"name": "HTTPS_PROXY", "value": "http://proxy:3128"},
            {"name": "HF_TOKEN", "secret": {"name": "hub", "key": "token"}},
        ],
        "modelCache": {"persistentVolumeClaim": {"claimName": "models"}},
        "caBundle": {"configMap": "authorities", "key": "all.pem"},
    },
    by_alias=True,
    by_name=False,
)


def pods(settings: Settings, **runtime: Any) -> dict[str, Any]:
    """Head, worker and reader of a job."""
    job = changed(PPO, {f"runtime.{name}": value for name, value in runtime.items()})
    rayjob = made(job, nodes(1), settings)["RayJob"]
    template = reader.manifest(snapshot(job), job, settings, [("hf://a/b", None)])["spec"]["template"]
    worker = next(iter(groups(rayjob).values()))
    return {"head": pod_of(head(rayjob)), "worker": pod_of(worker), "reader": template["spec"]}


def test_all_pods_of_jobs_get_what_the_installation_says() -> None:
    for pod in pods(GIVEN).values():
        assert (pod["serviceAccountName"], pod["imagePullSecrets"]) == ("trainer", [{"name": "registry"}])
        assert pod["automountServiceAccountToken"] is False
        container = pod["containers"][0]
        found = variables(container)
        assert found["HTTPS_PROXY"] == "http://proxy:3128"
        (token,) = (each for each in container["env"] if each["name"] == "HF_TOKEN")
        assert token["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
        volumes = {each["name"]: each for each in pod["volumes"]}
        folders = {each["name"]: each for each in container["volumeMounts"]}
        assert volumes["rlhf-models"]["persistentVolumeClaim"] == {"claimName": "models"}
        assert found["HF_HUB_CACHE"] == folders["rlhf-models"]["mountPath"]
        assert not folders["rlhf-models"].get("readOnly")
        ca = volumes["rlhf-ca"]["configMap"]
        assert (ca["name"], ca["items"]) == ("authorities", [{"key": "all.pem", "path": "ca.crt"}])
        assert found["SSL_CERT_FILE"] == found["REQUESTS_CA_BUNDLE"] == f"{folders['rlhf-ca']['mountPath']}/ca.crt"


def test_what_a_job_says_comes_first() -> None:
    own = {
        "imagePullSecrets": ["mine"],
        "serviceAccountName": "me",
        "env": [
            {"name": "HTTPS_PROXY", "value": "http://other:1"},
            {"name": "HF_HUB_CACHE", "value": "/rlhf/output/h"},
        ],
    }
    for pod in pods(GIVEN, **own).values():
        assert (pod["serviceAccountName"], pod["imagePullSecrets"]) == ("me", [{"name": "mine"}])
        found = variables(pod["containers"][0])
        assert found["HTTPS_PROXY"] == "http://other:1"
        assert found["HF_HUB_CACHE"] == "/rlhf/output/h"
        named = [each["name"] for each in pod["containers"][0]["env"]]
        assert len(named) == len(set(named))
        assert "HF_TOKEN" in named


def test_without_them_there_is_nothing_of_it() -> None:
    for pod in pods(Settings()).values():
        assert not {"serviceAccountName", "imagePullSecrets"} & pod.keys()
        assert not {"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "HF_HUB_CACHE"} & variables(pod["containers"][0]).keys()
        assert not [each for each in pod["volumes"] if each["name"].startswith("rlhf-")]
