"""`python -m images.resolve`: what the install of the image for GPUs would fetch, asked of the registry by uv.

Nothing is downloaded but metadata. It fails if the lock's packages contradict each other, or if one has no wheel for
the Dockerfile's base. It prints the version, size and licence of each wheel, the largest first.
"""

import io
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path
from typing import Any

from images.build import ROOT, CannotBuildError, must

LOCK = ROOT / "requirements/gpu.lock"
UV = Path(sys.prefix) / "bin/uv"
BASE = ("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_39", "--only-binary", ":all:")
"""The base of the Dockerfile, Ubuntu 24.04, as uv names it."""
CONNECTIONS, TIMEOUT_SECONDS, BLOCK_BYTES = 8, 120, 2**16


@dataclass(frozen=True)
class Wheel:
    """The wheel of a package that the image would get."""

    name: str
    version: str
    bytes: int
    url: str

    def licence(self) -> str:
        """Read the licence in the wheel's metadata, of which only that part is fetched; empty if it names none."""
        with zipfile.ZipFile(io.BufferedReader(RemoteFile(self.url, self.bytes), BLOCK_BYTES)) as archive:
            path = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
            metadata = message_from_bytes(archive.read(path))
        classifiers = [each for each in metadata.get_all("Classifier", []) if each.startswith("License ::")]
        named = "; ".join(each.rpartition(" :: ")[2] for each in classifiers)
        text = str(metadata.get("License") or "").strip()
        return str(metadata.get("License-Expression") or named or text.partition("\n")[0])


class RemoteFile(io.RawIOBase):
    """A file on a server, of which parts are fetched as they are read."""

    def __init__(self, url: str, size: int) -> None:
        self._url, self._size, self._place = url, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:  # any writable buffer
        end = min(self._place + len(buffer), self._size)
        if end <= self._place:
            return 0
        part = urllib.request.Request(self._url, headers={"Range": f"bytes={self._place}-{end - 1}"})
        with urllib.request.urlopen(part, timeout=TIMEOUT_SECONDS) as answer:
            found = answer.read(end - self._place) if answer.status == 206 else b""
        if not found:
            raise OSError(f"{self._url}: the registry sends no part of a file")
        buffer[: len(found)] = found
        self._place += len(found)
        return len(found)


def resolved(lock: Path = LOCK) -> list[Wheel]:
    """The wheels of a lock for the base, the largest first. CannotBuildError if they cannot be installed together."""
    with tempfile.TemporaryDirectory() as folder:
        target, answer = Path(folder, "target"), Path(folder, "pylock.toml")
        must([str(UV), "pip", "install", "--dry-run", "--target", str(target), *BASE, "--requirement", str(lock)])
        output = ("--format", "pylock.toml", "--output-file", str(answer))
        must([str(UV), "pip", "compile", "--quiet", "--no-deps", *BASE, *output, str(lock)])
        packages = tomllib.loads(answer.read_text())["packages"]
    smallest = [(each, min(each["wheels"], key=lambda wheel: int(wheel["size"]))) for each in packages]
    wheels = [Wheel(each["name"], each["version"], wheel["size"], wheel["url"]) for each, wheel in smallest]
    return sorted(wheels, key=lambda wheel: -wheel.bytes)


def main() -> int:
    """Print what would be fetched; exits 1 if it could not be."""
    try:
        wheels = resolved()
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            licences = list(pool.map(Wheel.licence, wheels))
    except (CannotBuildError, subprocess.SubprocessError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for wheel, licence in zip(wheels, licences, strict=True):
        print(f"{wheel.bytes / 1e6:8.1f} MB  {wheel.name} {wheel.version}  {licence or 'names no licence'}")
    print(f"{len(wheels)} wheels, {sum(wheel.bytes for wheel in wheels) / 1e9:.2f} GB to download")
    print(f"{sum(not each for each in licences)} name no licence")
    return 0


if __name__ == "__main__":
    sys.exit(main())
