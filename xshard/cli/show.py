"""`xshard show`: the picture of a layout as a grid in the terminal, and a table of the devices."""

from __future__ import annotations

from typing import Annotated

import typer

from xshard.cli.options import MeshText, ShapeOrNone, SizesOrNone, lengths_of_arrays
from xshard.contractions.expression import contraction
from xshard.contractions.shapes import shapes_of
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.layout import check_axes
from xshard.pictures.console import console
from xshard.pictures.grid import picture
from xshard.pictures.terminal import GridText


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
        einsum = contraction(layout)
        layouts = [*einsum.operands, einsum.result]
        shapes_of(einsum, lengths["sizes"], None)  # raises for lengths that do not fit
    for each in layouts:
        check_axes(each, on, layout)  # here, so that the caret marks the text as it was typed
    for each in layouts:
        whole = lengths["shape"] if sizes is None else tuple(lengths["sizes"][name] for name in each.names)
        console().print(GridText(picture(Sharding(each, on, whole), names)))
