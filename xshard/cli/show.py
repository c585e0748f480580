"""`xshard show`: the picture of a layout as a grid in the terminal, and a table of the devices.

Decides how a picture looks in a terminal. Every block has its device numbers, so that the grid can be
read without colour. What the picture shows is decided in `picture.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xshard.cli.console import console
from xshard.cli.options import MeshText, ShapeOrNone, SizesOrNone, lengths_of_arrays
from xshard.cli.picture import Cell, Picture, devices_text, picture, rows_text
from xshard.contractions.expression import contraction, shapes_of
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.layout import check_axes

# Light backgrounds of the 256-colour palette with different hues, used in turn under black text.
_COLOURS = (153, 223, 157, 217, 183, 229, 159, 216, 193, 225, 189, 187)


def show(
    layout: Annotated[
        str,
        typer.Argument(metavar="LAYOUT", help="As in 's/zigzag(cp) c | sum(tp)', or a contraction, quoted."),
    ],
    mesh: MeshText,
    shape: ShapeOrNone = None,
    sizes: SizesOrNone = None,
    dims: Annotated[
        str, typer.Option(metavar="NAMES", help="One or two dims to draw; by default the first two cut.")
    ] = "",
) -> None:
    """Draw which device of a mesh holds which block of an array, or of all arrays of a contraction.

    Example: xshard show "b s/zigzag(cp) c" --mesh cp=4 --shape 2,64,32
    """
    on, lengths = Mesh.parse(mesh), lengths_of_arrays(layout, shape, sizes)
    names = tuple(filter(None, (name.strip() for name in dims.split(","))))
    if sizes is None:
        layouts = [Layout.parse(layout)]
    else:
        given = contraction(layout)
        layouts = [*given.operands, given.result]
        shapes_of(given, lengths["sizes"], None)  # raises for lengths that do not fit
    for each in layouts:
        check_axes(each, on, layout)  # here, so that the caret marks the text as it was typed
    for each in layouts:
        whole = lengths["shape"] if sizes is None else tuple(lengths["sizes"][name] for name in each.names)
        _draw(picture(Sharding(each, on, whole), names))


def _draw(drawn: Picture) -> None:
    out, sharding = console(), drawn.sharding
    title = f"{sharding.layout}   {list(sharding.shape)} on {sharding.mesh}"
    out.print(Text(title, style="bold"), soft_wrap=True)
    for grid in _grids(drawn, out):
        out.print()
        out.print(grid)
    out.print()
    for note in (*_reading(drawn), *drawn.notes):
        out.print(f"- {note}", soft_wrap=True)
    out.print(_legend(drawn))


def _grids(drawn: Picture, out: Console) -> Iterator[Table]:
    """The grid, its columns split into bands that fit the width of the console."""
    colour = _colours(drawn)
    columns, rows = drawn.strips[-1:], drawn.strips[:-1]
    labels = [_range(block) for strip in columns for block in strip.blocks] if columns else [""]
    sides = [_range(block) for strip in rows for block in strip.blocks] if rows else [""]
    corner = " / ".join(f"{strip.dim.name} {strip.length}" for strip in drawn.strips) or "scalar"
    texts = [[_cell_text(cell) for cell in row] for row in drawn.cells]
    widths = [max(map(len, (label, *column))) + 2 for label, *column in zip(labels, *texts, strict=True)]
    for band in _bands(widths, out.width - max(map(len, (corner, *sides))) - 1):
        grid = Table(box=None, padding=0)
        grid.add_column(Text(f"{corner} ", style="bold"), justify="right", no_wrap=True)
        for j in band:
            grid.add_column(Text(labels[j].center(widths[j])), no_wrap=True)
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
    return {
        devices: f"black on color({number})"
        for devices, number in zip(owners, itertools.cycle(_COLOURS), strict=False)
    }


def _cell_text(cell: Cell) -> str:
    """The devices of a cell, written d0, d1, ... to distinguish them from rows."""
    owners = f"d{devices_text(cell.owners)}" if cell.owners else "."
    return " ".join([owners, *(f"+d{guest}" for guest in cell.guests)])


def _range(block: tuple[int, int]) -> str:
    first, last = block[0], block[1] - 1
    return f"{first}-{last}" if first < last else f"{first}"


def _reading(drawn: Picture) -> list[str]:
    """Explanations of the marks in this picture."""
    cells = list(itertools.chain.from_iterable(drawn.cells))
    marks = [
        f"only the first {strip.length - strip.hidden} of {strip.length} rows of {strip.dim.name} are drawn"
        for strip in drawn.strips
        if strip.hidden
    ]
    if any(cell.guests for cell in cells):
        marks.append("+d: a device that holds the block too, as overlap")
    if any(not cell.owners for cell in cells):
        marks.append(".: the owner does not hold this block")
    return marks


def _legend(drawn: Picture) -> Table:
    """One line per device: coordinates, local shape, and its rows of every dim that is cut or overlaps."""
    colour = {device: style for owners, style in _colours(drawn).items() for device in owners}
    cut = [(d, dim) for d, dim in enumerate(drawn.sharding.layout.dims) if dim.axes or dim.overlap]
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for name in ("device", *drawn.sharding.mesh.axes, "local shape"):
        table.add_column(name, justify="right", no_wrap=True)
    for _, dim in cut:
        table.add_column(f"{dim.name} owned" if dim.overlap else f"rows of {dim.name}")
        if dim.overlap:
            table.add_column(f"{dim.name} held")
    for block in drawn.devices:
        rows = []
        for d, dim in cut:
            rows.append(rows_text(block.owned[d]))
            if dim.overlap:
                rows.append(rows_text(block.held[d]))
        table.add_row(
            Text(f" {block.device} ", style=colour.get(block.device, "")),
            *(str(c) for _, c in block.coords),
            "x".join(map(str, block.local_shape)) or "scalar",
            *rows,
        )
    return table
