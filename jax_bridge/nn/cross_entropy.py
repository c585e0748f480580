"""Cross entropy of logits with sharded classes: no device holds the logits of all classes.

>>> logits, labels = (
...     jnp.arange(8.0).reshape(1, 2, 4),
...     jnp.array([[3, 0]]),
... )  # one block on one device
>>> loss = jax.pmap(lambda x, y: cross_entropy(x, y, "b v/tp"), "tp")
>>> [round(x.item(), 4) for x in (loss(logits, labels)[0], jax.nn.logsumexp(jnp.arange(4.0)) - 1.5)]
[1.9402, 1.9402]
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_bridge.calls import as_array, redistribute
from jax_bridge.lower.row_tables import valid, without_padding
from jax_bridge.mesh.context import AnyMesh, block_sharding, machine_here
from jax_bridge.ops import positions
from xshard import Layout, Sharding
from xshard.contractions.attention import Verb
from xshard.errors import DtypeError
from xshard.nn.cross_entropy import class_dim
from xshard.ops import move, tag


def _cross_entropy(
    logits: Any, labels: Any, layout: Layout | str, mesh: Any, *options: Any
) -> jax.Array:
    reduction, ignore_index, label_smoothing, shape, classes, profile = options
    layout = Layout.parse(layout)
    text = str(layout)
    logits = as_array(logits, text)
    labels = as_array(labels, text)
    if not jnp.issubdtype(labels.dtype, jnp.integer) or not jnp.issubdtype(
        logits.dtype, jnp.floating
    ):
        hint = "labels are numbers of classes"
        raise DtypeError(f"logits {logits.dtype}, labels {labels.dtype}", text=text, hint=hint)
    here, machine = machine_here(mesh, (layout.resolved(logits.ndim),), text, profile)
    sharding = block_sharding(logits, layout.resolved(logits.ndim), here, shape)
    d, axes, token_axes = class_dim(sharding, classes, logits.shape, labels.shape, reduction)
    n = sharding.shape[d]

    def reduced(x: jax.Array, kind: str, axes: tuple[str, ...]) -> jax.Array:
        return (
            redistribute(x, move(x.shape, tag(kind, axes), ""), here, profile=machine)
            if axes
            else x
        )

    rest = replace(
        sharding.layout, dims=(*sharding.layout.dims[:d], *sharding.layout.dims[d + 1 :])
    )
    tokens = Sharding(rest, here, (*sharding.shape[:d], *sharding.shape[d + 1 :]))
    ignored = (labels == ignore_index) | ~valid(tokens)
    x = jnp.moveaxis(without_padding(logits, sharding), d, -1)
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    own = positions(sharding.layout, here, shape=sharding.shape, dim=d)
    known = jnp.where(own < 0, -jnp.inf, x)
    top = reduced(lax.stop_gradient(known).max(-1), "max", axes)
    addends = [jnp.exp(known - top[..., None]), jnp.where(own == labels[..., None], x, 0)]
    addends += [x] if label_smoothing else []
    total, picked, *sums = reduced(jnp.stack([part.sum(-1) for part in addends]), "sum", axes)
    losses = top + jnp.log(total) - (1 - label_smoothing) * picked
    if label_smoothing:
        losses -= label_smoothing / n * sums[0]
    losses = jnp.where((labels < 0) | (labels >= n), jnp.nan, losses)
    losses = jnp.where(ignored, 0, losses)
    if reduction == "none":
        return losses
    loss, count = reduced(
        jnp.stack([losses.sum(), (~ignored).sum().astype(losses.dtype)]), "sum", token_axes
    )
    return loss / count if reduction == "mean" else loss


cross_entropy = Verb[jax.Array, AnyMesh](_cross_entropy).cross_entropy
