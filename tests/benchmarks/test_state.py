"""The benchmark of weights: what is counted is exact, its claims follow from its rows, and each can fail."""

from __future__ import annotations

import copy
import time
from typing import Any

import numpy as np
import pytest

from benchmarks.state import floor, weights
from benchmarks.state.claims import judge
from tests.benchmarks.helpers import failing, recorded
from xshard import Mesh

LOAD = {"bytes_read": 64, "bytes_needed": 64}
ROWS = (
    [
        LOAD
        | {"part": "torch", "bytes_beyond": 0}
        | {
            "seconds": {
                weights.OURS: [1.0],
                weights.READING: [0.4],
                weights.MEMCPY: [0.4],
                weights.SLICES: [1.0],
            }
        }
    ],
    [
        {"case": "one", "bound_bytes": 100, "across_bytes": {weights.OURS: 102}}
        | {"seconds": {weights.OURS: [1.0], weights.DTENSOR: [2.0], weights.STATE_DICT: [3.0]}}
    ],
)


@pytest.mark.parametrize(
    ("part", "key", "value", "broken"),
    [
        (0, ("seconds", weights.MEMCPY), [0.2], "load / (memcpy + reading)"),
        (0, ("seconds", weights.SLICES), [0.9], "load / safetensors' slices"),
        (0, ("seconds", weights.ORBAX), [7.9], "orbax / ours"),
        (0, ("seconds", weights.DCP), [1.9], "DCP / ours"),
        (0, ("seconds", weights.HF), [0.9], "DCP's reader of Hugging Face / ours"),
        (0, ("seconds", weights.TORCH), [0.9], "torch.load / ours"),
        (0, ("bytes_read",), 65, "loads that read other bytes than they need"),
        (0, ("bytes_beyond",), weights.BUCKET + 1, "memory beyond the result, in buckets"),
        (1, ("across_bytes", weights.OURS), 106, "transfer: bytes over the link / the fewest"),
        (1, ("seconds", weights.DTENSOR), [1.4], "transfer: torch's own / ours"),
        (1, ("seconds", weights.STATE_DICT), [1.4], "transfer: torch's own / ours"),
    ],
)
def test_every_claim_can_fail(part: int, key: tuple[str, ...], value: Any, broken: str) -> None:
    assert failing(judge(*ROWS)) == []
    rows = copy.deepcopy(ROWS)
    found: Any = rows[part][0]
    for each in key[:-1]:
        found = found[each]
    found[key[-1]] = value
    assert failing(judge(*rows)) == [broken]


def test_recorded_loads_read_what_they_need() -> None:
    assert all(row["bytes_read"] == row["bytes_needed"] for row in recorded("state")["loads"])


def test_what_nodes_lack() -> None:
    src = weights.shardings({"**": "o/tp ..."}, Mesh(tp=4), scale=64)
    dst = weights.shardings(weights.SERVED, Mesh(tp=4), scale=64)
    found = {name: weights.lacking(src[name], dst[name], range(2, 4)) for name in src}
    # Half of the columns, of the half of the rows that the node does not have; rows stay where they are.
    assert found["layers.0.o.weight"] == 64 * 64 // 4 and found["layers.1.q.weight"] == 0
    assert found["layers.1.norm"] == 32


@pytest.mark.long
def test_memory_beyond_the_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    n_bytes, looks, own_bytes = 16 * floor.MIB, list[int](), floor._own_bytes

    def look() -> int:
        looks.append(own_bytes())
        return looks[-1]

    monkeypatch.setattr(floor, "_own_bytes", look)

    def load(beyond: int) -> np.ndarray:
        buffer, found = np.ones(max(beyond, 1), np.uint8), np.ones(n_bytes, np.uint8)
        n_looks = len(looks)
        while len(looks) < n_looks + 3:  # while both are there, however slow the looks are
            time.sleep(1e-3)
        del buffer
        return found

    for _ in range(3):  # memory that is freed, and kept by the allocator for the next who asks, hides nothing
        np.ones(n_bytes, np.uint8)
    assert floor.bytes_beyond(lambda: load(0), n_bytes) < 8 * floor.MIB
    assert 56 * floor.MIB < floor.bytes_beyond(lambda: load(64 * floor.MIB), n_bytes) < 72 * floor.MIB
