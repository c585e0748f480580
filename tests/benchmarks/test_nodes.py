"""The benchmark between nodes: its moves cross nodes, and every claim of it can fail. It runs by hand."""

from __future__ import annotations

import pytest

import xshard as xs
from benchmarks.nodes.__main__ import judge
from benchmarks.nodes.measures import BLIND, BY_HAND, DTENSOR, MESH, MOVES, OURS, PER_NODE
from benchmarks.planner.traffic import plan_flow
from tests.benchmarks.helpers import failing


@pytest.mark.parametrize("name", MOVES)
def test_a_plan_that_knows_nodes_sends_no_more_between_them(name: str) -> None:
    known, blind = (
        plan_flow(xs.plan(MOVES[name], MESH, (1024, 1024), profile=profile), PER_NODE).nodes.max()
        for profile in ("gloo:2", "gloo")
    )
    assert 0 < known <= blind


def judged(ours: float = 1.0, xla: float = 2.0, error: float = 0.1, **others: float) -> list[str]:
    seconds = {OURS: ours, **{way: others.get(way, 3.0) for way in (DTENSOR, BLIND, BY_HAND)}}
    row = {"mbit": 100, "case": "one", "seconds": seconds}
    jax = {"mbit": 100, "case": "one", "seconds": {OURS: 1.0, "XLA": xla}}
    return failing(judge([row], [{"mbit": 100, "error": error}], [jax]))


def test_every_claim_can_fail() -> None:
    assert judged() == []
    for broken in ({DTENSOR: 1.5}, {BLIND: 1.1}, {"xla": 0.9}, {"error": 0.3}):
        assert len(judged(**broken)) == 1, broken
    assert len(judged(**{BY_HAND: 0.9})) == 2  # faster than ours, too
    assert len(judged(ours=4.0)) == 4
