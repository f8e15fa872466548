"""`rlhf submit` gives a cluster the jobs of a manifest and their code, once; a script plays kubectl and the server."""

import json
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import rlhf
import rlhf_kubectl.submit
from rlhf_api import kubectl_yaml
from rlhf_api.exit_codes import ExitCode
from rlhf_kubectl.submit import MAX_BYTES
from rlhf_kubectl.submit_commands import declare
from rlhf_planning.command_line import Program
from rlhf_trainer.commands.ending import ending
from rlhf_trainer.errors import DataError, EnvironmentProblem, TrainerError

PLAYED = """#!{python} -IS
import json, sys
from pathlib import Path
words, store = sys.argv[1:], Path({store!r})
objects = json.loads(store.read_text()) if store.exists() else {{}}
if error := objects.get("error", {{}}).get(words[0]):
    sys.exit(error)
if words[0] == "get":
    listed = {{"items": [each for key, each in objects.items() if key.startswith("RLHFJob/")]}}
    print(json.dumps(objects.get("RLHFJob/" + words[2].rpartition("/")[2], listed)))
elif words[0] == "apply":
    made = json.load(sys.stdin)
    if made["metadata"].get("namespace", "team") != "team":
        sys.exit("error: the namespace from the provided object does not match")
    key = made["kind"] + "/" + made["metadata"]["name"]
    old = objects.get(key, {{"metadata": {{"generation": 0}}, "spec": None}})
    changed = made.get("spec") != old.get("spec")
    generation = old["metadata"]["generation"] + changed
    made["metadata"] |= {{"namespace": "team", "uid": "u-" + key, "generation": generation}}
    made |= {{"status": old["status"]}} if "status" in old else {{}}
    if "--dry-run=server" not in words:
        store.write_text(json.dumps({{**objects, key: made}}))
    print(json.dumps(made))
"""
SPEC: dict[str, Any] = {
    "algorithm": {"name": "GRPO"},
    "models": {"actor": {"uri": "hf://a/b"}, "reward": {"entrypoint": "mine.brief:score"}},
    "data": {"train": {"uri": "hf://a/c"}, "maxPromptTokens": 8, "maxResponseTokens": 8},
    "rollout": {"samplesPerPrompt": 2},
    "training": {"totalSteps": 1, "promptBatchSize": 4},
}
JOB: dict[str, Any] = {
    "apiVersion": "rlhf.hybridflow.io/v1alpha1",
    "kind": "RLHFJob",
    "metadata": {"name": "ppo"},
    "spec": SPEC,
}
CODE = {
    "mine/__init__.py": "",
    "mine/brief.py": "import json\nimport words\n",
    "words.py": "",
    "other.py": "import json",
}


