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
from xshard.layout.runs import Runs, interval
from xshard.notation.parser import Shard
from xshard.steps.base import DimCut, axes_of, even_parts, rows_of_own_part
from xshard.steps.traffic import Phases

Lengths = Mapping[str, int]  # dim name -> its length, which may be a symbol of a compiler


class BlockShapes(NamedTuple):
    """The shapes of this process's block before and after a step; `shapes[BEFORE]` is `before`."""

    before: tuple[int, ...]
    after: tuple[int, ...]


class StepContext(NamedTuple):
    """The context of one step, as this process executes it.

    Attributes:
        before: The sharding before the step.
        after: The sharding after it.
        processes: The processes that run the plan.
        tensor_device: The device of blocks.
        dtype: The name of the dtype of values, as in the plan.
        lengths: Symbols of a compiler for lengths of dims that no step cuts; None if nothing is traced.
        is_last: Whether no later step makes a new tensor: the output is then the result.
        may_be_callers_tensor: Whether the input may be the tensor that the caller passed.
        fabric: The links of the mesh; None makes each collective one phase.
        place: Returns the name of the step and its plan, for errors.
    """

    before: Sharding
    after: Sharding
    processes: ProcessMesh
    tensor_device: torch.device
    dtype: str
    lengths: Lengths | None
    is_last: bool
    may_be_callers_tensor: bool
    fabric: Fabric | None
    place: Callable[[], str]

    @property
    def device(self) -> int:
        return self.processes.device

    @property
    def adds_in_order(self) -> bool:
        """Whether the plan asks for sums in the order of ranks."""
        return self.fabric is not None and self.fabric.profile.adds_in_order

    @property
    def shapes(self) -> BlockShapes:
        return BlockShapes(self._local_shape(self.before), self._local_shape(self.after))

    def _local_shape(self, sharding: Sharding) -> tuple[int, ...]:
        """Return the shape of this process's block, with symbols where a compiler has them."""
        shape = sharding.local_shape(self.device)
        if self.lengths is None:
            return shape
        pairs = zip(sharding.layout.names, shape, strict=True)
        return tuple(self.lengths.get(name, length) for name, length in pairs)

    def group(self, axes: Sequence[str]) -> Group:
        """Return the processes along some axes of the mesh."""
        if self._needs_no_group:
            return Group(None, self.processes.mesh.group(self.device, axes))
        return self._as_traced(self.processes.group(axes))

    def group_of_devices(self, devices: Sequence[int]) -> Group:
        """Return the processes of some devices along axes of the mesh, this one among them."""
        if self._needs_no_group:
            return Group(None, tuple(devices))
        return self._as_traced(self.processes.group_of_devices(tuple(devices)))

    @property
    def _needs_no_group(self) -> bool:
        """Whether only shapes are asked for: nothing is sent."""
        return self.tensor_device.type == "meta" and self.lengths is None

    def _as_traced(self, group: Group) -> Group:
        """Return the group as a compiler needs it, if one records."""
        return group if self.lengths is None else group.traced(self.place(), self.tensor_device)

    def phases(self, axes: Sequence[str]) -> Phases:
        """Return the phases of a collective along some axes; one phase where several are no faster."""
        ranks = self.processes.ranks
        if self.fabric is None or not self.fabric.has_phases(axes):
            return Phases.of_axes(self.before.mesh, axes, (), ranks)
        return Phases.of_axes(self.before.mesh, axes, self.fabric.spans, ranks)

    def subarray(self, shape: Sequence[int], rows: Mapping[int, Runs]) -> Subarray:
        """Return some rows of a block. A dim with a symbol for its length is never cut: it is whole."""
        if self.lengths is not None:
            names = self.before.layout.names
            rows = {d: runs for d, runs in rows.items() if names[d] not in self.lengths}
        return subarray(shape, rows, self.tensor_device)

    def whole_block(self, end: int) -> Packing:
        """Return the whole block as one message: the block BEFORE the step, or the one AFTER it."""
        shape = self.shapes[end]
        return Packing(shape, (self.subarray(shape, {}),))

    def fill(self, dim: int, start: int, stop: int, value: float) -> Fill:
        """Return rows of this process's new block that hold a constant, in the dtype that travels."""
        rows = self.subarray(self.shapes.after, {dim: interval(start, stop)})
        dtype = getattr(torch, self.dtype)
        carrier = CARRIERS.get(dtype, dtype)
        # What travels is seen as its carrier, a dtype of the same size that backends know.
        if not value:
            # All bits are zero. Torch writes no other constant in 4 bits.
            return Fill(rows, torch.zeros((), dtype=carrier, device=self.tensor_device))
        if not (dtype.is_floating_point or dtype.is_complex):
            value = int(value)  # torch writes only integers as integers
        constant = torch.tensor(value, dtype=dtype, device=self.tensor_device)
        return Fill(rows, constant.view(carrier))

    def rows_of_own_part(self, *cuts: DimCut) -> dict[int, Runs]:
        """Return this process's rows of the dims that a step cuts or gathers."""
        return {
            self.before.dim_index(dim): rows_of_own_part(self.before, dim, shards, self.device)
            for dim, shards in cuts
        }

    def parts_of_devices(
        self, end: int, dim: str, shards: tuple[Shard, ...], devices: Sequence[int]
    ) -> Packing:
        """Cut a block along a dim into one message per device.

        [8, 5] for 4 devices along dim 0 -> messages with rows 0:2, 2:4, 4:6 and 6:8.

        Args:
            end: Which block: the one BEFORE the step, or the one AFTER it.
            dim: The name of the dim that is cut.
            shards: How it is cut: a device gets the part of its index along their axes.
            devices: The devices, in the order of messages.
        """
        shape = self.shapes[end]
        d = self.before.dim_index(dim)
        part_rows = even_parts(self.before, dim, shards)
        axes = axes_of(shards)
        part_indices = [self.before.mesh.index(device, axes) for device in devices]
        messages = [self.subarray(shape, {d: part_rows[i]}) for i in part_indices]
        return Packing(shape, tuple(messages))
