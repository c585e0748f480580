"""The whole way: FSDP2 on four ranks, a tensor-parallel server on two others, JAX, files, torch again."""

from __future__ import annotations

from pathlib import Path

import torch

import jax_bridge as xj
from jax_bridge.torch_interop import to_jax
from tests.interop import chain
from tests.interop.helpers import jax_mesh
from tests.jax_bridge.helpers import in_jax
from tests.torch_bridge.helpers import on_ranks
from xshard import Mesh
from xshard.state.files import open_checkpoint


def test_a_state_goes_all_the_way_bit_by_bit(tmp_path: Path) -> None:
    on_ranks(6, chain.to_server, tmp_path)
    through_jax(folder=tmp_path)
    on_ranks(4, chain.from_files, tmp_path)


@in_jax
def through_jax(folder: Path) -> None:
    """The server's blocks, in their memory -> arrays of 8 devices -> files."""
    two, eight = jax_mesh(tp=2), jax_mesh(dp=2, tp=4)
    first, second = (torch.load(folder / f"server{rank}.pt") for rank in range(2))
    for kind, blocks in first.items():
        tensors = {name: [x, second[kind][name]] for name, x in blocks.items() if isinstance(x, torch.Tensor)}
        rules = chain.SERVED if kind == "whole" else chain.FUSED_THERE
        arrays = to_jax(tensors, rules, two, torch_mesh=Mesh(tp=2))
        there = {"**.step": "..."} if kind == "whole" else {}
        arrays = xj.transfer(arrays, there | {"**": "... i/(dp,tp)"}, eight)
        assert all(x.sharding.device_set == set(eight.devices.flat) for x in arrays.values())
        small = {"float8_e4m3fn", "float8_e5m2"} if kind in ("whole", "weights") else set()
        assert {x.dtype.name for x in arrays.values()} == {"bfloat16", "float32"} | small
        numbers = {name: x for name, x in blocks.items() if not isinstance(x, torch.Tensor)}
        xj.save({**arrays, **numbers}, folder / kind)
    names = set(open_checkpoint(folder / "weights"))
    assert (
        "model.layers.1.self_attn.qkv_proj.weight" in names and "model.layers.1.mlp.down_proj.small" in names
    )
    assert "model.layers.1.self_attn.q_proj.weight" in set(open_checkpoint(folder / "whole"))
