"""Interpolation of one dim, by torch's formulas: every output is a weighted sum of a few inputs, its taps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.errors import XshardError
from xshard.layout.block_rows import Sizes
from xshard.nn.windows import Frame, interval_frame
from xshard.notation.parser import Dim

MODES = ("nearest", "nearest-exact", "linear", "cubic")
CUBIC = -0.75  # the constant of the cubic kernel (Keys 1981 has -0.5; torch, OpenCV -0.75)


class Taps(NamedTuple):
    """Arrays (outputs, taps): the inputs of every output, and their weights."""

    inputs: NDArray[np.int64]
    weights: NDArray[np.float64]


def taps(
    mode: str, length: int, outputs: int, *, align_corners: bool = False, scale: float | None = None
) -> Taps:
    """Taps of `outputs` rows of `length` rows; scale: outputs per input. XshardError for other modes."""
    if mode not in MODES:
        raise XshardError(f"no interpolation {mode!r}", hint=f"modes are: {', '.join(MODES)}")
    output = np.arange(outputs, dtype=np.float64)
    step = length / outputs if scale is None else 1 / scale
    if mode.startswith("nearest"):
        shift = 0.5 if mode == "nearest-exact" else 0.0
        nearest = np.minimum(np.floor((output + shift) * step).astype(np.int64), length - 1)
        return Taps(nearest[:, None], np.ones((outputs, 1)))
    if align_corners:
        centre = output * ((length - 1) / (outputs - 1) if outputs > 1 else 0.0)
    else:
        centre = (output + 0.5) * step - 0.5
    if mode == "linear":
        centre = np.maximum(centre, 0.0)
        first = np.minimum(np.floor(centre).astype(np.int64), length - 1)
        part = centre - first
        second = np.minimum(first + 1, length - 1)
        return Taps(np.stack([first, second], 1), np.stack([1 - part, part], 1))
    first = np.floor(centre).astype(np.int64)
    part = centre - first
    inputs = np.clip(first[:, None] + np.arange(-1, 3), 0, length - 1)
    return Taps(
        inputs,
        np.stack([_cubic_far(part + 1), _cubic_near(part), _cubic_near(1 - part), _cubic_far(2 - part)], 1),
    )


def resampled_frame(dim: Dim, length: int, sizes: Sizes, resampling: Taps) -> Frame:
    """The frame of an interpolation; outputs are sharded like the dim. Raises as `interval_frame` does."""

    def reads(start: int, stop: int) -> tuple[int, int]:
        inputs = resampling.inputs[start:stop]
        return int(inputs.min()), int(inputs.max()) + 1

    return interval_frame(dim, length, sizes, len(resampling.inputs), reads)


def _cubic_near(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return ((CUBIC + 2) * x - (CUBIC + 3)) * x * x + 1


def _cubic_far(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return ((CUBIC * x - 5 * CUBIC) * x + 8 * CUBIC) * x - 4 * CUBIC
