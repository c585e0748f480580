"""Layers on cut arrays in JAX: any window over any cut, exact in whole numbers; norms; where they work.

Long because every layer has its row for values, adjoints, refusals and transformations.
"""

import random
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_bridge as xj
import xshard as xs
from jax_bridge import nn
from jax_bridge.testing.stacked import padded, unpadded
from tests.jax_bridge.domains import difference, on_devices, on_one, sharded
from tests.jax_bridge.helpers import device_mesh, in_jax
from tests.jax_bridge.test_nn_hlo import compiled, moved
from tests.nn.cases import PAD_MODES

MODES = ("vma", "novma", "pmap")


@pytest.mark.parametrize("seed", range(6))
@in_jax
def test_any_convolution_over_any_cut(seed) -> None:
    """Values and both gradients equal one device's, to the bit: they are whole numbers."""
    draw = random.Random(seed)
    n, length = draw.choice([(2, 9), (3, 10), (4, 8), (4, 13)])
    cut, outputs = drawn_cut(draw, n, length)
    k = draw.randint(1, 4)
    s = draw.randint(1, 3)
    d = draw.randint(1, 2)
    base = draw.choice([1, 1, 1, 2, 3])
    boundary = draw.choice(["periodic", "reflect", "edge", "zero"]) if base == 1 else "zero"
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
    strides = (s, 1)
    ends = [p, (1, 0)]
    dilation = (d, 1)

    def layers(x, kernel):
        rule = {"h": boundary} if boundary != "zero" else None
        return nn.conv_general_dilated(
            x,
            kernel,
            strides,
            ends,
            (base, 1),
            dilation,
            numbers,
            2,
            boundary=rule,
            outputs=outputs,
        )

    def whole(x, kernel):
        if boundary == "zero":
            return lax.conv_general_dilated(
                x, kernel, strides, ends, (base, 1), dilation, numbers, 2
            )
        x = jnp.pad(
            x, [p if letter == "H" else (0, 0) for letter in numbers[0]], PAD_MODES[boundary]
        )
        padding = [(0, 0), (1, 0)]
        return lax.conv_general_dilated(x, kernel, strides, padding, None, dilation, numbers, 2)

    with jax.enable_x64(True):
        found, sharding = on_devices(layers, x, (kernel,), layout, xs.Mesh(sp=n), mode=mode)
        assert difference(found, on_one(whole, x, (kernel,))) == 0
    order = sharding.layout.dims[numbers[2].index("H")].shards[0].order
    assert order == outputs or outputs != "balanced"


def contiguous(cut: str) -> bool:
    return not cut.startswith(("zigzag", "cyclic"))


def drawn_cut(draw: random.Random, n: int, length: int) -> tuple[str, str]:
    """A cut of the dim, and a rule for the outputs that it can have."""
    ends = sorted(draw.choices(range(length + 1), k=n - 1))
    sizes = [b - a for a, b in zip([0, *ends], [*ends, length], strict=True)]
    cuts = [
        "sp",
        "balanced(sp)",
        "zigzag(sp)",
        "cyclic(sp)",
        f"sizes(sp,{','.join(map(str, sizes))})",
    ]
    cut = draw.choice(cuts)
    return cut, draw.choice(["", "balanced", "aligned"]) if contiguous(cut) else ""


def whole_numbers(seed: int, shape: list[int]) -> np.ndarray:
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float64)


@in_jax
def test_a_convolution_over_the_poles() -> None:
    """Latitudes beyond a pole come from its other side, negated; longitudes go round; corners too."""
    x = whole_numbers(0, [2, 1, 8, 12])
    kernel = whole_numbers(1, [1, 1, 3, 3])

    def layers(x, kernel):
        rules = {"h": "pole(w,-1)", "w": "periodic"}
        return nn.conv_general_dilated(x, kernel, (1, 1), "SAME", boundary=rules)

    def whole(x, kernel):
        north, south = (-jnp.roll(x[:, :, row : row + 1], 6, axis=3) for row in (0, 7))
        x = jnp.concatenate([north, x, south], axis=2)
        x = jnp.pad(x, [(0, 0), (0, 0), (0, 0), (1, 1)], "wrap")
        return lax.conv_general_dilated(x, kernel, (1, 1), "VALID")

    with jax.enable_x64(True):
        found, _ = on_devices(layers, x, (kernel,), "n c h/a w/b", xs.Mesh(a=4, b=2))
        assert difference(found, on_one(whole, x, (kernel,))) == 0


