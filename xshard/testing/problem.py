"""The input of a comparison, checked before anything runs; and global arrays as blocks under a layout."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from xshard import dtypes, reference
from xshard.errors import DtypeError, MeshError, XshardError
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.layout import check_axes
from xshard.notation.overlap import Fold
from xshard.notation.parser import Dim
from xshard.runtimes.backends import check_size
from xshard.steps.base import Block
from xshard.testing.plans import random_blocks
from xshard.testing.question import Devices, parameters_of
from xshard.testing.trees import StructureError, Tree, broadcast_prefix, leaves, mapped, numbered

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
        return tuple(
            blocks_of(x, sharding, i)
            for i, (x, sharding) in enumerate(zip(self.values, shardings, strict=True))
        )

    def shardings(self, mesh: Mesh) -> tuple[Sharding, ...]:
        return tuple(
            Sharding(layout, mesh, x.shape) for layout, x in zip(self.layouts, self.values, strict=True)
        )

    def output_layouts(self, returned: Tree, names: Sequence[str]) -> dict[str, Layout]:
        """The layout of every output. returned: the tree of outputs."""
        return dict(zip(names, broadcast_prefix(self.outputs, returned, "output"), strict=True))


def problem(function: Callable[..., Any], args: Sequence[Tree], layouts: Any, mesh: Meshes | None) -> Problem:
    """The arguments of `assert_equivalent`, checked. mesh: None for `usual_meshes`."""
    args = tuple(args)
    if not (isinstance(layouts, tuple | list) and len(layouts) == 2):
        raise StructureError(
            "layouts= is a pair: of the arguments, and of what is returned",
            hint='as in layouts=(("b s/sp d", "d f/tp"), "b s/sp f/tp")',
        )
    inputs, outputs = layouts
    if not isinstance(inputs, tuple | list) or len(inputs) != len(args):
        n = len(inputs) if isinstance(inputs, tuple | list) else 1
        raise StructureError(f"{len(args)} arguments, layouts of {n}", hint="a layout, or a tree, for each")
    names, values, parsed = [], [], []
    for title, argument, prefix in zip(_titles(function, len(args)), args, inputs, strict=True):
        for (name, value), layout in zip(
            leaves(argument, title).items(), broadcast_prefix(prefix, argument, title), strict=True
        ):
            names.append(name)
            values.append(_array(value, name))
            parsed.append(_parsed(layout, name))
    outputs = mapped(lambda layout: _parsed(layout, "output"), outputs)
    if mesh is None:
        every = (*parsed, *leaves(outputs).values())
        mesh = usual_meshes(dict.fromkeys(axis for layout in every for axis in layout.axes))
    meshes = _meshes(mesh)
    for name, value, layout in zip(names, values, parsed, strict=True):
        for each in meshes:
            _check(name, value, layout, each)
    for layout in leaves(outputs).values():
        for each in meshes:
            check_axes(layout, each)
    return Problem(tuple(names), tuple(values), tuple(parsed), outputs, meshes, numbered(args))


def whole_layout(ndim: int) -> Layout:
    """The layout of an array on one device."""
    return Layout(tuple(Dim(f"d{i}") for i in range(ndim)))


def blocks_of(x: Block, sharding: Sharding, seed: int) -> Devices:
    """A whole array -> blocks under any linear layout; contributions are arbitrary but for their sum."""
    layout, mesh = sharding.layout, sharding.mesh
    open_ = layout.tagged("sum", "mean") or any(isinstance(dim.overlap, Fold) for dim in layout.dims)
    if not open_ or x.dtype.itemsize < 4 or x.dtype.kind not in "fci":
        return tuple(reference.scatter(x, layout, mesh))
    rng, name = np.random.default_rng((11, seed)), dtypes.name_of(x.dtype)
    noise = random_blocks(rng, layout, mesh, x.shape, name, mesh.n_devices if layout.tagged("mean") else 1)
    if x.dtype.kind in "fc":  # as large as the array, by a power of two, so that nothing is rounded twice
        largest = float(np.abs(x).max(initial=0)) or 1.0
        noise = [block * x.dtype.type(2.0 ** round(np.log2(largest) - 2)) for block in noise]
    rest = x - reference.gather(noise, layout, mesh, x.shape)
    return tuple(
        (a + b).astype(x.dtype) for a, b in zip(reference.scatter(rest, layout, mesh), noise, strict=True)
    )


def cotangents_of(c: Block, sharding: Sharding, seed: int) -> Devices:
    """The cotangent of a global array -> its blocks: under the dual layout, times 1/n for a mean."""
    blocks = blocks_of(c, sharding.with_layout(sharding.layout.dual), seed)
    scale = float(sharding.scale)
    return tuple((block * scale).astype(c.dtype) for block in blocks) if scale != 1 else blocks


def wanted_gradient(gradient: Block, sharding: Sharding) -> Devices:
    """The gradient of a whole array -> gradients of its blocks, as far as the layout determines them."""
    dual = sharding.layout.dual
    scale = gradient.dtype.type(float(sharding.scale))
    return tuple(block * scale for block in reference.scatter(gradient, dual, sharding.mesh))


def _titles(function: Callable[..., Any], n: int) -> list[str]:
    """Names of the arguments: the names of the function's parameters, if it has any."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [p.name for p in parameters_of(function).values() if p.kind in kinds][:n]
    return [*named, *(f"args[{i}]" for i in range(len(named), n))]


