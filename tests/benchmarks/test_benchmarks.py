"""The planner's benchmark runs, writes what it says, counts bytes rightly and fails where it should."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import xshard as xs
from xshard.notation.parser import Shard
from xshard.steps import AllGather, AllReduce, AllToAll, Exchange, Permute, ReduceScatter, Slice, Step

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PEERS = ["shardy", "dtensor_greedy", "dtensor_dijkstra", "gspmd"]


@pytest.fixture(scope="module")
def planning() -> Iterator[SimpleNamespace]:
    """The benchmark's modules; neither torch nor JAX is loaded by them."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from planning import bounds, cases, claims, measures, traffic, values
        from planning.peers import collect, gspmd

        yield SimpleNamespace(
            bounds=bounds,
            cases=cases,
            claims=claims,
            collect=collect,
            gspmd=gspmd,
            measures=measures,
            traffic=traffic,
            values=values,
        )
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_a_quick_run_leaves_a_json_file_and_a_plot(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "planner.py"), "--quick", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    files = {path.suffix: path for path in tmp_path.iterdir()}
    assert set(files) == {".json", ".png"}, done.stdout + done.stderr
    text = files[".json"].read_text()
    data = json.loads(text)
    assert {"date", "command", "peers", "quick", "versions", "machine", "speed"} < set(data)
    assert (data["quick"], data["peers"]) == (True, "recorded")
    assert str(tmp_path) not in text
    assert set(data["peer_versions"]) == set(PEERS)
    assert len(data["public"]) == 15 and len(data["scaled"]) == 12
    for row in [*data["public"], *data["scaled"]]:
        assert set(row["plans"]) == {"bandwidth", "h100", "h100_nvlink", "network"}
        assert all(plan["values_right"] for plan in row["plans"].values()), row["case"]
        assert row["cold_s"] > 0
    assert [name for name in PEERS if any("seconds" in row["peers"][name] for row in data["scaled"])] == PEERS
    broken = [claim["name"] for claim in data["claims"] if claim["must"] and not claim["holds"]]
    assert done.returncode == bool(broken), done.stdout + done.stderr
    assert all(f"{name} fails" in done.stdout for name in broken)


def test_bytes_are_counted_as_they_are_priced(planning: SimpleNamespace) -> None:
    """Two countings of one thing: what the busiest device receives in every step."""
    for case in planning.cases.load("public")[::7]:
        plan = case.plan(xs.load_profile("h100"))
        for stage, price in zip(plan.stages, plan.prices, strict=True):
            busiest = planning.traffic.step_flow(stage.step, stage.before, 8).devices.max()
            assert abs(busiest * plan.itemsize - price.received_bytes) < plan.itemsize, (
                case.name,
                stage.step,
            )


NODE, GPU = Shard(("node",)), Shard(("gpu",))


@pytest.mark.parametrize(
    ("before", "step", "crossing"),
    [
        ("n/node/gpu", AllGather("n", (NODE, GPU)), 2 * 32),  # half of the array enters every node once
        ("n/node", AllGather("n", (NODE,)), 2 * 8 * 32),  # eight groups, each gets it on its own
        ("n/gpu/node", AllGather("n", (NODE,)), 2 * 8 * 4),
        ("n/gpu", AllGather("n", (GPU,)), 0),
        ("n/node/gpu", Exchange(xs.Layout.parse("n")), 2 * 8 * 32),  # boxes know no groups
        ("n/node/gpu", Permute(xs.Layout.parse("n/gpu/node")), 2 * 4 * 4),  # half of the blocks stay
        ("n", Slice((("n", (NODE, GPU)),)), 0),
        ("n | sum(node,gpu)", ReduceScatter("n", (NODE, GPU)), 2 * 32),  # reduced before it leaves a node
        ("n | sum(node,gpu)", AllReduce(("node", "gpu")), 2 * 64),
        ("n | sum(gpu)", AllReduce(("gpu",)), 0),
        ("n/node m", AllToAll("n", (NODE,), "m", (NODE,)), 2 * 8 * 16 * 2),
    ],
)
def test_bytes_that_cross_nodes(planning: SimpleNamespace, before: str, step: Step, crossing: int) -> None:
    """64 rows (of 2, where there is a second dim) on two nodes of eight."""
    layout = xs.Layout.parse(before)
    sharding = xs.Sharding(layout, xs.Mesh(node=2, gpu=8), (64, 2)[: len(layout.dims)])
    assert planning.traffic.step_flow(step, sharding, 8).nodes.sum() == crossing


