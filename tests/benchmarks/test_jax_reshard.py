"""The benchmark of the JAX bridge runs, writes what it says, and fails where it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
JUDGE = """
import json, sys
sys.path.append(sys.argv[1])  # last: a script there has the name of a package
sys.path.insert(0, sys.argv[1] + "/..")
from resharding import claims
found = claims.judge(**json.load(sys.stdin))
print(json.dumps([claim.to_dict() for claim in found]))
"""


def ours(**figures):
    return {
        "steps": ["all_gather"],
        "plan_bytes": 64,
        "plan_counts": {"all-gather": 1},
        "counts": {"all-gather": 1},
        "received_bytes": 64,
        "temporary_bytes": 0,
        "compile_s": 0.1,
    } | figures


def failing(**figures) -> list[str]:
    """The statements that a row with these figures breaks, beside an XLA that receives 128 bytes."""
    xla = {"received_bytes": 128, "reduced_bytes": 0, "temporary_bytes": 0, "compile_s": 0.1}
    row = {"case": "one", "source_elements": 1, "target_elements": 1, "ended_sums": 1, "xla": xla}
    plans = ("bandwidth", "h100")
    plans += tuple(f"{plan}, holding no more than XLA" for plan in plans)
    row["ours"] = {plan: ours(**figures) for plan in plans}
    rows = {
        "compiled": [row],
        "timed": [{"case": "one", "bytes": 1, "faster": 2.0}],
        "dispatch": {"ratio": 1.2},
    }
    done = subprocess.run(
        [sys.executable, "-c", JUDGE, str(BENCHMARKS)],
        input=json.dumps(rows),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [claim["statement"] for claim in json.loads(done.stdout) if not claim["holds"]]


@pytest.mark.parametrize(
    ("figures", "broken"),
    [
        ({}, []),
        ({"received_bytes": 60}, ["cases whose collectives or bytes are not the plan's"]),
        ({"counts": {"all-gather": 2}}, ["cases whose collectives or bytes are not the plan's"]),
        (
            {"temporary_bytes": 5000},
            [
                "with these bytes, cases with more temporary memory than XLA's",
                "planned for H100s and asked for no more memory than XLA's, cases with more",
            ],
        ),
        ({"compile_s": 0.2}, ["seconds to compile / XLA's: geometric mean"]),
        (
            {"received_bytes": 130, "plan_bytes": 130},
            ["received bytes / XLA's: geometric mean", "received bytes / XLA's: worst"],
        ),
    ],
)
def test_what_is_worse_fails_its_claim(figures, broken) -> None:
    assert failing(**figures) == broken


def test_a_quick_run_leaves_a_json_file(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "jax_bridge.py"), "--quick", "--output", str(tmp_path)]
    environment = {**os.environ, "PJRT_NPROC": "64"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    data = json.loads(text)
    assert {"date", "command", "versions", "machine", "dispatch", "claims", "compiled", "timed"} == set(data)
    assert str(tmp_path) not in text and len(data["compiled"]) == 13, done.stdout + done.stderr
    exact = data["claims"][0]
    assert exact["statement"] == "cases whose collectives or bytes are not the plan's" and exact["holds"]
