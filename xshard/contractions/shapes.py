"""The shapes of operands, given or inferred from blocks, and contractions with one dim per name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from xshard.arguments import as_whole_number, lengths_of, short_repr
from xshard.caches import layout_cache
from xshard.contractions.expression import Contraction
from xshard.contractions.placements import dim_lengths
from xshard.errors import ShapeError
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.lengths import global_shape
from xshard.notation.parser import ELLIPSIS, Dim, names_of_dim, text_spans

Shapes = tuple[tuple[int, ...], ...]
Sizes = tuple[tuple[str, int], ...]  # lengths by name


def checked_lengths(sizes: Any, shape: Any) -> tuple[Sizes | None, Shapes | None]:
    """Check lengths by name, and shapes, as users write them, and return them as tuples of ints.

    {"b": 8} -> (("b", 8),); [(8, 4), (4,)] or one shape (8, 4) -> ((8, 4), ...). Raises ShapeError.
    """
    if sizes is not None:
        if not isinstance(sizes, Mapping):
            raise ShapeError(
                f"sizes {short_repr(sizes)}", hint='lengths by name, as in sizes={"b": 8}'
            )
        lengths = []
        for name, length in sizes.items():
            lengths.append((name, _length(f"dim {name!r} in sizes", length)))
        sizes = tuple(lengths)
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


def _length(what: str, value: Any) -> int:
    """Return a length as an int. Raises ShapeError unless it is a whole number >= 0."""
    length = as_whole_number(value)
    if length is None or length < 0:
        raise ShapeError(f"{what} has {short_repr(value)}", hint="a length is a whole number >= 0")
    return length


class GivenDim(NamedTuple):
    """A dim of an array as the text writes it, and the length that the array's shape gives it."""

    operand: int
    dim: Dim
    names: list[str]  # of its parts: b and d of `(b d)`
    length: int


def _number_of_names(given: GivenDim) -> int:
    return len(given.names)


@layout_cache(maxsize=4096)
def shapes_of(
    call: Contraction, sizes: Sizes | None, shapes: Shapes | None
) -> tuple[Contraction, Shapes]:
    """Return the contraction without `...`, and for every operand a length for each name.

    sizes: lengths by name; shapes: all global shapes, of arrays as the text writes them. One of both is
    given. Raises ShapeError if they do not fit the text, or each other.
    """
    if (sizes is None) == (shapes is None):
        raise _not_one_of_both(call, has_sizes=sizes is not None)
    if shapes is None:
        return call, _shapes_from_sizes(call, dict(sizes or ()))
    call = for_operands(call, shapes)
    lengths: dict[str, int] = {}
    # Dims of one name first: they tell the parts of composed dims, as b and d in `(b d)`.
    for given in sorted(_given_dims(call, shapes), key=_number_of_names):
        _learn_length(given, lengths, call)
    return call, _lengths_by_name(call, lengths)


def _lengths_by_name(call: Contraction, lengths: Mapping[str, int]) -> Shapes:
    """Return for every operand a length for each of its names."""
    shapes = []
    for layout in call.operands:
        shapes.append(tuple(lengths[name] for name in layout.names))
    return tuple(shapes)


def _not_one_of_both(call: Contraction, *, has_sizes: bool) -> ShapeError:
    """Return the error for a contraction with sizes and shapes, or with neither."""
    what = "sizes and shapes" if has_sizes else "no shapes"
    names: list[str] = []
    for layout in call.operands:
        names += layout.names
    example = names[0] if names else "b"
    hint = f'sizes={{"{example}": 8, ...}}, or shape=[(8, ...), ...] with one shape per operand'
    return ShapeError(what, text=call.text, hint=hint)


def _given_dims(call: Contraction, shapes: Shapes) -> list[GivenDim]:
    """Return all dims of the operands as the text writes them, with their lengths."""
    dims = []
    for i, (array, shape) in enumerate(zip(call.arrays, shapes, strict=False)):
        for dim, length in zip(array.dims, shape, strict=True):
            dims.append(GivenDim(i, dim, names_of_dim(dim), length))
    return dims


