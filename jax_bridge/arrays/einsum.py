"""`einsum`: the contraction of blocks inside `shard_map`, or of global arrays by one cached program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from jax_bridge.arrays.program import LOG
from jax_bridge.arrays.stored import ArrayMesh, StoredArray, check_order, remember
from jax_bridge.calls import are_keys, as_array
from jax_bridge.einsum import Choices, check_operands, check_shapes, einsum_blocks
from jax_bridge.mesh.axis_types import as_tagged, bound_sizes
from jax_bridge.mesh.context import AnyMesh, free_axes, machine
from xshard import ContractionPlan, ProfileLike
from xshard.contractions.expression import Contraction
from xshard.contractions.plan import contraction_of
from xshard.contractions.ring import NEVER
from xshard.contractions.shapes import Shapes, for_operands, shapes_of, whole_lengths
from xshard.errors import DtypeError
from xshard.formatting import format_bytes
from xshard.notation.maps import Maps
from xshard.notation.parser import with_maps


def einsum(
    expression: str | ContractionPlan,
    *operands: jax.typing.ArrayLike,
    mesh: AnyMesh | None = None,
    shape: Sequence[Sequence[int]] | None = None,
    sizes: Mapping[str, int] | None = None,
    profile: ProfileLike = "auto",
    overlap: str = NEVER,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    maps: Maps | None = None,
) -> jax.Array:
    """Arrays under the layouts left of the arrow -> their einsum under the right one, differentiable.

    Inside `jax.shard_map`, `jax.pmap` or `jax.vmap(axis_name=)` over the axes that the expression names, they
    are blocks, as for `redistribute`; outside, global arrays, as for `reshard`.
    expression: `"layout, layout -> layout"`, in which dims that the right side lacks are summed, or a plan of
    one; `...`, composed dims, `(h d)/tp`, and diagonals, `i i`, are as in numpy and einops.
    mesh: default: the one of the context, or the arrays' own. sizes: the length of every dim, by name;
    or shape: the global shape of every operand; by default the arrays', or, assuming that all blocks are
    equal, as the blocks say. Uneven blocks are padded, as in `redistribute`.
    profile: the machine to plan for. overlap: whether gathers and reduce-scatters may run in rounds, so that
    XLA can send while it contracts: "never", "auto" or "always", as for `xshard.plan`.
    preferred_element_type, precision: options of `jax.numpy.einsum` for the local products; sums over devices
    are in the dtype of these. maps: the `Owners` and `Needs` that layouts name.

    Raises, before anything is sent, NotationError, MeshError, ShapeError, DtypeError, PlanError.

    >>> mesh = jax.make_mesh((1,), ("tp",))
    >>> x, w = (
    ...     jnp.ones((8, 4)),
    ...     jax.device_put(jnp.ones((4, 6)), jax.NamedSharding(mesh, jax.P(None, "tp"))),
    ... )
    >>> y = einsum("n d, d f/tp -> n f/tp", x, w)
    >>> y.sharding.spec, float(y[0, 0])
    (P(None, 'tp'), 4.0)
    """
    call = contraction_of(with_maps(expression, maps))
    text = call.text
    arrays = tuple(as_array(x, text) for x in operands)
    if any(map(are_keys, arrays)):
        raise DtypeError("PRNG keys cannot be multiplied", text=text, hint="reshard moves them")
    own_shapes = tuple(x.shape for x in arrays)
    shapes = (
        None
        if sizes is None and shape is None
        else shapes_of(call, *whole_lengths(sizes, shape))[1]
    )
    call = for_operands(call, own_shapes)
    asked = expression if isinstance(expression, ContractionPlan) else call
    dtype = jnp.result_type(*arrays)
    preferred = dtype if preferred_element_type is None else np.dtype(preferred_element_type)
    options = Choices(profile, overlap, preferred, precision)
    axes = {axis for layout in (*call.operands, call.result) for axis in layout.axes}
    if bound_sizes(axes) and not (
        axes and axes <= set(free_axes(jax.sharding.get_abstract_mesh()))
    ):
        return einsum_blocks(asked, arrays, mesh, shapes, options)
    here = ArrayMesh.of(arrays, [text] * len(arrays), mesh)
    if shapes is None:
        shapes = (
            asked.shapes
            if isinstance(asked, ContractionPlan)
            else shapes_of(call, None, own_shapes)[1]
        )
    options = options._replace(profile=machine(profile, here.here))
    plan, sources, run = _program(asked, here, shapes, dtype, options)
    check_shapes(tuple(array.shape for array in plan.arrays), own_shapes, text)
    for x, source in zip(arrays, sources, strict=True):
        source.check(x)
        check_order(x, source.array, text)
    placed = [source.bring(x) for x, source in zip(arrays, sources, strict=True)]
    return remember(run(*placed), plan.arrays[-1])


@lru_cache(maxsize=4096)
def _program(
    given: Contraction | ContractionPlan,
    mesh: ArrayMesh,
    shapes: Shapes,
    dtype: np.dtype,
    options: Choices,
) -> tuple[ContractionPlan, list[StoredArray], Callable[..., jax.Array]]:
    """A plan, the arrays that it expects, and a jitted function of all operands."""
    call = contraction_of(given)
    text = call.text
    free = mesh.free([axis for layout in call.arrays for axis in layout.axes], text)
    if isinstance(given, ContractionPlan):
        plan = given
        check_operands(plan, shapes, dtype.name)
        mesh.free(plan.axes, text, plan.mesh)
    else:
        plan = options.plan(call, free, shapes, dtype)
    *sources, target = (StoredArray.of(array, mesh, text) for array in plan.arrays)
    received = format_bytes(plan.bytes_received)
    LOG.info(
        "einsum %s, %s%s: %s received by the busiest device",
        text,
        dtype.name,
        list(shapes),
        received,
    )

    def local(*blocks: jax.Array) -> jax.Array:
        return as_tagged(einsum_blocks(plan, blocks, None, None, options), call.result)

    specs: Any = {
        "in_specs": tuple(x.sharding.spec for x in sources),
        "out_specs": target.sharding.spec,
    }
    on_devices = jax.shard_map(local, mesh=mesh.here, axis_names=frozenset(free.axes), **specs)
    # A mesh without devices comes from the context: the jit around this one knows the devices.
    run = jax.jit(
        on_devices, out_shardings=None if isinstance(mesh.here, AbstractMesh) else target.sharding
    )
    return plan, sources, run
