"""Attention of `transformers` on blocks of a sequence that rules cut: an error, not another loss."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from torch_bridge.models.hooks import ModuleHooks
from xshard import XshardError


def guard_attention(model: nn.Module, hooks: Mapping[str, ModuleHooks]) -> None:
    """Check in each call of an attention of `transformers` that it does not get a block of a sequence."""
    for name, module in model.named_modules():
        kind = type(module)
        # Rules inside may gather the sequence, and cut heads instead.
        has_rules = any(other.startswith(f"{name}.") for other in hooks)
        if (
            kind.__module__.startswith("transformers.")
            and "Attention" in kind.__name__
            and not has_rules
        ):
            check = partial(check_attention, name, hooks)
            module.register_forward_pre_hook(check, with_kwargs=True)


def check_attention(
    name: str, hooks: Mapping[str, ModuleHooks], module: nn.Module, args: Any, kwargs: Any
) -> None:
    """Raise XshardError if a module would attend to one block of a sequence; a hook of the module."""
    has_other_keys = kwargs.get("key_value_states") is not None  # they may be whole
    if "" not in hooks or has_other_keys:
        return
    root = hooks[""]
    # Tokens are `[batch, sequence]`.
    layouts = [rule.rule.dst for rule in root.inputs]
    sequences = [layout.names[1] for layout in layouts if len(layout.names) == 2]
    _, rows, *_ = next(x.shape for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
    for dim in root.known_dims:
        is_cut = dim.name in sequences and root.context.axes.size(*dim.axes) > 1
        if is_cut and rows == dim.local_length and _is_own(module):
            message = f"{name} attends to {rows} of {dim.length} rows: {dim.source}"
            hint = "set an attention of xt.nn.register_attention, or gather the rows in a rule for its input"
            raise XshardError(message, hint=hint)


def _is_own(module: nn.Module) -> bool:
    """Return whether a module attends by code of `transformers`, not by a function of another's name."""
    # Models that take functions by name have this table in their file.
    functions = getattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS", {})
    config = getattr(module, "config", None)
    function = functions.get(getattr(config, "_attn_implementation", None))
    return function is None or function.__module__.startswith("transformers.")
