"""An attack on a job: pods without any credential knock at every port of its pods, while it trains and generates.

`python -m tests.cluster.attack FILE` starts a cluster for it, and writes what the doors said as JSON.
"""

import json
import secrets
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_operator import names
from tests.cluster import chart, golden_path, intruder
from tests.cluster.build import PODS_GROUPS, NotBuiltError, built, no_go
from tests.cluster.capabilities import pods_cannot_run
from tests.cluster.client import Cluster
from tests.cluster.launch import cluster
from tests.cluster.network_plugin import NetworkPlugin
from tests.cluster.processes import FailedError
from tests.cluster.settings import ROOT

MARK = "intruder"
"""The file that the intruder's command leaves on the claim of the job."""
STEPS = 10_000
"""It trains for as long as the attack takes."""
JOB = "attacked"
POOLS = [
    {"name": "train", "models": ["actor"], "nodes": 2, "slotsPerNode": 1},
    {"name": "writers", "models": ["rollout"], "slotsPerNode": 1},
]
"""Two pods whose ranks train together, and one that generates for both."""
SHARED = {"trainer": {"storage": {"accessMode": "ReadWriteMany"}}}
"""Values of the chart: its pods may be on both nodes."""
WITHIN, BESIDE, ELSEWHERE = "with the job's label", "of the same namespace", "of another namespace"
"""The intruders. Nothing of the network stops the first: it is as if no NetworkPolicy was enforced."""
MODEL = ROOT / "examples" / "rlhf_examples" / "arithmetic" / "model"
CLAIM = {
    "metadata": {"name": "models"},
    "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
}
LISTENS = "0A"
"""State of a socket in /proc/net/tcp."""

Answers = dict[str, str]


@dataclass(frozen=True)
class Attack:
    """Answers that the intruders heard, and programs behind the ports."""

    heard: Mapping[str, Answers]
    programs: Mapping[str, str]
    """Names of ports, such as `head 6379` -> program."""


def job() -> dict[str, Any]:
    """GRPO on sums, with short steps."""
    train = "package://rlhf_examples/arithmetic/train.jsonl"
    spec = {
        "algorithm": {"name": "GRPO", "kl": {"coefficient": 0.0}},
        "models": {
            "actor": {"uri": "pvc://models/tiny", "optimizer": {"learningRate": 5e-4}},
            "reward": {"verifier": {"name": "Math", "answerKey": "answer"}},
        },
        "data": {"train": {"uri": train}, "maxPromptTokens": 8, "maxResponseTokens": 4},
        "rollout": {"samplesPerPrompt": 2},
        "training": {"totalSteps": STEPS, "promptBatchSize": 4},
        "checkpoint": {"everySteps": STEPS},
        "resources": {"device": "CPU"},
        "placement": {"mode": "Manual", "pools": POOLS},
    }
    made = {"apiVersion": "rlhf.hybridflow.io/v1alpha1", "kind": "RLHFJob", "metadata": {"name": JOB}}
    return {**made, "spec": spec}


def attacked(cluster: Cluster) -> Attack:
    """What each intruder heard at each door of a job that was attacked while it trained; the chart is installed."""
    own, other = (f"attack-{secrets.token_hex(4)}" for _ in range(2))
    for namespace in (own, other):
        cluster.make_namespace(namespace)
    cluster.offer_volumes(2)
    cluster.expect("POST", f"/api/v1/namespaces/{own}/persistentvolumeclaims", CLAIM)
    write_model(cluster.folder_of_claim(own, "models") / "tiny")
    golden_path.apply(cluster, own, {JOB: job()})
    golden_path.until(cluster, own, JOB, golden_path.step, 300)
    pods = pods_of(cluster, own)
    listening = {name: listeners(pod) for name, pod in pods.items()}
    label = {names.JOB_UID: pods["head"]["metadata"]["labels"][names.JOB_UID]}
    heard = {}
    for who, namespace, labels in ((WITHIN, own, label), (BESIDE, own, {}), (ELSEWHERE, other, {})):
        doors = {name: (pod["status"]["podIP"], sorted(listening[name])) for name, pod in pods.items()}
        start(cluster, namespace, labels, doors)
        heard[who] = said(cluster, namespace)
        token = cluster.token(namespace, "default")
        status, _ = cluster.request("GET", f"/api/v1/namespaces/{own}/secrets", token=token)
        heard[who]["secrets"] = intruder.LET_IN if status == 200 else str(status)
        if (cluster.folder_of_claim(own, f"{JOB}-output") / MARK).exists():
            heard[who]["claim"] = intruder.LET_IN
    before = golden_path.step(golden_path.status(cluster, own, JOB))
    golden_path.until(cluster, own, JOB, lambda found: golden_path.step(found) > before + 1, 120)
    cluster.kubectl("delete", "rlhf", JOB, "--namespace", own)
    policies = f"/apis/networking.k8s.io/v1/namespaces/{own}/networkpolicies"
    cluster.until(lambda: not cluster.items(policies), 60, "its policy has gone with it")
    for namespace in (own, other):
        cluster.drop_namespace(namespace)
    return Attack(heard, {f"{name} {port}": each for name in pods for port, each in listening[name].items()})


