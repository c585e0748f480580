"""A planned contraction of blocks: its moves, and `jnp.einsum` on what every device then has.

Decides how a contraction is carried out inside `jax.shard_map`, `jax.pmap` or `jax.vmap(axis_name=)`. Its
derivatives are those of the moves and of `jnp.einsum`; a gradient that is planned in a place of its own is
contracted there. Padding is zero after a move, so it adds nothing to a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jax_bridge.mesh.axis_types import as_varying, varying_axes
from jax_bridge.planning import AnyMesh, check_block_here, given_mesh_here, machine_here, with_entry_type
from jax_bridge.redistribution import carry_out
from xshard import ContractionPlan, DtypeError, Mesh, NotationError, Plan, Profile, ShapeError, planner
from xshard.contractions.expression import Contraction, contraction, is_contraction, shapes_of
from xshard.contractions.plan import Part
from xshard.notation.parser import text_spans
from xshard.plans.expression import whole_shape

Sizes = Mapping[str, int] | None
Shapes = Sequence[Sequence[int]]


class Product(NamedTuple):
    """How local products are made; a dtype is what they give."""

    dtype: Any
    precision: Any


def contraction_of(expression: Any, operands: Sequence[jax.Array]) -> Contraction:
    """The layouts of operands and result. Raises NotationError, and ShapeError unless the operands fit."""
    if isinstance(expression, ContractionPlan):
        given = expression.contraction
    else:
        given = contraction(expression)
        if not is_contraction(expression):
            hint = "redistribute and reshard move one array"
            raise NotationError("no contraction: one operand, no dim summed", text=expression, hint=hint)
    if len(operands) != len(given.operands):
        what = f"{len(operands)} arrays for {len(given.operands)} operands"
        raise ShapeError(what, text=given.text, hint="einsum(expression, array, array, ...)")
    for i, (x, layout) in enumerate(zip(operands, given.operands, strict=True)):
        if x.ndim != len(layout.dims):
            what = f"an array of shape {x.shape} for {len(layout.dims)} dims"
            raise ShapeError(what, text=given.text, span=text_spans(given.text).layouts[i])
    return given


def axes_of(plan: ContractionPlan) -> tuple[str, ...]:
    """The axes that the plan makes use of."""
    moves = (move for part in plan.parts for move in (*part.moves, part.result))
    return tuple(dict.fromkeys(axis for move in moves for axis in move.axes))


def check_given(plan: ContractionPlan, shapes: Shapes, dtype: str) -> None:
    """Raise for operands of other shapes or another dtype than a given plan is for."""
    if dtype != plan.dtype:
        raise DtypeError(f"the operands are {dtype}, the plan is for {plan.dtype}", text=plan.text)
    check_shapes(plan.shapes, shapes, plan.text)


def check_shapes(found: Shapes, said: Shapes, text: str) -> None:
    """Raise ShapeError, marking the operand, where a shape is not what is said of it."""
    for i, (one, other) in enumerate(zip(found, said, strict=True)):
        if one != other:
            what, span = f"an operand of shape {one}, not {other}", text_spans(text).layouts[i]
            raise ShapeError(what, text=text, span=span)


def einsum_blocks(
    expression: str | ContractionPlan,
    blocks: Sequence[jax.Array],
    mesh: AnyMesh | None,
    sizes: Sizes,
    shape: Shapes | None,
    profile: str | Path | Profile,
    product: Product,
) -> jax.Array:
    """This device's blocks of the operands -> its block of the result. Raises as `einsum` does."""
    given, inferred = contraction_of(expression, blocks), sizes is None and shape is None
    text, dtype = given.text, jnp.result_type(*blocks).name
    if isinstance(expression, ContractionPlan):
        plan = expression
        here = given_mesh_here(mesh, plan.mesh, axes_of(plan), text)
        check_given(plan, plan.shapes if inferred else shapes_of(given, sizes, shape), dtype)
    else:
        here, machine = machine_here(mesh, (*given.operands, given.result), text, profile)
        if inferred:
            pairs = zip(given.operands, blocks, strict=True)
            shape = [whole_shape(layout, here, x.shape, text) for layout, x in pairs]
        plan = planner.plan(text, here, shape, dtype, sizes=sizes, profile=machine)
    for i, (x, move) in enumerate(zip(blocks, plan.moves, strict=True)):
        check_block_here(x.shape, move.source, text, inferred=inferred, operand=i)
    entries = enumerate(zip(blocks, plan.moves, strict=True))
    typed = [with_entry_type(x, move, text, here.axes, i) for i, (x, move) in entries]
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


