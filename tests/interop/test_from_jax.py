"""JAX functions inside torch: values, gradients of any order, and what autograd promises."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, PartitionSpec

import xshard as xs
from jax_bridge.torch_interop import from_jax
from tests.interop.helpers import blocks_of, gathered, jax_mesh
from tests.jax_bridge.helpers import in_jax

P = PartitionSpec


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def layer(mesh: jax.sharding.Mesh):
    """tanh(x @ w) on any mesh of one device."""
    return from_jax(lambda x, w: jnp.tanh(x @ w), ("n i", "i o"), "n o", mesh)


@in_jax
def test_derivatives_of_two_orders_are_those_of_torch() -> None:
    with jax.enable_x64(True):
        f = layer(jax_mesh(a=1))
        x = leaf(3, 4)
        w = leaf(4, 2)
        assert torch.autograd.gradcheck(f, (x, w))
        assert torch.autograd.gradgradcheck(f, (x, w))
        g, expected = (
            torch.autograd.grad((y**3).sum(), (x, w)) for y in (f(x, w), torch.tanh(x @ w))
        )
        assert all(map(torch.allclose, g, expected))


@in_jax
def test_complex_gradients_are_torchs_conjugates() -> None:
    with jax.enable_x64(True):
        f = from_jax(lambda z: jnp.exp(z) * z.conj() + z**3 * (1 + 2j), "...", "...", jax_mesh(a=1))
        z = leaf(4, dtype=torch.complex128)
        assert torch.autograd.gradcheck(f, (z,)) and torch.autograd.gradgradcheck(f, (z,))


def sharded(mesh: jax.sharding.Mesh):
    """x @ w, the contraction over tp, on every device its blocks."""

    options = {"in_specs": (P("dp", "tp"), P("tp", None)), "out_specs": P("dp", None)}
    whole = jax.shard_map(lambda x, w: jax.lax.psum(x @ w, "tp"), mesh=mesh, **options)
    return from_jax(whole, ("n/dp i/tp", "i/tp o"), "n/dp o", mesh)


@in_jax
def test_blocks_of_several_devices_have_the_gradients_of_the_whole() -> None:
    """Of whole numbers, so that equality is exact: the pullback is the adjoint."""
    axes = xs.Mesh(dp=2, tp=2)
    mesh = jax_mesh(dp=2, tp=2)
    rng = np.random.default_rng(0)
    X, W, C = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((4, 6), (6, 8), (4, 8)))
    x, w = (blocks_of(v, t, axes) for v, t in ((X, "n/dp i/tp"), (W, "i/tp o")))
    for block in (*x, *w):
        block.requires_grad_()
    y = sharded(mesh)(x, w)
    assert np.array_equal(gathered(y, "n/dp o", axes, (4, 8)), X @ W)
    assert torch.equal(y[0], y[1])  # replicas along tp
    gradients = torch.autograd.grad(y, [*x, *w], blocks_of(C, "n/dp o", axes))
    gx = gathered(gradients[:4], "n/dp i/tp", axes, X.shape)
    gw = gathered(gradients[4:], "i/tp o", axes, W.shape)
    assert np.array_equal(gx, C @ W.T) and np.array_equal(gw, X.T @ C)
    assert ((X @ W) * C).sum() == (gx * X).sum() == (gw * W).sum()
    assert torch.equal(gradients[4], gradients[6])  # a replica's gradient is whole on every device


@in_jax
def test_addends_come_back_as_copies() -> None:
    """An output `sum(a)` has a cotangent `copy(a)`: on a mesh of Explicit axes JAX has both."""
    mesh = jax_mesh(AxisType.Explicit, a=2)
    contracted = lambda x: jnp.einsum("ni,ni->n", x, x, out_sharding=P(None, unreduced={"a"}))  # noqa: E731
    f = from_jax(contracted, "n i/a", "n | sum(a)", mesh)
    x = [torch.full((2, 3), float(i + 1), requires_grad=True) for i in range(2)]
    y = f(x)
    assert [block.tolist() for block in y] == [[3.0, 3.0], [12.0, 12.0]]
    gradients = torch.autograd.grad(y, x, [torch.tensor([1.0, 5.0])] * 2)
    assert [g.tolist() for g in gradients] == [[[2.0] * 3, [10.0] * 3], [[4.0] * 3, [20.0] * 3]]


@in_jax
def test_a_graph_may_be_used_twice_if_it_is_retained() -> None:
    x = leaf(3, 4, dtype=torch.float32)
    w = leaf(4, 2, dtype=torch.float32)
    y = layer(jax_mesh(a=1))(x, w).sum()
    first, second = (torch.autograd.grad(y, w, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    y.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


@in_jax
def test_without_gradients_nothing_is_kept() -> None:
    f = layer(jax_mesh(a=1))
    x = leaf(3, 4, dtype=torch.float32)
    w = leaf(4, 2, dtype=torch.float32)
    with torch.no_grad():
        y = f(x, w)
    assert not y.requires_grad and y.grad_fn is None
    assert not f(x.detach(), w.detach()).requires_grad
    y = f(x.detach(), w)
    y.sum().backward()
    assert x.grad is None and w.grad is not None
    node = weakref.ref(y.grad_fn)
    del y
    gc.collect()
    assert node() is None


@pytest.mark.parametrize("written", ["input", "output"])
@in_jax
def test_writes_before_the_backward_pass_are_noticed(written) -> None:
    """JAX's pullback may keep torch's own memory."""
    x = leaf(64, dtype=torch.float32)
    at_input = written == "input"
    y = from_jax((lambda x: jnp.sin(x) * x) if at_input else jnp.exp, "n", "n", jax_mesh(a=1))(x)
    expected = x.sin() + x * x.cos() if at_input else x.exp()
    with torch.no_grad():
        (x if at_input else y).mul_(2)
    said = None
    try:
        y.sum().backward()
    except RuntimeError as error:
        said = str(error)
    # JAX may have kept no memory of its output.
    assert (
        "by an inplace operation" in said if at_input or said else torch.allclose(x.grad, expected)
    )


@in_jax
def test_what_is_returned_as_it_came_is_another_tensor() -> None:
    f = from_jax(lambda x: (x, x.T), "n d", "...", jax_mesh(a=1))
    x = leaf(8, 8, dtype=torch.float32)
    same, turned = f(x)
    same.data.zero_()
    assert x.abs().sum() > 0 and torch.equal(turned, x.T)


@in_jax
def test_whatever_jax_takes_may_be_passed() -> None:
    def fn(params, x, scale, key):
        y = x @ params["w"] * scale + 0 * jax.random.normal(key, ())
        return {"y": y, "best": (y.argmax(axis=1), params["unused"])}

    f = from_jax(fn, ({"w": "i o", "unused": "u"}, "n i", "...", "..."), "...", jax_mesh(a=1))
    w = leaf(4, 2, dtype=torch.float32)
    x = leaf(3, 4, dtype=torch.float32)
    unused = torch.arange(3, dtype=torch.int32)
    out = f({"w": w, "unused": unused}, x, 2.0, jax.random.key(0))
    assert torch.allclose(out["y"], x @ w * 2)
    best, same = out["best"]
    assert best.dtype == torch.int32 and not best.requires_grad
    assert torch.equal(best.long(), out["y"].argmax(1))
    assert torch.equal(same, unused) and same.data_ptr() != unused.data_ptr()
    out["y"].sum().backward()
    assert torch.allclose(w.grad, 2 * x.detach().sum(0)[:, None].expand(4, 2))


@in_jax
def test_it_is_traced_once() -> None:
    traces = []
    f = from_jax(lambda x: traces.append(x) or x * 2, "n", "n", jax_mesh(a=1))
    x = leaf(3, dtype=torch.float32)
    f(x).sum().backward()
    first = len(traces)
    for _ in range(3):
        f(x).sum().backward()
    assert len(traces) == first


@in_jax
def test_torch_compile_calls_it_between_its_graphs() -> None:
    f = from_jax(jnp.sin, "n", "n", jax_mesh(a=1))
    x = leaf(8, dtype=torch.float32)
    compiled = torch.compile(lambda x: f(x * 2) + 1, backend="eager")
    assert torch.allclose(compiled(x), (2 * x).sin() + 1)
    (g,) = torch.autograd.grad(compiled(x).sum(), x)
    assert torch.allclose(g, 2 * (2 * x).cos())


@in_jax
def test_errors_of_the_function_come_unchanged() -> None:
    for fn, kind, message in (
        (lambda x: {}["JAX is unhappy"], KeyError, "JAX is unhappy"),
        (lambda x: x @ jnp.zeros((7, 1)), TypeError, "dot_general requires contracting dimensions"),
    ):
        with pytest.raises(kind, match=message):
            from_jax(fn, "...", "...", jax_mesh(a=1))(torch.zeros(3))


@in_jax
def test_layouts_that_do_not_fit() -> None:
    mesh = jax_mesh(a=2)
    x = [torch.zeros(2, 3), torch.zeros(2, 3)]
    double = lambda x: x * 2  # noqa: E731
    for ins, outs, kind, message in (
        (("n d", "n d"), "n d", xs.XshardError, "in_layouts: the arrays .* differ: 1 items, and 2"),
        ("n/a d", ("n d", "n d"), xs.XshardError, "out_layouts: the arrays"),
        ("n/b d", "n d", xs.errors.NotationError, "unknown mesh axis 'b' in\n    'n/b d'"),
        ("n/a d", "n d/a", xs.errors.ShapeError, "needs equal blocks"),
        ("n/a d", "n", xs.errors.ShapeError, "has 1 dims, the array has 2"),
    ):
        with pytest.raises(kind, match=message):
            from_jax(double, ins, outs, mesh)(x)
