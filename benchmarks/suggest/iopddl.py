"""The solver of `xshard.suggest` on a public contest's instances of intra-operator parallelism.

    python -m benchmarks.suggest.iopddl instances/*.json.gz --best best.json

google/iopddl has them: options with costs and bytes for every node, costs for pairs of options on edges, a
limit of bytes at every time. A graph is reduced, exactly, and solved by `xshard.step.choose`; a large
one with the options that `pool` finds.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record
from benchmarks.claim import Claim, finish, worst
from benchmarks.suggest.pool import pool
from xshard.step.choose.programs import Pairs, solve_program
from xshard.step.price.cost import CostFunction

NEVER = 1e15  # a cost that stands for a forbidden pair
MOST_PAIRS = 200_000  # of options, in one integer program
STEPS = (3, 12), (1, 6)  # of prices, for each program of a graph with more


@dataclass
class Graph:
    """Costs and usages of options by node, the times at which a node counts, tables of pairs (i < j)."""

    costs: list[np.ndarray]
    usages: list[np.ndarray]
    intervals: list[tuple[int, int]]
    tables: dict[tuple[int, int], np.ndarray]
    limit: float
    constant: float = 0.0
    undo: list[tuple[int, list[int], np.ndarray]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Graph:
        problem = json.loads(gzip.decompress(path.read_bytes()))["problem"]
        nodes = problem["nodes"]
        edges = problem["edges"]
        costs, usages = ([np.array(x, float) for x in nodes[key]] for key in ("costs", "usages"))
        graph = cls(
            costs,
            usages,
            [tuple(x) for x in nodes["intervals"]],
            {},
            problem.get("usage_limit", np.inf),
        )
        for (i, j), table in zip(edges["nodes"], edges["costs"], strict=True):
            graph.add((i, j), np.array(table, float).reshape(len(costs[i]), len(costs[j])))
        return graph

    def add(self, edge: tuple[int, int], table: np.ndarray) -> None:
        (i, j), table = (edge, table) if edge[0] < edge[1] else (edge[::-1], table.T)
        self.tables[i, j] = self.tables.get((i, j), 0) + np.minimum(table, NEVER)

    def cost(self, chosen: Sequence[int]) -> float:
        pairs = sum(float(t[chosen[i], chosen[j]]) for (i, j), t in self.tables.items())
        return sum(float(c[k]) for c, k in zip(self.costs, chosen, strict=True)) + pairs

    def peak(self, chosen: Sequence[int]) -> float:
        changes = np.zeros(max(end for _, end in self.intervals) + 2)
        for (start, end), usage, k in zip(self.intervals, self.usages, chosen, strict=True):
            if start < end:
                changes[start] += usage[k]
                changes[end] -= usage[k]
        return float(changes.cumsum().max())

    def times(self) -> np.ndarray:
        """For every time that can exceed the limit, and no other time contains, the nodes that count."""
        points = sorted({start for start, end in self.intervals if start < end})
        most = np.array([u.max() for u in self.usages])
        rows: list[frozenset[int]] = []
        for point in points:
            live = frozenset(
                v
                for v, (start, end) in enumerate(self.intervals)
                if start <= point < end and most[v] > 0
            )
            if sum(most[v] for v in live) > self.limit:
                rows.append(live)
        kept = [row for row in dict.fromkeys(rows) if not any(row < other for other in rows)]
        return np.array([[v in row for v in range(len(self.costs))] for row in kept]).reshape(
            len(kept), len(self.costs)
        )


def reduce(graph: Graph) -> np.ndarray:
    """Leave out what no best solution needs, until nothing changes: nodes keep one option; the times left."""
    while True:
        times = graph.times()
        counted = np.asarray(times.any(0))
        before = sum(map(len, graph.costs)), len(graph.tables)
        ends: list[list[tuple[int, int]]] = [[] for _ in graph.costs]
        for edge in graph.tables:
            for v in edge:
                ends[v].append(edge)
        for v in range(len(graph.costs)):
            keep = undominated(graph, v, ends[v], bool(counted[v]))
            if not keep.all():
                select(graph, v, keep, ends[v])
        eliminate(graph, counted)
        for edge, table in list(
            graph.tables.items()
        ):  # what depends on one end only belongs to the node
            least = table.min(1)
            table = table - least[:, None]
            other = table.min(0)
            graph.costs[edge[0]], graph.costs[edge[1]] = (
                graph.costs[edge[0]] + least,
                graph.costs[edge[1]] + other,
            )
            graph.tables[edge] = table - other
            if not graph.tables[edge].any():
                del graph.tables[edge]
        if before == (sum(map(len, graph.costs)), len(graph.tables)):
            return times


def undominated(
    graph: Graph, v: int, edges: Sequence[tuple[int, int]], counted: bool
) -> np.ndarray:
    """Options that no other one can replace for less, whatever the neighbours do (Goldstein 1994)."""
    cost = graph.costs[v]
    usage = graph.usages[v]
    worse = cost[:, None] - cost[None]  # of i in place of j, at most
    for i, j in edges:
        table = graph.tables[i, j] if i == v else graph.tables[i, j].T
        rows, index = np.unique(table, axis=0, return_inverse=True)
        worse = (
            worse + (rows[:, None] - rows[None]).max(-1)[index.reshape(-1)][:, index.reshape(-1)]
        )
    better = worse <= 0
    if counted:
        better &= usage[:, None] <= usage[None]
    keep = cost < NEVER / 2
    for j in range(len(cost)):
        others = better[:, j] & keep
        others[j] = False
        keep[j] &= not others.any()
    return keep


def select(graph: Graph, v: int, keep: np.ndarray, edges: Sequence[tuple[int, int]]) -> None:
    graph.undo.append((v, [], np.nonzero(keep)[0]))
    graph.costs[v], graph.usages[v] = graph.costs[v][keep], graph.usages[v][keep]
    for i, j in edges:
        graph.tables[i, j] = graph.tables[i, j][keep] if i == v else graph.tables[i, j][:, keep]


def eliminate(graph: Graph, counted: np.ndarray) -> None:
    """Nodes with two neighbours at most that count at no time, or have one option: into their neighbours."""
    ends: dict[int, set[int]] = {v: set() for v in range(len(graph.costs))}
    for i, j in graph.tables:
        ends[i].add(j)
        ends[j].add(i)
    for v in range(len(graph.costs)):
        near = sorted(ends[v])
        if (len(graph.costs[v]) > 1 and (counted[v] or len(near) > 2)) or not near:
            continue
        if len(graph.costs[v]) == 1:
            for w in near:
                table = graph.tables.pop((min(v, w), max(v, w)))
                graph.costs[w] = graph.costs[w] + (table[0] if v < w else table[:, 0])
                ends[w].remove(v)
            ends[v] = set()
            continue
        tables = [graph.tables.pop((min(v, w), max(v, w))) for w in near]
        tables = [t.T if v < w else t for t, w in zip(tables, near, strict=True)]  # [neighbour, v]
        total = graph.costs[v] + (
            tables[0] if len(near) == 1 else tables[0][:, None] + tables[1][None]
        )
        graph.undo.append((v, near, total.argmin(-1)))
        graph.costs[v], graph.usages[v] = np.zeros(1), np.zeros(1)
        for w in near:
            ends[w].remove(v)
        ends[v] = set()
        if len(near) == 1:
            graph.costs[near[0]] = graph.costs[near[0]] + total.min(-1)
        else:
            graph.add((near[0], near[1]), total.min(-1))
            ends[near[0]].add(near[1])
            ends[near[1]].add(near[0])


def restored(graph: Graph, chosen: Sequence[int]) -> list[int]:
    """A solution of the reduced graph -> one of the graph as it was."""
    whole = list(chosen)
    for v, near, index in reversed(graph.undo):
        whole[v] = int(index[tuple(whole[w] for w in near)] if near else index[whole[v]])
    return whole


def solve(graph: Graph, most_nodes: int, gap: float) -> tuple[list[int] | None, float]:
    """The cheapest assignment of a reduced graph, None if none is found, and a lower bound of all.

    A graph with too many pairs of options has several programs, each of the options of assignments under many
    prices and of the best assignment so far; the bound is then from the prices.
    """
    times = reduce(graph)
    size = pairs_of(graph)
    shares = [
        usage[:, None] * row / graph.limit for usage, row in zip(graph.usages, times.T, strict=True)
    ]
    every = [np.arange(len(cost)) for cost in graph.costs]
    told = (
        f"{sum(len(o) > 1 for o in every)} nodes with {sum(map(len, every))} options, {size} pairs"
    )
    print(f"  {told}, {len(graph.tables)} edges, {len(times)} times left", flush=True)
    if size <= MOST_PAIRS:
        return solve_among(graph, shares, every, most_nodes, gap)
    best = None
    bound = -np.inf
    for steps in STEPS:
        left, below = pool(graph.costs, shares, graph.tables, steps)
        bound = max(bound, below)
        if best is not None:
            left = [np.union1d(own, k) for own, k in zip(left, best, strict=True)]
        chosen, _ = solve_among(graph, shares, left, most_nodes, gap)
        best = best if chosen is None else chosen  # the best so far is among the options
        found = "nothing" if best is None else f"{graph.cost(best):.0f}"
        print(f"  {sum(map(len, left))} options of assignments under prices: {found}", flush=True)
    return best, bound


def solve_among(
    graph: Graph,
    shares: Sequence[np.ndarray],
    left: Sequence[np.ndarray],
    most_nodes: int,
    gap: float,
) -> tuple[list[int] | None, float]:
    """The cheapest assignment of some of the options by an integer program, and a bound of all such."""
    values = [
        np.concatenate([c[own, None], s[own]], 1)
        for c, s, own in zip(graph.costs, shares, left, strict=True)
    ]
    pairs = []
    for (v, w), table in graph.tables.items():
        rows, i = np.unique(table[np.ix_(left[v], left[w])], axis=0, return_inverse=True)
        rows, j = np.unique(rows, axis=1, return_inverse=True)
        pairs.append(
            Pairs((v, w), (i.reshape(-1), j.reshape(-1)), [0], rows[None], rows > NEVER / 2)
        )
    unit = np.eye(1 + shares[0].shape[1])
    cost = CostFunction(unit[0], np.zeros(0), np.zeros((0, 1, len(unit))), unit[1:])
    about = sum(float(each.min()) for each in (*graph.costs, *graph.tables.values()))
    chosen, bound = solve_program(values, pairs, cost, max(about, 1.0), np.inf, most_nodes, gap)
    if chosen is None:
        return None, bound
    return [int(own[k]) for own, k in zip(left, chosen, strict=True)], bound


def pairs_of(graph: Graph) -> int:
    """The number of pairs of options that differ, of all edges."""
    return sum(
        len(np.unique(t, axis=0)) * len(np.unique(t, axis=1).T) for t in graph.tables.values()
    )


def run(path: Path, known: dict[str, Any], most_nodes: int, gap: float) -> dict[str, Any]:
    """An instance solved. known: the best cost that anyone reports, and the contest's limit of seconds."""
    start = time.process_time()
    whole = Graph.read(path)
    graph = Graph.read(path)
    reduced, bound = solve(graph, most_nodes, gap)
    row = {"instance": known["instance"], "seconds": time.process_time() - start, "bound": bound}
    row |= {
        "best_known": known["best_known"],
        "limit_s": known["timeout_s"],
        "nodes": len(whole.costs),
    }
    if reduced is None:
        return {**row, "cost": None}
    chosen = restored(graph, reduced)
    return {**row, "cost": whole.cost(chosen), "of_limit": whole.peak(chosen) / whole.limit}


