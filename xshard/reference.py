"""The reference interpreter: plans run on numpy blocks, one per device, row-major. It is the semantics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xshard import dtypes
from xshard.arguments import lengths_of
from xshard.contractions.plan import ContractionPlan, Part
from xshard.contractions.shapes import named_block
from xshard.errors import DtypeError, ShapeError, api_boundary
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.providers import offered_rows, wanted_rows
from xshard.layout.runs import FILL, Runs, row_numbers
from xshard.notation.maps import Maps
from xshard.plans.max_min import max_min_plans
from xshard.plans.plan import Plan
from xshard.steps.base import REDUCERS, Block
from xshard.steps.exchange.messages import fill_boxes
from xshard.steps.exchange.sources import DimEnd, View, dim_end, views
from xshard.steps.local import Scale

Arrays = Sequence[ArrayLike]  # a block per device


@api_boundary
def scatter(
    x: ArrayLike, layout: Layout | str, mesh: Mesh, *, maps: Maps | None = None
) -> list[Block]:
    """A global array -> the block of every device.

    Under `sum` the first device along the axis holds the value and the others zeros, in a `fold` the device
    that gives a row; under every other tag all hold it. Rows outside the array hold what the boundary says.

    >>> [b.tolist() for b in scatter([0, 1, 2, 3], "s/zigzag(cp)", Mesh(cp=2))]
    [[0, 3], [1, 2]]
    """
    x = np.asarray(x)
    sharding = Sharding(Layout.parse(layout, maps), mesh, x.shape)
    sums = sharding.layout.tagged("sum")
    blocks = []
    for device in range(mesh.n_devices):
        block = np.zeros(sharding.local_shape(device), x.dtype)
        if mesh.index(device, sums) == 0:
            for d, start, stop, value in fill_boxes(sharding, device):
                block[(slice(None),) * d + (slice(start, stop),)] = value
            for view in views(sharding):
                rows = [wanted_rows(*dim)[index] for dim, index in _dims(sharding, view, device)]
                places, index = _places(rows)
                block[places] = view.sign * x[index] if view.sign < 0 else x[index]
        blocks.append(block)
    return blocks


@api_boundary
def gather(
    blocks: Arrays,
    layout: Layout | str,
    mesh: Mesh,
    shape: Sequence[int],
    *,
    maps: Maps | None = None,
) -> NDArray[np.generic]:
    """The block of every device -> the global array. Raises ShapeError for a block that does not fit.

    Addends and contributions are reduced; of several copies of a row one is read, its owner's if there.
    """
    sharding = Sharding(Layout.parse(layout, maps), mesh, lengths_of(shape))
    arrays = checked_blocks(blocks, sharding)
    kinds = [kind for kind, _ in sharding.layout.tags if kind != "copy"]
    op = REDUCERS["sum" if not kinds or kinds[0] in ("sum", "mean") else kinds[0]]
    partial = sharding.layout.tagged("sum", "mean", "max", "min")
    copies = [a for a in mesh.axes if a not in (*sharding.layout.cut_axes, *partial)]
    out: Block = np.zeros(sharding.shape, arrays[0].dtype if arrays else float)
    written = np.zeros(out.shape, bool)
    for device in range(mesh.n_devices):
        if mesh.index(device, copies):
            continue
        for view in views(sharding):
            lists = [offered_rows(*dim)[index] for dim, index in _dims(sharding, view, device)]
            for rows in itertools.product(*lists):
                places, index = _places(rows)
                part = -arrays[device][places] if view.sign < 0 else arrays[device][places]
                out[index] = np.where(written[index], op(out[index], part), part)
                written[index] = True
    if sharding.scale != 1:
        out = Scale(sharding.scale).run([out], sharding)[0]
    return out


@api_boundary
def run(plan: Plan | ContractionPlan, *operands: Arrays) -> list[Block]:
    """Blocks under `plan.src` -> blocks under `plan.dst`; the input is left as it is.

    Between two meshes: a block per device of the source -> a block per device of the destination. A
    contraction takes the blocks of every operand.
    Raises ShapeError for a wrong number of blocks or a block of the wrong shape, DtypeError
    if blocks differ in dtype or it cannot be reduced.

    >>> from xshard.planner import plan
    >>> p = plan("n/dp -> n", Mesh(dp=2), shape=(4,), dtype="int64")
    >>> [b.tolist() for b in run(p, [np.arange(2), np.arange(2, 4)])]
    [[0, 1, 2, 3], [0, 1, 2, 3]]
    >>> dot = plan("n/dp, n/dp -> ()", Mesh(dp=2), sizes={"n": 4}, dtype="int64")
    >>> [b.tolist() for b in run(dot, [np.arange(2), np.arange(2, 4)], [np.ones(2, int)] * 2)]
    [6, 6]
    """
    if isinstance(plan, ContractionPlan):
        return _contracted(plan, operands)[0]
    [blocks] = operands
    current = [np.array(b) for b in checked_blocks(blocks, plan.source)]
    name = dtypes.name_of(current[0].dtype)
    for kind, axes in plan.src.tags:
        if kind != "copy" and (plan.transfer or not set(axes) <= set(plan.dst.tagged(kind))):
            dtypes.check_reduction(name, kind)
    for step, before, _ in plan.stages:
        current = step.run(current, before)
    return current


@api_boundary
def pullback(plan: Plan | ContractionPlan, given: Sequence[Any], cotangents: Arrays) -> list[Any]:
    """Cotangents of the outputs of `run(plan, given)` -> cotangents of the blocks `given`.

    cotangents: blocks under `plan.dst.dual`; the result is under `plan.src.dual`. A linear plan runs its
    backward plan; a max or min sends the cotangent to the winners in equal shares, which a plan between two
    meshes cannot: LinearityError. A contraction takes and gives a list of the operands' blocks; complex
    numbers are not conjugated.
    """
    if isinstance(plan, ContractionPlan):
        return _pulled(plan, given, cotangents)
    if plan.src.is_linear or plan.transfer:
        return run(plan.backward, cotangents)
    plans = max_min_plans(plan)
    xs = checked_blocks(given, plan.source)
    best = run(plans.result, run(plan, xs) if plans.result.src.is_linear else xs)
    won = [np.equal(x, y).astype(x.dtype) for x, y in zip(xs, best, strict=True)]
    counts = run(plans.count, won)
    pulled = run(plans.cotangent, cotangents)
    return [g * w / np.maximum(n, 1) for g, w, n in zip(pulled, won, counts, strict=True)]


Operand = list[Block]  # its blocks


def _contracted(
    plan: ContractionPlan, operands: Sequence[Arrays]
) -> tuple[Operand, list[list[Operand]]]:
    """The result, and for every part its operands as they were contracted."""
    if len(operands) != len(plan.shapes):
        raise ShapeError(f"{len(operands)} operands for the {len(plan.shapes)} of '{plan.text}'")
    *arrays, target = plan.arrays
    described = zip(operands, arrays, plan.moves, strict=True)
    left = [by_name(checked_blocks(x, array), array, move.source) for x, array, move in described]
    held = []
    for part in plan.parts:
        used = [run(move, left[i]) for i, move in zip(part.takes, part.moves, strict=True)]
        held.append(used)
        names = [move.dst.names for move in part.moves]
        result = run(
            part.result, contract(list(zip(names, used, strict=True)), part.result.src.names)
        )
        left = [x for i, x in enumerate(left) if i not in part.takes] + [result]
    return _as_written(left[0], target, plan.result.target), held


def _pulled(plan: ContractionPlan, operands: Sequence[Arrays], cotangents: Arrays) -> list[Operand]:
    """The cotangents of all operands, computed part by part, the last part first."""
    held = _contracted(plan, operands)[1]
    left = [by_name(list(map(np.asarray, cotangents)), plan.arrays[-1], plan.result.target)]
    for part, used in zip(reversed(plan.parts), reversed(held), strict=True):
        taken = dict(zip(part.takes, _gradients(part, used, left.pop()), strict=True))
        rest = iter(left)
        left = [taken[i] if i in taken else next(rest) for i in range(len(taken) + len(left))]
    described = zip(left, plan.arrays, plan.moves, strict=False)
    return [_as_written(x, array, move.source) for x, array, move in described]


def by_name(blocks: Sequence[Block], array: Sharding, named: Sharding) -> Operand:
    """Blocks of an array as a contraction writes it -> with one dim per name."""
    return [
        x.reshape(-1)[places]
        for x, places in zip(blocks, _places_by_name(array, named), strict=True)
    ]


def _as_written(blocks: Operand, array: Sharding, named: Sharding) -> Operand:
    """The adjoint of `by_name`: zeros where it takes nothing."""
    written = [np.zeros(array.local_shape(device), x.dtype) for device, x in enumerate(blocks)]
    for y, x, places in zip(written, blocks, _places_by_name(array, named), strict=True):
        y.reshape(-1)[places] = x
    return written


def _places_by_name(array: Sharding, named: Sharding) -> Iterator[NDArray[np.int64]]:
    """For every device, the places that it takes from its block."""
    for device in range(array.mesh.n_devices):
        shape = array.local_shape(device)
        rows = partial(named.layout.positions, named.mesh, named.shape, device=device)
        numbers = np.arange(math.prod(shape)).reshape(shape)
        yield named_block(numbers, array.layout, named, named.local_shape(device), rows)


def _gradients(part: Part, used: list[Operand], cotangent: Operand) -> Iterator[Operand]:
    """The cotangents of a part's operands, which are contracted where the operands were."""
    local_result = part.result.src.names, run(part.result.backward, cotangent)
    operands = list(zip([move.dst.names for move in part.moves], used, strict=True))
    for i, (move, (names, blocks)) in enumerate(zip(part.moves, operands, strict=True)):
        others = [local_result, *operands[:i], *operands[i + 1 :]]
        yield run(move.backward, contract_gradient(others, names, blocks))


