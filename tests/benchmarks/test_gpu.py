"""The benchmark of one GPU: what it recorded, and, where there is a GPU, a quick run."""

from pathlib import Path

from benchmarks.torch_redistribute import claims
from tests.benchmarks.helpers import as_recorded, quick_run, recorded
from tests.torch_bridge.gpus import needs_gpu


def test_the_recorded_claims_are_those_of_the_recorded_rows() -> None:
    data = recorded("gpu")
    assert data["gpu"] and {row["device"] for row in data["packs"]} == {"cuda"}
    judged = (*claims.host_times(data["host"]), *claims.packing(data["packs"]))
    assert data["claims"] == as_recorded(judged)
    assert all(row[way][key] > 0 for row in data["layers"] for way in ("xshard", "torch") for key in row[way])


@needs_gpu
def test_a_quick_run(tmp_path: Path) -> None:
    _, data, _ = quick_run("gpu", tmp_path)
    assert {"rates", "copies", "launches", "packs", "layers", "host", "products"} <= set(data)
