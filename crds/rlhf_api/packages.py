"""Where `package://` addresses are on this machine's disk."""

import importlib.resources
from pathlib import Path

PACKAGE = "package://"


def in_package(uri: str) -> Path:
    """What `package://top_package/path` names, whether or not it exists.

    LookupError, with a sentence, where no such package is installed, or it is not unpacked.
    """
    package, _, inside = uri.removeprefix(PACKAGE).partition("/")
    try:
        found = importlib.resources.files(package).joinpath(inside)
    except (ImportError, TypeError, ValueError) as error:
        raise LookupError(f"{uri}: no Python package named {package!r} is installed") from error
    if not isinstance(found, Path):
        raise LookupError(f"{uri}: the package {package!r} is not unpacked on disk")
    return found
