"""The shapes of operands, given or inferred from blocks, and contractions with one dim per name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from xshard.arguments import lengths_of
from xshard.caches import layout_cache
from xshard.contractions.expression import Contraction
from xshard.contractions.placements import dim_lengths
from xshard.errors import PlanError, ShapeError
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.layout import factored, without_spread
from xshard.layout.lengths import global_shape
from xshard.layout.sub_axes import axis_factors, common_mesh
from xshard.notation.parser import ELLIPSIS, Dim, mark_errors, names_of_dim, text_spans
from xshard.search.request import NEST_HINT
from xshard.signatures import as_whole_number, short_repr

Shapes = tuple[tuple[int, ...], ...]
Sizes = tuple[tuple[str, int], ...]  # lengths by name


def checked_lengths(sizes: Any, shape: Any) -> tuple[Sizes | None, Shapes | None]:
    """Check the `sizes` and `shape` that a user passes, and return both as tuples of ints.

    sizes {"b": 8} -> (("b", 8),). shape [(8, 4), (4,)] -> ((8, 4), (4,)), and one shape (8, 4) ->
    ((8, 4),). None, for not given, stays None. Raises ShapeError for anything else.
    """
    if sizes is not None:
        items = sizes.items()
        sizes = tuple((name, _length(f"dim {name!r} in sizes", length)) for name, length in items)
    if shape is not None:
        shape = tuple(map(_whole_shape, _as_shapes(shape)))
    return sizes, shape


def _as_shapes(shape: Any) -> tuple[Any, ...]:
    """Return a tuple of shapes: of one, if one shape or one length is given."""
    if as_whole_number(shape) is not None:  # as in shape=8, for one operand of one dim
        return ((shape,),)
    shapes = tuple(shape)
    is_one_shape = all(as_whole_number(length) is not None for length in shapes)
    return (shapes,) if is_one_shape else shapes


def _whole_shape(shape: Any) -> tuple[int, ...]:
    return tuple(_length("a shape", length) for length in lengths_of(shape))


def _length(subject: str, value: Any) -> int:
    """Return a length as an int. Raises ShapeError unless it is a whole number >= 0."""
    length = as_whole_number(value)
    if length is None or length < 0:
        raise ShapeError(
            f"{subject} has {short_repr(value)}", hint="a length is a whole number >= 0"
        )
    return length


class WrittenDim(NamedTuple):
    """A dim of an array as the text writes it, and the length that the array's shape gives it."""

    operand: int
    dim: Dim
    names: list[str]  # of its parts: b and d of `(b d)`
    length: int


@layout_cache(maxsize=4096)
def shapes_of(
    call: Contraction, sizes: Sizes | None, shapes: Shapes | None
) -> tuple[Contraction, Shapes]:
    """Find the length of every dim of a contraction, from lengths by name, from shapes, or from both.

    `b d, d f -> b f` with sizes b=8, d=4, f=2, or with shapes (8, 4), (4, 2) -> ((8, 4), (4, 2)). A
    composed dim is one number in shapes and one for each name in the result: `(b d)` of 32 -> (8,
    4). `...` in the text is replaced by names of dims, as many as the shapes have.

    sizes: lengths by name, of all dims if there are no shapes. shapes: the global shape of each
    operand. Raises ShapeError if they do not fit the text, or each other, or leave a length open.
    """
    if sizes is None and shapes is None:
        hint = 'sizes={"b": 8, ...}, or shape=[(8, ...), ...] with one shape per operand'
        raise ShapeError("no shapes", text=call.text, hint=hint)
    lengths = dict(sizes or ()) | _numbers_in(call.arrays)
    if shapes is not None:
        call = for_operands(call, shapes)
        _learn_lengths(call, shapes, lengths)
    return call, _lengths_by_name(call, lengths)


def _numbers_in(arrays: Sequence[Layout]) -> dict[str, int]:
    """Return the lengths that the text says: `(n 128)` -> n_128 is 128 long."""
    lengths = {}
    for layout in arrays:
        for dim in layout.dims:
            if dim.parts and dim.parts[-1].isdigit():
                lengths[names_of_dim(dim)[-1]] = int(dim.parts[-1])
    return lengths


