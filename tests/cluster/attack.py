"""An attack on a job: pods without any credential knock at the doors of its head pod, while it trains.

`python -m tests.cluster.attack FILE` starts a cluster for it, and writes what the doors said as JSON.
"""

import json
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

from rlhf_operator import names
from tests.cluster import chart, golden_path, intruder
from tests.cluster.build import PODS_GROUPS, NotBuiltError, built, no_go
from tests.cluster.capabilities import pods_cannot_run
from tests.cluster.client import Cluster
from tests.cluster.golden_path import SFT
from tests.cluster.launch import cluster
from tests.cluster.network_plugin import NetworkPlugin
from tests.cluster.processes import FailedError

MARK = "intruder"
"""The file that the intruder's command leaves on the claim of the job."""
STEPS = 10_000
"""It trains for as long as the attack takes."""
WITHIN, ELSEWHERE = "with the job's label", "of another namespace"
"""The intruders: the first one gets past the job's NetworkPolicy, for it may make pods in the job's namespace."""

Answers = dict[str, str]


def attacked(cluster: Cluster) -> dict[str, Answers]:
    """What each intruder heard at each door of a job that was attacked while it trained; the chart is installed."""
    own, other = (f"attack-{secrets.token_hex(4)}" for _ in range(2))
    for namespace in (own, other):
        cluster.make_namespace(namespace)
    cluster.offer_volumes()
    golden_path.apply(cluster, own, golden_path.shortened({SFT: STEPS}, every_steps=STEPS))
    golden_path.until(cluster, own, SFT, golden_path.step, 300)
    (head,) = golden_path.pods(cluster, own, SFT, golden_path.HEAD)
    uid = head["metadata"]["labels"][names.JOB_UID]
    start(cluster, own, {names.JOB_UID: uid}, head["status"]["podIP"])
    start(cluster, other, {}, head["status"]["podIP"])
    heard = {}
    for who, namespace in ((WITHIN, own), (ELSEWHERE, other)):
        heard[who] = said(cluster, namespace)
        token = cluster.token(namespace, "default")
        status, _ = cluster.request("GET", f"/api/v1/namespaces/{own}/secrets", token=token)
        heard[who]["secrets"] = intruder.LET_IN if status == 200 else str(status)
    if (cluster.folder_of_claim(own, f"{SFT}-output") / MARK).exists():
        heard[ELSEWHERE]["claim"] = intruder.LET_IN
    before = golden_path.step(golden_path.status(cluster, own, SFT))
    golden_path.until(cluster, own, SFT, lambda found: golden_path.step(found) > before, 120)
    cluster.kubectl("delete", "rlhf", SFT, "--namespace", own)
    policies = f"/apis/networking.k8s.io/v1/namespaces/{own}/networkpolicies"
    cluster.until(lambda: not cluster.items(policies), 60, "its policy has gone with it")
    for namespace in (own, other):
        cluster.drop_namespace(namespace)
    return heard


def start(cluster: Cluster, namespace: str, labels: Mapping[str, str], address: str) -> None:
    """The intruder in a namespace, with labels."""
    command = ["python", intruder.__file__, address, f"touch {names.OUTPUT_FOLDER}/{MARK}"]
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
        lambda: cluster.expect("GET", path)["status"].get("phase") in golden_path.ENDED, 120, "it has knocked"
    )
    printed = cluster.logs(namespace, "intruder", "main")
    cluster.expect("DELETE", path)
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
        with cluster("pods") as running, NetworkPlugin(running):
            chart.install(running)
            heard = attacked(running)
    except (FailedError, NotBuiltError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    Path(sys.argv[1]).write_text(json.dumps({"heard": heard, "open": open_doors(heard)}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
