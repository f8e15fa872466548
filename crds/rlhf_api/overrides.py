"""`--set path=value` and `--set NAME:path=value`: changes to documents before they are checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_api import kubectl_yaml
from rlhf_api.problems import Problem, SpecError, suggestion

TOP_LEVEL = ("apiVersion", "kind", "metadata", "spec")


class _NoSuchParentError(LookupError):
    """The path leads through something that has no fields or no such entry."""


@dataclass(frozen=True)
class Override:
    """A value for one path, in the document of one name or (empty) in all."""

    text: str
    name: str
    path: tuple[str, ...]
    value: Any

    @property
    def label(self) -> str:
        return f"--set {self.text}"

    @classmethod
    def parse(cls, text: str) -> "Override":
        """Reads `[NAME:]path=value`; raises SpecError."""
        target, equals, value = text.partition("=")
        name, _, path = target.rpartition(":")
        parts = tuple(path.split("."))
        if not equals or not all(parts):
            raise SpecError([Problem(f"--set {text}", "expected path=value or NAME:path=value")])
        documents = kubectl_yaml.read(value, f"--set {text}: ")
        if len(documents) > 1:
            raise SpecError([Problem(f"--set {text}", "expected one value")])
        prefix = () if parts[0] in TOP_LEVEL else ("spec",)
        return cls(text, name, prefix + parts, documents[0] if documents else None)


def apply(texts: Sequence[str], documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The documents with the overrides applied in order, the given ones left as they are.

    An override applies where its path can exist; one that applies nowhere is an error.
    """
    for override in [Override.parse(text) for text in texts]:
        documents = _everywhere(override, documents)
    return documents


def name_of(document: dict[str, Any]) -> str:
    """The name in the metadata of a document; empty if there is none."""
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) else ""


def _everywhere(override: Override, documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = [name_of(document) for document in documents]
    if override.name and override.name not in names:
        known = suggestion(override.name, filter(None, names))
        raise SpecError([Problem(override.label, f'no job is named "{override.name}"; {known}')])
    changed, applied = [], False
    for name, document in zip(names, documents, strict=True):
        try:
            chosen = override.name in ("", name)
            changed.append(_replaced(document, override.path, override.value) if chosen else document)
            applied = applied or chosen
        except _NoSuchParentError:
            changed.append(document)
    if not applied:
        raise SpecError([Problem(override.label, "there is no such path")])
    return changed


def _replaced(node: Any, path: tuple[str, ...], value: Any) -> Any:
    """`node` with `value` at `path`; copies what it changes, because YAML aliases share nodes."""
    if not path:
        return value
    part, rest = path[0], path[1:]
    if isinstance(node, dict) or (node is None and not part.isdecimal()):
        fields = node or {}
        return {**fields, part: _replaced(fields.get(part), rest, value)}
    if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
        index = int(part)
        return [*node[:index], _replaced(node[index], rest, value), *node[index + 1 :]]
    raise _NoSuchParentError(part)
