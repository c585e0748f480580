"""The benchmark of contractions runs, counts what XLA receives, and every claim of it can fail."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.einsum import cases, claims, host, peers
from tests.benchmarks.helpers import failing, quick_run

BOTH = "forward+backward"


def test_a_quick_run_compares_bytes_and_times(tmp_path: Path) -> None:
    _, data, printed = quick_run("einsum", tmp_path)
    assert {"peers", "cached_s", "claims", "cases", "timed"} <= set(data)
    assert len(data["cases"]) == 5 and "dtensor" in printed
    for row in data["cases"]:
        assert all(seconds > 0 for seconds in row["cold_s"].values())
        for objective, plan in row["ours"]["xla"].items():
            assert plan["received_bytes"] <= row["peers"]["xla"]["received_bytes"][objective], row["case"]
    forward, both = data["timed"]
    assert forward["case"].endswith("forward") and both["case"].endswith(BOTH)
    assert all(row[key] > 0 for row in data["timed"] for key in ("ours_s", "xla_s", "faster", "noise"))


def test_host_time_is_judged_by_the_worst_contraction() -> None:
    slow = host.judge([{"case": "row", "beyond_s": 16e-6}, {"case": "column", "beyond_s": 1e-6}])
    assert not slow.holds and slow.failing == ("row 16",)


def test_cases_are_even_and_peers_know_all_of_them() -> None:
    known = peers.recorded()
    for case in cases.load():
        assert {"xla", "plain", "dtensor"} <= set(peers.of(case, known))
        small = cases.scaled(case, 1e9)
        assert 2 * math.prod(n for _, n in small.sizes) <= 1e9
        for layout in (*case.contraction.operands, case.contraction.result):
            for dim in layout.dims:
                assert dict(small.sizes)[dim.name] % case.mesh.size(*dim.axes) == 0


def judged(
    ours: int = 64, backward_flops: int = 8, cold: float = 0.01, cached: float = 1e-6, faster: float = 2
):
    """The claims about two equal cases, beside an XLA and a plain planner that receive 256 bytes."""
    plan = {"received_bytes": ours, "flops": 4, "backward_flops": backward_flops}
    theirs: dict[str, Any] = {"received_bytes": {"forward": 256, BOTH: 256}}
    row = {
        "case": "one",
        "ours": {peer: dict.fromkeys(("forward", BOTH), plan) for peer in ("xla", "plain")},
        "peers": {"xla": theirs, "plain": theirs},
        "flops_limits": {"xla": (4, 8), "plain": (4, 8)},
        "cold_s": {"forward": cold, BOTH: cold},
    }
    return claims.judge([row, row], cached, [{"case": "one", "faster": faster}])


@pytest.mark.parametrize(
    ("figures", "broken"),
    [
        ({}, []),
        ({"ours": 128}, ["geometric mean"] * 2),
        ({"ours": 257}, ["XLA", "plain planner", "geometric mean"] * 2),
        ({"backward_flops": 9}, ["more operations"]),
        ({"cold": 0.1}, ["empty: median"]),
        ({"cold": 0.3}, ["empty: median", "empty: worst"]),
        ({"cached": 6e-6}, ["asked for again"]),
        ({"faster": 1.1}, ["ours: geometric mean"]),
        ({"faster": 0.8}, ["ours: geometric mean", "ours: worst"]),
    ],
)
def test_every_claim_can_fail(figures: dict[str, Any], broken: list[str]) -> None:
    statements = failing(judged(**figures))
    assert len(statements) == len(broken)
    assert all(part in each for part, each in zip(broken, statements, strict=True)), statements


def test_an_all_reduce_that_is_sliced_counts_as_a_reduce_scatter() -> None:
    from benchmarks.einsum.xla import is_sliced

    reduced = "  %sum = f32[8,4]{1,0} all-reduce(%x), replica_groups={{0,1}}"
    half = "  %{} = f32[4,4]{{1,0}} dynamic-slice(%sum, %i, %j), dynamic_slice_sizes={{4,4}}"
    assert is_sliced("\n".join([reduced, half.format("a")]), reduced)
    assert not is_sliced("\n".join([reduced, half.format("a"), half.format("b")]), reduced)  # all is read
    assert not is_sliced("\n".join([reduced, "  ROOT %y = f32[8,4]{1,0} add(%sum, %sum)"]), reduced)
    assert not is_sliced(reduced, reduced)
