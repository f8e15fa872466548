"""`python -m images.build [operator] [trainer]`: builds images (`make images`); the tests of the cluster call it too.

By Docker where its engine answers, else by Debian's buildah, as root. The base is what BASE names; without it, python's
own slim image, or, where no image can be pulled, a Debian that mmdebstrap makes. An image is built once for a content.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhf-operator" / "images"
"""Layers, and archives of images; all of it may be deleted."""
SLIM = "docker.io/library/python:3.11-slim-bookworm"
DEBIAN = "localhost/python:3.11-debian12"
DEBIAN_PACKAGES = "ca-certificates,python3,python3-venv"
SECONDS_TO_PULL = 120
PACKAGES = {"buildah": "buildah", "mmdebstrap": "mmdebstrap"}
"""Programs that are needed without Docker, and Debian's packages of them."""
CERTIFICATES = Path(os.environ.get("PIP_CERT") or "/etc/ssl/certs/ca-certificates.crt")
PIP_CONFIG = Path(os.environ.get("PIP_CONFIG_FILE") or "/etc/pip.conf")
"""Of this machine, for pip while an image is built; neither gets into it."""
COPIED = re.compile(r"^COPY (?!--from)(.+) \S+$", re.MULTILINE)
ARCHIVES_KEPT = 3


class CannotBuildError(Exception):
    """What this machine lacks, or which program failed, as one sentence."""


