"""Positions in JAX: as xshard says, inside the mapped program and outside of it."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_bridge as xj
import xshard as xs
from tests.cases import CELLS, NEAR
from tests.jax_bridge.helpers import device_mesh, in_jax, placed

MESH = xs.Mesh(dp=2, cp=2)
CP = xs.Mesh(cp=4)
LAYOUTS = ["s/zigzag(cp,4,8)", "s/(cp,dp)", "s/cyclic(dp,3)/cp:halo(1,1)"]
LAYOUTS += ["s", "s/sizes(cp,9,3)", "s/zigzag(dp)"]


def padded(text: str, mesh: xs.Mesh) -> list[list[int]]:
    """The positions of every device, padded as JAX pads blocks."""
    layout = xs.Layout.parse(text)
    found = [
        layout.positions(mesh, (12,), "s", device).tolist() for device in range(mesh.n_devices)
    ]
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
def test_positions_inside_mapped_functions() -> None:
    def local(_):
        return xj.positions("b s/zigzag(cp)", shape=(2, 12), dim=1)

    expected = padded("s/zigzag(cp)", CP)
    nothing = np.zeros(4)
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
    assert found.tolist() == [
        row for device in first_of_each for row in padded(layout, MESH)[device]
    ]
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
    local = jax.vmap(
        lambda _: xj.positions("b/dp s/cp", MESH, shape=(2, 12), dim="s"), axis_name="cp"
    )
    with pytest.raises(xs.errors.MeshError, match="'dp' is not manual here"):
        local(np.zeros(2))


@in_jax
def test_rows_of_a_map_move() -> None:
    """A halo of a graph and its adjoint on blocks, in types; a migration of arrays at rest, and its order."""
    mesh = device_mesh(CP)
    shape = (9, 2)
    maps = {"cells": CELLS, "near": NEAR, "even": xs.Owners([3, 0, 1, 2] * 2)}
    here = "n/by(cp,cells) d"
    wide = "n/by(cp,cells):reads(near) d"
    layouts = [xs.Layout.parse(text, maps) for text in (here, wide)]
    x = np.arange(18.0, dtype=np.float32).reshape(shape)
    own, read = (xs.reference.scatter(x, layout, CP) for layout in layouts)

    def total(v):
        y = xj.redistribute(v, f"{here} -> {wide}", shape=shape, maps=maps)
        return jax.lax.psum((y**2).sum(), "cp"), y

    def run(v):
        (_, y), pulled = jax.value_and_grad(total, has_aux=True)(v)
        return y, pulled

    blocks = np.concatenate([np.pad(b, [(0, 4 - len(b)), (0, 0)]) for b in own])
    mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P("cp"), out_specs=P("cp")))
    found, pulled = mapped(jax.device_put(blocks, jax.NamedSharding(mesh, P("cp"))))
    many = np.bincount(NEAR.rows, minlength=9) + 1
    for device, (mine, wider) in enumerate(zip(own, read, strict=True)):
        most = len(found) // 4
        assert np.array_equal(found[most * device :][: len(wider)], wider)
        expected = 2 * mine * many[CELLS.part(device), None]
        assert np.array_equal(pulled[4 * device :][: len(mine)], expected)
    rows = xj.positions("n/by(cp,even)", mesh, shape=(8,), dim="n", maps=maps)
    y = xj.reshard(placed(x[:8], mesh, "cp"), "n/cp d -> n/by(cp,even) d", maps=maps)
    assert rows.tolist() == maps["even"].rows.tolist() and np.array_equal(y, x[rows])
    back = xj.reshard(y, "n/by(cp,even) d -> n/cp d", mesh, maps=maps)
    assert np.array_equal(back, x[:8])
