"""Pictures, plans and errors in a terminal, by rich; blocks have device numbers to read without colour."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, singledispatch
from typing import Any, NamedTuple

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
    """Return a console that prints `[2, 64]` and `:halo(1,1)` as text, not as markup."""
    out = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = PIPE_WIDTH
    return out


def headed_table(*heads: str, left_aligned: Sequence[str]) -> Table:
    """Return a table without rows.

    Args:
        *heads: The heads of the columns.
        left_aligned: The heads of columns of text; numbers stand on the right.
    """
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for head in heads:
        table.add_column(head, justify="left" if head in left_aligned else "right", overflow="fold")
    return table


def print_error(error: XshardError) -> None:
    """Print an error on stderr like the last lines of a traceback."""
    message = Text.assemble((type(error).__name__, "bold red"), f": {error}")
    console(stderr=True).print(message, soft_wrap=True)


# Backgrounds that every terminal with 16 colours has and that black text is read on, by device number.
# Further devices have them again, underlined.
_HUES = ("cyan", "yellow", "green", "magenta")
_COLOURS = (*(f"bright_{hue}" for hue in _HUES), "bright_red", *_HUES)


@singledispatch
def renderable(value: object) -> RenderableType:
    """Return what rich prints for a value: its text, unless there is more to show."""
    return Text(str(value))


@renderable.register
def _(value: Sharding | Picture) -> RenderableType:
    drawn = picture(value) if isinstance(value, Sharding) else value
    return Fitted(partial(_grid_text, drawn))


@renderable.register
def _(plan: Plan | ContractionPlan) -> RenderableType:
    explain: Any = contractions if isinstance(plan, ContractionPlan) else table
    steps = partial(_steps_text, explain.title(plan), explain.rows(plan), explain.total(plan))
    return Fitted(steps)


class Fitted(NamedTuple):
    """Output that a function of the console's width makes."""

    parts: Callable[[int], Iterable[RenderableType]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.parts(options.max_width)


def _steps_text(
    head: str, rows: Sequence[table.Row], totals: str, width: int
) -> Iterator[RenderableType]:
    """Yield what a terminal shows of a plan: its title, its steps, and its price in all.

    Args:
        head: The title.
        rows: The texts of each step: step, layout after it, local shape, received, time, peak.
        totals: The line with the price of the whole plan.
        width: The columns of the terminal. If a table is wider, each step is written on lines
            instead.
    """
    yield lines_of(head, width)
    column_widths = [max(map(len, column)) + 3 for column in zip(table.HEAD, *rows, strict=True)]
    if sum(column_widths) <= width:
        steps = headed_table(*table.HEAD, left_aligned=("step", "layout after"))
        for row in rows:
            steps.add_row(*row)
        yield steps
    else:
        yield ""
        for row in rows:
            yield from _step_lines(row)
        yield ""
    yield Text(f"{totals}\n")


def lines_of(head: str, width: int, style: str = "bold") -> Text:
    """Return a title, its parts on lines of their own if they do not fit on one."""
    if len(head) > width:
        head = "\n  ".join(head.split("   "))
    return Text(head, style)


def _step_lines(row: table.Row) -> Iterator[Text]:
    """Print a step, and below it the layout after it and the numbers."""
    if row.step:
        yield Text(row.step)
    if row.layout:
        yield Text(f"    {row.layout}", "bold")
    received = f"received {row.received}" if row.received else ""
    peak = f"peak {row.peak}" if row.peak else ""
    texts = filter(None, (row.local_shape, received, row.time, peak))
    yield Text("    " + "   ".join(texts))


def _grid_text(drawn: Picture, width: int) -> Iterator[RenderableType]:
    """Print a picture as a title, a grid, notes and a line for every device."""
    yield lines_of(title(drawn.sharding), width)
    for grid in _grids(drawn, width):
        yield ""
        yield grid
    yield ""
    for note in (*reading(drawn), *drawn.notes):
        yield Text(f"- {note}")
    yield _legend(drawn)


def _grids(drawn: Picture, width: int) -> Iterator[Table]:
    """Yield tables that show which device holds which block of an array: rows down, columns across.

    One table if it fits the `width` of the terminal, else several, each with some of the columns. A
    cell has the devices that hold the block, such as "d0" or "sum d0-3".
    """
    down, across = drawn.down_and_across
    corner = " / ".join(strip.head for strip in drawn.strips) or "scalar"
    columns = [_column(drawn, j, head) for j, head in enumerate(across.texts)]
    row_head_width = max(map(len, (corner, *down.texts))) + 1
    for band in _bands(columns, width - row_head_width):
        grid = Table(box=None, padding=0)
        grid.add_column(Text(f"{corner} ", style="bold"), justify="right", no_wrap=True)
        for column in band:
            grid.add_column(column.head, no_wrap=True)
        for i, row_head in enumerate(down.texts):
            grid.add_row(Text(f"{row_head} "), *(column.cells[i] for column in band))
        yield grid


class _Column(NamedTuple):
    """The texts of a column of a grid, all of one width."""

    head: Text
    cells: list[Text]
    width: int


def _column(drawn: Picture, j: int, head: str) -> _Column:
    """Write one column of a picture's blocks, each in the colour of its device."""
    down, _ = drawn.down_and_across
    texts = [cell_text(drawn, i, j) for i in range(len(down.texts))]
    width = max(map(len, (head, *texts))) + 2
    cells = []
    for i, cell in enumerate(texts):
        # The device in front, where several have the block: [cards, rows, columns].
        style = _style(int(drawn.cards[0, i, j]))
        cells.append(Text(cell.center(width), style))
    return _Column(Text(head.center(width)), cells, width)


def _bands(columns: Sequence[_Column], room: int) -> list[list[_Column]]:
    """Divide columns into bands that have room, at least one column in each."""
    bands: list[list[_Column]] = [[]]
    band_width = 0
    for column in columns:
        if bands[-1] and band_width + column.width > room:
            bands.append([])
            band_width = 0
        bands[-1].append(column)
        band_width += column.width
    return bands


def _style(device: int) -> str:
    """Return the colours of a device's blocks."""
    repetition, hue_index = divmod(device, len(_COLOURS))
    underline = " underline" if repetition % 2 else ""
    return f"black on {_COLOURS[hue_index]}{underline}"


def _legend(drawn: Picture) -> Table:
    """Make a table with a line for each device: its place on the mesh, and what it holds.

    Such as device 3, dp=1, tp=1, local shape 4x2, rows 4-7 of n, rows 2-3 of c. Only dims that are
    sharded or have halos have a column.
    """
    sharding = drawn.sharding
    columns = _legend_columns(sharding)
    legend = headed_table(
        "device", *sharding.mesh.axes, "local shape", *columns, left_aligned=list(columns)
    )
    for device in range(sharding.mesh.n_devices):
        style = _style(drawn.first_holder[device])
        rows = [rows_text(rows_of(device)) for rows_of in columns.values()]
        legend.add_row(
            Text(f" {device} ", style),
            *map(str, sharding.mesh.coords(device)),
            "x".join(map(str, sharding.local_shape(device))) or "scalar",
            *rows,
        )
    return legend


def _legend_columns(sharding: Sharding) -> dict[str, Callable[[int], Runs]]:
    """Choose columns by head: the rows of each sharded dim; of an overlapping one, owned and held rows."""
    columns: dict[str, Callable[[int], Runs]] = {}
    for dim_index, dim in enumerate(sharding.layout.dims):
        if dim.overlap:
            held = "contributed" if isinstance(dim.overlap, Fold) else "held"
            columns[f"{dim.name} owned"] = partial(sharding.owned, dim_index)
            columns[f"{dim.name} {held}"] = partial(sharding.held, dim_index)
        elif dim.axes:
            columns[f"rows of {dim.name}"] = partial(sharding.owned, dim_index)
    return columns
