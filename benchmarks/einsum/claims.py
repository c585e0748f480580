"""What planned contractions must show, judged on measured rows.

Decides how each number is formed and when a claim holds. Beside XLA, ours is planned with at most XLA's
operations; beside the plain planner, which contracts three operands at once, with at most its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.claim import Claim, Named, mean, none_of, worst
from benchmarks.einsum.measures import BOTH, FORWARD

Row = dict[str, Any]
FASTER, LEAST = 1.2, 0.9  # XLA's run time / ours: geometric mean, worst


def judge(rows: Sequence[Row], cached_s: float, timed: Sequence[Row]) -> tuple[Claim, ...]:
    """Every claim, in order."""
    n, found = len(rows), []
    for objective, limit in ((FORWARD, 2.08), (BOTH, 2.67)):
        for peer, title in (("xla", "XLA"), ("plain", "the plain planner")):
            more = [
                row["case"] for row in rows if _ours(row, objective, peer) > _theirs(row, objective, peer)
            ]
            most = 1 if (objective, peer) == (BOTH, "xla") else 0  # XLA contracts each gradient elsewhere
            what = f"{objective}: cases that receive more bytes than {title}"
            found.append(Claim(what, len(more), most, False, n, tuple(more)))
        statement = f"{objective}: XLA's received bytes / ours, geometric mean"
        found.append(mean(statement, ratios(rows, objective, "xla"), limit, at_least=True))
    repeated = [row["case"] for row in rows if _repeats(row)]
    found.append(none_of("cases with more operations than XLA, in either pass", repeated, n))
    cold = [(row["case"], 1e3 * row["cold_s"][BOTH]) for row in rows]
    median = statistics.median(ms for _, ms in cold)
    found += [
        Claim("processor ms of a plan, caches empty: median", median, 20.0, False, n),
        worst("processor ms of a plan, caches empty: worst", cold, 250.0),
        Claim("processor us of a plan asked for again: median", 1e6 * cached_s, 5.0, False, n),
    ]
    faster = [(row["case"], row["faster"]) for row in timed]
    return (
        *found,
        mean("XLA's run time / ours: geometric mean", faster, FASTER, at_least=True),
        worst("XLA's run time / ours: worst", faster, LEAST, at_least=True),
    )


def ratios(rows: Sequence[Row], objective: str, peer: str) -> Named:
    """A peer's received bytes over ours, of the cases in which both receive any."""
    known = [row for row in rows if objective in row["peers"][peer].get("received_bytes", ())]
    pairs = [(row["case"], _theirs(row, objective, peer), _ours(row, objective, "xla")) for row in known]
    return [(case, a / b) for case, a, b in pairs if a and b]


def _ours(row: Row, objective: str, beside: str) -> int:
    """Our received bytes, planned for an objective with at most a peer's operations."""
    return row["ours"][beside][objective]["received_bytes"]


def _theirs(row: Row, objective: str, peer: str) -> int:
    return row["peers"][peer]["received_bytes"][objective]


def _repeats(row: Row) -> bool:
    """Whether our plans take more operations than XLA's."""
    most, plans = row["flops_limits"]["xla"], row["ours"]["xla"].values()
    return any(plan["flops"] > most[0] or plan["backward_flops"] > most[1] for plan in plans)
