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

from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from torch_bridge.autodiff.blocks import as_tensor
from torch_bridge.calls.move import between_graphs
from torch_bridge.mesh.process_mesh import MeshLike
from torch_bridge.nn.placed import placed_as
from torch_bridge.redistribution import redistribute
from torch_bridge.versions.functorch import is_transformed
from xshard import Layout, Sharding
from xshard.contractions.attention import Verb
from xshard.errors import ShapeError
from xshard.nn.cross_entropy import LossOptions, ShardedLoss, rows_of_classes


@between_graphs
def _cross_entropy(
    logits: Any, labels: Any, layout: Layout | str, mesh: MeshLike, *arguments: Any
) -> Tensor:
    """Compute the cross entropy of logits whose classes may be sharded (a parallel vocabulary).

    Returns the loss per token of this process for reduction "none", else one number for the tokens
    of all processes.

    Args:
        logits: This process's block of logits.
        labels: This process's block of labels, which are global class numbers.
        layout: The layout of the logits.
        mesh: The mesh.
        *arguments: The fields of `LossOptions`, in order.
    """
    options = LossOptions(*arguments)
    logits = as_tensor(logits, "logits")
    labels = as_tensor(labels, "labels")
    placement = placed_as(logits, layout, mesh, options.shape)
    processes = placement.processes
    move = partial(redistribute, mesh=processes, profile=options.profile)
    loss = ShardedLoss(torch, move, options, placement.sharding)
    loss.check(logits, labels)
    # An ignored label, such as -100, is no class: class 0 is looked up in its place, and the loss is
    # set to 0.
    is_ignored = labels == options.ignore_index
    classes = labels.masked_fill(is_ignored, 0).long()
    tables_before = _rows_of_classes.cache_info().misses
    rows = _rows_of_classes(placement.sharding, loss.dim, processes.device, labels.device)
    is_first_call = _rows_of_classes.cache_info().misses > tables_before  # under this sharding
    row_of_label = _look_up_rows(classes, rows, str(layout))
    # Sums of many exponentials: in float32 or wider.
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.movedim(loss.dim, -1).to(dtype)
    are_cut = processes.mesh.size(*loss.class_axes) > 1
    if is_first_call and are_cut and not logits.is_meta and not is_transformed():
        _check_are_blocks(logits.detach(), classes, loss)
    losses = loss.of_tokens(
        logits,
        exponents=logits,  # blocks have no padding
        local_top=logits.detach().logsumexp(-1),
        label_logits=_logits_of_labels(logits, row_of_label),
    )
    return loss.reduced(losses, ~is_ignored)


def _look_up_rows(classes: Tensor, rows: Tensor, layout: str) -> Tensor:
    """Return the row of each token's class in this process's block. Raises ShapeError for no class.

    Args:
        classes: The class of each token.
        rows: The row of each class, as of `_rows_of_classes`.
        layout: The text that errors quote.
    """
    try:
        return F.embedding(classes, rows[:, None]).squeeze(-1)
    except IndexError as error:  # on a GPU, it is an assertion there
        reason = f"labels from {classes.min()} to {classes.max()}, {len(rows)} classes"
        hint = "ignore_index=: labels that do not count"
        raise ShapeError(reason, text=layout, hint=hint) from error


def _logits_of_labels(logits: Tensor, row_of_label: Tensor) -> Tensor:
    """Return each token's logit of its label; 0 if another process has it.

    Args:
        logits: This process's block, `[tokens, rows]`.
        row_of_label: The row of each token's label; the number of rows if another process has it.
    """
    local_count = logits.shape[-1]
    if not local_count:
        return logits.sum(-1)  # zeros that depend on the logits, for autograd
    # Any row stands in for a class that is elsewhere.
    row = row_of_label % local_count
    chosen = logits.gather(-1, row[..., None]).squeeze(-1)
    return chosen.masked_fill(row_of_label == local_count, 0)


cross_entropy = Verb[Tensor, MeshLike](_cross_entropy).cross_entropy


def _check_are_blocks(logits: Tensor, classes: Tensor, loss: ShardedLoss) -> None:
    """Raise ShapeError on all processes if all of them have the same logits, which the labels fit.

    Whole logits in the place of blocks would make the loss too large by the logarithm of their number.
    Logits that are all equal, as of a new layer, tell nothing.
    """
    sums = logits.logsumexp(-1)
    is_same = sums == loss.all_reduced(sums, "max", loss.class_axes)
    is_varied = (logits != logits[..., :1]).any()
    looks_whole = is_same.all() & is_varied & (classes < logits.shape[-1]).all()
    if loss.all_reduced(looks_whole.long(), "min", loss.sharding.layout.axes):
        _rows_of_classes.cache_clear()  # the next call is checked again
        raise loss.whole_error()


@lru_cache(maxsize=64)
def _rows_of_classes(sharding: Sharding, dim: int, process: int, device: torch.device) -> Tensor:
    """Return the row of each class in a process's block, as `rows_of_classes` does."""
    return torch.as_tensor(rows_of_classes(sharding, dim, process), device=device)
