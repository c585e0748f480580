"""Positions in JAX: as xshard says, inside the mapped program and outside of it."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_bridge as xj
import xshard as xs
from tests.jax_bridge.helpers import in_jax

MESH = xs.Mesh(dp=2, cp=2)
LAYOUTS = [
    "s/zigzag(cp,4,8)",
    "s/(cp,dp)",
    "s/cyclic(dp,3)/cp:halo(1,1)",
    "s",
    "s/sizes(cp,9,3)",
    "s/zigzag(dp)",
]


def jax_mesh(**axes: int) -> jax.sharding.Mesh:
    n = int(np.prod(list(axes.values())))
    kinds = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), kinds, devices=jax.devices()[:n])


def padded(text: str, mesh: xs.Mesh) -> list[list[int]]:
    """The positions of every device, padded as JAX pads blocks."""
    layout = xs.Layout.parse(text)
    found = [layout.positions(mesh, (12,), "s", device).tolist() for device in range(mesh.n_devices)]
    return [rows + [-1] * (max(map(len, found)) - len(rows)) for rows in found]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@in_jax
def test_positions_of_this_devices_block(layout, check_vma) -> None:
    inside = jax.shard_map(
        lambda: xj.positions(layout, shape=(12,), dim="s")[None],
        mesh=jax_mesh(dp=2, cp=2),
        in_specs=(),
        out_specs=P(("dp", "cp")),
        check_vma=check_vma,
    )
    for run in (inside, jax.jit(inside)):
        assert run().tolist() == padded(layout, MESH)


@in_jax
def test_positions_inside_pmap_and_vmap() -> None:
    def local(_):
        return xj.positions("b s/zigzag(cp)", shape=(2, 12), dim=1)

    expected, nothing = padded("s/zigzag(cp)", xs.Mesh(cp=4)), np.zeros(4)
    assert jax.pmap(local, "cp", devices=jax.devices()[:4])(nothing).tolist() == expected
    assert jax.vmap(local, axis_name="cp")(nothing).tolist() == expected


@pytest.mark.parametrize("layout", LAYOUTS)
@in_jax
def test_positions_of_all_blocks_are_the_order_of_storage(layout) -> None:
    mesh = jax_mesh(dp=2, cp=2)
    axes = xs.Layout.parse(layout).axes
    found = xj.positions(layout, mesh, shape=(12,), dim="s")
    assert found.sharding.spec == P(axes or None)
    first_of_each = [group[0] for group in zip(*MESH.groups(axes), strict=True)] if axes else [0]
    assert found.tolist() == [row for device in first_of_each for row in padded(layout, MESH)[device]]
    if sorted(found.tolist()) == list(range(12)):
        x = np.arange(12.0) ** 2
        stored = xj.reshard(jax.device_put(x, jax.NamedSharding(mesh, P())), f"s -> {layout}")
        assert np.array_equal(stored, x[found])
    assert xj.positions(layout, mesh.abstract_mesh, shape=(12,), dim="s").tolist() == found.tolist()


@in_jax
def test_live_activations_from_contiguous_to_zigzag_and_back() -> None:
    mesh, x = jax_mesh(cp=4), np.arange(96.0, dtype=np.float32).reshape(2, 16, 3)
    for there, back in (("cp", "zigzag(cp)"), ("zigzag(cp)", "cyclic(cp,2)"), ("zigzag(cp,8,8)", "cp")):
        before, after = (
            np.asarray(xj.positions(f"s/{cut}", mesh, shape=(16,), dim=0)) for cut in (there, back)
        )
        expression = f"b s/{there} c -> b s/{back} c"
        moved = jax.shard_map(
            lambda x, e=expression: xj.redistribute(x, e, shape=(2, 16, 3)),
            mesh=mesh,
            in_specs=P(None, "cp"),
            out_specs=P(None, "cp"),
        )
        assert np.array_equal(moved(x[:, before]), x[:, after])
        weight = 7 * x + 1
        gradient = jax.grad(lambda y, f=moved, w=weight[:, after]: (f(y) * w).sum())(x[:, before])
        assert np.array_equal(gradient, weight[:, before])


@in_jax
def test_what_is_refused() -> None:
    with pytest.raises(xs.errors.MeshError, match="no axis of the layout is manual here") as caught:
        xj.positions("b s/cp", shape=(2, 12), dim="s")
    assert "positions(layout, mesh, shape=shape, dim=dim)" in str(caught.value)
    with pytest.raises(xs.errors.ShapeError, match="no dim 'c'"):
        xj.positions("b s/cp", jax_mesh(cp=4), shape=(2, 12), dim="c")
    with pytest.raises(xs.errors.NotationError, match="unknown mesh axis 'tp'"):
        xj.positions("b s/tp", jax_mesh(cp=4), shape=(2, 12), dim="s")
    with pytest.raises(xs.errors.MeshError, match="'dp' is not manual here"):
        jax.vmap(lambda _: xj.positions("b/dp s/cp", MESH, shape=(2, 12), dim="s"), axis_name="cp")(
            np.zeros(2)
        )
