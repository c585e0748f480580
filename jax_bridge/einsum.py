"""A planned contraction of blocks: its moves, and `jnp.einsum` on what every device then has.

Decides how a contraction is carried out inside `jax.shard_map`, `jax.pmap` or `jax.vmap(axis_name=)`. Its
derivatives are those of the moves and of `jnp.einsum`. Padding is zero after a
move, so it adds nothing to a sum.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_bridge.autodiff.product import multiplied
from jax_bridge.calls import execute, with_entry_type
from jax_bridge.mesh.context import AnyMesh, check_block_here, machine_here, planned_mesh_here
from xshard import ContractionPlan, Layout, Mesh, Plan, Profile, planner
from xshard.contractions.expression import Contraction, contraction
from xshard.contractions.plan import Part
from xshard.contractions.ring import ContractionRing
from xshard.contractions.shapes import Shapes, whole_shapes
from xshard.errors import DtypeError, ShapeError
from xshard.notation.parser import text_spans


class Product(NamedTuple):
    """How local products are made: `preferred_element_type` and `precision` of `jnp.einsum`."""

    dtype: Any
    precision: Any


def contraction_of(expression: Any) -> Contraction:
    """The layouts of operands and result. Raises NotationError."""
    return expression.contraction if isinstance(expression, ContractionPlan) else contraction(expression)


def plan_for(
    text: str, mesh: Mesh, shapes: Shapes, dtype: np.dtype, profile: str | Path | Profile, overlap: str
) -> ContractionPlan:
    """The cheapest plan."""
    whole = tuple(map(tuple, shapes))
    return planner.plan_contraction(text, mesh, None, whole, dtype.name, profile, None, None, None, overlap)


def axes_of(plan: ContractionPlan) -> tuple[str, ...]:
    """The axes that the plan makes use of."""
    moves = (move for part in plan.parts for move in (*part.moves, part.result))
    return tuple(dict.fromkeys(axis for move in moves for axis in move.axes))


def check_given(plan: ContractionPlan, shapes: Shapes, dtype: str) -> None:
    """Raise for operands of other shapes or another dtype than a given plan is for."""
    if dtype != plan.dtype:
        what = f"the operands are {dtype}, the plan is for {plan.dtype}"
        raise DtypeError(what, text=plan.text, hint="pass the expression, or a plan made for them")
    check_shapes(plan.shapes, shapes, plan.text)


def check_shapes(said: Shapes, found: Shapes, text: str) -> None:
    """Raise ShapeError, marking the operand, where a shape is not the one that is said."""
    for i, (one, other) in enumerate(zip(found, said, strict=True)):
        if one != other:
            span = text_spans(text).layouts[i]
            hint = "pass the expression alone, without sizes=, shape= or a plan"
            raise ShapeError(f"an operand of shape {one}, not {other}", text=text, span=span, hint=hint)


def einsum_blocks(
    expression: str | ContractionPlan,
    blocks: Sequence[jax.Array],
    mesh: AnyMesh | None,
    shapes: Shapes | None,
    profile: str | Path | Profile,
    overlap: str,
    product: Product,
) -> jax.Array:
    """This device's blocks of the operands -> its block of the result. Raises as `einsum` does.

    shapes: global, of the operands; None to infer them from the blocks.
    """
    given, dtype = contraction_of(expression), jnp.result_type(*blocks)
    if isinstance(expression, ContractionPlan):
        plan = expression
        here = planned_mesh_here(mesh, plan.mesh, axes_of(plan), given.text)
        check_given(plan, shapes or plan.shapes, dtype.name)
    else:
        here, machine = machine_here(mesh, (*given.operands, given.result), given.text, profile)
        whole = shapes or whole_shapes(given, here, [x.shape for x in blocks])
        plan = plan_for(given.text, here, whole, dtype, machine, overlap)
    entries = zip(blocks, plan.moves, text_spans(given.text).layouts, strict=False)
    typed = []
    for x, move, span in entries:
        check_block_here(x.shape, move.source, given.text, inferred=shapes is None, start=span[0])
        typed.append(with_entry_type(x, move, given.text, here.axes, span))
    return _contracted(plan, typed, here, product)


def _contracted(
    plan: ContractionPlan, blocks: Sequence[jax.Array], here: Mesh, product: Product
) -> jax.Array:
    left = list(blocks)
    for part in plan.parts:
        taken = [left[i] for i in part.takes]
        rest = [x for i, x in enumerate(left) if i not in part.takes]
        left = [*rest, _part(part, taken, here, product, plan.text)]
    return left[0]


def _moved(x: jax.Array, plan: Plan, here: Mesh, text: str) -> jax.Array:
    """A block after a move, on the part of the mesh that is here and in the dtype that it has."""
    fits = plan.mesh == here and plan.dtype == x.dtype.name
    return execute(plan if fits else replace(plan, mesh=here, dtype=x.dtype.name, devices=()), x, text)


def _part(part: Part, given: list[jax.Array], here: Mesh, product: Product, text: str) -> jax.Array:
    """The blocks that a part takes, under the layouts where they are -> the block of its result."""
    ring, moved = part.ring, partial(_moved, here=here, text=text)

    def used(i: int, x: jax.Array) -> Any:
        if ring is None or i != ring.operand:
            return moved(x, part.moves[i])
        blocks = jnp.split(moved(x, ring.rest), ring.pieces, part.moves[i].dst.dim_index(ring.dim))
        while len(blocks) < ring.products:
            blocks.append(moved(blocks[-ring.pieces], ring.rotation))
        return blocks

    def result(*operands: Any) -> jax.Array:
        if ring is None:
            return moved(_local(part, operands, product), part.result)
        blocks = _in_rounds(part, ring, operands, product)
        if ring.operand is None:
            sums = [
                reduce(lambda y, x: moved(y, ring.rotation) + x, blocks[i :: ring.pieces])
                for i in range(ring.pieces)
            ]
            return moved(jnp.concatenate(sums, part.result.src.dim_index(ring.dim)), ring.rest)
        kept = ring.dim in part.result.src.names
        return moved(_together(blocks, part.result.src, ring) if kept else reduce(add, blocks), part.result)

    return result(*map(used, range(len(given)), given))


def _local(part: Part, used: Sequence[jax.Array], product: Product) -> jax.Array:
    """Blocks under the layouts where they are contracted -> the block of the local result."""
    numbers = defaultdict[str, int](itertools.count().__next__)
    names = [
        tuple(numbers[name] for name in layout.names)
        for layout in (*(move.dst for move in part.moves), part.result.src)
    ]
    options = {"preferred_element_type": product.dtype, "precision": product.precision}
    if len(used) == 1:
        return jnp.einsum(used[0], *names, **options)
    return multiplied(used[0], used[1], names, **options)


def _in_rounds(part: Part, ring: ContractionRing, used: Sequence[Any], product: Product) -> list[jax.Array]:
    """What a device contracts, piece by piece, where an operand that travels is the blocks that it gets.

    No product waits for the message that is sent in its round.
    """
    parts: list[Any] = []
    for x, move in zip(used, part.moves, strict=True):
        if ring.dim in move.dst.names and not isinstance(x, list):
            at = move.dst.dim_index(ring.dim)
            rows = x.shape[at] // ring.products
            x = [lax.dynamic_slice_in_dim(x, start, rows, at) for start in _starts(ring, rows)]
        parts.append(x if isinstance(x, list) else [x] * ring.products)
    return [_local(part, each, product) for each in zip(*parts, strict=True)]


def _together(blocks: list[jax.Array], layout: Layout, ring: ContractionRing) -> jax.Array:
    """The blocks of all pieces, laid side by side in the order of their rows."""
    at = layout.dim_index(ring.dim)
    y = jnp.zeros_like(jnp.concatenate(blocks, at))
    for x, start in zip(blocks, _starts(ring, blocks[0].shape[at]), strict=True):
        y = lax.dynamic_update_slice_in_dim(y, x, start, at)
    return y


def _starts(ring: ContractionRing, rows: int) -> list[jax.Array]:
    """The row at which each piece begins that a device contracts."""
    return [piece * rows for piece in ring.order(lax.axis_index(ring.axis))]
