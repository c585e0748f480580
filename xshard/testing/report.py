"""The report of a failed comparison: text in the error, and a table of rich for consoles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xshard.testing.mismatch import DIFFERENCES, Mismatch

if TYPE_CHECKING:
    from rich.table import Table

_SHOWN = 8  # mismatches in the text of an error


class EquivalenceError(AssertionError):
    """Two functions that should be equal are not; `mismatches` has every array that differs."""

    def __init__(self, mismatches: Sequence[Mismatch], compared: int) -> None:
        self.mismatches, self.compared = tuple(mismatches), compared
        super().__init__(self._text())

    def __reduce__(self) -> tuple[object, ...]:
        return EquivalenceError, (self.mismatches, self.compared)

    def _text(self) -> str:
        parts = [f"{len(self.mismatches)} of {self.compared} comparisons differ"]
        alone = [m for m in self.mismatches if m.subject.mesh.n_devices == 1]
        if any(m.subject.against != DIFFERENCES for m in alone):
            parts.append("they differ on one device already: the functions differ, not their sharding")
        parts += map(mismatch_text, self.mismatches[:_SHOWN])
        more = len(self.mismatches) - _SHOWN
        if more > 0:
            parts.append(f"and {more} more: .mismatches has all")
        return "\n\n".join(parts)

    def table(self) -> Table:
        """All mismatches, a row each: array, place, both values, and the likely cause."""
        from rich.box import SIMPLE
        from rich.table import Table

        title = f"{len(self.mismatches)} of {self.compared} comparisons differ"
        table = Table(title=title, box=SIMPLE, pad_edge=False)
        for head in ("array", "run", "device", "global index", "got", "wanted", "likely cause", "right rows"):
            table.add_column(head, overflow="fold")
        for m in self.mismatches:
            kind = m.subject.kind if m.subject.kind != "output" else ""
            table.add_row(
                f"{kind} {m.subject.name}".strip(),
                f"{m.subject.runtime} {m.subject.mesh}",
                m.place,
                _index(m.global_index),
                _value(m.got),
                _value(m.want),
                "; first wrong: ".join(
                    filter(None, (m.problem or (m.cause.text if m.cause else "none that is known"), m.first))
                ),
                m.right,
            )
        return table


def mismatch_text(mismatch: Mismatch) -> str:
    """A mismatch in a few lines."""
    m = mismatch
    lines = [str(m.subject)]
    if m.index is None:
        lines.append(f"device {m.place}: {m.problem}")
    else:
        lines.append(
            f"{m.n_wrong} of {m.n_elements} elements differ, {_devices(m)}; "
            f"the largest error is {m.error:.3g}"
        )
        local = "" if m.index == m.global_index else f", {_index(m.index)} in its block,"
        lines.append(
            f"at global index {_index(m.global_index)}{local} on device {m.place}: "
            f"{_value(m.got)} in place of {_value(m.want)}"
        )
        if m.right:
            lines.append(f"right rows: {m.right}")
        lines.append(f"likely cause: {m.cause.text if m.cause else 'none that is known'}")
    if m.first:
        lines.append(f"first wrong: {m.first}")
    return "\n  ".join(lines)


def _devices(m: Mismatch) -> str:
    n = m.subject.mesh.n_devices
    if len(m.wrong_devices) == n:
        return "on every device" if n > 1 else "on the one device"
    return f"on device{'s' * (len(m.wrong_devices) > 1)} {', '.join(map(str, m.wrong_devices))} of {n}"


def _index(index: tuple[int, ...] | None) -> str:
    return "" if index is None else f"({', '.join('beyond' if i < 0 else str(i) for i in index)})"


def _value(value: complex | float | None) -> str:
    return "" if value is None else f"{value:.6g}"
