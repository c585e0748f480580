"""Blocks of whole arrays, of their cotangents and of their gradients, under any linear layout."""

from __future__ import annotations

import numpy as np

from xshard import dtypes, reference
from xshard.layout import Layout, Mesh, Sharding
from xshard.notation.parser import Dim
from xshard.steps.base import Block
from xshard.testing.diagnosis.evidence import is_settled
from xshard.testing.plans import random_blocks
from xshard.testing.question import Devices


def whole_layout(ndim: int) -> Layout:
    """Return the layout of an array on one device: "d0 d1" for two dims."""
    return Layout(tuple(Dim(f"d{i}") for i in range(ndim)))


def scatter_with_random_addends(x: Block, sharding: Sharding, seed: int) -> Devices:
    """Cut a whole array into one block per device, to feed to a function under test.

    Where the layout says that blocks are addends of a sum, they are random numbers that add up to
    the array: 5.0 on 2 devices may become -0.3 and 5.3. Equal addends, or one addend and zeros,
    would hide mistakes, such as a sum that is missing or done twice.
    """
    layout = sharding.layout
    mesh = sharding.mesh
    # Without addends ("n/dp d", where blocks are parts of the array) there is nothing to draw.
    has_addends = not is_settled(layout)
    # In short floats and small whole numbers, noise would be rounded or overflow.
    can_hold_noise = x.dtype.itemsize >= 4 and x.dtype.kind in "fci"
    if not has_addends or not can_hold_noise:
        return tuple(reference.scatter(x, layout, mesh))

    noise = _draw_contributions(x, layout, mesh, seed)
    # The noise adds up to an array of its own. Add the array that is missing to one addend of each sum.
    missing = x - reference.gather(noise, layout, mesh, x.shape)
    pairs = zip(reference.scatter(missing, layout, mesh), noise, strict=True)
    return tuple((part + noise_block).astype(x.dtype) for part, noise_block in pairs)


def _draw_contributions(x: Block, layout: Layout, mesh: Mesh, seed: int) -> list[Block]:
    """Draw blocks of an array of this shape and dtype, about as large as the array."""
    rng = np.random.default_rng((11, seed))
    noise = random_blocks(
        rng,
        layout,
        mesh,
        x.shape,
        dtypes.name_of(x.dtype),
        # So that means are whole numbers.
        multiple_of=mesh.n_devices if layout.tagged("mean") else 1,
    )
    if x.dtype.kind == "i":
        return noise
    largest = float(np.abs(x).max(initial=0))
    if largest == 0:
        largest = 1.0
    # By a power of two, so that nothing is rounded twice; drawn values go up to 4, or 2^2.
    scale = x.dtype.type(2.0 ** round(np.log2(largest) - 2))
    return [block * scale for block in noise]


def cotangents_of(cotangent: Block, sharding: Sharding, seed: int) -> Devices:
    """Cut the cotangent of a whole array into blocks under the dual layout, times 1/n for a mean."""
    blocks = scatter_with_random_addends(cotangent, sharding.dual, seed)
    scale = float(sharding.scale)
    if scale == 1:
        return blocks
    return tuple((block * scale).astype(cotangent.dtype) for block in blocks)


def wanted_gradient(gradient: Block, sharding: Sharding) -> Devices:
    """Cut the gradient of a whole array into blocks, as far as the layout determines them."""
    # A mean over n devices gives each 1/n of the gradient: the dual layout alone says a sum.
    scale = gradient.dtype.type(float(sharding.scale))
    blocks = reference.scatter(gradient, sharding.layout.dual, sharding.mesh)
    return tuple(block * scale for block in blocks)
