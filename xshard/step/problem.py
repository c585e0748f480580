"""The cost of a step on a mesh: a vector of parts for every option and every move; seconds and bytes from it.

The parts of each repeated block are seconds of computing and of moving, forward and backward, for one
micro-batch and one layer, and bytes held while it runs. Parts of the whole step follow (`WEIGHTS`, ...).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.cost.model import Profile
from xshard.dtypes import itemsize
from xshard.layout import Mesh
from xshard.notation.parser import ARROW, parts_of
from xshard.step.cost import Cost
from xshard.step.edge import Edge, Term
from xshard.step.moves import MovePrices
from xshard.step.op import Op
from xshard.step.options import Floats, Indices, distinct, options_of, product, without_copies
from xshard.step.step import TrainingStep, shape_of

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


class Node(NamedTuple):
    """An operation, a parameter or an input with its options, and the parts of the cost of each.

    ways: [options, arrays, axes], the result last. kept: for a parameter, `EACH` or `KEPT`.
    """

    name: str
    ways: NDArray[np.int64]
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

    def part(self, op: Op, which: int) -> int:
        """The place of a part of the block of an operation."""
        return self.blocks.index(op.times) * len(PARTS) + which

    @cached_property
    def unit(self) -> Floats:
        """A row for each part."""
        return np.eye(len(self.blocks) * len(PARTS) + 5)

    def names(self, name: str) -> list[str]:
        """A name for each dim of an array: several that are one dim have one name together.

        Dims of parameters are called alike in all, so that one rule is for many.
        """
        dims = self.step.arrays[name].dims
        if name in self.step.parameters:
            return {1: ["n"], 2: ["o", "i"], 3: ["e", "o", "i"]}.get(
                len(dims), [f"d{i}" for i in range(len(dims))]
            )
        return ["".join(parts_of(dim)) for dim in dims]

    def shape(self, name: str) -> tuple[int, ...]:
        """The global shape of an array of one micro-batch."""
        return shape_of(self.step.arrays[name], self.lengths)

    @cached_property
    def nodes(self) -> list[Node]:
        """Inputs and parameters, then operations."""
        return [
            *map(self._given, (*self.step.inputs, *self.step.parameters)),
            *map(self._node, self.step.ops),
        ]

    @cached_property
    def number(self) -> Mapping[str, int]:
        """The number of every node by name."""
        return {node.name: i for i, node in enumerate(self.nodes)}

    def _bytes(self, ways: NDArray[np.int64], shape: Sequence[int], each: int) -> Floats:
        """Bytes that a device holds of an array, with so many for each element."""
        local: Floats = each * math.prod(shape) / product(ways >= 0, self.mesh.sizes)
        return local

    def _given(self, name: str) -> Node:
        shape, names = self.shape(name), self.names(name)
        storing = Op(name, f"{ARROW} {' '.join(names)}", (), "source")
        ways = options_of(storing, dict(zip(names, shape, strict=True)), self.mesh)
        if name in self.step.inputs:
            return Node(name, ways, np.zeros((len(ways), len(self.unit))))
        kept, ways, training = np.repeat((EACH, KEPT), len(ways)), np.tile(ways, (2, 1, 1)), self.training
        values = np.zeros((len(ways), len(self.unit)))
        local = self._bytes(ways[:, -1], shape, self.step.consumers(name)[0].times)
        values[:, WEIGHTS] = np.where(kept == EACH, itemsize(self.step.dtype) * local, 0)
        values[:, GRADIENTS] = np.where(kept == EACH, training.gradient_bytes * local, 0)
        values[:, STATE] = training.state_bytes * local
        touched = 2 * training.state_bytes + training.gradient_bytes
        values[:, OPTIMIZER] = touched * local / (2 * self.profile.copy_bytes_per_s)
        return Node(name, ways, values, kept)

    def _node(self, op: Op) -> Node:
        ways, work, step = options_of(op, self.lengths, self.mesh), op.work, self.step
        values, recomputed = np.zeros((len(ways), len(self.unit))), self._recomputed(op)
        shapes = [shape_of(array, self.lengths) for array in op.arrays]
        local = [self._bytes(ways[:, j], s, itemsize(step.dtype)) for j, s in enumerate(shapes)]
        kept = [o in step.by_name and step.by_name[o].kind != "share" for o in op.operands]
        saved = work.saved * sum(each for each, is_kept in zip(local, kept, strict=False) if is_kept)
        space = math.prod(self.lengths[d] for d in {d for dims in op.dims for d in dims})
        split = product(np.any(ways >= 0, 1), self.mesh.sizes)
        rate = self.profile.flops(step.dtype) * self.training.efficiency * work.rate
        reading = work.accesses * sum(local) / (2 * self.profile.copy_bytes_per_s)
        seconds = np.maximum(work.flops * space / split / rate, reading)
        values[:, self.part(op, COMPUTED)] = seconds
        values[:, self.part(op, COMPUTED_BACK)] = seconds * (work.backward + recomputed)
        if recomputed:
            values[:, ACTIVATIONS] = op.times * local[-1] * (op.kind == "carry")
            values[:, self.part(op, HELD)] = saved
        else:
            values[:, ACTIVATIONS] = op.times * saved
        return Node(op.name, ways, values)

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
        parts: dict[int, tuple[Term, Term, Term]] = {
            self.part(op, MOVED): (often, 0.0, 0.0),
            self.part(op, MOVED_BACK): (often * self._recomputed(op), often, 0.0),
        }
        place = entered or left or (name if step.moves_anywhere else "")
        return self._edge(name, op, k, parts, place, is_linear=producer is not None, enters=bool(entered))

    def _parameter(self, op: Op, k: int) -> Edge:
        name, often, n = op.operands[k], 1 / self.training.micro_batches, itemsize(self.step.dtype)
        node, (used, _) = self.nodes[self.number[name]], distinct(self.nodes[self.number[op.name]].ways[:, k])
        assert node.kept is not None
        each = (node.kept == EACH)[:, None]
        gathered = each & (node.ways != without_copies(used)).any(-1)
        elements = self._bytes(used, shape_of(op.arrays[k], self.lengths), 1)
        first = np.where(each, 0, op.times * (self.step.consumers(name)[0] is op) * elements)
        copies = 3 if op.times > 1 else 2  # the next layer's is gathered meanwhile; one is for the gradient
        parts: dict[int, tuple[Term, Term, Term]] = {
            self.part(op, MOVED): (np.where(each, 1.0, often), 0.0, 0.0),
            self.part(op, MOVED_BACK): (np.where(each, 1.0, 0.0), np.where(each, 1.0, often), 0.0),
            self.part(op, HELD): (0.0, 0.0, np.where(gathered, copies * n * elements, 0)),
            WEIGHTS: (0.0, 0.0, n * first),
            GRADIENTS: (0.0, 0.0, self.training.gradient_bytes * first),
        }
        return self._edge(name, op, k, parts, name)

    def _edge(
        self,
        name: str,
        op: Op,
        k: int,
        parts: Mapping[int, tuple[Term, Term, Term]],
        place: str,
        *,
        is_linear: bool = True,
        enters: bool = False,
    ) -> Edge:
        numbers = self.number[name], self.number[op.name]
        src, dst = (self.nodes[i] for i in numbers)
        stored = (
            distinct(src.ways[:, -1]) if src.kept is None else (src.ways[:, -1], np.arange(len(src.ways)))
        )
        layouts, indices = zip(stored, distinct(dst.ways[:, k]), strict=True)
        moves = self.training.moves
        return Edge(numbers, indices, layouts, self.shape(name), moves, parts, is_linear, place, enters)

    def vectors(self, assignment: Sequence[int], node: int = -1) -> Floats:
        """The parts of the cost of an assignment; of a node, with each of its options in its place.

        MovePrices are as far as they are known; parts are infinite where nothing can move.
        """
        chosen = [np.array([i]) for i in assignment]
        if node >= 0:
            chosen[node] = np.arange(len(self.nodes[node].ways))
        total: Floats = sum(n.values[i] for n, i in zip(self.nodes, chosen, strict=True))
        banned = np.zeros(len(total), bool)
        for edge in self.edges:
            i, j = (edge.indices[side][chosen[n]] for side, n in enumerate(edge.nodes))
            total[:, edge.parts] += edge.tables[:, i, j].T
            banned |= edge.banned[i, j]
        total[banned] = np.inf
        return total

    def planned(self, assignment: Sequence[int]) -> Floats:
        """The parts of the cost of an assignment with all its moves planned."""
        self.plan(assignment)
        vector: Floats = self.vectors(assignment)[0]
        return vector

    def plan(self, assignment: Sequence[int]) -> float:
        """Plan all moves of an assignment; the seconds by which they were underestimated."""
        return sum(edge.plan(*(assignment[node] for node in edge.nodes)) for edge in self.edges)

    def cost(self, limit: float, overlap: float | None = None) -> Cost:
        """Seconds of a step as a function of parts, where no device holds more bytes than the limit."""
        hidden = self.training.overlap if overlap is None else overlap
        of_blocks = self.unit[: len(self.blocks) * len(PARTS)].reshape(len(self.blocks), len(PARTS), -1)
        work, moved = of_blocks[:, [COMPUTED, COMPUTED_BACK]], of_blocks[:, [MOVED, MOVED_BACK]]
        maxima = np.stack([work + (1 - hidden) * moved, moved], 2).reshape(-1, 2, len(self.unit))
        times = self.training.micro_batches * np.repeat(self.blocks, 2).astype(float)
        held = of_blocks[:, HELD] + self.unit[list(MEMORY.values())].sum(0)
        return Cost(self.unit[OPTIMIZER], times, maxima, held / limit)

    def memory(self, vector: Floats) -> dict[str, int]:
        """Bytes that a device holds at most, by kind."""
        held = vector[HELD : len(self.blocks) * len(PARTS) : len(PARTS)].max()
        return {**{kind: int(vector[part]) for kind, part in MEMORY.items()}, "while a block runs": int(held)}

    def parts_of(self, vector: Floats) -> dict[str, float]:
        """Seconds of a step by kind."""
        blocks = vector[: len(self.blocks) * len(PARTS)].reshape(-1, len(PARTS))
        sums = self.training.micro_batches * np.array(self.blocks) @ blocks
        computing, moving = sums[COMPUTED] + sums[COMPUTED_BACK], sums[MOVED] + sums[MOVED_BACK]
        return {"computing": float(computing), "moving": float(moving), "optimizer": float(vector[OPTIMIZER])}
