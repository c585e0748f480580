"""What shared arrays must show, judged on measured rows: no byte is copied, more bytes take no longer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.claim import Claim, worst
from xshard.formatting import format_bytes

Row = dict[str, Any]
FLAT = 2.0  # at most so many times as long for the largest block as for the smallest


def judge(handed: Sequence[Row]) -> list[Claim]:
    """Every claim, in order. handed: rows from the smallest block to the largest."""
    found = []
    for way in ("to_jax", "to_torch"):
        copied = [(format_bytes(row["block_bytes"]), row["bytes_copied"][way]) for row in handed]
        found.append(worst(f"bytes that {way} copies", copied, 0))
        seconds = [row["seconds"][way] for row in handed]
        flat = [("largest block", seconds[-1] / seconds[0])]
        found.append(worst(f"{way}: time of the largest block / of the smallest", flat, FLAT))
    return found
