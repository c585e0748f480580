"""Options that commands share: their types for typer, and the parsing of their text.

Decides how shapes are written. Commands parse these values, not typer, so that errors keep their
caret.
"""

from __future__ import annotations

from typing import Annotated

import typer

from xshard.errors import ShapeError

MESH_HELP = "Axes of the mesh and their sizes, as in dp=2,cp=4."
SHAPE_HELP = "Shape of the global array, as in 2,64,32."

ExpressionText = Annotated[str, typer.Argument(metavar="EXPR", help='"layout -> layout", quoted.')]
MeshText = Annotated[str, typer.Option("--mesh", metavar="AXES", help=MESH_HELP)]
ShapeText = Annotated[str, typer.Option("--shape", metavar="LENGTHS", help=SHAPE_HELP)]
Dtype = Annotated[
    str, typer.Option(metavar="NAME", help="Dtype of the array, as in float32, bfloat16, int64.")
]


def parse_shape(text: str) -> tuple[int, ...]:
    """`"2,64,32"` -> `(2, 64, 32)`; empty text -> `()`. Raises ShapeError with a caret."""
    if not text.strip():
        return ()
    lengths, at = [], 0
    for part in text.split(","):
        if not part.strip().isdecimal():
            span = (at, at + max(1, len(part)))
            raise ShapeError("a length is a whole number >= 0", text=text, span=span, hint="as in 2,64,32")
        lengths.append(int(part))
        at += len(part) + 1
    return tuple(lengths)
