"""Messages in rounds, and how their boxes travel: by permutations, or in one buffer.

Every device sends and receives at most one message in a round. Rounds colour the edges of the
bipartite graph of senders and receivers; the minimum, the most messages at one device, is always
reached (König 1916). `lax.ragged_all_to_all` is one collective for all rounds; XLA has it for GPUs
and TPUs, not for CPUs.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from jax_bridge.lower.row_tables import row_of_this_device
from jax_bridge.mesh.axis_types import as_varying, long_axes, ppermute, varying_axes
from xshard import Mesh, Sharding
from xshard.steps import Exchange
from xshard.steps.exchange.messages import Message, messages_to

Round = tuple[Message, ...]
Shape = tuple[int, ...]

# Received elements per element of the messages; above it rounds are split by shape.
MOST_PADDING = 1.02

# Rounds.


class Schedule(NamedTuple):
    """The messages of an exchange in rounds."""

    # Of devices to themselves; one shape and at most one message per device in each round.
    local: tuple[Round, ...]
    # All other messages; local ones too where that adds no round.
    sent: tuple[Round, ...]

    @property
    def all_rounds(self) -> tuple[Round, ...]:
        """The rounds in the order in which boxes are placed."""
        return self.local + self.sent


@lru_cache(maxsize=1024)
def rounds(step: Exchange, before: Sharding) -> Schedule:
    """Put the messages of an exchange into rounds: at most one per sender and receiver in each.

    Args:
        step: The exchange.
        before: The sharding before it.
    """
    after = step.after(before)
    messages: list[Message] = []
    for device in range(before.mesh.n_devices):
        messages += messages_to(before, after, device, step.node_devices)
    return scheduled(messages, adds=step.op(before) is not None)


def scheduled(messages: Sequence[Message], *, adds: bool) -> Schedule:
    """Put messages into few rounds: in each a device sends at most one, and receives at most one.

    Messages 0->1, 0->2, 1->2: rounds (0->1, 1->2) and (0->2).

    Args:
        messages: The messages; local ones are from a device to itself.
        adds: Whether boxes that arrive at one place are combined, as by a sum. The device's own box
            is then the first, so local messages come first, in rounds of their own.
    """
    local = [message for message in messages if _is_local(message)]
    sent = _in_rounds([message for message in messages if not _is_local(message)])
    # Local messages join the rounds of the others if that adds no round: it costs nothing, since a
    # device that receives nothing in a round writes a box all the same. There are at least as many
    # rounds as one device has messages to send or to receive: if these are too many, the joint
    # rounds are not computed.
    if not adds and _most_at_one_vertex(_edges(messages)) <= len(sent):
        joint = _in_rounds(messages)
        if len(joint) <= len(sent):
            return Schedule((), tuple(joint))

    local_rounds: list[Round] = []
    for same_shape in _by_shape(local):
        local_rounds += _one_per_device(same_shape)
    return Schedule(tuple(local_rounds), tuple(sent))


def box_shape(messages: Round) -> Shape:
    """Return the longest message along every dim: all boxes of a round are padded to it."""
    shapes = (message.shape for message in messages)
    return tuple(map(max, zip(*shapes, strict=True)))


def _edges(messages: Sequence[Message]) -> list[tuple[int, int]]:
    """Return the (sender, receiver) of each message."""
    return [(message.src, message.dst) for message in messages]


def _in_rounds(messages: Sequence[Message]) -> list[Round]:
    """Put messages into the fewest rounds, or into more rounds with boxes of one shape in each.

    The boxes of a round are padded to the longest along every dim. If the busiest device
    would then receive more than `MOST_PADDING` times the elements that it needs, messages of
    different shapes share no round.
    """
    # Longest first, so that long messages share rounds with long ones, which saves padding.
    longest_first = sorted(messages, key=lambda message: -message.size)
    fewest = _coloured(longest_first)
    if _received(fewest, padded=True) <= MOST_PADDING * _received(fewest, padded=False):
        return fewest
    result: list[Round] = []
    for same_shape in _by_shape(messages):
        result += _coloured(same_shape)
    return result


def _is_local(message: Message) -> bool:
    """Return whether a device sends the message to itself."""
    return message.src == message.dst


def _by_shape(messages: Sequence[Message]) -> list[list[Message]]:
    """Group messages by the shape of their boxes, in the order in which shapes first occur."""
    groups: dict[Shape, list[Message]] = {}
    for message in messages:
        groups.setdefault(message.shape, []).append(message)
    return list(groups.values())


def _coloured(messages: Sequence[Message]) -> list[Round]:
    """Put messages into the fewest rounds: see `edge_colours`, a colour is a round."""
    by_colour = defaultdict[int, list[Message]](list)
    for message, colour in zip(messages, edge_colours(_edges(messages)), strict=True):
        by_colour[colour].append(message)
    return [tuple(by_colour[colour]) for colour in sorted(by_colour)]


def _one_per_device(local: Sequence[Message]) -> list[Round]:
    """Put local messages into rounds: the first of every device, then the second, ..."""
    grouped = itertools.groupby(local, key=lambda message: message.dst)
    by_device = [list(of_device) for _, of_device in grouped]
    # Devices with fewer messages have None in the later rounds.
    return [tuple(filter(None, messages)) for messages in itertools.zip_longest(*by_device)]


def _received(schedule: Sequence[Round], *, padded: bool) -> int:
    """Count the elements that the busiest device receives, with or without padding."""
    elements = Counter[int]()
    for messages in schedule:
        padded_size = math.prod(box_shape(messages))
        for message in messages:
            if not _is_local(message):
                elements[message.dst] += padded_size if padded else message.size
    return max(elements.values(), default=0)


# Edge colours.


def edge_colours(edges: Sequence[tuple[int, int]]) -> list[int]:
    """Give each message the number of a round; no device sends or receives two in one round.

    This is an edge colouring of the bipartite graph of senders and receivers, with as few colours
    as the largest degree. An edge for which no colour is free at both ends takes one that is free
    at its sender; the edges in its way swap two colours.

    Args:
        edges: The (sender, receiver) of each message.

    Returns:
        The colour, the number of its round, of each edge.

    Examples:
        >>> edge_colours([(0, 1), (0, 2), (1, 2)])
        [0, 1, 0]
    """
    # Senders and receivers are different vertices: 0, 1, ... and -1, -2, ...
    ends = [(sender, -1 - receiver) for sender, receiver in edges]
    graph = _ColouredGraph(ends, [], defaultdict(dict))
    n_colours = _most_at_one_vertex(edges)
    for sender, receiver in ends:
        at_sender = graph.edge_at[sender]
        at_receiver = graph.edge_at[receiver]
        colour = _first_free({**at_sender, **at_receiver})
        if colour >= n_colours:
            # No colour is free at both ends. Take one that is free at the sender. If the receiver
            # has it, swap it with one that is free there, along all edges that this affects.
            colour = _first_free(at_sender)
            if colour in at_receiver:
                graph.swap(receiver, colour, _first_free(at_receiver))
        edge = len(graph.colours)  # the number of this edge
        graph.colours.append(colour)
        at_sender[colour] = edge
        at_receiver[colour] = edge
    return graph.colours


class _ColouredGraph(NamedTuple):
    """A graph with some of its edges coloured.

    Attributes:
        ends: Both vertices of each edge, by the edge's number.
        colours: The colour of each edge so far.
        edge_at: For each vertex a dict: colour -> the edge there that has it.
    """

    ends: list[tuple[int, int]]
    colours: list[int]
    edge_at: defaultdict[int, dict[int, int]]

    def swap(self, start: int, colour: int, other: int) -> None:
        """Free `colour` at a vertex, at which `other` is free: swap the two along a path.

        The path begins at the vertex; its edges have `colour`, `other`, `colour`, ... It cannot
        reach the sender of the edge that is being coloured: it would arrive there by an edge of
        `colour`, which is free at that sender.
        """
        path: list[int] = []
        vertex = start
        for wanted in itertools.cycle((colour, other)):
            edge = self.edge_at[vertex].get(wanted)
            if edge is None:
                break
            path.append(edge)
            first, second = self.ends[edge]
            vertex = second if vertex == first else first

        # All old entries are deleted first. Neighbours on the path take each other's colour, so
        # that deleting as we go would delete new entries.
        for edge in path:
            for vertex in self.ends[edge]:
                del self.edge_at[vertex][self.colours[edge]]
        for edge in path:
            self.colours[edge] = other if self.colours[edge] == colour else colour
            for vertex in self.ends[edge]:
                self.edge_at[vertex][self.colours[edge]] = edge


def _most_at_one_vertex(edges: Iterable[tuple[int, int]]) -> int:
    """Return the largest degree: the most edges at one sender or receiver."""
    degrees = [0]
    for vertices in zip(*edges, strict=True):
        degrees += Counter(vertices).values()
    return max(degrees)


def _first_free(edge_of_colour: dict[int, int]) -> int:
    """Return the smallest colour that no edge at a vertex has."""
    colour = 0
    while colour in edge_of_colour:
        colour += 1
    return colour


# Ways to send boxes.


class Transport(NamedTuple):
    """A way to send the boxes of an exchange."""

    # Boxes to send, their rounds, the mesh -> the boxes that arrived.
    send: Callable[[Sequence[jax.Array], Sequence[Round], Mesh], list[jax.Array]]
    # Devices may take different branches of a program; on GPUs the host would wait for each.
    branches: bool


def _by_ppermute(
    boxes: Sequence[jax.Array], rounds: Sequence[Round], mesh: Mesh
) -> list[jax.Array]:
    """Send the boxes of each round by one `ppermute`."""
    pairs_of_rounds = map(_edges, rounds)
    return [ppermute(box, mesh, pairs) for box, pairs in zip(boxes, pairs_of_rounds, strict=True)]


def _by_ragged_all_to_all(
    boxes: Sequence[jax.Array], rounds: Sequence[Round], mesh: Mesh
) -> list[jax.Array]:
    """Send the boxes of all rounds by one `ragged_all_to_all`, in one flat buffer.

    The collective takes one piece for each pair of devices. Rounds in which a pair of devices has
    a second message go into another call. Boxes [3, 2] and [2, 2] of two rounds lie in the buffer
    one after the other, 6 elements and then 4.

    Args:
        boxes: This device's box in each round.
        rounds: The messages of each round.
        mesh: The devices.

    Returns:
        The box that arrives in each round.
    """
    arrived = list(boxes)
    axes = long_axes(mesh)
    for members in _once_per_pair(rounds):
        shapes = [boxes[i].shape for i in members]
        # Tables of offsets and sizes: [devices, partners].
        arguments = ragged_arguments([rounds[i] for i in members], shapes, mesh.n_devices)
        buffer = jnp.concatenate([boxes[i].reshape(-1) for i in members])
        # JAX gives the result the type of the output buffer: zeros are declared different on all
        # devices (varying), as the data is.
        output = as_varying(jnp.zeros_like(buffer), varying_axes(buffer))
        of_this_device = [row_of_this_device(table, axes) for table in arguments]
        buffer = lax.ragged_all_to_all(buffer, output, *of_this_device, axis_name=axes)
        stops = np.cumsum([math.prod(shape) for shape in shapes])
        pieces = jnp.split(buffer, stops[:-1])
        for i, shape, piece in zip(members, shapes, pieces, strict=True):
            arrived[i] = piece.reshape(shape)
    return arrived


def _once_per_pair(rounds: Sequence[Round]) -> list[list[int]]:
    """Group rounds so that no (sender, receiver) occurs twice in a group.

    Each round joins the first group that it fits. Rounds (0->1), (0->1), (0->2) -> [[0, 2], [1]],
    the numbers of the rounds.
    """
    groups: list[list[int]] = []
    pairs_of_groups: list[set[tuple[int, int]]] = []
    for i, messages in enumerate(rounds):
        pairs = set(_edges(messages))
        group = 0
        while group < len(groups) and pairs & pairs_of_groups[group]:
            group += 1
        if group == len(groups):  # it fits none
            groups.append([])
            pairs_of_groups.append(set())
        groups[group].append(i)
        pairs_of_groups[group] |= pairs
    return groups


class RaggedArguments(NamedTuple):
    """Arguments of `lax.ragged_all_to_all`, in elements: [devices, partners]."""

    input_offsets: NDArray[np.int32]
    send_sizes: NDArray[np.int32]
    output_offsets: NDArray[np.int32]
    recv_sizes: NDArray[np.int32]


def ragged_arguments(
    rounds: Sequence[Round], shapes: Sequence[Shape], n_devices: int
) -> RaggedArguments:
    """Compute offsets and sizes of the messages in a flat buffer with one box after the other.

    The buffer of two rounds with boxes [3, 2] and [2, 2] has 10 elements: the boxes begin at the
    offsets 0 and 6. A message [2, 2] in the box [3, 2] has the size 4: the last row is not sent.

    Args:
        rounds: The rounds, with at most one message per pair of devices in all of them.
        shapes: The shape of each round's box. Padding along its first dim is not sent.
        n_devices: The number of devices.
    """
    offsets = np.zeros((n_devices, n_devices), np.int32)  # [senders, receivers]
    sizes = np.zeros((n_devices, n_devices), np.int32)
    box_offset = 0
    for messages, shape in zip(rounds, shapes, strict=True):
        for message in messages:
            offsets[message.src, message.dst] = box_offset
            # A message may be smaller than its padded box, which is flattened by rows: all up to
            # its last element is sent.
            last_element = 0
            for length, box_length in zip(message.shape, shape, strict=True):
                last_element = last_element * box_length + length - 1
            sizes[message.src, message.dst] = last_element + 1
        box_offset += math.prod(shape)
    # A box has one place in the buffers of all devices, so offsets are equal at both ends.
    return RaggedArguments(offsets, sizes, offsets, sizes.T.copy())


PERMUTE = Transport(_by_ppermute, branches=True)
RAGGED = Transport(_by_ragged_all_to_all, branches=False)
# For programs that do not know their platform.
PERMUTE_UNBRANCHED = Transport(_by_ppermute, branches=False)
