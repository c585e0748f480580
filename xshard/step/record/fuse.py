"""Chains of operations as one operation each: the rules of a chain are the joined rules of its operations.

Views, casts and numbers made in place join a neighbour; functions of elements join each other, and attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise, product
from operator import mul

from xshard.layout import Layout
from xshard.notation.parser import ARROW, parts_of
from xshard.step.record.op import COPY, REPLICAS, SUM, Op, dims_of
from xshard.step.record.training_step import TrainingStep

Rows = list[tuple[int, ...]]  # for each array the dim that an axis shards, or a tag
Spans = list[tuple[int, int, int]]
LIGHT = ("pointwise", "linear", "source")


def fused(step: TrainingStep) -> TrainingStep:
    """A step with chains of operations as one each, by the name of the last one.

    A place where a rule can move an array beside a product stays. A chain of light operations counts as one
    kernel: it reads its operands and writes its result.
    """
    ops = {op.name: _keeping(op, step) for op in step.ops}
    changed = True
    while changed:
        changed = False
        for name in list(ops):
            k = 0
            while k < len(ops[name].operands):
                first = ops.get(ops[name].operands[k])
                if first and _may_join(ops, first, ops[name], k, step):
                    ops[name] = _joined(first, ops[name], k, step)
                    changed = True
                    if not _uses(ops, first):
                        del ops[first.name]
                else:
                    k += 1
    parameters = {**step.parameters}
    for op in reversed(
        ops.values()
    ):  # a parameter has the dims of the first operation that uses it
        used = zip(op.operands, op.arrays, strict=False)
        parameters |= {name: str(array) for name, array in used if name in parameters}
    return replace(step, ops=tuple(ops.values()), parameters=parameters)


def _keeping(op: Op, step: TrainingStep) -> Op:
    """The operation with the operands that gradients need: for a product with a constant the constant."""
    n = len(op.operands)
    reached = {i for i, name in enumerate(op.operands) if name in step.differentiable}
    own = [i for i in op.kept if i < n or not step.is_kept(op.name)]
    return replace(op, keeps=tuple(i for i in own if reached - ({i} if n > 1 else set())))


def _uses(ops: Mapping[str, Op], op: Op) -> int:
    return sum(op.name in (*other.operands, other.again) for other in ops.values())


def _is_free(op: Op) -> bool:
    return op.kind in LIGHT and op.work.accesses == 0


def _may_join(ops: Mapping[str, Op], first: Op, second: Op, k: int, step: TrainingStep) -> bool:
    """Whether an operation may become one with a consumer of its result, as operand k."""
    if first.times != second.times or {first.kind, second.kind} & {"carry", "share", "opaque"}:
        return False
    only = _uses(ops, first) == 1
    anywhere = step.moves_anywhere
    enters = k == 0 and step.module(second, left=False)
    is_place = not anywhere and bool(enters or step.module(first, left=True))
    if _is_free(first):
        return not is_place and (only or anywhere or not step.module(first, left=False))
    if _is_free(second):
        before, after = (_elements(op.arrays[-1:], step.lengths) for op in (first, second))
        return only and not is_place and after <= before
    light = second.kind in LIGHT or (second.kind == "attention" and not is_place)
    # Modules with parameters stay apart, as each has its own rule; so do those without inputs, for no rule.
    own = [
        {x.rpartition(".")[0] for x in op.operands if x in step.parameters}
        for op in (first, second)
    ]
    is_apart = (
        own[0] != own[1] if all(own) else is_place and {*first.operands[:1]} & {*step.parameters}
    )
    return only and first.kind in LIGHT and light and (anywhere or not is_apart)


def _joined(first: Op, second: Op, k: int, step: TrainingStep) -> Op:
    """Two operations as one, with the pairs of rules that agree between them."""
    arrays = [*first.every, *second.every]
    start = len(first.every)
    m = len(first.operands)
    spans = [_spans(array, step.lengths) for array in arrays]
    result = start + len(second.operands)
    # The operands of the first stand where its result was, or lead where they enter a module.
    entered = [step.module(op, left=False) for op in (first, second)]
    rest = [start + i for i in range(len(second.operands)) if i != k]
    before = 0 if entered[0] and not entered[1] else k
    order = [*rest[:before], *range(m), *rest[before:]]
    name = {**dict(enumerate(first.operands)), **dict(enumerate(second.operands, start))}
    equal = [(m, start + k), *((i, j) for i, j in combinations(order, 2) if name[i] == name[j])]
    order = [i for i in order if i not in {j for _, j in equal}]
    same = [
        row for row in first.axis_rules if row[m] == REPLICAS and first.kind == "source"
    ]  # no gradient
    copies = ((COPY,) * start, *((*row[:m], COPY, *row[m + 1 :]) for row in same))
    pairs = product((*first.axis_rules, *copies), second.axis_rules)
    rows = [(*a, *b) for a, b in pairs]
    keeps = {*first.kept, *(start + i for i in second.kept)}
    for i, j in equal:
        rows = _same(rows, spans, i, j)
        keeps |= {i} if j in keeps else set()
    shown = [*order, result]
    views = [op for op in (first, second) if _is_free(op)]
    inner = 0
    if m in keeps:  # the array between them; a view of an array is that array
        keeps |= {*range(m)} if first in views else {result} if views else set()
        inner = 0 if views else _elements([arrays[m]], step.lengths)
    # If one dim is several dims in the other operation, axes shard the first of them first.
    places = [(i, 0) for i in (*range(m + 1, start), *range(result + 1, len(arrays)))]
    for i, j in (*equal, *(pair[::-1] for pair in equal)):
        for d in range(len(arrays[i].dims)):
            here, there = ([span for span in spans[x] if span[0] == d] for x in (i, j))
            places += [(i, d)] if len(here) > 1 and here != there else []
    split = dict[tuple[str, tuple[int, ...]], None]()
    for i, d in places:
        own = [p for p, span in enumerate(spans[i]) if span[0] == d]
        held = tuple(own.index(row[i]) if row[i] in own else REPLICAS for row in rows)
        split |= {(arrays[i].dims[d].name, held): None} if max(held) >= 0 else {}
    columns = (held for _, held in split)
    rules = ((*(row[i] for i in shown), *more) for row, *more in zip(rows, *columns, strict=True))
    base = max(
        second,
        first,
        key=lambda op: (op.kind not in LIGHT, not _is_free(op), op.kind == "pointwise"),
    )
    kind = base.kind
    accesses = base.accesses
    if kind in LIGHT and not views:
        accesses = None
    elif kind in LIGHT and not order:
        kind = "source"
        accesses = 0.0
    space = _elements([arrays[i] for i in shown], step.lengths)
    spaces = [(op, _elements(op.arrays, step.lengths)) for op in (first, second)]
    return Op(
        name=second.name,
        text=f"{', '.join(str(arrays[i]) or '()' for i in order)} {ARROW} {arrays[result]}",
        operands=tuple(name[i] for i in order),
        kind=kind,
        rules=tuple(rule for rule in dict.fromkeys(rules) if {*rule} != {REPLICAS}),
        times=second.times,
        enters=entered[0] if before == 0 and entered[0] else "" if k == 0 else entered[1],
        leaves=step.module(second, left=True),
        keeps=tuple(place for place, i in enumerate(shown) if i in keeps),
        flops=sum(op.work.flops * n for op, n in spaces) / space or None,
        accesses=accesses,
        inside=tuple(text for text, _ in split),
        inner=(inner + sum(op.inner * n for op, n in spaces)) / space,
    )


def _same(rows: Rows, spans: Sequence[Spans], i: int, j: int) -> Rows:
    """The rules that do the same in two arrays: they shard parts of one dim that overlap, or have one tag."""
    equal = {(tag, tag) for tag in (REPLICAS, SUM, COPY)}
    for (a, (d, low, high)), (b, (e, start, end)) in product(
        enumerate(spans[i]), enumerate(spans[j])
    ):
        equal |= {(a, b)} if d == e and low < end and start < high else set()
    return [row for row in rows if (row[i], row[j]) in equal]


def _spans(array: Layout, lengths: Mapping[str, int]) -> Spans:
    """For each dim by name its dim of the array, and its place there: products of lengths up to its ends."""
    spans = Spans()
    for d, dim in enumerate(array.dims):
        products = accumulate((lengths[name] for name in parts_of(dim)), mul, initial=1)
        spans += [(d, *part) for part in pairwise(products)]
    return spans


def _elements(arrays: Iterable[Layout], lengths: Mapping[str, int]) -> int:
    """Elements of the space of all dims."""
    return math.prod(
        lengths[name] for name in {name for array in arrays for name in dims_of(array)}
    )
