"""Programs of a user, for tests: each does what its row says, by the client of the package openai."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from openai import APIStatusError, AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletion

Row = Mapping[str, Any]
USER: Any = {"role": "user", "content": "2+2?"}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALLS: dict[str, Callable[[Row], Any]] = {}
"""Behaviour -> function."""
CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="none")
CLIENT.chat.completions  # noqa: B018 it imports what the programs need
CLIENT.completions  # noqa: B018


def behaviour(function: Callable[[Row], Any]) -> Callable[[Row], Any]:
    CALLS[function.__name__] = function
    return function


def run(row: Row) -> Any:
    """Play the episode of a row: `does` is what the program does."""
    return CALLS[row["does"]](row)


def client(**options: Any) -> OpenAI:
    return OpenAI(**{"max_retries": 0, **options})


def ask(messages: Any, **options: Any) -> ChatCompletion:
    found = client().chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages, **options)
    assert isinstance(found, ChatCompletion)
    return found


def echo(answer: ChatCompletion) -> Any:
    return answer.choices[0].message.model_dump(exclude_none=True)


@behaviour
def plain(_: Row) -> float:
    """Two calls, of which the second goes on from the first."""
    first = ask([USER])
    assert (first.choices[0].finish_reason, first.model) == ("stop", "policy")
    assert first.usage
    assert first.usage.completion_tokens > 0
    ask([USER, echo(first), {"role": "user", "content": "sure?"}])
    return 1.0


@behaviour
def parallel(_: Row) -> dict[str, float]:
    """Three calls at once of one prompt, two of another, and then one that goes on from the second of them."""

    async def calls() -> None:
        async with AsyncOpenAI(max_retries=0) as asynchronous:
            create = asynchronous.chat.completions.create
            other: Any = {"role": "user", "content": "3+3?"}
            found = await asyncio.gather(
                *(create(model="policy", messages=[USER]) for _ in range(3)),
                *(create(model="policy", messages=[other]) for _ in range(2)),
            )
            await create(model="policy", messages=[USER, echo(found[1]), other])

    asyncio.run(calls())
    return {"reward": 2.0}


@behaviour
async def awaited(_: Row) -> float:
    async with AsyncOpenAI() as asynchronous:
        models = [each.id async for each in asynchronous.models.list()]
        await asynchronous.chat.completions.create(model=models[0], messages=[USER])
    return 0.5


@behaviour
def retried(row: Row) -> float:
    """A call that is given up after a moment, and sent again by the client."""
    patient = OpenAI(timeout=float(row["patience"]), max_retries=20)
    patient.chat.completions.create(model="policy", messages=[{"role": "user", "content": "once"}])
    return 1.0


@behaviour
def edited(_: Row) -> float:
    """The history is another in the second call."""
    first = ask([USER])
    ask([{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "so"}, USER])
    ask([USER, echo(first), USER])
    return 1.0


@behaviour
def streamed(_: Row) -> float:
    parts = client().chat.completions.create(model="policy", messages=[USER], stream=True)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    whole = client().completions.create(model="policy", prompt="2+2=", stream=True)
    text += "".join(part.choices[0].text for part in whole)
    return float(len(text))


@behaviour
def text(_: Row) -> float:
    first = client().completions.create(model="policy", prompt="2+2=", max_tokens=3, logprobs=1)
    (choice,) = first.choices
    assert choice.logprobs
    assert len(choice.logprobs.tokens or ()) == len(choice.logprobs.token_logprobs or ()) == 3
    assert choice.finish_reason == "length"
    client().completions.create(model="policy", prompt=f"2+2={choice.text} so")
    return 1.0


@behaviour
def tools(_: Row) -> float:
    """A tool is called, and answered."""
    first = ask([USER], tools=[ADD], logprobs=True)
    (choice,) = first.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    call = choice.message.tool_calls[0]
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"one": 2})
    assert choice.logprobs
    assert choice.logprobs.content
    ask([USER, echo(first), {"role": "tool", "tool_call_id": call.id, "content": "4"}], tools=[ADD])
    return 1.0


@behaviour
def stopped(_: Row) -> float:
    answer = ask([USER], stop=["#"])
    assert "#" not in (answer.choices[0].message.content or "")
    return float(answer.choices[0].finish_reason == "stop")


@behaviour
def samples(_: Row) -> float:
    """It asks for another sampling than the job's, which does not answer to it."""
    ask([USER], temperature=0.1, seed=7, top_p=1.0)
    return 0.0


