"""The input of a comparison, checked before anything runs: arguments, layouts, meshes and optimisers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from xshard import dtypes
from xshard.errors import DtypeError, MeshError, located
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.layout import check_axes
from xshard.runtimes.backends import check_size
from xshard.steps.base import Block
from xshard.testing.blocks import scatter_with_random_addends
from xshard.testing.functions import broadcast_prefix, leaves, mapped, numbered, parameters_of
from xshard.testing.pickling import packed
from xshard.testing.question import Devices, Side, StructureError, Tree, Update

Function = Callable[..., Any]
Meshes = Mesh | str | Sequence[Mesh | str]
SIDES: tuple[Side, Side] = ("torch", "jax")


@dataclass(frozen=True)
class Problem:
    """Checked input of a comparison.

    Attributes:
        names: Of all arrays among the arguments: "x", "w['b']".
        values: The whole arrays, in the same order.
        layouts: Their layouts.
        outputs: Layouts of the outputs, as a tree.
        meshes: All meshes to run on.
        arguments: The arguments as trees of numbers of arrays.
    """

    names: tuple[str, ...]
    values: tuple[Block, ...]
    layouts: tuple[Layout, ...]
    outputs: Tree
    meshes: tuple[Mesh, ...]
    arguments: Tree

    @property
    def arrays(self) -> dict[str, Block]:
        """The whole arrays by name."""
        return dict(zip(self.names, self.values, strict=True))

    def inputs(self, shardings: Sequence[Sharding]) -> tuple[Devices, ...]:
        """Cut every array into blocks."""
        blocks = []
        for i, (x, sharding) in enumerate(zip(self.values, shardings, strict=True)):
            blocks.append(scatter_with_random_addends(x, sharding, seed=i))
        return tuple(blocks)

    def shardings(self, mesh: Mesh) -> tuple[Sharding, ...]:
        """Place the layout of every array on a mesh."""
        pairs = zip(self.layouts, self.values, strict=True)
        return tuple(Sharding(layout, mesh, x.shape) for layout, x in pairs)


def check_problem(
    function: Function, args: Sequence[Tree], layouts: Any, mesh: Meshes | None
) -> Problem:
    """Check the arguments of `assert_equivalent`, and list all arrays with their names and layouts.

    An argument x that is {"w": array, "b": array} gives the arrays "x['b']" and "x['w']". All is checked
    on every mesh before any process is started, so that errors come at once.

    Args:
        function: The names of its parameters become names of arrays.
        args: Trees of whole arrays.
        layouts: A pair: one for each argument, and of the outputs.
        mesh: One or several; None for `usual_meshes` of the axes that the layouts name.

    Raises:
        StructureError: Layouts and arguments are different trees, or leaves are no arrays.
        XshardError: A layout or mesh is wrong, or an array does not fit its layout.
    """
    args = tuple(args)
    input_layouts, output_layouts = _checked_pair(layouts, len(args))
    arrays: list[_Argument] = []
    titles = _argument_names(function, len(args))
    for title, argument, prefix in zip(titles, args, input_layouts, strict=True):
        # One layout in the place of a whole tree is for all its arrays.
        leaf_layouts = broadcast_prefix(prefix, argument, title)
        values = leaves(argument, title)
        for name, layout in zip(values, leaf_layouts, strict=True):
            arrays.append(
                _Argument(name, _read_array(values[name], name), _parse_layout(layout, name))
            )
    outputs = mapped(_parse_layout, output_layouts)

    output_leaves = list(leaves(outputs).values())
    if mesh is None:
        axes: list[str] = []
        for layout in [*(array.layout for array in arrays), *output_leaves]:
            axes += layout.axes
        mesh = usual_meshes(axes)
    # Every array on every mesh, before a process is started: errors name the array.
    meshes = _checked_meshes(mesh)
    for checked_mesh in meshes:
        for array in arrays:
            shape = array.value.shape
            with located(f"{array.name} of shape {shape} does not fit its layout"):
                Sharding(array.layout, checked_mesh, shape)
        for layout in output_leaves:
            check_axes(layout, checked_mesh)
    return Problem(
        names=tuple(array.name for array in arrays),
        values=tuple(array.value for array in arrays),
        layouts=tuple(array.layout for array in arrays),
        outputs=outputs,
        meshes=meshes,
        arguments=numbered(args),
    )


class _Argument(NamedTuple):
    """An array among the arguments."""

    name: str
    value: Block
    layout: Layout


def _checked_pair(layouts: Any, n_arguments: int) -> tuple[Sequence[Tree], Tree]:
    """Split `layouts=` into those of the arguments, one for each, and those of the outputs.

    (("b s/sp d", "d f/tp"), "b s/sp f/tp") is right for two arguments and one output. A layout may
    be a tree of layouts. Raises StructureError for another form.
    """
    if not isinstance(layouts, tuple | list) or len(layouts) != 2:
        raise StructureError(
            "layouts= is a pair: of the arguments, and of what is returned",
            hint='as in layouts=(("b s/sp d", "d f/tp"), "b s/sp f/tp")',
        )
    inputs, outputs = layouts
    # A text alone, in place of a tuple of texts, would pass as a sequence of letters.
    is_sequence = isinstance(inputs, tuple | list)
    n_layouts = len(inputs) if is_sequence else 1
    if not is_sequence or n_layouts != n_arguments:
        raise StructureError(
            f"{n_arguments} arguments, layouts of {n_layouts}",
            hint="a layout, or a tree, for each",
        )
    return inputs, outputs


def _argument_names(function: Function, count: int) -> list[str]:
    """Name the arguments: by the function's parameters, then `args[i]`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = parameters_of(function).values()
    # A parameter that takes many arguments, as `*args`, names none of them.
    names = [parameter.name for parameter in parameters if parameter.kind in kinds][:count]
    return names + [f"args[{i}]" for i in range(len(names), count)]


