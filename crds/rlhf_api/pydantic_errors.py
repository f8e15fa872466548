"""Pydantic's errors as problems: the path as the user wrote it and a sentence in plain words."""

import json
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, JsonValue, ValidationError
from pydantic_core import ErrorDetails

from rlhf_api import contract
from rlhf_api.contract import fields_of, tag_of
from rlhf_api.problems import Problem, SpecError, choice, suggestion
from rlhf_api.tables import read_table

Model = TypeVar("Model", bound=BaseModel)
Models = tuple[type[BaseModel], ...]

SENTENCES = read_table(__package__, "pydantic_errors.yaml", dict[str, str])
"""Type of a pydantic error -> sentence for it; `_sentence` fills in the names in braces from the error."""
FORMS = {vars(contract)[name]: words for name, words in read_table(__package__, "forms.yaml", dict[str, str]).items()}
"""Pattern of a field -> words that say what the pattern expects."""
_WORDS = read_table(__package__, "foreign_words.yaml", dict[str, str])
MEANT = {word: field for field, words in _WORDS.items() for word in words.split()}
"""Name of a field in verl, OpenRLHF or TRL -> the field below spec, for "did you mean"."""


def validated(kind: type[Model], document: object, prefix: str = "", **context: Any) -> Model:
    """Return a document, given as JSON types, as a value of a pydantic model; context: for its validators.

    Raises SpecError with every mistake, and `prefix` before each path.
    """
    try:
        return kind.model_validate(document, by_alias=True, by_name=False, context=context)
    except ValidationError as found:
        problems = [problem for error in found.errors() for problem in _problems(kind, error)]
        raise SpecError(problem.within(prefix) for problem in problems) from None


def _problems(root: type[BaseModel], error: ErrorDetails) -> list[Problem]:
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, SpecError):
        return cause.problems
    if error["type"] == "too_short" and error["input"]:
        return []  # pydantic counts the right entries only, and has reported the wrong ones
    path, candidates, tag = _locate(root, error["loc"])
    match error["type"]:
        case "extra_forbidden":
            return [Problem(path, _unknown(path.rpartition(".")[2], candidates, tag))]
        case "union_tag_invalid":
            tags = choice(map(tag_of, candidates))
            return [Problem(f"{path}.name", f"is {_shown(error['input']['name'])}, expected {tags}")]
        case "union_tag_not_found":
            return [Problem(f"{path}.name", f"is missing, expected {choice(map(tag_of, candidates))}")]
        case "value_error":
            return [Problem(path, str(cause))]
    return [Problem(path, _sentence(error))]


def _locate(root: type[BaseModel], location: tuple[int | str, ...]) -> tuple[str, Models, str]:
    """Return (path without tags of unions, pydantic models that the path may lead to, last tag) of an error's location.

    For an unknown field the models are those of its parent.
    """
    path: list[str] = []
    models: Models = (root,)
    tag = ""
    for place, part in enumerate(location):
        if len(models) > 1 and not tag:  # pydantic puts the tag of a union after its field
            tag = str(part)
            continue
        if part != "[key]":
            path.append(str(part))
        field = fields_of(_tagged(models, tag)).get(str(part)) if models else None
        if field and JsonValue in get_args(field.annotation):  # pydantic puts a type after each part of the value
            path += map(str, location[place + 1 :: 2])
            break
        if field:
            models, tag = _models_in(field.annotation), ""
    return ".".join(path) or "document", models, tag


def _tagged(models: Models, tag: str) -> type[BaseModel]:
    return next((model for model in models if tag_of(model) == tag), models[0])


def _models_in(annotation: Any) -> Models:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation,)
    return tuple(model for argument in get_args(annotation) for model in _models_in(argument))


def _unknown(name: str, candidates: Models, tag: str) -> str:
    others = [tag_of(model) for model in candidates if tag_of(model) != tag and name in fields_of(model)]
    place = MEANT.get(name.lower().replace("-", "_"))
    meant = f"did you mean spec.{place}?" if place else ""
    if others:
        sentence = f"unknown field for {tag}; it is for {choice(others)} only"
        return "; ".join(filter(None, [sentence, meant]))
    owner = _tagged(candidates, tag)
    hint = getattr(owner, "hints", {}).get(name)
    return f"unknown field; {hint or meant or suggestion(name, fields_of(owner))}"


def _sentence(error: ErrorDetails) -> str:
    value, context = error["input"], error.get("ctx", {})
    whole = {name: int(each) for name, each in context.items() if isinstance(each, float) and each.is_integer()}
    words = context | whole
    if isinstance(value, str):
        words["length"] = len(value)
    if "expected" in context:
        words["expected"] = context["expected"].replace("'", "")
    if "pattern" in context:
        words["form"] = FORMS[context["pattern"]]
    template = SENTENCES.get(error["type"], "is {shown}, which cannot be used here")
    return template.format(**words | {"value": value, "shown": _shown(value)})


def _shown(value: object) -> str:
    match value:
        case None:
            return "empty"
        case bool():
            return f"{str(value).lower()} (true or false)"
        case int() | float():
            return f"{value} (a number)"
        case str():
            return f"{json.dumps(value, ensure_ascii=False)} (text)"
        case dict():
            return "a mapping"
        case list() | tuple():
            return "a list"
    return f"a {type(value).__name__}"
