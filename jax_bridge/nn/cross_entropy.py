"""Cross entropy of logits with sharded classes: no device holds the logits of all classes.

>>> logits = jnp.arange(8.0).reshape(1, 2, 4)  # one block on one device
>>> labels = jnp.array([[3, 0]])
>>> loss = jax.pmap(lambda x, y: cross_entropy(x, y, "b v/tp"), "tp")
>>> [round(x.item(), 4) for x in (loss(logits, labels)[0], jax.nn.logsumexp(jnp.arange(4.0)) - 1.5)]
[1.9402, 1.9402]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_bridge.calls import as_array, redistribute
from jax_bridge.lower.row_tables import valid_elements, with_zero_padding
from jax_bridge.mesh.context import AnyMesh, MeshAndMachine, block_sharding, mesh_and_machine
from jax_bridge.ops import positions
from xshard import Layout, ProfileLike, Sharding
from xshard.contractions.attention import Verb
from xshard.errors import DtypeError, api_boundary
from xshard.nn.cross_entropy import class_dim
from xshard.ops import move, tag


class Options(NamedTuple):
    """The options of `nn.cross_entropy`, in the order in which its signature passes them on."""

    reduction: Literal["mean", "sum", "none"]
    ignore_index: int
    label_smoothing: float
    shape: Sequence[int | None] | None
    classes: str
    profile: ProfileLike


def _cross_entropy(
    logits: Any, labels: Any, layout: Layout | str, mesh: AnyMesh | None, *options: Any
) -> jax.Array:
    """Compute `nn.cross_entropy` of this device's logits and labels, and reduce it over tokens.

    Args:
        logits: This device's block of logits, [*tokens, classes] in the order of the layout.
        labels: The numbers of classes, [*tokens].
        layout: The layout of the logits.
        mesh: The mesh; None for the one of the context.
        options: The other arguments, in the order of `Options`.
    """
    given = Options._make(options)
    layout = Layout.parse(layout)
    text = str(layout)
    logits = as_array(logits, text)
    labels = as_array(labels, text)
    _check_dtypes(logits, labels, text)
    layout_of_logits = layout.resolved(logits.ndim)
    context = mesh_and_machine(mesh, (layout_of_logits,), text, given.profile)
    sharding = block_sharding(logits, layout_of_logits, context.mesh, given.shape)
    dim, class_axes, token_axes = class_dim(
        sharding, given.classes, logits.shape, labels.shape, given.reduction
    )

    losses = _token_losses(
        logits, labels, sharding, dim, class_axes, given.label_smoothing, context
    )
    is_no_class = (labels < 0) | (labels >= sharding.shape[dim])
    is_ignored = (labels == given.ignore_index) | ~valid_elements(_without_dim(sharding, dim))
    # A label that is no class gives NaN, since a compiled program cannot raise.
    losses = jnp.where(is_no_class, jnp.nan, losses)
    losses = jnp.where(is_ignored, 0, losses)
    if given.reduction == "none":
        return losses

    # The count travels with the sum: one message instead of two.
    local_count = (~is_ignored).sum().astype(losses.dtype)
    sum_and_count = jnp.stack([losses.sum(), local_count])
    loss, count = _all_reduced(sum_and_count, "sum", token_axes, context)
    if given.reduction == "sum":
        return loss
    return loss / count


def _check_dtypes(logits: jax.Array, labels: jax.Array, text: str) -> None:
    """Raise DtypeError unless labels are whole numbers, and logits floats."""
    are_classes = jnp.issubdtype(labels.dtype, jnp.integer)
    if not are_classes or not jnp.issubdtype(logits.dtype, jnp.floating):
        hint = "labels are numbers of classes"
        raise DtypeError(f"logits {logits.dtype}, labels {labels.dtype}", text=text, hint=hint)


def _without_dim(sharding: Sharding, dim: int) -> Sharding:
    """Return the sharding of an array that lacks one dim: [b, v] -> [b]."""
    dims = sharding.layout.dims
    other_dims = (*dims[:dim], *dims[dim + 1 :])
    shape = list(sharding.shape)
    del shape[dim]
    return Sharding(replace(sharding.layout, dims=other_dims), sharding.mesh, tuple(shape))


def _all_reduced(
    x: jax.Array, op: str, axes: tuple[str, ...], context: MeshAndMachine
) -> jax.Array:
    """Reduce a block over the devices along axes, by "sum" or "max".

    The result is on all of them.
    """
    if not axes:
        return x
    expression = move(x.shape, tag(op, axes), "")
    return redistribute(x, expression, context.mesh, profile=context.machine)


def _token_losses(
    logits: jax.Array,
    labels: jax.Array,
    sharding: Sharding,
    dim: int,
    class_axes: tuple[str, ...],
    label_smoothing: float,
    context: MeshAndMachine,
) -> jax.Array:
    """Compute the loss of each token, while each device has the logits of some classes only.

    The loss is log(sum over classes of exp(logit)) - logit of the label; smoothing replaces a part
    of the label's logit by the mean logit. Two reductions over devices: the largest logit, and the
    sums.

    Args:
        logits: This device's block.
        labels: The class of each of its tokens: [*tokens].
        sharding: The sharding of the logits.
        dim: The dim of classes.
        class_axes: The mesh axes that shard it.
        label_smoothing: The weight of the mean logit, 0 to 1.
        context: The mesh and its machine.

    Returns:
        [*tokens], equal on all devices along `class_axes`.
    """
    class_numbers = positions(sharding.layout, context.mesh, shape=sharding.shape, dim=dim)
    x = jnp.moveaxis(with_zero_padding(logits, sharding), dim, -1)  # [*tokens, classes]
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))

    # The largest logit is subtracted, so that exponentials do not overflow. It cancels out of the
    # loss, so it needs no gradient. Classes with a negative number are padding.
    known = jnp.where(class_numbers < 0, -jnp.inf, x)
    largest = _all_reduced(lax.stop_gradient(known).max(-1), "max", class_axes, context)
    exponentials = jnp.exp(known - largest[..., None])  # 0 in the padding
    logits_of_labels = jnp.where(class_numbers == labels[..., None], x, 0)
    local_sums = [exponentials.sum(-1), logits_of_labels.sum(-1)]
    if label_smoothing:
        local_sums.append(x.sum(-1))

    # One message for all sums: [2 or 3, *tokens].
    sums = _all_reduced(jnp.stack(local_sums), "sum", class_axes, context)
    log_sum = largest + jnp.log(sums[0])
    losses = log_sum - (1 - label_smoothing) * sums[1]
    if label_smoothing:
        losses -= label_smoothing / sharding.shape[dim] * sums[2]
    return losses


cross_entropy = api_boundary(Verb[jax.Array, AnyMesh](_cross_entropy).cross_entropy)
