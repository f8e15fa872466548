"""A hook of mkdocs: pages of the repository outside docs/ that are in the site too, and links that leave docs/."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

OUTSIDE = {
    "helm/rlhf-operator/README.md": "chart.md",
    "SECURITY.md": "SECURITY.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
}
"""Pages of the repository and where they are in the site."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of OUTSIDE."""
    root = Path(config.docs_dir).parent
    for source, place in OUTSIDE.items():
        files.append(File.generated(config, place, content=(root / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 mkdocs gives both by name
    """Links are written as the repository has them: one to a file that the site lacks becomes its text."""
    sources = {place: source for source, place in OUTSIDE.items()}
    here = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def moved(found: re.Match[str]) -> str:
        mark, text, target, anchor = found.groups()
        source = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        place = OUTSIDE.get(source, source.removeprefix("docs/") if source.startswith("docs/") else "")
        if not place:
            exists = (Path(config.docs_dir).parent / source).exists()
            return text if exists and not mark else found[0]
        return f"{mark}[{text}]({os.path.relpath(place, posixpath.dirname(page.file.src_uri) or '.')}{anchor or ''})"

    return LINK.sub(moved, markdown)
