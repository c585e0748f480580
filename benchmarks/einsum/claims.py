"""Measures of a case, as rows of the JSON file, and the claims that are judged on them.

Beside XLA, ours is planned with at most XLA's operations; beside the plain planner, which contracts three
operands at once, with at most its own.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

import xshard as xs
from benchmarks.claim import Claim, Named, Row, mean, none_of, worst
from benchmarks.einsum.cases import Case
from benchmarks.planner.timing import look_up_s, quickest

FORWARD = "forward"
BOTH = "forward+backward"
TIMED_DEVICES = 8
SLACK = 1.002  # XLA counts the additions of its collectives, too
FASTER = 1.2
LEAST = 0.9  # XLA's run time / ours: geometric mean, worst


def planned(case: Case, peers: Mapping[str, Row]) -> Row:
    """Our plans for the fewest bytes, with at most a peer's operations, beside the peers' figures."""
    limits = {
        "xla": beside_xla(case, peers["xla"]),
        "plain": _limits(case, case.share, peers["xla"]),
    }
    return {
        "case": case.name,
        "expression": case.expression,
        "mesh": str(case.mesh),
        "sizes": dict(case.sizes),
        "dtype": case.dtype,
        "flops_limits": limits,
        "ours": {
            peer: {
                objective: _facts(case.plan(objective, limit[0]), objective)
                for objective in (FORWARD, BOTH)
            }
            for peer, limit in limits.items()
        },
        "peers": dict(peers),
    }


def beside_xla(case: Case, xla: Row) -> tuple[int, int]:
    """XLA's operations, forward and backward: the first limits ours, `claims` judges both."""
    return _limits(case, case.least_flops, xla)


def _limits(case: Case, least: float, xla: Row) -> tuple[int, int]:
    """Where XLA repeats work in either pass, so may we in the backward pass."""
    forward = SLACK * max(least, xla["flops"]["forward"])
    both = len(case.contraction.operands) * forward, SLACK * xla["flops"]["backward"]
    return math.ceil(forward), math.ceil(max(both))


def _facts(plan: xs.ContractionPlan, objective: str) -> Row:
    backward = plan.backward_bytes_received if objective == BOTH else 0
    return {
        "local": plan.local,
        "received_bytes": plan.bytes_received + backward,
        "flops": plan.flops,
        "backward_flops": plan.backward_flops,
    }


def cold_s(case: Case, flops_limit: tuple[int, int]) -> dict[str, float]:
    """Seconds to plan with every cache of the package empty, by objective."""
    return {
        objective: quickest(lambda objective=objective: case.plan(objective, flops_limit[0]))
        for objective in (FORWARD, BOTH)
    }


def cached_s(cases: Sequence[Case]) -> float:
    """Seconds to get a plan again, the median of the cases."""
    profile = xs.load_profile("bandwidth")
    return look_up_s(
        ((c.expression, c.mesh), {"sizes": dict(c.sizes), "dtype": c.dtype, "profile": profile})
        for c in cases
    )


def judge(rows: Sequence[Row], cached_s: float, timed: Sequence[Row]) -> tuple[Claim, ...]:
    """Every claim, in order."""
    n = len(rows)
    claims: list[Claim] = []
    for objective, limit in ((FORWARD, 2.08), (BOTH, 2.67)):
        for peer, title in (("xla", "XLA"), ("plain", "the plain planner")):
            more = [
                row["case"]
                for row in rows
                if _ours(row, objective, peer) > _theirs(row, objective, peer)
            ]
            most = (
                1 if (objective, peer) == (BOTH, "xla") else 0
            )  # XLA contracts each gradient elsewhere
            what = f"{objective}: cases that receive more bytes than {title}"
            claims.append(Claim(what, len(more), most, False, n, tuple(more)))
        statement = f"{objective}: XLA's received bytes / ours, geometric mean"
        claims.append(mean(statement, ratios(rows, objective, "xla"), limit, at_least=True))
    repeated = [row["case"] for row in rows if _repeats(row)]
    claims.append(none_of("cases with more operations than XLA, in either pass", repeated, n))
    cold = [(row["case"], 1e3 * row["cold_s"][BOTH]) for row in rows]
    median = statistics.median(ms for _, ms in cold)
    claims += [
        Claim("processor ms of a plan, caches empty: median", median, 20.0, False, n),
        worst("processor ms of a plan, caches empty: worst", cold, 250.0),
        Claim("processor us of a plan asked for again: median", 1e6 * cached_s, 5.0, False, n),
    ]
    faster = [(row["case"], row["faster"]) for row in timed]
    return (
        *claims,
        mean("XLA's run time / ours: geometric mean", faster, FASTER, at_least=True),
        worst("XLA's run time / ours: worst", faster, LEAST, at_least=True),
    )


def ratios(rows: Sequence[Row], objective: str, peer: str) -> Named:
    """A peer's received bytes over ours, of the cases in which both receive any."""
    known = [row for row in rows if objective in row["peers"][peer].get("received_bytes", ())]
    pairs = [
        (row["case"], _theirs(row, objective, peer), _ours(row, objective, "xla")) for row in known
    ]
    return [(case, a / b) for case, a, b in pairs if a and b]


def _ours(row: Row, objective: str, beside: str) -> int:
    """Our received bytes, planned for an objective with at most a peer's operations."""
    return row["ours"][beside][objective]["received_bytes"]


def _theirs(row: Row, objective: str, peer: str) -> int:
    return row["peers"][peer]["received_bytes"][objective]


def _repeats(row: Row) -> bool:
    """Whether our plans take more operations than XLA's."""
    most = row["flops_limits"]["xla"]
    plans = row["ours"]["xla"].values()
    return any(plan["flops"] > most[0] or plan["backward_flops"] > most[1] for plan in plans)
