"""The two images of the test cluster, made without a registry or a container engine.

localhost/pause:test     one static program
localhost/hostroot:test  an almost empty root: links, users, temporary folders; its programs come from the machine,
                         through the mounts that its containers get (settings.mounts)

Those of the product are built by `images.build`, and brought into a cluster by `Cluster.import_image`.
"""

import hashlib
import io
import json
import os
import platform
import sys
import tarfile
from pathlib import Path
from typing import Any

from tests.cluster.settings import ROOT

HOSTROOT = "localhost/hostroot:test"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
FOLDERS = ("usr", "proc", "sys", "dev", "run", "etc", "etc/ssl", "var", "home", "root", "opt")
HOME = "home/ray"
USERS = f"""root:x:0:0:root:/root:/bin/bash
ray:x:1000:1000:ray:/{HOME}:/bin/bash
nobody:x:65534:65534:nobody:/:/usr/sbin/nologin
"""
FILES = {
    "etc/passwd": USERS,
    "etc/group": "root:x:0:\nray:x:1000:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
ENVIRONMENT = {
    "PATH": f"{sys.prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin",
    "PYTHONPATH": os.pathsep.join(str(ROOT / each) for each in ("crds", "operator", "trainer_image", "examples")),
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def write_images(folder: Path, pause: Path) -> None:
    """FOLDER/pause.tar and FOLDER/hostroot.tar."""
    folder.mkdir()
    only_pause, root = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=only_pause, mode="w") as layer:
        add_file(layer, "pause", pause.read_bytes(), 0o755)
    with tarfile.open(fileobj=root, mode="w") as layer:
        fill_root(layer)
    write_image(folder / "pause.tar", "localhost/pause:test", only_pause.getvalue(), {"Entrypoint": ["/pause"]})
    variables = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
    config = {"Env": variables, "Cmd": ["/bin/bash"], "WorkingDir": f"/{HOME}"}
    write_image(folder / "hostroot.tar", HOSTROOT, root.getvalue(), config)


def fill_root(layer: tarfile.TarFile) -> None:
    """What a container needs besides the mounts."""
    for name in FOLDERS:
        add_folder(layer, name, 0o755)
    for name in ("tmp", "var/tmp"):
        add_folder(layer, name, 0o1777)
    add_folder(layer, HOME, 0o755, owner=1000)
    for name in ("bin", "sbin", "lib", "lib64"):
        link = tarfile.TarInfo(name)
        link.type, link.linkname, link.mode = tarfile.SYMTYPE, f"usr/{name}", 0o777
        layer.addfile(link)
    for name, text in FILES.items():
        add_file(layer, name, text.encode())


def add_folder(layer: tarfile.TarFile, name: str, mode: int, owner: int = 0) -> None:
    """An empty folder."""
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.uid, member.gid = tarfile.DIRTYPE, mode, owner, owner
    layer.addfile(member)


def add_file(archive: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    """A file of root."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), mode
    archive.addfile(member, io.BytesIO(content))


def write_image(path: Path, tag: str, layer: bytes, config: dict[str, Any]) -> None:
    """An archive as `docker save` makes it, of one layer."""
    document = {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        "history": [{"created_by": "tests.cluster.images"}],
    }
    content = json.dumps(document).encode()
    name = f"{hashlib.sha256(content).hexdigest()}.json"
    manifest = [{"Config": name, "RepoTags": [tag], "Layers": ["layer.tar"]}]
    with tarfile.open(path, "w") as archive:
        add_file(archive, name, content)
        add_file(archive, "layer.tar", layer)
        add_file(archive, "manifest.json", json.dumps(manifest).encode())
