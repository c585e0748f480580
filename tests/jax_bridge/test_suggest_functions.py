"""`suggest` for losses of ordinary functions of JAX: each has a plan, and is right under its constraints."""

import contextlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_bridge as xj
import xshard as xs
from tests.jax_bridge.helpers import device_mesh, in_jax
from xshard.errors import PlanError

ONE = {"micro_batches": 1, "recompute": False, "gap": 0.9, "profile": "h100"}
D0 = np.int64(0)  # dims as numpy gives them
D1 = np.int64(1)


@jax.custom_vjp
def own_vjp(y: jax.Array) -> jax.Array:
    return jnp.sin(y)


own_vjp.defvjp(lambda y: (jnp.sin(y), y), lambda y, g: (g * jnp.cos(y),))

FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "roll": lambda y: jnp.roll(y, -1, D1),
    "cumsum": lambda y: jnp.cumsum(y, D1),
    "associative_scan": lambda y: lax.associative_scan(jnp.add, y, axis=D1),
    "take_along_axis": lambda y: jnp.take_along_axis(y, jnp.argsort(y, D1), D1),
    "sort": lambda y: jnp.sort(y, D0),
    "where": lambda y: jnp.where(y > 0, y, jnp.arange(8.0)),
    "pad": lambda y: jnp.pad(y, ((1, 2), (0, 0)), mode="edge"),
    "concatenate": lambda y: jnp.concatenate([y, y[:0], y[:1]], D0),
    "no rows": lambda y: lax.dynamic_update_slice(y, y[:0].reshape(4, 2, 0).reshape(0, 8), (1, 0)),
    "repeat": lambda y: jnp.repeat(y, jnp.array([1, 2] * 4), axis=0, total_repeat_length=12),
    "vmap": jax.vmap(lambda row: jnp.dot(row, row) * row),
    "scan": lambda y: lax.scan(lambda c, row: (c + row, jnp.sin(c)), y[0], y)[1],
    "scan of no rounds": lambda y: lax.scan(lambda c, row: (c + row, c), y[0], y[:0])[0],
    "scan that swaps": lambda y: lax.scan(lambda c, r: ((c[1], c[0] + r), None), (y[0], y[1]), y)[
        0
    ][0],
    "searchsorted": lambda y: y * jnp.searchsorted(jnp.arange(8.0), y),
    "cond": lambda y: lax.cond(y.sum() > 0, jnp.sin, jnp.cos, y),
    "fori_loop": lambda y: lax.fori_loop(0, 3, lambda i, c: c * 0.5 + y, y),
    "custom_vjp": own_vjp,
    "jit of nothing": lambda y: (jax.jit(lambda a: None)(y), y)[1],
    "casts": lambda y: y.astype(jnp.bfloat16).astype(jnp.float16).astype(jnp.float32),
    "nanmean": lambda y: jnp.nanmean(y, 1),
    "max of no rows": lambda y: y[:0].max(0, initial=1.0) + y[0],
}


def of_products(function: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    return lambda w, x: jnp.mean(function(x @ w) ** 2)


LOSSES = {name: of_products(function) for name, function in FUNCTIONS.items()}
LOSSES |= {
    "without parameters": lambda w, x: jnp.sin(x).mean(),
    "without inputs": lambda w, x: w[0, 0],
    "the parameter in a scan": lambda w, x: lax.scan(lambda c, r: (c + r.sum(), None), 0.0, w)[0],
}
W = np.random.default_rng(0).normal(size=(8, 8)).astype("f")
X = np.random.default_rng(1).normal(size=(8, 8)).astype("f")


@in_jax
def test_ordinary_functions_have_plans_that_are_right() -> None:
    """Constrained they are what one device computes, on axes of both types and on none of the context."""
    names = list(LOSSES)
    expected = jax.jit(lambda w, x: [LOSSES[name](w, x) for name in names])(W, X)
    of_name = dict(zip(names, expected, strict=True))
    for kind, mine in (("Auto", names[::2]), ("Explicit", names[1::2])):
        mesh = device_mesh(xs.Mesh(tp=2), kind)
        constrained = [
            xj.suggest(f, (W, X), mesh, **ONE).constrain(f) for f in map(LOSSES.get, mine)
        ]
        x = jax.device_put(X, jax.NamedSharding(mesh, jax.P(None, "tp")))
        step = jax.jit(lambda w, x, all_of=constrained: [f(w, x) for f in all_of])
        for name, found in zip(mine, step(W, x), strict=True):
            np.testing.assert_allclose(found, of_name[name], rtol=1e-4, err_msg=f"{kind}: {name}")


@in_jax
def test_gradients_on_explicit_axes() -> None:
    """With the mesh in the context or without it; arguments and gradients are sharded as suggested."""
    loss = lambda w, x: jnp.mean((x @ w) @ w.T)  # noqa: E731
    right = jax.grad(loss)(W, X)
    mesh = device_mesh(xs.Mesh(dp=2, tp=2), "Explicit")
    for given, context in (
        (mesh, contextlib.nullcontext()),
        (xs.Mesh(dp=2, tp=2), jax.set_mesh(mesh)),
    ):
        with context:
            plan = xj.suggest(loss, (W, X), given, fixed={"w": "i/tp o/dp"}, **ONE)
            args = [
                jax.device_put(a, jax.NamedSharding(mesh, spec))
                for a, spec in zip((W, X), plan.specs, strict=True)
            ]
            gradient = jax.jit(jax.grad(plan.constrain(loss)))(*args)
        assert gradient.sharding.spec == plan.specs[0] == jax.P("tp", "dp")
        np.testing.assert_allclose(gradient, right, rtol=1e-4)


@in_jax
def test_a_loss_without_a_batch_and_one_with_numbers_as_arrays() -> None:
    mesh = device_mesh(xs.Mesh(tp=2))
    losses = (
        (lambda w: jnp.mean((X @ w) ** 2), (W,)),
        (
            lambda w, x, temperature: jax.nn.softmax(x @ w / temperature)[0, 0],
            (W, X, jnp.float32(2)),
        ),
        (lambda a, b: a * b, (jnp.float32(3), jnp.float32(2))),
    )
    for loss, args in losses:
        plan = xj.suggest(loss, args, mesh, **ONE)
        assert str(plan)
        found = jax.jit(jax.grad(plan.constrain(loss)))(*args)
        np.testing.assert_allclose(found, jax.grad(loss)(*args), rtol=1e-4)
    with pytest.raises(
        PlanError, match="micro_batches=2, batch_parts=None do not divide the batch"
    ):
        xj.suggest(*losses[0], mesh, micro_batches=2, profile="h100")


@in_jax
def test_constants_are_no_losses() -> None:
    constants = (
        lambda w, x: jnp.float32(3.0),
        lambda w, x: jnp.arange(4.0).sum(),
        lambda w, x: jax.random.uniform(jax.random.key(0)),
        lambda w, x: jax.jit(lambda w: jnp.float32(2.0))(w),
    )
    for constant in constants:
        with pytest.raises(PlanError, match="computes nothing from the arrays of its arguments"):
            xj.suggest(constant, (W, X), xs.Mesh(tp=2), **ONE)
