"""How the boxes of an exchange travel: one permutation per round, or all rounds in one buffer.

`lax.ragged_all_to_all` is one collective for all rounds; XLA has it for GPUs and TPUs, not for CPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from jax_bridge.lower.row_tables import mine
from jax_bridge.lower.schedule import Round
from jax_bridge.mesh.axis_types import as_varying, long_axes, ppermute, varying_axes
from xshard import Mesh


class Transport(NamedTuple):
    """A way to send the boxes of an exchange.

    send: the packed box of every round, the rounds' messages, the mesh -> the boxes that arrived.
    branches: whether devices may take different branches of a program; on GPUs the host would wait for each.
    """

    send: Callable[[Sequence[jax.Array], Sequence[Round], Mesh], list[jax.Array]]
    branches: bool


def _by_ppermute(boxes: Sequence[jax.Array], rounds: Sequence[Round], mesh: Mesh) -> list[jax.Array]:
    """One `ppermute` per round."""
    pairs = ([(m.src, m.dst) for m in messages] for messages in rounds)
    return [ppermute(box, mesh, sent) for box, sent in zip(boxes, pairs, strict=True)]


def _by_ragged_all_to_all(boxes: Sequence[jax.Array], rounds: Sequence[Round], mesh: Mesh) -> list[jax.Array]:
    """All rounds in one buffer, sent by one `ragged_all_to_all`, or as many as a pair has messages."""
    result, axes = list(boxes), long_axes(mesh)
    for sent in _once_per_pair(rounds):
        shapes = [boxes[i].shape for i in sent]
        arguments = ragged_arguments([rounds[i] for i in sent], shapes, mesh.n_devices)
        buffer = jnp.concatenate([boxes[i].reshape(-1) for i in sent])
        # The result has the type of the buffer that it is written to: zeros are declared varying.
        new = as_varying(jnp.zeros_like(buffer), varying_axes(buffer))
        tables = [mine(table, axes) for table in arguments]
        arrived = lax.ragged_all_to_all(buffer, new, *tables, axis_name=axes)
        stops = np.cumsum([math.prod(shape) for shape in shapes])
        for i, shape, box in zip(sent, shapes, jnp.split(arrived, stops[:-1]), strict=True):
            result[i] = box.reshape(shape)
    return result


def _once_per_pair(rounds: Sequence[Round]) -> list[list[int]]:
    """Indices of the rounds, in groups with at most one message per pair of devices."""
    groups: list[tuple[list[int], set[tuple[int, int]]]] = []
    for i, messages in enumerate(rounds):
        pairs = {(m.src, m.dst) for m in messages}
        group = next((group for group in groups if not pairs & group[1]), None)
        if group is None:
            groups.append(group := ([], set()))
        group[0].append(i)
        group[1].update(pairs)
    return [members for members, _ in groups]


def ragged_arguments(
    rounds: Sequence[Round], shapes: Sequence[tuple[int, ...]], n_devices: int
) -> tuple[NDArray[np.int32], ...]:
    """The place of every message in a buffer with one box per round, of the given shapes.

    Input offsets, send sizes, output offsets and receive sizes in elements, by device and partner. A box is
    sent up to the last element of its message: padding along the first dim is not sent.
    """
    offsets, sizes = np.zeros((2, n_devices, n_devices), np.int32)
    start = 0
    for messages, shape in zip(rounds, shapes, strict=True):
        for message in messages:
            offsets[message.src, message.dst] = start
            last = [n - 1 for n in message.shape]
            sizes[message.src, message.dst] = np.ravel_multi_index(last, shape) + 1 if shape else 1
        start += math.prod(shape)
    return offsets, sizes, offsets, sizes.T.copy()


PERMUTE, RAGGED = Transport(_by_ppermute, branches=True), Transport(_by_ragged_all_to_all, branches=False)
PERMUTE_UNBRANCHED = Transport(_by_ppermute, branches=False)  # for programs that do not know their platform
