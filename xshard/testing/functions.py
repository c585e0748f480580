"""Functions of users as the workers call them: trees of arguments and outputs, cotangents, differences."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from xshard.layout import Mesh
from xshard.steps.base import Block
from xshard.testing.diagnosis.evidence import in_double
from xshard.testing.question import OUTPUT, Devices, Result, Slopes, StructureError, Tree
from xshard.tolerances import DERIVATIVE
from xshard.trees import children, prefix_branches


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
    return (
        {key: tree[key] for key in sorted(tree, key=str)}
        if isinstance(tree, dict)
        else children(tree)
    )


def draw(number: int, shape: Sequence[int], dtype: np.dtype[Any]) -> Block:
    """The random cotangent of output `number`: the same in every process."""
    rng = np.random.default_rng((7, number))
    values = rng.normal(size=tuple(shape))
    if dtype.kind == "c":
        values = values + 1j * rng.normal(size=tuple(shape))
    return values.astype(dtype)


def called(function: Callable[..., Any], arguments: Sequence[Any], mesh: Mesh) -> Any:
    """Call the function, with `mesh=` if it has such a parameter."""
    options = {"mesh": mesh} if mesh.axes and "mesh" in parameters_of(function) else {}
    return function(*arguments, **options)


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters by name; none if a function has no signature, like torch's own."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def named_outputs(
    returned: Tree, results: dict[str, Result] | None, runtime: str
) -> dict[str, Any]:
    """The outputs by name. Raises StructureError if the reference has others."""
    outputs = leaves(returned, OUTPUT)
    if results is not None and list(outputs) != list(results):
        own, others = (", ".join(names) or "nothing" for names in (outputs, results))
        what = f"the {runtime} function returns {own}, the reference returns {others}"
        raise StructureError(
            what, hint="dicts, lists and tuples of arrays with the same names on both sides"
        )
    return outputs


_DIRECTIONS = 3
# Relative to the largest value of a block. A kink (relu, max) that lies within one is not within both.
_STEPS = (1e-5, 1e-7)


def derivatives(
    loss: Callable[[Sequence[Block]], float],
    inputs: Sequence[Block],
    gradients: Mapping[int, Devices],
) -> Slopes:
    """By number of input, along a few directions: the gradient's derivatives, differences, and their size.
    loss: takes blocks of float64 or complex128; blocks of whole numbers stay as they are.
    """
    wide = [in_double(x) if i in gradients else x for i, x in enumerate(inputs)]
    by_input: Slopes = {}
    for i, (block,) in gradients.items():
        rng = np.random.default_rng((13, i))
        gradient = in_double(block)
        x = wide[i]
        length = float(np.abs(x).max(initial=0)) or 1.0
        got = np.zeros(_DIRECTIONS)
        want = np.zeros(_DIRECTIONS)
        size = 0.0
        for k in range(_DIRECTIONS):
            v = length * rng.normal(size=x.shape)
            if x.dtype.kind == "c":
                v = v + 1j * length * rng.normal(size=x.shape)
            got[k] = np.vdot(gradient, v).real
            size = max(size, float(np.linalg.norm(gradient * v)))
            for step in _STEPS:
                after, before = (
                    loss([*wide[:i], x + s * v, *wide[i + 1 :]]) for s in (step, -step)
                )
                slope = (after - before) / (2 * step)
                if step == _STEPS[0] or abs(slope - got[k]) < abs(want[k] - got[k]):
                    want[k] = slope
                if abs(want[k] - got[k]) <= DERIVATIVE / 10 * size:
                    break
        by_input[i] = (got,), (want,), size
    return by_input
