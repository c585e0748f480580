"""Uneven blocks in JAX: padded to the largest, with nothing of the padding in any value or gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_bridge as xj
import xshard as xs
from jax_bridge.testing.stacked import padded, unpadded
from tests.jax_bridge.helpers import in_jax

AXES = xs.Mesh(a=2, b=4)
SHAPE = (7, 5)
X = np.arange(1.0, 36.0, dtype=np.float32).reshape(SHAPE)
EVERYWHERE = P(("a", "b"))


def on_blocks(local):
    mesh = jax.make_mesh(AXES.sizes, AXES.axes, (AxisType.Auto,) * 2)
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=EVERYWHERE, out_specs=EVERYWHERE, check_vma=False)
    )


def blocks_of(x, layout: str) -> np.ndarray:
    """Padded with NaN."""
    return padded(
        xs.reference.scatter(x, layout, AXES), xs.Sharding(xs.Layout.parse(layout), AXES, SHAPE), fill=np.nan
    )


@pytest.mark.parametrize("layout", ["n/b d", "n/(b,a) d", "n/a d/b", "n/zigzag(b) d/a", "n d"])
@in_jax
def test_the_mask_is_the_blocks(layout) -> None:
    sharding = xs.Sharding(xs.Layout.parse(layout), AXES, SHAPE)
    found = on_blocks(lambda x: xj.ops.valid_mask(layout, shape=SHAPE)[None])(np.zeros(8))
    ones = [np.ones(sharding.local_shape(d), bool) for d in range(8)]
    assert np.array_equal(found, padded(ones, sharding))


@pytest.mark.parametrize("check_vma", [True, False])
@in_jax
def test_a_loss_of_uneven_blocks(check_vma) -> None:
    """The mask keeps NaN out of a sum of squares; its gradient is the array's own, and 0 in the padding."""
    mesh = jax.make_mesh(AXES.sizes, AXES.axes, (AxisType.Auto,) * 2)

    def local(x):
        def loss(x):
            y = xj.redistribute(x, "n/b d -> n d/b", shape=SHAPE)
            mine = jnp.where(xj.ops.valid_mask("n d/b", shape=SHAPE), y, 0)
            return xj.redistribute((mine**2).sum(), "() | sum(b) -> ()")

        value, gradient = jax.value_and_grad(loss)(x[0])
        return value, gradient[None]

    both = jax.shard_map(local, mesh=mesh, in_specs=P("b"), out_specs=(P(), P("b")), check_vma=check_vma)
    sharding = xs.Sharding(xs.Layout.parse("n/b d"), xs.Mesh(b=4), SHAPE)
    blocks = padded(xs.reference.scatter(X, "n/b d", xs.Mesh(b=4)), sharding, fill=np.nan)
    value, gradient = jax.jit(both)(blocks)
    assert value == (X**2).sum()
    assert np.array_equal(gradient, padded(xs.reference.scatter(2 * X, "n/b d", xs.Mesh(b=4)), sharding))


@pytest.mark.parametrize(
    ("src", "dst"),
    [("n/b d", "n d/b"), ("n/a d/b", "n/b d/a"), ("n/zigzag(b) d", "n/cyclic(b) d"), ("n/(a,b) d", "n d")],
)
@in_jax
def test_values_and_gradients_of_weighted_sums(src, dst) -> None:
    weights = np.float32((X * 7) % 5 - 2)

    def local(x, w):
        def loss(x):
            y = xj.redistribute(x, f"{src} -> {dst}", shape=SHAPE)
            return jnp.where(xj.ops.valid_mask(dst, shape=SHAPE), y * w[0], 0).sum(), y

        gradient, y = jax.grad(loss, has_aux=True)(x[0])
        return y[None], gradient[None]

    mesh = jax.make_mesh(AXES.sizes, AXES.axes, (AxisType.Auto,) * 2)
    both = jax.shard_map(
        local, mesh=mesh, in_specs=EVERYWHERE, out_specs=(EVERYWHERE, EVERYWHERE), check_vma=False
    )
    y, gradient = jax.jit(both)(blocks_of(X, src), blocks_of(weights, dst))
    for found, array, layout in ((y, X, dst), (gradient, weights, src)):
        sharding = xs.Sharding(xs.Layout.parse(layout), AXES, SHAPE)
        expected = xs.reference.scatter(array, layout, AXES)
        assert all(map(np.array_equal, unpadded(np.asarray(found), sharding), expected))
        assert np.array_equal(found, padded(expected, sharding))


@in_jax
def test_errors_of_the_mask() -> None:
    for layout, kind, reason in [
        ("n/c d", xs.errors.NotationError, "unknown mesh axis 'c' in\n    'n/c d'"),
        ("n/a", xs.errors.ShapeError, "in 'n/a'"),
    ]:
        with pytest.raises(kind) as caught:
            jax.eval_shape(
                on_blocks(lambda x, text=layout: xj.ops.valid_mask(text, shape=SHAPE)[None]), np.zeros(8)
            )
        assert reason in str(caught.value)
