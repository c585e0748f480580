"""The local half of a window op: outputs from the rows that an exchange has brought.

Decides what happens where a device has several runs of outputs, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from torch_bridge.nn.placed import Placement
from xshard.errors import ShapeError
from xshard.layout.runs import Run
from xshard.nn.windows import WindowLayouts, window_layouts
from xshard.notation.overlap import Window

Ints = tuple[int, ...]
Piece = tuple[int, int]  # a number of rows of the block, and the number of outputs made of them


def checked_windows(placement: Placement, windows: Sequence[tuple[int, Window]]) -> WindowLayouts:
    """The layouts of windows over the last dims of an array. Raises ShapeError if there are no outputs."""
    found = window_layouts(placement.sharding, windows)
    if any(found.result.shape[d] < 1 for d, _ in windows):
        raise ShapeError(
            f"no output: kernel {tuple(w.k for _, w in windows)} over {placement.shape[-len(windows) :]}",
            text=str(placement.layout),
            hint="a smaller kernel, or more padding",
        )
    return found


def pieces_of(runs: Sequence[Run], window: Window) -> tuple[Piece, ...]:
    """Runs of outputs along a dim -> for each the number of rows that it needs, and its length."""
    return tuple(((r.length - 1) * window.s + window.d * (window.k - 1) + 1, r.length) for r in runs)


def by_pieces(block: Tensor, pieces: Mapping[int, Sequence[Piece]], op: Callable[[Tensor], Tensor]) -> Tensor:
    """The op on every piece of the rows, the outputs concatenated in order."""
    for d, found in pieces.items():
        if len(found) > 1:
            parts = block.split([rows for rows, _ in found], d)
            return torch.cat(
                [by_pieces(p, {**pieces, d: (one,)}, op) for p, one in zip(parts, found, strict=True)], d
            )
    return op(block)


def no_outputs(shape: Sequence[int], *inputs: Tensor | None) -> Tensor:
    """A tensor without elements that depends on the inputs, with zero gradients.

    A device without outputs takes part in every exchange of the backward pass, in the same order as all
    others: so its output must depend on the same inputs as theirs.
    """
    return torch.cat([x.reshape(-1)[:0] for x in inputs if x is not None]).reshape(shape)
