"""The benchmark of the torch bridge runs, compares equal values, and every claim of it can fail."""

from pathlib import Path

import pytest

from benchmarks.torch_redistribute import claims
from tests.benchmarks.helpers import failing, quick_run


def judged(**changed):
    """The claims about rows with these figures."""
    figures = {"forward_s": 2e-5, "both_s": 1e-4, "dtensor_s": 2e-4, "DTensor": 3.0, "by hand": 1.0}
    figures |= {"extra_bytes": 64, "unpacked_bytes": 0}
    figures |= {"slower_than_copy": 1.1, "slower_than_copy_of_pieces": 1.0}
    figures |= changed
    host = {"forward_s": figures["forward_s"], "both_s": figures["both_s"]}
    memory = [
        {"move": move, "extra_bytes": figures[extra], "packed_bytes": 64, "needs_packing": packs}
        for move, extra, packs in (("packed", "extra_bytes", True), ("flat", "unpacked_bytes", False))
    ]
    packed = {"move": "one", "what": "pack", "device": "cpu", "block_bytes": 64}
    return claims.judge(
        host=[{"move": "one", "xshard": host, "DTensor": {"forward_s": figures["dtensor_s"]}}],
        ends=[{"case": "one", "bytes": 1, "faster_than": {w: figures[w] for w in ("DTensor", "by hand")}}],
        memory=memory,
        packs=[packed | {w: figures[w] for w in ("slower_than_copy", "slower_than_copy_of_pieces")}],
    )


@pytest.mark.parametrize(
    ("figures", "broken"),
    [
        ({}, []),
        ({"forward_s": 7e-5}, ["host time of a forward call, us"]),
        ({"both_s": 3e-4}, ["host time with the gradient, us"]),
        ({"dtensor_s": 3e-5}, ["DTensor's host time / ours, forward: geometric mean"]),
        ({"extra_bytes": 65}, ["bytes held beyond input and result / one packed copy"]),
        ({"unpacked_bytes": 1}, ["bytes held beyond input and result where nothing is packed"]),
        ({"slower_than_copy": 1.4}, ["time to pack / to copy as many bytes, CPU"]),
        ({"slower_than_copy_of_pieces": 1.4}, ["the same, to copy them in a quarter of a row each"]),
        ({"DTensor": 1.5}, ["run time, DTensor / ours: geometric mean"]),
        ({"DTensor": 0.9}, ["run time, DTensor / ours: geometric mean", "run time, DTensor / ours: worst"]),
        ({"by hand": 0.9}, ["run time, by hand / ours: geometric mean", "run time, by hand / ours: worst"]),
    ],
)
def test_every_claim_can_fail(figures, broken) -> None:
    assert failing(judged(**figures)) == broken


def test_a_quick_run_leaves_a_json_file(tmp_path: Path) -> None:
    _, data, _ = quick_run("torch_redistribute", tmp_path)
    assert {"claims", "host", "memory", "packs", "ends"} < set(data)
    ways = {way for row in data["ends"] for way in row["faster_than"]}
    assert ways == {"DTensor", "by hand"} and all(row["seconds"]["xshard"] > 0 for row in data["ends"])
    # These claims are exact: nothing is copied that lies in place, and a packed block is packed once.
    exact = [claim for claim in data["claims"] if claim["statement"].startswith("bytes held")]
    assert len(exact) == 2 and all(claim["holds"] for claim in exact), exact
