"""The einsum of two blocks as one operation of JAX, whose derivatives are such einsums again.

JAX computes the gradient of a product in the order of the cotangent's dims and transposes it; here
it is computed in the order of the operand.
"""

from __future__ import annotations

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
    Operation,
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
        names: The names of all dims, numbers in place of letters: ((0, 1), (1, 2)) and (0, 2) for
            "ij,jk->ik".
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

    left_index: int  # of the operand that is the left matrix: its dims begin the result
    left_names: Names
    result_names: Names
    n_copied: int  # elements to copy into this order and back


def _dim_order(left_operand: int, names: ProductNames, lengths: dict[int, int]) -> _DimOrder:
    """Order dims so that the einsum is a batched matrix product with one operand on the left.

    The left operand has batch dims, its own dims (rows), summed dims; the result has batch dims,
    rows, the right operand's dims (columns). "ij,jk->ki" with operand 0 on the left computes
    "ij,jk->ik" and then transposes the result. A summed dim that only one operand has is in neither
    order.

    Args:
        left_operand: The index of the operand on the left: 0 or 1.
        names: The names of all dims, numbers in place of letters. An array has each name once.
        lengths: The length of each dim by name, to count what transposing would copy.
    """
    left_names = names.operands[left_operand]
    right_names = names.operands[1 - left_operand]
    in_both = set(left_names) & set(right_names)
    batch = [name for name in names.result if name in in_both]
    rows = [name for name in names.result if name not in right_names]
    columns = [name for name in names.result if name not in left_names]
    # In the order of the right operand, which is not transposed.
    summed = [name for name in right_names if name in in_both and name not in names.result]
    ordered_left = (*batch, *rows, *summed)
    ordered_result = (*batch, *rows, *columns)

    n_copied = 0
    if left_names != ordered_left:
        n_copied += _n_elements(left_names, lengths)
    if names.result != ordered_result:
        n_copied += _n_elements(names.result, lengths)
    return _DimOrder(left_operand, ordered_left, ordered_result, n_copied)


def _n_elements(names: Names, lengths: dict[int, int]) -> int:
    """Count the elements of an array with these dims."""
    return prod(lengths[name] for name in names)


