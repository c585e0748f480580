"""One block in torch, on a process's blocks, from characters to a loss."""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import torch_bridge as xt
from llama.layouts import Scheme


class Llama(NamedTuple):
    """A model, its weights where the scheme stores them."""

    weights: dict[str, Tensor]
    scheme: Scheme

    def loss(self, characters: Tensor, following: Tensor) -> Tensor:
        """Characters and those to be predicted [batch, tokens] -> the mean cross-entropy."""
        embed = xt.redistribute(
            self.weights["embed"], self.scheme.expressions["embed"], self.scheme.mesh
        )
        x = embed[characters]
        x = x + self.attention(self.norm("norm1", x))
        x = x + self.feed_forward(self.norm("norm2", x))
        scores = self.layer("scores", self.norm("norm3", x))
        loss = F.cross_entropy(scores.flatten(0, 1), following.flatten())
        return xt.redistribute(loss, self.scheme.expressions["loss"], self.scheme.mesh)

    def attention(self, x: Tensor) -> Tensor:
        """[batch, tokens, width], causal."""
        heads = self.layer("qkv", x)  # [batch, tokens, group, queries + key + value, width]
        turned = rotated(heads[..., :-1, :])
        v = heads[..., -1, :]
        q = turned[..., :-1, :]
        k = turned[..., -1, :]
        match = self.einsum("match", q, k) * k.shape[-1] ** -0.5
        later = torch.ones(match.shape[-2:], dtype=torch.bool).triu(1)
        return self.layer(
            "out", self.einsum("mix", match.masked_fill(later, -torch.inf).softmax(-1), v)
        )

    def feed_forward(self, x: Tensor) -> Tensor:
        gate, value = self.layer("up", x)
        return self.layer("down", F.silu(gate) * value)

    def norm(self, name: str, x: Tensor) -> Tensor:
        return self.layer(name, x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt())

    def layer(self, name: str, x: Tensor) -> Tensor:
        return self.einsum(name, x, self.weights[name])

    def einsum(self, name: str, *operands: Tensor) -> Tensor:
        mesh = self.scheme.mesh
        save = self.scheme.save
        return xt.einsum(self.scheme.expressions[name], *operands, mesh=mesh, save=save)


def rotated(x: Tensor) -> Tensor:
    """Rotary embedding: [batch, tokens, ..., width], every token turned by its place."""
    a, b = x.chunk(2, -1)
    angles = torch.outer(
        torch.arange(x.shape[1]), 100.0 ** (-torch.arange(a.shape[-1]).to(x) / a.shape[-1])
    )
    cos, sin = (turn(angles)[:, None, None] for turn in (torch.cos, torch.sin))
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
