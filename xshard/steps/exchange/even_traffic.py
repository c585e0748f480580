"""The traffic of an exchange between even contiguous shards, in closed form.

A row number is written in digits, as a number of mixed radix, so that a digit is a coordinate of
the device that holds the row. With 8 rows, "n/x/y" on x=2, y=4 holds row 4x + y: the digit of size
2 is the coordinate along x, the digit of size 4 the one along y. Under "n/y/x" it holds row 2y + x:
the digits of row numbers are then of sizes 2, 2, 2, and y is split into two digits. An exchange is
a set of equalities between digits of the receiver and digits of its senders; elements are products.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import NamedTuple

from xshard.layout.partition import Ints
from xshard.steps.traffic import Hop, LinkSpan, LinkSpans, Traffic

LinkCuts = tuple[LinkSpans, ...]  # per dim, the spans that shard it, outermost first


class LinkDigit(NamedTuple):
    """A digit of a device's coordinate along a span.

    size: the number of its values.
    outer: the number of values of all digits before it.

    Coordinate 0 to 7 as a digit of size 2, then one of size 4: `(span, 1, 2)` and `(span, 2, 4)`.
    """

    span: LinkSpan
    outer: int
    size: int

    def leading(self, size: int) -> LinkDigit:
        """Return the leading digit of `size` values."""
        return self if size == self.size else self._replace(size=size)

    def without_leading(self, size: int) -> LinkDigit:
        """Return what is left without the leading digit of `size` values."""
        return LinkDigit(self.span, self.outer * size, self.size // size)


class Digit(NamedTuple):
    """A digit of the row numbers of a dim, and the coordinates that are this digit on each side.

    Where a side has no coordinate, each of its blocks has all values of the digit.
    """

    size: int
    src: LinkDigit | None
    dst: LinkDigit | None

    def split(self, size: int) -> tuple[Digit, Digit]:
        """Split the digit in two; the first has `size` values."""
        outer = Digit(size, self.src, self.dst)
        inner = Digit(self.size // size, self.src, self.dst)
        if self.src is not None:
            outer = outer._replace(src=self.src.leading(size))
            inner = inner._replace(src=self.src.without_leading(size))
        if self.dst is not None:
            outer = outer._replace(dst=self.dst.leading(size))
            inner = inner._replace(dst=self.dst.without_leading(size))
        return outer, inner


class DimDigits(NamedTuple):
    """The digits of the row numbers of a dim, and the spans that are split into several digits."""

    digits: tuple[Digit, ...]
    split_spans: frozenset[LinkSpan]


def row_digits(src: LinkCuts, dst: LinkCuts) -> tuple[Digit, ...] | None:
    """Write row numbers in digits (mixed radix) that are coordinates of devices before and after.

    Under even contiguous shards each digit of a row number is a coordinate of the device that has
    the row. "n/x" -> "n/y" with x=2, y=4: a digit of 2 values is the x of the device before, and
    the leading half of its y after; another digit of 2 is no coordinate before, and the rest of y
    after. Of two digits that come from one axis, either both are the same, or they do not overlap.

    Args:
        src: For each dim, the spans that shard it before, outermost first. A span is a part of a
            mesh axis over links of one speed.
        dst: The spans that shard it after.

    Returns:
        The digits, dim by dim, outermost first; None if the shards of the two sides do not divide
        each other.
    """
    digits: list[Digit] = []
    split_spans: set[LinkSpan] = set()
    for src_cut, dst_cut in zip(src, dst, strict=True):
        dim_digits = _dim_digits(src_cut, dst_cut)
        if dim_digits is None:
            return None
        digits += dim_digits.digits
        split_spans |= dim_digits.split_spans
    # Two digits can overlap in part only if their span shards on both sides, and is split into
    # several digits on one of them.
    src_spans = {digit.src.span for digit in digits if digit.src}
    dst_spans = {digit.dst.span for digit in digits if digit.dst}
    may_overlap = src_spans & dst_spans & split_spans
    if not may_overlap:
        return tuple(digits)
    return _equal_or_disjoint(digits, may_overlap)


@lru_cache(maxsize=16384)
def _dim_digits(src: LinkSpans, dst: LinkSpans) -> DimDigits | None:
    """Find common digits of the row numbers of one dim, which is sharded before and after.

    Shards of sizes (2, 4) before and (8,) after -> digits of 2 and 4: both sides are read from the
    outermost shard on; the smaller size at hand becomes a digit, and what is left of the larger one
    is compared with the next. None if neither size divides the other, as for 2 and 3.
    """
    digits: list[Digit] = []
    split_spans: set[LinkSpan] = set()
    # What is left of each side, as stacks: the outermost digits are last, where they are taken.
    src_left = [LinkDigit(span, 1, span.size) for span in reversed(src)]
    dst_left = [LinkDigit(span, 1, span.size) for span in reversed(dst)]
    while src_left and dst_left:
        src_digit = src_left.pop()
        dst_digit = dst_left.pop()
        size = min(src_digit.size, dst_digit.size)
        # Sizes 2 and 3 have no digit in common. The caller then counts device by device.
        if src_digit.size % size or dst_digit.size % size:
            return None
        digits.append(Digit(size, src_digit.leading(size), dst_digit.leading(size)))
        # What is left of the larger one is compared with the other side's next shard.
        if src_digit.size > size:
            src_left.append(src_digit.without_leading(size))
            split_spans.add(src_digit.span)
        if dst_digit.size > size:
            dst_left.append(dst_digit.without_leading(size))
            split_spans.add(dst_digit.span)
    # At most one side has shards left. Each block of the other side has all values of these digits.
    for digit in reversed(src_left):
        digits.append(Digit(digit.size, digit, None))
    for digit in reversed(dst_left):
        digits.append(Digit(digit.size, None, digit))
    return DimDigits(tuple(digits), frozenset(split_spans))


def _equal_or_disjoint(digits: Sequence[Digit], spans: set[LinkSpan]) -> tuple[Digit, ...] | None:
    """Split digits further, until any two from one of these axes are the same or do not overlap.

    An axis of 8 with digits of sizes (2, 4) before and (4, 2) after -> (2, 2, 2) on both sides. A
    span is a part of a mesh axis over links of one speed. None if the sizes do not divide.
    """
    while True:
        edges = _edges(digits, spans)
        finer: list[Digit] = []
        for digit in digits:
            size = digit.size
            for link_digit in (digit.src, digit.dst):
                if link_digit is not None and link_digit.span in spans:
                    size = min(size, _size_to_first_edge(link_digit, edges[link_digit.span]))
            if size == 0 or digit.size % size:  # 0: the edge of another digit lies inside
                return None
            if size < digit.size:
                finer += digit.split(size)
            else:
                finer.append(digit)
        if len(finer) == len(digits):
            return tuple(finer)
        digits = finer  # a split on one side makes new edges for the other: go on until none is new


def _edges(digits: Sequence[Digit], spans: set[LinkSpan]) -> dict[LinkSpan, set[int]]:
    """Collect, for each span, where its digits begin and end, as numbers of values outside."""
    edges: dict[LinkSpan, set[int]] = {span: set() for span in spans}
    for digit in digits:
        for link_digit in (digit.src, digit.dst):
            if link_digit is not None and link_digit.span in spans:
                end = link_digit.outer * link_digit.size
                edges[link_digit.span].update((link_digit.outer, end))
    return edges


def _size_to_first_edge(digit: LinkDigit, edges: set[int]) -> int:
    """Return the size of a digit up to the first edge inside; 0 if that does not divide."""
    end = digit.outer * digit.size
    inside = [edge for edge in edges if digit.outer < edge < end]
    if not inside:
        return digit.size
    first_edge = min(inside)
    return 0 if first_edge % digit.outer else first_edge // digit.outer


Equal = dict[Hashable, Hashable]  # coordinates, or digits, that must be equal (union-find)


def _join(equal: Equal, a: Hashable, b: Hashable) -> bool:
    """Add the condition a == b to `equal`; True if the earlier ones do not imply it."""
    a_root = _root(equal, a)
    b_root = _root(equal, b)
    if a_root == b_root:
        return False
    equal[a_root] = b_root
    return True


def _root(equal: Equal, item: Hashable) -> Hashable:
    """Return the representative of all items that must equal this one."""
    while item in equal:
        item = equal[item]
    return item


class DigitPair(NamedTuple):
    """A digit of the sender that must equal another digit of the receiver."""

    src: LinkDigit
    dst: LinkDigit


class DigitMoves(NamedTuple):
    """What differs between a receiver and its senders, by the level of the sender's links."""

    spans: set[LinkSpan]  # along which they may differ
    n_senders: dict[int, int]  # level -> the number of senders that differ only there
    pairs: dict[int, list[DigitPair]]  # level -> the digits that must be equal


