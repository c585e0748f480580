"""The benchmark of the JAX bridge runs, counts what the plan says, and every claim of it can fail."""

from pathlib import Path

import pytest

from benchmarks.jax_reshard import claims
from tests.benchmarks.helpers import failing, quick_run

RATIO, RUN_TIME = "received bytes / XLA's", "XLA's run time / ours"


def judged(faster=2.0, ratio=1.2, **figures):
    """The claims about one row with these figures, beside an XLA that receives 128 bytes."""
    xla = {"received_bytes": 128, "reduced_bytes": 0, "temporary_bytes": 0, "compile_s": 0.1}
    ours = {
        "steps": ["all_gather"],
        "plan_bytes": 64,
        "plan_counts": {"all-gather": 1},
        "counts": {"all-gather": 1},
        "received_bytes": 64,
        "temporary_bytes": 0,
        "compile_s": 0.1,
    } | figures
    profiles = (claims.FEWEST_BYTES, claims.DEFAULT)
    plans = (*profiles, *map(claims.within, profiles))
    row = {"case": "one", "source_elements": 1, "target_elements": 1, "ended_sums": 1, "xla": xla}
    row["ours"] = dict.fromkeys(plans, ours)
    return claims.judge([row], [{"case": "one", "bytes": 1, "faster": faster}], {"ratio": ratio})


@pytest.mark.parametrize(
    ("figures", "broken"),
    [
        ({}, []),
        ({"received_bytes": 60}, [claims.UNPLANNED]),
        ({"counts": {"all-gather": 2}}, [claims.UNPLANNED]),
        ({"temporary_bytes": 5000}, [claims.MORE_MEMORY, claims.OVER_LIMIT]),
        ({"compile_s": 0.2}, ["seconds to compile / XLA's: geometric mean"]),
        ({"received_bytes": 80, "plan_bytes": 80}, [f"{RATIO}: geometric mean"]),
        ({"received_bytes": 130, "plan_bytes": 130}, [f"{RATIO}: geometric mean", f"{RATIO}: worst"]),
        ({"faster": 1.4}, [f"{RUN_TIME}: geometric mean"]),
        ({"faster": 0.8}, [f"{RUN_TIME}: geometric mean", f"{RUN_TIME}: worst"]),
        ({"ratio": 1.6}, ["host time of a cached reshard / of a cached jit"]),
    ],
)
def test_every_claim_can_fail(figures, broken) -> None:
    assert failing(judged(**figures)) == broken


def test_a_quick_run_leaves_a_json_file(tmp_path: Path) -> None:
    _, data, printed = quick_run("jax_reshard", tmp_path)
    assert {"dispatch", "claims", "compiled", "timed"} < set(data)
    assert len(data["compiled"]) == 4 and len(data["timed"]) == 1, printed
    exact = data["claims"][0]
    assert exact["statement"] == claims.UNPLANNED and exact["holds"]
