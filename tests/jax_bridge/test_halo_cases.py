"""The published cases of plain halos, and the one of neighbourhood attention, in JAX."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

import xshard as xs
from tests.jax_bridge.helpers import in_jax
from tests.jax_bridge.test_nn_cases import CASES, kind, layout_of, mesh_of

PLAIN = [name for name, case in CASES.items() if kind(case) == "plain"]
# The boundary of every cut dim, and numpy's padding of the array: (mode, its options) per end.
ZERO = ("constant", {"constant_values": 0.0})
RULES = {
    "zero": ("zero", ZERO, ZERO),
    "zero at the poles": ("zero", ZERO, ZERO),
    "circular": ("periodic", ("wrap", {}), ("wrap", {})),
    "none": ("none", None, None),
    "none (edge ranks get no halo)": ("none", None, None),
    "constant 1.234": ("constant(1.234)", *[("constant", {"constant_values": 1.234})] * 2),
    "replicate top, constant=1 bottom": (
        "edge,constant(1)",
        ("edge", {}),
        ("constant", {"constant_values": 1.0}),
    ),
}
EARTH = "credit-earth-pole-pad"


def halo_layout(case: dict) -> str:
    dims = layout_of(case).split()
    rule = "pole(d3)" if case["name"] == EARTH else RULES[case["boundary"]][0]
    for d, before, after in zip(case["sharded_dims"], case["halo_before"], case["halo_after"], strict=True):
        dims[d] += f":halo([{','.join(map(str, before))}],[{','.join(map(str, after))}],{rule})"
    if case["name"] == EARTH:
        dims[3] += ":halo(3,3,periodic)"
    return " ".join(dims)


def expected_blocks(case: dict, x: np.ndarray) -> list[np.ndarray]:
    """Pieces of the array that numpy padded, dim after dim."""
    mesh, blocks = mesh_of(case), []
    widest = [(0, 0)] * x.ndim
    for d, before, after in zip(case["sharded_dims"], case["halo_before"], case["halo_after"], strict=True):
        widest[d] = max(before), max(after)
    if case["name"] == EARTH:
        beyond = [
            np.roll(x[:, :, rows], x.shape[3] // 2, axis=3)[:, :, ::-1]
            for rows in (slice(3), slice(-3, None))
        ]
        whole = np.pad(np.concatenate([beyond[0], x, beyond[1]], axis=2), [(0, 0)] * 3 + [(3, 3)], "wrap")
    elif RULES[case["boundary"]][0] == "none":
        whole, widest = x, [(0, 0)] * x.ndim
    else:
        whole, (_, before, after) = x, RULES[case["boundary"]]
        for d, (lo, hi) in enumerate(widest):
            head = padding_of(whole, d, (lo, 0), *before).take(range(lo), d)
            tail = padding_of(whole, d, (0, hi), *after).take(range(whole.shape[d], whole.shape[d] + hi), d)
            whole = np.concatenate([head, whole, tail], axis=d)
    for device in range(mesh.n_devices):
        index = [slice(None)] * x.ndim
        for i, d in enumerate(case["sharded_dims"]):
            part = mesh.coords(device)[i]
            ends = np.cumsum([0, *map(len, np.array_split(range(x.shape[d]), case["mesh"][i]))])
            start = ends[part] - case["halo_before"][i][part] + widest[d][0]
            stop = ends[part + 1] + case["halo_after"][i][part] + widest[d][0]
            index[d] = slice(max(start, 0), min(stop, whole.shape[d]))
        blocks.append(whole[tuple(index)])
    return blocks


def padding_of(x: np.ndarray, d: int, ends: tuple[int, int], mode: str, options: dict) -> np.ndarray:
    return np.pad(x, [ends if i == d else (0, 0) for i in range(x.ndim)], mode, **options)


@pytest.mark.parametrize("name", PLAIN)
@in_jax
def test_a_plain_halo(name) -> None:
    """Blocks are pieces of the padded array, and the gradient is the adjoint, in whole numbers."""
    import jax
    from jax.sharding import PartitionSpec as P

    from jax_bridge import nn
    from jax_bridge.testing.stacked import padded, unpadded
    from tests.jax_bridge.domains import cotangent_of, device_mesh

    case, mesh = CASES[name], mesh_of(CASES[name])
    layout, shape = layout_of(case), tuple(case["global_shape"])
    x = cotangent_of(shape, np.dtype(np.float64))
    source, target = (xs.Sharding(xs.Layout.parse(text), mesh, shape) for text in (layout, halo_layout(case)))
    expected = expected_blocks(case, x)
    ys = [np.random.default_rng(d).integers(-4, 5, b.shape).astype(float) for d, b in enumerate(expected)]

    def local(x, y):
        found, pull = jax.vjp(lambda x: nn.Sharded(x, layout, shape=shape).to(target.layout).block, x[0])
        return found[None], pull(y[0])[0][None]

    with jax.enable_x64(True):
        everywhere = P(mesh.axes)
        both = jax.shard_map(
            local, mesh=device_mesh(mesh), in_specs=(everywhere,) * 2, out_specs=(everywhere,) * 2
        )
        blocks = padded(xs.reference.scatter(x, layout, mesh), source, fill=np.nan)
        found, gradient = map(np.asarray, jax.jit(both)(blocks, padded(ys, target, fill=np.nan)))
    for mine, theirs in zip(unpadded(found, target), expected, strict=True):
        assert np.array_equal(mine, theirs)
    zero = [np.zeros_like(b) for b in expected]
    if "constant" in str(target.layout):  # an affine map: its linear part
        zero = expected_blocks(case, np.zeros_like(x))
    forward = sum(np.vdot(b - z, y) for b, z, y in zip(expected, zero, ys, strict=True))
    assert forward == np.vdot(x, xs.reference.gather(unpadded(gradient, source), layout, mesh, shape))


@in_jax
def test_neighbourhood_attention() -> None:
    """Blocks get two rows of each neighbour; of the result they keep their own."""
    import jax
    import jax.numpy as jnp

    from jax_bridge import nn
    from tests.jax_bridge.domains import difference, on_devices, on_one

    case = CASES["pn-natten-na2d-k5"]
    k = int(re.search(r"k=(\d+)", case["op"])[1])

    def windows(length):
        """Rows that every query sees: k around it, moved inwards at the ends."""
        first = np.clip(np.arange(length) - k // 2, 0, length - k)
        return first[:, None] + np.arange(k)

    def attention(x):  # b h w heads features
        rows, columns = windows(x.shape[1]), windows(x.shape[2])
        near = x[:, rows][:, :, :, columns]  # b h k w k heads features
        weights = jnp.einsum("bhwnf,bhiwjnf->bhwnij", x, near) / math.sqrt(x.shape[-1])
        weights = jax.nn.softmax(weights.reshape(*weights.shape[:-2], -1)).reshape(weights.shape)
        return jnp.einsum("bhwnij,bhiwjnf->bhwnf", weights, near)

    def layers(x):
        before, after = (str(case[side][0]).replace(" ", "") for side in ("halo_before", "halo_after"))
        wide = x.to(f"b h/sp:halo({before},{after},none) w n f")
        return nn.Sharded(attention(wide.block), wide.sharding).to("b h/sp w n f")

    # Five columns and heads of width 8 are enough: rows are what is cut.
    b, h, _, n, _ = case["global_shape"]
    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=(b, h, 6, n, 8))
        found = on_devices(layers, x, (), "b h/sp w n f", xs.Mesh(sp=2))
        assert difference(found, on_one(attention, x, ())) <= 1e-10
