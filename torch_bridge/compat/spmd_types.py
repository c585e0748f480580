"""Drop-in for `spmd_types.redistribute`, and layouts as types of spmd_types and back.

Per mesh axis, R is a copy (its gradients are addends), I a replica (they are equal), P an addend, S(i) a
shard along dim i, and V a value of each device, which is stacked. Types are objects of the package, or their
names: "R", "S(0)". Better here: blocks of different sizes, forward mode and derivatives of any order; a
layout moves along several axes at once, and has means, orders and halos, for which there are no types.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_bridge import dtensor
from torch_bridge.mesh.process_mesh import MeshLike, group_mesh, mesh_of
from torch_bridge.redistribution import redistribute as moved
from xshard import Layout, compat
from xshard.errors import PlanError
from xshard.layout.layout import check_axes
from xshard.notation.parser import Dim
from xshard.notation.parser import Shard as Cut
from xshard.ops import Shape

AXIS = "axis"
_TAGS = {"sum": "P", "copy": "R"}


def redistribute(
    x: Tensor,
    axis: Any,
    *,
    src: Any,
    dst: Any,
    op_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    async_op: bool = False,
    backward_options: Mapping[str, Any] | None = None,
    shape: Shape = None,
) -> Tensor:
    """A block of type `src` along an axis -> the block of type `dst`, with the gradient of those types.

    axis: a process group, None for all processes, or an axis of the current mesh of spmd_types. V on the
    left adds a leading dim as long as the axis; V on the right takes it away: [n, ...] -> [...]. op_dtype:
    dtype in which blocks travel and, without `out_dtype`, arrive; in `backward_options`, dtype in which
    gradients travel. async_op: accepted and not used. shape: the global shape, if shards differ in size. The
    checker of spmd_types takes it inside `no_typecheck(out_types=...)`.
    Raises XshardError for unknown types, ShapeError, MeshError.

    >>> import torch, torch_bridge as xt
    >>> from torch_bridge.compat import spmd_types
    >>> def turn():
    ...     x = torch.ones(2, requires_grad=True)
    ...     y = spmd_types.redistribute(x, None, src="S(0)", dst="R")
    ...     y.sum().backward()
    ...     return y.tolist(), x.grad.tolist()
    >>> xt.testing.run_ranks(2, turn)[0]
    ([1.0, 1.0, 1.0, 1.0], [2.0, 2.0])
    """
    if not isinstance(axis, dist.ProcessGroup | None):
        from spmd_types._mesh import _pg_for_axis

        axis = _pg_for_axis(axis)
    mesh = group_mesh(axis, AXIS)
    before = _name(src)
    after = _name(dst)
    text = compat.spmd_transition(before, after, tuple(x.shape), mesh_of(mesh).n_devices, AXIS)
    if text is not None:
        back = (backward_options or {}).get("op_dtype")
        travels = (op_dtype, back) if op_dtype or back else None
        x = moved(
            x.unsqueeze(0) if before == "V" else x, text, mesh, shape=shape, comm_dtype=travels
        )
        x = (x.squeeze(0) if after == "V" else x).to(out_dtype or op_dtype or x.dtype)
    return x


@contextmanager
def planned() -> Iterator[None]:
    """Inside, moves of spmd_types over several axes are one plan; moves over one axis remain its own.

    `spmd_types.redistribute(x, mesh, src=, dst=)` then also takes types of several axes, as `from_types`
    does, with the gradient of those types; `spmd_types.spmd_redistribute(x, src, dst)` plans all axes of a
    DTensor together, also for dims that several axes shard. Raises as `redistribute` and `from_types` do.

    >>> import spmd_types, torch, torch_bridge as xt
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch_bridge.compat.spmd_types import planned
    >>> def turn():
    ...     mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    ...     x = torch.full((1, 2), mesh.get_rank())
    ...     with planned():
    ...         y = spmd_types.redistribute(
    ...             x, mesh, src={"dp": "S(0)", "tp": "P"}, dst={"dp": "S(1)"}
    ...         )
    ...     return y.tolist()
    >>> xt.testing.run_ranks(2, turn)[0]
    [[0], [1]]
    """
    from spmd_types import _dtensor

    spmd_types: Any = sys.modules["spmd_types"]
    theirs = spmd_types.redistribute
    dtensors = _dtensor.spmd_redistribute

    def of_blocks(x: Any, axis: Any, *, src: Any, dst: Any, **options: Any) -> Any:
        if not isinstance(getattr(src, "local_type", src), Mapping):
            return theirs(x, axis, src=src, dst=dst, **options)
        return moved(x, " -> ".join(str(from_types(types, x.ndim)) for types in (src, dst)), axis)

    def of_dtensors(x: Any, src: Any, dst: Any) -> Any:
        layouts = (from_types({}, x.ndim, spec) for spec in (src, dst))
        before, after = (dtensor.to_placements(layout, x.device_mesh) for layout in layouts)
        changed = zip(x.placements, before, after, strict=True)
        return dtensor.redistribute(
            x, [now if one == other else other for now, one, other in changed]
        )

    spmd_types.redistribute = of_blocks
    spmd_types.spmd_redistribute = of_dtensors
    _dtensor.spmd_redistribute = of_dtensors
    try:
        yield
    finally:
        spmd_types.redistribute = theirs
        spmd_types.spmd_redistribute = dtensors
        _dtensor.spmd_redistribute = dtensors


def to_types(layout: Layout | str, mesh: MeshLike) -> Any:
    """A layout -> the `SpmdType` of its blocks: a type per axis of the mesh, and the axes of each dim.

    Raises PlanError for layouts without types: zigzag and other orders, sizes, overlaps, means, maxima.

    >>> from xshard import Mesh
    >>> to_types("s/cp c | sum(tp)", Mesh(dp=2, cp=2, tp=2))
    SpmdType(local_type={'dp': I, 'cp': V, 'tp': P}, partition_spec=PartitionSpec('cp', None))
    """
    from spmd_types import types

    layout = Layout.parse(layout)
    axes = mesh_of(mesh)
    check_axes(layout, axes)
    names: dict[str, str] = {}
    for dim in layout.dims:
        if dim.overlap is not None or any(cut.order != "block" for cut in dim.shards):
            raise PlanError(
                f"no type for '{dim}'", text=str(layout), hint="it has contiguous shards"
            )
        names |= dict.fromkeys(dim.axes, "V")
    for kind, tagged in layout.tags:
        if kind not in _TAGS:
            hint = f"P is a sum: end it first, as in {kind}(dp) ->"
            raise PlanError(
                f"no type for '{kind}({','.join(tagged)})'", text=str(layout), hint=hint
            )
        names |= dict.fromkeys(tagged, _TAGS[kind])
    entries = (dim.axes if len(dim.axes) > 1 else (*dim.axes, None)[0] for dim in layout.dims)
    kinds: Any = {name: getattr(types, names.get(name, "I")) for name in axes.axes}
    return types.SpmdType(kinds, types.PartitionSpec(*entries))


def from_types(types: Any, ndim: int, partition_spec: Sequence[Any] | None = None) -> Layout:
    """Types per axis, for an array of `ndim` dims -> the layout, its dims named d0, d1, ...

    types: an `SpmdType`, or a dict from an axis or its name to its type. partition_spec: the axes that shard
    each dim, as there. Raises PlanError for a V that does not shard a dim, and for two axes that shard the
    same dim in an unknown order.

    >>> str(from_types({"dp": "S(0)", "tp": "P", "cp": "R"}, 2))
    'd0/dp d1 | sum(tp) copy(cp)'
    >>> str(from_types({}, 2, [("dp", "tp")]))
    'd0/dp/tp d1'
    """
    kinds = {
        _axis_name(axis): _name(kind) for axis, kind in getattr(types, "local_type", types).items()
    }
    spec = getattr(types, "partition_spec", partition_spec) or ()
    if len(spec) > ndim:
        raise PlanError(f"{spec!r} shards {len(spec)} dims, the array has {ndim}")
    cuts = [
        [_axis_name(axis) for axis in (e if isinstance(e, tuple) else (e,)) if axis] for e in spec
    ]
    cuts += [[] for _ in range(ndim - len(spec))]
    cutting = {name for names in cuts for name in names}
    for name, kind in kinds.items():
        if (d := None if name in cutting else compat.spmd_cut(kind)) is None:
            continue
        if kind == "V" or not -ndim <= d < ndim:
            raise PlanError(
                f"{kind} of axis '{name}' does not shard a dim", hint="S(0), or a partition_spec"
            )
        if cuts[d]:
            other = cuts[d][-1]
            hint = f'a partition_spec has it, as in PartitionSpec(("{other}", "{name}"))'
            raise PlanError(f"'{other}' and '{name}' shard dim {d} in an unknown order", hint=hint)
        cuts[d].append(name)
    dims = tuple(
        Dim(f"d{d}", tuple(Cut((name,)) for name in names)) for d, names in enumerate(cuts)
    )
    tagged = {
        tag: tuple(name for name in kinds if kinds[name] == kind) for tag, kind in _TAGS.items()
    }
    return Layout(dims, tuple((tag, names) for tag, names in tagged.items() if names))


def _name(type_: Any) -> str:
    return type_ if isinstance(type_, str) else repr(type_)


def _axis_name(axis: Any) -> str:
    """The name of an axis of the current mesh of spmd_types."""
    if isinstance(axis, str):
        return axis
    from spmd_types._state import current_mesh_all_names
    from spmd_types.types import normalize_axis

    axis = normalize_axis(axis)
    names = current_mesh_all_names() or {}
    name = next((name for name, named in names.items() if named == axis), None)
    if name is None:
        raise PlanError(
            f"{axis!r} is not in the current mesh", hint="use it inside set_current_mesh(mesh)"
        )
    return name
