"""Gradients against differences along random directions: on one device too a gradient may be wrong.

A framework gives the loss as a function of blocks; the rest is numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from xshard.steps.base import Block
from xshard.testing.diagnosis.evidence import in_double
from xshard.testing.question import Devices
from xshard.tolerances import DERIVATIVE

_DIRECTIONS = 3
# Relative to the largest value of a block. A kink (relu, max) that lies within one is not within both.
_STEPS = (1e-5, 1e-7)

Derivatives = dict[int, tuple[Devices, Devices, float]]


def derivatives(
    loss: Callable[[Sequence[Block]], float], inputs: Sequence[Block], gradients: Mapping[int, Devices]
) -> Derivatives:
    """By number of input, along a few directions: the gradient's derivatives, differences, and their size.

    loss: takes blocks of float64 or complex128; blocks of whole numbers stay as they are.
    """
    wide = [in_double(x) if i in gradients else x for i, x in enumerate(inputs)]
    by_input: Derivatives = {}
    for i, (block,) in gradients.items():
        rng, gradient, x = np.random.default_rng((13, i)), in_double(block), wide[i]
        length = float(np.abs(x).max(initial=0)) or 1.0
        got, want, size = np.zeros(_DIRECTIONS), np.zeros(_DIRECTIONS), 0.0
        for k in range(_DIRECTIONS):
            v = length * rng.normal(size=x.shape)
            if x.dtype.kind == "c":
                v = v + 1j * length * rng.normal(size=x.shape)
            got[k] = np.vdot(gradient, v).real
            size = max(size, float(np.linalg.norm(gradient * v)))
            for step in _STEPS:
                after, before = (loss([*wide[:i], x + s * v, *wide[i + 1 :]]) for s in (step, -step))
                slope = (after - before) / (2 * step)
                if step == _STEPS[0] or abs(slope - got[k]) < abs(want[k] - got[k]):
                    want[k] = slope
                if abs(want[k] - got[k]) <= DERIVATIVE / 10 * size:
                    break
        by_input[i] = (got,), (want,), size
    return by_input
