"""The benchmark of the torch bridge runs, compares equal values, and fails where it should."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
JUDGE = """
import json, sys
sys.path.append(sys.argv[1])  # last: a script there has the name of a package
from executing import claims
print(json.dumps([claim.to_dict() for claim in claims.judge(**json.load(sys.stdin))]))
"""


def failing(**changed) -> list[str]:
    """The statements that rows with these figures break."""
    figures = {"forward_s": 2e-5, "both_s": 1e-4, "dtensor_s": 2e-4, "DTensor": 3.0, "by hand": 1.0}
    figures |= {
        "extra_bytes": 64,
        "unpacked_bytes": 0,
        "slower_than_copy": 1.1,
        "slower_than_copy_of_pieces": 1.0,
    }
    figures |= changed
    host = {"forward_s": figures["forward_s"], "both_s": figures["both_s"]}
    rows = {
        "host": [{"move": "one", "xshard": host, "DTensor": {"forward_s": figures["dtensor_s"]}}],
        "ends": [{"case": "one", "bytes": 1, "faster_than": {w: figures[w] for w in ("DTensor", "by hand")}}],
        "memory": [
            {
                "move": "packed",
                "extra_bytes": figures["extra_bytes"],
                "packed_bytes": 64,
                "needs_packing": True,
            },
            {
                "move": "flat",
                "extra_bytes": figures["unpacked_bytes"],
                "packed_bytes": 64,
                "needs_packing": False,
            },
        ],
        "packs": [
            {"move": "one", "what": "pack", "device": "cpu", "block_bytes": 64}
            | {name: figures[name] for name in ("slower_than_copy", "slower_than_copy_of_pieces")}
        ],
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
        ({"forward_s": 7e-5}, ["host time of a forward call, us"]),
        ({"both_s": 3e-4}, ["host time with the gradient, us"]),
        ({"extra_bytes": 65}, ["bytes held beyond input and result / one packed copy"]),
        ({"unpacked_bytes": 1}, ["bytes held beyond input and result where nothing is packed"]),
        ({"slower_than_copy": 1.4}, ["time to pack / to copy as many bytes, CPU"]),
        (
            {"slower_than_copy_of_pieces": 1.4},
            ["the same, to copy them in a quarter of a row each"],
        ),
        ({"DTensor": 1.5}, ["run time, DTensor / ours: geometric mean"]),
        ({"by hand": 0.9}, ["run time, by hand / ours: geometric mean", "run time, by hand / ours: worst"]),
    ],
)
def test_what_is_worse_fails_its_claim(figures, broken) -> None:
    assert failing(**figures) == broken


def test_a_quick_run_leaves_a_json_file(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "torch_bridge.py"), "--quick", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert list(tmp_path.iterdir()), done.stdout + done.stderr
    (path,) = tmp_path.iterdir()
    data = json.loads(path.read_text())
    assert {"date", "versions", "machine", "claims", "host", "memory", "packs", "ends"} <= set(data)
    assert str(tmp_path) not in path.read_text()
    ways = {way for row in data["ends"] for way in row["faster_than"]}
    assert ways == {"DTensor", "by hand"} and all(row["seconds"]["xshard"] > 0 for row in data["ends"])
    # What is exact: nothing is copied that lies in place, and what is packed is packed once.
    exact = [claim for claim in data["claims"] if claim["statement"].startswith("bytes held")]
    assert len(exact) == 2 and all(claim["holds"] for claim in exact), exact
