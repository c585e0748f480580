"""Equal blocks of operations, such as the layers of a model, as one block that runs often."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from operator import attrgetter
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


def find_repeated(step: TrainingStep) -> tuple[TrainingStep, dict[str, str]]:
    """Replace runs of equal layers by one layer that runs several times.

    The operations `0.up`, `1.up` and so on, each with the result of the one before as operand,
    become `*.up` with `times`. Its operand is a `carry`: what the layer before made, or, for the
    first one, what went into the first. If other layers differ, their numbers are listed in place
    of the star: `{1,2}.up`.

    Returns the step, and the new name of every operation and parameter that has one, by the old.

    >>> ops = [
    ...     Op("0.up", "b c, d c -> b d", ("x", "0.w")),
    ...     Op("1.up", "b c, d c -> b d", ("0.up", "1.w")),
    ... ]
    >>> step = TrainingStep(
    ...     ops, {"b": 8, "c": 4, "d": 4}, {"x": "b c"}, {"0.w": "d c", "1.w": "d c"}
    ... )
    >>> print(find_repeated(step)[0])
    *.up (before)  carry x 2        b d -> b d       x
    *.up           contraction x 2  b c, d c -> b d  *.up (before), *.w
    """
    ops = []
    new_names = dict[str, str]()
    # For each operation a key without names: equal for operations that do the same.
    kinds = [_kind_of(op) for op in step.ops]
    start = 0
    while start < len(step.ops):
        run = _longest_run_at(start, kinds, step)
        if run is None:
            ops.append(step.ops[start])
            start += 1
        else:
            ops += run.as_one_block()
            new_names |= run.new_names
            start += len(run.members)
    parameters = {}
    for name, text in step.parameters.items():
        parameters[new_names.get(name, name)] = text
    # What follows a run uses the results of its last layer, by their old names.
    ops = [renamed(op, new_names) for op in ops]
    return replace(step, ops=ops, parameters=parameters), new_names


def _longest_run_at(start: int, kinds: Sequence[object], step: TrainingStep) -> _Run | None:
    """Find the longest run of equal blocks from operation `start` on that can be one block."""
    # The longest first: two layers of a kind may be a part of a block of both.
    for size, times in _runs_from(kinds, start):
        run = _Run(step, start, size, times)
        # "" among the new names: parameters of the blocks have no pattern for a rule.
        if run.is_repeated and "" not in run.new_names.values():
            return run
    return None


def in_first_block(pattern: str) -> str:
    """Name a module in the first of repeated blocks: `layers.*.up` -> `layers.0.up`."""
    return spellings(pattern)[0].replace("*", "0")


def _kind_of(op: Op) -> tuple[object, ...]:
    """Return what is equal in equal operations of two blocks."""
    return NUMBER.sub("*", op.name), attrgetter(*EQUAL_FIELDS)(op)


def _runs_from(kinds: Sequence[object], start: int) -> list[tuple[int, int]]:
    """List the sizes of blocks that repeat from `start` on, and how often; longest runs first."""
    runs = []
    for end in range(start + 1, len(kinds)):
        if kinds[end] == kinds[start]:
            times = _count_repeats(kinds, start, end - start)
            if times > 1:
                runs.append((end - start, times))
    # Of runs of one length, that of smaller blocks comes first: the sort keeps their order.
    return sorted(runs, key=math.prod, reverse=True)


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

    step: TrainingStep
    start: int
    size: int
    times: int

    @property
    def _end(self) -> int:
        return self.start + self.size * self.times

    @cached_property
    def members(self) -> Sequence[Op]:
        """The operations of the run."""
        return self.step.ops[self.start : self._end]

    @property
    def columns(self) -> list[Sequence[Op]]:
        """For each operation of a block the operations in all blocks."""
        return [self.members[i :: self.size] for i in range(self.size)]

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each operation, counted from the first one of the run."""
        return {op.name: i for i, op in enumerate(self.step.ops, -self.start)}

    @cached_property
    def sources(self) -> list[list[Source]]:
        """Where the operands of each operation of the run come from."""
        sources = []
        for i, op in enumerate(self.members):
            sources.append([self._source(i, name) for name in op.operands])
        return sources

    def _source(self, i: int, name: str) -> Source:
        """Say where operation i of a run of layers has its operand `name` from.

        In layers of 2 operations, `1.up` takes `0.down`, the second operation of the layer before:
        (BLOCK_BEFORE, 1). So does `2.up`, which takes `1.down`: equal layers have equal sources.
        Other sources are the same layer, with the number of the operation there; a parameter, with
        a star for the layer's number; and anything else, by name.
        """
        if name in self.step.parameters:
            return Source(PARAMETER, NUMBER.sub("*", name))
        if name not in self.numbers:
            return Source(ELSEWHERE, name)  # an input
        block = i // self.size
        offset = self.numbers[name] - block * self.size
        if offset >= 0:
            return Source(SAME_BLOCK, offset)
        # The first block has none before it; results of two blocks before count as elsewhere.
        if block == 0 or offset < -self.size:
            return Source(ELSEWHERE, name)
        return Source(BLOCK_BEFORE, offset + self.size)

    @cached_property
    def carried(self) -> dict[Source, Source]:
        """What blocks take from the block before -> what the first block takes in its place."""
        first_block, second_block, *_ = self._sources_by_block()
        pairs = zip(second_block, first_block, strict=True)
        return {source: first for source, first in pairs if source.kind == BLOCK_BEFORE}

    def _sources_by_block(self) -> list[list[Source]]:
        """List the sources of all operands of each block, one after the other."""
        blocks = []
        for start in range(0, len(self.members), self.size):
            blocks.append(list(chain(*self.sources[start : start + self.size])))
        return blocks

    @property
    def is_repeated(self) -> bool:
        """Whether this run of equal blocks is a chain of layers, so that one can stand for all.

        Each block has to take what the block before made, and operations outside the run may use
        only results of the last block. Otherwise they are no layers but, for example, branches side
        by side, or layers with a residual connection over more than one.
        """
        # The second block is the pattern, for the first one has none before it.
        first_block, second_block, *others = self._sources_by_block()
        if any(block != second_block for block in others):
            return False
        # The first block differs only in what it takes in place of results of the block before.
        if first_block != [self.carried.get(source, source) for source in second_block]:
            return False
        if {source.kind for source in self.carried.values()} != {ELSEWHERE}:
            return False  # nothing is handed on, or the first block takes a parameter in its place
        # Once the run is one block, only the last block's results can be named from outside.
        used_outside = set[str]()
        for op in (*self.step.ops[: self.start], *self.step.ops[self._end :]):
            used_outside.update((*op.operands, op.again))
        all_but_last_block = self.members[: -self.size]
        return used_outside.isdisjoint(op.name for op in all_but_last_block)

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
        """Write a run of equal layers as the operations of one layer, which runs several times.

        A carry is an operation without work: `b d -> b d`, whose operand is what the first block
        takes, and whose `again` is the block's own result, for all later runs of the block. The
        carries come first, for the block's operations use them.
        """
        carries = {source: self._carry(source) for source in self.carried}
        members = [self._member(i, carries) for i in range(self.size)]
        own_carries = []
        for carry in carries.values():
            users = [i for i, op in enumerate(members) if carry.name in op.operands]
            user = members[users[0]]
            is_copied_once = len(users) == 1 and user.text == carry.text
            if is_copied_once and user.accesses == 0:
                # A module may begin with an operation that only copies its input (no accesses to
                # memory). It becomes the carry itself. So the carry begins the module, and a user's
                # rule for the module's input moves what comes from the layer before.
                members[users[0]] = replace(
                    user,
                    kind="carry",
                    operands=carry.operands,
                    again=carry.again,
                    accesses=None,  # as of all carries
                )
            else:
                own_carries.append(carry)
        return [*own_carries, *members]

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
        """Make operation i of the one layer that stands for a run of equal layers.

        `0.up` of 12 layers becomes `*.up` with times=12. An operand that comes from the layer
        before is replaced by its carry, the operation that hands it on.

        carries: by where the operand comes from.
        """
        op = self.members[i]
        operands = []
        # Sources are read off the second layer: the first one has no layer before it.
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

    If `taken` has `a.2.b`, too, the star would fit a name that is not meant, and the result is
    `a.{0,1}.b`. Equal names are their own pattern. Names that differ in several numbers, `a.0.b.0`
    and `a.1.b.1`, have none: "".
    """
    pieces = [NUMBER.split(name) for name in names]  # `a.0.b` -> `a.`, `0`, `.b`
    columns = list(zip(*pieces, strict=True))  # piece i of every name
    differing = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    if not differing:
        return names[0]
    if len(differing) > 1:
        return ""  # a pattern has one star
    place = differing[0]  # a number: equal blocks have names that are equal but for numbers
    head = "".join(pieces[0][:place])
    tail = "".join(pieces[0][place + 1 :])
    # A star stands for a part of a name between dots, or for a piece of one, but for no dot.
    star = re.compile(f"{re.escape(head)}[^.]+{re.escape(tail)}")
    fits_no_other = all(name in names for name in taken if star.fullmatch(name))
    number = "*" if fits_no_other else f"{{{','.join(columns[place])}}}"
    return f"{head}{number}{tail}"
