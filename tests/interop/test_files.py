"""States of torch read by JAX from files or ranks, and back: bit by bit, under names of either, from DCP."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import torch
import torch.distributed.checkpoint as dcp

import jax_bridge as xj
import torch_bridge as xt
from jax_bridge.torch_interop import to_jax
from tests.interop import chain
from tests.interop.helpers import jax_mesh
from tests.jax_bridge.helpers import in_jax
from tests.torch_bridge.helpers import on_ranks
from xshard import Mesh
from xshard.state.files import open_checkpoint
from xshard.state.llama import names_from_text

HEADS = "4,2,8"  # 4 of queries, 2 of keys and values, each of 8


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, x in expected.items() if not chain.same(found[name], x)] == []


@in_jax
def test_a_round_trip_from_torch_through_jax(tmp_path: Path) -> None:
    """Fused on the way to the files, as flax has them in JAX, and of the names of torch again."""
    torch.manual_seed(0)
    state = {name: torch.randn(shape).bfloat16() for name, shape in chain.SHAPES.items()}
    mesh = jax_mesh(dp=2, tp=2)
    flax = names_from_text("llama-to-flax")
    xt.save(state, tmp_path / "torch", names=names_from_text(f"llama-to-fused:{HEADS}"))
    back = names_from_text(f"fused-to-llama:{HEADS}")
    plain = xj.load(tmp_path / "torch", {"**.weight": "..."}, mesh, names=back)
    same(
        {
            name: torch.tensor(np.asarray(x).view("i2")).view(torch.bfloat16)
            for name, x in plain.items()
        },
        state,
    )

    xt.save(state, tmp_path / "plain")
    tree = xj.load(tmp_path / "plain", {"**.kernel": "i/dp o/tp", "**": "..."}, mesh, names=flax)
    kernels = [x for name, x in tree.items() if name.endswith("kernel")]
    assert kernels and all(x.sharding.spec == jax.P("dp", "tp") for x in kernels)
    xj.save(tree, tmp_path / "jax")
    same(xt.load(tmp_path / "jax", names=names_from_text("flax-to-llama")), state)


@in_jax
def test_every_dtype_survives_files_of_any_kind(tmp_path: Path) -> None:
    mesh = jax_mesh(dp=2, tp=2)
    bytes_ = torch.arange(64, dtype=torch.uint8)
    names = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32")
    state = {name: bytes_.clone().view(getattr(torch, name)).reshape(4, -1) for name in names}
    state["turned"] = torch.arange(12.0).reshape(3, 4).T
    xt.save(state, tmp_path / "files")
    dcp.save(dict(state), checkpoint_id=tmp_path / "dcp", no_dist=True)
    for kind in ("files", "dcp"):
        tree = xj.load(tmp_path / kind, {"**": "o/dp i"}, mesh)
        xj.save(tree, tmp_path / f"{kind} of jax")
        same(xt.load(tmp_path / f"{kind} of jax"), state)


def test_a_state_goes_all_the_way_bit_by_bit(tmp_path: Path) -> None:
    """FSDP2 on four ranks, a tensor-parallel server on two others, JAX, files, torch again."""
    on_ranks(6, chain.to_server, tmp_path)
    through_jax(folder=tmp_path)
    on_ranks(4, chain.from_files, tmp_path)


@in_jax
def through_jax(folder: Path) -> None:
    """The server's blocks, in their memory -> arrays of 8 devices -> files."""
    two = jax_mesh(tp=2)
    eight = jax_mesh(dp=2, tp=4)
    first, second = (torch.load(folder / f"server{rank}.pt") for rank in range(2))
    for kind, blocks in first.items():
        tensors = {
            name: [x, second[kind][name]]
            for name, x in blocks.items()
            if isinstance(x, torch.Tensor)
        }
        rules = chain.SERVED if kind == "whole" else chain.FUSED_THERE
        arrays = to_jax(tensors, rules, two, torch_mesh=Mesh(tp=2))
        there = {"**.step": "..."} if kind == "whole" else {}
        arrays = xj.transfer(arrays, there | {"**": "... i/(dp,tp)"}, eight)
        assert all(x.sharding.device_set == set(eight.devices.flat) for x in arrays.values())
        small = {"float8_e4m3fn", "float8_e5m2"} if kind in ("whole", "weights") else set()
        assert {x.dtype.name for x in arrays.values()} == {"bfloat16", "float32"} | small
        numbers = {name: x for name, x in blocks.items() if not isinstance(x, torch.Tensor)}
        xj.save({**arrays, **numbers}, folder / kind)
    fused, whole = (set(open_checkpoint(folder / kind)) for kind in ("weights", "whole"))
    assert {
        f"model.layers.1.{name}" for name in ("self_attn.qkv_proj.weight", "mlp.down_proj.small")
    } <= fused
    assert "model.layers.1.self_attn.q_proj.weight" in whole
