"""The benchmark of the halo exchange runs, and every way gives the same values with the bytes it claims."""

from pathlib import Path

from tests.benchmarks.helpers import quick_run


def test_a_quick_run_compares_three_ways(tmp_path: Path) -> None:
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
