"""Arrays as a contraction writes them <-> the same with one dim per name: local, and a bijection or a choice
of elements. A composed dim is reshaped; of two dims with one name the diagonal is taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from xshard.contractions.expression import Contraction
from xshard.contractions.placements import dim_lengths
from xshard.errors import ShapeError
from xshard.layout import Layout, Mesh, Sharding
from xshard.notation.parser import parts_of


def written(call: Contraction, mesh: Mesh, shapes: Sequence[Sequence[int]]) -> tuple[Sharding, ...]:
    """The operands and the result as they are written. shapes: the operands', a length per name.

    Raises ShapeError unless the blocks of a composed dim are blocks of its first name.
    """
    lengths, arrays = dim_lengths(call.operands, shapes), list[Sharding]()
    for layout in call.arrays:
        for dim in layout.dims:
            first, *rest = parts_of(dim)
            n = mesh.size(*dim.axes) * 2 ** sum(shard.order == "zigzag" for shard in dim.shards)
            in_turn = any(shard.numbers or shard.order == "cyclic" for shard in dim.shards)
            if rest and (in_turn or lengths[first] % n):
                what = f"blocks may end within a row of {first!r}, which is {lengths[first]} long"
                raise ShapeError(what, text=str(dim), hint="it takes equal parts or zigzags of these rows")
        shape = (math.prod(lengths[name] for name in parts_of(dim)) for dim in layout.dims)
        arrays.append(Sharding(layout, mesh, tuple(shape)))
    return tuple(arrays)


def named_block(
    x: Any, layout: Layout, named: Sharding, block: Sequence[int], rows: Callable[[str], Any]
) -> Any:
    """A block under a layout as it is written -> the block, of shape `block`, under `named`.

    x: an array of numpy, torch or JAX, which have its gradient. rows: the global rows of a name in the block.
    """
    here, whole = (dict(zip(named.layout.names, lengths, strict=True)) for lengths in (block, named.shape))
    names, lengths, picked = list[str](), list[int](), list[int]()
    for dim in layout.dims:
        for i, name in enumerate(parts_of(dim)):
            is_here = bool(dim.shards) and not i
            if named.layout.dim(name).shards and not is_here:
                picked.append(len(names))
            names.append(name)
            lengths.append((here if is_here else whole)[name])
    if layout.names != tuple(names):
        x = x.reshape(lengths)
    for d in picked:
        x = x[(slice(None),) * d + (rows(names[d]),)]
    for name in named.layout.names:
        while names.count(name) > 1:
            first = names.index(name)
            second = names.index(name, first + 1)
            x = x.diagonal(0, first, second)
            names = [*names[:first], *names[first + 1 : second], *names[second + 1 :], name]
    return x
