"""The traffic of exchanges, in closed form and counted by arrays, against messages counted one by one."""

import math
from collections import Counter
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import xshard as xs
from tests.steps.test_exchange import ends, near_moves
from tests.strategies import moves
from xshard.cost.bounds import total_elements
from xshard.layout.runs import row_numbers
from xshard.notation.parser import Dim, Shard
from xshard.steps import Exchange
from xshard.steps.exchange.even_traffic import elements_lacking_in_node, elements_staying
from xshard.steps.exchange.messages import messages_to
from xshard.steps.exchange.traffic import counted_traffic, even_traffic, link_cuts
from xshard.steps.traffic import LinkSpan

FAST = xs.Link(1e-6, 1e11)
SLOW = xs.Link(1e-5, 1e9)


@st.composite
def even_moves(draw, sums=True):
    """(source, destination, spans): even contiguous cuts, on nodes of a few devices."""
    sizes = draw(st.lists(st.sampled_from((2, 2, 3, 4, 6)), min_size=1, max_size=3))
    assume(math.prod(sizes) <= 48)
    mesh = xs.Mesh(dict(zip("xyz", sizes, strict=False)))
    src, dst = (draw(plain_layouts(mesh, sums and first)) for first in (True, False))
    shape = tuple(draw(st.sampled_from((144, 288))) for _ in src.dims)
    nodes = xs.Profile(
        "nodes", "test", FAST, across=SLOW, node_devices=draw(st.sampled_from((2, 4, 6, 8)))
    )
    ends = (xs.Sharding(layout, mesh, shape) for layout in (src, dst))
    return *(end.with_layout(end.normal_layout) for end in ends), nodes.link_spans(mesh)


@st.composite
def plain_layouts(draw, mesh, sums):
    cuts = [[], []]
    tagged = []
    for axis in draw(st.permutations(mesh.axes)):
        role = draw(st.sampled_from((0, 1, None, "sum") if sums else (0, 1, None)))
        if role == "sum":
            tagged.append(axis)
        elif role is not None:
            cuts[role].append(Shard((axis,)))
    dims = tuple(Dim(name, tuple(shards)) for name, shards in zip("nd", cuts, strict=True))
    return xs.Layout(dims, (("sum", tuple(tagged)),))


@st.composite
def any_moves(draw):
    """(source, destination, spans): any linear layouts, on two kinds of links."""
    src, dst = ends(draw(moves(kinds=("linear",))))
    chosen = draw(st.sets(st.sampled_from(src.mesh.axes)))
    spans = [LinkSpan(a, src.mesh.size(a), int(a in chosen)) for a in src.mesh.axes]
    return src, dst, tuple(sorted(spans, key=lambda span: span.level))


