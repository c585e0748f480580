"""What the torch bridge must show beside DTensor, collectives by hand and a plain copy.

Decides how each number is formed from measured rows, and when a claim holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.claim import Claim, mean, worst
from xshard.formatting import format_bytes

Row = dict[str, Any]
LEAST = 0.95  # a move is at least so many times as fast as by a peer


def judge(
    host: Sequence[Row], ends: Sequence[Row], memory: Sequence[Row], packs: Sequence[Row]
) -> tuple[Claim, ...]:
    """Every claim, in order."""
    ours = [row for row in host if "xshard" in row]
    beside = [row for row in ours if "DTensor" in row]
    on_gpu = bool(packs) and packs[0]["device"] == "cuda"
    found = [
        worst(
            "host time of a forward call, us", [(r["move"], r["xshard"]["forward_s"] * 1e6) for r in ours], 60
        ),
        worst(
            "host time with the gradient, us", [(r["move"], r["xshard"]["both_s"] * 1e6) for r in ours], 200
        ),
        mean(
            "DTensor's host time / ours, forward: geometric mean",
            [(r["move"], r["DTensor"]["forward_s"] / r["xshard"]["forward_s"]) for r in beside],
            2.0,
            at_least=True,
        ),
    ]
    for way, least in (("DTensor", 2.0), ("by hand", LEAST)):
        faster = [(_label(row), row["faster_than"][way]) for row in ends if way in row["faster_than"]]
        found.append(mean(f"run time, {way} / ours: geometric mean", faster, least, at_least=True))
        found.append(worst(f"run time, {way} / ours: worst", faster, LEAST, at_least=True))
    return (
        *found,
        worst(
            "bytes held beyond input and result / one packed copy",
            [(r["move"], r["extra_bytes"] / r["packed_bytes"]) for r in memory if r["needs_packing"]],
            1.0,
        ),
        worst(
            "bytes held beyond input and result where nothing is packed",
            [(r["move"], r["extra_bytes"]) for r in memory if not r["needs_packing"]],
            0.0,
        ),
        worst(
            f"time to pack / to copy as many bytes, {'GPU' if on_gpu else 'CPU'}",
            [(_packed(row), row["slower_than_copy"]) for row in packs],
            1 / 0.85 if on_gpu else 1.3,
        ),
        worst(
            "the same, to copy them in a quarter of a row each",
            [(_packed(row), row["slower_than_copy_of_pieces"]) for row in packs],
            1 / 0.85 if on_gpu else 1.3,
        ),
    )


def _packed(row: Row) -> str:
    return f"{row['move']}, {row['what']} of {format_bytes(row['block_bytes'])}"


def _label(row: Row) -> str:
    return f"{row['case']} of {row['bytes']} bytes"