def contract_gradient(
    operands: Sequence[tuple[tuple[str, ...], Operand]], names: tuple[str, ...], like: Operand
) -> Operand:
    """The cotangent and the other operands -> the cotangent of the operand `like`, which has dims `names`."""
    known = {name for dims, _ in operands for name in dims}
    # Dims of its own, that the result lacks, are summed in it alone: the rest, repeated along them.
    alone = tuple(d for d, name in enumerate(names) if name not in known)
    ones = [np.ones([x.shape[d] for d in alone], x.dtype) for x in like]
    return contract([*operands, (tuple(names[d] for d in alone), ones)], names)


def contract(
    operands: Sequence[tuple[tuple[str, ...], Operand]], names: tuple[str, ...]
) -> Operand:
    """Every operand's dims with its blocks -> the local results; numpy lacks an einsum of bfloat16."""
    numbers = {
        name: n
        for n, name in enumerate(dict.fromkeys(name for dims, _ in operands for name in dims))
    }
    result = []
    for device, first in enumerate(operands[0][1]):
        arguments: list[Any] = []
        for dims, blocks in operands:
            block = blocks[device]
            wide = np.float32 if block.dtype.kind == "V" else block.dtype
            arguments += [block.astype(wide), [numbers[name] for name in dims]]
        y = np.asarray(np.einsum(*arguments, [numbers[name] for name in names]))
        result.append(y.astype(first.dtype) if first.dtype.kind == "V" else y)
    return result


