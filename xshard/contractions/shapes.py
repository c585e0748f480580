"""The shapes of a contraction's operands: given by the user, or inferred from blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xshard.arguments import lengths_of, shown, whole_number
from xshard.contractions.expression import Contraction
from xshard.errors import ShapeError
from xshard.layout import Mesh
from xshard.layout.lengths import global_shape
from xshard.notation.parser import text_spans

Shapes = Sequence[Sequence[int]]


def whole_lengths(sizes: Any, shape: Any) -> tuple[dict[str, int] | None, tuple[tuple[int, ...], ...] | None]:
    """Lengths by name, and shapes, as users write them -> the same in ints, or ShapeError."""
    if sizes is not None:
        if not isinstance(sizes, Mapping):
            raise ShapeError(f"sizes {shown(sizes)}", hint='lengths by name, as in sizes={"b": 8}')
        sizes = {name: _length(f"dim {name!r} in sizes", n) for name, n in sizes.items()}
    if shape is not None:
        shapes = tuple(shape) if whole_number(shape) is None else (shape,)
        shapes = (shapes,) if all(whole_number(n) is not None for n in shapes) else shapes
        shape = tuple(tuple(_length("a shape", n) for n in lengths_of(one)) for one in shapes)
    return sizes, shape


def _length(what: str, value: Any) -> int:
    length = whole_number(value)
    if length is None or length < 0:
        raise ShapeError(f"{what} has {shown(value)}", hint="a length is a whole number >= 0")
    return length


def shapes_of(
    contraction: Contraction, sizes: Mapping[str, int] | None, shapes: Sequence[tuple[int, ...]] | None
) -> tuple[tuple[int, ...], ...]:
    """The global shape of every operand, from lengths by name or from all shapes, or ShapeError."""
    text, operands = contraction.text, contraction.operands
    if (sizes is None) == (shapes is None):
        what = "no shapes" if sizes is None else "sizes and shapes"
        first = next((name for layout in operands for name in layout.names), "b")
        hint = f'sizes={{"{first}": 8, ...}}, or shape=[(8, ...), ...] with one shape per operand'
        raise ShapeError(what, text=text, hint=hint)
    if shapes is None:
        return _from_sizes(contraction, sizes or {})
    if len(shapes) != len(operands):
        what = f"{len(shapes)} shapes for {len(operands)} operands"
        raise ShapeError(what, text=text, hint="one shape per operand")
    lengths: dict[str, int] = {}
    for i, (layout, shape) in enumerate(zip(operands, shapes, strict=True)):
        if len(shape) != len(layout.names):
            what, span = f"shape {shape} for {len(layout.names)} dims", text_spans(text).layouts[i]
            raise ShapeError(what, text=text, span=span, hint="one length per dim")
        for name, length in zip(layout.names, shape, strict=True):
            if lengths.setdefault(name, length) != length:
                what = f"dim {name!r} is {lengths[name]} long in one operand and {length} in another"
                span = _dim_span(contraction, i, name)
                raise ShapeError(what, text=text, span=span, hint="a name stands for one length")
    return tuple(shapes)


def _from_sizes(contraction: Contraction, sizes: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
    names = [(i, name) for i, layout in enumerate(contraction.operands) for name in layout.names]
    for i, name in names:
        if name not in sizes:
            have = ", ".join(f"{key}={value}" for key, value in sizes.items())
            what, span = f"sizes has no length for dim {name!r}", _dim_span(contraction, i, name)
            raise ShapeError(what, text=contraction.text, span=span, hint=f"sizes has: {have}")
    known = {name for _, name in names}
    if extra := [name for name in sizes if name not in known]:
        hint = f"dims are: {', '.join(sorted(known))}"
        raise ShapeError(f"sizes has dim {extra[0]!r}", text=contraction.text, hint=hint)
    return tuple(tuple(sizes[name] for name in layout.names) for layout in contraction.operands)


def _dim_span(contraction: Contraction, operand: int, name: str) -> tuple[int, int]:
    """The place of an operand's dim in the text."""
    spans = text_spans(contraction.text)
    start, end = spans.layouts[operand]
    return next(span for dim, span in spans.dims if dim == name and start <= span[0] < end)


def check_operands(contraction: Contraction, shapes: Shapes) -> None:
    """Raise ShapeError unless there is an array for every operand, with a dim for every name."""
    text, operands = contraction.text, contraction.operands
    if len(shapes) != len(operands):
        what = f"{len(shapes)} arrays for {len(operands)} operands"
        raise ShapeError(what, text=text, hint="einsum(expression, x, w, ...), with one per operand")
    for i, (layout, shape) in enumerate(zip(operands, shapes, strict=True)):
        if len(shape) != len(layout.names):
            what, span = f"an array of {len(shape)} dims, {tuple(shape)}", text_spans(text).layouts[i]
            raise ShapeError(f"{what}, for '{layout}'", text=text, span=span, hint="one dim per name")


def whole_shapes(contraction: Contraction, mesh: Mesh, blocks: Shapes) -> tuple[tuple[int, ...], ...]:
    """The shape of every block -> the global shape of every operand. Raises ShapeError.

    A dim is as long as in an operand that holds it unsharded, else its blocks are taken to be equal.
    """
    operands = list(zip(contraction.operands, blocks, strict=True))
    dims = [pair for layout, block in operands for pair in zip(layout.dims, block, strict=True)]
    unsharded = {dim.name: rows for dim, rows in dims if not dim.shards}
    shapes = []
    for layout, block in operands:
        known = {dim.name: unsharded.get(dim.name) for dim in layout.dims if dim.shards}
        shapes.append(global_shape(layout, mesh, block, contraction.text, known))
    return shapes_of(contraction, None, shapes)
