"""A plan: the steps from one sharding to another, checked, priced and printable.

Decides what makes a plan right: every step's result is inferred and the last must mean the
destination. How steps are found is the planner's business.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Self

from xshard import dtypes
from xshard.cost import bounds
from xshard.cost.model import Price, Profile, load_profile, price
from xshard.errors import PlanError
from xshard.layout.layout import Layout
from xshard.layout.mesh import Mesh
from xshard.layout.sharding import Sharding
from xshard.layout.sub_axes import Split, SubAxisMesh
from xshard.plans import table
from xshard.plans.explain import explain
from xshard.plans.priced import FORWARD, Priced, check_objective
from xshard.plans.serialize import _step_from_dict, _step_to_dict, reading_plan
from xshard.search.solve import solve
from xshard.steps import Scale, Step
from xshard.steps.base import REDUCERS


class Stage(NamedTuple):
    """One step of a plan with the shardings before and after it, both in normal form."""

    step: Step
    before: Sharding
    after: Sharding


@dataclass(frozen=True)
class Plan(Priced):
    """Steps that lead an array of `shape` on `mesh` from layout `src` to layout `dst`.

    scale: the constant that the steps multiply by: 1/n where a mean over n ends.
    profile: the machine it is priced for; plans for two machines with the same steps differ.
    memory_limit: bytes that no device may exceed at any moment, forward or backward.
    objective: with "forward+backward" the gradient is planned too, and `cost` is the seconds of both.
    split: axes that the steps divide, with the sizes of their parts: `x` of 4 into `x_0` and `x_1` of 2,
    which steps and stages name. Devices and blocks are those of `mesh` all the same.
    Raises PlanError where the steps do not lead from `src` to `dst`.
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

    def __post_init__(self) -> None:
        check_objective(self.objective)
        reached = self.stages[-1].after if self.stages else self._normal(self._finely(self.source))
        if not reached.means_the_same_as(self._finely(self.target)):
            raise PlanError(f"the steps lead from '{self.src}' to '{reached.layout}', not to '{self.dst}'")
        self._check_split()
        scaled = math.prod((s.factor for s in self.steps if isinstance(s, Scale)), start=Fraction(1))
        if scaled != self.scale:
            raise PlanError(f"the steps scale by {scaled}, the plan says {self.scale}")
        self._check_weight()

    def _check_split(self) -> None:
        if not self.split:
            return
        held = (at.layout.tagged(*REDUCERS) for stage in self.stages for at in (stage.before, stage.after))
        summed = {self.steps_mesh.origin(axis) for axes in held for axis in axes}
        for axis, _ in self.split:
            if axis in summed:
                raise PlanError(f"axis {axis!r} is divided and holds addends", hint="reduce along whole axes")

    @cached_property
    def source(self) -> Sharding:
        """Where the plan starts."""
        return Sharding(self.src, self.mesh, self.shape)

    @cached_property
    def target(self) -> Sharding:
        """Where the plan ends."""
        return Sharding(self.dst, self.mesh, self.shape)

    @cached_property
    def steps_mesh(self) -> Mesh:
        """The mesh whose axes the steps name: `mesh`, with the axes of `split` divided."""
        return SubAxisMesh(self.mesh, self.split) if self.split else self.mesh

    def _finely(self, sharding: Sharding) -> Sharding:
        """The same sharding on the mesh of the steps."""
        fine = self.steps_mesh
        return fine.factored(sharding) if isinstance(fine, SubAxisMesh) else sharding

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Every step with the shardings around it."""
        here, found = self._normal(self._finely(self.source)), []
        for step in self.steps:
            after = step.after(here)
            found.append(Stage(step, here, after))
            here = after
        return tuple(found)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes that the layouts name, and those whose replicas the steps make use of."""
        passed = (a for stage in self.stages for a in stage.after.layout.axes)
        named = (*self.src.axes, *self.dst.axes, *map(self.steps_mesh.origin, passed))
        return tuple(dict.fromkeys(named))

    @staticmethod
    def _normal(sharding: Sharding) -> Sharding:
        return sharding.with_layout(sharding.normal)

    @cached_property
    def prices(self) -> tuple[Price, ...]:
        """What every step costs."""
        return tuple(price(s.step, s.before, s.after, self.itemsize, self.profile) for s in self.stages)

    @cached_property
    def bytes_lower_bound(self) -> int:
        """Fewest bytes that the busiest device must receive, whatever the plan."""
        src, dst = self._normal(self.source), self._normal(self.target)
        return bounds.received_elements(src, dst) * self.itemsize

    @cached_property
    def backward(self) -> Plan:
        """The plan of the adjoint: from the dual of `dst` to the dual of `src`. Raises LinearityError."""
        return self._between(self.dst.dual, self.src.dual)

    @cached_property
    def tangent(self) -> Plan:
        """The plan that tangents take: itself, unless a boundary fills with a constant, which has none."""
        src, dst = self.src.tangent, self.dst.tangent
        return self if (src, dst) == (self.src, self.dst) else self._between(src, dst)

    def _between(self, src: Layout, dst: Layout) -> Plan:
        """The plan between two other layouts of the same array, machine and constant."""
        return find_plan(
            src,
            dst,
            self.mesh,
            self.shape,
            self.dtype,
            self.profile,
            scale=self.scale,
            memory_limit=self.memory_limit,
        )

    @property
    def messages(self) -> int:
        """Latencies paid one after the other, over all steps."""
        spans = self.profile.link_spans(self.steps_mesh)
        return sum(hop.messages for s in self.stages for hop in s.step.traffic(s.before, spans).hops)

    @property
    def swells(self) -> bool:
        """Whether a block on the way is larger than the blocks of both ends."""
        largest = max(self.source.max_local_size, self.target.max_local_size)
        return any(stage.after.max_local_size > largest for stage in self.stages)

    def with_steps(self, steps: tuple[Step, ...]) -> Self:
        """The same request carried out by other steps, on whole axes."""
        return replace(self, steps=steps, split=())

    def __str__(self) -> str:
        return table.text(self)

    def explain(self) -> str:
        """The alternatives that were weighed, with seconds, bytes, peak, messages, and why this one won."""
        return explain(self)

    def to_json(self) -> str:
        """The plan as text, with all that is needed to check and run it elsewhere."""
        return json.dumps(
            {
                "src": str(self.src),
                "dst": str(self.dst),
                "mesh": dict(zip(self.mesh.axes, self.mesh.sizes, strict=True)),
                "shape": list(self.shape),
                "dtype": self.dtype,
                "scale": str(self.scale),
                "profile": self.profile.name,
                "memory_limit": self.memory_limit,
                "objective": self.objective,
                "split": dict(self.split),
                "steps": [_step_to_dict(s) for s in self.steps],
                "after": [str(stage.after.layout) for stage in self.stages],
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str, profile: Profile | str | None = None) -> Plan:
        """Text of `to_json` -> the plan, checked again. Raises PlanError for malformed or wrong text.

        profile: the machine to price it for, where the text names one that is not shipped.
        """
        with reading_plan(PlanError):
            data: dict[str, Any] = json.loads(text)
            plan = cls(
                src=Layout.parse(data["src"]),
                dst=Layout.parse(data["dst"]),
                mesh=Mesh(data["mesh"]),
                shape=tuple(data["shape"]),
                dtype=dtypes.name_of(data["dtype"]),
                steps=tuple(_step_from_dict(s) for s in data["steps"]),
                scale=Fraction(data["scale"]),
                profile=load_profile(data["profile"] if profile is None else profile),
                memory_limit=data["memory_limit"],
                objective=data["objective"],
                split=tuple((axis, tuple(sizes)) for axis, sizes in data.get("split", {}).items()),
            )
            written = data["after"]
        inferred = [str(stage.after.layout) for stage in plan.stages]
        if written != inferred:
            raise PlanError(f"the plan says its steps lead to {written}, they lead to {inferred}")
        return plan


@lru_cache(maxsize=4096)
def find_plan(
    src: Layout,
    dst: Layout,
    mesh: Mesh,
    shape: tuple[int, ...],
    dtype: str,
    profile: Profile,
    *,
    scale: Fraction | None = None,
    memory_limit: int | None = None,
) -> Plan:
    """The cheapest plan between two layouts, by value. `scale`: the constant it multiplies by, where
    that is not read off the layouts (a backward plan)."""
    source, target = Sharding(src, mesh, shape), Sharding(dst, mesh, shape)
    factor = source.scale / target.scale if scale is None else scale
    steps, split = solve(source, target, dtype, profile, factor, memory_limit)
    return Plan(src, dst, mesh, shape, dtype, steps, factor, profile, memory_limit, split=split)
