"""What is measured of a case: our plans beside the peers' figures, and the time that planning takes.

A row holds one case's numbers, as they go into the JSON; `claims` judges them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import xshard as xs
from benchmarks.einsum.cases import Case
from benchmarks.planner.timing import LOOK_UPS, clear_caches, quickest

Row = dict[str, Any]
FORWARD, BOTH = "forward", "forward+backward"
TIMED_DEVICES = 8
SLACK = 1.002  # XLA counts the additions of its collectives, too


def planned(case: Case, peers: Mapping[str, Row]) -> Row:
    """Our plans for the fewest bytes, with at most a peer's operations, beside the peers' figures."""
    limits = {"xla": beside_xla(case, peers["xla"]), "plain": _limits(case, case.share, peers["xla"])}
    return {
        "case": case.name,
        "expression": case.expression,
        "mesh": str(case.mesh),
        "sizes": dict(case.sizes),
        "dtype": case.dtype,
        "flops_limits": limits,
        "ours": {
            peer: {
                objective: _facts(case.plan(objective, limit[0]), objective) for objective in (FORWARD, BOTH)
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
        objective: quickest(lambda objective=objective: case.plan(objective, flops_limit[0]), clear_caches)
        for objective in (FORWARD, BOTH)
    }


def cached_s(cases: Sequence[Case]) -> float:
    """Seconds to get a plan again, the median of the cases."""
    return statistics.median(map(_look_up_s, cases))


def _look_up_s(case: Case) -> float:
    given = {"sizes": dict(case.sizes), "dtype": case.dtype, "profile": xs.load_profile("bandwidth")}
    xs.plan(case.expression, case.mesh, **given)
    start = time.process_time()
    for _ in range(LOOK_UPS):
        xs.plan(case.expression, case.mesh, **given)
    return (time.process_time() - start) / LOOK_UPS