def _run(
    x: jax.Array, y: jax.Array, *, names: ProductNames, cuts: Any, **options: Any
) -> jax.Array:
    """Compute the einsum as a matrix product, with that operand on the left that copies less.

    "ij,jk->ki" is computed as "kj,ij->ki", with the second operand on the left and transposed; or
    as "ij,jk->ik", with the result transposed. The smaller of these two arrays is copied.

    Args:
        x: The first operand.
        y: The second operand.
        names: The names of all dims, as numbers.
        cuts: For each dim of the result the Explicit axes that shard it; None if there are no such
            axes.
        options: As for `jnp.einsum`.
    """
    first_names, second_names = names.operands
    lengths = dict(zip(first_names + second_names, x.shape + y.shape, strict=True))
    orders = (_dim_order(0, names, lengths), _dim_order(1, names, lengths))
    order = min(orders, key=lambda order: order.n_copied)

    left = (x, y)[order.left_index]
    left_names = names.operands[order.left_index]
    right = (x, y)[1 - order.left_index]
    right_names = names.operands[1 - order.left_index]
    # A dim that only the left operand has, and that is summed, is in no order: `einsum` sums it
    # before the product, so that transposing the operand first would be of no use.
    has_all_dims = len(left_names) == len(order.left_names)
    if left_names != order.left_names and has_all_dims:
        permutation = list(map(left_names.index, order.left_names))
        left = _in_memory_order(lax.transpose(left, permutation))
        left_names = order.left_names

    out_sharding = None
    if cuts is not None:
        cut_of = dict(zip(names.result, cuts, strict=True))
        out_sharding = jax.P(*map(cut_of.get, order.result_names))
    result = jnp.einsum(
        left,
        left_names,
        right,
        right_names,
        order.result_names,
        out_sharding=out_sharding,
        **options,
    )
    if order.result_names == names.result:
        return result
    permutation = list(map(order.result_names.index, names.result))
    return lax.transpose(_in_memory_order(result), permutation)


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

    "ij,jk->ik": that of the first operand is "ik,jk->ij". "ij,ik->ik", which sums j of the first
    operand alone: that of the first operand is "ik,ik->i", the same for all j.

    Args:
        i: The number of the operand.
        cotangent: The cotangent of the result.
        operand_type: The operand's type.
        other: The other operand.
        names: The names of all dims of the product.
        cuts: The Explicit axes that shard the result of the product. Not used: JAX passes all
            parameters of an operation to its rules.
        options: As for `jnp.einsum`.
    """
    operand_names = names.operands[i]
    other_names = names.operands[1 - i]
    # A dim that neither the result nor the other operand has, as j above, was summed. The cotangent
    # is computed without it, and repeated along it at the end.
    available_names = {*names.result, *other_names}
    computed_dims = [dim for dim, name in enumerate(operand_names) if name in available_names]

    out_sharding = None
    computed_cuts = None
    if AxisType.Explicit in operand_type.sharding.mesh.axis_types:
        out_sharding = operand_type.sharding
        entries = cuts_of(out_sharding.spec)
        computed_cuts = tuple(entries[dim] for dim in computed_dims)
    computed_names = tuple(operand_names[dim] for dim in computed_dims)
    y = _product(
        cotangent,
        other,
        names=ProductNames((names.result, other_names), computed_names),
        cuts=computed_cuts,
        **options,
    )
    if not jnp.issubdtype(operand_type.dtype, jnp.complexfloating):
        y = jnp.real(y)  # the gradient of a real operand, by which a complex one was multiplied
    y = lax.convert_element_type(y, operand_type.dtype)
    if len(computed_dims) == operand_type.ndim:
        return y
    return lax.broadcast_in_dim(y, operand_type.shape, computed_dims, out_sharding=out_sharding)


def _batch(
    bind: Operation,
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
        bind: The product.
        x: The first operand.
        y: The second operand.
        x_dim: The batch dim of `x`; None if `x` is the same for the whole batch.
        y_dim: The batch dim of `y`; None if `y` is the same for the whole batch.
        batch: The batch, with the mesh axes that shard it.
        names: The names of the dims of one product.
        cuts: For each dim of one result the Explicit axes that shard it; None if there are no such
            axes.
        options: As for `jnp.einsum`.

    Returns:
        The result, and its batch dim: the first, or None without a batch.
    """
    if x_dim is None and y_dim is None:
        return bind(x, y, names=names, cuts=cuts, **options), None
    first_names, second_names = names.operands
    batch_name = 1 + max(first_names + second_names, default=-1)  # a number that no dim has

    def with_batch(dims: Names, batch_dim: int | None) -> Names:
        """Add the name of the batch: (0, 1) with batch dim 1 -> (0, 2, 1)."""
        if batch_dim is None:
            return dims
        return (*dims[:batch_dim], batch_name, *dims[batch_dim:])

    operands = (with_batch(first_names, x_dim), with_batch(second_names, y_dim))
    names = ProductNames(operands, (batch_name, *names.result))
    if cuts is not None:
        batch_cut = batch.mesh_axes if batch.mesh_axes else None
        cuts = (batch_cut, *cuts)
    return bind(x, y, names=names, cuts=cuts, **options), 0


_product: Operation = bilinear_primitive(
    "xshard_product",
    run=_run,
    abstract_eval=types_of(_run, ("names", "cuts", "preferred_element_type", "precision")),
    transposes=(partial(_transpose, 0), partial(_transpose, 1)),
    batch=_batch,
)

# XLA:CPU would fold the order into the product, for which it then has no fast kernel.
_in_memory_order: Operation = linear_primitive(
    "xshard_in_order",
    run=lax.optimization_barrier,
    transpose=lambda cotangent: cotangent,
    on_platforms=dict.fromkeys(ACCELERATORS, lambda x: x),
)
