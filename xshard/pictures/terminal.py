"""Pictures, plans and errors in a terminal, by rich; blocks have device numbers to read without colour."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, singledispatch
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from xshard.contractions import explain as contractions
from xshard.contractions.plan import ContractionPlan
from xshard.errors import XshardError
from xshard.layout import Sharding
from xshard.layout.runs import Runs
from xshard.notation.overlap import Fold
from xshard.pictures.grid import Picture, cell_text, picture, reading, title
from xshard.pictures.rows import rows_text
from xshard.plans import table
from xshard.plans.plan import Plan

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


# Backgrounds that every terminal with 16 colours has and that black text is read on, by device number; then
# underlined.
_HUES = ("cyan", "yellow", "green", "magenta")
_COLOURS = (*(f"bright_{hue}" for hue in _HUES), "bright_red", *_HUES)
_SHARED = "black on white"


@singledispatch
def renderable(value: object) -> RenderableType:
    """What rich prints for a value: its text, unless there is more to show."""
    return Text(str(value))


@renderable.register
def _(drawn: Sharding | Picture) -> RenderableType:
    return Fitted(partial(_grid_text, picture(drawn) if isinstance(drawn, Sharding) else drawn))


@renderable.register
def _(plan: Plan | ContractionPlan) -> RenderableType:
    explain: Any = contractions if isinstance(plan, ContractionPlan) else table
    return Fitted(
        partial(_steps_text, explain.title(plan), explain.rows(plan), explain.total(plan))
    )


@dataclass(frozen=True)
class Fitted:
    """Output that a function of the console's width makes."""

    parts: Callable[[int], Iterable[RenderableType]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.parts(options.max_width)


def _steps_text(
    head: str, rows: Sequence[table.Row], total: str, width: int
) -> Iterator[RenderableType]:
    """The steps of a plan between its title and its total: a table, or lines if it is too wide."""
    yield lines_of(head, width)
    if sum(max(map(len, column)) + 3 for column in zip(table.HEAD, *rows, strict=True)) <= width:
        steps = headed_table(*table.HEAD, left=("step", "layout after"))
        for row in rows:
            steps.add_row(*row)
        yield steps
    else:
        yield ""
        yield from itertools.chain.from_iterable(map(_step_lines, rows))
        yield ""
    yield Text(f"{total}\n")


def lines_of(head: str, width: int, style: str = "bold") -> Text:
    """A title, its parts on lines of their own if they do not fit on one."""
    return Text(head if len(head) <= width else "\n  ".join(head.split("   ")), style)


def _step_lines(row: table.Row) -> Iterator[Text]:
    """A step, and below it the layout after it and the numbers."""
    names = {"received": row.received, "": row.time, "peak": row.peak}
    numbers = [f"{name} {text}".strip() for name, text in names.items() if text]
    yield from [Text(row.step)] if row.step else []
    yield from [Text(f"    {row.layout}", "bold")] if row.layout else []
    yield Text("    " + "   ".join(filter(None, (row.local_shape, *numbers))))


def _grid_text(drawn: Picture, width: int) -> Iterator[RenderableType]:
    """A picture as a title, a grid, notes and a line for every device."""
    yield lines_of(title(drawn.sharding), width)
    for grid in _grids(drawn, width):
        yield ""
        yield grid
    yield ""
    yield from (Text(f"- {note}") for note in (*reading(drawn), *drawn.notes))
    yield _legend(drawn)


def _grids(drawn: Picture, width: int) -> Iterator[Table]:
    """The grid, its columns split into bands that fit the width of the console."""
    sides, heads = (strip.texts for strip in drawn.sides)
    corner = " / ".join(strip.head for strip in drawn.strips) or "scalar"
    texts = [[cell_text(drawn, i, j) for j in range(len(heads))] for i in range(len(sides))]
    widths = [
        max(map(len, (label, *column))) + 2 for label, *column in zip(heads, *texts, strict=True)
    ]
    room = width - max(map(len, (corner, *sides))) - 1
    bands = [list[int]()]
    for j, wide in enumerate(widths):
        if bands[-1] and sum(widths[i] for i in bands[-1]) + wide > room:
            bands.append([])
        bands[-1].append(j)
    for band in bands:
        grid = Table(box=None, padding=0)
        grid.add_column(Text(f"{corner} ", style="bold"), justify="right", no_wrap=True)
        for j in band:
            grid.add_column(Text(heads[j].center(widths[j])), no_wrap=True)
        for i, side in enumerate(sides):
            styles = (
                _SHARED if len(drawn.cards) > 1 else _style(drawn.cards[0, i, j]) for j in band
            )
            cells = (texts[i][j].center(widths[j]) for j in band)
            grid.add_row(Text(f"{side} "), *map(Text, cells, styles))
        yield grid


def _style(device: int) -> str:
    again, number = divmod(device, len(_COLOURS))
    return f"black on {_COLOURS[number]}" + (" underline" if again % 2 else "")


def _legend(drawn: Picture) -> Table:
    """One line per device: coordinates, local shape, and its rows of every sharded or overlapping dim."""
    sharding = drawn.sharding
    columns = list[tuple[str, Callable[[int, int], Runs], int]]()
    for d, dim in enumerate(sharding.layout.dims):
        if dim.overlap or dim.axes:
            columns.append(
                (f"{dim.name} owned" if dim.overlap else f"rows of {dim.name}", sharding.owned, d)
            )
        if dim.overlap:
            held = "contributed" if isinstance(dim.overlap, Fold) else "held"
            columns.append((f"{dim.name} {held}", sharding.held, d))
    names = [name for name, *_ in columns]
    legend = headed_table("device", *sharding.mesh.axes, "local shape", *names, left=names)
    for device in range(sharding.mesh.n_devices):
        legend.add_row(
            Text(f" {device} ", _SHARED if drawn.has_replicas else _style(device)),
            *map(str, sharding.mesh.coords(device)),
            "x".join(map(str, sharding.local_shape(device))) or "scalar",
            *(rows_text(rows(d, device)) for _, rows, d in columns),
        )
    return legend
