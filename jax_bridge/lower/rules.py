"""JAX's rule for each step of a plan: collectives of `jax.lax` on one device's block.

In JAX's types a value is varying along an axis if devices along it may hold different values, else invariant.
Between steps a block is padded to the largest, and varying along all axes of the plan; after the last step
`run` declares along which axes devices hold equal blocks. A step works on the normal form of its layouts: all
its axes have more than one device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
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
from jax_bridge.lower.row_tables import (
    group_table,
    inverse,
    pick_rows,
    pick_same_rows,
    row_of_this_device,
    with_lengths,
    with_zero_padding,
)
from jax_bridge.lower.transports import PERMUTE, Transport
from jax_bridge.mesh import axis_types
from jax_bridge.mesh.axis_types import (
    as_bits,
    as_varying,
    group_arguments,
    is_vmapped,
    over_whole_axes,
    subgroup_arguments,
    varying_axes,
    whole_axes,
)
from jax_bridge.versions import cuts_of
from xshard import Mesh, Plan, Sharding, steps
from xshard.cost.model import Fabric
from xshard.errors import ShapeError
from xshard.layout.runs import row_numbers
from xshard.notation.parser import Shard
from xshard.steps.base import axes_of, even_parts, rows_of_own_part
from xshard.steps.permute import sender_of_each_device
from xshard.steps.traffic import Phases

ALL_REDUCE = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}
REDUCE_BLOCKS = {"max": jnp.max, "min": jnp.min}


class StepContext(NamedTuple):
    """What a step needs beside its block: the shardings before and after it, links, how boxes travel."""

    before: Sharding
    after: Sharding
    fabric: Fabric  # the links between the devices of the mesh
    transport: Transport

    def phases(self, axes: Sequence[str], op: str = "sum") -> Phases:
        """Split a collective into phases, one per kind of link, where that is faster.

        Args:
            axes: The axes of the collective.
            op: "sum" for a sum or a gather; with "max", "min" or "" (an all-to-all) there is one phase.

        Returns:
            The phases; one if several are no faster, or JAX has no groups of devices for them.
        """
        # Collectives under `jax.vmap` take no `axis_index_groups`, and XLA has a reduce-scatter
        # for sums alone.
        can_split = op == "sum" and not any(map(is_vmapped, axes))
        links = self.fabric.spans if can_split and self.fabric.has_phases(axes) else ()
        mesh = self.before.mesh
        return Phases.of_axes(mesh, axes, links, block_indices=range(mesh.n_devices))

    def group_arguments(self, phases: Phases) -> list[dict[str, Any]]:
        """Return the arguments of the collective of every phase, the fastest links first."""
        mesh = self.before.mesh
        if not phases.has_several_speeds:
            return [group_arguments(mesh, phases.axes)]
        arguments = []
        for level, spans in enumerate(phases.levels):
            axes = [span.axis for span in spans]
            members = partial(phases.members, level=level)
            arguments.append(subgroup_arguments(mesh, axes, members))
        return arguments


# Jitted: a plan is traced once for all its uses in a model, and compiled once where `shard_map`
# runs outside of jit.
@partial(jax.jit, static_argnames=("plan", "transport"), inline=True)
def run(plan: Plan, x: jax.Array, transport: Transport = PERMUTE) -> jax.Array:
    """Run the steps of a plan on this device's block, inside `shard_map`.

    The block under the layout `plan.src` -> the block under `plan.dst`: for "s/cp c -> s c/cp" of
    an array [8, 4] on 4 devices, [2, 4] -> [8, 1].

    Args:
        plan: The plan.
        x: The block, padded to the largest; the padding may hold anything.
        transport: How the boxes of an exchange travel.

    Returns:
        The new block, padded with zeros. JAX's type says that it is equal on all devices along the
        plan's axes that `plan.dst` does not name (invariant, not varying).
    """
    if any(_explicit_axes(x)):
        return _run_on_subblocks(partial(run, transport=transport), plan, x)
    block_axes = varying_axes(x)
    axes = sorted(block_axes.union(plan.axes))
    if 0 in plan.shape:  # XLA has no collectives of nothing
        y = as_varying(jnp.zeros(plan.target.max_local_shape, x.dtype), axes)
    else:
        y = _run_steps(plan, x, axes, transport)
    # The steps say nothing of replicas: the plan's target does. Along other axes than the plan's the
    # block stays as varying as it was.
    target = plan.target
    target_axes = map(target.mesh.origin, target.layout.axes)
    varying_after = block_axes.difference(plan.axes).union(target_axes)
    # A permutation makes the block varying along all axes of the mesh, more than the plan's.
    return axis_types.as_invariant(y, varying_axes(y) - varying_after)


def _run_steps(plan: Plan, x: jax.Array, axes: Sequence[str], transport: Transport) -> jax.Array:
    """Run the steps of a plan on a block, one after the other.

    Between steps a block counts as different on all devices (varying) along `axes`, also one that a
    rule makes of constants: JAX refuses to mix the two types in an operation.
    """
    source = plan.source.with_layout(plan.source.normal_layout)
    x = with_zero_padding(as_varying(x, axes), source)
    for step, before, after in plan.stages:
        context = StepContext(before, after, plan.profile.fabric(before.mesh), transport)
        x = as_varying(RULES[type(step)](step, x, context), axes)
    return x


# Blocks that Explicit axes shard further.


def _explicit_axes(x: jax.Array) -> list[tuple[str, ...]]:
    """Return the mesh axes of type Explicit over which JAX shards each dim of a block: [("tp",), ()].

    They occur inside a `shard_map` over other axes: a block there is still an array that is spread
    over the devices along Explicit axes.
    """
    spec = jax.typeof(x).sharding.spec
    return [axis_types.axes_of_entry(entry, spec) for entry in cuts_of(spec)]


def _run_on_subblocks(
    move: Callable[[Plan, jax.Array], jax.Array], plan: Plan, x: jax.Array
) -> jax.Array:
    """Run a plan on each sub-block of a block that JAX shards further over Explicit axes.

    Collectives work along manual axes only, so a `shard_map` makes the Explicit axes manual. A
    block [8, 6] with dim 1 over tp=2 is moved as sub-blocks [8, 3].

    Args:
        move: Runs a plan on one sub-block.
        plan: The plan for the whole block.
        x: The block.

    Raises:
        ShapeError: The plan shards a dim that Explicit axes shard.
    """
    sharding = jax.typeof(x).sharding
    explicit_axes = _explicit_axes(x)
    subblock_shape = _subblock_shape(plan, explicit_axes, sharding.mesh.shape)

    spec = sharding.spec
    entries = cuts_of(spec)
    # The result may have its dims in another order: each stays cut as it was.
    out_entries = [entries[plan.source.dim_index(name)] for name in plan.target.layout.names]
    on_subblocks = jax.shard_map(
        partial(move, replace(plan, shape=subblock_shape)),
        in_specs=spec,
        out_specs=PartitionSpec(*out_entries, unreduced=spec.unreduced, reduced=spec.reduced),
        axis_names=frozenset(itertools.chain(*explicit_axes)),
    )
    return on_subblocks(x)


def _subblock_shape(
    plan: Plan, explicit_axes: Sequence[tuple[str, ...]], sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """Divide the plan's global shape by the Explicit axes of each dim: [8, 6], [(), ("tp",)] -> [8, 3].

    Raises ShapeError if the plan shards such a dim, too.
    """
    shape = []
    for axes, length, dim in zip(explicit_axes, plan.shape, plan.source.layout.dims, strict=True):
        if axes and (dim.shards or plan.target.layout.dim(dim.name).shards):
            reason = (
                f"dim {dim.name!r} of the block is also sharded over the Explicit axis {axes[0]!r}"
            )
            hint = "make that axis manual as well, and name it in the expression"
            raise ShapeError(reason, text=f"{plan.src} -> {plan.dst}", hint=hint)
        shape.append(length // math.prod(sizes[axis] for axis in axes))
    return tuple(shape)


# The rules: one function per step.


def _all_gather(step: steps.AllGather, x: jax.Array, context: StepContext) -> jax.Array:
    """Gather a dim that is sharded over the step's axes: a block [2, c] -> [8, c] on 4 devices.

    Rows come in their global order, also if devices held them in another, as in zigzag order.
    """
    dim = context.before.dim_index(step.dim)
    block_shape = x.shape
    phases = context.phases(axes_of(step.shards))
    # Gathered along a new first dim, blocks are put in place by one copy. Gathering along another
    # dim is slower: XLA transposes the blocks before the collective and back after it.
    for devices in reversed(context.group_arguments(phases)):
        x = lax.all_gather(x, **devices)  # the slowest link first, while blocks are small
    blocks = x.reshape(-1, *block_shape)  # [devices, *block]
    x = _merge_dims(jnp.moveaxis(blocks, 0, dim), dim)
    return _rows_in_order(x, dim, _rows_by_device(context.before, step.dim, step.shards, phases))


def _slice(step: steps.Slice, x: jax.Array, context: StepContext) -> jax.Array:
    """Keep this device's rows of each dim that the step shards; nothing is sent."""
    before = context.before
    after = context.after
    for name, shards in step.cuts:
        dim = before.dim_index(name)
        span = whole_axes(before.mesh, after.layout.dim(name).axes)
        rows_of = partial(_rows_kept, before, name, shards)
        rows = group_table(before.mesh, span.sub_axes, after.max_local_shape[dim], rows_of)
        x = pick_rows(x, dim, rows, span.names)
    return x


