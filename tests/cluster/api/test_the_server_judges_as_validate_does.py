"""A real API server accepts and refuses what `rlhf validate` does, and names the same field."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_api import kubectl_yaml
from tests.api.cases import ONLY_VALIDATE, RIGHT, UPDATES, WRONG, Update, made
from tests.api.test_crd import MOST_BYTES, applied_bytes
from tests.cluster.client import Cluster
from tests.cluster.conftest import fresh_namespace
from tests.cluster.processes import FailedError
from tests.cluster.settings import ROOT
from tests.fuzz.server import server as judged
from tests.fuzz.targets import tried

JOBS = "/apis/rlhf.hybridflow.io/v1alpha1/namespaces/{}/rlhfjobs"
DRY = "dryRun=All&fieldValidation=Strict"
CREATED, OK = 201, 200
AT_ONCE = 8
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def as_kubectl_sends(value: Any) -> Any:
    """JSON as Go writes it: a number without a fraction has no point."""
    if isinstance(value, dict):
        return {key: as_kubectl_sends(each) for key, each in value.items()}
    if isinstance(value, list):
        return [as_kubectl_sends(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def create(server: Cluster, document: dict[str, Any], query: str = DRY, namespace: str = "default") -> tuple[int, Any]:
    """The server's answer to a new job."""
    return server.request("POST", f"{JOBS.format(namespace)}?{query}", as_kubectl_sends(document))


def fields(answer: dict[str, Any]) -> list[str]:
    """The fields that a refusal names, written as `rlhf validate` writes them."""
    named = [cause.get("field", "") for cause in answer.get("details", {}).get("causes", [])]
    named += re.findall(r'(?:unknown|duplicate) field "([^"]+)"', answer.get("message", ""))
    named += re.findall(
        r"Invalid value: (metadata\.name):", answer.get("message", "")
    )  # a rule at the root has no field
    return [re.sub(r"\[(\w+)\]", r".\1", field) for field in named]


def same_place(one: str, other: str) -> bool:
    """Whether one of two paths is the other, or is above it."""
    first, second = sorted((one.split("."), other.split(".")), key=len)
    return second[: len(first)] == first


Answer = tuple[int, dict[str, Any]]


