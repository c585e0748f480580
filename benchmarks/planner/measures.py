"""The rows of cases: our plans on every machine, the bounds, and the peers' plans."""

import math
from dataclasses import replace

import xshard as xs
from benchmarks.cases import Case
from benchmarks.claim import Row
from benchmarks.planner import values
from benchmarks.planner.peers.base import NODE_DEVICES, PeerPlan
from benchmarks.planner.peers.collect import Answer
from benchmarks.planner.traffic import node_elements, plan_flow, total_elements
from xshard import Link, dtypes

UNLIMITED = 1e15  # bytes per second


def profiles() -> dict[str, xs.Profile]:
    """The machines: bytes alone; nodes of eight H100; one node of any number of H100; and nodes of eight in
    which only bytes that cross nodes take time."""
    h100 = xs.load_profile("h100")
    return {
        "bandwidth": xs.load_profile("bandwidth"),
        "h100": h100,
        "h100_nvlink": replace(h100, name="h100_nvlink", across=None, node_devices=None),
        "network": replace(
            h100,
            name="network",
            launch_s=(("other", 0.0),),
            copy_bytes_per_s=math.inf,
            default=Link(0.0, UNLIMITED),
        ),
    }


def case_row(case: Case) -> Row:
    """Our plans for a case."""
    itemsize = dtypes.itemsize(case.dtype)
    plans = {name: case.plan(profile) for name, profile in profiles().items()}
    row = {
        "case": case.name,
        "mesh": str(case.mesh),
        "shape": list(case.shape),
        "dtype": case.dtype,
        "move": case.expression,
        "even": case.is_even,
        "partial": case.is_partial,
        "plans": {name: _plan_facts(plan) for name, plan in plans.items()},
    }
    if case.is_partial:
        row["total_bound_bytes"] = total_elements(case) * itemsize
    elif case.mesh.n_devices > NODE_DEVICES:  # bytes that cross nodes, summed over the nodes
        crossing = {
            name: plan_flow(plans[name], NODE_DEVICES).nodes.sum() for name in ("h100", "network")
        }
        row["nodes"] = {
            "bound_bytes": int(node_elements(*case.shardings, NODE_DEVICES).sum()) * itemsize,
            "crossing_bytes": {name: float(n) * itemsize for name, n in crossing.items()},
        }
    return row


def _plan_facts(plan: xs.Plan) -> Row:
    at_rest = max(plan.source.max_local_size, plan.target.max_local_size)
    largest = max([at_rest, *(stage.after.max_local_size for stage in plan.stages)])
    return {
        "steps": [str(step) for step in plan.steps],
        "seconds": plan.cost,
        "received_bytes": plan.bytes_received,
        "bound_bytes": plan.bytes_lower_bound,
        "total_bytes": float(plan_flow(plan, NODE_DEVICES).devices.sum()) * plan.itemsize,
        "peak_over_ends": largest / at_rest if at_rest else 1.0,
        "values_right": values.are_right(plan),
    }


def peer_facts(case: Case, answer: Answer) -> Row:
    """A peer's plan for a case."""
    facts: Row = {"source": answer.source, "received_bytes": answer.received_bytes(case)}
    if answer.reason:
        facts["reason"] = answer.reason
    if answer.plan is None:
        return facts
    facts["plan_s"] = answer.plan.plan_s
    facts["seconds"] = {name: answer.plan.seconds(case, p) for name, p in profiles().items()}
    if isinstance(answer.plan, PeerPlan):
        plan = answer.plan.plan(case, xs.load_profile("h100"))
        flow = plan_flow(plan, NODE_DEVICES)
        facts["steps"] = [str(step) for step in plan.steps]
        facts["crossing_bytes"] = float(flow.nodes.sum()) * plan.itemsize
        facts["total_bytes"] = float(flow.devices.sum()) * plan.itemsize
    else:
        facts["steps"] = [f"{c.kind} of {c.devices}" for c in answer.plan.collectives]
    return facts