def slowest(mesh, spans, a, b):
    """The level between two devices: that of the slowest span along which they differ."""
    coords = [dict(zip(mesh.axes, mesh.coords(device), strict=True)) for device in (a, b)]
    return min(
        span.level
        for span in spans
        if len({c[span.axis] // span.stride % span.size for c in coords}) == 2
    )


def counted(src, dst, level_of, nodes=None):
    """Per level, the most elements and messages that a device receives; its elements for each device; totals.

    Totals: elements received; elements packed and unpacked if all boxes are; and if a device's own box is
    put into place directly.
    """
    elements = Counter()
    messages = Counter()
    most = [0, 0, 0]
    each = []
    for device in range(src.mesh.n_devices):
        received = Counter()
        senders = Counter()
        wanted = 0
        for message in messages_to(src, dst, device, nodes):
            wanted += message.size
            if message.src != device and message.size:
                level = level_of(message.src, device)
                received[level] += message.size
                senders[level] += 1
        elements = elements | received
        messages = messages | senders
        each = [*each, received]
        total = received.total()
        most = list(map(max, most, (total, 2 * wanted, total + wanted)))
    return [(n, messages[level], level) for level, n in sorted(elements.items())], each, most


def slack(mesh, spans, level, each):
    """How many elements fewer the devices that share a link receive on average than the busiest of all."""
    by_group = {}
    for device, received in enumerate(each):
        coords = dict(zip(mesh.axes, mesh.coords(device), strict=True))
        group = tuple(coords[s.axis] // s.stride % s.size for s in spans if s.level <= level)
        by_group.setdefault(group, []).append(received[level])
    return int(max(n[level] for n in each) - max(sum(n) / len(n) for n in by_group.values()))


@given(even_moves() | any_moves())
def test_traffic_by_level_is_that_of_the_messages(move):
    """By the closed form, and by arrays over the mesh: for cuts that do not divide each other, as 4 and 6."""
    src, dst, spans = move
    hops, each, most = counted(src, dst, lambda a, b: slowest(src.mesh, spans, a, b))
    expected = [(*hop, slack(src.mesh, spans, hop[-1], each)) for hop in hops]
    for traffic in (even_traffic(src, dst, spans), counted_traffic(src, dst, spans)):
        if traffic is not None:
            assert [
                (hop.received, hop.messages, hop.level, hop.mean_shortfall) for hop in traffic.hops
            ] == expected
            assert [traffic.received, traffic.copied, traffic.copied - traffic.saved_copies] == most


@given(near_moves())
def test_traffic_from_near_senders_is_that_of_the_messages(move):
    src, dst, nodes = move
    hops, _, most = counted(src, dst, lambda a, b: int(a // nodes == b // nodes), nodes)
    traffic = Exchange(dst.layout, nodes).traffic(src)
    assert sorted((hop.received, hop.messages, hop.level) for hop in traffic.hops) == sorted(hops)
    assert [traffic.copied, traffic.copied - traffic.saved_copies] == most[1:]


def rows_of(sharding, device):
    """Positions of all elements in a device's block."""
    along = (row_numbers(sharding.held(d, device)).tolist() for d in range(len(sharding.shape)))
    return set(product(*along))


@given(even_moves(sums=False).filter(lambda move: math.prod(move[0].shape) <= 144 * 144))
def test_what_must_enter_a_node(move):
    src, dst, spans = move
    nodes = {}
    for device in range(src.mesh.n_devices):
        coords = dict(zip(src.mesh.axes, src.mesh.coords(device), strict=True))
        far = tuple(
            coords[span.axis] // span.stride % span.size for span in spans if span.level == 0
        )
        have, need = nodes.setdefault(far, (set(), set()))
        small = [xs.Sharding(s.layout, s.mesh, tuple(n // 6 for n in s.shape)) for s in (src, dst)]
        assume(all(s.is_even for s in small))
        have |= rows_of(small[0], device)
        need |= rows_of(small[1], device)
    most = max(len(need - have) for have, need in nodes.values())
    found = elements_lacking_in_node(small[0].shape, *(link_cuts(s, spans) for s in small))
    divide = even_traffic(*small, spans) is not None
    assert found == (most if divide else 0)


@given(even_moves(sums=False))
def test_elements_that_some_device_holds_at_both_ends(move):
    src, dst, _ = move
    small = [xs.Sharding(s.layout, s.mesh, tuple(n // 12 for n in s.shape)) for s in (src, dst)]
    assume(all(s.is_even for s in small))
    found = elements_staying(small[0].shape, *(link_cuts(s, ()) for s in small))
    assume(found is not None)
    met = (
        rows_of(small[0], device) & rows_of(small[1], device)
        for device in range(src.mesh.n_devices)
    )
    assert found == len(set().union(*met))


@pytest.mark.parametrize(
    ("move", "elements"),
    [
        # 3 messages until one of 4 devices has the sum of an element, 3 more until all have.
        ("n d | sum(a,b) -> n d", 6 * 64),
        ("n d | sum(a,b) -> n/a/b d", 3 * 64),
        # Every device takes the 16 elements of its block from the device with the same `b`.
        ("n/b d | sum(a) -> n/b/a d", 64),
        # Half of the rows move to devices that hold no addend of them: two messages, not one.
        ("n/b d | sum(a) -> n/a/b d", 64 + 32),
        ("n/a d -> n d", 4 * 32),
    ],
)
def test_bytes_of_all_devices(move, elements):
    mesh = xs.Mesh(a=2, b=2)
    plan = xs.plan(move, mesh, (8, 8), profile="bandwidth")
    ends = [s.with_layout(s.normal_layout) for s in (plan.source, plan.target)]
    assert total_elements(*ends) == elements
    assert plan.bytes_lower_bound <= plan.bytes_received
