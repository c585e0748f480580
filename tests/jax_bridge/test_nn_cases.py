"""Every published case of a layer on a cut array, in JAX: values and gradients as on one device."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

import xshard as xs
from tests.jax_bridge.helpers import in_jax

CASES = {c["name"]: c for c in json.loads((Path(__file__).parents[1] / "data" / "halo.json").read_text())}
TOLERANCE = 1e-10
RNG = np.random.default_rng(0)

WINDOWED = ("conv", "causal", "maxpool", "avgpool", "conv_transpose", "interpolate")


def kind(case: dict) -> str:
    return case["op"].split()[0]


def options(case: dict) -> dict[str, list[int]]:
    """`k=[3, 3] s=[1, 1]` -> numbers by name."""
    found = re.findall(r"(\w+)=\[([\d, ]+)\]", case["op"])
    return {name: [int(n) for n in numbers.split(",")] for name, numbers in found}


def smaller(case: dict) -> dict:
    """The case with at most two samples and two features, and uncut dims no longer than two windows.

    Cut dims, windows, strides and the mesh stay as published.
    """
    asked, shape = options(case), list(case["global_shape"])
    shape[:2] = [min(n, 2) for n in shape[:2]]
    for d, k in enumerate(asked.get("k", ()), 2):
        if d not in case["sharded_dims"]:
            dilation = asked["d"][d - 2] if "d" in asked else 1
            shape[d] = min(shape[d], 2 * (dilation * (k - 1) + 1))
    return case | {"global_shape": shape}


def layout_of(case: dict) -> str:
    """n c, then space; cut as the case says."""
    ndim = len(case["global_shape"])
    names = [f"d{i}" for i in range(ndim)]
    sizes = case.get("shard_sizes") or [None] * len(case["sharded_dims"])
    for i, d in enumerate(case["sharded_dims"]):
        n, length = case["mesh"][i], case["global_shape"][d]
        if case.get("layout") == "zigzag":
            names[d] += f"/zigzag(m{i})"
        elif sizes[i] is None or set(sizes[i]) == {length // n}:
            names[d] += f"/balanced(m{i})"
        else:
            names[d] += f"/sizes(m{i},{','.join(map(str, sizes[i]))})"
    return " ".join(names)


def mesh_of(case: dict) -> xs.Mesh:
    return xs.Mesh({f"m{i}": n for i, n in enumerate(case["mesh"])})


def test_every_case_is_known() -> None:
    assert len(CASES) == 63
    assert {kind(c) for c in CASES.values()} == {*WINDOWED, "plain", "na2d"}
    assert max(math.prod(c["mesh"]) for c in CASES.values()) == 18


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if kind(c) in WINDOWED])
@in_jax
def test_a_layer(name) -> None:
    import jax

    from tests.jax_bridge.domains import difference, on_devices, on_one

    case = smaller(CASES[name])
    with jax.enable_x64(True):
        layers, whole, parameters = LAYERS[kind(case)](case)
        x = RNG.normal(size=case["global_shape"])
        found = on_devices(layers, x, parameters, layout_of(case), mesh_of(case))
        assert difference(found, on_one(whole, x, parameters)) <= TOLERANCE
        for d, sizes in zip(case["sharded_dims"], case.get("out_sizes") or (), strict=False):
            assert list(found.sharding.local_sizes[d]) == sizes


def convolution(case: dict):
    """A convolution of few features: plain, or transposed (dilated inputs, mirrored padding)."""
    import jax.numpy as jnp
    from jax import lax

    from jax_bridge import nn

    asked, channels = options(case), case["global_shape"][1]
    k, s, p = (asked[name] for name in "ksp")
    transposed = kind(case) == "conv_transpose"
    d = asked.get("d", [1] * len(k))
    if transposed:
        extra, ones = asked["op"], [1] * len(k)
        ends = [(k_ - 1 - p_, k_ - 1 - p_ + e) for k_, p_, e in zip(k, p, extra, strict=True)]
        arguments = ones, ends, s
    else:
        arguments = s, [(p_, p_) for p_ in p], None
    kernel = RNG.normal(size=(2, channels, *k))
    periodic = case["boundary"] == "circular"

    def layers(x, kernel):
        rule = "periodic" if periodic else None
        return nn.conv_general_dilated(x, kernel, *arguments, d, boundary=rule, outputs=cut_of(case))

    def whole(x, kernel):
        if not periodic:
            return lax.conv_general_dilated(x, kernel, *arguments, d)
        x = jnp.pad(x, [(0, 0), (0, 0), *arguments[1]], mode="wrap")
        return lax.conv_general_dilated(x, kernel, arguments[0], "VALID", None, d)

    return layers, whole, (kernel,)


def cut_of(case: dict) -> str:
    return case["out_rule"] if case.get("out_rule") and kind(case) != "conv_transpose" else ""


def causal_convolution(case: dict):
    from jax import lax

    from jax_bridge import nn

    (k,), channels = [int(n) for n in re.findall(r"k=(\d+)", case["op"])], case["global_shape"][1]
    kernel, arguments = RNG.normal(size=(channels, 1, k)), ((1,), [(k - 1, 0)])

    def layers(x, kernel):
        return nn.conv_general_dilated(x, kernel, *arguments, feature_group_count=channels)

    def whole(x, kernel):
        return lax.conv_general_dilated(x, kernel, *arguments, feature_group_count=channels)

    return layers, whole, (kernel,)


def pooling(case: dict):
    import jax.numpy as jnp
    from jax import lax

    from jax_bridge import nn

    k, s, d, p = ([1, 1, *options(case)[name]] for name in "ksdp")
    ends = [(0, 0), (0, 0), *((p_, p_) for p_ in p[2:])]

    def taken(x, offset):
        starts = [o * d_ for o, d_ in zip(offset, d, strict=True)]
        stops = [n - (k_ - 1 - o) * d_ for n, k_, o, d_ in zip(x.shape, k, offset, d, strict=True)]
        return lax.slice(x, starts, stops, s)

    def layers(x):
        if kind(case) == "maxpool":
            return nn.max_pool(x, k, s, ends, d, outputs=cut_of(case))
        return nn.avg_pool(x, k, s, ends, outputs=cut_of(case))

    def whole(x):
        if kind(case) == "maxpool" and max(d) > 1:  # JAX has no gradient of it: every window, written out
            x = jnp.pad(x, ends, constant_values=-np.inf)
            return jnp.max(jnp.stack([taken(x, offset) for offset in np.ndindex(*k)]), axis=0)
        if kind(case) == "maxpool":
            return lax.reduce_window(x, -np.inf, lax.max, k, s, ends)
        return lax.reduce_window(x, 0.0, lax.add, k, s, ends) / math.prod(k)

    return layers, whole, ()


def interpolation(case: dict):
    """torch's formulas, as a matrix: xshard's taps are tested against torch itself."""
    import jax.numpy as jnp

    from jax_bridge import nn
    from xshard.nn.resample import taps

    size, mode, corners = re.fullmatch(
        r"interpolate size=(\d+) mode=(\w+) align_corners=(\w+)", case["op"]
    ).groups()
    length, aligned = case["global_shape"][-1], corners == "True"
    found, matrix = taps(mode, length, int(size), align_corners=aligned), np.zeros((int(size), length))
    for o, (inputs, weights) in enumerate(zip(*found, strict=True)):
        np.add.at(matrix[o], inputs, weights)

    def layers(x):
        return nn.interpolate(x, (*x.sharding.shape[:-1], int(size)), mode, align_corners=aligned)

    return layers, lambda x: jnp.einsum("ncl,ol->nco", x, matrix), ()


LAYERS = {
    "conv": convolution,
    "conv_transpose": convolution,
    "causal": causal_convolution,
    "maxpool": pooling,
    "avgpool": pooling,
    "interpolate": interpolation,
}