@dataclass(frozen=True)
class Image:
    """One of the project's images, as it is built for machines without GPUs."""

    name: str
    dockerfile: str
    arguments: dict[str, str] = field(default_factory=dict)

    def content(self) -> str:
        """A hash of all that the image is made from, the base by its name."""
        digest = hashlib.sha256(f"{os.environ.get('BASE', '')} {self.arguments}".encode())
        text = (ROOT / self.dockerfile).read_text()
        names = [name for line in COPIED.findall(text) for name in line.split()]
        for place in [self.dockerfile, *names]:
            for path in sorted([ROOT / place, *(ROOT / place).rglob("*")]):
                if path.is_file() and not ("__pycache__" in path.parts or ".egg-info/" in str(path)):
                    digest.update(f"\0{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
        return digest.hexdigest()[:16]

    @property
    def reference(self) -> str:
        """Its name on this machine, another one for each content."""
        return f"localhost/{self.name}:{self.content()}"


IMAGES = {
    "operator": Image("rlhf-operator", "Dockerfile"),
    "trainer": Image("rlhf-trainer", "trainer_image/Dockerfile", {"LOCK": "trainer-cpu"}),
}


def cannot_build() -> str:
    """Why no image can be built here, as one sentence; empty if one can."""
    if docker_answers():
        return ""
    absent = sorted(package for program, package in PACKAGES.items() if not shutil.which(program))
    if absent:
        return f"no Docker engine answers, and without it images need the packages {', '.join(absent)}"
    return "" if os.geteuid() == 0 else "no Docker engine answers, and buildah needs root"


def docker_answers() -> bool:
    """Whether there is a Docker engine; the client alone is of no use."""
    if not shutil.which("docker"):
        return False
    return subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0


def buildah(*arguments: object) -> list[str]:
    """A command of buildah with its storage in the cache."""
    storage = ["--root", CACHE / "storage", "--runroot", "/run/rlhf-images", "--storage-driver", "overlay"]
    return [str(word) for word in ("buildah", *storage, *arguments)]


def build(image: Image) -> str:
    """Build an image if this content has not been built: its reference. CannotBuildError."""
    if reason := cannot_build():
        raise CannotBuildError(reason)
    if is_there(image.reference):
        print(f"{image.reference} is there", flush=True)
        return image.reference
    with_docker = docker_answers()
    base = os.environ.get("BASE") or (SLIM if with_docker else free_base())
    print(f"building {image.reference} on {base} by {'Docker' if with_docker else 'buildah'}", flush=True)
    arguments = {**image.arguments, "BASE": base}
    secrets = []
    if PIP_CONFIG.is_file():
        secrets += ["--secret", f"id=pip,src={PIP_CONFIG}"]
    if CERTIFICATES.is_file():
        secrets += ["--secret", f"id=ca,src={CERTIFICATES}"]
        arguments["PIP_CERT"] = "/run/secrets/ca"
    given = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    what = [*given, *secrets, "--file", str(ROOT / image.dockerfile), "--tag", image.reference, str(ROOT)]
    command = ["docker", "build", *what] if with_docker else buildah("bud", "--isolation", "chroot", "--layers", *what)
    if ended := subprocess.run(command, check=False).returncode:  # its words go to the terminal
        raise CannotBuildError(f"{image.reference} was not built: {command[0]} ended with {ended}")
    return image.reference


def is_there(reference: str) -> bool:
    """Whether an image is on this machine."""
    look = ["docker", "image", "inspect", reference] if docker_answers() else buildah("inspect", reference)
    return subprocess.run(look, capture_output=True, check=False).returncode == 0


def free_base() -> str:
    """A base for buildah: python's own slim image if it can be pulled, else a Debian with its Python."""
    for reference in (SLIM, DEBIAN):
        if is_there(reference):
            return reference
    try:
        pull = subprocess.run(buildah("pull", SLIM), capture_output=True, timeout=SECONDS_TO_PULL, check=False)
        if pull.returncode == 0:
            return SLIM
    except subprocess.TimeoutExpired:
        pass
    print(f"{SLIM} cannot be pulled; making {DEBIAN} by mmdebstrap", flush=True)
    archive = CACHE / f"debian-{os.getpid()}.tar"
    archive.parent.mkdir(parents=True, exist_ok=True)
    try:
        must(["mmdebstrap", "--variant=minbase", f"--include={DEBIAN_PACKAGES}", "bookworm", str(archive)])
        container = must(buildah("from", "scratch")).strip()
        must(buildah("add", "--quiet", container, archive, "/"))
        must(buildah("config", "--env", "PATH=/usr/local/bin:/usr/bin:/bin", container))
        must(buildah("commit", "--quiet", "--rm", container, DEBIAN))
    finally:
        archive.unlink(missing_ok=True)
    return DEBIAN


def archive(image: Image) -> Path:
    """An image of this content as `docker save` writes it, built if it is not there; only the newest are kept."""
    path = CACHE / f"{image.name}-{image.content()}.tar"
    if not path.exists():
        save(image, path)
    path.touch()
    for old in sorted(CACHE.glob(f"{image.name}-*.tar"), key=lambda each: -each.stat().st_mtime)[ARCHIVES_KEPT:]:
        old.unlink(missing_ok=True)
        if not docker_answers():
            reference = f"localhost/{image.name}:{old.stem.rpartition('-')[2]}"
            subprocess.run(buildah("rmi", reference), capture_output=True, check=False)
    return path


def save(image: Image, path: Path) -> None:
    """Write an image to a file, which is there only when it is whole."""
    reference = build(image)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        if docker_answers():
            must(["docker", "save", "--output", str(partial), reference])
        else:
            must(buildah("push", "--quiet", reference, f"docker-archive:{partial}:{reference}"))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def must(command: list[str]) -> str:
    """What a program prints; CannotBuildError with its last words if it fails."""
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if ended.returncode:
        said = "\n".join(ended.stdout.splitlines()[-40:])
        raise CannotBuildError(f"{said}\n{command[0]} ended with {ended.returncode}")
    return ended.stdout


def main() -> int:
    """Build those that are named, or all, give them the tag of this version, and tell what they are."""
    parser = argparse.ArgumentParser(prog="python -m images.build", description=__doc__)
    parser.add_argument("images", nargs="*", metavar="operator|trainer")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    names = parser.parse_args().images or list(IMAGES)
    if unknown := [name for name in names if name not in IMAGES]:
        parser.error(f"no such image: {', '.join(unknown)}; there are {', '.join(IMAGES)}")
    try:
        for name in names:
            began = time.monotonic()
            image = IMAGES[name]
            reference, tagged = build(image), f"localhost/{image.name}:{version}"
            must(["docker", "tag", reference, tagged] if docker_answers() else buildah("tag", reference, tagged))
            print(f"{tagged}: {time.monotonic() - began:.0f} s")
    except CannotBuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
