"""Drop-in for `spmd_types.redistribute`, and layouts as types of spmd_types and back.

Per mesh axis, R is a copy (its gradients are addends), I a replica (they are equal), P an addend,
S(i) a shard along dim i, and V a value of each device, which is stacked. Types are objects of the
package, or their names: "R", "S(0)". Better here: blocks of different sizes, forward mode and
derivatives of any order; a layout moves along several axes at once, and has means, orders and
halos, for which there are no types.
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
from xshard.errors import PlanError, api_boundary
from xshard.layout.layout import check_axes
from xshard.notation.parser import Dim, is_plain
from xshard.notation.parser import Shard as Cut
from xshard.ops import Shape

AXIS = "axis"
_TYPE_OF_TAG = {"sum": "P", "copy": "R"}


@api_boundary
def redistribute(  # noqa: PLR0913  the original's arguments, and the global shape
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
    """Move a block from type `src` along an axis to type `dst`, with the gradient of those types.

    "S(0)" -> "R": [n/p, ...] -> [n, ...]. V on the left adds a leading dim as long as the axis; V
    on the right takes it away: [n, ...] -> [...]. The checker of spmd_types takes this function
    inside `no_typecheck(out_types=...)`.

    Args:
        x: This process's block.
        axis: A process group, None for all processes, or an axis of the current mesh of spmd_types.
        src: The type of the block.
        dst: The type of the result.
        op_dtype: The dtype in which blocks travel and, without `out_dtype`, arrive.
        out_dtype: The dtype of the result.
        async_op: Accepted and not used.
        backward_options: Its `op_dtype` is the dtype in which gradients travel.
        shape: The global shape, if shards differ in size.

    Raises:
        XshardError: A type is unknown.
        ShapeError: The shape does not fit the types.
        MeshError: As for `xt.redistribute`.

    Examples:
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
    if not isinstance(axis, dist.ProcessGroup | None):  # an axis of the current mesh
        from spmd_types._mesh import _pg_for_axis  # spmd_types has a private name for it alone

        axis = _pg_for_axis(axis)
    mesh = group_mesh(axis, AXIS)
    src_type = _type_name(src)
    dst_type = _type_name(dst)
    n_devices = mesh_of(mesh).n_devices
    text = compat.spmd_transition(src_type, dst_type, tuple(x.shape), n_devices, AXIS)
    if text is None:  # the types have the same blocks and gradients
        return x
    backward_dtype = None if backward_options is None else backward_options.get("op_dtype")
    comm_dtype = (op_dtype, backward_dtype) if op_dtype or backward_dtype else None
    # A value of each device is a row of a stacked array.
    if src_type == "V":
        x = x.unsqueeze(0)
    y = moved(x, text, mesh, shape=shape, comm_dtype=comm_dtype)
    if dst_type == "V":
        y = y.squeeze(0)
    return y.to(out_dtype or op_dtype or y.dtype)


