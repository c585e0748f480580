"""Every case of `tests/nn/cases.py` in JAX: values and gradients of layers and halos as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xshard as xs
from jax_bridge import nn
from jax_bridge.testing.stacked import padded, unpadded
from tests.jax_bridge.domains import cotangent_of, difference, on_devices, on_one, sharded
from tests.jax_bridge.helpers import in_jax
from tests.nn import cases
from tests.nn.cases import CASES, HALOS, NATTEN, PUBLISHED, Case

TOLERANCE = 1e-10
MODES = ("vma", "novma", "pmap")
LAYERS = {**PUBLISHED, **CASES}


def layer_of(case: Case):
    """The layer, as a function of a block and of its kernel, if it has one."""
    k, s, d = ((1, 1, *numbers) for numbers in (case.k, case.s, case.d))
    pads = [(0, 0), (0, 0), *case.p]
    boundary = None if case.boundary == "zero" else case.boundary

    def layer(x, *kernel):
        if case.op == "interpolate":
            shape = (*x.sharding.shape[:2], *case.size)
            return nn.interpolate(x, shape, case.mode, align_corners=case.align_corners)
        if case.op == "max":
            return nn.max_pool(x, k, s, pads, d, ceil_mode=case.ceil, outputs=case.outputs)
        if case.op == "avg":
            options = {"ceil_mode": case.ceil, "count_include_pad": case.include_pad}
            return nn.avg_pool(x, k, s, pads, outputs=case.outputs, **options)
        options = {
            "boundary": boundary,
            "outputs": case.outputs,
            "feature_group_count": case.groups,
        }
        if case.op == "conv":
            return nn.conv_general_dilated(x, *kernel, case.s, case.p, None, case.d, **options)
        # A transposed convolution is one of dilated inputs, by the mirrored kernel.
        spans = [n * (size - 1) for n, size in zip(case.d, case.k, strict=True)]
        ends = [(n - p, n - q + e) for n, (p, q), e in zip(spans, case.p, case.extra, strict=True)]
        return nn.conv_general_dilated(
            x, mirrored(kernel[0], case), (1,) * len(ends), ends, case.s, case.d, **options
        )

    return layer


def mirrored(kernel, case: Case):
    """torch's kernel of a transposed convolution (in, out / groups, ...) as JAX's (out, in / groups, ...)."""
    groups, (wide, narrow, *taps) = case.groups, kernel.shape
    kernel = kernel.reshape(groups, wide // groups, narrow, *taps).swapaxes(1, 2)
    return kernel.reshape(groups * narrow, wide // groups, *taps)[
        (..., *[slice(None, None, -1)] * len(taps))
    ]


@pytest.mark.parametrize(("name", "mode"), [(name, MODES[i % 3]) for i, name in enumerate(LAYERS)])
@in_jax
def test_a_layer(name, mode) -> None:
    case = LAYERS[name]
    draw = np.random.default_rng(0)
    x = draw.normal(size=case.shape)
    kernels = (draw.normal(size=case.kernel_shape),) if case.op in ("conv", "transposed") else ()
    if mode == "pmap" and max(case.mesh.sizes) < case.mesh.n_devices:
        mode = "vma"
    with jax.enable_x64(True):
        found, sharding = on_devices(layer_of(case), x, kernels, case.layout, case.mesh, mode=mode)
    kernel = kernels[0] if kernels else None
    expected = cases.one_device(case, x, kernel, lambda shape: cotangent_of(shape, x.dtype))
    assert difference(found, expected) <= TOLERANCE
    for d, sizes in case.out_sizes.items():
        assert list(sharding.local_sizes[d]) == sizes


@pytest.mark.parametrize("name", HALOS)
@in_jax
def test_a_plain_halo(name) -> None:
    """Blocks are pieces of the padded array, and the gradient is the adjoint, in whole numbers."""
    data = HALOS[name]
    mesh = cases.device_mesh(HALOS[name])
    layout = cases.sharded_layout(data)
    shape = tuple(data["global_shape"])
    x = cotangent_of(shape, np.dtype(np.float64))
    texts = layout, cases.halo_layout(data)
    source, target = (xs.Sharding(xs.Layout.parse(text), mesh, shape) for text in texts)
    expected = cases.halo_blocks(data, x)
    ys = [
        np.random.default_rng(d).integers(-4, 5, b.shape).astype(float)
        for d, b in enumerate(expected)
    ]

    def local(x, y):
        wide, pull = jax.vjp(
            lambda x: nn.Sharded(x, layout, shape=shape).to(target.layout).block, x
        )
        return wide, pull(y)[0]

    with jax.enable_x64(True):
        blocks = padded(xs.reference.scatter(x, layout, mesh), source, fill=np.nan)
        both = jax.jit(sharded(local, mesh))(blocks, padded(ys, target, fill=np.nan))
    wide, gradient = map(np.asarray, both)
    assert difference(unpadded(wide, target), expected) == 0
    gathered = xs.reference.gather(unpadded(gradient, source), layout, mesh, shape)
    assert not cases.adjoint_error(data, x, ys, gathered)


@in_jax
def test_neighbourhood_attention() -> None:
    """Blocks get two rows of each neighbour; of the result they keep their own."""

    def layers(x):
        before, after = (
            str(NATTEN[side][0]).replace(" ", "") for side in ("halo_before", "halo_after")
        )
        wide = x.to(f"b h/sp:halo({before},{after},none) w n f")
        y = cases.neighbourhood(jnp, *[wide.block] * 3)
        return nn.Sharded(y, wide.sharding).to("b h/sp w n f")

    # Five columns and heads of width 8 are enough: rows are what is sharded.
    b, h, _, n, _ = NATTEN["global_shape"]
    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=(b, h, 6, n, 8))
        found, _ = on_devices(layers, x, (), "b h/sp w n f", xs.Mesh(sp=2))
        assert (
            difference(found, on_one(lambda x: cases.neighbourhood(jnp, x, x, x), x, ()))
            <= TOLERANCE
        )
