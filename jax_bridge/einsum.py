"""A planned contraction of blocks: its moves, and `jnp.einsum` on every device.
Padding is zero after a move, so it adds nothing to a sum.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_bridge.autodiff.product import multiplied
from jax_bridge.calls import execute, with_entry_type
from jax_bridge.lower.row_tables import mine, row_table
from jax_bridge.mesh.context import AnyMesh, check_block_here, machine_here, planned_mesh_here
from xshard import ContractionPlan, Mesh, Plan, ProfileLike, Sharding, planner
from xshard.contractions.expression import Contraction
from xshard.contractions.plan import Part, contraction_of
from xshard.contractions.ring import ContractionRing
from xshard.contractions.shapes import Shapes, named_block, whole_shapes
from xshard.errors import ShapeError
from xshard.notation.parser import text_spans
from xshard.plans.expression import check_given

Move = Callable[[jax.Array, Plan], jax.Array]
Given = Contraction | ContractionPlan


class Choices(NamedTuple):
    """How a contraction is planned, and how local products are made: options of `jnp.einsum`."""

    profile: ProfileLike
    overlap: str
    dtype: Any = None
    precision: Any = None

    def plan(
        self, call: Contraction, mesh: Mesh, shapes: Shapes, dtype: np.dtype
    ) -> ContractionPlan:
        """The cheapest plan."""
        limits = None, None, None
        return planner.plan_contraction(
            call, mesh, shapes, dtype.name, self.profile, *limits, self.overlap
        )


def check_operands(plan: ContractionPlan, shapes: Shapes, dtype: str) -> None:
    """Raise for operands of other shapes or another dtype than a given plan is for."""
    hint = "pass the expression, or a plan made for them"
    check_given("the operands are", plan, dtype, text=plan.text, hint=hint)
    check_shapes(plan.shapes, shapes, plan.text)


def check_shapes(expected: Shapes, shapes: Shapes, text: str) -> None:
    """Raise ShapeError, marking the operand, for a shape that differs from the expected one."""
    for i, (shape, other) in enumerate(zip(shapes, expected, strict=False)):
        if shape != other:
            span = text_spans(text).layouts[i]
            hint = "pass the expression alone, without sizes=, shape= or a plan"
            raise ShapeError(
                f"an operand of shape {shape}, not {other}", text=text, span=span, hint=hint
            )


def einsum_blocks(
    given: Given,
    blocks: Sequence[jax.Array],
    mesh: AnyMesh | None,
    shapes: Shapes | None,
    options: Choices,
) -> jax.Array:
    """This device's blocks -> its block of the result; shapes: global, None to infer them from the blocks."""
    call = contraction_of(given)
    dtype = jnp.result_type(*blocks)
    if isinstance(given, ContractionPlan):
        plan = given
        here = planned_mesh_here(mesh, plan.mesh, plan.axes, call.text)
        check_operands(plan, shapes or plan.shapes, dtype.name)
    else:
        here, machine = machine_here(
            mesh, (*call.operands, call.result), call.text, options.profile
        )
        whole = shapes or whole_shapes(call, here, tuple(x.shape for x in blocks))
        plan = options._replace(profile=machine).plan(call, here, whole, dtype)
    left = []
    spans = text_spans(call.text).layouts
    for x, array, move, span in zip(blocks, plan.arrays, plan.moves, spans, strict=False):
        check_block_here(x.shape, array, call.text, inferred=shapes is None, start=span[0])
        x = with_entry_type(x, move, call.text, here.axes, span)
        named = move.source
        rows = partial(_rows, move.source)
        left.append(named_block(x, array.layout, named, named.max_local_shape, rows))
    moved = partial(_moved, here=here, text=plan.text)
    for part in plan.parts:
        operands = [left[i] for i in part.takes]
        left = [x for i, x in enumerate(left) if i not in part.takes]
        if part.ring is not None:
            left.append(_in_rounds(part, part.ring, operands, moved, options))
        else:
            contracted = list(map(moved, operands, part.moves))
            left.append(moved(_local(part, contracted, options), part.result))
    return left[0].reshape(plan.arrays[-1].max_local_shape)


def _rows(named: Sharding, name: str) -> jax.Array:
    """The global rows of a dim in this device's block."""
    return mine(row_table(named, named.dim_index(name)), named.layout.dim(name).axes)


def _moved(x: jax.Array, plan: Plan, here: Mesh, text: str) -> jax.Array:
    """A block after a move, on the part of the mesh that is here and in the dtype that it has."""
    fits = plan.mesh == here and plan.dtype == x.dtype.name
    return execute(
        plan if fits else replace(plan, mesh=here, dtype=x.dtype.name, devices=()), x, text
    )


def _local(part: Part, operands: Sequence[jax.Array], options: Choices) -> jax.Array:
    """Blocks under the layouts where they are contracted -> the block of the local result."""
    numbers = defaultdict[str, int](itertools.count().__next__)
    layouts = *(move.dst for move in part.moves), part.result.src
    names = [tuple(numbers[name] for name in layout.names) for layout in layouts]
    arithmetic = {"preferred_element_type": options.dtype, "precision": options.precision}
    if len(operands) == 1:
        return jnp.einsum(operands[0], *names, **arithmetic)
    return multiplied(operands[0], operands[1], names, **arithmetic)


def _in_rounds(
    part: Part, ring: ContractionRing, operands: Sequence[jax.Array], moved: Move, options: Choices
) -> jax.Array:
    """A part's blocks -> its result. No product waits for the message that is sent in its round."""

    def starts(rows: int) -> list[jax.Array]:
        """The row at which each piece begins, in the order in which this device contracts them."""
        return [piece * rows for piece in ring.order(lax.axis_index(ring.axis))]

    pieces: list[Sequence[jax.Array]] = []  # of each operand, one for each product
    for i, (x, move) in enumerate(zip(operands, part.moves, strict=True)):
        x = moved(x, ring.rest if i == ring.operand else move)
        if ring.dim not in move.dst.names:
            pieces.append([x] * ring.products)
            continue
        d = move.dst.dim_index(ring.dim)
        if i == ring.operand:
            blocks = jnp.split(x, ring.pieces, d)
            while len(blocks) < ring.products:
                blocks.append(moved(blocks[-ring.pieces], ring.rotation))
        else:
            rows = x.shape[d] // ring.products
            blocks = [lax.dynamic_slice_in_dim(x, start, rows, d) for start in starts(rows)]
        pieces.append(blocks)
    results = [_local(part, each, options) for each in zip(*pieces, strict=True)]
    if ring.dim not in part.result.src.names:
        return moved(reduce(add, results), part.result)
    d = part.result.src.dim_index(ring.dim)
    if ring.operand is None:
        rounds = [results[i :: ring.pieces] for i in range(ring.pieces)]
        sums = [reduce(lambda y, x: moved(y, ring.rotation) + x, each) for each in rounds]
        return moved(jnp.concatenate(sums, d), ring.rest)
    y = jnp.zeros_like(jnp.concatenate(results, d))
    for x, start in zip(results, starts(results[0].shape[d]), strict=True):
        y = lax.dynamic_update_slice_in_dim(y, x, start, d)
    return moved(y, part.result)
