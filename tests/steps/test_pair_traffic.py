"""Who sends whom how much adds up to what the busiest device receives."""

from __future__ import annotations

from collections import Counter

import pytest

import xshard as xs
from tests.cases import CASES, Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.name))
def test_pairs_add_up_to_what_the_busiest_device_receives(case: Case) -> None:
    for stage in case.plan().stages:
        received: Counter[int] = Counter()
        for src, dst, elements in stage.step.pair_traffic(stage.before):
            assert src != dst and elements >= 0
            received[dst] += elements
        expected = stage.step.traffic(stage.before).received
        if stage.step.kind == "all_reduce":  # shares are rounded up, for each peer here
            assert expected <= max(received.values()) <= expected + stage.before.mesh.n_devices
        else:
            assert max(received.values(), default=0) == expected, stage.step


def test_pairs_between_two_meshes_are_the_messages_of_the_transfer() -> None:
    plan = xs.plan(
        "n/a -> n/b", src_mesh=xs.Mesh(a=2), dst_mesh=xs.Mesh(b=4), dst_devices=range(4), shape=(8,)
    )
    (stage,) = plan.stages
    # Devices 0 and 1 keep rows 0-1 and hand on the others.
    assert stage.step.pair_traffic(stage.before) == ((0, 1, 2), (1, 2, 2), (1, 3, 2))
