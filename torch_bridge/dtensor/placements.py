"""Layouts <-> the placements of a DTensor.

Decides which layouts a DTensor can have, and which layout its placements mean. `Replicate` is read
as replicas, and written for replicas and for copies: a DTensor keeps the difference with its gradient,
not in its placements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Size, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torch_bridge.mesh.process_mesh import MeshLike, mesh_of
from xshard import Layout, Mesh, NotationError, PlanError, Sharding
from xshard.layout.layout import NONLINEAR, check_axes
from xshard.notation.parser import Dim, text_spans
from xshard.notation.parser import Shard as Cut
from xshard.steps.base import without_tags

# Reductions under their two names.
_REDUCTIONS = {"sum": "sum", "mean": "avg", "max": "max", "min": "min"}
_TAGS = {theirs: ours for ours, theirs in _REDUCTIONS.items()}


def to_placements(
    layout: Layout | str, mesh: MeshLike, shape: Sequence[int] | None = None
) -> tuple[Placement, ...]:
    """A layout -> DTensor placements, one per mesh axis.

    shape: the global shape; needed for cuts such as `n/(dp,tp)`, which are nested cuts only if blocks are
    even. A nesting that is not in mesh order becomes `_StridedShard`.
    Raises PlanError for layouts that a DTensor cannot have (zigzag, cyclic, halo, ...).

    >>> to_placements("n/tp/dp d", Mesh(dp=2, tp=4))
    (_StridedShard(dim=0, sf=4), Shard(dim=0))
    >>> to_placements("n/dp d | sum(tp)", Mesh(dp=2, tp=4))
    (Shard(dim=0), Partial(sum))
    """
    layout, axes = Layout.parse(layout), mesh_of(mesh)
    if shape is not None:
        layout = layout.resolved(len(shape))
    check_axes(layout, axes)
    found: dict[str, Placement] = {}
    for d in range(len(layout.dims)):
        nested = _nested(layout, d, axes, shape)
        for i, axis in enumerate(nested):
            # Axes that cut the dim before this one does, though they come later in the mesh.
            before = [a for a in nested[:i] if axes.position(a) > axes.position(axis)]
            factor = axes.size(*before)
            found[axis] = _StridedShard(d, split_factor=factor) if factor > 1 else Shard(d)
    for kind, tagged in layout.tags:
        if kind != "copy":
            found.update((axis, Partial(_REDUCTIONS[kind])) for axis in tagged)
    return tuple(found.get(axis, Replicate()) for axis in axes.axes)


def from_placements(placements: Sequence[Placement], mesh: MeshLike, ndim: int) -> Layout:
    """DTensor placements for an array of `ndim` dims -> the layout, its dims named d0, d1, ...

    Raises PlanError for placements that are no layout.

    >>> str(from_placements([Shard(0), Partial()], Mesh(dp=2, tp=4), 2))
    'd0/dp d1 | sum(tp)'
    """
    axes = mesh_of(mesh)
    if len(placements) != len(axes.axes):
        raise PlanError(f"{len(placements)} placements for {axes!r}", hint="one placement per mesh axis")
    orders: list[list[str]] = [[] for _ in range(ndim)]
    tags: dict[str, list[str]] = {}
    # Backwards: a strided shard counts the axes after it in the mesh.
    for axis, placement in reversed(list(zip(axes.axes, placements, strict=True))):
        if isinstance(placement, Shard | _StridedShard):
            order = orders[placement.dim]
            factor = getattr(placement, "split_factor", 1)
            ends = [i for i in range(len(order) + 1) if axes.size(*order[:i]) == factor]
            if not ends:
                raise PlanError(f"{placement} of axis '{axis}' is no nesting of cuts in {tuple(placements)}")
            order.insert(ends[0], axis)
        elif (tag := tag_of(placement)) is not None:
            tags.setdefault(tag, []).append(axis)
        elif not isinstance(placement, Replicate):
            raise PlanError(
                f"{placement!r} of axis '{axis}' is no layout",
                hint=f"partials: {', '.join(_TAGS)}; another DTensor.redistribute to Replicate() ends it",
            )
    dims = tuple(Dim(f"d{d}", tuple(Cut((a,)) for a in order)) for d, order in enumerate(orders))
    return Layout(dims, tuple((kind, tuple(tagged)) for kind, tagged in tags.items()))


def tag_of(placement: Placement) -> str | None:
    """The tag of a `Partial`; None for its subclasses, which hold more than addends, and for the rest."""
    return _TAGS.get(placement.reduce_op) if type(placement) is Partial else None


def check_placed(x: DTensor, layout: Layout, text: str) -> None:
    """Raise NotationError unless a DTensor is placed as `layout` says.

    text: the user's expression, whose left side is `layout`.
    """
    mesh, shape = mesh_of(x.device_mesh), tuple(x.shape)
    want = Sharding(layout, mesh, shape)
    found = from_placements(x.placements, mesh, x.ndim)
    named = tuple(replace(dim, name=name) for dim, name in zip(found.dims, want.layout.names, strict=True))
    have = Sharding(replace(found, dims=named), mesh, shape)
    uncopied = want.with_layout(without_tags(want.layout, want.layout.tagged("copy")))
    if not have.means_the_same_as(uncopied) or have.scale != want.scale:
        raise NotationError(
            f"the DTensor is placed as '{have.layout}'",
            text=text,
            span=(0, len(text.partition("->")[0].rstrip())),
            hint=f"its placements are {x.placements} on {mesh!r}",
        )


def local_of(x: DTensor, layout: Layout, text: str) -> Tensor:
    """A DTensor -> its local block; the gradient has the dual of `layout`. Raises as `check_placed` does."""
    check_placed(x, layout, text)
    gradient = to_placements(layout_of_gradient(layout), x.device_mesh, tuple(x.shape))
    return x.to_local(grad_placements=gradient)


def as_dtensor(local: Tensor, layout: Layout, mesh: DeviceMesh, shape: Sequence[int]) -> DTensor:
    """A local block under `layout` -> the DTensor of global `shape`."""
    options: dict[str, Any] = {}
    if layout.tagged("copy"):  # gradients of copies are partial; a DTensor assumes `Replicate`
        options["grad_placements"] = to_placements(layout_of_gradient(layout), mesh, shape)
    return dtensor_of(local, mesh, to_placements(layout, mesh, shape), shape, **options)


def dtensor_of(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], **options: Any
) -> DTensor:
    """A local block -> the contiguous DTensor of global `shape`. options: as in `from_local`."""
    stride = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    return DTensor.from_local(local, mesh, placements, shape=Size(shape), stride=stride, **options)


def positional(layout: Layout, ndim: int) -> Layout:
    """The layout with the dim names of `from_placements`: d0, d1, ..."""
    dims = layout.resolved(ndim).dims
    return replace(layout, dims=tuple(replace(dim, name=f"d{d}") for d, dim in enumerate(dims)))


def layout_of_gradient(layout: Layout) -> Layout:
    """The layout of a block's gradient: the dual, where the operands of a max or min count as addends."""
    return with_sums(layout).dual


