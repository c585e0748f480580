"""The planner's benchmark runs, and counts bytes rightly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import xshard as xs
from benchmarks import cases
from benchmarks.planner import claims, traffic, values
from benchmarks.planner.peers import collect, gspmd
from tests.benchmarks.helpers import quick_run, recorded
from xshard.layout.layout import parse_expression
from xshard.notation.parser import Shard
from xshard.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    Permute,
    ReduceScatter,
    Slice,
    Step,
)

PEERS = ["shardy", "dtensor_greedy", "dtensor_dijkstra", "gspmd"]


def test_a_quick_run_leaves_its_files(tmp_path: Path) -> None:
    _, data, printed = quick_run("planner", tmp_path, forked=True)
    assert {path.name for path in tmp_path.iterdir()} == {"planner.json", "planner.png"}
    assert (data["quick"], data["peers"]) == (True, "recorded") and "speed" in data
    assert set(data["peer_versions"]) == set(PEERS)
    assert len(data["public"]) == 8 and len(data["scaled"]) == 6
    for row in [*data["public"], *data["scaled"]]:
        assert set(row["plans"]) == {"bandwidth", "h100", "h100_nvlink", "network"}
        assert all(plan["values_right"] for plan in row["plans"].values()), row["case"]
        assert row["cold_s"] > 0
    assert [
        name for name in PEERS if any("seconds" in row["peers"][name] for row in data["scaled"])
    ] == PEERS
    broken = [claim["name"] for claim in data["claims"] if claim["must"] and not claim["holds"]]
    assert all(f"{name} fails" in printed for name in broken)


def test_bytes_are_counted_as_they_are_priced() -> None:
    """Two countings of one thing: what the busiest device receives in every step."""
    for case in cases.load("public")[::7]:
        plan = case.plan(xs.load_profile("h100"))
        for stage, price in zip(plan.stages, plan.prices, strict=True):
            busiest = traffic.flow_of([(stage.step, stage.before)], plan.mesh, 8).devices.max()
            assert abs(busiest * plan.itemsize - price.received_bytes) < plan.itemsize, (
                case.name,
                stage.step,
            )


NODE = Shard(("node",))
GPU = Shard(("gpu",))


@pytest.mark.parametrize(
    ("before", "step", "crossing"),
    [
        (
            "n/node/gpu",
            AllGather("n", (NODE, GPU)),
            2 * 32,
        ),  # half of the array enters every node once
        ("n/node", AllGather("n", (NODE,)), 2 * 8 * 32),  # eight groups, each gets it on its own
        ("n/gpu/node", AllGather("n", (NODE,)), 2 * 8 * 4),
        ("n/gpu", AllGather("n", (GPU,)), 0),
        ("n/node/gpu", Exchange(xs.Layout.parse("n")), 2 * 8 * 32),  # boxes know no groups
        (
            "n/node/gpu",
            Permute(xs.Layout.parse("n/gpu/node")),
            2 * 4 * 4,
        ),  # half of the blocks stay
        ("n", Slice((("n", (NODE, GPU)),)), 0),
        (
            "n | sum(node,gpu)",
            ReduceScatter("n", (NODE, GPU)),
            2 * 32,
        ),  # reduced before it leaves a node
        ("n | sum(node,gpu)", AllReduce(("node", "gpu")), 2 * 64),
        ("n | sum(gpu)", AllReduce(("gpu",)), 0),
        ("n/node m", AllToAll("n", (NODE,), "m", (NODE,)), 2 * 8 * 16 * 2),
    ],
)
def test_bytes_that_cross_nodes(before: str, step: Step, crossing: int) -> None:
    """64 rows (of 2, where there is a second dim) on two nodes of eight."""
    layout = xs.Layout.parse(before)
    sharding = xs.Sharding(layout, xs.Mesh(node=2, gpu=8), (64, 2)[: len(layout.dims)])
    assert traffic.flow_of([(step, sharding)], sharding.mesh, 8).nodes.sum() == crossing


NODES = xs.Mesh(node=2, gpu=8)
SQUARE = xs.Mesh(a=2, b=2)


@pytest.mark.parametrize(
    ("mesh", "move", "bound"),
    [
        (NODES, "n/node/gpu -> n", 2 * 32),
        (NODES, "n/node/gpu -> n/gpu/node", 2 * 16),
        (NODES, "n/gpu -> n", 0),
        (NODES, "n/gpu -> n/gpu/node", 0),
        (NODES, "n/node -> n", 2 * 32),
        (NODES, "n/node/gpu -> n/gpu", 2 * 32),
        (SQUARE, "n | sum(a,b) -> n", 8 * (3 + 3)),
        (SQUARE, "n | sum(a) -> n", 8 * (1 + 3)),
        (SQUARE, "n | sum(a,b) -> n/a/b", 8 * 3),
        (SQUARE, "n | sum(a,b) -> n/a | sum(b)", 2 * 8 * 1),
        (SQUARE, "n/a | sum(b) -> n/a/b", 8 * 1),
        (
            SQUARE,
            "n/a | sum(b) -> n/b/a",
            8 * 1 + 4,
        ),  # half of the elements end where no addend of them was
        (SQUARE, "n/a -> n", 4 * 4),
    ],
)
def test_bytes_that_must_cross_nodes_or_move(mesh: xs.Mesh, move: str, bound: int) -> None:
    """64 rows on two nodes; 8 rows, also as partial sums, on four devices."""
    case = cases.Case(
        "made up", mesh, (64 if mesh == NODES else 8,), "float32", *parse_expression(move)
    )
    must = (
        traffic.node_elements(*case.shardings, 8) if mesh == NODES else traffic.total_elements(case)
    )
    assert np.sum(must) == bound


def test_wrong_values_are_seen() -> None:
    plan = xs.plan("n/a d/b -> n/b d/a", xs.Mesh(a=2, b=2), (1 << 12, 1 << 12))
    assert values.are_right(plan)
    small = values.scaled_down(plan)
    blocks, value = values._drawn(small)
    assert not values.is_value(blocks, value, small)


def test_every_recorded_plan_can_be_priced() -> None:
    profile = xs.load_profile("h100")
    priced = dict.fromkeys(PEERS, 0)
    scaled = cases.load("scaled")
    for answers, case in zip(
        collect.answers("scaled", scaled, live=False).values(), scaled, strict=True
    ):
        for name, answer in answers.items():
            if answer.plan is not None:
                priced[name] += 1
                assert answer.plan.seconds(case, profile) >= 0
    assert all(n > 100 for n in priced.values()), priced


def test_a_plan_slower_than_a_peer_by_a_hundredth_is_named() -> None:
    data = recorded("planner")
    row = next(
        row for row in data["scaled"] if any("seconds" in peer for peer in row["peers"].values())
    )
    best = min(peer["seconds"]["h100"] for peer in row["peers"].values() if "seconds" in peer)
    row["plans"]["h100"]["seconds"] = 1.01 * best
    found = claims.judge(data["public"], data["scaled"], data["speed"], quick=False)
    (worst,) = (claim for claim in found if claim.name == "seconds_worst_h100")
    assert not worst.holds and row["case"] in worst.failing[0]


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, dims", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0), dims", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=4] {'a':(2)2}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", [[0, 1], [2, 3]]),
    ],
)
def test_replica_groups_of_hlo_are_read_in_all_spellings(
    text: str, groups: list[list[int]]
) -> None:
    assert gspmd._groups(text).tolist() == groups
