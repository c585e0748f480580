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
    found = [*host_times(host)]
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
        *packing(packs),
    )


def host_times(host: Sequence[Row]) -> tuple[Claim, ...]:
    """What a cached call costs the host."""
    ours = [row for row in host if "xshard" in row]
    beside = [row for row in ours if "DTensor" in row]
    forward, both = (
        [(row["move"], row["xshard"][key] * 1e6) for row in ours] for key in ("forward_s", "both_s")
    )
    ratios = [(row["move"], row["DTensor"]["forward_s"] / row["xshard"]["forward_s"]) for row in beside]
    return (
        worst("host time of a forward call, us", forward, 60),
        worst("host time with the gradient, us", both, 200),
        mean("DTensor's host time / ours, forward: geometric mean", ratios, 2.0, at_least=True),
    )


def packing(packs: Sequence[Row]) -> tuple[Claim, ...]:
    """What it takes to pack blocks, beside copies of as many bytes."""
    on_gpu = bool(packs) and packs[0]["device"] == "cuda"
    limit = 1 / 0.85 if on_gpu else 1.3
    whole, pieces = (
        [(packed_label(row), row[key]) for row in packs]
        for key in ("slower_than_copy", "slower_than_copy_of_pieces")
    )
    return (
        worst(f"time to pack / to copy as many bytes, {'GPU' if on_gpu else 'CPU'}", whole, limit),
        worst("the same, to copy them in a quarter of a row each", pieces, limit),
    )


def packed_label(row: Row) -> str:
    """What a row of packing is of."""
    return f"{row['move']}, {row['what']} of {format_bytes(row['block_bytes'])}"


def _label(row: Row) -> str:
    return f"{row['case']} of {row['bytes']} bytes"
