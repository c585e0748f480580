"""Transforms of `torch.func` and forward mode: which are active, and what is inside their tensors.

torch has no public question for any of it.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from torch_bridge.versions.support import private_names

with private_names():
    # Hot: whether a torch.func transform is active. `Function.apply` has to see the call then:
    # without it, `vmap` and `grad` would not reach a redistribution.
    has_functorch_transforms = torch._C._are_functorch_transforms_active

    # Hot: a tensor that outlives its torch.func transform -> the plain one inside. `Function.apply`
    # unwraps its arguments like this; without it `Redistribute.apply`, which skips that code, would
    # pass dead wrappers on.
    unwrap_if_dead = torch._C._functorch.unwrap_if_dead

    # Whether a tensor is one of `vmap`, which has other values for each batch. Without it, `vmap`
    # would route all batches by wrong values.
    is_batched = torch._C._functorch.is_batchedtensor

    _interpreter_stack = torch._C._functorch.get_interpreter_stack
    forward_ad._current_level  # noqa: B018  # a number that changes: asked for, and not bound


def is_transformed() -> bool:
    """Return whether torch.func or forward mode is active; their tensors require no gradient.

    Hot. Without it derivatives in these modes would be dropped in silence.
    """
    return has_functorch_transforms() or forward_ad._current_level >= 0


def is_forward_mode() -> bool:
    """Return whether tangents are computed, inside `forward_ad.dual_level`.

    Without it, functions of autograd without a rule for tangents would raise.
    """
    return forward_ad._current_level >= 0


def active_transforms() -> list[str]:
    """Return the active transforms of `torch.func` as text: "vmap of 3", "grad".

    The outermost comes first. Without it, ranks inside different transforms would not be told.
    """
    stack = _interpreter_stack()
    if not stack:
        return []
    with private_names():
        # Slow to import, and seldom needed.
        from torch._functorch.pyfunctorch import VmapInterpreter, coerce_cinterpreter

    transforms: list[str] = []
    for level in map(coerce_cinterpreter, stack):
        if isinstance(level, VmapInterpreter):
            transforms.append(f"vmap of {level.batch_size()}")
        else:
            transforms.append("grad")
    return transforms
