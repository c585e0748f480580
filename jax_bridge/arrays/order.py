"""The order in which the rows of a global array are stored, remembered on the array.

Decides what is known of an array of JAX: it is contiguous, unless a move has put it into storage order or
`stored_as` says so. JAX itself drops the record: the result of a computation has none, nor has a tracer.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding

from jax_bridge.planning import AnyMesh, xshard_mesh
from xshard import Layout, MeshError, ShapeError, Sharding
from xshard.notation.parser import Shard

_RECORD = "_xshard_order"


def stored_as(array: jax.Array, layout: Layout | str, mesh: AnyMesh | None = None) -> jax.Array:
    """Say in which order the rows of an array are stored -> the same array.

    For arrays that were computed from others in storage order, loaded, or ordered by hand: `reshard` does not
    read rows in an order of which it knows nothing. Nothing moves; a tracer is returned as it is.
    layout: an order such as `s/zigzag(cp)`, or none, as in `s/cp`. mesh: by default the array's own.
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
        raise MeshError("the array has no mesh", text=str(layout), hint="stored_as(array, layout, mesh)")
    return remember(array, Sharding(Layout.parse(layout), xshard_mesh(mesh), array.shape))


def remember(array: Any, stored: Sharding) -> Any:
    """Record the order of the rows -> the same array."""
    if not isinstance(array, Tracer):
        setattr(array, _RECORD, stored)
    return array


def check_order(array: Any, source: Sharding, text: str) -> None:
    """Raise ShapeError if the rows of an array are in another order than its source says."""
    if isinstance(array, Tracer):
        return
    known: Sharding | None = getattr(array, _RECORD, None)
    found = () if known is None else _orders(known)
    if found == _orders(source):
        return
    if found:
        raise ShapeError(
            f"the rows of the array are stored as '{known and known.layout}'",
            text=text,
            hint=f"write that on the left, or say what they are: stored_as(array, '{source.layout}')",
        )
    raise ShapeError(
        f"nothing says that the rows of the array are stored as '{source.layout}'",
        text=text,
        hint=f"an array of JAX is contiguous unless reshard has ordered it; to say that its rows are in this "
        f"order: stored_as(array, '{source.layout}')",
    )


@lru_cache(maxsize=4096)
def _orders(stored: Sharding) -> tuple[tuple[int, Shard, tuple[int, ...]], ...]:
    """The cuts of the dims whose rows are not contiguous: the dim, a cut, and the sizes of its axes."""
    dims = stored.normal.dims
    ordered = [i for i, dim in enumerate(dims) if any(shard.order != "block" for shard in dim.shards)]
    return tuple((i, shard, stored.mesh.sizes_of(shard.axes)) for i in ordered for shard in dims[i].shards)
