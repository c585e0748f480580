"""No path of steps is cheaper: the planner against exhaustive search over all layouts and all steps.

On meshes of one axis all pairs of layouts are searched, on two and three a sample. All of them, for hours:
python -m pytest tests/search/test_optimal.py --pairs all
If axes have sub-axes, the search covers all steps on whole axes, and all paths of a slice, a permutation and
gathers over sub-axes.
"""

import heapq
import itertools
import math
import random
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache

import pytest

import xshard as xs
from xshard.cost.model import price
from xshard.errors import PlanError
from xshard.layout.sub_axes import SubAxisMesh
from xshard.notation.parser import Dim, Shard
from xshard.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Embed,
    Exchange,
    Mask,
    Permute,
    ReduceScatter,
    Slice,
)

pytestmark = pytest.mark.long
DIMS = "ab"
MESHES = [
    xs.Mesh(dict(zip("xyz", sizes, strict=False)))
    for n in (1, 2, 3)
    for sizes in itertools.product((2, 3), repeat=n)
]
NVLINK = xs.Link(3e-6, 4e11)
INFINIBAND = xs.Link(14e-6, 5e10)
LAUNCH = (("all_to_all", 2e-5), ("exchange", 2e-5), ("other", 6e-6))
FLAT = xs.Profile("flat", "test", NVLINK, launch_s=LAUNCH)
# x crosses nodes: a slow link beside fast ones.
NODES = replace(FLAT, name="nodes", axes=(("x", INFINIBAND),), copy_bytes_per_s=1.6e12)


def layouts(mesh):
    """Every layout of two dims: each axis cuts a dim, holds addends, or holds replicas."""
    found = []
    for roles in itertools.product((*DIMS, "sum", None), repeat=len(mesh.axes)):
        given = dict(zip(mesh.axes, roles, strict=True))
        by_role = {role: [a for a in mesh.axes if given[a] == role] for role in (*DIMS, "sum")}
        for cuts in itertools.product(*(itertools.permutations(by_role[d]) for d in DIMS)):
            dims = tuple(
                Dim(d, tuple(Shard((a,)) for a in cut)) for d, cut in zip(DIMS, cuts, strict=True)
            )
            found.append(xs.Layout(dims, (("sum", tuple(by_role["sum"])),)))
    return found


@lru_cache(maxsize=2)
def graph(mesh, shape):
    """All layouts, and what a search asks: the seconds of the cheapest step from one to another."""
    shardings = {node: xs.Sharding(node, mesh, shape) for node in layouts(mesh)}

    @cache
    def moves(node):
        """The steps that name what they change, by the layout that they lead to."""
        found = {}
        for step in steps_from(node, mesh):
            with suppress(PlanError):
                found.setdefault(step.after(shardings[node]).layout, []).append(step)
        return found

    @cache
    def steps(node, after):
        found = list(moves(node).get(after, ()))
        for step in (Permute(after), Exchange(after)) if node != after else ():
            with suppress(PlanError):
                found += [step] if step.after(shardings[node]).layout == after else []
        return found

    @cache
    def seconds(node, after, profile):
        ends = shardings[node], shardings[after]
        return min(
            (price(s, *ends, 4, profile).seconds for s in steps(node, after)), default=math.inf
        )

    return shardings, seconds


def steps_from(src, mesh):
    """Every step that might apply to a layout, but permutations and exchanges."""
    free = [a for a in mesh.axes if a not in src.axes]
    for dim in src.dims:
        for n in range(1, len(dim.shards) + 1):
            inner = dim.shards[-n:]
            yield AllGather(dim.name, inner)
            yield Embed(dim.name, inner)
            for other, order in itertools.product(src.dims, itertools.permutations(inner)):
                if other is not dim:
                    yield AllToAll(dim.name, inner, other.name, order)
    yield from slices(src, free)
    sums = src.tagged("sum")
    for n in range(1, len(sums) + 1):
        yield from (AllReduce(axes) for axes in itertools.combinations(sums, n))
        for cut, dim in itertools.product(itertools.permutations(sums, n), src.dims):
            yield ReduceScatter(dim.name, tuple(Shard((a,)) for a in cut))
    for n in range(1, len(free) + 1):
        yield from (Mask(axes) for axes in itertools.combinations(free, n))


