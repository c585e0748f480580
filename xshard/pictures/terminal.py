"""Pictures, plans and errors in a terminal, by rich; blocks have device numbers to read without colour."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import singledispatch

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from xshard.contractions import explain as contractions
from xshard.contractions.plan import ContractionPlan
from xshard.errors import XshardError
from xshard.layout import Sharding
from xshard.layout.runs import Runs
from xshard.pictures.grid import Picture, cell_text, labels, picture, reading, rows_text, title
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


# Light backgrounds of the 256-colour palette with different hues, used in turn under black text.
_COLOURS = (153, 223, 157, 217, 183, 229, 159, 216, 193, 225, 189, 187)


@singledispatch
def renderable(value: object) -> RenderableType:
    """What rich prints for a value: its text, unless there is more to show."""
    return Text(str(value))


@renderable.register
def _(drawn: Sharding | Picture) -> RenderableType:
    return GridText(picture(drawn) if isinstance(drawn, Sharding) else drawn)


@renderable.register
def _(plan: Plan) -> RenderableType:
    return titled(table.title(plan), table.rows(plan), table.total(plan))


@renderable.register
def _(plan: ContractionPlan) -> RenderableType:
    return titled(contractions.title(plan), contractions.rows(plan), contractions.total(plan))


def titled(head: str, rows: Sequence[table.Row], total: str) -> RenderableType:
    """A table of steps between its title and its total."""
    steps = headed_table(*table.HEAD, left=("step", "layout after"))
    for row in rows:
        steps.add_row(*row)
    return Group(Text(head, "bold"), steps, Text(f"{total}\n"))


@dataclass(frozen=True)
class GridText:
    """A picture as a title, a grid, notes and a line for every device."""

    drawn: Picture

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(title(self.drawn.sharding), style="bold")
        for grid in _grids(self.drawn, options.max_width):
            yield ""
            yield grid
        yield ""
        for note in (*reading(self.drawn), *self.drawn.notes):
            yield Text(f"- {note}")
        yield _legend(self.drawn)


def _grids(drawn: Picture, width: int) -> Iterator[Table]:
    """The grid, its columns split into bands that fit the width of the console."""
    colour = _colours(drawn)
    corner, heads, sides = labels(drawn)
    corner = corner or "scalar"
    texts = [[cell_text(cell) for cell in row] for row in drawn.cells]
    widths = [max(map(len, (label, *column))) + 2 for label, *column in zip(heads, *texts, strict=True)]
    for band in _bands(widths, width - max(map(len, (corner, *sides))) - 1):
        grid = Table(box=None, padding=0)
        grid.add_column(Text(f"{corner} ", style="bold"), justify="right", no_wrap=True)
        for j in band:
            grid.add_column(Text(heads[j].center(widths[j])), no_wrap=True)
        for side, row, line in zip(sides, drawn.cells, texts, strict=True):
            cells = [Text(line[j].center(widths[j]), style=colour.get(row[j].owners, "dim")) for j in band]
            grid.add_row(Text(f"{side} "), *cells)
        yield grid


def _bands(widths: list[int], room: int) -> Iterator[list[int]]:
    """Bands of consecutive columns that fit in `room`, as lists of indices; at least one column each."""
    band: list[int] = []
    for j, width in enumerate(widths):
        if band and sum(widths[i] for i in band) + width > room:
            yield band
            band = []
        band.append(j)
    yield band


def _colours(drawn: Picture) -> dict[tuple[int, ...], str]:
    """A style for every set of owners, in order of appearance."""
    owners = dict.fromkeys(cell.owners for row in drawn.cells for cell in row if cell.owners)
    styles = (f"black on color({number})" for number in itertools.cycle(_COLOURS))
    return dict(zip(owners, styles, strict=False))


def _legend(drawn: Picture) -> Table:
    """One line per device: coordinates, local shape, and its rows of every dim that is cut or overlaps."""
    colour = {device: style for owners, style in _colours(drawn).items() for device in owners}
    sharding, columns = drawn.sharding, list[tuple[str, Callable[[int, int], Runs], int]]()
    for d, dim in enumerate(sharding.layout.dims):
        if dim.overlap:
            columns += [(f"{dim.name} owned", sharding.owned, d), (f"{dim.name} held", sharding.held, d)]
        elif dim.axes:
            columns.append((f"rows of {dim.name}", sharding.owned, d))
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for name in ("device", *sharding.mesh.axes, "local shape"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, *_ in columns:
        table.add_column(name)
    for device in range(sharding.mesh.n_devices):
        table.add_row(
            Text(f" {device} ", style=colour.get(device, "")),
            *map(str, sharding.mesh.coords(device)),
            "x".join(map(str, sharding.local_shape(device))) or "scalar",
            *(rows_text(rows(d, device)) for _, rows, d in columns),
        )
    return table
