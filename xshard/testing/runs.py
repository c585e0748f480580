"""The input of a comparison, checked, and its runs: one device first, which is the truth, then every mesh."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np

from xshard import dtypes, reference
from xshard.errors import DtypeError, MeshError, XshardError
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.layout import check_axes
from xshard.layout.lengths import global_shape
from xshard.notation.overlap import Fold
from xshard.notation.parser import Dim
from xshard.runtimes.backends import BACKENDS, check_size, kit_process
from xshard.steps.base import Block
from xshard.testing.diagnosis.evidence import whole
from xshard.testing.functions import broadcast_prefix, leaves, mapped, numbered, parameters_of
from xshard.testing.moves import Seen
from xshard.testing.pickling import packed
from xshard.testing.plans import random_blocks
from xshard.testing.question import (
    Answer,
    Devices,
    Question,
    Result,
    Slopes,
    StructureError,
    Tree,
    Update,
)

Meshes = Mesh | str | Sequence[Mesh | str]


@dataclass(frozen=True)
class Problem:
    """Checked input: names, values and layouts of all arrays; arguments and output layouts as trees."""

    names: tuple[str, ...]
    values: tuple[Block, ...]
    layouts: tuple[Layout, ...]
    outputs: Tree
    meshes: tuple[Mesh, ...]
    arguments: Tree

    def inputs(self, shardings: Sequence[Sharding]) -> tuple[Devices, ...]:
        """The blocks of every argument."""
        pairs = zip(self.values, shardings, strict=True)
        return tuple(blocks_of(x, sharding, i) for i, (x, sharding) in enumerate(pairs))

    def shardings(self, mesh: Mesh) -> tuple[Sharding, ...]:
        pairs = zip(self.layouts, self.values, strict=True)
        return tuple(Sharding(layout, mesh, x.shape) for layout, x in pairs)


def problem(
    function: Callable[..., Any], args: Sequence[Tree], layouts: Any, mesh: Meshes | None
) -> Problem:
    """The arguments of `assert_equivalent`, checked. mesh: None for `usual_meshes`."""
    args = tuple(args)
    if not (isinstance(layouts, tuple | list) and len(layouts) == 2):
        hint = 'as in layouts=(("b s/sp d", "d f/tp"), "b s/sp f/tp")'
        raise StructureError(
            "layouts= is a pair: of the arguments, and of what is returned", hint=hint
        )
    inputs, outputs = layouts
    if not isinstance(inputs, tuple | list) or len(inputs) != len(args):
        n = len(inputs) if isinstance(inputs, tuple | list) else 1
        raise StructureError(
            f"{len(args)} arguments, layouts of {n}", hint="a layout, or a tree, for each"
        )
    names = []
    values = []
    parsed = []
    for title, argument, prefix in zip(_titles(function, len(args)), args, inputs, strict=True):
        own = broadcast_prefix(prefix, argument, title)
        for (name, value), layout in zip(leaves(argument, title).items(), own, strict=True):
            names.append(name)
            values.append(_array(value, name))
            parsed.append(_parsed(layout, name))
    outputs = mapped(lambda layout: _parsed(layout, "output"), outputs)
    if mesh is None:
        every = (*parsed, *leaves(outputs).values())
        mesh = usual_meshes(dict.fromkeys(axis for layout in every for axis in layout.axes))
    for each in (meshes := _meshes(mesh)):
        for name, value, layout in zip(names, values, parsed, strict=True):
            _check(name, value, layout, each)
        for layout in leaves(outputs).values():
            check_axes(layout, each)
    return Problem(tuple(names), tuple(values), tuple(parsed), outputs, meshes, numbered(args))


def whole_layout(ndim: int) -> Layout:
    """The layout of an array on one device."""
    return Layout(tuple(Dim(f"d{i}") for i in range(ndim)))


def blocks_of(x: Block, sharding: Sharding, seed: int) -> Devices:
    """A whole array -> blocks under any linear layout; contributions are arbitrary but for their sum."""
    layout = sharding.layout
    mesh = sharding.mesh
    open_ = layout.tagged("sum", "mean") or any(
        isinstance(dim.overlap, Fold) for dim in layout.dims
    )
    if not open_ or x.dtype.itemsize < 4 or x.dtype.kind not in "fci":
        return tuple(reference.scatter(x, layout, mesh))
    rng = np.random.default_rng((11, seed))
    name = dtypes.name_of(x.dtype)
    noise = random_blocks(
        rng, layout, mesh, x.shape, name, mesh.n_devices if layout.tagged("mean") else 1
    )
    if (
        x.dtype.kind in "fc"
    ):  # as large as the array, by a power of two, so that nothing is rounded twice
        largest = float(np.abs(x).max(initial=0)) or 1.0
        noise = [block * x.dtype.type(2.0 ** round(np.log2(largest) - 2)) for block in noise]
    rest = reference.scatter(x - reference.gather(noise, layout, mesh, x.shape), layout, mesh)
    return tuple((a + b).astype(x.dtype) for a, b in zip(rest, noise, strict=True))


def cotangents_of(c: Block, sharding: Sharding, seed: int) -> Devices:
    """The cotangent of a global array -> its blocks: under the dual layout, times 1/n for a mean."""
    blocks = blocks_of(c, sharding.dual, seed)
    scale = float(sharding.scale)
    return tuple((block * scale).astype(c.dtype) for block in blocks) if scale != 1 else blocks


def wanted_gradient(gradient: Block, sharding: Sharding) -> Devices:
    """The gradient of a whole array -> gradients of its blocks, as far as the layout determines them."""
    scale = gradient.dtype.type(float(sharding.scale))
    return tuple(
        block * scale for block in reference.scatter(gradient, sharding.layout.dual, sharding.mesh)
    )


def _titles(function: Callable[..., Any], n: int) -> list[str]:
    """Names of the arguments: the names of the function's parameters, if it has any."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [p.name for p in parameters_of(function).values() if p.kind in kinds][:n]
    return [*named, *(f"args[{i}]" for i in range(len(named), n))]