def _part(part: Part, given: list[jax.Array], here: Mesh, product: Product, text: str) -> jax.Array:
    """The blocks that a part takes, under the layouts where they are -> the block of its result."""

    def moved(x: jax.Array, plan: Plan) -> jax.Array:
        fits = plan.mesh == here and plan.dtype == x.dtype.name
        return carry_out(plan if fits else replace(plan, mesh=here, dtype=x.dtype.name, devices=()), x, text)

    def result(*used: jax.Array) -> jax.Array:
        return moved(_local(part, used, product), part.result)

    if all(own is None for own in part.gradients):
        return result(*map(moved, given, part.moves))
    # What one operand varies along, the result does, and so does every gradient.
    unnamed = frozenset[str]().union(*map(varying_axes, given)).difference(here.axes)
    given = [as_varying(x, unnamed) for x in given]
    return _with_own_gradients(part, result, here, product)(given, list(map(moved, given, part.moves)))


def _local(part: Part, used: Sequence[jax.Array], product: Product) -> jax.Array:
    """Blocks under the layouts where they are contracted -> the block of the local result."""
    names = [move.dst.names for move in part.moves]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(name for each in names for name in each))}
    given: list[Any] = []
    for x, dims in zip(used, names, strict=True):
        given += [x, [numbers[name] for name in dims]]
    kept = [numbers[name] for name in part.result.src.names]
    return jnp.einsum(*given, kept, preferred_element_type=product.dtype, precision=product.precision)


def _with_own_gradients(
    part: Part, result: Callable[..., jax.Array], here: Mesh, product: Product
) -> Callable[[list[jax.Array], list[jax.Array]], jax.Array]:
    """The operands as they are given, and as they are used -> the result.

    Where a gradient has a plan of its own, the tangent of that operand, as it is given, takes the transpose
    of this plan; so its cotangent takes the plan itself, in every mode of differentiation.
    """

    @jax.custom_jvp
    def contracted(_: list[jax.Array], used: list[jax.Array]) -> jax.Array:
        return result(*used)

    @partial(contracted.defjvp, symbolic_zeros=True)
    def rule(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        given, used = primals
        along = [i for i in part.shared if type(tangents[1][i]) is not SymbolicZero]

        def shared(*some: jax.Array) -> jax.Array:
            replaced = dict(zip(along, some, strict=True))
            return result(*(replaced.get(i, x) for i, x in enumerate(used)))

        y, tangent = jax.jvp(shared, [used[i] for i in along], [tangents[1][i] for i in along])
        for i, own in enumerate(part.gradients):
            if own is None or type(tangents[0][i]) is SymbolicZero:
                continue
            rest = [j for j in range(len(given)) if j != i]
            at = zip(own.contraction.operands[1:], rest, strict=True)
            others = [given[j] if layout == part.moves[j].src else used[j] for layout, j in at]

            def pulled(cotangent: jax.Array, own=own, i=i, others=others) -> jax.Array:
                wide = Product(None, product.precision)
                return _contracted(own, [cotangent, *others], here, wide).astype(given[i].dtype)

            tangent += jax.linear_transpose(pulled, y)(tangents[0][i])[0]
        return y, tangent

    return contracted
