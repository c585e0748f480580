"""The route of one array between torch and JAX: its shardings, and the side that moves blocks.

Either side could run the plan; the cheaper one does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch.distributed as dist
from jax.sharding import NamedSharding
from torch import Tensor

from jax_bridge.arrays.program import Move, make_program
from jax_bridge.arrays.stored import ArrayMesh, check_even
from jax_bridge.mesh.context import machine_profile as jax_machine
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
from jax_bridge.trees import leaves_with_given_values
from torch_bridge.mesh.machine import machine_profile as torch_machine
from torch_bridge.redistribution import redistribute
from xshard import Layout, Mesh, Plan, ProfileLike, Sharding, XshardError, plan
from xshard.errors import PlanError, ShapeError, located
from xshard.layout.layout import check_axes
from xshard.layout.lengths import global_shape
from xshard.notation.parser import mark_errors
from xshard.plans.expression import Expression, sides_or_one

TORCH = "torch"
JAX = "jax"
SIDES = (TORCH, JAX)
Profiles = ProfileLike | Mapping[str, ProfileLike]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Route:
    """The route of one array.

    Attributes:
        src: The layout at the start: of torch's blocks, or of JAX's array on the way to torch.
        text: The user's own text.
        torch_sharding: Layout, mesh and global shape of torch's blocks.
        named_sharding: JAX's own description of the sharding of its array.
        jax_sharding: The same as a layout, which also has the order of rows, as zigzag.
        plan: The plan from one to the other.
        mover: The framework that runs the plan, "torch" or "jax"; None if nothing moves.
    """

    src: Layout
    text: str
    torch_sharding: Sharding
    named_sharding: NamedSharding
    jax_sharding: Sharding
    plan: Plan
    mover: str | None


class KnownArray(NamedTuple):
    """What is known of an array before its route: one of its two shapes, and its dtype's name."""

    dtype: str
    shape: Shape | None = None  # the global shape
    local_shape: Shape = ()  # of a block of torch, if the global shape is not known


class ProfileOfSide(NamedTuple):
    """The machine that each side plans for: NCCL and XLA differ in speed."""

    torch: ProfileLike
    jax: ProfileLike


@dataclass(frozen=True)
class Options:
    """The options of `to_jax` and `to_torch`, which describe them."""

    copy: bool | None = None
    writable: bool = True
    dtensor: bool = False
    shape: Shape | None = None
    profile: Profiles = "auto"
    via: str | None = None

    def route(
        self, layout: Layout | Expression, meshes: MeshPair, array: KnownArray, *, to_jax: bool
    ) -> Route:
        """Find how an array gets from one framework to the other: see `Route`.

        Args:
            layout: One layout, or the layouts of both ends.
            meshes: The meshes of torch and JAX.
            array: What is known of the array.
            to_jax: True from torch to JAX, False from JAX to torch.

        Raises:
            XshardError: As `to_jax`.
        """
        torch_refuses = _why_torch_cannot_run(meshes)  # not cached: a process group may start later
        return _route(layout, meshes, array, to_jax, self.profiles, self.via, torch_refuses)

    @property
    def profiles(self) -> ProfileOfSide:
        """The machines that torch and JAX plan for."""
        if isinstance(self.profile, Mapping):
            return ProfileOfSide(torch_machine(self.profile[TORCH]), jax_machine(self.profile[JAX]))
        return ProfileOfSide(torch_machine(self.profile), jax_machine(self.profile))

    def check_moved(self, route: Route) -> None:
        """Check that blocks may be moved: it makes copies, which copy=False forbids.

        Logs the side that moves them. Raises XshardError for copy=False.
        """
        if self.copy is False:
            reason = "blocks that move cannot be handed over without a copy"
            raise XshardError(reason, text=route.text, hint="copy=None allows it")
        LOG.info("%s moves the blocks first: %s", route.mover, route.text)


@functools.lru_cache(maxsize=65536)
def array_sharding(layout: Layout, meshes: MeshPair, shape: Shape) -> NamedSharding:
    """Return JAX's sharding of an array. Raises ShapeError for blocks that differ in size."""
    text = str(layout)
    with mark_errors(text):
        check_axes(layout, meshes.jax_axes, text)
        sharding = Sharding(layout, meshes.jax_axes, shape)
        if not sharding.is_even:
            unsharded = " ".join(sharding.layout.names)
            rule = "a jax.Array needs equal blocks"
            reason = f"{rule}: {shape} does not divide on JAX's {meshes.jax_axes!r}"
            hint = f"hand it over under a layout that divides, as in '{layout} -> {unsharded}'"
            raise ShapeError(reason, hint=hint)
        return storage_sharding(sharding.layout, meshes.jax_mesh)


