"""How blocks under one layout come to be under another: handed over as they are, or moved by one side first.

Decides which framework carries out the plan: of those that can, the one for which it costs less, torch
where it costs the same, as it has nothing to compile. torch's processes are the devices of the plan, or JAX's
own devices are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import torch.distributed as dist
from torch import Tensor

from jax_bridge.arrays.program import make_program
from jax_bridge.arrays.stored import ArrayMesh, check_even
from jax_bridge.specs import storage_layout, to_partition_spec
from jax_bridge.state.execute import Blocks, LocalBlocks, as_array_plan, execute, plan_mesh, run_on_mesh
from jax_bridge.torch_interop.devices import Ends
from torch_bridge.redistribution import redistribute
from xshard import Layout, Plan, Profile, XshardError, plan
from xshard.errors import PlanError

SIDES = ("torch", "jax")
AnyProfile = str | Path | Profile
Profiles = AnyProfile | Mapping[str, AnyProfile]


@dataclass(frozen=True)
class Route:
    """A plan between the ends and the side that carries it out; none where nothing moves."""

    plan: Plan
    side: str | None


class Machines(NamedTuple):
    """The machine as torch and as JAX have it; the side, if one is named; why it cannot be torch."""

    profiles: tuple[AnyProfile, ...]
    via: str | None
    refused: str | None


def find_route(
    src: Layout, dst: Layout, ends: Ends, shape: tuple[int, ...], dtype: str, machines: Machines, to_jax: bool
) -> Route:
    """The cheapest way between blocks under `src` on one mesh and under `dst` on the other.

    Raises as `xshard.plan` does, and PlanError where neither side can carry the plan out.
    """
    profiles, via, refused = machines
    if via not in (None, *SIDES):
        raise PlanError(
            f"via={via!r}", hint='the side that moves: "torch", "jax", or None for the cheaper one'
        )
    meshes = (ends.axes, ends.numbers(ends.devices)), (ends.jax_axes, ends.numbers(ends.jax_devices))
    (src_mesh, src_devices), (dst_mesh, dst_devices) = meshes if to_jax else meshes[::-1]
    found = {
        side: plan(
            (src, dst),
            src_mesh=src_mesh,
            dst_mesh=dst_mesh,
            src_devices=src_devices,
            dst_devices=dst_devices,
            shape=shape,
            dtype=dtype,
            profile=machine,
        )
        for side, machine in zip(SIDES, profiles, strict=True)
    }
    first = found["torch"]
    if all(step.kind == "retag" or (step is first.transfer and step.is_in_place) for step in first.steps):
        return Route(first, None)
    refusals = {"torch": refused, "jax": _jax_refuses(found["jax"], ends)}
    able = [side for side in SIDES if refusals[side] is None and via in (None, side)]
    if not able:
        raise PlanError(
            f"neither torch nor JAX can bring '{src}' to '{dst}' here"
            if via is None
            else f"{via} cannot bring '{src}' to '{dst}' here",
            hint="\n  ".join(f"{side}: {why}" for side, why in refusals.items() if why),
        )
    side = min(able, key=lambda side: found[side].cost)
    return Route(found[side], side)


def torch_refuses(ends: Ends) -> str | None:
    """Why torch cannot carry out a plan here and now, if so."""
    if not dist.is_initialized():
        return "no process group is initialised"
    if not ends.is_one_each:
        return "a process has several devices of the mesh, and one block in a collective"
    if (n := len({d.process_index for d in (*ends.devices, *ends.jax_devices)})) != dist.get_world_size():
        return f"the meshes have {n} of {dist.get_world_size()} processes"
    return None


def _jax_refuses(found: Plan, ends: Ends) -> str | None:
    try:
        if found.transfer:
            for end in (found.source, found.target):
                check_even(end, f"{found.src} -> {found.dst}")
                to_partition_spec(storage_layout(end.layout), len(end.shape))
        else:
            mesh = plan_mesh(found, ends.devices)
            make_program(
                (found,), ArrayMesh(mesh, mesh), (found.shape,), (jnp.dtype(found.dtype),), False, "h100"
            )
    except XshardError as error:
        return error.reason
    return None


def by_torch(block: Tensor | None, made: Plan) -> Tensor | None:
    """A block before the plan -> the block after it, where there is one; the plan's devices are ranks."""
    return redistribute(None if block is None else block.detach(), made)


def by_jax(blocks: Blocks, made: Plan, devices: Mapping[int, jax.Device]) -> Blocks:
    """This process's blocks before the plan -> its blocks after it. devices: by the plan's numbers."""
    if made.transfer is None:
        return run_on_mesh(blocks, made, [devices[number] for number in made.src_devices])
    return execute({"": LocalBlocks(blocks, made.dtype)}, [as_array_plan(made)], devices)[0]
