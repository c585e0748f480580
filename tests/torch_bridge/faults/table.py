"""The tables in docs/safety.md: what becomes of calls after faults. Tests compare them, column by column."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.torch_bridge.faults.operations import BARE
from tests.torch_bridge.faults.ranks import End

DOCUMENT = Path(__file__).parents[3] / "docs" / "safety.md"
LATE_S = 5.0  # beyond the timeout

# What an error says of where it was, in the words of the user, and of who was there.
_PLACE = (
    r"(step \d of \d, '.+', of|the messages between the meshes of) '.+ -> .+' failed on rank {rank}\n"
    r"  (?:one of the ranks \d(, \d)+|rank \d) has ended, .+ within \d+ s, .+\n"
    r"  (the backend says: .+\n  )?with XSHARD_DEBUG=1"
)
_DIFFERS = (
    r"ranks? \d.* did not come to '.+ -> .+' within \d+ s\n  ranks 0 to 3 of the mesh all call it"
    r"|disagree about a redistribution: .+\n  rank"
    r"|rank {rank} cannot compare '.+ -> .+' with ranks 0 to 3: no store"
)
# Which version of the stream, and which rank or program, or that nobody can be asked.
_VERSION = (
    r"(?s)version 2 did not (reach the server|arrive whole; version 1 stays)\n.*"
    r"(ranks? \d|the server|the trainer|the store of both programs)"
)


def check_column(fault: str, ends: Mapping[int, Sequence[End]], timeout_s: float) -> None:
    """Compare what has been found after a fault, by rank, with the table.

    timeout_s: by when, and `LATE_S`, all must be over.
    """
    found: dict[str, set[str]] = {}
    for rank, some in ends.items():
        bare_s = max((end.seconds for end in some if end.row == BARE), default=0.0)
        for end in some:
            if end.row == BARE:
                continue
            assert end.seconds <= max(bare_s, timeout_s) + LATE_S, (rank, end)
            check_text(rank, end)
            found.setdefault(end.row, set()).add(end.kind)
    # A rank that has no part in a message of those that are lost gets its result.
    cells = {row: ", ".join(sorted(kinds - {"right"})) or "right" for row, kinds in found.items()}
    wrong = {
        row: (cells.get(row), cell)
        for row, cell in _column(fault).items()
        if cells.get(row) != cell
    }
    assert not wrong, f"the table in {DOCUMENT.name} has another column {fault!r}: {wrong}"


def check_text(rank: int, end: End) -> None:
    """Check that an error names the plan, the step and the ranks."""
    texts = {"CollectiveError": _PLACE, "DesyncError": _DIFFERS, "LostVersionError": _VERSION}
    says = texts.get(end.kind, "").format(rank=rank)
    assert re.search(says, end.text), (rank, end)


def _column(fault: str) -> dict[str, str]:
    """A column of the table: row -> cell, without marks."""
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("|")]
    start = next(i for i, line in enumerate(lines) if f"| {fault} |" in line)
    place = _cells(lines[start]).index(fault)
    column = {}
    for line in lines[start + 2 :]:
        if len(cells := _cells(line)) != len(_cells(lines[start])):
            break
        column[cells[0]] = cells[place]
    return column


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]