def slices(src, free):
    """Every way to cut the dims further, any of the free axes in any order on any dim."""
    for n in range(1, len(free) + 1):
        for order in itertools.permutations(free, n):
            for at in range(n + 1):
                parts = zip(DIMS, (order[:at], order[at:]), strict=True)
                cuts = tuple((d, tuple(Shard((a,)) for a in axes)) for d, axes in parts if axes)
                yield Slice(cuts)


def allowed(mesh, src, dst, profile):
    """Where a plan may pass: over axes that change, and replicas that relieve them."""
    level = {span.axis: span.level for span in profile.link_spans(mesh)}
    changing = [a for a in mesh.axes if src.role(a) != dst.role(a)]
    slowest = min(level[a] for a in changing)
    ends = set(src.tagged("sum")) - set(dst.tagged("sum"))
    relief = [
        a for a in mesh.axes if src.role(a) == dst.role(a) == () and (ends or level[a] > slowest)
    ]
    pinned = [a for a in mesh.axes if a not in changing and a not in relief]
    begins = set(dst.tagged("sum")) - set(src.tagged("sum"))

    def passes(node):
        sums = set(node.tagged("sum"))
        kept = set(src.tagged("sum")) & set(dst.tagged("sum"))
        return (
            all(node.role(a) == src.role(a) for a in pinned)
            and kept <= sums <= set(src.tagged("sum")) | begins
        )

    return passes


def least_seconds(mesh, shape, src, dst, profile):
    """Dijkstra over all layouts that hold no block larger than both ends."""
    shardings, seconds_to = graph(mesh, shape)
    largest = max(shardings[end].max_local_size for end in (src, dst))
    passes = allowed(mesh, src, dst, profile)
    sums = {node: set(node.tagged("sum")) for node in shardings}
    inside = [
        node for node in shardings if passes(node) and shardings[node].max_local_size <= largest
    ]
    best = {src: 0.0}
    queue = [(0.0, 0, src)]
    tie = itertools.count(1)
    while queue:
        seconds, _, node = heapq.heappop(queue)
        if node == dst:
            return seconds
        if seconds > best[node]:
            continue
        ended = sums[src] - sums[node]
        begun = sums[node] - sums[src]
        for after in inside:
            # A sum that has ended does not begin again, nor does one end that has begun.
            if not (ended & sums[after] or begun - sums[after]):
                more = seconds + seconds_to(node, after, profile)
                if more < best.get(after, math.inf):
                    best[after] = more
                    heapq.heappush(queue, (more, next(tie), after))
    raise AssertionError("a direct exchange always leads there")


def pairs(mesh, nodes, pytestconfig):
    """Pairs of layouts: all on meshes of one axis, which are always searched whole."""
    found = [(a, b) for a in nodes for b in nodes if a != b]
    wanted = pytestconfig.getoption("pairs")
    if len(mesh.axes) == 1 or wanted == "all":
        return found
    # A search on three axes takes as long as many on two.
    n = int(wanted) * (20 if len(mesh.axes) == 2 else 1)
    return random.Random(str(mesh)).sample(found, min(n, len(found)))


# The order of axes on equal links decides nothing: of all axes, or of those inside nodes.
PRICED = [
    (profile, mesh)
    for mesh in MESHES
    for profile, equal in ((FLAT, mesh.sizes), (NODES, mesh.sizes[1:]))
    if sorted(equal) == list(equal)
]


