"""How the boxes of an exchange travel: round by round as permutations, or all at once in one buffer.

Decides nothing of what is sent. `lax.ragged_all_to_all` is one collective for all rounds, which XLA has
for GPUs and TPUs, not for CPUs.
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
from jax_bridge.mesh.axis_types import send, varying, varying_axes
from jax_bridge.mesh.sub_axes import long_axes
from xshard.layout.mesh import Mesh


class Transport(NamedTuple):
    """What a platform has for exchanges.

    send: the packed box of every round, its messages, the mesh -> the boxes that arrived.
    branches: whether every device may go a branch of its own; on GPUs the host would wait to choose it.
    """

    send: Callable[[Sequence[jax.Array], Sequence[Round], Mesh], list[jax.Array]]
    branches: bool


def _permuted(boxes: Sequence[jax.Array], rounds: Sequence[Round], mesh: Mesh) -> list[jax.Array]:
    """One `ppermute` a round."""
    return [
        send(box, mesh, [(m.src, m.dst) for m in messages])
        for box, messages in zip(boxes, rounds, strict=True)
    ]


def _ragged(boxes: Sequence[jax.Array], rounds: Sequence[Round], mesh: Mesh) -> list[jax.Array]:
    """All rounds behind each other in one buffer, sent by one `ragged_all_to_all`.

    It has one slice for every pair of devices: where a pair has several messages, as many are made.
    """
    result = list(boxes)
    for sent in _once_per_pair(rounds):
        _send_ragged(result, sent, rounds, mesh)
    return result


def _once_per_pair(rounds: Sequence[Round]) -> list[list[int]]:
    """Numbers of the rounds, in groups in which a pair of devices has one message at most."""
    groups: list[tuple[list[int], set[tuple[int, int]]]] = []
    for i, messages in enumerate(rounds):
        pairs = {(m.src, m.dst) for m in messages}
        for numbers, taken in groups:
            if not pairs & taken:
                numbers.append(i)
                taken |= pairs
                break
        else:
            groups.append(([i], pairs))
    return [numbers for numbers, _ in groups]


def _send_ragged(boxes: list[jax.Array], sent: list[int], rounds: Sequence[Round], mesh: Mesh) -> None:
    """Replace the boxes of some rounds by those that arrive."""
    axes = long_axes(mesh)
    shapes = [boxes[i].shape for i in sent]
    tables = [mine(table, axes) for table in slices([rounds[i] for i in sent], shapes, mesh.n_devices)]
    buffer = jnp.concatenate([boxes[i].reshape(-1) for i in sent])
    # The result has the type of the buffer that it is written to, which zeros alone do not have.
    arrived = lax.ragged_all_to_all(
        buffer, varying(jnp.zeros_like(buffer), varying_axes(buffer)), *tables, axis_name=axes
    )
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    for i, shape, box in zip(sent, shapes, jnp.split(arrived, ends[:-1]), strict=True):
        boxes[i] = box.reshape(shape)


class Slices(NamedTuple):
    """The arguments of `ragged_all_to_all` for every device (first index) and every other: in elements."""

    input_offsets: NDArray[np.int32]
    send_sizes: NDArray[np.int32]
    output_offsets: NDArray[np.int32]
    recv_sizes: NDArray[np.int32]


def slices(rounds: Sequence[Round], shapes: Sequence[tuple[int, ...]], n_devices: int) -> Slices:
    """Where every message is in a buffer of boxes of those shapes, one per round.

    A round's box stands at the same place in all buffers. What is sent of it ends with the last element of
    the message: where it is padded along the first dim, the padding stays behind.
    """
    offsets, sizes = np.zeros((2, n_devices, n_devices), np.int32)
    start = 0
    for messages, shape in zip(rounds, shapes, strict=True):
        for message in messages:
            offsets[message.src, message.dst] = start
            last = [n - 1 for n in message.shape]
            sizes[message.src, message.dst] = np.ravel_multi_index(last, shape) + 1 if shape else 1
        start += math.prod(shape)
    return Slices(offsets, sizes, offsets, sizes.T.copy())


permuted, ragged = Transport(_permuted, branches=True), Transport(_ragged, branches=False)
anywhere = Transport(_permuted, branches=False)  # where a program does not know its platform
