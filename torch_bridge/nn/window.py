"""The local half of a window op: its outputs from the rows that an exchange has brought.

Decides what happens where a device has several stretches of outputs, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Piece = tuple[int, int]  # rows of the block, outputs made of them


def by_pieces(block: Tensor, pieces: Mapping[int, Sequence[Piece]], op: Callable[[Tensor], Tensor]) -> Tensor:
    """The op on every stretch of rows by itself, the outputs put together in their order."""
    for d, found in pieces.items():
        if len(found) > 1:
            parts = block.split([rows for rows, _ in found], d)
            return torch.cat(
                [by_pieces(p, {**pieces, d: (one,)}, op) for p, one in zip(parts, found, strict=True)], d
            )
    return op(block)


def no_outputs(shape: Sequence[int], *inputs: Tensor | None) -> Tensor:
    """A tensor without elements that depends on the inputs, whose gradients it makes zero.

    A device without outputs takes part in every exchange of the backward pass like all others, in
    the same order: so what its output depends on must not differ from theirs.
    """
    return torch.cat([x.reshape(-1)[:0] for x in inputs if x is not None]).reshape(shape)
