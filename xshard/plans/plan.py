"""A plan: the steps from one sharding to another, on one mesh or two, checked, priced and printable."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from typing import Any, NamedTuple

from xshard.caches import layout_cache
from xshard.cost import bounds
from xshard.cost.machine import load_profile, profile_of_devices
from xshard.cost.model import Price, Profile, price, too_large
from xshard.dtypes import check_reduction, itemsize
from xshard.errors import PlanError
from xshard.formatting import Pictured
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.layout import NONLINEAR
from xshard.layout.sub_axes import Split, root_of, split_by, split_of
from xshard.plans import alternatives, table
from xshard.plans.disk_cache import read_or_make
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
    on_common_mesh,
    target_sharding,
)
from xshard.search.solve import solve
from xshard.steps import AllReduce, ReduceScatter, Scale, Step, Transpose
from xshard.steps.base import REDUCERS


class Stage(NamedTuple):
    """One step of a plan with the shardings before and after it, both in normal form."""

    step: Step
    before: Sharding
    after: Sharding


@dataclass(frozen=True, repr=False)
class Plan(Pictured):
    """The steps that lead an array of `shape` on `mesh` from layout `src` to layout `dst`.

    A plan checks itself when it is built: a plan whose steps lead elsewhere cannot exist.

    Attributes:
        src: The layout at the start.
        dst: The layout at the end. It is on the mesh to which the steps' `Transfer` leads, if there
            is one, else on `mesh` too.
        mesh: The mesh at the start.
        shape: The global shape.
        dtype: The name of the dtype, such as "bfloat16".
        steps: Collectives and local steps, in order.
        scale: The constant that the steps multiply by: 1/n if a mean over n devices ends.
        profile: The machine it is priced for. Plans for two machines with the same steps differ.
        memory_limit: Bytes that no device may exceed at any moment, forward or backward.
        objective: With "forward+backward" the gradient is planned too, and `cost` is the seconds of both.
        split: Axes of `mesh` that the steps split, with the sizes of their sub-axes: `x` of 4 into
            `x_0` and `x_1` of 2, which steps and stages name. Devices and blocks remain the same.
        devices: The number of every device of `mesh`, in its order. Default: 0, 1, 2, ...
        dst_split: Axes of the mesh on which a transfer lands that `dst` names as sub-axes, likewise.

    Raises:
        PlanError: The steps do not lead from `src` to `dst`, or do not fit the memory limit.
        MeshError: The devices do not fit the mesh.

    Examples:
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
    dst_split: Split = ()

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise PlanError(
                f"no objective {self.objective!r}", hint=f"there are: {', '.join(OBJECTIVES)}"
            )
        # A plan verifies itself, so one from a search, a file or a user's hand is right or is
        # refused.
        self._check_destination()
        self._check_sums_on_whole_axes()
        self._check_addends()
        self._check_scale()
        self._resolve_devices()
        if self.memory_limit is not None and self.peak_bytes > self.memory_limit:
            raise PlanError(
                f"the steps hold {self.peak_bytes} bytes, the limit is {self.memory_limit}"
            )
        if self.objective == BOTH:
            self._check_backward()

    def _check_destination(self) -> None:
        """Raise PlanError unless the steps lead to `dst`."""
        reached = self.stages[-1].after if self.stages else self._start
        if not reached.means_the_same_as(_on_sub_axes(self.target, reached.mesh)):
            raise PlanError(
                f"the steps lead from '{self.src}' to '{reached.layout}', not to '{self.dst}'"
            )

    def _check_sums_on_whole_axes(self) -> None:
        """Raise PlanError if an axis that steps split into sub-axes holds addends.

        The steps may divide dp=8 into sub-axes of 2 and 4 devices. A reduction over the first alone
        would leave partial sums over the second, for which the user's mesh has no name.
        """
        named_axes = {axis for end in self._normal_ends for axis in end.mesh.axes}
        for stage in self.stages:
            for sharding in (stage.before, stage.after):
                for sub_axis in sharding.layout.tagged(*REDUCERS):  # axes with addends
                    if sub_axis not in named_axes:
                        axis = sharding.mesh.origin(sub_axis)
                        raise PlanError(
                            f"axis {axis!r} is divided and holds addends",
                            hint="reduce along whole axes",
                        )

    def _check_addends(self) -> None:
        """Raise PlanError if a step adds in another order than the machine's."""
        for step in self.steps:
            if self.profile.adds_in_order and isinstance(step, AllReduce | ReduceScatter):
                raise PlanError(
                    f"'{step}' adds in an order of its own, {self.profile.name!r} in that of ranks",
                    hint='search for it: xshard.plan(..., addends="ranks")',
                )

    def _check_scale(self) -> None:
        """Raise PlanError unless the steps multiply by `scale`, no more and no less."""
        steps_scale = _product_of_scales(self.steps)
        if steps_scale != self.scale:
            raise PlanError(f"the steps scale by {steps_scale}, the plan says {self.scale}")

    def _resolve_devices(self) -> None:
        """Fill in `devices`: as given, else those of the transfer, else 0, 1, 2, ..."""
        transfer_devices = self.transfer.src_devices if self.transfer else None
        devices = device_numbers("source", self.mesh, self.devices or transfer_devices)
        object.__setattr__(self, "devices", devices)  # a frozen dataclass has no other way
        if transfer_devices and self.src_devices != transfer_devices:
            raise PlanError(
                f"the plan is for devices {self.src_devices}, its transfer for {transfer_devices}"
            )

    def _check_backward(self) -> None:
        """Raise PlanError if no plan of the gradient obeys the memory limit."""
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
        if self.transfer is None:
            return self.mesh
        # The transfer may land on more sub-axes than those of the destination.
        return split_by(root_of(self.transfer.target.mesh), self.dst_split)

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
        return target_sharding(self.source, self.dst, self.dst_mesh)

    @cached_property
    def _normal_ends(self) -> tuple[Sharding, Sharding]:
        """The shardings at the start and at the end in normal form, both with the source's order of dims."""
        source = self.source
        target = self.target
        if self.transfer is None:
            source, target = on_common_mesh(source, target)
        target = target.in_order(source.layout.names)
        start = source.with_layout(source.normal_layout)
        return start, target.with_layout(target.normal_layout)

    @cached_property
    def steps_mesh(self) -> Mesh:
        """The mesh with the axes that the first steps name: `mesh`, with the axes of `split` split."""
        return split_by(self.mesh, self.split)

    @cached_property
    def _start(self) -> Sharding:
        source = _on_sub_axes(self.source, self.steps_mesh)
        return source.with_layout(source.normal_layout)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Every step with the shardings around it."""
        before = self._start
        stages = []
        for step in self.steps:
            after = step.after(before)
            stages.append(Stage(step, before, after))
            before = after
        return tuple(stages)

    def sub_plan(self, stages: Sequence[Stage]) -> Plan:
        """Return consecutive stages of the plan, all on one mesh, as a plan of their own."""
        start = stages[0].before
        steps = tuple(stage.step for stage in stages)
        return Plan(
            src=start.layout,
            dst=stages[-1].after.layout,
            mesh=start.mesh,
            shape=start.shape,
            dtype=self.dtype,
            steps=steps,
            scale=_product_of_scales(steps),
            profile=self.profile,
        )

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes that the layouts name, and axes with replicas that the steps use."""
        axes = [*map(self.mesh.origin, self.src.axes), *map(self.dst_mesh.origin, self.dst.axes)]
        for stage in self.stages:
            axes += [stage.after.mesh.origin(axis) for axis in stage.after.layout.axes]
        return tuple(dict.fromkeys(axes))  # in a fixed order, without repetitions

    @cached_property
    def request(self) -> Request:
        """The request that this plan answers: both layouts and meshes, shape, dtype and limits.

        Searching for it gives a plan between the same layouts, perhaps with other steps. On one
        mesh, both sides have the same devices.
        """
        return Request(
            src=self.src,
            dst=self.dst,
            src_mesh=self.mesh,
            dst_mesh=self.dst_mesh,
            src_devices=self.devices,
            dst_devices=self.transfer.dst_devices if self.transfer else self.devices,
            shape=self.shape,
            dtype=self.dtype,
            profile=self.profile,
            scale=self.scale,
            memory_limit=self.memory_limit,
        )

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return itemsize(self.dtype)

    @cached_property
    def prices(self) -> tuple[Price, ...]:
        """The price of every step."""
        return tuple(map(self.price_of, range(len(self.steps))))

    def price_of(self, index: int) -> Price:
        """Price one step, by its place in `steps`."""
        stage = self.stages[index]
        if isinstance(stage.step, Transfer):
            return stage.step.price(self.itemsize)
        return price(stage.step, stage.before, stage.after, self.itemsize, self.machines[index])

    @cached_property
    def machines(self) -> Sequence[Profile]:
        """For every step, the profile for the devices of its mesh."""
        n_steps = len(self.steps)
        n_on_source = self.steps.index(self.transfer) if self.transfer else n_steps
        dst_machine = profile_of_devices(self.profile, self.dst_mesh, self.request.dst_devices)
        return [self.request.machine] * n_on_source + [dst_machine] * (n_steps - n_on_source)

    @property
    def cost(self) -> float:
        """Predicted seconds, of all that the objective counts."""
        forward_s = sum(price.seconds for price in self.prices)
        if self.objective == BOTH:
            return forward_s + self.backward.cost
        return forward_s

    @property
    def bytes_received(self) -> int:
        """Bytes that the busiest device receives, summed over the steps."""
        return sum(price.received_bytes for price in self.prices)

    @property
    def peak_bytes(self) -> int:
        """Bytes that the busiest device holds at the worst moment: input, output, buffers."""
        if not self.prices:
            return self._largest_endpoint_elements * self.itemsize
        return max(price.peak_bytes for price in self.prices)

    @property
    def _largest_endpoint_elements(self) -> int:
        """Elements of the largest block at the start or at the end."""
        return max(self.source.max_local_size, self.target.max_local_size)

    @cached_property
    def bytes_lower_bound(self) -> int:
        """Fewest bytes that the busiest device must receive, whatever the plan."""
        src, dst = self._normal_ends
        if self.transfer is None:
            elements = bounds.received_elements(src, dst)
        else:
            elements = bounds.received_elements_between(
                src, dst, self.src_devices, self.dst_devices
            )
        return elements * self.itemsize

    @property
    def messages(self) -> int:
        """Latencies paid one after the other, over all steps."""
        total = 0
        for stage, machine in zip(self.stages, self.machines, strict=True):
            traffic = stage.step.traffic(stage.before, machine.link_spans(stage.before.mesh))
            total += sum(hop.messages for hop in traffic.hops)
        return total

    @property
    def exceeds_endpoints(self) -> bool:
        """Whether an intermediate block is larger than the blocks at the start and at the end."""
        largest = self._largest_endpoint_elements
        return any(stage.after.max_local_size > largest for stage in self.stages)

    @cached_property
    def backward(self) -> Plan:
        """The plan of the adjoint: from the dual of `dst` to the dual of `src`. Raises LinearityError."""
        return find_plan(self.request.adjoint)

    @cached_property
    def tangent(self) -> Plan:
        """The plan that tangents take: itself, unless a boundary fills with a constant, which has none."""
        tangent = self.request.tangent
        if tangent == self.request:
            return self
        return find_plan(tangent)

    def __str__(self) -> str:
        return table.text(self)

    def __repr__(self) -> str:
        arguments = f"'{self.src} -> {self.dst}', {self.mesh!r}, {self.shape}, {self.dtype!r}"
        dst_mesh = f", dst_mesh={self.dst_mesh!r}" if self.transfer else ""
        return f"Plan({arguments}{dst_mesh}, steps={', '.join(map(str, self.steps))!r})"

    def explain(self) -> str:
        """Print the alternatives that were weighed, and why this plan won.

        Returns:
            A table of seconds, bytes, peak memory, messages and steps, and a sentence.

        Raises:
            PlanError: The plan leads from one mesh to another.
        """
        return alternatives.explain(self)

    def to_json(self) -> str:
        """Write the plan as text, with all that is needed to check and run it elsewhere."""
        return json.dumps(plan_to_plain(self), indent=1)

    @classmethod
    def from_json(cls, text: str, profile: Profile | str | None = None) -> Plan:
        """Read the text that `to_json` wrote, and check the plan again.

        Args:
            text: The text of `to_json`.
            profile: The machine to price it for, if the text names one that is not shipped.

        Raises:
            PlanError: The text is malformed, or its steps do not lead where it says.
        """
        with reading_plan():
            return cls.from_plain(json.loads(text), profile)

    @classmethod
    def from_plain(cls, data: dict[str, Any], profile: Profile | str | None = None) -> Plan:
        """Read a plan from JSON that is parsed already; see `from_json`."""
        arguments, written_layouts = plan_from_plain(data, profile)
        plan = cls(**arguments)
        # The layouts follow from the steps. A text that disagrees was damaged, or made by other code.
        inferred_layouts = [str(stage.after.layout) for stage in plan.stages]
        if written_layouts != inferred_layouts:
            raise PlanError(
                f"the plan says its steps lead to {written_layouts}, they lead to {inferred_layouts}"
            )
        return plan


