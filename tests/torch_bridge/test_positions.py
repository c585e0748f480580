"""Positions in torch: as xshard says, on every rank and mesh."""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import torch_bridge as xt
import xshard as xs
from tests.cases import CELLS, NEAR, TURNED
from tests.torch_bridge.helpers import SharedRanks, check_error, on_ranks
from xshard.state.files.folder import open_checkpoint

MESH = xs.Mesh(dp=2, cp=2)


on_four = SharedRanks(4)


@on_four
def test_positions_are_those_of_the_layout() -> None:
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    rank = dist.get_rank()
    for text in ("b/dp s/zigzag(cp,4,8)", "b s/(cp,dp)", "b s/cyclic(dp,3)/cp:halo(1,1)"):
        layout = xs.Layout.parse(text)
        expected = layout.positions(MESH, (2, 12), "s", rank)
        for found in (
            xt.positions(text, MESH, shape=(2, 12), dim="s"),
            xt.positions(layout, device_mesh, shape=(2, 12), dim=1),
            xt.positions(text, device_mesh, shape=(2, 12), dim=-1, device="cpu"),
        ):
            assert found.dtype == torch.int64 and found.tolist() == expected.tolist()
    part = device_mesh["cp"]  # a mesh of two of the four ranks
    assert xt.positions("s/cp", part, shape=(4,), dim="s").tolist() == [[0, 1], [2, 3]][rank % 2]
    assert xt.positions("s/cp", part, shape=(4,), dim=0, device="meta").device.type == "meta"

    asked = functools.partial(xt.positions, shape=(2, 12))
    axis = "unknown mesh axis 'tp'"
    dim = "no dim 'c' in 'b s/cp'"
    check_error(lambda: asked("b s/tp", device_mesh, dim="s"), "NotationError", axis)
    check_error(lambda: asked("b s/cp", MESH, dim="c"), "ShapeError", dim)


@on_four
def test_activations_move_to_the_rows_of_their_positions() -> None:
    """Live activations between contiguous and zigzag: positions tell which rows arrived, gradients return."""
    mesh = xs.Mesh(cp=4)
    shape = (2, 16, 3)
    whole = torch.arange(96.0, dtype=torch.float64).reshape(shape)
    for there, back in (
        ("cp", "zigzag(cp)"),
        ("zigzag(cp)", "cyclic(cp,2)"),
        ("zigzag(cp,4,12)", "cp"),
    ):
        before, after = (
            xt.positions(f"b s/{cut} c", mesh, shape=shape, dim="s") for cut in (there, back)
        )
        x = whole[:, before].clone().requires_grad_()
        y = xt.redistribute(x, f"b s/{there} c -> b s/{back} c", mesh, shape=shape)
        assert torch.equal(y, whole[:, after])
        (y * (7 * whole[:, after] + 1)).sum().backward()
        assert torch.equal(x.grad, 7 * whole[:, before] + 1)


@on_four
def test_every_verb_takes_maps() -> None:
    """Every verb with `maps`: a halo of a graph, its adjoint, trees, compiled code, a compared call."""
    mesh = xs.Mesh(a=4)
    maps = {"cells": CELLS, "near": NEAR}
    rank = dist.get_rank()
    here = "n/by(a,cells) d"
    wide = "n/by(a,cells):reads(near) d"
    whole = torch.arange(18.0, dtype=torch.float64).reshape(9, 2)
    own, read = (
        xt.positions(text, mesh, shape=(9, 2), dim="n", maps=maps) for text in (here, wide)
    )
    assert own.tolist() == CELLS.part(rank).tolist() and read.tolist() == [
        *own.tolist(),
        *NEAR.part(rank),
    ]
    x = whole[own].clone().requires_grad_()
    y = xt.redistribute(x, f"{here} -> {wide}", mesh, maps=maps)
    assert torch.equal(y, whole[read])
    y.sum().backward()
    readers = torch.bincount(torch.from_numpy(NEAR.rows.copy()), minlength=9) + 1.0
    assert torch.equal(x.grad, readers[own, None].expand(-1, 2).double())
    tree = xt.redistribute(
        {"v": x, "w": {"u": x}}, {"v": f"{here} -> n d", "w": f"{here} -> {wide}"}, mesh, maps=maps
    )
    assert torch.equal(tree["v"], whole) and torch.equal(tree["w"]["u"], y)
    moved = xt.redistribute(x, f"{here} -> {wide}", mesh, maps=maps, async_op=True, debug=True)
    assert torch.equal(moved.wait(), y)
    halo = torch.compile(
        lambda v: xt.redistribute(v * 2, f"{here} -> {wide}", mesh, maps=maps), backend="eager"
    )
    assert torch.equal(halo(x), 2 * y)
    product = xt.einsum(f"{here}, d f -> n/by(a,cells) f", x, whole[:2], mesh=mesh, maps=maps)
    assert torch.equal(product, x @ whole[:2])


