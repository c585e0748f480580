"""A planned contraction of blocks: its moves, and `jnp.einsum` on what every device then has.

Decides how a contraction is carried out inside `jax.shard_map`, `jax.pmap` or `jax.vmap(axis_name=)`. Its
derivatives are those of the moves and of `jnp.einsum`; a gradient that is planned in a place of its own is
contracted there. Padding is zero after a move, so it adds nothing to a sum.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jax_bridge.autodiff.product import multiplied
from jax_bridge.mesh.axis_types import as_varying, varying_axes
from jax_bridge.planning import AnyMesh, check_block_here, given_mesh_here, machine_here, with_entry_type
from jax_bridge.redistribution import carry_out
from xshard import ContractionPlan, Layout, Mesh, Plan, Profile, planner
from xshard.contractions.blocks import Shapes, whole_shapes
from xshard.contractions.expression import Contraction, contraction
from xshard.contractions.plan import Part
from xshard.contractions.ring import Ring
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
    """The axes that the plan makes use of, also for gradients in places of their own."""
    apart = (own.parts[0] for part in plan.parts for own in part.gradients if own)
    moves = (move for part in (*plan.parts, *apart) for move in (*part.moves, part.result))
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
        here = given_mesh_here(mesh, plan.mesh, axes_of(plan), given.text)
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
    return carry_out(plan if fits else replace(plan, mesh=here, dtype=x.dtype.name, devices=()), x, text)


def _part(
    part: Part,
    given: list[jax.Array],
    here: Mesh,
    product: Product,
    text: str,
    first: jax.Array | None = None,
) -> jax.Array:
    """The blocks that a part takes, under the layouts where they are -> the block of its result.

    first: the first of them where it is contracted, if it is there already.
    """
    ring, moved = part.ring, partial(_moved, here=here, text=text)

    def used(i: int, x: jax.Array) -> Any:
        if i == 0 and first is not None:
            return first
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

    if all(own is None for own in part.gradients):
        return result(*map(used, range(len(given)), given))
    # What one operand varies along, the result does, and so does every gradient.
    unnamed = frozenset[str]().union(*map(varying_axes, given)).difference(here.axes)
    given = [as_varying(x, unnamed) for x in given]
    return _with_own_gradients(part, result, here, product)(given, list(map(used, range(len(given)), given)))


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


def _in_rounds(part: Part, ring: Ring, used: Sequence[Any], product: Product) -> list[jax.Array]:
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


def _together(blocks: list[jax.Array], layout: Layout, ring: Ring) -> jax.Array:
    """The blocks of all pieces, laid side by side in the order of their rows."""
    at = layout.dim_index(ring.dim)
    y = jnp.zeros_like(jnp.concatenate(blocks, at))
    for x, start in zip(blocks, _starts(ring, blocks[0].shape[at]), strict=True):
        y = lax.dynamic_update_slice_in_dim(y, x, start, at)
    return y


def _starts(ring: Ring, rows: int) -> list[jax.Array]:
    """The row at which each piece begins that a device contracts."""
    return [piece * rows for piece in ring.order(lax.axis_index(ring.axis))]


def _with_own_gradients(
    part: Part, result: Callable[..., jax.Array], here: Mesh, product: Product
) -> Callable[[list[jax.Array], list[Any]], jax.Array]:
    """The operands as they are given, and as they are used -> the result.

    Where a gradient has a plan of its own, the tangent of that operand, as it is given, takes the transpose
    of this plan; so its cotangent takes the plan itself, in every mode of differentiation.
    """

    def whole(j: int, x: Any) -> jax.Array:
        return _together(x, part.moves[j].dst, part.ring) if part.ring and isinstance(x, list) else x

    @jax.custom_jvp
    def contracted(_: list[jax.Array], used: list[Any]) -> jax.Array:
        return result(*used)

    @partial(contracted.defjvp, symbolic_zeros=True)
    def rule(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        given, used = primals
        along = [i for i in part.shared if not _is_zero(tangents[1][i])]

        def shared(*some: Any) -> jax.Array:
            replaced = dict(zip(along, some, strict=True))
            return result(*(replaced.get(i, x) for i, x in enumerate(used)))

        y, tangent = jax.jvp(shared, [used[i] for i in along], [tangents[1][i] for i in along])
        owns = {
            i: own for i, own in enumerate(part.gradients) if own is not None and not _is_zero(tangents[0][i])
        }

        def pulled(cotangent: jax.Array) -> list[jax.Array]:
            travelled: dict[Layout, jax.Array] = {}  # where several take it to one place, it travels once
            found = []
            for i, own in owns.items():
                [alone], rest = own.parts, (j for j in range(len(given)) if j != i)
                pairs = zip(rest, part.as_used(i), strict=True)
                others = [whole(j, used[j]) if as_used else given[j] for j, as_used in pairs]
                to = alone.moves[0]
                at, moves = cotangent, [to] if to.src == part.result.dst.dual else [part.result.backward, to]
                for move in moves:
                    if move.dst not in travelled:
                        travelled[move.dst] = _moved(at, move, here, own.text)
                    at = travelled[move.dst]
                made = _part(alone, [cotangent, *others], here, product, own.text, travelled[to.dst])
                found.append(made.astype(given[i].dtype))
            return found

        if owns:
            tangent += jax.linear_transpose(pulled, y)([tangents[0][i] for i in owns])[0]
        return y, tangent

    return contracted


def _is_zero(tangent: Any) -> bool:
    """True if there is no tangent, also of an operand that is a list of blocks."""
    return type(jax.tree.leaves(tangent)[0]) is SymbolicZero
