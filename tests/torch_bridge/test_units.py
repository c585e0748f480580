"""Dims cut in whole units: weights in blocks that share a scale, and DTensor's placements."""

import pytest
import torch
from torch.distributed.tensor import Shard

import torch_bridge as xt
from xshard import Mesh
from xshard.errors import PlanError

RULES = {"weight": "(n 128)/tp (m 128)", "scale": "n/tp m"}
SHAPES = {"weight": (1152, 256), "scale": (9, 2)}


def whole() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-8, 9, SHAPES["weight"], generator=generator)
    scale = torch.randint(1, 5, SHAPES["scale"], generator=generator)
    return {"weight": weight.float().to(torch.float8_e4m3fn), "scale": scale.float()}


def save(path: str) -> list[int]:
    mesh = Mesh(tp=8)
    blocks = {}
    for name, rule in RULES.items():
        blocks[name] = xt.redistribute(whole()[name], f"{rule.replace('/tp', '')} -> {rule}", mesh)
    xt.save(blocks, path, RULES, mesh, shapes=SHAPES)
    return [len(block) for block in blocks.values()]


def load_and_multiply(path: str) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = Mesh(tp=3)
    blocks = xt.load(path, RULES, mesh)
    x = torch.arange(512.0).reshape(2, 256) % 16
    weight = blocks["weight"].float().requires_grad_()
    text = "(n 128)/tp (m 128), n/tp m, b (m 128) | copy(tp) -> b (n 128)/tp"
    y = xt.einsum(text, weight, blocks["scale"], x, mesh=mesh)
    y.sum().backward()
    y = xt.redistribute(y.detach(), "b (n 128)/tp -> b (n 128)", mesh)
    return y, xt.redistribute(weight.grad, "(n 128)/tp (m 128) -> (n 128) (m 128)", mesh)


def test_blocks_and_scales_are_saved_on_8_ranks_and_multiplied_on_3(tmp_path):
    path = str(tmp_path / "weights")
    assert xt.testing.run_ranks(8, save, path) == [[256, 2]] * 4 + [[128, 1]] + [[0, 0]] * 3
    scale = whole()["scale"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    weight = (whole()["weight"].float() * scale).requires_grad_()
    x = torch.arange(512.0).reshape(2, 256) % 16
    for y, gradient in xt.testing.run_ranks(3, load_and_multiply, path):
        assert torch.equal(y, (x @ weight.T).detach())
        assert torch.equal(gradient, x.sum(0) * scale)


def test_a_dtensor_has_units_where_its_placements_cut_between_them():
    place = xt.dtensor.to_placements
    assert place("(n 4)/tp d", Mesh(tp=2), (16, 3)) == (Shard(0),)
    for shape in (None, (12, 3)):  # 3 units are 2 and 1, where a DTensor has 6 rows and 6
        with pytest.raises(PlanError, match="a DTensor cannot hold '\\(n 4\\)/tp'"):
            place("(n 4)/tp d", Mesh(tp=2), shape)
