"""Links between devices by their numbers, for meshes that do not begin at device 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from xshard.cost.model import Link, Profile
from xshard.layout import Mesh
from xshard.layout.sub_axes import Refinement


def link_between(profile: Profile, a: int, b: int) -> Link:
    """The link between two devices: inside a node, or across nodes."""
    if profile.across is None or profile.node_devices is None:
        return profile.default
    return profile.default if a // profile.node_devices == b // profile.node_devices else profile.across


def located(profile: Profile, mesh: Mesh, devices: Sequence[int]) -> Profile:
    """The profile for a mesh of these devices: an axis that leaves a node anywhere is across nodes."""
    if profile.across is None or profile.node_devices is None or isinstance(devices, range):
        return profile
    links = dict.fromkeys(mesh.axes, profile.default)
    for axis in mesh.axes:
        for first, *others in mesh.groups((axis,)):
            for other in others:
                if link_between(profile, devices[first], devices[other]) == profile.across:
                    links[axis] = profile.across
    links |= dict(profile.axes)
    nodes = profile.node_devices or 1
    in_step = all(device // nodes - devices[0] // nodes == i // nodes for i, device in enumerate(devices))
    if in_step and all(profile.link(axis, mesh) == links[axis] for axis in mesh.axes):
        return profile
    return replace(profile, axes=tuple(sorted(links.items())))


def refined(profile: Profile, refinement: Refinement) -> Profile:
    """The profile with the link of every axis given to its factors; of two links the slower counts."""
    links: dict[str, Link] = {}
    for axis, link in profile.axes:
        for factor in (*dict(refinement.src).get(axis, ()), *dict(refinement.dst).get(axis, ())):
            links[factor] = min(links.get(factor, link), link, key=lambda x: x.bytes_per_s)
    return replace(profile, axes=tuple(sorted(links.items())), inside=()) if links else profile
