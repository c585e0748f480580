"""Positions in JAX: as xshard says, inside the mapped program and outside of it."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_bridge as xj
import xshard as xs
from tests.jax_bridge.helpers import device_mesh, in_jax, placed

MESH = xs.Mesh(dp=2, cp=2)
CP = xs.Mesh(cp=4)
LAYOUTS = ["s/zigzag(cp,4,8)", "s/(cp,dp)", "s/cyclic(dp,3)/cp:halo(1,1)"]
LAYOUTS += ["s", "s/sizes(cp,9,3)", "s/zigzag(dp)"]


def padded(text: str, mesh: xs.Mesh) -> list[list[int]]:
    """The positions of every device, padded as JAX pads blocks."""
    layout = xs.Layout.parse(text)
    found = [layout.positions(mesh, (12,), "s", device).tolist() for device in range(mesh.n_devices)]
    return [rows + [-1] * (max(map(len, found)) - len(rows)) for rows in found]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@in_jax
def test_positions_of_this_devices_block(layout, check_vma) -> None:
    specs = {"in_specs": (), "out_specs": P(("dp", "cp")), "check_vma": check_vma}
    here = lambda: xj.positions(layout, shape=(12,), dim="s")[None]  # noqa: E731
    inside = jax.shard_map(here, mesh=device_mesh(MESH), **specs)
    for run in (inside, jax.jit(inside)):
        assert run().tolist() == padded(layout, MESH)


@in_jax
def test_positions_inside_pmap_and_vmap() -> None:
    def local(_):
        return xj.positions("b s/zigzag(cp)", shape=(2, 12), dim=1)

    expected, nothing = padded("s/zigzag(cp)", CP), np.zeros(4)
    assert jax.pmap(local, "cp", devices=jax.devices()[:4])(nothing).tolist() == expected
    assert jax.vmap(local, axis_name="cp")(nothing).tolist() == expected


@pytest.mark.parametrize("layout", LAYOUTS)
@in_jax
def test_positions_of_all_blocks_are_the_order_of_storage(layout) -> None:
    mesh = device_mesh(MESH)
    axes = xs.Layout.parse(layout).axes
    found = xj.positions(layout, mesh, shape=(12,), dim="s")
    assert found.sharding.spec == P(axes or None)
    first_of_each = [group[0] for group in zip(*MESH.groups(axes), strict=True)] if axes else [0]
    assert found.tolist() == [row for device in first_of_each for row in padded(layout, MESH)[device]]
    if sorted(found.tolist()) == list(range(12)):
        x = np.arange(12.0) ** 2
        stored = xj.reshard(placed(x, mesh), f"s -> {layout}")
        assert np.array_equal(stored, x[found])
    assert xj.positions(layout, mesh.abstract_mesh, shape=(12,), dim="s").tolist() == found.tolist()


@in_jax
def test_what_is_refused() -> None:
    with pytest.raises(xs.errors.MeshError, match="no axis of the layout is manual here") as caught:
        xj.positions("b s/cp", shape=(2, 12), dim="s")
    assert "positions(layout, mesh, shape=shape, dim=dim)" in str(caught.value)
    with pytest.raises(xs.errors.ShapeError, match="no dim 'c'"):
        xj.positions("b s/cp", device_mesh(CP), shape=(2, 12), dim="c")
    with pytest.raises(xs.errors.NotationError, match="unknown mesh axis 'tp'"):
        xj.positions("b s/tp", device_mesh(CP), shape=(2, 12), dim="s")
    local = jax.vmap(lambda _: xj.positions("b/dp s/cp", MESH, shape=(2, 12), dim="s"), axis_name="cp")
    with pytest.raises(xs.errors.MeshError, match="'dp' is not manual here"):
        local(np.zeros(2))
