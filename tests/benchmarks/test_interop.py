"""The benchmark of torch and JAX in one program runs, and no byte is copied where none should be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "interop.py"


def test_a_quick_run_counts_bytes(tmp_path: Path) -> None:
    """Times are not looked at: a claim about them may fail on a busy machine."""
    command = [sys.executable, str(BENCHMARK), "--quick", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    data = json.loads((tmp_path / "interop.json").read_text())
    assert {"date", "command", "versions", "machine", "claims", "handed", "called"} <= set(data)
    for row in data["handed"]:
        copied = row["bytes_copied"]
        assert copied["to_jax"] == copied["to_torch"] == 0
        assert copied["to_jax, copied"] == 4 * row["block_bytes"]
    for row in (*data["handed"], *data["called"]):
        assert all(seconds > 0 for seconds in row["seconds"].values())
