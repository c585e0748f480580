"""Questions of the kit, about a user's function or a plan, and answers of the bridges' workers, as trees."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xshard.contractions.plan import ContractionPlan
from xshard.errors import XshardError
from xshard.layout import Mesh, Sharding
from xshard.plans.plan import Plan
from xshard.steps.base import Block
from xshard.testing.diagnosis.evidence import in_double
from xshard.tolerances import DERIVATIVE
from xshard.trees import children, prefix_branches

Tree = Any  # a leaf, or a dict, list or tuple of trees; None is a tree without leaves


class StructureError(XshardError):
    """Trees that should have the same leaves, but do not."""


def leaves(tree: Tree, name: str = "") -> dict[str, Any]:
    """Every leaf by its place, in order; the keys of a dict are sorted, as in JAX.

    >>> leaves({"w": 1, "b": (2, 3)}, "x")
    {"x['b'][0]": 2, "x['b'][1]": 3, "x['w']": 1}
    """
    branches = _sorted_children(tree)
    if branches is None:
        return {} if tree is None else {name: tree}
    parts = (leaves(branch, f"{name}[{key!r}]") for key, branch in branches.items())
    return {place: leaf for part in parts for place, leaf in part.items()}


def mapped(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """The same tree with `function` applied to every leaf: `(1, None)` -> `('1', None)` for `str`."""
    branches = _sorted_children(tree)
    if branches is None:
        return None if tree is None else function(tree)
    parts = {key: mapped(function, branch) for key, branch in branches.items()}
    if isinstance(tree, dict):
        return parts
    return type(tree)(*parts.values()) if hasattr(tree, "_fields") else type(tree)(parts.values())


def numbered(tree: Tree) -> Tree:
    """The same tree with leaves 0, 1, 2, ... in the order of `leaves`."""
    numbers = iter(range(len(leaves(tree))))
    return mapped(lambda _: next(numbers), tree)


def broadcast_prefix(prefix: Tree, tree: Tree, name: str = "") -> list[Any]:
    """One leaf of `prefix` for every leaf of `tree`: a leaf in the place of a branch stands for all of it.

    >>> broadcast_prefix(("a", "b"), (1, {"w": 2, "v": 3}))
    ['a', 'b', 'b']
    """
    options: Any = {"children": _sorted_children, "error": StructureError}
    what = (name, "layouts")
    branches = prefix_branches(prefix, tree, lambda x: _sorted_children(x) is None, what, **options)
    return [value for _, value, branch in branches for _ in leaves(branch)]


def _sorted_children(tree: Tree) -> dict[Any, Any] | None:
    branches = children(tree)
    if isinstance(tree, dict):
        return {key: tree[key] for key in sorted(tree, key=str)}
    return branches


Devices = tuple[Block, ...]  # the blocks of one array, one per device
Derivatives = dict[int, tuple[Devices, Devices, float]]  # see `derivatives`
AnyPlan = Plan | ContractionPlan
OUTPUT = "output"  # the name of a result that is one array


@dataclass(frozen=True)
class Update:
    """One optimiser step on the arguments at `positions`, with the leaves `arrays`."""

    function: bytes  # for torch a list of tensors -> the optimiser, for JAX (values, gradients) -> values
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

    function: bytes | AnyPlan  # packed, see `pickling`; or a plan: its bytes and seconds are measured too
    mesh: Mesh  # without axes: one device with unsharded arrays
    arguments: Tree  # of numbers of `inputs`, one branch per argument
    inputs: tuple[Devices, ...]
    shardings: tuple[Sharding, ...]
    results: dict[str, Result] | None  # None for a reference, which draws its own cotangents
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
    """Results of a function: outputs by name, gradients and updated values by number of input."""

    outputs: Mapping[str, Devices]
    gradients: Mapping[int, Devices] | None  # None if the shapes of outputs do not fit the cotangents
    updated: Mapping[int, Devices] = field(default_factory=dict)
    cotangents: Mapping[str, Devices] = field(default_factory=dict)  # as `tree`, `derivatives`: a reference's
    tree: Tree = None
    derivatives: Derivatives = field(default_factory=dict)  # see `differences`
    forward_bytes: int | None = None  # that the busiest device received; None if not measured
    backward_bytes: int | None = None
    seconds: float | None = None  # of one forward and backward pass after a first one
    draws: bool = False  # numbers of the framework's own generator, as dropout does


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
        own, others = (", ".join(names) or "nothing" for names in (outputs, results))
        hint = "dicts, lists and tuples of arrays with the same names on both sides"
        raise StructureError(
            f"the {runtime} function returns {own}, the reference returns {others}", hint=hint
        )
    return outputs


_DIRECTIONS = 3
# Relative to the largest value of a block. A kink (relu, max) that lies within one is not within both.
_STEPS = (1e-5, 1e-7)


def derivatives(
    loss: Callable[[Sequence[Block]], float], inputs: Sequence[Block], gradients: Mapping[int, Devices]
) -> Derivatives:
    """By number of input, along a few directions: the gradient's derivatives, differences, and their size.
    loss: takes blocks of float64 or complex128; blocks of whole numbers stay as they are."""
    wide = [in_double(x) if i in gradients else x for i, x in enumerate(inputs)]
    by_input: Derivatives = {}
    for i, (block,) in gradients.items():
        rng, gradient, x = np.random.default_rng((13, i)), in_double(block), wide[i]
        length = float(np.abs(x).max(initial=0)) or 1.0
        got, want, size = np.zeros(_DIRECTIONS), np.zeros(_DIRECTIONS), 0.0
        for k in range(_DIRECTIONS):
            v = length * rng.normal(size=x.shape)
            if x.dtype.kind == "c":
                v = v + 1j * length * rng.normal(size=x.shape)
            got[k] = np.vdot(gradient, v).real
            size = max(size, float(np.linalg.norm(gradient * v)))
            for step in _STEPS:
                after, before = (loss([*wide[:i], x + s * v, *wide[i + 1 :]]) for s in (step, -step))
                slope = (after - before) / (2 * step)
                if step == _STEPS[0] or abs(slope - got[k]) < abs(want[k] - got[k]):
                    want[k] = slope
                if abs(want[k] - got[k]) <= DERIVATIVE / 10 * size:
                    break
        by_input[i] = (got,), (want,), size
    return by_input