def _rows_kept(
    before: Sharding, dim: str, shards: tuple[Shard, ...], device: int
) -> NDArray[np.int64]:
    """Return the rows of its block that a device keeps when a dim is sharded further."""
    return row_numbers(rows_of_own_part(before, dim, shards, device))


def _embed(step: steps.Embed, x: jax.Array, context: StepContext) -> jax.Array:
    """Put the block's rows where they belong in a larger block of zeros: the transpose of `_slice`.

    Rows [a, b] on device 1 of 2 -> [0, 0, a, b].
    """
    before = context.before
    dim = before.dim_index(step.dim)
    axes = before.layout.dim(step.dim).axes
    length = context.after.max_local_shape[dim]

    def source_rows(device: int) -> NDArray[np.int64]:
        # For each row of the larger block the row of the device's block, or none.
        return inverse(_rows_kept(before, step.dim, step.shards, device), length)

    table = group_table(before.mesh, axes, length, source_rows)
    return pick_rows(x, dim, *over_whole_axes(table, axes, before.mesh))


def _all_reduce(step: steps.AllReduce, x: jax.Array, context: StepContext) -> jax.Array:
    """Reduce blocks elementwise over the devices along the step's axes; all get the result.

    Where links differ in speed, a sum runs in phases: reduce-scatters over the fast links, an
    all-reduce of the small shares over the slowest, and all-gathers back. On 2 nodes of 4 devices a
    block of 8 elements is scattered in shares of 2 within nodes; these are summed between nodes.
    """
    phases = context.phases(step.axes, step.op)
    # Each phase has the arguments that tell a collective its devices, the fastest links first.
    scatter_phases = context.group_arguments(phases)
    if step.op != "sum" or scatter_phases == [{"axis_name": step.axes}]:
        return all_reduce(x, step.op, context.before.mesh, step.axes)

    sum_phases = []
    # The last phase is a `psum` if its devices are all of some axes. In smaller groups JAX has no
    # `psum` of typed values (check_vma): there a scatter and a gather do the same.
    if "axis_index_groups" not in scatter_phases[-1]:
        sum_phases = [scatter_phases.pop()]
    n_devices = context.before.mesh.size(*step.axes)
    flat = jnp.pad(x.reshape(-1), (0, -x.size % n_devices))  # scattered in equal shares
    for devices in scatter_phases:
        flat = lax.psum_scatter(flat, **devices, tiled=True)
    for devices in sum_phases:
        flat = as_varying(lax.psum(flat, **devices), step.axes)
    for devices in reversed(scatter_phases):
        flat = lax.all_gather(flat, **devices, tiled=True)
    return flat[: x.size].reshape(x.shape)


