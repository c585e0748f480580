"""One array against another: whether they agree, and the report of a mismatch as text and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xshard.layout import Mesh, Sharding
from xshard.steps.base import Block
from xshard.testing.diagnosis.causes import Cause, likely_cause
from xshard.testing.diagnosis.evidence import Case, in_double, wrong_rows
from xshard.testing.diagnosis.orders import rows_text

if TYPE_CHECKING:
    from rich.console import Group

_SHOWN = 8  # mismatches in the text of an error
# The source of values that a gradient on one device is compared with.
DIFFERENCES = "differences of its function along random directions"


@dataclass(frozen=True)
class Subject:
    """An array of a run, and the source of the values it is compared with."""

    kind: str  # output, gradient or parameter
    name: str
    runtime: str
    mesh: Mesh
    against: str

    def __str__(self) -> str:
        of = self.name if self.kind == "output" else f"{self.kind} of {self.name}"
        return f"{of}, {self.runtime} on {self.mesh or 'whole arrays'}, against {self.against}"


@dataclass(frozen=True)
class Mismatch:
    """The place of an array's largest error: device, global index, and both values.

    index: None if shapes or dtypes differ; then `problem` says how. global_index: -1 for a row beyond the
    ends of the array. n_wrong, n_elements: counted over all devices. right: rows of every dim without errors.
    first: the first redistribution of the run with a wrong meaning, if the run was asked for it.
    """

    subject: Subject
    device: int
    index: tuple[int, ...] | None = None
    global_index: tuple[int, ...] | None = None
    got: complex | float | None = None
    want: complex | float | None = None
    error: float = 0.0
    n_wrong: int = 0
    n_elements: int = 0
    wrong_devices: tuple[int, ...] = ()
    problem: str = ""
    cause: Cause | None = None
    right: str = ""
    first: str = ""

    @property
    def place(self) -> str:
        """The device's number and its coordinates: `2 (tp=1,sp=0)`."""
        return f"{self.device} ({self.subject.mesh.place(self.device)})"

    @property
    def likely_cause(self) -> str:
        return self.cause.text if self.cause else "none that is known"


def find_mismatch(
    subject: Subject,
    got: Sequence[Block],
    want: Sequence[Block],
    sharding: Sharding,
    *evidence: Any,
) -> Mismatch | None:
    """Blocks of one array against blocks of another under the same layout, or None. evidence: see `Case`."""
    for device, (a, b) in enumerate(zip(got, want, strict=True)):
        if problem := _problem(a, b, sharding):
            return Mismatch(subject, device, problem=problem)
    case = Case.of(got, want, sharding, *evidence)
    return None if case.agrees else located(subject, case)


def _problem(got: Block, want: Block, sharding: Sharding) -> str:
    """The mismatch of a block's shape or dtype, or nothing."""
    if got.shape != want.shape:
        array = f"the block of a {sharding.shape} array under '{sharding.layout}'"
        hint = ""
        if got.shape == sharding.shape:
            hint = ": the whole array, where a block was meant"
        elif want.shape == sharding.shape and got.size < want.size:
            hint = ": a part of the array, where all of it was meant"
        return f"shape {got.shape} in place of {want.shape}, {array}{hint}"
    a = got.dtype
    b = want.dtype
    # The width of whole numbers may differ: JAX has no 64-bit ones by default.
    if a != b and not (a.kind in "iu" and b.kind in "iu"):
        return f"{a.name} in place of {b.name}"
    return ""


def located(subject: Subject, case: Case) -> Mismatch:
    """The report of blocks that do not agree: the largest error, and the likely cause."""
    blocks = zip(case.got, case.want, case.wrong, strict=True)
    gaps = ((np.abs(in_double(a) - in_double(b)), mask) for a, b, mask in blocks)
    errors = [
        np.where(mask, np.nan_to_num(gap, nan=np.inf), -1) for gap, mask in gaps
    ]  # NaN is the largest
    device = int(np.argmax([e.max(initial=-1) for e in errors]))
    index = tuple(int(i) for i in np.unravel_index(errors[device].argmax(), errors[device].shape))
    rows = tuple(int(case.rows(d, device)[i]) for d, i in enumerate(index))
    got, want = (in_double(blocks[device])[index].item() for blocks in (case.got, case.want))
    counts = sum(int(mask.sum()) for mask in case.wrong), sum(mask.size for mask in case.wrong)
    error = float(errors[device][index])
    names = case.sharding.layout.names
    wrong = case.whole_wrong
    right = "; ".join(f"{name} {rows_text(~wrong_rows(wrong, d))}" for d, name in enumerate(names))
    largest = (device, index, rows, got, want, error)
    cause = likely_cause(case)
    return Mismatch(subject, *largest, *counts, case.wrong_devices, cause=cause, right=right)


