"""Attention of `transformers` on blocks of a sequence that rules cut: an error, not another loss."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from torch_bridge.models.hooks import ModuleHooks
from torch_bridge.models.names import is_inside
from xshard import XshardError


def guard_attention(model: nn.Module, hooks: Mapping[str, ModuleHooks]) -> None:
    """Check in each call of an attention of `transformers` that it does not get a block of a sequence."""
    if "" not in hooks:
        return
    for name, module in model.named_modules():
        kind = type(module)
        is_attention = kind.__module__.startswith("transformers.") and "Attention" in kind.__name__
        # Rules inside may gather the sequence, and cut heads instead.
        if is_attention and not any(is_inside(other, name) for other in hooks):
            check = partial(check_attention, name, hooks[""])
            module.register_forward_pre_hook(check, with_kwargs=True)


def check_attention(
    name: str, root: ModuleHooks, module: nn.Module, args: Any, kwargs: Any
) -> None:
    """Raise XshardError if a module would attend to one block of a sequence; a hook of the module."""
    blocks = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim > 1]
    has_other_keys = kwargs.get("key_value_states") is not None  # they may be whole
    if not blocks or has_other_keys or not _is_own(module):
        return
    rows = blocks[0].shape[1]  # of [batch, sequence, ...]
    layouts = [rule.rule.dst for rule in root.inputs]
    sequences = [layout.names[1] for layout in layouts if len(layout.names) == 2]  # of tokens
    for dim in root.known_dims:
        is_cut = dim.name in sequences and root.context.axes.size(*dim.axes) > 1
        if is_cut and rows == dim.local_length:
            reason = f"{name} attends to {rows} of {dim.length} rows: {dim.source}"
            hint = "set an attention of xt.nn.register_attention, or gather the rows in a rule for its input"
            raise XshardError(reason, hint=hint)


def _is_own(module: nn.Module) -> bool:
    """Return whether a module attends by code of `transformers`, not by a function of another's name."""
    # Models that take functions by name have this table in their file.
    functions = getattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS", {})
    config = getattr(module, "config", None)
    function = functions.get(getattr(config, "_attn_implementation", None))
    return function is None or function.__module__.startswith("transformers.")