def _read_array(value: Any, name: str) -> Block:
    """Convert an argument of a test to a numpy array: a numpy or JAX array, or a torch tensor.

    `name` is its name in errors, such as "x['w']".

    Raises:
        StructureError: It is no array.
        DtypeError: It has a dtype that xshard does not know, or whole numbers that JAX would narrow.
    """
    # numpy would make arrays of numbers and texts too, which are rather options of the function.
    if not hasattr(value, "shape"):
        raise StructureError(
            f"{name} is a {type(value).__name__}, arguments are arrays",
            hint="let the functions close over other values; trees are dicts, lists and tuples",
        )
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise StructureError(
            f"{name} cannot be read as a numpy array: {error}",
            hint="tensors are detached and on the CPU; bfloat16 is numpy's with ml_dtypes",
        ) from None
    dtypes.name_of(array.dtype)  # raises for dtypes that xshard does not know

    has_long_integers = array.dtype.kind in "iu" and array.dtype.itemsize == 8
    if has_long_integers and array.size and abs(array).max() >= 2**31:
        raise DtypeError(f"{name} has whole numbers of more than 32 bits, which JAX would narrow")
    return array


def _parse_layout(layout: Any, name: str = "output") -> Layout:
    """Parse a layout that has a dual. Raises LinearityError for a max or min."""
    if not isinstance(layout, Layout | str):
        raise StructureError(
            f"the layout of {name} is a {type(layout).__name__}", hint='text, as in "n/dp d"'
        )
    parsed = Layout.parse(layout)
    _ = parsed.dual  # raises if gradients have no layout
    return parsed


