"""The benchmark of torch and JAX in one program runs, copies no byte where it should not, and can fail."""

from pathlib import Path

import pytest

from benchmarks.interop.__main__ import judge
from tests.benchmarks.helpers import failing, quick_run, recorded


def test_a_quick_run_counts_bytes(tmp_path: Path) -> None:
    _, data, _ = quick_run("interop", tmp_path)
    for row in data["handed"]:
        copied = row["bytes_copied"]
        assert copied["to_jax"] == copied["to_torch"] == 0
        assert copied["to_jax, copied"] == 4 * row["block_bytes"]
    for row in (*data["handed"], *data["called"]):
        assert all(seconds > 0 for seconds in row["seconds"].values())


@pytest.mark.parametrize("way", ["to_jax", "to_torch"])
def test_every_claim_can_fail(way: str) -> None:
    rows = recorded("interop")["handed"]
    assert failing(judge(rows)) == []
    rows[1]["bytes_copied"][way] = 1
    assert failing(judge(rows)) == [f"bytes that {way} copies"]
    rows = recorded("interop")["handed"]
    rows[-1]["seconds"][way] = 3 * rows[0]["seconds"][way]
    assert failing(judge(rows)) == [f"{way}: time of the largest block / of the smallest"]