def judge(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    costs = [(row["instance"], (row["cost"] or np.inf) / row["best_known"]) for row in rows]
    seconds = [(row["instance"], row["seconds"] / row["limit_s"]) for row in rows]
    used = [(row["instance"], row.get("of_limit", np.inf)) for row in rows]
    return [
        worst("cost / the best known: worst", costs, 1.03),
        worst("bytes at the peak / the limit: worst", used, 1.0),
        worst("processor seconds / the contest's limit: worst", seconds, 1.0),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = record.options("suggest.iopddl", __doc__, quick="the first instance alone")
    parser.add_argument("instances", type=Path, nargs="+")
    parser.add_argument("--best", type=Path, required=True)
    parser.add_argument(
        "--nodes", type=int, default=2000, help="most nodes of an integer program's tree"
    )
    parser.add_argument(
        "--gap", type=float, default=0.0, help="share of the cost that a program may leave"
    )
    options = parser.parse_args(arguments)
    known = {row["instance"]: row for row in json.loads(options.best.read_text())["instances"]}
    rows = []
    for path in options.instances[: 1 if options.quick else None]:
        row = run(path, known[path.name.partition(".")[0]], options.nodes, options.gap)
        rows.append(row)
        share = (
            f"{row['cost'] / row['best_known']:.4f} of the best known"
            if row["cost"]
            else "nothing found"
        )
        print(
            f"{row['instance']}: {share}, bound {row['bound']:.0f}, {row['seconds']:.1f} s",
            flush=True,
        )
    named = " ".join(path.name for path in options.instances)
    command = f"python -m benchmarks.suggest.iopddl {named} --best {options.best.name}"
    title = "A contest's instances"
    rows_by_name = {"instances": rows}
    return finish(options, title, judge(rows), "scipy", rows=rows_by_name, command=command)


if __name__ == "__main__":
    sys.exit(main())
