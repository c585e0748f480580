"""The benchmark of suggested steps runs, and its claims can fail."""

from __future__ import annotations

import copy
from pathlib import Path

from benchmarks.suggest.__main__ import judge
from tests.benchmarks.helpers import quick_run


def test_a_quick_run_leaves_rows_and_claims_that_can_fail(tmp_path: Path) -> None:
    _, data, printed = quick_run("suggest", tmp_path)
    rows = data["cases"]
    assert [row["model"] for row in rows] == ["8B"] and "tensor + sequence parallel" in printed
    assert all(row["seconds"] < min(row["by_hand"].values()) for row in rows)
    assert [claim["statement"] for claim in data["claims"]] == [claim.statement for claim in judge(rows)]
    for name in ("seconds", "gap", "rules", "planning_bytes"):
        worse = copy.deepcopy(rows)
        worse[0][name] = 2**40
        failing = [claim.failing[0] for claim in judge(worse) if not claim.holds]
        assert failing and all("8B 16 x 8192" in each for each in failing), name
