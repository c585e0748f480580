"""Whether blocks that a layout holds to be equal are: which axes, how close, and what is said where not.

Decides what `check_replicated=True` of the bridges means. They compare along the axes and bring the
differences of all devices together; the verdict is made here, the same on every device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from xshard import dtypes
from xshard.environment import is_on
from xshard.errors import XshardError
from xshard.layout.mesh import Mesh
from xshard.layout.sharding import Sharding
from xshard.notation.parser import ARROW

# Whether every call compares them that does not say otherwise.
ALWAYS = is_on("XSHARD_CHECK_REPLICATED")


class ReplicaError(XshardError):
    """Blocks differ along an axis along which a layout holds them to be one value."""


class ReplicaCheck(NamedTuple):
    """Blocks that are compared: those that enter the redistribution `text`, or their results' cotangents.

    mesh: all devices that call it, along axes too that the sharding does not have: what one group of them
    finds is told to all, so that none goes on and waits for the others.
    """

    sharding: Sharding
    mesh: Mesh
    dtype: str
    text: str
    cotangents: bool

    @property
    def axes(self) -> tuple[str, ...]:
        """Along which the blocks are equal by contract: those of replicas and of copies."""
        layout, mesh = self.sharding.layout, self.sharding.mesh
        apart = {a for dim in layout.dims for a in dim.axes} | {
            a for kind, axes in layout.tags if kind != "copy" for a in axes
        }
        return tuple(a for a in mesh.axes if a not in apart and mesh.size(a) > 1)

    @property
    def tolerance(self) -> float:
        """How far replicas may be apart, relative to the largest value of a block: 0 for whole numbers.

        The square root of the dtype's precision. Kernels that add in an order of their own leave replicas
        apart in their last bits, and equality would call that a fault; gradients that belong to
        different work are apart by as much as they are large.
        """
        return math.sqrt(dtypes.precision(self.dtype))

    def fault(self, found: ArrayLike, names: Sequence[object] | None = None) -> ReplicaError | None:
        """What is wrong, or None.

        found: `[devices, axes, 2]`: for every device of `mesh` the largest difference along every one of the
        axes, and the largest finite value there. names: what the devices are called, if not by their numbers.
        """
        difference, largest = np.moveaxis(np.asarray(found, np.float64), -1, 0)
        wrong = difference > self.tolerance * largest
        if not wrong.any():
            return None
        at = int(wrong.any(axis=0).argmax())
        axis, device = self.axes[at], int(wrong[:, at].argmax())
        group = self.mesh.group(device, (axis,))
        called = ", ".join(str(names[d] if names else d) for d in group)
        left, _, right = self.text.partition(ARROW)
        end = len(self.text)
        side = (end - len(right.lstrip()), end) if self.cotangents else (0, len(left.rstrip()))
        what = "cotangents" if self.cotangents else "blocks"
        return ReplicaError(
            f"{what} differ along {axis!r}, where one value is meant",
            text=self.text,
            span=side,
            hint=f"by {difference[device, at]:.3g} on {'ranks' if names else 'devices'} {called}, where the "
            f"largest value is {largest[device, at]:.3g}\n  {self._way_out(axis)}",
        )

    def _way_out(self, axis: str) -> str:
        if not self.cotangents:
            return (
                f"say what the blocks are, as in sum({axis}) or mean({axis}) on the left, or make them equal"
            )
        if axis in self.sharding.layout.tagged("copy"):
            return f"addends have one gradient: reduce sum({axis}) before devices use it, each in its own way"
        return f"if each device uses its result in its own way, say so: copy({axis}) on the right"


def are_checked(asked: bool | None) -> bool:
    """Whether replicas are compared: as the call says or, where it does not, as the environment did."""
    return ALWAYS if asked is None else asked
