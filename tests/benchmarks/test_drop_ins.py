"""The benchmark of the drop-ins runs, and every way comes to the same values with the bytes it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "compat.py"


def test_a_quick_run_compares_all_ways(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--quick", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "compat.json").read_text())
    assert {"date", "command", "versions", "ranks", "rounds", "verbs"} <= set(data)
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
