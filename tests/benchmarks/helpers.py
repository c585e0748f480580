"""A quick run of a benchmark, as a user starts it, and the results of full runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.documents.forking import script

ROOT = Path(__file__).parents[2]
HANG_S = 3600  # a quick run takes seconds


def quick_run(name: str, folder: Path, forked: bool = False) -> tuple[int, dict[str, Any], str]:
    """`python -m benchmarks.NAME --quick` -> its exit status (1: a claim fails), its JSON, and its output.

    forked: the process is a fork of the one that has imported torch, which takes as long as the run.
    """
    module = f"benchmarks.{name}"
    options = ["--quick", "--output", str(folder)]
    if forked:
        from tests.torch_bridge.helpers import apart  # imports torch

        status, printed, errors = apart(script, module, options, {})
    else:
        command: Any = [sys.executable, "-m", module, *options]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False
        )
        status = done.returncode
        printed = done.stdout
        errors = done.stderr
    path = folder / f"{name}.json"
    assert path.exists(), printed + errors
    text = path.read_text()
    data = json.loads(text)
    assert {"date", "command", "versions", "machine"} <= set(data) and str(folder) not in text
    broken = [
        claim for claim in data.get("claims", ()) if claim.get("must", True) and not claim["holds"]
    ]
    assert status == bool(broken), printed + errors
    return status, data, printed


def recorded(name: str) -> dict[str, Any]:
    """The results of a full run, as the repository keeps them."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
