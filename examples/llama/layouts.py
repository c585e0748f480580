"""Every layout of the block: torch and JAX read the same expressions.

A scheme lays out weights and tokens; all that has to be sent, and when, follows. b: batch,
s: tokens, t: the tokens that are looked at, v: characters, d: width, g: heads of keys and values, r: heads of
queries that share one of them, h: these, its key and its value, k: width of a head, n: gate and value,
f: width of the feed-forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from xshard import Mesh


@dataclass(frozen=True)
class Scheme:
    """A way to be parallel. save: whether gathered weights are kept for the gradients, or gathered again."""

    mesh: Mesh
    tokens: str
    save: Literal["used", "given"]
    expressions: Mapping[str, str]

    def stored(self, weight: str) -> str:
        """The layout of a weight, which is the last operand of the expression of its name."""
        return self.expressions[weight].partition("->")[0].rpartition(", ")[2].strip()

    def alone(self) -> Scheme:
        """The same on one device."""
        return replace(self, mesh=Mesh(dict.fromkeys(self.mesh.axes, 1)))


# Heads and the feed-forward are cut over `tp`, and between them the tokens are: norms and residuals work on
# different tokens (sequence parallelism). The batch is cut over `dp`.
TENSOR_PARALLEL = Scheme(
    mesh=Mesh(dp=2, tp=2),
    tokens="b/dp s/tp",
    save="used",
    expressions={
        "embed": "v d -> v d | copy(dp,tp)",
        "norm1": "b/dp s/tp d, d -> b/dp s/tp d",
        "qkv": "b/dp s/tp d, d g/tp h k -> b/dp s g/tp h k",
        "match": "b/dp s g/tp r k, b/dp t g/tp k -> b/dp g/tp r s t",
        "mix": "b/dp g/tp r s t, b/dp t g/tp k -> b/dp s g/tp r k",
        "out": "b/dp s g/tp r k, g/tp r k d -> b/dp s/tp d",
        "norm2": "b/dp s/tp d, d -> b/dp s/tp d",
        "up": "b/dp s/tp d, d n f/tp -> n b/dp s f/tp",
        "down": "b/dp s f/tp, f/tp d -> b/dp s/tp d",
        "norm3": "b/dp s/tp d, d -> b/dp s/tp d",
        "scores": "b/dp s/tp d, d v -> b/dp s/tp v",
        "loss": "() | mean(dp,tp) -> ()",
    },
)

# Every device has some of the batch and a part of every weight, which is gathered where it is used, once more
# for the gradients, and kept nowhere.
ZERO3 = Scheme(
    mesh=Mesh(node=2, gpu=2),
    tokens="b/(node,gpu) s",
    save="given",
    expressions={
        "embed": "v d/(node,gpu) -> v d | copy(node,gpu)",
        "norm1": "b/(node,gpu) s d, d/(node,gpu) -> b/(node,gpu) s d",
        "qkv": "b/(node,gpu) s d, d/(node,gpu) g h k -> b/(node,gpu) s g h k",
        "match": "b/(node,gpu) s g r k, b/(node,gpu) t g k -> b/(node,gpu) g r s t",
        "mix": "b/(node,gpu) g r s t, b/(node,gpu) t g k -> b/(node,gpu) s g r k",
        "out": "b/(node,gpu) s g r k, g r k d/(node,gpu) -> b/(node,gpu) s d",
        "norm2": "b/(node,gpu) s d, d/(node,gpu) -> b/(node,gpu) s d",
        "up": "b/(node,gpu) s d, d/(node,gpu) n f -> n b/(node,gpu) s f",
        "down": "b/(node,gpu) s f, f d/(node,gpu) -> b/(node,gpu) s d",
        "norm3": "b/(node,gpu) s d, d/(node,gpu) -> b/(node,gpu) s d",
        "scores": "b/(node,gpu) s d, d/(node,gpu) v -> b/(node,gpu) s v",
        "loss": "() | mean(node,gpu) -> ()",
    },
)

SCHEMES = {"TP + SP + DP": TENSOR_PARALLEL, "ZeRO-3": ZERO3}
