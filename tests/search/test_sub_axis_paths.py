"""Plans that divide axes: the finer mesh, what steps cost there, and when a plan goes over parts of axes."""

import itertools
from dataclasses import astuple, replace

import numpy as np
import pytest

import xshard as xs
from tests import oracle
from tests.search.test_optimal import FLAT, NVLINK
from xshard.cost.model import price
from xshard.errors import MeshError, PlanError
from xshard.layout.layout import parse_expression
from xshard.layout.sub_axes import SubAxisMesh
from xshard.notation.parser import Dim, Shard
from xshard.steps import AllGather, AllReduce, AllToAll, Exchange, Permute, ReduceScatter, Slice

MESH = xs.Mesh(x=4, y=2, z=2)
# Eight devices a node, and four: of the latter `x` leaves a node half-way.
NODES = [
    xs.Profile("nodes", "test", NVLINK, xs.Link(14e-6, 5e10), n, copy_bytes_per_s=1.6e12)
    for n in (4, 8)
]
PROFILES = [FLAT, *NODES, xs.load_profile("h100"), xs.load_profile("bandwidth")]


@pytest.mark.parametrize(
    ("mesh", "split", "fine"),
    [
        ("x=4,y=2", (("x", (2, 2)),), "x_0=2,x_1=2,y=2"),
        ("y=6,x=8", (("x", (2, 4)), ("y", (3, 2))), "y_0=3,y_1=2,x_0=2,x_1=4"),
        ("x=4,x_1=2", (("x", (2, 2)),), "x_0_=2,x_1_=2,x_1=2"),
    ],
)
def test_parts_are_the_same_devices_under_names_of_their_own(mesh, split, fine):
    whole = xs.Mesh.parse(mesh)
    found = SubAxisMesh(whole, split)
    assert str(found) == fine
    for axis in whole.axes:
        assert found.groups(found.sub_axes[axis]) == whole.groups((axis,))
        assert {found.origin(part) for part in found.sub_axes[axis]} == {axis}


@pytest.mark.parametrize("split", [(("x", (2, 3)),), (("x", (4,)),), (("w", (2, 2)),)])
def test_parts_that_make_up_no_axis_are_refused(split):
    with pytest.raises(MeshError, match=r"does not split into|unknown mesh axis"):
        SubAxisMesh(MESH, split)


STEPS = [
    ("a/x b", lambda x: AllGather("a", x)),
    ("a b/z/x", lambda x: AllGather("b", x)),
    ("a b/z/x", lambda x: AllGather("b", (Shard(("z",)), *x))),
    ("a/x b", lambda x: AllToAll("a", x, "b", x)),
    ("a b/y", lambda x: Slice((("a", x),))),
    ("a b/y | sum(x)", lambda x: ReduceScatter("a", x)),
    ("a b/y", lambda x: Slice((("a", x), ("b", (Shard(("z",)),))))),
    ("a/z/x b", lambda x: Permute(xs.Layout((Dim("a", (Shard(("y",)), *x)), Dim("b"))))),
    ("a/x/z b", lambda x: Exchange(xs.Layout.parse("a/y b"))),
    ("a/z b", lambda x: Exchange(xs.Layout((Dim("a", (Shard(("y",)),)), Dim("b", x))))),
]


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: f"{p.name}{p.node_devices}")
@pytest.mark.parametrize(("layout", "step"), STEPS)
def test_a_step_over_all_parts_costs_what_it_costs_over_the_axis(layout, step, profile):
    fine = SubAxisMesh(MESH, (("x", (2, 2)),))
    here = xs.Sharding(xs.Layout.parse(layout), MESH, (64, 128))
    there = here.on_sub_axes(fine)
    there = there.with_layout(there.normal_layout)
    ways = (here, step((Shard(("x",)),))), (there, step((Shard(("x_0",)), Shard(("x_1",)))))
    one, other = (astuple(price(s, at, s.after(at), 4, profile)) for at, s in ways)
    assert other == pytest.approx(one)


LANDED = ["permute", "all_gather a/x_1"]


@pytest.mark.parametrize(
    ("move", "mesh", "steps", "split"),
    [
        # Two blocks of the one are a block of the other.
        ("a/x b -> a/y b", "x=4,y=2", LANDED, {"x": (2, 2)}),
        ("a/y b -> a/x b", "x=4,y=2", ["slice a/x_1", "permute"], {"x": (2, 2)}),
        ("a/x b -> a/y b", "x=8,y=2", LANDED, {"x": (2, 4)}),
        # One half of an axis goes to each dim.
        ("a b/y -> a/y b/x", "x=4,y=2", ["slice a/x_1 b/x_0", "permute"], {"x": (2, 2)}),
        # Neither divides the other: twelve blocks are cut alike at both ends.
        ("a/x b -> a/y b", "x=4,y=6", ["slice a/y_1", *LANDED], {"x": (2, 2), "y": (2, 3)}),
        # What needs no part has none.
        ("a/x b -> a/y b", "x=4,y=4", ["permute"], {}),
        ("a/x b -> a b/x", "x=4,y=2", ["all_to_all a/x -> b/x"], {}),
        ("a/x/y b -> a b", "x=4,y=2", ["all_gather a/x/y"], {}),
    ],
)
def test_an_axis_is_divided_where_that_saves_time(move, mesh, steps, split):
    plan = xs.plan(move, xs.Mesh.parse(mesh), (96, 96), "int64", profile=FLAT)
    assert [str(step) for step in plan.steps] == steps
    assert dict(plan.split) == split


