"""Paths on this machine's disk of `file://` and `package://` addresses."""

from pathlib import Path
from urllib.parse import unquote

from rlhf_api.packages import PACKAGE, in_package
from rlhf_trainer.errors import DataError
from rlhf_trainer.hub import HUB

FILE = "file://"


def folder_or_name(uri: str) -> str:
    """Return the local folder of a model or adapter, or its name on the Hugging Face Hub. DataError as `local_path`."""
    return uri.removeprefix(HUB) if uri.startswith(HUB) else str(local_path(uri))


def local_path(uri: str) -> Path:
    """Return the path of the file or folder that `uri` names.

    `file:///absolute/path` is taken as it stands (%20 and the like decoded); `package://top_package/path` is looked up
    in the installed Python package. DataError, naming `uri`, if no such file exists or the scheme is neither of these.
    """
    if uri.startswith(FILE):
        found = Path(unquote(uri.removeprefix(FILE)))
        if not found.is_absolute():
            raise DataError(f"{uri}: a file:// address is absolute, as file:///folder/file")
    elif uri.startswith(PACKAGE):
        try:
            found = in_package(uri)
        except LookupError as error:
            raise DataError(str(error)) from error
    else:
        raise DataError(f"{uri}: only file:// and package:// name something on this machine's disk")
    if not found.exists():
        raise DataError(f"{uri}: there is no file or folder {found}")
    return found
