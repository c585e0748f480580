"""The route of one array between torch and JAX: its shardings, and the cheaper side that can move blocks."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch.distributed as dist
from jax.sharding import NamedSharding
from torch import Tensor

from jax_bridge.arrays.program import make_program
from jax_bridge.arrays.stored import ArrayMesh, check_even
from jax_bridge.mesh.context import machine as jax_machine
from jax_bridge.specs import storage_layout, storage_sharding, to_partition_spec
from jax_bridge.state.execute import (
    Blocks,
    LocalBlocks,
    as_array_plan,
    execute,
    plan_mesh,
    run_on_mesh,
)
from jax_bridge.torch_interop.buffers import LOG
from jax_bridge.torch_interop.devices import MeshPair
from jax_bridge.trees import leaves_of
from torch_bridge.mesh.machine import machine as torch_machine
from torch_bridge.redistribution import redistribute
from xshard import Layout, Plan, ProfileLike, Sharding, XshardError, plan
from xshard.errors import PlanError, ShapeError, located
from xshard.layout.layout import check_axes
from xshard.layout.lengths import global_shape
from xshard.notation.parser import mark_errors
from xshard.plans.expression import Expression, sides_or_one

SIDES = ("torch", "jax")
Profiles = ProfileLike | Mapping[str, ProfileLike]


@dataclass(frozen=True)
class Route:
    """One array's way: the sharding of torch's blocks and of JAX's array, and the side that runs the plan."""

    src: Layout
    text: str  # the user's own
    blocks: Sharding
    array: NamedSharding
    stored: Sharding  # of the array
    plan: Plan
    side: str | None  # None if nothing moves


@dataclass(frozen=True)
class Options:
    """The arguments copy, writable, dtensor, shape, profile and via of `to_jax` and `to_torch`."""

    copy: bool | None = None
    writable: bool = True
    dtensor: bool = False
    shape: tuple[int, ...] | None = None
    profile: Profiles = "auto"
    via: str | None = None

    def route(
        self, layout: Layout | Expression, meshes: MeshPair, *array: Any, to_jax: bool
    ) -> Route:
        """The route of an array. array: block shape, global shape if known, dtype. Raises as `to_jax`."""
        return _route(
            layout, meshes, array, self.profiles, (self.via, _torch_refuses(meshes)), to_jax
        )

    @property
    def profiles(self) -> tuple[ProfileLike, ...]:
        """The machines that torch and JAX plan for."""
        one = self.profile
        in_torch, in_jax = (one[side] if isinstance(one, Mapping) else one for side in SIDES)
        return torch_machine(in_torch), jax_machine(in_jax)

    def check_moved(self, route: Route) -> None:
        """Log the plan that runs first; raise XshardError if copies are forbidden."""
        if self.copy is False:
            reason = "blocks that move cannot be handed over without a copy"
            raise XshardError(reason, text=route.text, hint="copy=None allows it")
        LOG.info("%s moves the blocks first: %s", route.side, route.text)


@functools.lru_cache(maxsize=65536)
def array_sharding(layout: Layout, meshes: MeshPair, shape: tuple[int, ...]) -> NamedSharding:
    """JAX's sharding of an array. Raises ShapeError for blocks that differ in size."""
    text = str(layout)
    with mark_errors(text):
        check_axes(layout, meshes.jax_axes, text)
        sharding = Sharding(layout, meshes.jax_axes, shape)
        if not sharding.is_even:
            whole = " ".join(sharding.layout.names)
            reason = f"a jax.Array needs equal blocks: {shape} does not divide on JAX's {meshes.jax_axes!r}"
            hint = f"hand it over under a layout that divides, as in '{layout} -> {whole}'"
            raise ShapeError(reason, hint=hint)
        return storage_sharding(sharding.layout, meshes.jax_mesh)


def layouts_of(what: str, layouts: Any, tree: Any) -> list[Any]:
    """The layout or expression of every leaf of a structure. layouts: one for all, or a pytree prefix."""
    with located(what):
        return [
            leaf.given
            for leaf in leaves_of(layouts, jax.tree.unflatten(tree, range(tree.num_leaves)))
        ]


