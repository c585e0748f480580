"""Common cases of `redistribute` under their usual names: `all_gather`, `halo_exchange`, ...

Each takes the arguments of its twin in `torch_bridge` and only writes the expression. They work where
`redistribute` does: inside `jax.shard_map` with `check_vma=True` or `False`, inside `jax.pmap` and, along one
axis, inside `jax.vmap(axis_name=)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np

from jax_bridge.calls import as_array
from jax_bridge.lower.row_tables import valid
from jax_bridge.mesh.context import AnyMesh, sharding_here
from jax_bridge.redistribution import redistribute
from xshard import Layout
from xshard.ops import Axes, HaloWidth, dims, gradient_tag, halo, sharded, tag

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "copy_to",
    "halo_exchange",
    "reduce_scatter",
    "shard",
    "trim_halo",
    "valid_mask",
]

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
    """Concatenate the blocks along `axis` along `dim`: `n/axis -> n`.

    grad: how the gradients of the devices' results combine. "sum": they differ and add up, and the backward
    pass reduce-scatters. "replicated": they are equal, and the backward pass slices.
    """
    src, dst = dims(np.shape(x), {dim: sharded(axis)}), dims(np.shape(x)) + gradient_tag(axis, grad)
    return _moved(x, src, dst, mesh, shape)


def reduce_scatter(
    x: jax.Array,
    dim: int,
    axis: Axes,
    mesh: AnyMesh | None = None,
    *,
    op: str = "sum",
    shape: Sequence[int] | None = None,
) -> jax.Array:
    """Reduce the blocks along `axis` and shard the result along `dim`: `n | sum(axis) -> n/axis`.

    op: sum, mean, max or min. The backward pass all-gathers.
    """
    src, dst = dims(np.shape(x)) + tag(op, axis), dims(np.shape(x), {dim: sharded(axis)})
    return _moved(x, src, dst, mesh, shape)


def all_reduce(
    x: jax.Array, axis: Axes, mesh: AnyMesh | None = None, *, op: str = "sum", grad: Grad
) -> jax.Array:
    """Reduce the blocks along `axis`; every device gets the result: `n | sum(axis) -> n`.

    op: sum, mean, max or min. grad: "sum": the gradients of the devices' results add up, and the backward
    pass all-reduces. "replicated": they are equal, and the backward pass moves nothing.
    """
    src, dst = dims(np.shape(x)) + tag(op, axis), dims(np.shape(x)) + gradient_tag(axis, grad)
    return _moved(x, src, dst, mesh)


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
    """Shard `split_dim` instead of `concat_dim`: `s/axis c -> s c/axis`.

    split_order, concat_order: the orders of their rows: block, zigzag, cyclic or balanced.
    """
    src, dst = (
        dims(np.shape(x), {concat_dim: sharded(axis, concat_order)}),
        dims(np.shape(x), {split_dim: sharded(axis, split_order)}),
    )
    return _moved(x, src, dst, mesh, shape)


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
    """Widen each block by rows of its neighbours: `h/axis -> h/axis:halo(width, width, boundary)`.

    width: rows at both ends, or `(before, after)`; a list has one number per part. A width may exceed a
    neighbour's block; a negative one leaves rows out. boundary: the rows beyond the ends of the array:
    zero, constant(1.5), periodic, reflect, edge, none, pole, or one for each end ("edge,zero").
    The backward pass adds the gradients of all copies of a row at its owner.
    """
    src, dst = dims(np.shape(x), {dim: sharded(axis)}), dims(np.shape(x), {dim: halo(axis, width, boundary)})
    return _moved(x, src, dst, mesh, shape)


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
    """Remove the rows that `halo_exchange` added: `h/axis:halo(width, width, boundary) -> h/axis`.

    >>> import functools
    >>> both = lambda x: trim_halo(halo_exchange(x, 1, 0, "sp"), 1, 0, "sp")
    >>> jax.pmap(both, "sp")(jax.numpy.ones((1, 4))).shape  # one block on one device
    (1, 4)
    """
    src, dst = dims(np.shape(x), {dim: halo(axis, width, boundary)}), dims(np.shape(x), {dim: sharded(axis)})
    return _moved(x, src, dst, mesh, shape)


def shard(x: jax.Array, dim: int, axis: Axes, mesh: AnyMesh | None = None, *, grad: Grad) -> jax.Array:
    """Take this device's part of `dim` of a block replicated along `axis`: `n -> n/axis`.

    grad: the gradient of the block. "sum": each device gets its own contribution (zero outside its part).
    "replicated": all devices get the same, and the backward pass all-gathers.
    """
    src, dst = dims(np.shape(x)) + gradient_tag(axis, grad), dims(np.shape(x), {dim: sharded(axis)})
    return _moved(x, src, dst, mesh)


def copy_to(x: jax.Array, axis: Axes, mesh: AnyMesh | None = None) -> jax.Array:
    """Turn a replicated block into one copy per device along `axis`: `n -> n | copy(axis)`.

    Moves nothing; the backward pass all-reduces.
    """
    block = dims(np.shape(x))
    return _moved(x, block, block + gradient_tag(axis, "sum"), mesh)


def valid_mask(layout: Layout | str, mesh: AnyMesh | None = None, *, shape: Sequence[int]) -> jax.Array:
    """A mask of this device's block: True at elements of the array, False in its padding.

    shape: the global shape; if it does not divide, blocks are padded at the end of a dim to the largest.
    mesh: default: the mesh of the context. Raises as `redistribute` does.

    >>> masks = jax.pmap(lambda x: valid_mask("n/dp", shape=(3,)), "dp")
    >>> masks(jax.numpy.ones(1)).tolist()  # one block on one device: no padding
    [[True, True, True]]
    """
    return valid(sharding_here(layout, shape, mesh))


def _moved(
    x: jax.typing.ArrayLike, src: str, dst: str, mesh: AnyMesh | None, shape: Sequence[int] | None = None
) -> jax.Array:
    expression = f"{src} -> {dst}"
    return redistribute(as_array(x, expression), expression, mesh, shape=shape)