def _learn_lengths(call: Contraction, shapes: Shapes, lengths: dict[str, int]) -> None:
    """Add to `lengths` those of all names, from the shapes of the operands.

    Raises ShapeError for a dim whose length differs from what is known, or says too little.
    """
    written_dims: list[WrittenDim] = []
    # The shapes are those of the operands; the last array, the result, has none.
    for operand_index, (operand, shape) in enumerate(zip(call.arrays, shapes, strict=False)):
        for dim, length in zip(operand.dims, shape, strict=True):
            written_dims.append(WrittenDim(operand_index, dim, names_of_dim(dim), length))
    # Dims of one name first: errors speak of the composed ones only where these agree.
    written_dims.sort(key=lambda written_dim: len(written_dim.names))
    # With the length of b known, `(b d)` gives that of d, which may give another one in turn.
    while written_dims:
        waiting_dims = [written for written in written_dims if not _learn_length(written, lengths)]
        if len(waiting_dims) == len(written_dims):
            raise _wrong_length(call, waiting_dims[0], lengths)
        written_dims = waiting_dims


def _wrong_length(
    call: Contraction, written_dim: WrittenDim, lengths: Mapping[str, int]
) -> ShapeError:
    """Make the error for a dim whose length differs from the known `lengths`, or says too little."""
    operand, dim, names, length = written_dim
    known_parts = [f"{name}={lengths[name]}" for name in names if name in lengths]
    elsewhere = " and ".join(known_parts) if known_parts else "no part is known"
    return ShapeError(
        f"dim '{dim.text}' is {length} long, elsewhere {elsewhere}",
        text=call.text,
        span=_dim_span(call, operand, dim.name),
        hint="a name stands for one length; sizes= says all of them",
    )


