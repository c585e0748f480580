"""The shapes of operands, given or inferred from blocks, and contractions with one dim per name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xshard.arguments import lengths_of, shown, whole_number
from xshard.caches import layout_cache
from xshard.contractions.expression import Contraction
from xshard.contractions.placements import dim_lengths
from xshard.errors import ShapeError
from xshard.layout import Layout, Mesh, Sharding
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


@layout_cache(maxsize=4096)
def shapes_of(
    call: Contraction, sizes: Sizes | None, shapes: Shapes | None
) -> tuple[Contraction, Shapes]:
    """Lengths by name, or all global shapes -> the contraction without `...`, a length per operand's name."""
    text = call.text
    operands = call.operands
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
    dims = [
        (i, *dim) for i, (x, shape) in enumerate(pairs) for dim in zip(x.dims, shape, strict=True)
    ]
    for i, dim, length in sorted(dims, key=lambda each: len(parts_of(each[1]))):
        unknown = set(parts := parts_of(dim)) - lengths.keys()
        known = math.prod(lengths.get(name, 1) for name in parts)
        if len(unknown) == 1 and known and length % known == 0:
            lengths[unknown.pop()] = length // known
        elif unknown or known != length:
            have = " and ".join(f"{name}={lengths[name]}" for name in parts if name in lengths)
            what = (
                f"dim '{' '.join(parts)}' is {length} long, elsewhere {have or 'no part is known'}"
            )
            hint = "a name stands for one length; sizes= says all of them"
            raise ShapeError(what, text=text, span=_dim_span(call, i, dim.name), hint=hint)
    return call, tuple(tuple(lengths[name] for name in layout.names) for layout in call.operands)


def _from_sizes(contraction: Contraction, sizes: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
    names = [(i, name) for i, layout in enumerate(contraction.operands) for name in layout.names]
    for i, name in names:
        if name not in sizes:
            have = "sizes has: " + ", ".join(f"{key}={value}" for key, value in sizes.items())
            have = "pass shape= with one shape per operand" if name == ELLIPSIS else have
            what = f"sizes has no length for dim {name!r}"
            span = _dim_span(contraction, i, name)
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
    text = call.text
    operands = call.operands
    if len(shapes) != len(operands):
        what = f"{len(shapes)} arrays for {len(operands)} operands"
        raise ShapeError(what, text=text, hint="one array or shape per operand")
    call = call.resolved(map(len, shapes))
    for i, (layout, shape) in enumerate(zip(call.arrays, shapes, strict=False)):
        if len(shape) != len(layout.names):
            what = f"an array of {len(shape)} dims, {tuple(shape)}"
            span = text_spans(text).layouts[i]
            raise ShapeError(
                f"{what}, for '{layout}'", text=text, span=span, hint="one dim per name"
            )
    return call


def whole_shapes(call: Contraction, mesh: Mesh, blocks: Shapes) -> Shapes:
    """The shape of every block -> the global lengths of every operand's names. Raises ShapeError."""
    # A dim is as long as in an operand that holds it unsharded, else its blocks are taken to be equal.
    operands = list(zip(call.arrays, blocks, strict=False))
    dims = [pair for layout, block in operands for pair in zip(layout.dims, block, strict=True)]
    unsharded = {str(parts_of(dim)): rows for dim, rows in dims if not dim.shards}
    shapes = list[tuple[int, ...]]()
    for layout, block in operands:
        known = {dim.name: unsharded.get(str(parts_of(dim))) for dim in layout.dims if dim.shards}
        shapes.append(global_shape(layout, mesh, block, call.text, known))
    return shapes_of(call, None, tuple(shapes))[1]


def written(call: Contraction, mesh: Mesh, shapes: Sequence[Sequence[int]]) -> tuple[Sharding, ...]:
    """Operands and result as they are written; ShapeError if blocks end within a row of a first name."""
    lengths = dim_lengths(call.operands, shapes)
    arrays = list[Sharding]()
    for layout in call.arrays:
        for dim in layout.dims:
            first, *rest = parts_of(dim)
            n = mesh.size(*dim.axes) * 2 ** sum(shard.order == "zigzag" for shard in dim.shards)
            in_turn = any(shard.numbers or shard.order == "cyclic" for shard in dim.shards)
            if rest and (in_turn or lengths[first] % n):
                what = f"blocks may end within a row of {first!r}, which is {lengths[first]} long"
                raise ShapeError(
                    what, text=str(dim), hint="it takes equal parts or zigzags of these rows"
                )
        shape = (math.prod(lengths[name] for name in parts_of(dim)) for dim in layout.dims)
        arrays.append(Sharding(layout, mesh, tuple(shape)))
    return tuple(arrays)


def named_block(
    x: Any, layout: Layout, named: Sharding, block: Sequence[int], rows: Callable[[str], Any]
) -> Any:
    """A block (numpy, torch or JAX) as it is written -> with one dim per name. rows: global, by name."""
    here, whole = (
        dict(zip(named.layout.names, lengths, strict=True)) for lengths in (block, named.shape)
    )
    names = list[str]()
    lengths = list[int]()
    picked = list[int]()
    for dim in layout.dims:
        for i, name in enumerate(parts_of(dim)):
            is_here = bool(dim.shards) and not i
            if named.layout.dim(name).shards and not is_here:
                picked.append(len(names))
            names.append(name)
            lengths.append((here if is_here else whole)[name])
    if layout.names != tuple(names):
        x = x.reshape(lengths)
    for d in picked:
        x = x[(slice(None),) * d + (rows(names[d]),)]
    for name in named.layout.names:
        while names.count(name) > 1:
            first = names.index(name)
            second = names.index(name, first + 1)
            x = x.diagonal(0, first, second)
            names = [*names[:first], *names[first + 1 : second], *names[second + 1 :], name]
    return x
