"""A graph network in the words that torch and JAX share, its graph in parts, and what a run reports."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sphere.mesh import Rows, icosphere
from xshard import Mesh, Needs, Owners, Plan, plan, reference

Array = NDArray[np.float64]

WIDTH = 16
LAYERS = 4
NODES = "n/by(gp,cells) d"
HALO = "n/by(gp,cells):reads(near) d"
EDGES = "e/by(gp,edges) c"


class Arrays(NamedTuple):
    """Nodes [n, d], what they should become, and edges [e, 3], of the whole graph or of a part."""

    nodes: Array
    expected: Array
    edges: Array


class Run(NamedTuple):
    """The output and the gradients by name, whole; the most bytes that a device receives before a layer."""

    output: Array
    gradients: dict[str, Array]
    received_bytes: int


class Problem:
    """A graph with random nodes, edges that hold the vector between neighbours, and weights."""

    def __init__(self, refinements: int) -> None:
        rng = np.random.default_rng(0)
        self.points, self.senders, self.receivers = icosphere(refinements)
        n = len(self.points)
        between = self.points[self.senders] - self.points[self.receivers]
        self.arrays = Arrays(*rng.normal(size=(2, n, WIDTH)), between * n**0.5)
        self.weights = {"embed": rng.normal(0, 0.5, (3, WIDTH))}
        for layer in range(LAYERS):
            for kind, inputs in (("edge", 3 * WIDTH), ("node", 2 * WIDTH)):
                for name, shape in (("up", (inputs, WIDTH)), ("down", (WIDTH, WIDTH))):
                    self.weights[f"{layer}.{kind}.{name}"] = rng.normal(0, shape[0] ** -0.5, shape)


class Parts:
    """The problem on devices: who owns which nodes, which others a part reads, and the edges into its own."""

    def __init__(self, problem: Problem, owner: Rows) -> None:
        cells = Owners(owner)
        near, self.local = Needs.of_edges(cells, problem.senders, problem.receivers)
        edges = Owners.of_rows([each.number for each in self.local])
        self.problem, self.mesh = problem, Mesh(gp=len(cells.sizes))
        self.maps: dict[str, Any] = {"cells": cells, "near": near, "edges": edges}

    @cached_property
    def exchange(self) -> Plan:
        """The exchange before a layer."""
        shape = self.problem.arrays.nodes.shape
        return plan(f"{NODES} -> {HALO}", self.mesh, shape, "float64", maps=self.maps)

    def blocks(self) -> list[Arrays]:
        """The arrays of every device."""
        scatter = partial(reference.scatter, mesh=self.mesh, maps=self.maps)
        by_array = map(scatter, self.problem.arrays, (NODES, NODES, EDGES))
        return [Arrays(*found) for found in zip(*by_array, strict=True)]

    def joined(
        self,
        output: Sequence[Array],
        nodes: Sequence[Array],
        edges: Sequence[Array],
        weights: Mapping[str, Array],
        received_bytes: int,
    ) -> Run:
        """Blocks of the output, of the gradients of nodes and of edges; gradients of weights."""
        whole = partial(reference.gather, mesh=self.mesh, maps=self.maps)
        n = self.problem.arrays.nodes.shape
        e = self.problem.arrays.edges.shape
        pulled = {"nodes": whole(nodes, NODES, shape=n), "edges": whole(edges, EDGES, shape=e)}
        return Run(whole(output, NODES, shape=n), {**weights, **pulled}, received_bytes)


def network(
    weights: Mapping[str, Any],
    nodes: Any,
    edges: Any,
    sender: Any,
    receiver: Any,
    *,
    read: Callable[[Any], Any],
    take: Callable[[Any, Any], Any],
    add: Callable[[Any, Any, Any], Any],
    join: Callable[[Sequence[Any]], Any],
    silu: Callable[[Any], Any],
) -> Any:
    """Nodes [n, d] and edges [e, 3] of a part -> nodes after all layers.

    read: a part's nodes -> these, then the others that it reads. sender, receiver: rows of both, of nodes.
    take: (x, rows) -> x[rows]. add: (x, rows, y) -> zeros like x, with y added in rows.
    """

    def mlp(name: str, *inputs: Any) -> Any:
        return silu(join(inputs) @ weights[f"{name}.up"]) @ weights[f"{name}.down"]

    edges = edges @ weights["embed"]
    for layer in range(LAYERS):
        edges = edges + mlp(
            f"{layer}.edge", edges, take(read(nodes), sender), take(nodes, receiver)
        )
        nodes = nodes + mlp(f"{layer}.node", nodes, add(nodes, receiver, edges))
    return nodes
