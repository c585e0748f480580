"""Devices that change places in the destination's mesh, so that less moves."""

import itertools
import sys

import numpy as np
import pytest
from hypothesis import given

import xshard as xs
from tests.messages import refused
from tests.strategies import profiles, seeds
from tests.two_meshes import assert_right, crossing, crossings, planned
from xshard import Layout
from xshard.plans.transfer import Transfer
from xshard.plans.transfer_search import best_positions, relabelled


@pytest.mark.parametrize("unit", [1, 3, 2**33])
def test_the_assignment_is_the_best_of_all(unit):
    """Fewest in all; of these the fewest for the busiest, never more than unpermuted; then fewest moves."""
    rng = np.random.default_rng(0)
    bounded = 0
    for _ in range(400):
        n = int(rng.integers(1, 6))
        lacking = rng.integers(0, 5, (n, n)) * unit

        def rank(order, lacking=lacking):
            received = [int(lacking[device, place]) for place, device in enumerate(order)]
            return (
                sum(received),
                max(received),
                sum(device != place for place, device in enumerate(order)),
            )

        ranks = [rank(order) for order in itertools.permutations(range(n))]
        allowed = [r for r in ranks if r[1] <= rank(range(n))[1]]
        found = best_positions(lacking).tolist()
        assert sorted(found) == list(range(n))
        assert rank(found) == min(allowed)
        bounded += min(allowed) != min(ranks)
    assert bounded  # some would be better in all and worse for the busiest


def test_a_new_sum_asks_for_one_contribution():
    """Device 1 holds two of three rows: it is the better first, where alone they are needed."""
    source, target = (
        xs.Sharding(Layout.parse(text), xs.Mesh(x=2), (3,)) for text in ("n/x", "n | sum(x)")
    )
    assert relabelled(source, target, (1, 0), (0, 1)) == (1, 0)


@given(crossings())
def test_what_is_assigned_is_what_devices_lack(move):
    """Without partial sums the permuted transfer receives exactly what the assignment says."""
    meshes = move["src_mesh"], move["dst_mesh"]
    if meshes[0].n_devices != meshes[1].n_devices:
        return
    ends = [
        xs.Sharding(x, m, move["shape"]) for x, m in zip(move["expression"], meshes, strict=True)
    ]
    source, target = (s.with_layout(s.normal_layout) for s in ends)
    if not source.layout.tagged("sum"):
        devices = tuple(range(meshes[0].n_devices))
        machine = xs.load_profile("bandwidth")
        plain, moved = (
            Transfer(source, target, devices, takers, machine)
            for takers in (devices, relabelled(source, target, devices, devices))
        )
        totals = [sum(m.size for m in t.messages if not t.is_kept(m)) for t in (plain, moved)]
        assert totals[1] <= totals[0]
        assert moved.received <= plain.received


@given(crossings(), profiles, seeds)
def test_relabelling_never_receives_more(move, profile, seed):
    if move["src_mesh"].n_devices != move["dst_mesh"].n_devices:
        return
    move = {**move, "dst_devices": None}
    plain = planned(move, profile=profile)
    plan = planned(move, profile=profile, relabel=True)
    assert sorted(plan.dst_devices) == sorted(plan.src_devices)
    assert plan.bytes_received <= plain.bytes_received
    assert plan.cost <= plain.cost * (1 + 1e-9)
    assert_right(plan, move, np.random.default_rng(seed))


def test_relabelling_may_leave_nothing_to_move():
    options = ("n/x/y", "n/y/x", "x=2,y=3", "x=2,y=3", (12,))
    plain = crossing(*options)
    plan = crossing(*options, relabel=True)
    assert plain.bytes_received == 2 * 8
    assert (plan.bytes_received, plan.cost, *map(str, plan.steps)) == (0, 0, "transfer, 0 messages")
    assert plan.dst_devices == (0, 2, 4, 1, 3, 5)


def test_devices_that_gain_nothing_stay():
    plan = crossing("n/x d", "n d/y", "x=4", "y=4", (8, 8), relabel=True)
    assert plan.dst_devices == plan.src_devices == (0, 1, 2, 3)
    assert [str(step) for step in plan.steps] == ["all_to_all n/x_y -> d/x_y"]


def test_relabelling_without_scipy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    message = "relabel=True needs scipy\n  pip install scipy, or xshard with its extra 'relabel'"
    with refused(xs.errors.PlanError, message):
        crossing("n/x/y", "n/y/x", "x=2,y=3", "x=2,y=3", (18,), relabel=True)
