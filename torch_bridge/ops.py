"""What users call: `redistribute`, and its common cases by the names they have elsewhere.

Decides how a tensor and an expression become a plan, and what is refused before anything is
sent. First comes what all processes see alike (expression, mesh, dtype, `shape=`), so that all
of them raise or none; then the local block, whose shape only its own process knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torch_bridge.autograd import Redistribute
from torch_bridge.dtensor import as_dtensor, local_of, to_placements
from torch_bridge.groups import MeshLike, ProcessMesh, process_mesh
from torch_bridge.lower import Executable, lower
from xshard import (
    DtypeError,
    Layout,
    MeshError,
    Plan,
    Profile,
    ShapeError,
    Sharding,
    XshardError,
    dtypes,
    load_profile,
    notation,
    parse_expression,
    planner,
)
from xshard.layout import check_axes

Expression = str | tuple[Layout | str, Layout | str] | Plan
Axes = str | tuple[str, ...]
Grad = Literal["sum", "replicated"]


def redistribute(
    x: Tensor,
    expression: Expression,
    mesh: MeshLike | None = None,
    *,
    shape: Sequence[int] | None = None,
    profile: str | Path | Profile = "h100",
) -> Tensor:
    """This process's block under the left layout -> its block under the right one, differentiable.

    All processes of the mesh call it, with equal arguments but for the values of `x`, and with
    equal `requires_grad`. The result is a new tensor; `x` is left as it is.

    expression: `"layout -> layout"`, a pair of layouts, or a plan (whose dtype `x` must have). Axes
    that the layouts do not name are left alone: blocks may differ along them. A plan is
    carried out as it is.
    mesh: a `DeviceMesh` with named dims, or an `xshard.Mesh` over the world; a DTensor brings its own.
    shape: the global shape, where blocks differ in size. Without it every block is taken to be
    as large as `x`: where that is not so, processes plan differently and nobody can tell in time.
    profile: the machine it is planned for.
    A DTensor must be placed as the left layout says, and the result is a DTensor.

    Raises, before anything is sent, MeshError, NotationError, DtypeError, PlanError, LinearityError
    (a gradient that is not defined), on all processes; ShapeError for a block that does not fit,
    on its own process: if that is not all of them, the others wait for the group's timeout.

    >>> import torch.distributed as dist, torch_bridge as xt
    >>> from xshard import Mesh
    >>> def turn():
    ...     x = torch.full((1, 4), dist.get_rank())
    ...     return xt.redistribute(x, "s/cp c -> s c/cp", Mesh(cp=2))
    >>> [y.tolist() for y in xt.run_ranks(2, turn)]
    [[[0, 0], [1, 1]], [[0, 0], [1, 1]]]
    """
    if isinstance(x, DTensor):
        return _redistribute_dtensor(x, expression, mesh, shape, profile)
    if mesh is None:
        raise MeshError("a tensor needs a mesh", hint="redistribute(x, expression, mesh)")
    global_shape = None if shape is None else tuple(shape)
    executable = _executable(
        expression, process_mesh(mesh), tuple(x.shape), x.dtype, x.device, global_shape, profile
    )
    if x.requires_grad and torch.is_grad_enabled():
        executable.plan_gradient()  # refused now if at all, and its groups made while all are here
    return Redistribute.apply(x, executable)


def all_gather(
    x: Tensor, dim: int, axis: Axes, mesh: MeshLike, *, grad: Grad, shape: Sequence[int] | None = None
) -> Tensor:
    """Blocks along `axis` put together along `dim`: `n/axis -> n`.

    grad: what the gradients of the results are. "sum": each is a contribution of its own, and
    the backward pass reduce-scatters. "replicated": they are equal, and it slices.

    >>> import torch_bridge as xt
    >>> from xshard import Mesh
    >>> x, mesh = torch.tensor([1, 2]), Mesh(dp=2)
    >>> xt.run_ranks(2, lambda: xt.all_gather(x, 0, "dp", mesh, grad="sum").tolist())[1]
    [1, 2, 1, 2]
    """
    return redistribute(
        x, f"{_cut(x, {dim: _shard(axis)})} -> {_cut(x)}{_whole(axis, grad)}", mesh, shape=shape
    )


def reduce_scatter(
    x: Tensor, dim: int, axis: Axes, mesh: MeshLike, *, op: str = "sum", shape: Sequence[int] | None = None
) -> Tensor:
    """The reduction of the blocks along `axis`, cut along `dim`: `n | sum(axis) -> n/axis`.

    op: sum, mean, max or min. The backward pass all-gathers.

    >>> import torch_bridge as xt
    >>> from xshard import Mesh
    >>> x, mesh = torch.tensor([1, 2]), Mesh(tp=2)
    >>> xt.run_ranks(2, lambda: xt.reduce_scatter(x, 0, "tp", mesh).tolist())[1]
    [4]
    """
    return redistribute(x, f"{_cut(x)}{_tag(op, axis)} -> {_cut(x, {dim: _shard(axis)})}", mesh, shape=shape)


def all_reduce(x: Tensor, axis: Axes, mesh: MeshLike, *, op: str = "sum", grad: Grad) -> Tensor:
    """The reduction of the blocks along `axis`, on every device: `n | sum(axis) -> n`.

    op: sum, mean, max or min. grad: "sum": the results' gradients add up, and the backward pass
    all-reduces. "replicated": they are equal, and it moves nothing.

    >>> import torch_bridge as xt
    >>> from xshard import Mesh
    >>> x, mesh = torch.tensor([1, 2]), Mesh(tp=2)
    >>> xt.run_ranks(2, lambda: xt.all_reduce(x, "tp", mesh, grad="replicated").tolist())[1]
    [2, 4]
    """
    return redistribute(x, f"{_cut(x)}{_tag(op, axis)} -> {_cut(x)}{_whole(axis, grad)}", mesh)


def all_to_all(
    x: Tensor,
    split_dim: int,
    concat_dim: int,
    axis: Axes,
    mesh: MeshLike,
    *,
    split_order: str = "block",
    concat_order: str = "block",
    shape: Sequence[int] | None = None,
) -> Tensor:
    """A cut moves from `concat_dim`, which becomes whole, to `split_dim`: `s/axis c -> s c/axis`.

    split_order, concat_order: the order of the cut after and before: block, zigzag, cyclic, balanced.

    >>> import torch_bridge as xt
    >>> from xshard import Mesh
    >>> x, mesh = torch.tensor([[1, 2]]), Mesh(cp=2)
    >>> xt.run_ranks(2, lambda: xt.all_to_all(x, 1, 0, "cp", mesh).tolist())[1]
    [[2], [2]]
    """
    before, after = {concat_dim: _shard(axis, concat_order)}, {split_dim: _shard(axis, split_order)}
    return redistribute(x, f"{_cut(x, before)} -> {_cut(x, after)}", mesh, shape=shape)


def slice(x: Tensor, dim: int, axis: Axes, mesh: MeshLike, *, grad: Grad) -> Tensor:
    """This device's part of `dim` of a block that all along `axis` have: `n -> n/axis`.

    grad: what the gradient of the block is to be. "sum": each device's is its own contribution
    (its part, and zeros). "replicated": all get the same, and the backward pass all-gathers.

    >>> import torch_bridge as xt
    >>> from xshard import Mesh
    >>> x, mesh = torch.tensor([1, 2]), Mesh(tp=2)
    >>> xt.run_ranks(2, lambda: xt.slice(x, 0, "tp", mesh, grad="sum").tolist())[1]
    [2]
    """
    return redistribute(x, f"{_cut(x)}{_whole(axis, grad)} -> {_cut(x, {dim: _shard(axis)})}", mesh)


def copy_to(x: Tensor, axis: Axes, mesh: MeshLike) -> Tensor:
    """The same block, of which every device along `axis` has a copy of its own: `n -> n | copy(axis)`.

    Moves nothing; the backward pass all-reduces.

    >>> import torch_bridge as xt
    >>> from xshard import Mesh
    >>> x, mesh = torch.tensor([1, 2]), Mesh(tp=2)
    >>> xt.run_ranks(2, lambda: xt.copy_to(x, "tp", mesh).tolist())[1]
    [1, 2]
    """
    return redistribute(x, f"{_cut(x)} -> {_cut(x)}{_whole(axis, 'sum')}", mesh)


def reduce_from(x: Tensor, axis: Axes, mesh: MeshLike) -> Tensor:
    """The sum of the blocks along `axis`, one value for all: `n | sum(axis) -> n`.

    The backward pass moves nothing: the adjoint of `copy_to`.

    >>> import torch_bridge as xt
    >>> from xshard import Mesh
    >>> x, mesh = torch.tensor([1, 2]), Mesh(tp=2)
    >>> xt.run_ranks(2, lambda: xt.reduce_from(x, "tp", mesh).tolist())[1]
    [2, 4]
    """
    return all_reduce(x, axis, mesh, grad="replicated")


def _cut(x: Tensor, shards: Mapping[int, str] | None = None) -> str:
    """The dims of `x` as text, some of them cut."""
    names = [f"d{d}" for d in range(x.ndim)]
    for dim, shard in (shards or {}).items():
        if not -x.ndim <= dim < x.ndim:
            raise ShapeError(f"no dim {dim} in a block of shape {tuple(x.shape)}")
        names[dim] += f"/{shard}"
    return " ".join(names) or "()"


def _shard(axis: Axes, order: str = "block") -> str:
    axes = _axes(axis)
    if order != "block":
        return f"{order}({axes})"
    return axes if isinstance(axis, str) else f"({axes})"


def _whole(axis: Axes, grad: str) -> str:
    if grad not in ("sum", "replicated"):
        raise XshardError(
            f"grad={grad!r}", hint='"sum": gradients add up along the axis; "replicated": they are equal'
        )
    return _tag("copy", axis) if grad == "sum" else ""


def _tag(kind: str, axis: Axes) -> str:
    return f" | {kind}({_axes(axis)})"


def _axes(axis: Axes) -> str:
    return axis if isinstance(axis, str) else ",".join(axis)


def _redistribute_dtensor(
    x: DTensor,
    expression: Expression,
    mesh: MeshLike | None,
    shape: Sequence[int] | None,
    profile: str | Path | Profile,
) -> DTensor:
    src, dst, text = _sides(expression)
    if mesh is not None and mesh != x.device_mesh:
        raise MeshError(f"the DTensor is on {x.device_mesh!r}, not on {mesh!r}", hint="leave the mesh out")
    if shape is not None and tuple(shape) != tuple(x.shape):
        raise ShapeError(f"the DTensor has shape {tuple(x.shape)}, not {tuple(shape)}")
    to_placements(dst, x.device_mesh, x.shape)  # refused here, before anything is sent
    local = local_of(x, src, text)
    y = redistribute(local, expression, x.device_mesh, shape=tuple(x.shape), profile=profile)
    return as_dtensor(y, dst, x.device_mesh, tuple(x.shape))


def _sides(expression: Expression) -> tuple[Layout, Layout, str]:
    """Both layouts of an expression, and the text that errors mark."""
    if isinstance(expression, str):
        return *parse_expression(expression), expression
    if isinstance(expression, Plan):
        src, dst = expression.src, expression.dst
    else:
        src, dst = (Layout.parse(side) if isinstance(side, str) else side for side in expression)
    return src, dst, f"{src} -> {dst}"


@lru_cache(maxsize=4096)
def _executable(
    expression: Expression,
    processes: ProcessMesh,
    local_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    shape: tuple[int, ...] | None,
    profile: str | Path | Profile,
) -> Executable:
    src, dst, text = _sides(expression)
    name = dtypes.name_of(dtype)
    for layout in (src, dst):
        check_axes(layout, processes.mesh, text)
    if isinstance(expression, Plan):
        plan = expression
        if plan.mesh != processes.mesh:
            raise MeshError(f"the plan is for {plan.mesh!r}, this is {processes.mesh!r}")
        if plan.dtype != name:
            raise DtypeError(f"the plan is for {plan.dtype}, the block has {name}")
        if shape not in (None, plan.shape):
            raise ShapeError(f"the plan is for a {plan.shape} array, not {shape}")
    else:
        named = tuple(dict.fromkeys((*src.axes, *dst.axes)))
        # Devices of a part of the mesh have other numbers; what connects them stays the same.
        machine = load_profile(profile)
        links = tuple((axis, machine.link(axis, processes.mesh)) for axis in named)
        profile = replace(machine, axes=links)
        processes = processes.along(named)
        whole = _even_shape(src, processes, local_shape, text) if shape is None else shape
        plan = planner.plan(expression, processes.mesh, whole, name, profile=profile)
    _check_block(plan.source, processes.device, local_shape, text, inferred=shape is None)
    return lower(plan, processes, device)


def _even_shape(
    layout: Layout, processes: ProcessMesh, local_shape: tuple[int, ...], text: str
) -> tuple[int, ...]:
    """The global shape of which every block is as large as this one."""
    try:
        dims = layout.resolved(len(local_shape)).dims
    except ShapeError as error:
        raise ShapeError(error.reason, text=text, hint=error.hint) from None
    return tuple(n * processes.mesh.size(*dim.axes) for n, dim in zip(local_shape, dims, strict=True))


def _check_block(
    source: Sharding, device: int, local_shape: tuple[int, ...], text: str, *, inferred: bool
) -> None:
    expected = source.local_shape(device)
    if local_shape == expected:
        return
    names = source.layout.names
    wrong = [n for n, have, want in zip(names, local_shape, expected, strict=False) if have != want]
    where = dict(reversed(notation.spans(text).dims))  # the left side's, which come first
    raise ShapeError(
        f"the block of device {device} has shape {local_shape}, not {expected}",
        text=text,
        span=where.get(wrong[0], where.get(notation.ELLIPSIS)) if wrong else None,
        hint=f"under '{source.layout}' on {source.mesh!r} that is its part of a {source.shape} array"
        + ("; where blocks differ in size, pass shape= (the global shape)" if inferred else ""),
    )
