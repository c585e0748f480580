"""The benchmark of contractions runs, and counts what XLA receives."""

from __future__ import annotations

import math
from pathlib import Path

from benchmarks.einsum import cases, peers
from tests.benchmarks.helpers import quick_run


def test_a_quick_run_compares_peers(tmp_path: Path) -> None:
    _, data, printed = quick_run("einsum", tmp_path, forked=True)
    assert {"peers", "cached_s", "claims", "cases", "timed"} <= set(data)
    assert len(data["cases"]) == 5 and "dtensor" in printed
    for row in data["cases"]:
        assert all(seconds > 0 for seconds in row["cold_s"].values())
        for objective, plan in row["ours"]["xla"].items():
            assert plan["received_bytes"] <= row["peers"]["xla"]["received_bytes"][objective], row[
                "case"
            ]
    forward, both = data["timed"]
    assert forward["case"].endswith("forward") and both["case"].endswith("forward+backward")
    assert all(
        row[key] > 0 for row in data["timed"] for key in ("ours_s", "xla_s", "faster", "noise")
    )


def test_peers_know_every_case() -> None:
    known = peers.recorded()
    for case in cases.load():
        assert {"xla", "plain", "dtensor"} <= set(peers.of(case, known))
        small = cases.scaled(case, 1e9)
        assert 2 * math.prod(n for _, n in small.sizes) <= 1e9
        for layout in (*case.contraction.operands, case.contraction.result):
            for dim in layout.dims:
                assert dict(small.sizes)[dim.name] % case.mesh.size(*dim.axes) == 0


def test_an_all_reduce_that_is_sliced_counts_as_a_reduce_scatter() -> None:
    from benchmarks.einsum.xla import is_sliced

    reduced = "  %sum = f32[8,4]{1,0} all-reduce(%x), replica_groups={{0,1}}"
    half = "  %{} = f32[4,4]{{1,0}} dynamic-slice(%sum, %i, %j), dynamic_slice_sizes={{4,4}}"
    assert is_sliced("\n".join([reduced, half.format("a")]), reduced)
    assert not is_sliced(
        "\n".join([reduced, half.format("a"), half.format("b")]), reduced
    )  # all is read
    assert not is_sliced("\n".join([reduced, "  ROOT %y = f32[8,4]{1,0} add(%sum, %sum)"]), reduced)
    assert not is_sliced(reduced, reduced)
