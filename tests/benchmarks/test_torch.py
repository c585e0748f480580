"""The benchmarks of the torch bridge run, compare equal values, and count the right bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

import xshard as xs
from benchmarks.inductor.__main__ import table
from benchmarks.nodes.measures import MESH, MOVES, PER_NODE
from benchmarks.planner.traffic import plan_flow
from tests.benchmarks.helpers import ROOT, quick_run, recorded
from tests.torch_bridge.gpus import needs_gpu


def test_redistributions_are_compared_with_both_ways(tmp_path: Path) -> None:
    _, data, _ = quick_run("torch_redistribute", tmp_path, forked=True)
    assert {"claims", "host", "memory", "packs", "ends"} < set(data)
    ways = {way for row in data["ends"] for way in row["faster_than"]}
    assert ways == {"DTensor", "by hand"} and all(
        row["seconds"]["xshard"] > 0 for row in data["ends"]
    )
    # These claims are exact: nothing is copied that lies in place, and a packed block is packed once.
    exact = [claim for claim in data["claims"] if claim["statement"].startswith("bytes held")]
    assert len(exact) == 2 and all(claim["holds"] for claim in exact), exact


def test_drop_ins_are_compared_with_all_ways(tmp_path: Path) -> None:
    status, data, _ = quick_run("drop_ins", tmp_path, forked=True)
    assert status == 0 and {"ranks", "rounds", "verbs"} <= set(data)
    verbs = {verb["verb"]: {way["way"]: way for way in verb["ways"]} for verb in data["verbs"]}
    # Ranks on gloo first tell each other their rows, which may differ.
    told = {verb: 3 * 8 for verb in verbs if verb.startswith("all_gather_grad")}
    for verb, ways in verbs.items():
        assert {"xshard", "transcribed"} <= set(ways)
        for way in ways.values():
            assert ways["xshard"]["both_bytes"] <= way["both_bytes"] + told.get(verb, 0)
            assert all(way[key] > 0 for key in way if key.endswith("_s"))
    # The gradient of a gather is as many bytes as the gather; the original's is twice as many.
    gather = verbs["all_gather_grad"]
    for name, times, more in (("xshard", 2, 24), ("nn.functional", 2, 0), ("transcribed", 3, 0)):
        assert gather[name]["both_bytes"] == times * gather["nn.functional"]["forward_bytes"] + more


def test_halos_are_compared_in_three_ways(tmp_path: Path) -> None:
    status, data, _ = quick_run("halo", tmp_path, forked=True)
    assert status == 0 and {"ranks", "host_s", "cases"} <= set(data)
    (case,) = data["cases"]
    ways = case["ways"]
    # One row on either side: forward, and once more with the gradient. A gather takes over 20 times as much.
    assert ways["xshard"]["received_bytes"] == case["planned_bytes"] == case["least_bytes"]
    assert ways["index_select + all_to_all"]["received_bytes"] == case["least_bytes"]
    assert ways["DTensor, gathered"]["received_bytes"] > 20 * case["least_bytes"]
    assert case["messages"] == 2
    assert all(seconds > 0 for way in ways.values() for seconds in way.values())


@needs_gpu
def test_all_is_measured_on_a_gpu(tmp_path: Path) -> None:
    _, data, _ = quick_run("gpu", tmp_path)
    assert {"rates", "copies", "launches", "packs", "layers", "host", "products"} <= set(data)


def test_the_recorded_gpu_has_times_of_all_layers() -> None:
    data = recorded("gpu")
    assert data["gpu"] and {row["device"] for row in data["packs"]} == {"cuda"}
    assert all(
        row[way][key] > 0
        for row in data["layers"]
        for way in ("xshard", "torch")
        for key in row[way]
    )


@pytest.mark.parametrize("name", MOVES)
def test_a_plan_that_knows_nodes_sends_no_more_between_them(name: str) -> None:
    known, blind = (
        plan_flow(xs.plan(MOVES[name], MESH, (1024, 1024), profile=profile), PER_NODE).nodes.max()
        for profile in ("gloo:2", "gloo")
    )
    assert 0 < known <= blind


def test_recorded_passes_find_the_collectives_of_compiled_steps() -> None:
    rows = recorded("inductor")["rows"]
    page = (ROOT / "docs" / "torch.md").read_text()
    assert "\n".join(table(rows)) in page
    of = {(row["program"], row["passes"], row["graph"]): row for row in rows}
    fused = of["tensor and sequence parallel", "micro-pipelined products", "forward"]
    assert fused["fused"] == 4 and fused["gathers"] == fused["reduce-scatters"] == 0
    for graph in ("forward", "backward"):
        plain = of["ZeRO-3", "none", graph]
        hidden = of["ZeRO-3", "reordering", graph]
        joined = of["ZeRO-3", "buckets", graph]
        assert plain["beside products"] == 0 < hidden["beside products"]
        assert joined["gathers"] + joined["reduce-scatters"] == 1
    assert of["ZeRO-3", "none", "backward"]["gathers"] == 0  # what is gathered is kept
