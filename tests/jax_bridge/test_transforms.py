"""A plan under every transformation of JAX, with and without types: a row each, which is a program.

Moving blocks does not change the global array: a row gives the same for an array that is not moved.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.jet import jet
from jax.sharding import PartitionSpec as P

import jax_bridge as xj
import xshard as xs
from tests.jax_bridge.helpers import device_mesh, in_jax, placed

MESH = xs.Mesh(a=4, b=2)
X = np.arange(1.0, 1 + 8 * 4, dtype=np.float32).reshape(8, 4)
T = (X * 5) % 7 - 3  # tangents
W = (X * 7) % 5 - 2  # weights and cotangents


class Moved:
    """The argument of a row: a function on blocks, and how it is run on all devices."""

    def __init__(
        self, expression: str, src: P, dst: P, check_vma: bool, ad: str = "linear"
    ) -> None:
        self.expression = expression
        self.check_vma = check_vma
        self.ad = ad
        self.specs = {"src": src, "dst": dst, "all": P()}

    def op(self, x):
        """On one device's block."""
        if "," in self.expression:
            identity = xj.redistribute(np.eye(4, dtype=np.float32), "d f -> d f/a")
            return xj.einsum(self.expression, x, identity, profile="bandwidth")
        return xj.redistribute(x, self.expression, ad=self.ad)

    def spread(self, local, in_specs, out_specs):
        """On all devices. A spec: "src" or "dst"."""
        ins, outs = jax.tree.map(self.specs.get, (in_specs, out_specs))
        options = {"mesh": device_mesh(MESH), "check_vma": self.check_vma}
        return jax.shard_map(local, in_specs=ins, out_specs=outs, **options)

    @property
    def whole(self):
        """On the global array."""
        return self.spread(self.op, ("src",), "dst")


class Unmoved(Moved):
    """The same programs on an array that stays where it is, on one device."""

    def __init__(self) -> None:
        pass

    def op(self, x):
        return x

    def spread(self, local, in_specs, out_specs):
        return local


def cubes(m, W):
    return lambda x: (m.whole(x) ** 3 * W).sum()


def grad_inside(m, X, T, W):
    return m.spread(jax.grad(lambda x, w: (m.op(x) ** 2 * w).sum()), ("src", "dst"), "src")(X, W)


def grad_inside_of_jit(m, X, T, W):
    local = jax.grad(lambda x, w: jax.jit(m.op)(x * w[0, 0]).sum())
    return jax.jit(m.spread(local, ("src", "all"), "src"))(X, W[:1, :1])


def vjp_outside(m, X, T, W):
    y, pull = jax.vjp(m.whole, X)
    return y, pull(jnp.asarray(W))


def vjp_inside(m, X, T, W):
    def local(x, w):
        y, pull = jax.vjp(m.op, x)
        return y, *pull(w)

    return m.spread(local, ("src", "dst"), ("dst", "src"))(X, W)


def jvp_inside(m, X, T, W):
    square = lambda x: m.op(x) ** 2  # noqa: E731
    return m.spread(lambda x, t: jax.jvp(square, (x,), (t,)), ("src", "src"), ("dst", "dst"))(X, T)


def vmap_inside(m, X, T, W):
    batched = m.spread(jax.vmap(m.op, in_axes=2, out_axes=2), ("src",), "dst")
    return batched(jnp.stack([X, T, W], axis=2))


def linearize(m, X, T, W):
    y, push = jax.linearize(lambda x: m.whole(x) ** 2, X)
    return y, push(T)


def scan(m, X, T, W):
    def steps(x):
        return jax.lax.scan(lambda c, t: (m.whole(c) * 2 - t, c.sum()), x, jnp.stack([X, T, W]))

    return steps(X), jax.grad(lambda x: (steps(x)[0] * W).sum())(X)


def cond_and_while(m, X, T, W):
    def loop(x):
        step = jax.lax.cond(x[0, 0] > 0, lambda x: m.whole(x) * 2, lambda x: x, x)
        return jax.lax.fori_loop(0, 3, lambda _, x: m.whole(x) + 1, step)

    return loop(X), jax.grad(lambda x: (loop(x) * W).sum())(X)


