"""A small Llama's state and AdamW's: cut by FSDP2, moved to a server's ranks, and read from files again.

The part of torch: ranks import this file, and no JAX.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten_with_path

import torch_bridge as xt
from tests.torch_bridge.helpers import still_connected
from xshard.state.llama import to_fused
from xshard.trees import leaf_name

LAYER = {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32)}
LAYER |= {"self_attn.o_proj": (32, 32), "mlp.gate_proj": (64, 32), "mlp.up_proj": (64, 32)}
LAYER |= {"mlp.down_proj": (32, 64), "input_layernorm": (32,), "post_attention_layernorm": (32,)}
SHAPES = {
    f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in LAYER.items()
}
# 50 rows are uneven over four ranks.
SHAPES |= {
    "model.embed_tokens.weight": (50, 32),
    "model.norm.weight": (32,),
    "lm_head.weight": (50, 32),
}

FUSED = to_fused(4, 2, 8)
TRAINED = {"**.step": "...", "**": "o/fsdp ..."}
SERVED = {"**.step": "...", "**.{o,down}_proj.*": "o i/tp", "**": "o/tp ..."}
FUSED_THERE = {
    "**.qkv_proj.*": "o/block(tp,32,16,16) i",
    "**.gate_up_proj.*": "o/block(tp,64,64) i",
}
FUSED_THERE |= {name: layout for name, layout in SERVED.items() if name != "**.step"}
PARTS = "weights", "exp_avg", "exp_avg_sq"
ONLY_STORED = {"mlp.down_proj": torch.float8_e4m3fn, "mlp.up_proj": torch.float8_e5m2}


def trained(
    mesh: DeviceMesh, seed: int = 0, steps: int = 2
) -> tuple[dict[str, Any], dict[str, dict]]:
    """The whole state, as a program has it, and weights, first and second moments by names, which fuse."""
    torch.manual_seed(seed)
    model = nn.Module()
    for name, shape in SHAPES.items():
        *path, last = name.split(".")
        at = model
        for part in path:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        dtype = torch.float32 if "norm" in name else torch.bfloat16
        at.register_parameter(last, nn.Parameter(torch.randn(shape).to(dtype)))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25 / (1 + seed))
    for _ in range(steps):
        for x in model.parameters():
            x.grad = x.detach() / 7
        optimizer.step()
    weights = {name: x.detach() for name, x in model.named_parameters()}
    for part, dtype in ONLY_STORED.items():
        for i in range(2):
            x = weights[f"model.layers.{i}.{part}.weight"]
            small = x.to_local().to(dtype)
            like = {"shape": x.shape, "stride": x.stride()}
            weights[f"model.layers.{i}.{part}.small"] = DTensor.from_local(
                small, mesh, x.placements, **like
            )
    moments = {
        key: {name: optimizer.state[x][key] for name, x in model.named_parameters()}
        for key in PARTS[1:]
    }
    return {**weights, "optimizer": optimizer.state_dict()}, {"weights": weights, **moments}


def to_server(folder: Path) -> None:
    """On ranks 0 to 3 a trainer, on 4 and 5 a server, which leaves its blocks in the folder."""
    trainer = DeviceMesh("cpu", torch.arange(4), mesh_dim_names=("fsdp",))
    server = DeviceMesh("cpu", torch.tensor([4, 5]), mesh_dim_names=("tp",))
    rank = dist.get_rank()
    ends = {"src_mesh": trainer, "dst_mesh": server}
    whole, parts = trained(trainer) if rank < 4 else (None, dict.fromkeys(PARTS))
    found = {"whole": xt.transfer(whole, (TRAINED, SERVED), bucket_bytes="16KiB", **ends)}
    for kind, tree in parts.items():
        found[kind] = xt.transfer(tree, ({"**": TRAINED["**"]}, FUSED_THERE), names=FUSED, **ends)
    assert (found["whole"] is None) == (rank < 4)
    if rank >= 4:
        named = {
            kind: {leaf_name(path): x for path, x in flat(tree)} for kind, tree in found.items()
        }
        torch.save(named, folder / f"server{rank - 4}.pt")
    assert still_connected()


def flat(tree: Any) -> list[Any]:
    return tree_flatten_with_path(tree)[0]


def from_files(folder: Path) -> None:
    """On 4 ranks: what JAX has saved, under FSDP2 again, has every bit of what was trained."""
    mesh = DeviceMesh("cpu", torch.arange(4), mesh_dim_names=("fsdp",))
    whole, parts = trained(mesh)
    fresh, _ = trained(mesh, seed=1, steps=1)
    before = dict(flat(fresh))
    assert not any(same(before[path], x) for path, x in flat(whole) if isinstance(x, Tensor))
    found = xt.load(folder / "whole", {"**.step": "..."}, mesh, like=fresh)
    loaded = dict(flat(found))
    assert [path for path, x in flat(whole) if not same(loaded[path], x)] == []
    assert loaded.keys() == {path for path, _ in flat(whole)}
    for kind, tree in parts.items():
        blocks = xt.load(folder / kind, {"**": TRAINED["**"]}, mesh, names=FUSED.inverse)
        assert [name for name, x in tree.items() if not same(blocks[name], x)] == []
        assert blocks.keys() == tree.keys()


def same(found: Any, expected: Any) -> bool:
    """Whether both are one number or text, or tensors with the same bits in this process."""
    if not isinstance(expected, Tensor):
        return type(found) is type(expected) and found == expected
    a, b = (x.to_local() if isinstance(x, DTensor) else x for x in (found, expected))
    raw = [x.contiguous().view(-1).view(torch.uint8) for x in (a, b)]
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*raw)
