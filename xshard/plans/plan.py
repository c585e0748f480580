"""A plan: the steps from one sharding to another, on one mesh or two, checked, priced and printable."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

from xshard.caches import layout_cache
from xshard.cost import bounds
from xshard.cost.machine import load_profile, located
from xshard.cost.model import Price, Profile, price, too_large
from xshard.dtypes import check_reduction, itemsize
from xshard.errors import PlanError
from xshard.formatting import Pictured
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.layout import NONLINEAR
from xshard.layout.sub_axes import Split, SubAxisMesh
from xshard.plans import table
from xshard.plans.kept import kept
from xshard.plans.serialize import plan_from_plain, plan_to_plain, reading_plan
from xshard.plans.transfer import Transfer
from xshard.plans.transfer_search import cheapest, transfer_paths
from xshard.search.request import (
    BOTH,
    FORWARD,
    OBJECTIVES,
    Devices,
    Request,
    device_numbers,
    target_of,
)
from xshard.search.solve import solve
from xshard.steps import Scale, Step, Transpose
from xshard.steps.base import REDUCERS


class Stage(NamedTuple):
    """One step of a plan with the shardings before and after it, both in normal form."""

    step: Step
    before: Sharding
    after: Sharding


@dataclass(frozen=True, repr=False)
class Plan(Pictured):
    """Steps that lead an array of `shape` on `mesh` from layout `src` to layout `dst`.

    `dst` is on the mesh to which the steps' `Transfer` leads, if there is one, else on `mesh` too.

    scale: the constant that the steps multiply by: 1/n if a mean over n ends.
    profile: the machine it is priced for; plans for two machines with the same steps differ.
    memory_limit: bytes that no device may exceed at any moment, forward or backward.
    objective: with "forward+backward" the gradient is planned too, and `cost` is the seconds of both.
    split: axes of `mesh` that the steps split, with the sizes of their parts: `x` of 4 into `x_0` and `x_1`
    of 2, which steps and stages name. Devices and blocks remain the same.
    devices: the number of every device of `mesh`, in its order; 0, 1, 2, ... by default.
    Raises PlanError if the steps do not lead from `src` to `dst`, MeshError for devices that do not fit.

    >>> from xshard import plan
    >>> p = plan(
    ...     "n/a -> n/b",
    ...     src_mesh=Mesh(a=2),
    ...     dst_mesh=Mesh(b=4),
    ...     dst_devices=range(2, 6),
    ...     shape=(8,),
    ... )
    >>> [(p.src_devices[m.src], p.dst_devices[m.dst]) for m in p.transfer.messages]
    [(0, 2), (0, 3), (1, 4), (1, 5)]
    """

    src: Layout
    dst: Layout
    mesh: Mesh
    shape: tuple[int, ...]
    dtype: str
    steps: tuple[Step, ...]
    scale: Fraction = Fraction(1)
    profile: Profile = field(default_factory=lambda: load_profile("h100"), repr=False)
    memory_limit: int | None = None
    objective: str = FORWARD
    split: Split = ()
    devices: Devices = ()

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise PlanError(
                f"no objective {self.objective!r}", hint=f"there are: {', '.join(OBJECTIVES)}"
            )
        reached = self.stages[-1].after if self.stages else self._start
        if not reached.means_the_same_as(_factored(self.target, reached.mesh)):
            raise PlanError(
                f"the steps lead from '{self.src}' to '{reached.layout}', not to '{self.dst}'"
            )
        for sharding in (sharding for stage in self.stages for sharding in stage[1:]):
            for part in sharding.layout.tagged(*REDUCERS):
                if (axis := sharding.mesh.origin(part)) != part:
                    reason = f"axis {axis!r} is divided and holds addends"
                    raise PlanError(reason, hint="reduce along whole axes")
        scaled = math.prod(
            (s.factor for s in self.steps if isinstance(s, Scale)), start=Fraction(1)
        )
        if scaled != self.scale:
            raise PlanError(f"the steps scale by {scaled}, the plan says {self.scale}")
        starts = self.transfer.src_devices if self.transfer else None
        object.__setattr__(
            self, "devices", device_numbers("source", self.mesh, self.devices or starts)
        )
        if starts and self.src_devices != starts:
            raise PlanError(
                f"the plan is for devices {self.src_devices}, its transfer for {starts}"
            )
        if self.memory_limit is not None and self.peak_bytes > self.memory_limit:
            raise PlanError(
                f"the steps hold {self.peak_bytes} bytes, the limit is {self.memory_limit}"
            )
        if self.objective == BOTH:
            try:
                _ = self.backward
            except PlanError as error:
                raise PlanError(f"backward: {error.reason}", hint=error.hint) from None

    @cached_property
    def transfer(self) -> Transfer | None:
        """The step that leads to another mesh, or other devices; None for a plan on one mesh."""
        transfers = [step for step in self.steps if isinstance(step, Transfer)]
        if len(transfers) > 1:
            raise PlanError(f"{len(transfers)} transfers in one plan", hint="make a plan for each")
        return transfers[0] if transfers else None

    @property
    def src_mesh(self) -> Mesh:
        """The mesh of the source: `mesh`."""
        return self.mesh

    @property
    def dst_mesh(self) -> Mesh:
        """The mesh of the destination."""
        mesh = self.transfer.target.mesh if self.transfer else self.mesh
        return mesh.base if self.transfer and isinstance(mesh, SubAxisMesh) else mesh

    @property
    def src_devices(self) -> tuple[int, ...]:
        """The number of every device of `mesh`, in its order."""
        return tuple(self.devices)

    @property
    def dst_devices(self) -> tuple[int, ...]:
        """The number of every device of `dst_mesh`, in its order; with `relabel=True`, the permutation."""
        return self.transfer.dst_devices if self.transfer else self.src_devices

    @cached_property
    def source(self) -> Sharding:
        """The sharding at the start."""
        return Sharding(self.src, self.mesh, self.shape)

    @cached_property
    def target(self) -> Sharding:
        """The sharding at the end."""
        return target_of(self.source, self.dst, self.dst_mesh)

    @cached_property
    def steps_mesh(self) -> Mesh:
        """The mesh with the axes that the first steps name: `mesh`, with the axes of `split` split."""
        return SubAxisMesh(self.mesh, self.split) if self.split else self.mesh

    @cached_property
    def _start(self) -> Sharding:
        fine = _factored(self.source, self.steps_mesh)
        return fine.with_layout(fine.normal)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Every step with the shardings around it."""
        here = self._start
        stages = []
        for step in self.steps:
            after = step.after(here)
            stages.append(Stage(step, here, after))
            here = after
        return tuple(stages)

    def part(self, stages: Sequence[Stage]) -> Plan:
        """Some of its stages, all on one mesh, as a plan of their own."""
        first = stages[0].before
        steps = tuple(stage.step for stage in stages)
        scale = math.prod(
            (step.factor for step in steps if isinstance(step, Scale)), start=Fraction(1)
        )
        endpoints = first.layout, stages[-1].after.layout, first.mesh
        return Plan(*endpoints, first.shape, self.dtype, steps, scale, self.profile)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes that the layouts name, and axes with replicas that the steps use."""
        passed = (after.mesh.origin(a) for _, _, after in self.stages for a in after.layout.axes)
        return tuple(dict.fromkeys((*self.src.axes, *self.dst.axes, *passed)))

    @cached_property
    def request(self) -> Request:
        """The request for this plan."""
        takers = self.transfer.dst_devices if self.transfer else self.devices
        endpoints = self.src, self.dst, self.mesh, self.dst_mesh, self.devices, takers
        return Request(
            *endpoints, self.shape, self.dtype, self.profile, self.scale, self.memory_limit
        )

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    @cached_property
    def prices(self) -> tuple[Price, ...]:
        """The price of every step."""
        return tuple(map(self.price_of, range(len(self.steps))))

    def price_of(self, at: int) -> Price:
        """The price of one step, computed alone."""
        step, before, after = self.stages[at]
        if isinstance(step, Transfer):
            return step.price(self.itemsize)
        return price(step, before, after, self.itemsize, self.machines[at])

    @cached_property
    def machines(self) -> Sequence[Profile]:
        """For every step, the profile for the devices of its mesh."""
        first = self.steps.index(self.transfer) if self.transfer else len(self.steps)
        there = located(self.profile, self.dst_mesh, self.request.dst_devices)
        return [self.request.machine] * first + [there] * (len(self.steps) - first)

    @property
    def cost(self) -> float:
        """Predicted seconds, of all that the objective counts."""
        forward = sum(p.seconds for p in self.prices)
        return forward + self.backward.cost if self.objective == BOTH else forward

    @property
    def bytes_received(self) -> int:
        """Bytes that the busiest device receives, summed over the steps."""
        return sum(p.received_bytes for p in self.prices)

    @property
    def peak_bytes(self) -> int:
        """Bytes that the busiest device holds at the worst moment: input, output, buffers."""
        largest = max(self.source.max_local_size, self.target.max_local_size) * self.itemsize
        return max((p.peak_bytes for p in self.prices), default=largest)

    @cached_property
    def bytes_lower_bound(self) -> int:
        """Fewest bytes that the busiest device must receive, whatever the plan."""
        endpoints = self.source, self.target.in_order(self.source.layout.names)
        src, dst = (sharding.with_layout(sharding.normal) for sharding in endpoints)
        if self.transfer is None:
            return bounds.received_elements(src, dst) * self.itemsize
        devices = self.src_devices, self.dst_devices
        return bounds.received_elements_between(src, dst, *devices) * self.itemsize

    @property
    def messages(self) -> int:
        """Latencies paid one after the other, over all steps."""
        stages = zip(self.stages, self.machines, strict=True)
        traffics = (step.traffic(here, m.link_spans(here.mesh)) for (step, here, _), m in stages)
        return sum(hop.messages for traffic in traffics for hop in traffic.hops)

    @property
    def exceeds_endpoints(self) -> bool:
        """Whether an intermediate block is larger than the blocks at the start and at the end."""
        largest = max(self.source.max_local_size, self.target.max_local_size)
        return any(stage.after.max_local_size > largest for stage in self.stages)

    @cached_property
    def backward(self) -> Plan:
        """The plan of the adjoint: from the dual of `dst` to the dual of `src`. Raises LinearityError."""
        return find_plan(self.request.adjoint)

    @cached_property
    def tangent(self) -> Plan:
        """The plan that tangents take: itself, unless a boundary fills with a constant, which has none."""
        tangent = self.request.tangent
        return self if tangent == self.request else find_plan(tangent)

    def __str__(self) -> str:
        return table.text(self)

    def __repr__(self) -> str:
        arguments = f"'{self.src} -> {self.dst}', {self.mesh!r}, {self.shape}, {self.dtype!r}"
        to = f", dst_mesh={self.dst_mesh!r}" if self.transfer else ""
        return f"Plan({arguments}{to}, steps={', '.join(map(str, self.steps))!r})"

    def explain(self) -> str:
        """The alternatives that were weighed, with seconds, bytes, peak, messages, and why this one won.

        Raises PlanError for a plan between two meshes.
        """
        return table.explain(self)

    def to_json(self) -> str:
        """The plan as text, with all that is needed to check and run it elsewhere."""
        return json.dumps(plan_to_plain(self), indent=1)

    @classmethod
    def from_json(cls, text: str, profile: Profile | str | None = None) -> Plan:
        """Text of `to_json` -> the plan, checked again. Raises PlanError for malformed or wrong text.

        profile: the machine to price it for, if the text names one that is not shipped.
        """
        with reading_plan():
            return cls.from_plain(json.loads(text), profile)

    @classmethod
    def from_plain(cls, data: dict[str, Any], profile: Profile | str | None = None) -> Plan:
        """`from_json` of text that is parsed already."""
        values, written = plan_from_plain(data, profile)
        plan = cls(**values)
        inferred = [str(stage.after.layout) for stage in plan.stages]
        if written != inferred:
            raise PlanError(f"the plan says its steps lead to {written}, they lead to {inferred}")
        return plan


def _factored(sharding: Sharding, mesh: Mesh) -> Sharding:
    """The same sharding on `mesh`, which may split axes of the sharding's mesh."""
    if isinstance(mesh, SubAxisMesh) and mesh.base == sharding.mesh:
        return mesh.factored(sharding)
    return sharding