@pytest.fixture(scope="module")
def answers(rlhf_server: Cluster) -> Iterator[dict[str, Future[Answer]]]:
    """What the server says of each document; several are asked about at once."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        yield {
            name: threads.submit(create, rlhf_server, case.document())
            for name, case in {**RIGHT, **ONLY_VALIDATE, **WRONG}.items()
        }


@pytest.fixture(scope="module")
def changes(rlhf_server: Cluster) -> Iterator[dict[str, Future[tuple[Answer, Answer]]]]:
    """What the server says of each job and of its change."""
    for namespace in fresh_namespace(rlhf_server):
        with ThreadPoolExecutor(AT_ONCE) as threads:
            yield {
                name: threads.submit(change, rlhf_server, namespace, f"job-{number}", update)
                for number, (name, update) in enumerate(UPDATES.items())
            }


def change(server: Cluster, namespace: str, name: str, update: Update) -> tuple[Answer, Answer]:
    """Makes the first half of an update and asks for the second."""
    before, after = made(update.base, update.before), as_kubectl_sends(made(update.base, update.after))
    before["metadata"]["name"] = after["metadata"]["name"] = name
    first = create(server, before, "fieldValidation=Strict", namespace)
    after["metadata"]["resourceVersion"] = first[1].get("metadata", {}).get("resourceVersion")
    return first, server.request("PUT", f"{JOBS.format(namespace)}/{name}?{DRY}", after)


@pytest.mark.parametrize("name", [*RIGHT, *ONLY_VALIDATE])
def test_a_right_document_is_accepted(answers: dict[str, Future[Answer]], name: str) -> None:
    status, answer = answers[name].result()
    assert status == CREATED, answer


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_document_is_refused_at_its_field(answers: dict[str, Future[Answer]], name: str) -> None:
    status, answer = answers[name].result()
    assert status in (400, 422), answer
    assert any(same_place(field, WRONG[name].path) for field in fields(answer)), (fields(answer), answer["message"])


def test_no_two_cases_have_one_name() -> None:
    assert len({*RIGHT, *ONLY_VALIDATE, *WRONG}) == len(RIGHT) + len(ONLY_VALIDATE) + len(WRONG)


@pytest.mark.parametrize("name", UPDATES)
def test_a_change_is_allowed_or_not(changes: dict[str, Future[tuple[Answer, Answer]]], name: str) -> None:
    update, ((created, document), (status, answer)) = UPDATES[name], changes[name].result()
    assert created == CREATED, document
    assert status == (422 if update.path else OK), answer
    assert not update.path or any(same_place(field, update.path) for field in fields(answer)), answer


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_are_accepted_by_kubectl(rlhf_server: Cluster, example: Path) -> None:
    said = rlhf_server.kubectl("create", "--dry-run=server", "--validate=strict", "-f", example)
    documents = [document for document in kubectl_yaml.read(example.read_text(), "") if document]
    assert said.count("created (server dry run)") == len(documents)


def test_the_definition_fits_client_side_apply(rlhf_server: Cluster) -> None:
    file = ROOT / "crds" / "rlhfjobs.yaml"
    applied = json.loads(rlhf_server.kubectl("apply", "--dry-run=server", "-o", "json", "-f", file))
    kept = applied["metadata"]["annotations"]["kubectl.kubernetes.io/last-applied-configuration"]
    assert MOST_BYTES / 2 < len(kept.encode()) <= MOST_BYTES
    assert (
        abs(len(kept.encode()) - applied_bytes(yaml.safe_load(file.read_text()))) < 100
    )  # kubectl adds annotations: {}


def test_null_is_kept_where_it_is_a_value(rlhf_server: Cluster) -> None:
    document = made("PPO", ("algorithm.valueClipRange=", "algorithm.discount="))
    status, answer = create(rlhf_server, document)
    assert status == CREATED
    assert json.dumps(answer["spec"]["algorithm"]) == '{"name": "PPO", "valueClipRange": null}'


def explained(server: Cluster, field: str) -> str:
    """What kubectl says of a field; nothing while the server does not tell it yet."""
    try:
        return server.kubectl("explain", field)
    except FailedError:
        return ""


def test_kubectl_explains_the_algorithm(rlhf_server: Cluster) -> None:
    said = rlhf_server.until(lambda: explained(rlhf_server, "rlhfjob.spec.algorithm"), 60, "the field is explained")
    assert "clipRange" in said
    assert "Clipping of the probability ratio" in said


def test_damaged_documents_are_judged_alike(rlhf_server: Cluster) -> None:
    found = tried(judged(rlhf_server), cases=200, seed=1)
    assert not found.defects, "\n".join(f"case {number}: {shown}" for number, shown in found.defects.values())
    assert {"taken by both", "refused by both"} <= found.outcomes.keys()


POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
LIMITED = (
    "runtime.worker.template={spec: {hostNetwork: true}}",
    "runtime.controller.template={spec: {priorityClassName: system-node-critical}}",
    "runtime.controller.template={spec: {volumes: [{name: etc, hostPath: {path: /etc}}]}}",
    "runtime.worker.template={spec: {tolerations: [{operator: Exists}]}}",
    "runtime.worker.template={spec: {nodeName: control-plane}}",
)
ALLOWED = "runtime.worker.template={spec: {priorityClassName: training, tolerations: [{key: training/a}], volumes: []}}"


def test_the_example_of_a_policy_limits_templates(rlhf_server: Cluster, namespace: str) -> None:
    text = (ROOT / "helm/rlhf-operator/examples/limits-of-templates.yaml").read_text()
    policy, binding = yaml.safe_load_all(text)
    where = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    binding["spec"]["matchResources"] = where
    rlhf_server.expect("POST", POLICIES, policy)
    rlhf_server.expect("POST", f"{POLICIES.removesuffix('policies')}policybindings", binding)

    def asked(override: str) -> tuple[int, Any]:
        document = made("PPO", (override,))
        document["metadata"]["namespace"] = namespace
        return create(rlhf_server, document, namespace=namespace)

    rlhf_server.until(lambda: asked(LIMITED[0])[0] != CREATED, 60, "the policy is in force")
    for override in LIMITED:
        status, answer = asked(override)
        assert (status, "RLHFJob" in answer["message"]) == (422, True), answer
    for override in (ALLOWED, "runtime.sharedMemory=1Gi"):
        status, answer = asked(override)
        assert status == CREATED, answer
    rlhf_server.expect("DELETE", f"{POLICIES}/rlhfjob-templates")
    rlhf_server.expect("DELETE", f"{POLICIES.removesuffix('policies')}policybindings/rlhfjob-templates")
