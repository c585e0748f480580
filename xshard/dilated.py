"""What a window op reads whose input is dilated (a transposed convolution) or cropped (negative padding).

Decides the rows of every part as a halo of its own widths, with the fill beyond the ends in it: so every
block begins with the first row that its outputs read.
"""

from __future__ import annotations

from dataclasses import replace

from xshard.notation import Dim
from xshard.overlap import Boundary, Halo
from xshard.ownership import owners
from xshard.reads import Read, Sizes, covered, intervals, read


def dilated(
    dim: Dim,
    length: int,
    sizes: Sizes,
    *,
    k: int,
    s: int = 1,
    d: int = 1,
    base: int = 1,
    p: tuple[int, int] = (0, 0),
    fill: float = 0.0,
    out: str = "",
) -> Read:
    """The read of outputs `o` that take rows `o * s - p[0] + d * j`, input i being row `i * base`.

    fill: what stands between the inputs, and beyond the ends. out: how the outputs are cut (see `read`).
    Raises ShapeError where the parts of the dim are no intervals.

    >>> from xshard.notation import Shard
    >>> found = dilated(Dim("h", (Shard(("sp",)),)), 8, (2,), k=3, base=2, p=(1, 2))
    >>> str(found.source), found.inputs, found.outputs
    ('h/sp:halo([0,0],[1,1],constant)', ((0, 5), (4, 9)), ((0, 8), (8, 16)))
    """
    rows = (length - 1) * base + 1 if length else 0
    outputs = max(0, (rows + sum(p) - d * (k - 1) - 1) // s + 1)
    needs = covered(k, s, d, base, p[0])
    found = read(dim, length, sizes, outputs, needs, out)
    own = intervals(owners(dim, length, sizes))
    inputs = tuple(needs(*made) if made[0] < made[1] else (0, 0) for made in found.outputs)
    lo = tuple(mine[0] - first for mine, (first, _) in zip(own, inputs, strict=True))
    hi = tuple(last - mine[1] for mine, (_, last) in zip(own, inputs, strict=True))
    beyond = Boundary("constant", fill)
    source = replace(found.source, overlap=Halo(lo, hi, beyond, beyond))
    return replace(found, source=source, inputs=inputs)
