"""A program that asks by HTTP alone, for tests: which calls it makes follows from its row."""

import json
import os
import random
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

STOP = "e"
Messages = list[dict[str, Any]]


def post(path: str, body: Mapping[str, Any]) -> Any:
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    whole = json.dumps({"model": "policy", **body}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, whole, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]


def ask(messages: Messages, **options: Any) -> Any:
    return post("/chat/completions", {"messages": messages, **options})


def run(row: Mapping[str, Any]) -> float:
    """Up to five calls: some at once, some that go on, some with another history, and some of a text."""
    drawn, messages = random.Random(row["number"]), [{"role": "user", "content": f"{row['number']}?"}]
    try:
        with ThreadPoolExecutor() as pool:
            options = ({"stop": [STOP]}, {"max_tokens": 3}, {"logprobs": True})
            answers = list(pool.map(lambda each: ask(messages, **each), options[: drawn.randrange(1, 4)]))
        assert STOP not in answers[0]["message"]["content"]
        chosen = drawn.choice(answers)["message"]
        if drawn.random() < 0.7:
            ask([*messages, chosen, {"role": "user", "content": "sure?"}])
        if drawn.random() < 0.3:
            ask([{"role": "system", "content": "Well."}, *messages, chosen, *messages])
        if drawn.random() < 0.3:
            text = post("/completions", {"prompt": "1+1=", "max_tokens": 4})["text"]
            post("/completions", {"prompt": f"1+1={text} and"})
    except urllib.error.HTTPError as error:  # no tokens are left
        if error.code != 400:
            raise
    return drawn.random()
