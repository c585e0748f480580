"""The cost of a step on a mesh: a vector of parts for every option and every move; seconds and bytes from it.

The parts of each repeated block are for one micro-batch and one layer: seconds of computing and of moving,
forward and backward; bytes of activations that are saved or computed again, and of parameters that are
gathered for each use or once. Parts of the whole step follow (`WEIGHTS`, ...).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from xshard.dtypes import itemsize
from xshard.layout import Mesh
from xshard.notation.parser import ARROW, parts_of
from xshard.rules import spellings
from xshard.step.cost import Cost
from xshard.step.moves import Edge, MovePrices, Term
from xshard.step.op import Floats, Ints, Op, distinct, options_of, product, without_copies
from xshard.step.step import TrainingStep, shape_of

COMPUTED, MOVED, COMPUTED_BACK, MOVED_BACK, SAVED, AGAIN, HELD, GATHERED = PARTS = range(8)  # of each block
WEIGHTS, GRADIENTS, STATE, OPTIMIZER = range(-4, 0)  # of the whole step
EFFICIENCY = 0.72  # of the peak rate, for products
EACH, KEPT = range(2)  # a parameter is gathered for each use, or once per step


class Node(NamedTuple):
    """An operation, a parameter or an input with its options, and the parts of the cost of each.

    ways: [options, arrays, axes], the result last. kept: for a parameter, `EACH` or `KEPT`.
    """

    name: str
    ways: Ints
    values: Floats
    kept: Ints | None = None


@dataclass(frozen=True, eq=False)
class StepProblem:
    """A step on a mesh with micro-batches; an assignment is an option for every node.

    overlap: share of the seconds of moves that run beside computing, if that takes long enough.
    """

    step: TrainingStep
    moves: MovePrices
    micro_batches: int = 1
    recompute: bool = False
    overlap: float = 0.8

    @property
    def mesh(self) -> Mesh:
        return self.moves.mesh

    @cached_property
    def lengths(self) -> Mapping[str, int]:
        """Lengths of dims in one micro-batch."""
        batch = self.step.batch
        return {**self.step.lengths, batch: self.step.lengths[batch] // self.micro_batches}

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
        return np.eye(len(self.blocks) * len(PARTS) + 4)

    def names(self, name: str) -> list[str]:
        """A name for each dim of an array; parameters have the same ones, so that one rule is for many."""
        dims = self.step.arrays[name].dims
        if name in self.step.inputs or name in self.step.by_name:
            return ["".join(parts_of(dim)) for dim in dims]
        return list({1: "n", 2: "oi", 3: "eoi"}.get(len(dims), "")) or [f"d{i}" for i in range(len(dims))]

    def shape(self, name: str) -> tuple[int, ...]:
        """The global shape of an array of one micro-batch."""
        return shape_of(self.step.arrays[name], self.lengths)

    @cached_property
    def nodes(self) -> list[Node]:
        """Inputs and parameters, then operations."""
        stored = map(self._stored, (*self.step.inputs, *self.step.parameters))
        return [*stored, *map(self._node, self.step.ops)]

    @cached_property
    def number(self) -> Mapping[str, int]:
        """The number of every node by name."""
        return {node.name: i for i, node in enumerate(self.nodes)}

    @cached_property
    def optimizer_bytes(self) -> tuple[int, int]:
        """For each parameter the bytes of its gradient, and of moments and a copy in full precision."""
        full = max(4, itemsize(self.step.dtype))
        return full, full * (2 + (itemsize(self.step.dtype) < full))

    def _bytes(self, ways: Ints, shape: Sequence[int], each: int) -> Floats:
        """Bytes that a device holds of an array, with so many for each element."""
        return each * math.prod(shape) / product(ways >= 0, self.mesh.sizes)

    def _stored(self, name: str) -> Node:
        shape, names, (gradient, state) = self.shape(name), self.names(name), self.optimizer_bytes
        storing = Op(name, f"{ARROW} {' '.join(names)}", (), "source")
        ways = options_of(storing, dict(zip(names, shape, strict=True)), self.mesh)
        if name in self.step.inputs:
            return Node(name, ways, np.zeros((len(ways), len(self.unit))))
        kept, ways = np.repeat((EACH, KEPT), len(ways)), np.tile(ways, (2, 1, 1))
        values = np.zeros((len(ways), len(self.unit)))
        local = self._bytes(ways[:, -1], shape, self.step.consumers(name)[0].times)
        values[:, WEIGHTS] = itemsize(self.step.dtype) * local
        values[:, GRADIENTS] = np.where((kept == EACH) | (self.micro_batches == 1), gradient * local, 0)
        values[:, STATE] = state * local
        touched = 7 * gradient  # itself, both moments and the parameter are read, the last three written
        values[:, OPTIMIZER] = touched * local / (2 * self.moves.profile.copy_bytes_per_s)
        return Node(name, ways, values, kept)

    def _node(self, op: Op) -> Node:
        ways, work, step = options_of(op, self.lengths, self.mesh), op.work, self.step
        values, recomputed = np.zeros((len(ways), len(self.unit))), self.recompute and op.times > 1
        shapes = [shape_of(array, self.lengths) for array in op.arrays]
        local = [self._bytes(ways[:, j], s, itemsize(step.dtype)) for j, s in enumerate(shapes)]
        space = math.prod(self.lengths[d] for d in {d for dims in op.dims for d in dims})
        profile, split = self.moves.profile, product(np.any(ways >= 0, 1), self.mesh.sizes)
        rate = profile.flops(step.dtype) * EFFICIENCY * work.rate
        reading = work.accesses * sum(local) / (2 * profile.copy_bytes_per_s)
        seconds = np.maximum(work.flops * space / split / rate, reading)
        kept = [o in step.by_name and step.by_name[o].kind != "share" for o in op.operands]
        saved = sum(local[i] for i in op.kept if i == len(kept) or kept[i])
        saved = saved + itemsize(step.dtype) * op.inner * space / split
        if op.kind == "loss" and itemsize(step.dtype) < 4:
            saved *= 3  # in float32, too
        values[:, self.part(op, COMPUTED)] = seconds
        values[:, self.part(op, COMPUTED_BACK)] = seconds * (work.backward + recomputed)
        if recomputed:
            values[:, self.part(op, SAVED)] = local[-1] * (op.kind == "carry")
            values[:, self.part(op, AGAIN)] = saved
        else:
            values[:, self.part(op, SAVED)] = saved
        return Node(op.name, ways, values)

    @cached_property
    def edges(self) -> list[Edge]:
        """The moves of every operand; a repeated block has its first one from elsewhere."""
        edges = []
        for op in self.step.ops:
            often = 1 / op.times if op.again else 1.0
            edges += [self._edge(name, op, k, often) for k, name in enumerate(op.operands)]
            edges += [self._edge(op.again, op, 0, 1 - often)] if op.again else []
        return edges

    def _edge(self, name: str, op: Op, k: int, often: float) -> Edge:
        numbers, step = (self.number[name], self.number[op.name]), self.step
        src, dst = (self.nodes[i] for i in numbers)
        rows, (used, columns) = distinct(src.ways[:, -1]), distinct(dst.ways[:, k])
        place = name if name in step.parameters or step.moves_anywhere else ""
        if name in step.by_name and len(step.consumers(name)) == op.operands.count(name) == 1:
            place = step.module(step.by_name[name], left=True) or place
        entered = step.module(op, left=False) if k == 0 and name not in step.parameters else ""
        if op.again and name != op.again:  # the first of repeated blocks
            entered = spellings(entered)[0].replace("*", "0")
        once: Term = often
        again: Term = often * (self.recompute and op.times > 1)
        terms = dict[int, tuple[Term, Term, Floats | None]]()
        if src.kept is not None:
            rows, each = (src.ways[:, -1], np.arange(len(src.ways))), src.kept == EACH
            once, again = np.where(each, 1.0, 1 / self.micro_batches), np.where(each, 1.0, 0.0)
            gathered = (src.ways != without_copies(used)).any(-1)
            elements = self._bytes(used, shape_of(op.arrays[k], self.lengths), 1)
            each, is_once = each[:, None], (~each & (step.consumers(name)[0] is op))[:, None]
            held = np.where(gathered, itemsize(step.dtype) * elements, 0)
            terms[self.part(op, HELD)] = 0.0, 0.0, each * held
            terms[self.part(op, GATHERED)] = 0.0, 0.0, is_once * held
            if self.micro_batches > 1:
                terms[GRADIENTS] = 0.0, 0.0, self.optimizer_bytes[0] * op.times * is_once * elements
        terms[self.part(op, MOVED)] = once, 0.0, None
        terms[self.part(op, MOVED_BACK)] = again, once, None
        is_linear = name in step.differentiable
        if name in step.by_name and not is_linear and not entered:  # without a gradient a copy is a replica
            used = without_copies(used)
        shape, indices, layouts = self.shape(name), (rows[1], columns), (rows[0], used)
        place = entered or place
        return Edge(numbers, indices, layouts, shape, self.moves, terms, is_linear, place, bool(entered))

    def vectors(self, assignment: Sequence[int], node: int = -1) -> Floats:
        """The parts of the cost of an assignment; of a node, with each of its options in its place.

        Moves are as far as they are known; parts are infinite where nothing can move.
        """
        chosen = [np.array([i]) for i in assignment]
        if node >= 0:
            chosen[node] = np.arange(len(self.nodes[node].ways))
        total: Floats = sum(n.values[i] for n, i in zip(self.nodes, chosen, strict=True))
        banned = np.zeros(len(total), bool)
        for edge in self.edges:
            i, j = (edge.indices[side][chosen[n]] for side, n in enumerate(edge.nodes))
            total[:, edge.parts] += edge.of(i, j).T
            banned |= edge.banned[i, j]
        total[banned] = np.inf
        return total

    def plan(self, assignment: Sequence[int]) -> float:
        """Plan all moves of an assignment; the seconds by which they were underestimated."""
        return sum(edge.plan(*(assignment[node] for node in edge.nodes)) for edge in self.edges)

    def _of_blocks(self, vectors: Floats) -> Floats:
        """Parts come last -> blocks and their parts come last."""
        return vectors[..., :WEIGHTS].reshape(*vectors.shape[:-1], -1, len(PARTS))

    def cost(self, limit: float, overlap: float | None = None) -> Cost:
        """Seconds of a step as a function of parts; no device may hold more bytes than the limit."""
        hidden = self.overlap if overlap is None else overlap
        of_blocks = np.moveaxis(self._of_blocks(self.unit), 0, -1)
        work, moved = of_blocks[:, [COMPUTED, COMPUTED_BACK]], of_blocks[:, [MOVED, MOVED_BACK]]
        maxima = np.stack([work + (1 - hidden) * moved, moved], 2).reshape(-1, 2, len(self.unit))
        times = self.micro_batches * np.repeat(self.blocks, 2).astype(float)
        return Cost(self.unit[OPTIMIZER], times, maxima, self.moments / limit)

    @cached_property
    def moments(self) -> Floats:
        """Bytes that a device holds, at every moment that may have the most: a sum of parts in each row."""
        unit, of_blocks = self.unit, np.moveaxis(self._of_blocks(self.unit), 0, -1)
        saved, again, held, gathered = (of_blocks[:, part] for part in (SAVED, AGAIN, HELD, GATHERED))
        times, many = np.array(self.blocks), self.micro_batches > 1
        kept = times @ (saved + gathered) + many * unit[GRADIENTS]
        whole = 3 * held + (1 - many) * 2 * gathered  # gradients, sent and received; kept parameters go then
        begins = again + (1 + (times > 1))[:, None] * held + kept  # with the next block's parameters
        moments = begins, whole - saved + kept, whole + unit[GRADIENTS]  # it ends; the last one ends
        return np.asarray(np.concatenate(moments) + unit[[WEIGHTS, STATE]].sum(0))

    def summary(self, vector: Floats) -> tuple[dict[str, float], dict[str, int]]:
        """Seconds of a step, and bytes at the moment when a device holds most, by kind."""
        blocks = self._of_blocks(vector)
        sums = self.micro_batches * np.array(self.blocks) @ blocks
        computing, moving = sums[[COMPUTED, MOVED]] + sums[[COMPUTED_BACK, MOVED_BACK]]
        seconds = {"computing": computing, "moving": moving, "optimizer": vector[OPTIMIZER]}
        most = self.moments[(self.moments @ vector).argmax()] * vector
        saved, again, beside, gathered = self._of_blocks(most)[:, [SAVED, AGAIN, HELD, GATHERED]].sum(0)
        held = {"parameters": most[WEIGHTS] + gathered, "gradients": most[GRADIENTS]}
        held |= {"optimizer state": most[STATE], "activations": saved, "while a block runs": again + beside}
        held = {kind: int(n) for kind, n in held.items()}
        return {kind: float(s) for kind, s in seconds.items()}, held
