"""User code in a spec: functions, and services that score responses."""

from typing import Annotated, ClassVar, TypeVar

from pydantic import BeforeValidator, Field, JsonValue

from rlhf_api.contract import ENTRYPOINT, SERVICE_URL, STORE_URI, WITHIN_ITSELF, Count, Identifier, Spec, Text
from rlhf_api.expressions import VALUE, Check

ALWAYS_GIVEN = ("prompts", "responses", "finished")
"""Names of the parameters that every user function gets; no argument or column may have them."""
MAX_DEPTH = 16
"""Most levels of mappings and lists in a field that holds any JSON, such as `arguments`."""


def check_depth(value: object) -> object:
    """Refuse free JSON with more than `MAX_DEPTH` levels. A loop is used, since recursion could fail on deep input."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        containers = {id(each): each for each in level if isinstance(each, dict | list)}  # aliases repeat a container
        level = [child for each in containers.values() for child in (each.values() if isinstance(each, dict) else each)]
    if any(isinstance(each, dict | list) for each in level):
        raise ValueError(f"holds more than {MAX_DEPTH} mappings and lists within each other")
    return value


Key = TypeVar("Key")
JsonFields = Annotated[dict[Key, JsonValue], Field(max_length=64), BeforeValidator(check_depth)]
"""Mapping from names of the type `Key` to any JSON values."""
Argument = Annotated[Identifier, Check(~VALUE.one_of(ALWAYS_GIVEN), "is given to every function; choose another name")]
Column = Annotated[Text, Check(~VALUE.one_of(ALWAYS_GIVEN), "is given to every function; rename the column")]
"""Name of a column of the data, under which functions get its values."""


class EntryPoint(Spec):
    """User code, and the arguments that it gets."""

    entrypoint: str = Field(pattern=ENTRYPOINT, max_length=256, description="Your function or class, module.path:name.")
    arguments: JsonFields[Identifier] = Field(
        default_factory=dict, description=f"Arguments of your code, by name; at most {MAX_DEPTH} levels deep."
    )


class Function(Spec):
    """A function of the user's: (prompts, responses, whether each ended, **columns, **arguments) -> scores."""

    entrypoint: str = Field(pattern=ENTRYPOINT, max_length=256, description="Your function, module.path:function.")
    arguments: JsonFields[Argument] = Field(
        default_factory=dict, description=f"Arguments of each call, by name; at most {MAX_DEPTH} levels deep."
    )
    timeout_seconds: float = Field(60.0, gt=0, description="Longest time of one call, on the responses of one rank.")


class RewardFunction(Function):
    """A reward computed by a function, in a process of its own."""

    form: ClassVar = "a function"


def _without_secrets(url: object) -> object:
    if isinstance(url, str) and set(url) & set("@?#"):
        raise ValueError("holds a name, a password or a query; a secret is given by an environment variable")
    return url


ServiceUrl = Annotated[str, Field(pattern=SERVICE_URL, max_length=1024), BeforeValidator(_without_secrets)]
StoreUri = Annotated[str, Field(pattern=STORE_URI, max_length=1024), WITHIN_ITSELF]


class RewardService(Spec):
    """A reward computed by an HTTP service: POST {"prompt", "response", "finished"}, answered by {"score": number}.

    Where the data names columns, {"columns": {name: value}} is sent too.
    """

    form: ClassVar = "a service"

    url: ServiceUrl = Field(description="URL of the service: http:// or https://.")
    timeout_seconds: float = Field(30.0, gt=0, description="Longest time of one attempt for one response.")
    attempts: Count = Field(8, description="Largest number of attempts for one response, with growing pauses between.")
    concurrency: Count = 16
    """Largest number of requests at once, over all ranks; one a rank at least."""
    token_variable: Identifier | None = Field(None, description="Environment variable that holds the bearer token.")
