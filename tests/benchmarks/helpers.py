"""A quick run of a benchmark, as a user starts it, and the results of full runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HANG_S = 3600  # a quick run takes seconds


def quick_run(name: str, folder: Path) -> tuple[int, dict[str, Any], str]:
    """`python -m benchmarks.NAME --quick` -> its exit status, its JSON file and what it printed.

    The status says whether a claim fails; claims about times may fail on a busy machine.
    """
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--output", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False)
    path = folder / f"{name}.json"
    assert path.exists(), done.stdout + done.stderr
    text = path.read_text()
    data = json.loads(text)
    assert {"date", "command", "versions", "machine"} <= set(data) and str(folder) not in text
    broken = [claim for claim in data.get("claims", ()) if claim.get("must", True) and not claim["holds"]]
    assert done.returncode == bool(broken), done.stdout + done.stderr
    return done.returncode, data, done.stdout


def recorded(name: str) -> dict[str, Any]:
    """The results of a full run, as the repository keeps them."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def failing(claims: Iterable[Any]) -> list[str]:
    """The statements of the claims that fail."""
    return [claim.statement for claim in claims if not claim.holds]


def as_recorded(claims: Iterable[Any]) -> list[dict[str, Any]]:
    """Claims as a file has them."""
    return json.loads(json.dumps([claim.to_dict() for claim in claims]))


def model_figures(data: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """The recorded steps of models, by kind of parameters, way and figure."""
    by_kind: dict[str, dict[str, dict[str, float]]] = {}
    for row in data["steps"]:
        figures = {key: row[key] for key in ("collectives", "bytes", "step_s")}
        by_kind.setdefault(row["parameters"], {})[row["way"]] = figures
    return by_kind