@in_jax
def test_windows_that_fit_nowhere() -> None:
    def conv(x):
        kernel = np.ones((1, 1, 9), np.float32)
        return nn.conv_general_dilated(nn.Sharded(x, "n c h/sp"), kernel, (1,), "VALID")

    nothing = jax.eval_shape(sharded(conv, xs.Mesh(sp=2)), np.ones((2, 1, 1, 4), np.float32))
    assert nothing.sharding.shape == (1, 1, 0)


@in_jax
def test_maxima_of_whole_numbers() -> None:
    def pool(x):
        return nn.max_pool(nn.Sharded(x, "h/sp"), (3,), (1,), ((1, 1),)).block

    found = sharded(pool, xs.Mesh(sp=2))(np.arange(-8, 0).reshape(2, 4))
    assert found.ravel().tolist() == [-7, -6, -5, -4, -3, -2, -1, -1]


@pytest.mark.parametrize(
    ("method", "antialias"),
    [("nearest", True), ("linear", False), ("cubic", True), ("lanczos3", False)],
)
@in_jax
def test_resize_as_jax_does_it(method, antialias) -> None:
    x = np.random.default_rng(0).normal(size=(2, 13, 10))
    shape = (2, 9, 21)
    ours, theirs = (
        partial(f, shape=shape, method=method, antialias=antialias)
        for f in (nn.resize, jax.image.resize)
    )
    with jax.enable_x64(True):
        found, _ = on_devices(ours, x, (), "n h/a w/balanced(b)", xs.Mesh(a=2, b=3))
        assert difference(found, on_one(theirs, x, ())) <= 1e-12


def normalised(x, dims, epsilon=1e-5):
    centred = x - x.mean(dims, keepdims=True)
    return centred / ((centred**2).mean(dims, keepdims=True) + epsilon) ** 0.5


