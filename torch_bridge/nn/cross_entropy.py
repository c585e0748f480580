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

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from torch_bridge.autodiff.blocks import as_tensor
from torch_bridge.calls.move import between_graphs
from torch_bridge.mesh.process_mesh import MeshLike, ProcessMesh
from torch_bridge.nn.placed import Lengths, Placement, placed_as
from torch_bridge.redistribution import redistribute
from xshard import Layout, ProfileLike, Sharding
from xshard.contractions.attention import Verb
from xshard.errors import DtypeError
from xshard.nn.cross_entropy import class_dim, rows_of_classes
from xshard.ops import move, tag

Axes = tuple[str, ...]
# A tensor, "sum" or "max" -> its sum or maximum over devices that have different classes.
Reduce = Callable[[Tensor, str], Tensor]


class LossOptions(NamedTuple):
    """The options of `Verb.cross_entropy`, in its order."""

    reduction: str
    ignore_index: int
    label_smoothing: float
    shape: Lengths
    classes: str
    profile: ProfileLike


@between_graphs
def _cross_entropy(
    logits: Any, labels: Any, layout: Layout | str, mesh: MeshLike, *arguments: Any
) -> Tensor:
    """Compute the cross entropy of logits whose classes may be sharded (a parallel vocabulary).

    logits, labels: this process's blocks; labels are global class numbers. layout: of the logits.
    arguments: the fields of `LossOptions`, in order. Returns the loss per token of this process for
    reduction "none", else one number for the tokens of all processes.
    """
    options = LossOptions(*arguments)
    logits = as_tensor(logits, "logits")
    labels = as_tensor(labels, "labels")
    if labels.is_floating_point() or not logits.is_floating_point():
        message = f"logits {logits.dtype}, labels {labels.dtype}"
        raise DtypeError(message, text=str(layout), hint="labels are numbers of classes")
    placement = placed_as(logits, layout, mesh, options.shape)
    classes = class_dim(
        placement.sharding, options.classes, logits.shape, labels.shape, options.reduction
    )
    reduce = partial(_reduced, processes=placement.processes, profile=options.profile)
    # An ignored label, such as -100, is no class: class 0 is looked up in its place, and the loss is
    # set to 0.
    is_ignored = labels == options.ignore_index
    row_of_label = _local_rows(labels.masked_fill(is_ignored, 0), placement, classes.dim)
    losses = _losses(
        logits.movedim(classes.dim, -1),
        row_of_label,
        placement.shape[classes.dim],
        options.label_smoothing,
        partial(reduce, axes=classes.axes),
    )
    losses = losses.masked_fill(is_ignored, 0)
    if options.reduction == "none":
        return losses
    # The sum of losses and the number of tokens travel in one all-reduce. Reduction "sum" does not
    # need the number, which costs it nothing.
    count = (~is_ignored).sum().to(losses)
    sums = torch.stack([losses.sum(), count])
    total, count = reduce(sums, "sum", axes=classes.token_axes)
    return total / count if options.reduction == "mean" else total


def _local_rows(labels: Tensor, placement: Placement, dim: int) -> Tensor:
    """Return the row of each label's class in this process's block, along the dim of classes."""
    device = placement.processes.device
    rows = _rows_of_classes(placement.sharding, dim, device, labels.device)
    return F.embedding(labels.long(), rows[:, None]).squeeze(-1)


def _reduced(
    x: Tensor, operation: str, *, axes: Axes, processes: ProcessMesh, profile: ProfileLike
) -> Tensor:
    """Return the sum, or another reduction, of a tensor over mesh axes: on all devices."""
    if not axes:
        return x
    expression = move(x.shape, tag(operation, axes), "")
    return redistribute(x, expression, processes, profile=profile)


def _losses(
    logits: Tensor, row_of_label: Tensor, class_count: int, smoothing: float, reduce: Reduce
) -> Tensor:
    """Compute each token's cross entropy with two all-reduces over the devices that share classes.

    The first finds a maximum for stability; the second adds the sums of exponentials and the
    logits of the labels: loss = log(sum(exp(logits))) - logits[label].

    logits: `[tokens, this block's classes]`. row_of_label: `[tokens]`, the label's position among
    this block's classes, or their number if another process has it. class_count: of all devices
    together.
    """
    # Sums of many exponentials: in float32 or wider.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # Subtracting the largest log-sum-exp of a block keeps exponentials from overflowing. It cancels
    # in the loss, so that it needs no gradient.
    top = reduce(logits.detach().logsumexp(-1), "max")
    exponentials = (logits - top[..., None]).exp()
    addends = [exponentials.sum(-1), _chosen(logits, row_of_label)]
    if smoothing:
        addends.append(logits.sum(-1))
    sums = reduce(torch.stack(addends), "sum")
    losses = top + sums[0].log()
    losses = losses - (1 - smoothing) * sums[1]
    if smoothing:
        losses = losses - smoothing / class_count * sums[2]
    return losses


def _chosen(logits: Tensor, row_of_label: Tensor) -> Tensor:
    """Return each token's logit of its label; 0 if another process has it."""
    local_count = logits.shape[-1]
    if not local_count:
        return logits.sum(-1)  # zeros that depend on the logits, for autograd
    # Any row stands in for a class that is elsewhere.
    row = row_of_label % local_count
    chosen = logits.gather(-1, row[..., None]).squeeze(-1)
    return chosen.masked_fill(row_of_label == local_count, 0)


cross_entropy = Verb[Tensor, MeshLike](_cross_entropy).cross_entropy


@lru_cache(maxsize=64)
def _rows_of_classes(sharding: Sharding, dim: int, process: int, device: torch.device) -> Tensor:
    """Return the row of each class in a process's block, as `rows_of_classes` does."""
    return torch.as_tensor(rows_of_classes(sharding, dim, process), device=device)
