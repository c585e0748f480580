"""The moves of one array between the options of two nodes of a problem, with bounds in place of prices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from xshard.step.moves import Floats, MovePrices, Ways, dual
from xshard.step.options import Flags, Indices

Term = Floats | float


@dataclass(eq=False)
class Edge:
    """The moves of an array from the options of one node to the options of another.

    indices: for every option of each node its row, or its column. layouts: for rows and columns. parts: for a
    part of the cost, how much of the forward and of the backward seconds it gets, and what besides; numbers,
    or arrays over rows and columns. A linear move has a backward pass. place: the module or array where a
    rule can say the move, as it enters or leaves; "" if it is between equal layouts only.
    """

    nodes: tuple[int, int]
    indices: tuple[Indices, Indices]
    layouts: tuple[Ways, Ways]
    lengths: tuple[int, ...]
    moves: MovePrices
    parts: Mapping[int, tuple[Term, Term, Term]]
    is_linear: bool = True
    place: str = ""
    enters: bool = False
    forward: Floats = field(init=False)
    backward: Floats = field(init=False)
    banned: Flags = field(init=False)

    def __post_init__(self) -> None:
        (src, dst), elements = self.layouts, math.prod(self.lengths)
        (start, each), (back, each_back) = (
            self.moves.bounds(src, dst),
            self.moves.bounds(dual(dst), dual(src)),
        )
        self.forward, self.backward = (
            start + each * elements,
            (back + each_back * elements).T * self.is_linear,
        )
        self._planned = np.zeros(self.forward.shape, bool)
        different = (src[:, None] != dst[None]).any(-1)
        self.banned = different & (not self.place)

    def plan(self, i: int, j: int) -> float:
        """Plan the move from option i to option j; by how many seconds it is more than was known."""
        i, j = int(self.indices[0][i]), int(self.indices[1][j])
        known = self.forward[i, j] + self.backward[i, j]
        if self._planned[i, j] or self.banned[i, j]:
            return 0.0
        src, dst = self.layouts[0][i], self.layouts[1][j]
        self.forward[i, j] = self.moves.price(src, dst, self.lengths)
        if self.is_linear:
            self.backward[i, j] = self.moves.price(dual(dst), dual(src), self.lengths)
        self._planned[i, j] = True
        return float(self.forward[i, j] + self.backward[i, j] - known)

    def weighed(self, weights: Floats, i: Indices, j: Indices) -> Floats:
        """The weighted sum of all parts, for every pair of some options; infinite where nothing can move."""
        total = np.where(self.banned, np.inf, 0.0)
        for part, table in self.tables.items():
            total += weights[part] * table
        return total[self.indices[0][i]][:, self.indices[1][j]]

    @property
    def tables(self) -> dict[int, Floats]:
        """Each part of the cost for every row and column."""
        terms = self.parts.items()
        return {part: f * self.forward + b * self.backward + more for part, (f, b, more) in terms}

    def vectors(self, i: Indices, j: Indices, size: int) -> Floats:
        """The parts of the cost of pairs of options; all infinite where nothing can move."""
        i, j = self.indices[0][i], self.indices[1][j]
        total = np.zeros((len(i), size))
        total[self.banned[i, j]] = np.inf
        for part, terms in self.parts.items():
            forward, backward, besides = (np.broadcast_to(term, self.banned.shape)[i, j] for term in terms)
            total[:, part] += forward * self.forward[i, j] + backward * self.backward[i, j] + besides
        return total
