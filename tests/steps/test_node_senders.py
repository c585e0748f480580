"""Senders in the receiver's node, if nodes end in the middle of groups of devices."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xshard as xs
from tests import oracle
from tests.strategies import LENGTHS, layouts
from xshard.steps import Exchange
from xshard.steps.exchange.messages import messages_from, messages_to

NODES = xs.Profile(
    "nodes", "test", xs.Link(1e-6, 1e11), across=xs.Link(1e-5, 1e9), node_devices=4, copy_bytes_per_s=1e12
)


@st.composite
def near_moves(draw):
    """Layouts without sums, on meshes whose groups cross nodes of 2 to 5 devices."""
    mesh = xs.Mesh(x=draw(st.integers(2, 4)), y=draw(st.sampled_from((2, 3, 5))))
    shape = tuple(draw(st.lists(LENGTHS, min_size=1, max_size=2)))
    src, dst = (xs.Sharding(draw(layouts(mesh, len(shape), ("copy",))), mesh, shape) for _ in range(2))
    return src.with_layout(src.normal), dst.with_layout(dst.normal), draw(st.integers(2, 5))


def holders(src, message):
    """The devices that hold the block from which a message is taken."""
    free = [a for a in src.mesh.axes if not src.layout.role(a)]
    return src.mesh.group(message.src, free)


@given(near_moves(), st.integers(0, 99))
def test_the_values_are_those_of_any_exchange(move, seed):
    src, dst, nodes = move
    blocks = oracle.random_blocks(src.layout, src.mesh, src.shape, np.random.default_rng(seed))
    near, plain = (Exchange(dst.layout, n).run(blocks, src) for n in (nodes, None))
    assert all(np.array_equal(a, b) for a, b in zip(near, plain, strict=True))


@given(near_moves())
def test_nothing_comes_from_another_node_that_a_neighbour_holds(move):
    src, dst, nodes = move
    for device in range(src.mesh.n_devices):
        for message in messages_to(src, dst, device, nodes):
            if message.src // nodes != device // nodes:
                assert all(holder // nodes != device // nodes for holder in holders(src, message))


@given(near_moves())
def test_traffic_is_that_of_the_messages(move):
    src, dst, nodes = move
    most, copied = [Counter(), Counter()], 0
    for device in range(src.mesh.n_devices):
        own = Counter(), Counter()
        for message in messages_to(src, dst, device, nodes):
            if message.src != device and message.size:
                level = int(message.src // nodes == device // nodes)
                own[0][level] += message.size
                own[1][level] += 1
        most = [a | b for a, b in zip(most, own, strict=True)]
        copied = max(copied, math.prod(dst.local_shape(device)) + own[0].total())
    traffic = Exchange(dst.layout, nodes).traffic(src)
    assert (traffic.copied, traffic.copied - traffic.kept) == (2 * dst.max_local_size, copied)
    assert {hop.level: (hop.received, hop.messages) for hop in traffic.hops} == {
        level: (most[0][level], most[1][level]) for level in most[0]
    }


@given(near_moves())
def test_senders_and_receivers_see_the_same_messages(move):
    src, dst, nodes = move
    devices = range(src.mesh.n_devices)
    taken = Counter(m for d in devices for m in messages_to(src, dst, d, nodes))
    assert taken == Counter(m for d in devices for m in messages_from(src, dst, d, nodes))


def test_replicas_in_a_node_share_the_sending():
    """Eight devices are a node; four hold each of two blocks, and the other four want it."""
    mesh = xs.Mesh(r=5, a=2)
    src, dst = (xs.Sharding(xs.Layout.parse(text), mesh, (8,)) for text in ("n/a", "n"))
    sent = Counter(m.src for d in range(8) for m in messages_to(src, dst, d, 8) if m.src != d)
    assert sent == dict.fromkeys(range(8), 1)


def test_a_plan_on_such_a_mesh_stays_in_the_nodes_where_it_can():
    """4 x 3 devices, 4 to a node: each block has a replica nearby, though not along the same axis."""
    mesh = xs.Mesh(x=4, y=3)
    plan = xs.plan("n/y -> n/x", mesh, (12 * 1024,), profile=NODES)
    assert [str(step) for step in plan.steps] == ["exchange"]
    assert plan.steps[0].node_devices == 4
    assert xs.Plan.from_json(plan.to_json(), NODES) == plan
    (stage,) = plan.stages
    for device in range(12):
        for message in messages_to(stage.before, stage.after, device, 4):
            assert message.src // 4 == device // 4


def test_no_near_senders_for_sums():
    """Replicas must add in one order, whichever device sends."""
    mesh = xs.Mesh(a=2)
    step = Exchange(xs.Layout.parse("n"), 2)
    with pytest.raises(xs.errors.PlanError) as caught:
        step.after(xs.Sharding(xs.Layout.parse("n | sum(a)"), mesh, (8,)))
    assert (
        str(caught.value) == "node_devices is not for exchanges that end or begin a sum: 'n | sum(a)' -> 'n'"
    )


def test_nodes_that_fit_need_no_near_senders():
    for mesh in (xs.Mesh(x=4, y=2), xs.Mesh(x=2, y=8), xs.Mesh(x=3, y=2, z=2)):
        assert not NODES.splits_groups(mesh)
    assert NODES.splits_groups(xs.Mesh(x=4, y=3))