def checked_blocks(blocks: Arrays, sharding: Sharding) -> list[Block]:
    """One array per device of the shape that the layout gives it, all of one dtype."""
    arrays = [np.asarray(b) for b in blocks]
    if len(arrays) != sharding.mesh.n_devices:
        hint = f"one block per device of {sharding.mesh!r}, row-major"
        raise ShapeError(f"{len(arrays)} blocks for {sharding.mesh.n_devices} devices", hint=hint)
    for device, array in enumerate(arrays):
        if array.shape != sharding.local_shape(device):
            hint = (
                f"under '{sharding.layout}' a {sharding.shape} array on {sharding.mesh!r} gives it "
            )
            hint += f"{sharding.local_shape(device)}"
            raise ShapeError(f"the block of device {device} has shape {array.shape}", hint=hint)
        if array.dtype != arrays[0].dtype:
            raise DtypeError(
                f"device {device} holds {array.dtype}, device 0 holds {arrays[0].dtype}"
            )
    return arrays


def _dims(sharding: Sharding, view: View, device: int) -> Iterator[tuple[DimEnd, int]]:
    """Every dim in a view, and the device's place in it."""
    for d, part in enumerate(zip(view.sides, view.shifts, strict=True)):
        yield dim_end(sharding, d, *part), sharding.dim_device(d, device)


def _places(rows: Sequence[Runs]) -> tuple[Any, Any]:
    """Numpy indices of the rows in a block and in the global array: without FILL."""
    numbers = list(map(row_numbers, rows))
    held = [each != FILL for each in numbers]
    return np.ix_(*held), np.ix_(*(each[kept] for each, kept in zip(numbers, held, strict=True)))
