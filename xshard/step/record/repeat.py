"""Equal blocks of operations, such as the layers of a model, as one block that runs often.

A *run* is a number of equal blocks that follow each other. A *pattern* is one name for what has a
number of its own in each block: `*.up` for `0.up`, `1.up`, ... What one block hands to the next is
a *carry*.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from operator import attrgetter
from typing import NamedTuple

from xshard.caches import layout_cache
from xshard.notation.parser import ARROW
from xshard.rules import spellings
from xshard.step.record.op import Op, renamed
from xshard.step.record.training_step import TrainingStep

NUMBER = re.compile(r"(\d+)")
# Fields of `Op` that are equal in operations of equal blocks, as is the name but for its number.
EQUAL_FIELDS = ("text", "kind", "whole", "rules", "times", "flops", "accesses", "keeps", "inner")
# Where an operand comes from.
PARAMETER = "parameter"
SAME_BLOCK = "same block"
BLOCK_BEFORE = "block before"
ELSEWHERE = "elsewhere"


class RepeatedStep(NamedTuple):
    """A step in which one block stands for equal ones.

    new_names: of operations and parameters that have other names now, by their old names.
    """

    step: TrainingStep
    new_names: dict[str, str]


def find_repeated(step: TrainingStep) -> RepeatedStep:
    """Replace runs of equal layers by one layer that runs several times.

    The operations `0.up`, `1.up` and so on, each with the result of the one before as operand,
    become `*.up` with `times`. Its operand is a `carry`: what the layer before made, or, for the
    first one, what went into the first. If other layers differ, their numbers are listed in place
    of the star: `{1,2}.up`.

    >>> ops = [
    ...     Op("0.up", "b c, d c -> b d", ("x", "0.w")),
    ...     Op("1.up", "b c, d c -> b d", ("0.up", "1.w")),
    ... ]
    >>> step = TrainingStep(
    ...     ops, {"b": 8, "c": 4, "d": 4}, {"x": "b c"}, {"0.w": "d c", "1.w": "d c"}
    ... )
    >>> print(find_repeated(step).step)
    *.up (before)  carry x 2        b d -> b d       x
    *.up           contraction x 2  b c, d c -> b d  *.up (before), *.w
    """
    new_names: dict[str, str] = {}
    while True:
        # Layers come first, then the loops inside them.
        folded = _fold_runs(step)
        if not folded.new_names:
            return RepeatedStep(step, new_names)
        # A name may be new already: `0.loop.1` -> `*.loop.1` -> `*.loop.*`.
        for name, new_name in new_names.items():
            new_names[name] = folded.new_names.get(new_name, new_name)
        new_names = folded.new_names | new_names
        step = folded.step


def _fold_runs(step: TrainingStep) -> RepeatedStep:
    """Replace each run of equal blocks by one block; return the new names, too."""
    ops: list[Op] = []
    new_names: dict[str, str] = {}
    # A number for each operation, equal for operations that do the same: numbers compare fast.
    number_of: dict[object, int] = {}
    kinds = [number_of.setdefault(_equality_key(op), len(number_of)) for op in step.ops]
    names = _StepNames(step)
    start = 0
    while start < len(step.ops):
        run = _longest_run_at(start, kinds, names)
        if run is None:
            ops.append(step.ops[start])
            start += 1
        else:
            ops += run.as_one_block()
            new_names |= run.new_names
            start += len(run.members)
    if not new_names:
        return RepeatedStep(step, new_names)
    parameters = {}
    for name, text in step.parameters.items():
        parameters[new_names.get(name, name)] = text
    # What follows a run uses the results of its last layer, by their old names.
    ops = [renamed(op, new_names) for op in ops]
    return RepeatedStep(replace(step, ops=ops, parameters=parameters), new_names)


def _longest_run_at(start: int, kinds: Sequence[int], names: _StepNames) -> _Run | None:
    """Find the longest run of equal blocks from operation `start` on that can be one block.

    kinds: for each operation of the step a number, equal for operations that do the same.
    """
    # The longest first: two layers of a kind may be a part of a block of both.
    for size, times in _runs_from(kinds, start):
        run = _Run(names, start, size, times)
        # "" among the new names: parameters of the blocks have no pattern for a rule.
        if run.is_repeated and "" not in run.new_names.values():
            return run
    return None


@layout_cache(maxsize=4096)
def in_first_block(pattern: str) -> str:
    """Name a module in the first of repeated blocks: `layers.*.up` -> `layers.0.up`."""
    return spellings(pattern)[0].replace("*", "0")


def _equality_key(op: Op) -> tuple[object, ...]:
    """Return a key that is equal for operations that do the same in two blocks."""
    return NUMBER.sub("*", op.name), attrgetter(*EQUAL_FIELDS)(op)


class _Repeats(NamedTuple):
    """Equal blocks of `size` operations each, `times` of them one after the other."""

    size: int
    times: int

    @property
    def length(self) -> int:
        """The number of operations in all blocks."""
        return self.size * self.times


def _runs_from(kinds: Sequence[int], start: int) -> list[_Repeats]:
    """List the runs of equal blocks that begin at `start`, the longest first.

    Kinds of operations 0 1 0 1 0 1 2, from 0: 3 blocks of size 2. (Blocks of size 4 come once only.)
    """
    runs = []
    for second_start in range(start + 1, len(kinds)):
        if kinds[second_start] == kinds[start]:
            size = second_start - start
            times = _count_repeats(kinds, start, size)
            if times > 1:
                runs.append(_Repeats(size, times))
    # Of runs of one length, that of smaller blocks comes first: the sort keeps their order.
    return sorted(runs, key=attrgetter("length"), reverse=True)


def _count_repeats(kinds: Sequence[int], start: int, size: int) -> int:
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
class _StepNames:
    """The names of a step: where they are, and what patterns may be written for them."""

    step: TrainingStep

    @cached_property
    def index_of(self) -> Mapping[str, int]:
        """The number of each operation."""
        return {op.name: i for i, op in enumerate(self.step.ops)}

    @cached_property
    def parts_in_use(self) -> Mapping[tuple[str, str], Sequence[str]]:
        """All parts of names by what is before and after them: a star there fits each of them.

        Names are those of operations, parameters and modules. For `a.0.w` and `a.1.w` the result is
        {("a", "w"): ["0", "1"], ("a", ""): ["0", "1"], ...}: a star between "a" and "w" fits "0"
        and "1". So a pattern does not fit a name by mistake.
        """
        paths = {*self.step.parameters}
        for op in self.step.ops:
            paths.add(op.name)
            paths.update(module for module in (op.enters, op.leaves) if module)
        # With the modules around them: `a.0.w` -> `a`, `a.0`, `a.0.w`.
        names: set[str] = set()
        for path in paths:
            names.update(accumulate(path.split("."), "{}.{}".format))
        parts_in_use = defaultdict[tuple[str, str], list[str]](list)
        for name in names:
            parts = name.split(".")
            for i, part in enumerate(parts):
                before = ".".join(parts[:i])
                after = ".".join(parts[i + 1 :])
                parts_in_use[before, after].append(part)
        return parts_in_use

    def pattern_of(self, names: Sequence[str]) -> str:
        """Write names that differ in one number as a pattern: `a.0.b`, `a.1.b` -> `a.*.b`.

        If the step has `a.2.b`, too, the star would fit a name that is not meant, and the result is
        `a.{0,1}.b`. Equal names are their own pattern. Names that differ in several numbers,
        `a.0.b.0` and `a.1.b.1`, have none: "". The names are equal but for numbers.
        """
        pieces_of_names = [NUMBER.split(name) for name in names]  # `a.0.b` -> `a.`, `0`, `.b`
        columns = list(zip(*pieces_of_names, strict=True))  # piece i of every name
        differing = [i for i, column in enumerate(columns) if len(set(column)) > 1]
        if not differing:
            return names[0]
        if len(differing) > 1:
            return ""  # a pattern has one star
        (i,) = differing
        numbers = columns[i]
        head = "".join(pieces_of_names[0][:i])
        tail = "".join(pieces_of_names[0][i + 1 :])
        if self._star_fits_others(head, numbers, tail):
            return f"{head}{{{','.join(numbers)}}}{tail}"
        return f"{head}*{tail}"

    def _star_fits_others(self, head: str, numbers: Sequence[str], tail: str) -> bool:
        """Tell whether the pattern `head*tail` fits a name in the step without one of the numbers.

        A star stands for no dot, but may stand for a piece of a part: `a.layer*.b`.
        """
        before, _, begin = head.rpartition(".")
        end, _, after = tail.partition(".")
        star = re.compile(f"{re.escape(begin)}.+{re.escape(end)}")
        fitting = filter(star.fullmatch, self.parts_in_use[before, after])
        meant = {f"{begin}{number}{end}" for number in numbers}
        return not meant.issuperset(fitting)


@dataclass(frozen=True, eq=False)
class _Run:
    """A run of `times` blocks of `size` operations each, from number `start` on."""

    names: _StepNames
    start: int
    size: int
    times: int

    @property
    def step(self) -> TrainingStep:
        """The step that the run is a part of."""
        return self.names.step

    @property
    def _end(self) -> int:
        """The number of the first operation after the run."""
        return self.start + self.size * self.times

    @cached_property
    def members(self) -> Sequence[Op]:
        """The operations of the run."""
        return self.step.ops[self.start : self._end]

    @property
    def columns(self) -> list[Sequence[Op]]:
        """For each operation of a block, the same one in all blocks: [0.up, 1.up], [0.down, 1.down]."""
        return [self.members[i :: self.size] for i in range(self.size)]

    @cached_property
    def sources(self) -> list[list[Source]]:
        """Where the operands of each operation of the run come from."""
        sources = []
        for i, op in enumerate(self.members):
            sources.append([self._source_of_operand(i, name) for name in op.operands])
        return sources

    def _source_of_operand(self, i: int, name: str) -> Source:
        """Say where operation i of this run gets its operand `name` from, alike for equal layers.

        With layers of 2 operations, up and down, `1.up` takes `0.down`: operation 1 of the layer
        before, Source(BLOCK_BEFORE, 1). So does `2.up`, which takes `1.down`. Other sources:

        - Source(SAME_BLOCK, 0): operation 0 of its own layer.
        - Source(PARAMETER, "*.up.weight"), with a star for the layer's number.
        - Source(ELSEWHERE, "x"): anything else, by name.

        i counts from the beginning of the run.
        """
        if name in self.step.parameters:
            return Source(PARAMETER, NUMBER.sub("*", name))
        if name not in self.names.index_of:
            return Source(ELSEWHERE, name)  # an input of the step
        block = i // self.size
        # Counted from the first operation of this block: negative in blocks before.
        offset = self.names.index_of[name] - self.start - block * self.size
        if offset >= 0:
            return Source(SAME_BLOCK, offset)
        # The first block has none before it; anything from two blocks before is elsewhere.
        if block == 0 or offset < -self.size:
            return Source(ELSEWHERE, name)
        return Source(BLOCK_BEFORE, offset + self.size)

    @cached_property
    def first_source_of(self) -> dict[Source, Source]:
        """Sources in the block before -> where the first block gets the same operand from."""
        first_block, second_block, *_ = self._sources_by_block()
        pairs = zip(second_block, first_block, strict=True)
        return {source: of_first for source, of_first in pairs if source.kind == BLOCK_BEFORE}

    def _sources_by_block(self) -> list[list[Source]]:
        """List the sources of all operands of each block, one after the other."""
        blocks = []
        for start in range(0, len(self.members), self.size):
            blocks.append(list(chain(*self.sources[start : start + self.size])))
        return blocks

    @property
    def is_repeated(self) -> bool:
        """Whether the blocks of this run are layers in a chain, so that one can stand for all.

        Each block has to take results of the block before, and operations outside the run may use
        results of the last block only. Branches side by side, or layers with a residual connection
        over several of them, are not such a chain. A block inside a block that repeats has neither
        parameters nor modules, so that names of both have one number.
        """
        if self.members[0].times > 1 and self._has_names_of_rules:
            return False
        # Lists of the sources of all operands in a block: equal for equal layers. The second block is
        # the pattern, for the first one has no block before it.
        first_block, second_block, *others = self._sources_by_block()
        if any(block != second_block for block in others):
            return False
        # The first block differs only in what it takes in place of results of the block before.
        if first_block != [self.first_source_of.get(source, source) for source in second_block]:
            return False
        if {source.kind for source in self.first_source_of.values()} != {ELSEWHERE}:
            return False  # nothing is handed on, or the first block begins with a parameter
        # As one block that runs often, the run has only the results of its last time.
        used_outside: set[str] = set()
        for op in (*self.step.ops[: self.start], *self.step.ops[self._end :]):
            used_outside.update((*op.operands, op.again))
        all_but_last_block = self.members[: -self.size]
        return used_outside.isdisjoint(op.name for op in all_but_last_block)

    @property
    def _has_names_of_rules(self) -> bool:
        """Whether a rule could be about a parameter or a module of the run."""
        for op in self.members:
            if op.enters != "" or op.leaves != "":
                return True
            if not self.step.parameters.keys().isdisjoint(op.operands):
                return True
        return False

    @cached_property
    def new_names(self) -> dict[str, str]:
        """For each old name in the run, of an operation or a parameter, the name in the one layer.

        {"0.up": "*.up", "1.up": "*.up", "0.w": "*.w", "1.w": "*.w"}; "" for parameters whose names
        fit no pattern.
        """
        new_names: dict[str, str] = {}
        for column in self.columns:
            own_names = [op.name for op in column]
            pattern = self.names.pattern_of(own_names)
            new_names |= dict.fromkeys(own_names, pattern if pattern else own_names[0])
            for operands in zip(*[op.operands for op in column], strict=True):
                if operands[0] in self.step.parameters:
                    # Without a pattern for its parameters a block cannot have a rule: "" stays.
                    new_names |= dict.fromkeys(operands, self.names.pattern_of(operands))
        return new_names

    def as_one_block(self) -> list[Op]:
        """Write this run of equal layers as one layer that runs several times.

        Each layer takes the result of the layer before; the first one takes something else. In the
        one layer both are the result of a carry, an operation without work: its operand is what the
        first layer takes, its field `again` the result for all later layers. From `x -> 0.up -> 1.up`
        come `*.up (before)`, the carry with operand x and again="*.up", and `*.up`, which takes it.
        Carries come first, as the layer's operations use them.
        """
        carries = {source: self._carry(source) for source in self.first_source_of}
        members = [self._member(i, carries) for i in range(self.size)]
        separate_carries = []
        for carry in carries.values():
            users = [i for i, op in enumerate(members) if carry.name in op.operands]
            user = members[users[0]]
            # A view that leaves the layer's input as it is, without accesses to memory.
            is_view_of_carry = len(users) == 1 and user.text == carry.text and user.accesses == 0
            # A layer of one cast makes what it hands on: it cannot be its own carry, too.
            if is_view_of_carry and user.name != carry.again:
                members[users[0]] = _as_carry(user, carry)
            else:
                separate_carries.append(carry)
        return [*separate_carries, *members]

    def _carry(self, source: Source) -> Op:
        """Make the operation that stands for what the block before made.

        source: the operation of that block, with its number as `place`.
        """
        maker = self.members[int(source.place)]
        name = self.new_names[maker.name]
        result = maker.text.partition(ARROW)[2].strip()
        return Op(
            f"{name} (before)",
            text=f"{result} {ARROW} {result}",
            operands=(str(self.first_source_of[source].place),),
            kind="carry",
            times=self.times * maker.times,
            starts=maker.times,
            again=name,
            enters="",
        )

    def _member(self, i: int, carries: dict[Source, Op]) -> Op:
        """Make operation i of the one layer that stands for all layers of this run.

        `0.up` of 12 layers becomes `*.up` with times=12. An operand from the layer before is replaced
        by its carry, the operation that stands for what one layer hands to the next.

        carries: by the source of the operand, as in `sources`.
        """
        op = self.members[i]
        operands = []
        # Sources of the second layer's operation: the first layer has none before it.
        sources = self.sources[self.size + i]
        for source, name in zip(sources, op.operands, strict=True):
            if source in carries:
                operands.append(carries[source].name)
            else:
                operands.append(self.new_names.get(name, name))
        column = self.columns[i]  # this operation in every layer
        return replace(
            op,
            name=self.new_names[op.name],
            operands=tuple(operands),
            times=self.times * op.times,
            starts=self.times * op.starts,
            enters=self._module([member.enters for member in column]),
            leaves=self._module([member.leaves for member in column]),
        )

    def _module(self, names: Sequence[str | None]) -> str | None:
        """Return a pattern for the modules that the operations of a column enter or leave."""
        if not names[0]:
            return names[0]  # None and "" mean different things (`Op.enters`)
        return self.names.pattern_of([str(name) for name in names])


def _as_carry(view: Op, carry: Op) -> Op:
    """Make the carry of a view at the beginning of a layer.

    So the carry belongs to the module that begins with the view, and a rule for the module's input
    moves what comes from the layer before.
    """
    return replace(
        view,
        kind="carry",
        operands=carry.operands,
        again=carry.again,
        starts=carry.starts,
        accesses=None,  # as of all carries
    )