def _checked_meshes(meshes: Meshes) -> tuple[Mesh, ...]:
    """Read one or several meshes. Raises MeshError for none, for one without axes, for too many devices."""
    if isinstance(meshes, Mesh | str):
        meshes = [meshes]
    checked: list[Mesh] = []
    for mesh in meshes:
        checked += parse_meshes(mesh) if isinstance(mesh, str) else [mesh]
    if not checked:
        raise MeshError("no mesh", hint='as in mesh="dp=2,tp=2"')
    if not all(mesh.axes for mesh in checked):
        raise MeshError("a mesh without axes", hint='as in mesh="dp=2,tp=2"')
    for mesh in checked:
        check_size(mesh.n_devices)
    return tuple(checked)


def usual_meshes(axes: Iterable[str]) -> list[Mesh]:
    """List meshes that tell sizes and axes apart: each axis alone, all with 2 devices, the first with 3.

    >>> usual_meshes(["dp"]), usual_meshes(["dp", "tp"])[1:]
    ([Mesh(dp=2), Mesh(dp=3)], [Mesh(dp=1, tp=3), Mesh(dp=2, tp=2), Mesh(dp=3, tp=2)])
    """
    twos = dict.fromkeys(axes, 2)  # axes that several layouts name, once
    ones = dict.fromkeys(twos, 1)
    # Neighbouring axes alone have 2 and 3 devices: exchanged axes have other sizes then.
    sizes = [{**ones, axis: 2 + i % 2} for i, axis in enumerate(ones)]
    sizes.append(twos)  # small, so that it runs on most machines
    for first_axis in islice(twos, 1):
        sizes.append({**twos, first_axis: 3})
    return list(dict.fromkeys(map(Mesh, sizes)))  # with one axis, two are equal


def parse_meshes(text: str) -> list[Mesh]:
    """Parse meshes: "dp=2,cp=2;cp=4" has two. Raises MeshError, also for more devices than this host has."""
    meshes = [Mesh.parse(part.strip()) for part in text.split(";") if part.strip()]
    for mesh in meshes:
        check_size(mesh.n_devices)
    return meshes


def mesh_of_ones(meshes: Sequence[Mesh]) -> Mesh:
    """Return a mesh of one device with the axes of all these meshes."""
    sizes: dict[str, int] = {}
    # Functions name these axes also where one device runs them.
    for mesh in meshes:
        sizes.update(dict.fromkeys(mesh.axes, 1))
    return Mesh(sizes)


def updates_of(
    problem: Problem,
    args: Sequence[Tree],
    parameters: Sequence[int],
    optimisers: Sequence[Function] | None,
) -> dict[str, Update]:
    """Pickle the optimiser of each framework, to compare parameters after one step, too.

    Args:
        problem: The checked input.
        args: The arguments as the user gave them.
        parameters: Positions of the arguments that the optimiser updates.
        optimisers: One for torch and one for JAX. None: no step is taken.

    Returns:
        What to send to the processes, by framework; {} without optimisers.

    Raises:
        StructureError: Parameters that cannot have a step, or parameters without optimisers.
    """
    if bool(parameters) != (optimisers is not None):
        raise StructureError(
            "parameters= and optimisers= belong together",
            hint="as in parameters=[1], optimisers=(torch_factory, jax_update)",
        )
    if optimisers is None:
        return {}

    numbers: list[int] = []
    for position in parameters:
        if not 0 <= position < len(args):
            raise StructureError(f"no argument {position} of {len(args)}", hint="counted from 0")
        numbers += leaves(problem.arguments[position]).values()
    for i in numbers:
        layout = problem.layouts[i]
        # Under a `copy` tag or a halo, a device's gradient is only an addend of the right one: an
        # optimiser that runs on each device would take a wrong step.
        if layout.dual != layout:
            raise StructureError(
                f"{problem.names[i]} has gradients under '{layout.dual}', which no optimiser can add up",
                text=str(layout),
                hint="no tags and no overlaps: the function itself redistributes to copies",
            )

    updates: dict[str, Update] = {}
    for side, optimiser in zip(SIDES, optimisers, strict=True):
        updates[side] = Update(packed(optimiser), tuple(parameters), tuple(numbers))
    return updates
