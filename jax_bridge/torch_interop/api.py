"""`to_jax` and `to_torch`: the public verbs, for one array or a tree of them.

Decides the arguments and results of a call. `to_jax.py` and `to_torch.py` carry it out, `handover` plans it,
and `trees` finds the layout of every leaf.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh as JaxMesh
from torch import Tensor

from jax_bridge.torch_interop import trees
from jax_bridge.torch_interop.devices import TorchMesh, ends_of
from jax_bridge.torch_interop.handover import Options
from jax_bridge.torch_interop.route import Profiles
from jax_bridge.torch_interop.to_jax import prepare_to_jax
from jax_bridge.torch_interop.to_torch import prepare_to_torch
from xshard import Layout
from xshard.plans.expression import Expression
from xshard.rules import Pattern

Given = Layout | Expression | Mapping[Pattern, Layout | Expression]


def to_jax(
    x: Any,
    layout: Given,
    mesh: JaxMesh,
    *,
    torch_mesh: TorchMesh | None = None,
    shape: Sequence[int] | None = None,
    copy: bool | None = None,
    profile: Profiles = "auto",
    via: str | None = None,
    progress: bool | None = None,
) -> Any:
    """This process's tensors under a layout -> one global `jax.Array` with a `NamedSharding`.

    x: the block of this process; a list with one block per device of the process, in mesh order; a DTensor;
    or a tree of these. All processes of either mesh call it; one without a block passes one on `meta`.
    layout: of the blocks and the array; `"layout -> layout"` moves blocks from the first to the second. For a
    tree: an `xshard.Rules`, or a dict like it, from patterns of leaf names (`"layers.*.weight"`) to layouts.
    In the array, a dim in zigzag or another order is in storage order, as with `reshard`.
    torch_mesh: the mesh of the blocks if it is not `mesh`: a `DeviceMesh` or an `xshard.Mesh`, of the same
    devices or others. A DTensor brings its own.
    shape: the global shape, needed if blocks differ in size.
    copy: None shares memory if layout, dtype and alignment allow it, and logs a copy with its reason in
    "xshard.interop"; True always copies; False raises if a copy cannot be avoided.
    A write to shared memory, `x.add_(1)`, changes the array, which JAX assumes to be immutable: pass
    `copy=True` if the tensor is written to afterwards.
    profile, via: if blocks have to move, the cheaper side moves them, by the costs of this profile (or of one
    for "torch" and one for "jax"); `via` names the side instead.
    progress: whether to show a bar; None shows one for large trees on a terminal.

    Has no gradient: `jax_bridge.torch_interop.from_jax` makes a differentiable function.
    Raises, before anything is sent, NotationError, ShapeError, DtypeError (also for 64 bits without
    jax_enable_x64), MeshError (for kinds of devices or processes that differ), PlanError,
    XshardError (for a copy that is not allowed, leaves without a rule, and rules without a leaf).

    >>> import torch
    >>> x = torch.arange(4.0)
    >>> array = to_jax(x, "n/dp", jax.make_mesh((1,), ("dp",)))
    >>> array.sharding.spec, array.unsafe_buffer_pointer() == x.data_ptr()
    (P('dp',), True)
    """
    options = Options(copy=copy, shape=None if shape is None else tuple(shape), profile=profile, via=via)
    if not isinstance(layout, Mapping):
        return prepare_to_jax(x, layout, mesh, torch_mesh, options)()
    several = len(ends_of(mesh).local) > 1

    def is_leaf(value: Any) -> bool:
        return several and isinstance(value, list) and any(isinstance(block, Tensor) for block in value)

    work, structure = trees.prepared(
        x, layout, is_leaf, lambda leaf, rule: prepare_to_jax(leaf, rule, mesh, torch_mesh, options)
    )
    sizes = [sum(map(_bytes, jax.tree.leaves(leaf))) for leaf in jax.tree.leaves(x, is_leaf=is_leaf)]
    return jax.tree.unflatten(structure, trees.done(work, sizes, "to JAX", progress))


def to_torch(
    array: Any,
    layout: Given,
    mesh: TorchMesh | JaxMesh | None = None,
    *,
    dtensor: bool = False,
    copy: bool | None = None,
    writable: bool = True,
    profile: Profiles = "auto",
    via: str | None = None,
    progress: bool | None = None,
) -> Any:
    """A global `jax.Array` under a layout -> this process's tensor, a list of them, or a DTensor.

    array: sharded by `layout`, or by its left side; or a tree of such arrays. A process with one device of
    the mesh gets a tensor, a process with several a list with one tensor per device, in mesh order.
    layout, copy, profile, via, progress: as in `to_jax`.
    mesh: the mesh of the tensors if it is not the array's own, which may have other devices; a process with
    none of them gets None. JAX's mesh for an array without one.
    dtensor: return a DTensor, on the `DeviceMesh` given.
    writable: without a copy the tensor shares the array's memory, which JAX assumes to be immutable: a write
    changes the array. With `writable=False` a write raises XshardError instead.

    Raises as `to_jax` does; ShapeError for an array with another sharding, XshardError for one that was
    donated or deleted, and for a tracer.

    >>> import jax.numpy as jnp
    >>> mesh = jax.make_mesh((1,), ("dp",))
    >>> array = jax.device_put(jnp.arange(4.0), jax.NamedSharding(mesh, jax.P("dp")))
    >>> to_torch(array, "n/dp", writable=False).sum()
    tensor(6.)
    """
    options = Options(copy=copy, writable=writable, dtensor=dtensor, profile=profile, via=via)
    if not isinstance(layout, Mapping):
        return prepare_to_torch(array, layout, mesh, options)()
    work, structure = trees.prepared(
        array, layout, lambda _: False, lambda leaf, rule: prepare_to_torch(leaf, rule, mesh, options)
    )
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(array)]
    return jax.tree.unflatten(structure, trees.done(work, sizes, "to torch", progress))


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
