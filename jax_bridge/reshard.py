"""`reshard`: a global `jax.Array` from one sharding to another, outside `shard_map` or under `jit`.

Decides what a layout means for a global array: the array that JAX holds is the blocks put together
in the order of the devices. For plain cuts that is the array itself; a dim in zigzag or cyclic
order stands in storage order, so that `s -> s/zigzag(cp)` puts the rows in the order in which the
devices keep them, and `s/zigzag(cp) -> s` puts them back.

A global array has one gradient, so `copy` and `sum` need a mesh of Explicit axes, where JAX has
reduced and unreduced arrays. It has no uneven blocks: dims that do not divide are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import Mesh as JaxMesh

from jax_bridge.axes import reduced, unreduced
from jax_bridge.context import marked, xshard_mesh
from jax_bridge.ops import redistribute
from jax_bridge.sharding import to_named_sharding
from xshard import Layout, MeshError, Plan, Profile, ShapeError, planner
from xshard.notation import Shard
from xshard.spelling import Expression, sides


def reshard(
    array: jax.Array,
    expression: Expression,
    mesh: JaxMesh | AbstractMesh | None = None,
    *,
    profile: str | Path | Profile = "h100",
) -> jax.Array:
    """A global array under the left layout -> the same under the right one, differentiable.

    expression: `"layout -> layout"`, a pair of layouts, or a plan. mesh: the array's own where it is left
    out. A committed array must be sharded as the left layout says; one that JAX knows nothing
    of (a tracer on Auto axes, a numpy array) is brought there by XLA first.
    Compiled once per expression, mesh, shape and dtype.

    Raises NotationError, MeshError, DtypeError, PlanError; ShapeError for dims that do not divide
    and for an array that is sharded otherwise.

    >>> mesh = jax.make_mesh((1,), ("cp",))
    >>> x = jax.device_put(jnp.ones((4, 2)), NamedSharding(mesh, jax.P("cp")))
    >>> reshard(x, "s/cp c -> s c/cp").sharding.spec
    P(None, 'cp')
    """
    array = jnp.asarray(array)
    mesh = _mesh_of(array) if mesh is None else mesh
    program = _program(expression, mesh, array.shape, array.dtype.name, profile)
    known = not isinstance(array, jax.core.Tracer) and array.committed
    if known and isinstance(mesh, AbstractMesh):
        raise MeshError(
            "the array is on devices, the mesh given has none", hint="pass the jax.Mesh, or nothing"
        )
    if known and not array.sharding.is_equivalent_to(program.source, array.ndim):
        src, _, text = sides(expression)
        raise ShapeError(
            f"the array is not sharded as '{src}' says", text=text, hint=f"it has {array.sharding}"
        )
    return program.run(array)


class _Program(NamedTuple):
    source: NamedSharding
    run: Callable[[jax.Array], jax.Array]


@lru_cache(maxsize=4096)
def _program(
    expression: Expression,
    mesh: JaxMesh | AbstractMesh,
    shape: tuple[int, ...],
    dtype: str,
    profile: str | Path | Profile,
) -> _Program:
    if isinstance(expression, Plan):
        plan = expression
    else:
        plan = planner.plan(expression, xshard_mesh(mesh), shape, dtype, profile=profile)
    text = sides(expression)[2]
    for side in (plan.source, plan.target):
        if not side.is_even:
            raise ShapeError(
                f"a jax.Array has no uneven blocks: {shape} does not divide under '{side.layout}'",
                text=text,
                hint="pad the array, or redistribute(..., shape=) inside shard_map, which pads blocks",
            )
    with marked(text):
        source = to_named_sharding(_stored(plan.source.layout), mesh)
        target = to_named_sharding(_stored(plan.target.layout), mesh)

    def local(x: jax.Array) -> jax.Array:
        y = redistribute(x, plan)
        return reduced(unreduced(y, plan.dst.tagged("sum")), plan.dst.tagged("copy"))

    whole = jax.shard_map(local, mesh=mesh, in_specs=source.spec, out_specs=target.spec)
    return _Program(source, jax.jit(whole))


def _stored(layout: Layout) -> Layout:
    """The layout of the array in storage order: the same cuts, in the order of the devices."""
    dims = (replace(d, shards=tuple(Shard(s.axes) for s in d.shards)) for d in layout.dims)
    return replace(layout, dims=tuple(dims))


def _mesh_of(array: jax.Array) -> JaxMesh | AbstractMesh:
    """The mesh that the array is on or, where JAX does not say, the one of the context."""
    if not isinstance(array, jax.core.Tracer) and isinstance(array.sharding, NamedSharding):
        return array.sharding.mesh
    for mesh in (jax.typeof(array).sharding.mesh, jax.sharding.get_abstract_mesh()):
        if not mesh.empty:
            return mesh
    raise MeshError("JAX does not say on which mesh the array is", hint="reshard(array, expression, mesh)")