def all_reduce(x: jax.Array, op: str, mesh: Mesh, axes: Sequence[str]) -> jax.Array:
    """Reduce blocks over the devices along axes of a plan's mesh; all get the result."""
    devices = group_arguments(mesh, axes)
    if "axis_index_groups" not in devices:
        return ALL_REDUCE[op](x, **devices)
    # JAX reduces typed values (check_vma) over whole axes alone.
    return REDUCE_BLOCKS[op](lax.all_gather(x, **devices), axis=0)


def _reduce_scatter(step: steps.ReduceScatter, x: jax.Array, context: StepContext) -> jax.Array:
    """Reduce blocks over the devices along the step's axes, and leave each device its share.

    A block [8, c] on each of 4 devices -> [2, c] of their sum.
    """
    before = context.before
    axes = axes_of(step.shards)
    dim = before.dim_index(step.dim)
    phases = context.phases(axes, step.op)
    rows = _rows_by_device(before, step.dim, step.shards, phases)
    x = pick_same_rows(x, dim, rows)
    split = _split_dim(x, dim, before.mesh.size(*axes))
    shares = jnp.moveaxis(split, dim, 0)  # [devices, *block]: a share for each device
    if step.op == "sum":
        for devices in context.group_arguments(phases):
            # The slowest link last, when shares are small.
            shares = lax.psum_scatter(shares, **devices, tiled=True)
        return shares.reshape(shares.shape[1:])

    # XLA has a reduce-scatter for sums alone. For a max or min each device sends share i to device
    # i, which reduces what arrives, [devices, *block]. A reduce-scatter would send as many bytes.
    devices = group_arguments(before.mesh, axes)
    arrived = as_bits(
        lambda bits: lax.all_to_all(bits, **devices, split_axis=0, concat_axis=0, tiled=True),
        shares,
    )
    return REDUCE_BLOCKS[step.op](arrived, axis=0)


