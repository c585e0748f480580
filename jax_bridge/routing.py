"""`route` inside `shard_map`: rows to devices that values name, and back; `xshard.routing` says what. Shapes
are static: each device sends as many copies to each as the capacity says, the rest of them padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_bridge.calls import as_array
from jax_bridge.mesh.axis_types import as_varying, axis_size, bound_size, is_vmapped, varying_axes
from xshard.errors import MeshError, ShapeError
from xshard.ops import Axes
from xshard.routing import Groups, check_rows


@dataclass(frozen=True)
class Copies:
    """Copies of this device's rows, on their way and back. index: the row of each copy sent, by parts, or
    `n_rows` for padding: `[devices * capacity]`. counts: copies to each device, and copies from each.
    """

    axis: tuple[str, ...]
    n_rows: int
    k: int
    index: jax.Array
    counts: tuple[jax.Array, jax.Array]

    def sent(self, x: jax.Array) -> jax.Array:
        return self._exchanged(x.at[self.index].get(mode="fill", fill_value=0), *self.counts)

    def home(self, y: jax.Array) -> jax.Array:
        result = jnp.zeros((self.n_rows, *y.shape[1:]), y.dtype)
        return result.at[self.index].add(self._exchanged(y, *self.counts[::-1]), mode="drop")

    def _exchanged(self, x: jax.Array, sent: jax.Array, received: jax.Array) -> jax.Array:
        x = as_varying(x, self.axis)
        padded = partial(_all_to_all, axis=self.axis)
        if any(map(is_vmapped, self.axis)):
            return padded(x)

        def ragged(x: jax.Array) -> jax.Array:
            starts = jnp.arange(len(sent)) * (len(x) // len(sent))
            places = jnp.full_like(starts, lax.axis_index(self.axis) * (len(x) // len(sent)))
            tables = (table.astype(jnp.int32) for table in (starts, sent, places, received))
            arguments = (as_varying(y, varying_axes(x)) for y in (jnp.zeros_like(x), *tables))
            return lax.ragged_all_to_all(x, *arguments, axis_name=self.axis)

        return lax.platform_dependent(
            x, cpu=padded, default=ragged
        )  # XLA has no ragged one for CPUs


@dataclass(frozen=True)
class Routed:
    """Rows that came, by group, and the way back. `sizes`: how many each group has; rows after those are
    zeros. `dropped`: how many copies of this device's rows were not sent.
    """

    rows: jax.Array
    sizes: jax.Array
    dropped: jax.Array
    _there: Copies
    _choices: jax.Array  # of each row: its number among all choices of all copies

    def back(self, y: jax.Array, weights: jax.Array | None = None) -> jax.Array:
        """A result per row of `rows` -> the sum of results of each row at home: `[n, ...] -> [rows, ...]`.

        weights: factors of results, with the shape of `to`. Products are added up before one row returns for
        each copy. Raises ShapeError.
        """
        if y.ndim < 1 or len(y) != len(self.rows):
            hint = f"a result for each of {len(self.rows)} rows, in their order"
            raise ShapeError(f"results of shape {y.shape}", hint=hint)
        known = jnp.arange(len(y)) < self.sizes.sum()
        ones = [1] * (y.ndim - 1)
        y = jnp.where(known.reshape(-1, *ones), y, 0)  # padding has any values
        if weights is not None:
            if (
                len(weights) != self._there.n_rows
                or weights.size != self._there.n_rows * self._there.k
            ):
                raise ShapeError(f"weights have shape {weights.shape}", hint="the shape of to")
            factors = self._there.sent(weights.reshape(len(weights), -1)).reshape(-1)[self._choices]
            y = y * factors.reshape(-1, *ones).astype(y.dtype)
        shares = jnp.zeros((len(self._there.index), *y.shape[1:]), y.dtype)
        return self._there.home(shares.at[self._choices // self._there.k].add(y))


def _all_to_all(x: jax.Array, axis: tuple[str, ...]) -> jax.Array:
    return lax.all_to_all(x, axis, 0, 0, tiled=True)


def route(
    x: jax.Array,
    to: jax.Array,
    axis: Axes,
    *,
    groups: int | Sequence[int] | None = None,
    capacity: int | None = None,
) -> Routed:
    """Send each row to the devices of the groups that it chose, as tokens to experts, inside `shard_map`.

    `[rows, ...]` -> a `Routed`: its `rows` are those that came, a row per choice, by group, then by the
    device and the row that they come from: `[devices * capacity * k, ...]`, zeros at the end. `sizes` says
    how many each group has, `[most groups of a device]`, as `lax.ragged_dot` takes them. `back(y, weights=)`
    brings one result per row home and adds them up. A device gets one copy of a row, however many of its
    groups the row chose, and one returns. Every mode of differentiation works.

    to: the group of each row, `[rows]`, or several, `[rows, k]`; other numbers than 0 to `groups` - 1 go
    nowhere. axis: an axis that is manual here, or several taken as one. groups: their number, sharded as
    `"g/axis"` says, or for each the part of the axis that it is on. Default: one per device.
    capacity: the most copies from each device to each; the first rows go, and `dropped` is the number of
    copies of this device's rows that did not. Default: as many as rows, none is dropped.
    GPUs and TPUs send no padding (`lax.ragged_all_to_all`), CPUs do.
    Raises MeshError for an axis that is not manual here, and ShapeError.

    >>> def doubled(x, to):
    ...     there = route(x, to, "ep", groups=2)
    ...     return there.sizes, there.back(2 * there.rows)
    >>> x, to = jnp.arange(3.0)[:, None], jnp.array([[1, 0], [0, 1], [1, -1]])
    >>> sizes, y = jax.pmap(doubled, "ep")(x[None], to[None])  # one device
    >>> sizes.tolist(), y.ravel().tolist()
    ([[2, 3]], [0.0, 4.0, 4.0])
    """
    x = as_array(x, "route")
    to = as_array(to, "route")
    axis = (axis,) if isinstance(axis, str) else tuple(axis)
    for name in axis:
        if bound_size(name) is None:
            raise MeshError(
                f"'{name}' is not manual here", hint="call it inside shard_map over this axis"
            )
    check_rows(x.shape, to.shape, jnp.issubdtype(to.dtype, jnp.integer), capacity=capacity)
    n = axis_size(axis)
    n_rows = len(to)
    own = Groups.of(groups, n)
    most = len(to) if capacity is None else min(capacity, len(to))
    chosen = to.reshape(n_rows, -1)
    n_groups = max(Groups.of(groups, n).sizes)
    k = chosen.shape[1]
    chosen = jnp.where((chosen >= 0) & (chosen < len(own.parts)), chosen, len(own.parts))
    parts = jnp.asarray((*own.parts, n))[chosen]
    meets = (parts[:, :, None] == jnp.arange(n)).any(1)
    place = jnp.cumsum(meets, 0) - 1
    kept = meets & (place < most)
    # Copies are written to `part * most + place`; beyond all of them is nowhere.
    slots = jnp.where(kept, jnp.arange(n) * most + place, n * most)
    rows = jnp.broadcast_to(jnp.arange(n_rows)[:, None], slots.shape)
    index = jnp.full((n * most,), n_rows).at[slots].set(rows, mode="drop")
    count = kept.sum(0)
    there = Copies(axis, n_rows, k, index, (count, _all_to_all(as_varying(count, axis), axis)))
    is_here = (
        parts.at[index].get(mode="fill", fill_value=n) == jnp.repeat(jnp.arange(n), most)[:, None]
    )
    numbers = jnp.asarray((*own.numbers, 0))[chosen].at[index].get(mode="fill", fill_value=0)
    sent = jnp.where(is_here, numbers, n_groups)
    choices = _all_to_all(as_varying(sent, axis), axis).reshape(-1)
    order = jnp.argsort(choices, stable=True)
    sizes = jnp.bincount(choices, length=n_groups + 1)[:n_groups]
    known = jnp.arange(len(order)) < sizes.sum()
    came = there.sent(x)[order // k]
    came = jnp.where(known.reshape(-1, *[1] * (x.ndim - 1)), came, 0)
    return Routed(came, sizes, meets.sum() - count.sum(), there, order)
