"""The cost of a step on a mesh: a vector of parts for every option and every move; seconds and bytes from it.

The parts of each repeated block are seconds of computing and of moving, forward and backward, for one
micro-batch and one layer, and bytes held while it runs. Parts of the whole step follow (`WEIGHTS`, ...).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from xshard.cost.model import Profile
from xshard.dtypes import itemsize
from xshard.layout import Mesh
from xshard.step.cost import Cost
from xshard.step.edge import Edge, Term
from xshard.step.moves import Floats, MovePrices
from xshard.step.op import COPY, REPLICAS, Op
from xshard.step.options import Indices, NodeOptions, array_shape, options_of, shares, storage
from xshard.step.step import TrainingStep

COMPUTED, MOVED, COMPUTED_BACK, MOVED_BACK, HELD = PARTS = range(5)  # of each block
WEIGHTS, GRADIENTS, STATE, ACTIVATIONS, OPTIMIZER = range(-5, 0)  # of the whole step
MEMORY = {"parameters": WEIGHTS, "gradients": GRADIENTS, "optimizer state": STATE, "activations": ACTIVATIONS}
EACH, KEPT = range(2)  # a parameter is gathered for each use, or once per step


class Training(NamedTuple):
    """How a step runs, and on what.

    overlap: share of the seconds of moves that run beside computing, if that takes long enough.
    efficiency: share of the peak rate that products reach. The bytes are for each parameter.
    """

    moves: MovePrices
    micro_batches: int = 1
    recompute: bool = False
    overlap: float = 0.8
    efficiency: float = 0.72
    gradient_bytes: int = 4
    state_bytes: int = 12


@dataclass(frozen=True, eq=False)
class Node:
    """An operation, a parameter or an input with its options, and the parts of the cost of each.

    kept: for a parameter, whether an option is gathered once per step (`KEPT`).
    """

    name: str
    options: NodeOptions
    values: Floats
    kept: Indices | None = None


@dataclass(frozen=True, eq=False)
class StepProblem:
    """A step on a mesh with micro-batches; `assignment` is an option for every node."""

    step: TrainingStep
    training: Training

    @property
    def mesh(self) -> Mesh:
        return self.training.moves.mesh

    @property
    def profile(self) -> Profile:
        return self.training.moves.profile

    @cached_property
    def lengths(self) -> Mapping[str, int]:
        """Lengths of dims in one micro-batch."""
        batch = self.step.batch
        return {**self.step.lengths, batch: self.step.lengths[batch] // self.training.micro_batches}

    @cached_property
    def blocks(self) -> list[int]:
        """How often each block runs, operations that run equally often as one."""
        return sorted({op.times for op in self.step.ops})

    @property
    def size(self) -> int:
        """Number of parts."""
        return len(self.blocks) * len(PARTS) + 5

    def part(self, op: Op, which: int) -> int:
        """The place of a part of the block of an operation."""
        return self.blocks.index(op.times) * len(PARTS) + which

    @cached_property
    def nodes(self) -> list[Node]:
        """Inputs and parameters, then operations."""
        inputs = [self._given(name, 1) for name in self.step.inputs]
        parameters = [self._given(name, 2) for name in self.step.parameters]
        return [*inputs, *parameters, *map(self._node, self.step.ops)]

    @cached_property
    def number(self) -> Mapping[str, int]:
        """The number of every node by name."""
        return {node.name: i for i, node in enumerate(self.nodes)}

    def _given(self, name: str, modes: int) -> Node:
        shape = array_shape(self.step.dims[name], self.lengths)
        options = storage(shape, self.mesh)
        kept = np.repeat(np.arange(modes), len(options))
        options = options.only(np.tile(np.arange(len(options)), modes))
        values = np.zeros((len(kept), self.size))
        if name in self.step.parameters:
            local = math.prod(shape) * shares(options.ways[:, -1], self.mesh)
            times, training = self.step.consumers(name)[0].times, self.training
            for part, n_bytes in ((WEIGHTS, itemsize(self.step.dtype)), (GRADIENTS, training.gradient_bytes)):
                values[:, part] = np.where(kept == EACH, times * n_bytes * local, 0)
            values[:, STATE] = times * training.state_bytes * local
            touched = 2 * training.state_bytes + training.gradient_bytes
            values[:, OPTIMIZER] = times * touched * local / (2 * self.profile.copy_bytes_per_s)
        return Node(name, options, values, kept if modes == 2 else None)

    def _node(self, op: Op) -> Node:
        options, work, n = options_of(op, self.lengths, self.mesh), op.work, itemsize(self.step.dtype)
        values, recomputed = np.zeros((len(options), self.size)), self._recomputed(op)
        busy = np.array([max((*rule.operands, rule.result)) >= 0 for rule in op.axis_rules])
        split = np.prod(np.where(busy[options.rules], self.mesh.sizes, 1), -1)
        touched, saved = np.zeros((2, len(values)))
        for j, dims in enumerate(op.arrays):
            n_bytes = n * shares(options.ways[:, j], self.mesh) * math.prod(self.lengths[d] for d in dims)
            touched += n_bytes
            name = op.operands[j] if j < len(op.operands) else ""
            producer = self.step.by_name.get(name)
            if producer is not None and producer.kind != "share":
                saved += work.saved * n_bytes
            elif not name and op.kind == "carry" and recomputed:
                values[:, ACTIVATIONS] += op.times * n_bytes
        space = math.prod(self.lengths[d] for d in dict.fromkeys(d for dims in op.arrays for d in dims))
        rate = self.profile.flops(self.step.dtype) * self.training.efficiency * work.rate
        seconds = np.maximum(
            work.flops * space / split / rate, work.accesses * touched / (2 * self.profile.copy_bytes_per_s)
        )
        values[:, self.part(op, COMPUTED)] = seconds
        values[:, self.part(op, COMPUTED_BACK)] = seconds * (work.backward + recomputed)
        values[:, self.part(op, HELD) if recomputed else ACTIVATIONS] += saved * (
            1 if recomputed else op.times
        )
        return Node(op.name, options, values)

    def _recomputed(self, op: Op) -> bool:
        return self.training.recompute and op.times > 1

    @cached_property
    def edges(self) -> list[Edge]:
        """The moves of every operand."""
        edges = []
        for op in self.step.ops:
            for k, name in enumerate(op.operands):
                if name in self.step.parameters:
                    edges.append(self._parameter(op, k))
                else:
                    edges.append(self._activation(name, op, k, 1 / op.times if op.again else 1.0))
            if op.again:
                edges.append(self._activation(op.again, op, 0, 1 - 1 / op.times))
        return edges

    def _activation(self, name: str, op: Op, k: int, often: float) -> Edge:
        producer, step = self.step.by_name.get(name), self.step
        entered, left = step.module(op, left=False) if k == 0 else "", ""
        if producer is not None and len(step.consumers(name)) == 1:
            left = step.module(producer, left=True)
        if op.again and name != op.again:  # the first of repeated blocks
            entered = entered.replace("*", "0")
        place = entered or left or (name if step.moves_anywhere else "")
        parts: dict[int, tuple[Term, Term, Term]] = {
            self.part(op, MOVED): (often, 0.0, 0.0),
            self.part(op, MOVED_BACK): (often * self._recomputed(op), often, 0.0),
        }
        return self._edge(
            name, op, k, parts, is_linear=producer is not None, place=place, enters=bool(entered)
        )

    def _parameter(self, op: Op, k: int) -> Edge:
        name, often, n = op.operands[k], 1 / self.training.micro_batches, itemsize(self.step.dtype)
        kept, used = (
            self.nodes[self.number[name]].kept,
            self.nodes[self.number[op.name]].options.layouts(k)[0],
        )
        assert kept is not None
        each = (kept == EACH)[:, None]
        stored = self.nodes[self.number[name]].options.ways[:, -1]
        gathered = each & (stored[:, None] != np.where(used == COPY, REPLICAS, used)[None]).any(-1)
        first = op.times * (self.step.consumers(name)[0] is op)
        used_elements = math.prod(self.lengths[d] for d in op.arrays[k]) * shares(used, self.mesh)[None]
        copies = 3 if op.times > 1 else 2  # the next layer's is gathered meanwhile; one is for the gradient
        parts: dict[int, tuple[Term, Term, Term]] = {
            self.part(op, MOVED): (np.where(each, 1.0, often), 0.0, 0.0),
            self.part(op, MOVED_BACK): (np.where(each, 1.0, 0.0), np.where(each, 1.0, often), 0.0),
            self.part(op, HELD): (0.0, 0.0, np.where(gathered, copies * n * used_elements, 0)),
            WEIGHTS: (0.0, 0.0, np.where(each, 0, first * n * used_elements)),
            GRADIENTS: (0.0, 0.0, np.where(each, 0, first * self.training.gradient_bytes * used_elements)),
        }
        return self._edge(name, op, k, parts, place=name)

    def _edge(
        self, name: str, op: Op, k: int, parts: Mapping[int, tuple[Term, Term, Term]], **how: Any
    ) -> Edge:
        nodes = self.number[name], self.number[op.name]
        src, dst = (self.nodes[i].options for i in nodes)
        every = np.arange(len(src))
        sides = (src.ways[:, -1], every) if name in self.step.parameters else src.layouts(-1), dst.layouts(k)
        layouts, indices = zip(*sides, strict=True)
        return Edge(nodes, indices, layouts, self.shape(name), self.training.moves, parts, **how)

    def shape(self, name: str) -> tuple[int, ...]:
        """The global shape of an array of one micro-batch."""
        return array_shape(self.step.dims[name], self.lengths)

    def vector(self, assignment: Sequence[int]) -> Floats:
        """The parts of the cost of an assignment, with moves as far as they are known."""
        total: Floats = np.sum([n.values[i] for n, i in zip(self.nodes, assignment, strict=True)], 0)
        for edge in self.edges:
            i, j = (np.array([assignment[node]]) for node in edge.nodes)
            total = total + edge.vectors(i, j, self.size)[0]
        return total

    def alternatives(self, assignment: Sequence[int], node: int) -> Floats:
        """The vectors of an assignment with every option of one node in its place."""
        here, every = self.nodes[node], np.arange(len(self.nodes[node].values))
        change = here.values - here.values[assignment[node]]
        for edge in self.edges:
            if node in edge.nodes:
                i, j = (every if n == node else np.repeat(assignment[n], len(every)) for n in edge.nodes)
                moved = edge.vectors(i, j, self.size)
                change = change + moved - moved[assignment[node]]
        vectors: Floats = self.vector(assignment) + change
        return vectors

    def plan(self, assignment: Sequence[int]) -> float:
        """Plan all moves of an assignment; the seconds by which they were underestimated."""
        return sum(edge.plan(*(assignment[node] for node in edge.nodes)) for edge in self.edges)

    def cost(self, limit: float, overlap: float | None = None) -> Cost:
        """Seconds of a step as a function of parts; no device may hold more bytes than the limit."""
        unit, size = np.eye(self.size), len(PARTS)
        maxima, limited = [], []
        hidden = self.training.overlap if overlap is None else overlap
        for block in (unit[i * size : (i + 1) * size] for i in range(len(self.blocks))):
            for work, moved in ((COMPUTED, MOVED), (COMPUTED_BACK, MOVED_BACK)):
                maxima.append([block[work] + (1 - hidden) * block[moved], block[moved]])
            limited.append((block[HELD] + unit[list(MEMORY.values())].sum(0)) / limit)
        times = self.training.micro_batches * np.repeat(self.blocks, 2).astype(float)
        return Cost(unit[OPTIMIZER], times, np.array(maxima), np.array(limited))