@pytest.mark.parametrize(
    ("move", "bound"),
    [
        ("n/node/gpu -> n", 2 * 32),
        ("n/node/gpu -> n/gpu/node", 2 * 16),
        ("n/gpu -> n", 0),
        ("n/gpu -> n/gpu/node", 0),
        ("n/node -> n", 2 * 32),
        ("n/node/gpu -> n/gpu", 2 * 32),
    ],
)
def test_bytes_that_must_cross_nodes(planning: SimpleNamespace, move: str, bound: int) -> None:
    src, dst = xs.parse_expression(move)
    case = planning.cases.Case("made up", xs.Mesh(node=2, gpu=8), (64,), "float32", src, dst)
    assert planning.bounds.node_elements(case, 8).sum() == bound


@pytest.mark.parametrize(
    ("move", "bound"),
    [
        ("n | sum(a,b) -> n", 8 * (3 + 3)),
        ("n | sum(a) -> n", 8 * (1 + 3)),
        ("n | sum(a,b) -> n/a/b", 8 * 3),
        ("n | sum(a,b) -> n/a | sum(b)", 2 * 8 * 1),
        ("n/a | sum(b) -> n/a/b", 8 * 1),
        ("n/a | sum(b) -> n/b/a", 8 * 1 + 4),  # half of the elements end where no addend of them was
        ("n/a -> n", 4 * 4),
    ],
)
def test_bytes_that_partial_sums_must_move(planning: SimpleNamespace, move: str, bound: int) -> None:
    src, dst = xs.parse_expression(move)
    case = planning.cases.Case("made up", xs.Mesh(a=2, b=2), (8,), "float32", src, dst)
    assert planning.bounds.total_elements(case) == bound


def test_wrong_values_are_seen(planning: SimpleNamespace) -> None:
    plan = xs.plan("n/a d/b -> n/b d/a", xs.Mesh(a=2, b=2), (1 << 12, 1 << 12))
    assert planning.values.are_right(plan)
    small = planning.values.scaled_down(plan)
    blocks, value = planning.values._drawn(small)
    assert not planning.values.is_value(blocks, value, small)


def test_every_recorded_plan_can_be_priced(planning: SimpleNamespace) -> None:
    profile = xs.load_profile("h100")
    priced = dict.fromkeys(PEERS, 0)
    cases = planning.cases.load("scaled")
    for answers, case in zip(
        planning.collect.answers("scaled", cases, live=False).values(), cases, strict=True
    ):
        for name, answer in answers.items():
            if answer.plan is not None:
                priced[name] += 1
                assert answer.plan.seconds(case, profile) >= 0
    assert all(n > 100 for n in priced.values()), priced


def test_a_plan_slower_than_a_peer_fails_its_claim(planning: SimpleNamespace) -> None:
    case = planning.cases.load("scaled")[0]
    row = planning.measures.case_row(case)
    answers = planning.collect.answers("scaled", [case], live=False)
    planning.measures.add_peers(row, case, answers[case.name])
    row["cold_s"] = 0.001
    speed = {"cached_s": 1e-6, "large_mesh_s": {"a -> b": 0.001}}

    def worst() -> object:
        found = planning.claims.judge([row], [row], speed, quick=False)
        return next(claim for claim in found if claim.name == "seconds_worst_h100")

    assert worst().holds
    row["plans"]["h100"]["seconds"] *= 1.01
    assert not worst().holds and case.name in worst().failing[0]


def test_replica_groups_of_hlo_are_read_in_all_spellings(planning: SimpleNamespace) -> None:
    groups = planning.gspmd._groups
    assert groups("replica_groups={{0,1},{2,3}}, dims").tolist() == [[0, 1], [2, 3]]
    assert groups("replica_groups=[2,2]<=[2,2]T(1,0), dims").tolist() == [[0, 2], [1, 3]]
    assert groups("replica_groups=mesh['a'=2,'b'=2] {'a'}").tolist() == [[0, 2], [1, 3]]
    assert groups("replica_groups=mesh['a'=4] {'a':(2)2}").tolist() == [[0, 1], [2, 3]]
    assert groups("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}").tolist() == [
        [0, 1],
        [2, 3],
    ]
