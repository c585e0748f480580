"""The reference interpreter: plans run on numpy blocks, one per device, row-major. It is the semantics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xshard import dtypes
from xshard.arguments import lengths_of
from xshard.contractions.plan import ContractionPlan, Part, remaining
from xshard.contractions.shapes import named_block
from xshard.errors import DtypeError, ShapeError, api_boundary
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.runs import FILL, Runs, row_numbers
from xshard.notation.maps import Maps
from xshard.plans.max_min import max_min_plans
from xshard.plans.plan import Plan
from xshard.search.overlap_paths import check_boundaries
from xshard.steps.base import Block, write_or_reduce
from xshard.steps.exchange.messages import fill_boundaries
from xshard.steps.exchange.sources import View, view_ends, views
from xshard.steps.local import Scale

Arrays = Sequence[ArrayLike]  # a block per device
Operand = list[Block]  # its blocks
NamedOperand = tuple[tuple[str, ...], Operand]  # with the names of its dims


@api_boundary
def scatter(
    x: ArrayLike, layout: Layout | str, mesh: Mesh, *, maps: Maps | None = None
) -> list[Block]:
    """Cut a global array into the block of every device.

    Args:
        x: The global array.
        layout: The layout of the blocks. Under `sum` the first device along the axis holds the value and
            the others zeros; in a `fold` the device that gives a row has it. Under every other tag all
            hold it. Rows outside the array hold what the boundary says.
        mesh: The devices.
        maps: The `Owners` and `Needs` that the layout names.

    Returns:
        A block for every device of the mesh, row-major.

    Raises:
        ShapeError: The array does not fit the layout. It also raises NotationError for a wrong layout.
        DtypeError: Values at a boundary are none of the array's dtype.

    Examples:
        >>> [b.tolist() for b in scatter([0, 1, 2, 3], "s/zigzag(cp)", Mesh(cp=2))]
        [[0, 3], [1, 2]]
    """
    x = np.asarray(x)
    sharding = Sharding(Layout.parse(layout, maps), mesh, x.shape)
    check_boundaries(sharding.layout, dtypes.name_of(x.dtype))
    sums = sharding.layout.tagged("sum")
    blocks = []
    for device in range(mesh.n_devices):
        block = np.zeros(sharding.local_shape(device), x.dtype)
        is_first_addend = sharding.mesh.index(device, sums) == 0
        if is_first_addend:  # it has the value; the others are zeros, which change no sum
            _fill(block, x, sharding, device)
        blocks.append(block)
    return blocks


def _fill(block: Block, x: Block, sharding: Sharding, device: int) -> None:
    """Write a device's part of a global array into its block, with the rows of halos.

    Of [0, 1, 2, 3] in "s/cp:halo(1,1)" on cp=2, device 1 gets rows 1, 2 and 3, and what the boundary
    gives for the row behind the end.

    Args:
        block: Zeros in the shape of the device's block, which is changed.
        x: The global array.
        sharding: The sharding of the block.
        device: The device.
    """
    # Rows beyond the ends of the array first, as of a zero or constant boundary; rows of the array
    # are written over them where both are.
    fill_boundaries(block, sharding, device)
    # One view is the array itself. Others are mirrored copies of it, if it ends at poles of a sphere.
    for view in views(sharding):
        rows = []  # for every dim, the global row at each position of the block; FILL for none
        for dim_index, dim_end in enumerate(view_ends(sharding, view)):  # each dim as it is sharded
            rows_by_shard = dim_end.wanted_rows()
            rows.append(rows_by_shard[sharding.dim_device(dim_index, device)])
        index = _indices(rows)  # of all positions that have a row
        values = x[index.array]
        if view.sign < 0:  # components of vectors change their sign across a pole
            values = view.sign * values
        block[index.block] = values


@api_boundary
def gather(
    blocks: Arrays,
    layout: Layout | str,
    mesh: Mesh,
    shape: Sequence[int],
    *,
    maps: Maps | None = None,
) -> NDArray[np.generic]:
    """Put the global array together from the block of every device.

    Addends of a sum, and overlapping rows under a `fold`, are reduced. Of several copies of a row one
    is read: the one of the device that owns the row, if it holds it.

    Args:
        blocks: A block for every device of the mesh, row-major.
        layout: The layout of the blocks.
        mesh: The devices.
        shape: The global shape.
        maps: The `Owners` and `Needs` that the layout names.

    Returns:
        The global array.

    Raises:
        ShapeError: A block does not fit. It also raises DtypeError if blocks differ in dtype.

    Examples:
        >>> gather([[0, 3], [1, 2]], "s/zigzag(cp)", Mesh(cp=2), (4,)).tolist()
        [0, 1, 2, 3]
    """
    sharding = Sharding(Layout.parse(layout, maps), mesh, lengths_of(shape))
    arrays = checked_blocks(blocks, sharding)
    check_boundaries(sharding.layout, dtypes.name_of(arrays[0].dtype))
    op = _reduction(sharding.layout)
    out: Block = np.zeros(sharding.shape, arrays[0].dtype)
    is_written = np.zeros(out.shape, bool)  # an element is reduced if it was written before
    # Replicas hold one block: reading several would add it up several times.
    for device in _devices_with_distinct_blocks(sharding):
        # One view (part) of a block is its rows in the array. Others are copies beyond poles.
        for view in views(sharding):
            # Rows of each dim, by position in the block. Several, if it has a row several times.
            for rows in _offers(sharding, view, device):
                index = _indices(rows)
                values = arrays[device][index.block]
                if view.sign < 0:
                    values = -values
                write_or_reduce(out, is_written, index.array, values, op)
    if sharding.scale != 1:  # a mean
        [out] = Scale(sharding.scale).run([out], sharding)
    return out


def _devices_with_distinct_blocks(sharding: Sharding) -> list[int]:
    """List one device for each block: under "n/x" on x=2, y=2 devices 0 and 2."""
    mesh = sharding.mesh
    addend_axes = sharding.layout.tagged("sum", "mean", "max", "min")
    distinct_axes = (*sharding.layout.sharding_axes, *addend_axes)
    copy_axes = [axis for axis in mesh.axes if axis not in distinct_axes]
    return [device for device in range(mesh.n_devices) if mesh.index(device, copy_axes) == 0]


def _reduction(layout: Layout) -> str:
    """Return how addends under a layout are reduced, as a key of `REDUCERS`."""
    for tag in ("max", "min"):
        if layout.tagged(tag):
            return tag
    return "sum"  # a mean is scaled afterwards


def _offers(sharding: Sharding, view: View, device: int) -> Iterator[tuple[Runs, ...]]:
    """List the parts of a device's block to read into the global array, each element once.

    A block that has a row twice, as with some halos, offers it once. Each part is a tuple with the
    global rows of every dim; parts of several dims are all combinations of theirs.

    view: the array itself, or its image beyond a pole.
    """
    offers = []
    for dim_index, end in enumerate(view_ends(sharding, view)):
        offers.append(end.offered_rows()[sharding.dim_device(dim_index, device)])
    yield from itertools.product(*offers)


class Indices(NamedTuple):
    """Where rows are in a block, and in the global array, as indices of numpy."""

    block: Any
    array: Any


def _indices(rows_by_dim: Sequence[Runs]) -> Indices:
    """Turn rows for every dim into numpy indices of a block, and of the global array.

    Rows (4, FILL, 5) of one dim: positions 0 and 2 of the block are rows 4 and 5 of the array, and
    position 1 holds no row of it.
    """
    row_masks = []
    array_rows = []
    for rows_of_dim in rows_by_dim:
        row_array = row_numbers(rows_of_dim)
        is_row = row_array != FILL
        row_masks.append(is_row)
        array_rows.append(row_array[is_row])
    return Indices(np.ix_(*row_masks), np.ix_(*array_rows))


@api_boundary
def run(plan: Plan | ContractionPlan, *operands: Arrays) -> list[Block]:
    """Run a plan on numpy blocks: blocks under `plan.src` -> blocks under `plan.dst`.

    Args:
        plan: The plan of a move, or of a contraction.
        operands: A block for every device; between two meshes, for every device of the source. For a
            contraction, the blocks of every operand. They are left as they are.

    Returns:
        A block for every device; between two meshes, for every device of the destination.

    Raises:
        ShapeError: The number of blocks is wrong, or a block has the wrong shape.
        DtypeError: Blocks differ in dtype, or it cannot be reduced.

    Examples:
        >>> from xshard.planner import plan
        >>> p = plan("n/dp -> n", Mesh(dp=2), shape=(4,), dtype="int64")
        >>> [b.tolist() for b in run(p, [np.arange(2), np.arange(2, 4)])]
        [[0, 1, 2, 3], [0, 1, 2, 3]]
        >>> dot = plan("n/dp, n/dp -> ()", Mesh(dp=2), sizes={"n": 4}, dtype="int64")
        >>> [b.tolist() for b in run(dot, [np.arange(2), np.arange(2, 4)], [np.ones(2, int)] * 2)]
        [6, 6]
    """
    if isinstance(plan, ContractionPlan):
        return _run_contraction(plan, operands).result
    [source_blocks] = operands
    # Copies, since steps may return their input, and the caller's blocks are left as they are.
    current_blocks = [np.array(block) for block in checked_blocks(source_blocks, plan.source)]
    dtype = dtypes.name_of(current_blocks[0].dtype)
    for tag, axes in plan.src.tags:
        # A sum that stays is not reduced: then any dtype is right.
        is_reduced = plan.transfer or not set(axes) <= set(plan.dst.tagged(tag))
        if tag != "copy" and is_reduced:
            dtypes.check_reduction(dtype, tag)
    for step, sharding, _ in plan.stages:
        current_blocks = step.run(current_blocks, sharding)
    return current_blocks


@overload
def pullback(plan: Plan, given: Arrays, cotangents: Arrays) -> list[Block]: ...


@overload
def pullback(
    plan: ContractionPlan, given: Sequence[Arrays], cotangents: Arrays
) -> list[list[Block]]: ...


@api_boundary
def pullback(plan: Plan | ContractionPlan, given: Sequence[Any], cotangents: Arrays) -> list[Any]:
    """Compute the gradients of a plan's inputs from the gradients of its outputs, on numpy blocks.

    This is the vector-Jacobian product of `run(plan, given)`. The gradient of an all-gather, for
    example, is a reduce-scatter. A max or min shares the gradient equally among all devices that
    hold the greatest or least value, which a plan between two meshes cannot. Complex numbers are
    not conjugated.

    Args:
        plan: The plan of a move, or of a contraction.
        given: The blocks that `run` was given; for a contraction, a list of the operands' blocks.
        cotangents: Blocks under `plan.dst.dual`.

    Returns:
        Blocks under `plan.src.dual`; for a contraction, a list of them for each operand.

    Raises:
        LinearityError: The plan is a max or min between two meshes.
    """
    if isinstance(plan, ContractionPlan):
        return _pull_back_contraction(plan, given, cotangents)
    if plan.src.is_linear or plan.transfer:
        return run(plan.backward, cotangents)
    return _pull_back_max_min(plan, checked_blocks(given, plan.source), cotangents)


def _pull_back_max_min(plan: Plan, blocks: list[Block], cotangents: Arrays) -> list[Block]:
    """Share the gradient of each maximum (or minimum) equally among the devices that hold it.

    Values 3, 5, 5 on three devices and a gradient of 1 for their maximum -> 0, 1/2, 1/2.

    Args:
        plan: A redistribution that ends a max or min over devices.
        blocks: The input blocks, one per device.
        cotangents: The gradient of the result, one block per device.
    """
    plans = max_min_plans(plan)
    # Bring the maxima to where the input blocks are, to be compared with them: from the plan's
    # result, or, if that lacks rows of the array, by another reduction of the input blocks. Its
    # source layout tells which: only the input still holds a max, which is not linear.
    starts_from_result = plans.result.src.is_linear
    extremes = run(plans.result, run(plan, blocks) if starts_from_result else blocks)
    has_won = []  # 1 where a block has the maximum, else 0
    for block, extreme in zip(blocks, extremes, strict=True):
        has_won.append(np.equal(block, extreme).astype(block.dtype))
    n_winners = run(plans.count, has_won)  # their sum over the devices, on each device
    gradients = run(plans.cotangent, cotangents)  # of the maxima, where the input blocks are
    shares = []
    for device, gradient in enumerate(gradients):
        # Without a winner, as with nan, there is nothing to share, and nothing to divide by. The one
        # has the dtype of the count: with a plain 1 numpy 2.0 makes float32 of bfloat16.
        one = np.ones((), n_winners[device].dtype)
        shares.append(gradient * has_won[device] / np.maximum(n_winners[device], one))
    return shares


class Contracted(NamedTuple):
    """The result of a contraction, and for every part of its plan the operands after their moves."""

    result: Operand
    operands_by_part: list[list[Operand]]


def _run_contraction(plan: ContractionPlan, operands: Sequence[Arrays]) -> Contracted:
    """Run a contraction on numpy blocks, one local contraction (part of the plan) after the other.

    Values are numbered: x, y, z are values 0, 1, 2; the first part contracts x and y to value 3,
    the second contracts z and value 3 to value 4, the result. Each part first moves its operands to
    the layouts in which devices can contract them by themselves.

    Args:
        plan: The plan.
        operands: For each operand its blocks, one per device.

    Returns:
        The result, and the operands of each part as they were contracted, which gradients need.
    """
    if len(operands) != len(plan.shapes):
        raise ShapeError(f"{len(operands)} operands for the {len(plan.shapes)} of '{plan.text}'")
    *arrays, target = plan.arrays
    values = []  # the operands, then the result of each part; each has one block per device
    for operand_blocks, array, move in zip(operands, arrays, plan.moves, strict=True):
        values.append(blocks_by_name(checked_blocks(operand_blocks, array), array, move.source))
    operands_by_part = []
    for part, value_indices in zip(plan.parts, _operand_indices(plan), strict=True):
        part_operands = []
        for value_index, move in zip(value_indices, part.moves, strict=True):
            part_operands.append(run(move, values[value_index]))
        operands_by_part.append(part_operands)
        result = contract(_with_names(part, part_operands), part.result.src.names)
        values.append(run(part.result, result))  # such as a reduction of partial sums
    return Contracted(_to_written_dims(values[-1], target, plan.result.target), operands_by_part)


def _operand_indices(plan: ContractionPlan) -> list[list[int]]:
    """List which values each part of a contraction takes: operands 0, 1, ..., then parts' results.

    Three operands, of which the first part contracts the first two -> [0, 1], and [2, 3] or [3, 2].
    """
    unused = list(range(len(plan.moves)))
    indices_by_part = []
    for part_index, part in enumerate(plan.parts):
        indices_by_part.append([unused[i] for i in part.operand_indices])
        unused = [*remaining(unused, part.operand_indices), len(plan.moves) + part_index]
    return indices_by_part


def _with_names(part: Part, operands: Sequence[Operand]) -> list[NamedOperand]:
    """Pair the operands of a local contraction with the names of their dims."""
    return [(move.dst.names, x) for move, x in zip(part.moves, operands, strict=True)]


def _pull_back_contraction(
    plan: ContractionPlan, operands: Sequence[Arrays], cotangents: Arrays
) -> list[Operand]:
    """Return the gradients (cotangents) of all operands, from the gradient of the result.

    The forward pass runs again, since gradients need the operands of each local contraction (part
    of the plan). Then the parts are differentiated, the last one first.

    Values are numbered: of a contraction of x, y, z in two parts, x, y, z are values 0, 1, 2, the
    result of the first part is value 3, and that of the second, the whole result, is value 4.
    """
    operands_by_part = _run_contraction(plan, operands).operands_by_part
    value_indices = _operand_indices(plan)  # by part, such as [[0, 1], [2, 3]]
    n_operands = len(plan.moves)
    last_value = n_operands + len(plan.parts) - 1
    blocks = [np.asarray(block) for block in cotangents]
    # The gradient of each value, by its number. Each value is the operand of just one part.
    gradients = {last_value: blocks_by_name(blocks, plan.arrays[-1], plan.result.target)}
    for part_index in reversed(range(len(plan.parts))):
        operand_gradients = _gradients(
            plan.parts[part_index], operands_by_part[part_index], gradients[n_operands + part_index]
        )
        gradients.update(zip(value_indices[part_index], operand_gradients, strict=True))
    results = []
    for i, move in enumerate(plan.moves):
        results.append(_to_written_dims(gradients[i], plan.arrays[i], move.source))
    return results


def blocks_by_name(blocks: Sequence[Block], written: Sharding, by_name: Sharding) -> Operand:
    """Bring blocks from the dims of a contraction's text to one dim for each name.

    The text `(h d)/tp` has one dim for two names: on 4 devices `[h*d/4]` -> `[h/4, d]`.

    Args:
        blocks: One block per device, with the dims of the text.
        written: The sharding of the array as the text writes it: "(h d)/tp".
        by_name: The sharding of the same array with one dim per name: "h/tp d".

    Returns:
        One block per device, with one dim per name.
    """
    blocks_and_positions = zip(blocks, _positions_in_written_blocks(written, by_name), strict=True)
    return [block.reshape(-1)[positions] for block, positions in blocks_and_positions]


def _to_written_dims(blocks: Operand, written: Sharding, by_name: Sharding) -> Operand:
    """Bring blocks back from one dim per name: the adjoint of `blocks_by_name`.

    Zeros stand where `blocks_by_name` takes nothing: beside a diagonal.
    """
    written_blocks = []
    blocks_and_positions = zip(blocks, _positions_in_written_blocks(written, by_name), strict=True)
    for device, (block, positions) in enumerate(blocks_and_positions):
        out = np.zeros(written.local_shape(device), block.dtype)
        out.reshape(-1)[positions] = block
        written_blocks.append(out)
    return written_blocks


def _positions_in_written_blocks(
    written: Sharding, by_name: Sharding
) -> Iterator[NDArray[np.int64]]:
    """Yield, for each device, the position that each element of its new block has in its old one.

    `(h d)/tp` with h = d = 2 is `[4]` on one device, and `[2, 2]` with one dim per name: the positions
    are [[0, 1], [2, 3]]. Of `i i`, `[2, 2]`, only the diagonal is kept: [0, 3].

    Returns:
        For each device, an array of the shape that its block has under `by_name`. It indexes the
        block under `written`, flattened row-major.
    """
    for device in range(written.mesh.n_devices):
        shape = written.local_shape(device)
        rows = partial(by_name.layout.positions, by_name.mesh, by_name.shape, device=device)
        # Indices of elements go the way of elements, so that they tell where each is from.
        element_indices = np.arange(math.prod(shape)).reshape(shape)
        yield named_block(
            element_indices, written.layout, by_name, by_name.local_shape(device), rows
        )


def _gradients(part: Part, part_operands: list[Operand], cotangent: Operand) -> Iterator[Operand]:
    """Yield the gradient of each operand of a local contraction, from the gradient of its result.

    part_operands: the operands after their moves. Each gradient is moved back to where its operand
        came from.
    """
    result_gradient = (part.result.src.names, run(part.result.backward, cotangent))
    operands = _with_names(part, part_operands)
    for i, move in enumerate(part.moves):
        names, blocks = operands[i]
        other_operands = [result_gradient, *operands[:i], *operands[i + 1 :]]
        yield run(move.backward, contract_gradient(other_operands, names, blocks))


def contract_gradient(
    operands: Sequence[NamedOperand], names: tuple[str, ...], operand_blocks: Operand
) -> Operand:
    """Compute one operand's gradient (cotangent) in a local contraction: another contraction.

    For `b d, d f -> b f`, the gradient of the first operand is `b f, d f -> b d` of the result's
    gradient and the second operand. Nothing moves between devices.

    Args:
        operands: The names of dims and the blocks of the result's gradient, and of each operand but
            the one that is asked for: here those with dims "b f" and "d f".
        names: The dims of the operand whose gradient is asked for: "b d".
        operand_blocks: The blocks of that operand, which give shapes and dtypes.

    Returns:
        One block per device: the gradient of the operand.
    """
    known_names: set[str] = set()
    for dims, _ in operands:
        known_names.update(dims)
    # In `n d, d -> d`, only the first operand has n, which is summed: all rows along n have the
    # same gradient. A factor of ones with the dim n repeats it.
    repeated_dims = [dim_index for dim_index, name in enumerate(names) if name not in known_names]
    blocks_of_ones = []  # one block per device
    for block in operand_blocks:
        shape = [block.shape[dim_index] for dim_index in repeated_dims]
        blocks_of_ones.append(np.ones(shape, block.dtype))
    repeated_names = tuple(names[dim_index] for dim_index in repeated_dims)
    return contract([*operands, (repeated_names, blocks_of_ones)], names)


def contract(operands: Sequence[NamedOperand], names: tuple[str, ...]) -> Operand:
    """Run an einsum on the blocks of every device by itself; nothing moves between devices.

        contract([(("b", "d"), x), (("d", "f"), w)], ("b", "f"))    # [b, d], [d, f] -> [b, f] on each

    Args:
        operands: For each operand its dims and its blocks, one per device.
        names: The dims of the result; others are summed.

    Returns:
        One block per device. Low-precision blocks are added in float32, and rounded once.
    """
    dim_indices: dict[str, int] = {}  # of dims, since numpy has 52 letters, and names may be longer
    for dims, _ in operands:
        for name in dims:
            dim_indices.setdefault(name, len(dim_indices))
    result_indices = [dim_indices[name] for name in names]
    result_blocks = []
    for device, first_block in enumerate(operands[0][1]):
        arguments: list[Any] = []
        for dims, blocks in operands:
            block = blocks[device]
            arguments.append(block.astype(np.float32) if _is_low_precision(block) else block)
            arguments.append([dim_indices[name] for name in dims])
        y = np.asarray(np.einsum(*arguments, result_indices))
        if _is_low_precision(first_block):
            y = y.astype(first_block.dtype)
        result_blocks.append(y)
    return result_blocks


def _is_low_precision(block: Block) -> bool:
    """Return whether numpy cannot contract a dtype: bfloat16 and 8-bit floats of ml_dtypes."""
    return block.dtype.kind == "V"


def checked_blocks(blocks: Arrays, sharding: Sharding) -> list[Block]:
    """Return the blocks as arrays, checked against the layout: one per device.

    Args:
        blocks: One block per device, row-major over the mesh.
        sharding: The layout, mesh and global shape that the blocks must have.

    Raises:
        ShapeError: There are too few or too many blocks, or one has another shape than the layout
            gives it.
        DtypeError: The blocks differ in dtype.
    """
    arrays = [np.asarray(block) for block in blocks]
    if len(arrays) != sharding.mesh.n_devices:
        hint = f"one block per device of {sharding.mesh!r}, row-major"
        raise ShapeError(f"{len(arrays)} blocks for {sharding.mesh.n_devices} devices", hint=hint)
    # Layouts may give devices blocks of different shapes.
    for device, array in enumerate(arrays):
        local_shape = sharding.local_shape(device)
        if array.shape != local_shape:
            hint = f"under '{sharding.written}' a {sharding.shape} array on {sharding.mesh!r} "
            hint += f"gives it {local_shape}"
            raise ShapeError(f"the block of device {device} has shape {array.shape}", hint=hint)
        if array.dtype != arrays[0].dtype:
            raise DtypeError(
                f"device {device} holds {array.dtype}, device 0 holds {arrays[0].dtype}"
            )
    return arrays
