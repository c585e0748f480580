"""Messages in rounds, and how their boxes travel: by permutations, or in one buffer.

Every device sends at most one message in a round, and receives at most one. So rounds are a colouring of the
edges (messages) of the bipartite graph of senders and receivers. As many rounds as one device has messages at
most are necessary, and always enough (König 1916). `lax.ragged_all_to_all` is one collective for all rounds;
XLA has it for GPUs and TPUs, not for CPUs.
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

# Elements of padded boxes per element of messages; above it rounds are split by shape.
MAX_PADDING = 1.02

# Rounds.


class Schedule(NamedTuple):
    """The messages of an exchange in rounds.

    Attributes:
        local: Rounds of messages from devices to themselves, each round with boxes of one shape.
        sent: Rounds of all other messages; of local ones, too, where that adds no round.
    """

    local: tuple[Round, ...]
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
    return make_schedule(messages, adds=step.op(before) is not None)


def make_schedule(messages: Sequence[Message], *, adds: bool) -> Schedule:
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
    if not adds and _max_degree(_edges(messages)) <= len(sent):
        joint = _in_rounds(messages)
        if len(joint) <= len(sent):
            return Schedule((), tuple(joint))

    local_rounds: list[Round] = []
    for same_shape in _by_shape(local):
        local_rounds += _one_per_device(same_shape)
    return Schedule(tuple(local_rounds), tuple(sent))


def box_shape(messages: Round) -> Shape:
    """Return the shape to which all boxes of a round are padded: the longest along every dim."""
    shapes = (message.shape for message in messages)
    return tuple(map(max, zip(*shapes, strict=True)))


def _edges(messages: Sequence[Message]) -> list[tuple[int, int]]:
    """Return the (sender, receiver) of each message."""
    return [(message.src, message.dst) for message in messages]


def _in_rounds(messages: Sequence[Message]) -> list[Round]:
    """Put messages into the fewest rounds, or into more rounds with boxes of one shape in each.

    The boxes of a round are padded to the longest along every dim. If the busiest device
    would then receive more than `MAX_PADDING` times the elements that it needs, messages of
    different shapes share no round.
    """
    # Longest first, so that long messages share rounds with long ones, which saves padding.
    longest_first = sorted(messages, key=lambda message: -message.size)
    fewest = _colour_rounds(longest_first)
    if _max_received(fewest, padded=True) <= MAX_PADDING * _max_received(fewest, padded=False):
        return fewest
    result: list[Round] = []
    for same_shape in _by_shape(messages):
        result += _colour_rounds(same_shape)
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


def _colour_rounds(messages: Sequence[Message]) -> list[Round]:
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


def _max_received(schedule: Sequence[Round], *, padded: bool) -> int:
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
    """Give each message the index of a round; no device sends or receives two in one round.

    This is an edge colouring of the bipartite graph of senders and receivers, with as few colours
    as the largest degree. An edge for which no colour is free at both vertices takes one that is
    free at its sender; the edges in its way swap two colours.

    Args:
        edges: The (sender, receiver) of each message.

    Returns:
        The colour of each edge: the index of its round.

    Examples:
        >>> edge_colours([(0, 1), (0, 2), (1, 2)])
        [0, 1, 0]
    """
    # Senders and receivers are different vertices: 0, 1, ... and -1, -2, ...
    vertices = [(sender, -1 - receiver) for sender, receiver in edges]
    graph = _ColouredGraph(vertices, [], defaultdict(dict))
    n_colours = _max_degree(edges)
    for sender, receiver in vertices:
        at_sender = graph.edge_at[sender]
        at_receiver = graph.edge_at[receiver]
        colour = _first_free({**at_sender, **at_receiver})
        if colour >= n_colours:
            # No colour is free at both vertices. Take one that is free at the sender. If the receiver
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
        vertices: Both vertices of each edge, by the edge's number.
        colours: The colour of each edge so far.
        edge_at: For each vertex a dict: colour -> the edge there that has it.
    """

    vertices: list[tuple[int, int]]
    colours: list[int]
    edge_at: defaultdict[int, dict[int, int]]

    def swap(self, start: int, first_colour: int, second_colour: int) -> None:
        """Free one colour at a vertex, at which another one is free: swap the two along a path.

        The edges of the path have the two colours in turn. It cannot reach the sender of the edge
        that is being coloured: it would arrive there by an edge of `first_colour`, which is free at
        that sender.

        Args:
            start: The vertex, at which the path begins.
            first_colour: The colour to free there.
            second_colour: The colour that is free there.
        """
        path: list[int] = []
        vertex = start
        for wanted in itertools.cycle((first_colour, second_colour)):
            edge = self.edge_at[vertex].get(wanted)
            if edge is None:
                break
            path.append(edge)
            vertex_a, vertex_b = self.vertices[edge]
            vertex = vertex_b if vertex == vertex_a else vertex_a

        # All old entries are deleted before new ones are made: neighbours on the path take each
        # other's colour.
        for edge in path:
            for vertex in self.vertices[edge]:
                del self.edge_at[vertex][self.colours[edge]]
        for edge in path:
            self.colours[edge] = (
                second_colour if self.colours[edge] == first_colour else first_colour
            )
            for vertex in self.vertices[edge]:
                self.edge_at[vertex][self.colours[edge]] = edge


