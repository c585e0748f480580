"""Equal blocks of operations, such as the layers of a model, as one block that runs often."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple

from xshard.notation.parser import ARROW
from xshard.rules import spellings
from xshard.step.record.op import Op, renamed
from xshard.step.record.training_step import TrainingStep

NUMBER = re.compile(r"(\d+)")
# Fields that are equal in operations of equal blocks, beside the name but for its number.
EQUAL_FIELDS = ("text", "kind", "whole", "rules", "times", "flops", "accesses", "keeps", "inner")
# Where an operand comes from.
PARAMETER = "parameter"
SAME_BLOCK = "same block"
BLOCK_BEFORE = "block before"
ELSEWHERE = "elsewhere"


def repeated(step: TrainingStep) -> tuple[TrainingStep, dict[str, str]]:
    """Write equal blocks, each with results of the one before, as one block; `*` is their number.

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
    kinds = [_kind_of(op) for op in ops]
    start = 0
    while start < len(ops):
        # The longest run first: two layers of a kind may be a part of a block of both.
        for size, times in _runs_from(kinds, start):
            run = _Run(ops, step, start, size, times)
            new_names = run.new_names if run.is_repeated else {}
            if not new_names or "" in new_names.values():
                continue
            block = run.as_one_block()
            names |= new_names
            end = start + size * times
            following = [renamed(op, names) for op in ops[end:]]
            ops[start:] = [*block, *following]
            kinds[start:end] = [("",)] * len(block)  # equal to no operation that follows
            start += len(block) - 1  # the last one, with 1 added below
            break
        start += 1
    parameters = {names.get(name, name): text for name, text in step.parameters.items()}
    return replace(step, ops=ops, parameters=parameters), names


def in_first_block(pattern: str) -> str:
    """Name a module in the first of repeated blocks: `layers.*.up` -> `layers.0.up`."""
    return spellings(pattern)[0].replace("*", "0")


def _kind_of(op: Op) -> tuple[object, ...]:
    """Return what is equal in equal operations of two blocks."""
    return (NUMBER.sub("*", op.name), *(getattr(op, field) for field in EQUAL_FIELDS))


def _runs_from(kinds: Sequence[object], start: int) -> list[tuple[int, int]]:
    """List the sizes of blocks that repeat from `start` on, and how often; longest runs first."""
    runs = list[tuple[int, int]]()
    for end in range(start + 1, len(kinds)):
        if kinds[end] == kinds[start]:
            times = _count_repeats(kinds, start, end - start)
            if times > 1:
                runs.append((end - start, times))
    return sorted(runs, key=lambda run: (-run[0] * run[1], run[0]))


def _count_repeats(kinds: Sequence[object], start: int, size: int) -> int:
    """Count how many times the `size` operations at `start` come back to back."""
    block = kinds[start : start + size]
    times = 1
    while kinds[start + times * size : start + (times + 1) * size] == block:
        times += 1
    return times


class Source(NamedTuple):
    """Where an operand of a block comes from, in terms that are equal for equal blocks.

    place: the number in its block of the operation that makes it; else its name.
    """

    kind: str
    place: int | str


