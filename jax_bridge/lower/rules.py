"""How JAX executes a plan: one short rule per step, made of collectives of `jax.lax` on one device's block.

Decides nothing: the plan says what to do. A block is padded to the largest (`row_tables`). Inside a plan
the block is varying along all axes of the plan; the end declares replicas once, from the layout. Rules are
forward only: the gradient is another plan (`autodiff`).

A rule takes the step, the block, and the shardings before and after. A step works on the normal form of its
layouts: all its axes have more than one device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from jax_bridge.lower.exchange import exchange
from jax_bridge.lower.explicit import explicit_axes, part_by_part
from jax_bridge.lower.row_tables import inverse, pick, table, without_padding
from jax_bridge.lower.transports import PERMUTE, Transport
from jax_bridge.mesh.axis_types import as_bits, as_invariant, as_varying, ppermute, varying_axes
from jax_bridge.mesh.sub_axes import group, spanned
from xshard import Mesh, Plan, Sharding, steps
from xshard.cost.model import Fabric
from xshard.layout.runs import row_numbers
from xshard.notation.parser import Shard
from xshard.steps.base import axes_of, even_parts, own_part
from xshard.steps.permute import senders

ALL_REDUCE = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}
ALONG = {"max": jnp.max, "min": jnp.min}


# Jitted: a plan is traced once for all its uses in a model, and compiled once for shard_map without jit.
@partial(jax.jit, static_argnames=("plan", "transport"), inline=True)
def run(plan: Plan, x: jax.Array, transport: Transport = PERMUTE) -> jax.Array:
    """A block under `plan.src` -> the block under `plan.dst`, on every device at once.

    x: of shape `plan.source.max_local_shape`; its padding may hold anything. The result is padded with
    zeros, and invariant along the plan's axes that `plan.dst` does not name.
    transport: how the boxes of an exchange travel.
    """
    if explicit_axes(x):
        return part_by_part(partial(run, transport=transport), plan, x)
    apart = varying_axes(x).difference(plan.axes).union(plan.dst.axes)
    axes = sorted(varying_axes(x).union(plan.axes))  # a rule's constants are declared varying too
    if 0 in plan.shape:  # XLA has no collectives of nothing
        x = as_varying(jnp.zeros(plan.target.max_local_shape, x.dtype), axes)
    else:
        x = without_padding(as_varying(x, axes), plan.source.with_layout(plan.source.normal))
        for step, before, after in plan.stages:
            speeds = partial(_by_speed, before.mesh, plan.profile.fabric(before.mesh))
            rules = RULES | {
                steps.Exchange: partial(exchange, transport=transport),
                steps.AllGather: _moves(partial(_all_gather, by_speed=speeds)),
                steps.ReduceScatter: partial(_reduce_scatter, by_speed=speeds),
            }
            x = as_varying(rules[type(step)](step, x, before, after), axes)
    return as_invariant(x, varying_axes(x).difference(apart))  # a permutation is along all axes of the mesh


Speeds = Callable[[tuple[str, ...]], list[tuple[str, ...]]]


def _together(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [axes]


def _by_speed(mesh: Mesh, fabric: Fabric, axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The axes by the speed of their links, the slowest first; all together where that is as fast.

    Also where one axis has links of several speeds.
    """
    levels: dict[int, tuple[str, ...]] = {}
    for span in fabric.spans:
        if span.axis in axes:
            levels[span.level] = (*levels.get(span.level, ()), span.axis)
    whole = sum(map(len, levels.values())) == len(axes)
    return [levels[level] for level in sorted(levels)] if whole and fabric.has_phases(axes) else [axes]


def _all_gather(
    step: steps.AllGather, x: jax.Array, before: Sharding, _: Sharding, by_speed: Speeds = _together
) -> jax.Array:
    dim, block = before.dim_index(step.dim), x.shape
    phases = by_speed(axes_of(step.shards))  # the slowest link first, while blocks are small
    axes = tuple(axis for phase in reversed(phases) for axis in phase)
    # Gathered along a new first dim, one copy puts the parts in place. Along another dim XLA transposes the
    # blocks before the collective and back after it.
    for phase in phases:
        x = lax.all_gather(x, **group(before.mesh, phase))
    x = x.reshape(-1, *block)
    x = _merged(jnp.moveaxis(x, 0, dim), dim)
    return _from_parts(x, dim, _joined_parts(before, step.dim, step.shards, axes))


def _slice(step: steps.Slice, x: jax.Array, before: Sharding, after: Sharding) -> jax.Array:
    for name, shards in step.cuts:
        dim, (axes, known) = before.dim_index(name), spanned(before.mesh, after.layout.dim(name).axes)
        rows = partial(_own_rows, before, name, shards)
        x = pick(x, dim, table(before.mesh, axes, after.max_local_shape[dim], rows), known)
    return x


def _own_rows(before: Sharding, dim: str, shards: tuple[Shard, ...], device: int) -> NDArray[np.int64]:
    return row_numbers(own_part(before, dim, shards, device))


def _embed(step: steps.Embed, x: jax.Array, before: Sharding, after: Sharding) -> jax.Array:
    dim, mesh, axes = before.dim_index(step.dim), before.mesh, before.layout.dim(step.dim).axes
    length = after.max_local_shape[dim]

    def place_of_own_part(device: int) -> NDArray[np.int64]:
        return inverse(_own_rows(before, step.dim, step.shards, device), length)

    return pick(x, dim, table(mesh, axes, length, place_of_own_part), axes)


