"""Cross entropy of logits with sharded classes: no device holds the logits of all classes.

>>> logits = jnp.arange(8.0).reshape(1, 2, 4)  # one block on one device
>>> labels = jnp.array([[3, 0]])
>>> loss = jax.pmap(lambda x, y: cross_entropy(x, y, "b v/tp"), "tp")
>>> [round(x.item(), 4) for x in (loss(logits, labels)[0], jax.nn.logsumexp(jnp.arange(4.0)) - 1.5)]
[1.9402, 1.9402]
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_bridge.calls import as_array, redistribute
from jax_bridge.lower.row_tables import rows_of_this_device, valid_elements, with_zero_padding
from jax_bridge.mesh.axis_types import axes_of_equal_blocks
from jax_bridge.mesh.context import AnyMesh, block_sharding, mesh_and_machine
from xshard import Layout
from xshard.contractions.attention import Verb
from xshard.errors import api_boundary
from xshard.nn.cross_entropy import LossOptions, ShardedLoss


def _cross_entropy(
    logits: Any, labels: Any, layout: Layout | str, mesh: AnyMesh | None, *arguments: Any
) -> jax.Array:
    """Compute `nn.cross_entropy` of this device's logits and labels.

    Args:
        logits: This device's block of logits, [*tokens, classes] in the order of the layout.
        labels: The numbers of classes, [*tokens].
        layout: The layout of the logits.
        mesh: The mesh; None for the one of the context.
        arguments: The fields of `LossOptions`, in order.
    """
    options = LossOptions(*arguments)
    layout = Layout.parse(layout)
    text = str(layout)
    logits = as_array(logits, text)
    labels = as_array(labels, text)
    layout_of_logits = layout.resolved(logits.ndim)
    context = mesh_and_machine(mesh, (layout_of_logits,), text, options.profile)
    sharding = block_sharding(logits, layout_of_logits, context.mesh, options.shape)
    move = partial(redistribute, mesh=context.mesh, profile=context.machine)
    loss = ShardedLoss(jnp, move, options, sharding)
    loss.check(logits, labels)
    # Types may say that devices have the same logits: whole ones, in the place of blocks.
    if axes_of_equal_blocks(logits, loss.class_axes):
        raise loss.whole_error()

    losses = _token_losses(logits, labels, loss)
    is_no_class = (labels < 0) | (labels >= loss.n_classes)
    # A label that is no class gives NaN, since a compiled program cannot raise.
    losses = jnp.where(is_no_class, jnp.nan, losses)
    token_names = [name for name in layout_of_logits.names if name != options.class_name]
    is_token = valid_elements(sharding.in_order(token_names))
    return loss.reduced(losses, is_token & (labels != options.ignore_index))


def _token_losses(logits: jax.Array, labels: jax.Array, loss: ShardedLoss) -> jax.Array:
    """Compute the loss of each token, while each device has the logits of some classes only.

    Args:
        logits: This device's block.
        labels: The class of each of its tokens: [*tokens].
        loss: Reduces over the devices.

    Returns:
        [*tokens], equal on all devices that share classes.
    """
    sharding = loss.sharding
    dim = loss.dim
    class_numbers = rows_of_this_device(sharding, dim)
    # Padding is 0 where logits are summed, as label smoothing does: it adds nothing.
    summands = jnp.moveaxis(with_zero_padding(logits, sharding), dim, -1)  # [*tokens, classes]
    summands = summands.astype(jnp.promote_types(summands.dtype, jnp.float32))
    # It is -inf where their exponentials are summed, since exp(-inf) = 0.
    is_padding = class_numbers < 0
    exponents = jnp.where(is_padding, -jnp.inf, summands)
    # Each token has one label: all but its logit become 0, so that the sum over classes is that logit.
    label_summands = jnp.where(class_numbers == labels[..., None], summands, 0)
    return loss.of_tokens(
        logits=summands,
        exponents=exponents,
        local_top=lax.stop_gradient(exponents).max(-1),
        label_logits=label_summands.sum(-1),
    )


cross_entropy = api_boundary(Verb[jax.Array, AnyMesh](_cross_entropy).cross_entropy)