def _max_degree(edges: Iterable[tuple[int, int]]) -> int:
    """Return the largest degree: the number of edges at the busiest sender or receiver."""
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
    edges_of_rounds = map(_edges, rounds)
    return [
        ppermute(box, mesh, senders_and_receivers)
        for box, senders_and_receivers in zip(boxes, edges_of_rounds, strict=True)
    ]


def _by_ragged_all_to_all(
    boxes: Sequence[jax.Array], rounds: Sequence[Round], mesh: Mesh
) -> list[jax.Array]:
    """Send the boxes of all rounds by one `ragged_all_to_all`, in one flat buffer.

    The collective takes one message for each pair of devices. Rounds in which a pair of devices has
    a second message go into another call.

    Args:
        boxes: This device's box in each round.
        rounds: The messages of each round.
        mesh: The devices.

    Returns:
        The box that arrives in each round.
    """
    arrived = list(boxes)
    for round_indices in _without_repeated_pairs(rounds):
        boxes_of_call = _send_in_one_buffer(
            [boxes[i] for i in round_indices], [rounds[i] for i in round_indices], mesh
        )
        for i, box in zip(round_indices, boxes_of_call, strict=True):
            arrived[i] = box
    return arrived


def _send_in_one_buffer(
    boxes: Sequence[jax.Array], rounds: Sequence[Round], mesh: Mesh
) -> list[jax.Array]:
    """Send the boxes of rounds that have at most one message for each pair of devices.

    Boxes [3, 2] and [2, 2] lie in the buffer one after the other, 6 elements and then 4.
    """
    shapes = [box.shape for box in boxes]
    sent = jnp.concatenate([box.reshape(-1) for box in boxes])
    # JAX gives the result the type of the output buffer: zeros are declared different on all
    # devices (varying), as the data is.
    output = as_varying(jnp.zeros_like(sent), varying_axes(sent))
    axes = long_axes(mesh)
    tables = ragged_arguments(rounds, shapes, mesh.n_devices)
    received = lax.ragged_all_to_all(
        sent,
        output,
        input_offsets=row_of_this_device(tables.input_offsets, axes),
        send_sizes=row_of_this_device(tables.send_sizes, axes),
        output_offsets=row_of_this_device(tables.output_offsets, axes),
        recv_sizes=row_of_this_device(tables.recv_sizes, axes),
        axis_name=axes,
    )
    return _split_into_boxes(received, shapes)


def _split_into_boxes(buffer: jax.Array, shapes: Sequence[Shape]) -> list[jax.Array]:
    """Split a flat buffer into boxes: 10 elements, [3, 2] and [2, 2] -> two boxes of these shapes."""
    box_ends = np.cumsum([math.prod(shape) for shape in shapes])
    flat_boxes = jnp.split(buffer, box_ends[:-1])
    return [flat.reshape(shape) for flat, shape in zip(flat_boxes, shapes, strict=True)]


def _without_repeated_pairs(rounds: Sequence[Round]) -> list[list[int]]:
    """Group rounds so that no (sender, receiver) occurs twice in a group; return their indices.

    Each round joins the first group that it fits. Rounds (0->1), (0->1), (0->2) -> [[0, 2], [1]].
    """
    groups: list[list[int]] = []
    edges_of_groups: list[set[tuple[int, int]]] = []
    for i, messages in enumerate(rounds):
        edges = set(_edges(messages))
        group = 0
        while group < len(groups) and edges & edges_of_groups[group]:
            group += 1
        if group == len(groups):  # it fits none
            groups.append([])
            edges_of_groups.append(set())
        groups[group].append(i)
        edges_of_groups[group] |= edges
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
    # A box begins at the same offset in the buffers of all devices, its sender's and its receiver's.
    return RaggedArguments(offsets, sizes, offsets, sizes.T.copy())


PERMUTE = Transport(_by_ppermute, branches=True)
RAGGED = Transport(_by_ragged_all_to_all, branches=False)
# For programs that do not know their platform.
PERMUTE_UNBRANCHED = Transport(_by_ppermute, branches=False)