@contextmanager
def planned() -> Iterator[None]:
    """Let the package spmd_types redistribute over several mesh axes in one move, inside a `with`.

    Two functions of the package are replaced by ours, until the `with` block ends:

    - `spmd_types.redistribute(x, mesh, src=, dst=)` takes types of several axes, too, such as
      {"dp": "S(0)", "tp": "P"}. Moves over one axis remain the package's own.
    - `spmd_types.spmd_redistribute(x, src, dst)` plans all axes of a DTensor together, also for dims
      that several axes shard.

    Raises:
        XshardError: Inside, by these functions: types without a layout, or a layout without a plan.

    Examples:
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

    # Not `import spmd_types`, which is this module.
    spmd_types: Any = sys.modules["spmd_types"]
    their_redistribute = spmd_types.redistribute
    their_spmd_redistribute = _dtensor.spmd_redistribute

    def redistribute_blocks(x: Any, axis: Any, *, src: Any, dst: Any, **options: Any) -> Any:
        has_types_of_axes = isinstance(getattr(src, "local_type", src), Mapping)
        if not has_types_of_axes:
            return their_redistribute(x, axis, src=src, dst=dst, **options)
        return moved(x, f"{from_types(src, x.ndim)} -> {from_types(dst, x.ndim)}", axis)

    spmd_types.redistribute = redistribute_blocks
    # The package and its module have the function each under a name of their own.
    spmd_types.spmd_redistribute = _redistribute_dtensor
    _dtensor.spmd_redistribute = _redistribute_dtensor
    try:
        yield
    finally:
        spmd_types.redistribute = their_redistribute
        spmd_types.spmd_redistribute = their_spmd_redistribute
        _dtensor.spmd_redistribute = their_spmd_redistribute


def _redistribute_dtensor(x: Any, src: Any, dst: Any) -> Any:
    """Move a DTensor between two partition specs, all axes together.

    The specs say nothing of addends: where they do not differ, the DTensor's own placement stays.
    """
    placements = list(x.placements)
    src_placements = dtensor.to_placements(from_types({}, x.ndim, src), x.device_mesh)
    dst_placements = dtensor.to_placements(from_types({}, x.ndim, dst), x.device_mesh)
    for i, target in enumerate(dst_placements):
        if target != src_placements[i]:
            placements[i] = target
    return dtensor.redistribute(x, placements)


@api_boundary
def to_types(layout: Layout | str, mesh: MeshLike) -> Any:
    """Convert a layout to an `SpmdType` of the package spmd_types.

    "s/cp c | sum(tp)" -> {"cp": V, "tp": P} and PartitionSpec("cp", None): a type for each mesh axis,
    and the axes that shard each dim. The types of an axis are

    - V (varying): it shards a dim.
    - P (partial): blocks along it are addends of a sum.
    - I (invariant): blocks along it are equal, and so are their gradients.
    - R (replicated): blocks along it are equal, and their gradients are summed ("copy").

    Args:
        layout: A layout or its text.
        mesh: A `DeviceMesh` with named dims, or an `xshard.Mesh`.

    Raises:
        PlanError: A layout has no types: zigzag and other orders, sizes, overlaps, means, maxima.

    Examples:
        >>> from xshard import Mesh
        >>> to_types("s/cp c | sum(tp)", Mesh(dp=2, cp=2, tp=2))
        SpmdType(local_type={'dp': I, 'cp': V, 'tp': P}, partition_spec=PartitionSpec('cp', None))
    """
    from spmd_types import types

    layout = Layout.parse(layout)
    axes = mesh_of(mesh)
    check_axes(layout, axes)
    # Axes that the layout does not name hold replicas.
    type_names = dict.fromkeys(axes.axes, "I")
    spec_entries = []  # for each dim, as in a PartitionSpec: None, one axis, or a tuple of axes
    for dim in layout.dims:
        if dim.overlap is not None or not is_plain(dim):
            hint = "it has contiguous shards"
            raise PlanError(f"no type for '{dim}'", text=str(layout), hint=hint)
        type_names |= dict.fromkeys(dim.axes, "V")
        entry: Any = dim.axes
        if len(dim.axes) <= 1:
            entry = dim.axes[0] if dim.axes else None
        spec_entries.append(entry)
    for kind, tagged_axes in layout.tags:
        if kind not in _TYPE_OF_TAG:
            hint = f"P is a sum: end it first, as in {kind}(dp) ->"
            reason = f"no type for '{kind}({','.join(tagged_axes)})'"
            raise PlanError(reason, text=str(layout), hint=hint)
        type_names |= dict.fromkeys(tagged_axes, _TYPE_OF_TAG[kind])
    type_of_axis: Any = {axis: getattr(types, type_names[axis]) for axis in axes.axes}
    return types.SpmdType(type_of_axis, types.PartitionSpec(*spec_entries))


@api_boundary
def from_types(types: Any, ndim: int, partition_spec: Sequence[Any] | None = None) -> Layout:
    """Convert types of the package spmd_types, one per mesh axis, to a layout.

    Its dims are named d0, d1, ... {"dp": "S(0)", "tp": "P"} for 2 dims -> "d0/dp d1 | sum(tp)":
    S(0) shards dim 0, and P is an addend of a sum.

    Args:
        types: An `SpmdType`, or a dict from an axis or its name to its type.
        ndim: The number of dims of the array.
        partition_spec: The axes that shard each dim, as in an `SpmdType`.

    Raises:
        PlanError: A V does not shard a dim, or two axes shard the same dim in an unknown order.

    Examples:
        >>> str(from_types({"dp": "S(0)", "tp": "P", "cp": "R"}, 2))
        'd0/dp d1 | sum(tp) copy(cp)'
        >>> str(from_types({}, 2, [("dp", "tp")]))
        'd0/dp/tp d1'
    """
    type_of_axis = {}
    for axis, kind in getattr(types, "local_type", types).items():
        type_of_axis[_axis_name(axis)] = _type_name(kind)
    spec = getattr(types, "partition_spec", partition_spec) or ()
    axes_of_dims = _axes_of_dims(spec, ndim)
    # Types V only say that an axis shards some dim: the spec says which one. S(0) says it itself.
    sharding_axes = {axis for axes in axes_of_dims for axis in axes}
    for axis, kind in type_of_axis.items():
        if axis not in sharding_axes:
            _add_shard(axes_of_dims, axis, kind)
    dims = []
    for d, axes in enumerate(axes_of_dims):
        dims.append(Dim(f"d{d}", tuple(Cut((axis,)) for axis in axes)))
    tags = []
    for tag, tagged_kind in _TYPE_OF_TAG.items():
        tagged_axes = tuple(axis for axis, kind in type_of_axis.items() if kind == tagged_kind)
        if tagged_axes:
            tags.append((tag, tagged_axes))
    return Layout(tuple(dims), tuple(tags))


def _axes_of_dims(spec: Sequence[Any], ndim: int) -> list[list[str]]:
    """Return the names of the axes that shard each dim: ["dp", None] of 3 dims -> [["dp"], [], []].

    Raises PlanError for a spec of more dims than the array has.
    """
    if len(spec) > ndim:
        raise PlanError(f"{spec!r} shards {len(spec)} dims, the array has {ndim}")
    axes_of_dims: list[list[str]] = [[] for _ in range(ndim)]
    for names, entry in zip(axes_of_dims, spec, strict=False):
        axes = entry if isinstance(entry, tuple) else (entry,)
        names.extend(_axis_name(axis) for axis in axes if axis)
    return axes_of_dims


def _add_shard(axes_of_dims: list[list[str]], axis: str, kind: str) -> None:
    """Append a mesh axis to the axes of the dim that its type shards, in `axes_of_dims`.

    "dp" of type S(0): [[], []] -> [["dp"], []]. S(-1) shards the last dim; R, I and P shard none,
    and nothing changes. Raises PlanError for V, which does not say what dim it shards, and for a
    dim that another axis shards too, as types do not say which one cuts first.
    """
    d = compat.spmd_cut(kind)
    if d is None:  # R, I or P
        return
    ndim = len(axes_of_dims)
    if kind == "V" or not -ndim <= d < ndim:
        hint = "S(0), or a partition_spec"
        raise PlanError(f"{kind} of axis '{axis}' does not shard a dim", hint=hint)
    if axes_of_dims[d]:
        other = axes_of_dims[d][-1]
        hint = f'a partition_spec has it, as in PartitionSpec(("{other}", "{axis}"))'
        raise PlanError(f"'{other}' and '{axis}' shard dim {d} in an unknown order", hint=hint)
    axes_of_dims[d].append(axis)


def _type_name(type_: Any) -> str:
    """Return the name of a type: its text, as in S(0)."""
    return type_ if isinstance(type_, str) else repr(type_)


def _axis_name(axis: Any) -> str:
    """Return the name of a mesh axis: a name, an axis object or a process group of spmd_types.

    An axis object or a process group is looked up in the mesh that spmd_types is used with now,
    `set_current_mesh`. Raises PlanError if it is not there.
    """
    if isinstance(axis, str):
        return axis
    # The names of the current mesh are in a private module of the package.
    from spmd_types._state import current_mesh_all_names
    from spmd_types.types import normalize_axis

    axis = normalize_axis(axis)
    names = current_mesh_all_names() or {}
    for name, named_axis in names.items():
        if named_axis == axis:
            return name
    hint = "use it inside set_current_mesh(mesh)"
    raise PlanError(f"{axis!r} is not in the current mesh", hint=hint)
