"""Layouts <-> the placements of a DTensor. Replicas and copies are `Replicate`, and differ in gradients. A
`_StridedShard` of factor f gives each device a share of f pieces, or means that later mesh axes cut first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Size, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torch_bridge.mesh.process_mesh import MeshLike, mesh_of
from xshard import Layout, Mesh, Sharding
from xshard.arguments import lengths_of
from xshard.errors import MeshError, NotationError, PlanError, ShapeError, Span
from xshard.layout.layout import check_axes
from xshard.layout.runs import Run, Runs, interval, interval_pairs, merge_adjacent, n_rows, select
from xshard.notation.parser import INTERVALS, Dim, text_spans
from xshard.notation.parser import Shard as Cut
from xshard.plans.max_min import with_kind
from xshard.steps.base import without_tags

# Reductions under their two names.
_REDUCTIONS = {"sum": "sum", "mean": "avg", "max": "max", "min": "min"}
_TAGS = {theirs: ours for ours, theirs in _REDUCTIONS.items()}


def to_placements(
    layout: Layout | str, mesh: MeshLike, shape: Sequence[int] | None = None
) -> tuple[Placement, ...]:
    """A layout -> DTensor placements, one per mesh axis.

    shape: the global shape; needed for cuts that a DTensor makes of some lengths only, such as `n/(dp,tp)` of
    an even one. A nesting that is not in mesh order, and rows dealt out in turn, become `_StridedShard`.
    Raises PlanError for layouts that a DTensor cannot have (zigzag, halo, ...).

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
    placements: dict[str, Placement] = {}
    for d in range(len(layout.dims)):
        for axis, factor in _split_factors(layout, d, axes, shape).items():
            placements[axis] = _StridedShard(d, split_factor=factor) if factor > 1 else Shard(d)
    for kind, tagged in layout.tags:
        if kind != "copy":
            placements.update((axis, Partial(_REDUCTIONS[kind])) for axis in tagged)
    return tuple(placements.get(axis, Replicate()) for axis in axes.axes)


def from_placements(
    placements: Sequence[Placement], mesh: MeshLike, ndim: int, shape: Sequence[int] | None = None
) -> Layout:
    """DTensor placements for an array of `ndim` dims -> the layout, its dims named d0, d1, ...

    shape: the global shape; needed for a `_StridedShard` that is no nesting of cuts, as `flatten` makes.
    Raises PlanError for placements that are no layout.

    >>> str(from_placements([Shard(0), Partial()], Mesh(dp=2, tp=4), 2))
    'd0/dp d1 | sum(tp)'
    >>> str(from_placements([_StridedShard(0, split_factor=2)], Mesh(tp=4), 2, (16, 3)))
    'd0/cyclic(tp,2) d1'
    """
    axes = mesh_of(mesh)
    if len(placements) != len(axes.axes):
        raise PlanError(
            f"{len(placements)} placements for {axes!r}", hint="one placement per mesh axis"
        )
    factors: list[dict[str, int]] = [{} for _ in range(ndim)]
    tags: dict[str, list[str]] = {}
    for axis, placement in zip(axes.axes, placements, strict=True):
        if isinstance(placement, Shard | _StridedShard):
            factor = getattr(placement, "split_factor", 1)
            factors[placement.dim][axis] = int(factor) if axes.size(axis) > 1 else 1
        elif (tag := tag_of(placement)) is not None:
            tags.setdefault(tag, []).append(axis)
        elif not isinstance(placement, Replicate):
            hint = (
                f"partials: {', '.join(_TAGS)}; another DTensor.redistribute to Replicate() ends it"
            )
            raise PlanError(f"{placement!r} of axis '{axis}' has no layout", hint=hint)
    dims = []
    for d, by_axis in enumerate(factors):
        cuts = cuts_of(by_axis, axes, None if shape is None else shape[d])
        if cuts is None:
            hint = (
                "pass shape="
                if shape is None
                else f"torch reads them in two ways for {shape[d]} rows"
            )
            raise PlanError(
                f"the split factors of {tuple(placements)} are not a nesting of cuts", hint=hint
            )
        dims.append(Dim(f"d{d}", cuts))
    return Layout(tuple(dims), tuple((kind, tuple(tagged)) for kind, tagged in tags.items()))


