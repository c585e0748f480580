"""Keeps torch's own `clip_grad_norm_` from taking the blocks of a parallel model for whole gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor

from torch_bridge.versions.modules import (
    CLIP_TARGET,
    clipping_function,
    replace_clipping_function,
)
from xshard import XshardError

if TYPE_CHECKING:
    from torch_bridge.models.parallel import ParallelModel


_GUARDED: WeakSet[ParallelModel] = WeakSet()


def guard_clipping(model: ParallelModel) -> None:
    """From now on, let torch's own `clip_grad_norm_` raise for this model's gradients.

    These are blocks: torch would take the norm of a block for that of the whole gradient. The first
    call, in a program, replaces a private function of torch by `_scale_unless_blocks`; all calls
    add the model to those that it guards. Raises XshardError if this release of torch lacks that
    function.
    """
    function = clipping_function()
    if function is not _scale_unless_blocks:
        if function is None:
            what = f"torch {torch.__version__} has no torch.nn.utils.clip_grad.{CLIP_TARGET}, by which "
            what += "xshard keeps clip_grad_norm_ from taking blocks for whole gradients"
            hint = "install a release of torch that xshard is tested with, as torch==2.13, or a newer xshard"
            raise XshardError(what, hint=hint)
        replace_clipping_function(_scale_unless_blocks)
    _GUARDED.add(model)


def _scale_unless_blocks(parameters: Any, *args: Any, **options: Any) -> None:
    """Scale gradients as torch does. Raises XshardError for blocks: their norm was not that of the whole."""
    tensors: Iterable[Tensor] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    names = {}
    for model in _GUARDED:
        names.update({id(block.tensor): block.name for block in model.sharded})
    for x in tensors:
        if id(x) in names:
            name = names[id(x)]
            what = f"torch.nn.utils.clip_grad_norm_ would take the block of {name} for the whole"
            raise XshardError(what, hint="xt.clip_grad_norm_(model, max_norm)")
    torch.nn.utils.clip_grads_with_norm_(tensors, *args, **options)
