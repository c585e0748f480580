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
from typing import Any, Literal

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
from xshard.nn.cross_entropy import ClassDim, class_dim
from xshard.ops import move, tag


def _cross_entropy(  # noqa: PLR0913, PLR0917  the arguments of `nn.cross_entropy`, in its order
    logits: Any,
    labels: Any,
    layout: Layout | str,
    mesh: AnyMesh | None,
    reduction: Literal["mean", "sum", "none"],
    ignore_index: int,
    label_smoothing: float,
    shape: Sequence[int | None] | None,
    class_name: str,
    profile: ProfileLike,
) -> jax.Array:
    """Compute `nn.cross_entropy`, whose arguments these are, of this device's logits and labels.

    Args:
        logits: This device's block of logits, [*tokens, classes] in the order of the layout.
        labels: The numbers of classes, [*tokens].
        layout: The layout of the logits.
        mesh: The mesh; None for the one of the context.
        reduction: How losses are reduced over tokens.
        ignore_index: The label that does not count.
        label_smoothing: The weight of the mean logit, 0 to 1.
        shape: The global shape of the logits; None if blocks are equal.
        class_name: The name of the dim of classes.
        profile: The machine to plan for.
    """
    layout = Layout.parse(layout)
    text = str(layout)
    logits = as_array(logits, text)
    labels = as_array(labels, text)
    _check_dtypes(logits, labels, text)
    layout_of_logits = layout.resolved(logits.ndim)
    context = mesh_and_machine(mesh, (layout_of_logits,), text, profile)
    sharding = block_sharding(logits, layout_of_logits, context.mesh, shape)
    classes = class_dim(sharding, class_name, logits.shape, labels.shape, reduction)

    losses = _token_losses(logits, labels, sharding, classes, label_smoothing, context)
    n_classes = sharding.shape[classes.dim]
    is_no_class = (labels < 0) | (labels >= n_classes)
    is_token = valid_elements(_without_dim(sharding, classes.dim))
    is_counted = is_token & (labels != ignore_index)
    # A label that is no class gives NaN, since a compiled program cannot raise.
    losses = jnp.where(is_no_class, jnp.nan, losses)
    losses = jnp.where(is_counted, losses, 0)
    if reduction == "none":
        return losses

    # The count travels with the sum: one message instead of two.
    sum_and_count = jnp.stack([losses.sum(), is_counted.sum().astype(losses.dtype)])
    loss, count = _all_reduced(sum_and_count, "sum", classes.token_axes, context)
    if reduction == "sum":
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
    shape = sharding.shape
    other_dims = dims[:dim] + dims[dim + 1 :]
    layout = replace(sharding.layout, dims=other_dims)
    return Sharding(layout, sharding.mesh, shape[:dim] + shape[dim + 1 :])


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
    classes: ClassDim,
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
        classes: The dim of classes, and the mesh axes that shard it.
        label_smoothing: The weight of the mean logit, 0 to 1.
        context: The mesh and its machine.

    Returns:
        [*tokens], equal on all devices along `classes.axes`.
    """
    dim = classes.dim
    class_numbers = positions(sharding.layout, context.mesh, shape=sharding.shape, dim=dim)
    x = jnp.moveaxis(with_zero_padding(logits, sharding), dim, -1)  # [*tokens, classes]
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))

    # The largest logit is subtracted, so that exponentials do not overflow. It cancels out of the
    # loss, so it needs no gradient. Classes with a negative number are padding.
    logits_or_inf = jnp.where(class_numbers < 0, -jnp.inf, x)
    local_largest = lax.stop_gradient(logits_or_inf).max(-1)
    largest = _all_reduced(local_largest, "max", classes.axes, context)
    exponentials = jnp.exp(logits_or_inf - largest[..., None])  # 0 in the padding
    logits_of_labels = jnp.where(class_numbers == labels[..., None], x, 0)
    local_sums = [exponentials.sum(-1), logits_of_labels.sum(-1)]
    if label_smoothing:
        local_sums.append(x.sum(-1))

    # One message for all sums: [2 or 3, *tokens]. Below, sums[0] are the exponentials, sums[1] the
    # logits of the labels, and sums[2] all logits.
    sums = _all_reduced(jnp.stack(local_sums), "sum", classes.axes, context)
    log_sum = largest + jnp.log(sums[0])
    losses = log_sum - (1 - label_smoothing) * sums[1]
    if label_smoothing:
        losses -= label_smoothing / sharding.shape[dim] * sums[2]
    return losses


cross_entropy = api_boundary(Verb[jax.Array, AnyMesh](_cross_entropy).cross_entropy)
