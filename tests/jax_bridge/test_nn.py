"""Layers on cut arrays in JAX: any window over any cut, exact in whole numbers; norms; where they work.

Long because every layer has its row for values, adjoints, refusals and transformations.
"""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest

import xshard as xs
from tests.jax_bridge.helpers import in_jax

MODES = ("vma", "novma", "pmap")
PAD_MODES = {"periodic": "wrap", "reflect": "reflect", "edge": "edge", "zero": "constant"}


# -- windows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@in_jax
def test_any_convolution_over_any_cut(seed) -> None:
    """Values and both gradients equal one device's, to the bit: they are whole numbers."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    from jax_bridge import nn
    from tests.jax_bridge.domains import on_devices, on_one

    draw = random.Random(seed)
    n, length = draw.choice([(2, 9), (3, 10), (4, 8), (4, 13)])
    cut, outputs = drawn_cut(draw, n, length)
    k, s, d, base = draw.randint(1, 4), draw.randint(1, 3), draw.randint(1, 2), draw.choice([1, 1, 1, 2, 3])
    boundary = draw.choice(list(PAD_MODES)) if base == 1 else "zero"
    least = -2 if boundary == "zero" and contiguous(cut) else 0
    p = draw.randint(least, 4), draw.randint(least, 4)
    base = base if contiguous(cut) else 1
    mode = MODES[seed % 3]
    # Features last, and the other spatial dim whole: what it needs is padded on the spot.
    numbers = ("NHWC", "HWIO", "NHWC") if draw.random() < 0.5 else ("NCHW", "OIHW", "NHWC")
    names = {"N": "n", "H": f"h/{cut}", "W": "w", "C": "c"}
    layout = " ".join(names[letter] for letter in numbers[0])
    sizes = {"N": 2, "H": length, "W": 3, "C": 4, "O": 6, "I": 2}
    x = whole_numbers(seed, [sizes[letter] for letter in numbers[0]])
    kernel = whole_numbers(seed + 1, [(sizes | {"H": k, "W": 2})[letter] for letter in numbers[1]])
    strides, ends, dilation = (s, 1), [p, (1, 0)], (d, 1)

    def layers(x, kernel):
        rule = {"h": boundary} if boundary != "zero" else None
        return nn.conv_general_dilated(
            x, kernel, strides, ends, (base, 1), dilation, numbers, 2, boundary=rule, outputs=outputs
        )

    def whole(x, kernel):
        if boundary == "zero":
            return lax.conv_general_dilated(x, kernel, strides, ends, (base, 1), dilation, numbers, 2)
        x = jnp.pad(x, [p if letter == "H" else (0, 0) for letter in numbers[0]], PAD_MODES[boundary])
        padding = [(0, 0), (1, 0)]
        return lax.conv_general_dilated(x, kernel, strides, padding, None, dilation, numbers, 2)

    with jax.enable_x64(True):
        found = on_devices(layers, x, (kernel,), layout, xs.Mesh(sp=n), mode=mode)
        expected = on_one(whole, x, (kernel,))
    order = found.sharding.layout.dims[numbers[2].index("H")].shards[0].order
    assert order == outputs or outputs != "balanced"
    assert np.array_equal(found.output, expected.output)
    for mine, theirs in zip(found.gradients, expected.gradients, strict=True):
        assert np.array_equal(mine, theirs)


def contiguous(cut: str) -> bool:
    return not cut.startswith(("zigzag", "cyclic"))


def drawn_cut(draw: random.Random, n: int, length: int) -> tuple[str, str]:
    """A cut of the dim, and a rule for the outputs that it can have."""
    ends = sorted(draw.choices(range(length + 1), k=n - 1))
    sizes = [b - a for a, b in zip([0, *ends], [*ends, length], strict=True)]
    cuts = ["sp", "balanced(sp)", "zigzag(sp)", "cyclic(sp)", f"sizes(sp,{','.join(map(str, sizes))})"]
    cut = draw.choice(cuts)
    return cut, draw.choice(["", "balanced", "aligned"]) if contiguous(cut) else ""


def whole_numbers(seed: int, shape: list[int]) -> np.ndarray:
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float64)


@in_jax
def test_a_convolution_over_the_poles() -> None:
    """Latitudes beyond a pole come from its other side, negated; longitudes go round; corners too."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    from jax_bridge import nn
    from tests.jax_bridge.domains import on_devices, on_one

    x, kernel = whole_numbers(0, [2, 1, 8, 12]), whole_numbers(1, [1, 1, 3, 3])

    def layers(x, kernel):
        rules = {"h": "pole(w,-1)", "w": "periodic"}
        return nn.conv_general_dilated(x, kernel, (1, 1), "SAME", boundary=rules)

    def whole(x, kernel):
        north, south = (-jnp.roll(x[:, :, row : row + 1], 6, axis=3) for row in (0, 7))
        x = jnp.concatenate([north, x, south], axis=2)
        x = jnp.pad(x, [(0, 0), (0, 0), (0, 0), (1, 1)], "wrap")
        return lax.conv_general_dilated(x, kernel, (1, 1), "VALID")

    with jax.enable_x64(True):
        found = on_devices(layers, x, (kernel,), "n c h/a w/b", xs.Mesh(a=4, b=2))
        expected = on_one(whole, x, (kernel,))
    assert np.array_equal(found.output, expected.output)
    for mine, theirs in zip(found.gradients, expected.gradients, strict=True):
        assert np.array_equal(mine, theirs)


