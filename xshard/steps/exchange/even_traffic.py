"""Even layouts as digits: which digit of a row's number tells which span holds it, before and after.

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

LinkCuts = tuple[tuple[LinkSpan, ...], ...]  # per dim, the spans that cut it in turn


class LinkDigit(NamedTuple):
    """A digit of a device's coordinate along a span: `size` values, with `outer` of them to the left."""

    span: LinkSpan
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


def digits(src: LinkCuts, dst: LinkCuts) -> tuple[Digit, ...] | None:
    """The digits that the cuts of all dims read. None where cuts do not divide each other (4 and 6).

    Parts of one span are the same or do not overlap, so that each is a coordinate of its own.
    """
    found: list[Digit] = []
    split: set[LinkSpan] = set()
    for cuts in zip(src, dst, strict=True):
        of_dim = _dim_digits(*cuts)
        if of_dim is None:
            return None
        found += of_dim[0]
        split |= of_dim[1]
    # A span of one end only has every digit once.
    both = split and split & {d.src.span for d in found if d.src} & {d.dst.span for d in found if d.dst}
    return _apart(found, both) if both else tuple(found)


@lru_cache(maxsize=16384)
def _dim_digits(
    src: tuple[LinkSpan, ...], dst: tuple[LinkSpan, ...]
) -> tuple[tuple[Digit, ...], set[LinkSpan]] | None:
    """The digits of one dim, and the spans that have more than one of them."""
    split: set[LinkSpan] = set()
    found: list[Digit] = []
    ours, theirs = (
        [LinkDigit(span, 1, span.size) for span in src],
        [LinkDigit(span, 1, span.size) for span in dst],
    )
    while ours and theirs:
        one, other = ours.pop(0), theirs.pop(0)
        size = min(one.size, other.size)
        if one.size % size or other.size % size:
            return None
        for part, left in ((one, ours), (other, theirs)):
            if part.size > size:
                left.insert(0, part.after(size))
                split.add(part.span)
        found.append(Digit(size, one.before(size), other.before(size)))
    found += [Digit(part.size, part, None) for part in ours]
    found += [Digit(part.size, None, part) for part in theirs]
    return tuple(found), split


def _apart(found: Sequence[Digit], spans: set[LinkSpan]) -> tuple[Digit, ...] | None:
    """The digits cut further, until parts of these spans overlap only where they are the same."""
    while True:
        marks: dict[LinkSpan, set[int]] = {span: set() for span in spans}
        for _, src, dst in found:
            for part in (src, dst):
                if part is not None and part.span in spans:
                    marks[part.span].update((part.outer, part.outer * part.size))
        finer: list[Digit] = []
        for digit in found:
            size = digit.size
            for part in (digit.src, digit.dst):
                if part is not None and part.span in spans:
                    size = min(size, _first_mark(part, marks[part.span]))
            if not size or digit.size % size:
                return None
            finer += digit.cut(size) if size < digit.size else (digit,)
        if len(finer) == len(found):
            return tuple(finer)
        found = finer


def _first_mark(part: LinkDigit, marks: set[int]) -> int:
    """How many values a part has until another of its span begins or ends; 0 where that does not divide."""
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
    shape: Sequence[int], src: LinkCuts, dst: LinkCuts, addends: Sequence[LinkSpan]
) -> Traffic | None:
    """Traffic of an exchange between even contiguous cuts, by level.

    addends: the spans along which a sum ends. None where the cuts do not divide each other.
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
        for span in cut:
            elements //= span.size
    for span in addends:
        elements, senders = elements * span.size, senders * span.size
        free[span.level] = free.get(span.level, 1) * span.size
    for size, before, after in found:
        if before == after:
            continue
        if after is not None:
            moving.add(after.span)
        if before is None:
            continue
        level = before.span.level
        moving.add(before.span)
        if after is not None:
            pairs.append((level, before, after))
        else:
            senders *= size
            free[level] = free.get(level, 1) * size
    whole, equal, differs = elements, _Equal(), False
    hops = []
    # A level after the other: the sender must share the receiver's coordinates along its spans too.
    for level in sorted({span.level for span in moving}):
        news = False
        for at, before, after in pairs:
            news |= at == level and equal.join(before, after)
        nearer, fewer = elements // free.get(level, 1), senders // free.get(level, 1)
        received, messages = (elements, senders) if news else (elements - nearer, senders - fewer)
        if received:
            longest = max((span.size, span.axis) for span in moving if span.level == level)[1]
            hops.append(Hop(longest, received, messages, level))
        elements, senders, differs = nearer, fewer, differs or news
    kept = 0 if differs else elements
    return Traffic(whole - kept, 2 * whole, tuple(hops), kept)


def node_lack(shape: Sequence[int], src: LinkCuts, dst: LinkCuts) -> int:
    """Fewest elements that must enter some node, whatever the plan; a node is what level-0 spans lead to.

    0 where the cuts do not divide each other: then it is not known.
    """
    found = digits(src, dst)
    if found is None:
        return 0
    far = [span for cut in dst for span in cut if span.level == 0]
    need = math.prod(shape) // math.prod(span.size for span in far)
    have = need
    for digit in found:
        if digit.src and digit.src.span.level == 0 and digit.src != digit.dst:
            if digit.dst and digit.dst.span.level == 0:
                return need  # of the nodes, some have other values of this digit than they need
            have //= digit.size
    return need - have


def met_elements(shape: Sequence[int], src: LinkCuts, dst: LinkCuts) -> int | None:
    """Elements that some device holds at both ends. None where the cuts do not divide each other."""
    found = digits(src, dst)
    if found is None:
        return None
    # A span that cuts at one place before and at another after holds only rows with equal digits there.
    before = {digit.src: i for i, digit in enumerate(found) if digit.src}
    met, equal = math.prod(shape), _Equal()
    for i, digit in enumerate(found):
        if digit.dst in before and equal.join(before[digit.dst], i):
            met //= digit.size
    return met
