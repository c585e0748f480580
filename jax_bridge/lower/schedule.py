"""Messages in rounds: in one round every device sends at most one and receives at most one.

Decides the schedule of messages for transports that only permute. Messages are the edges of a
bipartite graph of senders and receivers, rounds a colouring of its edges. The minimum, the largest number of
messages at one device, is always reached (König 1916). Knows no JAX.
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

    local: messages of devices to themselves, one shape and at most one per device in each round.
    sent: the rounds of all other messages.
    """

    local: tuple[Round, ...]
    sent: tuple[Round, ...]

    @property
    def every(self) -> tuple[Round, ...]:
        """All rounds, the local ones first."""
        return self.local + self.sent


@lru_cache(maxsize=1024)
def rounds(step: Exchange, before: Sharding) -> Schedule:
    """The schedule of an exchange."""
    after, devices = step.after(before), range(before.mesh.n_devices)
    found = [m for device in devices for m in messages_to(before, after, device, step.node_devices)]
    return scheduled(found, adds=step.op(before) is not None)


def scheduled(found: Sequence[Message], *, adds: bool) -> Schedule:
    """The schedule of messages. adds: boxes are added up.

    Local messages join the rounds if that adds no round: a device that receives nothing then still has a
    box to write. Not if boxes are added up, since a sum starts with the device's own box.
    """
    sent = _in_rounds([m for m in found if not _is_local(m)])
    # The busiest device's messages bound the rounds from below: most schedules need not be tried.
    if not adds and _busiest(map(_edge, found)) <= len(sent):
        together = _in_rounds(found)
        if len(together) <= len(sent):
            return Schedule((), tuple(together))
    local = _by_shape([m for m in found if _is_local(m)])
    return Schedule(tuple(r for alike in local for r in _one_per_device(alike)), tuple(sent))


def box_shape(messages: Round) -> tuple[int, ...]:
    """The longest message along every dim."""
    return tuple(map(max, zip(*(m.shape for m in messages), strict=True)))


def _in_rounds(messages: Sequence[Message]) -> list[Round]:
    """The fewest rounds; rounds of one shape each if padding to the longest message costs too much."""
    fewest = _coloured(sorted(messages, key=lambda m: -m.size))  # long messages share rounds
    if _received(fewest, padded=True) > MOST_PADDING * _received(fewest, padded=False):
        return [r for alike in _by_shape(messages) for r in _coloured(alike)]
    return fewest


def _is_local(message: Message) -> bool:
    return message.src == message.dst


def _by_shape(messages: Sequence[Message]) -> list[list[Message]]:
    return [[m for m in messages if m.shape == shape] for shape in dict.fromkeys(m.shape for m in messages)]


def _coloured(messages: Sequence[Message]) -> list[Round]:
    colours = edge_colours(list(map(_edge, messages)))
    by_colour: list[list[Message]] = [[] for _ in range(max(colours, default=-1) + 1)]
    for message, colour in zip(messages, colours, strict=True):
        by_colour[colour].append(message)
    return [tuple(found) for found in by_colour]


def _one_per_device(local: Sequence[Message]) -> list[Round]:
    """Local messages in rounds: the first of every device, then the second, ..."""
    found: list[list[Message]] = []
    for _, own in itertools.groupby(local, key=lambda m: m.dst):
        for turn, message in enumerate(own):
            found += [[]] if turn == len(found) else []
            found[turn].append(message)
    return [tuple(turn) for turn in found]


def _received(schedule: Sequence[Round], *, padded: bool) -> int:
    """Elements that the busiest device receives, with or without the padding of the rounds."""
    elements: Counter[int] = Counter()
    for messages in schedule:
        for message in messages:
            if not _is_local(message):
                elements[message.dst] += math.prod(box_shape(messages)) if padded else message.size
    return max(elements.values(), default=0)


def edge_colours(edges: Sequence[tuple[int, int]]) -> list[int]:
    """Edges (sender, receiver) -> a colour each, different at every vertex; as few as the largest degree.

    >>> edge_colours([(0, 1), (0, 2), (1, 2)])
    [0, 1, 0]
    """
    # at[end][vertex][colour] is an edge; end 0 has the senders, end 1 the receivers.
    at: tuple[dict[int, dict[int, int]], ...] = ({}, {})
    colours: list[int] = []
    most = _busiest(edges)
    for edge, ends in enumerate(edges):
        used = [at[end].setdefault(ends[end], {}) for end in (0, 1)]
        mine, theirs = (_first_free(u) for u in used)
        both = _first_free({**used[0], **used[1]})
        if both < most:
            mine = both
        elif mine in used[1]:
            # Swap the two colours along the path that starts at the receiver with `mine`: it
            # alternates between them and cannot reach the sender, where `mine` is free.
            path, end, vertex, colour = [], 1, ends[1], mine
            while (step := at[end][vertex].get(colour)) is not None:
                path.append(step)
                end, colour = 1 - end, theirs if colour == mine else mine
                vertex = edges[step][end]
            for step in path:
                for end in (0, 1):
                    del at[end][edges[step][end]][colours[step]]
            for step in path:
                colours[step] = theirs if colours[step] == mine else mine
                for end in (0, 1):
                    at[end][edges[step][end]][colours[step]] = step
        colours.append(mine)
        for u in used:
            u[mine] = edge
    return colours


def _busiest(edges: Iterable[tuple[int, int]]) -> int:
    """The most edges at one end of one vertex."""
    return max((degree for end in zip(*edges, strict=True) for degree in Counter(end).values()), default=0)


def _edge(message: Message) -> tuple[int, int]:
    return message.src, message.dst


def _first_free(used: dict[int, int]) -> int:
    return next(colour for colour in range(len(used) + 1) if colour not in used)
