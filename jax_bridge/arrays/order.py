"""The order in which the rows of a global array are stored, remembered on the array.

A move records the order into which it puts the rows, and `stored_as` records one. JAX itself drops the
record: the result of a computation is without, and so is a tracer.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from jax_bridge.mesh.context import AnyMesh, xshard_mesh
from xshard import Layout, Sharding
from xshard.arguments import is_on
from xshard.errors import MeshError, ShapeError
from xshard.layout.runs import row_numbers
from xshard.notation.parser import Shard

STRICT = is_on("XSHARD_DEBUG")  # unknown orders are refused, too
_RECORD = "_xshard_order"


def stored_as(array: jax.Array, layout: Layout | str, mesh: AnyMesh | None = None) -> jax.Array:
    """Record in which order the rows of an array are stored -> the same array.

    For arrays that were computed from others in storage order, loaded, or ordered by hand: `reshard` then
    refuses to read them in another order. Nothing moves; a tracer is returned as it is.
    layout: an order such as `s/zigzag(cp)`, or none, as in `s/cp`. mesh: default: the array's own.
    Raises NotationError, ShapeError, MeshError.

    >>> mesh = jax.make_mesh((1,), ("cp",))
    >>> stored_as(jax.numpy.arange(4), "s/zigzag(cp)", mesh).tolist()
    [0, 1, 2, 3]
    """
    if isinstance(array, Tracer):
        return array
    if mesh is None and isinstance(array.sharding, NamedSharding):
        mesh = array.sharding.mesh
    if mesh is None:
        raise MeshError("the array lacks a mesh", text=str(layout), hint="stored_as(array, layout, mesh)")
    return remember(array, Sharding(Layout.parse(layout), xshard_mesh(mesh), array.shape))


def remember(array: Any, stored: Sharding) -> Any:
    """Record the order of the rows -> the same array. stored: the array, or the words of its keys."""
    if not isinstance(array, Tracer):
        if len(stored.shape) > array.ndim:
            layout = replace(stored.layout, dims=stored.layout.dims[: array.ndim])
            stored = Sharding(layout, stored.mesh, array.shape)
        setattr(array, _RECORD, stored)
    return array


def order_of(array: Any) -> Sharding | None:
    """The recorded order of the rows, if any."""
    return None if isinstance(array, Tracer) else getattr(array, _RECORD, None)


def check_order(array: Any, source: Sharding, text: str) -> None:
    """Raise ShapeError if the rows of an array are in another order than its source says.

    Without a record the source is believed; if XSHARD_DEBUG is on, it is only where rows are contiguous.
    """
    known = order_of(array)
    if isinstance(array, Tracer) or (known is None and not STRICT):
        return
    if (() if known is None else _orders(known)) == _orders(source):
        return
    if known is None:
        reason = f"nothing says that the rows of the array are stored as '{source.layout}'"
    else:
        reason = f"the rows of the array are stored as '{known.layout}'"
    say = f"stored_as(array, '{source.layout}')"
    raise ShapeError(reason, text=text, hint=f"write their order on the left, or say what it is: {say}")


def stored_rows(array: Sharding, dim: int) -> NDArray[np.int64] | None:
    """The rows of a dim, device by device; None if that is their own order."""
    rows = np.concatenate([row_numbers(owned) for owned in array.owners(dim)])
    return None if np.array_equal(rows, np.arange(array.shape[dim])) else rows


@lru_cache(maxsize=4096)
def _orders(stored: Sharding) -> tuple[tuple[int, Shard, tuple[int, ...]], ...]:
    """The shards in another order than their rows' own: the dim, the shard, the sizes of its axes."""
    dims = stored.normal.dims
    ordered = [i for i, dim in enumerate(dims) if any(shard.order != "block" for shard in dim.shards)]
    return tuple((i, shard, stored.mesh.sizes_of(shard.axes)) for i in ordered for shard in dims[i].shards)
