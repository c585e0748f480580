"""JAX's rule for each step of a plan: collectives of `jax.lax` on one device's block. A block is padded to
the largest, and varying along all axes of the plan; the end declares replicas once. A step works on the
normal form of its layouts: all its axes have more than one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from numpy.typing import NDArray

from jax_bridge.lower.exchange import exchange
from jax_bridge.lower.row_tables import inverse, pick, table, without_padding
from jax_bridge.lower.transports import PERMUTE, Transport
from jax_bridge.mesh import axis_types
from jax_bridge.mesh.axis_types import as_bits, as_varying, group, is_vmapped, spanned, subgroups
from jax_bridge.versions import cuts_of
from xshard import Plan, Sharding, steps
from xshard.cost.model import Fabric
from xshard.errors import ShapeError
from xshard.layout.runs import row_numbers
from xshard.notation.parser import Shard
from xshard.steps.base import axes_of, even_parts, own_part
from xshard.steps.permute import senders
from xshard.steps.traffic import Phases

ALL_REDUCE = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}
ALONG = {"max": jnp.max, "min": jnp.min}


class StepContext(NamedTuple):
    """The shardings before and after a step, the links of the mesh, and how boxes of an exchange travel."""

    before: Sharding
    after: Sharding
    fabric: Fabric
    transport: Transport

    def phases(self, axes: Sequence[str], op: str = "sum") -> Phases:
        """The phases of a collective along axes; one if several are no faster, or JAX has no groups."""
        # `jax.vmap` has no groups of devices, and XLA scatters no reduction but sums.
        has_several = (
            op == "sum" and not any(map(is_vmapped, axes)) and self.fabric.has_phases(axes)
        )
        spans = self.fabric.spans if has_several else ()
        return Phases.along(self.before.mesh, axes, spans, range(self.before.mesh.n_devices))

    def groups(self, phases: Phases) -> list[dict[str, Any]]:
        """Arguments of the collective of every phase, the fastest links first."""
        mesh = self.before.mesh
        if not phases.are_several:
            return [group(mesh, phases.axes)]
        levels = [[span.axis for span in level] for level in phases.levels]
        return [
            subgroups(mesh, axes, partial(phases.members, level=i)) for i, axes in enumerate(levels)
        ]


# Jitted: a plan is traced once for all its uses in a model, and compiled once for shard_map without jit.
@partial(jax.jit, static_argnames=("plan", "transport"), inline=True)
def run(plan: Plan, x: jax.Array, transport: Transport = PERMUTE) -> jax.Array:
    """A block under `plan.src`, its padding unknown -> the block under `plan.dst`, padded with zeros, and
    invariant along the plan's axes that `plan.dst` does not name.
    """
    if explicit_axes(x):
        return _part_by_part(partial(run, transport=transport), plan, x)
    stays_varying = axis_types.varying_axes(x).difference(plan.axes).union(plan.dst.axes)
    axes = sorted(
        axis_types.varying_axes(x).union(plan.axes)
    )  # a rule's constants are declared varying too
    if 0 in plan.shape:  # XLA has no collectives of nothing
        x = as_varying(jnp.zeros(plan.target.max_local_shape, x.dtype), axes)
    else:
        x = without_padding(as_varying(x, axes), plan.source.with_layout(plan.source.normal))
        for step, before, after in plan.stages:
            context = StepContext(before, after, plan.profile.fabric(before.mesh), transport)
            x = as_varying(RULES[type(step)](step, x, context), axes)
    # A permutation is along all axes of the mesh.
    return axis_types.as_invariant(x, axis_types.varying_axes(x) - stays_varying)


def explicit_axes(x: jax.Array) -> frozenset[str]:
    """The Explicit axes over which JAX shards the block further, inside a `shard_map` over other axes."""
    return frozenset(axis for axes in _explicit_cuts(x) for axis in axes)


def _explicit_cuts(x: jax.Array) -> list[tuple[str, ...]]:
    entries = cuts_of(jax.typeof(x).sharding.spec)
    return [(entry,) if isinstance(entry, str) else entry or () for entry in entries]


def _part_by_part(
    move: Callable[[Plan, jax.Array], jax.Array], plan: Plan, x: jax.Array
) -> jax.Array:
    """Move each part of a block that Explicit axes shard, with these axes manual: collectives need that.
    Raises ShapeError if the plan shards a dim that Explicit axes shard.
    """
    sizes = jax.typeof(x).sharding.mesh.shape
    lengths = []
    target = plan.target.layout
    for axes, length, dim in zip(
        _explicit_cuts(x), plan.shape, plan.source.layout.dims, strict=True
    ):
        if axes and (dim.shards or target.dim(dim.name).shards):
            reason = (
                f"dim {dim.name!r} of the block is also sharded over the Explicit axis {axes[0]!r}"
            )
            hint = "make that axis manual as well, and name it in the expression"
            raise ShapeError(reason, text=f"{plan.src} -> {plan.dst}", hint=hint)
        lengths.append(length // math.prod(sizes[axis] for axis in axes))
    part_plan = replace(plan, shape=tuple(lengths))
    spec = jax.typeof(x).sharding.spec
    entries = [cuts_of(spec)[plan.source.dim_index(name)] for name in target.names]
    after = PartitionSpec(*entries, unreduced=spec.unreduced, reduced=spec.reduced)
    specs: Any = {"in_specs": spec, "out_specs": after, "axis_names": explicit_axes(x)}
    return jax.shard_map(partial(move, part_plan), **specs)(x)


def _all_gather(step: steps.AllGather, x: jax.Array, context: StepContext) -> jax.Array:
    dim = context.before.dim_index(step.dim)
    block = x.shape
    phases = context.phases(axes_of(step.shards))
    # Gathered along a new first dim, one copy puts the parts in place. Along another dim XLA transposes the
    # blocks before the collective and back after it.
    for devices in reversed(
        context.groups(phases)
    ):  # the slowest link first, while blocks are small
        x = lax.all_gather(x, **devices)
    x = _merged(jnp.moveaxis(x.reshape(-1, *block), 0, dim), dim)
    return _from_parts(x, dim, _joined_parts(context.before, step.dim, step.shards, phases))


def _slice(step: steps.Slice, x: jax.Array, context: StepContext) -> jax.Array:
    before = context.before
    after = context.after
    for name, shards in step.cuts:
        dim, (axes, names) = (
            before.dim_index(name),
            spanned(before.mesh, after.layout.dim(name).axes),
        )
        rows = partial(_own_rows, before, name, shards)
        x = pick(x, dim, table(before.mesh, axes, after.max_local_shape[dim], rows), names)
    return x


def _own_rows(
    before: Sharding, dim: str, shards: tuple[Shard, ...], device: int
) -> NDArray[np.int64]:
    return row_numbers(own_part(before, dim, shards, device))


def _embed(step: steps.Embed, x: jax.Array, context: StepContext) -> jax.Array:
    before = context.before
    dim = before.dim_index(step.dim)
    axes = before.layout.dim(step.dim).axes
    length = context.after.max_local_shape[dim]

    def own_positions(device: int) -> NDArray[np.int64]:
        return inverse(_own_rows(before, step.dim, step.shards, device), length)

    return pick(x, dim, table(before.mesh, axes, length, own_positions), axes)


def _all_reduce(step: steps.AllReduce, x: jax.Array, context: StepContext) -> jax.Array:
    phases = context.phases(step.axes, step.op)
    if not phases.are_several:
        return ALL_REDUCE[step.op](x, step.axes)
    # Scattered over the fast links, so that the slowest carries small pieces, and gathered back.
    *near, far = context.groups(phases)
    if "axis_index_groups" in far:  # JAX sums typed values over whole axes only
        near.append(far)
    pieces = jnp.pad(x.reshape(-1), (0, -x.size % context.before.mesh.size(*step.axes)))
    for devices in near:
        pieces = lax.psum_scatter(pieces, **devices, tiled=True)
    if far not in near:
        pieces = as_varying(lax.psum(pieces, **far), step.axes)
    for devices in reversed(near):
        pieces = lax.all_gather(pieces, **devices, tiled=True)
    return pieces[: x.size].reshape(x.shape)


def _reduce_scatter(step: steps.ReduceScatter, x: jax.Array, context: StepContext) -> jax.Array:
    before = context.before
    axes = axes_of(step.shards)
    dim = before.dim_index(step.dim)
    phases = context.phases(axes, step.op)
    x = pick(x, dim, _joined_parts(before, step.dim, step.shards, phases)[None], ())
    pieces = jnp.moveaxis(_split(x, dim, before.mesh.size(*axes)), dim, 0)
    if step.op == "sum":
        for devices in context.groups(phases):  # the slowest link last, when pieces are small
            pieces = lax.psum_scatter(pieces, **devices, tiled=True)
        return pieces.reshape(pieces.shape[1:])
    # XLA scatters sums only: pieces travel and are reduced on arrival, for the same bytes.
    return ALONG[step.op](
        as_bits(lambda x: lax.all_to_all(x, axes, 0, 0, tiled=True), pieces), axis=0
    )


def _all_to_all(step: steps.AllToAll, x: jax.Array, context: StepContext) -> jax.Array:
    before = context.before
    src = before.dim_index(step.src_dim)
    dst = before.dim_index(step.dst_dim)
    phases = context.phases(axes_of(step.dst_shards), op="")
    x = pick(x, dst, _joined_parts(before, step.dst_dim, step.dst_shards, phases)[None], ())
    # With the parts along a dim of their own one copy puts them in place; a tiled `all_to_all` makes two.
    x = _split(x, dst, before.mesh.size(*phases.axes))
    x = lax.all_to_all(
        x, split_axis=dst, concat_axis=dst, tiled=True, **group(before.mesh, phases.axes)
    )
    x = _merged(jnp.moveaxis(x, dst, src), src)
    return _from_parts(x, src, _joined_parts(before, step.src_dim, step.src_shards, phases))


def _permute(_: steps.Permute, x: jax.Array, context: StepContext) -> jax.Array:
    pairs = enumerate(senders(context.before, context.after))
    return axis_types.ppermute(
        x, context.before.mesh, [(sender, receiver) for receiver, sender in pairs]
    )


def _scale(step: steps.Scale, x: jax.Array, _: StepContext) -> jax.Array:
    n = step.factor.denominator
    x = x * np.array(step.factor.numerator, x.dtype)
    if n == 1:
        return x
    by = jnp.full_like(x, n)
    # XLA replaces division by a constant with multiplication by its reciprocal, fused into a sum. A rounded
    # reciprocal would make a mean of whole numbers fractional; the barrier hides the constant.
    return x / (by if n & (n - 1) == 0 else lax.optimization_barrier(by))


def _joined_parts(
    before: Sharding, dim: str, shards: tuple[Shard, ...], phases: Phases
) -> NDArray[np.int64]:
    """Rows of a dim's parts under `shards`, part after part in the order that the phases leave them in."""
    parts = even_parts(before, dim, shards)
    devices = phases.reached(0) if phases.are_several else before.mesh.group(0, phases.axes)
    return np.concatenate(
        [row_numbers(parts[before.mesh.index(d, axes_of(shards))]) for d in devices]
    )


