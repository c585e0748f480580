"""Gradients in JAX: of collectives under both conventions, as on a single device; outside of shard_map."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_bridge as xj
import xshard as xs
from tests.conventions import CASES, Case, N
from tests.jax_bridge.domains import sharded
from tests.jax_bridge.helpers import device_mesh, in_jax

MESH = xs.Mesh(a=N)
X = np.arange(1.0, 1 + 8 * 4, dtype=np.float32).reshape(8, 4)
WEIGHTS = (X * 7) % 5 - 2


def on_devices(local, case: Case, mode: str):
    """`local` on every device's block; the results stacked. With types one value is invariant."""
    blocks = jnp.asarray(np.stack(case.blocks()), np.float32)
    if mode == "pmap":
        return jax.pmap(local, "a", devices=jax.devices()[:N])(blocks)
    if mode == "novma" or case.given != "one":
        return jax.jit(sharded(local, MESH, check_vma=mode == "vma"))(blocks)
    mapped = jax.shard_map(
        lambda x: local(x)[None], mesh=device_mesh(MESH), in_specs=P(), out_specs=P("a")
    )
    return jax.jit(mapped)(blocks[0])


@pytest.mark.parametrize("mode", ["vma", "novma", "pmap"])
@pytest.mark.parametrize("name", CASES)
@in_jax
def test_the_gradient_is_that_of_a_single_device(name, mode) -> None:
    case = CASES[name]
    leaves = [jnp.asarray(block, np.float32) for block in case.leaves(case.blocks())]
    expected = jax.grad(lambda leaves: case.total(leaves, jnp.concatenate))(leaves)
    named = partial(getattr(xj.ops, case.op), axis="a", **case.options)
    moves = partial(xj.redistribute, layouts=case.expression), named

    def gradients(x):
        device = 0 if case.is_replicated() else jax.lax.axis_index("a").astype(np.float32)
        return jnp.stack(
            [jax.grad(lambda x, f=move: case.loss(x, f(x), device))(x) for move in moves]
        )

    found = np.asarray(on_devices(gradients, case, mode))
    assert (np.abs(found).sum(axis=(0, 2, 3)) > 0).all()
    for device in range(N):
        assert np.array_equal(found[device], [expected[device % len(expected)]] * 2)


def over_a(expression: str, **options):
    """`redistribute` on every device, over specs that omit `a` where the expression holds one value."""

    def spec(side: str) -> P:
        return P(*("a" if "/a" in dim else None for dim in side.partition("|")[0].split()))

    ins, outs = map(spec, expression.split(" -> "))
    move = partial(xj.redistribute, layouts=expression)
    return jax.shard_map(move, mesh=device_mesh(MESH), in_specs=ins, out_specs=outs, **options)


# The gradient taken outside, as a multiple of the identity's. Without types a replica at the border is no
# single value: JAX's convention for an axis that a spec omits, and the reason to write copies.
OUTSIDE = [
    (True, "n/a d -> n d", 1),
    (True, "n d -> n/a d", 1),
    (True, "n d -> n d", 1),
    (False, "n/a d -> n d | copy(a)", 1),
    (False, "n d | copy(a) -> n/a d", 1),
    (False, "n d | copy(a) -> n d | copy(a)", 1),
    (False, "n/a d -> n d", 1 / N),
    (False, "n d -> n/a d", N),
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
def test_in_the_padding_of_an_uneven_extreme_no_share_is_divided_by_none() -> None:
    """5 columns over `b`: nobody wins the last one of the devices of its second half."""
    blocks = np.array([[[1, 2, 3]], [[1, 2, 0]], [[4, 1, 3]], [[4, 1, 0]]], np.float32)
    extreme = partial(xj.redistribute, layouts="n d/b | max(a) -> n d/b", shape=(1, 5))
    gradient = sharded(jax.grad(lambda x: extreme(x).sum()), xs.Mesh(a=2, b=2))
    with jax.debug_nans(True):
        found = gradient(blocks)
    assert found[:, 0].tolist() == [[0, 1, 0.5], [0, 1, 0], [1, 0, 0.5], [1, 0, 0]]
    assert np.array_equal(jax.jit(gradient)(blocks), found)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "complex64"])
@in_jax
def test_a_gradient_has_the_dtype_of_its_value(dtype) -> None:
    moved = over_a("n/a d -> n d")
    x = jnp.asarray(X, dtype)
    gradient = jax.jit(jax.grad(lambda x: (moved(x).real.astype("float32") * WEIGHTS).sum()))(x)
    assert gradient.dtype == x.dtype and np.array_equal(gradient, jnp.asarray(WEIGHTS, dtype))


@in_jax
def test_types_are_those_of_the_layouts() -> None:
    """At the exits JAX's own check: a result that omits `a` is invariant, one that names it varies."""
    seen = {}

    def local(x):
        y, pull = jax.vjp(lambda x: xj.redistribute(x, "n/a d -> n d"), x)
        z, push = jax.vjp(lambda y: xj.redistribute(y, "n d -> n d | copy(a)"), y)
        seen.update(x=x, y=y, z=z, dy=push(z)[0], dx=pull(y)[0])
        return y

    jax.make_jaxpr(jax.shard_map(local, mesh=device_mesh(MESH), in_specs=P("a"), out_specs=P()))(X)
    varies = {name: bool(jax.typeof(v).manual_axis_type.varying) for name, v in seen.items()}
    assert varies == {"x": True, "y": False, "z": True, "dy": False, "dx": True}


@in_jax
def test_whole_numbers_pass_through_differentiated_code() -> None:
    moved = over_a("n/a d -> n d")
    order = np.roll(np.arange(8), 3)[:, None].repeat(4, 1)
    gradient = jax.grad(lambda x, order: (moved(x)[moved(order)[:, 0]] * WEIGHTS).sum())(X, order)
    assert np.array_equal(gradient[order[:, 0]], WEIGHTS)
