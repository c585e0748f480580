"""The moves of one array between the options of two nodes of a problem, with bounds in place of prices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field

import numpy as np

from xshard.step.moves import MovePrices, dual
from xshard.step.options import Flags, Floats, Indices, Ways, without_copies

Term = Floats | float


@dataclass(eq=False)
class Edge:
    """The moves of an array from the options of one node to the options of another.

    indices: for every option of each node its row, or its column. layouts: for rows and columns. terms: for a
    part of the cost, how much of the forward and of the backward seconds it gets by rows, and what besides;
    `tables` has the parts. A linear move has a backward pass. place: the module or array where a rule can
    say the move, as it enters or leaves; "" if it is between equal layouts only: others are `banned`.
    """

    nodes: tuple[int, int]
    indices: tuple[Indices, Indices]
    layouts: tuple[Ways, Ways]
    shape: tuple[int, ...]
    moves: MovePrices
    terms: InitVar[Mapping[int, tuple[Term, Term, Term]]]
    is_linear: bool = True
    place: str = ""
    enters: bool = False
    parts: Indices = field(init=False)
    tables: Floats = field(init=False)  # [parts, rows, columns]
    banned: Flags = field(init=False)

    def __post_init__(self, terms: Mapping[int, tuple[Term, Term, Term]]) -> None:
        (src, dst), elements = self.layouts, math.prod(self.shape)
        start, each = self.moves.bounds(src, dst)
        back, each_back = self.moves.bounds(dual(dst), dual(src))
        self._seconds = np.stack([start + each * elements, (back + each_back * elements).T * self.is_linear])
        self._planned = np.zeros((len(src), len(dst)), bool)
        self.parts, every = np.array(list(terms)), np.zeros((len(src), 1))
        self._shares = np.array([[every + f, every + b] for f, b, _ in terms.values()])[..., 0]
        self.tables = np.einsum("pwi, wij -> pij", self._shares, self._seconds)
        self.tables += [np.broadcast_to(more, self._planned.shape) for *_, more in terms.values()]
        plain = dst if self.is_linear else without_copies(dst)
        self.banned = (src[:, None] != plain).any(-1) & (not self.place)

    def plan(self, i: int, j: int) -> float:
        """Plan the move from option i to option j; by how many seconds it is more than was known."""
        i, j = int(self.indices[0][i]), int(self.indices[1][j])
        if self._planned[i, j] or self.banned[i, j]:
            return 0.0
        src, dst = self.layouts[0][i], self.layouts[1][j]
        forward = self.moves.price(src, dst, self.shape)
        backward = self.moves.price(dual(dst), dual(src), self.shape) if self.is_linear else 0.0
        late = np.array([forward, backward]) - self._seconds[:, i, j]
        self.tables[:, i, j] += self._shares[:, :, i] @ late
        self._planned[i, j] = True
        return float(late.sum())

    def weighed(self, weights: Floats, i: Indices, j: Indices) -> Floats:
        """The weighted sum of all parts, for every pair of some options; infinite where nothing can move."""
        total = np.where(self.banned, np.inf, np.tensordot(weights[self.parts], self.tables, 1))
        return total[self.indices[0][i]][:, self.indices[1][j]]