def _digit_moves(digits: Sequence[Digit], addends: Sequence[LinkSpan]) -> DigitMoves:
    """Count from how many senders a device takes rows, and list conditions on who they are.

    Each digit of a row number is a coordinate of the device that has the row before (`src`), of the
    one that has it after (`dst`), or of both. There are four cases:

    - the same coordinate on both sides: sender and receiver agree, and nothing moves along it;
    - different coordinates: the sender's one must equal the receiver's other one, a pair;
    - only a coordinate before: the receiver wants all values, each from another sender;
    - only a coordinate after: every sender has all values, which asks for nothing.

    `addends` are the parts of axes along which a sum ends: each addend comes from another sender.
    """
    moves = DigitMoves(set(addends), {}, {})
    n_senders = moves.n_senders
    for span in addends:  # each addend comes from another sender
        n_senders[span.level] = n_senders.get(span.level, 1) * span.size
    for size, src, dst in digits:
        if src == dst:
            continue  # the sender's coordinate is the receiver's
        if dst is not None:
            moves.spans.add(dst.span)
        if src is None:
            continue  # each sender has all values of this digit
        moves.spans.add(src.span)
        level = src.span.level
        if dst is not None:
            moves.pairs.setdefault(level, []).append(DigitPair(src, dst))
        else:
            n_senders[level] = n_senders.get(level, 1) * size
    return moves


