"""Messages in rounds, for transports that permute: every device sends and receives at most one in a round.

Rounds colour the edges of the bipartite graph of senders and receivers. The minimum, the most messages at one
device, is always reached (König 1916).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from xshard import Sharding
from xshard.steps import Exchange
from xshard.steps.exchange.messages import Message, messages_to

Round = tuple[Message, ...]
MOST_PADDING = 1.02  # received elements per element of the messages; above it rounds are split by shape


class Schedule(NamedTuple):
    """The messages of an exchange in rounds.

    local: messages of devices to themselves, one shape and at most one per device in each round. sent: all
    others. every: both, the local ones first.
    """

    local: tuple[Round, ...]
    sent: tuple[Round, ...]

    @property
    def every(self) -> tuple[Round, ...]:
        return self.local + self.sent


@lru_cache(maxsize=1024)
def rounds(step: Exchange, before: Sharding) -> Schedule:
    """The schedule of an exchange."""
    after, devices = step.after(before), range(before.mesh.n_devices)
    messages = [m for device in devices for m in messages_to(before, after, device, step.node_devices)]
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
    return [[m for m in messages if m.shape == shape] for shape in dict.fromkeys(m.shape for m in messages)]


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
            path, side, vertex, colour = [], 1, vertices[1], mine
            while (step := edge_of[side][vertex].get(colour)) is not None:
                path.append(step)
                side, colour = 1 - side, theirs if colour == mine else mine
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