def _learn_length(given: GivenDim, lengths: dict[str, int], call: Contraction) -> None:
    """Add the length of a name to `lengths` that a dim tells, or check it against the known ones.

    A composed dim tells the last unknown part: `(b d)` of 12 with b = 3 gives d = 4. Raises ShapeError.
    """
    names = given.names
    unknown = set(names) - lengths.keys()  # of a name that repeats, as in `(i i)`, once
    known_length = math.prod(lengths.get(name, 1) for name in names)  # of the parts that are known
    # A dim of 0 rows tells nothing about the other parts.
    if len(unknown) == 1 and known_length and given.length % known_length == 0:
        lengths[unknown.pop()] = given.length // known_length
        return
    if not unknown and known_length == given.length:
        return
    known_parts = [f"{name}={lengths[name]}" for name in names if name in lengths]
    elsewhere = " and ".join(known_parts) if known_parts else "no part is known"
    raise ShapeError(
        f"dim '{' '.join(names)}' is {given.length} long, elsewhere {elsewhere}",
        text=call.text,
        span=_dim_span(call, given.operand, given.dim.name),
        hint="a name stands for one length; sizes= says all of them",
    )


def _shapes_from_sizes(call: Contraction, sizes: Mapping[str, int]) -> Shapes:
    """Return the shape of each operand. Raises ShapeError for a name too few or too many."""
    known_names = set[str]()
    for i, layout in enumerate(call.operands):
        for name in layout.names:
            known_names.add(name)
            if name not in sizes:
                raise _no_length(call, i, name, sizes)
    for name in sizes:
        if name not in known_names:
            hint = f"dims are: {', '.join(sorted(known_names))}"
            raise ShapeError(f"sizes has dim {name!r}", text=call.text, hint=hint)
    return _lengths_by_name(call, sizes)


def _no_length(call: Contraction, operand: int, name: str, sizes: Mapping[str, int]) -> ShapeError:
    """Return the error for a dim of an operand without a length in `sizes`."""
    if name == ELLIPSIS:
        hint = "pass shape= with one shape per operand"
    else:
        hint = "sizes has: " + ", ".join(f"{key}={value}" for key, value in sizes.items())
    what = f"sizes has no length for dim {name!r}"
    return ShapeError(what, text=call.text, span=_dim_span(call, operand, name), hint=hint)


def _dim_span(call: Contraction, operand: int, name: str) -> tuple[int, int]:
    """Return the place of an operand's dim in the text: of `...` for the dims that it stands for."""
    spans = text_spans(call.text)
    start, end = spans.layouts[operand]
    places: dict[str, tuple[int, int]] = {}
    for dim_name, span in spans.dims:
        if start <= span[0] < end:
            places.setdefault(dim_name, span)  # of a name that repeats, the first
    if name not in places:  # `_0`, `_1`, ...
        return places[ELLIPSIS]
    return places[name]


def for_operands(call: Contraction, shapes: Shapes) -> Contraction:
    """Return the contraction of arrays of these shapes: `...` becomes so many dims.

    Raises ShapeError unless each operand has a shape, with its dims.
    """
    if len(shapes) != len(call.operands):
        what = f"{len(shapes)} arrays for {len(call.operands)} operands"
        raise ShapeError(what, text=call.text, hint="one array or shape per operand")
    call = call.resolved(map(len, shapes))
    # `arrays` has the result behind the operands, which has no shape yet: so zips are not strict here.
    for i, (layout, shape) in enumerate(zip(call.arrays, shapes, strict=False)):
        if len(shape) != len(layout.names):
            what = f"an array of {len(shape)} dims, {tuple(shape)}, for '{layout}'"
            span = text_spans(call.text).layouts[i]
            raise ShapeError(what, text=call.text, span=span, hint="one dim per name")
    return call


def global_lengths(call: Contraction, mesh: Mesh, blocks: Shapes) -> Shapes:
    """Return the global lengths of every operand's names, by the shapes of this device's blocks.

    A dim is as long as in an operand that holds it unsharded; else its blocks are taken to be equal.
    Raises ShapeError.
    """
    operands = list(zip(call.arrays, blocks, strict=False))
    unsharded: dict[str, int] = {}
    for layout, block in operands:
        for dim, rows in zip(layout.dims, block, strict=True):
            if not dim.shards:
                unsharded[str(names_of_dim(dim))] = rows
    shapes = list[tuple[int, ...]]()
    for layout, block in operands:
        # `(h d)` in one array is as long as `(h d)` in another, whatever their shards.
        known = {
            dim.name: unsharded.get(str(names_of_dim(dim))) for dim in layout.dims if dim.shards
        }
        shapes.append(global_shape(layout, mesh, block, call.text, known))
    return shapes_of(call, None, tuple(shapes))[1]


