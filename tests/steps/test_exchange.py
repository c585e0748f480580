"""Exchange, the general step: any pair of layouts in one round, without sending a device what it has."""

import itertools
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import xshard as xs
from tests import oracle
from tests.messages import refused
from tests.strategies import LENGTHS, layouts, moves, seeds
from xshard.steps import Exchange
from xshard.steps.exchange.messages import messages_from, messages_to

NODES = xs.Profile(
    "nodes", "test", xs.Link(1e-6, 1e11), xs.Link(1e-5, 1e9), 4, copy_bytes_per_s=1e12
)


def ends(move):
    """The two shardings of a move in normal form, which steps require."""
    mesh, shape, *layouts = move
    shardings = [xs.Sharding(layout, mesh, shape) for layout in layouts]
    return [s.with_layout(s.normal_layout) for s in shardings]


@st.composite
def near_moves(draw):
    """Layouts without sums, on meshes whose groups cross nodes of 2 to 5 devices."""
    mesh = xs.Mesh(x=draw(st.integers(2, 4)), y=draw(st.sampled_from((2, 3, 5))))
    shape = tuple(draw(st.lists(LENGTHS, min_size=1, max_size=2)))
    src, dst = (
        xs.Sharding(draw(layouts(mesh, len(shape), ("copy",))), mesh, shape) for _ in range(2)
    )
    return (
        src.with_layout(src.normal_layout),
        dst.with_layout(dst.normal_layout),
        draw(st.integers(2, 5)),
    )


MOVES = moves().map(lambda move: (*ends(move), None)) | near_moves()


@given(MOVES, seeds)
def test_it_realises_any_pair_of_layouts(move, seed):
    src, dst, nodes = move
    blocks = oracle.random_blocks(src.layout, src.mesh, src.shape, np.random.default_rng(seed))
    result = Exchange(dst.layout, nodes).run(blocks, src)
    value = oracle.gather(blocks, src.layout, src.mesh, src.shape)
    assert np.array_equal(oracle.gather(result, dst.layout, dst.mesh, dst.shape), value)


@given(MOVES)
def test_senders_see_the_messages_of_receivers(move):
    src, dst, nodes = move
    devices = range(src.mesh.n_devices)
    taken = Counter(message for d in devices for message in messages_to(src, dst, d, nodes))
    assert taken == Counter(
        message for d in devices for message in messages_from(src, dst, d, nodes)
    )
    assert all(message.size > 0 or 0 in src.shape for message in taken)


def test_a_device_takes_from_itself_what_it_holds():
    mesh = xs.Mesh(a=2, b=2)
    src, dst = (xs.Sharding(text, mesh, (8,)) for text in ("n/a", "n"))
    pairs = {(m.src, m.dst) for device in range(4) for m in messages_to(src, dst, device)}
    # Devices 0, 1 hold the first half and 2, 3 the second: each takes from the device with its `b`.
    assert pairs == {(0, 0), (2, 0), (1, 1), (3, 1), (0, 2), (2, 2), (1, 3), (3, 3)}


def test_a_new_sum_has_one_contribution_of_every_element():
    mesh = xs.Mesh(a=2, b=2)
    src, dst = (xs.Sharding(text, mesh, (4,)) for text in ("n/a", "n | sum(a,b)"))
    blocks = Exchange(dst.layout).run([np.ones(2)] * 4, src)
    assert [b.tolist() for b in blocks] == [[1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]]


def test_a_maximum_may_end_along_the_axis_where_a_sum_begins():
    """The first device contributes the maximum, once."""
    mesh = xs.Mesh(a=3)
    src, dst = (xs.Sharding(text, mesh, (2,)) for text in ("n | max(a)", "n | sum(a)"))
    blocks = Exchange(dst.layout).run([np.array([1, 9]), np.array([5, 2]), np.array([3, 3])], src)
    assert [b.tolist() for b in blocks] == [[5, 9], [0, 0], [0, 0]]


def test_addends_are_added_in_the_order_of_their_devices():
    """All devices use one order: in floats another order gives another number."""
    mesh = xs.Mesh(a=4)
    src, dst = (xs.Sharding(text, mesh, (4,)) for text in ("n | sum(a)", "n/cyclic(a)"))
    orders = [[m.src for m in messages_to(src, dst, device)] for device in range(4)]
    assert orders == [[0, 1, 2, 3]] * 4
    blocks = [np.full(4, x, np.float32) for x in (1e8, 1.0, -1e8, 1.0)]
    *_, expected = itertools.accumulate(np.float32([1e8, 1.0, -1e8, 1.0]))
    assert [b.tolist() for b in Exchange(dst.layout).run(blocks, src)] == [[expected]] * 4


# -- senders in the receiver's node, if nodes end in the middle of groups of devices ---------------------


@given(near_moves())
def test_nothing_comes_from_another_node_that_a_neighbour_holds(move):
    src, dst, nodes = move
    replicated = [a for a in src.mesh.axes if not src.layout.role(a)]
    for device in range(src.mesh.n_devices):
        for message in messages_to(src, dst, device, nodes):
            if message.src // nodes != device // nodes:
                holders = src.mesh.group(message.src, replicated)
                assert all(holder // nodes != device // nodes for holder in holders)


def test_replicas_in_a_node_share_the_sending():
    """Eight devices are a node; four hold each of two blocks, and the other four want it."""
    mesh = xs.Mesh(r=5, a=2)
    src, dst = (xs.Sharding(text, mesh, (8,)) for text in ("n/a", "n"))
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
        assert {m.src // 4 for m in messages_to(stage.before, stage.after, device, 4)} == {
            device // 4
        }


def test_no_near_senders_for_sums():
    """Replicas must add in one order, whichever device sends."""
    mesh = xs.Mesh(a=2)
    step = Exchange(xs.Layout("n"), 2)
    message = "node_devices is not for exchanges that end or begin a sum: 'n | sum(a)' -> 'n'"
    with refused(xs.errors.PlanError, message):
        step.after(xs.Sharding("n | sum(a)", mesh, (8,)))


def test_nodes_that_fit_need_no_near_senders():
    for mesh in (xs.Mesh(x=4, y=2), xs.Mesh(x=2, y=8), xs.Mesh(x=3, y=2, z=2)):
        assert not NODES.splits_groups(mesh)
    assert NODES.splits_groups(xs.Mesh(x=4, y=3))