def _array(value: Any, name: str) -> Block:
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
    dtypes.name_of(array.dtype)
    if array.dtype.kind in "iu" and array.dtype.itemsize == 8 and array.size and abs(array).max() >= 2**31:
        raise DtypeError(f"{name} has whole numbers of more than 32 bits, which JAX would narrow")
    return array


def _parsed(layout: Any, name: str) -> Layout:
    if not isinstance(layout, Layout | str):
        raise StructureError(
            f"the layout of {name} is a {type(layout).__name__}", hint='text, as in "n/dp d"'
        )
    parsed = Layout.parse(layout)
    parsed.dual  # noqa: B018  max and min have none: refused
    return parsed


def _check(name: str, value: Block, layout: Layout, mesh: Mesh) -> None:
    try:
        Sharding(layout, mesh, value.shape)
    except XshardError as error:
        raise type(error)(
            f"{name} of shape {value.shape} does not fit its layout: {error.reason}",
            text=error.text or str(layout),
            span=error.span,
            hint=error.hint,
        ) from None


def _meshes(mesh: Meshes) -> tuple[Mesh, ...]:
    several = [mesh] if isinstance(mesh, Mesh | str) else list(mesh)
    meshes = [m for each in several for m in (parse_meshes(each) if isinstance(each, str) else [each])]
    if not meshes or not all(each.axes for each in meshes):
        raise MeshError(f"{'a mesh without axes' if meshes else 'no mesh'}", hint='as in mesh="dp=2,tp=2"')
    for each in meshes:
        check_size(each.n_devices)
    return tuple(meshes)


def usual_meshes(axes: Iterable[str]) -> list[Mesh]:
    """Meshes that tell sizes and axes apart: each axis alone, all with 2 devices, and the first with 3.

    >>> usual_meshes(["dp"]), usual_meshes(["dp", "tp"])[1:]
    ([Mesh(dp=2), Mesh(dp=3)], [Mesh(dp=1, tp=3), Mesh(dp=2, tp=2), Mesh(dp=3, tp=2)])
    """
    twos, ones = dict.fromkeys(axes, 2), dict.fromkeys(axes, 1)
    alone = [{**ones, axis: 2 + i % 2} for i, axis in enumerate(ones)]
    threes = [{**twos, axis: 3} for axis in islice(twos, 1)]
    return list(dict.fromkeys(map(Mesh, (*alone, twos, *threes))))


def parse_meshes(text: str) -> list[Mesh]:
    """`"dp=2,cp=2;cp=4"` -> the meshes."""
    return [Mesh.parse(part.strip()) for part in text.split(";") if part.strip()]
