"""Functions of users as the workers call them: trees of arguments and outputs, cotangents, differences."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np

from xshard.layout import Mesh
from xshard.steps.base import Block
from xshard.testing.diagnosis.evidence import in_double
from xshard.testing.question import OUTPUT, Devices, Result, Slope, Slopes, StructureError, Tree
from xshard.tolerances import DERIVATIVE
from xshard.trees import children, prefix_branches

Loss = Callable[[Sequence[Block]], float]

_N_DIRECTIONS = 3
# Of a difference, relative to the largest value of a block. A kink (relu, max) that lies within one
# step does not lie within both.
_STEPS = (1e-5, 1e-7)


def leaves(tree: Tree, name: str = "") -> dict[str, Any]:
    """List the arrays of a tree (nested dicts, lists and tuples) by name, in order.

    A name is that of the tree and the keys that lead to the array. Keys of a dict are sorted, as
    in JAX. None is a tree without arrays.

    >>> leaves({"w": 1, "b": (2, 3)}, "x")
    {"x['b'][0]": 2, "x['b'][1]": 3, "x['w']": 1}
    """
    if tree is None:
        return {}
    branches = _sorted_children(tree)
    if branches is None:
        return {name: tree}
    arrays: dict[str, Any] = {}
    for key, branch in branches.items():
        arrays.update(leaves(branch, f"{name}[{key!r}]"))
    return arrays


def mapped(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """Apply a function to every leaf of a tree: `str` and `(1, None)` -> `('1', None)`."""
    if tree is None:
        return None
    branches = _sorted_children(tree)
    if branches is None:
        return function(tree)
    new_branches = {key: mapped(function, branch) for key, branch in branches.items()}
    if isinstance(tree, dict):
        return new_branches
    if hasattr(tree, "_fields"):  # a NamedTuple takes its fields one by one
        return type(tree)(*new_branches.values())
    return type(tree)(new_branches.values())


def numbered(tree: Tree) -> Tree:
    """Replace the leaves of a tree by 0, 1, 2, ... in the order of `leaves`."""
    numbers = count()  # `mapped` visits leaves in the same order
    return mapped(lambda _: next(numbers), tree)


def broadcast_prefix(prefix: Tree, tree: Tree, name: str = "") -> list[Any]:
    """List the entry of `prefix` that belongs to each leaf of `tree`, as with `in_specs` of JAX.

    An entry of `prefix` that stands in the place of a whole branch is for all leaves of that
    branch.

    Raises:
        StructureError: The prefix is another tree; the message has `name`.

    >>> broadcast_prefix(("a", "b"), (1, {"w": 2, "v": 3}))
    ['a', 'b', 'b']
    """
    # (name, value, branch) for each value of the prefix: ("[1]", "b", {"w": 2, "v": 3}) and so on.
    branches = prefix_branches(
        prefix,
        tree,
        _is_leaf,
        (name, "layouts"),  # what messages call the tree, and the values of the prefix
        children=_sorted_children,
        error=StructureError,
    )
    values: list[Any] = []
    for _, value, branch in branches:
        values += [value] * len(leaves(branch))
    return values


def _is_leaf(tree: Tree) -> bool:
    return _sorted_children(tree) is None


def _sorted_children(tree: Tree) -> dict[Any, Any] | None:
    """Return the branches of a tree by key, those of a dict sorted; None for a leaf."""
    if isinstance(tree, dict):
        return {key: tree[key] for key in sorted(tree, key=str)}
    return children(tree)


def draw(number: int, shape: Sequence[int], dtype: np.dtype[Any]) -> Block:
    """Draw the random cotangent of output `number`: the same in every process."""
    rng = np.random.default_rng((7, number))
    return _draw_normal(rng, tuple(shape), is_complex=dtype.kind == "c").astype(dtype)


def _draw_normal(rng: np.random.Generator, shape: tuple[int, ...], is_complex: bool) -> Block:
    values: Block = np.asarray(rng.normal(size=shape))
    if is_complex:
        values = values + 1j * rng.normal(size=shape)
    return values


def called(function: Callable[..., Any], arguments: Sequence[Any], mesh: Mesh) -> Any:
    """Call the function, with `mesh=` if it has such a parameter and the arrays are blocks."""
    # A reference on unsharded arrays may be the same function: there is no mesh to give it.
    if mesh.axes and "mesh" in parameters_of(function):
        return function(*arguments, mesh=mesh)
    return function(*arguments)


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters by name; none if a function has no signature, like torch's own."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def named_outputs(
    returned: Tree, results: dict[str, Result] | None, runtime: str
) -> dict[str, Any]:
    """Name the arrays that a function returned: "output", with the keys of a tree behind it.

    A tuple of two arrays -> {"output[0]": ..., "output[1]": ...}. All runs must return the same
    names as the reference.

    Args:
        returned: One array or a tree of them.
        results: The results of the reference, by name; None if this is the reference.
        runtime: The function's framework, for the message.

    Raises:
        StructureError: The reference returned others, or there is no array to compare.
    """
    outputs = leaves(returned, OUTPUT)
    if not outputs:
        raise StructureError(
            f"the {runtime} function returns nothing that can be compared", hint="return the arrays"
        )
    if results is not None and list(outputs) != list(results):
        found = ", ".join(outputs)
        expected = ", ".join(results)
        raise StructureError(
            f"the {runtime} function returns {found}, the reference returns {expected}",
            hint="dicts, lists and tuples of arrays with the same names on both sides",
        )
    return outputs


def measure_slopes(loss: Loss, inputs: Sequence[Block], gradients: Mapping[int, Devices]) -> Slopes:
    """Measure slopes of a loss along random directions, by its gradients and by differences.

    Where the gradients are right, both agree. The caller compares them.

    Args:
        loss: A function of the blocks of one device. It is given those that have gradients in
            float64 or complex128.
        inputs: The blocks.
        gradients: The gradients by number of input, each on one device.

    Returns:
        By number of input, the slopes along each direction by the gradient and by differences.
    """
    # Differences in single precision would have no right digits.
    wide = [in_double(x) if i in gradients else x for i, x in enumerate(inputs)]
    slopes: Slopes = {}
    for i, (gradient,) in gradients.items():
        rng = np.random.default_rng((13, i))  # the same directions in every run
        loss_of_input = _loss_of_input(loss, wide, i)
        slopes[i] = _slopes_of_input(loss_of_input, wide[i], in_double(gradient), rng)
    return slopes


def _loss_of_input(loss: Loss, inputs: Sequence[Block], i: int) -> Callable[[Block], float]:
    """Make the loss a function of input `i` alone."""

    def loss_of_input(x: Block) -> float:
        return loss([*inputs[:i], x, *inputs[i + 1 :]])

    return loss_of_input


def _slopes_of_input(
    loss: Callable[[Block], float], x: Block, gradient: Block, rng: np.random.Generator
) -> Slope:
    """Measure the slopes of a loss of one array along random directions, in two ways.

    Along a direction d, the gradient g gives the slope g . d, and differences give
    (loss(x + h d) - loss(x - h d)) / 2h. Returns both, [directions], and a size to which their
    difference can be compared.
    """
    # Directions are scaled to the largest value of the array, so that steps suit it.
    length = float(np.abs(x).max(initial=0))
    if length == 0:
        length = 1.0
    by_gradient = np.zeros(_N_DIRECTIONS)
    by_differences = np.zeros(_N_DIRECTIONS)
    size = 0.0
    for k in range(_N_DIRECTIONS):
        direction = length * _draw_normal(rng, x.shape, is_complex=x.dtype.kind == "c")
        by_gradient[k] = np.vdot(gradient, direction).real
        # The slope itself would be no measure: it is near 0 where the loss is level along d.
        size = max(size, float(np.linalg.norm(gradient * direction)))
        by_differences[k] = _nearest_slope(loss, x, direction, by_gradient[k], size)
    return Slope((by_gradient,), (by_differences,), size)


def _nearest_slope(
    loss: Callable[[Block], float], x: Block, direction: Block, expected: float, size: float
) -> float:
    """Return the slope of a loss along a direction by central differences, with the best step.

    Large steps are wrong where the loss is curved, small ones by rounding. So several are tried,
    until one is within a tenth of the tolerance (relative to `size`) of the slope that the gradient
    gives, `expected`. Without one, the nearest is returned.
    """
    nearest = np.inf
    for step in _STEPS:
        rise = loss(x + step * direction) - loss(x - step * direction)
        slope = rise / (2 * step)
        # If the first step gives NaN, no other slope is nearer: NaN is returned and reported.
        if step == _STEPS[0] or abs(slope - expected) < abs(nearest - expected):
            nearest = slope
        if abs(nearest - expected) <= DERIVATIVE / 10 * size:
            break
    return float(nearest)
