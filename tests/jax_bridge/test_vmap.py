"""`vmap(axis_name=)`: a batch as the devices of one axis, without devices."""

from functools import partial

import jax
import numpy as np
import pytest

import jax_bridge as xj
import xshard as xs
from jax_bridge.testing.stacked import padded
from tests.cases import CASES, one_of_each
from tests.jax_bridge.helpers import in_jax
from xshard.testing.plans import in_numpy, plan_question

ONE_AXIS = {
    case.name: case.plan()
    for case in CASES
    # Means of three: fused into one loop, XLA multiplies by a third and adds before it rounds.
    if case.has_single_axis and case.dtype == "float32" and case.name != "mean-of-three"
}
X = np.arange(1.0, 1 + 8 * 4, dtype=np.float32).reshape(8, 4)
W = (X * 7) % 5 - 2


@in_jax
def test_every_kind_of_case_of_one_axis() -> None:
    """Values, and gradients inside, as on devices without types; every third case in both modes."""
    names = sorted(one_of_each(ONE_AXIS))
    assert len(names) > 10
    for seed, name in enumerate(names):
        plan = ONE_AXIS[name]
        modes = ("linear",) if seed % 3 else ("linear", "custom_vjp")
        question = plan_question(plan, seed)
        expected = in_numpy(question)

        def local(x, g, plan=plan, modes=modes):
            results = []
            for ad in modes:
                y, pull = jax.vjp(lambda x, ad=ad: xj.redistribute(x, plan, ad=ad), x)
                results.append((y, *pull(g)))
            return results

        given = padded(question.inputs[0], plan.source), padded(question.cotangents, plan.target)
        for y, g in jax.jit(jax.vmap(local, axis_name="a"))(*given):
            assert np.array_equal(y, padded(expected.outputs["output"], plan.target)), name
            assert np.array_equal(g, padded(expected.gradients[0], plan.source)), name


@pytest.mark.parametrize(
    ("expression", "in_axes", "out_axes", "factor"),
    [
        ("n/a d -> n d | copy(a)", 0, None, 1),
        ("n d | copy(a) -> n/a d", None, 0, 1),
        ("n/a d -> n d", 0, None, "first"),
        ("n d -> n/a d", None, 0, 4),
    ],
)
@in_jax
def test_gradients_outside(expression, in_axes, out_axes, factor) -> None:
    """Copies are right on both sides; what the convention makes of a replica at the border."""

    def whole(x):
        move = partial(xj.redistribute, layouts=expression)
        blocks = x.reshape(4, 2, 4) if in_axes == 0 else x
        out = jax.vmap(move, in_axes, 0, axis_name="a", axis_size=4)(blocks)
        return out[0] if out_axes is None else out.reshape(8, 4)

    assert np.array_equal(whole(X), X)
    gradient = jax.grad(lambda x: (whole(x) * W).sum())(X)
    if factor == "first":  # a replica's cotangent is that of one device, and the others have none
        assert np.array_equal(gradient[:2], W[:2]) and not gradient[2:].any()
    else:
        assert np.array_equal(gradient, factor * W)


@in_jax
def test_several_axes_are_refused() -> None:
    both = partial(xj.redistribute, layouts="n/a/b -> n")
    words = "a batch of vmap, and the expression names 2 axes in\n    'n/a/b -> n'"
    with pytest.raises(xs.errors.MeshError, match=words):
        jax.vmap(jax.vmap(both, axis_name="b"), axis_name="a")(X)