def _array(value: Any, name: str) -> Block:
    if not hasattr(value, "shape"):
        hint = "let the functions close over other values; trees are dicts, lists and tuples"
        raise StructureError(f"{name} is a {type(value).__name__}, arguments are arrays", hint=hint)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        hint = "tensors are detached and on the CPU; bfloat16 is numpy's with ml_dtypes"
        raise StructureError(
            f"{name} cannot be read as a numpy array: {error}", hint=hint
        ) from None
    dtypes.name_of(array.dtype)
    if (
        array.dtype.kind in "iu"
        and array.dtype.itemsize == 8
        and array.size
        and abs(array).max() >= 2**31
    ):
        raise DtypeError(f"{name} has whole numbers of more than 32 bits, which JAX would narrow")
    return array


def _parsed(layout: Any, name: str) -> Layout:
    if not isinstance(layout, Layout | str):
        why = f"the layout of {name} is a {type(layout).__name__}"
        raise StructureError(why, hint='text, as in "n/dp d"')
    parsed = Layout.parse(layout)
    parsed.dual  # noqa: B018  max and min have none: refused
    return parsed


def _check(name: str, value: Block, layout: Layout, mesh: Mesh) -> None:
    try:
        Sharding(layout, mesh, value.shape)
    except XshardError as error:
        why = f"{name} of shape {value.shape} does not fit its layout: {error.reason}"
        text = error.text
        raise type(error)(why, text=text or str(layout), span=error.span, hint=error.hint) from None


def _meshes(mesh: Meshes) -> tuple[Mesh, ...]:
    several = [mesh] if isinstance(mesh, Mesh | str) else list(mesh)
    meshes = [
        m for each in several for m in (parse_meshes(each) if isinstance(each, str) else [each])
    ]
    if not meshes or not all(each.axes for each in meshes):
        raise MeshError(
            "a mesh without axes" if meshes else "no mesh", hint='as in mesh="dp=2,tp=2"'
        )
    for each in meshes:
        check_size(each.n_devices)
    return tuple(meshes)


def usual_meshes(axes: Iterable[str]) -> list[Mesh]:
    """Meshes that tell sizes and axes apart: each axis alone, all with 2 devices, and the first with 3.

    >>> usual_meshes(["dp"]), usual_meshes(["dp", "tp"])[1:]
    ([Mesh(dp=2), Mesh(dp=3)], [Mesh(dp=1, tp=3), Mesh(dp=2, tp=2), Mesh(dp=3, tp=2)])
    """
    twos = dict.fromkeys(axes, 2)
    ones = dict.fromkeys(axes, 1)
    alone = [{**ones, axis: 2 + i % 2} for i, axis in enumerate(ones)]
    threes = [{**twos, axis: 3} for axis in islice(twos, 1)]
    return list(dict.fromkeys(map(Mesh, (*alone, twos, *threes))))


def parse_meshes(text: str) -> list[Mesh]:
    """`"dp=2,cp=2;cp=4"` -> the meshes. Raises MeshError, also for more devices than this host has."""
    meshes = [Mesh.parse(part.strip()) for part in text.split(";") if part.strip()]
    for mesh in meshes:
        check_size(mesh.n_devices)
    return meshes


Side = Literal["torch", "jax"]
Function = Callable[..., Any]
SIDES: tuple[Side, Side] = ("torch", "jax")


@dataclass(frozen=True)
class Truth:
    """The right values: whole arrays by name of output and number of argument, and their source."""

    outputs: dict[str, Block]
    layouts: dict[str, Layout]
    cotangents: dict[str, Block]
    gradients: dict[int, Block]
    updated: dict[int, Block]
    source: str
    mesh: Mesh
    derivatives: Slopes
    draws: bool


class RunAnswer(NamedTuple):
    """An answer, and where it is from."""

    runtime: Side
    mesh: Mesh
    answer: Answer


