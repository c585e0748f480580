"""The check of `check_replicated=True`: replicated blocks are equal. The bridges measure, this judges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from xshard import arguments, tolerances
from xshard.errors import ReplicaError, with_path
from xshard.layout import Mesh, Sharding
from xshard.notation.parser import ARROW

# True if calls without `check_replicated=` compare replicas.
ALWAYS = arguments.is_on("XSHARD_CHECK_REPLICATED")

Watcher = Callable[["ReplicaCheck"], Callable[[int, Any], object]]
WatcherT = TypeVar("WatcherT", bound=Watcher)

# Set by `watched`: blocks are then not compared.
WATCH: Watcher | None = None


@contextmanager
def watched(watcher: WatcherT) -> Iterator[WatcherT]:
    """Call `watcher` with each check, instead of comparing; it returns a function of device and block."""
    global WATCH
    WATCH = watcher
    try:
        yield watcher
    finally:
        WATCH = None


class ReplicaCheck(NamedTuple):
    """The blocks to compare: the inputs of the redistribution `text`, or the cotangents of its results."""

    sharding: Sharding
    mesh: Mesh  # all devices that call it: each gets the findings of all groups, so that none waits
    dtype: str
    text: str
    cotangents: bool
    name: str = ""  # the array's name in errors
    see: Callable[[int, Any], object] | None = None  # called instead, with a device and its block

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which blocks are equal by contract: axes of replicas and of copies."""
        layout = self.sharding.layout
        mesh = self.sharding.mesh
        apart = set(layout.axes) - set(layout.tagged("copy"))
        return tuple(a for a in mesh.long_axes if a not in apart)

    def fault(
        self, differences: ArrayLike, names: Sequence[object] | None = None
    ) -> ReplicaError | None:
        """The error to raise or None, by (largest difference, largest value): `[devices, axes, 2]`."""
        difference, largest = np.moveaxis(np.asarray(differences, np.float64), -1, 0)
        wrong = difference > tolerances.replicas(self.dtype) * largest
        if not wrong.any():
            return None
        i = int(wrong.any(axis=0).argmax())
        axis = self.axes[i]
        device = int(wrong[:, i].argmax())
        group = self.mesh.group(device, (axis,))
        called = ", ".join(str(names[d] if names else d) for d in group)
        left, _, right = self.text.partition(ARROW)
        end = len(self.text)
        side = (end - len(right.lstrip()), end) if self.cotangents else (0, len(left.rstrip()))
        what = "cotangents" if self.cotangents else "blocks"
        hint = f"by {difference[device, i]:.3g} on {'ranks' if names else 'devices'} {called}, where the "
        hint += f"largest value is {largest[device, i]:.3g}\n  {self._way_out(axis)}"
        reason = f"{what} differ along {axis!r}, where one value is meant"
        return with_path(ReplicaError(reason, text=self.text, span=side, hint=hint), self.name)

    def _way_out(self, axis: str) -> str:
        if not self.cotangents:
            return f"write what they are, as in sum({axis}) or mean({axis}) on the left, or make them equal"
        if axis in self.sharding.layout.tagged("copy"):
            return f"addends have one gradient: reduce sum({axis}) before devices use it in different ways"
        return f"if each device uses its result in its own way, say so: copy({axis}) on the right"


def checks_of(
    plan: Any, mesh: Mesh | None, text: str, name: str = ""
) -> tuple[ReplicaCheck, ReplicaCheck | None]:
    """The checks of a plan's blocks, and of its results' cotangents. mesh: None is the mesh of either."""
    check = ReplicaCheck(plan.source, mesh or plan.source.mesh, plan.dtype, text, False, name)
    if not plan.dst.is_linear:
        return check, None
    dual = plan.target.dual
    return check, check._replace(sharding=dual, mesh=mesh or dual.mesh, cotangents=True)


def are_checked(asked: bool | None) -> bool:
    """True if replicas are compared: as the call asks, else as the environment does. Or they are watched."""
    return WATCH is not None or (ALWAYS if asked is None else asked)
