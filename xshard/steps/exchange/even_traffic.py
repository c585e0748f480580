"""Even layouts as digits: which digit of a row's number tells which lane holds it, before and after.

Decides what an exchange between even contiguous cuts moves over every level of links, in closed
form: nothing grows with the number of devices. A block is all rows whose digits at the places of
its cuts are the device's coordinates, so overlaps of blocks are products over digits.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import NamedTuple

from xshard.steps.traffic import Hop, LinkSpan, Traffic

LaneCuts = tuple[tuple[LinkSpan, ...], ...]  # per dim, the lanes that cut it in turn


class LinkDigit(NamedTuple):
    """A digit of a device's coordinate along a lane: `size` values, with `outer` of them to the left."""

    lane: LinkSpan
    outer: int
    size: int

    def before(self, size: int) -> LinkDigit:
        """The leading digit of `size` values."""
        return self if size == self.size else self._replace(size=size)

    def after(self, size: int) -> LinkDigit:
        """What follows that digit."""
        return self._replace(outer=self.outer * size, size=self.size // size)


class Digit(NamedTuple):
    """A digit of the row number of a dim, and what the two ends cut there. None: one of them does not."""

    size: int
    src: LinkDigit | None
    dst: LinkDigit | None

    def cut(self, size: int) -> tuple[Digit, Digit]:
        """The digit as two, the first of `size` values."""
        src, dst = self.src, self.dst
        return (
            Digit(size, src and src.before(size), dst and dst.before(size)),
            Digit(self.size // size, src and src.after(size), dst and dst.after(size)),
        )


def digits(src: LaneCuts, dst: LaneCuts) -> tuple[Digit, ...] | None:
    """The digits that the cuts of all dims read. None where cuts do not divide each other (4 and 6).

    Parts of one lane are the same or do not overlap, so that each is a coordinate of its own.
    """
    found: list[Digit] = []
    split: set[LinkSpan] = set()
    for cuts in zip(src, dst, strict=True):
        of_dim = _dim_digits(*cuts)
        if of_dim is None:
            return None
        found += of_dim[0]
        split |= of_dim[1]
    # A lane of one end only has every digit once.
    both = split and split & {d.src.lane for d in found if d.src} & {d.dst.lane for d in found if d.dst}
    return _apart(found, both) if both else tuple(found)


@lru_cache(maxsize=16384)
def _dim_digits(
    src: tuple[LinkSpan, ...], dst: tuple[LinkSpan, ...]
) -> tuple[tuple[Digit, ...], set[LinkSpan]] | None:
    """The digits of one dim, and the lanes that have more than one of them."""
    split: set[LinkSpan] = set()
    found: list[Digit] = []
    ours, theirs = (
        [LinkDigit(lane, 1, lane.size) for lane in src],
        [LinkDigit(lane, 1, lane.size) for lane in dst],
    )
    while ours and theirs:
        one, other = ours.pop(0), theirs.pop(0)
        size = min(one.size, other.size)
        if one.size % size or other.size % size:
            return None
        for part, left in ((one, ours), (other, theirs)):
            if part.size > size:
                left.insert(0, part.after(size))
                split.add(part.lane)
        found.append(Digit(size, one.before(size), other.before(size)))
    found += [Digit(part.size, part, None) for part in ours]
    found += [Digit(part.size, None, part) for part in theirs]
    return tuple(found), split


def _apart(found: Sequence[Digit], lanes: set[LinkSpan]) -> tuple[Digit, ...] | None:
    """The digits cut further, until parts of these lanes overlap only where they are the same."""
    while True:
        marks: dict[LinkSpan, set[int]] = {lane: set() for lane in lanes}
        for _, src, dst in found:
            for part in (src, dst):
                if part is not None and part.lane in lanes:
                    marks[part.lane].update((part.outer, part.outer * part.size))
        finer: list[Digit] = []
        for digit in found:
            size = digit.size
            for part in (digit.src, digit.dst):
                if part is not None and part.lane in lanes:
                    size = min(size, _first_mark(part, marks[part.lane]))
            if not size or digit.size % size:
                return None
            finer += digit.cut(size) if size < digit.size else (digit,)
        if len(finer) == len(found):
            return tuple(finer)
        found = finer


def _first_mark(part: LinkDigit, marks: set[int]) -> int:
    """How many values a part has until another of its lane begins or ends; 0 where that does not divide."""
    inner = end = part.outer * part.size
    for mark in marks:
        if part.outer < mark < inner:
            inner = mark
    return part.size if inner == end else 0 if inner % part.outer else inner // part.outer


class _Equal:
    """Which parts of coordinates, or which digits, must be equal, as a partition that grows."""

    def __init__(self) -> None:
        self._parent: dict[Hashable, Hashable] = {}

    def join(self, a: Hashable, b: Hashable) -> bool:
        """Whether that is news: something that met all earlier conditions does not meet this one."""
        a, b = self._root(a), self._root(b)
        if a != b:
            self._parent[a] = b
        return a != b

    def _root(self, item: Hashable) -> Hashable:
        while item in self._parent:
            item = self._parent[item]
        return item


def digit_traffic(
    shape: Sequence[int], src: LaneCuts, dst: LaneCuts, addends: Sequence[LinkSpan]
) -> Traffic | None:
    """Traffic of an exchange between even contiguous cuts, by level.

    addends: the lanes along which a sum ends. None where the cuts do not divide each other.
    """
    found = digits(src, dst)
    if found is None:
        return None
    free: dict[int, int] = {}  # by level, how many senders share all but the coordinates there
    pairs: list[tuple[int, LinkDigit, LinkDigit]] = []
    moving = set(addends)
    elements = math.prod(shape)
    senders = 1
    for cut in dst:
        for lane in cut:
            elements //= lane.size
    for lane in addends:
        elements, senders = elements * lane.size, senders * lane.size
        free[lane.level] = free.get(lane.level, 1) * lane.size
    for size, before, after in found:
        if before == after:
            continue
        if after is not None:
            moving.add(after.lane)
        if before is None:
            continue
        level = before.lane.level
        moving.add(before.lane)
        if after is not None:
            pairs.append((level, before, after))
        else:
            senders *= size
            free[level] = free.get(level, 1) * size
    whole, equal, differs = elements, _Equal(), False
    hops = []
    # A level after the other: the sender must share the receiver's coordinates along its lanes too.
    for level in sorted({lane.level for lane in moving}):
        news = False
        for at, before, after in pairs:
            news |= at == level and equal.join(before, after)
        nearer, fewer = elements // free.get(level, 1), senders // free.get(level, 1)
        received, messages = (elements, senders) if news else (elements - nearer, senders - fewer)
        if received:
            longest = max((lane.size, lane.axis) for lane in moving if lane.level == level)[1]
            hops.append(Hop(longest, received, messages, level))
        elements, senders, differs = nearer, fewer, differs or news
    kept = 0 if differs else elements
    return Traffic(whole - kept, 2 * whole, tuple(hops), kept)


def node_lack(shape: Sequence[int], src: LaneCuts, dst: LaneCuts) -> int:
    """Fewest elements that must enter some node, whatever the plan; a node is what level-0 lanes lead to.

    0 where the cuts do not divide each other: then it is not known.
    """
    found = digits(src, dst)
    if found is None:
        return 0
    far = [lane for cut in dst for lane in cut if lane.level == 0]
    need = math.prod(shape) // math.prod(lane.size for lane in far)
    have = need
    for digit in found:
        if digit.src and digit.src.lane.level == 0 and digit.src != digit.dst:
            if digit.dst and digit.dst.lane.level == 0:
                return need  # of the nodes, some have other values of this digit than they need
            have //= digit.size
    return need - have


def met_elements(shape: Sequence[int], src: LaneCuts, dst: LaneCuts) -> int | None:
    """Elements that some device holds at both ends. None where the cuts do not divide each other."""
    found = digits(src, dst)
    if found is None:
        return None
    # A lane that cuts at one place before and at another after holds only rows with equal digits there.
    before = {digit.src: i for i, digit in enumerate(found) if digit.src}
    met, equal = math.prod(shape), _Equal()
    for i, digit in enumerate(found):
        if digit.dst in before and equal.join(before[digit.dst], i):
            met //= digit.size
    return met
