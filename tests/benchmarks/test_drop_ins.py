"""The benchmark of the drop-ins runs, and every way gives the same values with the bytes it claims."""

from pathlib import Path

from tests.benchmarks.helpers import quick_run


def test_a_quick_run_compares_all_ways(tmp_path: Path) -> None:
    status, data, _ = quick_run("drop_ins", tmp_path)
    assert status == 0 and {"ranks", "rounds", "verbs"} <= set(data)
    found = {verb["verb"]: {way["way"]: way for way in verb["ways"]} for verb in data["verbs"]}
    for ways in found.values():
        assert {"xshard", "transcribed"} <= set(ways)
        for way in ways.values():
            assert ways["xshard"]["both_bytes"] <= way["both_bytes"]
            assert all(way[key] > 0 for key in way if key.endswith("_s"))
    # The gradient of a gather is as many bytes as the gather; that of the original twice as many.
    gather = found["all_gather_grad"]
    for name, times in (("xshard", 2), ("nn.functional", 2), ("transcribed", 3)):
        assert gather[name]["both_bytes"] == times * gather["xshard"]["forward_bytes"]
