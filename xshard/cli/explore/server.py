"""The server of the page: on the loopback only, a few small questions at a time."""

from __future__ import annotations

import socket
from queue import PriorityQueue
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse
from starlette.routing import Route

from xshard.cli.explore.page import live_page
from xshard.errors import XshardError
from xshard.runtimes.processes import FunctionError, end_all, running

HOST = "127.0.0.1"
LIMIT_S = 5.0  # processor seconds for one answer
PLANNERS = 4  # processes that answer
CLOSED = -1  # in place of the number of a free process: no more answers
# Pages of others may neither frame this one nor load it as a script, and it loads nothing of theirs.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def application() -> Starlette:
    """Return the page and its answers.

    For requests with the loopback as Host: a page of another site cannot pass as it.
    """
    page = Starlette(
        routes=[Route("/", _page), Route("/view", _view)],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])],
    )
    page.state.free = PriorityQueue()
    for number in range(PLANNERS):
        page.state.free.put(number)
    return page


def listening(port: int) -> socket.socket:
    """Open a socket on the loopback; port 0: a free one.

    Raises:
        XshardError: The port cannot be had.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except (OSError, OverflowError) as error:
        raise XshardError(f"port {port}: {error}", hint="0 to 65535; 0 is a free one") from None
    listener.listen()
    return listener


class Server(uvicorn.Server):
    """A server that does not wait for answers when it is interrupted."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self.config.app.state.free.put(CLOSED)  # type: ignore[union-attr]
        end_all()


def serve(listener: socket.socket) -> None:
    """Answer until it is interrupted."""
    running("planner 0", {})  # started now: the first answer would wait for it
    config = uvicorn.Config(
        application(),
        log_level="warning",
        # A page asks one small question at a time; a flood is refused.
        limit_concurrency=32,
        h11_max_incomplete_event_size=16_384,
    )
    Server(config).run(sockets=[listener])


async def _page(_: Request) -> HTMLResponse:
    return HTMLResponse(live_page(), headers=HEADERS)


async def _view(request: Request) -> JSONResponse:
    answer = await run_in_threadpool(_answer, dict(request.query_params), request.app.state.free)
    return JSONResponse(answer, headers=HEADERS)


def _answer(fields: dict[str, str], free: PriorityQueue[int]) -> dict[str, str]:
    """Compute the answer to a request of the page in a worker process, with a time limit.

    `free` has the numbers of workers without work; this waits for one, and puts it back at the end.
    A worker that takes too long is ended, and a new one is started with the next request. Returns
    what the page shows, or {"error": text, "field": name}.
    """
    number = free.get()
    try:
        if number != CLOSED:  # else the server is ending
            planner = running(f"planner {number}", {})
            view = "xshard.cli.explore.views.limited_view"
            return dict(planner.ask(view, fields, timeout_s=LIMIT_S, quiet=True))
    except FunctionError:  # the worker took too long and was ended: the text below says so
        pass
    finally:
        free.put(number)
    return {
        "error": f"this takes over {LIMIT_S:.0f} seconds\n  try a smaller mesh or shorter dims",
        "field": "expression",
    }
