"""Carrying out the plan of a hand-over, on the side that the route names.

Decides nothing about the plan: torch's processes are its devices, or JAX's own devices are.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
from torch import Tensor

from jax_bridge.state.between import Blocks, Held, alone, carried, on_mesh
from torch_bridge.between import redistribute_between
from xshard import Plan


def by_torch(block: Tensor | None, made: Plan) -> Tensor | None:
    """A block before the plan -> the block after it, where there is one; the plan's devices are ranks."""
    return redistribute_between(None if block is None else block.detach(), made)


def by_jax(blocks: Blocks, made: Plan, devices: Mapping[int, jax.Device]) -> Blocks:
    """This process's blocks before the plan -> its blocks after it. devices: by the plan's numbers."""
    if made.transfer is None:
        return on_mesh(blocks, made, [devices[number] for number in made.src_devices])
    return carried({"": Held(blocks, made.dtype)}, [alone(made)], devices)[0]
