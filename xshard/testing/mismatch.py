"""One array against another: whether they agree, and the report of a mismatch as text and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from xshard.layout import Mesh, Sharding
from xshard.steps.base import Block
from xshard.testing.diagnosis.causes import Cause, likely_cause
from xshard.testing.diagnosis.evidence import Case, in_double, wrong_rows
from xshard.testing.diagnosis.orders import rows_text
from xshard.testing.question import Side

if TYPE_CHECKING:
    from rich.console import Group

_MAX_SHOWN = 8  # mismatches in the text of an error
# The source of values that a gradient on one device is compared with.
DIFFERENCES = "differences of its function along random directions"


@dataclass(frozen=True)
class Subject:
    """An array of a run, and the source of the values that it is compared with.

    Attributes:
        kind: "output", "gradient" or "parameter".
        name: Of the output, or of the argument.
        runtime: The framework.
        mesh: The mesh of the run.
        against: The source, in words: "torch on one device".
    """

    kind: str
    name: str
    runtime: Side
    mesh: Mesh
    against: str

    def __str__(self) -> str:
        array = self.name if self.kind == "output" else f"{self.kind} of {self.name}"
        return f"{array}, {self.runtime} on {self.mesh}, against {self.against}"


@dataclass(frozen=True)
class Mismatch:
    """An array that differs, with the place of its largest error.

    Attributes:
        subject: The array.
        device: Where the largest error is.
        index: In the device's block; None if shapes or dtypes differ, then `problem` says how.
        global_index: In the array; -1 for a row beyond its ends.
        got: The value there.
        want: The right value.
        error: The absolute difference of both.
        n_wrong: Wrong elements, counted over all devices.
        n_elements: Elements, counted over all devices.
        wrong_devices: Those with a wrong element.
        problem: How shapes or dtypes differ.
        cause: The likely one, if one is known.
        right: The rows of every dim that have no errors.
        first: The first redistribution of the run with a wrong meaning, if the run was asked for it.
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
        """The cause in a sentence."""
        return self.cause.text if self.cause else "none that is known"


def find_mismatch(subject: Subject, case: Case) -> Mismatch | None:
    """Compare one array's blocks with the right blocks: shapes, then dtypes, then values.

    Args:
        subject: What is compared with what, for the report.
        case: The blocks as they are, and the right ones.

    Returns:
        The first device and element that differ most, with a likely cause; None if all blocks
        agree.
    """
    # First, since blocks of other shapes have no elements to compare.
    for device, (got, want) in enumerate(case.pairs):
        problem = _difference_of_form(got, want, case.sharding)
        if problem:
            return Mismatch(subject, device, problem=problem)
    case = case.settled()
    return None if case.agrees else located(subject, case)


def _difference_of_form(got: Block, want: Block, sharding: Sharding) -> str:
    """Describe how a block's shape or dtype differs from the right one's; "" if neither does.

    Such as "shape (8, 2) in place of (4, 2), ...: the whole array, where a block was meant".
    """
    if got.shape != want.shape:
        array = f"the block of a {sharding.shape} array under '{sharding.written}'"
        hint = ""
        if got.shape == sharding.shape:
            hint = ": the whole array, where a block was meant"
        elif want.shape == sharding.shape and got.size < want.size:
            hint = ": a part of the array, where all of it was meant"
        return f"shape {got.shape} in place of {want.shape}, {array}{hint}"

    # The width of whole numbers may differ: JAX has no 64-bit ones by default.
    both_integers = got.dtype.kind in "iu" and want.dtype.kind in "iu"
    if got.dtype != want.dtype and not both_integers:
        return f"{got.dtype.name} in place of {want.dtype.name}"
    return ""


class _LargestError(NamedTuple):
    """The place of the largest error, and its size."""

    device: int
    local_index: tuple[int, ...]
    error: float


def located(subject: Subject, case: Case) -> Mismatch:
    """Describe how wrong and right blocks differ, for an error message.

    The result names the largest error with its device, its index in the block and in the global
    array, and both values; how many elements are wrong, on which devices; which rows of each dim
    are right, such as "n 0-3; c none"; and the likely cause.
    """
    largest = _find_largest_error(case)
    device = largest.device
    index = largest.local_index
    global_index = []
    right_rows = []
    for dim, name in enumerate(case.sharding.layout.names):
        global_index.append(int(case.rows(dim, device)[index[dim]]))
        right_rows.append(f"{name} {rows_text(~wrong_rows(case.whole_wrong, dim))}")
    return Mismatch(
        subject,
        device,
        index=index,
        global_index=tuple(global_index),
        got=in_double(case.got[device])[index].item(),
        want=in_double(case.want[device])[index].item(),
        error=largest.error,
        n_wrong=sum(int(mask.sum()) for mask in case.wrong),
        n_elements=sum(mask.size for mask in case.wrong),
        wrong_devices=case.wrong_devices,
        cause=likely_cause(case),
        right="; ".join(right_rows),
    )


def _find_largest_error(case: Case) -> _LargestError:
    """Find the largest error among the wrong elements of all devices; NaN is the largest of all."""
    largest = _LargestError(device=0, local_index=(), error=-np.inf)
    for device, (got, want, wrong) in enumerate(zip(case.got, case.want, case.wrong, strict=True)):
        if not wrong.size:  # a device without rows
            continue
        errors = np.nan_to_num(np.abs(in_double(got) - in_double(want)), nan=np.inf)
        errors = np.where(wrong, errors, -1)  # an element within the tolerance is no error
        index = np.unravel_index(errors.argmax(), errors.shape)
        if errors[index] > largest.error:  # of equal errors, on the first device
            largest = _LargestError(device, tuple(map(int, index)), float(errors[index]))
    return largest


