"""Consoles that print the notation as it is, and errors as a traceback ends."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xshard.errors import XshardError

# Columns of a console that is not a terminal: a pipe has no width, and folded tables are hard to read.
PIPE_WIDTH = 200


def console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr that prints `[2, 64]` and `:halo(1,1)` as text, not as markup."""
    out = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = PIPE_WIDTH
    return out


def headed_table(*heads: str, left: Sequence[str]) -> Table:
    """A table without rows. left: the heads of columns of text; numbers stand on the right."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for head in heads:
        table.add_column(head, justify="left" if head in left else "right", overflow="fold")
    return table


def print_error(error: XshardError) -> None:
    """Print the error on stderr like the last lines of a traceback."""
    message = Text.assemble((type(error).__name__, "bold red"), f": {error}")
    console(stderr=True).print(message, soft_wrap=True)
