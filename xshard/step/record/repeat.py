"""Equal blocks of operations one after another, as the layers of a model are: one block that runs often."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, count
from typing import Any

from xshard.notation.parser import ARROW
from xshard.step.record.op import Op, renamed
from xshard.step.record.training_step import TrainingStep

NUMBER = re.compile(r"(\d+)")
ALIKE = ("text", "kind", "whole", "rules", "times", "flops", "accesses", "keeps", "inner")


def repeated(step: TrainingStep) -> tuple[TrainingStep, dict[str, str]]:
    """A step with equal blocks, each with results of the one before, as one block; `*` is their number.

    `{1,2}` is, if there are others: layers before the block or after it that differ from it.

    Returns the new names of operations and parameters, too.

    >>> ops = [
    ...     Op("0.up", "b c, d c -> b d", ("x", "0.w")),
    ...     Op("1.up", "b c, d c -> b d", ("0.up", "1.w")),
    ... ]
    >>> step = TrainingStep(
    ...     ops, {"b": 8, "c": 4, "d": 4}, {"x": "b c"}, {"0.w": "d c", "1.w": "d c"}
    ... )
    >>> print(repeated(step)[0])
    *.up (before)  carry x 2        b d -> b d       x
    *.up           contraction x 2  b c, d c -> b d  *.up (before), *.w
    """
    ops = list(step.ops)
    names = dict[str, str]()
    start = 0
    kinds = [(NUMBER.sub("*", op.name), *(getattr(op, field) for field in ALIKE)) for op in ops]
    while start < len(ops):
        sizes = [end - start for end in range(start + 1, len(ops)) if kinds[end] == kinds[start]]
        runs = [(size, _times(kinds, start, size)) for size in sizes]
        for size, times in sorted(runs, key=lambda run: (-run[0] * run[1], run[0])):
            if times > 1 and (one := _block(ops, step, start, size, times, names)):
                end = start + size * times
                ops[start:] = [*one, *(renamed(op, names) for op in ops[end:])]
                kinds[start:end] = [("",)] * len(one)
                start += len(one) - 1
                break
        start += 1
    parameters = {names.get(name, name): text for name, text in step.parameters.items()}
    return replace(step, ops=ops, parameters=parameters), names


def _times(kinds: Sequence[object], start: int, size: int) -> int:
    """How often the operations from a place on come one after another."""
    return next(n for n in count(1) if kinds[start + n * size :][:size] != kinds[start:][:size])


def _block(
    ops: Sequence[Op], step: TrainingStep, start: int, size: int, times: int, names: dict[str, str]
) -> list[Op]:
    """Blocks as one; empty unless each takes what the one before it made. names: gets new ones."""
    run = ops[start : start + size * times]
    place = {op.name: i - start for i, op in enumerate(ops)}

    def role(i: int, name: str) -> tuple[str, int | str]:
        offset = place.get(name, -len(ops)) - i // size * size
        if name in step.parameters:
            return "parameter", NUMBER.sub("*", name)
        if offset >= 0:
            return "here", offset
        return ("apart", name) if i < size or offset < -size else ("before", offset + size)

    roles = [[role(i, name) for name in op.operands] for i, op in enumerate(run)]
    first, *others = (
        [each for op in roles[i : i + size] for each in op] for i in range(0, len(run), size)
    )
    carried = {b: a for a, b in zip(first, others[0], strict=True) if b[0] == "before"}
    beside = {
        name for op in (*ops[:start], *ops[start + len(run) :]) for name in (*op.operands, op.again)
    }
    if first != [carried.get(b, b) for b in others[0]] or any(each != others[0] for each in others):
        return []
    if {a[0] for a in carried.values()} != {"apart"} or beside & {op.name for op in run[:-size]}:
        return []
    new = dict[str, str]()
    every = {*step.parameters}.union(
        *((op.name, op.enters or "", op.leaves or "") for op in step.ops)
    )
    taken = {path for name in every for path in accumulate(name.split("."), "{}.{}".format)}
    for column in (run[i::size] for i in range(size)):
        own = [op.name for op in column]
        new |= dict.fromkeys(own, _starred(own, taken) or own[0])
        for each in zip(*(op.operands for op in column), strict=True):
            if each[0] in step.parameters:
                new |= dict.fromkeys(each, _starred(each, taken))
    if "" in new.values():
        return []
    carries = dict[tuple[str, int | str], Op]()
    for before, (_, origin) in carried.items():
        op = run[int(before[1])]
        name = new[op.name]
        result = op.text.partition(ARROW)[2].strip()
        how: Any = {"kind": "carry", "times": times * op.times, "again": name, "enters": ""}
        carries[before] = Op(
            f"{name} (before)", f"{result} {ARROW} {result}", (str(origin),), **how
        )
    block = list(carries.values())
    for i, op in enumerate(run[:size]):
        places = zip(roles[size + i], op.operands, strict=True)
        operands = [carries[p].name if p in carries else new.get(name, name) for p, name in places]
        fields: Any = {"name": new[op.name], "operands": operands, "times": times * op.times}
        for side in ("enters", "leaves"):
            fields[side] = getattr(op, side) and _starred(
                [getattr(x, side) for x in run[i::size]], taken
            )
        block.append(replace(op, **fields))
    for carry in carries.values():  # the operation with which a module begins is the carry itself
        users = [op for op in block if carry.name in op.operands]
        if len(users) == 1 and users[0].text == carry.text and users[0].accesses == 0:
            fields = {
                "kind": "carry",
                "operands": carry.operands,
                "again": carry.again,
                "accesses": None,
            }
            block[block.index(users[0])] = replace(users[0], **fields)
            block.remove(carry)
    names |= new
    return block


def _starred(names: Sequence[str], taken: Iterable[str]) -> str:
    """A pattern for names that differ in one number: `*`, or the numbers if that fits others, too; or ""."""
    parts = list(zip(*map(NUMBER.split, names), strict=True))
    differ = [i for i, each in enumerate(parts) if len(set(each)) > 1]
    if len(differ) != 1:
        return "" if differ else names[0]
    numbers = parts[differ[0]]
    around = [each[0] for each in parts]
    sides = "".join(around[: differ[0]]), "".join(around[differ[0] + 1 :])
    fits = re.compile("[^.]+".join(map(re.escape, sides))).fullmatch
    is_alone = all(name in names for name in taken if fits(name))
    around[differ[0]] = "*" if is_alone else f"{{{','.join(numbers)}}}"
    return "".join(around)
