"""Overlaps: rows that a block holds beyond its own, as values that print as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xshard.notation.maps import NamedMap

BOUNDARIES = ("zero", "constant", "periodic", "reflect", "edge", "none", "pole")
OUTPUT_RULES = ("balanced", "aligned")

Width = (
    int | tuple[int, ...]
)  # a number of rows, the same for every part of the dim or one per part


@dataclass(frozen=True)
class Boundary:
    """The rule for rows beyond an end of the array."""

    kind: str = "zero"
    value: float = 0.0  # the fill of `constant`
    dim: str = ""  # the dim that a `pole` rolls by half its length; empty for the next dim
    sign: int = 1  # the factor of rows from beyond the pole

    def __str__(self) -> str:
        if self.kind == "constant" and self.value:
            value = self.value
            return (
                f"constant({int(value) if value.is_integer() and abs(value) < 1e16 else value!r})"
            )
        arguments = [self.dim] * bool(self.dim) + ["-1"] * (self.sign < 0)
        return f"{self.kind}({','.join(arguments)})" if arguments else self.kind

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
    """Each block widened by `lo` rows before it and `hi` rows after it; negative widths leave rows out."""

    lo: Width  # one width, or one per part of the dim
    hi: Width
    before: Boundary = ZERO  # the boundary before the first row of the array
    after: Boundary = ZERO

    def __str__(self) -> str:
        return f"halo({bracketed(self.lo)},{bracketed(self.hi)}{_boundary_text(self)})"

    def widths(self, part: int) -> tuple[int, int]:
        """Rows before and after the block of one part."""
        lo, hi = (w if isinstance(w, int) else w[part] for w in (self.lo, self.hi))
        return lo, hi


@dataclass(frozen=True)
class Window:
    """The rows that a device reads for its outputs of a k-wide, s-strided, d-dilated, p-padded window op."""

    k: int
    s: int = 1
    d: int = 1
    p: int | tuple[int, ...] = 0  # rows of padding at both ends, or (before, after)
    out: str = (
        ""  # sharding of outputs: as the dim (empty), `balanced`, or `aligned` with row s * i
    )
    before: Boundary = ZERO
    after: Boundary = ZERO

    def __str__(self) -> str:
        defaults = (("s", 1), ("d", 1), ("p", 0), ("out", ""))
        values = [(name, getattr(self, name), default) for name, default in defaults]
        options = "".join(f",{name}={bracketed(n)}" for name, n, default in values if n != default)
        return f"window(k={self.k}{options}{_boundary_text(self)})"

    @property
    def padding(self) -> tuple[int, int]:
        """Rows of padding before and after the array."""
        return (self.p, self.p) if isinstance(self.p, int) else (self.p[0], self.p[1])

    def output_length(self, length: int) -> int:
        """Number of outputs over `length` rows, counted as torch's convolutions do."""
        return max(0, (length + sum(self.padding) - self.d * (self.k - 1) - 1) // self.s + 1)


@dataclass(frozen=True)
class Reads:
    """Each block followed by the rows that a map lists for it: `Needs`."""

    rows: NamedMap

    def __str__(self) -> str:
        return f"reads({self.rows})"


@dataclass(frozen=True)
class Fold:
    """The dual of an overlap: overlapping rows are contributions, added at their owner."""

    of: Halo | Window | Reads

    def __str__(self) -> str:
        return f"fold({self.of})"


Overlap = Halo | Window | Reads | Fold


def unfolded(overlap: Overlap) -> Halo | Window | Reads:
    """The overlap itself, or the one inside a fold: both hold the same rows."""
    return overlap.of if isinstance(overlap, Fold) else overlap


def ends_of(overlap: Overlap | None) -> tuple[Boundary, ...]:
    """The boundaries at both ends of the array, if there is an overlap."""
    rows = None if overlap is None else unfolded(overlap)
    return () if rows is None or isinstance(rows, Reads) else (rows.before, rows.after)


def _boundary_text(overlap: Halo | Window) -> str:
    both = (overlap.before,) if overlap.before == overlap.after else (overlap.before, overlap.after)
    return "" if both == (ZERO,) else "".join(f",{end}" for end in both)


def bracketed(value: Any) -> str:
    """A number as it is; several numbers in brackets."""
    return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value)
