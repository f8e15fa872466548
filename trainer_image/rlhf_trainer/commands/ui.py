"""Server of `rlhf ui`: read-only pages about the runs below a folder, made from the files at each request."""

import asyncio
import hashlib
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import typer
from aiohttp import web

from rlhf_api.problems import Problem, SpecError
from rlhf_trainer.errors import EnvironmentProblem, TrainerError
from rlhf_trainer.report import compare, page, runs
from rlhf_trainer.report.run_record import read_run
from rlhf_trainer.run_folder.folder import JOB_FILE

HOST: Final = "127.0.0.1"
HOST_NAMES: Final = (HOST, "localhost")
"""Names of this server in a request; any other one is a page of another site whose name leads here (DNS rebinding)."""
SCRIPTS: Final = " ".join(map(page.digest, ("live.js", "rollouts.js")))
HEADERS: Final = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'unsafe-inline'; script-src {SCRIPTS}; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def serve_runs(folder: Path, port: int) -> None:
    """Serve pages about the runs below a folder to this machine until Ctrl-C. SpecError for a wrong folder or port."""
    if not folder.is_dir():
        raise SpecError([Problem(str(folder), "is no folder; name one with run folders, as `rlhf run` writes them")])
    if (folder / JOB_FILE).is_file():
        raise SpecError([Problem(str(folder), f"is the folder of a job; name its run folder, {folder.parent}")])
    try:
        listener = socket.create_server((HOST, port))
    except OSError as error:
        reason = str(error.strerror).split(" (")[0]
        raise SpecError([Problem("--port", f"{HOST}:{port}: {reason}; name another port")]) from None
    typer.echo(f"the runs below {folder} are at http://{HOST}:{port}; Ctrl-C ends it")
    web.run_app(application(folder), sock=listener, print=None, access_log=None, shutdown_timeout=0.1)


def application(folder: Path) -> web.Application:
    """Return the application that answers GET requests for the list, a run's pages, and comparisons."""
    pages, app = Pages(folder), web.Application(middlewares=[guard])
    routes = {
        "/": pages.listing,
        "/compare.html": pages.page,
        "/runs/{run:(?s:.+)}/{kind:report|rollouts}.html": pages.page,
    }
    app.add_routes([web.get(path, handler, allow_head=False) for path, handler in routes.items()])
    return app


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse other hosts, add HEADERS, and answer a trainer's error, or an unreadable file, by its text."""
    try:
        if request.host.partition(":")[0] not in HOST_NAMES:
            raise web.HTTPForbidden(text=f"this server is http://{HOST} only")
        response = await handler(request)
    except web.HTTPException as error:
        response = web.Response(text=error.text, status=error.status)
    except (TrainerError, OSError) as error:
        response = web.Response(text=str(error).encode(errors="replace").decode(), status=409)
    response.headers.update(HEADERS)
    return response


class Pages:
    """Handlers of requests for pages about the runs below a folder."""

    def __init__(self, root: Path) -> None:
        self._root, self._rows = root, dict[str, runs.RunRow]()
        self._drawing = asyncio.Lock()  # matplotlib draws in one thread at a time

    async def listing(self, request: web.Request) -> web.Response:
        """Answer with the list; query: text, order, and the chosen runs."""
        self._rows = await asyncio.to_thread(runs.list_runs, self._root)
        text, order = (request.query.get(name, "") for name in ("text", "order"))
        html = runs.render(self._rows, self._root, text, order, _chosen(request))
        return _answer(request, html, lambda: html)

    async def page(self, request: web.Request) -> web.Response:
        """Answer with a run's report or its rollouts, or with a comparison of the chosen runs."""
        names = [found] if (found := request.match_info.get("run")) else _chosen(request)
        if not found and not 2 <= len(names) <= compare.MAX_RUNS:
            how = f"choose 2 to {compare.MAX_RUNS} runs, not {len(names)}: go back, and mark them at the left"
            raise web.HTTPBadRequest(text=how)
        if not self._rows.keys() >= set(names):
            self._rows = await asyncio.to_thread(runs.list_runs, self._root)
        if missing := [name for name in names if name not in self._rows]:  # a path of a request is never opened
            raise web.HTTPNotFound(text=f"there is no run {missing[0]} below {self._root}")
        rows = {name: self._rows[name].path for name in names}
        draw = partial(_rendered, request.match_info.get("kind"), rows)
        async with self._drawing:
            return await asyncio.to_thread(lambda: _answer(request, version([*rows.values()]), draw))


def _chosen(request: web.Request) -> list[str]:
    return list(dict.fromkeys(request.query.getall("run", [])))


def _rendered(kind: str | None, rows: Mapping[str, Path]) -> str:
    """Return the page of a kind about run folders, by their names; None: the comparison."""
    found = [read_run(path) for path in rows.values()]
    if kind is None:
        return compare.render([*rows], found, live=True)
    if kind == "report":
        return page.render(found[0], live=True)
    kept = {job.name: job.rollouts for job in found[0].jobs if job.rollouts.rows}
    return page.render_rollouts(found[0].name, kept, live=True)


def version(folders: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Return path and version of all files of run folders and their jobs that a page may show, without hidden ones.

    Raises EnvironmentProblem for a file that is a link, which might lead out of the folder.
    """
    found = sorted(file for folder in folders for pattern in ("[!.]*", "*/[!.]*") for file in folder.glob(pattern))
    if links := [file for file in found if file.is_symlink() and not file.is_dir()]:
        raise EnvironmentProblem(f"{links[0]}: is a link, which is not followed")
    return [(str(file), *runs.version_of(file)) for file in found if file.is_file()]


def _answer(request: web.Request, content: object, draw: Callable[[], str]) -> web.Response:
    """Return the page by `draw`, or status 304 if the client has it; content: all on which the page depends."""
    headers = {"ETag": f'"{hashlib.sha256(repr(content).encode(errors="replace")).hexdigest()}"'}
    if request.headers.get("If-None-Match") == headers["ETag"]:
        return web.Response(status=304, headers=headers)
    data = draw().encode(errors="replace")
    return web.Response(body=data, content_type="text/html", charset="utf-8", headers=headers)