@pytest.mark.parametrize("rows", [54 * 8, 54 * 800], ids=["latency", "bandwidth"])
@pytest.mark.parametrize(
    ("profile", "mesh"), PRICED, ids=lambda value: getattr(value, "name", str(value))
)
def test_no_path_is_cheaper(mesh, profile, rows, pytestconfig):
    shape = (rows, rows)
    for src, dst in pairs(mesh, graph(mesh, shape)[0], pytestconfig):
        least = least_seconds(mesh, shape, src, dst, profile)
        plan = xs.plan((src, dst), mesh, shape, profile=profile)
        assert plan.cost == pytest.approx(least, rel=1e-9), (
            f"{src} -> {dst}: {[str(s) for s in plan.steps]}"
        )


PRIMES = {4: (2, 2), 6: (2, 3)}  # the parts that axes of these sizes have
DIVISIBLE = [
    xs.Mesh.parse(text) for text in ("x=4,y=2", "x=2,y=4", "x=6,y=2", "x=4,y=6", "x=2,y=2,z=4")
]


def least_over_parts(mesh, shape, src, dst, profile):
    """The cheapest of all paths of a slice, a permutation and gathers over parts of the axes that change.

    On both sides of the permutation dims are cut as little as makes them alike.
    """
    changing = [a for a in mesh.axes if src.role(a) != dst.role(a)]
    split = tuple((a, PRIMES[mesh.size(a)]) for a in changing if mesh.size(a) in PRIMES)
    if src.tags or dst.tags or not split:
        return math.inf
    fine = SubAxisMesh(mesh, split)
    start, goal = (xs.Sharding(end, mesh, shape).on_sub_axes(fine) for end in (src, dst))
    start, goal = (end.with_layout(end.normal_layout) for end in (start, goal))
    free = [part for a in changing for part in fine.sub_axes[a]]
    blocks = tuple(map(math.gcd, start.max_local_shape, goal.max_local_shape))
    found = [math.inf]
    ends = (cut_to(blocks, end, free) for end in (start, goal))
    for (sliced, here), (landed, there) in itertools.product(*ends):
        if here.layout != there.layout:
            steps = [*sliced, Permute(there.layout)]
            gathers = itertools.permutations(
                AllGather(*cut) for step in landed for cut in step.cuts
            )
            found += [seconds_of([*steps, *order], start, profile) for order in gathers]
    return min(found)


def cut_to(blocks, here, free):
    """Every slice over free axes that leads to blocks of a shape; no step where they have it."""
    if here.max_local_shape == blocks:
        yield [], here
    for step in slices(here.layout, [a for a in free if a not in here.layout.axes]):
        after = step.after(here)
        if after.max_local_shape == blocks:
            yield [step], after


def seconds_of(steps, here, profile):
    total = 0.0
    for step in steps:
        after = step.after(here)
        total = total + price(step, here, after, 4, profile).seconds
        here = after
    return total


@pytest.mark.parametrize("rows", [48, 48 * 1024], ids=["latency", "bandwidth"])
@pytest.mark.parametrize("profile", [FLAT, NODES], ids=lambda p: p.name)
@pytest.mark.parametrize("mesh", DIVISIBLE, ids=str)
def test_no_path_over_parts_of_axes_is_cheaper(mesh, profile, rows, pytestconfig):
    shape = (rows, rows)
    divided = 0
    for src, dst in pairs(
        mesh, [node for node in graph(mesh, shape)[0] if not node.tags], pytestconfig
    ):
        whole = least_seconds(mesh, shape, src, dst, profile)
        least = min(whole, least_over_parts(mesh, shape, src, dst, profile))
        plan = xs.plan((src, dst), mesh, shape, profile=profile)
        assert plan.cost == pytest.approx(least, rel=1e-9), (
            f"{src} -> {dst}: {[str(s) for s in plan.steps]}"
        )
        assert bool(plan.split) == (least < whole * (1 - 1e-9))
        divided += bool(plan.split)
    assert divided or profile is NODES or len(mesh.axes) == 3
