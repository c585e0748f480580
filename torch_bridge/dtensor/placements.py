"""Layouts to and from the placements of a DTensor.

Replicas and copies are both `Replicate`; they differ in gradients. A `_StridedShard` of factor f
gives each device a share of f pieces of a dim; that is also what later mesh axes do when they cut
the dim first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Size, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torch_bridge.mesh.process_mesh import MeshLike, mesh_of
from torch_bridge.versions.dtensor import StridedShard
from xshard import Layout, Mesh, Sharding
from xshard.arguments import lengths_of
from xshard.errors import MeshError, NotationError, PlanError, ShapeError, Span, api_boundary
from xshard.layout.layout import check_axes
from xshard.layout.partition import ceil_div
from xshard.layout.runs import (
    Run,
    Runs,
    count_rows,
    interval,
    interval_pairs,
    merge_adjacent,
    rows_at_positions,
)
from xshard.notation.parser import INTERVALS, Dim, is_plain, text_spans
from xshard.notation.parser import Shard as Cut
from xshard.plans.max_min import with_kind
from xshard.signatures import Length
from xshard.steps.base import without_tags

# The tags of layouts -> the reductions of torch.
_REDUCTIONS = {"sum": "sum", "mean": "avg", "max": "max", "min": "min"}
_TAGS = {reduction: tag for tag, reduction in _REDUCTIONS.items()}
# The axes that cut a dim -> their split factors, in the order of the mesh.
Factors = Mapping[str, int]


@api_boundary
def to_placements(
    layout: Layout | str, mesh: MeshLike, shape: Sequence[int] | None = None
) -> tuple[Placement, ...]:
    """Convert a layout to DTensor placements, one per mesh axis.

    "n/dp d" on a mesh (dp=2, tp=4) -> (Shard(0), Replicate()). Two cases become torch's
    `_StridedShard`: axes that cut one dim in another order than the mesh has them ("n/tp/dp"), and
    rows dealt out in turn ("n/cyclic(tp,2)": 2 rows to each device, then again).

    Args:
        layout: A layout or its text.
        mesh: A `DeviceMesh` with named dims, or an `xshard.Mesh`.
        shape: The global shape. It is needed for cuts that a DTensor makes of some lengths only,
            such as `n/(dp,tp)` of an even one.

    Raises:
        PlanError: A DTensor cannot have this layout (zigzag, halo, ...).

    Examples:
        >>> to_placements("n/tp/dp d", Mesh(dp=2, tp=4))
        (_StridedShard(dim=0, sf=4), Shard(dim=0))
        >>> to_placements("n/dp d | sum(tp)", Mesh(dp=2, tp=4))
        (Shard(dim=0), Partial(sum))
        >>> to_placements("n/cyclic(tp,2) d", Mesh(tp=4), (16, 3))
        (_StridedShard(dim=0, sf=2),)
    """
    layout = Layout.parse(layout)
    axes = mesh_of(mesh)
    if shape is not None:
        layout = layout.resolved(len(shape))
    check_axes(layout, axes)
    # Axes that the layout does not name hold replicas. So do "copy" axes: DTensor does not say
    # whether the gradients of replicas are to be summed.
    placements: dict[str, Placement] = dict.fromkeys(axes.axes, Replicate())
    for d in range(len(layout.dims)):
        for axis, factor in _split_factors(layout, d, axes, shape).items():
            placements[axis] = StridedShard(d, split_factor=factor) if factor > 1 else Shard(d)
    for tag, tagged_axes in layout.tags:
        if tag != "copy":
            placements |= dict.fromkeys(tagged_axes, Partial(_REDUCTIONS[tag]))
    return tuple(placements[axis] for axis in axes.axes)


@api_boundary
def from_placements(
    placements: Sequence[Placement],
    mesh: MeshLike,
    ndim: Length,
    shape: Sequence[int] | None = None,
) -> Layout:
    """Convert DTensor placements to a layout, its dims named d0, d1, ...

    (Shard(0), Replicate()) on a mesh (dp=2, tp=4), for 2 dims -> "d0/dp d1".

    Args:
        placements: One per mesh axis.
        mesh: A `DeviceMesh` with named dims, or an `xshard.Mesh`.
        ndim: The number of dims of the array.
        shape: The global shape. It is needed for a `_StridedShard` that deals rows out in turn, as
            `flatten` makes; one that cuts after a later axis of the mesh is read without it.

    Raises:
        PlanError: The placements are no layout.

    Examples:
        >>> str(from_placements([Shard(0), Partial()], Mesh(dp=2, tp=4), 2))
        'd0/dp d1 | sum(tp)'
        >>> from torch.distributed.tensor.placement_types import _StridedShard
        >>> str(from_placements([_StridedShard(0, split_factor=2)], Mesh(tp=4), 2, (16, 3)))
        'd0/cyclic(tp,2) d1'
    """
    axes = mesh_of(mesh)
    if len(placements) != len(axes.axes):
        raise PlanError(
            f"{len(placements)} placements for {axes!r}", hint="one placement per mesh axis"
        )
    # For each dim {axis: split factor}: into how many pieces a placement divides the dim before it
    # gives each device a share of every piece; 1 for a plain `Shard`.
    factors_by_dim: list[dict[str, int]] = [{} for _ in range(ndim)]
    tags: dict[str, tuple[str, ...]] = {}
    for axis, placement in zip(axes.axes, placements, strict=True):
        tag = tag_of(placement)
        if isinstance(placement, Shard | StridedShard):
            factor = int(getattr(placement, "split_factor", 1))
            if axes.size(axis) == 1:
                factor = 1  # one device has all pieces
            factors_by_dim[placement.dim][axis] = factor
        elif tag is not None:
            tags[tag] = (*tags.get(tag, ()), axis)
        elif not isinstance(placement, Replicate):
            hint = (
                f"partials: {', '.join(_TAGS)}; another DTensor.redistribute to Replicate() ends it"
            )
            raise PlanError(f"{placement!r} of axis '{axis}' has no layout", hint=hint)
    dims = []
    for d, factors in enumerate(factors_by_dim):
        length = None if shape is None else shape[d]
        cuts = cuts_of(factors, axes, length)
        if cuts is None:
            hint = "pass shape="
            if length is not None:
                hint = f"torch reads them in two ways for {length} rows"
            reason = f"the split factors of {tuple(placements)} are not a nesting of cuts"
            raise PlanError(reason, hint=hint)
        dims.append(Dim(f"d{d}", cuts))
    return Layout(tuple(dims), tuple(tags.items()))


def tag_of(placement: Placement) -> str | None:
    """Return the tag of a `Partial`; None for all other placements.

    Subclasses of `Partial` hold more than addends, so they have no tag either.
    """
    return _TAGS.get(placement.reduce_op) if type(placement) is Partial else None


def check_placed(x: DTensor, layout: Layout, text: str, span: Span | None = None) -> None:
    """Raise NotationError unless a DTensor is placed as a layout says.

    "n/dp d" on a mesh (dp=2, tp=4) asks for (Shard(0), Replicate()), or for other placements that
    give each device the same rows.

    Args:
        x: The DTensor.
        layout: A side of the user's expression.
        text: The expression, which the error shows.
        span: Start and end of the part that the error marks; None: all before the arrow.
    """
    mesh = mesh_of(x.device_mesh)
    shape = tuple(x.shape)
    stated = Sharding(layout, mesh, shape)
    inferred = from_placements(x.placements, mesh, x.ndim, shape)
    # What the placements say, with the names of dims that the user wrote.
    placed = Sharding(inferred.with_names(stated.layout.names), mesh, shape)
    # "copy" says that gradients of replicas are to be summed. Placements cannot say that: it is left
    # out of the comparison.
    uncopied = stated.with_layout(without_tags(stated.layout, stated.layout.tagged("copy")))
    if placed.means_the_same_as(uncopied) and placed.scale == stated.scale:
        return
    if not span:
        span = (0, len(text.partition("->")[0].rstrip()))
    reason = f"the DTensor is placed as '{placed.layout}'"
    hint = f"its placements are {x.placements} on {mesh!r}"
    raise NotationError(reason, text=text, span=span, hint=hint)


def local_block_under(x: DTensor, layout: Layout, text: str, span: Span | None = None) -> Tensor:
    """Return the local block of a DTensor; its gradient has the dual of `layout`.

    Raises as `check_placed` does.
    """
    check_placed(x, layout, text, span)
    gradient = to_placements(gradient_layout(layout), x.device_mesh, tuple(x.shape))
    return x.to_local(grad_placements=gradient)


def dtensor_of(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """Return the contiguous DTensor of global `shape` that has this local block."""
    stride = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    return DTensor.from_local(local, mesh, placements, shape=Size(shape), stride=tuple(stride))


def positional(layout: Layout, ndim: int) -> Layout:
    """Return the layout with the dim names of `from_placements`: d0, d1, ..."""
    return layout.resolved(ndim).with_names([f"d{d}" for d in range(ndim)])


def gradient_layout(layout: Layout) -> Layout:
    """Return the layout of a block's gradient: the dual.

    Operands of a max or min count as addends: one of them gets the gradient.
    """
    return with_kind(layout, "sum").dual


def checked_global_shape(
    x: DTensor, mesh: Any, shape: Sequence[int] | None, name: str = "the mesh"
) -> tuple[int, ...]:
    """Return a DTensor's global shape, after checking the mesh and the shape that a user passed.

    A DTensor has both: the user may leave them out (None). Raises MeshError or ShapeError if they
    are not the DTensor's.

    Args:
        x: The DTensor.
        mesh: The mesh that the user passed.
        shape: The shape that the user passed.
        name: The name of the argument for the mesh, for the error's hint.
    """
    if mesh not in (None, x.device_mesh):
        reason = f"the DTensor is on {x.device_mesh!r}, not on {mesh!r}"
        raise MeshError(reason, hint=f"leave {name} out")
    actual = tuple(x.shape)
    if shape is not None:
        passed_shape = lengths_of(shape)
        if passed_shape != actual:
            reason = f"the DTensor has shape {actual}, not {passed_shape}"
            raise ShapeError(reason, hint="leave shape out")
    return actual


def _split_factors(
    layout: Layout, d: int, mesh: Mesh, shape: Sequence[int] | None
) -> dict[str, int]:
    """Return the mesh axes that cut dim number `d`, each with the split factor of its placement.

    `_StridedShard` first makes as many pieces as its split factor says, and then gives each device a
    share of every piece; the factor 1 is an ordinary `Shard`. "n/tp/dp" with tp=4 ->
    {"tp": 1, "dp": 4}.

    Raises PlanError for cuts that no DTensor has, such as zigzag.

    Args:
        layout: The layout.
        d: The index of the dim.
        mesh: The mesh.
        shape: The global shape; None: unknown.
    """
    dim = layout.dims[d]
    # The same cut in its simplest form: balanced parts of 8 rows on 4 devices are 2 rows each, so
    # that for this length they are ordinary blocks.
    simplest = dim
    if shape is not None and not _is_nesting(dim):
        simplest = Sharding(layout, mesh, tuple(shape)).normal_layout.dims[d]
    length = None if shape is None else shape[d]
    if set(simplest.axes) <= set(mesh.axes):  # and not sub-axes, for which `spread` stands
        factors = factors_of(simplest, mesh, length)
        if factors is not None:
            return factors
    text = str(layout)
    spans_by_dim = dict(text_spans(text).dims)
    hint = _hint_of_unplaceable(dim, simplest, has_shape=shape is not None)
    reason = f"a DTensor cannot hold '{dim}'"
    raise PlanError(reason, text=text, span=spans_by_dim.get(dim.name), hint=hint)


def _hint_of_unplaceable(dim: Dim, normal: Dim, *, has_shape: bool) -> str:
    """Return what a DTensor can hold instead of a dim.

    Args:
        dim: The dim as the user wrote it.
        normal: The dim in the form for its length.
        has_shape: Whether its length is known.
    """
    orders = {cut.order for cut in normal.shards}
    hint = "its placements cut into contiguous parts, or deal out rows in turn"
    if dim.overlap is not None:
        return hint
    if has_shape and dim.spread_axes:
        return "devices share its units: xt.state_dict has it whole, xt.save writes each unit once"
    if not has_shape and "zigzag" not in orders:
        return f"{hint}; pass shape=, which may make it one of them"
    if has_shape and orders == {"block"}:
        return "over axes that are not in mesh order, it cuts uneven dims in another way"
    return hint


def _is_nesting(dim: Dim) -> bool:
    """Return whether axes cut a dim into contiguous blocks one after the other, as in `n/tp/dp`."""
    return is_plain(dim) and all(len(cut.axes) == 1 for cut in dim.shards)


def cuts_of(factors: Factors, mesh: Mesh, length: int | None) -> tuple[Cut, ...] | None:
    """Return the cuts of a layout that mean the same as DTensor placements of one dim.

    A placement `_StridedShard(split_factor=f)` divides the dim into f pieces, and gives each device
    of its axis a share of every piece. A layout can say that in two ways:

    - Nested: another axis makes the pieces. {"dp": 4, "tp": 1} with tp=4 -> "n/tp/dp".
    - Dealt out in turn: {"tp": 2} with tp=4 and 16 rows -> "n/cyclic(tp,2)", 2 rows to each device,
      then again. If pieces differ in length, the layout lists the rows of each device.

    Returns None if a nesting is all that could be known, and there is none; or if both ways exist
    and differ for this length, as torch itself uses both.

    Args:
        factors: The split factor of each axis that cuts the dim, 1 for a `Shard`, in mesh order.
        mesh: The mesh.
        length: The length of the dim; None: unknown.
    """
    nested_cuts = _nested_cuts(factors, mesh)
    # A plain `Shard` has the factor 1.
    if length is None or set(factors.values()) <= {1}:
        return nested_cuts
    dealt_cuts = _dealt_cuts(factors, mesh, length)
    if dealt_cuts is not None:  # pieces have equal lengths: then both ways give the same rows
        return dealt_cuts if nested_cuts is None else nested_cuts
    # Unequal pieces: compute the rows of each device as torch does, on the axes that cut the dim.
    submesh = Mesh({axis: mesh.size(axis) for axis in factors})
    devices = range(submesh.n_devices)
    rows_by_device = [_rows_of_device(length, factors, submesh, device) for device in devices]
    if nested_cuts is None:
        return (Cut(submesh.axes, INTERVALS, tuple(map(_interval_ends, rows_by_device))),)
    nested_sharding = _sharding_of_dim(nested_cuts, submesh, length)
    is_one_meaning = rows_by_device == [nested_sharding.owned(0, device) for device in devices]
    return nested_cuts if is_one_meaning else None


def _nested_cuts(factors: Factors, mesh: Mesh) -> tuple[Cut, ...] | None:
    """Find an order in which axes cut a dim one after the other, so that it has these factors.

    {"dp": 4, "tp": 1}, in mesh order, on dp=2, tp=4 -> "n/tp/dp". dp has the factor 4: it finds 4
    pieces, so that tp, which comes later in the mesh, must cut before it. With tp=2 no axis makes 4
    pieces, and the result is None.
    """
    # Axes in the order in which they cut. The last axis of the mesh is placed first; each earlier
    # one goes behind just those axes that make the pieces it needs.
    cutting_order: list[str] = []
    for axis, factor in reversed(list(factors.items())):
        # How many pieces the first 0, 1, 2, ... axes of the order make: their positions.
        n_pieces = [1]
        for earlier_axis in cutting_order:
            n_pieces.append(n_pieces[-1] * mesh.size(earlier_axis))
        if factor not in n_pieces:
            return None
        cutting_order.insert(n_pieces.index(factor), axis)
    return tuple(Cut((axis,)) for axis in cutting_order)


def _dealt_cuts(factors: Factors, mesh: Mesh, length: int) -> tuple[Cut, ...] | None:
    """Return "cyclic" cuts that mean these split factors; None if a device's shares are not equal.

    An axis with the factor f divides the rows into f pieces, and gives each of its devices an equal
    share of every piece. {"tp": 2} on tp=4: 16 rows are 2 pieces of 8, and each device gets 2 rows
    of both, which is "cyclic(tp,2)". The factor 1 makes plain blocks.

    Args:
        factors: The split factor of each axis, in mesh order: later axes cut what earlier ones left.
        mesh: The mesh.
        length: The length of the dim.
    """
    cuts = []
    rows_of_device = length  # after the cuts so far
    for axis, n_pieces in factors.items():
        n_shares = n_pieces * mesh.size(axis)
        share_rows, remainder = divmod(rows_of_device, n_shares)
        if remainder:
            return None
        if n_pieces > 1 and share_rows:  # without rows any cut is the same
            cuts.append(Cut((axis,), "cyclic", (share_rows,)))
        else:
            cuts.append(Cut((axis,)))
        rows_of_device //= mesh.size(axis)
    return tuple(cuts)


def factors_of(dim: Dim, mesh: Mesh, length: int | None) -> dict[str, int] | None:
    """Return the split factors of the DTensor placements that cut a dim as a layout says.

    `_StridedShard` first makes as many pieces as its split factor says, and then gives each device a
    share of every piece; the factor 1 is an ordinary `Shard`. "n/tp/dp" with tp=4 ->
    {"tp": 1, "dp": 4}. Returns None if no placements give each device these rows.

    Args:
        dim: The dim, of a layout in its simplest form.
        mesh: The mesh.
        length: The length of the dim. None: unknown; then only a nesting, whose axes cut one after
            the other into contiguous blocks, has factors.
    """
    is_nesting = _is_nesting(dim)
    if dim.overlap is not None or (length is None and not is_nesting):
        return None
    factors = _wanted_factors(dim, mesh, length)
    is_plain = all(factor <= 1 for factor in factors.values())
    if length is None or (is_nesting and is_plain):
        return factors
    # Convert the factors back to cuts, as torch would make them. For a length that does not divide
    # evenly these may be other rows than the layout's: then no placements are right.
    in_mesh_order = {axis: factors[axis] for axis in mesh.axes if axis in factors}
    made_cuts = cuts_of(in_mesh_order, mesh, length)
    if made_cuts is None:
        return None
    wanted_rows = _sharding_of_dim(dim.shards, mesh, length)
    is_same = _sharding_of_dim(made_cuts, mesh, length).means_the_same_as(wanted_rows)
    return factors if is_same else None


def _wanted_factors(dim: Dim, mesh: Mesh, length: int | None) -> dict[str, int]:
    """Compute the split factors that DTensor placements need for the cuts of a dim.

    On a mesh (dp=2, tp=4), "n/tp/dp" means: tp cuts into 4 pieces, then dp halves each of them. But
    torch applies placements in mesh order, dp first. So dp gets the factor 4: its `_StridedShard`
    makes 4 pieces, and takes half of each; tp then takes one of the four: {"tp": 1, "dp": 4}.
    Whether torch then gives each device the same rows is not checked.

    Args:
        dim: The dim.
        mesh: The mesh.
        length: The length of the dim, or None.
    """
    factors: dict[str, int] = {}
    n_rows = length  # of the largest block, after the cuts so far
    for cut in dim.shards:
        # A "cyclic" cut deals out several pieces by itself: 16 rows, 2 at a time, on 4 devices: 2.
        n_pieces = _n_pieces(cut, mesh, n_rows)
        for axis in cut.axes:
            position = mesh.position(axis)
            # Those that cut before this axis, and to which torch comes only after it.
            later_in_mesh = [
                earlier_cut for earlier_cut in factors if mesh.position(earlier_cut) > position
            ]
            factors[axis] = n_pieces * mesh.size(*later_in_mesh)
        if n_rows is not None:
            n_rows = ceil_div(n_rows, mesh.size(*cut.axes))
    return factors


def _sharding_of_dim(cuts: tuple[Cut, ...], mesh: Mesh, length: int) -> Sharding:
    """Return the sharding of an array of one dim that is cut so."""
    return Sharding(Layout((Dim("d", cuts),)), mesh, (length,))


def _n_pieces(cut: Cut, mesh: Mesh, length: int | None) -> int:
    """Count the pieces of a dim of which each device gets a share: "cyclic(tp,2)" of 16 rows -> 2.

    1 for a cut into contiguous blocks.

    Args:
        cut: The cut.
        mesh: The mesh.
        length: The length of what is cut; None: unknown.
    """
    if length is not None and cut.order == "cyclic":
        piece_rows = 1
        if cut.numbers:
            piece_rows = int(cut.numbers[0])  # type: ignore[arg-type]  # only intervals have pairs
        return max(length // (piece_rows * mesh.size(*cut.axes)), 1)
    if cut.order == INTERVALS:
        return len(interval_pairs(cut.numbers[0]))
    return 1


def _interval_ends(runs: Runs) -> tuple[int, ...]:
    """Return the start and the end of each run, in one list: rows 0-2 and 6-7 -> (0, 3, 6, 8)."""
    starts_and_stops: list[int] = []
    for run in runs:
        starts_and_stops += [run.start, run.start + run.length]
    if not starts_and_stops:  # a device without rows
        return (0, 0)
    return tuple(starts_and_stops)


def _rows_of_device(length: int, factors: Factors, mesh: Mesh, device: int) -> Runs:
    """Compute the rows of a device as torch does for these split factors, one axis after the other.

    Each axis divides the rows that are left into `factor` pieces, and keeps the device's share of
    every piece, both as `torch.chunk` does: {"tp": 2} on tp=4, 16 rows, device 0 -> rows 0-1, 8-9.
    """
    runs = interval(0, length)
    for (axis, factor), coordinate in zip(factors.items(), mesh.coords(device), strict=True):
        shares = _shares(count_rows(runs), mesh.size(axis), factor, coordinate)
        runs = tuple(
            itertools.chain.from_iterable(rows_at_positions(runs, share) for share in shares)
        )
    return merge_adjacent(runs)


def _shares(length: int, n_devices: int, n_pieces: int, coordinate: int) -> Iterator[Run]:
    """Yield a device's share of each of `n_pieces` pieces of a dim, as runs of rows.

    8 rows in 2 pieces for 4 devices, coordinate 1 -> rows 1 and 5. Sizes are rounded up, so that the
    last pieces and shares may be empty.
    """
    piece_rows = max(ceil_div(length, n_pieces), 1)
    for start in range(0, length, piece_rows):
        stop = min(start + piece_rows, length)
        # Rounded up, as `torch.chunk` does.
        share_rows = ceil_div(stop - start, n_devices)
        share_start = start + coordinate * share_rows
        yield from interval(min(share_start, stop), min(share_start + share_rows, stop))
