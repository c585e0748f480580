"""`to_jax` and `to_torch`: the public verbs, for one array or a tree of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh as JaxMesh
from torch import Tensor

from jax_bridge.torch_interop.devices import TorchMesh, mesh_pair
from jax_bridge.torch_interop.hand_over import prepare_to_jax, prepare_to_torch
from jax_bridge.torch_interop.route import Options, Profiles
from jax_bridge.trees import leaves_of
from xshard import Layout, Rules
from xshard.errors import located
from xshard.plans.expression import Expression
from xshard.rules import Pattern
from xshard.state.progress import Progress, reporting

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
    progress: Progress = None,
) -> Any:
    """Hand over this process's tensors as a global `jax.Array` with a `NamedSharding`.

    x: the local block; a list with one block per device of the process, in mesh order; a DTensor; or a tree
    of these. All processes of either mesh call it; a process without a block passes one on `meta`. layout:
    the layout of the blocks and of the array; `"layout -> layout"` moves blocks from the first to the second.
    For a tree: an `xshard.Rules`, or a dict like it, from patterns of leaf names (`"layers.*.weight"`) to
    layouts. In the array, a dim in zigzag or another order is in storage order, as with `reshard`.
    torch_mesh: the mesh of the blocks if it is not `mesh`: a `DeviceMesh` or an `xshard.Mesh`, with the same
    devices or others. A DTensor brings its mesh.
    shape: the global shape, needed if blocks differ in size.
    copy: None shares memory if layout, dtype and alignment allow it, and logs a copy with its reason in
    "xshard.interop"; True always copies; False raises if a copy cannot be avoided.
    A write to shared memory, `x.add_(1)`, changes the array, which JAX assumes to be immutable: pass
    `copy=True` if the tensor is written to afterwards.
    profile, via: if blocks have to move, the cheaper side moves them, by the costs of this profile (or of one
    for "torch" and one for "jax"); `via` names the side instead.
    progress: True for a bar, or a function called with the bytes done and the total; None shows a bar for
    large trees on a terminal.

    It has no gradient: `torch_interop.from_jax` makes a differentiable function.
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

    def is_leaf(value: Any) -> bool:
        is_list = isinstance(value, list) and any(isinstance(block, Tensor) for block in value)
        return is_list and len(mesh_pair(mesh).local) > 1

    def prepare(leaf: Any, rule: Layout | Expression) -> Callable[[], Any]:
        return prepare_to_jax(leaf, rule, mesh, torch_mesh, options)

    return _hand_over(x, layout, prepare, "to JAX", progress, is_leaf)


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
    progress: Progress = None,
) -> Any:
    """Hand over a global `jax.Array` as this process's tensor, a list of tensors, or a DTensor.

    array: an array sharded by `layout`, or by its left side; or a tree of such arrays. A process with one
    device of the mesh gets a tensor, a process with several a list with one tensor per device, in mesh order.
    layout, copy, profile, via, progress: as in `to_jax`.
    mesh: the mesh of the tensors if it is not the array's; its devices may be others, and a process without
    any of them gets None. JAX's mesh for an array without a mesh.
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

    def prepare(leaf: Any, rule: Layout | Expression) -> Callable[[], Any]:
        return prepare_to_torch(leaf, rule, mesh, options)

    return _hand_over(array, layout, prepare, "to torch", progress)


def _hand_over(
    tree: Any,
    layout: Given,
    prepare: Callable[[Any, Layout | Expression], Callable[[], Any]],
    what: str,
    progress: Progress,
    is_leaf: Callable[[Any], bool] = lambda _: False,
) -> Any:
    """Check one array, or all leaves of a tree, before the first is handed over."""
    if not isinstance(layout, Mapping):
        return prepare(tree, layout)()
    work = []
    for leaf in leaves_of(Rules(layout), tree, lambda _: False, is_leaf=is_leaf):
        with located(leaf.place):
            work.append((prepare(leaf.x, leaf.given), sum(x.nbytes for x in jax.tree.leaves(leaf.x))))
    results = []
    with reporting(progress, sum(n_bytes for _, n_bytes in work), True, what) as report:
        for run, n_bytes in work:
            results.append(run())
            report(n_bytes)
    return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=is_leaf), results)
