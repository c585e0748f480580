"""Cross entropy of logits with sharded classes: no process holds the logits of all classes.

>>> import torch, torch_bridge as xt
>>> from xshard import Mesh
>>> def loss():
...     block = xt.redistribute(torch.arange(8.0).view(2, 4), "b v -> b v/tp", Mesh(tp=2))
...     return round(
...         xt.nn.cross_entropy(block, torch.tensor([3, 0]), "b v/tp", Mesh(tp=2)).item(), 4
...     )
>>> xt.testing.run_ranks(2, loss), round(torch.logsumexp(torch.arange(4.0), 0).item() - 1.5, 4)
([1.9402, 1.9402], 1.9402)
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from torch_bridge.autodiff.blocks import as_tensor
from torch_bridge.calls.move import between_graphs
from torch_bridge.mesh.process_mesh import MeshLike
from torch_bridge.nn.placed import placed_as
from torch_bridge.redistribution import redistribute
from xshard import Layout, Sharding
from xshard.contractions.attention import Verb
from xshard.errors import DtypeError
from xshard.nn.cross_entropy import class_dim, rows_of_classes
from xshard.ops import move, tag


@between_graphs
def _cross_entropy(
    logits: Any, labels: Any, layout: Layout | str, mesh: MeshLike, *options: Any
) -> Tensor:
    reduction, ignore_index, label_smoothing, shape, classes, profile = options
    logits = as_tensor(logits, "logits")
    labels = as_tensor(labels, "labels")
    if labels.is_floating_point() or not logits.is_floating_point():
        hint = "labels are numbers of classes"
        raise DtypeError(
            f"logits {logits.dtype}, labels {labels.dtype}", text=str(layout), hint=hint
        )
    placement = placed_as(logits, layout, mesh, shape)
    sharding = placement.sharding
    processes = placement.processes
    d, axes, token_axes = class_dim(sharding, classes, logits.shape, labels.shape, reduction)

    def reduced(x: Tensor, kind: str, axes: tuple[str, ...]) -> Tensor:
        return (
            redistribute(x, move(x.shape, tag(kind, axes), ""), processes, profile=profile)
            if axes
            else x
        )

    x = logits.movedim(d, -1)
    x, n, ignored = (
        x.to(torch.promote_types(x.dtype, torch.float32)),
        x.shape[-1],
        labels == ignore_index,
    )
    rows = _rows_of_classes(sharding, d, processes.device, x.device)
    row = F.embedding(labels.masked_fill(ignored, 0).long(), rows[:, None])[..., 0]
    top = reduced(x.detach().logsumexp(-1), "max", axes)
    chosen = x.gather(-1, row[..., None] % n)[..., 0].masked_fill(row == n, 0) if n else x.sum(-1)
    addends = [
        (x - top[..., None]).exp().sum(-1),
        chosen,
        *([x.sum(-1)] if label_smoothing else []),
    ]
    total, chosen, *sums = reduced(torch.stack(addends), "sum", axes)
    losses = top + total.log() - (1 - label_smoothing) * chosen
    if label_smoothing:
        losses = losses - label_smoothing / sharding.shape[d] * sums[0]
    losses = losses.masked_fill(ignored, 0)
    if reduction == "none":
        return losses
    total, count = reduced(
        torch.stack([losses.sum(), (~ignored).sum().to(losses)]), "sum", token_axes
    )
    return total / count if reduction == "mean" else total


cross_entropy = Verb[Tensor, MeshLike](_cross_entropy).cross_entropy


@lru_cache(maxsize=64)
def _rows_of_classes(sharding: Sharding, dim: int, process: int, device: torch.device) -> Tensor:
    return torch.as_tensor(rows_of_classes(sharding, dim, process), device=device)
