"""torch functions inside JAX: values, gradients of any order, transformations, and no waiting for ever."""

from __future__ import annotations

import faulthandler
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType
from jax.test_util import check_grads

import xshard as xs
from jax_bridge.torch_interop import from_jax, from_torch, to_jax
from tests.interop.helpers import jax_mesh
from tests.jax_bridge.helpers import in_jax
from tests.torch_bridge.helpers import apart


def numbers(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.array(np.random.default_rng(seed).normal(size=shape))


def both():
    """The same function of torch and of JAX."""
    f = from_torch(lambda x, w: torch.tanh(x @ w), ("n i", "i o"), "n o", jax_mesh(a=1))
    return f, lambda x, w: jnp.tanh(x @ w)


def equal(a, b) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: jnp.allclose(x, y).item(), a, b)))


@pytest.mark.parametrize("jitted", [False, True])
@in_jax
def test_derivatives_are_those_of_jax(jitted) -> None:
    with jax.enable_x64(True):
        x = numbers(3, 4)
        w = numbers(4, 2, seed=1)

        def cube(f):
            return lambda x, w: (f(x, w) ** 3).sum()

        def curved(f):
            return lambda x, w: (jax.grad(cube(f))(x, w) ** 2).sum()

        jit = jax.jit if jitted else lambda f: f
        first, second = (lambda f, of=of: jax.grad(of(f), (0, 1)) for of in (cube, curved))
        for of in (lambda f: f, cube, first, second):
            torchs, jaxs = (jit(of(f))(x, w) for f in both())
            assert equal(torchs, jaxs)
        if jitted:
            check_grads(jit(both()[0]), (x, w), order=2, modes=["rev"])


@in_jax
def test_complex_gradients_are_jaxs_conjugates() -> None:
    with jax.enable_x64(True):
        z = numbers(4) + 1j * numbers(4, seed=1)
        f = from_torch(
            lambda x: torch.exp(x) * x.conj() + x**3 * (1 + 2j), "...", "...", jax_mesh(a=1)
        )

        def first(f):
            return jax.grad(lambda x: (f(x) * (2 - 1j)).sum().real)

        def second(f):
            return jax.grad(lambda x: (first(f)(x) * (1 + 3j)).sum().imag)

        g = lambda x: jnp.exp(x) * x.conj() + x**3 * (1 + 2j)  # noqa: E731
        assert (
            equal(f(z), g(z))
            and equal(first(f)(z), first(g)(z))
            and equal(second(f)(z), second(g)(z))
        )


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float8_e4m3fn", "int8", "bool", "complex64"]
)
@in_jax
def test_dtypes_stay_as_they_are(dtype) -> None:
    x = jnp.arange(6).reshape(2, 3).astype(dtype)
    y, n = from_torch(lambda x: (x.T, torch.ones(x.shape[:1])), "...", "...", jax_mesh(a=1))(x)
    assert y.dtype == x.dtype and n.dtype == jnp.float32
    assert np.asarray(y).tobytes() == np.asarray(x.T).tobytes()


@in_jax
def test_blocks_of_several_devices_say_how_gradients_add() -> None:
    """Of whole numbers, so that equality is exact."""
    mesh = jax_mesh(dp=2, tp=2)
    f = from_torch(
        lambda x, w: x @ w, ("n/dp i/tp", "i/tp o | copy(dp)"), "n/dp o | sum(tp) -> n/dp o", mesh
    )
    rng = np.random.default_rng(0)
    x, w, c = (
        jnp.array(rng.integers(-4, 5, shape), jnp.float32) for shape in ((4, 6), (6, 8), (4, 8))
    )
    for call in (f, jax.jit(f)):
        y, pull = jax.vjp(call, x, w)
        assert (y == x @ w).all()
        assert y.sharding.is_equivalent_to(jax.NamedSharding(mesh, jax.P("dp")), 2)
        for _ in range(2):  # a pullback may be used twice
            gx, gw = pull(c)
            assert (gx == c @ w.T).all() and (gw == x.T @ c).all()
    scaled = from_torch(lambda x: (x**2).sum(), "n/dp", "() | mean(dp) -> ()", mesh)
    assert scaled(jnp.ones(8)) == 4 and (jax.grad(scaled)(jnp.ones(8)) == 1).all()


@in_jax
def test_zigzag_stands_in_storage_order() -> None:
    f = from_torch(lambda x: x, "s/zigzag(a) -> s/zigzag(a)", "s/zigzag(a) -> s/a", jax_mesh(a=2))
    stored = jnp.array([0, 1, 6, 7, 2, 3, 4, 5])
    assert f(stored.astype("float32")).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


@in_jax
def test_gradients_reach_the_parameters_of_a_module() -> None:
    mesh = jax_mesh(dp=2)
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    parameters = dict(module.named_parameters())
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    blocks = {name: [p, p] for name, p in parameters.items()}
    arrays = to_jax(blocks, {"**": "..."}, mesh)
    f = from_torch(module, ("... | copy(dp)", "n/dp i"), "n/dp o", mesh)
    gradients = jax.jit(jax.grad(lambda p: (f(p, jnp.array(x)) ** 2).sum()))(arrays)
    (module(torch.tensor(x)) ** 2).sum().backward()
    for name, p in parameters.items():
        assert np.allclose(gradients[name], p.grad.numpy(), rtol=1e-4, atol=1e-5)


