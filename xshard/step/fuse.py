"""Chains of operations as one operation each: the rules of a chain are the joined rules of its operations.

Views, casts and numbers made in place join a neighbour; functions of elements join each other, and attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

from xshard.notation.parser import ARROW, parts_of
from xshard.step.op import COPY, REPLICAS, Op
from xshard.step.step import TrainingStep
from xshard.step.views import common_factors, grouped

Names = list[list[str]]  # of the dims of an array: several that are one dim of it are a list
Row = tuple[str | int, ...]  # for each array the dim that an axis shards, or a tag
Rows = list[tuple[Row, tuple[int, ...]]]  # with the number of the rule that each comes from
LIGHT = ("pointwise", "linear", "source")
FIRST = "~"  # in the names of the first of two operations


def fused(step: TrainingStep) -> TrainingStep:
    """A step with chains of operations as one each, by the name of the last one.

    A place where a rule can move an array beside a product stays. A chain of light operations counts as one
    kernel: it reads its operands and writes its result.

    >>> ops = [
    ...     Op("up", "b c, f c -> b f", ("x", "w")),
    ...     Op("split", "b (g h) -> b g h", ("up",), "linear", accesses=0.0),
    ...     Op("act", "b g h -> b g h", ("split",), "pointwise"),
    ...     Op("loss", "b g h ->", ("act",), "loss"),
    ... ]
    >>> lengths = {"b": 8, "c": 4, "f": 6, "g": 2, "h": 3}
    >>> print(fused(TrainingStep(ops, lengths, {"x": "b c"}, {"w": "f c"})))
    up    contraction  b c, f c -> b f   x, w
    act   pointwise    b (g h) -> b g h  up
    loss  loss         b g h ->          act
    """
    ops, lengths, tried, changed = {op.name: op for op in step.ops}, {**step.lengths}, set[Any](), True
    while changed:
        changed = False
        for name in list(ops):
            k = 0
            while name in ops and k < len(ops[name].operands):
                one, first, second = None, ops.get(ops[name].operands[k]), ops[name]
                if first and (first, second, k) not in tried and _may_join(ops, first, second, k, step):
                    tried.add((first, second, k))
                    one = _joined(first, second, k, step, lengths)
                if first is None or one is None:
                    k += 1
                    continue
                ops[name], changed = one, True
                if not _uses(ops, first):
                    del ops[first.name]
    parameters = {**step.parameters}
    for op in reversed(ops.values()):  # a parameter has the dims of the first operation that uses it
        for operand, names in zip(op.operands, _arrays(op), strict=False):
            if operand in parameters:
                parameters[operand] = " ".join(map(grouped, names))
    return replace(step, ops=tuple(ops.values()), lengths=lengths, parameters=parameters)


def _uses(ops: Mapping[str, Op], op: Op) -> int:
    return sum(op.name in (*other.operands, other.again) for other in ops.values())


def _is_free(op: Op) -> bool:
    return op.kind in LIGHT and op.work.accesses == 0


def _may_join(ops: Mapping[str, Op], first: Op, second: Op, k: int, step: TrainingStep) -> bool:
    """Whether an operation may become one with a consumer of its result, as operand k."""
    unlike = first.times != second.times and first.operands
    if unlike or second.again or {first.kind, second.kind} & {"carry", "share", "opaque"}:
        return False
    only, anywhere = _uses(ops, first) == 1, step.moves_anywhere
    enters = k == 0 and step.module(second, left=False)
    is_place = not anywhere and bool(enters or step.module(first, left=True))
    if _is_free(first):
        return not is_place and (only or anywhere or not step.module(first, left=False))
    if _is_free(second):
        before, after = (_elements(_arrays(op)[-1:], step.lengths) for op in (first, second))
        return only and not is_place and after <= before
    light = second.kind in LIGHT or (second.kind == "attention" and not is_place)
    return only and first.kind in LIGHT and light


def _joined(first: Op, second: Op, k: int, step: TrainingStep, lengths: dict[str, int]) -> Op | None:
    """Two operations as one; None if moves are possible between them and could be worth their while.

    lengths: gets the new names.
    """
    arrays, m = [*_arrays(first, FIRST), *_arrays(second)], len(first.operands)
    known = {**lengths, **{name + FIRST: n for name, n in lengths.items()}}
    starts = [*enumerate(_rows(first, arrays[: m + 1])), (-1, (COPY,) * (m + 1))]
    later = enumerate(_rows(second, arrays[m + 1 :]))
    rows: Rows = [((*a, *b), (i, j)) for (i, a), (j, b) in product(starts, later)]
    arrays, rows = _same(arrays, rows, m + 1 + k, m, known, cut=m + 1)
    # The operands of the first stand where its result was, or lead where they enter a module.
    entered = [step.module(op, left=False) for op in (first, second)]
    rest = [m + 1 + i for i in range(len(second.operands)) if i != k]
    before = 0 if entered[0] and not entered[1] else k
    order = [*rest[:before], *range(m), *rest[before:]]
    name = (*first.operands, "", *second.operands)
    for i, j in combinations(order, 2):
        if i in order and j in order and name[i] == name[j]:  # one array, used twice
            one = _same(arrays, rows, i, j, known)
            flat = [_flat(names) for names in one[0]]
            distinct = one[1] and all(len(set(each)) == len(each) for each in flat)
            if distinct and not _misses(first, second, one[1], step):
                arrays, rows = one
                order.remove(j)
    if _misses(first, second, rows, step):
        return None
    ways = dict.fromkeys(tuple(row[i] for i in (*order, -1)) for row, _ in rows)
    arrays = [arrays[i] for i in (*order, -1)]
    plain = _plain(arrays, known, lengths)
    arrays = [[[plain.get(n, n) for n in dim] for dim in names] for names in arrays]
    sides = [" ".join(map(grouped, names)) for names in arrays]
    text = f"{', '.join(side or '()' for side in sides[:-1])} {ARROW} {sides[-1]}"
    operands, flat = tuple(name[i] for i in order), list(map(_flat, arrays))
    rules = (
        tuple(flat[i].index(plain.get(p, p)) if isinstance(p, str) else p for i, p in enumerate(way))
        for way in ways
        if {*way} != {REPLICAS}
    )
    base = max(second, first, key=lambda op: (op.kind not in LIGHT, not _is_free(op), op.kind == "pointwise"))
    how: dict[str, Any] = {"kind": base.kind, "accesses": base.accesses, "saved": base.saved}
    if not _is_free(first) and not _is_free(second) and base.kind in LIGHT:
        how = {"kind": base.kind}
    elif base.kind in LIGHT and not order:
        how = {"kind": "source", "accesses": 0.0}
    if flops := sum(op.work.flops * _elements(_arrays(op), lengths) for op in (first, second)):
        how["flops"] = flops / _elements(arrays, lengths)
    how |= {"rules": tuple(rules), "times": second.times, "leaves": step.module(second, left=True)}
    how["enters"] = entered[0] if before == 0 and entered[0] else "" if k == 0 else entered[1]
    return Op(second.name, text, operands, **how)


def _misses(first: Op, second: Op, rows: Rows, step: TrainingStep) -> bool:
    """Whether a rule of a product is lost, or of what a free operation joins, though a move could use it."""
    if not step.moves_anywhere:
        return False
    for side, (op, beside) in enumerate(((first, second), (second, first))):
        numbers = set(range(len(op.axis_rules) - 1)) - {origin[side] for _, origin in rows}
        if numbers and not _is_free(op) and (op.kind not in LIGHT or _is_free(beside)):
            return True
    return False


def _same(
    arrays: list[Names], rows: Rows, i: int, j: int, lengths: dict[str, int], cut: int = 0
) -> tuple[list[Names], Rows]:
    """Arrays i and j are one: their dims are split into common factors, by names of i if it has them.

    Rules stay if they do the same in both. cut: where arrays of a second operation begin.
    """
    meaning = dict[str, list[str]]()
    for pair in zip(arrays[i], arrays[j], strict=True):
        factors = common_factors(*([lengths[n] for n in dim] for dim in pair))
        names = {f: f"n{n}{FIRST}{len(lengths) + f}" for f, n in enumerate(factors.lengths)}
        both = [list(zip(dim, of, strict=True)) for dim, of in zip(pair, factors[1:], strict=True)]
        names |= {of[0]: name for side in reversed(both) for name, of in side if len(of) == 1}
        lengths |= {name: factors.lengths[f] for f, name in names.items()}
        for name, of in (each for side in both for each in side):
            if meaning.setdefault(name, new := [names[f] for f in of]) != new:
                return arrays, []  # a transposed copy
    arrays = [[[new for n in dim for new in meaning.get(n, [n])] for dim in names] for names in arrays]
    refined = ((new, origin) for row, origin in rows for new in _refined(row[:cut], row[cut:], meaning))
    return arrays, [(row, origin) for row, origin in refined if row[i] == row[j]]


def _refined(one: Row, other: Row, meaning: Mapping[str, list[str]]) -> Iterable[Row]:
    """Rules of two operations after a change of names: an axis shards either factor of a dim.

    If it shards dims of several names, that is the first factor.
    """

    def each(row: Row) -> list[Row]:
        names = {part for part in row if isinstance(part, str)}
        n = max((len(meaning.get(name, [name])) for name in names), default=1) if len(names) == 1 else 1
        return [tuple(meaning.get(p, [p])[f] if isinstance(p, str) else p for p in row) for f in range(n)]

    return ((*a, *b) for a, b in product(each(one), each(other)))


def _plain(arrays: Sequence[Names], known: Mapping[str, int], lengths: dict[str, int]) -> dict[Any, str]:
    """Names without marks for those that have one."""
    plain, names = dict[Any, str](), list(dict.fromkeys(n for each in arrays for n in _flat(each)))
    taken = {name for name in names if FIRST not in name}
    for name in names:
        if FIRST in name:
            new, i, n = (wanted := name.partition(FIRST)[0]), 1, known[name]
            while new in taken or lengths.get(new, n) != n:
                i += 1
                new = f"{wanted}_{i}"
            plain[name], lengths[new] = new, n
            taken.add(new)
    return plain


def _rows(op: Op, arrays: Sequence[Names]) -> list[Row]:
    flat = list(map(_flat, arrays))
    return [tuple(d[p] if p >= 0 else p for p, d in zip(rule, flat, strict=True)) for rule in op.axis_rules]


def _arrays(op: Op, mark: str = "") -> list[Names]:
    """The dims of operands and result, with a mark after their names."""
    return [[[name + mark for name in parts_of(dim)] for dim in array.dims] for array in op.arrays]


def _flat(names: Names) -> list[str]:
    return [name for dim in names for name in dim]


def _elements(arrays: Sequence[Names], lengths: Mapping[str, int]) -> int:
    """Elements of the space of all dims."""
    return math.prod(lengths[name] for name in {name for names in arrays for name in _flat(names)})
