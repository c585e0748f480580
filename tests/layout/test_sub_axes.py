"""The same devices under other axes: the refined mesh of two meshes, and ordinary plans on it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xshard as xs
from tests import oracle
from tests.strategies import layouts, meshes, shapes
from tests.two_meshes import crossing
from xshard.cost.machine import profile_of_factors
from xshard.layout.layout import factored
from xshard.layout.sub_axes import refine


@pytest.mark.parametrize(
    ("src_mesh", "dst_mesh", "refined"),
    [
        ("dp=8", "dp=2,tp=4", "dp=2,dp_tp=4"),
        ("dp=4,tp=2", "dp=2,tp=4", "dp=2,dp_tp=2,tp=2"),
        ("x=4", "y=4", "x_y=4"),
        ("x=2,y=6", "a=4,b=3", "x_a=2,y_a=2,y_b=3"),
        ("x=6,one=1", "one=1,x=6", "x=6"),
        ("a_b=2,a=2", "c=2,b_c=2", "a_b_c=2,a_b_c_=2"),
        ("a=2,b=1", "a=2,b=1", "a=2,b=1"),
        ("", "", ""),
        ("x=3,y=2", "x=2,y=3", None),
        ("x=4", "x=2", None),
        ("x=4", "x=6", None),
    ],
)
def test_refined_meshes(src_mesh, dst_mesh, refined):
    common = refine(xs.Mesh.parse(src_mesh), xs.Mesh.parse(dst_mesh))
    assert (None if common is None else str(common.mesh)) == refined


@given(st.data(), meshes(), meshes(), shapes())
def test_a_refined_layout_gives_every_device_the_same_rows(data, src_mesh, dst_mesh, shape):
    common = refine(src_mesh, dst_mesh)
    if common is not None:
        for mesh, factors in ((src_mesh, common.src), (dst_mesh, common.dst)):
            layout = data.draw(layouts(mesh, len(shape)))
            for device in range(mesh.n_devices):
                plain = oracle.block_index(layout, mesh, shape, device)
                fine = oracle.block_index(
                    factored(layout, dict(factors)), common.mesh, shape, device
                )
                assert all(np.array_equal(a, b) for a, b in zip(plain, fine, strict=True))


@pytest.mark.parametrize(
    ("src", "dst", "src_mesh", "dst_mesh", "steps"),
    [
        ("n/dp d", "n/dp d/tp", "dp=8", "dp=2,tp=4", ["all_to_all n/dp_tp -> d/dp_tp"]),
        ("n/dp d", "n/dp d", "dp=8", "dp=2,tp=4", ["all_gather n/dp_tp"]),
        (
            "n d | sum(dp)",
            "n d/tp | sum(dp)",
            "dp=8",
            "dp=2,tp=4",
            ["reduce_scatter sum -> d/dp_tp"],
        ),
        ("n/x d", "n/(a,b) d", "x=8", "a=2,b=4", []),
        ("n/x d", "n/b/a d", "x=8", "a=2,b=4", ["permute"]),
    ],
)
def test_a_refined_plan_has_the_ordinary_collectives(src, dst, src_mesh, dst_mesh, steps):
    plan = crossing(src, dst, src_mesh, dst_mesh, (64, 64), profile="h100")
    assert plan.transfer is None
    assert [str(step) for step in plan.steps] == steps
    assert plan.mesh == refine(xs.Mesh.parse(src_mesh), xs.Mesh.parse(dst_mesh)).mesh


def test_a_refined_plan_prints_in_the_refined_axes():
    plan = crossing("n/dp d", "n/dp d/tp", "dp=8", "dp=2,tp=4", (8, 8))
    assert (str(plan.src), str(plan.dst)) == ("n/(dp,dp_tp) d", "n/dp d/dp_tp")


def test_the_factors_of_an_axis_have_its_link():
    """If both ends name a link, the slower one counts."""
    fast = xs.Link(0.0, 8e9)
    slow = xs.Link(0.0, 2e9)
    machine = xs.Profile("named", "made up", xs.Link(0.0, 1e9), axes=(("dp", fast), ("tp", slow)))
    found = profile_of_factors(machine, refine(xs.Mesh(dp=4, pp=2), xs.Mesh(tp=2, ep=4)))
    assert dict(found.axes) == {"dp_tp": slow, "dp_ep": fast}


def test_three_by_two_to_two_by_three():
    """No refinement exists: every device gets the elements that it lacks directly from their holders."""
    plan = crossing("n/x d/y", "n/x d/y", "x=3,y=2", "x=2,y=3", (6, 6))
    assert (plan.steps, plan.src_devices) == ((plan.transfer,), plan.dst_devices)
    assert plan.bytes_received == plan.bytes_lower_bound == 6 * 8
    x = np.arange(36).reshape(6, 6)
    blocks = xs.reference.run(plan, xs.reference.scatter(x, "n/x d/y", plan.src_mesh))
    assert [b.tolist() for b in blocks[:2]] == [x[:3, :2].tolist(), x[:3, 2:4].tolist()]
    assert plan.backward.bytes_received == plan.backward.bytes_lower_bound
