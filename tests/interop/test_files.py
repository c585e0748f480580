"""Files of torch read by JAX, and back: bit by bit, under names of either, from DCP too."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import torch
import torch.distributed.checkpoint as dcp

import jax_bridge as xj
import torch_bridge as xt
from tests.interop.helpers import jax_mesh
from tests.jax_bridge.helpers import in_jax
from xshard.state.llama import named

HEADS = "4,2,8"  # 4 of queries, 2 of keys and values, each of 8


def llama() -> dict[str, torch.Tensor]:
    """The state of a small one, with what Adam keeps of it, in several dtypes."""
    torch.manual_seed(0)
    layer = {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32)}
    layer |= {"self_attn.o_proj": (32, 32), "mlp.gate_proj": (64, 32), "mlp.up_proj": (64, 32)}
    layer |= {"mlp.down_proj": (32, 64), "input_layernorm": (32,), "post_attention_layernorm": (32,)}
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (48, 32), "model.norm.weight": (32,), "lm_head.weight": (48, 32)}
    return {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}


def bits(x: torch.Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert (
            found[name].dtype == x.dtype and found[name].shape == x.shape and bits(found[name]) == bits(x)
        ), name


@in_jax
def test_torch_to_jax_and_back(tmp_path: Path) -> None:
    """Fused on the way to the files, as flax has them in JAX, and of the names of torch again."""
    mesh, state = jax_mesh(dp=2, tp=2), llama()
    fused, flax = named(f"llama-to-fused:{HEADS}"), named("llama-to-flax")
    xt.save(state, tmp_path / "torch", names=fused)
    back = named(f"fused-to-llama:{HEADS}")
    plain = xj.load(tmp_path / "torch", {"**.weight": "..."}, mesh, names=back)
    assert {name: np.asarray(x).tobytes() for name, x in plain.items()} == {
        n: bits(x) for n, x in state.items()
    }

    xt.save(state, tmp_path / "plain")
    tree = xj.load(tmp_path / "plain", {"**.kernel": "i/dp o/tp", "**": "..."}, mesh, names=flax)
    kernels = [x for name, x in tree.items() if name.endswith("kernel")]
    assert kernels and all(x.sharding.spec == jax.P("dp", "tp") for x in kernels)
    xj.save(tree, tmp_path / "jax")
    same(xt.load(tmp_path / "jax", names=named("flax-to-llama")), state)


@in_jax
def test_every_dtype_and_dcp(tmp_path: Path) -> None:
    mesh = jax_mesh(dp=2, tp=2)
    bytes_ = torch.arange(64, dtype=torch.uint8)
    dtypes = [
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int32,
    ]
    state = {str(dtype): bytes_.clone().view(dtype).reshape(4, -1) for dtype in dtypes}
    state["turned"] = torch.arange(12.0).reshape(3, 4).T
    xt.save(state, tmp_path / "files")
    dcp.save(dict(state), checkpoint_id=tmp_path / "dcp", no_dist=True)
    for kind in ("files", "dcp"):
        tree = xj.load(tmp_path / kind, {"**": "o/dp i"}, mesh)
        xj.save(tree, tmp_path / f"{kind} of jax")
        same(xt.load(tmp_path / f"{kind} of jax"), state)
