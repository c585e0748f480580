"""Questions of the kit, about a user's function or a plan, and answers of the bridges' workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from xshard.contractions.plan import ContractionPlan
from xshard.errors import XshardError
from xshard.layout import Mesh, Sharding
from xshard.plans.plan import Plan
from xshard.steps.base import Block

Tree = Any  # a leaf, or a dict, list or tuple of trees; None is a tree without leaves
Devices = tuple[Block, ...]  # the blocks of one array, one per device
Slopes = dict[int, tuple[Devices, Devices, float]]  # see `derivatives`
AnyPlan = Plan | ContractionPlan
OUTPUT = "output"  # the name of a result that is one array


class StructureError(XshardError):
    """Trees that should have the same leaves, but do not."""


@dataclass(frozen=True)
class Update:
    """One optimiser step on the arguments at `positions`, with the leaves `arrays`."""

    function: (
        bytes  # for torch a list of tensors -> the optimiser, for JAX (values, gradients) -> values
    )
    positions: tuple[int, ...]
    arrays: tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """The layout of one output, and its cotangent blocks; None if it has no derivative."""

    sharding: Sharding
    cotangents: Devices | None


@dataclass(frozen=True)
class Question:
    """A function, the blocks of its arguments, and the cotangents of what it returns."""

    function: (
        bytes | AnyPlan
    )  # packed, see `pickling`; or a plan: its bytes and seconds are measured too
    mesh: Mesh  # without axes: one device with unsharded arrays
    arguments: Tree  # of numbers of `inputs`, one branch per argument
    inputs: tuple[Devices, ...]
    shardings: tuple[Sharding, ...]
    results: dict[str, Result] | None  # None for a reference, which draws its own cotangents
    update: Update | None = None
    wide: bool = False  # 64-bit numbers, which JAX must be told to keep
    mode: str = "vma"  # JAX: `shard_map` with types ("vma") or without ("novma"), or "pmap"
    differences: bool = (
        False  # compare the gradients of a reference with differences of its function
    )

    @property
    def differentiable(self) -> tuple[int, ...]:
        """The numbers of the inputs that have gradients. By name, since bfloat16 is no float to numpy."""
        names = (blocks[0].dtype.name for blocks in self.inputs)
        return tuple(
            i for i, name in enumerate(names) if name.startswith(("float", "bfloat", "complex"))
        )

    @property
    def plan(self) -> AnyPlan:
        """The plan that is the function."""
        assert not isinstance(self.function, bytes)
        return self.function

    @property
    def cotangents(self) -> Devices:
        """The cotangent blocks of a plan's result."""
        assert self.results is not None
        return self.results[OUTPUT].cotangents or ()


@dataclass(frozen=True)
class Answer:
    """Results of a function: outputs by name, gradients and updated values by number of input."""

    outputs: Mapping[str, Devices]
    gradients: (
        Mapping[int, Devices] | None
    )  # None if the shapes of outputs do not fit the cotangents
    updated: Mapping[int, Devices] = field(default_factory=dict)
    cotangents: Mapping[str, Devices] = field(
        default_factory=dict
    )  # as `tree`, `derivatives`: a reference's
    tree: Tree = None
    derivatives: Slopes = field(default_factory=dict)  # see `differences`
    forward_bytes: int | None = None  # that the busiest device received; None if not measured
    backward_bytes: int | None = None
    seconds: float | None = None  # of one forward and backward pass after a first one
    draws: bool = False  # numbers of the framework's own generator, as dropout does
