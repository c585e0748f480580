"""The benchmark of the halo exchange runs, and every way comes to the same values with the bytes it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "halo.py"


def test_a_quick_run_compares_three_ways(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--quick", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "halo.json").read_text())
    assert {"date", "command", "versions", "ranks", "host_s", "cases", "overlap"} <= set(data)
    (case,) = data["cases"]
    ways = case["ways"]
    # A row at either side: forward, and once more with the gradient. A gather takes over 20 times as much.
    assert ways["xshard"]["received_bytes"] == case["planned_bytes"] == case["least_bytes"]
    assert ways["index_select + all_to_all"]["received_bytes"] == case["least_bytes"]
    assert ways["DTensor, gathered"]["received_bytes"] > 20 * case["least_bytes"]
    assert case["messages"] == 2
    assert all(seconds > 0 for way in ways.values() for seconds in way.values())
