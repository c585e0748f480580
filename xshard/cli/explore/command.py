"""`xshard explore`: serves the page, and opens it."""

from __future__ import annotations

import webbrowser
from importlib.util import find_spec
from typing import Annotated
from urllib.parse import urlencode

from typer import Argument, Option

from xshard.errors import XshardError
from xshard.pictures.terminal import console


def explore(
    expression: Annotated[
        str | None, Argument(metavar="EXPR", help="What the page shows first.")
    ] = None,
    mesh: Annotated[str | None, Option(metavar="AXES", help="As in dp=2,cp=4.")] = None,
    shape: Annotated[
        str | None, Option("--shape", "--sizes", metavar="LENGTHS", help="Or b=2,s=64.")
    ] = None,
    port: Annotated[int, Option(metavar="N", help="On 127.0.0.1; 0: a free one.")] = 0,
    browser: Annotated[bool, Option("--browser/--no-browser", help="Open a browser.")] = True,
) -> None:
    """Serve a page on this machine that plans as one types, with pictures before and after every step.

    Example: xshard explore "b s/cp c -> b s c/cp" --mesh dp=2,cp=4 --shape 2,64,32
    """
    missing = [name for name in ("starlette", "uvicorn") if not find_spec(name)]
    if missing:
        raise XshardError(
            f"{' and '.join(missing)} not installed", hint="pip install 'xshard[explore]'"
        )
    from xshard.cli.explore.server import HOST, listening, serve

    fields = {"expression": expression, "mesh": mesh, "lengths": shape}
    listener = listening(port)
    url = f"http://{HOST}:{listener.getsockname()[1]}/"
    given = {name: text for name, text in fields.items() if text is not None}
    if given:
        url += f"#{urlencode(given)}"
    console().print(f"{url}   (Ctrl-C ends it)", soft_wrap=True)
    if browser:
        webbrowser.open(url)
    serve(listener)
