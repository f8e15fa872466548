"""`kubectl rlhf` on a real API server, with the operator; pods and trainers are played."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_api import kubectl_yaml
from tests.cluster import chart
from tests.cluster.client import Cluster
from tests.cluster.conftest import fresh_namespace
from tests.cluster.lifecycle import SECONDS, example
from tests.cluster.plugin import kubectl, rlhf, told
from tests.cluster.settings import ROOT
from tests.cluster.stage import Lives, small_job, stage

PLAYED, BROKEN, SERVED, READER = "played", "broken", "served", "helpful-ppo"


@pytest.fixture(scope="module")
def lives(rlhf_server: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    """A job that makes steps, one that has failed for good, and one that waits for another that is not there."""
    for namespace in fresh_namespace(rlhf_server):
        with stage(rlhf_server, namespace, tmp_path_factory.mktemp("operator")) as (lives, _):
            ppo = example(1, namespace)[2]
            assert ppo["metadata"]["name"] == READER
            lives.apply(small_job(PLAYED, namespace), small_job(BROKEN, namespace, backoffLimit=0), ppo)
            lives.train(PLAYED)
            lives.train(BROKEN)
            lives.fail(BROKEN)
            lives.jobs.wait_for(BROKEN, "Failed")
            lives.jobs.wait_for(READER, "Pending")
            yield lives


def ask(lives: Lives, command: str, *words: object) -> str:
    return told(lives.jobs.server, command, *words, "-n", lives.jobs.namespace)


@pytest.mark.parametrize("columns", [80, 120])
def test_top_shows_the_jobs(lives: Lives, columns: int) -> None:
    shown = told(lives.jobs.server, "top", "-n", lives.jobs.namespace, columns=columns)
    assert max(map(len, shown.splitlines())) <= columns
    rows = {line.split()[0]: line for line in shown.splitlines()[1:]}
    assert set(rows) == {PLAYED, BROKEN, READER}
    assert "Running" in rows[PLAYED]
    assert "3/10" in rows[PLAYED]
    assert "loss 0.25" in rows[PLAYED]
    assert "Failed" in rows[BROKEN]


def test_top_of_all_namespaces_names_them(lives: Lives) -> None:
    assert f"{lives.jobs.namespace}/{PLAYED}" in told(lives.jobs.server, "top", "-A", columns=140)


def test_why_explains_each_job(lives: Lives) -> None:
    running = ask(lives, "why", PLAYED)
    assert "step 3 of 10" in running
    assert "Step 2 was saved" in running
    failed = ask(lives, "why", BROKEN)
    assert "Internal, exit code 1 (internal)" in failed
    assert "It said: played." in failed
    assert "it goes on from step 2" in failed
    waiting = ask(lives, "why", READER)
    assert "is Pending" in waiting
    assert "InputsReady: InputMissing" in waiting
    assert "Create the job that it reads" in waiting


def test_jobs_are_compared_and_traced_back(lives: Lives) -> None:
    compared = ask(lives, "compare", PLAYED, BROKEN)
    assert compared.splitlines()[0].split() == [PLAYED, BROKEN, "change"]
    assert ["status", "Running", "Failed"] in [line.split() for line in compared.splitlines()]
    assert "spec.runPolicy.backoffLimit" in compared
    traced = ask(lives, "lineage", PLAYED)
    assert traced.startswith(f"{PLAYED} (SFT) is Running")
    assert "models.actor: package://" in traced
    unknown = rlhf(lives.jobs.server, "lineage", "playe", "-n", lives.jobs.namespace)
    assert (unknown.returncode, unknown.stderr) == (
        2,
        f"error: no status of a job names playe: did you mean {PLAYED}?\n",
    )


def test_a_job_is_suspended_and_resumed(lives: Lives) -> None:
    assert "saves a checkpoint" in ask(lives, "suspend", PLAYED)
    lives.jobs.wait_for(PLAYED, "Suspended")
    assert f"kubectl rlhf resume {PLAYED}" in ask(lives, "why", PLAYED)
    assert "nothing was changed" in ask(lives, "suspend", PLAYED)
    ask(lives, "resume", PLAYED)
    lives.train(PLAYED, 2)
    assert "Running" in ask(lives, "top")


def test_plan_says_what_the_operator_says(lives: Lives, tmp_path: Path) -> None:
    mapped = lives.jobs.condition(PLAYED, "Mapped")
    assert mapped["message"] in ask(lives, "plan", PLAYED)
    (tmp_path / "job.yaml").write_text(kubectl_yaml.write(small_job("new", lives.jobs.namespace)))
    shown = ask(lives, "plan", tmp_path / "job.yaml")
    assert shown.startswith("new: Mapped")
    assert "actor" in shown
    done = rlhf(lives.jobs.server, "plan", ROOT / "README.md", "-n", lives.jobs.namespace)
    assert (done.returncode, done.stderr[:7]) == (2, "error: ")


def test_the_server_takes_the_manifests_that_serve_a_job(lives: Lives, tmp_path: Path) -> None:
    lives.apply(small_job(SERVED, lives.jobs.namespace))
    output = lives.through(SERVED)["output"]["uri"]
    claim, _, path = output.removeprefix("pvc://").partition("/")
    (tmp_path / "served.yaml").write_text(ask(lives, "serve", SERVED, "--gpus", 2))
    words = ("create", "--dry-run=server", "--validate=strict", "--output=yaml", f"--filename={tmp_path}/served.yaml")
    done = kubectl(lives.jobs.server, *words)
    assert done.returncode == 0, done.stderr
    deployment, service = kubectl_yaml.read(done.stdout, "")
    pod = deployment["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    assert pod["volumes"][-1]["persistentVolumeClaim"] == {"claimName": claim, "readOnly": True}
    assert server["command"][:3] == ["rlhf", "serve", f"/claim/{path}"]
    assert server["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert server["image"] == lives.jobs.status(SERVED)["image"]
    assert server["readinessProbe"]["httpGet"]["path"] == "/health"
    chosen = service["spec"]["selector"].items()
    assert chosen <= deployment["spec"]["template"]["metadata"]["labels"].items()
    assert "limits" not in ask(lives, "serve", SERVED)


def test_kubectl_completes_names_of_jobs(lives: Lives) -> None:
    done = kubectl(lives.jobs.server, "__complete", "rlhf", "why", "-n", lives.jobs.namespace, "pl")
    assert done.stdout.splitlines()[0] == PLAYED, done.stderr


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("why", "plaied"), 2, f"did you mean {PLAYED}?"),
        (("logs", READER), 2, f"{READER} has had no attempts"),
        (("logs", BROKEN, "--attempt", 2), 2, f"{BROKEN} has had 1 attempt;"),
        (("save-now", READER), 2, "no head pod that runs"),
        (("fetch", BROKEN, "model"), 2, f"{BROKEN} has made nothing yet"),
        (("serve", BROKEN), 2, f"{BROKEN} has made no model yet"),
        (("suspend", BROKEN), 2, f"{BROKEN} has ended"),
        (("top", "--context", "nowhere"), 4, "nowhere"),
    ],
    ids=str,
)
def test_a_mistake_is_one_sentence(lives: Lives, words: tuple[object, ...], code: int, sentence: str) -> None:
    done = rlhf(lives.jobs.server, *words, "-n", lives.jobs.namespace)
    assert done.returncode == code, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert sentence in line
    assert not done.stdout


@pytest.fixture(scope="module")
def people(lives: Lives) -> Iterator[dict[str, Path]]:
    """The kubeconfigs of two users of the namespace: one has the cluster's role view, one its role edit."""
    server, namespace = lives.jobs.server, lives.jobs.namespace
    chart.helm_upgrade(server, namespace, "--set", "crds.enabled=false,replicaCount=0")  # roles are all of it
    found = {}
    for role in ("view", "edit"):
        server.kubectl("create", "serviceaccount", role, "-n", namespace)
        account = f"--serviceaccount={namespace}:{role}"
        server.kubectl("create", "rolebinding", role, f"--clusterrole={role}", account, "-n", namespace)
        found[role] = server.kubeconfig(server.token(namespace, role))
        may = ("auth", "can-i", "list", "rlhfjobs", "-n", namespace, f"--kubeconfig={found[role]}")
        server.until(lambda: "yes" in kubectl(server, *may).stdout, SECONDS, f"{role} has the chart's rights")  # noqa: B023
    yield found
    chart.uninstall(server, namespace=namespace)


