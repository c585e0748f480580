"""Positions in torch: as xshard says, on every rank and mesh."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import check_error, in_turn, on_ranks

MESH = xs.Mesh(dp=2, cp=2)


def _positions() -> None:
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
    axis, dim = "unknown mesh axis 'tp'", "no dim 'c' in 'b s/cp'"
    check_error(lambda: asked("b s/tp", device_mesh, dim="s"), "NotationError", axis)
    check_error(lambda: asked("b s/cp", MESH, dim="c"), "ShapeError", dim)


def _reshard() -> None:
    """Live activations between contiguous and zigzag: positions tell which rows arrived, gradients return."""
    mesh, shape = xs.Mesh(cp=4), (2, 16, 3)
    whole = torch.arange(96.0, dtype=torch.float64).reshape(shape)
    for there, back in (("cp", "zigzag(cp)"), ("zigzag(cp)", "cyclic(cp,2)"), ("zigzag(cp,4,12)", "cp")):
        before, after = (xt.positions(f"b s/{cut} c", mesh, shape=shape, dim="s") for cut in (there, back))
        x = whole[:, before].clone().requires_grad_()
        y = xt.redistribute(x, f"b s/{there} c -> b s/{back} c", mesh, shape=shape)
        assert torch.equal(y, whole[:, after])
        (y * (7 * whole[:, after] + 1)).sum().backward()
        assert torch.equal(x.grad, 7 * whole[:, before] + 1)


def test_positions_and_live_activations_between_contiguous_and_zigzag() -> None:
    on_ranks(4, in_turn, _positions, _reshard)
