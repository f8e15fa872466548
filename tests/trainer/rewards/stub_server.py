"""A real HTTP server on this machine that does what a test tells it to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SHUTDOWN_POLL_SECONDS = 0.01
"""Interval at which a server looks whether it is to shut down: Python's 0.5 s would be added to every test."""


class Server(ThreadingHTTPServer):
    """Scores a response by its length, unless `behave` writes another answer; sees how many requests are under way."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behave: Callable[[Handler, dict[str, Any]], None] = lambda handler, call: handler.score(call)
        self.seen: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.under_way, self.most_under_way = 0, 0
        self.lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no concern of the tests'."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        call = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.seen.append(call)
            self.server.tokens.append(self.headers.get("Authorization"))
            self.server.under_way += 1
            self.server.most_under_way = max(self.server.most_under_way, self.server.under_way)
        try:
            self.server.behave(self, call)
        finally:
            with self.server.lock:
                self.server.under_way -= 1

    def answer(self, body: bytes, code: int = 200, **headers: str) -> None:
        self.send_response(code, "the server's own words")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        if body.startswith(b"\x1f\x8b"):
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        self.wfile.write(body)

    def score(self, call: dict[str, Any]) -> None:
        self.answer(json.dumps({"score": len(call["response"])}).encode())

    def say(self, text: str | None) -> None:
        """Answer as a chat completion."""
        message = {"role": "assistant", "content": text}
        self.answer(json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode())

    def drip(self) -> None:
        """A byte now and then, for ever: no single read takes long."""
        self.send_response(200)
        self.end_headers()
        while True:
            self.wfile.write(b" ")
            time.sleep(0.05)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@contextmanager
def served(behave: Callable[[Handler, dict[str, Any]], None]) -> Iterator[str]:
    """The base URL of a server that answers so while the block runs."""
    server = Server()
    server.behave = behave
    threading.Thread(target=server.serve_forever, args=[SHUTDOWN_POLL_SECONDS], daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