def _all_reduce(step: steps.AllReduce, x: jax.Array, _: Sharding, __: Sharding) -> jax.Array:
    return ALL_REDUCE[step.op](x, step.axes)


def _reduce_scatter(
    step: steps.ReduceScatter, x: jax.Array, before: Sharding, _: Sharding, by_speed: Speeds = _together
) -> jax.Array:
    dim, axes = before.dim_index(step.dim), axes_of(step.shards)
    phases = by_speed(axes)[::-1] if step.op == "sum" else [axes]  # the slowest link last: pieces are small
    axes = tuple(axis for phase in phases for axis in phase)
    x = _to_parts(x, dim, _joined_parts(before, step.dim, step.shards, axes))
    pieces = jnp.moveaxis(_split(x, dim, before.mesh.size(*axes)), dim, 0)
    if step.op == "sum":
        block = pieces.shape[1:]
        for phase in phases:
            pieces = lax.psum_scatter(pieces.reshape(before.mesh.size(*phase), -1, *block), phase)
        return pieces.reshape(block)
    # XLA scatters sums only: pieces travel and are reduced on arrival, for the same bytes.
    return ALONG[step.op](as_bits(lambda x: lax.all_to_all(x, axes, 0, 0, tiled=True), pieces), axis=0)


def _all_to_all(step: steps.AllToAll, x: jax.Array, before: Sharding, _: Sharding) -> jax.Array:
    src, dst = before.dim_index(step.src_dim), before.dim_index(step.dst_dim)
    axes = axes_of(step.dst_shards)
    x = _to_parts(x, dst, _joined_parts(before, step.dst_dim, step.dst_shards, axes))
    # With the parts along a dim of their own one copy puts them in place; a tiled `all_to_all` makes two.
    x = _split(x, dst, before.mesh.size(*axes))
    x = lax.all_to_all(x, split_axis=dst, concat_axis=dst, tiled=True, **group(before.mesh, axes))
    x = _merged(jnp.moveaxis(x, dst, src), src)
    return _from_parts(x, src, _joined_parts(before, step.src_dim, step.src_shards, axes))


def _permute(_: steps.Permute, x: jax.Array, before: Sharding, after: Sharding) -> jax.Array:
    return ppermute(x, before.mesh, [(s, d) for d, s in enumerate(senders(before, after))])


def _mask(step: steps.Mask, x: jax.Array, _: Sharding, __: Sharding) -> jax.Array:
    return jnp.where(lax.axis_index(step.axes) == 0, x, jnp.zeros_like(x))


def _retag(_: steps.Retag, x: jax.Array, __: Sharding, ___: Sharding) -> jax.Array:
    return x


def _transpose(step: steps.Transpose, x: jax.Array, before: Sharding, _: Sharding) -> jax.Array:
    return jnp.transpose(x, step.order(before))


def _scale(step: steps.Scale, x: jax.Array, _: Sharding, __: Sharding) -> jax.Array:
    n = step.factor.denominator
    x = x * np.array(step.factor.numerator, x.dtype)
    if n == 1:
        return x
    by = jnp.full_like(x, n)
    # XLA replaces division by a constant with multiplication by its reciprocal, fused into a sum. A rounded
    # reciprocal would make a mean of whole numbers fractional; the barrier hides the constant.
    return x / (by if n & (n - 1) == 0 else lax.optimization_barrier(by))


def _joined_parts(
    before: Sharding, dim: str, shards: tuple[Shard, ...], group: tuple[str, ...]
) -> NDArray[np.int64]:
    """Rows of a dim's parts under `shards`, part after part as `group` counts its members."""
    parts = even_parts(before, dim, shards)
    members = (before.mesh.index(d, axes_of(shards)) for d in before.mesh.group(0, group))
    return np.concatenate([row_numbers(parts[member]) for member in members])


def _to_parts(x: jax.Array, dim: int, rows: NDArray[np.int64]) -> jax.Array:
    return pick(x, dim, rows[None], ())


def _from_parts(x: jax.Array, dim: int, rows: NDArray[np.int64]) -> jax.Array:
    return pick(x, dim, inverse(rows, len(rows))[None], ())


def _split(x: jax.Array, dim: int, n: int) -> jax.Array:
    """Split a dim into `n` parts and the rows of a part."""
    return x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :])


def _merged(x: jax.Array, dim: int) -> jax.Array:
    """Merge a dim and the next into one."""
    return x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])


Rule = Callable[[Any, jax.Array, Sharding, Sharding], jax.Array]


def _moves(rule: Rule) -> Rule:
    """A rule that only moves elements: short floats go as integers."""
    return lambda step, x, before, after: as_bits(lambda bits: rule(step, bits, before, after), x)


RULES: dict[type[steps.Step], Rule] = {
    steps.AllGather: _moves(_all_gather),
    steps.AllReduce: _all_reduce,
    steps.AllToAll: _moves(_all_to_all),
    steps.Embed: _moves(_embed),
    steps.Exchange: partial(exchange, transport=PERMUTE),
    steps.Mask: _mask,
    steps.Permute: _permute,
    steps.ReduceScatter: _reduce_scatter,
    steps.Retag: _retag,
    steps.Scale: _scale,
    steps.Slice: _moves(_slice),
    steps.Transpose: _transpose,
}
