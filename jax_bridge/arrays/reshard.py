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
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, Sharding

from jax_bridge.arrays.order import check_order, remember
from jax_bridge.arrays.primitive import Mesh
from jax_bridge.arrays.program import Program, make_program
from jax_bridge.keys import are_keys, as_words
from jax_bridge.planning import NotLayout, as_array, jax_mesh, parse_call, xshard_mesh
from jax_bridge.versions import unreduced_kind, with_sharding
from xshard import Layout, MeshError, Plan, Profile, ShapeError, XshardError
from xshard.plans.expression import Expression, Sides


def reshard(
    arrays: Any,
    expression: Any,
    mesh: Mesh | None = None,
    *,
    donate: bool = False,
    profile: str | Path | Profile = "h100",
) -> Any:
    """Global arrays under the left layout -> the same arrays under the right one, differentiable.

    arrays: one, or a pytree moved by one program. expression: `"layout -> layout"`, a pair of layouts, or a
    plan; for a pytree one for all, or a pytree prefix with one for each. mesh: by default the arrays' own.
    A committed array must be sharded by its left layout; XLA first brings an array of unknown sharding (a
    tracer on Auto axes, a numpy array) there. If the left layout has zigzag or another order, the array must
    be known to be stored in it: it comes from here, or `stored_as` says so. Tracers are believed.
    donate: results may reuse the arrays' memory, and the arrays are deleted.
    Compiled once per expression, mesh, shape and dtype; the log "xshard.reshard" reports it.

    Raises, before anything is sent, NotationError, MeshError, DtypeError, PlanError; ShapeError for dims
    that do not divide and for an array with another sharding or order; XshardError for expressions that do
    not fit the pytree.

    >>> mesh = jax.make_mesh((1,), ("cp",))
    >>> x = jax.device_put(jax.numpy.ones((4, 2)), NamedSharding(mesh, jax.P("cp")))
    >>> reshard(x, "s/cp c -> s c/cp").sharding.spec
    P(None, 'cp')
    >>> moved = reshard({"w": x, "b": x}, {"w": "s/cp c -> s c/cp", "b": "s/cp c -> s c"})
    >>> moved["b"].sharding.spec
    P(None, None)
    """
    given, tree = jax.tree.flatten(arrays)
    expressions = _expressions(expression, arrays, len(given))
    if not given:
        return arrays
    parsed = tuple(map(parse_call, given, expressions))
    entries = [_entry(x, e, p) for x, e, p in zip(given, expressions, parsed, strict=True)]
    leaves, moves = [entry.x for entry in entries], tuple(entry.move for entry in entries)
    mesh = _mesh_of(leaves, [p.text for p in parsed]) if mesh is None else jax_mesh(mesh)
    shapes, dtypes = tuple(x.shape for x in leaves), tuple(x.dtype for x in leaves)
    here = _mesh_here(mesh, parsed[0].text)
    program = make_program(moves, here, shapes, dtypes, donate, profile)
    checked = zip(leaves, given, parsed, program.plans, program.sources, strict=True)
    for x, array, p, plan, source in checked:
        _check(x, p, source.spec, mesh, donate)
        check_order(array, plan.source, p.text)
    leaves = [_brought(x, at, here is not mesh) for x, at in zip(leaves, program.sources, strict=True)]
    moved = zip(_run(program, leaves, donate), entries, program.plans, strict=True)
    results = ((y if entry.back is None else entry.back(y), plan) for y, entry, plan in moved)
    return jax.tree.unflatten(tree, [remember(y, plan.target) for y, plan in results])


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


def _expressions(expression: Any, arrays: Any, n: int) -> tuple[Expression, ...]:
    """The expression of every leaf."""
    if _is_expression(expression):
        return (expression,) * n
    try:
        found = jax.tree.broadcast(expression, arrays, is_leaf=_is_expression)
    except ValueError as error:
        raise XshardError(
            f"the expressions do not fit the arrays: {error}",
            hint="pass one for all arrays, or a pytree prefix of the arrays with one for each",
        ) from None
    return tuple(jax.tree.leaves(found, is_leaf=_is_expression))


def _is_expression(value: Any) -> bool:
    """True for a pair of layouts; False for a pair of expressions, which is a pytree."""
    if isinstance(value, tuple) and len(value) == 2:
        return all(
            isinstance(side, Layout | NotLayout) or (isinstance(side, str) and "->" not in side)
            for side in value
        )
    return isinstance(value, str | Plan | NotLayout)


