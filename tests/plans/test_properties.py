"""What holds for any mesh, shape and pair of layouts."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import xshard as xs
from tests import oracle
from tests.fuzz.chains import random_chain
from tests.fuzz.judge import judge, trip
from tests.fuzz.runtimes import on_numpy
from tests.strategies import UNIT, moves, profiles, seeds


def plan_of(move, profile):
    mesh, shape, src, dst = move
    return xs.plan((src, dst), mesh, shape, "float64", profile=profile)


@given(st.integers(0, 2**32))
def test_chains_of_moves_are_what_layouts_say(seed):
    """Values, gradients, bounds, limits, JSON and refusals, with overlaps and without: see `judge`."""
    if found := trip(random_chain(seed)):
        judge(found, *on_numpy([found]))
        for plan in found.plans:
            held = max(plan.source.max_local_size, plan.target.max_local_size)
            assert plan.peak_bytes >= held * plan.itemsize and not plan.exceeds_endpoints


@given(moves(kinds=("linear",)), profiles, seeds)
def test_the_backward_plan_is_the_adjoint(move, profile, seed):
    """<A x, y> = <x, A* y>, in whole numbers, with any addends and contributions; A** x = A x."""
    mesh, shape, src, dst = move
    plan = plan_of(move, profile)
    rng = np.random.default_rng(seed)
    oracle.assert_right(plan, rng, UNIT)
    x = oracle.random_blocks(src, mesh, shape, rng, UNIT)
    twice = plan.backward.backward
    there, again = (xs.reference.run(each, x) for each in (plan, twice))
    value = oracle.gather(there, dst.dual.dual, mesh, shape)
    assert np.array_equal(oracle.gather(again, twice.dst, mesh, shape), value)


@settings(max_examples=50)
@given(st.data(), moves(), profiles)
def test_dims_in_another_order_are_a_view(data, move, profile):
    """The plan is the one in the old order, with nothing more to send; so is that of its gradient."""
    mesh, shape, src, dst = move
    turned = dst.in_order(data.draw(st.permutations(dst.names)))
    plans = [xs.plan((src, end), mesh, shape, "float64", profile=profile) for end in (dst, turned)]
    plain, plan = ((p, p.backward) if src.is_linear else (p,) for p in plans)
    for old, new in zip(plain, plan, strict=True):
        assert new.bytes_received == old.bytes_received
    assert (plan[0].cost, plan[0].peak_bytes) == (plain[0].cost, plain[0].peak_bytes)
    assert xs.Plan.from_json(plan[0].to_json(), profile) == plan[0]


@given(moves())
def test_plans_for_bandwidth_receive_no_more_than_the_direct_exchange(move):
    mesh, shape, src, dst = move
    plan = plan_of(move, "bandwidth")
    start, goal = (
        s.with_layout(s.normal_layout)
        for s in (xs.Sharding(end, mesh, shape) for end in (src, dst))
    )
    direct = xs.steps.Exchange(goal.layout).traffic(start).received
    assert plan.bytes_received <= direct * plan.itemsize