def grouped(x, groups):
    n, h, w, c = x.shape
    return normalised(x.reshape(n, h, w, groups, c // groups), (1, 2, 4)).reshape(x.shape)


# Functions of the array, scale and bias: ours, and of whole arrays; the shape of scale and bias.
NORMS = {
    "group": (
        lambda x, s, b: nn.group_norm(x, 3, s, b),
        lambda x, s, b: grouped(x, 3) * s + b,
        (6,),
    ),
    "instance": (
        lambda x, s, b: nn.group_norm(x, 6, s, b),
        lambda x, s, b: grouped(x, 6) * s + b,
        (6,),
    ),
    "batch": (nn.batch_norm, lambda x, s, b: normalised(x, (0, 1, 2)) * s + b, (6,)),
    "layer over cut dims": (
        lambda x, s, b: nn.layer_norm(x, (1, 3), s, b),
        lambda x, s, b: normalised(x, (1, 3)) * s[:, None] + b[:, None],
        (11, 6),
    ),
    "layer over features": (
        lambda x, s, b: nn.layer_norm(x, (-1,), s, b),
        lambda x, s, b: normalised(x, (3,)) * s + b,
        (6,),
    ),
    "batch, known statistics": (
        lambda x, s, b: nn.batch_norm(x, mean=b, variance=s**2),
        lambda x, s, b: (x - b) / (s**2 + 1e-5) ** 0.5,
        (6,),
    ),
}
GRID = "n/dp h/balanced(a) w/b c", xs.Mesh(dp=2, a=2, b=2)
WHERE = {"vma": GRID, "novma": GRID, "pmap": ("n h/sp w c", xs.Mesh(sp=4))}
CASES = [(name, mode, *WHERE[mode]) for name, mode in zip(NORMS, 2 * MODES, strict=True)]
CASES += [
    ("batch", "vma", "n h/a w c/b", xs.Mesh(a=2, b=2))
]  # each device takes its part of whole parameters


@pytest.mark.parametrize(("name", "mode", "layout", "mesh"), CASES)
@in_jax
def test_norms_over_cut_dims(name, mode, layout, mesh) -> None:
    ours, whole, lengths = NORMS[name]
    draw = np.random.default_rng(0)
    x, *parameters = (
        draw.normal(size=(3, 11, 4, 6)),
        draw.normal(size=lengths),
        draw.normal(size=lengths),
    )
    with jax.enable_x64(True):
        found, _ = on_devices(ours, x, parameters, layout, mesh, mode=mode)
        assert difference(found, on_one(whole, x, parameters)) <= 1e-12


@pytest.mark.parametrize("layout", ["h/sp", "h/sp:halo(1,2,edge)"])
@in_jax
def test_moments_of_the_whole(layout) -> None:
    """Rows that several blocks hold count once."""
    x = np.arange(12, dtype=np.float32)

    def local(x):
        return nn.moments(nn.Sharded(x, "h/sp").to(layout), (0,))

    mean, variance = sharded(local, xs.Mesh(sp=4))(x.reshape(4, 3))
    assert mean.ravel().tolist() == [5.5] * 4
    assert np.allclose(variance, x.var())


@pytest.mark.parametrize("check_vma", [True, False])
@in_jax
def test_layers_in_a_row_under_transformations(check_vma) -> None:
    """Gradients taken outside; a block travels with its place through all of them."""

    def block(x, kernel):
        y = nn.conv_general_dilated(x, kernel, (1,), "SAME", boundary="periodic")
        return jax.tree.map(jax.nn.gelu, y)

    def local(x, kernels):
        x = nn.Sharded(x, "n c h/sp")
        y, _ = lax.scan(lambda x, k: (jax.checkpoint(block)(x, k), None), x, kernels)
        mine = (y.owned().block ** 2).sum()
        return xj.ops.all_reduce(mine, "sp", grad="replicated" if check_vma else "sum")

    def whole(x, kernels):
        for kernel in kernels:
            wrapped = jnp.pad(x, [(0, 0), (0, 0), (1, 1)], "wrap")
            x = jax.nn.gelu(lax.conv_general_dilated(wrapped, kernel, (1,), "VALID"))
        return (x**2).sum()

    draw = np.random.default_rng(0)
    with jax.enable_x64(True):
        given = draw.normal(size=(2, 3, 8)), draw.normal(size=(3, 3, 3, 3)) / 3
        specs = {"in_specs": (P(None, None, "sp"), P()), "out_specs": P(), "check_vma": check_vma}
        cut = jax.shard_map(local, mesh=device_mesh(xs.Mesh(sp=4)), **specs)
        found, expected = (jax.jit(jax.value_and_grad(f, (0, 1)))(*given) for f in (cut, whole))
    assert difference(found, expected) <= 1e-10


@pytest.mark.parametrize("check_vma", [True, False])
@in_jax
def test_derivatives_of_any_order_go_through_layers(check_vma) -> None:
    """jvp, and the gradient of a gradient, of a strided convolution over rows that do not divide."""
    mesh = xs.Mesh(sp=4)
    shape = (1, 2, 13)
    draw = np.random.default_rng(0)
    x, tangent = (draw.integers(-3, 4, shape).astype(float) for _ in range(2))
    kernel = draw.integers(-2, 3, (3, 2, 3)).astype(float)
    sharding = xs.Sharding(xs.Layout.parse("n c h/sp"), mesh, shape)

    def whole(x):
        return lax.conv_general_dilated(x, kernel, (2,), ((1, 1),))

    def local(block):
        placed = nn.Sharded(block, "n c h/sp", shape=shape)
        return nn.conv_general_dilated(placed, jnp.asarray(kernel), (2,), ((1, 1),)).owned()

    def cubes(block):  # a scalar share of every device
        return (local(block).block ** 3).sum()

    def both(block, direction):
        moved = jax.jvp(lambda b: local(b).block, (block,), (direction,))[1]
        return moved, jax.jvp(jax.grad(cubes), (block,), (direction,))[1]

    cut = [
        padded(xs.reference.scatter(a, "n c h/sp", mesh), sharding, fill=0) for a in (x, tangent)
    ]
    moved, curved = map(np.asarray, jax.jit(sharded(both, mesh, check_vma=check_vma))(*cut))
    outputs = xs.Sharding(xs.Layout.parse("n c h/sizes(sp,2,2,2,1)"), mesh, (1, 3, 7))
    second = jax.grad(lambda x: (whole(x) ** 3).sum())
    for f, found, there in ((whole, moved, outputs), (second, curved, sharding)):
        expected = np.asarray(jax.jvp(f, (x,), (tangent,))[1])
        parts = xs.reference.scatter(expected, str(there.layout), mesh)
        assert all(map(np.array_equal, unpadded(found, there), parts))


@in_jax
def test_a_block_that_has_its_halo_is_the_input_of_a_layer() -> None:
    """Rows that it holds already are not fetched again."""
    kernel = np.ones((1, 1, 3), np.float32)

    def local(x, layout):
        return nn.conv_general_dilated(
            nn.Sharded(x, layout, shape=(1, 1, 8)), kernel, (1,), "SAME"
        ).block

    x = np.arange(8, dtype=np.float32)
    plain = sharded(partial(local, layout="n c h/sp"), xs.Mesh(sp=2))
    wide = jax.jit(sharded(partial(local, layout="n c h/sp:halo(1,1)"), xs.Mesh(sp=2)))
    widened = np.stack([np.pad(x, 1)[i : i + 6] for i in (0, 4)])[:, None, None]
    assert np.array_equal(plain(x.reshape(2, 1, 1, 4)), wide(widened))
    assert not moved(compiled(wide, widened))


KERNEL = np.ones((4, 4, 3), np.float32)


def conv(x, **options):
    return nn.conv_general_dilated(x, KERNEL, (1,), [(1, 1)], **options)


MIRROR = "unknown boundary 'mirror' in\n    'mirror'\n     ^^^^^^\n  did you mean 'reflect'?"
# Words of the error, a layer, and the layout of its input where it is not `n c h/sp`.
REFUSED = [
    ("outputs is 'even', not OutputRule", partial(conv, outputs="even")),
    ("and a convolution adds over them in 'n c/sp h'", conv, "n c/sp h"),
    (MIRROR, partial(conv, boundary="mirror")),
    ("a boundary for 'x'", partial(conv, boundary={"x": "edge"})),
    ("no rows beyond the ends of 'h'", partial(conv, boundary="none")),
    ("boundary edge of 'h' with dilated inputs", partial(conv, boundary="edge", lhs_dilation=(2,))),
    (
        "parts of 'h/zigzag(sp)' are not intervals",
        partial(conv, lhs_dilation=(2,)),
        "n c h/zigzag(sp)",
    ),
    ("4 features 'c' in 3 groups", partial(nn.group_norm, num_groups=3, feature_dim=1)),
    (
        "shape (3,) for dims of lengths (4,)",
        partial(nn.batch_norm, scale=np.ones(3), feature_dim=1),
    ),
    ("no interpolation 'lanczos'", partial(nn.interpolate, shape=(2, 4, 16), mode="lanczos")),
    # What lax refuses of the whole array.
    ("must have the same number", lambda x: nn.conv_general_dilated(x, KERNEL, (1, 1), "SAME")),
    ("feature", lambda x: nn.conv_general_dilated(x, KERNEL[:, :3], (1,), "SAME")),
    ("window", lambda x: nn.max_pool(x, (2, 2))),
]


@in_jax
def test_what_is_refused() -> None:
    for words, call, *layout in REFUSED:
        there = xs.Sharding(xs.Layout.parse(*layout or ["n c h/sp"]), xs.Mesh(sp=2), (2, 4, 8))
        local = lambda x, f=call, to=there: f(nn.Sharded(x, to.layout, shape=to.shape)).block  # noqa: E731
        with pytest.raises((ValueError, TypeError)) as caught:
            jax.eval_shape(
                sharded(local, there.mesh), np.zeros((2, *there.max_local_shape), np.float32)
            )
        assert words in str(caught.value)


@in_jax
def test_where_a_block_cannot_be_placed() -> None:
    for layout, shape, message in [
        ("h/sp w", (9, 2), "the block has shape (4, 2), not (5, 2)"),
        ("h/sp w | sum(tp)", None, "unknown mesh axis 'tp'"),
        ("h w | sum(sp)", None, "still to be reduced by sum in 'h w | sum(sp)'"),
        ("h/tp w", None, "unknown mesh axis 'tp' in\n    'h/tp w'"),
        ("h/sp", None, "in 'h/sp'"),
        ("h/zigzag(sp):halo([1,0],[0,1]) w", None, "do not say how long dim 'h' is"),
    ]:
        local = sharded(partial(nn.Sharded, sharding=layout, shape=shape), xs.Mesh(sp=2))
        with pytest.raises(xs.XshardError) as caught:
            jax.eval_shape(local, np.zeros((2, 4, 2)))
        assert message in str(caught.value)