class EquivalenceError(AssertionError):
    """Two functions that should be equal are not; `mismatches` has every array that differs."""

    def __init__(self, mismatches: Sequence[Mismatch], compared: int) -> None:
        self.mismatches = tuple(mismatches)
        self.compared = compared
        super().__init__(self._text())

    def __reduce__(self) -> tuple[object, ...]:
        return EquivalenceError, (self.mismatches, self.compared)

    def _text(self) -> str:
        parts = [f"{len(self.mismatches)} of {self.compared} comparisons differ"]
        alone = [m for m in self.mismatches if m.subject.mesh.n_devices == 1]
        if any(m.subject.against != DIFFERENCES for m in alone):
            parts.append(
                "they differ on one device already: the functions differ, not their sharding"
            )
        parts += map(mismatch_text, self.mismatches[:_SHOWN])
        if (more := len(self.mismatches) - _SHOWN) > 0:
            parts.append(f"and {more} more: .mismatches has all")
        return "\n\n".join(parts)

    def table(self) -> Group:
        """All mismatches, a row each: array, place and both values; below it the likely causes."""
        from rich.box import SIMPLE
        from rich.console import Group
        from rich.table import Table

        table = Table(
            title=self._text().partition("\n")[0], box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0)
        )
        for head in ("", "array", "run", "device", "index", "got", "wanted"):
            table.add_column(head, overflow="fold")
        causes: dict[str, list[str]] = {}
        for number, m in enumerate(self.mismatches, start=1):
            kind = m.subject.kind if m.subject.kind != "output" else ""
            array = f"{kind} {m.subject.name}".strip()
            run = f"{m.subject.runtime} {m.subject.mesh}"
            values = _index(m.global_index), _value(m.got), _value(m.want)
            right = f"right rows: {m.right}" if m.right else ""
            why = "; first wrong: ".join(filter(None, (m.problem or m.likely_cause, m.first)))
            causes.setdefault("; ".join(filter(None, (why, right))), []).append(str(number))
            table.add_row(str(number), array, run, m.place, *values)
        return Group(table, *(f"{', '.join(rows)}: {cause}" for cause, rows in causes.items()))


def mismatch_text(m: Mismatch) -> str:
    """A mismatch in a few lines."""
    lines = [str(m.subject)]
    if m.index is None:
        lines.append(f"device {m.place}: {m.problem}")
    else:
        count = f"{m.n_wrong} of {m.n_elements} elements differ, {_devices(m)}"
        lines.append(f"{count}; the largest error is {m.error:.3g}")
        local = "" if m.index == m.global_index else f", {_index(m.index)} in its block,"
        place = f"at global index {_index(m.global_index)}{local} on device {m.place}"
        lines.append(f"{place}: {_value(m.got)} in place of {_value(m.want)}")
        if m.right:
            lines.append(f"right rows: {m.right}")
        lines.append(f"likely cause: {m.likely_cause}")
    if m.first:
        lines.append(f"first wrong: {m.first}")
    return "\n  ".join(lines)


def _devices(m: Mismatch) -> str:
    n = m.subject.mesh.n_devices
    if len(m.wrong_devices) == n:
        return "on every device" if n > 1 else "on the one device"
    return (
        f"on device{'s' * (len(m.wrong_devices) > 1)} {', '.join(map(str, m.wrong_devices))} of {n}"
    )


def _index(index: tuple[int, ...] | None) -> str:
    return "" if index is None else f"({', '.join('beyond' if i < 0 else str(i) for i in index)})"


def _value(value: complex | float | None) -> str:
    return "" if value is None else f"{value:.6g}"
