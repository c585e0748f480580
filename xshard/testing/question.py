"""Questions of the kit to a runtime, and the answers: blocks per device, in and out.

A question asks for the outputs and gradients of a user's function, or of a plan. The bridges'
`testing.worker` answers, so that no framework is imported here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xshard.contractions.plan import ContractionPlan
from xshard.layout import Mesh, Sharding
from xshard.plans.plan import Plan
from xshard.steps.base import Block
from xshard.testing.trees import StructureError, Tree, leaves

Devices = tuple[Block, ...]  # the blocks of one array, one per device
AnyPlan = Plan | ContractionPlan
OUTPUT = "output"  # the name of a result that is one array


@dataclass(frozen=True)
class Update:
    """One optimiser step on some of the arguments.

    function: packed. torch: a list of tensors -> the optimiser; JAX: (values, gradients) -> values, both
    trees of the arguments at `positions`. arrays: the numbers of their leaves.
    """

    function: bytes
    positions: tuple[int, ...]
    arrays: tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """The layout of one output, and its cotangent blocks; None if it has no derivative."""

    sharding: Sharding
    cotangents: Devices | None


@dataclass(frozen=True)
class Question:
    """A function, the blocks of its arguments, and the cotangents of what it returns.

    function: packed, see `pickling`; or a plan: its bytes and seconds are measured too. arguments: a tree
    of numbers of `inputs`, one branch per argument. inputs, shardings: per array. results: per output; None
    for a reference, which draws its own cotangents (`draw`) and returns them. A mesh without axes is one
    device with unsharded arrays.
    """

    function: bytes | AnyPlan
    mesh: Mesh
    arguments: Tree
    inputs: tuple[Devices, ...]
    shardings: tuple[Sharding, ...]
    results: dict[str, Result] | None
    update: Update | None = None
    wide: bool = False  # 64-bit numbers, which JAX must be told to keep
    mode: str = "vma"  # JAX: `shard_map` with types ("vma") or without ("novma"), or "pmap"
    differences: bool = False  # compare the gradients of a reference with differences of its function

    @property
    def differentiable(self) -> tuple[int, ...]:
        """The numbers of the inputs that have gradients. By name, since bfloat16 is no float to numpy."""
        names = (blocks[0].dtype.name for blocks in self.inputs)
        return tuple(i for i, name in enumerate(names) if name.startswith(("float", "bfloat", "complex")))

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
    """Results of a function: outputs by name, gradients and updated values by number of input.

    gradients: None if the shapes of outputs do not fit the cotangents. cotangents, tree, derivatives: only of
    a reference: its cotangents by name, the tree of its outputs with numbers as leaves, and differences.
    forward_bytes, backward_bytes: bytes that the busiest device received; None if not measured. seconds: wall
    time of one forward and backward pass after a first one.
    """

    outputs: Mapping[str, Devices]
    gradients: Mapping[int, Devices] | None
    updated: Mapping[int, Devices] = field(default_factory=dict)
    cotangents: Mapping[str, Devices] = field(default_factory=dict)
    tree: Tree = None
    derivatives: dict[int, tuple[Devices, Devices, float]] = field(default_factory=dict)  # see `differences`
    forward_bytes: int | None = None
    backward_bytes: int | None = None
    seconds: float | None = None


def draw(number: int, shape: Sequence[int], dtype: np.dtype[Any]) -> Block:
    """The random cotangent of output `number`: the same in every process."""
    rng = np.random.default_rng((7, number))
    values = rng.normal(size=tuple(shape))
    if dtype.kind == "c":
        values = values + 1j * rng.normal(size=tuple(shape))
    return values.astype(dtype)


def called(function: Callable[..., Any], arguments: Sequence[Any], mesh: Mesh) -> Any:
    """Call the function, with `mesh=` if it has such a parameter."""
    if mesh.axes and "mesh" in parameters_of(function):
        return function(*arguments, mesh=mesh)
    return function(*arguments)


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters by name; none if a function has no signature, like torch's own."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def named_outputs(returned: Tree, results: dict[str, Result] | None, runtime: str) -> dict[str, Any]:
    """The outputs by name. Raises StructureError if the reference has others."""
    outputs = leaves(returned, OUTPUT)
    if results is not None and list(outputs) != list(results):
        listed = [", ".join(names) or "nothing" for names in (outputs, results)]
        raise StructureError(
            f"the {runtime} function returns {listed[0]}, the reference returns {listed[1]}",
            hint="dicts, lists and tuples of arrays with the same names on both sides",
        )
    return outputs
