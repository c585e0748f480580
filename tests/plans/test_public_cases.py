"""180 reshardings from the test suites of others (tests/data/reshard.json), on the reference."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

import xshard as xs
from tests import oracle
from xshard.notation.parser import Dim, Shard
from xshard.plans.alternatives import alternatives

DATA = Path(__file__).parents[1] / "data" / "reshard.json"
PUBLIC_CASES = [
    case for case in json.loads(DATA.read_text()) if math.prod(case["mesh"].values()) <= 64
]


def layout_of(cuts, partial):
    dims = tuple(
        Dim(f"d{i}", tuple(Shard((axis,)) for axis in axes)) for i, axes in enumerate(cuts)
    )
    return xs.Layout(dims, (("sum", tuple(partial)),))


def small(length, parts):
    """A length with the same remainder by every divisor of `parts`, at least twice as long as it."""
    return length if length <= 3 * parts else 2 * parts + length % parts


def move_of(case):
    """A case as arguments of `xs.plan`, its shape scaled down where it is large."""
    ends = [layout_of(case[end], case[f"{end}_partial"]) for end in ("src", "dst")]
    mesh = xs.Mesh(case["mesh"])
    parts = [
        math.lcm(*(mesh.size(*layout.dims[d].axes) for layout in ends))
        for d in range(len(case["shape"]))
    ]
    shape = tuple(small(n, max(p, 4)) for n, p in zip(case["shape"], parts, strict=True))
    return tuple(ends), mesh, shape


def test_the_files_are_whole():
    two = json.loads((DATA.parent / "reshard_two_meshes.json").read_text())
    assert (len(json.loads(DATA.read_text())), len(PUBLIC_CASES), len(two)) == (180, 168, 15)


@pytest.mark.long
@pytest.mark.parametrize("profile", ["bandwidth", "h100", "host"])
def test_no_other_way_is_cheaper(profile):
    """Of those that `explain` compares; on meshes of many axes as well, where not every path is looked at."""
    for case in PUBLIC_CASES:
        ends, mesh, shape = move_of(case)
        plan = xs.plan(ends, mesh, shape, profile=profile)
        for way in alternatives(plan):
            if way.plan is not None and not way.plan.exceeds_endpoints:
                cost = way.plan.cost
                said = f"{case['name']}: {way.name}, {cost} s instead of {plan.cost}"
                assert cost >= plan.cost * (1 - 1e-9), said


@pytest.mark.parametrize("case", PUBLIC_CASES, ids=lambda case: case["name"])
def test_values(case):
    """And gradients, as planned for bandwidth alone and for real latencies."""
    for profile in ("bandwidth", "h100"):
        plan = xs.plan(*move_of(case), case["dtype"], profile=profile)
        oracle.assert_right(plan, np.random.default_rng(0))
        assert plan.bytes_received >= plan.bytes_lower_bound
        # Planned for bandwidth, an even move without a reduction receives no byte more than needed.
        if profile == "bandwidth" and plan.source.is_even and plan.target.is_even:
            reduces = case["src_partial"] or case["dst_partial"]
            assert reduces or plan.bytes_received == plan.bytes_lower_bound
