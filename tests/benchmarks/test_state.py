"""The benchmark of weights: what is counted is exact."""

from __future__ import annotations

import time

import numpy as np
import pytest

from benchmarks.planner.traffic import node_elements
from benchmarks.state import floor, weights
from xshard import Mesh


def test_what_nodes_lack() -> None:
    src = weights.shardings({"**": "o/tp ..."}, Mesh(tp=4), scale=64)
    dst = weights.shardings(weights.SERVED, Mesh(tp=4), scale=64)
    found = {name: node_elements(src[name], dst[name], 2)[1] for name in src}
    # Half of the columns, of the half of the rows that the node does not have; rows stay where they are.
    assert found["layers.0.o.weight"] == 64 * 64 // 4 and found["layers.1.q.weight"] == 0
    assert found["layers.1.norm"] == 32


@pytest.mark.long
def test_memory_beyond_the_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    n_bytes = 16 * floor.MIB
    looks: list[int] = []
    own_bytes = floor._own_bytes

    def look() -> int:
        looks.append(own_bytes())
        return looks[-1]

    monkeypatch.setattr(floor, "_own_bytes", look)

    def load(beyond: int) -> np.ndarray:
        buffer = np.ones(max(beyond, 1), np.uint8)
        found = np.ones(n_bytes, np.uint8)
        n_looks = len(looks)
        while len(looks) < n_looks + 3:  # while both are there, however slow the looks are
            time.sleep(1e-3)
        del buffer
        return found

    for _ in range(
        3
    ):  # memory that is freed, and kept by the allocator for the next who asks, hides nothing
        np.ones(n_bytes, np.uint8)
    assert floor.bytes_beyond(lambda: load(0), n_bytes) < 8 * floor.MIB
    assert (
        56 * floor.MIB < floor.bytes_beyond(lambda: load(64 * floor.MIB), n_bytes) < 72 * floor.MIB
    )
