"""`route` inside `shard_map`: rows to devices that values name, and back.

`xshard.routing` says what.

Shapes are static: each device sends as many copies to each as the capacity says, and pads what it
lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_bridge.calls import as_array
from jax_bridge.lower.row_tables import along_dim
from jax_bridge.mesh.axis_types import as_varying, axis_size, bound_size, is_vmapped, varying_axes
from xshard.errors import MeshError, ShapeError, api_boundary
from xshard.ops import Axes
from xshard.routing import Groups, check_rows
from xshard.signatures import Length


@dataclass(frozen=True)
class Copies:
    """Copies of this device's rows, one for each device that has a group that the row chose.

    They lie in a buffer with `capacity` places for each device: [devices * capacity, ...].
    """

    axis: tuple[str, ...]
    n_rows: int  # of this device
    n_choices: int  # of each row
    row_of_copy: jax.Array  # [devices * capacity], `n_rows` for padding
    n_sent: jax.Array  # copies to each device: [devices]
    n_received: jax.Array  # copies from each device: [devices]

    def send(self, x: jax.Array) -> jax.Array:
        """Send copies of rows: [rows, ...] -> copies that arrive [devices * capacity, ...]."""
        copies = x.at[self.row_of_copy].get(mode="fill", fill_value=0)
        return _exchange_chunks(copies, self.axis, self.n_sent, self.n_received)

    def home(self, y: jax.Array) -> jax.Array:
        """Send the copies back and add up the copies of each row: the transpose of `send`."""
        # On the way back a device sends as many rows as it received, and receives what it sent.
        copies = _exchange_chunks(y, self.axis, self.n_received, self.n_sent)
        result = jnp.zeros((self.n_rows, *y.shape[1:]), y.dtype)
        return result.at[self.row_of_copy].add(copies, mode="drop")


def _exchange_chunks(
    x: jax.Array, axis: tuple[str, ...], n_sent: jax.Array, n_received: jax.Array
) -> jax.Array:
    """Send chunk i of a buffer to device i, all-to-all; GPUs and TPUs leave out the padding.

    On 2 devices [a0, a1] of device 0 and [b0, b1] of device 1 become [a0, b0] and [a1, b1].

    Args:
        x: A buffer with equal chunks, one for each device: [devices * capacity, ...].
        axis: The axes along which the devices are numbered.
        n_sent: The rows in use at the beginning of each chunk: [devices].
        n_received: The rows that each device sends to this one: [devices].

    Returns:
        A buffer of the same shape, whose chunk i came from device i.
    """
    x = as_varying(x, axis)

    def padded(x: jax.Array) -> jax.Array:
        return _all_to_all(x, axis)

    def ragged(x: jax.Array) -> jax.Array:
        """Send the rows in use only.

        With a capacity of 3, device 1 has its rows for device 2 at rows 6, 7, ... of its buffer, and
        they arrive at rows 3, 4, ... of device 2's.
        """
        n_devices = len(n_sent)
        capacity = len(x) // n_devices
        starts = jnp.arange(n_devices) * capacity
        output_offsets = jnp.full_like(starts, lax.axis_index(axis) * capacity)
        # JAX wants all arguments to be declared different on all devices along the same axes.
        varying = sorted(varying_axes(x))
        output = as_varying(jnp.zeros_like(x), varying)
        offsets_and_sizes = [
            as_varying(offsets.astype(jnp.int32), varying)
            for offsets in (starts, n_sent, output_offsets, n_received)
        ]
        return lax.ragged_all_to_all(x, output, *offsets_and_sizes, axis_name=axis)

    if any(map(is_vmapped, axis)):
        return padded(x)
    return lax.platform_dependent(x, cpu=padded, default=ragged)  # XLA has no ragged one for CPUs


@dataclass(frozen=True)
class Routed:
    """Rows that came, by group, and the way back.

    Attributes:
        rows: A row per choice, by group; zeros at the end.
        sizes: The number of rows of each group.
        dropped: The number of copies of this device's rows that were not sent.
    """

    rows: jax.Array
    sizes: jax.Array
    dropped: jax.Array
    _copies: Copies
    # For each row the choice that it is of: choices are counted copy by copy, `n_choices` of each.
    _choice_of_row: jax.Array

    @api_boundary
    def back(self, y: jax.Array, weights: jax.Array | None = None) -> jax.Array:
        """Bring results home, and add up the results of each row: `[n, ...] -> [rows, ...]`.

        A row that chose several groups has a result from each. Those on one device are added up
        there, so that one row per device returns.

        Args:
            y: A result for each row of `rows`, in their order.
            weights: Factors of the results, with the shape of `to`.

        Returns:
            The sum of the results of each of this device's rows.

        Raises:
            ShapeError: There are other numbers of results or weights.
        """
        if y.ndim < 1 or len(y) != len(self.rows):
            hint = f"a result for each of {len(self.rows)} rows, in their order"
            raise ShapeError(f"results of shape {y.shape}", hint=hint)
        y = _with_zero_padding(y, self.sizes)  # it may hold anything
        if weights is not None:
            y = y * along_dim(self._weights_of_rows(weights), 0, y.ndim).astype(y.dtype)
        # Each copy of a row that arrived here has `n_choices` choices, counted copy by copy: with 2,
        # choice 5 is of copy 2.
        copies = self._copies
        copy_of_row = self._choice_of_row // copies.n_choices
        sums_of_copies = jnp.zeros((len(copies.row_of_copy), *y.shape[1:]), y.dtype)
        return copies.home(sums_of_copies.at[copy_of_row].add(y))

    def _weights_of_rows(self, weights: jax.Array) -> jax.Array:
        """Bring the weights of choices, [rows, choices], to the rows that were sent: [n]."""
        copies = self._copies
        n_weights = copies.n_rows * copies.n_choices
        if len(weights) != copies.n_rows or weights.size != n_weights:
            raise ShapeError(f"weights have shape {weights.shape}", hint="the shape of to")
        # Each copy brings the weights of all choices along; a row takes the one of its choice.
        arrived = copies.send(weights.reshape(copies.n_rows, -1))  # [copies, choices]
        return arrived.reshape(-1)[self._choice_of_row]


def _with_zero_padding(rows: jax.Array, sizes: jax.Array) -> jax.Array:
    """Overwrite the padding behind the rows of all groups with zeros."""
    is_row = jnp.arange(len(rows)) < sizes.sum()
    return jnp.where(along_dim(is_row, 0, rows.ndim), rows, 0)


def _all_to_all(x: jax.Array, axis: tuple[str, ...]) -> jax.Array:
    """Send each device its part of a buffer, padding included."""
    return lax.all_to_all(x, axis, 0, 0, tiled=True)


@api_boundary
def route(
    x: jax.Array,
    to: jax.Array,
    axis: Axes,
    *,
    groups: int | Sequence[int] | None = None,
    capacity: Length | None = None,
) -> Routed:
    """Send each row to the devices of the groups that it chose, as tokens to experts.

        routed = route(x, to, "ep", groups=8)                    # x: [rows, d], to: [rows, k]
        y = routed.back(expert(routed.rows, routed.sizes))       # [n, d] -> [rows, d]

    It works inside `shard_map`. A device gets one copy of a row, however many of its groups the row
    chose, and one returns. Every mode of differentiation works. GPUs and TPUs send no padding
    (`lax.ragged_all_to_all`), CPUs do.

    Args:
        x: This device's rows: `[rows, ...]`.
        to: The group of each row, `[rows]`, or several, `[rows, k]`; other numbers than 0 to
            `groups` - 1 go nowhere.
        axis: An axis that is manual here, or several taken as one.
        groups: The number of groups, sharded as `"g/axis"` says, or for each the part of the axis
            that it is on. Default: one per device.
        capacity: The most copies from each device to each. The first rows go, and `dropped` is the
            number of copies of this device's rows that did not. Default: as many as rows, none is
            dropped.

    Returns:
        A `Routed`. Its `rows` are the rows that came, `[devices * capacity * k, ...]`: a row per
        choice, by group, then by the device and the row that they come from, and zeros at the end.
        `sizes` says how many each group has, `[most groups of a device]`, as `lax.ragged_dot` takes
        them. `back(y, weights=)` brings one result per row home and adds them up.

    Raises:
        MeshError: An axis is not manual here.
        ShapeError: `to`, `groups` or `capacity` do not fit.

    Examples:
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
    axes = _manual_axes(axis)
    check_rows(x.shape, to.shape, jnp.issubdtype(to.dtype, jnp.integer), capacity=capacity)
    n_rows = len(to)
    n_devices = axis_size(axes)
    groups_on_devices = Groups.of(groups, n_devices)
    copies_per_device = n_rows if capacity is None else min(capacity, n_rows)

    choices = _choices_of_rows(to.reshape(n_rows, -1), groups_on_devices)
    placed = _place_copies(choices.device, n_devices, copies_per_device)
    n_received = _all_to_all(as_varying(placed.n_sent, axes), axes)
    n_choices = choices.device.shape[1]
    copies = Copies(
        axis=axes,
        n_rows=n_rows,
        n_choices=n_choices,
        row_of_copy=placed.row_of_copy,
        n_sent=placed.n_sent,
        n_received=n_received,
    )

    # Each copy brings the group of each of its choices along: [devices * capacity, choices].
    n_groups = max(groups_on_devices.sizes)
    sent_groups = _groups_of_copies(choices, placed.row_of_copy, n_devices, n_groups)
    arrived_groups = _all_to_all(as_varying(sent_groups, axes), axes).reshape(-1)

    # Sort the choices by group: with 2 choices and 2 groups, copies that bring the groups [1, 2] and
    # [0, 1] have the choices 0 to 3, sorted 2, 0, 3, 1. Padding, and choices of groups on other
    # devices, have the number `n_groups` and come last: here choice 1.
    choice_of_row = jnp.argsort(arrived_groups, stable=True)
    sizes = jnp.bincount(arrived_groups, length=n_groups + 1)[:n_groups]
    rows = copies.send(x)[choice_of_row // n_choices]
    rows = _with_zero_padding(rows, sizes)
    return Routed(
        rows=rows,
        sizes=sizes,
        dropped=placed.n_dropped,
        _copies=copies,
        _choice_of_row=choice_of_row,
    )


def _manual_axes(axis: Axes) -> tuple[str, ...]:
    """Return the axes of a call of `route`. Raises MeshError unless all are manual here."""
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    for name in axes:
        if bound_size(name) is None:
            raise MeshError(
                f"'{name}' is not manual here", hint="call it inside shard_map over this axis"
            )
    return axes


class _Choices(NamedTuple):
    """The groups that rows chose: [rows, choices]."""

    # The device of the group; for a choice that goes nowhere the number of devices, as no device.
    device: jax.Array
    local_group: jax.Array  # the group's number among the groups of its device


def _choices_of_rows(to: jax.Array, groups: Groups) -> _Choices:
    """Look up the device of each chosen group.

    Args:
        to: The indices of groups, [rows, choices].
        groups: Which device has each group.
    """
    nowhere = len(groups.parts)
    chosen = jnp.where((to >= 0) & (to < nowhere), to, nowhere)
    device_of_group = jnp.asarray((*groups.parts, groups.n_parts))
    local_number_of_group = jnp.asarray((*groups.numbers, 0))
    return _Choices(device_of_group[chosen], local_number_of_group[chosen])


class _PlacedCopies(NamedTuple):
    """Where copies of rows lie in the buffer that is sent."""

    row_of_copy: jax.Array  # [devices * capacity], the number of rows for padding
    n_sent: jax.Array  # [devices]
    n_dropped: jax.Array


def _place_copies(device_of_choice: jax.Array, n_devices: int, capacity: int) -> _PlacedCopies:
    """Give each row a slot in the send buffer for each device that it goes to.

    The buffer has `capacity` slots per device. Rows 0, 1, 2 that chose the devices
    [[0, 1], [1, 1], [0, 2]], of 2 devices with 2 slots each: the buffer gets the rows [0, 2] for
    device 0 and [0, 1] for device 1. Number 2 is no device, and a row is sent to a device once.

    Args:
        device_of_choice: The device of each choice, or `n_devices` for one that goes nowhere:
            [rows, choices].
        n_devices: The number of devices.
        capacity: The most rows for each device; later ones are dropped.
    """
    n_rows = len(device_of_choice)
    buffer_length = n_devices * capacity
    devices = jnp.arange(n_devices)
    is_chosen = (device_of_choice[:, :, None] == devices).any(1)  # [rows, devices]
    # How many earlier rows go to the same device: [rows, devices].
    index_at_device = jnp.cumsum(is_chosen, 0) - 1
    is_sent = is_chosen & (index_at_device < capacity)
    # The slot of each copy: [rows, devices]. JAX drops what is written at `buffer_length`, which is
    # out of bounds.
    slots = jnp.where(is_sent, devices * capacity + index_at_device, buffer_length)
    rows = jnp.broadcast_to(jnp.arange(n_rows)[:, None], slots.shape)
    row_of_copy = jnp.full((buffer_length,), n_rows).at[slots].set(rows, mode="drop")
    n_sent = is_sent.sum(0)
    n_dropped = is_chosen.sum() - n_sent.sum()
    return _PlacedCopies(row_of_copy, n_sent, n_dropped)


def _groups_of_copies(
    choices: _Choices, row_of_copy: jax.Array, n_devices: int, n_groups: int
) -> jax.Array:
    """Return for each copy of a row the groups on the receiving device that the row chose.

    With 2 groups on each device, groups 2 and 3 are number 0 and 1 on device 1. A row that chose
    the groups 0 and 3 has two copies: for device 0 with [0, 2], for device 1 with [2, 1]. The
    number 2, `n_groups`, is no group: that choice is of another device. Padding has it, too.

    Args:
        choices: The device and the group of each choice: [rows, choices].
        row_of_copy: The row of each place in the send buffer: [devices * capacity].
        n_devices: The number of devices.
        n_groups: The most groups of a device.

    Returns:
        [devices * capacity, choices].
    """
    # [devices * capacity, choices] like the result; padding chose no device.
    chosen_device = choices.device.at[row_of_copy].get(mode="fill", fill_value=n_devices)
    chosen_group = choices.local_group.at[row_of_copy].get(mode="fill", fill_value=0)
    capacity = len(row_of_copy) // n_devices
    receiver = jnp.repeat(jnp.arange(n_devices), capacity)[:, None]
    return jnp.where(chosen_device == receiver, chosen_group, n_groups)
