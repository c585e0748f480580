"""Cross entropy of logits with sharded classes: no device holds the logits of all classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jax_bridge.calls import as_array, redistribute
from jax_bridge.lower.row_tables import valid, without_padding
from jax_bridge.mesh.context import AnyMesh, machine_here
from jax_bridge.nn.sharded import block_sharding
from jax_bridge.ops import positions
from xshard import Layout, Profile, Sharding
from xshard.errors import DtypeError
from xshard.nn.cross_entropy import class_dim
from xshard.ops import move, tag


def cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    layout: Layout | str,
    mesh: AnyMesh | None = None,
    *,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    shape: Sequence[int | None] | None = None,
    classes: str = "v",
    profile: str | Path | Profile = "auto",
) -> jax.Array:
    """Blocks of logits, and labels -> the cross entropy of the whole batch, without gathering logits.

    Labels are numbers of classes, sharded as the dims of `layout` without the one of classes: `[b, s]` beside
    `"b/dp s v/tp"`. Two reductions along the axes that shard classes send three numbers per token; the
    backward pass sends nothing.

    reduction: "mean" over all labels of the whole batch that are not ignored, "sum", both on every device; or
    "none", this device's block of losses, 0 where the label is ignored and in padding.
    ignore_index, label_smoothing: as in torch's `cross_entropy`. mesh: by default the one of the context.
    shape: the global shape of the logits, if blocks differ in size. classes: the name of their dim. The loss
    of float16 and bfloat16 is in float32, and NaN for a label that is not a class.

    Raises as `redistribute` does; DtypeError for labels that are not whole numbers; ShapeError unless each
    token has one.

    >>> logits, labels = jnp.arange(8.0).reshape(1, 2, 4), jnp.array([[3, 0]])  # one block on one device
    >>> loss = jax.pmap(lambda x, y: cross_entropy(x, y, "b v/tp"), "tp")
    >>> [round(x.item(), 4) for x in (loss(logits, labels)[0], jax.nn.logsumexp(jnp.arange(4.0)) - 1.5)]
    [1.9402, 1.9402]
    """
    layout = Layout.parse(layout)
    text = str(layout)
    logits, labels = as_array(logits, text), as_array(labels, text)
    if not jnp.issubdtype(labels.dtype, jnp.integer) or not jnp.issubdtype(logits.dtype, jnp.floating):
        hint = "labels are numbers of classes"
        raise DtypeError(f"logits {logits.dtype}, labels {labels.dtype}", text=text, hint=hint)
    here, machine = machine_here(mesh, (layout.resolved(logits.ndim),), text, profile)
    sharding = block_sharding(logits, layout.resolved(logits.ndim), here, shape)
    d, axes, token_axes = class_dim(sharding, classes, logits.shape, labels.shape, reduction)
    n = sharding.shape[d]

    def reduced(x: jax.Array, kind: str, axes: tuple[str, ...]) -> jax.Array:
        text = move(x.shape, tag(kind, axes), "")
        return redistribute(x, text, here, profile=machine) if axes else x

    rest = replace(sharding.layout, dims=(*sharding.layout.dims[:d], *sharding.layout.dims[d + 1 :]))
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
    counted = jnp.stack([losses.sum(), (~ignored).sum().astype(losses.dtype)])
    loss, count = reduced(counted, "sum", token_axes)
    return loss / count if reduction == "mean" else loss