class Alone(torch.nn.Module):
    """A module that notices whether it is called while it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.calls: list[int] = []  # shared with copies
        self.most = [0]

    def __deepcopy__(self, memo) -> Alone:
        other = Alone()
        other.calls = self.calls
        other.most = self.most
        return other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(1)
        time.sleep(0.02)
        self.most[0] = max(self.most[0], len(self.calls))
        self.calls.pop()
        return self.weight * x


@in_jax
def test_devices_take_turns_with_a_module() -> None:
    """Which holds the parameters of one call at a time; the user's own keeps its own."""
    module = Alone()
    f = jax.jit(from_torch(module, ("...", "n/a"), "n/a", jax_mesh(a=4)))
    assert (f({"weight": jnp.full(1, 3.0)}, jnp.ones(8)) == 3).all()
    assert module.most == [1] and module.weight.item() == 1


@in_jax
def test_on_explicit_axes_arrays_are_brought_to_their_sharding() -> None:
    mesh = jax_mesh(AxisType.Explicit, dp=2)
    f = from_torch(lambda x, w: x * w, ("n/dp", "n/dp"), "n/dp", mesh)
    x = jnp.arange(4.0)
    w = jax.device_put(jnp.ones(4), jax.NamedSharding(mesh, jax.P("dp")))
    with jax.set_mesh(mesh):
        for call in (jax.grad(lambda x: f(x, w).sum()), jax.jit(jax.grad(lambda x: f(x, w).sum()))):
            assert (call(x) == 1).all()


@in_jax
def test_under_vmap() -> None:
    f, g = both()
    x = numbers(3, 4).astype("float32")
    w = numbers(4, 4).astype("float32")
    many = jnp.stack([x, 2 * x])
    assert equal(jax.vmap(f, (0, None))(many, w), jax.vmap(g, (0, None))(many, w))


@in_jax
def test_under_scan() -> None:
    f, g = both()
    x = numbers(3, 4).astype("float32")
    w = numbers(4, 4).astype("float32")

    def chain(f):
        return lambda x: jax.lax.scan(lambda x, _: (f(x, w), None), x, None, 3)[0].sum()

    assert equal(jax.jit(jax.grad(chain(f)))(x), jax.grad(chain(g))(x))


@in_jax
def test_a_function_may_write_to_its_blocks() -> None:
    f = from_torch(lambda x: x.add_(1), "n", "n", jax_mesh(a=1))
    x = jnp.zeros(64)
    assert (f(x) == 1).all() and (x == 0).all()


@in_jax
def test_one_inside_the_other_inside_the_one() -> None:
    mesh = jax_mesh(a=2)
    inner = from_torch(torch.sin, "n/a", "n/a", mesh)
    outer = from_jax(lambda x: inner(x) * 2, "n/a", "n/a", mesh)
    x = [torch.ones(4, requires_grad=True), torch.zeros(4, requires_grad=True)]
    y = outer(x)
    torch.cat(y).sum().backward()
    assert torch.allclose(y[0], 2 * torch.ones(4).sin()) and torch.allclose(
        x[1].grad, torch.full((4,), 2.0)
    )


def unhappy(x: torch.Tensor) -> torch.Tensor:
    if type(x) is torch.Tensor:  # no fake one
        raise KeyError("torch is unhappy")
    return x


@in_jax
def test_errors_of_the_function_keep_their_message() -> None:
    mesh = jax_mesh(a=1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="KeyError: 'torch is unhappy'"):
        jax.block_until_ready(from_torch(unhappy, "n", "n", mesh)(jnp.ones(3)))
    with pytest.raises(RuntimeError, match="same reduction dim"):  # already when it is traced
        from_torch(lambda x: x @ x, "n d", "n d", mesh)(jnp.ones((2, 3)))
    other = from_torch(lambda x: x if type(x) is torch.Tensor else x[1:], "n", "n", mesh)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"returns \(\(3,\).*\(\(2,\).* for fake tensors"
    ):
        jax.block_until_ready(other(jnp.ones(3)))


@in_jax
def test_what_is_refused_when_it_is_traced() -> None:
    mesh = jax_mesh(a=2)
    for fn, ins, outs, kind, message in (
        (torch.sin, "n/b", "n", xs.errors.NotationError, "unknown mesh axis 'b' in\n    'n/b'"),
        (torch.sin, "n/a", "n/a", xs.errors.ShapeError, "needs equal blocks"),
        (
            torch.argmax,
            "n",
            "...",
            xs.errors.DtypeError,
            "is torch.int64, which JAX would make int32",
        ),
        (lambda x: 3, "n", "...", xs.XshardError, "returns int"),
        (
            torch.sin,
            ("n", "n"),
            "n",
            xs.XshardError,
            "in_layouts: the arrays .* differ: 1 items, and 2",
        ),
    ):
        with pytest.raises(kind, match=message):
            from_torch(fn, ins, outs, mesh)(jnp.ones(3))
    with pytest.raises(xs.errors.DtypeError, match="torch has no int4"):
        from_torch(torch.sin, "n", "n", mesh)(jnp.ones(4, "int4"))


def _many_devices() -> None:
    faulthandler.dump_traceback_later(300, exit=True)
    os.environ.pop("XLA_FLAGS", None)
    os.environ["PJRT_NPROC"] = "2"  # JAX has not begun here
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    f = from_torch(lambda x: x * 2, "n/a d", "n/a d", mesh)
    x = jnp.ones((1024, 1024))
    run = jax.jit(jax.grad(lambda x: f(x).sum()))
    for _ in range(3):
        assert (jax.block_until_ready(run(x)) == 2).all()


def test_more_devices_than_threads_do_not_wait_for_each_other() -> None:
    """With blocks of this size they would, in callbacks whose arguments XLA's own threads copy."""
    apart(_many_devices)
