"""A planned contraction of blocks: its moves, and `jnp.einsum` on every device.

Padding is zero after a move, so it adds nothing to a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_bridge.autodiff.product import ProductNames, multiplied
from jax_bridge.calls import execute, with_entry_type
from jax_bridge.lower.row_tables import rows_of_this_device
from jax_bridge.mesh.context import (
    AnyMesh,
    check_block_shape,
    mesh_and_machine,
    planned_mesh_in_context,
)
from xshard import ContractionPlan, Mesh, Plan, ProfileLike, planner
from xshard.contractions.expression import Contraction
from xshard.contractions.plan import Part, contraction_of
from xshard.contractions.ring import ContractionRing
from xshard.contractions.shapes import Shapes, Sizes, global_lengths, named_block
from xshard.errors import ShapeError
from xshard.layout.sub_axes import root_of, split_by, split_of
from xshard.notation.parser import text_spans
from xshard.plans.expression import check_given

ContractionOrPlan = Contraction | ContractionPlan


class EinsumOptions(NamedTuple):
    """How a contraction is planned, and how local products are made: options of `jnp.einsum`.

    Attributes:
        profile: The machine to plan for.
        overlap: Whether messages travel while products are computed.
        dtype: The dtype of the result.
        precision: As of `jnp.einsum`.
        sizes: Lengths by name that blocks do not tell.
    """

    profile: ProfileLike
    overlap: str
    dtype: np.dtype
    precision: Any = None
    sizes: Sizes | None = None

    def plan(
        self, call: Contraction, mesh: Mesh, shapes: Shapes, dtype: np.dtype
    ) -> ContractionPlan:
        """Find the cheapest plan of a contraction.

        Args:
            call: The contraction, as parsed from "n d, d f/tp -> n f/tp".
            mesh: The axes of the mesh.
            shapes: The operands' global shapes.
            dtype: Their common dtype.
        """
        return planner.plan_contraction(
            call,
            mesh,
            shapes,
            dtype.name,
            self.profile,
            overlap=self.overlap,
        )


def check_operands(plan: ContractionPlan, shapes: Shapes, dtype: str) -> None:
    """Raise for operands of other shapes or another dtype than a given plan is for."""
    hint = "pass the expression, or a plan made for them"
    check_given("the operands are", plan, dtype, text=plan.text, hint=hint)
    check_shapes(plan.shapes, shapes, plan.text)


def check_shapes(expected: Shapes, shapes: Shapes, text: str) -> None:
    """Raise ShapeError, marking the operand, for a shape that differs from the expected one."""
    # Either may have the result's shape at its end, too.
    for i, (shape, expected_shape) in enumerate(zip(shapes, expected, strict=False)):
        if shape != expected_shape:
            span = text_spans(text).layouts[i]
            hint = "pass the expression alone, without sizes=, shape= or a plan"
            reason = f"an operand of shape {shape}, not {expected_shape}"
            raise ShapeError(reason, text=text, span=span, hint=hint)


class _Mover(NamedTuple):
    """Moves blocks by plans of a contraction.

    Attributes:
        mesh: The sub-mesh around the call.
        text: The expression, for errors.
    """

    mesh: Mesh
    text: str

    def move(self, x: jax.Array, plan: Plan) -> jax.Array:
        """Redistribute a block on the mesh around the call, in the dtype that it has."""
        # Products may have another dtype than the operands that the plan is for.
        if root_of(plan.mesh) != self.mesh or plan.dtype != x.dtype.name:
            mesh = split_by(self.mesh, split_of(plan.mesh))
            plan = replace(plan, mesh=mesh, dtype=x.dtype.name, devices=())
        return execute(plan, x, self.text)


def einsum_blocks(
    contraction: ContractionOrPlan,
    blocks: Sequence[jax.Array],
    mesh: AnyMesh | None,
    shapes: Shapes | None,
    options: EinsumOptions,
) -> jax.Array:
    """Compute the einsum of global arrays from this device's blocks, inside `shard_map`.

    A plan is a list of parts, each the contraction of one or two operands: move the operands to
    other layouts, `jnp.einsum` of the blocks, move the result. Or, in a ring, pieces of an operand
    travel while others are contracted.

    Args:
        contraction: The contraction, or a plan of it.
        blocks: A block of each operand.
        mesh: The mesh; None for the one of the context.
        shapes: The operands' global shapes; None to infer them from the blocks.
        options: How the contraction is planned and computed.

    Returns:
        The block of the result.
    """
    plan, mesh_of_plan = _plan_for_blocks(contraction, blocks, mesh, shapes, options)
    mover = _Mover(mesh_of_plan, plan.text)
    operands = _named_operands(plan, blocks, mover, inferred=shapes is None)
    for part in plan.parts:
        # As in opt_einsum, indices count the operands that are left; a result is appended.
        contracted = [operands[i] for i in part.operand_indices]
        operands = [x for i, x in enumerate(operands) if i not in part.operand_indices]
        if part.ring is not None:
            result = _contract_in_rounds(part, part.ring, contracted, mover, options)
        else:
            moved_operands = [
                mover.move(x, move) for x, move in zip(contracted, part.moves, strict=True)
            ]
            result = mover.move(_contract_locally(part, moved_operands, options), part.result)
        operands.append(result)
    return operands[0].reshape(plan.arrays[-1].max_local_shape).astype(options.dtype)


def _named_operands(
    plan: ContractionPlan, blocks: Sequence[jax.Array], mover: _Mover, *, inferred: bool
) -> list[jax.Array]:
    """Check the blocks of all operands, and give each one dim per name.

    Composed dims such as "(h d)" are split, and diagonals of "i i" are taken: blocks [12, 3] of
    "(h d) n" with d=4 become [3, 4, 3].

    Args:
        plan: The plan.
        blocks: A block of each operand.
        mover: The mesh around the call, and the expression for errors.
        inferred: Whether the global shapes follow from the blocks.
    """
    text = mover.text
    operands = []
    spans = text_spans(text).layouts  # the last one is the result's, as of `plan.arrays`
    for x, array, move, span in zip(blocks, plan.arrays, plan.moves, spans, strict=False):
        check_block_shape(x.shape, array, text, inferred=inferred, start=span[0])
        x = with_entry_type(x, move, text, mover.mesh.axes, span)
        named = move.source  # the operand with a dim per name
        rows_of = partial(rows_of_this_device, named)
        operands.append(named_block(x, array.layout, named, named.max_local_shape, rows_of))
    return operands


def _plan_for_blocks(
    contraction: ContractionOrPlan,
    blocks: Sequence[jax.Array],
    mesh: AnyMesh | None,
    shapes: Shapes | None,
    options: EinsumOptions,
) -> tuple[ContractionPlan, Mesh]:
    """Plan the contraction of blocks, or check that the given plan fits them.

    Returns the plan, and the sub-mesh of the mesh around the call on which it runs.

    Args:
        contraction: The contraction, or a plan of it.
        blocks: A block of each operand.
        mesh: The mesh; None for the one of the context.
        shapes: The operands' global shapes; None to infer them from the blocks.
        options: How the contraction is planned.
    """
    call = contraction_of(contraction)
    dtype = jnp.result_type(*blocks)
    if isinstance(contraction, ContractionPlan):
        whole_mesh = root_of(contraction.mesh)
        sub_mesh = planned_mesh_in_context(mesh, whole_mesh, contraction.axes, call.text)
        check_operands(contraction, contraction.shapes if shapes is None else shapes, dtype.name)
        return contraction, sub_mesh
    layouts = (*call.operands, call.result)
    sub_mesh, machine = mesh_and_machine(mesh, layouts, call.text, options.profile)
    if shapes is None:
        shapes = global_lengths(call, sub_mesh, tuple(x.shape for x in blocks), options.sizes)
    options = options._replace(profile=machine)
    return options.plan(call, sub_mesh, shapes, dtype), sub_mesh


def _contract_locally(
    part: Part, operands: Sequence[jax.Array], options: EinsumOptions
) -> jax.Array:
    """Compute `jnp.einsum` of one or two blocks; dims are matched by the names in their layouts.

    Blocks under "n d" and "d f" with a result under "n f": [2, 4], [4, 3] -> [2, 3].
    """
    layouts = [move.dst for move in part.moves]
    layouts.append(part.result.src)
    # `jnp.einsum` takes numbers in place of letters: for a name its index among all names.
    all_names: list[str] = []
    for layout in layouts:
        all_names += layout.names
    index_numbers = [tuple(map(all_names.index, layout.names)) for layout in layouts]

    dtype = options.dtype
    operand_dtype = jnp.result_type(*operands)
    is_float_of_integers = operand_dtype.kind in "iu" and dtype.kind not in "iu"
    if is_float_of_integers and dtype.itemsize < operand_dtype.itemsize:
        # XLA adds up no whole numbers in a narrower float: int32 for bfloat16 are, in float32.
        dtype = jnp.promote_types(dtype, f"float{8 * operand_dtype.itemsize}")
    arithmetic = {"preferred_element_type": dtype, "precision": options.precision}
    if len(operands) == 1:
        return jnp.einsum(operands[0], index_numbers[0], index_numbers[1], **arithmetic)
    names = ProductNames((index_numbers[0], index_numbers[1]), index_numbers[2])
    return multiplied(operands[0], operands[1], names, **arithmetic)


# Contractions in rounds: a piece is contracted while the next one travels around a ring of devices.


def _contract_in_rounds(
    part: Part,
    ring: ContractionRing,
    operands: Sequence[jax.Array],
    mover: _Mover,
    options: EinsumOptions,
) -> jax.Array:
    """Contract two blocks piece by piece, while pieces travel around a ring of devices.

    Instead of gathering an operand first, each device contracts the piece that it has, while the
    next one arrives. Or pieces of the result travel and gather an addend on each device, instead of
    a reduce-scatter at the end. Messages do not wait for products, so that XLA can overlap them.

    Args:
        part: The part of the contraction's plan.
        ring: What travels: pieces of an operand, or sums of the result.
        operands: This device's blocks.
        mover: Moves blocks.
        options: How products are computed.

    Returns:
        The block of the part's result.
    """
    pieces_of_operands: list[Sequence[jax.Array]] = []  # [operands][products]
    for i, (x, move) in enumerate(zip(operands, part.moves, strict=True)):
        if i == ring.operand:  # its pieces travel
            x = mover.move(x, ring.remaining_move)
            pieces = _travelling_pieces(x, move.dst.dim_index(ring.dim), ring, mover)
        elif ring.dim in move.dst.names:
            x = mover.move(x, move)
            pieces = _resident_pieces(x, move.dst.dim_index(ring.dim), ring)
        else:
            # Without the ring's dim it takes part in every product as a whole.
            pieces = [mover.move(x, move)] * ring.products
        pieces_of_operands.append(pieces)

    pieces_of_products = zip(*pieces_of_operands, strict=True)
    products = [_contract_locally(part, pieces, options) for pieces in pieces_of_products]

    result_layout = part.result.src
    if ring.dim not in result_layout.names:  # it was summed
        return mover.move(reduce(add, products), part.result)
    dim = result_layout.dim_index(ring.dim)
    if ring.operand is None:  # sums travel
        return mover.move(_travelling_sums(products, dim, ring, mover), ring.remaining_move)
    return mover.move(_in_order_of_pieces(products, dim, ring), part.result)


def _piece_starts(ring: ContractionRing, piece_rows: int) -> list[jax.Array]:
    """Return the first row of each piece, in the order in which this device contracts them."""
    return [piece * piece_rows for piece in ring.order(lax.axis_index(ring.axis))]


def _travelling_pieces(
    x: jax.Array, dim: int, ring: ContractionRing, mover: _Mover
) -> list[jax.Array]:
    """Return this device's pieces of an operand, then the pieces that arrive."""
    pieces = jnp.split(x, ring.pieces, dim)
    while len(pieces) < ring.products:
        # A piece is passed on as it arrived, `ring.pieces` products ago.
        pieces.append(mover.move(pieces[-ring.pieces], ring.rotation))
    return pieces