@in_jax
def test_a_window_that_fits_nowhere_has_no_outputs() -> None:
    import jax

    from jax_bridge import nn
    from tests.jax_bridge.domains import device_mesh, sharded

    def local(x):
        return nn.conv_general_dilated(
            nn.Sharded(x, "n c h/sp"), np.ones((1, 1, 9), np.float32), (1,), "VALID"
        )

    found = jax.eval_shape(
        sharded(local, device_mesh(xs.Mesh(sp=2)), "sp"), np.ones((2, 1, 1, 4), np.float32)
    )
    assert found.sharding.shape == (1, 1, 0)


@in_jax
def test_whole_numbers_have_a_least_one() -> None:
    from jax_bridge import nn
    from tests.jax_bridge.domains import device_mesh, sharded

    def local(x):
        return nn.max_pool(nn.Sharded(x, "h/sp"), (3,), (1,), ((1, 1),)).block

    found = sharded(local, device_mesh(xs.Mesh(sp=2)), "sp")(np.arange(-8, 0).reshape(2, 4))
    assert found.ravel().tolist() == [-7, -6, -5, -4, -3, -2, -1, -1]


# -- interpolation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "antialias"), [("nearest", True), ("linear", False), ("cubic", True), ("lanczos3", False)]
)
@in_jax
def test_resize_as_jax_does_it(method, antialias) -> None:
    import jax

    from jax_bridge import nn
    from tests.jax_bridge.domains import difference, on_devices, on_one

    x, shape = np.random.default_rng(0).normal(size=(2, 13, 10)), (2, 9, 21)
    with jax.enable_x64(True):
        found = on_devices(
            partial(nn.resize, shape=shape, method=method, antialias=antialias),
            x,
            (),
            "n h/a w/balanced(b)",
            xs.Mesh(a=2, b=3),
        )
        whole = on_one(partial(jax.image.resize, shape=shape, method=method, antialias=antialias), x, ())
    assert difference(found, whole) <= 1e-12


# -- normalisation -----------------------------------------------------------------------------------------


def normalised(x, dims, epsilon=1e-5):
    centred = x - x.mean(dims, keepdims=True)
    return centred / ((centred**2).mean(dims, keepdims=True) + epsilon) ** 0.5