def export(m, X, T, W):
    exported = jax.export.export(jax.jit(jax.grad(lambda x: (m.whole(x) ** 2 * W).sum())))(X)
    # It runs on as many devices as it was made for.
    mesh = {8: MESH, 1: xs.Mesh(a=1, b=1)}[exported.nr_devices]
    return jax.jit(exported.call)(placed(X, device_mesh(mesh)))


def taylor_series(m, X, T, W):
    def local(x, t):
        y, (first, second) = jet(lambda x: m.op(x) * m.op(x), (x,), ((t, jnp.zeros_like(t)),))
        return y, first, second

    # Jitted, `jet` rounds its factorials in another way: for all moves alike.
    return jax.jit(m.spread(local, ("src", "src"), ("dst", "dst", "dst")))(X, T)


ROWS: dict[str, Callable[..., object]] = {  # programs of what moves, X, T and W
    "eager": lambda m, X, T, W: m.whole(X),
    "jit": lambda m, X, T, W: jax.jit(m.whole)(X),
    "grad_outside": lambda m, X, T, W: jax.grad(lambda x: (m.whole(x) ** 2 * W).sum())(X),
    "grad_inside": grad_inside,
    "grad_inside_of_jit": grad_inside_of_jit,
    "vjp_outside": vjp_outside,
    "vjp_inside": vjp_inside,
    "jvp_outside": lambda m, X, T, W: jax.jvp(lambda x: m.whole(x) ** 2, (X,), (T,)),
    "jvp_inside": jvp_inside,
    "jacfwd": lambda m, X, T, W: jax.jacfwd(lambda x: m.whole(x) * W)(X),
    "jacrev": lambda m, X, T, W: jax.jacrev(lambda x: m.whole(x) * W)(X),
    "hessian": lambda m, X, T, W: jax.hessian(cubes(m, W))(X),
    "grad_of_grad": lambda m, X, T, W: jax.grad(lambda x: (jax.grad(cubes(m, W))(x) * T).sum())(X),
    "jvp_of_grad": lambda m, X, T, W: jax.jvp(jax.grad(cubes(m, W)), (X,), (T,)),
    "grad_of_jvp": lambda m, X, T, W: jax.grad(lambda x: jax.jvp(cubes(m, W), (x,), (T,))[1])(X),
    "linearize": linearize,
    "linear_transpose": lambda m, X, T, W: jax.linear_transpose(m.whole, X)(jnp.asarray(W)),
    "vmap_outside": lambda m, X, T, W: jax.vmap(m.whole, in_axes=2, out_axes=1)(
        jnp.stack([X, T, W], axis=2)
    ),
    "vmap_inside": vmap_inside,
    "vmap_of_grad": lambda m, X, T, W: jax.vmap(jax.grad(cubes(m, W)))(jnp.stack([X, T, W])),
    "remat": lambda m, X, T, W: jax.grad(jax.checkpoint(cubes(m, W)))(X),
    "scan": scan,
    "cond_and_while": cond_and_while,
    "export": export,
    "taylor_series": taylor_series,
}
# Without types, the gradient outside of a gathered value is that of copies: `jax_bridge.autodiff.function`.
MOVES = {
    "all-to-all": ("n/a d -> n d/a", P("a"), P(None, "a"), True),
    "exchange": ("n/b d/a -> n/a d/b", P("b", "a"), P("a", "b"), True),
    "exchange-untyped": ("n/b d/a -> n/a d/b", P("b", "a"), P("a", "b"), False),
    "gather": ("n/a d -> n d", P("a"), P(), True),
    "gather-untyped": ("n/a d -> n d | copy(a)", P("a"), P(), False),
    # A product with the identity.
    "einsum": ("n/b d, d f/a -> n/a f", P("b"), P("a"), True),
}
# Every device has a loss of its own there, of its own copy: their gradients add up.
ADD_UP = ("grad_inside", "grad_inside_of_jit", "vjp_inside")