def _product_of_scales(steps: Iterable[Step]) -> Fraction:
    """Return the constant by which the steps multiply an array in all."""
    factors = [step.factor for step in steps if isinstance(step, Scale)]
    return math.prod(factors, start=Fraction(1))


def _on_sub_axes(sharding: Sharding, mesh: Mesh) -> Sharding:
    """Write a sharding with the sub-axes of `mesh`, if `mesh` splits axes of the sharding's mesh."""
    if root_of(mesh) == root_of(sharding.mesh):
        return sharding.on_sub_axes(mesh)
    return sharding


@layout_cache(maxsize=4096)  # in this file because a plan finds the plan of its gradient
def find_plan(request: Request, objective: str = FORWARD, *, by_transfer: bool = False) -> Plan:
    """Return the cheapest plan, from the folder of earlier runs (XSHARD_CACHE) or by a search.

    Args:
        request: Layouts, meshes, shape, dtype, machine and limits.
        objective: Whether the seconds of the gradient count too.
        by_transfer: Whether the plan is to have a `Transfer` even if both meshes are one.
    """
    search = partial(search_plan, request, objective, by_transfer=by_transfer)
    return read_or_make(
        request, Plan.from_json, search, {"objective": objective, "by_transfer": by_transfer}
    )


@layout_cache(maxsize=4096)
def search_plan(request: Request, objective: str = FORWARD, *, by_transfer: bool = False) -> Plan:
    """Search the cheapest plan from one layout to another, without reading plans of earlier runs.

    Devices keep their places on the destination's mesh. If `request.relabel` allows others, the
    cheapest plan with devices in other places is searched too, and returned in two cases: it is
    faster and receives no more bytes, or it alone fits the memory limit.

    `by_transfer` plans a move between two meshes as such, even if they are one mesh.
    """
    if request.dst.names != request.src.names:
        # No price depends on the order of dims: move in the source's order, and transpose at the end.
        inner = search_plan(request.in_order, objective, by_transfer=by_transfer)
        steps = (*inner.steps, Transpose(request.target.layout.names))
        return replace(inner, dst=inner.dst.in_order(request.dst.names), steps=steps)
    # A max or min in the destination cannot be sent to other devices, see `Transfer`.
    may_relabel = request.relabel and not request.dst.tagged(*NONLINEAR)
    try:
        plan = _with_objective(_cheapest_in_place(request, by_transfer), objective)
    except PlanError:
        # Devices in other places may fit a memory limit that devices in their own places do not.
        if not may_relabel or request.memory_limit is None:
            raise
        other_places = _cheapest_relabelled(request, objective)
        if other_places is None:
            raise
        return other_places
    if not may_relabel or not plan.bytes_received:  # nothing to save
        return plan
    other_places = _cheapest_relabelled(request, objective)
    if other_places is None or other_places.bytes_received > plan.bytes_received:
        return plan
    return other_places if other_places.cost < plan.cost else plan


