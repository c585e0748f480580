"""What prices depend on: a step on a mesh, its micro-batches, its blocks of operations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from xshard.dtypes import itemsize
from xshard.layout import Mesh
from xshard.layout.sub_axes import SubAxisMesh, root_of
from xshard.notation.parser import names_of_dim
from xshard.step.price.moves import MovePrices
from xshard.step.price.options import (
    ArrayDim,
    Floats,
    Ints,
    Placements,
    are_uneven,
    product_over,
    unevenness,
)
from xshard.step.price.parts import BlockPart, Parts
from xshard.step.record.arrays import shape_of
from xshard.step.record.op import Op
from xshard.step.record.training_step import TrainingStep

FULL = 4  # bytes of an element in full precision, as gradients, moments and logits are
# What rules call the dims of a parameter, by their number: [out, in], [expert, out, in].
NAMES_OF_PARAMETER_DIMS = {1: "n", 2: "oi", 3: "eoi"}


class GatherGroup(NamedTuple):
    """Parameters that one collective gathers: the matrices of a block of operations, or its vectors."""

    block: int
    are_matrices: bool


@dataclass(frozen=True, eq=False)
class StepSetup:
    """A step on a mesh, with micro-batches.

    Args:
        step: The step, with shares (`TrainingStep.with_shares`).
        moves: The prices of moves, which know mesh and machine.
        micro_batches: Parts of the batch that run one after another.
        recompute: Activations of repeated blocks are computed again in the backward pass.
        overlap: Share of the seconds of moves that run beside computing; None for what the
            schedule hides.
        prefetch: How many modules ahead parameters travel.
        batch_parts: Parts of a micro-batch that take turns, so that one computes while activations
            of another travel.
    """

    step: TrainingStep
    moves: MovePrices
    micro_batches: int = 1
    recompute: bool = False
    overlap: float | None = None
    prefetch: int = 1
    batch_parts: int = 1

    @property
    def mesh(self) -> Mesh:
        """The mesh that is searched: the last axis is split if its devices may share heads of keys."""
        return self.moves.mesh

    @property
    def whole_mesh(self) -> Mesh:
        """The mesh with the axes that rules name."""
        return root_of(self.mesh)

    @cached_property
    def shared_dims(self) -> frozenset[ArrayDim]:
        """The dims of arrays whose units devices may share: as many as groups along a split axis."""
        if not isinstance(self.mesh, SubAxisMesh):
            return frozenset()
        n_groups = self.mesh.sizes[-2]
        return frozenset(dim for dim, n_units in self.step.units.items() if n_units == n_groups)

    @property
    def item_bytes(self) -> int:
        """Bytes of an element of activations and parameters in use."""
        return itemsize(self.step.dtype)

    @property
    def stored_bytes(self) -> int:
        """Bytes of an element of parameters in storage."""
        return itemsize(self.step.stored_dtype)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an element of gradients of parameters."""
        return max(FULL, self.item_bytes)

    @cached_property
    def lengths(self) -> Mapping[str, int]:
        """Lengths of dims in one micro-batch, or in one part of it."""
        n_parts = self.micro_batches * self.batch_parts
        return {**self.step.lengths, self.step.batch: self.step.batch_length // n_parts}

    @cached_property
    def units(self) -> Mapping[str, tuple[int, ...]]:
        """The units of each dim of an array, where they can make uneven blocks; else 1.

        6 heads are 6 units on a mesh of 4 devices, and 1 on a mesh of 3, which they divide over.
        """
        n_devices = self.mesh.n_devices
        block_counts = [n for n in range(1, n_devices + 1) if n_devices % n == 0]
        units: dict[str, tuple[int, ...]] = {}
        for name, array in self.step.arrays.items():
            n_units = np.array([self.step.units.get((name, d), 1) for d in range(len(array.dims))])
            can_be_uneven = are_uneven(n_units[:, None], block_counts).any(-1)
            units[name] = tuple(np.where(can_be_uneven, n_units, 1).tolist())
        return units

    @cached_property
    def block_of(self) -> Mapping[str, int]:
        """The number of each operation's block: neighbours that run equally often.

        Embedding (once), 12 layers as operations that run 12 times, loss (once): blocks 0, 1, 2.
        """
        ops = self.step.ops
        block = 0
        block_of = {ops[0].name: block}
        for previous, op in pairwise(ops):
            # Blocks are told apart by how often they run, as layers and what is around them are.
            if previous.times != op.times:
                block += 1
            block_of[op.name] = block
        return block_of

    @cached_property
    def block_times(self) -> Ints:
        """How often each block runs."""
        times = {self.block_of[op.name]: op.times for op in self.step.ops}
        return np.array([*times.values()])

    @cached_property
    def n_turns(self) -> Ints:
        """How many modules of each block compute, and gather their parameters, one after another.

        They are its layers; outside of layers they are the operations that take a matrix.
        """
        step = self.step
        matrices = [name for name in step.parameters if self._is_matrix(name)]
        first_users = {step.consumers(name)[0].name for name in matrices}
        users_in_block = Counter(self.block_of[name] for name in first_users)
        n_users = [users_in_block[block] for block in range(len(self.block_times))]
        return np.maximum(np.where(self.block_times > 1, self.block_times, n_users), 1)

    def _is_matrix(self, parameter: str) -> bool:
        """Tell whether a parameter is more than a vector."""
        return len(self.step.arrays[parameter].dims) > 1

    @cached_property
    def parts(self) -> Parts:
        """Where each part of the cost is in a vector."""
        return Parts(len(self.block_times))

    def part_index(self, op: Op, part: BlockPart) -> int:
        """Return the place of a part of an operation's block in vectors."""
        return self.block_of[op.name] * len(BlockPart) + part

    def cost_vectors(
        self, op: Op, n_options: int, values_by_part: Mapping[BlockPart, Floats]
    ) -> Floats:
        """Put parts of an operation's block, each [options], into vectors: [options, parts]."""
        costs = np.zeros((n_options, self.parts.size))
        for part, values in values_by_part.items():
            costs[:, self.part_index(op, part)] = values
        return costs

    def is_recomputed(self, op: Op) -> bool:
        """Tell whether an operation runs again in the backward pass."""
        return self.recompute and op.times > 1

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the global shape of an array of one micro-batch."""
        return self._shapes[name]

    @cached_property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The global shape of every array, by name."""
        return {name: shape_of(array, self.lengths) for name, array in self.step.arrays.items()}

    def dim_names(self, name: str) -> tuple[str, ...]:
        """Name each dim of an array; parameters have common names, so that one rule is for many."""
        return self._dim_names[name]

    @cached_property
    def _dim_names(self) -> Mapping[str, tuple[str, ...]]:
        return {name: self._names_of_dims(name) for name in self.step.arrays}

    def _names_of_dims(self, name: str) -> tuple[str, ...]:
        dims = self.step.arrays[name].dims
        if name in self.step.inputs or name in self.step.by_name:
            # A rule has one name for each dim of the array: `(g d)` is gd.
            return tuple("".join(names_of_dim(dim)) for dim in dims)
        if len(dims) in NAMES_OF_PARAMETER_DIMS:
            return tuple(NAMES_OF_PARAMETER_DIMS[len(dims)])
        return tuple(f"d{i}" for i in range(len(dims)))

    def block_bytes(self, name: str, placements: Placements, item_bytes: int) -> Floats:
        """Return the bytes of the largest block of an array: [..., axes] -> [...]."""
        n_bytes = item_bytes * math.prod(self.shape(name))
        even_bytes = n_bytes / product_over(placements >= 0, self.mesh.sizes)
        return even_bytes * unevenness(placements, self.units[name], self.mesh)

    def bytes_in_use(self, name: str, placements: Placements) -> Floats:
        """Return the bytes of a device's block of an array as operations take it."""
        return self.block_bytes(name, placements, self.item_bytes)

    def launch_share(self, parameter: str) -> float:
        """Return a parameter's part of the elements that are gathered by one collective.

        Parameters of a block travel together, vectors and all others apart; XLA sends every array
        on its own.
        """
        if self.step.moves_anywhere:
            return 1.0
        elements = math.prod(self.shape(parameter))
        return elements / self._elements_of_groups[self._gather_group(parameter)]

    @cached_property
    def _elements_of_groups(self) -> Mapping[GatherGroup, int]:
        """The elements that travel together, by group of parameters."""
        elements = Counter[GatherGroup]()
        for name in self.step.parameters:
            elements[self._gather_group(name)] += math.prod(self.shape(name))
        return elements

    def _gather_group(self, parameter: str) -> GatherGroup:
        """Return the group of parameters that travel together with this one."""
        first_use = self.step.consumers(parameter)[0]
        return GatherGroup(self.block_of[first_use.name], self._is_matrix(parameter))