def _all_to_all(step: steps.AllToAll, x: jax.Array, context: StepContext) -> jax.Array:
    """Shard the step's `dst_dim` instead of its `src_dim`, which becomes whole.

    s/cp c -> s c/cp of an array [8, 4] on 4 devices: a block [2, 4] -> [8, 1].
    """
    before = context.before
    src = before.dim_index(step.src_dim)
    dst = before.dim_index(step.dst_dim)
    phases = context.phases(axes_of(step.dst_shards), op="")  # one phase
    sent_rows = _rows_by_device(before, step.dst_dim, step.dst_shards, phases)
    x = pick_same_rows(x, dst, sent_rows)
    # With a dim that counts devices, one copy puts the rows in place; a tiled `all_to_all` of the
    # dim itself makes two.
    x = _split_dim(x, dst, before.mesh.size(*phases.axes))  # [..., devices, rows, ...]
    devices = group_arguments(before.mesh, phases.axes)
    x = lax.all_to_all(x, split_axis=dst, concat_axis=dst, tiled=True, **devices)
    # Entry i along `dst` is the rows of `src` that came from device i.
    x = _merge_dims(jnp.moveaxis(x, dst, src), src)
    return _rows_in_order(x, src, _rows_by_device(before, step.src_dim, step.src_shards, phases))


def _exchange(step: steps.Exchange, x: jax.Array, context: StepContext) -> jax.Array:
    """Send boxes of elements between any devices."""
    sender_order = context.fabric.profile.adds_in_order
    return exchange(
        step, x, context.before, context.after, context.transport, sender_order=sender_order
    )


def _mask(step: steps.Mask, x: jax.Array, context: StepContext) -> jax.Array:
    """Keep the block on the first device along the step's axes; zeros elsewhere: a sum."""
    mesh = context.before.mesh
    is_first = np.arange(mesh.size(*step.axes)) == 0
    is_kept = row_of_this_device(*over_whole_axes(is_first, step.axes, mesh))
    return jnp.where(is_kept, x, jnp.zeros_like(x))


def _permute(step: steps.Permute, x: jax.Array, context: StepContext) -> jax.Array:
    """Send whole blocks to other devices."""
    senders = sender_of_each_device(context.before, context.after)
    pairs = [(sender, receiver) for receiver, sender in enumerate(senders)]
    return axis_types.ppermute(x, context.before.mesh, pairs)


