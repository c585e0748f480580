"""The examples of `xshard selfcheck --all`: redistributions with a mesh and a shape each.

Decides which: the rows of the notation's table, and three on orders and means, small enough to run on
four devices within seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xshard.layout import Mesh


@dataclass(frozen=True)
class Example:
    """An expression, its name in other systems, and a mesh to run it on.

    lengths: the `shape` of an array, or the `sizes` of a contraction.
    """

    expression: str
    elsewhere: str
    mesh: Mesh
    lengths: dict[str, Any]


EXAMPLES = (
    Example("b s/cp c -> b s c/cp", "all-to-all (Ulysses)", Mesh(cp=4), {"shape": (2, 16, 8)}),
    Example("b s/zigzag(cp) c -> b s c/cp", "the zigzag all-to-all", Mesh(cp=4), {"shape": (2, 16, 8)}),
    Example("b s/zigzag(cp) c -> b s/cp c", "zigzag to contiguous", Mesh(cp=4), {"shape": (2, 16, 8)}),
    Example("n/dp d -> n d", "all-gather, gradients identical", Mesh(dp=4), {"shape": (12, 8)}),
    Example("n/dp d -> n d | copy(dp)", "all-gather, gradients summed", Mesh(dp=4), {"shape": (12, 8)}),
    Example("n d | sum(tp) -> n/tp d", "reduce-scatter", Mesh(tp=4), {"shape": (12, 8)}),
    Example("n d | sum(tp) -> n d", "all-reduce, identity backward", Mesh(tp=4), {"shape": (12, 8)}),
    Example("n d -> n d | copy(tp)", "identity, all-reduce backward", Mesh(tp=4), {"shape": (12, 8)}),
    Example("n/x/y d -> n/y/x d", "a permutation of devices", Mesh(x=2, y=2), {"shape": (12, 8)}),
    Example("b h/sp w -> b h/sp:halo(1,1) w", "halo exchange", Mesh(sp=4), {"shape": (2, 16, 4)}),
    Example("b h/sp:halo(1,1) w -> b h/sp w", "trim", Mesh(sp=4), {"shape": (2, 16, 4)}),
    Example("b s/zigzag(cp) -> b s/zigzag(cp):halo(3,0)", "a causal halo", Mesh(cp=4), {"shape": (2, 64)}),
    Example(
        "n d | mean(dp,tp) -> n/(dp,tp) d", "mean of gradients, sharded", Mesh(dp=2, tp=2), {"shape": (12, 8)}
    ),
    Example(
        "b s/tp d, d f/tp -> b s f/tp",
        "sequence and tensor parallel (Megatron)",
        Mesh(tp=4),
        {"sizes": {"b": 2, "s": 16, "d": 4, "f": 8}},
    ),
)
