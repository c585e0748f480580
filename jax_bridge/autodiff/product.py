"""The einsum of two blocks as one operation of JAX, whose derivatives are such einsums again.

JAX computes the gradient of a product in the order of the cotangent's dims and transposes it; here
it is computed in the order of the operand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from jax_bridge.mesh.axis_types import as_varying, varying_axes
from jax_bridge.versions import (
    ACCELERATORS,
    Batch,
    bilinear_primitive,
    cuts_of,
    linear_primitive,
    types_of,
)

Names = tuple[int, ...]  # of the dims of an array, as `jnp.einsum` takes them in place of letters


class ProductNames(NamedTuple):
    """The names of the dims of two operands and of their einsum.

    "ij,jk->ik" is ((0, 1), (1, 2)), (0, 2).
    """

    operands: tuple[Names, Names]
    result: Names


def multiplied(x: jax.Array, y: jax.Array, names: ProductNames, **options: Any) -> jax.Array:
    """Compute the einsum of two arrays, differentiably; gradients are such einsums again.

    Args:
        x: The first operand.
        y: The second operand.
        names: The names of all dims.
        options: `preferred_element_type` and `precision`, as for `jnp.einsum`.
    """
    # Both operands are declared different on the same mesh axes, since JAX wants one type; their
    # cotangents then have this type, too.
    varying = sorted(varying_axes(x) | varying_axes(y))
    return _product(
        as_varying(x, varying), as_varying(y, varying), names=names, cuts=None, **options
    )


class _DimOrder(NamedTuple):
    """An order of dims in which a product is a matrix product, without transpositions."""

    row_operand: int  # the operand whose dims begin the result
    operand_dims: Names
    result_dims: Names
    n_copied: int  # elements to copy into this order and back


def _dim_order(i: int, names: ProductNames, sizes: dict[int, int]) -> _DimOrder:
    """Order dims so that the einsum is a batched matrix product with operand `i` as the left one.

    The operand's dims: batch dims, its own dims (rows), summed dims; the result's: batch dims,
    rows, the other operand's dims (columns). "ij,jk->ki" with operand 0 computes "ij,jk->ik" and
    then transposes the result.

    Args:
        i: The operand: 0 or 1.
        names: The names of all dims.
        sizes: The length of each dim by name, to count what transposing would copy.
    """
    rows_names = names.operands[i]
    other_names = names.operands[1 - i]
    shared = set(rows_names) & set(other_names)
    batch = [n for n in names.result if n in shared]
    row_dims = [n for n in names.result if n not in other_names]
    summed = [n for n in other_names if n in shared and n not in names.result]
    columns = [n for n in names.result if n not in rows_names]
    operand_dims = (*batch, *row_dims, *summed)
    result_dims = (*batch, *row_dims, *columns)

    n_copied = 0
    if rows_names != operand_dims:
        n_copied += prod(sizes[n] for n in rows_names)
    if result_dims != names.result:
        n_copied += prod(sizes[n] for n in result_dims)
    return _DimOrder(i, operand_dims, result_dims, n_copied)


def _run(
    x: jax.Array, y: jax.Array, *, names: ProductNames, cuts: Any, **options: Any
) -> jax.Array:
    """Compute the einsum as a matrix product, with that operand on the left that copies less.

    Args:
        x: The first operand.
        y: The second operand.
        names: The names of all dims.
        cuts: For each dim of the result the Explicit axes that shard it; None if there are no such
            axes.
        options: As for `jnp.einsum`.
    """
    sizes = dict(zip(names.operands[0], x.shape, strict=True))
    sizes |= zip(names.operands[1], y.shape, strict=True)
    by_first = _dim_order(0, names, sizes)
    by_second = _dim_order(1, names, sizes)
    order = by_first
    if by_second.n_copied < by_first.n_copied:
        order = by_second

    i = order.row_operand
    rows = (x, y)[i]
    rows_names = names.operands[i]
    other = (x, y)[1 - i]
    other_names = names.operands[1 - i]
    # If the operand has a dim that only it has and that is summed, `einsum` sums it before the
    # product anyway: transposing the operand first would be of no use.
    has_same_dims = sorted(rows_names) == sorted(order.operand_dims)
    if rows_names != order.operand_dims and has_same_dims:
        permutation = [rows_names.index(n) for n in order.operand_dims]
        rows = _in_order(lax.transpose(rows, permutation))
        rows_names = order.operand_dims

    out_sharding = None
    if cuts is not None:
        entries = [cuts[names.result.index(n)] for n in order.result_dims]
        out_sharding = jax.P(*entries)
    result = jnp.einsum(
        rows,
        rows_names,
        other,
        other_names,
        order.result_dims,
        out_sharding=out_sharding,
        **options,
    )
    if order.result_dims == names.result:
        return result
    permutation = [order.result_dims.index(n) for n in names.result]
    return lax.transpose(_in_order(result), permutation)


def _transpose(
    i: int,
    cotangent: jax.Array,
    operand_type: Any,
    other: jax.Array,
    *,
    names: ProductNames,
    cuts: Any,
    **options: Any,
) -> jax.Array:
    """Compute the cotangent of operand `i`: the result's cotangent times the other operand.

    "ij,jk->ik": that of the first operand is "ik,jk->ij".

    Args:
        i: The number of the operand.
        cotangent: The cotangent of the result.
        operand_type: The operand's type.
        other: The other operand.
        names: The names of all dims of the product.
        cuts: As for `_run`, of the product.
        options: As for `jnp.einsum`.
    """
    operand_names = names.operands[i]
    other_names = names.operands[1 - i]
    # A dim that neither the result nor the other operand has was summed: the cotangent is equal all
    # along it. It is computed without the dim, and repeated at the end.
    computed_dims = []
    for dim, name in enumerate(operand_names):
        if name in names.result or name in other_names:
            computed_dims.append(dim)

    is_explicit = AxisType.Explicit in operand_type.sharding.mesh.axis_types
    computed_cuts = None
    if is_explicit:
        entries = cuts_of(operand_type.sharding.spec)
        computed_cuts = tuple(entries[dim] for dim in computed_dims)
    computed_names = tuple(operand_names[dim] for dim in computed_dims)
    y = _product(
        cotangent,
        other,
        names=ProductNames((names.result, other_names), computed_names),
        cuts=computed_cuts,
        **options,
    )
    y = lax.convert_element_type(y, operand_type.dtype)
    if len(computed_dims) == operand_type.ndim:
        return y
    out_sharding = operand_type.sharding if is_explicit else None
    return lax.broadcast_in_dim(y, operand_type.shape, computed_dims, out_sharding=out_sharding)


def _batch(
    x: jax.Array,
    y: jax.Array,
    x_dim: int | None,
    y_dim: int | None,
    batch: Batch,
    *,
    names: ProductNames,
    cuts: Any,
    **options: Any,
) -> tuple[jax.Array, int | None]:
    """Run the product on a batch (the rule of `jax.vmap`): one more dim with a new name.

    Args:
        x: The first operand.
        y: The second operand.
        x_dim: The batch dim of `x`; None if `x` is the same for the whole batch.
        y_dim: The batch dim of `y`; None if `y` is the same for the whole batch.
        batch: The batch, with the mesh axes that shard it.
        names: The names of the dims of one product.
        cuts: As for `_run`.
        options: As for `jnp.einsum`.

    Returns:
        The result, and its batch dim: the first, or None without a batch.
    """
    if x_dim is None and y_dim is None:
        return _product(x, y, names=names, cuts=cuts, **options), None
    first_names, second_names = names.operands
    new_name = 1 + max(first_names + second_names, default=-1)

    def wider(dims: Names, batch_dim: int | None) -> Names:
        if batch_dim is None:
            return dims
        return (*dims[:batch_dim], new_name, *dims[batch_dim:])

    operands = (wider(first_names, x_dim), wider(second_names, y_dim))
    wider_names = ProductNames(operands, wider(names.result, 0))
    if cuts is not None:
        batch_cut = batch.mesh_axes if batch.mesh_axes else None
        cuts = (batch_cut, *cuts)
    return _product(x, y, names=wider_names, cuts=cuts, **options), 0


_product: Callable[..., jax.Array] = bilinear_primitive(
    "xshard_product",
    run=_run,
    abstract_eval=types_of(_run, ("names", "cuts", "preferred_element_type", "precision")),
    transposes=(partial(_transpose, 0), partial(_transpose, 1)),
    batch=_batch,
)

# XLA:CPU would fold the order into the product, for which it then has no fast kernel.
_in_order: Callable[..., jax.Array] = linear_primitive(
    "xshard_in_order",
    run=lax.optimization_barrier,
    transpose=lambda cotangent: cotangent,
    on_platforms=dict.fromkeys(ACCELERATORS, lambda x: x),
)