def layouts_of(keyword: str, layouts: Any, tree: Any) -> list[Any]:
    """Return the layout or expression of every leaf of a pytree structure, in order.

    "n/dp" for a structure of two leaves -> ["n/dp", "n/dp"]

    Args:
        keyword: The argument that errors name.
        layouts: One for all, or a pytree prefix.
        tree: The structure.
    """
    with located(keyword):
        placeholders = jax.tree.unflatten(tree, range(tree.num_leaves))
        return [leaf.value for leaf in leaves_with_given_values(layouts, placeholders)]


def named_like(
    fn: Callable[..., Any], function: Callable[..., Any], default: str
) -> Callable[..., Any]:
    """Return a function with the name and docstring of another, or a default name."""
    function.__name__ = getattr(fn, "__name__", default)
    function.__qualname__ = function.__name__
    function.__doc__ = fn.__doc__
    return function


class _End(NamedTuple):
    """The source or the target of a move: a layout, a mesh, and its devices in order."""

    layout: Layout
    mesh: Mesh
    devices: Sequence[jax.Device]


@functools.lru_cache(maxsize=65536)
def _route(
    layout: Layout | Expression,
    meshes: MeshPair,
    array: KnownArray,
    to_jax: bool,
    profiles: ProfileOfSide,
    via: str | None,
    torch_refuses: str | None,
) -> Route:
    """Find the shardings of an array in torch and in JAX, and the side that moves its blocks.

    Both sides plan the move; the cheaper one runs it. Nobody does if all blocks stay in place.
    "s/cp c -> s c/cp" to JAX, [8, 4] on cp=4: blocks of torch are [2, 4], those of JAX [8, 1].

    Args:
        layout: One layout, or the layouts of both ends.
        meshes: The meshes of torch and JAX.
        array: What is known of the array.
        to_jax: True from torch to JAX, False from JAX to torch.
        profiles: The machine that each side plans for.
        via: "torch" or "jax" to choose the side; None for the cheaper one.
        torch_refuses: Why torch cannot run a plan now; None if it can.

    Raises:
        PlanError: No side that may run its plan can.
    """
    src, dst, text = sides_or_one(layout)  # errors quote the text, as the user wrote it
    layouts = {TORCH: src, JAX: dst} if to_jax else {JAX: src, TORCH: dst}
    torch_end = _End(layouts[TORCH], meshes.torch_axes, meshes.torch_devices)
    jax_end = _End(layouts[JAX], meshes.jax_axes, meshes.jax_devices)
    # The same two in the direction of the move.
    source, target = (torch_end, jax_end) if to_jax else (jax_end, torch_end)

    with mark_errors(text):
        # All that can be wrong with the user's arguments is noticed here, before anything is sent.
        check_axes(src, source.mesh, text)
        check_axes(dst, target.mesh, text)
        shape = array.shape
        if shape is None:
            shape = global_shape(src, source.mesh, array.local_shape, text)
        torch_sharding = Sharding(torch_end.layout, torch_end.mesh, shape)
        jax_sharding = Sharding(jax_end.layout, jax_end.mesh, shape)
        # JAX's own kind of sharding, which does not say in which order rows are stored.
        named_sharding = array_sharding(jax_end.layout, meshes, shape)

        plan_move = functools.partial(
            plan,
            (src, dst),
            shape=shape,
            dtype=array.dtype,
            src_mesh=source.mesh,
            dst_mesh=target.mesh,
            src_devices=meshes.numbers(source.devices),
            dst_devices=meshes.numbers(target.devices),
        )
        plans = {TORCH: plan_move(profile=profiles.torch), JAX: plan_move(profile=profiles.jax)}
        mover = None
        chosen_plan = plans[TORCH]  # either will do if all blocks stay where they are
        if not _moves_nothing(chosen_plan):
            mover = _cheapest_side(plans, meshes, via, torch_refuses)
            chosen_plan = plans[mover]
    return Route(
        src=src,
        text=text,
        torch_sharding=torch_sharding,
        named_sharding=named_sharding,
        jax_sharding=jax_sharding,
        plan=chosen_plan,
        mover=mover,
    )


