"""Mistakes that a port may have, each in one of the two functions."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from torch import Tensor

import jax_bridge as xj
import torch_bridge as xt
from port import with_jax, with_torch
from port.shardings import GATHER, SCATTER, TO_COPIES
from xshard import Mesh


class Bug(NamedTuple):
    """The mistake, the runtime that makes it, the function with it, and a mesh on which it shows."""

    what: str
    runtime: str
    function: Callable
    mesh: str


def bias_before_scatter(weights: with_jax.Weights, x: jax.Array) -> jax.Array:
    """Every device along `tp` adds the bias to its own addend."""
    w = {name: xj.redistribute(value, TO_COPIES[name]) for name, value in weights.items()}
    x = with_jax.attend(w, x)
    tokens = xj.redistribute(with_jax.norm(x, w["norm2"]), GATHER)
    hidden = jax.nn.gelu(tokens @ w["up"] + w["up_bias"])
    return x + xj.redistribute(hidden @ w["down"] + w["down_bias"], SCATTER)


def other_gelu(weights: with_torch.Weights, x: Tensor, mesh: Mesh) -> Tensor:
    """torch's default GELU is exact, JAX's is the approximation by tanh."""
    w = {name: xt.redistribute(value, TO_COPIES[name], mesh) for name, value in weights.items()}
    return with_torch.layers(w, x, mesh, gelu="none")


def norm_without_copies(weights: with_torch.Weights, x: Tensor, mesh: Mesh) -> Tensor:
    """The first norm's scale is used as it is: every device has the gradient of its own tokens."""
    w = {name: xt.redistribute(value, TO_COPIES[name], mesh) for name, value in weights.items()}
    return with_torch.layers({**w, "norm1": weights["norm1"]}, x, mesh)


BUGS = {
    "bias": Bug(
        "the last bias is added before the reduce-scatter", "jax", bias_before_scatter, "dp=1,tp=4"
    ),
    "gelu": Bug("GELU is exact, not the approximation by tanh", "torch", other_gelu, "dp=1,tp=4"),
    "norm": Bug(
        "the gradient of the first norm's scale is not added up",
        "torch",
        norm_without_copies,
        "dp=2,tp=2",
    ),
}
