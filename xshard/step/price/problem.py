"""The cost of a step on a mesh: a vector of parts for every option and every move; seconds and bytes from it.

The parts of each block are for one micro-batch and one layer: seconds of computing and of moving, forward
and backward; bytes of activations that are saved or computed again, of parameters that are gathered for each
use and of their gradients with the messages, of those gathered once, of gradients, and of their sums on the
way. Parts of the whole step follow (`WEIGHTS`, ...).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from xshard.dtypes import itemsize
from xshard.layout import Mesh
from xshard.notation.parser import ARROW, parts_of
from xshard.rules import spellings
from xshard.step.price.cost import Cost
from xshard.step.price.moves import Edge, MovePrices
from xshard.step.price.options import (
    Floats,
    Ints,
    distinct,
    options_of,
    product_over,
    without_copies,
)
from xshard.step.record.arrays import COPY, REPLICAS, shape_of
from xshard.step.record.op import Op
from xshard.step.record.training_step import TrainingStep

COMPUTED, MOVED, COMPUTED_BACK, MOVED_BACK, SAVED, AGAIN, *_ = PARTS = range(11)
RECEIVED, SENT, GATHERED, GRADIENTS, SUMS = PARTS[AGAIN + 1 :]
WEIGHTS, STATE, OPTIMIZER = range(-3, 0)  # of the whole step
EFFICIENCY = 0.72  # of the peak rate, for products
FULL = 4  # bytes of an element in full precision, as gradients, moments and logits are
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
    def _block(self) -> Mapping[str, int]:
        """The number of each operation's block, in which all run equally often, one after another."""
        begins = (before.times != op.times for before, op in pairwise(self.step.ops))
        return dict(
            zip((op.name for op in self.step.ops), accumulate(begins, initial=0), strict=True)
        )

    @cached_property
    def times(self) -> Ints:
        """How often each block runs."""
        return np.array([*{self._block[op.name]: op.times for op in self.step.ops}.values()])

    @cached_property
    def _together(self) -> Mapping[tuple[int, bool], int]:
        """Elements of the parameters of each block that are gathered together: vectors, and all others."""
        elements = Counter[tuple[int, bool]]()
        for name in self.step.parameters:
            elements[self._bucket(name)] += math.prod(self.shape(name))
        return elements

    def _bucket(self, name: str) -> tuple[int, bool]:
        return self._block[self.step.consumers(name)[0].name], len(self.step.arrays[name].dims) > 1

    def part(self, op: Op, which: int) -> int:
        """The place of a part of the block of an operation."""
        return self._block[op.name] * len(PARTS) + which

    @cached_property
    def unit(self) -> Floats:
        """A row for each part."""
        return np.eye(len(self.times) * len(PARTS) - WEIGHTS)

    def names(self, name: str) -> list[str]:
        """A name for each dim of an array; parameters have the same ones, so that one rule is for many."""
        dims = self.step.arrays[name].dims
        if name in self.step.inputs or name in self.step.by_name:
            return ["".join(parts_of(dim)) for dim in dims]
        return list({1: "n", 2: "oi", 3: "eoi"}.get(len(dims), "")) or [
            f"d{i}" for i in range(len(dims))
        ]

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

    def _bytes(self, ways: Ints, shape: Sequence[int], each: int) -> Floats:
        """Bytes that a device holds of an array, with so many for each element."""
        return each * math.prod(shape) / product_over(ways >= 0, self.mesh.sizes)

    def _stored(self, name: str) -> Node:
        shape = self.shape(name)
        names = self.names(name)
        size = itemsize(self.step.dtype)
        storing = Op(name, f"{ARROW} {' '.join(names)}", (), "source")
        ways = options_of(storing, dict(zip(names, shape, strict=True)), self.mesh)
        if name in self.step.inputs:
            return Node(name, ways, np.zeros((len(ways), len(self.unit))))
        kept = np.repeat((EACH, KEPT), len(ways))
        ways = np.tile(ways, (2, 1, 1))
        values = np.zeros((len(ways), len(self.unit)))
        first = self.step.consumers(name)[0]
        gradient = max(FULL, size)
        of_layer = self._bytes(ways[:, -1], shape, gradient)
        values[:, self.part(first, GRADIENTS)] = of_layer * (
            (kept == EACH) | (self.micro_batches == 1)
        )
        local = of_layer * first.times / gradient
        values[:, WEIGHTS] = size * local
        values[:, STATE] = (
            gradient * (2 + (size < FULL)) * local
        )  # moments, and a copy in full precision
        touched = (
            7 * gradient
        )  # itself, both moments and the parameter are read, the last three written
        values[:, OPTIMIZER] = touched * local / (2 * self.moves.profile.copy_bytes_per_s)
        return Node(name, ways, values, kept)

    def _node(self, op: Op) -> Node:
        ways = options_of(op, self.lengths, self.mesh)
        work = op.work
        step = self.step
        values = np.zeros((len(ways), len(self.unit)))
        recomputed = self.recompute and op.times > 1
        shapes = [shape_of(array, self.lengths) for array in op.arrays]
        local = [self._bytes(ways[:, j], s, itemsize(step.dtype)) for j, s in enumerate(shapes)]
        space = math.prod(self.lengths[d] for d in {d for dims in op.dims for d in dims})
        profile = self.moves.profile
        split = product_over(np.any(ways >= 0, 1), self.mesh.sizes)
        rate = profile.flops(step.dtype) * EFFICIENCY * work.rate
        reading = work.accesses * sum(local) / (2 * profile.copy_bytes_per_s)
        seconds = np.maximum(work.flops * space / split / rate, reading)
        makers = [step.by_name.get(name) for name in op.operands]
        kept = [maker is not None and maker.kind != "share" for maker in makers]
        saved = sum(local[i] for i in op.saved_operands if i == len(kept) or kept[i])
        saved = saved + itemsize(step.dtype) * op.inner * space / split
        entering = [i for i, maker in enumerate(makers) if maker and maker.times != op.times]
        on_the_way = sum(
            2 * local[i] for i in entering if op.operands[i] in step.differentiable
        )  # gradients
        if op.kind == "loss":
            on_the_way = on_the_way + local[0]  # of the logits
            saved *= 3 if itemsize(step.dtype) < FULL else 1  # in float32, too
        values[:, self.part(op, COMPUTED)] = seconds
        values[:, self.part(op, COMPUTED_BACK)] = seconds * (work.backward + recomputed)
        values[:, self.part(op, AGAIN)] = on_the_way + recomputed * saved
        values[:, self.part(op, SAVED)] = local[-1] * (op.kind == "carry") if recomputed else saved
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
        numbers = (self.number[name], self.number[op.name])
        step = self.step
        src, dst = (self.nodes[i] for i in numbers)
        rows, (used, columns) = distinct(src.ways[:, -1]), distinct(dst.ways[:, k])
        place, enters = self._place(name, op, k)
        once = np.ones(len(rows[0]))
        more = dict[int, Floats]()
        again = once * (self.recompute and op.times > 1)
        if src.kept is not None:
            rows = (src.ways[:, -1], np.arange(len(src.ways)))
            again = (src.kept == EACH) * 1.0
            once = np.maximum(again, 1 / self.micro_batches)
            more = self._bytes_of_parameter(src, op, k, used)
        elif op.kind == "loss":  # the gradient of the logits on arrival
            arrives = self._bytes(rows[0], self.shape(name), itemsize(step.dtype))[:, None]
            more = {self.part(op, AGAIN): arrives * (rows[0][:, None] != used).any(-1)}
        is_linear = name in step.differentiable
        share = 1.0
        if src.kept is not None and not step.moves_anywhere:  # XLA sends every array on its own
            share = math.prod(self.shape(name)) / self._together[self._bucket(name)]
        if (
            name in step.by_name and not is_linear and not enters
        ):  # without a gradient a copy is a replica
            used = without_copies(used)
        moved = (self.part(op, MOVED), self.part(op, MOVED_BACK))
        shares = [[once, 0 * once], [again, once]]
        indices = (rows[1], columns)
        layouts = (rows[0], used)
        often_by_rows = often * np.array(shares)
        how = share, is_linear, place, enters
        return Edge(
            numbers,
            indices,
            layouts,
            self.shape(name),
            self.moves,
            moved,
            often_by_rows,
            more,
            *how,
        )

    def _place(self, name: str, op: Op, k: int) -> tuple[str, bool]:
        """The module or array at which a rule can move an operand, "" for none; whether it enters there."""
        step = self.step
        if k == 0 and name not in step.parameters and (entered := step.module(op, left=False)):
            is_first = op.again and name != op.again  # of repeated blocks
            return spellings(entered)[0].replace("*", "0") if is_first else entered, True
        own = name if name in step.parameters or step.moves_anywhere else ""
        is_alone = (
            name in step.by_name and len(step.consumers(name)) == op.operands.count(name) == 1
        )
        return (is_alone and step.module(step.by_name[name], left=True)) or own, False

    def _bytes_of_parameter(self, src: Node, op: Op, k: int, used: Ints) -> dict[int, Floats]:
        """Parts for each option of a parameter and each layout in which an operation uses it."""
        size = itemsize(self.step.dtype)
        gradient = max(FULL, itemsize(self.step.dtype))
        halfway = np.where(self.moves.far, used, src.ways)  # slow links are first
        own = np.where(
            used == REPLICAS, src.ways, used
        )  # of equal gradients, before others are added
        shape = shape_of(op.arrays[k], self.lengths)
        whole, received, sent = (self._bytes(ways, shape, size) for ways in (used, halfway, own))
        stored = self._bytes(src.ways, self.shape(src.name), size)
        gathered = (src.ways != without_copies(used)).any(-1)
        twice = (halfway != src.ways).any(-1) & (halfway != used).any(-1)
        later = ((src.ways == REPLICAS) & (used == COPY)).any(-1)
        kept = np.asarray(src.kept)
        is_first = self.step.consumers(src.name)[0] is op
        each = (kept == EACH)[:, None]
        once = is_first * (kept == KEPT)[:, None]
        more = {
            RECEIVED: each * gathered * (2 * whole + twice * received),
            SENT: each * gathered * (whole + 2 * sent),
            GATHERED: once * gathered * whole,
            GRADIENTS: (self.micro_batches > 1) * once * whole * gradient / size,
            SUMS: is_first * later * stored * max(2 - gradient / size, 0),  # a share and its sum
        }
        return {self.part(op, part): n for part, n in more.items()}

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

    @property
    def of_blocks(self) -> Floats:
        """A row for each part of each block: [blocks, their parts, all parts]."""
        return self.unit[:WEIGHTS].reshape(len(self.times), len(PARTS), -1)

    def cost(self, limit: float, overlap: float | None = None) -> Cost:
        """Seconds of a step as a function of parts; no device may hold more bytes than the limit."""
        hidden = self.overlap if overlap is None else overlap
        work, moved = (
            self.of_blocks[:, [*two]] for two in ((COMPUTED, COMPUTED_BACK), (MOVED, MOVED_BACK))
        )
        maxima = np.stack([work + (1 - hidden) * moved, moved], 2).reshape(-1, 2, len(self.unit))
        times = self.micro_batches * np.repeat(self.times, 2).astype(float)
        return Cost(self.unit[OPTIMIZER], times, maxima, self.moments / limit)

    @cached_property
    def moments(self) -> Floats:
        """Bytes that a device holds, at every moment that may have the most: a sum of parts in each row.

        In the backward pass of each block the first layer begins, with its parameters received; it ends,
        with gradients whole, sent and received; the last layer ends. At the end gradients are summed where
        they were not.
        """
        every = self.of_blocks * self.times[:, None, None]
        saved, again, received, sent, gathered, gradients, sums = (
            every[:, i] for i in PARTS[SAVED:]
        )
        many = self.micro_batches > 1
        there = gathered if many else gradients  # with sums, after the backward pass
        always = self.unit[[WEIGHTS, STATE]].sum(0) + many * gradients.sum(0)
        rows = [always + (sums + there).sum(0)]
        for k, times in enumerate(self.times):
            around = always + (saved + gathered)[:k].sum(0) + (sums + there)[k + 1 :].sum(0)
            whole = (sent[k] + (0 if many else 2 * gathered[k])) / times
            rows += [
                around + saved[k] + gathered[k] + (again[k] + received[k]) / times,
                around + saved[k] * (1 - 1 / times) + gathered[k] + whole,
                around + whole + there[k] * (many or 1 - 1 / times),
            ]
        return np.asarray(rows)

    def summary(self, vector: Floats) -> tuple[dict[str, float], dict[str, int]]:
        """Seconds of a step, and bytes at the moment when a device holds most, by kind."""
        sums = self.micro_batches * self.times @ (self.of_blocks @ vector)
        computing, moving = sums[[COMPUTED, MOVED]] + sums[[COMPUTED_BACK, MOVED_BACK]]
        seconds = {"computing": computing, "moving": moving, "optimizer": vector[OPTIMIZER]}
        most = self.moments[(self.moments @ vector).argmax()] * vector
        saved, *running, gathered, gradients, sums = (self.of_blocks @ most).sum(0)[SAVED:]
        held = {"parameters": most[WEIGHTS] + gathered, "gradients": gradients + sums}
        held |= {
            "optimizer state": most[STATE],
            "activations": saved,
            "while a block runs": sum(running),
        }
        held = {kind: int(n) for kind, n in held.items()}
        return {kind: float(s) for kind, s in seconds.items()}, held
