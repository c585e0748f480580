"""A step as a bridge meets it, operation by operation: names of dims reach every result from its operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, product
from typing import Any

from xshard.step.record.letters import Written, common_factors, grouped
from xshard.step.record.op import COPY, REPLICAS, SUM, Op
from xshard.step.record.training_step import TrainingStep

Names = list[list[str]]  # the names of every dim of an array: several that are one dim are a list


@dataclass
class Trace:
    """Operations in letters of a bridge's own -> a step in which a dim keeps its name wherever it goes.

    batch: length of the first dim of inputs, named `b`; other dims of inputs are named `s512`, by length,
    all others `n4096`: equal layers have equal texts. dims, shapes: the arrays' so far, by name.

    >>> from xshard.step.record.letters import view
    >>> trace = Trace(batch=64)
    >>> trace.input("x", (64, 512, 128)), trace.parameter("up", (256, 128))
    ('x', 'up')
    >>> flat = trace.add("flat", view((64, 512, 128), (64 * 512, 128)), ("x",), (64 * 512, 128))
    >>> product = Written(["ac", "dc", "ad"], "contraction")
    >>> print(trace.step(trace.add("y", product, (flat, "up"), (64 * 512, 256))))
    flat  linear       b s512 s128 -> (b s512) s128               x
    y     contraction  (b s512) s128, n256 s128 -> (b s512) n256  flat, up
    """

    batch: int
    dtype: str = "bfloat16"
    ops: list[Op] = field(default_factory=list)
    dims: dict[str, Names] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)

    def input(self, name: str, shape: Sequence[int]) -> str:
        """An array of the batch; returns its name."""
        names = list[str]()
        for n in shape:
            self._fresh("b" if n == self.batch and not names else f"s{n}", n, names)
        self.inputs.append(name)
        self.dims[name] = [[each] for each in names]
        self.shapes[name] = (*shape,)
        return name

    def parameter(self, name: str, shape: Sequence[int]) -> str:
        """A parameter; its dims have the names of the first operation that uses it. Returns its name."""
        self.shapes[name] = (*shape,)
        return name

    def add(
        self, name: str, op: Written, operands: Sequence[str], shape: Sequence[int], **how: Any
    ) -> str:
        """An operation inside a module, the shape of its result, and fields of `Op`; returns its name."""
        operands = operands[: len(op.arrays) - 1]
        how = {**op.work, "enters": "", "leaves": "", **how}
        arrays = [[dim.strip("()").split() for dim in dims] for dims in op.arrays]
        shapes = [*(self.shapes[o] for o in operands), shape]
        sizes = dict(op.lengths)
        for dims, each in zip(arrays, shapes, strict=True):
            sizes |= {dim[0]: n for dim, n in zip(dims, each, strict=True) if len(dim) == 1}
        factors = {x: [("", n)] for x, n in sizes.items()}
        for operand, dims in zip(operands, arrays, strict=False):
            for dim, names in zip(dims, self.dims.get(operand, ()), strict=False):
                for letter, split in self._factors(dim, names, sizes).items():
                    factors[letter] = max(factors[letter], split, key=_rank)
        taken = list[str]()
        letters = dict.fromkeys(x for dims in arrays for dim in dims for x in dim)
        meaning = {
            x: [self._fresh(known or f"n{n}", n, taken) for known, n in factors[x]] for x in letters
        }
        named = [[[n for x in dim for n in meaning[x]] for dim in dims] for dims in arrays]
        for operand, own in zip(operands, named, strict=False):
            self.dims.setdefault(operand, own)
        pairs = ((x, n) for x, names in meaning.items() for n in names)
        whole = tuple(n for x, n in pairs if x in op.whole or self.lengths[n] == 1)
        text = Written([[*map(grouped, names)] for names in named]).text
        step_op = Op(name, text, tuple(operands), op.kind, whole, **how)
        first = {
            names[0] for names in meaning.values()
        }  # an axis shards the first of several names
        self.ops.append(
            replace(step_op, rules=_linked(step_op, op.links, first)) if op.links else step_op
        )
        self.dims[name] = named[-1]
        self.shapes[name] = (*shape,)
        return name

    def step(self, *last: str, moves_anywhere: bool = False) -> TrainingStep:
        """The step that ends in some operations, with all that they need."""
        needed = set(last)
        ops = list[Op]()
        for op in reversed(self.ops):
            if op.name in needed:
                needed.update(op.operands)
                ops.insert(0, op)
        stored = needed.difference(op.name for op in ops)
        texts = {x: " ".join(map(grouped, dims)) for x, dims in self.dims.items() if x in stored}
        inputs = {name: texts.pop(name) for name in self.inputs if name in texts}
        return TrainingStep(ops, self.lengths, inputs, texts, "b", self.dtype, moves_anywhere)

    def _factors(
        self, letters: Sequence[str], names: Sequence[str], sizes: Mapping[str, int]
    ) -> dict[str, list[tuple[str, int]]]:
        """The factors of each letter of one dim: names, "" for a part of one, and lengths."""
        if len(letters) == 1:
            return {letters[0]: [(name, self.lengths[name]) for name in names]}
        shapes = [self.lengths[name] for name in names], [sizes[x] for x in letters]
        before, after = common_factors(*shapes)
        entire = {dim[0]: name for name, dim in zip(names, before, strict=True) if len(dim) == 1}
        parts = zip(letters, after, strict=True)
        return {letter: [(entire.get(each, ""), each[1]) for each in dim] for letter, dim in parts}

    def _fresh(self, wanted: str, n: int, taken: list[str]) -> str:
        """A name for a dim of length n that is not in `taken`, and then is."""
        others = (f"{wanted.partition('_')[0]}_{i}" for i in count(2))
        name = next(each for each in chain([wanted], others) if each not in taken)
        taken.append(name)
        self.lengths[name] = n
        return name


def _linked(op: Op, links: int, first: set[str]) -> tuple[tuple[int, ...], ...]:
    """The rules of an operation beside its last operands, which it only reads lengths from.

    An axis shards the same in both; beside that, it does anything in them.
    """
    *operands, result = op.dims
    own = {name for dims in (*operands[:-links], result) for name in dims}
    rules = list[tuple[int, ...]]()
    beside = operands[-links:]
    others = first - own
    free = [
        [REPLICAS, SUM, COPY, *(d for d, name in enumerate(dims) if name in others)]
        for dims in beside
    ]
    for rule in op.axis_rules:
        named = {dims[way] for dims, way in zip(op.dims, rule, strict=True) if way >= 0}
        if named <= own & first:
            same = ([d for d, name in enumerate(dims) if name in named] for dims in beside)
            ways = (some or anything for some, anything in zip(same, free, strict=True))
            rules += [(*rule[: -links - 1], *each, rule[-1]) for each in product(*ways)]
    return tuple(rule for rule in rules if {*rule} != {REPLICAS})


def _rank(factors: Sequence[tuple[str, int]]) -> tuple[int, int]:
    """Of the names that operands have for a dim, the most factors count, then names from inputs."""
    return len(factors), " nsb".find((factors[0][0] or " ")[0])
