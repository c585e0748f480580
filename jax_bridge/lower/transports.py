"""Messages in rounds, and how their boxes travel: one permutation per round, or all rounds in one buffer.
Every device sends and receives at most one message in a round. Rounds colour the edges of the bipartite graph
of senders and receivers; the minimum, the most messages at one device, is always reached (König 1916).
`lax.ragged_all_to_all` is one collective for all rounds; XLA has it for GPUs and TPUs, not for CPUs.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from jax_bridge.lower.row_tables import mine
from jax_bridge.mesh.axis_types import as_varying, long_axes, ppermute, varying_axes
from xshard import Mesh, Sharding
from xshard.steps import Exchange
from xshard.steps.exchange.messages import Message, messages_to

Round = tuple[Message, ...]
MOST_PADDING = (
    1.02  # received elements per element of the messages; above it rounds are split by shape
)


class Schedule(NamedTuple):
    """The messages of an exchange in rounds."""

    local: tuple[
        Round, ...
    ]  # of devices to themselves, one shape and at most one per device in each round
    sent: tuple[Round, ...]  # all others

    @property
    def every(self) -> tuple[Round, ...]:
        return self.local + self.sent


@lru_cache(maxsize=1024)
def rounds(step: Exchange, before: Sharding) -> Schedule:
    """The schedule of an exchange."""
    after = step.after(before)
    devices = range(before.mesh.n_devices)
    messages = [
        m for device in devices for m in messages_to(before, after, device, step.node_devices)
    ]
    return scheduled(messages, adds=step.op(before) is not None)


def scheduled(messages: Sequence[Message], *, adds: bool) -> Schedule:
    """The schedule of messages. adds: True if boxes are added up: a sum starts with the device's own box."""
    # Else local messages join the rounds if that adds none: devices that receive nothing still write a box.
    sent = _in_rounds([m for m in messages if not _is_local(m)])
    # The busiest device's messages bound the rounds from below: most schedules need not be tried.
    if not adds and _busiest((m.src, m.dst) for m in messages) <= len(sent):
        joint = _in_rounds(messages)
        if len(joint) <= len(sent):
            return Schedule((), tuple(joint))
    local = _by_shape([m for m in messages if _is_local(m)])
    return Schedule(tuple(r for of_shape in local for r in _one_per_device(of_shape)), tuple(sent))


def box_shape(messages: Round) -> tuple[int, ...]:
    """The longest message along every dim."""
    return tuple(map(max, zip(*(m.shape for m in messages), strict=True)))


def _in_rounds(messages: Sequence[Message]) -> list[Round]:
    """The fewest rounds; rounds of one shape each if padding to the longest message costs too much."""
    fewest = _coloured(sorted(messages, key=lambda m: -m.size))  # long messages share rounds
    if _received(fewest, padded=True) > MOST_PADDING * _received(fewest, padded=False):
        return [r for of_shape in _by_shape(messages) for r in _coloured(of_shape)]
    return fewest


def _is_local(message: Message) -> bool:
    return message.src == message.dst


def _by_shape(messages: Sequence[Message]) -> list[list[Message]]:
    return [
        [m for m in messages if m.shape == shape]
        for shape in dict.fromkeys(m.shape for m in messages)
    ]


def _coloured(messages: Sequence[Message]) -> list[Round]:
    colours = edge_colours([(m.src, m.dst) for m in messages])
    by_colour: list[list[Message]] = [[] for _ in range(max(colours, default=-1) + 1)]
    for message, colour in zip(messages, colours, strict=True):
        by_colour[colour].append(message)
    return [tuple(messages) for messages in by_colour]


def _one_per_device(local: Sequence[Message]) -> list[Round]:
    """Local messages in rounds: the first of every device, then the second, ..."""
    by_device = [list(own) for _, own in itertools.groupby(local, key=lambda m: m.dst)]
    return [tuple(m for m in turn if m is not None) for turn in itertools.zip_longest(*by_device)]


def _received(schedule: Sequence[Round], *, padded: bool) -> int:
    """Elements that the busiest device receives, with or without the padding of the rounds."""
    elements: Counter[int] = Counter()
    for messages in schedule:
        for message in itertools.filterfalse(_is_local, messages):
            elements[message.dst] += math.prod(box_shape(messages)) if padded else message.size
    return max(elements.values(), default=0)


def edge_colours(edges: Sequence[tuple[int, int]]) -> list[int]:
    """Edges (sender, receiver) -> a colour each, different at every vertex; as few as the largest degree.

    >>> edge_colours([(0, 1), (0, 2), (1, 2)])
    [0, 1, 0]
    """
    # edge_of[side][vertex][colour] is an edge; side 0 has the senders, side 1 the receivers.
    edge_of: tuple[dict[int, dict[int, int]], ...] = ({}, {})
    colours: list[int] = []
    most = _busiest(edges)
    for edge, vertices in enumerate(edges):
        used = [edge_of[side].setdefault(vertices[side], {}) for side in (0, 1)]
        mine, theirs = (_first_free(u) for u in used)
        both = _first_free({**used[0], **used[1]})
        if both < most:
            mine = both
        elif mine in used[1]:
            # Swap the two colours along the path that starts at the receiver with `mine`: it
            # alternates between them and cannot reach the sender, where `mine` is free.
            path = []
            side = 1
            vertex = vertices[1]
            colour = mine
            while (step := edge_of[side][vertex].get(colour)) is not None:
                path.append(step)
                side = 1 - side
                colour = theirs if colour == mine else mine
                vertex = edges[step][side]
            for step in path:
                for side in (0, 1):
                    del edge_of[side][edges[step][side]][colours[step]]
            for step in path:
                colours[step] = theirs if colours[step] == mine else mine
                for side in (0, 1):
                    edge_of[side][edges[step][side]][colours[step]] = step
        colours.append(mine)
        for u in used:
            u[mine] = edge
    return colours


def _busiest(edges: Iterable[tuple[int, int]]) -> int:
    """The most edges at one vertex."""
    return max((n for side in zip(*edges, strict=True) for n in Counter(side).values()), default=0)


def _first_free(used: dict[int, int]) -> int:
    return next(colour for colour in range(len(used) + 1) if colour not in used)


class Transport(NamedTuple):
    """A way to send the boxes of an exchange."""

    send: Callable[
        [Sequence[jax.Array], Sequence[Round], Mesh], list[jax.Array]
    ]  # -> those that arrived
    branches: bool  # devices may take different branches of a program; on GPUs the host would wait for each


def _by_ppermute(
    boxes: Sequence[jax.Array], rounds: Sequence[Round], mesh: Mesh
) -> list[jax.Array]:
    """One `ppermute` per round."""
    pairs = ([(m.src, m.dst) for m in messages] for messages in rounds)
    return [ppermute(box, mesh, sent) for box, sent in zip(boxes, pairs, strict=True)]


def _by_ragged_all_to_all(
    boxes: Sequence[jax.Array], rounds: Sequence[Round], mesh: Mesh
) -> list[jax.Array]:
    """All rounds in one buffer, sent by one `ragged_all_to_all`, or as many as a pair has messages."""
    result = list(boxes)
    axes = long_axes(mesh)
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
    """Input offsets, send sizes, output offsets and receive sizes in elements, by device and partner, of the
    messages in a buffer with one box per round. Padding along the first dim of a box is not sent.
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


PERMUTE = Transport(_by_ppermute, branches=True)
RAGGED = Transport(_by_ragged_all_to_all, branches=False)
PERMUTE_UNBRANCHED = Transport(
    _by_ppermute, branches=False
)  # for programs that do not know their platform