class Taken(NamedTuple):
    """What one device takes from others: elements, and the number of their senders."""

    elements: int
    senders: int


def digit_traffic(
    shape: Ints, src: LinkCuts, dst: LinkCuts, addends: Sequence[LinkSpan]
) -> Traffic | None:
    """Count what the busiest device receives in an exchange between even shards, by a formula.

    In an exchange each device takes from any others what it lacks. "n/x" -> "n", 8 rows on x=4: 8
    rows are wanted, 2 are its own, and 6 come from 3 senders. Hot: a search asks for each pair of
    layouts that it tries. The result has one hop for each speed (level) of links.

    Args:
        shape: The lengths of the dims.
        src: The spans that shard each dim before, outermost first. A span is a part of a mesh axis
            over links of one speed.
        dst: The spans that shard each dim after.
        addends: The spans along which a sum ends.

    Returns:
        The traffic; None if the shards of both sides do not divide each other, as 2 and 3 parts.
    """
    digits = row_digits(src, dst)
    if digits is None:
        return None
    moves = _digit_moves(digits, addends)
    wanted = _wanted_elements(shape, dst, addends)
    # `farther` is what comes from senders at the receiver's own coordinates on all slower levels:
    # at first from all senders. What comes over the links of each level is subtracted in turn.
    farther = Taken(wanted, math.prod(moves.n_senders.values()))
    equal = Equal()
    has_own_rows = True
    hops = []
    for level in sorted({span.level for span in moves.spans}):  # the slowest links first
        # Of the senders so far, one in `n_alike` also shares the receiver's coordinates along spans
        # of this level; what it sends comes over faster links.
        n_alike = moves.n_senders.get(level, 1)
        nearer = Taken(farther.elements // n_alike, farther.senders // n_alike)
        # Pairs of coordinates that are equal on some receivers only, and do not follow from earlier
        # pairs. `_join` returns whether a pair is new, and adds it to `equal`.
        unmet = [pair.dst for pair in moves.pairs.get(level, ()) if _join(equal, *pair)]
        if unmet:
            # On the busiest device they are not equal: all that it takes comes over these links.
            has_own_rows = False
            received = farther
        else:
            received = Taken(farther.elements - nearer.elements, farther.senders - nearer.senders)
        if received.elements:
            axis = _longest_axis(moves.spans, level)
            slack = _slack(level, unmet, nearer.elements)
            hops.append(Hop(axis, received.elements, received.senders, level, slack))
        farther = nearer
    own = farther.elements if has_own_rows else 0
    # Each element is packed by its sender and unpacked by its receiver: two copies.
    return Traffic(wanted - own, 2 * wanted, tuple(hops), own)


def _wanted_elements(shape: Ints, dst: LinkCuts, addends: Sequence[LinkSpan]) -> int:
    """Count the elements of a block afterwards, as often as there are addends of each."""
    elements = math.prod(shape)
    for cut in dst:
        for span in cut:
            elements //= span.size
    for span in addends:
        elements *= span.size
    return elements


def _longest_axis(spans: set[LinkSpan], level: int) -> str:
    """Return the axis of the longest span of a level, the last in the alphabet of several."""
    _, axis = max((span.size, span.axis) for span in spans if span.level == level)
    return axis


def _slack(level: int, unmet: Sequence[LinkDigit], nearer_elements: int) -> int:
    """Return how many elements fewer than the busiest the mean device of its node receives.

    If the digits that senders must have are coordinates along faster links, devices with such
    digits are in each node, or make whole nodes, and take less over this level. Else all take the
    same.
    """
    if not unmet or any(digit.span.level <= level for digit in unmet):
        return 0
    return nearer_elements // math.prod(digit.size for digit in unmet)


def node_lack(shape: Ints, src: LinkCuts, dst: LinkCuts) -> int:
    """Bound from below the elements that must enter the node that lacks most; 0 if unknown.

    A node needs the blocks of all its devices, and has what these held before. 16 rows from
    "n/node/x" to "n/x/node" on 2 nodes of 2: some node needs rows 0 to 3 and 8 to 11, has 0 to 7,
    and lacks 4 rows. `src` and `dst` list, for each dim, the spans that shard it: parts of mesh
    axes, of level 0 if they connect nodes.
    """
    digits = row_digits(src, dst)
    if digits is None:
        return 0
    n_nodes = 1
    for cut in dst:
        for span in cut:
            if span.level == 0:
                n_nodes *= span.size
    needed = math.prod(shape) // n_nodes  # by each node
    at_hand = needed
    for digit in digits:
        # This digit is no coordinate of a node before, or is the same coordinate after: a node has
        # every value of it that it needs.
        if digit.src is None or digit.src.span.level != 0 or digit.src == digit.dst:
            continue
        if digit.dst is not None and digit.dst.span.level == 0:
            return needed  # some nodes have only other values of this digit than they need
        at_hand //= digit.size  # the node had one value of this digit, and needs all
    return needed - at_hand


def met_elements(shape: Ints, src: LinkCuts, dst: LinkCuts) -> int | None:
    """Count the elements that need not move: those that some device holds before and after.

    8 rows on x=2, y=4: from "n/x/y" to "n/y/x" rows 0 and 7 stay on their devices, 2 elements. Each
    element is counted once, on however many devices it stays.

    Args:
        shape: The lengths of the dims.
        src: The spans (parts of mesh axes) that shard each dim before, outermost first.
        dst: The spans that shard each dim after.

    Returns:
        The count; None if the shards of both sides do not divide each other.
    """
    digits = row_digits(src, dst)
    if digits is None:
        return None
    # A device has a row on both sides only if all its coordinates fit both times. A coordinate that
    # is digit i of the row number before and digit j after asks that both digits are equal: true
    # for one row in `size`, unless it follows from earlier conditions.
    src_number = {digit.src: i for i, digit in enumerate(digits) if digit.src is not None}
    met = math.prod(shape)
    equal = Equal()
    for i, digit in enumerate(digits):
        if digit.dst in src_number and _join(equal, src_number[digit.dst], i):
            met //= digit.size
    return met
