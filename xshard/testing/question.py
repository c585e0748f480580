"""Questions of the kit, about a user's function or a plan, and answers of the bridges' workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from xshard.contractions.plan import ContractionPlan
from xshard.errors import XshardError
from xshard.layout import Mesh, Sharding
from xshard.plans.plan import Plan
from xshard.steps.base import Block

Tree = Any  # a leaf, or a dict, list or tuple of trees; None is a tree without leaves
Devices = tuple[Block, ...]  # the blocks of one array, one per device
AnyPlan = Plan | ContractionPlan
Side = Literal["torch", "jax"]
OUTPUT = "output"  # the name of a result that is one array


class Slope(NamedTuple):
    """Derivatives of a function along a few random directions, in two ways: each one block of one device.

    Attributes:
        of_gradient: The dot products of the gradient with the directions.
        by_differences: The differences of the function, divided by the steps.
        size: The largest norm of gradient times direction: what an error is measured by.
    """

    of_gradient: Devices
    by_differences: Devices
    size: float


Slopes = dict[int, Slope]  # by number of input


class StructureError(XshardError):
    """Trees that should have the same leaves, but do not."""


@dataclass(frozen=True)
class Update:
    """One optimiser step on some of the arguments.

    Attributes:
        function: Packed; for torch a list of tensors -> the optimiser, for JAX (values, gradients) ->
            values.
        positions: Of the arguments.
        arrays: Numbers of the arrays in these arguments.
    """

    function: bytes
    positions: tuple[int, ...]
    arrays: tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """The sharding of one output, and the blocks of its cotangent; None if it has no derivative."""

    sharding: Sharding
    cotangents: Devices | None


@dataclass(frozen=True)
class Question:
    """A function, the blocks of its arguments, and the cotangents of what it returns.

    Attributes:
        function: Packed, see `pickling`; or a plan, whose bytes and seconds are measured too.
        mesh: Without axes: one device with unsharded arrays.
        arguments: Trees of numbers of `inputs`, one branch per argument.
        inputs: The blocks of every array.
        shardings: Of the inputs.
        results: By name; None for a reference, which draws its own cotangents.
        update: An optimiser step, if there is one.
        wide: Whether there are 64-bit numbers, which JAX must be told to keep.
        mode: For JAX: `shard_map` with types ("vma") or without ("novma"), or "pmap".
        differences: Whether gradients of a reference are compared with differences of its function.
    """

    function: bytes | AnyPlan
    mesh: Mesh
    arguments: Tree
    inputs: tuple[Devices, ...]
    shardings: tuple[Sharding, ...]
    results: dict[str, Result] | None
    update: Update | None = None
    wide: bool = False
    mode: str = "vma"
    differences: bool = False

    @property
    def differentiable(self) -> tuple[int, ...]:
        """The numbers of the inputs that have gradients."""
        # By name: to numpy, bfloat16 is no float.
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
        """The cotangent blocks of a plan's result; none for a result without derivatives."""
        assert self.results is not None
        cotangents = self.results[OUTPUT].cotangents
        return () if cotangents is None else cotangents


@dataclass(frozen=True)
class Answer:
    """Results of a function.

    Attributes:
        outputs: By name.
        gradients: By number of input; None if the shapes of outputs do not fit the cotangents.
        updated: Parameters after the optimiser step, by number of input.
        cotangents: By name; a reference's, as `tree` and `derivatives`.
        tree: What the function returned, with numbers in the place of arrays.
        derivatives: Gradients beside differences, see `Question.differences`.
        forward_bytes: That the busiest device received; None if not measured.
        backward_bytes: The same for the gradients.
        seconds: Of one forward and backward pass after a first one.
        draws: Whether the framework's own random numbers were used, as dropout does.
    """

    outputs: Mapping[str, Devices]
    gradients: Mapping[int, Devices] | None
    updated: Mapping[int, Devices] = field(default_factory=dict)
    cotangents: Mapping[str, Devices] = field(default_factory=dict)
    tree: Tree = None
    derivatives: Slopes = field(default_factory=dict)
    forward_bytes: int | None = None
    backward_bytes: int | None = None
    seconds: float | None = None
    draws: bool = False

    @property
    def gradients_if_any(self) -> Mapping[int, Devices]:
        """The gradients by number of input; empty where `gradients` is None."""
        return {} if self.gradients is None else self.gradients
