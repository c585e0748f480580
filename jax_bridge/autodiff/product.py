"""The einsum of two blocks as one operation of JAX. Its derivatives are such einsums again. JAX computes the
gradient of a product in the order of the cotangent's dims and transposes it; here it is computed in the order
of the operand.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

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


def multiplied(x: jax.Array, y: jax.Array, names: Sequence[Names], **options: Any) -> jax.Array:
    """Two arrays -> `jnp.einsum(x, names[0], y, names[1], names[2], **options)`."""
    varying = varying_axes(x) | varying_axes(y)
    return _product(
        as_varying(x, varying), as_varying(y, varying), names=tuple(names), cuts=None, **options
    )


def _run(x: jax.Array, y: jax.Array, *, names: Any, cuts: Any, **options: Any) -> jax.Array:
    """names: names of the dims of both and of the result. cuts: Explicit axes that shard it, or None."""
    kept = names[2]
    sizes = dict(zip(itertools.chain(*names[:2]), (*x.shape, *y.shape), strict=True))

    def rows_of(i: int) -> tuple[int, int, Names, Names]:
        """Elements to copy if operand i has the rows; i; its order; the order of the result."""
        mine = names[i]
        other = names[1 - i]
        batch, summed = ([n for n in one if n in mine and n in other] for one in (kept, other))
        rows = [*batch, *(n for n in kept if n not in other)]
        order = (*rows, *(n for n in summed if n not in kept))
        result_order = (*rows, *(n for n in kept if n not in mine))
        copied = [dims for dims, wanted in ((mine, order), (result_order, kept)) if dims != wanted]
        return sum(prod(sizes[n] for n in dims) for dims in copied), i, order, result_order

    _, i, order, result_order = min(rows_of(0), rows_of(1))
    arrays = [x, y]
    dims = [*names[:2]]
    if dims[i] != order and sorted(dims[i]) == sorted(
        order
    ):  # else it has dims that are summed before
        arrays[i] = _in_order(lax.transpose(arrays[i], [dims[i].index(n) for n in order]))
        dims[i] = order
    to = None if cuts is None else jax.P(*(cuts[kept.index(n)] for n in result_order))
    y = jnp.einsum(
        arrays[i], dims[i], arrays[1 - i], dims[1 - i], result_order, out_sharding=to, **options
    )
    return (
        y
        if result_order == kept
        else lax.transpose(_in_order(y), [result_order.index(n) for n in kept])
    )


def _transpose(
    i: int,
    cotangent: jax.Array,
    one: Any,
    other: jax.Array,
    *,
    names: Any,
    cuts: Any,
    **options: Any,
) -> jax.Array:
    """The cotangent of operand i, of type `one`."""
    mine = names[i]
    theirs = names[1 - i]
    kept = names[2]
    dims = [k for k, name in enumerate(mine) if name in kept or name in theirs]
    explicit = AxisType.Explicit in one.sharding.mesh.axis_types
    cuts = tuple(cuts_of(one.sharding.spec)[k] for k in dims) if explicit else None
    new_names = kept, theirs, tuple(mine[k] for k in dims)
    y = lax.convert_element_type(
        _product(cotangent, other, names=new_names, cuts=cuts, **options), one.dtype
    )
    # Along a dim that is summed alone, the gradient is repeated.
    to = one.sharding if explicit else None
    return y if len(dims) == one.ndim else lax.broadcast_in_dim(y, one.shape, dims, out_sharding=to)


def _batch(
    x: jax.Array,
    y: jax.Array,
    x_dim: Any,
    y_dim: Any,
    along: Batch,
    *,
    names: Any,
    cuts: Any,
    **options: Any,
) -> tuple[jax.Array, int | None]:
    if x_dim is None and y_dim is None:
        return _product(x, y, names=names, cuts=cuts, **options), None
    new = 1 + max(itertools.chain(*names))
    pairs = zip(names, (x_dim, y_dim, 0), strict=True)
    wider = tuple(some if dim is None else (*some[:dim], new, *some[dim:]) for some, dim in pairs)
    cuts = None if cuts is None else (along.mesh_axes or None, *cuts)
    return _product(x, y, names=wider, cuts=cuts, **options), 0


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
