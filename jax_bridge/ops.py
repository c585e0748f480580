"""What users call on one device's block: `redistribute`, and its common cases by the names they have
elsewhere.

Works inside `jax.shard_map`, with `check_vma=True` or `False`, inside `jax.pmap` and, for one axis, inside
`jax.vmap(axis_name=)`. The common cases take the same arguments as those of `torch_bridge` and only write
the expression.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax

from jax_bridge.planning import AnyMesh
from jax_bridge.redistribution import redistribute
from xshard.ops import Axes, HaloWidth, dims, gradient_tag, halo, shard, tag

Grad = Literal["sum", "replicated"]


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
    src, dst = dims(x.shape, {dim: shard(axis)}), dims(x.shape) + gradient_tag(axis, grad)
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
    src, dst = dims(x.shape) + tag(op, axis), dims(x.shape) + gradient_tag(axis, grad)
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
    src, dst = dims(x.shape) + gradient_tag(axis, grad), dims(x.shape, {dim: shard(axis)})
    return redistribute(x, f"{src} -> {dst}", mesh)


def copy_to(x: jax.Array, axis: Axes, mesh: AnyMesh | None = None) -> jax.Array:
    """The same block, of which every device along `axis` has a copy of its own: `n -> n | copy(axis)`.

    Moves nothing; the backward pass all-reduces.
    """
    return redistribute(x, f"{dims(x.shape)} -> {dims(x.shape)}{gradient_tag(axis, 'sum')}", mesh)


def reduce_from(x: jax.Array, axis: Axes, mesh: AnyMesh | None = None) -> jax.Array:
    """The sum of the blocks along `axis`, one value for all: `n | sum(axis) -> n`.

    The backward pass moves nothing: the adjoint of `copy_to`.
    """
    return all_reduce(x, axis, mesh, grad="replicated")
