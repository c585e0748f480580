"""What the bridge must show beside XLA's own reshard, judged on measured rows.

Decides how each number is formed and when it holds. Where XLA:CPU reduces everything and throws a part
away, XLA is credited with the reduce-scatter that it makes of it elsewhere: half the bytes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from resharding.measures import Row

# What plans are for: received bytes are compared where they are planned for, run time where it is measured,
# all else as users get it.
FEWEST_BYTES, DEFAULT, HOST = "bandwidth", "h100", "host"
Ratio = Callable[[Row], float]
# Of temporary memory: tables of indices, and 64 bytes per buffer that XLA rounds up to.
SLACK_BYTES = 4096


@dataclass(frozen=True)
class Claim:
    """A number and what it should be. failing: the cases that break it, the worst first."""

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


def judge(compiled: Sequence[Row], timed: Sequence[Row], dispatch: Row) -> tuple[Claim, ...]:
    """Every claim, in order."""
    moving = [row for row in compiled if _xla_bytes(row)]
    silent = [row for row in compiled if not _xla_bytes(row) and row["ours"][FEWEST_BYTES]["received_bytes"]]
    return (
        _share("cases whose collectives or bytes are not the plan's", compiled, _is_not_as_planned),
        _mean("received bytes / XLA's: geometric mean", moving, _bytes_ratio, 0.60),
        _worst("received bytes / XLA's: worst", [*moving, *silent], _bytes_ratio, 1.00),
        _share("cases with more temporary memory than XLA's", compiled, _is_larger),
        _mean("seconds to compile / XLA's: geometric mean", compiled, _compile_ratio, 1.5),
        _mean("XLA's run time / ours: geometric mean", timed, _faster, 1.5, at_least=True),
        _worst("XLA's run time / ours: worst", timed, _faster, 0.9, at_least=True),
        Claim("host time of a cached reshard / of a cached jit", dispatch["ratio"], 1.5, False, 1),
    )


def _xla_bytes(row: Row) -> float:
    xla = row["xla"]
    scattered = row["ended_sums"] > 1 and row["source_elements"] == row["target_elements"] * row["ended_sums"]
    return xla["received_bytes"] - (xla["reduced_bytes"] / 2 if scattered else 0)


def _bytes_ratio(row: Row) -> float:
    theirs = _xla_bytes(row)
    return row["ours"][FEWEST_BYTES]["received_bytes"] / theirs if theirs else math.inf


def _is_not_as_planned(row: Row) -> bool:
    return any(
        (ours["received_bytes"], ours["counts"]) != (ours["plan_bytes"], ours["plan_counts"])
        for ours in row["ours"].values()
    )


def _is_larger(row: Row) -> bool:
    return row["ours"][DEFAULT]["temporary_bytes"] > row["xla"]["temporary_bytes"] + SLACK_BYTES


def _compile_ratio(row: Row) -> float:
    return row["ours"][DEFAULT]["compile_s"] / row["xla"]["compile_s"]


def _faster(row: Row) -> float:
    return row["faster"]


def _mean(
    statement: str,
    rows: Sequence[Row],
    ratio: Callable[[Row], float],
    limit: float,
    *,
    at_least: bool = False,
) -> Claim:
    # A ratio of 0 (nothing received where XLA receives something) counts as one byte would.
    values = [max(ratio(row), 1e-3) for row in rows]
    return Claim(statement, statistics.geometric_mean(values), limit, at_least, len(rows))


def _worst(
    statement: str,
    rows: Sequence[Row],
    ratio: Callable[[Row], float],
    limit: float,
    *,
    at_least: bool = False,
) -> Claim:
    ranked = sorted(((ratio(row), row["case"]) for row in rows), reverse=not at_least)
    failing = [
        f"{case} {value:.2f}" for value, case in ranked if (value < limit if at_least else value > limit)
    ]
    return Claim(statement, ranked[0][0], limit, at_least, len(rows), tuple(failing))


def _share(statement: str, rows: Sequence[Row], breaks: Callable[[Row], bool]) -> Claim:
    failing = tuple(row["case"] for row in rows if breaks(row))
    return Claim(statement, len(failing), 0, False, len(rows), failing)