def _resident_pieces(x: jax.Array, dim: int, ring: ContractionRing) -> list[jax.Array]:
    """Cut an operand that does not travel into pieces, in the order of this device's products."""
    piece_rows = x.shape[dim] // ring.products
    starts = _piece_starts(ring, piece_rows)
    return [lax.dynamic_slice_in_dim(x, start, piece_rows, dim) for start in starts]


def _travelling_sums(
    products: Sequence[jax.Array], dim: int, ring: ContractionRing, mover: _Mover
) -> jax.Array:
    """Add up pieces of the result on their way around the ring; return those that end here.

    A sum begins as a product of the device where it starts. Each device that it comes to adds its
    own product for it, and the last one keeps it.

    Args:
        products: This device's products, in the order in which it computes them: with 2 pieces at
            once, 0, 2, 4, ... are for the first sums that pass, 1, 3, 5, ... for the second.
        dim: The dim of the result that the ring cuts.
        ring: What travels.
        mover: Moves blocks.
    """
    sums = []
    for piece in range(ring.pieces):
        addends = products[piece :: ring.pieces]  # one per round
        travelling_sum = addends[0]
        for addend in addends[1:]:
            # The product does not wait for the message: XLA may compute it meanwhile.
            travelling_sum = mover.move(travelling_sum, ring.rotation) + addend
        sums.append(travelling_sum)
    return jnp.concatenate(sums, dim)


def _in_order_of_pieces(
    products: Sequence[jax.Array], dim: int, ring: ContractionRing
) -> jax.Array:
    """Put products at the rows of the pieces that they were computed from."""
    # The concatenation gives shape, dtype and type; XLA leaves it out.
    y = jnp.zeros_like(jnp.concatenate(products, dim))
    starts = _piece_starts(ring, products[0].shape[dim])
    for product, start in zip(products, starts, strict=True):
        y = lax.dynamic_update_slice_in_dim(y, product, start, dim)
    return y