def as_user(lives: Lives, config: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a command with the rights of a user."""
    return rlhf(lives.jobs.server, *words, "-n", lives.jobs.namespace, KUBECONFIG=str(config))


@pytest.mark.parametrize("role", ["view", "edit"])
@pytest.mark.parametrize("words", [("top",), ("why", BROKEN), ("why", READER), ("plan", PLAYED)], ids=str)
def test_a_user_of_one_namespace_sees_all_of_a_job(
    lives: Lives, people: dict[str, Path], role: str, words: tuple[str, ...]
) -> None:
    done = as_user(lives, people[role], *words)
    assert done.returncode == 0, done.stderr
    assert "not known here" not in done.stdout
    assert done.stdout.split("\nnote:")[0].split()[:2] == ask(lives, *words).split()[:2]


@pytest.mark.parametrize("role", ["view", "edit"])
def test_who_may_not_list_nodes_gets_the_operators_plan(lives: Lives, people: dict[str, Path], role: str) -> None:
    shown = as_user(lives, people[role], "plan", PLAYED).stdout
    assert lives.jobs.condition(PLAYED, "Mapped")["message"] in shown
    assert "note: you may not list nodes; this is the operator's answer of" in shown


def test_the_plan_of_a_file_needs_nodes(lives: Lives, people: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(kubectl_yaml.write(small_job("new", lives.jobs.namespace)))
    done = as_user(lives, people["edit"], "plan", tmp_path / "job.yaml")
    assert done.returncode == 4
    (line,) = done.stderr.splitlines()
    assert f'User "system:serviceaccount:{lives.jobs.namespace}:edit" cannot list resource "nodes"' in line


@pytest.mark.parametrize(
    ("words", "right"),
    [
        (("suspend", PLAYED), 'cannot patch resource "rlhfjobs"'),
        (("save-now", PLAYED), 'cannot create resource "pods/exec"'),
        (("logs", BROKEN), 'cannot create resource "pods"'),
        (("top", "-A"), 'cannot list resource "rlhfjobs"'),
    ],
    ids=str,
)
def test_a_right_that_is_missing_is_named_in_a_sentence(
    lives: Lives, people: dict[str, Path], words: tuple[str, ...], right: str
) -> None:
    done = as_user(lives, people["view"], *words)
    assert done.returncode == 4
    (line,) = done.stderr.splitlines()
    assert f'User "system:serviceaccount:{lives.jobs.namespace}:view" {right}' in line


@pytest.mark.parametrize("words", [("save-now", PLAYED), ("logs", PLAYED), ("logs", BROKEN)], ids=str)
def test_the_role_edit_is_enough(lives: Lives, people: dict[str, Path], words: tuple[str, ...]) -> None:
    """The API server refuses nothing; a kubelet, which would run a command, is not here."""
    done = as_user(lives, people["edit"], *words)
    assert "forbidden" not in done.stderr
    assert "--image" not in done.stderr
    if words == ("logs", BROKEN):
        assert done.stderr.startswith(f"pod {BROKEN}-files-")


def test_an_editor_suspends_and_resumes(lives: Lives, people: dict[str, Path]) -> None:
    attempt = lives.jobs.status(PLAYED)["attempt"]
    for command in ("suspend", "resume"):
        done = as_user(lives, people["edit"], command, PLAYED)
        assert done.returncode == 0, done.stderr
        if command == "suspend":
            lives.jobs.wait_for(PLAYED, "Suspended")
    lives.train(PLAYED, attempt + 1)


def test_who_may_not_look_is_told_so(lives: Lives) -> None:
    server = lives.jobs.server
    done = rlhf(server, "top", "-n", lives.jobs.namespace, KUBECONFIG=str(server.kubeconfig("dev")))
    assert done.returncode == 4
    assert "cannot list resource" in done.stderr


def test_no_cluster_is_one_sentence(lives: Lives, tmp_path: Path) -> None:
    config = (
        lives.jobs.server.kubeconfig("admin").read_text().replace(lives.jobs.server.settings.url, "https://127.0.0.1:1")
    )
    (tmp_path / "config").write_text(config)
    done = rlhf(lives.jobs.server, "why", PLAYED, KUBECONFIG=str(tmp_path / "config"))
    assert done.returncode == 4
    assert "error: kubectl: " in done.stderr
    assert len(done.stderr.splitlines()) == 1