@on_four
def test_forces_of_a_graph_network_are_those_of_one_device() -> None:
    """A network on a directed graph of systems with rows on all ranks: energies and forces of one device."""
    rng = np.random.default_rng(0)
    mesh = xs.Mesh(a=4)
    n = 24
    cells, (senders, receivers) = xs.Owners(rng.integers(0, 4, n), 4), rng.integers(0, n, (2, 96))
    near, edges = xs.Needs.of_edges(cells, senders, receivers)
    maps = {"cells": cells, "near": near}
    shapes = (n, 3), (3, 8), (11, 8), (11, 8)
    place, *weights = (torch.from_numpy(rng.normal(size=shape)) for shape in shapes)
    system, own = (
        torch.tensor(rows) for rows in (rng.integers(0, 3, n), cells.part(dist.get_rank()))
    )

    def energies(place, system, graph, read):
        sender, receiver = map(torch.tensor, graph)
        h = place @ weights[0]
        for w in weights[1:]:
            ends = [read(h)[sender], read(place)[sender] - place[receiver]]
            h = h + torch.zeros_like(h).index_add(0, receiver, torch.tanh(torch.cat(ends, -1) @ w))
        return torch.zeros(3, dtype=h.dtype).index_add(0, system, h.square().sum(1))

    def read(x):
        return xt.redistribute(x, "n/by(a,cells) d -> n/by(a,cells):reads(near) d", mesh, maps=maps)

    mine = place[own].requires_grad_()
    place = place.requires_grad_()
    expected = energies(place, system, (senders, receivers), lambda x: x)
    share = energies(mine, system[own], edges[dist.get_rank()][1:], read)
    found = xt.redistribute(share, "s | sum(a) -> s", mesh)
    assert torch.allclose(found, expected, rtol=1e-13, atol=0)
    forces, everyone = (
        torch.autograd.grad(e.sum(), p)[0] for e, p in ((found, mine), (expected, place))
    )
    assert (forces - everyone[own]).abs().max() <= 1e-13 * everyone.abs().max() and len(
        forces
    ) == len(own)


def _files(folder: str) -> None:
    """A checkpoint has its maps, and its rows are there for other owners."""
    mesh = xs.Mesh(a=4)
    shape = (9, 2)
    x = torch.arange(18.0).reshape(shape)[torch.from_numpy(CELLS.part(dist.get_rank()).copy())]
    xt.save({"x": x}, folder, xs.Rules({"x": "n/by(a,cells) d"}, {"cells": CELLS}), mesh)
    dist.barrier()
    y = xt.load(folder, xs.Rules({"x": "n/by(a,to) d"}, {"to": TURNED}), mesh)["x"]
    rows = xt.positions("n/by(a,to) d", mesh, shape=shape, dim="n", maps={"to": TURNED})
    assert torch.equal(y, torch.arange(18.0).reshape(shape)[rows])


def test_files_have_their_maps(tmp_path) -> None:
    on_ranks(4, _files, str(tmp_path / "saved"))
    saved = xs.Layout.parse("n/by(a,cells) d", {"cells": CELLS})
    assert open_checkpoint(tmp_path / "saved").layouts["x"] == saved