def _learn_length(written_dim: WrittenDim, lengths: dict[str, int]) -> bool:
    """Add to `lengths` the length that one dim of an operand gives a name.

    A dim `b` of 3 gives b = 3. A composed dim gives its one unknown name: `(b d)` of 12 with b = 3
    gives d = 4. Returns whether all of its names are known, and agree with its length.
    """
    names = written_dim.names
    unknown = set(names) - lengths.keys()
    known_length = math.prod(lengths.get(name, 1) for name in names)  # of the names that are known
    # If a known name is 0 long, the product is 0 whatever the unknown one is.
    if len(unknown) == 1 and known_length:
        [name] = unknown
        # A name that repeats, as in `(i i)`, is a root: of 9 it is 3.
        root = round((written_dim.length // known_length) ** (1 / names.count(name)))
        if root ** names.count(name) * known_length == written_dim.length:
            lengths[name] = root
            return True
    return not unknown and known_length == written_dim.length


def _lengths_by_name(call: Contraction, lengths: Mapping[str, int]) -> Shapes:
    """Return for every operand a length for each name. Raises ShapeError for a name too few or too many."""
    known_names: set[str] = set()
    for i, layout in enumerate(call.operands):
        for name in layout.names:
            known_names.add(name)
            if name not in lengths or name == ELLIPSIS:
                raise _no_length(call, i, name, lengths)
    for name in lengths:
        if name not in known_names:
            hint = f"dims are: {', '.join(sorted(known_names))}"
            raise ShapeError(f"sizes has dim {name!r}", text=call.text, hint=hint)
    return tuple(tuple(map(lengths.__getitem__, layout.names)) for layout in call.operands)


def _no_length(call: Contraction, operand: int, name: str, sizes: Mapping[str, int]) -> ShapeError:
    """Return the error for a dim of an operand without a length in `sizes`."""
    if name == ELLIPSIS:
        hint = "pass shape= with one shape per operand"
    else:
        hint = "sizes has: " + ", ".join(f"{key}={value}" for key, value in sizes.items())
    reason = f"sizes has no length for dim {name!r}"
    return ShapeError(reason, text=call.text, span=_dim_span(call, operand, name), hint=hint)


def _dim_span(call: Contraction, operand: int, name: str) -> tuple[int, int]:
    """Find the characters (start, stop) of an operand's dim in the text, for the caret of an error.

    d of operand 1 in `b d, d f -> b f` -> (5, 6). Dims that `...` stands for are called `_0`, `_1`,
    ... and not in the text: they have the span of `...`.
    """
    spans = text_spans(call.text)
    start, end = spans.layouts[operand]
    span_of_name: dict[str, tuple[int, int]] = {}
    for dim_name, span in spans.dims:
        if start <= span[0] < end:
            span_of_name.setdefault(dim_name, span)  # of a name that repeats, the first
    if name not in span_of_name:  # `_0`, `_1`, ...
        return span_of_name[ELLIPSIS]
    return span_of_name[name]


def for_operands(call: Contraction, shapes: Shapes) -> Contraction:
    """Replace `...` in a contraction by as many dims as these shapes need, and check their numbers.

    `... c, c d -> ... d` with shapes of 3 and 2 dims becomes `_0 _1 c, c d -> _0 _1 d`.

    Raises ShapeError unless there is one shape for each operand, with one length for each dim.
    """
    if len(shapes) != len(call.operands):
        reason = f"{len(shapes)} arrays for {len(call.operands)} operands"
        raise ShapeError(reason, text=call.text, hint="one array or shape per operand")
    call = call.resolved(map(len, shapes))
    # `arrays` has the result behind the operands, which has no shape yet: so zips are not strict here.
    for i, (layout, shape) in enumerate(zip(call.arrays, shapes, strict=False)):
        if len(shape) != len(layout.names):
            reason = f"an array of {len(shape)} dims, {tuple(shape)}, for '{layout}'"
            span = text_spans(call.text).layouts[i]
            raise ShapeError(reason, text=call.text, span=span, hint="one dim per name")
    return call


def global_lengths(
    call: Contraction, mesh: Mesh, block_shapes: Shapes, sizes: Sizes | None = None
) -> Shapes:
    """Infer the global lengths of all dims from the shapes of this device's blocks.

    `b d/tp, d f -> b f` on 4 devices with blocks (8, 3) and (12, 2): d is whole in the second
    operand, so it is 12 long. A dim that no operand holds whole is taken to have equal blocks: a
    block of 3 rows on 4 devices gives 12. Returns for every operand a length for each of its names.

    blocks: the local shape of each operand. sizes: lengths by name that are known. Raises
    ShapeError if they do not fit.
    """
    operands = list(zip(call.arrays, block_shapes, strict=False))
    whole_lengths: dict[str, int] = {}  # lengths that are known, by the names of a dim
    for layout, block_shape in operands:
        for dim, rows in zip(layout.dims, block_shape, strict=True):
            if not dim.shards:
                whole_lengths[str(names_of_dim(dim))] = rows
    # Given lengths count more: so an error marks the block that contradicts them.
    known_sizes = dict(sizes or ()) | _numbers_in(call.arrays)
    for layout in call.arrays:
        for names in map(names_of_dim, layout.dims):
            if known_sizes.keys() >= set(names):
                whole_lengths[str(names)] = math.prod(known_sizes[name] for name in names)
    shapes: list[tuple[int, ...]] = []
    for written_layout, block_shape in operands:
        layout = _with_units(written_layout, known_sizes)
        # `(h d)` in one array is as long as `(h d)` in another, whatever their shards.
        known_lengths = {
            dim.name: whole_lengths.get(str(names_of_dim(dim))) for dim in layout.dims if dim.shards
        }
        shapes.append(global_shape(layout, mesh, block_shape, call.text, known_lengths))
    return shapes_of(call, sizes, tuple(shapes))[1]


def written_shardings(
    call: Contraction, mesh: Mesh, shapes: Sequence[Sequence[int]]
) -> tuple[Sharding, ...]:
    """Return how operands and result are sharded, with composed dims as the text writes them.

    An operand `(b d)/tp` with b = 8 and d = 3 has one dim of 24 rows, cut between units of 3.

    shapes: for every operand, a length for each name, as (8, 3).
    """
    arrays = _written_arrays(call, shapes)
    return tuple(Sharding(layout, mesh, shape) for layout, shape in arrays)


def _written_arrays(
    call: Contraction, shapes: Sequence[Sequence[int]]
) -> list[tuple[Layout, tuple[int, ...]]]:
    """Return the layout and the shape of each array, with the units of composed dims."""
    lengths = dim_lengths(call.operands, shapes)
    arrays = []
    for layout in call.arrays:
        shape = []
        for dim in layout.dims:
            shape.append(math.prod(lengths[name] for name in names_of_dim(dim)))
        arrays.append((_with_units(layout, lengths), tuple(shape)))
    return arrays


def on_sub_axes(call: Contraction, mesh: Mesh, shapes: Shapes) -> tuple[Contraction, Mesh]:
    """Write a contraction without `spread`, over the sub-axes that it stands for.

    `b (h 4)/tp, h/spread(tp) -> ...` of 2 units on tp=8 is one over tp_0=2 and tp_1=4, in all its
    arrays, since an axis has one role in a contraction.

    Raises:
        PlanError: No mesh has the sub-axes of all arrays.
    """
    if not any(layout.spread_axes for layout in call.arrays):
        return call, mesh
    with mark_errors(call.text):
        arrays = [without_spread(*array, mesh) for array in _written_arrays(call, shapes)]
    fine_mesh: Mesh | None = mesh
    for _, split_mesh in arrays:
        fine_mesh = common_mesh(fine_mesh, split_mesh) if fine_mesh else None
    if fine_mesh is None:
        reason = "arrays spread units over groups that do not nest"
        raise PlanError(reason, text=call.text, hint=NEST_HINT)
    layouts = [
        factored(layout, axis_factors(split_mesh, fine_mesh)) for layout, split_mesh in arrays
    ]
    return Contraction.of(layouts, call.text), fine_mesh


def _with_units(layout: Layout, lengths: Mapping[str, int]) -> Layout:
    """Give composed dims their units: those of `(b d)/tp` with d = 3 are 3 rows."""
    dims = []
    for dim in layout.dims:
        inner_names = names_of_dim(dim)[1:]
        if inner_names and all(name in lengths for name in inner_names):
            dim = replace(dim, unit=math.prod(lengths[name] for name in inner_names))
        dims.append(dim)
    return replace(layout, dims=tuple(dims))


class BlockDim(NamedTuple):
    """A dim of a block once composed dims are split.

    is_picked: the block holds it whole although its name is sharded in another dim, as in the second
    dim of `i/tp i`.
    """

    name: str
    length: int
    is_picked: bool


def named_block(
    x: Any, layout: Layout, named: Sharding, block: Sequence[int], rows: Callable[[str], Any]
) -> Any:
    """Reshape a local block so that it has one dim for each name of a contraction.

    `(b d)` is split into b and d: [24] -> [8, 3]. Of `i i` the diagonal is taken: [4, 4] -> [4].
    The block may be numpy's, torch's or JAX's.

    Args:
        x: The block, under `layout`.
        layout: The layout of the array as the text writes it.
        named: The sharding of the array with one dim per name.
        block: The local shape under `named`.
        rows: A name -> the global numbers of this device's rows, to pick from a dim that `x` holds whole.

    Returns:
        The block under `named`.
    """
    dims = list(_split_dims(layout, named, block))
    names = [dim.name for dim in dims]
    if layout.names != tuple(names):
        x = x.reshape([dim.length for dim in dims])
    # In `i/tp i` the name i is sharded in one dim and whole in the other. Of the whole one, only
    # the rows that this device has in the sharded one are on its part of the diagonal.
    for dim_index, dim in enumerate(dims):
        if dim.is_picked:
            x = x[(slice(None),) * dim_index + (rows(dim.name),)]
    for name in named.layout.names:
        while names.count(name) > 1:
            first = names.index(name)
            second = names.index(name, first + 1)
            x = x.diagonal(0, first, second)
            # Both dims are gone, and the diagonal comes last.
            names.pop(second)
            names.pop(first)
            names.append(name)
    return x


def _split_dims(layout: Layout, named: Sharding, block: Sequence[int]) -> Iterator[BlockDim]:
    """Iterate over a block's dims after composed dims are split into names.

    `(b d)/tp` of b = 8, d = 3 on 4 devices: b of length 2, d of length 3.

    layout: of the array as the text writes it. named: its sharding with one dim per name. block:
    the local shape under `named`.
    """
    local_lengths = dict(zip(named.layout.names, block, strict=True))
    global_lengths = dict(zip(named.layout.names, named.shape, strict=True))
    for dim in layout.dims:
        for i, name in enumerate(names_of_dim(dim)):
            if dim.shards and i == 0:  # a composed dim is sharded by its first name
                yield BlockDim(name, local_lengths[name], is_picked=False)
            else:
                is_sharded_elsewhere = bool(named.layout.dim(name).shards)
                yield BlockDim(name, global_lengths[name], is_picked=is_sharded_elsewhere)
