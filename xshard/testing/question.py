"""Questions of the kit to a runtime, and the answers: blocks per device, in and out.

Decides what both hold. The bridges' `testing.equivalence` turns one into the other, so that no framework is
imported here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xshard.layout import Mesh, Sharding
from xshard.steps.base import Block
from xshard.testing.trees import StructureError, Tree, leaves

Devices = tuple[Block, ...]  # of one array, a block per device


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

    function: packed, see `pickling`. arguments: a tree of numbers of `inputs`, one branch per argument.
    inputs, shardings: per array. results: per output; None for a reference, which draws its own cotangents
    (`draw`) and returns them. A mesh without axes is one device with whole arrays.
    """

    function: bytes
    mesh: Mesh
    arguments: Tree
    inputs: tuple[Devices, ...]
    shardings: tuple[Sharding, ...]
    results: dict[str, Result] | None
    update: Update | None = None
    wide: bool = False  # 64-bit numbers, which JAX must be told to keep
    typed: bool = True  # JAX: check_vma
    differences: bool = False  # of a reference: its gradients are compared with them

    @property
    def differentiable(self) -> tuple[int, ...]:
        """The numbers of the inputs that have gradients. By name, since bfloat16 is no float to numpy."""
        names = (blocks[0].dtype.name for blocks in self.inputs)
        return tuple(i for i, name in enumerate(names) if name.startswith(("float", "bfloat", "complex")))


@dataclass(frozen=True)
class Answer:
    """Results of a function: outputs by name, gradients and updated values by number of input.

    gradients: None if the shapes of outputs do not fit the cotangents. cotangents, tree, derivatives: of a
    reference only, its cotangents by name, the tree of its outputs with numbers as leaves, and differences.
    """

    outputs: dict[str, Devices]
    gradients: dict[int, Devices] | None
    updated: dict[int, Devices]
    cotangents: dict[str, Devices]
    tree: Tree = None
    derivatives: dict[int, tuple[Devices, Devices, float]] = field(default_factory=dict)  # see `differences`


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
    found = leaves(returned, "output")
    if results is not None and list(found) != list(results):
        raise StructureError(
            f"the {runtime} function returns {_listed(found)}, the reference returns {_listed(results)}",
            hint="dicts, lists and tuples of arrays, alike on both sides",
        )
    return found


def _listed(names: dict[str, Any]) -> str:
    return ", ".join(names) or "nothing"