@dataclass(frozen=True, eq=False)
class _Run:
    """A run of `times` blocks of `size` operations each, from number `start` on."""

    ops: Sequence[Op]
    step: TrainingStep
    start: int
    size: int
    times: int

    @cached_property
    def members(self) -> Sequence[Op]:
        """The operations of the run."""
        return self.ops[self.start : self.start + self.size * self.times]

    @property
    def columns(self) -> list[Sequence[Op]]:
        """For each operation of a block the operations in all blocks."""
        return [self.members[i :: self.size] for i in range(self.size)]

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each operation, counted from the first one of the run."""
        return {op.name: i for i, op in enumerate(self.ops, -self.start)}

    @cached_property
    def sources(self) -> list[list[Source]]:
        """Where the operands of each operation of the run come from."""
        return [
            [self._source(i, name) for name in op.operands] for i, op in enumerate(self.members)
        ]

    def _source(self, i: int, name: str) -> Source:
        if name in self.step.parameters:
            # Parameters of equal layers are equal but for the number of the layer.
            return Source(PARAMETER, NUMBER.sub("*", name))
        if name not in self.numbers:
            return Source(ELSEWHERE, name)  # an input
        block_start = i // self.size * self.size
        offset = self.numbers[name] - block_start
        if offset >= 0:
            return Source(SAME_BLOCK, offset)
        is_first_block = i < self.size
        if is_first_block or offset < -self.size:
            return Source(ELSEWHERE, name)
        return Source(BLOCK_BEFORE, offset + self.size)

    @cached_property
    def carried(self) -> dict[Source, Source]:
        """What blocks take from the block before -> what the first block takes in its place."""
        first_block, second_block, *_ = self._sources_by_block()
        pairs = zip(second_block, first_block, strict=True)
        return {source: first for source, first in pairs if source.kind == BLOCK_BEFORE}

    def _sources_by_block(self) -> list[list[Source]]:
        starts = range(0, len(self.members), self.size)
        return [[*chain(*self.sources[i : i + self.size])] for i in starts]

    @property
    def is_repeated(self) -> bool:
        """Whether blocks take what the one before made, and others use only the last one."""
        # The second block is the pattern, for the first one has none before it.
        first_block, second_block, *others = self._sources_by_block()
        if any(block != second_block for block in others):
            return False
        if first_block != [self.carried.get(source, source) for source in second_block]:
            return False
        if {source.kind for source in self.carried.values()} != {ELSEWHERE}:
            return False  # nothing is handed on, or the first block takes a parameter in its place
        # Results inside the run have no name of their own once it is one block.
        end = self.start + len(self.members)
        used_outside = set[str]()
        for op in (*self.ops[: self.start], *self.ops[end:]):
            used_outside.update((*op.operands, op.again))
        return used_outside.isdisjoint(op.name for op in self.members[: -self.size])

    @cached_property
    def taken(self) -> set[str]:
        """All names of the step and of modules, which a pattern must not fit by mistake."""
        paths = {*self.step.parameters}
        for op in self.step.ops:
            paths.add(op.name)
            paths.update(module for module in (op.enters, op.leaves) if module)
        taken = set[str]()
        for path in paths:
            taken.update(accumulate(path.split("."), "{}.{}".format))
        return taken

    @cached_property
    def new_names(self) -> dict[str, str]:
        """A name for the operations of each column and for their parameters; "" where none fits."""
        new_names = dict[str, str]()
        for column in self.columns:
            own_names = [op.name for op in column]
            pattern = _starred(own_names, self.taken)
            new_names |= dict.fromkeys(own_names, pattern if pattern else own_names[0])
            for operands in zip(*[op.operands for op in column], strict=True):
                if operands[0] in self.step.parameters:
                    # Without a pattern for its parameters a block cannot have a rule: no `or` here.
                    new_names |= dict.fromkeys(operands, _starred(operands, self.taken))
        return new_names

    def as_one_block(self) -> list[Op]:
        """Write the run as one block, with a `carry` for each array from the block before."""
        carries = {source: self._carry(source) for source in self.carried}
        members = [self._member(i, carries) for i in range(self.size)]
        block = [*carries.values(), *members]
        for carry in carries.values():
            users = [op for op in block if carry.name in op.operands]
            is_copied_once = len(users) == 1 and users[0].text == carry.text
            if is_copied_once and users[0].accesses == 0:
                # The operation with which a module begins is the carry itself.
                place = block.index(users[0])
                block[place] = replace(
                    users[0],
                    kind="carry",
                    operands=carry.operands,
                    again=carry.again,
                    accesses=None,
                )
                block.remove(carry)
        return block

    def _carry(self, source: Source) -> Op:
        """Make the operation that stands for what the block before made."""
        maker = self.members[int(source.place)]
        name = self.new_names[maker.name]
        result = maker.text.partition(ARROW)[2].strip()
        return Op(
            f"{name} (before)",
            f"{result} {ARROW} {result}",
            (str(self.carried[source].place),),
            kind="carry",
            times=self.times * maker.times,
            again=name,
            enters="",
        )

    def _member(self, i: int, carries: dict[Source, Op]) -> Op:
        """Rename operation i, with the operands of the second block, which has one before it."""
        op = self.members[i]
        operands = list[str]()
        sources = self.sources[self.size + i]
        for source, name in zip(sources, op.operands, strict=True):
            if source in carries:
                operands.append(carries[source].name)
            else:
                operands.append(self.new_names.get(name, name))
        column = self.columns[i]
        return replace(
            op,
            name=self.new_names[op.name],
            operands=tuple(operands),
            times=self.times * op.times,
            enters=self._module([member.enters for member in column]),
            leaves=self._module([member.leaves for member in column]),
        )

    def _module(self, names: Sequence[str | None]) -> str | None:
        """Return a pattern for the modules that the operations of a column enter or leave."""
        if not names[0]:
            return names[0]  # None and "" mean different things (`Op.enters`)
        return _starred([str(name) for name in names], self.taken)


def _starred(names: Sequence[str], taken: Collection[str]) -> str:
    """Write names that differ in one number as a pattern: `a.0.b`, `a.1.b` -> `a.*.b`.

    `a.{0,1}.b` if the star would fit other names in `taken`; "" if the names differ elsewhere.
    """
    pieces = [NUMBER.split(name) for name in names]  # numbers have odd places
    columns = list(zip(*pieces, strict=True))
    differ = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    if not differ:
        return names[0]
    if len(differ) > 1:
        return ""
    place = differ[0]
    pattern = [column[0] for column in columns]
    head = "".join(pattern[:place])
    tail = "".join(pattern[place + 1 :])
    # A star is a part of a name between dots, or a piece of it.
    fits_star = re.compile(f"{re.escape(head)}[^.]+{re.escape(tail)}").fullmatch
    is_alone = all(name in names for name in taken if fits_star(name))
    number = "*" if is_alone else f"{{{','.join(columns[place])}}}"
    return f"{head}{number}{tail}"
