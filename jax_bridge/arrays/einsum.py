"""`einsum`: the contraction of blocks inside `shard_map`, or of global arrays outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_bridge.arrays.program import LOG
from jax_bridge.arrays.stored import ArrayMesh, StoredArray, check_order, record_order
from jax_bridge.calls import are_keys, as_array
from jax_bridge.contractions import (
    ContractionOrPlan,
    EinsumOptions,
    check_operands,
    check_shapes,
    einsum_blocks,
)
from jax_bridge.mesh.axis_types import as_tagged, bound_sizes
from jax_bridge.mesh.context import AnyMesh, free_axes, machine_profile
from xshard import ContractionPlan, ProfileLike
from xshard.contractions.expression import Contraction
from xshard.contractions.plan import contraction_of, known_lengths
from xshard.contractions.ring import NEVER, Overlapping
from xshard.contractions.shapes import Shapes, for_operands, shapes_of
from xshard.cost.machine import with_addends
from xshard.cost.model import FREE, Addends
from xshard.dtypes import name_of
from xshard.errors import DtypeError, api_boundary
from xshard.formatting import format_bytes
from xshard.notation.maps import Maps
from xshard.notation.parser import with_map_digests


@api_boundary
def einsum(  # noqa: PLR0913  one option more than the limit; torch_bridge has the same
    expression: str | ContractionPlan,
    *operands: jax.typing.ArrayLike,
    mesh: AnyMesh | None = None,
    shape: Sequence[Sequence[int]] | None = None,
    sizes: Mapping[str, int] | None = None,
    profile: ProfileLike = "auto",
    overlap: Overlapping = NEVER,
    addends: Addends = FREE,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    maps: Maps | None = None,
) -> jax.Array:
    """Contract sharded arrays to a sharded result: einsum with layouts, differentiably.

        y = einsum("n d, d f/tp -> n f/tp", x, w)     # [n, d], [d, f] -> [n, f]; f sharded over tp

    Inside `jax.shard_map`, `jax.pmap` or `jax.vmap(axis_name=)` over the axes that the expression
    names, operands are blocks, as for `redistribute`; outside, global arrays, as for `reshard`.
    Uneven blocks are padded, as in `redistribute`.

    Args:
        expression: `"layout, layout -> layout"`, in which dims that the right side lacks are
            summed, or a plan of one. `...`, composed dims, `(h d)/tp`, and diagonals, `i i`, are as
            in numpy and einops.
        operands: The arrays or blocks, each under its layout left of the arrow.
        mesh: The mesh; by default the mesh of the context, or the arrays' own.
        shape: The global shape of every operand. Default: the arrays' shapes; of blocks, as they
            say if all blocks are equal.
        sizes: Lengths of dims by name, as of parts of composed ones; `shape` or the arrays give the
            others.
        profile: The machine to plan for.
        overlap: Whether gathers and reduce-scatters may run in rounds, so that XLA can send while
            it contracts: "never", "auto" or "always", as for `xshard.plan`.
        addends: As in `redistribute`, for the moves.
        preferred_element_type: As for `jax.numpy.einsum`, for the local products. Sums over devices
            are in the dtype of these.
        precision: As for `jax.numpy.einsum`, for the local products.
        maps: The `Owners` and `Needs` that layouts name.

    Returns:
        The result under the layout right of the arrow.

    Raises:
        NotationError: The text is wrong, marked with a caret. All errors come before anything is
            sent.
        MeshError: An axis is not in the mesh, or is manual where arrays are global.
        ShapeError: Lengths disagree, do not divide, or an array has another sharding or order.
        DtypeError: JAX cannot hold the numbers, or they are PRNG keys.
        PlanError: No plan leads to the result, or the given plan does not fit.

    Examples:
        >>> mesh = jax.make_mesh((1,), ("tp",))
        >>> x = jnp.ones((8, 4))
        >>> w = jax.device_put(jnp.ones((4, 6)), jax.NamedSharding(mesh, jax.P(None, "tp")))
        >>> y = einsum("n d, d f/tp -> n f/tp", x, w)
        >>> y.sharding.spec, float(y[0, 0])
        (P(None, 'tp'), 4.0)
    """
    call = contraction_of(with_map_digests(expression, maps))
    text = call.text
    arrays = tuple(as_array(x, text) for x in operands)
    if any(map(are_keys, arrays)):
        raise DtypeError("PRNG keys cannot be multiplied", text=text, hint="reshard moves them")
    operand_shapes = tuple(x.shape for x in arrays)
    call = for_operands(call, operand_shapes)
    contraction: ContractionOrPlan = call
    if isinstance(expression, ContractionPlan):
        contraction = expression
    known_sizes, shapes = known_lengths(contraction, sizes, shape)
    if shapes is None and isinstance(contraction, ContractionPlan):
        shapes = contraction.shapes

    dtype = jnp.result_type(*arrays)
    product_dtype = dtype
    if preferred_element_type is not None:
        product_dtype = np.dtype(name_of(preferred_element_type))
    profile = with_addends(profile, addends, expression)
    options = EinsumOptions(
        profile=profile,
        overlap=overlap,
        dtype=product_dtype,
        precision=precision,
        sizes=known_sizes,
    )
    if _are_blocks(call):
        return einsum_blocks(contraction, arrays, mesh, shapes, options)
    if shapes is None:
        _, shapes = shapes_of(call, known_sizes, operand_shapes)
    return _einsum_of_arrays(contraction, arrays, mesh, shapes, dtype, options)


def _einsum_of_arrays(
    contraction: ContractionOrPlan,
    arrays: Sequence[jax.Array],
    mesh: AnyMesh | None,
    shapes: Shapes,
    dtype: np.dtype,
    options: EinsumOptions,
) -> jax.Array:
    """Compute the einsum of global arrays by one jitted program, cached for the next call.

    Args:
        contraction: The contraction, or a plan of it.
        arrays: The operands.
        mesh: The mesh; None for the arrays' own.
        shapes: Their global shapes as the plan needs them, a length per name.
        dtype: Their common dtype.
        options: How the contraction is planned and computed.
    """
    # A call like an earlier one does no more than this and its caller.
    text = contraction_of(contraction).text
    array_mesh = ArrayMesh.of(arrays, [text] * len(arrays), mesh)
    profile = machine_profile(options.profile, array_mesh.in_context)
    program = _make_program(
        contraction, array_mesh, shapes, dtype, options._replace(profile=profile)
    )
    expected_shapes = tuple(array.shape for array in program.plan.arrays)
    check_shapes(expected_shapes, tuple(x.shape for x in arrays), text)
    # All arrays are checked before one is brought to its source: an error leaves nothing half done.
    for x, source in zip(arrays, program.sources, strict=True):
        source.check(x)
        check_order(x, source.array, text)
    placed = [
        source.with_expected_type(x) for x, source in zip(arrays, program.sources, strict=True)
    ]
    return record_order(program.run(*placed), program.plan.arrays[-1])


def _are_blocks(call: Contraction) -> bool:
    """Return whether the operands are one device's blocks, else they are global arrays.

    They are blocks inside a `shard_map`, `pmap` or named `vmap` over an axis of the layouts.
    Inside a `shard_map` over other axes only they are global arrays.
    """
    axes: set[str] = set()
    for layout in call.arrays:
        axes.update(layout.axes)
    if not bound_sizes(axes):
        return False
    free = free_axes(jax.sharding.get_abstract_mesh())
    return not axes or not axes <= free.keys()


class _ContractionProgram(NamedTuple):
    """A plan, the arrays that it expects, and a jitted function of all operands."""

    plan: ContractionPlan
    sources: list[StoredArray]
    run: Callable[..., jax.Array]


@lru_cache(maxsize=4096)
def _make_program(
    contraction: ContractionOrPlan,
    mesh: ArrayMesh,
    shapes: Shapes,
    dtype: np.dtype,
    options: EinsumOptions,
) -> _ContractionProgram:
    """Plan an einsum of global arrays, and make the jitted function that runs it.

    Args:
        contraction: The contraction, or a plan of it, which is checked.
        mesh: The mesh of the arrays.
        shapes: The operands' global shapes.
        dtype: The operands' common dtype.
        options: How it is planned and computed.
    """
    call = contraction_of(contraction)
    named_axes: list[str] = []
    for layout in call.arrays:
        named_axes += layout.axes
    free = mesh.free(named_axes, call.text)
    if isinstance(contraction, ContractionPlan):
        check_operands(contraction, shapes, dtype.name)
        mesh.check_plan(contraction, call.text)
        plan = contraction
    else:
        plan = options.plan(contraction, free, shapes, dtype)
    # The result is the last of the plan's arrays.
    *sources, target = [StoredArray.of(array, mesh, call.text) for array in plan.arrays]
    LOG.info(
        "einsum %s, %s%s: %s received by the busiest device",
        call.text,
        dtype.name,
        list(shapes),
        format_bytes(plan.bytes_received),
    )

    def contract_blocks(*blocks: jax.Array) -> jax.Array:
        y = einsum_blocks(plan, blocks, mesh=None, shapes=None, options=options)
        return as_tagged(y, call.result)

    on_devices = jax.shard_map(
        contract_blocks,
        mesh=mesh.in_context,
        axis_names=frozenset(free.axes),
        in_specs=tuple(source.sharding.spec for source in sources),
        out_specs=target.sharding.spec,
    )
    run = jax.jit(on_devices, out_shardings=target.sharding_on_devices)
    return _ContractionProgram(plan, sources, run)