@behaviour
def ignores(_: Row) -> float:
    return 1.0


@behaviour
def nothing(_: Row) -> None:
    ask([USER])


def refusal(messages: Any, key: str = "", **options: Any) -> str:
    """Status and sentence of the error that a request gets."""
    own = client(api_key=key) if key else client()
    try:
        own.chat.completions.create(**{"model": "policy", "messages": messages, **options})
    except APIStatusError as error:
        body: Any = error.body
        return f"{error.status_code} {body['message']}"
    return "answered"


@behaviour
def misused(row: Row) -> float:
    """One request of each kind that is refused, and then a right one."""
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    found = [
        refusal([{"role": "user", "content": "a" * 2**20}]),
        refusal([{"role": "user", "content": [image]}]),
        refusal([USER], n=2),
        refusal([USER], max_tokens=0),
        refusal([]),
        refusal([USER], logprobs=True, top_logprobs=3),
        refusal([USER], model="gpt-5"),
        refusal([USER], key="another"),
    ]
    Path(row["told"]).write_text("\n".join(found))
    ask([USER])
    return 1.0


@behaviour
def too_often(_: Row) -> float:
    """It calls until it is refused, and does not catch the error."""
    while True:
        ask([USER])


@behaviour
def at_most(_: Row) -> float:
    """It calls until it is refused, and ends well."""
    count = 0
    try:
        while True:
            ask([USER])
            count += 1
    except APIStatusError:
        return float(count)


@behaviour
def quits_refused(_: Row) -> None:
    """Its process ends by itself, but not because of the error that it gets."""
    try:
        too_often(_)
    except APIStatusError:
        os._exit(3)


@behaviour
def many_names(_: Row) -> float:
    """It asks for parameters of any name."""
    ask([USER], extra_body={f"a{number:02}" * length: 1 for number in range(20) for length in (1, 2000)})
    ask([USER], extra_body={"b c": 1, "z": 1})
    return 1.0


@behaviour
def hangs_up(_: Row) -> float:
    """A connection is closed in the middle of a request, another before its answer; then it asks as it should."""
    host, port = os.environ["OPENAI_BASE_URL"].removeprefix("http://").removesuffix("/v1").split(":")
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "slow"}]})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {os.environ['OPENAI_API_KEY']}"
    for sent in (body[:20], body):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{sent}".encode())
            time.sleep(0.2)
    ask([USER])
    return 1.0


def post_reward(reward: float | str) -> int:
    """The status."""
    address = os.environ["OPENAI_BASE_URL"] + "/reward"
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(address, json.dumps({"reward": reward}).encode(), headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return int(error.code)


@behaviour
def posts(_: Row) -> None:
    ask([USER])
    assert post_reward(3.0) == 200


@behaviour
def posts_or_not(_: Row) -> float:
    """The reward is the status of one that is posted."""
    ask([USER])
    return float(post_reward(3.0))


@behaviour
def posts_twice(_: Row) -> None:
    ask([USER])
    post_reward(1.0)
    post_reward(2.0)


@behaviour
def posts_and_returns(_: Row) -> float:
    ask([USER])
    post_reward(1.0)
    return 1.0


@behaviour
def posts_nan(_: Row) -> None:
    ask([USER])
    assert post_reward(float("nan")) == 400


@behaviour
def returns_text(_: Row) -> str:
    ask([USER])
    return "well"


@behaviour
def breaks(_: Row) -> float:
    ask([USER])
    return 1 / 0


@behaviour
def quits(_: Row) -> None:
    ask([USER])
    os._exit(3)


@behaviour
def hangs(_: Row) -> None:
    ask([USER])
    time.sleep(1000)


@behaviour
def thinks(_: Row) -> float:
    """The model takes longer than a program may."""
    ask([{"role": "user", "content": "slow"}])
    return 1.0


@behaviour
def leaves(_: Row) -> float:
    """It starts a program in a session of its own, and one that goes on calling; both stay."""
    command = [sys.executable, "-S", "-c", "import os, time; os.fork() and os._exit(0); os.setsid(); time.sleep(1000)"]
    subprocess.run(command, check=True)
    if os.fork() == 0:
        while True:
            ask([USER])
    ask([USER])
    return 1.0


@behaviour
def unfinished(_: Row) -> float:
    """It ends while a call is under way."""
    ask([USER])
    if os.fork() == 0:
        ask([{"role": "user", "content": "slow"}])
    time.sleep(2)
    return 1.0
