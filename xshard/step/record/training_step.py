"""A training step as a value: its operations, parameters and inputs, all dims by name."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from xshard.arguments import did_you_mean, whole_number
from xshard.dtypes import name_of
from xshard.errors import PlanError, ShapeError, located
from xshard.formatting import align_columns
from xshard.layout import Layout
from xshard.notation.parser import ARROW, parts_of
from xshard.rules import listed
from xshard.step.record.op import KINDS, Op, dims_of, parse_arrays


@dataclass(frozen=True)
class TrainingStep:
    """The forward pass of a training step; its backward pass follows by dual layouts.

    ops: in an order in which they can run. lengths: one per dim, by name. inputs, parameters: the dims of
    each, by name; names of parameters are as in `model.state_dict()`, with `*` for the number of a repeated
    block. batch: the dim that micro-batches divide. dtype: for activations and parameters in use.
    moves_anywhere: moves are possible between any two operations, instead of at modules (`Op.enters`).
    Raises PlanError for names that do not exist or come too late, ShapeError for lengths that do not fit.

    >>> up = Op("up", "b c, f c -> b f", ("x", "up.weight"))
    >>> loss = Op("loss", "b f -> ", ("up",), kind="loss")
    >>> lengths = {"b": 64, "c": 128, "f": 512}
    >>> print(
    ...     TrainingStep([up, loss], lengths, inputs={"x": "b c"}, parameters={"up.weight": "f c"})
    ... )
    up    contraction  b c, f c -> b f  x, up.weight
    loss  loss         b f ->           up
    """

    ops: Sequence[Op]
    lengths: Mapping[str, int]
    inputs: Mapping[str, str]
    parameters: Mapping[str, str]
    batch: str = "b"
    dtype: str = "bfloat16"
    moves_anywhere: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "ops", tuple(self.ops))
        object.__setattr__(self, "dtype", name_of(self.dtype))
        for dim, n in self.lengths.items():
            if (whole_number(n) or 0) < 1:
                raise ShapeError(
                    f"dim {dim!r} has length {n!r}", hint="a length is a whole number >= 1"
                )
        known = [*self.inputs, *self.parameters]
        for op in self.ops:
            with located(f"operation {op.name}"):
                for name, array in zip(op.operands, op.arrays, strict=False):
                    self._check_operand(name, array, known)
                if op.again:
                    self._check_operand(op.again, op.arrays[0], self.by_name)
                if op.name in known:
                    raise PlanError("there is another array of this name", hint="names are unique")
                shape_of(op.arrays[-1], self.lengths)
                known.append(op.name)
        used = {name for op in self.ops for name in op.operands}
        if idle := [name for name in self.parameters if name not in used]:
            raise PlanError(f"no operation uses {listed(idle)}", hint="leave it out")

    def _check_operand(self, name: str, array: Layout, known: Collection[str]) -> None:
        if name not in known:
            hint = f"{did_you_mean(name, known)}known here are: {listed(list(known))}"
            raise PlanError(f"no array {name!r}", hint=hint)
        here, there = (shape_of(each, self.lengths) for each in (array, self.arrays[name]))
        if here != there:
            hint = (
                "an array has the same lengths, by position, where it is made and where it is used"
            )
            raise ShapeError(
                f"{name} is '{self.arrays[name]}' {there}, used as '{array}' {here}", hint=hint
            )

    @cached_property
    def by_name(self) -> Mapping[str, Op]:
        """The operations by name."""
        return {op.name: op for op in self.ops}

    @cached_property
    def arrays(self) -> Mapping[str, Layout]:
        """The dims of every array by its name."""
        texts = {**self.inputs, **self.parameters}
        arrays = {name: parse_arrays(f"{ARROW} {text}")[-1] for name, text in texts.items()}
        return {**arrays, **{op.name: op.arrays[-1] for op in self.ops}}

    @cached_property
    def differentiable(self) -> frozenset[str]:
        """The parameters, and the operations that have a gradient because of them."""
        reached = {*self.parameters, *(op.again for op in self.ops if op.again)}
        for op in self.ops:
            if op.again or (op.kind != "source" and not reached.isdisjoint(op.operands)):
                reached.add(op.name)
        return frozenset(reached)

    def consumers(self, name: str) -> list[Op]:
        """The operations that use an array, each once."""
        return [op for op in self.ops if name in (*op.operands, op.again)]

    def module(self, op: Op, *, left: bool) -> str:
        """The module that an operation enters, or leaves; "" if it is inside one."""
        own = op.leaves if left else op.enters
        default = op.name if any(name in self.parameters for name in op.operands) else ""
        return default if own is None else own

    def is_kept(self, name: str) -> bool:
        """Whether the backward pass of an operation needs this operand."""
        consumers = self.consumers(name)
        return any(
            name in (c.operands[i] for i in c.kept if i < len(c.operands)) for c in consumers
        )

    @cached_property
    def with_shares(self) -> TrainingStep:
        """The step with a `share` after each activation that several operations keep: it is moved once."""
        ops = list[Op]()
        renamed = dict[tuple[str, str], str]()
        for op in self.ops:
            ops.append(
                replace(op, operands=tuple(renamed.get((o, op.name), o) for o in op.operands))
            )
            keep = {
                c.name for c in self.consumers(op.name) if KINDS[c.kind].saves and c.kind != "share"
            }
            if len(keep) > 1:
                text = f"{op.arrays[-1]} {ARROW} {op.arrays[-1]}"
                name = f"{op.name} (shared)"
                keeps = (0,) if self.is_kept(op.name) else ()
                ops.append(
                    Op(name, text, (op.name,), kind="share", times=op.times, enters="", keeps=keeps)
                )
                renamed |= {(op.name, consumer): name for consumer in keep}
        return replace(self, ops=ops) if renamed else self

    def __str__(self) -> str:
        kinds = [f"{op.kind} x {op.times}" if op.times > 1 else op.kind for op in self.ops]
        rows = zip(self.ops, kinds, strict=True)
        return align_columns(
            [(op.name, kind, op.text, ", ".join(op.operands)) for op, kind in rows]
        )


def shape_of(array: Layout, lengths: Mapping[str, int]) -> tuple[int, ...]:
    """The lengths of the dims of an array. Raises ShapeError for a dim without a length."""
    for name in dims_of(array):
        if name not in lengths:
            raise ShapeError(
                f"dim {name!r} lacks a length", hint=f"lengths are: {', '.join(lengths)}"
            )
    return tuple(math.prod(lengths[name] for name in parts_of(dim)) for dim in array.dims)
