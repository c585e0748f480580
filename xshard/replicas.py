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
from xshard.layout.sub_axes import split_by, split_of
from xshard.notation.parser import ARROW

# True if calls without `check_replicated=` compare replicas.
ALWAYS = arguments.is_on("XSHARD_CHECK_REPLICATED")

Watcher = Callable[["ReplicaCheck"], Callable[[int, Any], object]]
WatcherT = TypeVar("WatcherT", bound=Watcher)

# Set by `watch_checks`: blocks are then not compared.
WATCH: Watcher | None = None


@contextmanager
def watch_checks(watcher: WatcherT) -> Iterator[WatcherT]:
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
        # Copies have one value, too, though devices use them in different ways.
        differing = set(layout.axes) - set(layout.tagged("copy"))
        return tuple(axis for axis in self.sharding.mesh.long_axes if axis not in differing)

    def fault(
        self, differences: ArrayLike, names: Sequence[object] | None = None
    ) -> ReplicaError | None:
        """Judge measured differences between replicas: return the error to raise, None if they are equal.

        Devices along an axis of replicas should hold equal blocks. If the largest value is 1.0, a
        difference of 0.5 is an error; one within the rounding of the dtype is none.

        Args:
            differences: `[devices, axes, 2]`: for each device and each of `self.axes` the largest
                difference between the devices along the axis, then the largest value that they hold.
            names: Of devices in errors, such as ranks; by default their numbers.
        """
        difference_and_largest = np.asarray(differences, np.float64)
        difference = difference_and_largest[..., 0]  # [devices, axes]
        largest = difference_and_largest[..., 1]
        is_wrong = difference > tolerances.replicas(self.dtype) * largest
        if not is_wrong.any():
            return None
        # Only the first wrong axis is reported, and on it the first device with its group. All devices
        # have the findings of all groups, so that all of them raise the same error.
        # `argmax` of bools is the first that is True.
        axis_index = int(is_wrong.any(axis=0).argmax())
        device = int(is_wrong[:, axis_index].argmax())
        axis = self.axes[axis_index]
        group = self.mesh.group(device, (axis,))
        members_text = "devices " + ", ".join(map(str, group))
        if names:
            members_text = "ranks " + ", ".join(str(names[member]) for member in group)
        hint = f"by {difference[device, axis_index]:.3g} on {members_text}, where the largest value is "
        hint += f"{largest[device, axis_index]:.3g}\n  {self._way_out(axis)}"
        noun = "cotangents" if self.cotangents else "blocks"
        axis_name = self.sharding.mesh.origin(axis)  # as a layout names it
        reason = f"{noun} differ along {axis_name!r}, where one value is meant"
        error = ReplicaError(reason, text=self.text, span=self._span_of_layout(), hint=hint)
        return with_path(error, self.name)

    def _span_of_layout(self) -> tuple[int, int]:
        """Return the span of the layout in the text: before the arrow, or for cotangents behind it."""
        before_arrow, _, behind_arrow = self.text.partition(ARROW)
        if not self.cotangents:
            return 0, len(before_arrow.rstrip())
        text_end = len(self.text)
        return text_end - len(behind_arrow.lstrip()), text_end

    def _way_out(self, axis: str) -> str:
        """Return what to write or do, for blocks that differ along an axis."""
        is_copied = axis in self.sharding.layout.tagged("copy")
        axis = self.sharding.mesh.origin(axis)  # as a layout names it
        if not self.cotangents:
            way_out = f"write what they are on the left, as sum({axis}), mean({axis})"
            return f"{way_out} or n/{axis} for parts of a dim n, or make them equal"
        if is_copied:
            return f"addends have one gradient: reduce sum({axis}) before devices use it in different ways"
        return f"if each device uses its result in its own way, say so: copy({axis}) on the right"


def checks_of(
    plan: Any, mesh: Mesh | None, text: str, name: str = ""
) -> tuple[ReplicaCheck, ReplicaCheck | None]:
    """Make the checks that replicas are equal: of a plan's input blocks, and of its results' gradients.

    The gradients (cotangents) that arrive for the results are laid out by the dual of the target layout.
    A target layout with pending maxima or minima is not linear and has no dual: the second is None.

    Args:
        plan: The plan of a redistribution.
        mesh: All devices that call it; None: the mesh of the source for blocks, of the target for
            gradients.
        text: The redistribution as the user wrote it, for errors.
        name: The array's name in errors.
    """
    source = plan.source
    check = ReplicaCheck(
        sharding=source,
        mesh=_mesh_of_callers(source, mesh),
        dtype=plan.dtype,
        text=text,
        cotangents=False,
        name=name,
    )
    if not plan.dst.is_linear:
        return check, None
    dual = plan.target.dual
    target_mesh = _mesh_of_callers(plan.target, mesh)
    return check, check._replace(sharding=dual, mesh=target_mesh, cotangents=True)


def _mesh_of_callers(array: Sharding, mesh: Mesh | None) -> Mesh:
    """Return the mesh of all devices that call, with the sub-axes of the array's."""
    # The two ends of a plan may be on two meshes, with other devices.
    if mesh is None:
        return array.mesh
    return split_by(mesh, split_of(array.mesh))


def are_replicas_checked(requested: bool | None) -> bool:
    """Return whether replicas are compared: as a call asks, else as the environment does.

    Also while they are watched.
    """
    if WATCH is not None:
        return True
    return ALWAYS if requested is None else requested
