"""`reshard`: global `jax.Array`s from one sharding to another, outside `shard_map` or under `jit`.

Decides what a layout means for a global array: JAX's array is the concatenation of the blocks in device
order. For contiguous cuts that is the array itself. A dim in zigzag or cyclic order is in storage order:
`s -> s/zigzag(cp)` permutes the rows to the order in which the devices store them, `s/zigzag(cp) -> s` back.
Which arrays are in storage order is remembered (`order`).

A global array has one gradient, so `copy` and `sum` need a mesh of Explicit axes, where JAX has reduced and
unreduced arrays. A global array has no uneven blocks: dims that do not divide are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from jax_bridge.arrays.given import brought, check_sharding, mesh_here, mesh_of
from jax_bridge.arrays.leaves import of_each
from jax_bridge.arrays.order import check_order, remember
from jax_bridge.arrays.primitive import Mesh
from jax_bridge.arrays.program import Program, make_program
from jax_bridge.keys import are_keys, as_words
from jax_bridge.mesh.machine import machine
from jax_bridge.planning import NotLayout, as_array, jax_mesh, parse_call
from xshard import Layout, Plan, Profile
from xshard.errors import located
from xshard.plans.expression import Expression, Sides


def reshard(
    arrays: Any,
    expression: Any,
    mesh: Mesh | None = None,
    *,
    donate: bool = False,
    profile: str | Path | Profile = "auto",
) -> Any:
    """Global arrays under the left layout -> the same arrays under the right one, differentiable.

    arrays: one, or a pytree moved by one program. expression: `"layout -> layout"`, a pair of layouts, or a
    plan; for a pytree one for all, `xshard.Rules` over the names of leaves, or a pytree prefix with either in
    the place of a branch (a dict is a pytree, no rules). mesh: by default the arrays' own.
    A committed array must be sharded by its left layout; XLA first brings an array of unknown sharding (a
    tracer on Auto axes, a numpy array) there. If the array is known to be stored in another order (it comes
    from here, or `stored_as` says so), it is refused; what JAX made is believed, unless XSHARD_DEBUG is on.
    donate: results may reuse the arrays' memory, and the arrays are deleted.
    Compiled once per expression, mesh, shape and dtype; the log "xshard.reshard" reports it.

    Raises, before anything is sent, NotationError, MeshError, DtypeError, PlanError; ShapeError for dims
    that do not divide and for an array with another sharding or order; XshardError for expressions that do
    not fit the pytree.

    >>> mesh = jax.make_mesh((1,), ("cp",))
    >>> x = jax.device_put(jax.numpy.ones((4, 2)), jax.NamedSharding(mesh, jax.P("cp")))
    >>> reshard(x, "s/cp c -> s c/cp").sharding.spec
    P(None, 'cp')
    >>> moved = reshard({"w": x, "b": x}, {"w": "s/cp c -> s c/cp", "b": "s/cp c -> s c"})
    >>> moved["b"].sharding.spec
    P(None, None)
    """
    given = of_each(expression, arrays, _is_expression)
    if not given:
        return arrays
    places, parsed, entries = tuple(leaf.place for leaf in given), [], []
    for leaf in given:
        with located(leaf.place):
            parsed.append(parse_call(leaf.x, leaf.said))
            entries.append(_entry(leaf.x, leaf.said, parsed[-1]))
    leaves, moves = [entry.x for entry in entries], tuple(entry.move for entry in entries)
    mesh = mesh_of(leaves, [p.text for p in parsed]) if mesh is None else jax_mesh(mesh)
    shapes, dtypes = tuple(x.shape for x in leaves), tuple(x.dtype for x in leaves)
    here = mesh_here(mesh, parsed[0].text)
    program = make_program(moves, here, shapes, dtypes, donate, machine(profile, here), places)
    checked = zip(leaves, given, parsed, program.plans, program.sources, strict=True)
    for x, leaf, p, plan, source in checked:
        with located(leaf.place):
            check_sharding(x, p.src, p.text, source.spec, mesh, donate)
            check_order(leaf.x, plan.source, p.text)
    leaves = [brought(x, at, here is not mesh) for x, at in zip(leaves, program.sources, strict=True)]
    moved = zip(_run(program, leaves, donate), entries, program.plans, strict=True)
    results = ((y if entry.back is None else entry.back(y), plan) for y, entry, plan in moved)
    return jax.tree.unflatten(jax.tree.structure(arrays), [remember(y, plan.target) for y, plan in results])


class _Entry(NamedTuple):
    """An array of numbers, where it is to go, and what makes the result of them again, if anything does."""

    x: jax.Array
    move: Sides | Plan
    back: Callable[[jax.Array], jax.Array] | None = None


def _entry(x: Any, expression: Expression, parsed: Sides) -> _Entry:
    x = as_array(x, parsed.text)
    if isinstance(expression, Plan):
        return _Entry(x, expression)
    return _Entry(*as_words(x, parsed)) if are_keys(x) else _Entry(x, parsed)


def _run(program: Program, leaves: list[jax.Array], donate: bool) -> Sequence[jax.Array]:
    # Transformations see each move as it is. A program of its own is for arrays, which have memory to donate.
    traced = any(isinstance(x, Tracer) for x in leaves)
    results = program.traced(*leaves) if traced else program.run(*leaves)
    if donate:
        for x in leaves:  # those whose memory no result could reuse
            if not x.is_deleted():
                x.delete()
    return results


def _is_expression(value: Any) -> bool:
    """True for a pair of layouts; False for a pair of expressions, which is a pytree."""
    if isinstance(value, tuple) and len(value) == 2:
        return all(
            isinstance(side, Layout | NotLayout) or (isinstance(side, str) and "->" not in side)
            for side in value
        )
    return isinstance(value, str | Plan | NotLayout)
