"""The server of the page: on the loopback only, one small question at a time."""

from __future__ import annotations

import socket

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse
from starlette.routing import Route

from xshard.cli.explore.views import live_page
from xshard.runtimes.processes import FunctionError, running

HOST = "127.0.0.1"
LIMIT_S = 5.0  # processor seconds for one answer
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
    """The page and its answers, for requests with the loopback as Host: others cannot pass as it."""
    return Starlette(
        routes=[Route("/", _page), Route("/view", _view)],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])],
    )


def listening(port: int) -> socket.socket:
    """A socket on the loopback; port 0: a free one."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((HOST, port))
    listener.listen()
    return listener


def serve(listener: socket.socket) -> None:
    """Answer until it is interrupted."""
    running("xshard", {})  # started now: the first answer would wait for it
    config = uvicorn.Config(
        application(), log_level="warning", limit_concurrency=32, h11_max_incomplete_event_size=16_384
    )
    uvicorn.Server(config).run(sockets=[listener])


async def _page(_: Request) -> HTMLResponse:
    return HTMLResponse(live_page(), headers=HEADERS)


async def _view(request: Request) -> JSONResponse:
    return JSONResponse(await run_in_threadpool(_answer, dict(request.query_params)), headers=HEADERS)


def _answer(fields: dict[str, str]) -> dict[str, str]:
    """In the one process for this; one that takes too long is ended, and the next question gets another."""
    view = "xshard.cli.explore.views.view"
    try:
        return dict(running("xshard", {}).ask(view, fields, timeout_s=LIMIT_S, quiet=True))
    except FunctionError:
        return {"error": f"this takes over {LIMIT_S:.0f} seconds\n  try a smaller mesh or shorter dims"}