def _retag(step: steps.Retag, x: jax.Array, context: StepContext) -> jax.Array:
    """Return the block as it is: only the meaning changes, as from a replica to a copy."""
    return x


def _scale(step: steps.Scale, x: jax.Array, context: StepContext) -> jax.Array:
    """Multiply the block by the step's fraction, as 1/4 for the mean over 4 devices."""
    denominator = step.factor.denominator
    x = x * np.array(step.factor.numerator, x.dtype)
    if denominator == 1:
        return x
    divisor = jnp.full_like(x, denominator)
    is_power_of_two = denominator & (denominator - 1) == 0
    if not is_power_of_two:
        # XLA replaces division by a constant with multiplication by its reciprocal, fused into a
        # sum. A rounded reciprocal would make a mean of whole numbers fractional; the barrier hides
        # the constant.
        divisor = lax.optimization_barrier(divisor)
    return x / divisor


def _transpose(step: steps.Transpose, x: jax.Array, context: StepContext) -> jax.Array:
    """Reorder the dims of the block."""
    return jnp.transpose(x, step.order(context.before))


def _rows_by_device(
    before: Sharding, dim: str, shards: tuple[Shard, ...], phases: Phases
) -> NDArray[np.int64]:
    """Return the rows of a dim, device by device, in the order in which a collective takes devices.

    8 rows in zigzag order over 2 devices -> [0, 1, 6, 7, 2, 3, 4, 5], the rows of device 0, then
    those of device 1. A collective in phases, one per speed of links, takes devices in another
    order: those that fast links join come one after the other.

    Args:
        before: The sharding before the step.
        dim: The name of the dim.
        shards: How the dim is cut over devices.
        phases: The phases of the collective; maybe just one.
    """
    mesh = before.mesh
    # The devices in the group of device 0. Other groups have them in the same order.
    devices: Sequence[int] = mesh.group(0, phases.axes)
    if phases.has_several_speeds:
        devices = phases.devices_reached(0)
    rows_by_index = [row_numbers(rows) for rows in even_parts(before, dim, shards)]
    axes = axes_of(shards)
    return np.concatenate([rows_by_index[mesh.index(device, axes)] for device in devices])


def _rows_in_order(x: jax.Array, dim: int, rows: NDArray[np.int64]) -> jax.Array:
    """Sort a dim whose i-th row is row `rows[i]` of the array."""
    return pick_same_rows(x, dim, inverse(rows, len(rows)))


def _split_dim(x: jax.Array, dim: int, n_parts: int) -> jax.Array:
    """Split a dim into its parts and the rows of a part: [8, 3] -> [4, 2, 3]."""
    return with_lengths(x, dim, 1, n_parts, x.shape[dim] // n_parts)


def _merge_dims(x: jax.Array, dim: int) -> jax.Array:
    """Merge a dim and the next into one: [4, 2, 3] -> [8, 3]."""
    return with_lengths(x, dim, 2, x.shape[dim] * x.shape[dim + 1])


Rule = Callable[[Any, jax.Array, StepContext], jax.Array]


def _on_bits(rule: Rule) -> Rule:
    """Make a rule that only moves elements move short floats as integers."""

    def rule_on_bits(step: steps.Step, x: jax.Array, context: StepContext) -> jax.Array:
        return as_bits(lambda bits: rule(step, bits, context), x)

    return rule_on_bits


RULES: dict[type[steps.Step], Rule] = {
    steps.AllGather: _on_bits(_all_gather),
    steps.AllReduce: _all_reduce,
    steps.AllToAll: _on_bits(_all_to_all),
    steps.Embed: _on_bits(_embed),
    steps.Exchange: _exchange,
    steps.Mask: _mask,
    steps.Permute: _permute,
    steps.ReduceScatter: _reduce_scatter,
    steps.Retag: _retag,
    steps.Scale: _scale,
    steps.Slice: _on_bits(_slice),
    steps.Transpose: _transpose,
}
