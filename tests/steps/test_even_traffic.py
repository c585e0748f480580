"""Closed forms of the traffic between even layouts, against messages counted one by one."""

import math
from collections import Counter
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import xshard as xs
from xshard.cost.bounds import total_elements
from xshard.notation.parser import Dim, Shard
from xshard.steps import Exchange
from xshard.steps.exchange.even_traffic import met_elements, node_lack
from xshard.steps.exchange.messages import messages_to
from xshard.steps.exchange.traffic import even_traffic, link_cuts

FAST, SLOW = xs.Link(1e-6, 1e11), xs.Link(1e-5, 1e9)


@st.composite
def even_moves(draw, sums=True):
    """(source, destination, spans): even contiguous cuts, on nodes of a few devices."""
    sizes = draw(st.lists(st.sampled_from((2, 2, 3, 4, 6)), min_size=1, max_size=3))
    assume(math.prod(sizes) <= 48)
    mesh = xs.Mesh(dict(zip("xyz", sizes, strict=False)))
    src, dst = (draw(plain_layouts(mesh, sums and first)) for first in (True, False))
    shape = tuple(draw(st.sampled_from((144, 288))) for _ in src.dims)
    nodes = xs.Profile("nodes", "test", FAST, across=SLOW, node_devices=draw(st.sampled_from((2, 4, 6, 8))))
    ends = (xs.Sharding(layout, mesh, shape) for layout in (src, dst))
    return *(end.with_layout(end.normal) for end in ends), nodes.link_spans(mesh)


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


def slowest(mesh, spans, a, b):
    """The level between two devices: that of the slowest span along which they differ."""
    coords = [dict(zip(mesh.axes, mesh.coords(device), strict=True)) for device in (a, b)]
    return min(
        span.level for span in spans if len({c[span.axis] // span.stride % span.size for c in coords}) == 2
    )


def counted(src, dst, spans):
    """Per level, the most elements and messages that a device receives, and slack; and totals of all.

    Totals: elements received; elements packed and unpacked if all boxes are; and if a device's own box is
    put into place directly.
    """
    elements, messages, most = Counter(), Counter(), [0, 0, 0]
    by_group, size = Counter(), Counter()  # of a level: the devices that its links and slower ones divide
    for device in range(src.mesh.n_devices):
        own = Counter(), Counter()
        wanted = 0
        for message in messages_to(src, dst, device):
            wanted += message.size
            if message.src != device:
                level = slowest(src.mesh, spans, message.src, device)
                own[0][level] += message.size
                own[1][level] += 1
        coords = dict(zip(src.mesh.axes, src.mesh.coords(device), strict=True))
        for level in {span.level for span in spans}:
            places = (coords[s.axis] // s.stride % s.size for s in spans if s.level <= level)
            group = level, *places
            by_group[group] += own[0][level]
            size[group] += 1
        elements |= own[0]
        messages |= own[1]
        received = own[0].total()
        most = list(map(max, most, (received, 2 * wanted, received + wanted)))
    mean = {level: max(n / size[g] for g, n in by_group.items() if g[0] == level) for level in +elements}
    return [
        (n, messages[level], level, int(n - mean[level])) for level, n in sorted((+elements).items())
    ], most


@given(even_moves())
def test_traffic_by_level_is_that_of_the_messages(move):
    src, dst, spans = move
    traffic = even_traffic(src, dst, spans)
    assume(traffic is not None)
    hops, most = counted(src, dst, spans)
    assert [(hop.received, hop.messages, hop.level, hop.slack) for hop in traffic.hops] == hops
    assert [traffic.received, traffic.copied, traffic.copied - traffic.kept] == most


@given(even_moves())
def test_layouts_without_a_closed_form_are_priced_alike(move):
    """Cuts that do not divide each other, such as 4 and 6, are priced by arrays over the mesh."""
    src, dst, spans = move
    hops, most = counted(src, dst, spans)
    traffic = Exchange(dst.layout).traffic(src, spans)
    assert [(hop.received, hop.messages, hop.level, hop.slack) for hop in traffic.hops] == hops
    assert [traffic.received, traffic.copied, traffic.copied - traffic.kept] == most


def rows_of(sharding, device):
    """Positions of all elements in a device's block."""
    return set(
        product(
            *(
                [run.start + i for run in sharding.held(d, device) for i in range(run.length)]
                for d in range(len(sharding.shape))
            )
        )
    )


@given(even_moves(sums=False).filter(lambda move: math.prod(move[0].shape) <= 144 * 144))
def test_what_must_enter_a_node(move):
    src, dst, spans = move
    nodes = {}
    for device in range(src.mesh.n_devices):
        coords = dict(zip(src.mesh.axes, src.mesh.coords(device), strict=True))
        far = tuple(coords[span.axis] // span.stride % span.size for span in spans if span.level == 0)
        have, need = nodes.setdefault(far, (set(), set()))
        small = [xs.Sharding(s.layout, s.mesh, tuple(n // 6 for n in s.shape)) for s in (src, dst)]
        assume(all(s.is_even for s in small))
        have |= rows_of(small[0], device)
        need |= rows_of(small[1], device)
    most = max(len(need - have) for have, need in nodes.values())
    found = node_lack(small[0].shape, *(link_cuts(s, spans) for s in small))
    divide = even_traffic(*small, spans) is not None
    assert found == (most if divide else 0)


@given(even_moves(sums=False))
def test_elements_that_some_device_holds_at_both_ends(move):
    src, dst, _ = move
    small = [xs.Sharding(s.layout, s.mesh, tuple(n // 12 for n in s.shape)) for s in (src, dst)]
    assume(all(s.is_even for s in small))
    found = met_elements(small[0].shape, *(link_cuts(s, ()) for s in small))
    assume(found is not None)
    met = set()
    for device in range(src.mesh.n_devices):
        met |= rows_of(small[0], device) & rows_of(small[1], device)
    assert found == len(met)


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
    ends = [s.with_layout(s.normal) for s in (plan.source, plan.target)]
    assert total_elements(*ends) == elements
    assert plan.bytes_lower_bound <= plan.bytes_received
