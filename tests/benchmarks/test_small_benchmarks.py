"""The small benchmarks run, count the right bytes, and every claim of theirs can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

import xshard as xs
from benchmarks.interop.__main__ import judge as judge_interop
from benchmarks.models.__main__ import shown
from benchmarks.nodes.__main__ import judge as judge_nodes
from benchmarks.nodes.measures import BLIND, BY_HAND, DTENSOR, MESH, MOVES, OURS, PER_NODE
from benchmarks.planner.traffic import plan_flow
from tests.benchmarks.helpers import failing, model_figures, quick_run, recorded
from tests.torch_bridge.gpus import needs_gpu


def test_drop_ins_are_compared_with_all_ways(tmp_path: Path) -> None:
    status, data, _ = quick_run("drop_ins", tmp_path)
    assert status == 0 and {"ranks", "rounds", "verbs"} <= set(data)
    verbs = {verb["verb"]: {way["way"]: way for way in verb["ways"]} for verb in data["verbs"]}
    for ways in verbs.values():
        assert {"xshard", "transcribed"} <= set(ways)
        for way in ways.values():
            assert ways["xshard"]["both_bytes"] <= way["both_bytes"]
            assert all(way[key] > 0 for key in way if key.endswith("_s"))
    # The gradient of a gather is as many bytes as the gather; the original's is twice as many.
    gather = verbs["all_gather_grad"]
    for name, times in (("xshard", 2), ("nn.functional", 2), ("transcribed", 3)):
        assert gather[name]["both_bytes"] == times * gather["xshard"]["forward_bytes"]


def test_halos_are_compared_in_three_ways(tmp_path: Path) -> None:
    status, data, _ = quick_run("halo", tmp_path)
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
    assert all(row[way][key] > 0 for row in data["layers"] for way in ("xshard", "torch") for key in row[way])


def test_models_hold_all_their_claims() -> None:
    data = recorded("models")
    assert all(claim["holds"] for claim in data["claims"]) and shown(model_figures(data)).row_count == 4


def test_shared_arrays_are_not_copied(tmp_path: Path) -> None:
    _, data, _ = quick_run("interop", tmp_path)
    for row in data["handed"]:
        copied = row["bytes_copied"]
        assert copied["to_jax"] == copied["to_torch"] == 0
        assert copied["to_jax, copied"] == 4 * row["block_bytes"]
    for row in (*data["handed"], *data["called"]):
        assert all(seconds > 0 for seconds in row["seconds"].values())


@pytest.mark.parametrize("way", ["to_jax", "to_torch"])
def test_every_claim_about_shared_arrays_can_fail(way: str) -> None:
    rows = recorded("interop")["handed"]
    assert failing(judge_interop(rows)) == []
    rows[1]["bytes_copied"][way] = 1
    assert failing(judge_interop(rows)) == [f"bytes that {way} copies"]
    rows = recorded("interop")["handed"]
    rows[-1]["seconds"][way] = 3 * rows[0]["seconds"][way]
    assert failing(judge_interop(rows)) == [f"{way}: time of the largest block / of the smallest"]


@pytest.mark.parametrize("name", MOVES)
def test_a_plan_that_knows_nodes_sends_no_more_between_them(name: str) -> None:
    known, blind = (
        plan_flow(xs.plan(MOVES[name], MESH, (1024, 1024), profile=profile), PER_NODE).nodes.max()
        for profile in ("gloo:2", "gloo")
    )
    assert 0 < known <= blind


def between_nodes(ours: float = 1.0, xla: float = 2.0, error: float = 0.1, **others: float) -> list[str]:
    """The claims that fail for one move with these seconds."""
    seconds = {OURS: ours, **{way: others.get(way, 3.0) for way in (DTENSOR, BLIND, BY_HAND)}}
    row = {"mbit": 100, "case": "one", "seconds": seconds}
    jax = {"mbit": 100, "case": "one", "seconds": {OURS: 1.0, "XLA": xla}}
    return failing(judge_nodes([row], [{"mbit": 100, "error": error}], [jax]))


def test_every_claim_between_nodes_can_fail() -> None:
    assert between_nodes() == []
    for broken in ({DTENSOR: 1.5}, {BLIND: 1.1}, {"xla": 0.9}, {"error": 0.3}):
        assert len(between_nodes(**broken)) == 1, broken
    assert len(between_nodes(**{BY_HAND: 0.9})) == 2  # faster than ours, too
    assert len(between_nodes(ours=4.0)) == 4