class Played:
    """A manifest with code beside it, and a cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, folder / "store.json"
        self.errors: list[TrainerError] = []
        self.program = Program("rlhf", "", lambda work, debug: ending(work, debug=debug)[0])
        declare(self.program)
        for name, text in CODE.items():
            self.write(name, text)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).parent.mkdir(exist_ok=True)
        (self.folder / name).write_text(text)

    def submit(self, job: dict[str, Any] = JOB, *words: str, **spec: Any) -> Result:
        self.write("job.yaml", kubectl_yaml.write({**job, "spec": {**job["spec"], **spec}}))
        return CliRunner().invoke(self.program.app, ["submit", str(self.folder / "job.yaml"), "-n", "team", *words])

    @property
    def objects(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.store.read_text()) if self.store.exists() else {}
        return found

    @property
    def code(self) -> list[dict[str, Any]]:
        return [each for key, each in self.objects.items() if key.startswith("ConfigMap/")]

    def change(self, **objects: Any) -> None:
        self.store.write_text(json.dumps({**self.objects, **objects}))


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    """The trial of jobs on this machine finds `errors`."""
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(PLAYED.format(python=sys.executable, store=str(tmp_path / "store.json")))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    cluster = Played(tmp_path)
    trial = SimpleNamespace(problems=lambda: cluster.errors)
    check = SimpleNamespace(load=lambda: lambda job, jobs, folder, elsewhere: trial)
    monkeypatch.setattr(rlhf_kubectl.submit, "entry_points", lambda group: [check])
    monkeypatch.setattr(rlhf_kubectl.submit, "packages_distributions", lambda: {"typer": ["typer"]})
    yield cluster
    for name in ("mine", "words"):
        sys.modules.pop(name, None)


def test_the_code_goes_along_and_goes_with_the_job(played: Played) -> None:
    done = played.submit()
    assert done.exit_code == 0, done.output
    (code,) = played.code
    assert code["data"] == {"mine.__init__.py": "", "mine.brief.py": CODE["mine/brief.py"], "words.py": ""}
    assert code["immutable"]
    (owner,) = code["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("RLHFJob", "ppo", "u-RLHFJob/ppo")
    runtime = played.objects["RLHFJob/ppo"]["spec"]["runtime"]
    assert runtime["env"] == [{"name": "PYTHONPATH", "value": "/code"}]
    for role, container in (("controller", "ray-head"), ("worker", "ray-worker")):
        pod = runtime[role]["template"]["spec"]
        assert pod["volumes"][0]["configMap"]["name"] == code["metadata"]["name"]
        assert {each["path"] for each in pod["volumes"][0]["configMap"]["items"]} == {*CODE} - {"other.py"}
        assert pod["containers"] == [{"name": container, "volumeMounts": [{"name": "own-code", "mountPath": "/code"}]}]
    assert "ppo: created in namespace team; its code is in ConfigMap" in done.output
    assert "`kubectl rlhf why ppo`" in done.output


def test_the_same_file_again_changes_nothing(played: Played) -> None:
    played.submit()
    before = played.store.read_text()
    done = played.submit()
    assert (done.exit_code, played.store.read_text()) == (0, before)
    assert "ppo: is already on the cluster, unchanged; it is Pending" in done.output


def test_other_code_leaves_the_old_code_there(played: Played) -> None:
    played.submit()
    played.write("words.py", "MORE = 1")
    assert "ppo: changed" in played.submit().output
    assert [each["data"]["words.py"] for each in played.code] == ["", "MORE = 1"]


def test_code_that_the_pods_have_is_left_alone(played: Played) -> None:
    done = played.submit(runtime={"env": [{"name": "PYTHONPATH", "value": "/mine"}]})
    assert (done.exit_code, played.code) == (0, [])
    reward = {"actor": SPEC["models"]["actor"], "reward": {"entrypoint": "typer.main:run"}}
    assert (played.submit({**JOB, "metadata": {"name": "b"}}, models=reward).exit_code, played.code) == (0, [])


def test_a_template_may_set_pythonpath(played: Played) -> None:
    container = {"name": "ray-head", "env": [{"name": "PYTHONPATH", "value": "/mine"}]}
    before = {"initContainers": [{**container, "name": "before", "image": "a"}]}
    assert played.submit(runtime={"controller": {"template": {"spec": {"containers": [container]}}}}).exit_code == 0
    assert not played.code
    assert played.submit(runtime={"controller": {"template": {"spec": before}}}).exit_code == 0
    assert played.code


def test_an_empty_runtime_is_none(played: Played) -> None:
    assert (played.submit(runtime=None).exit_code, len(played.code)) == (0, 1)


def test_what_python_finds_first_is_left_out(played: Played) -> None:
    played.write("mine/brief.py", "import json, statistics, typer, datasets, table.rows\nfrom table import more")
    for name in ("statistics.py", "typer/no_package.py", "datasets/rows.jsonl", "table/rows.py", "table/more.py"):
        played.write(name, "")
    done = played.submit()
    assert done.exit_code == 0, done.output
    assert {*played.code[0]["data"]} == {"mine.__init__.py", "mine.brief.py", "table.rows.py", "table.more.py"}


def test_a_package_needs_no_init_file(played: Played) -> None:
    (played.folder / "mine/__init__.py").unlink()
    assert played.submit().exit_code == 0
    assert {*played.code[0]["data"]} == {"mine.brief.py", "words.py"}


@pytest.mark.parametrize(
    ("name", "data", "sentence"),
    [
        ("words.py", "# coding: latin-1\nTEXT = 'é'".encode("latin-1"), "words.py: cannot be read: it is not UTF-8"),
        (f"words{EXTENSION_SUFFIXES[0]}", b"\x7fELF\xff", "cannot be read: it is not UTF-8 text"),
        ("mine/words.py", b"def", "words.py: is no Python that can be read"),
    ],
)
def test_a_file_that_cannot_go_along_is_named(played: Played, name: str, data: bytes, sentence: str) -> None:
    played.write("mine/brief.py", "from . import words" if "/" in name else "import words")
    (played.folder / "words.py").unlink()
    (played.folder / name).write_bytes(data)
    done = played.submit()
    assert (done.exit_code, done.stderr.count("\n"), played.objects) == (2, 1, {}), done.output
    assert sentence in done.stderr


def test_all_jobs_are_of_the_namespace(played: Played) -> None:
    here, there = ({**JOB, "metadata": {"name": name, "namespace": name}} for name in ("team", "other"))
    played.write("jobs.yaml", "---\n".join(map(kubectl_yaml.write, (here, there))))
    done = CliRunner().invoke(played.program.app, ["submit", str(played.folder / "jobs.yaml"), "-n", "team"])
    assert (done.exit_code, done.stderr.count("\n"), played.objects) == (2, 1, {})
    assert "other: metadata.namespace: is not team" in done.stderr


def test_python_submits_too(played: Played) -> None:
    played.submit({**JOB, "metadata": {"name": "other"}})
    jobs = rlhf.load(played.folder / "job.yaml")
    handle = rlhf.submit(jobs, namespace="team")
    assert handle.name == "other"
    played.change(**{"RLHFJob/other": {**played.objects["RLHFJob/other"], "status": {"phase": "Running"}}})
    assert handle.status().phase == "Running"


def test_what_cannot_be_tried_here_is_told(played: Played) -> None:
    played.errors = [EnvironmentProblem("wandb is not installed")]
    assert "note: on this machine wandb is not installed" in played.submit().output
    claim = {"train": {"uri": "pvc://data/a.jsonl"}, "maxPromptTokens": 8, "maxResponseTokens": 8}
    told = played.submit({**JOB, "metadata": {"name": "b"}}, data=claim).output
    assert "note: b is not tried here: pvc://data/a.jsonl is looked for on the cluster" in told


def test_mistakes_are_told_before_anything_is_made(played: Played) -> None:
    played.errors = [DataError("ppo: spec.data.train.uri: no column text")]
    wrong = played.submit()
    assert (wrong.exit_code, wrong.stderr) == (3, "error: ppo: spec.data.train.uri: no column text\n")
    played.errors = []
    wrong = played.submit(training={"totalSteps": 0})
    assert wrong.exit_code == ExitCode.SPEC
    assert "spec.training.totalSteps" in wrong.stderr
    wrong = played.submit(data={**SPEC["data"], "train": {"uri": "file://rows.jsonl"}})
    assert (wrong.exit_code, wrong.stderr.count("\n")) == (2, 1)
    assert "ppo: spec.data.train.uri: file://rows.jsonl is beside the manifest" in wrong.stderr
    played.write("words.py", f"TEXT = '{'x' * MAX_BYTES}'")
    wrong = played.submit()
    assert (wrong.exit_code, wrong.stderr.count("\n")) == (2, 1)
    assert "put the code into the image" in wrong.stderr
    played.write("words.py", "def")
    assert "words.py: is no Python" in played.submit().stderr
    assert "JOB: is nobody; the manifest has ppo" in played.submit(JOB, "nobody").stderr
    assert not played.objects


INVALID = 'The RLHFJob "ppo" is invalid: spec.models.actor: Invalid value: uri cannot change'


@pytest.mark.parametrize(
    ("verb", "error", "code", "sentence"),
    [
        ("get", "Error from server (NotFound): the server could not find it", 4, "this cluster knows no RLHFJobs"),
        ("get", 'Error from server (Forbidden): User "dev" cannot list', 4, 'the cluster refuses: User "dev" cannot'),
        ("get", "The connection to the server localhost:8080 was refused", 4, "kubectl config use-context"),
        (
            "apply",
            'Error from server (Forbidden): User "dev" cannot patch',
            4,
            'the cluster refuses: User "dev" cannot',
        ),
        ("apply", "error: context deadline exceeded", 4, "kubectl: context deadline exceeded"),
        ("apply", "Error from server (InternalError): etcd", 4, "the cluster refuses: etcd"),
        ("apply", INVALID, 2, "ppo is there already, Pending: kubectl: The RLHFJob"),
        (
            "apply",
            'The RLHFJob "ppo" is invalid: \n* spec.a: no\n* spec.b: no',
            2,
            "is invalid: * spec.a: no * spec.b: no",
        ),
        ("apply", "error: 2 conflicts: by x:\n- .spec.a\n- .spec.b\nReview", 2, "by x: - .spec.a - .spec.b; give"),
    ],
)
def test_a_refusal_is_one_sentence(played: Played, verb: str, error: str, code: int, sentence: str) -> None:
    played.submit()
    played.change(error={verb: error})
    done = played.submit()
    assert (done.exit_code, done.stderr.count("\n")) == (code, 1), done.stderr
    assert sentence in done.stderr
    assert ("kubectl delete rlhf ppo" in done.stderr) == (code == ExitCode.SPEC)


def test_without_kubectl_it_says_so(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(played.folder))
    done = played.submit()
    assert (done.exit_code, done.stderr[:36]) == (4, "error: kubectl cannot be started: No")


def test_a_job_that_has_ended_is_not_changed(played: Played) -> None:
    played.submit()
    played.change(**{"RLHFJob/ppo": {**played.objects["RLHFJob/ppo"], "status": {"phase": "Succeeded"}}})
    assert "ppo: is already on the cluster, unchanged; it is Succeeded" in played.submit().output
    before = played.store.read_text()
    done = played.submit(training={**SPEC["training"], "totalSteps": 2})
    assert (done.exit_code, played.store.read_text()) == (2, before)
    assert "ppo is there already, Succeeded: it has ended, and is not run again; give this job another" in done.stderr