def _from_parts(x: jax.Array, dim: int, rows: NDArray[np.int64]) -> jax.Array:
    return pick(x, dim, inverse(rows, len(rows))[None], ())


def _split(x: jax.Array, dim: int, n: int) -> jax.Array:
    """Split a dim into `n` parts and the rows of a part."""
    return x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :])


def _merged(x: jax.Array, dim: int) -> jax.Array:
    """Merge a dim and the next into one."""
    return x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])


Rule = Callable[[Any, jax.Array, StepContext], jax.Array]


def _of_bits(rule: Rule) -> Rule:
    """A rule that only moves elements: short floats travel as integers."""
    return lambda step, x, context: as_bits(lambda bits: rule(step, bits, context), x)


RULES: dict[type[steps.Step], Rule] = {
    steps.AllGather: _of_bits(_all_gather),
    steps.AllReduce: _all_reduce,
    steps.AllToAll: _of_bits(_all_to_all),
    steps.Embed: _of_bits(_embed),
    steps.Exchange: lambda step, x, context: exchange(step, x, *context[:2], context.transport),
    steps.Mask: lambda step, x, _: jnp.where(lax.axis_index(step.axes) == 0, x, jnp.zeros_like(x)),
    steps.Permute: _permute,
    steps.ReduceScatter: _reduce_scatter,
    steps.Retag: lambda step, x, context: x,
    steps.Scale: _scale,
    steps.Slice: _of_bits(_slice),
    steps.Transpose: lambda step, x, context: jnp.transpose(x, step.order(context.before)),
}
