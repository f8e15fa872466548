"""`python3 -m tests.gpu.unpack FOLDER`: unpack a carried part on the lent machine; it needs the standard library only.

The first part holds what trainer steps need. The rest is one archive in pieces, which is unpacked after its last piece.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tarfile
from pathlib import Path

SITE = Path("/tmp/rlhf-site")
"""Folder of the unpacked packages, outside of the repository: it has to stay from one command to the next."""
RESULTS = Path("/tmp/rlhf-ladder")
"""Folder of the ladder's results, where the summary looks for counts of memory."""
FIRST, PIECE = "first.tar.xz", "rest.{number}-of-{count}"


def unpack(part: Path, site: Path, results: Path) -> None:
    """Unpack a part into `site`, and copy the counts of memory in it to `results`."""
    for folder in (site, results):
        folder.mkdir(parents=True, exist_ok=True)
    for counted in part.glob("counted-*"):
        shutil.copy(counted, results)
    if (first := part / FIRST).exists():
        extract(first, site)
    for path in part.glob("rest.*"):
        found = re.fullmatch(PIECE.format(number=r"(\d+)", count=r"(\d+)"), path.name)
        assert found, path
        rest = site / "rest.tar.xz"
        with rest.open("wb" if found[1] == "1" else "ab") as joined:
            joined.write(path.read_bytes())
        if found[1] == found[2]:
            extract(rest, site)
            rest.unlink()


def extract(archive: Path, site: Path) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(site, filter="data")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python3 -m tests.gpu.unpack", description=__doc__)
    parser.add_argument("part", type=Path, metavar="FOLDER")
    unpack(parser.parse_args().part, SITE, RESULTS)