def tag_of(placement: Placement) -> str | None:
    """The tag of a `Partial`; None for its subclasses, which hold more than addends, and for the rest."""
    return _TAGS.get(placement.reduce_op) if type(placement) is Partial else None


def check_placed(x: DTensor, layout: Layout, text: str, span: Span | None = None) -> None:
    """Raise NotationError, at `span` or the left side, unless a DTensor is placed as `layout` says."""
    mesh = mesh_of(x.device_mesh)
    shape = tuple(x.shape)
    want = Sharding(layout, mesh, shape)
    have = Sharding(
        from_placements(x.placements, mesh, x.ndim, shape).named(want.layout.names), mesh, shape
    )
    uncopied = want.with_layout(without_tags(want.layout, want.layout.tagged("copy")))
    if not have.means_the_same_as(uncopied) or have.scale != want.scale:
        hint = f"its placements are {x.placements} on {mesh!r}"
        span = span or (0, len(text.partition("->")[0].rstrip()))
        raise NotationError(
            f"the DTensor is placed as '{have.layout}'", text=text, span=span, hint=hint
        )


def local_of(x: DTensor, layout: Layout, text: str, span: Span | None = None) -> Tensor:
    """A DTensor -> its local block; the gradient has the dual of `layout`. Raises as `check_placed` does."""
    check_placed(x, layout, text, span)
    return x.to_local(
        grad_placements=to_placements(gradient_layout(layout), x.device_mesh, tuple(x.shape))
    )


