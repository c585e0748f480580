"""Exchanges whose boxes lie side by side: what takes part in rounds, and blocks that are made of boxes."""

from __future__ import annotations

import numpy as np
import pytest

import xshard as xs
from jax_bridge.lower.exchange import tiled, tilings
from jax_bridge.lower.schedule import Schedule, rounds
from tests.jax_bridge.helpers import in_jax
from xshard.layout.layout import parse_expression
from xshard.steps import Exchange
from xshard.steps.exchange.messages import messages_to

SWAP = ("n/a d/b -> n/b d/a", "a=2,b=4", (8, 8))


def scheduled(expression: str, mesh: str, shape: tuple[int, ...]) -> tuple[xs.Plan, Schedule]:
    src, dst = parse_expression(expression)
    plan = xs.Plan(src, dst, xs.Mesh.parse(mesh), shape, "int32", (Exchange(dst),))
    ((step, before, _),) = plan.stages
    return plan, rounds(step, before)


def kept(messages) -> int:
    return sum(m.src == m.dst for m in messages)


def test_what_devices_keep_takes_part_in_rounds_that_become_no_more() -> None:
    """Half of the devices hold one of their two boxes: two rounds where every device has a box, not three."""
    _, schedule = scheduled(*SWAP)
    assert not schedule.local
    assert [len(messages) for messages in schedule.sent] == [8, 8]
    assert sum(map(kept, schedule.sent)) == 4


@pytest.mark.parametrize(
    "case",
    [("n/a d -> n d/a", "a=4", (8, 8)), ("n/a d | sum(b) -> n/b d", "a=2,b=4", (8, 4))],
    ids=["one round more", "boxes are added"],
)
def test_what_devices_keep_comes_first_elsewhere(case) -> None:
    _, schedule = scheduled(*case)
    assert schedule.local
    assert all(kept(messages) == len(messages) for messages in schedule.local)
    assert not any(map(kept, schedule.sent))


@pytest.mark.parametrize(
    "case",
    [
        SWAP,
        ("n/a d -> n d/a", "a=4", (8, 8)),
        ("n/a/b d -> n/b d/a", "a=2,b=2", (8, 8)),
        ("n/a d/b c -> n d c/(a,b)", "a=2,b=2", (4, 8, 16)),
    ],
    ids=lambda case: case[0],
)
@in_jax
def test_blocks_are_made_of_boxes(case) -> None:
    plan, schedule = scheduled(*case)
    every = schedule.every
    inputs = xs.reference.scatter(np.arange(np.prod(plan.shape)).reshape(plan.shape), plan.src, plan.mesh)
    expected = xs.reference.run(plan, inputs)
    found = tilings(every, plan.target)
    assert found is not None
    for device, tiling in enumerate(found):
        boxes = {}
        for message in messages_to(plan.source, plan.target, device):
            (r,) = [r for r, messages in enumerate(every) if message in messages]
            boxes[r] = inputs[message.src][message.src_index()]
        assert np.array_equal(tiled(tiling, boxes.__getitem__), expected[device])


@pytest.mark.parametrize(
    "case",
    [
        ("n/a d -> n d/a", "a=4", (10, 8)),  # blocks of 3 rows and of 2
        ("n/a -> n | sum(b)", "a=4,b=2", (8,)),  # half of the devices contribute nothing
        ("h/a -> h/a:halo(2,1,zero)", "a=4", (16,)),  # boxes of 4 rows, 2 and 1, and rows beyond the ends
        ("n/a d -> n d/a", "a=8", (8, 8)),  # eight orders: as many branches would be compiled
    ],
    ids=lambda case: case[0],
)
def test_what_leaves_gaps_or_has_many_orders_is_not_made_of_boxes_alone(case) -> None:
    plan, schedule = scheduled(*case)
    assert tilings(schedule.every, plan.target) is None
