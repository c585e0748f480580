"""Sub-axes for `jax.lax`, which has no names for them: groups of devices along whole axes instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xshard import Mesh
from xshard.layout.sub_axes import SubAxisMesh, unfactored


def long_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of more than one device, as JAX knows them, in mesh order."""
    whole = unfactored(mesh, mesh.axes)[0]
    return tuple(a for a in whole.axes if whole.size(a) > 1)


def group(mesh: Mesh, axes: Sequence[str]) -> dict[str, Any]:
    """Arguments of a collective of `jax.lax` along axes of a plan's mesh; the first axis is the slowest.

    >>> fine = SubAxisMesh(Mesh(x=4, y=2), (("x", (2, 2)),))
    >>> group(fine, ("x_0", "x_1")), group(fine, ("x_1",))["axis_index_groups"]
    ({'axis_name': ('x',)}, ((0, 1), (2, 3)))
    """
    whole, names = unfactored(mesh, axes)
    if whole is not mesh or not isinstance(mesh, SubAxisMesh):
        return {"axis_name": names}
    return subgroups(mesh, axes, lambda device: mesh.group(device, axes))


def subgroups(mesh: Mesh, axes: Sequence[str], members: Callable[[int], Sequence[int]]) -> dict[str, Any]:
    """Arguments of a collective among the members that each device has along the axes, in their order."""
    parts, names = spanned(mesh, [axis for axis in mesh.axes if axis in axes])
    # JAX names the devices of a group by their index along the axes that span it.
    groups = {tuple(mesh.index(d, parts) for d in members(device)): () for device in mesh.group(0, parts)}
    if tuple(groups) == (tuple(range(mesh.size(*parts))),):
        return {"axis_name": names}
    return {"axis_name": names, "axis_index_groups": tuple(groups)}


def spanned(mesh: Mesh, axes: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """All sub-axes of the whole axes that these are part of, and the whole axes: the same devices."""
    if not isinstance(mesh, SubAxisMesh):
        return tuple(axes), tuple(axes)
    names = tuple(dict.fromkeys(map(mesh.origin, axes)))
    return tuple(part for name in names for part in mesh.sub_axes[name]), names