COMPOSED = (
    "jacrev",
    "hessian",
    "grad_of_grad",
    "jvp_of_grad",
    "grad_of_jvp",
    "scan",
    "cond_and_while",
)
# What a rule for reverse mode cannot do. (JAX takes no function with a rule of its own through `jet`.)
FORWARD = ("jvp_outside", "jvp_inside", "jacfwd", "grad_of_jvp", "linearize", "linear_transpose")
REVERSE = [name for name in ROWS if name not in (*FORWARD, "taylor_series")]


@functools.cache
def expected_of(name: str) -> list[np.ndarray]:
    """The results of a row for an array that is not moved: one run for all moves and modes."""
    return [np.asarray(x) for x in jax.tree.leaves(ROWS[name](Unmoved(), X, T, W))]


def results_of(name: str, move: str, ad: str) -> list[jax.Array]:
    """The results of a row for a moved array: jitted, but for a gather under one transformation."""
    program = functools.partial(ROWS[name], Moved(*MOVES[move], ad=ad))
    jitted = (move != "gather" or name in COMPOSED) and name not in ("eager", "export")
    return jax.tree.leaves((jax.jit(program) if jitted else program)(X, T, W))


# All rows with a collective. For the other moves every other row has types: only their steps differ, and
# `test_lower.py` has every kind of step. Gradients inside differ by the types of a gather: both.
LINEAR = [("all-to-all", name) for name in ROWS] + [("gather", name) for name in ADD_UP]
for typed, untyped in (("gather", "gather-untyped"), ("exchange-untyped", "exchange")):
    LINEAR += [((typed, untyped)[i % 2 or name in ADD_UP], name) for i, name in enumerate(ROWS)]
# With a rule, which is the same for all moves: a collective with types, or a gather without.
RULED = [(("all-to-all", "gather-untyped")[i % 2], name) for i, name in enumerate(REVERSE)]


@pytest.mark.parametrize(
    ("move", "ad", "name"),
    [(move, "linear", name) for move, name in LINEAR]
    + [("einsum", "linear", name) for name in ROWS]
    + [(move, "custom_vjp", name) for move, name in RULED],
)
@in_jax
def test_a_moved_array_is_as_good_as_one_that_is_not(move, ad, name) -> None:
    *values, last = expected_of(name)
    if move == "gather-untyped" and name in ADD_UP:
        last = 4 * last
    for found, expected in zip(results_of(name, move, ad), [*values, last], strict=True):
        assert found.dtype == expected.dtype and np.array_equal(found, expected)


@pytest.mark.parametrize("name", FORWARD)
@in_jax
def test_what_it_cannot_do_names_the_mode_that_can(name) -> None:
    with pytest.raises(xs.XshardError, match='ad="linear"'):
        ROWS[name](Moved(*MOVES["all-to-all"], ad="custom_vjp"), X, T, W)


@in_jax
def test_with_a_rule_jaxprs_name_the_collectives() -> None:
    for ad, named in (("custom_vjp", True), ("linear", False)):
        moved = Moved(*MOVES["all-to-all"], ad=ad)
        text = str(jax.make_jaxpr(jax.grad(lambda x, m=moved: (m.whole(x) ** 2).sum()))(X))
        assert text.count("all_to_all[") == (2 if named else 0)
        assert ("xshard_move" in text) != named


@in_jax
def test_a_maximum_has_a_rule_for_reverse_mode() -> None:
    specs = {"mesh": device_mesh(MESH), "in_specs": P("a", "b"), "out_specs": P("a")}

    def loss(x, ad):
        local = functools.partial(xj.redistribute, layouts="n/a d | max(b) -> n/a d", ad=ad)
        return (jax.shard_map(local, **specs)(x) ** 2).sum()

    found, expected = (jax.grad(loss)(jnp.asarray(X), ad) for ad in ("custom_vjp", "linear"))
    assert expected.any() and np.array_equal(found, expected)
    with pytest.raises(xs.XshardError, match='ad="linear"'):
        jax.jvp(lambda x: loss(x, "custom_vjp"), (X,), (T,))
    with pytest.raises(xs.XshardError, match="ad is 'jvp', not Derivatives"):
        xj.redistribute(jnp.ones(2), "n -> n", ad="jvp")