def _cheapest_relabelled(request: Request, objective: str) -> Plan | None:
    """Return the cheapest plan in which devices may change places, or None if none fits the limit."""
    plan = cheapest(request, _make_plan, relabel=True)
    return None if plan is None else _with_objective(plan, objective)


def _with_objective(plan: Plan, objective: str) -> Plan:
    """Return the plan with another objective, which checks the gradient's plan too."""
    return plan if objective == FORWARD else replace(plan, objective=objective)


def _cheapest_in_place(request: Request, by_transfer: bool) -> Plan:
    """Return the cheapest plan in which every device keeps its place on the destination's mesh.

    On one mesh the steps are collectives. Between two meshes, or with `by_transfer`, one of the
    steps sends pieces of blocks from the devices of the source to those of the destination.

    Raises:
        PlanError: No plan fits the memory limit; it names the smallest peak.
    """
    # Two meshes over the same devices, such as dp=8 and dp=2,tp=4, may be written as one mesh whose
    # axes are parts of theirs: then collectives are enough.
    one_mesh = None if by_transfer else request.on_one_mesh
    plan: Plan | None
    if one_mesh is None:
        plan = cheapest(request, _make_plan, relabel=False)
    else:
        plan = _make_plan(one_mesh, *solve(one_mesh))
    # A mean is a sum and a factor of 1/n. Multiplying by it needs a dtype that a sum needs, also for
    # a mean that only begins here, which reduces nothing.
    if request.factor != 1:
        check_reduction(request.dtype, "sum")
    # None: the limit is too small for every plan with a transfer. (`solve`, on one mesh, raises for
    # that itself.) The plans are made without the limit, for the smallest peak in the message.
    if plan is None:
        unlimited = replace(request, memory_limit=None)
        peaks = [_make_plan(unlimited, *path).peak_bytes for path in transfer_paths(unlimited)]
        raise too_large(request.memory_limit, min(peaks))
    return plan


def _make_plan(request: Request, steps: tuple[Step, ...], split: Split) -> Plan:
    """Make the plan of the steps that a search found; all else comes from the request.

    `Plan` raises if the steps do not lead from `src` to `dst`, or if they exceed the memory limit.
    `split` says which mesh axes the steps divide into sub-axes, as dp=8 into 2 x 4; () if none.
    """
    return Plan(
        src=request.src,
        dst=request.dst,
        mesh=request.src_mesh,
        shape=request.shape,
        dtype=request.dtype,
        steps=steps,
        scale=request.factor,
        profile=request.profile,
        memory_limit=request.memory_limit,
        split=split,
        devices=request.src_devices,
        dst_split=split_of(request.dst_mesh),
    )
