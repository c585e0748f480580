"""What users call on one device's block: `redistribute`, and its common cases by the names they have
elsewhere.

Works inside `jax.shard_map`, with `check_vma=True` or `False`, inside `jax.pmap` and, for one axis, inside
`jax.vmap(axis_name=)`. The common cases take the same arguments as those of `torch_bridge` and only write
the expression.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax

from jax_bridge.autodiff import MODES, apply
from jax_bridge.blocks import valid
from jax_bridge.context import AnyMesh, as_array, entered, plan_here, sharding_here
from jax_bridge.replicas import apply_checked
from xshard import Layout, Profile, XshardError
from xshard.replicas import are_checked
from xshard.spelling import Axes, Expression, HaloWidth, dims, halo, shard, sides, tag, whole

Grad = Literal["sum", "replicated"]
Derivatives = Literal["linear", "custom_vjp"]


def redistribute(
    x: jax.Array,
    expression: Expression,
    mesh: AnyMesh | None = None,
    *,
    shape: Sequence[int] | None = None,
    profile: str | Path | Profile = "h100",
    check_replicated: bool | None = None,
    ad: Derivatives = "linear",
) -> jax.Array:
    """This device's block under the left layout -> its block under the right one, differentiable.

    expression: `"layout -> layout"`, a pair of layouts, or a plan. mesh: read from the context where
    it is left out. shape: the global shape, inferred where all blocks are as large as this one; an
    uneven block has the shape of the largest. What its padding holds does not matter on the way
    in, and is zero on the way out. profile: the machine it is planned for.
    ad: "linear" has derivatives of every mode. "custom_vjp" has those of reverse mode alone; jaxprs then
    show the collectives of `jax.lax`.
    Axes that the expression does not name are left alone: blocks may differ along them. With
    `check_vma=True` the result is invariant along an axis that only the left side names.

    Raises, while tracing, NotationError, MeshError, ShapeError, DtypeError, PlanError; LinearityError
    for a gradient that is not defined. With `check_replicated`, when it runs, ReplicaError in the text of
    JAX's own error.

    >>> gather = jax.pmap(lambda x: redistribute(x, "n/dp d -> n d | copy(dp)"), "dp")
    >>> gather(jax.numpy.ones((1, 4, 2))).shape  # one block on one device
    (1, 4, 2)
    """
    if ad not in MODES:
        raise XshardError(f"no derivatives ad={ad!r}", hint=f"there are: {', '.join(MODES)}")
    x = as_array(x, expression)
    plan, text = plan_here(x, expression, mesh, shape, profile), sides(expression)[2]
    x = entered(x, plan, text)
    return apply_checked(plan, x, text, ad) if are_checked(check_replicated) else apply(plan, x, ad)


def valid_mask(layout: Layout | str, shape: Sequence[int], mesh: AnyMesh | None = None) -> jax.Array:
    """Which elements of this device's block are the array's and not padding: bool, shaped as the block.

    shape: the global shape; where it does not divide, blocks are padded at the end of a dim to the largest.
    mesh: read from the context where it is left out. Raises as `redistribute` does.

    >>> masks = jax.pmap(lambda x: valid_mask("n/dp", (3,)), "dp")
    >>> masks(jax.numpy.ones(1)).tolist()  # one block on one device: no padding
    [[True, True, True]]
    """
    return valid(sharding_here(layout, shape, mesh))


def all_gather(
    x: jax.Array,
    dim: int,
    axis: Axes,
    mesh: AnyMesh | None = None,
    *,
    grad: Grad,
    shape: Sequence[int] | None = None,
) -> jax.Array:
    """Blocks along `axis` put together along `dim`: `n/axis -> n`.

    grad: what the gradients of the results are. "sum": each is a contribution of its own, and the
    backward pass reduce-scatters. "replicated": they are equal, and it slices.
    """
    src, dst = dims(x.shape, {dim: shard(axis)}), dims(x.shape) + whole(axis, grad)
    return redistribute(x, f"{src} -> {dst}", mesh, shape=shape)


def reduce_scatter(
    x: jax.Array,
    dim: int,
    axis: Axes,
    mesh: AnyMesh | None = None,
    *,
    op: str = "sum",
    shape: Sequence[int] | None = None,
) -> jax.Array:
    """The reduction of the blocks along `axis`, cut along `dim`: `n | sum(axis) -> n/axis`.

    op: sum, mean, max or min. The backward pass all-gathers.
    """
    src, dst = dims(x.shape) + tag(op, axis), dims(x.shape, {dim: shard(axis)})
    return redistribute(x, f"{src} -> {dst}", mesh, shape=shape)


def all_reduce(
    x: jax.Array, axis: Axes, mesh: AnyMesh | None = None, *, op: str = "sum", grad: Grad
) -> jax.Array:
    """The reduction of the blocks along `axis`, on every device: `n | sum(axis) -> n`.

    op: sum, mean, max or min. grad: "sum": the results' gradients add up, and the backward pass
    all-reduces. "replicated": they are equal, and it moves nothing.
    """
    src, dst = dims(x.shape) + tag(op, axis), dims(x.shape) + whole(axis, grad)
    return redistribute(x, f"{src} -> {dst}", mesh)


def all_to_all(
    x: jax.Array,
    split_dim: int,
    concat_dim: int,
    axis: Axes,
    mesh: AnyMesh | None = None,
    *,
    split_order: str = "block",
    concat_order: str = "block",
    shape: Sequence[int] | None = None,
) -> jax.Array:
    """A cut moves from `concat_dim`, which becomes whole, to `split_dim`: `s/axis c -> s c/axis`.

    split_order, concat_order: the order of the cut after and before: block, zigzag, cyclic, balanced.
    """
    src, dst = (
        dims(x.shape, {concat_dim: shard(axis, concat_order)}),
        dims(x.shape, {split_dim: shard(axis, split_order)}),
    )
    return redistribute(x, f"{src} -> {dst}", mesh, shape=shape)


def halo_exchange(
    x: jax.Array,
    width: HaloWidth,
    dim: int,
    axis: Axes,
    mesh: AnyMesh | None = None,
    *,
    boundary: str = "zero",
    shape: Sequence[int] | None = None,
) -> jax.Array:
    """Each block widened by rows of its neighbours: `h/axis -> h/axis:halo(width, width, boundary)`.

    width: rows at both ends, or `(before, after)`; a list has one number per part. Negative ones leave
    rows out, and they may be wider than a neighbour's block. boundary: what stands beyond the ends of the
    array: zero, constant(1.5), periodic, reflect, edge, none, pole, or two of them ("edge,zero").
    The backward pass adds what the rows got at their owner.
    """
    src, dst = dims(x.shape, {dim: shard(axis)}), dims(x.shape, {dim: halo(axis, width, boundary)})
    return redistribute(x, f"{src} -> {dst}", mesh, shape=shape)


def trim_halo(
    x: jax.Array,
    width: HaloWidth,
    dim: int,
    axis: Axes,
    mesh: AnyMesh | None = None,
    *,
    boundary: str = "zero",
    shape: Sequence[int] | None = None,
) -> jax.Array:
    """What `halo_exchange` added, taken away: `h/axis:halo(width, width, boundary) -> h/axis`.

    >>> import functools
    >>> both = lambda x: trim_halo(halo_exchange(x, 1, 0, "sp"), 1, 0, "sp")
    >>> jax.pmap(both, "sp")(jax.numpy.ones((1, 4))).shape  # one block on one device
    (1, 4)
    """
    src, dst = dims(x.shape, {dim: halo(axis, width, boundary)}), dims(x.shape, {dim: shard(axis)})
    return redistribute(x, f"{src} -> {dst}", mesh, shape=shape)


def slice(x: jax.Array, dim: int, axis: Axes, mesh: AnyMesh | None = None, *, grad: Grad) -> jax.Array:
    """This device's part of `dim` of a block that all along `axis` have: `n -> n/axis`.

    grad: what the gradient of the block is to be. "sum": each device's is its own contribution
    (its part, and zeros). "replicated": all get the same, and the backward pass all-gathers.
    """
    src, dst = dims(x.shape) + whole(axis, grad), dims(x.shape, {dim: shard(axis)})
    return redistribute(x, f"{src} -> {dst}", mesh)


def copy_to(x: jax.Array, axis: Axes, mesh: AnyMesh | None = None) -> jax.Array:
    """The same block, of which every device along `axis` has a copy of its own: `n -> n | copy(axis)`.

    Moves nothing; the backward pass all-reduces.
    """
    return redistribute(x, f"{dims(x.shape)} -> {dims(x.shape)}{whole(axis, 'sum')}", mesh)


def reduce_from(x: jax.Array, axis: Axes, mesh: AnyMesh | None = None) -> jax.Array:
    """The sum of the blocks along `axis`, one value for all: `n | sum(axis) -> n`.

    The backward pass moves nothing: the adjoint of `copy_to`.
    """
    return all_reduce(x, axis, mesh, grad="replicated")
