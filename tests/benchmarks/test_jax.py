"""The benchmarks of the JAX bridge run, and count what the plan says."""

from __future__ import annotations

from pathlib import Path

from benchmarks.jax_reshard import claims
from tests.benchmarks.helpers import quick_run


def test_reshards_are_compared_with_xla(tmp_path: Path) -> None:
    _, data, printed = quick_run("jax_reshard", tmp_path, forked=True)
    assert {"dispatch", "claims", "compiled", "timed"} < set(data)
    assert len(data["compiled"]) == 4 and len(data["timed"]) == 1, printed
    exact = data["claims"][0]
    assert exact["statement"] == claims.UNPLANNED and exact["holds"]


def test_shared_arrays_are_not_copied(tmp_path: Path) -> None:
    _, data, _ = quick_run("interop", tmp_path, forked=True)
    for row in data["handed"]:
        copied = row["bytes_copied"]
        assert copied["to_jax"] == copied["to_torch"] == 0
        assert copied["to_jax, copied"] == 4 * row["block_bytes"]
    for row in (*data["handed"], *data["called"]):
        assert all(seconds > 0 for seconds in row["seconds"].values())
