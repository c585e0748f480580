"""The context of one step as one process executes it, and rows of a dim as parts of its block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from torch_bridge.lower.collectives import CARRIERS
from torch_bridge.lower.packing import Packing
from torch_bridge.lower.subarray import Fill, Subarray, subarray
from torch_bridge.mesh.process_mesh import Group, ProcessMesh
from xshard import Sharding
from xshard.cost.model import Fabric
from xshard.layout.runs import Runs
from xshard.steps.base import DimCut, own_part
from xshard.steps.traffic import Phases


class Site(NamedTuple):
    """The context of one step."""

    before: Sharding
    after: Sharding
    processes: ProcessMesh
    tensor_device: torch.device
    dtype: str
    lengths: Mapping[str, int] | None = (
        None  # symbols of dims that no step cuts; None if nothing is traced
    )
    is_last: bool = True  # the output of the step is the result
    is_given: bool = True  # the input may be the plan's
    fabric: Fabric | None = None
    place: Callable[[], str] = str  # returns the name of the step and its plan

    @property
    def device(self) -> int:
        return self.processes.device

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """This process's block before and after the step."""
        sides = (
            zip(side.layout.names, side.local_shape(self.device), strict=True) for side in self[:2]
        )
        before, after = (
            tuple((self.lengths or {}).get(name, n) for name, n in side) for side in sides
        )
        return before, after

    def group(self, axes: Sequence[str]) -> Group:
        """The processes along some axes of the mesh."""
        return self._group(
            lambda: self.processes.group(axes), self.processes.mesh.group(self.device, axes)
        )

    def among(self, devices: Sequence[int]) -> Group:
        """The processes of some devices along axes of the mesh, this one among them."""
        return self._group(lambda: self.processes.among(tuple(devices)), tuple(devices))

    def _group(self, make: Callable[[], Group], devices: tuple[int, ...]) -> Group:
        if (
            self.tensor_device.type == "meta" and self.lengths is None
        ):  # shapes alone: no group is made
            return Group(None, devices)
        return make() if self.lengths is None else make().traced(self.place(), self.tensor_device)

    def phases(self, axes: Sequence[str]) -> Phases:
        """The phases of a collective along some axes of the mesh; one where several are no faster."""
        spans = self.fabric.spans if self.fabric and self.fabric.has_phases(axes) else ()
        return Phases.along(self.before.mesh, axes, spans, self.processes.ranks)

    def subarray(self, shape: Sequence[int], rows: Mapping[int, Runs]) -> Subarray:
        names = self.before.layout.names
        named = {d: runs for d, runs in rows.items() if names[d] not in (self.lengths or {})}
        return subarray(shape, named, self.tensor_device)

    def whole(self, end: int) -> Packing:
        """The whole block before (0) or after (1) the step as one message."""
        shape = self.shapes[end]
        return Packing(shape, (self.subarray(shape, {}),))

    def fill(self, dim: int, start: int, stop: int, value: float) -> Fill:
        """Rows of this process's block that hold a constant, in the dtype of what travels."""
        dtype = getattr(torch, self.dtype)
        constant = torch.zeros((), dtype=CARRIERS.get(dtype, dtype), device=self.tensor_device)
        if value:  # torch writes nothing else in 4 bits, and only integers as integers
            exact = value if dtype.is_floating_point or dtype.is_complex else int(value)
            constant = torch.tensor(exact, dtype=dtype, device=self.tensor_device).view(
                constant.dtype
            )
        return Fill(dim, start, stop, constant)

    def own_part(self, *cuts: DimCut) -> dict[int, Runs]:
        """This process's rows of the dims that a step cuts or gathers."""
        before = self.before
        return {before.dim_index(d): own_part(before, d, shards, self.device) for d, shards in cuts}

    def cut(
        self,
        shape: tuple[int, ...],
        dim: int,
        parts: Sequence[Runs],
        axes: tuple[str, ...],
        group: Group,
    ) -> Packing:
        """A block as one message per rank of a group: the part of `dim` at the rank's index along `axes`."""
        mine = [parts[self.before.mesh.index(device, axes)] for device in group.devices]
        return Packing(shape, tuple(self.subarray(shape, {dim: rows}) for rows in mine))
