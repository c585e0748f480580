"""Gradients in JAX: inside and outside of shard_map, with and without types, of higher order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_bridge as xj
from tests.jax_bridge.helpers import in_jax

SIZE = 4
X = np.arange(1.0, 1 + 8 * 4, dtype=np.float32).reshape(8, 4)
WEIGHTS = (X * 7) % 5 - 2


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((SIZE,), ("a",), (AxisType.Auto,), devices=jax.devices()[:SIZE])


def over_a(expression: str, **options):
    """`redistribute` on every device, over specs that omit `a` where the expression holds one value."""

    def spec(side: str) -> P:
        return P(*("a" if "/a" in dim else None for dim in side.partition("|")[0].split()))

    src, dst = expression.split(" -> ")
    return jax.shard_map(
        lambda x: xj.redistribute(x, expression),
        mesh=mesh(),
        in_specs=spec(src),
        out_specs=spec(dst),
        **options,
    )


# The gradient taken outside, as a multiple of the identity's. Without types a replica at the border is no
# single value: JAX's convention for an axis that a spec omits, and the reason to write copies.
OUTSIDE = [
    (True, "n/a d -> n d", 1),
    (True, "n d -> n/a d", 1),
    (True, "n d -> n d", 1),
    (False, "n/a d -> n d | copy(a)", 1),
    (False, "n d | copy(a) -> n/a d", 1),
    (False, "n d | copy(a) -> n d | copy(a)", 1),
    (False, "n/a d -> n d", 1 / SIZE),
    (False, "n d -> n/a d", SIZE),
    (False, "n d -> n d", 1),
]


@pytest.mark.parametrize(("check_vma", "expression", "factor"), OUTSIDE)
@in_jax
def test_gradients_taken_outside(check_vma, expression, factor) -> None:
    moved = over_a(expression, check_vma=check_vma)
    assert np.array_equal(moved(X), X)
    gradient = jax.grad(lambda x: (moved(x) * WEIGHTS).sum())(X)
    assert np.array_equal(gradient, factor * WEIGHTS)


@in_jax
def test_gradients_of_sums_and_their_duals() -> None:
    """y = sum of f(copy): the cotangent that reaches the replica is the sum over the devices."""

    def local(x):
        mine = xj.ops.copy_to(x, "a") * (1 + jax.lax.axis_index("a"))
        return xj.ops.all_reduce(mine, "a", grad="replicated")

    total = jax.shard_map(local, mesh=mesh(), in_specs=P(), out_specs=P())
    assert np.array_equal(total(X), 10 * X)
    assert np.array_equal(jax.grad(lambda x: (total(x) * WEIGHTS).sum())(X), 10 * WEIGHTS)


@pytest.mark.parametrize("kind", ["max", "min"])
@in_jax
def test_gradients_of_extremes_go_to_the_winners_in_equal_shares(kind) -> None:
    values = np.array([[3, 1, 2, 5], [3, 1, 0, 4], [1, 1, 2, 5], [0, 1, 2, 5]], np.float32)
    found = jax.shard_map(
        lambda x: xj.ops.all_reduce(x[0], "a", op=kind, grad="replicated"),
        mesh=mesh(),
        in_specs=P("a"),
        out_specs=P(),
    )
    best = values.max(0) if kind == "max" else values.min(0)
    assert np.array_equal(found(values), best)
    won = values == best
    gradient = jax.grad(lambda x: (found(x) * 12).sum())(values)
    assert np.array_equal(gradient, 12 * won / won.sum(0))


@in_jax
def test_an_uneven_extreme_keeps_padding_out_of_the_gradient() -> None:
    blocks = np.array([[1, 2, np.nan], [4, 1, np.nan]], np.float32).reshape(2, 1, 3)  # 5 columns over 2

    def local(x):
        expression = "n d/b | max(a) -> n d/b"
        return xj.redistribute(x[0], expression, shape=(1, 5))[None]

    both = jax.make_mesh((2, 2), ("a", "b"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    stacked = np.zeros((2, 1, 6), np.float32)
    stacked[:, :, :3] = [[[1, 2, 3]], [[4, 1, 3]]]
    stacked[:, :, 3:] = blocks
    moved = jax.shard_map(local, mesh=both, in_specs=P("a", None, "b"), out_specs=P(None, None, "b"))
    assert np.array_equal(moved(stacked), [[[4, 2, 3, 4, 2, 0]]])
    with jax.debug_nans(True):  # in the padding nobody wins: no share is divided by none
        gradient = jax.grad(lambda x: moved(x).sum())(np.nan_to_num(stacked))
    assert np.array_equal(gradient[:, 0], [[0, 1, 0.5, 0, 1, 0], [1, 0, 0.5, 1, 0, 0]])
    assert np.array_equal(jax.jit(jax.grad(lambda x: moved(x).sum()))(stacked), gradient)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "complex64"])
@in_jax
def test_a_gradient_has_the_dtype_of_its_value(dtype) -> None:
    moved = over_a("n/a d -> n d")
    x = jnp.asarray(X, dtype)
    gradient = jax.jit(jax.grad(lambda x: (moved(x).real.astype("float32") * WEIGHTS).sum()))(x)
    assert gradient.dtype == x.dtype and np.array_equal(gradient, jnp.asarray(WEIGHTS, dtype))


@in_jax
def test_the_types_of_values_and_cotangents() -> None:
    """At the exits JAX's own check: a result that omits `a` is invariant, one that names it varies."""
    seen = {}

    def local(x):
        y, pull = jax.vjp(lambda x: xj.redistribute(x, "n/a d -> n d"), x)
        z, push = jax.vjp(lambda y: xj.redistribute(y, "n d -> n d | copy(a)"), y)
        seen.update(x=x, y=y, z=z)
        seen["dy"], seen["dx"] = push(z)[0], pull(y)[0]
        return y

    jax.make_jaxpr(jax.shard_map(local, mesh=mesh(), in_specs=P("a"), out_specs=P()))(X)
    varies = {name: bool(jax.typeof(v).manual_axis_type.varying) for name, v in seen.items()}
    assert varies == {"x": True, "y": False, "z": True, "dy": False, "dx": True}


@in_jax
def test_whole_numbers_pass_through_differentiated_code() -> None:
    moved = over_a("n/a d -> n d")

    def loss(x, order):
        return (moved(x)[moved(order)[:, 0]] * WEIGHTS).sum()

    order = np.roll(np.arange(8), 3)[:, None].repeat(4, 1)
    gradient = jax.grad(loss)(X, order)
    assert np.array_equal(gradient[order[:, 0]], WEIGHTS)
