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
    """The context of one step. lengths: a compiler's symbols for dims that no step cuts, by their names; None
    if nothing is traced. is_last: the output of the step is the result. is_given: its input may be the
    plan's. place: returns the name of the step and its plan."""

    before: Sharding
    after: Sharding
    processes: ProcessMesh
    tensor_device: torch.device
    dtype: str
    lengths: Mapping[str, int] | None = None
    is_last: bool = True
    is_given: bool = True
    fabric: Fabric | None = None
    place: Callable[[], str] = str

    @property
    def device(self) -> int:
        return self.processes.device

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """This process's block before and after the step."""
        before, after = (
            zip(side.layout.names, side.local_shape(self.device), strict=True) for side in self[:2]
        )
        symbols = self.lengths or {}
        return tuple(symbols.get(d, n) for d, n in before), tuple(symbols.get(d, n) for d, n in after)

    def group(self, axes: Sequence[str]) -> Group:
        """The processes along some axes of the mesh."""
        if self.lengths is not None:
            return self.processes.group(axes).traced(self.place(), self.tensor_device)
        if self.tensor_device.type == "meta":  # shapes alone: no process group is made
            return Group(None, self.processes.mesh.group(self.device, axes))
        return self.processes.group(axes)

    def phases(self, axes: Sequence[str]) -> Phases:
        """The phases of a collective along some axes of the mesh; one where several are no faster."""
        spans = self.fabric.spans if self.fabric and self.fabric.has_phases(axes) else ()
        return Phases.along(self.before.mesh, axes, spans, self.processes.ranks)

    def among(self, devices: Sequence[int]) -> Group:
        """The processes of some devices along axes of the mesh, this one among them."""
        if self.tensor_device.type == "meta":
            return Group(None, tuple(devices))
        group = self.processes.among(tuple(devices))
        return group if self.lengths is None else group.traced(self.place(), self.tensor_device)

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
            constant = torch.tensor(exact, dtype=dtype, device=self.tensor_device).view(constant.dtype)
        return Fill(dim, start, stop, constant)

    def own_part(self, *cuts: DimCut) -> dict[int, Runs]:
        """This process's rows of the dims that a step cuts or gathers."""
        before = self.before
        return {before.dim_index(d): own_part(before, d, shards, self.device) for d, shards in cuts}

    def cut(
        self, shape: tuple[int, ...], dim: int, parts: Sequence[Runs], axes: tuple[str, ...], group: Group
    ) -> Packing:
        """A block as one message per rank of a group: the part of `dim` at the rank's index along `axes`."""
        mine = [parts[self.before.mesh.index(device, axes)] for device in group.devices]
        return Packing(shape, tuple(self.subarray(shape, {dim: rows}) for rows in mine))