def dtensor_of(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """A local block -> the contiguous DTensor of global `shape`."""
    stride = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    return DTensor.from_local(local, mesh, placements, shape=Size(shape), stride=stride)


def positional(layout: Layout, ndim: int) -> Layout:
    """The layout with the dim names of `from_placements`: d0, d1, ..."""
    dims = layout.resolved(ndim).dims
    return replace(layout, dims=dims).named([f"d{d}" for d in range(len(dims))])


def gradient_layout(layout: Layout) -> Layout:
    """The layout of a block's gradient: the dual, with the operands of a max or min as addends."""
    return with_kind(layout, "sum").dual


def whole_of(
    x: DTensor, mesh: Any, shape: Sequence[int] | None, name: str = "the mesh"
) -> tuple[int, ...]:
    """The global shape of a DTensor. Raises MeshError, ShapeError for another mesh or shape than it has."""
    if mesh not in (None, x.device_mesh):
        raise MeshError(
            f"the DTensor is on {x.device_mesh!r}, not on {mesh!r}", hint=f"leave {name} out"
        )
    own = tuple(x.shape)
    if shape is not None and (asked := lengths_of(shape)) != own:
        raise ShapeError(f"the DTensor has shape {own}, not {asked}", hint="leave shape out")
    return own


def _split_factors(
    layout: Layout, d: int, mesh: Mesh, shape: Sequence[int] | None
) -> dict[str, int]:
    """The axes that cut a dim, with their split factors. Raises PlanError for cuts that no DTensor has."""
    dim = normal = layout.dims[d]
    if shape is not None and any(len(cut.axes) > 1 or cut.order != "block" for cut in dim.shards):
        normal = Sharding(layout, mesh, tuple(shape)).normal.dims[d]
    factors = factors_of(normal, mesh, None if shape is None else shape[d])
    if factors is not None:
        return factors
    text = str(layout)
    span = next((span for name, span in text_spans(text).dims if name == dim.name), None)
    hint = "its placements cut into contiguous parts, or deal out rows in turn"
    orders = {cut.order for cut in normal.shards}
    if dim.overlap is None and shape is None and "zigzag" not in orders:
        hint += "; pass shape=, which may make it one of them"
    elif dim.overlap is None and shape is not None and orders == {"block"}:
        hint = "over axes that are not in mesh order, it cuts uneven dims in another way"
    raise PlanError(f"a DTensor cannot hold '{dim}'", text=text, span=span, hint=hint)


Factors = Mapping[
    str, int
]  # an axis that cuts the dim -> its split factor, in the order of the mesh


def cuts_of(factors: Factors, mesh: Mesh, length: int | None) -> tuple[Cut, ...] | None:
    """Split factors -> the cuts of a dim. None if they are no nesting and the length is unknown, or if torch
    itself reads them in two ways: as an order of axes, and as pieces of an uneven length.
    """
    order = _nesting(factors, mesh)
    nested = None if order is None else tuple(Cut((axis,)) for axis in order)
    if length is None or order == [*factors]:
        return nested
    strided = []
    left = length
    for axis, factor in factors.items():
        n = mesh.size(axis)
        rows, rest = divmod(left, factor * n)
        if rest:
            return _uneven(factors, mesh, length, order)
        strided.append(Cut((axis,), "cyclic", (rows,)) if factor > 1 and rows else Cut((axis,)))
        left //= n
    return nested or tuple(strided)


def factors_of(dim: Dim, mesh: Mesh, length: int | None) -> dict[str, int] | None:
    """The cuts of a dim, in normal form unless nested -> the split factors that make them, or None."""
    plain = all(cut.order == "block" and len(cut.axes) == 1 for cut in dim.shards)
    if dim.overlap is not None or (length is None and not plain):
        return None
    factors: dict[str, int] = {}
    left = length
    for cut in dim.shards:
        pieces = 1
        if left is not None and cut.order == "cyclic":
            rows = int(cut.numbers[0]) if cut.numbers else 1  # type: ignore[arg-type]
            pieces = max(left // (rows * mesh.size(*cut.axes)), 1)
        elif cut.order == INTERVALS:
            pieces = len(interval_pairs(cut.numbers[0]))
        for axis in cut.axes:
            # Axes that cut the dim before this one does, though they come later in the mesh.
            earlier = (a for a in factors if mesh.position(a) > mesh.position(axis))
            factors[axis] = pieces * mesh.size(*earlier)
        left = None if left is None else -(-left // mesh.size(*cut.axes))
    if length is None or (plain and not any(factor > 1 for factor in factors.values())):
        return factors
    cuts = cuts_of(
        {axis: factors[axis] for axis in sorted(factors, key=mesh.position)}, mesh, length
    )

    def sharding(cuts: tuple[Cut, ...]) -> Sharding:
        return Sharding(Layout((Dim(dim.name, cuts),)), mesh, (length,))

    return (
        factors
        if cuts is not None and sharding(cuts).means_the_same_as(sharding(dim.shards))
        else None
    )


def _nesting(factors: Factors, mesh: Mesh) -> list[str] | None:
    """The order of the axes if each factor is the number of parts that later axes of the mesh make first."""
    order: list[str] = []
    for axis, factor in reversed([*factors.items()]):
        positions = [i for i in range(len(order) + 1) if mesh.size(*order[:i]) == factor]
        if not positions:
            return None
        order.insert(positions[0], axis)
    return order


def _uneven(
    factors: Factors, mesh: Mesh, length: int, order: Sequence[str] | None
) -> tuple[Cut, ...] | None:
    """As `cuts_of`, for pieces or shares of different sizes."""
    part = Mesh({axis: mesh.size(axis) for axis in factors})
    held = [_rows(length, factors, part, device) for device in range(part.n_devices)]
    if order is None:
        intervals = [
            tuple(e for run in runs for e in (run.start, run.start + run.length)) for runs in held
        ]
        return (Cut(part.axes, INTERVALS, tuple(numbers or (0, 0) for numbers in intervals)),)
    nested = tuple(Cut((axis,)) for axis in order)
    blocks = Sharding(Layout((Dim("_", nested),)), part, (length,))
    return nested if held == [blocks.owned(0, device) for device in range(part.n_devices)] else None


def _rows(length: int, factors: Factors, mesh: Mesh, device: int) -> Runs:
    """The rows of one device, cut as `_StridedShard` cuts: chunks of chunks, as `torch.chunk` makes them."""
    runs = interval(0, length)
    for (axis, factor), coordinate in zip(factors.items(), mesh.coords(device), strict=True):
        shares = [*_shares(n_rows(runs), mesh.size(axis), factor, coordinate)]
        runs = tuple(itertools.chain.from_iterable(select(runs, share) for share in shares))
    return merge_adjacent(runs)


def _shares(length: int, n: int, factor: int, coordinate: int) -> Iterator[Run]:
    piece = max(-(-length // factor), 1)
    for start in range(0, length, piece):
        stop = min(start + piece, length)
        share = -(-(stop - start) // n)
        first = start + coordinate * share
        yield from interval(min(first, stop), min(first + share, stop))