def _moves_nothing(plan: Plan) -> bool:
    """Return True if every device keeps its block as it is."""
    for step in plan.steps:
        # A retag changes a tag of the layout only, as from a replica to `copy`. A transfer to the
        # same devices under the same sharding sends nothing.
        stays = step is plan.transfer and step.is_in_place
        if step.kind != "retag" and not stays:
            return False
    return True


def _cheapest_side(
    plans: Mapping[str, Plan], meshes: MeshPair, via: str | None, torch_refuses: str | None
) -> str:
    """Return which framework moves the blocks, "torch" or "jax": the cheaper one, or `via`.

    Args:
        plans: The plan of each side.
        meshes: The meshes of torch and JAX.
        via: The side that the user wants, if any.
        torch_refuses: Why torch cannot run a plan now; None if it can.

    Raises:
        PlanError: No candidate can.
    """
    refusals = {TORCH: torch_refuses, JAX: _why_jax_cannot_run(plans[JAX], meshes)}
    candidates = SIDES if via is None else (via,)
    costs = {side: plans[side].cost for side in candidates if refusals[side] is None}
    if costs:
        # The first of equal ones, torch: it does not compile.
        return min(costs, key=costs.__getitem__)
    cannot = "neither torch nor JAX can" if via is None else f"{via} cannot"
    plan = plans[TORCH]
    reasons = [f"{side}: {reason}" for side, reason in refusals.items() if reason]
    raise PlanError(f"{cannot} bring '{plan.src}' to '{plan.dst}' here", hint="\n  ".join(reasons))


def _why_torch_cannot_run(meshes: MeshPair) -> str | None:
    """Return the reason why torch cannot run a plan here, if any."""
    if not dist.is_initialized():
        return "no process group is initialised"
    if not meshes.has_device_per_process:
        return "a process has several devices of the mesh, and one block in a collective"
    # Torch's collectives here run over the default group, in which all processes take part.
    n_processes = len({device.process_index for device in meshes.all_devices})
    if n_processes != dist.get_world_size():
        return f"the meshes have {n_processes} of {dist.get_world_size()} processes"
    return None


def _why_jax_cannot_run(plan: Plan, meshes: MeshPair) -> str | None:
    """Return the reason why JAX cannot run a plan; None if it can.

    A plan whose blocks differ in size -> the reason of the error that running it would raise.
    """
    try:
        if plan.transfer:
            _check_ends_of_transfer(plan)
        else:
            _check_program(plan, meshes)
    except XshardError as error:
        return error.reason
    return None


def _check_ends_of_transfer(plan: Plan) -> None:
    """Raise XshardError if JAX has no such arrays as a plan between two meshes begins or ends with."""
    for end in (plan.source, plan.target):
        check_even(end, f"{plan.src} -> {plan.dst}")
        to_partition_spec(storage_layout(end.layout), len(end.shape))


def _check_program(plan: Plan, meshes: MeshPair) -> None:
    """Raise XshardError if JAX has no program for a plan on one mesh: build it, and throw it away."""
    mesh = plan_mesh(plan, meshes.torch_devices)
    name_in_errors = ""  # the caller keeps the reason of an error alone
    move: Move = (plan, plan.shape, jnp.dtype(plan.dtype), name_in_errors)
    # A machine has to be named, but is not used: the plan is made already.
    make_program((move,), ArrayMesh(mesh, mesh), donate=False, profile="h100")


def by_torch(blocks: Sequence[Tensor], plan: Plan) -> list[Tensor]:
    """Run a plan in torch: the local block before it, if any -> the one after it, if any.

    The plan's devices are ranks.
    """
    # A process of JAX's mesh alone has no block, but takes part.
    block = blocks[0].detach() if blocks else None
    moved = redistribute(block, plan)
    return [] if moved is None else [moved]


def by_jax(blocks: Blocks, plan: Plan, devices: Mapping[int, jax.Device]) -> Blocks:
    """Run a plan in JAX: the local blocks before it -> the local blocks after it.

    Args:
        blocks: The blocks.
        plan: The plan.
        devices: Devices by the plan's numbers.
    """
    if plan.transfer is None:
        return run_on_mesh(blocks, plan, [devices[number] for number in plan.src_devices])
    arrays = {"": LocalBlocks(blocks, plan.dtype)}
    (moved,) = execute(arrays, [as_array_plan(plan)], devices)
    return moved
