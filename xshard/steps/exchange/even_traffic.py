"""The traffic of an exchange between even contiguous shards, in closed form.

A row number is written in digits, as a number of mixed radix, so that a digit is a coordinate of
the device that holds the row. With 8 rows, "n/x/y" on x=2, y=4 holds row 4x + y: the digit of size
2 is the coordinate along x, the digit of size 4 the one along y. Under "n/y/x" it holds row 2y + x:
the digits of row numbers are then of sizes 2, 2, 2, and y is split into two digits. An exchange is
a set of equalities between digits of the receiver and digits of its senders; elements are products.

`src` is the source, how the array is sharded when the exchange begins; `dst` is the target, how it is
sharded when it ends. A *span* is a part of a mesh axis over links of one speed.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from xshard.layout.partition import Ints
from xshard.steps.traffic import Hop, LinkSpan, LinkSpans, Traffic

LinkCuts = tuple[LinkSpans, ...]  # per dim, the spans that shard it, outermost first


class LinkDigit(NamedTuple):
    """A digit of a device's coordinate along a span (positions of a mesh axis on links of one speed).

    Coordinate 0 to 7 as a digit of size 2, then one of size 4: `(span, 1, 2)` and `(span, 2, 4)`.

    Attributes:
        span: The span.
        outer_values: The number of values that all more significant digits have together.
        size: The number of its own values.
    """

    span: LinkSpan
    outer_values: int
    size: int

    @classmethod
    def of_whole_span(cls, span: LinkSpan) -> LinkDigit:
        """Return the coordinate along a span as one digit."""
        return cls(span, outer_values=1, size=span.size)

    def split(self, size: int) -> tuple[LinkDigit, LinkDigit]:
        """Split the digit in two: the leading one has `size` values."""
        leading = LinkDigit(self.span, self.outer_values, size)
        trailing = LinkDigit(self.span, self.outer_values * size, self.size // size)
        return leading, trailing


class Digit(NamedTuple):
    """A digit of the row numbers of a dim, and the coordinate of a device that is this digit.

    Attributes:
        size: The number of its values.
        src: The coordinate of the device that has the row in the source. None: each block of the
            source has rows with all values of the digit.
        dst: The same in the target.
    """

    size: int
    src: LinkDigit | None
    dst: LinkDigit | None

    def split(self, size: int) -> tuple[Digit, Digit]:
        """Split the digit in two; the first has `size` values."""
        src_leading, src_trailing = self.src.split(size) if self.src is not None else (None, None)
        dst_leading, dst_trailing = self.dst.split(size) if self.dst is not None else (None, None)
        leading = Digit(size, src_leading, dst_leading)
        trailing = Digit(self.size // size, src_trailing, dst_trailing)
        return leading, trailing


def row_digits(src: LinkCuts, dst: LinkCuts) -> tuple[Digit, ...] | None:
    """Write row numbers in digits (mixed radix) that say which device has a row in source and target.

    "n/x" -> "n/y" with 8 rows on x=2, y=4: row 4a + 2b + c, each digit 0 or 1, is on the device
    x = a in the source, and on y = 2a + b in the target. So digit a is the whole x of the source
    and the leading half of y of the target; digit b is no coordinate of the source, and the rest of
    y of the target. Digit c, the position in a block of 2 rows, says no device and is left out.

    Args:
        src: For each dim, the spans that shard it in the source, outermost first. All shards are
            even and contiguous.
        dst: The same for the target.

    Returns:
        The digits, dim by dim, outermost first. Digits of one span, of source or target, are equal
        or do not overlap. None if the shards of both do not divide each other, as 2 and 3.
    """
    digits: list[Digit] = []
    for src_cut, dst_cut in zip(src, dst, strict=True):
        digits_of_dim = _dim_digits(src_cut, dst_cut)
        if digits_of_dim is None:
            return None
        digits += digits_of_dim
    # Digits of one span may overlap only if it shards source and target, and is split in one of them.
    src_coordinates = [digit.src for digit in digits if digit.src is not None]
    dst_coordinates = [digit.dst for digit in digits if digit.dst is not None]
    coordinates = src_coordinates + dst_coordinates
    split_spans = {
        coordinate.span for coordinate in coordinates if coordinate.size < coordinate.span.size
    }
    split_spans.intersection_update(coordinate.span for coordinate in src_coordinates)
    split_spans.intersection_update(coordinate.span for coordinate in dst_coordinates)
    if not split_spans:
        return tuple(digits)
    return _equal_or_disjoint(digits, split_spans)


@lru_cache(maxsize=16384)
def _dim_digits(src: LinkSpans, dst: LinkSpans) -> tuple[Digit, ...] | None:
    """Split the shards of one dim, in source and target, into digits of row numbers for both.

    Shards over axes of sizes (2, 4) in the source and (8,) in the target -> digits of 2 and of 4
    values. The outermost shards are compared first: the smaller size, 2 of 2 and 8, becomes a digit.
    The rest of the larger one, 8 / 2 = 4, is compared with the next shard. None if sizes do not
    divide each other, as 2 and 3.
    """
    digits = []
    # The shards that are not compared yet, as stacks: the outermost are last, where stacks pop.
    src_stack = [LinkDigit.of_whole_span(span) for span in reversed(src)]
    dst_stack = [LinkDigit.of_whole_span(span) for span in reversed(dst)]
    while src_stack and dst_stack:
        size = min(src_stack[-1].size, dst_stack[-1].size)
        # Sizes 2 and 3 have no common digit: there is no formula, and the caller lists devices.
        if src_stack[-1].size % size or dst_stack[-1].size % size:
            return None
        src_digit = _pop_leading(src_stack, size)
        dst_digit = _pop_leading(dst_stack, size)
        digits.append(Digit(size, src_digit, dst_digit))
    # One of the stacks is empty: "n/x" -> "n/x/y" has y left in the target. Any block of the source
    # has rows for all coordinates along y, so that this digit says nothing about the source: None.
    digits += [Digit(link.size, src=link, dst=None) for link in reversed(src_stack)]
    digits += [Digit(link.size, src=None, dst=link) for link in reversed(dst_stack)]
    return tuple(digits)


def _pop_leading(stack: list[LinkDigit], size: int) -> LinkDigit:
    """Pop the leading digit of `size` values off a stack, and push what is left of the popped one.

    Size 2 from [4, 8] -> a digit of 2, and the stack becomes [4, 4].
    """
    leading, trailing = stack.pop().split(size)
    if trailing.size > 1:
        stack.append(trailing)
    return leading


def _equal_or_disjoint(digits: Sequence[Digit], spans: set[LinkSpan]) -> tuple[Digit, ...] | None:
    """Split digits further, until any two from one of these spans are the same or do not overlap.

    An axis of 8 with digits of sizes (2, 4) in the source and (4, 2) in the target -> (2, 2, 2) in
    both. None if the sizes do not divide each other.
    """
    split_digits = _split_at_edges(digits, _edges(digits, spans))
    if split_digits is None:
        return None
    if len(split_digits) == len(digits):
        return tuple(digits)
    # A split in the source makes new edges for the target, and the reverse: go on until none is new.
    return _equal_or_disjoint(split_digits, spans)


def _split_at_edges(digits: Sequence[Digit], edges: dict[LinkSpan, set[int]]) -> list[Digit] | None:
    """Split each digit in two where another digit of the same span begins or ends inside of it.

    A digit of 4 values on span x, and another that ends after the leading 2 of them -> 2 and 2. One
    call splits each digit once, at the first such edge. `edges` has, for each span, how many values
    lie outside of each edge. None if an edge does not divide a digit evenly.
    """
    split_digits: list[Digit] = []
    for digit in digits:
        size = digit.size
        for coordinate in (digit.src, digit.dst):
            if coordinate is not None and coordinate.span in edges:
                # 0 if the edge does not divide the coordinate.
                size = min(size, _size_to_first_edge(coordinate, edges[coordinate.span]))
        if size == 0 or digit.size % size:
            return None
        if size < digit.size:
            split_digits += digit.split(size)
        else:
            split_digits.append(digit)
    return split_digits


def _edges(digits: Sequence[Digit], spans: set[LinkSpan]) -> dict[LinkSpan, set[int]]:
    """Collect, for each span, where its digits begin and end, as numbers of values outside."""
    edges: dict[LinkSpan, set[int]] = {span: set() for span in spans}
    for digit in digits:
        for coordinate in (digit.src, digit.dst):
            if coordinate is not None and coordinate.span in spans:
                edges[coordinate.span].update(
                    (coordinate.outer_values, coordinate.outer_values * coordinate.size)
                )
    return edges


def _size_to_first_edge(digit: LinkDigit, edges: set[int]) -> int:
    """Return the size of a digit up to the first edge inside; 0 if that does not divide."""
    inner_edge = digit.outer_values * digit.size
    edges_inside = [edge for edge in edges if digit.outer_values < edge < inner_edge]
    if not edges_inside:
        return digit.size
    first_edge = min(edges_inside)
    return 0 if first_edge % digit.outer_values else first_edge // digit.outer_values


Equations = dict[Hashable, Hashable]  # of digits: each item equals the one it leads to (union-find)


def _is_new_equation(equations: Equations, a: Hashable, b: Hashable) -> bool:
    """Add the equation a == b; return False if it follows from the earlier ones.

    a == b, then b == c: both are new. a == c is not.
    """
    a_root = _representative(equations, a)
    b_root = _representative(equations, b)
    if a_root == b_root:
        return False
    equations[a_root] = b_root
    return True


def _representative(equations: Equations, item: Hashable) -> Hashable:
    """Return the one that stands for all items that must equal this one."""
    while item in equations:
        item = equations[item]
    return item


class DigitPair(NamedTuple):
    """A digit of the sender that must equal another digit of the receiver."""

    src: LinkDigit
    dst: LinkDigit


class SenderRules(NamedTuple):
    """Which devices are the senders of a receiver, by their coordinates.

    Coordinates of which nothing is said are those of the receiver.

    Attributes:
        spans: The spans along which senders may differ from the receiver.
        free_digits: The receiver takes from senders with all values of these coordinates.
        digit_pairs: The sender's coordinates that must equal other coordinates of the receiver.
    """

    spans: set[LinkSpan]
    free_digits: list[LinkDigit]
    digit_pairs: list[DigitPair]


def _sender_rules(digits: Sequence[Digit], addends: Sequence[LinkSpan]) -> SenderRules:
    """Find from which devices a device takes rows, given the digits of row numbers.

    A digit is a coordinate of the device that has the row in the source (`src`, the sender), of the
    one that has it in the target (`dst`, the receiver), or of both:

    - the same coordinate of both: nothing moves along it;
    - different coordinates, x of the sender and y of the receiver: senders have x equal to the
      receiver's y, a pair;
    - a coordinate of the sender only: the receiver wants all its values, each from another sender;
    - a coordinate of the receiver only: each sender has rows with all its values, so that it says
      nothing about senders.

    `addends` are the parts of axes along which a sum ends: each addend comes from another sender.
    """
    spans = set(addends)
    free_digits = [LinkDigit.of_whole_span(span) for span in addends]
    digit_pairs = []
    for digit in digits:
        if digit.src == digit.dst:
            continue
        if digit.dst is not None:
            spans.add(digit.dst.span)
        if digit.src is None:
            continue
        spans.add(digit.src.span)
        if digit.dst is None:
            free_digits.append(digit.src)
        else:
            digit_pairs.append(DigitPair(digit.src, digit.dst))
    return SenderRules(spans, free_digits, digit_pairs)


class Taken(NamedTuple):
    """What one device takes from others: elements, and the number of their senders."""

    elements: int
    senders: int

    def share(self, n_shares: int) -> Taken:
        """Return what comes from one of `n_shares` equal groups of the senders."""
        return Taken(self.elements // n_shares, self.senders // n_shares)

    def without(self, part: Taken) -> Taken:
        """Return what comes from the senders that are not among those of `part`."""
        return Taken(self.elements - part.elements, self.senders - part.senders)


def digit_traffic(
    shape: Ints, src: LinkCuts, dst: LinkCuts, addends: Sequence[LinkSpan]
) -> Traffic | None:
    """Count what the busiest device receives in an exchange between even shards, by a formula.

    In an exchange each device takes from any others what it lacks. "n/x" -> "n" with 8 rows on 2
    nodes of 4: a device wants 8 rows, 1 from each of 8 devices. 4 of these are in its own node, so
    4 rows come from the other 4 over the slow links; 1 of the 4 is the device itself, so 3 rows
    come over the links in the node. The result has one hop for each speed (level) of links. Hot: a
    search asks for each pair of layouts that it tries.

    Args:
        shape: The lengths of the dims.
        src: The spans that shard each dim in the source, outermost first.
        dst: The same for the target.
        addends: The spans along which a sum ends.

    Returns:
        The traffic; None if the shards of source and target do not divide each other, as 2 and 3.
    """
    digits = row_digits(src, dst)
    if digits is None:
        return None
    rules = _sender_rules(digits, addends)
    wanted_elements = _wanted_elements(shape, dst, addends)
    # What is not counted yet comes from the senders that share the receiver's coordinates on all
    # levels so far. In the example: 8 rows of 8 senders, then the 4 of its node, at last its own.
    not_counted = Taken(wanted_elements, math.prod(digit.size for digit in rules.free_digits))
    equations = Equations()  # between coordinates; `_new_paired_digits` adds those of a level
    has_own_rows = True
    hops = []
    for level in sorted({span.level for span in rules.spans}):  # the slowest links first
        # Among senders with all values of the free digits of this level, one in `n_values` has the
        # receiver's own: what it sends comes over faster links, or is the receiver itself.
        n_values = math.prod(digit.size for digit in rules.free_digits if digit.span.level == level)
        nearer = not_counted.share(n_values)
        paired_digits = _new_paired_digits(rules.digit_pairs, level, equations)
        if paired_digits:
            # A sender's coordinate here must be another coordinate of the receiver. For the busiest
            # receiver that is not its own place: nothing that is not counted yet is nearer.
            has_own_rows = False
            received = not_counted
        else:
            received = not_counted.without(nearer)
        if received.elements:
            hops.append(
                Hop(
                    axis=_longest_axis(rules.spans, level),
                    received=received.elements,
                    messages=received.senders,
                    level=level,
                    mean_shortfall=_mean_shortfall(level, paired_digits, nearer.elements),
                )
            )
        not_counted = nearer
    # What comes from the sender with all coordinates of the receiver: itself.
    own_elements = not_counted.elements if has_own_rows else 0
    return Traffic(
        received=wanted_elements - own_elements,
        copied=2 * wanted_elements,  # packed by its sender, unpacked by its receiver
        hops=tuple(hops),
        saved_copies=own_elements,
    )


def _new_paired_digits(
    digit_pairs: Sequence[DigitPair], level: int, equations: Equations
) -> list[LinkDigit]:
    """List the receiver's digits that must equal a sender's digit on this level of links.

    Pairs that follow from earlier ones are left out. The others are added to `equations`, which is
    changed.
    """
    receiver_digits = []
    for pair in digit_pairs:
        if pair.src.span.level == level and _is_new_equation(equations, pair.src, pair.dst):
            receiver_digits.append(pair.dst)
    return receiver_digits


def _wanted_elements(shape: Ints, dst: LinkCuts, addends: Sequence[LinkSpan]) -> int:
    """Count the elements of a block of the target, as often as there are addends of each."""
    n_blocks = math.prod(span.size for span in chain.from_iterable(dst))
    n_addends = math.prod(span.size for span in addends)
    return math.prod(shape) // n_blocks * n_addends


def _longest_axis(spans: set[LinkSpan], level: int) -> str:
    """Return the axis of the longest span of a level, the last in the alphabet of several."""
    _, axis = max((span.size, span.axis) for span in spans if span.level == level)
    return axis


def _mean_shortfall(level: int, paired_digits: Sequence[LinkDigit], nearer_elements: int) -> int:
    """Return how many elements fewer than the busiest device the mean device of its node receives.

    `paired_digits` are the receiver's digits that a sender's digits must equal. If they are all
    coordinates along faster links, devices with any values of them are in each node, and some take
    less over this level. Else all devices of the busiest node take the same.
    """
    if not paired_digits or any(digit.span.level <= level for digit in paired_digits):
        return 0
    return nearer_elements // math.prod(digit.size for digit in paired_digits)


def elements_lacking_in_node(shape: Ints, src: LinkCuts, dst: LinkCuts) -> int:
    """Bound from below the elements that must enter the node that lacks most; 0 if unknown.

    A node has the blocks that the source gives its devices, and needs those of the target. 16 rows
    from "n/node/x" to "n/x/node" on 2 nodes of 2: node 0 has rows 0 to 7, needs 0 to 3 and 8 to 11,
    and lacks 4 rows. `src` and `dst` list, for each dim, the spans that shard it; those of level 0
    connect nodes.
    """
    digits = row_digits(src, dst)
    if digits is None:
        return 0
    n_nodes = math.prod(span.size for span in chain.from_iterable(dst) if span.level == 0)
    needed = math.prod(shape) // n_nodes  # by each node
    present = needed
    # A digit of row numbers that is a coordinate between nodes says in which node a row is.
    for digit in digits:
        says_source_node = digit.src is not None and digit.src.span.level == 0
        if not says_source_node or digit.src == digit.dst:
            continue  # a node has rows with every value of the digit that it needs
        # Otherwise a node has rows with only one value of the digit.
        if digit.dst is not None and digit.dst.span.level == 0:
            return needed  # each needs one value, and for some node it is another one
        present //= digit.size  # each node needs all values, and has one
    return needed - present


def elements_staying(shape: Ints, src: LinkCuts, dst: LinkCuts) -> int | None:
    """Count the elements that need not move: those that some device holds already.

    8 rows on x=2, y=4: from "n/x/y" to "n/y/x" rows 0 and 7 stay on their devices, 2 elements. Each
    element is counted once, on however many devices it stays.

    Args:
        shape: The lengths of the dims.
        src: The spans that shard each dim in the source, outermost first.
        dst: The same for the target.

    Returns:
        The count; None if the shards of source and target do not divide each other.
    """
    digits = row_digits(src, dst)
    if digits is None:
        return None
    # An element stays if one device has its row in source and target. In the example row abc (digits
    # of 2 values each) is on x = a, y = bc in the source, and on y = ab, x = c in the target. They are
    # one device if b = a, c = b and a = c. Each equation holds for one row in 2, but the third follows
    # from the others: 8 / 2 / 2 rows stay.
    source_digit_index = {digit.src: i for i, digit in enumerate(digits) if digit.src is not None}
    staying = math.prod(shape)
    equations = Equations()
    for i, digit in enumerate(digits):
        if digit.dst is None or digit.dst not in source_digit_index:
            continue
        if _is_new_equation(equations, source_digit_index[digit.dst], i):
            staying //= digit.size
    return staying