class EquivalenceError(AssertionError):
    """Two functions that should be equal are not.

    Attributes:
        mismatches: Every array that differs.
        compared: The number of comparisons.
    """

    def __init__(self, mismatches: Sequence[Mismatch], compared: int) -> None:
        self.mismatches = tuple(mismatches)
        self.compared = compared
        super().__init__(self._text())

    # Exceptions are pickled with their text alone, and this one is made of other arguments.
    def __reduce__(self) -> tuple[object, ...]:
        return EquivalenceError, (self.mismatches, self.compared)

    def _text(self) -> str:
        """Write the message: a summary, the first mismatches in full, and how many more there are."""
        paragraphs = [self._summary()]
        # A mismatch with finite differences says that a function's own gradient is wrong, and not
        # that it differs from the other framework's function.
        subjects = [m.subject for m in self.mismatches if m.subject.against != DIFFERENCES]
        if any(subject.mesh.n_devices == 1 for subject in subjects):
            paragraphs.append(
                "they differ on one device already: the functions differ, not their sharding"
            )
        paragraphs += map(mismatch_text, self.mismatches[:_MAX_SHOWN])
        n_hidden = len(self.mismatches) - _MAX_SHOWN
        if n_hidden > 0:
            paragraphs.append(f"and {n_hidden} more: .mismatches has all")
        return "\n\n".join(paragraphs)

    def _summary(self) -> str:
        return f"{len(self.mismatches)} of {self.compared} comparisons differ"

    def table(self) -> Group:
        """Make a table of all mismatches to print with rich, a row each: array, place, both values.

            Console().print(error.table())

        Returns:
            The table, and below it the likely causes with the rows that have them.
        """
        # An extra package: errors are raised and printed without it.
        from rich.box import SIMPLE
        from rich.console import Group
        from rich.table import Table

        table = Table(title=self._summary(), box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
        for head in ("", "array", "run", "device", "index", "got", "wanted"):
            table.add_column(head, overflow="fold")
        # A cause is a long sentence, and often the same for many arrays: below, each stands once.
        rows_of_cause: dict[str, list[str]] = {}
        for number, mismatch in enumerate(self.mismatches, start=1):
            rows_of_cause.setdefault(_cause_in_table(mismatch), []).append(str(number))
            subject = mismatch.subject
            is_output = subject.kind == "output"
            table.add_row(
                str(number),
                subject.name if is_output else f"{subject.kind} {subject.name}",
                f"{subject.runtime} {subject.mesh}",
                mismatch.place,
                _index_text(mismatch.global_index),
                _value_text(mismatch.got),
                _value_text(mismatch.want),
            )
        lines = [f"{', '.join(rows)}: {cause}" for cause, rows in rows_of_cause.items()]
        return Group(table, *lines)


def _cause_in_table(mismatch: Mismatch) -> str:
    """Write the cause, the first wrong redistribution and the right rows, as far as they are known."""
    text = mismatch.problem if mismatch.problem else mismatch.likely_cause
    if mismatch.first:
        text += f"; first wrong: {mismatch.first}"
    if mismatch.right:
        text += f"; right rows: {mismatch.right}"
    return text


def mismatch_text(mismatch: Mismatch) -> str:
    """Write a mismatch in a few lines: how much is wrong, the largest error, and the likely cause.

    The first line names the array. A mismatch of shapes or dtypes, which has no index of an
    element, is one further line.
    """
    lines = [str(mismatch.subject)]
    if mismatch.index is None:
        lines.append(f"device {mismatch.place}: {mismatch.problem}")
    else:
        count = f"{mismatch.n_wrong} of {mismatch.n_elements} elements differ"
        lines.append(
            f"{count}, {_wrong_devices_text(mismatch)}; the largest error is {mismatch.error:.3g}"
        )
        # On an unsharded array, the index in the block is the global one, and is not repeated.
        local = ""
        if mismatch.index != mismatch.global_index:
            local = f", {_index_text(mismatch.index)} in its block,"
        place = f"at global index {_index_text(mismatch.global_index)}{local}"
        values = f"{_value_text(mismatch.got)} in place of {_value_text(mismatch.want)}"
        lines.append(f"{place} on device {mismatch.place}: {values}")
        if mismatch.right:
            lines.append(f"right rows: {mismatch.right}")
        lines.append(f"likely cause: {mismatch.likely_cause}")
    if mismatch.first:
        lines.append(f"first wrong: {mismatch.first}")
    return "\n  ".join(lines)


def _wrong_devices_text(mismatch: Mismatch) -> str:
    """Name the wrong devices: "on every device", or "on devices 0, 2 of 4"."""
    n_devices = mismatch.subject.mesh.n_devices
    wrong = mismatch.wrong_devices
    if len(wrong) == n_devices:
        return "on every device" if n_devices > 1 else "on the one device"
    noun = "device" if len(wrong) == 1 else "devices"
    return f"on {noun} {', '.join(map(str, wrong))} of {n_devices}"


def _index_text(index: tuple[int, ...] | None) -> str:
    """Write an index: "(0, 3)"; rows outside of the array as "beyond"."""
    if index is None:
        return ""
    rows = ["beyond" if row < 0 else str(row) for row in index]
    return f"({', '.join(rows)})"


def _value_text(value: complex | float | None) -> str:
    return "" if value is None else f"{value:.6g}"
