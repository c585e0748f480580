"""Overlaps: rows that a block holds beyond its own, as values that print as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from xshard.notation.maps import NamedMap

BOUNDARIES = ("zero", "constant", "periodic", "reflect", "edge", "none", "pole")
OUTPUT_RULES = ("balanced", "aligned")
OutputRule = Literal["", "balanced", "aligned"]  # "": as the rows, with given sizes aligned

Width = int | tuple[int, ...]  # rows: the same number for every part of the dim, or one per part


@dataclass(frozen=True)
class Boundary:
    """The rule for rows beyond an end of the array, as `zero`, `constant(1.5)` or `pole(w,-1)`.

    Attributes:
        kind: One of `BOUNDARIES`.
        value: The fill of `constant`.
        dim: The dim that a `pole` rolls by half its length; empty for the next dim.
        sign: The factor of rows from beyond the pole: 1 or -1.
    """

    kind: str = "zero"
    value: float = 0.0
    dim: str = ""
    sign: int = 1

    def __str__(self) -> str:
        if self.kind == "constant" and self.value:
            return f"constant({_number_text(self.value)})"
        arguments = []
        if self.dim:
            arguments.append(self.dim)
        if self.sign < 0:
            arguments.append("-1")
        if not arguments:
            return self.kind
        return f"{self.kind}({','.join(arguments)})"

    @property
    def linear(self) -> Boundary:
        """The boundary for tangents and cotangents: a constant becomes zero."""
        return Boundary("constant") if self.kind == "constant" else self

    @property
    def fill(self) -> float | None:
        """The value of rows outside the array; None if this boundary copies rows or holds none."""
        return self.value if self.kind in ("zero", "constant") else None


ZERO = Boundary()


@dataclass(frozen=True)
class Halo:
    """Each block widened by rows before and after it: `halo(1,1)`, `halo(2,0,periodic)`.

    Attributes:
        lo: Rows before the block: one width, or one per part of the dim. Negative widths leave
            rows of the block out.
        hi: Rows after the block.
        before: The boundary before the first row of the array.
        after: The boundary after the last row of the array.
    """

    lo: Width
    hi: Width
    before: Boundary = ZERO
    after: Boundary = ZERO

    def __str__(self) -> str:
        return f"halo({bracketed(self.lo)},{bracketed(self.hi)}{_boundary_text(self)})"

    def widths(self, part_index: int) -> tuple[int, int]:
        """Return the rows before and after the block of one part."""
        lo = self.lo if isinstance(self.lo, int) else self.lo[part_index]
        hi = self.hi if isinstance(self.hi, int) else self.hi[part_index]
        return lo, hi


@dataclass(frozen=True)
class Window:
    """The rows that a device reads for its outputs of a window op, as a convolution or a pooling.

    Attributes:
        k: The width of the window.
        s: The stride from one output to the next.
        d: The dilation: the distance of the rows in a window.
        p: Rows of padding at both ends of the array, or (before, after).
        out: How outputs are sharded: like the dim (empty), `balanced`, or `aligned`, where output
            i is computed by the owner of row s * i.
        before: The boundary before the first row of the array.
        after: The boundary after the last row of the array.
    """

    k: int
    s: int = 1
    d: int = 1
    p: int | tuple[int, ...] = 0
    out: str = ""
    before: Boundary = ZERO
    after: Boundary = ZERO

    def __str__(self) -> str:
        arguments = [f"k={self.k}"]
        for name in ("s", "d", "p", "out"):
            value = getattr(self, name)
            if value != getattr(Window, name):  # the default
                arguments.append(f"{name}={bracketed(value)}")
        return f"window({','.join(arguments)}{_boundary_text(self)})"

    @property
    def padding(self) -> tuple[int, int]:
        """Rows of padding before and after the array."""
        if isinstance(self.p, int):
            return self.p, self.p
        return self.p[0], self.p[1]

    @property
    def span(self) -> int:
        """Rows from the first that an output reads to the last: k=3 with a dilation of 2 -> 5."""
        return self.d * (self.k - 1) + 1

    def output_length(self, length: int) -> int:
        """Count the outputs over `length` rows, as torch's convolutions do: 8 rows, k=3 -> 6."""
        return max(0, (length + sum(self.padding) - self.span) // self.s + 1)

    def rows_read(self, start: int, stop: int) -> tuple[int, int]:
        """Return the rows [first, end) that the outputs [start, stop) read; below 0 in the padding.

        k=3 with stride 2: outputs 1 and 2 read rows 2 to 4 and 4 to 6 -> (2, 7).
        """
        rows_before, _ = self.padding
        last_start = (stop - 1) * self.s - rows_before
        return start * self.s - rows_before, last_start + self.span


@dataclass(frozen=True)
class Reads:
    """Each block followed by the rows that a map lists for it.

    Attributes:
        rows: The map, which is a `Needs`.
    """

    rows: NamedMap

    def __str__(self) -> str:
        return f"reads({self.rows})"


@dataclass(frozen=True)
class Fold:
    """The dual of an overlap: overlapping rows are contributions, added at their owner.

    Attributes:
        overlap: The overlap.
    """

    overlap: Halo | Window | Reads

    def __str__(self) -> str:
        return f"fold({self.overlap})"


Overlap = Halo | Window | Reads | Fold


def unfolded(overlap: Overlap) -> Halo | Window | Reads:
    """Return the overlap itself, or the one inside a fold: both hold the same rows."""
    return overlap.overlap if isinstance(overlap, Fold) else overlap


def ends_of(overlap: Overlap | None) -> tuple[Boundary, ...]:
    """Return the boundaries (before, after) of an overlap; none without one."""
    if overlap is None:
        return ()
    rows = unfolded(overlap)
    if isinstance(rows, Reads):
        return ()  # a map lists rows of the array alone
    return (rows.before, rows.after)


def bracketed(value: Any) -> str:
    """Write a number as it is, and several numbers in brackets: (1, 0) -> `[1,0]`."""
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return str(value)


def _boundary_text(overlap: Halo | Window) -> str:
    """Write the boundaries after the numbers: nothing for zeros, one where both are equal."""
    if overlap.before != overlap.after:
        return f",{overlap.before},{overlap.after}"
    if overlap.before == ZERO:
        return ""
    return f",{overlap.before}"


def _number_text(value: float) -> str:
    """Write a number so that it parses to the same: 2.0 -> `2`, 1.5 -> `1.5`."""
    # From 1e16 on `repr` writes an exponent, and an int would have all its digits.
    if value.is_integer() and abs(value) < 1e16:
        return str(int(value))
    return repr(value)
