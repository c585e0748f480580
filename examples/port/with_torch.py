"""The block in torch, on one device's blocks."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import torch_bridge as xt
from port.shardings import GATHER, SCATTER, TO_COPIES
from xshard import Mesh

Weights = dict[str, Tensor]


def block(weights: Weights, x: Tensor, mesh: Mesh) -> Tensor:
    """Weights and tokens [batch, tokens, width] -> tokens of the same shape."""
    w = {name: xt.redistribute(value, TO_COPIES[name], mesh) for name, value in weights.items()}
    return layers(w, x, mesh)


def layers(w: Weights, x: Tensor, mesh: Mesh, gelu: str = "tanh") -> Tensor:
    """The block, on each device's copies of the weights."""
    x = attend(w, x, mesh)
    tokens = xt.redistribute(norm(x, w["norm2"]), GATHER, mesh)
    hidden = F.gelu(tokens @ w["up"] + w["up_bias"], approximate=gelu)
    return x + xt.redistribute(hidden @ w["down"], SCATTER, mesh) + w["down_bias"]


def attend(w: Weights, x: Tensor, mesh: Mesh) -> Tensor:
    """The first half: attention and its residual."""
    tokens = xt.redistribute(norm(x, w["norm1"]), GATHER, mesh)
    return x + xt.redistribute(attention(tokens, w["qkv"], w["out"]), SCATTER, mesh)


def attention(x: Tensor, w_qkv: Tensor, w_out: Tensor) -> Tensor:
    q, k, v = torch.einsum("bsd,dche->cbhse", x, w_qkv)
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return torch.einsum("bhse,hed->bsd", heads, w_out)


def norm(x: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, scale.shape, scale)


def optimiser(values: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(values, lr=0.1, weight_decay=0.01)