@dataclass(frozen=True)
class Runs:
    """A problem, and what all its questions have in common. typed: `check_vma` of JAX."""

    problem: Problem
    functions: dict[str, bytes]
    updates: dict[str, Update]
    typed: bool
    timeout_s: float
    preload: tuple[str, ...]
    differences: bool = False

    def truth(self, runtime: Side, function: bytes, mesh: Mesh) -> Truth:
        """Results of a function on one device, for unsharded arrays or for blocks on a mesh of ones."""
        problem = self.problem
        is_whole = not mesh.axes
        if is_whole:
            problem = replace(problem, layouts=tuple(whole_layout(x.ndim) for x in problem.values))
        try:
            shardings = problem.shardings(mesh)
        except XshardError as error:
            why = f"a layout does not fit one device: {error.reason}"
            raise StructureError(why, text=error.text, hint="pass reference=") from None
        answer = self._answer(runtime, self._question(runtime, function, mesh, shardings, None))
        layouts = broadcast_prefix(problem.outputs, answer.tree, "output")
        declared = dict(zip(answer.outputs, layouts, strict=True))
        outputs = {}
        for name, (block,) in answer.outputs.items():
            layout = whole_layout(block.ndim) if is_whole else declared[name]
            outputs[name] = Sharding(
                layout, mesh, global_shape(layout, mesh, block.shape, str(layout))
            )
        return Truth(
            {name: whole(blocks, outputs[name]) for name, blocks in answer.outputs.items()},
            declared,
            {name: whole(blocks, outputs[name].dual) for name, blocks in answer.cotangents.items()},
            {i: whole(blocks, shardings[i].dual) for i, blocks in (answer.gradients or {}).items()},
            {i: whole(blocks, shardings[i]) for i, blocks in answer.updated.items()},
            "the reference" if is_whole else f"{runtime} on one device",
            mesh,
            answer.derivatives,
            answer.draws,
        )

    def run(self, runtime: Side, mesh: Mesh, truth: Truth) -> RunAnswer:
        """Results of a runtime's function on the blocks of a mesh."""
        return RunAnswer(
            runtime, mesh, self._answer(runtime, self._on_blocks(runtime, mesh, truth))
        )

    def seen(self, runtime: Side, mesh: Mesh, truth: Truth) -> list[Seen]:
        """The inputs of the redistributions of such a run, and the cotangents of their results."""
        seen: list[Seen] = self._ask(
            runtime, "seen", self._on_blocks(runtime, mesh, truth), quiet=True
        )
        return seen

    def _on_blocks(self, runtime: Side, mesh: Mesh, truth: Truth) -> Question:
        results = {}
        for i, (name, output) in enumerate(truth.outputs.items()):
            sharding = Sharding(truth.layouts[name], mesh, output.shape)
            c = truth.cotangents.get(name)
            results[name] = Result(sharding, None if c is None else cotangents_of(c, sharding, i))
        return self._question(
            runtime, self.functions[runtime], mesh, self.problem.shardings(mesh), results
        )

    def _question(
        self,
        runtime: Side,
        function: bytes,
        mesh: Mesh,
        shardings: tuple[Sharding, ...],
        results: Any,
    ) -> Question:
        arrays = self.problem.arguments, self.problem.inputs(shardings), shardings
        wide = any(x.dtype.name in ("float64", "complex128") for x in self.problem.values)
        mode = "vma" if self.typed else "novma"
        differences = self.differences and results is None
        return Question(
            function, mesh, *arrays, results, self.updates.get(runtime), wide, mode, differences
        )

    def _answer(self, runtime: Side, question: Question) -> Answer:
        answers: list[Answer] = self._ask(runtime, "answers", [question])
        return answers[0]

    def _ask(self, runtime: Side, name: str, asked: Any, *, quiet: bool = False) -> Any:
        """Call a function of the bridge's kit in its process."""
        process = kit_process(runtime, self.preload if runtime == "torch" else ())
        function = BACKENDS[runtime].function(f"worker.{name}")
        return process.ask(function, asked, timeout_s=self.timeout_s, quiet=quiet)


def mesh_of_ones(meshes: Sequence[Mesh]) -> Mesh:
    """One device, with the axes of all these meshes."""
    return Mesh({axis: 1 for mesh in meshes for axis in mesh.axes})


def updates_of(
    problem: Problem,
    args: Sequence[Tree],
    parameters: Sequence[int],
    optimisers: Sequence[Function] | None,
) -> dict[str, Update]:
    """The optimiser step of each runtime. Raises StructureError for parameters that cannot have one."""
    if bool(parameters) != (optimisers is not None):
        hint = "as in parameters=[1], optimisers=(torch_factory, jax_update)"
        raise StructureError("parameters= and optimisers= belong together", hint=hint)
    if optimisers is None:
        return {}
    numbers: list[int] = []
    for position in parameters:
        if not 0 <= position < len(args):
            raise StructureError(f"no argument {position} of {len(args)}", hint="counted from 0")
        numbers += leaves(problem.arguments[position]).values()
    for i in numbers:
        layout = problem.layouts[i]
        if layout.dual != layout:
            why = f"{problem.names[i]} has gradients under '{layout.dual}', which no optimiser can add up"
            hint = "no tags and no overlaps: the function itself redistributes to copies"
            raise StructureError(why, text=str(layout), hint=hint)
    by_side = zip(SIDES, optimisers, strict=True)
    return {side: Update(packed(f), tuple(parameters), tuple(numbers)) for side, f in by_side}
