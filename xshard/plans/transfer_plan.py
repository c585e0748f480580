"""A plan from one mesh to another: steps on the source's, a transfer, steps on the destination's.

Decides what makes such a plan right and what it costs. How it is found is the business of
`between`, how it prints that of `transfer_table`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

from xshard import dtypes
from xshard.cost.bounds import have_same_blocks, received_elements_between
from xshard.cost.device_links import located, refined
from xshard.cost.model import Price, Profile, load_profile
from xshard.errors import MeshError, PlanError
from xshard.formatting import format_bytes
from xshard.layout.layout import Layout
from xshard.layout.mesh import Mesh
from xshard.layout.sharding import Sharding
from xshard.layout.sub_axes import refine
from xshard.plans import transfer_table
from xshard.plans.plan import Plan, find_plan
from xshard.plans.priced import FORWARD, Priced, check_objective
from xshard.plans.serialize import reading_plan
from xshard.plans.transfer import Transfer
from xshard.plans.transfer_search import Transfers
from xshard.steps import Step


@dataclass(frozen=True)
class TransferPlan(Priced):
    """Leads an array of `shape` from layout `src` on one mesh to layout `dst` on another.

    src_devices, dst_devices: the number of every device, in the order of its mesh. Equal numbers are
    one device; of `relabel=True`, `dst_devices` is the permutation.
    src_plan, dst_plan: what is done at either end, before and after the transfer; None for nothing.
    scale, profile, memory_limit, objective: as in a `Plan`.
    Raises MeshError for devices that do not fit, PlanError where the parts do not fit together.

    >>> from xshard import plan
    >>> p = plan("n/a -> n/b", src_mesh=Mesh(a=2), dst_mesh=Mesh(b=4), dst_devices=range(2, 6), shape=(8,))
    >>> [(p.src_devices[m.src], p.dst_devices[m.dst]) for m in p.transfer.messages]
    [(0, 2), (0, 3), (1, 4), (1, 5)]
    """

    src: Layout
    dst: Layout
    src_mesh: Mesh
    dst_mesh: Mesh
    src_devices: tuple[int, ...]
    dst_devices: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    src_plan: Plan | None = None
    dst_plan: Plan | None = None
    scale: Fraction = Fraction(1)
    profile: Profile = field(default_factory=lambda: load_profile("h100"), repr=False)
    memory_limit: int | None = None
    objective: str = FORWARD

    def __post_init__(self) -> None:
        check_objective(self.objective)
        check_devices("source", self.src_mesh, self.src_devices)
        check_devices("destination", self.dst_mesh, self.dst_devices)
        for inner, outer in ((self._sent, self.source), (self._arrived, self.target)):
            plan = inner[0]
            if plan is not None and (plan.dtype != self.dtype or not have_same_blocks(inner[1], outer)):
                raise PlanError(
                    f"'{plan.src} -> {plan.dst}' of {plan.dtype}{list(plan.shape)} is no part of "
                    f"'{self.src} -> {self.dst}' of {self.dtype}{list(self.shape)}"
                )
        scaled = math.prod((p.scale for p in (self.src_plan, self.dst_plan) if p), start=Fraction(1))
        if scaled != self.scale:
            raise PlanError(f"the steps scale by {scaled}, the plan says {self.scale}")
        if self.transfer is not None and (kept := self.dst.tagged("max", "min")):
            raise PlanError(
                f"'{self.dst}' holds a max or min over {', '.join(kept)}, which no transfer brings there",
                hint=f"reduce it: write copy({','.join(kept)})",
            )
        self._check_weight()

    @cached_property
    def source(self) -> Sharding:
        """Where the plan starts."""
        return Sharding(self.src, self.src_mesh, self.shape)

    @cached_property
    def target(self) -> Sharding:
        """Where the plan ends."""
        return Sharding(self.dst, self.dst_mesh, self.shape)

    @cached_property
    def transfer(self) -> Transfer | None:
        """What goes from mesh to mesh; None where every device has its block already."""
        source = self.src_plan.target if self.src_plan else self.source
        target = self.dst_plan.source if self.dst_plan else self.target
        if sorted(self.src_devices) == sorted(self.dst_devices):
            places = [self.src_devices.index(device) for device in self.dst_devices]
            if have_same_blocks(source, target, places):
                return None
        source, target = (s.with_layout(s.normal) for s in (source, target))
        return Transfer(source, target, self.src_devices, self.dst_devices, self.profile)

    @property
    def steps(self) -> tuple[Step | Transfer, ...]:
        """All that is done, in order."""
        before, after = (plan.steps if plan else () for plan in (self.src_plan, self.dst_plan))
        return (*before, *([self.transfer] if self.transfer else []), *after)

    @cached_property
    def transfer_price(self) -> Price:
        """What the transfer costs."""
        if self.transfer is None:
            return Price(0.0, 0, 0)
        moved, size = self.transfer, self.itemsize
        return Price(moved.seconds(size), moved.received * size, moved.held * size)

    @cached_property
    def prices(self) -> tuple[Price, ...]:
        """What every step costs."""
        before, after = (plan.prices if plan else () for plan in (self.src_plan, self.dst_plan))
        return (*before, *([self.transfer_price] if self.transfer else []), *after)

    @cached_property
    def bytes_lower_bound(self) -> int:
        """Fewest bytes that the busiest device must receive, whatever the plan."""
        source, target = (s.with_layout(s.normal) for s in (self.source, self.target))
        return received_elements_between(source, target, self.src_devices, self.dst_devices) * self.itemsize

    @cached_property
    def backward(self) -> TransferPlan:
        """The plan of the adjoint: between the dual layouts, the meshes swapped. Raises LinearityError."""
        return find_transfer(
            self.dst.dual,
            self.src.dual,
            self.dst_mesh,
            self.src_mesh,
            self.dst_devices,
            self.src_devices,
            self.shape,
            self.dtype,
            self.profile,
            scale=self.scale,
            memory_limit=self.memory_limit,
        )

    def __str__(self) -> str:
        return transfer_table.text(self)

    def to_json(self) -> str:
        """The plan as text, with all that is needed to check and run it elsewhere."""
        return json.dumps(
            {
                "src": str(self.src),
                "dst": str(self.dst),
                "src_mesh": dict(zip(self.src_mesh.axes, self.src_mesh.sizes, strict=True)),
                "dst_mesh": dict(zip(self.dst_mesh.axes, self.dst_mesh.sizes, strict=True)),
                "src_devices": list(self.src_devices),
                "dst_devices": list(self.dst_devices),
                "shape": list(self.shape),
                "dtype": self.dtype,
                "src_plan": self.src_plan and json.loads(self.src_plan.to_json()),
                "dst_plan": self.dst_plan and json.loads(self.dst_plan.to_json()),
                "scale": str(self.scale),
                "profile": self.profile.name,
                "memory_limit": self.memory_limit,
                "objective": self.objective,
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str, profile: Profile | str | None = None) -> TransferPlan:
        """Text of `to_json` -> the plan, checked again. Raises PlanError for malformed or wrong text.

        profile: the machine to price it for, where the text names one that is not shipped.
        """
        with reading_plan():
            data: dict[str, Any] = json.loads(text)
            machine = load_profile(data["profile"] if profile is None else profile)
            plans = {}
            for end in ("src", "dst"):
                found = data[f"{end}_plan"]
                if found is not None:
                    where = located(machine, Mesh(found["mesh"]), tuple(data[f"{end}_devices"]))
                    plans[f"{end}_plan"] = Plan.from_json(json.dumps(found), where)
            return cls(
                src=Layout.parse(data["src"]),
                dst=Layout.parse(data["dst"]),
                src_mesh=Mesh(data["src_mesh"]),
                dst_mesh=Mesh(data["dst_mesh"]),
                src_devices=tuple(data["src_devices"]),
                dst_devices=tuple(data["dst_devices"]),
                shape=tuple(data["shape"]),
                dtype=dtypes.name_of(data["dtype"]),
                scale=Fraction(data["scale"]),
                profile=machine,
                memory_limit=data["memory_limit"],
                objective=data["objective"],
                **plans,
            )

    @property
    def _sent(self) -> tuple[Plan | None, Sharding]:
        return self.src_plan, self.src_plan.source if self.src_plan else self.source

    @property
    def _arrived(self) -> tuple[Plan | None, Sharding]:
        return self.dst_plan, self.dst_plan.target if self.dst_plan else self.target


def check_devices(end: str, mesh: Mesh, devices: tuple[int, ...]) -> None:
    """Raise MeshError unless there is one number, of its own, for every device of the mesh."""
    for device in devices:
        if isinstance(device, bool) or not isinstance(device, int) or device < 0:
            raise MeshError(f"device {device!r} of the {end}", hint="devices are whole numbers >= 0")
    if len(devices) != mesh.n_devices:
        raise MeshError(
            f"{len(devices)} devices for the {end}, whose mesh {mesh!r} has {mesh.n_devices}",
            hint="one number per device, in the order of the mesh",
        )
    if len(set(devices)) != len(devices):
        twice = next(d for d in devices if devices.count(d) > 1)
        raise MeshError(f"device {twice} twice in the {end}", hint="a device has one place in a mesh")


def find_refined(
    src: Layout,
    dst: Layout,
    src_mesh: Mesh,
    dst_mesh: Mesh,
    devices: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: str,
    profile: Profile,
    *,
    scale: Fraction | None = None,
    memory_limit: int | None = None,
) -> Plan | None:
    """The cheapest plan on the common refinement of two meshes over the same devices, if there is one."""
    common = refine(src_mesh, dst_mesh)
    if common is None:
        return None
    if scale is None:
        scale = Sharding(src, src_mesh, shape).scale / Sharding(dst, dst_mesh, shape).scale
    return find_plan(
        common.source(src),
        common.target(dst),
        common.mesh,
        shape,
        dtype,
        located(refined(profile, common), common.mesh, devices),
        scale=scale,
        memory_limit=memory_limit,
    )


@lru_cache(maxsize=1024)
def find_transfer(
    src: Layout,
    dst: Layout,
    src_mesh: Mesh,
    dst_mesh: Mesh,
    src_devices: tuple[int, ...],
    dst_devices: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: str,
    profile: Profile,
    *,
    scale: Fraction | None = None,
    relabel: bool = False,
    memory_limit: int | None = None,
    objective: str = FORWARD,
) -> TransferPlan:
    """The cheapest plan between two meshes, by value; the options are those of `xshard.plan`.

    scale: the constant it multiplies by, where that is not read off the layouts (a backward plan).
    """
    source, target = Sharding(src, src_mesh, shape), Sharding(dst, dst_mesh, shape)
    factor = source.scale / target.scale if scale is None else scale
    transfers = Transfers(source, target, src_devices, dst_devices, dtype, profile, factor, memory_limit)
    refined = None
    if src_devices == dst_devices:
        ends = src, dst, src_mesh, dst_mesh, src_devices
        refined = find_refined(*ends, shape, dtype, profile, scale=factor, memory_limit=memory_limit)
    plain = transfers.made(refined, None) if refined else transfers.cheapest()
    if plain is None:
        least = transfers.least_peak_bytes()
        raise PlanError(
            f"no plan stays within {format_bytes(memory_limit or 0)} per device",
            hint=f"the least of those weighed is {format_bytes(least)} ({least} bytes)",
        )
    if objective != FORWARD:
        plain = replace(plain, objective=objective)
    if not relabel or plain.bytes_received == 0 or dst.tagged("max", "min"):
        return plain
    moved = transfers.cheapest(relabel=True)
    if moved and objective != FORWARD:
        moved = replace(moved, objective=objective)
    better = moved and moved.cost < plain.cost and moved.bytes_received <= plain.bytes_received
    return moved if moved and better else plain
