"""Paths of `package://` addresses on this machine."""

import importlib.util
from pathlib import Path

PACKAGE = "package://"


def in_package(uri: str) -> Path:
    """Return the path that `package://top_package/path` names, whether or not it exists.

    No code of the package runs. Raises LookupError with a sentence if the package is not installed or not unpacked.
    """
    package, _, inside = uri.removeprefix(PACKAGE).partition("/")
    try:
        found = importlib.util.find_spec(package) if package.isidentifier() else None  # `a.b` would import a
    except ValueError:  # __main__ has no spec
        found = None
    folders = [Path(each) for each in (found and found.submodule_search_locations) or ()]
    if not folders:
        raise LookupError(f"{uri}: no Python package named {package!r} is installed")
    if len(folders) > 1:
        raise LookupError(f"{uri}: the package {package!r} lies in {len(folders)} folders")
    (folder,) = folders
    if not folder.is_dir():
        raise LookupError(f"{uri}: the package {package!r} is not unpacked on disk")
    return folder / inside