@layout_cache(maxsize=4096)  # in this file because a plan finds the plan of its gradient
def find_plan(request: Request, objective: str = FORWARD, *, by_transfer: bool = False) -> Plan:
    """The cheapest plan, or the cheapest with a `Transfer`, kept by an earlier run or searched for."""
    options: Any = {"objective": objective, "by_transfer": by_transfer}
    return kept(request, Plan.from_json, lambda: search_plan(request, **options), options)


@layout_cache(maxsize=4096)
def search_plan(request: Request, objective: str = FORWARD, *, by_transfer: bool = False) -> Plan:
    """`find_plan` without plans of earlier runs: for searches that compare many."""

    def aimed(plan: Plan) -> Plan:
        return plan if objective == FORWARD else replace(plan, objective=objective)

    if request.dst.names != request.src.names:
        inner = search_plan(request.in_order, objective, by_transfer=by_transfer)
        transpose = Transpose(request.target.layout.names)
        return replace(
            inner, dst=inner.dst.in_order(request.dst.names), steps=(*inner.steps, transpose)
        )
    may_move = request.relabel and not request.dst.tagged(*NONLINEAR)
    try:
        plan = aimed(_as_numbered(request, by_transfer))
    except PlanError:
        if not may_move or request.memory_limit is None:
            raise
        if (relabelled := cheapest(request, _made, relabel=True)) is None:
            raise
        return aimed(relabelled)
    if may_move and plan.bytes_received:
        relabelled = cheapest(request, _made, relabel=True)
        relabelled = relabelled and aimed(relabelled)
        if (
            relabelled
            and relabelled.cost < plan.cost
            and relabelled.bytes_received <= plan.bytes_received
        ):
            return relabelled
    return plan


def _as_numbered(request: Request, by_transfer: bool) -> Plan:
    """The cheapest plan in which devices keep their places. Raises PlanError if none fits the limit."""
    one = None if by_transfer else request.on_one_mesh
    plan = cheapest(request, _made, relabel=False) if one is None else _made(one, *solve(one))
    if request.factor != 1:  # also for a mean that begins: scaling needs the same dtypes
        check_reduction(request.dtype, "sum")
    if plan is None:
        paths = transfer_paths(free := replace(request, memory_limit=None))
        raise too_large(request.memory_limit, min(_made(free, *way).peak_bytes for way in paths))
    return plan


def _made(request: Request, steps: tuple[Step, ...], split: Split) -> Plan:
    array = request.src, request.dst, request.src_mesh, request.shape, request.dtype
    machine = request.profile, request.memory_limit
    return Plan(*array, steps, request.factor, *machine, split=split, devices=request.src_devices)
