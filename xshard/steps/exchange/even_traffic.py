"""The traffic of an exchange between even contiguous shards, in closed form, by digits of coordinates."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import NamedTuple

from xshard.layout.partition import Ints
from xshard.steps.traffic import Hop, LinkSpan, LinkSpans, Traffic

LinkCuts = tuple[LinkSpans, ...]  # per dim, the spans that shard it, outermost first


class LinkDigit(NamedTuple):
    """A digit of a device's coordinate along a span: `size` values; the digits before it have `outer`."""

    span: LinkSpan
    outer: int
    size: int

    def before(self, size: int) -> LinkDigit:
        """The leading digit of `size` values."""
        return self if size == self.size else self._replace(size=size)

    def after(self, size: int) -> LinkDigit:
        """The digit without its leading digit of `size` values."""
        return self._replace(outer=self.outer * size, size=self.size // size)


class Digit(NamedTuple):
    """A digit of the row numbers of a dim, and the coordinates that shard it on either side, if any."""

    size: int
    src: LinkDigit | None
    dst: LinkDigit | None

    def cut(self, size: int) -> tuple[Digit, Digit]:
        """The digit split in two; the first has `size` values."""
        src = self.src
        dst = self.dst
        first = Digit(size, src and src.before(size), dst and dst.before(size))
        return first, Digit(self.size // size, src and src.after(size), dst and dst.after(size))


def digits(src: LinkCuts, dst: LinkCuts) -> tuple[Digit, ...] | None:
    """The digits of the row numbers of all dims, equal or disjoint on a span; None if shards do not fit."""
    row_digits: list[Digit] = []
    split: set[LinkSpan] = set()
    for cuts in zip(src, dst, strict=True):
        of_dim = _dim_digits(*cuts)
        if of_dim is None:
            return None
        row_digits += of_dim[0]
        split |= of_dim[1]
    # A span that cuts on one side only has every digit once.
    both = (
        {d.src.span for d in row_digits if d.src}
        & {d.dst.span for d in row_digits if d.dst}
        & split
    )
    return _apart(row_digits, both) if both else tuple(row_digits)


@lru_cache(maxsize=16384)
def _dim_digits(src: LinkSpans, dst: LinkSpans) -> tuple[tuple[Digit, ...], set[LinkSpan]] | None:
    """The digits of one dim, and the spans that are split into several digits."""
    split: set[LinkSpan] = set()
    row_digits: list[Digit] = []
    ours, theirs = ([LinkDigit(span, 1, span.size) for span in spans] for spans in (src, dst))
    while ours and theirs:
        one = ours.pop(0)
        other = theirs.pop(0)
        size = min(one.size, other.size)
        if one.size % size or other.size % size:
            return None
        for coord, left in ((one, ours), (other, theirs)):
            if coord.size > size:
                left.insert(0, coord.after(size))
                split.add(coord.span)
        row_digits.append(Digit(size, one.before(size), other.before(size)))
    row_digits += [Digit(coord.size, coord, None) for coord in ours]
    row_digits += [Digit(coord.size, None, coord) for coord in theirs]
    return tuple(row_digits), split


def _apart(row_digits: Sequence[Digit], spans: set[LinkSpan]) -> tuple[Digit, ...] | None:
    """The digits split further, until digits of these spans are equal or disjoint."""
    while True:
        marks: dict[LinkSpan, set[int]] = {span: set() for span in spans}
        for _, src, dst in row_digits:
            for coord in (src, dst):
                if coord is not None and coord.span in spans:
                    marks[coord.span].update((coord.outer, coord.outer * coord.size))
        finer: list[Digit] = []
        for digit in row_digits:
            size = digit.size
            for coord in (digit.src, digit.dst):
                if coord is not None and coord.span in spans:
                    size = min(size, _first_mark(coord, marks[coord.span]))
            if not size or digit.size % size:
                return None
            finer += digit.cut(size) if size < digit.size else (digit,)
        if len(finer) == len(row_digits):
            return tuple(finer)
        row_digits = finer


def _first_mark(coord: LinkDigit, marks: set[int]) -> int:
    """The values of a digit before another digit of its span begins or ends; 0 if that does not divide."""
    inner = end = coord.outer * coord.size
    for mark in marks:
        if coord.outer < mark < inner:
            inner = mark
    return coord.size if inner == end else 0 if inner % coord.outer else inner // coord.outer


Equal = dict[Hashable, Hashable]  # coordinates, or digits, that must be equal (union-find)


def _join(equal: Equal, *pair: Hashable) -> bool:
    """Require a == b; True if the earlier conditions do not imply it."""
    a, b = (_root(equal, item) for item in pair)
    if a != b:
        equal[a] = b
    return a != b


def _root(equal: Equal, item: Hashable) -> Hashable:
    return _root(equal, equal[item]) if item in equal else item


def digit_traffic(
    shape: Ints, src: LinkCuts, dst: LinkCuts, addends: Sequence[LinkSpan]
) -> Traffic | None:
    """Traffic of an exchange between even contiguous shards, by level; None if shards do not divide."""
    row_digits = digits(src, dst)
    if row_digits is None:
        return None
    free: dict[int, int] = {}  # per level, the number of senders that differ only there
    pairs: list[tuple[int, LinkDigit, LinkDigit]] = []
    moving = set(addends)
    elements = math.prod(shape)
    senders = 1
    for cut in dst:
        for span in cut:
            elements //= span.size
    for span in addends:
        elements = elements * span.size
        senders = senders * span.size
        free[span.level] = free.get(span.level, 1) * span.size
    for size, before, after in row_digits:
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
    whole = elements
    equal = Equal()
    differs = False
    hops = []
    # From each level on, the sender also shares the receiver's coordinates along its spans.
    for level in sorted({span.level for span in moving}):
        joined = [b for pair_level, a, b in pairs if pair_level == level and _join(equal, a, b)]
        news = bool(joined)
        nearby = all(after.span.level > level for after in joined)
        nearer = elements // free.get(level, 1)
        fewer = senders // free.get(level, 1)
        received, messages = (elements, senders) if news else (elements - nearer, senders - fewer)
        if received:
            longest = max((span.size, span.axis) for span in moving if span.level == level)[1]
            # Devices with the senders' digits are in every node, or make whole nodes.
            slack = nearer // math.prod(after.size for after in joined) if news and nearby else 0
            hops.append(Hop(longest, received, messages, level, slack))
        elements = nearer
        senders = fewer
        differs = differs or news
    kept = 0 if differs else elements
    return Traffic(whole - kept, 2 * whole, tuple(hops), kept)


def node_lack(shape: Ints, src: LinkCuts, dst: LinkCuts) -> int:
    """The fewest elements that must enter some node (level-0 spans connect nodes); 0 if unknown."""
    row_digits = digits(src, dst)
    if row_digits is None:
        return 0
    far = [span for cut in dst for span in cut if span.level == 0]
    need = math.prod(shape) // math.prod(span.size for span in far)
    have = need
    for digit in row_digits:
        if digit.src and digit.src.span.level == 0 and digit.src != digit.dst:
            if digit.dst and digit.dst.span.level == 0:
                return need  # some nodes have only other values of this digit than they need
            have //= digit.size
    return need - have


def met_elements(shape: Ints, src: LinkCuts, dst: LinkCuts) -> int | None:
    """Elements that some device holds on both sides. None if the shards do not divide each other."""
    row_digits = digits(src, dst)
    if row_digits is None:
        return None
    # A span that cuts at different digits before and after keeps only rows in which these are equal.
    before = {digit.src: i for i, digit in enumerate(row_digits) if digit.src}
    met = math.prod(shape)
    equal = Equal()
    for i, digit in enumerate(row_digits):
        if digit.dst in before and _join(equal, before[digit.dst], i):
            met //= digit.size
    return met