def grouped(x, groups):
    n, h, w, c = x.shape
    return normalised(x.reshape(n, h, w, groups, c // groups), (1, 2, 4)).reshape(x.shape)


NORMS = {
    "group": (
        lambda nn, x, scale, bias: nn.group_norm(x, 3, scale, bias),
        lambda x, scale, bias: grouped(x, 3) * scale + bias,
        (6,),
    ),
    "instance": (
        lambda nn, x, scale, bias: nn.group_norm(x, 6, scale, bias),
        lambda x, scale, bias: grouped(x, 6) * scale + bias,
        (6,),
    ),
    "batch": (
        lambda nn, x, scale, bias: nn.batch_norm(x, scale, bias),
        lambda x, scale, bias: normalised(x, (0, 1, 2)) * scale + bias,
        (6,),
    ),
    "layer over cut dims": (
        lambda nn, x, scale, bias: nn.layer_norm(x, (1, 3), scale, bias),
        lambda x, scale, bias: normalised(x, (1, 3)) * scale[:, None] + bias[:, None],
        (11, 6),
    ),
    "layer over features": (
        lambda nn, x, scale, bias: nn.layer_norm(x, (-1,), scale, bias),
        lambda x, scale, bias: normalised(x, (3,)) * scale + bias,
        (6,),
    ),
    "batch, known statistics": (
        lambda nn, x, scale, bias: nn.batch_norm(x, mean=bias, variance=scale**2),
        lambda x, scale, bias: (x - bias) / (scale**2 + 1e-5) ** 0.5,
        (6,),
    ),
}


@pytest.mark.parametrize(("name", "mode"), [(name, MODES[i % 3]) for i, name in enumerate(NORMS)])
@in_jax
def test_norms_over_cut_dims(name, mode) -> None:
    import jax

    from jax_bridge import nn
    from tests.jax_bridge.domains import difference, on_devices, on_one

    ours, whole, lengths = NORMS[name]
    draw = np.random.default_rng(0)
    x, scale, bias = draw.normal(size=(3, 11, 4, 6)), draw.normal(size=lengths), draw.normal(size=lengths)
    mesh, layout = (
        (xs.Mesh(sp=4), "n h/sp w c")
        if mode == "pmap"
        else (xs.Mesh(dp=2, a=2, b=2), "n/dp h/balanced(a) w/b c")
    )
    with jax.enable_x64(True):
        found = on_devices(partial(ours, nn), x, (scale, bias), layout, mesh, mode=mode)
        assert difference(found, on_one(whole, x, (scale, bias))) <= 1e-12


@in_jax
def test_features_cut_over_an_axis_of_their_own() -> None:
    """Parameters are whole, and each device takes its part of them."""
    import jax

    from jax_bridge import nn
    from tests.jax_bridge.domains import difference, on_devices, on_one

    _, whole, _ = NORMS["batch"]
    draw = np.random.default_rng(0)
    x, parameters = draw.normal(size=(3, 4, 5, 6)), (draw.normal(size=6), draw.normal(size=6))
    with jax.enable_x64(True):
        found = on_devices(nn.batch_norm, x, parameters, "n h/a w c/b", xs.Mesh(a=2, b=2))
        assert difference(found, on_one(whole, x, parameters)) <= 1e-12


@pytest.mark.parametrize("layout", ["h/sp", "h/sp:halo(1,2,edge)"])
@in_jax
def test_moments_of_the_whole(layout) -> None:
    """Rows that several blocks hold count once."""
    from jax_bridge import nn
    from tests.jax_bridge.domains import device_mesh, sharded

    x = np.arange(12, dtype=np.float32)

    def local(x):
        return nn.moments(nn.Sharded(x, "h/sp").to(layout), (0,))

    mean, variance = sharded(local, device_mesh(xs.Mesh(sp=4)), "sp")(x.reshape(4, 3))
    assert mean.ravel().tolist() == [5.5] * 4
    assert np.allclose(variance, x.var())


# -- where they can be used --------------------------------------------------------------------------------


@pytest.mark.parametrize("check_vma", [True, False])
@in_jax
def test_layers_in_a_row_under_jit_remat_and_scan(check_vma) -> None:
    """Gradients taken outside; a block travels with its place through all of them."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    import jax_bridge as xj
    from jax_bridge import nn
    from tests.jax_bridge.domains import device_mesh

    def block(x, kernel):
        y = nn.conv_general_dilated(x, kernel, (1,), "SAME", boundary="periodic")
        return jax.tree.map(jax.nn.gelu, y)

    def loss(x, kernels):
        x, _ = jax.lax.scan(lambda x, k: (jax.checkpoint(block)(x, k), None), x, kernels)
        return x

    def local(x, kernels):
        y = loss(nn.Sharded(x, "n c h/sp"), kernels)
        return xj.ops.all_reduce(
            (y.owned().block ** 2).sum(), "sp", grad="replicated" if check_vma else "sum"
        )

    def whole(x, kernels):
        for kernel in kernels:
            padded = jnp.pad(x, [(0, 0), (0, 0), (1, 1)], "wrap")
            x = jax.nn.gelu(jax.lax.conv_general_dilated(padded, kernel, (1,), "VALID"))
        return (x**2).sum()

    draw = np.random.default_rng(0)
    with jax.enable_x64(True):
        given = draw.normal(size=(2, 3, 8)), draw.normal(size=(3, 3, 3, 3)) / 3
        cut = jax.shard_map(
            local,
            mesh=device_mesh(xs.Mesh(sp=4)),
            in_specs=(P(None, None, "sp"), P()),
            out_specs=P(),
            check_vma=check_vma,
        )
        found = jax.jit(jax.value_and_grad(cut, (0, 1)))(*given)
        expected = jax.jit(jax.value_and_grad(whole, (0, 1)))(*given)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(mine - theirs).max() <= 1e-10 * max(1, np.abs(theirs).max())


@pytest.mark.parametrize("check_vma", [True, False])
@in_jax
def test_forward_mode_and_second_derivatives_go_through_layers(check_vma) -> None:
    """jvp, and the gradient of a gradient, of a strided convolution over rows that do not divide."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import PartitionSpec

    from jax_bridge import nn
    from jax_bridge.testing.stacked import padded
    from tests.jax_bridge.domains import device_mesh

    mesh, shape = xs.Mesh(sp=4), (1, 2, 13)
    draw = np.random.default_rng(0)
    x, tangent = (draw.integers(-3, 4, shape).astype(float) for _ in range(2))
    kernel = draw.integers(-2, 3, (3, 2, 3)).astype(float)
    sharding = xs.Sharding(xs.Layout.parse("n c h/sp"), mesh, shape)
    everywhere = PartitionSpec("sp")

    def whole(x):
        return lax.conv_general_dilated(x, kernel, (2,), ((1, 1),))

    def local(block):
        placed = nn.Sharded(block, "n c h/sp", shape=shape)
        return nn.conv_general_dilated(placed, jnp.asarray(kernel), (2,), ((1, 1),)).owned()

    def cubes(block):  # a scalar share of every device
        return (local(block).block ** 3).sum()

    def both(block, direction):
        moved = jax.jvp(lambda b: local(b).block, (block[0],), (direction[0],))[1]
        curved = jax.jvp(jax.grad(cubes), (block[0],), (direction[0],))[1]
        return moved[None], curved[None]

    program = jax.shard_map(
        both, mesh=device_mesh(mesh), in_specs=everywhere, out_specs=everywhere, check_vma=check_vma
    )
    cut = [padded(xs.reference.scatter(a, "n c h/sp", mesh), sharding, fill=0) for a in (x, tangent)]
    moved, curved = jax.jit(program)(*cut)
    expected = jax.jvp(whole, (x,), (tangent,))[1]
    rows = [2, 2, 2, 1]
    found = np.concatenate(
        [np.asarray(block)[..., :n] for block, n in zip(moved, rows, strict=True)], axis=-1
    )
    assert np.array_equal(found, expected)
    second = jax.jvp(jax.grad(lambda x: (whole(x) ** 3).sum()), (x,), (tangent,))[1]
    parts = xs.reference.scatter(np.asarray(second), "n c h/sp", mesh)
    for block, part in zip(np.asarray(curved), parts, strict=True):
        assert np.array_equal(block[..., : part.shape[-1]], part)


@in_jax
def test_a_block_that_has_its_halo_is_the_input_of_a_layer() -> None:
    """Rows that it holds already are not fetched again."""
    import jax

    from jax_bridge import nn
    from tests.jax_bridge.domains import device_mesh, sharded
    from tests.jax_bridge.test_nn_hlo import compiled, moved

    kernel = np.ones((1, 1, 3), np.float32)

    def local(x, layout):
        return nn.conv_general_dilated(nn.Sharded(x, layout, shape=(1, 1, 8)), kernel, (1,), "SAME").block

    mesh = device_mesh(xs.Mesh(sp=2))
    x = np.arange(8, dtype=np.float32)
    plain = sharded(partial(local, layout="n c h/sp"), mesh, "sp")
    wide = jax.jit(sharded(partial(local, layout="n c h/sp:halo(1,1)"), mesh, "sp"))
    widened = np.stack([np.pad(x, 1)[i : i + 6] for i in (0, 4)])[:, None, None]
    assert np.array_equal(plain(x.reshape(2, 1, 1, 4)), wide(widened))
    assert not moved(compiled(wide, widened))


# -- errors ------------------------------------------------------------------------------------------------


def refused(call, layout="n c h/sp", shape=(2, 4, 8)) -> str:
    """The error of a layer while it is traced."""
    import jax

    from jax_bridge import nn
    from tests.jax_bridge.domains import device_mesh, sharded

    mesh = xs.Mesh(sp=2)
    block = xs.Sharding(xs.Layout.parse(layout), mesh, shape).max_local_shape
    local = sharded(lambda x: call(nn, nn.Sharded(x, layout, shape=shape)).block, device_mesh(mesh), "sp")
    try:
        jax.eval_shape(local, np.zeros((2, *block), np.float32))
    except xs.XshardError as error:
        return str(error)
    raise AssertionError("nothing was raised")


@in_jax
def test_what_is_refused() -> None:
    kernel = np.ones((4, 4, 3), np.float32)

    def conv(nn, x, **options):
        return nn.conv_general_dilated(x, kernel, (1,), [(1, 1)], **options)

    text = refused(conv, "n c/sp h")
    assert "no output rule 'even'" in refused(partial(conv, outputs="even"))
    assert "features 'c/sp' are sharded" in text and "in 'n c/sp h'" in text
    text = refused(partial(conv, boundary="mirror"))
    assert "unknown boundary 'mirror' in\n    'mirror'" in text and "^" in text and "reflect" in text
    assert "a boundary for 'x'" in refused(partial(conv, boundary={"x": "edge"}))
    assert "no rows beyond the ends of 'h'" in refused(partial(conv, boundary="none"))
    assert "boundary edge of 'h' with dilated inputs" in refused(
        partial(conv, boundary="edge", lhs_dilation=(2,))
    )
    assert "the parts of 'h/zigzag(sp)' are not intervals" in refused(
        partial(conv, lhs_dilation=(2,)), "n c h/zigzag(sp)"
    )
    assert "4 features 'c' in 3 groups" in refused(lambda nn, x: nn.group_norm(x, 3, feature_dim=1))
    text = refused(lambda nn, x: nn.batch_norm(x, np.ones(3), feature_dim=1))
    assert "a parameter of shape (3,) for dims of lengths (4,)" in text
    assert "no interpolation 'lanczos'" in refused(lambda nn, x: nn.interpolate(x, (2, 4, 16), "lanczos"))


@in_jax
def test_what_lax_refuses_of_the_whole_array() -> None:
    kernel = np.ones((4, 4, 3), np.float32)
    with pytest.raises(ValueError, match="window_strides must have the same number"):
        refused(lambda nn, x: nn.conv_general_dilated(x, kernel, (1, 1), "SAME"))
    with pytest.raises(ValueError, match="feature"):
        refused(lambda nn, x: nn.conv_general_dilated(x, kernel[:, :3], (1,), "SAME"))
    with pytest.raises(TypeError, match="window"):
        refused(lambda nn, x: nn.max_pool(x, (2, 2)))


@in_jax
def test_where_a_block_cannot_be_placed() -> None:
    import jax

    from jax_bridge import nn
    from tests.jax_bridge.domains import device_mesh, sharded

    for layout, shape, message in [
        ("h/sp w", (9, 2), "the block has shape (4, 2), not (5, 2)"),
        ("h/sp w | sum(tp)", None, "unknown mesh axis 'tp'"),
        ("h w | sum(sp)", None, "still to be reduced by sum in 'h w | sum(sp)'"),
        ("h/tp w", None, "unknown mesh axis 'tp' in\n    'h/tp w'"),
        ("h/sp", None, "in 'h/sp'"),
        ("h/zigzag(sp):halo([1,0],[0,1]) w", None, "do not say how long dim 'h' is"),
    ]:
        local = sharded(partial(nn.Sharded, sharding=layout, shape=shape), device_mesh(xs.Mesh(sp=2)), "sp")
        with pytest.raises(xs.XshardError) as caught:
            jax.eval_shape(local, np.zeros((2, 4, 2)))
        assert message in str(caught.value)
