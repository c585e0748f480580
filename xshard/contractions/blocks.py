"""What the blocks of operands say of a contraction: whether they fit it, and how long its dims are.

Decides how long a dim is where nobody says: as long as an operand that has it whole, else as equal blocks.
Knows no data.
"""

from __future__ import annotations

from collections.abc import Sequence

from xshard.contractions.expression import Contraction, shapes_of
from xshard.errors import ShapeError
from xshard.layout import Mesh
from xshard.layout.lengths import global_shape
from xshard.notation.parser import text_spans

Shapes = Sequence[Sequence[int]]


def check_operands(given: Contraction, shapes: Shapes) -> None:
    """Raise ShapeError unless there is an array for every operand, with a dim for every name."""
    if len(shapes) != len(given.operands):
        what = f"{len(shapes)} arrays for {len(given.operands)} operands"
        raise ShapeError(what, text=given.text, hint="einsum(expression, x, w, ...), with one per operand")
    for i, (layout, shape) in enumerate(zip(given.operands, shapes, strict=True)):
        if len(shape) != len(layout.names):
            what, span = f"an array of {len(shape)} dims, {tuple(shape)}", text_spans(given.text).layouts[i]
            raise ShapeError(f"{what}, for '{layout}'", text=given.text, span=span, hint="one dim per name")


def whole_shapes(given: Contraction, mesh: Mesh, blocks: Shapes) -> tuple[tuple[int, ...], ...]:
    """The shape of every block -> the global shape of every operand. Raises ShapeError.

    >>> from xshard.contractions.expression import contraction
    >>> whole_shapes(contraction("n d/tp, d f/tp -> n f"), Mesh(tp=4), [(3, 2), (6, 5)])
    ((3, 6), (6, 20))
    """
    operands = list(zip(given.operands, blocks, strict=True))
    dims = [pair for layout, block in operands for pair in zip(layout.dims, block, strict=True)]
    unsharded = {dim.name: rows for dim, rows in dims if not dim.shards}
    shapes = []
    for layout, block in operands:
        known = {dim.name: unsharded.get(dim.name) for dim in layout.dims if dim.shards}
        shapes.append(global_shape(layout, mesh, block, given.text, known))
    return shapes_of(given, None, shapes)
