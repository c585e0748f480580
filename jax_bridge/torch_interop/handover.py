"""The arrangement of one array's hand-over: layouts, shapes, the sharding, the route.

Decides everything that follows from layouts, meshes, shapes and dtypes, and raises all errors about them:
the same in every process, and cached by value. Knows no tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import NamedSharding

from jax_bridge.mesh.machine import machine as jax_machine
from jax_bridge.specs import storage_sharding
from jax_bridge.torch_interop.buffers import LOG
from jax_bridge.torch_interop.devices import Ends
from jax_bridge.torch_interop.route import SIDES, Machines, Profiles, Route, find_route, torch_refuses
from torch_bridge.mesh.machine import machine as torch_machine
from xshard import Layout, Sharding, XshardError
from xshard.errors import ShapeError
from xshard.layout.layout import check_axes
from xshard.layout.lengths import global_shape
from xshard.notation.parser import mark_errors
from xshard.plans.expression import Expression, sides_or_one


@dataclass(frozen=True)
class Arrangement:
    """One array's way from one framework to the other.

    src: its layout before. text: what errors mark. blocks: the sharding of torch's blocks. array: that of
    JAX's array, stored: its layout. route: the move in between.
    """

    src: Layout
    text: str
    blocks: Sharding
    array: NamedSharding
    stored: Sharding
    route: Route

    @property
    def shape(self) -> tuple[int, ...]:
        return self.blocks.shape


@dataclass(frozen=True)
class Options:
    """The arguments copy, writable, dtensor, shape, profile and via of `to_jax` and `to_torch`."""

    copy: bool | None = None
    writable: bool = True
    dtensor: bool = False
    shape: tuple[int, ...] | None = None
    profile: Profiles = "auto"
    via: str | None = None

    def arranged(self, layout: Layout | Expression, ends: Ends, *array: Any, to_jax: bool) -> Arrangement:
        """array: the shape of blocks, the global one if it is known, the dtype. Raises as `api.to_jax`."""
        machines = Machines(_by_side(self.profile), self.via, torch_refuses(ends))
        return _arranged(layout, ends, *array, machines, to_jax)

    def check_moved(self, found: Arrangement) -> None:
        """Log the plan that runs first; raise XshardError if nothing may be copied."""
        if self.copy is False:
            raise XshardError(
                "blocks that move cannot be handed over without a copy",
                text=found.text,
                hint="copy=None allows it",
            )
        LOG.info("%s moves the blocks first: %s", found.route.side, found.text)


@functools.lru_cache(maxsize=65536)
def named(layout: Layout, ends: Ends, shape: tuple[int, ...]) -> NamedSharding:
    """The sharding of an array. Raises ShapeError for blocks that differ in size, which JAX does not have."""
    text = str(layout)
    with mark_errors(text):
        check_axes(layout, ends.jax_axes, text)
        sharding = Sharding(layout, ends.jax_axes, shape)
        if not sharding.is_even:
            whole = " ".join(sharding.layout.names)
            raise ShapeError(
                f"a jax.Array has no uneven blocks: {shape} does not divide on JAX's {ends.jax_axes!r}",
                hint=f"hand it over under a layout that divides, as in '{layout} -> {whole}'",
            )
        return storage_sharding(sharding.layout, ends.jax_mesh)


@functools.lru_cache(maxsize=65536)
def _arranged(
    layout: Layout | Expression,
    ends: Ends,
    local_shape: tuple[int, ...],
    shape: tuple[int, ...] | None,
    dtype: str,
    machines: Machines,
    to_jax: bool,
) -> Arrangement:
    src, dst, text = sides_or_one(layout)
    before, after = (ends.axes, ends.jax_axes) if to_jax else (ends.jax_axes, ends.axes)
    of_blocks, of_array = (src, dst) if to_jax else (dst, src)
    with mark_errors(text):
        check_axes(src, before, text)
        check_axes(dst, after, text)
        whole = global_shape(src, before, local_shape, text) if shape is None else shape
        blocks = Sharding(of_blocks, ends.axes, whole)
        array, stored = named(of_array, ends, whole), Sharding(of_array, ends.jax_axes, whole)
        route = find_route(src, dst, ends, whole, dtype, machines, to_jax)
    return Arrangement(src, text, blocks, array, stored, route)


def _by_side(profile: Profiles) -> tuple:
    """The profile of either side."""
    given = (profile[side] if isinstance(profile, Mapping) else profile for side in SIDES)
    return tuple(find(each) for find, each in zip((torch_machine, jax_machine), given, strict=True))
