"""Windows over several dims: the layout that blocks must hold, and the sharding of the outputs.

Decides how convolutions and pools become layouts with `window` overlaps, and the divisors of average pools.
`xshard/layout/block_rows.py` knows windows over one dim; transposed windows and resampling are in
`receptive_fields.py` and `resample.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from xshard.errors import ShapeError
from xshard.layout import Layout, Sharding
from xshard.layout.block_rows import output_dim, window_outputs
from xshard.layout.runs import Run, Runs, unrolled
from xshard.notation.overlap import Window

Windows = tuple[tuple[int, Window], ...]  # (index of a dim, the window over it)


@dataclass(frozen=True)
class WindowLayouts:
    """The two ends of an op whose outputs read windows of some dims.

    source: the layout that blocks must hold: cut dims with their windows, uncut dims as they are.
    result: the outputs; dims without a window are those of the input.
    """

    source: Layout
    result: Sharding


@lru_cache(maxsize=4096)
def window_layouts(sharding: Sharding, windows: Windows) -> WindowLayouts:
    """The sharding of the input and the windows -> the layout to read and the sharding of the outputs.

    Raises ShapeError if a cut dim overlaps already, or no layout can express how the outputs are cut.

    >>> from xshard import Mesh
    >>> found = window_layouts(
    ...     Sharding(Layout.parse("h/sp w"), Mesh(sp=2), (14, 9)), ((0, Window(k=3, s=2, p=1)),)
    ... )
    >>> str(found.source), str(found.result.layout), found.result.shape
    ('h/sp:window(k=3,s=2,p=1) w', 'h/sp w', (7, 9))
    """
    source, result, shape = list(sharding.layout.dims), list(sharding.layout.dims), list(sharding.shape)
    for d, window in windows:
        shape[d] = window.output_length(sharding.shape[d])
        dim = source[d]
        if dim.axes:
            if dim.overlap is not None:
                raise ShapeError(f"'{dim}' overlaps already", hint="redistribute to the dim without it first")
            source[d] = replace(dim, overlap=window)
            sizes = sharding.mesh.sizes_of(dim.axes)
            result[d], shape[d] = output_dim(source[d], sharding.shape[d], sizes)
    layout = sharding.layout
    made = Sharding(replace(layout, dims=tuple(result)), sharding.mesh, tuple(shape))
    return WindowLayouts(replace(layout, dims=tuple(source)), made)


def output_pieces(sharding: Sharding, d: int, window: Window, device: int) -> Runs:
    """The intervals of outputs that a device computes; its block holds the rows for each in turn."""
    dim = replace(sharding.layout.dims[d], overlap=window)
    mesh = sharding.mesh
    coords = [mesh.coords(device)[mesh.position(axis)] for axis in dim.axes]
    found = window_outputs(dim, window, sharding.shape[d], mesh.sizes_of(dim.axes), coords)
    return tuple(run for run in unrolled(found) if run.length)


def pool_window(length: int, window: Window, *, ceil: bool) -> Window:
    """The window of a pool; with `ceil`, padded at its end by what the outputs of torch's `ceil_mode` read.

    >>> pool_window(6, Window(k=3, s=2), ceil=True).padding
    (0, 1)
    """
    before, after = window.padding
    span, padded = window.d * (window.k - 1) + 1, length + before + after
    last = -(-(padded - span) // window.s) * window.s
    # The last window counts if it begins in the array or in the padding before it.
    if not ceil or last >= length + before:
        return window
    return replace(window, p=(before, after + last + span - padded))


def pool_counts(
    length: int, window: Window, runs: Sequence[Run], *, padding: int, include_pad: bool
) -> NDArray[np.int64]:
    """The number of rows by which each output of an average pool is divided, counted as torch does.

    runs: the outputs. padding: rows after the array that count as padding; rows that `ceil_mode` reads
    beyond them never count.

    >>> pool_counts(5, Window(k=3, s=2, p=1), (Run(0, 3),), padding=1, include_pad=False).tolist()
    [2, 3, 2]
    """
    number = np.concatenate([np.arange(r.start, r.start + r.length) for r in runs] or [np.zeros(0, np.int64)])
    first = number * window.s - window.padding[0]
    last = np.minimum(first + window.k, length + padding)
    if not include_pad:
        first, last = np.maximum(first, 0), np.minimum(last, length)
    counts: NDArray[np.int64] = last - first
    return counts
