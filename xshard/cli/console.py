"""Consoles that print the notation as it is, and errors with their caret in the right place.

Decides how text reaches a terminal or a pipe. Knows no command.
"""

from __future__ import annotations

import os

from rich.console import Console
from rich.text import Text

from xshard.errors import XshardError

# Columns of a console that is not a terminal: a pipe has no width, and folded tables are hard to read.
PIPE_WIDTH = 200


def console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr that prints `[2, 64]` and `:halo(1,1)` as text, not as markup."""
    made = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = PIPE_WIDTH
    return made


def print_error(error: XshardError) -> None:
    """Print the error on stderr like the last lines of a traceback."""
    out = console(stderr=True)
    head, rest = error_lines(error, out.width)
    out.print(Text.assemble((head, "bold red"), rest), soft_wrap=True)


def error_lines(error: XshardError, width: int) -> tuple[str, str]:
    """An error -> its name and the rest of its message, with the caret placed for a terminal of `width`.

    A terminal breaks long lines, and the caret below would mark the wrong place. Then the user's text
    gets a line of its own.
    """
    name = type(error).__name__
    message = f": {error}"
    if error.text is None or error.span is None or len(name) + len(message.splitlines()[0]) <= width:
        return name, message
    start, stop = error.span
    lines = [f": {error.reason} in", f"  {error.text}", " " * (2 + start) + "^" * max(1, stop - start)]
    return name, "\n".join([*lines, *([f"  {error.hint}"] if error.hint else [])])
