"""Arrays of operations: their dims by name, and what each mesh axis does with them.

A *placement* says by a number what one mesh axis does with an array: the dim that it shards, or a
negative *tag* if it shards none. A layout has one placement per axis. For dims `b c` and axes
`dp tp`, the layout `b/dp c` is `(0, REPLICAS)`, and `b c/tp | sum(dp)` is `(SUM, 1)`.

In `b (g d)` there are two dims and three *single dims*: the second dim is g and d, merged.

An axis can also shard a dim by whole *units*, as 6 heads over 4 devices: 2, 2, 1 and 1. For that a
dim has a second number, behind those of all dims (`placement_by_units`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from xshard.caches import layout_cache
from xshard.errors import NotationError, ShapeError
from xshard.layout import Layout, Mesh
from xshard.notation.parser import ARROW, SIZES, Dim, Shard, names_of_dim, parse_sides

# Tags: placements that shard no dim. They are negative, beside the numbers of dims.
REPLICAS = -1  # equal blocks along the axis
SUM = -2  # addends of the array (partial sums)
COPY = -3  # equal blocks whose gradients are addends: the adjoint of SUM
TAGS = {"sum": SUM, "copy": COPY}  # by their names in the notation

Number = TypeVar("Number", int, NDArray[np.int64])  # of a dim, or of several


def placement_by_units(dim: Number, n_dims: Number) -> Number:
    """Return the placement of an axis that shards a dim by whole units: c, 1 of the 2 of `b c` -> 3."""
    return dim + n_dims


@layout_cache(maxsize=2**12)
def parse_arrays(text: str) -> tuple[Layout, ...]:
    """Parse `"b c, f c -> b f"` into its arrays, the result last; there may be no operands."""
    has_operands = bool(text.partition(ARROW)[0].strip())
    operands, results, _ = parse_sides(text if has_operands else f"() {text}", "contraction")
    if not has_operands:
        operands = operands[1:]
    arrays = tuple(Layout(*side) for side in (*operands, *results))
    for array in arrays:
        names = dims_of(array)
        if array.axes or len(set(names)) < len(names):
            hint = "an operation has the dims of arrays, each once, and no axes"
            raise NotationError(f"'{array}' in an operation", text=text, hint=hint)
    return arrays


def write_arrays(texts: Sequence[str]) -> str:
    """Write arrays, the result last, as `parse_arrays` takes them: b c, f c, b f -> `b c, f c -> b f`.

    An operand without dims is `()`.
    """
    *operands, result = texts
    shown = [operand if operand else "()" for operand in operands]
    return f"{', '.join(shown)} {ARROW} {result}".strip()


def dims_of(array: Layout) -> tuple[str, ...]:
    """List the single dims of an array: `b s (g d)` -> b, s, g, d."""
    return tuple(chain.from_iterable(map(names_of_dim, array.dims)))


def shape_of(array: Layout, lengths: Mapping[str, int]) -> tuple[int, ...]:
    """Look up the global shape of an array; raise ShapeError for a dim without a length."""
    for name in dims_of(array):
        if name not in lengths:
            hint = f"lengths are: {', '.join(lengths)}"
            raise ShapeError(f"dim {name!r} lacks a length", hint=hint)
    return tuple(length_of(names_of_dim(dim), lengths) for dim in array.dims)


def length_of(names: Collection[str], lengths: Mapping[str, int]) -> int:
    """Multiply the lengths of some single dims: the rows of `(g d)`."""
    return math.prod(lengths[name] for name in names)


def space_of(arrays: Iterable[Layout], lengths: Mapping[str, int]) -> int:
    """Count the elements of the space of all dims of some arrays.

    `b c, f c -> b f` has the space b x c x f: a product is made for each of its elements.
    """
    return length_of({*chain.from_iterable(map(dims_of, arrays))}, lengths)


def layout_of(placements: Sequence[int], names: Sequence[str], axes: Sequence[str]) -> Layout:
    """Write placements as a layout: (0, SUM) on axes dp tp, dims b c -> `b/dp c | sum(tp)`."""
    axes_of = defaultdict[int, list[tuple[str]]](list)  # by placement
    for axis, placement in zip(axes, placements, strict=True):
        axes_of[placement].append((axis,))
    dims = []
    for number, name in enumerate(names):
        in_even_blocks = axes_of[number]
        by_units = axes_of[placement_by_units(number, len(names))]
        shards = in_even_blocks + by_units  # one of both is empty
        dims.append(Dim(name, tuple(map(Shard, shards))))
    tags = []
    for kind, tag in TAGS.items():
        tags += [(kind, tagged_axis) for tagged_axis in axes_of[tag]]
    return Layout(tuple(dims), tuple(tags))


def in_units(dim: Dim, length: int, n_units: int, mesh: Mesh, *, says_length: bool) -> Dim:
    """Shard a dim by whole units instead of rows, as evenly as possible.

    `o/tp` of 96 rows in 6 units, over 4 devices -> `(o 16)/balanced(tp)`: 2, 2, 1 and 1 units.

    says_length: list them, `(o 16)/sizes(tp,2,2,1,1)`: one block does not tell how long the dim is.
    """
    shards = [replace(shard, order="balanced") for shard in dim.shards]
    if says_length and shards:
        n_blocks = mesh.size(dim.axes[0])
        counts = [len(range(i, n_units, n_blocks)) for i in range(n_blocks)]
        shards[0] = replace(shards[0], order=SIZES, numbers=tuple(counts))
    return with_unit(replace(dim, shards=tuple(shards)), length // n_units)


def with_unit(dim: Dim, unit_rows: int) -> Dim:
    """Let the shards of a dim count units of several rows: `o/tp` -> `(o 16)/tp`."""
    if unit_rows == 1:
        return dim
    parts = (dim.name, str(unit_rows))
    return replace(dim, name=f"{dim.name}_{unit_rows}", parts=parts, unit=unit_rows)


def as_even_blocks(dim: Dim) -> Dim:
    """Write a dim as if it were in even blocks: `(o 16)/balanced(tp)` -> `o/tp`."""
    first_name = dim.parts[0] if dim.parts else dim.name
    return Dim(first_name, tuple(Shard(shard.axes) for shard in dim.shards))


def placements_of(layout: Layout, axes: Sequence[str]) -> list[int]:
    """Convert a layout into a list with one placement per mesh axis.

    On the axes dp, tp and pp, `b/dp c | sum(tp)` is [0, SUM, REPLICAS]. A placement is the number of
    the dim that the axis shards, or a negative tag. Raises NotationError for layouts that the search
    does not know, such as uneven blocks.
    """
    placement_of: dict[str, int] = {}
    for number, dim in enumerate(layout.dims):
        placement_of |= dict.fromkeys(dim.axes, number)
    for kind, tagged_axes in layout.tags:
        # Tags without a placement, such as max, count as replicas here; the check below finds them.
        placement_of |= dict.fromkeys(tagged_axes, TAGS.get(kind, REPLICAS))
    placements = [placement_of.get(axis, REPLICAS) for axis in axes]
    # Convert back: sizes, halos and another order of axes, which placements cannot say, are lost.
    if str(layout_of(placements, layout.names, axes)) != str(layout):
        hint = f"contiguous blocks over axes in the order {', '.join(axes)}, sum and copy"
        raise NotationError(f"'{layout}' is not searched", hint=hint)
    return placements
