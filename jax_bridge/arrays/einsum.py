"""`einsum`: the contraction of blocks inside `shard_map`, or of global arrays outside of it or under `jit`.

Decides which of the two a call means, and what a contraction of global arrays is: one jitted program, the
contraction of their blocks, kept for the next call like it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from jax_bridge.arrays.given import brought, check_given_mesh, check_sharding, free_mesh, mesh_here, mesh_of
from jax_bridge.arrays.order import check_order, remember
from jax_bridge.arrays.primitive import Mesh
from jax_bridge.arrays.program import LOG, check_even
from jax_bridge.einsum import (
    Product,
    axes_of,
    check_given,
    check_shapes,
    contraction_of,
    einsum_blocks,
    plan_for,
)
from jax_bridge.keys import are_keys
from jax_bridge.mesh.axis_types import as_reduced, as_unreduced, bound_sizes
from jax_bridge.mesh.machine import machine
from jax_bridge.planning import AnyMesh, as_array, free_axes, jax_mesh
from jax_bridge.specs import storage_layout, to_named_sharding
from xshard import ContractionPlan, Profile
from xshard.contractions.blocks import Shapes, check_operands
from xshard.contractions.expression import shapes_of, whole_lengths
from xshard.contractions.ring import NEVER
from xshard.errors import DtypeError
from xshard.formatting import format_bytes
from xshard.notation.parser import mark_errors


def einsum(
    expression: str | ContractionPlan,
    *operands: Any,
    mesh: AnyMesh | None = None,
    sizes: Mapping[str, int] | None = None,
    shape: Shapes | None = None,
    profile: str | Path | Profile = "auto",
    overlap: str = NEVER,
    preferred_element_type: Any = None,
    precision: Any = None,
) -> jax.Array:
    """Arrays under the layouts left of the arrow -> their einsum under the right one, differentiable.

    Inside `jax.shard_map`, `jax.pmap` or `jax.vmap(axis_name=)` over the axes that the expression names, they
    are blocks, as for `redistribute`; outside, global arrays, as for `reshard`.
    expression: `"layout, layout -> layout"`, in which dims that the right side lacks are summed, or a plan of
    one. mesh: by default the one of the context, or the arrays' own. sizes: the length of every dim, by name;
    or shape: the global shape of every operand; by default the arrays', or, assuming that all blocks are
    equal, as the blocks say. Uneven blocks are padded as those of `redistribute` are.
    profile: the machine to plan for. overlap: whether gathers and reduce-scatters may run in rounds, so that
    XLA can send while it contracts: "never", "auto" or "always", as for `xshard.plan`.
    preferred_element_type, precision: of `jax.numpy.einsum`, for the local products; sums over devices are in
    the dtype that they give.

    Raises, before anything is sent, NotationError, MeshError, ShapeError, DtypeError, PlanError.

    >>> mesh = jax.make_mesh((1,), ("tp",))
    >>> x, w = jnp.ones((8, 4)), jax.device_put(jnp.ones((4, 6)), NamedSharding(mesh, jax.P(None, "tp")))
    >>> y = einsum("n d, d f/tp -> n f/tp", x, w)
    >>> y.sharding.spec, float(y[0, 0])
    (P(None, 'tp'), 4.0)
    """
    given = contraction_of(expression)
    text = given.text
    arrays = tuple(as_array(x, text) for x in operands)
    if any(map(are_keys, arrays)):
        raise DtypeError("PRNG keys have no products", text=text, hint="redistribute and reshard move them")
    found = tuple(x.shape for x in arrays)
    check_operands(given, found)
    shapes = None if sizes is None and shape is None else shapes_of(given, *whole_lengths(sizes, shape))
    dtype = jnp.result_type(*arrays)
    preferred = dtype if preferred_element_type is None else np.dtype(preferred_element_type)
    product = Product(preferred, precision)
    axes = {axis for layout in (*given.operands, given.result) for axis in layout.axes}
    if bound_sizes(axes) and not (axes and axes <= set(free_axes(jax.sharding.get_abstract_mesh()))):
        return einsum_blocks(expression, arrays, mesh, shapes, profile, overlap, product)
    mesh = mesh_of(arrays, [text] * len(arrays)) if mesh is None else jax_mesh(mesh)
    here = mesh_here(mesh, text)
    check_shapes(shapes or found, found, text)
    program = _program(expression, here, found, dtype, machine(profile, here), overlap, product)
    for x, move, source in zip(arrays, program.plan.moves, program.sources, strict=True):
        check_sharding(x, move.src, text, source.spec, mesh)
        check_order(x, move.source, text)
    placed = [brought(x, at, here is not mesh) for x, at in zip(arrays, program.sources, strict=True)]
    return remember(program.run(*placed), program.plan.result.target)


class _Program(NamedTuple):
    """A jitted function of all operands, its plan, and the shardings that it expects."""

    plan: ContractionPlan
    sources: list[NamedSharding]
    run: Callable[..., jax.Array]


@lru_cache(maxsize=4096)
def _program(
    expression: str | ContractionPlan,
    mesh: Mesh,
    shapes: tuple[tuple[int, ...], ...],
    dtype: np.dtype,
    profile: str | Path | Profile,
    overlap: str,
    product: Product,
) -> _Program:
    given = contraction_of(expression)
    text, layouts = given.text, (*given.operands, given.result)
    here = free_mesh(mesh, [axis for layout in layouts for axis in layout.axes], text)
    if isinstance(expression, ContractionPlan):
        plan = expression
        check_given(plan, shapes, dtype.name)
        with mark_errors(text):
            check_given_mesh(axes_of(plan), plan.mesh, here)
    else:
        plan = plan_for(text, here, shapes, dtype, profile, overlap)
    arrays = [*(move.source for move in plan.moves), plan.result.target]
    check_even(arrays, text)
    with mark_errors(text):
        *sources, target = (to_named_sharding(storage_layout(at.layout), mesh) for at in arrays)
    received = format_bytes(plan.bytes_received)
    LOG.info("einsum %s, %s%s: %s received by the busiest device", text, dtype.name, list(shapes), received)

    def local(*blocks: jax.Array) -> jax.Array:
        y = einsum_blocks(plan, blocks, None, None, profile, overlap, product)
        return as_reduced(as_unreduced(y, given.result.tagged("sum")), given.result.tagged("copy"))

    specs = tuple(at.spec for at in sources), target.spec
    axes = frozenset(free_axes(mesh))
    on_devices = jax.shard_map(local, mesh=mesh, in_specs=specs[0], out_specs=specs[1], axis_names=axes)
    # A mesh without devices comes from the context: the jit around this one knows the devices.
    run = jax.jit(on_devices, out_shardings=None if isinstance(mesh, AbstractMesh) else target)
    return _Program(plan, sources, run)
