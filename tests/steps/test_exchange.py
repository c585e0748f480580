"""Exchange, the general step: any pair of layouts in one round, without sending a device what it has."""

import itertools
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import xshard as xs
from tests import oracle
from tests.strategies import moves
from xshard import Layout
from xshard.steps import Exchange
from xshard.steps.exchange.messages import messages_from, messages_to
from xshard.steps.traffic import LinkSpan


def ends(move):
    """The two shardings of a move in normal form, which steps require."""
    mesh, shape, *layouts = move
    shardings = [xs.Sharding(layout, mesh, shape) for layout in layouts]
    return [s.with_layout(s.normal) for s in shardings]


def longest_that_changes(src, dst, mesh, level):
    """The axis that a hop names: the longest one of its level that changes."""
    return max((mesh.size(a), a) for a in level if src.role(a) != dst.role(a))[1]


@given(moves(), st.integers(0, 99))
def test_it_realises_any_pair_of_layouts(move, seed):
    src, dst = ends(move)
    blocks = oracle.random_blocks(src.layout, src.mesh, src.shape, np.random.default_rng(seed))
    result = Exchange(dst.layout).run(blocks, src)
    value = oracle.gather(blocks, src.layout, src.mesh, src.shape)
    assert np.array_equal(oracle.gather(result, dst.layout, dst.mesh, dst.shape), value)


@given(moves(kinds=("linear",)), st.data())
def test_it_receives_what_it_says(move, data):
    """In total and over each of two links: devices that differ along the slow one use it."""
    src, dst = ends(move)
    step, mesh = Exchange(dst.layout), src.mesh
    received = oracle.foreign_elements(step, src)
    assert step.traffic(src).received == max(received)
    chosen = data.draw(st.sets(st.sampled_from(mesh.axes), min_size=1))
    slow, fast = (tuple(a for a in mesh.axes if (a in chosen) is side) for side in (True, False))
    over_slow = oracle.foreign_elements(step, src, slow)
    over_fast = [a - b for a, b in zip(received, over_slow, strict=True)]
    expected = [
        (longest_that_changes(src.layout, dst.layout, mesh, level), max(n))
        for level, n in ((slow, over_slow), (fast, over_fast))
        if level and max(n)
    ]
    spans = [LinkSpan(a, mesh.size(a), level) for level, axes in enumerate((slow, fast)) for a in axes]
    traffic = step.traffic(src, tuple(spans))
    assert [(hop.axis, hop.received) for hop in traffic.hops] == expected


@given(moves(kinds=("linear",)))
def test_messages_of_the_busiest_device(move):
    """One latency per device that sends something."""
    src, dst = ends(move)
    senders = [
        sum(message.src != device for message in messages_to(src, dst, device))
        for device in range(src.mesh.n_devices)
    ]
    hops = Exchange(dst.layout).traffic(src).hops
    assert sum(hop.messages for hop in hops) == (max(senders) if hops else 0)


@given(moves())
def test_senders_and_receivers_see_the_same_messages(move):
    src, dst = ends(move)
    devices = range(src.mesh.n_devices)
    taken = Counter(message for d in devices for message in messages_to(src, dst, d))
    sent = Counter(message for d in devices for message in messages_from(src, dst, d))
    assert taken == sent
    assert all(message.size > 0 or 0 in src.shape for message in taken)


def test_a_device_takes_from_itself_what_it_holds():
    mesh = xs.Mesh(a=2, b=2)
    src, dst = (xs.Sharding(Layout.parse(text), mesh, (8,)) for text in ("n/a", "n"))
    pairs = {(m.src, m.dst) for device in range(4) for m in messages_to(src, dst, device)}
    # Devices 0, 1 hold the first half and 2, 3 the second: each takes from the device with its `b`.
    assert pairs == {(0, 0), (2, 0), (1, 1), (3, 1), (0, 2), (2, 2), (1, 3), (3, 3)}


def test_a_new_sum_has_one_contribution_of_every_element():
    mesh = xs.Mesh(a=2, b=2)
    src, dst = (xs.Sharding(Layout.parse(text), mesh, (4,)) for text in ("n/a", "n | sum(a,b)"))
    blocks = Exchange(dst.layout).run([np.ones(2)] * 4, src)
    assert [b.tolist() for b in blocks] == [[1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]]


def test_a_maximum_may_end_along_the_axis_where_a_sum_begins():
    """The first device contributes the maximum, once."""
    mesh = xs.Mesh(a=3)
    src, dst = (xs.Sharding(Layout.parse(text), mesh, (2,)) for text in ("n | max(a)", "n | sum(a)"))
    blocks = Exchange(dst.layout).run([np.array([1, 9]), np.array([5, 2]), np.array([3, 3])], src)
    assert [b.tolist() for b in blocks] == [[5, 9], [0, 0], [0, 0]]


def test_addends_are_added_in_the_order_of_their_devices():
    """All devices use one order: in floats another order gives another number."""
    mesh = xs.Mesh(a=4)
    src, dst = (xs.Sharding(Layout.parse(text), mesh, (4,)) for text in ("n | sum(a)", "n/cyclic(a)"))
    orders = [[m.src for m in messages_to(src, dst, device)] for device in range(4)]
    assert orders == [[0, 1, 2, 3]] * 4
    blocks = [np.full(4, x, np.float32) for x in (1e8, 1.0, -1e8, 1.0)]
    expected = list(itertools.accumulate(np.float32([1e8, 1.0, -1e8, 1.0])))[-1]
    assert [b.tolist() for b in Exchange(dst.layout).run(blocks, src)] == [[expected]] * 4
