"""What holds for any mesh, shape and pair of layouts."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import xshard as xs
from tests import oracle
from tests.strategies import moves

# Divisible by every product of axis sizes up to 4, so that means stay whole numbers.
UNIT = 64 * 81 * 25
seeds = st.integers(0, 99)
profiles = st.sampled_from(("h100", "bandwidth"))


def plan_of(move, profile):
    mesh, shape, src, dst = move
    return xs.plan((src, dst), mesh, shape, "float64", profile=profile)


@given(moves(), profiles, seeds)
def test_a_plan_keeps_the_value_of_arbitrary_addends_within_its_bounds(move, profile, seed):
    mesh, shape, src, dst = move
    plan = plan_of(move, profile)
    blocks = oracle.random_blocks(src, mesh, shape, np.random.default_rng(seed), UNIT)
    result = xs.reference.run(plan, blocks)
    expected = oracle.gather(blocks, src, mesh, shape)
    assert np.array_equal(oracle.gather(result, dst, mesh, shape), expected)
    assert plan.bytes_received >= plan.bytes_lower_bound
    assert plan.peak_bytes >= max(plan.source.max_local_size, plan.target.max_local_size) * plan.itemsize
    assert xs.Plan.from_json(plan.to_json()) == plan


@given(moves(kinds=("linear",)), profiles, seeds)
def test_the_backward_plan_is_the_adjoint_and_its_adjoint_is_the_plan(move, profile, seed):
    """<A x, y> = <x, A* y>, exactly, with any addends in x and any contributions in y; A** x = A x."""
    mesh, shape, src, dst = move
    plan, rng = plan_of(move, profile), np.random.default_rng(seed)
    x = oracle.random_blocks(src, mesh, shape, rng, UNIT)
    y = oracle.random_blocks(dst.dual, mesh, shape, rng, UNIT)
    there = xs.reference.run(plan, x)
    back = xs.reference.run(plan.backward, y)
    assert oracle.paired(there, y, dst, mesh) == oracle.paired(x, back, src, mesh)
    twice = plan.backward.backward
    again = oracle.gather(xs.reference.run(twice, x), twice.dst, mesh, shape)
    assert np.array_equal(again, oracle.gather(there, plan.dst.dual.dual, mesh, shape))


@settings(max_examples=50)
@given(st.data(), moves(), profiles, seeds)
def test_dims_in_another_order_are_a_view(data, move, profile, seed):
    """The plan is the one in the old order, with nothing more to send; so is that of its gradient."""
    mesh, shape, src, dst = move
    turned = dst.in_order(data.draw(st.permutations(dst.names)))
    plain, plan = (xs.plan((src, end), mesh, shape, "float64", profile=profile) for end in (dst, turned))
    assert plan.bytes_received == plain.bytes_received
    assert (plan.cost, plan.peak_bytes) == (plain.cost, plain.peak_bytes)
    order, rng = [dst.names.index(name) for name in turned.names], np.random.default_rng(seed)
    x = oracle.random_blocks(src, mesh, shape, rng, UNIT)
    result = xs.reference.run(plan, x)
    for found, block in zip(result, xs.reference.run(plain, x), strict=True):
        assert np.array_equal(found, block.transpose(order))
    if not src.is_linear:
        return
    y = oracle.random_blocks(turned.dual, mesh, plan.target.shape, rng, UNIT)
    gradient = xs.reference.run(plan.backward, y)
    assert plan.backward.bytes_received == plain.backward.bytes_received
    assert oracle.paired(result, y, turned, mesh) == oracle.paired(x, gradient, src, mesh)
    assert xs.Plan.from_json(plan.to_json(), profile) == plan


@given(moves())
def test_plans_for_bandwidth_receive_no_more_than_the_direct_exchange(move):
    mesh, shape, src, dst = move
    plan = plan_of(move, "bandwidth")
    ends = [xs.Sharding(layout, mesh, shape) for layout in (src, dst)]
    start, goal = (s.with_layout(s.normal) for s in ends)
    direct = xs.steps.Exchange(goal.layout).traffic(start).received
    assert plan.bytes_received <= direct * plan.itemsize
