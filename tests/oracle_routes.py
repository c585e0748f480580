"""What a route means, in numpy, row by row: the tests of both bridges compare with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.routing import Groups

Array = NDArray[Any]


class Arrived(NamedTuple):
    """What a part gets: a row per choice, by group, how many per group, and where each row comes from."""

    rows: Array  # [choices, ...]
    sizes: Array  # [groups of the part]
    origins: list[tuple[int, int, int]]  # the part, the row there and its choice
    copies: int


def route(
    rows: Sequence[Array], to: Sequence[Array], groups: Groups, capacity: int | None = None
) -> tuple[list[Arrived], list[int]]:
    """The rows and choices of every part -> what each part gets, and how many copies of each are dropped.

    >>> (first, second), dropped = route(
    ...     [np.array([5, 6])] * 2, [np.array([1, 1])] * 2, Groups.of(2, 2), 1
    ... )
    >>> first.rows, second.rows, second.origins, dropped
    (array([], dtype=int64), array([5, 5]), [(0, 0, 0), (1, 0, 0)], [1, 1])
    """
    arrived = []
    dropped = [0] * len(rows)
    for part in range(groups.n_parts):
        origins = []
        copies = 0
        for source, choices in enumerate(to):
            table = choices if choices.ndim == 2 else choices[:, None]
            here = [
                i
                for i, gs in enumerate(table)
                if any(g >= 0 and groups.parts[g] == part for g in gs)
            ]
            kept = here[:capacity]
            dropped[source] += len(here) - len(kept)
            copies += len(kept)
            chosen = [(g, source, i, j) for i in kept for j, g in enumerate(table[i])]
            origins += [each for each in chosen if each[0] >= 0 and groups.parts[each[0]] == part]
        origins.sort()
        sizes = [
            sum(each[0] == g for each in origins)
            for g, own in enumerate(groups.parts)
            if own == part
        ]
        values = [rows[source][i] for _, source, i, _ in origins]
        shape = (len(values), *rows[0].shape[1:])
        places = [each[1:] for each in origins]
        block = np.array(values, rows[0].dtype).reshape(shape)
        arrived.append(Arrived(block, np.array(sizes), places, copies))
    return arrived, dropped


def back(
    results: Sequence[Array],
    arrived: Sequence[Arrived],
    lengths: Sequence[int],
    weights: Any = None,
) -> list[Array]:
    """A result per row that arrived -> their sums at home, each times the weight `[row, choice]` if given."""
    home = [np.zeros((n, *results[0].shape[1:]), results[0].dtype) for n in lengths]
    for values, each in zip(results, arrived, strict=True):
        for value, (source, i, j) in zip(values, each.origins, strict=True):
            home[source][i] += value if weights is None else value * weights[source][i, j]
    return home
