"""What the torch bridge must show beside DTensor, collectives by hand and a plain copy."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

Row = dict[str, Any]
FORWARD_S, BOTH_S = 60e-6, 200e-6


@dataclass(frozen=True)
class Claim:
    """A number and what it should be. failing: what breaks it, the worst first."""

    statement: str
    measured: float
    limit: float
    at_least: bool
    n_cases: int
    failing: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


def judge(
    host: Sequence[Row], ends: Sequence[Row], memory: Sequence[Row], packs: Sequence[Row]
) -> tuple[Claim, ...]:
    """Every claim, in order."""
    ours = [row for row in host if "xshard" in row]
    beside = [row for row in ours if "DTensor" in row]
    on_gpu = bool(packs) and packs[0]["device"] == "cuda"
    found = [
        _worst(
            "host time of a forward call, us", [(r["move"], r["xshard"]["forward_s"] * 1e6) for r in ours], 60
        ),
        _worst(
            "host time with the gradient, us", [(r["move"], r["xshard"]["both_s"] * 1e6) for r in ours], 200
        ),
        _mean(
            "DTensor's host time / ours, forward: geometric mean",
            [r["DTensor"]["forward_s"] / r["xshard"]["forward_s"] for r in beside],
            2.0,
        ),
    ]
    for way, mean in (("DTensor", 2.0), ("by hand", None)):
        faster = [(_label(row), row["faster_than"][way]) for row in ends if way in row["faster_than"]]
        if mean is not None:
            found.append(_mean(f"{way}'s run time / ours: geometric mean", [v for _, v in faster], mean))
            found.append(_worst(f"{way}'s run time / ours: worst", faster, 0.95, at_least=True))
        else:
            found.append(_mean(f"run time {way} / ours: geometric mean", [v for _, v in faster], 0.95))
            found.append(_worst(f"run time {way} / ours: worst", faster, 0.95, at_least=True))
    return (
        *found,
        _worst(
            "bytes held beyond input and result / one packed copy",
            [(r["move"], r["extra_bytes"] / r["packed_bytes"]) for r in memory if r["needs_packing"]],
            1.0,
        ),
        _worst(
            "bytes held beyond input and result where nothing is packed",
            [(r["move"], r["extra_bytes"]) for r in memory if not r["needs_packing"]],
            0.0,
        ),
        _worst(
            f"time to pack / to copy as many bytes, {'GPU' if on_gpu else 'CPU'}",
            [(f"{r['move']}, {r['what']}", r["slower_than_copy"]) for r in packs],
            1 / 0.85 if on_gpu else 1.3,
        ),
    )


def _label(row: Row) -> str:
    return f"{row['case']} of {row['bytes']} bytes"


def _mean(statement: str, values: Sequence[float], limit: float) -> Claim:
    return Claim(statement, statistics.geometric_mean(values), limit, True, len(values))


def _worst(
    statement: str, values: Sequence[tuple[str, float]], limit: float, *, at_least: bool = False
) -> Claim:
    ranked = sorted(values, key=lambda found: found[1], reverse=not at_least)
    failing = [f"{name} {v:.3g}" for name, v in ranked if (v < limit if at_least else v > limit)]
    return Claim(statement, ranked[0][1], limit, at_least, len(values), tuple(failing))