def written_shardings(
    call: Contraction, mesh: Mesh, shapes: Sequence[Sequence[int]]
) -> tuple[Sharding, ...]:
    """Return the shardings of operands and result as the text writes them.

    shapes: for every operand, the lengths of its names. Raises ShapeError if blocks of a composed dim end
    within a row of its first name.
    """
    lengths = dim_lengths(call.operands, shapes)
    arrays = list[Sharding]()
    for layout in call.arrays:
        shape = []
        for dim in layout.dims:
            _check_composed(dim, lengths, mesh)
            shape.append(math.prod(lengths[name] for name in names_of_dim(dim)))
        arrays.append(Sharding(layout, mesh, tuple(shape)))
    return tuple(arrays)


def _check_composed(dim: Dim, lengths: Mapping[str, int], mesh: Mesh) -> None:
    """Raise ShapeError unless blocks of a composed dim hold whole rows of its first name."""
    first, *others = names_of_dim(dim)
    if not others:
        return
    n_blocks = mesh.size(*dim.axes)
    for shard in dim.shards:
        if shard.order == "zigzag":  # two pieces for each device
            n_blocks *= 2
    # Rows by numbers, or in turn, are rows of the composed dim, and end anywhere.
    is_special = any(shard.numbers or shard.order == "cyclic" for shard in dim.shards)
    if is_special or lengths[first] % n_blocks:
        what = f"blocks may end within a row of {first!r}, which is {lengths[first]} long"
        hint = "it takes equal parts or zigzags of these rows"
        raise ShapeError(what, text=str(dim), hint=hint)


class BlockDims(NamedTuple):
    """The dims of a block once composed dims are split: names, lengths, and dims to pick rows in."""

    names: list[str]
    lengths: list[int]
    picked: list[int]


def named_block(
    x: Any, layout: Layout, named: Sharding, block: Sequence[int], rows: Callable[[str], Any]
) -> Any:
    """Bring a block (numpy, torch or JAX) from the dims of the text into one dim per name.

    `(b d)` is split into b and d; of `i i` the diagonal is taken.

    Args:
        x: The block, under `layout`.
        layout: The layout of the array as the text writes it.
        named: The sharding of the array with one dim per name.
        block: The local shape under `named`.
        rows: A name -> the global numbers of this device's rows, to pick from a dim that `x` holds whole.

    Returns:
        The block under `named`.
    """
    dims = _split_dims(layout, named, block)
    names = dims.names
    if layout.names != tuple(names):
        x = x.reshape(dims.lengths)
    # A name that is sharded in one dim and whole in another: only the rows of both count.
    for d in dims.picked:
        x = x[(slice(None),) * d + (rows(names[d]),)]
    for name in named.layout.names:
        while names.count(name) > 1:
            first = names.index(name)
            second = names.index(name, first + 1)
            x = x.diagonal(0, first, second)
            # The diagonal comes last.
            names = [*names[:first], *names[first + 1 : second], *names[second + 1 :], name]
    return x


def _split_dims(layout: Layout, named: Sharding, block: Sequence[int]) -> BlockDims:
    """Return the dims of a block under `layout` once composed dims are split; arguments as above."""
    local_lengths = dict(zip(named.layout.names, block, strict=True))
    global_lengths = dict(zip(named.layout.names, named.shape, strict=True))
    dims = BlockDims([], [], [])
    for dim in layout.dims:
        for i, name in enumerate(names_of_dim(dim)):
            # A composed dim is sharded by its first name.
            is_local = bool(dim.shards) and i == 0
            if named.layout.dim(name).shards and not is_local:
                dims.picked.append(len(dims.names))  # the name is sharded in another dim
            dims.names.append(name)
            lengths = local_lengths if is_local else global_lengths
            dims.lengths.append(lengths[name])
    return dims