@functools.lru_cache(maxsize=65536)
def _route(
    layout: Layout | Expression,
    meshes: MeshPair,
    array: Any,
    profiles: Any,
    sides: Any,
    to_jax: bool,
) -> Route:
    """The cheaper side, or `via`, moves the blocks. Raises PlanError if neither side can."""
    (local_shape, shape, dtype), (via, torch_refuses) = array, sides
    src, dst, text = sides_or_one(layout)
    sides = (meshes.axes, meshes.devices), (meshes.jax_axes, meshes.jax_devices)
    (src_mesh, src_devices), (dst_mesh, dst_devices) = sides if to_jax else sides[::-1]
    of_blocks, of_array = (src, dst) if to_jax else (dst, src)
    with mark_errors(text):
        check_axes(src, src_mesh, text)
        check_axes(dst, dst_mesh, text)
        whole = global_shape(src, src_mesh, local_shape, text) if shape is None else shape
        blocks = Sharding(of_blocks, meshes.axes, whole)
        on_jax = array_sharding(of_array, meshes, whole)
        stored = Sharding(of_array, meshes.jax_axes, whole)
        if via not in (None, *SIDES):
            raise PlanError(f"via={via!r}", hint='"torch", "jax", or None for the cheaper side')
        options: Any = {"src_mesh": src_mesh, "src_devices": meshes.numbers(src_devices)}
        options |= {"dst_mesh": dst_mesh, "dst_devices": meshes.numbers(dst_devices)}
        plan_on = functools.partial(plan, (src, dst), shape=whole, dtype=dtype, **options)
        in_torch, in_jax = (plan_on(profile=profile) for profile in profiles)
        if all(
            s.kind == "retag" or (s is in_torch.transfer and s.is_in_place) for s in in_torch.steps
        ):
            return Route(src, text, blocks, on_jax, stored, in_torch, None)
        refusals = {"torch": torch_refuses, "jax": _jax_refuses(in_jax, meshes)}
        plans = {"torch": in_torch, "jax": in_jax}
        able = [side for side in SIDES if refusals[side] is None and via in (None, side)]
        if not able:
            cannot = "neither torch nor JAX can" if via is None else f"{via} cannot"
            reasons = (f"{side}: {reason}" for side, reason in refusals.items() if reason)
            what = f"{cannot} bring '{in_torch.src}' to '{in_torch.dst}' here"
            raise PlanError(what, hint="\n  ".join(reasons))
        side = min(
            able, key=lambda side: plans[side].cost
        )  # torch at equal costs: it does not compile
    return Route(src, text, blocks, on_jax, stored, plans[side], side)


def _torch_refuses(meshes: MeshPair) -> str | None:
    """The reason why torch cannot execute a plan here, if any."""
    if not dist.is_initialized():
        return "no process group is initialised"
    if not meshes.is_one_each:
        return "a process has several devices of the mesh, and one block in a collective"
    if (
        n := len({d.process_index for d in (*meshes.devices, *meshes.jax_devices)})
    ) != dist.get_world_size():
        return f"the meshes have {n} of {dist.get_world_size()} processes"
    return None


def _jax_refuses(plan: Plan, meshes: MeshPair) -> str | None:
    try:
        if plan.transfer:
            for end in (plan.source, plan.target):
                check_even(end, f"{plan.src} -> {plan.dst}")
                to_partition_spec(storage_layout(end.layout), len(end.shape))
        else:
            mesh = plan_mesh(plan, meshes.devices)
            move = plan, plan.shape, jnp.dtype(plan.dtype), ""
            make_program((move,), ArrayMesh(mesh, mesh), False, "h100")
    except XshardError as error:
        return error.reason
    return None


def by_torch(blocks: Sequence[Tensor], plan: Plan) -> list[Tensor]:
    """The local block before the plan, if any -> the one after it, if any. The plan's devices are ranks."""
    moved = redistribute(blocks[0].detach() if blocks else None, plan)
    return [] if moved is None else [moved]


def by_jax(blocks: Blocks, plan: Plan, devices: Mapping[int, jax.Device]) -> Blocks:
    """The local blocks before the plan -> the local blocks after it. devices: by the plan's numbers."""
    if plan.transfer is None:
        return run_on_mesh(blocks, plan, [devices[number] for number in plan.src_devices])
    return execute({"": LocalBlocks(blocks, plan.dtype)}, [as_array_plan(plan)], devices)[0]
