"""What a user may say of code of their own: a function, or a service that scores responses."""

import json
from typing import Annotated, ClassVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, JsonValue

from rlhf_api.contract import ENTRYPOINT, FORMS, IDENTIFIER, SERVICE_URL, Count, Spec

ALWAYS_GIVEN = ("prompts", "responses", "finished")
"""Parameters of every function."""


def _not_always_given(name: str) -> str:
    if name in ALWAYS_GIVEN:
        raise ValueError("is given to every function; choose another name")
    return name


Argument = Annotated[str, Field(pattern=IDENTIFIER), AfterValidator(_not_always_given)]


class Function(Spec):
    """A function of the user's: (prompts, responses, whether each ended, **arguments) -> a number for each."""

    entrypoint: Annotated[str, Field(pattern=ENTRYPOINT, description="module.path:function.")]
    arguments: Annotated[dict[Argument, JsonValue], Field(description="Given to each call by name.")] = Field(
        default_factory=dict
    )
    timeout_seconds: Annotated[
        float, Field(gt=0, description="Longest time of one call, on the responses of one rank.")
    ] = 60.0


class RewardFunction(Function):
    """A reward computed by a function, in a process of its own."""

    form: ClassVar = "a function"


def _without_secrets(url: str) -> str:
    if set(url) & set("@?#"):
        raise ValueError("holds a name, a password or a query; a secret is given by tokenVariable")
    return url


def _with_a_host(url: str) -> str:
    """The URL; ValueError if a client could not tell host and port."""
    try:
        parts = urlsplit(url)
        is_right = bool(parts.hostname) and parts.port != 0  # `port` raises for what is no number
    except ValueError:
        is_right = False
    if not is_right or not url.isprintable() or " " in url:
        raise ValueError(f"is {json.dumps(url)} (text), expected {FORMS[SERVICE_URL]}")
    return url


class RewardService(Spec):
    """A reward computed by an HTTP service: POST {"prompt", "response", "finished"}, answered by {"score": number}."""

    form: ClassVar = "a service"

    url: Annotated[
        str,
        Field(pattern=SERVICE_URL, description="http:// or https://."),
        AfterValidator(_without_secrets),
        AfterValidator(_with_a_host),
    ]
    timeout_seconds: Annotated[float, Field(gt=0, description="Longest time of one attempt for one response.")] = 30.0
    attempts: Annotated[Count, Field(description="Attempts for one response, with growing pauses in between.")] = 4
    concurrency: Annotated[
        Count, Field(description="Requests under way at once, of all ranks; one a rank at least.")
    ] = 16
    token_variable: Annotated[
        str | None, Field(pattern=IDENTIFIER, description="Environment variable that holds the bearer token.")
    ] = None