def write_model(folder: Path) -> None:
    """Write a model with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(MODEL, folder)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # it is made for its owner alone, and pods are not root


def pods_of(cluster: Cluster, namespace: str) -> dict[str, golden_path.Document]:
    """The pods of the job: `head`, and of each pool `train-0`, `train-1`, `writers-0`."""
    (found,) = golden_path.pods(cluster, namespace, JOB, golden_path.HEAD)
    pods = {"head": found}
    for pod in golden_path.pods(cluster, namespace, JOB, golden_path.WORKER):
        pool = pod["metadata"]["labels"][names.POOL]
        pods[f"{pool}-{sum(name.startswith(pool) for name in pods)}"] = pod
    return pods


def listeners(pod: golden_path.Document) -> dict[int, str]:
    """TCP ports on which a pod of this machine listens, at any address -> program; it has a network of its own."""
    found: dict[str, int] = {}
    programs: dict[str, str] = {}
    for process in golden_path.processes():
        with suppress(OSError):
            if pod["metadata"]["uid"] not in (process / "cgroup").read_text():
                continue
            lines = [line for name in ("tcp", "tcp6") for line in (process / "net" / name).read_text().splitlines()[1:]]
            rows = [line.split() for line in lines]
            found |= {f"socket:[{row[9]}]": int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTENS}
            links = {link.readlink().name for link in (process / "fd").iterdir()}
            programs |= dict.fromkeys(links, program_of(process))
    return {port: programs.get(socket, "?") for socket, port in found.items()}


def program_of(process: Path) -> str:
    """Name of a program: of Python's the module or file that it runs, of Ray's workers the class."""
    words = (process / "cmdline").read_bytes().decode().split("\0")
    first = words[0].split(" ")[0]
    if first.startswith("ray::"):
        return first.partition(".")[0]
    name = Path(first).name
    if name.startswith("python"):
        rest = [word for word in words[1:] if not word.startswith("-")]
        return Path(rest[0]).name if rest else name
    return name


def start(
    cluster: Cluster, namespace: str, labels: Mapping[str, str], doors: Mapping[str, tuple[str, list[int]]]
) -> None:
    """The intruder in a namespace, with labels; doors: address and ports by pod."""
    command = ["python", intruder.__file__, doors["head"][0], f"touch {names.OUTPUT_FOLDER}/{MARK}", json.dumps(doors)]
    container = {"name": "main", "image": f"{chart.IMAGE}:{chart.TAG}", "command": command}
    pod = {
        "metadata": {"name": "intruder", "labels": labels},
        "spec": {"restartPolicy": "Never", "automountServiceAccountToken": False, "containers": [container]},
    }
    cluster.expect("POST", f"/api/v1/namespaces/{namespace}/pods", pod)


def said(cluster: Cluster, namespace: str) -> Answers:
    """What the intruder of a namespace has heard at each door; it is gone then."""
    path = f"/api/v1/namespaces/{namespace}/pods/intruder"
    cluster.until(
        lambda: cluster.expect("GET", path)["status"].get("phase") in golden_path.ENDED, 300, "it has knocked"
    )
    printed = cluster.logs(namespace, "intruder", "main")
    cluster.expect("DELETE", path)
    cluster.until(lambda: cluster.request("GET", path)[0] == 404, 60, "it has gone")
    answers: Answers = json.loads(printed.splitlines()[-1])
    return answers


def open_doors(heard: Mapping[str, Answers]) -> list[str]:
    """The doors that let an intruder in. /status.json is read by everybody who gets past the NetworkPolicy."""
    answers = ((who, door, answer) for who, doors in heard.items() for door, answer in doors.items())
    is_open = [(who, door) for who, door, answer in answers if answer == intruder.LET_IN]
    return [f"{door} to a pod {who}" for who, door in is_open if (who, door) != (WITHIN, "status")]


def main() -> int:
    """Attack, and write what was heard; exits 1 if that cannot be done here."""
    try:
        if reason := pods_cannot_run() or no_go():
            raise FailedError(reason)
        built(PODS_GROUPS)
        with cluster("pods", nodes=2) as running, NetworkPlugin(running):
            chart.install(running, SHARED)
            found = attacked(running)
    except (FailedError, NotBuiltError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    told = {"heard": found.heard, "programs": found.programs, "open": open_doors(found.heard)}
    Path(sys.argv[1]).write_text(json.dumps(told, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
