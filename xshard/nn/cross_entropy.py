"""Cross entropy of logits with sharded classes: its options, sums, and who holds which class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.dtypes import name_of
from xshard.errors import DtypeError, ShapeError
from xshard.layout import Sharding
from xshard.layout.runs import row_numbers
from xshard.ops import move, tag

Axes = tuple[str, ...]


class LossOptions(NamedTuple):
    """The options of `cross_entropy`, which both bridges get by position, in this order."""

    reduction: str
    ignore_index: int
    label_smoothing: float
    shape: Sequence[int | None] | None
    class_name: str
    profile: Any  # of the machine to plan for


@dataclass(frozen=True, eq=False)
class ShardedLoss:
    """The sums over devices of a cross entropy, in the arrays of torch or JAX.

    xp: the array functions, `torch` or `jax.numpy`. redistribute: takes a block and an expression.
    sharding: of the logits, such as `b/dp s v/tp`.
    """

    xp: Any
    redistribute: Callable[[Any, str], Any]
    options: LossOptions
    sharding: Sharding

    @property
    def dim(self) -> int:
        """The dim of the classes."""
        return self.sharding.layout.dim_index(self.options.class_name)

    @property
    def n_classes(self) -> int:
        """The classes of all devices."""
        return self.sharding.shape[self.dim]

    @property
    def class_axes(self) -> Axes:
        """The mesh axes that shard the classes."""
        return self.sharding.layout.dims[self.dim].axes

    def check(self, logits: Any, labels: Any) -> None:
        """Raise DtypeError unless labels are whole numbers, ShapeError unless each token has one.

        logits, labels: this device's, [b, s, v] and [b, s].
        """
        text = str(self.sharding.layout)
        if "float" not in name_of(logits.dtype) or "int" not in name_of(labels.dtype):
            reason = f"logits {logits.dtype}, labels {labels.dtype}"
            raise DtypeError(reason, text=text, hint="labels are numbers of classes")
        tokens = list(logits.shape)
        del tokens[self.dim]
        if list(labels.shape) != tokens:
            reason = f"labels of shape {tuple(labels.shape)}, logits of shape {tuple(logits.shape)}"
            hint = f"labels are {tuple(tokens)}, all dims but {self.options.class_name!r}"
            raise ShapeError(reason, text=text, hint=hint)

    def whole_error(self) -> ShapeError:
        """Return the error of devices that all have the same logits, in the place of blocks."""
        dim = self.sharding.layout.dims[self.dim]
        reason = f"the same logits on all devices along {', '.join(dim.axes)}, of {self.n_classes} classes"
        hint = f"whole logits are under '{dim.name}', and not '{dim}'"
        return ShapeError(reason, text=str(self.sharding.layout), hint=hint)

    def all_reduced(self, x: Any, op: str, axes: Axes) -> Any:
        """Reduce a block over mesh axes, by "sum" or "max"; the result is on all devices."""
        if not axes:
            return x
        return self.redistribute(x, move(x.shape, tag(op, axes), ""))

    def of_tokens(self, logits: Any, exponents: Any, local_top: Any, label_logits: Any) -> Any:
        """Compute each token's loss with two all-reduces over the devices that share classes.

        The first finds a maximum for stability. The second adds the sums of exponentials and the
        logits of the labels: loss = log(sum(exp(logits))) - logits[label]. Smoothing replaces a part
        of the label's logit by the mean logit.

        logits: [*tokens, this block's classes], 0 in padding. exponents: the same, -inf in padding.
        local_top: [*tokens], what this device subtracts so that exponentials do not overflow. It
        cancels in the loss, so that it needs no gradient. label_logits: [*tokens], the label's
        logit, 0 if another device has it. Returns [*tokens], equal on these devices.
        """
        xp = self.xp
        smoothing = self.options.label_smoothing
        axes = self.class_axes
        top = self.all_reduced(local_top, "max", axes)
        local_sums = [xp.exp(exponents - top[..., None]).sum(-1), label_logits]
        if smoothing:
            local_sums.append(logits.sum(-1))
        # One message for all sums: [2 or 3, *tokens].
        sums = self.all_reduced(xp.stack(local_sums), "sum", axes)
        losses = top + xp.log(sums[0])
        losses = losses - (1 - smoothing) * sums[1]
        if smoothing:
            losses = losses - smoothing / self.n_classes * sums[2]
        return losses

    def reduced(self, losses: Any, is_counted: Any) -> Any:
        """Return the mean, or the sum, of the tokens' losses on all devices, or this device's losses.

        losses: [*tokens]. is_counted: which of them count, [*tokens]; the others are 0.
        """
        losses = self.xp.where(is_counted, losses, 0)
        if self.options.reduction == "none":
            return losses
        # The count travels with the sum: one message instead of two. A sum does not need it, which
        # costs nothing.
        sum_and_count = self.xp.stack([losses.sum(), is_counted.sum()])
        all_axes = self.sharding.layout.axes
        token_axes = tuple(axis for axis in all_axes if axis not in self.class_axes)
        loss_sum, count = self.all_reduced(sum_and_count, "sum", token_axes)
        return loss_sum / count if self.options.reduction == "mean" else loss_sum


def rows_of_classes(sharding: Sharding, dim: int, device: int) -> NDArray[np.int64]:
    """Return the row of each class in a device's block; for classes of other devices, its number of rows.

    >>> from xshard import Mesh
    >>> rows_of_classes(Sharding("v/tp c", Mesh(tp=2), (5, 1)), 0, 1)
    array([2, 2, 2, 0, 1])
    """
    held = row_numbers(sharding.held(dim, device))
    rows = np.full(sharding.shape[dim], len(held))
    rows[held] = np.arange(len(held))
    return rows
