"""Options of good assignments of a graph, if all of them are too many for one integer program.

Messages between nodes (TRW-S, Kolmogorov 2006) find assignments under prices for what counts at each time;
prices change by what an assignment exceeds (subgradients). Large steps make assignments vary: an integer
program over their options needs that more than a good bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

FEW = 20  # options of a node, which stay all
ROUNDS = 250  # of messages and prices, for each step
FIRST = 10  # rounds before assignments count
EVERY = 10  # rounds between assignments that are improved
KEPT = 0.8  # of the direction in which prices changed before
EXCEEDED = 50.0  # times the cost, for a limit that is exceeded once over
MOST_SWEEPS = 30  # of changes of one node at a time


@dataclass(eq=False)
class Messages:
    """Messages between nodes of a graph, each about the options of the node that receives it.

    costs: of options by node; shares: of the limits that they use [options, times]; tables: of pairs (i < j).
    """

    costs: Sequence[np.ndarray]
    shares: Sequence[np.ndarray]
    tables: Mapping[tuple[int, int], np.ndarray]
    received: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)  # from, to

    def __post_init__(self) -> None:
        self.before: list[list[tuple[int, np.ndarray]]] = [[] for _ in self.costs]
        self.after: list[list[tuple[int, np.ndarray]]] = [[] for _ in self.costs]
        for (i, j), table in self.tables.items():
            self.after[i].append((j, table))
            self.before[j].append((i, np.ascontiguousarray(table.T)))
            self.received[i, j], self.received[j, i] = (
                np.zeros(table.shape[1]),
                np.zeros(table.shape[0]),
            )

    def sweep(self, prices: np.ndarray, forward: bool) -> float:
        """Renew the messages in one direction; no assignment within the limits costs less than the result."""
        bound = -float(prices.sum())
        count = len(self.costs)
        for v in range(count) if forward else reversed(range(count)):
            ahead, behind = (self.after[v], self.before[v])[:: 1 if forward else -1]
            total = self.costs[v] + self.shares[v] @ prices
            parts = max(len(ahead), len(behind), 1)
            for w, _ in (*ahead, *behind):
                total = total + self.received[w, v]
            for w, table in ahead:
                message = ((total / parts - self.received[w, v])[:, None] + table).min(0)
                least = message.min()
                bound = bound + least
                self.received[v, w] = message - least
            bound += total.min() * (1 - len(ahead) / parts)
        return float(bound)

    def assignment(self, prices: np.ndarray) -> list[int]:
        """An option for every node, the best beside those before it and the messages of others."""
        chosen: list[int] = []
        for v, (cost, shares) in enumerate(zip(self.costs, self.shares, strict=True)):
            total = cost + shares @ prices
            for w, table in self.before[v]:
                total = total + table[:, chosen[w]]
            for w, _ in self.after[v]:
                total = total + self.received[w, v]
            chosen.append(int(total.argmin()))
        return chosen

    def used(self, chosen: Iterable[int]) -> np.ndarray:
        """The share of the limit that an assignment uses at every time."""
        return np.asarray(sum(shares[k] for shares, k in zip(self.shares, chosen, strict=True)))

    def improved(self, chosen: Sequence[int], exceeded: float) -> list[int]:
        """An assignment that no change at one node makes cheaper. exceeded: costs of a limit once over."""
        chosen, used = list(chosen), self.used(chosen)
        for _ in range(MOST_SWEEPS):
            before = list(chosen)
            for v, (cost, shares) in enumerate(zip(self.costs, self.shares, strict=True)):
                others = used - shares[chosen[v]]
                total = cost + exceeded * np.maximum(others + shares - 1, 0).sum(1)
                for w, table in (*self.before[v], *self.after[v]):
                    total = total + table[:, chosen[w]]
                if total.min() < total[chosen[v]]:
                    chosen[v] = int(total.argmin())
                    used = others + shares[chosen[v]]
            if before == chosen:
                break
        return chosen


def pool(
    costs: Sequence[np.ndarray],
    shares: Sequence[np.ndarray],
    tables: Mapping[tuple[int, int], np.ndarray],
    steps: Sequence[float],
    rounds: int = ROUNDS,
) -> tuple[list[np.ndarray], float]:
    """For every node its few options, or those of assignments under many prices; a lower bound of all costs.

    costs, shares, tables: as for `Messages`. steps: of prices, for a shortage of one limit, in bounds.
    """
    met = [np.full(len(cost), len(cost) <= FEW) for cost in costs]
    highest = -np.inf
    for step in steps:
        messages = Messages(costs, shares, tables)
        prices = np.zeros(shares[0].shape[1])
        turn = np.zeros(len(prices))
        for i in range(rounds):
            messages.sweep(prices, forward=True)
            bound = messages.sweep(prices, forward=False)
            highest = max(highest, bound)
            chosen = messages.assignment(prices)
            short = messages.used(chosen) - 1
            improved = (
                messages.improved(chosen, EXCEEDED * abs(bound))
                if i % EVERY == EVERY - 1
                else chosen
            )
            for flags, *options in zip(met, chosen, improved, strict=True):
                flags[options] |= i >= FIRST
            turn = KEPT * turn + (1 - KEPT) * short if i else short
            change = np.where((prices <= 0) & (turn < 0), 0, turn)
            if change.any():
                prices = np.maximum(
                    0, prices + step * max(abs(bound), 1.0) * change / (change @ change)
                )
    return [np.nonzero(flags)[0] for flags in met], highest
