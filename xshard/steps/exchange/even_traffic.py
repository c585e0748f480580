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
    """Divide the row numbers of all dims into digits; digits of a span are equal or disjoint.

    "n/x" -> "n/y" with x=2, y=4: one digit of 2 values, x before and the leading half of y after;
    one of 2, nothing before and the other half of y after.

    Args:
        src: For each dim, the spans of links that shard it before, outermost first.
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
    # A span that cuts on one side only has each digit once, and one that is a single digit on both
    # sides is equal: only the others may overlap in part.
    src_spans = {digit.src.span for digit in digits if digit.src}
    dst_spans = {digit.dst.span for digit in digits if digit.dst}
    may_overlap = src_spans & dst_spans & split_spans
    if not may_overlap:
        return tuple(digits)
    return _equal_or_disjoint(digits, may_overlap)


@lru_cache(maxsize=16384)
def _dim_digits(src: LinkSpans, dst: LinkSpans) -> DimDigits | None:
    """Divide the row numbers of one dim into digits that are coordinates' digits on both sides.

    Both sides are read from the outermost digit. The shorter of the two digits at hand becomes one
    of the result, and what is left of the longer meets the next: sizes (2, 4) and (8,) -> (2, 4).

    None if neither of two digits divides the other.
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
        # Sizes 2 and 3 have no digit in common: such shards are counted per device.
        if src_digit.size % size or dst_digit.size % size:
            return None
        digits.append(Digit(size, src_digit.leading(size), dst_digit.leading(size)))
        # The rest of the longer digit meets the other side's next.
        if src_digit.size > size:
            src_left.append(src_digit.without_leading(size))
            split_spans.add(src_digit.span)
        if dst_digit.size > size:
            dst_left.append(dst_digit.without_leading(size))
            split_spans.add(dst_digit.span)
    # At most one side has digits left. The other side's blocks have all values of these.
    for digit in reversed(src_left):
        digits.append(Digit(digit.size, digit, None))
    for digit in reversed(dst_left):
        digits.append(Digit(digit.size, None, digit))
    return DimDigits(tuple(digits), frozenset(split_spans))


def _equal_or_disjoint(digits: Sequence[Digit], spans: set[LinkSpan]) -> tuple[Digit, ...] | None:
    """Split digits until those of these spans are equal or disjoint; None if they cannot be.

    A span of 8 that has digits (2, 4) before and (4, 2) after -> (2, 2, 2) on both sides.
    """
    while True:
        edges = _edges(digits, spans)
        finer: list[Digit] = []
        for digit in digits:
            size = digit.size
            for link_digit in (digit.src, digit.dst):
                if link_digit is not None and link_digit.span in spans:
                    size = min(size, _size_to_first_edge(link_digit, edges[link_digit.span]))
            if size == 0 or digit.size % size:  # 0: an edge that divides no coordinate
                return None
            if size < digit.size:
                finer += digit.split(size)
            else:
                finer.append(digit)
        if len(finer) == len(digits):
            return tuple(finer)
        digits = finer  # a split on one side makes new edges for the other


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
    """Sort the digits by what they ask of a sender.

    A digit of a row asks that a coordinate of its sender has this value. If the same digit of the
    same span is a coordinate of the receiver, the sender has the receiver's value. If another is,
    the two must be equal. If none is, the receiver wants all values: each from another sender.
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
            continue  # every sender has all values of this digit
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
    """Count the traffic of an exchange between even contiguous shards, by level of links.

    Hot: a search asks for each pair of states.

    Args:
        shape: The lengths of the dims.
        src: The spans that shard each dim before, outermost first.
        dst: The spans that shard each dim after.
        addends: The spans along which a sum ends.

    Returns:
        The traffic; None if shards do not divide each other.
    """
    digits = row_digits(src, dst)
    if digits is None:
        return None
    moves = _digit_moves(digits, addends)
    wanted = _wanted_elements(shape, dst, addends)
    # What a device takes from the senders that share its coordinates on slower levels: at first
    # from all senders. Level by level, what comes over its links is taken off.
    farther = Taken(wanted, math.prod(moves.n_senders.values()))
    equal = Equal()
    has_own_rows = True
    hops = []
    for level in sorted({span.level for span in moves.spans}):  # the slowest links first
        # Of the senders so far, one in `n_alike` also shares the receiver's coordinates along spans
        # of this level; what it sends comes over faster links.
        n_alike = moves.n_senders.get(level, 1)
        nearer = Taken(farther.elements // n_alike, farther.senders // n_alike)
        # Equalities that hold on some receivers only. `_join` adds each to `equal` on the way.
        unmet = [pair.dst for pair in moves.pairs.get(level, ()) if _join(equal, *pair)]
        if unmet:
            # The busiest device has other digits than all its senders: all comes over these links.
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
    # Each box is packed by its sender and unpacked by its receiver.
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
    """Return the fewest elements that must enter some node; 0 if unknown.

    Spans of level 0 connect nodes. All others are inside them. A node of n devices needs all their
    blocks, and has what the same devices held before: 16 rows "n/node/x" -> "n/x/node" on 2 nodes
    of 2: some node needs rows 0 to 3 and 8 to 11, and has 0 to 7. It lacks 4.
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
        # Digits inside nodes, and digits that stay, keep all their rows in the node.
        if digit.src is None or digit.src.span.level != 0 or digit.src == digit.dst:
            continue
        if digit.dst is not None and digit.dst.span.level == 0:
            return needed  # some nodes have only other values of this digit than they need
        at_hand //= digit.size  # the node has one value of the digit, and needs all
    return needed - at_hand


def met_elements(shape: Ints, src: LinkCuts, dst: LinkCuts) -> int | None:
    """Count the elements that some device holds on both sides: each element once.

    8 rows on x=2, y=4: "n/x/y" -> "n/y/x" keeps rows 0 and 7 on their devices, 2 elements.

    Args:
        shape: The lengths of the dims.
        src: The spans that shard each dim before, outermost first.
        dst: The spans that shard each dim after.

    Returns:
        The count; None if the shards of both sides do not divide each other.
    """
    digits = row_digits(src, dst)
    if digits is None:
        return None
    # A coordinate that is digit i of the row before, and digit j after, keeps only rows in which
    # both digits are equal: one in `size`, unless earlier conditions imply it.
    src_number = {digit.src: i for i, digit in enumerate(digits) if digit.src is not None}
    met = math.prod(shape)
    equal = Equal()
    for i, digit in enumerate(digits):
        if digit.dst in src_number and _join(equal, src_number[digit.dst], i):
            met //= digit.size
    return met