def _check(x: jax.Array, parsed: Sides, spec: PartitionSpec, mesh: Mesh, donate: bool) -> None:
    """Raise if the array is known to be sharded differently from the left side."""
    if isinstance(x, Tracer):
        if donate:
            raise XshardError(
                "a traced array cannot be donated",
                text=parsed.text,
                hint="donate it to the jit that is being traced: jax.jit(f, donate_argnums=...)",
            )
        found = jax.typeof(x).sharding
        if found.mesh.empty or any(kind != AxisType.Explicit for kind in found.mesh.axis_types):
            return
        source = NamedSharding(found.mesh, spec, memory_kind=found.memory_kind)
    elif not x.committed:
        return
    elif isinstance(mesh, AbstractMesh):
        raise MeshError(
            "the array is on devices, the mesh given has none",
            text=parsed.text,
            hint="pass the jax.Mesh, or nothing",
        )
    else:
        found, source = x.sharding, NamedSharding(mesh, spec)
    if not are_the_same(found, source, x.ndim):
        raise ShapeError(
            f"the array is not sharded as '{parsed.src}' says", text=parsed.text, hint=f"it has {found}"
        )


def are_the_same(found: Sharding, source: NamedSharding, ndim: int) -> bool:
    """True if every device has the same part of the array, under the same tags."""
    # JAX's own comparison ignores which axes are unreduced or reduced.
    return found == source or (_tags(found) == _tags(source) and found.is_equivalent_to(source, ndim))


def _tags(sharding: Sharding) -> tuple[frozenset[str], frozenset[str], str]:
    if isinstance(sharding, NamedSharding):
        spec = sharding.spec
        return frozenset(spec.unreduced), frozenset(spec.reduced), unreduced_kind(spec)
    return frozenset(), frozenset(), "sum"


def _mesh_of(leaves: Sequence[jax.Array], texts: Sequence[str]) -> Mesh:
    """The mesh of the arrays; that of the context if the arrays have none."""
    found: Mesh | None = None
    for x, text in zip(leaves, texts, strict=True):
        mesh = _own_mesh(x)
        if mesh is not None and found is not None and mesh != found:
            raise MeshError(
                f"the arrays are on several meshes: {found} and {mesh}",
                text=text,
                hint="one call moves the arrays of one mesh",
            )
        found = mesh or found
    if found is not None:
        return found
    if not (context := jax.sharding.get_abstract_mesh()).empty:
        return context
    raise MeshError(
        "JAX does not say on which mesh the array is", text=texts[0], hint="reshard(array, expression, mesh)"
    )


def _mesh_here(mesh: Mesh, text: str) -> Mesh:
    """The mesh with the types that its axes have in the context: `auto_axes` and `shard_map` change them."""
    context = jax.sharding.get_abstract_mesh()
    if context.empty or mesh.abstract_mesh == context:
        return mesh
    if tuple(mesh.shape.items()) != tuple(context.shape.items()):
        raise MeshError(
            f"the mesh of the array is {xshard_mesh(mesh)!r}, that of the context {xshard_mesh(context)!r}",
            text=text,
            hint="leave the context, or let jax.reshard take the array to its mesh first",
        )
    return context


def _brought(x: jax.Array, source: NamedSharding, retyped: bool) -> jax.Array:
    """The array with the type of its source. One on devices keeps its place, in the types of the axes here;
    one that is nowhere yet is put on a mesh with Explicit axes as the source says."""
    if isinstance(x, Tracer) or x.committed:
        mesh = jax.typeof(x).sharding.mesh
        if not retyped or mesh.empty or mesh == source.mesh:
            return x
    elif AxisType.Explicit not in source.mesh.axis_types:
        return x
    spec = with_sharding(jax.typeof(x), source).sharding.spec  # of the Explicit axes alone
    return jax.reshard(x, NamedSharding(source.mesh, spec))


def _own_mesh(x: jax.Array) -> Mesh | None:
    if not isinstance(x, Tracer):
        return x.sharding.mesh if isinstance(x.sharding, NamedSharding) else None
    return None if jax.typeof(x).sharding.mesh.empty else jax.typeof(x).sharding.mesh