def with_sums(layout: Layout) -> Layout:
    """The layout with the tags of a max or min replaced by those of a sum."""
    return replace(
        layout, tags=tuple(("sum" if kind in NONLINEAR else kind, axes) for kind, axes in layout.tags)
    )


def _nested(layout: Layout, d: int, mesh: Mesh, shape: Sequence[int] | None) -> tuple[str, ...]:
    """The axes that cut a dim, nested. Raises PlanError for cuts that a DTensor cannot have."""
    dim = layout.dims[d]
    normal = dim
    if shape is not None and any(len(cut.axes) > 1 or cut.order != "block" for cut in dim.shards):
        normal = Sharding(layout, mesh, tuple(shape)).normal.dims[d]
    axes = normal.axes
    if normal.overlap is not None or any(len(cut.axes) > 1 or cut.order != "block" for cut in normal.shards):
        hint = "its placements are nested contiguous cuts"
        if shape is None:
            hint += "; pass shape= where blocks are even"
    elif shape is not None and len(axes) > 2 and shape[d] % mesh.size(*axes) and _strided(axes, mesh):
        hint = "over three axes or more that are not in mesh order, it cuts uneven dims in another way"
    else:
        return axes
    text = str(layout)
    span = next((span for name, span in text_spans(text).dims if name == dim.name), None)
    raise PlanError(f"a DTensor cannot hold '{dim}'", text=text, span=span, hint=hint)


def _strided(axes: Sequence[str], mesh: Mesh) -> bool:
    return list(axes) != sorted(axes, key=mesh.position)
