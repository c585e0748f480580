"""The gradient of a maximum goes to its winners, in equal shares."""

import numpy as np
import pytest

import xshard as xs
from tests import oracle
from tests.messages import refused
from tests.two_meshes import crossing
from xshard import Layout
from xshard.errors import LinearityError, PlanError


def naive_gradient(blocks, cotangent, layout, mesh, shape):
    """Of a global cotangent, by comparing all addends of every element in one place."""
    best = oracle.gather(blocks, layout, mesh, shape)
    index = [oracle.block_index(layout, mesh, shape, device) for device in range(mesh.n_devices)]
    won = [(block == best[i]).astype(float) for block, i in zip(blocks, index, strict=True)]
    sums = Layout(
        layout.dims, (("sum", layout.tagged("max", "min")), ("copy", layout.tagged("copy")))
    )
    count = oracle.gather(won, sums, mesh, shape)
    return [cotangent[i] * w / count[i] for w, i in zip(won, index, strict=True)]


@pytest.mark.parametrize(
    ("expression", "mesh"),
    [
        ("n d | max(a) -> n d", "a=4"),
        ("n d | min(a) -> n/a d", "a=4"),
        ("n d | max(a,b) -> n d/b | copy(a)", "a=2,b=2"),
        ("n/b d | max(a) -> n d/b | copy(a)", "a=3,b=2"),
        ("n/b d | min(a) copy(c) -> n/c d", "a=2,b=2,c=2"),
        ("n/zigzag(b) d | max(a) -> n d", "a=3,b=2"),
    ],
)
def test_gradient_goes_to_the_winners(expression, mesh):
    """Three values and many addends: most elements are ties."""
    mesh = xs.Mesh.parse(mesh)
    shape = (7, 6)
    plan = xs.plan(expression, mesh, shape, "float64")
    rng = np.random.default_rng(0)
    blocks = [np.sign(block) for block in oracle.random_blocks(plan.src, mesh, shape, rng)]
    cotangents = oracle.random_blocks(plan.dst.dual, mesh, shape, rng)
    pulled = xs.reference.pullback(plan, blocks, cotangents)
    cotangent = oracle.gather(cotangents, plan.dst.dual, mesh, shape)
    expected = naive_gradient(blocks, cotangent, plan.src, mesh, shape)
    # Where the source has copies, their gradients are addends: compare what they add up to.
    addends = Layout(
        plan.src.dims, tuple(("sum", axes) for kind, axes in plan.src.tags if kind == "copy")
    )
    for device in range(mesh.n_devices):
        group = mesh.group(device, addends.tagged("sum"))
        assert np.allclose(sum(pulled[d] for d in group), expected[device], rtol=1e-15, atol=0)


def test_a_kept_maximum_moves_but_has_no_gradient():
    mesh = xs.Mesh(a=2, b=2)
    shape = (4, 6)
    plan = xs.plan("n/b d | max(a) -> n d/b | max(a)", mesh, shape, "float64")
    blocks = oracle.random_blocks(plan.src, mesh, shape, np.random.default_rng(0))
    result = xs.reference.run(plan, blocks)
    value = oracle.gather(blocks, plan.src, mesh, shape)
    assert np.array_equal(oracle.gather(result, plan.dst, mesh, shape), value)
    message = "'n/b d | max(a) -> n d/b | max(a)' keeps a max or min: its gradient is not defined\n"
    with refused(LinearityError, message + "  reduce it first, then redistribute"):
        xs.reference.pullback(plan, blocks, result)


def test_a_maximum_cannot_begin():
    message = "'n | max(a)' holds a max over a that 'n/a' does not\n"
    with refused(PlanError, message + "  a max can be kept or reduced, not begun: write copy(a)"):
        xs.plan("n/a -> n | max(a)", xs.Mesh(a=2), (4,))


@pytest.mark.parametrize("dst", ["n | sum(a)", "n | sum(b)", "n | mean(b)"])
def test_no_sum_begins_where_a_maximum_ends(dst):
    message = f"between 'n | max(a)' and '{dst}' a max ends and a sum begins\n"
    with refused(PlanError, message + "  reduce first, then redistribute"):
        xs.plan(f"n | max(a) -> {dst}", xs.Mesh(a=2, b=2), (4,))


def test_a_plan_from_a_maximum_has_no_backward():
    mesh = xs.Mesh(a=2)
    message = "lacks a dual: max and min are not linear"
    apart = crossing("n | max(a)", "n/b", "a=3", "b=2", (2,))
    for call in (
        lambda: xs.plan("n | max(a) -> n", mesh, (4,)).backward,
        lambda: xs.plan("n | max(a) -> n", mesh, (4,), objective="forward+backward"),
        lambda: xs.reference.pullback(apart, [np.ones(2)] * 3, [np.ones(1)] * 2),
    ):
        with pytest.raises(LinearityError, match=message):
            call()
