"""A headless Chromium, driven over its DevTools protocol."""

import asyncio
import base64
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

PROGRAM = shutil.which("chromium")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0")
PATIENCE = 60.0


class Tab:
    """The only page of a browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._number = socket, 0
        self.errors: list[str] = []
        """What the page's console says: exceptions, and what its policy refused."""

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; events before it are read for errors."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=PATIENCE)
            if message.get("id") == self._number:
                assert "error" not in message, message
                return dict(message["result"])
            if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(str(message["params"]))

    async def open(self, url: str) -> None:
        """Go to a page; what it shows comes by `until`."""
        await self.call("Page.navigate", url=url)

    async def value(self, expression: str) -> Any:
        """Evaluate an expression in the page."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until an expression is true in the page, and return its value."""
        for _ in range(round(PATIENCE / 0.1)):
            if found := await self.value(f"document.readyState === 'complete' && ({expression})"):
                return found
            await asyncio.sleep(0.1)
        raise AssertionError(f"never came: {expression}\n{await self.value('document.body.innerText')}\n{self.errors}")

    async def type(self, text: str) -> None:
        """Type into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def size(self, width: int, height: int, *, dark: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self) -> bytes:
        """What the window shows, as a PNG."""
        shown = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(shown["data"])


@contextmanager
def chromium(folder: Path) -> Iterator[int]:
    """A browser with its profile in a new folder; yields the port of its DevTools."""
    command = [str(PROGRAM), *OPTIONS, f"--user-data-dir={folder}", "about:blank"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield _port(process, folder / "DevToolsActivePort")
        finally:
            process.terminate()
            process.wait()


def _port(process: subprocess.Popen[bytes], written: Path) -> int:
    for _ in range(round(PATIENCE / 0.1)):
        if written.is_file() and (text := written.read_text()):
            return int(text.split()[0])
        assert process.poll() is None, f"{PROGRAM} has ended"
        time.sleep(0.1)
    raise AssertionError(f"{PROGRAM} does not answer")


@asynccontextmanager
async def tab_of(port: int) -> AsyncIterator[Tab]:
    """The page of a browser with this port."""
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            pages = [each for each in await answer.json() if each["type"] == "page"]
        async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            tab = Tab(socket)
            for domain in ("Page", "Runtime", "Log"):
                await tab.call(f"{domain}.enable")
            yield tab