@pytest.mark.parametrize(
    "move", ["a/x b -> a/y b", "a/y b -> a/x b", "a b/y -> a/y b/x", "a/z/x b -> a/y b/z"]
)
@pytest.mark.parametrize("profile", PROFILES[:2], ids=lambda p: p.name)
def test_a_divided_plan_is_right(move, profile):
    plan = xs.plan(move, MESH, (16, 16), "int64", profile=profile)
    oracle.assert_right(plan, np.random.default_rng(0))


def test_a_divided_plan_prints_its_parts():
    plan = xs.plan("a b/y -> a/y b/x", xs.Mesh(x=4, y=2), (16, 16))
    assert "on x=4,y=2, divided as x_0=2,x_1=2,y=2" in str(plan)
    assert "slice a/x_1 b/x_0  a/x_1 b/y/x_0" in str(plan)


def test_a_divided_plan_explains_what_it_saves():
    plan = xs.plan("a b/y -> a/y b/x", xs.Mesh(x=4, y=2), (16, 16))
    assert "us faster than whole axes" in plan.explain()


def test_a_divided_plan_survives_json():
    plan = xs.plan("a b/y -> a/y b/x", xs.Mesh(x=4, y=2), (16, 16))
    assert xs.Plan.from_json(plan.to_json()) == plan


def test_a_divided_plan_has_whole_axes():
    plan = xs.plan("a b/y -> a/y b/x", xs.Mesh(x=4, y=2), (16, 16))
    assert plan.axes == ("y", "x")


def test_copies_are_told_from_replicas_part_by_part():
    plan = xs.plan("a/x b -> a/y b | copy(x)", xs.Mesh(x=4, y=2), (16, 16))
    assert [str(step) for step in plan.steps] == LANDED
    assert str(plan.stages[-1].after.layout) == "a/y b | copy(x_0,x_1)"


def test_an_axis_that_holds_addends_is_not_divided():
    ends = parse_expression("a b | sum(x) -> a b")
    summed = (AllReduce(("x_0", "x_1")),)
    with pytest.raises(PlanError, match="axis 'x' is divided and holds addends"):
        xs.Plan(*ends, xs.Mesh(x=4, y=2), (8, 8), "float32", summed, split=(("x", (2, 2)),))


def test_a_ring_is_not_divided():
    """Half a ring is no ring: its devices are two hops apart."""
    for profile, divided in ((FLAT, True), (xs.load_profile("tpu_v5p"), False)):
        plan = xs.plan("a/y b -> a/x b", xs.Mesh(x=4, y=2), (16, 16), profile=profile)
        assert bool(plan.split) == divided


def test_a_memory_limit_holds_for_divided_plans():
    ends = "a/x b -> a/y b", xs.Mesh(x=4, y=2), (1024, 1024), "int8"
    plan = xs.plan(*ends, profile=FLAT)
    assert (
        plan.split
        and xs.plan(*ends, profile=FLAT, memory_limit=plan.peak_bytes).steps == plan.steps
    )
    with pytest.raises(PlanError, match="no plan stays within"):
        xs.plan(*ends, profile=FLAT, memory_limit=plan.peak_bytes // 4)


def test_links_named_by_axis_hold_for_parts():
    slow = replace(
        FLAT, name="slow", axes=(("x", xs.Link(14e-6, 5e10)),), copy_bytes_per_s=float("inf")
    )
    plan = xs.plan("a/x b -> a/y b", xs.Mesh(x=4, y=2), (1024, 1024), "int8", profile=slow)
    assert plan.split
    expected = [6e-6 + 14e-6 + p.received_bytes / 5e10 for p in plan.prices]
    assert [p.seconds for p in plan.prices] == pytest.approx(expected)


def test_more_devices_than_rows_of_a_part_are_left_to_other_steps():
    for rows in itertools.product((2, 3, 6, 12), repeat=2):
        plan = xs.plan("a/x b -> a/y b", xs.Mesh(x=4, y=6), rows, "int64", profile=FLAT)
        oracle.assert_right(plan, np.random.default_rng(0))


def test_replicas_inside_a_node_relieve_a_permutation_without_those_across():
    """A slice by all 16 would gather a half across nodes again."""
    plan = xs.plan("a/x/y b -> a/y/x b", xs.Mesh(x=4, y=4, z=16), (8192, 8192), "bfloat16")
    assert [str(step) for step in plan.steps] == ["slice a/z_1", "permute", "all_gather a/z_1"]
    assert dict(plan.split) == {"z": (2, 8)}
