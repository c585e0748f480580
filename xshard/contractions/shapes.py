"""The shapes of a contraction's operands: given by the user, or inferred from blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from xshard.arguments import lengths_of, shown, whole_number
from xshard.contractions.expression import Contraction
from xshard.errors import ShapeError
from xshard.layout import Mesh
from xshard.layout.lengths import global_shape
from xshard.notation.parser import ELLIPSIS, parts_of, text_spans

Shapes = tuple[tuple[int, ...], ...]
Sizes = tuple[tuple[str, int], ...]  # lengths by name


def whole_lengths(sizes: Any, shape: Any) -> tuple[Sizes | None, Shapes | None]:
    """Lengths by name, and shapes, as users write them -> the same in tuples of ints, or ShapeError."""
    if sizes is not None:
        if not isinstance(sizes, Mapping):
            raise ShapeError(f"sizes {shown(sizes)}", hint='lengths by name, as in sizes={"b": 8}')
        sizes = tuple((name, _length(f"dim {name!r} in sizes", n)) for name, n in sizes.items())
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


@lru_cache(maxsize=4096)
def shapes_of(call: Contraction, sizes: Sizes | None, shapes: Shapes | None) -> tuple[Contraction, Shapes]:
    """Lengths by name, or all global shapes -> the contraction without `...`, and shapes by name of operands.

    A shape by name has a length for every name of an operand. Raises ShapeError.
    """
    text, operands = call.text, call.operands
    if (sizes is None) == (shapes is None):
        what = "no shapes" if sizes is None else "sizes and shapes"
        first = next((name for layout in operands for name in layout.names), "b")
        hint = f'sizes={{"{first}": 8, ...}}, or shape=[(8, ...), ...] with one shape per operand'
        raise ShapeError(what, text=text, hint=hint)
    if shapes is None:
        return call, _from_sizes(call, dict(sizes or ()))
    call = for_operands(call, shapes)
    lengths: dict[str, int] = {}
    pairs = zip(call.arrays, shapes, strict=False)
    dims = [(i, *dim) for i, (x, shape) in enumerate(pairs) for dim in zip(x.dims, shape, strict=True)]
    for i, dim, length in sorted(dims, key=lambda each: len(parts_of(each[1]))):
        unknown = set(parts := parts_of(dim)) - lengths.keys()
        known = math.prod(lengths.get(name, 1) for name in parts)
        if len(unknown) == 1 and known and length % known == 0:
            lengths[unknown.pop()] = length // known
        elif unknown or known != length:
            have = " and ".join(f"{name}={lengths[name]}" for name in parts if name in lengths)
            what = f"dim '{' '.join(parts)}' is {length} long, elsewhere {have or 'no part is known'}"
            hint = "a name stands for one length; sizes= says all of them"
            raise ShapeError(what, text=text, span=_dim_span(call, i, dim.name), hint=hint)
    return call, tuple(tuple(lengths[name] for name in layout.names) for layout in call.operands)


def _from_sizes(contraction: Contraction, sizes: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
    names = [(i, name) for i, layout in enumerate(contraction.operands) for name in layout.names]
    for i, name in names:
        if name not in sizes:
            have = "sizes has: " + ", ".join(f"{key}={value}" for key, value in sizes.items())
            have = "pass shape= with one shape per operand" if name == ELLIPSIS else have
            what, span = f"sizes has no length for dim {name!r}", _dim_span(contraction, i, name)
            raise ShapeError(what, text=contraction.text, span=span, hint=have)
    known = {name for _, name in names}
    if extra := [name for name in sizes if name not in known]:
        hint = f"dims are: {', '.join(sorted(known))}"
        raise ShapeError(f"sizes has dim {extra[0]!r}", text=contraction.text, hint=hint)
    return tuple(tuple(sizes[name] for name in layout.names) for layout in contraction.operands)


def _dim_span(contraction: Contraction, operand: int, name: str) -> tuple[int, int]:
    """The place of an operand's dim in the text."""
    spans = text_spans(contraction.text)
    start, end = spans.layouts[operand]
    places = {dim: span for dim, span in reversed(spans.dims) if start <= span[0] < end}
    return places.get(name) or places[ELLIPSIS]


def for_operands(call: Contraction, shapes: Shapes) -> Contraction:
    """The contraction of such arrays. Raises ShapeError unless each operand has one, with its dims."""
    text, operands = call.text, call.operands
    if len(shapes) != len(operands):
        what = f"{len(shapes)} arrays for {len(operands)} operands"
        raise ShapeError(what, text=text, hint="one array or shape per operand")
    call = call.resolved(map(len, shapes))
    for i, (layout, shape) in enumerate(zip(call.arrays, shapes, strict=False)):
        if len(shape) != len(layout.names):
            what, span = f"an array of {len(shape)} dims, {tuple(shape)}", text_spans(text).layouts[i]
            raise ShapeError(f"{what}, for '{layout}'", text=text, span=span, hint="one dim per name")
    return call


def whole_shapes(call: Contraction, mesh: Mesh, blocks: Shapes) -> Shapes:
    """The shape of every block -> the global lengths of every operand's names. Raises ShapeError.

    A dim is as long as in an operand that holds it unsharded, else its blocks are taken to be equal.
    """
    operands = list(zip(call.arrays, blocks, strict=False))
    dims = [pair for layout, block in operands for pair in zip(layout.dims, block, strict=True)]
    unsharded = {str(parts_of(dim)): rows for dim, rows in dims if not dim.shards}
    shapes = list[tuple[int, ...]]()
    for layout, block in operands:
        known = {dim.name: unsharded.get(str(parts_of(dim))) for dim in layout.dims if dim.shards}
        shapes.append(global_shape(layout, mesh, block, call.text, known))
    return shapes_of(call, None, tuple(shapes))[1]
