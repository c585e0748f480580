"""Texts about modules of a parallel model: their rules and blocks, as errors have them."""

from __future__ import annotations

import itertools
import sys
import traceback
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from torch import nn

from torch_bridge.models.names import title_of
from xshard.models import layout_text

if TYPE_CHECKING:
    from torch_bridge.models.hooks import ModuleHooks
    from torch_bridge.models.parallel import ParallelModel

NOTE = "in the parallel module "
LISTED = 8  # most parameters, and most attributes, in a note


def described(title: str, parallel: ParallelModel, path: str) -> str:
    """Write a few lines about a module for an error: its layout rules, and its parameters' blocks.

        <title>
          <the rules of its inputs and outputs>
          up.weight: o/tp i, block (3, 6) of (12, 6)

    Args:
        title: The first line.
        parallel: The state of the parallel model.
        path: The name of the module.
    """
    lines = [title]
    if path in parallel.hooks:
        lines += _rule_lines(parallel.hooks[path])
    lines += _parameter_lines(parallel, path)
    return "\n  ".join(lines)


def _rule_lines(hooks: ModuleHooks) -> list[str]:
    """Write a line for each rule of a module, and one if its inputs, or its outputs, have none."""
    lines = []
    for direction, rules in (("input", hooks.inputs), ("output", hooks.outputs)):
        texts = [rule.rule.text for rule in rules] if rules else ["no rule"]
        lines += [f"{direction} of {hooks.title}: {text}" for text in texts]
    return lines


def _parameter_lines(parallel: ParallelModel, path: str) -> list[str]:
    """Write a line for each of the first parameters inside a module: its layout, and its block."""
    lines = []
    parameters = list(parallel.used_inside(path).items())
    for name, sharding in parameters[:LISTED]:
        layout = layout_text(sharding.written)
        block_shape = sharding.local_shape(parallel.context.processes.device)
        lines.append(f"{name}: {layout}, block {block_shape} of {sharding.shape}")
    return lines


def leaves_call_of_hook(error: BaseException) -> bool:
    """Return whether an error leaves the module whose hook calls this, and not something around it.

    An error may be handled around the call of a model: `sys.exc_info()` then has it, too.
    """
    if error.__traceback__ is None:
        return False
    # Up from here: the hook, and the frame of torch that called the module's `forward`.
    return error.__traceback__.tb_frame is sys._getframe(2)


def has_note(error: BaseException) -> bool:
    """Return whether the hook of an inner module has added a note to the error already."""
    return any(note.startswith(NOTE) for note in getattr(error, "__notes__", ()))


def note_on(error: BaseException, parallel: ParallelModel) -> str:
    """Write the note that is added to an error in a parallel model: how its modules are sharded.

    The error came through several modules, one inside another. The note has the rules of the
    innermost one with rules, the blocks of the innermost one with parameters, and attributes of all
    that are the whole length of a sharded dim. `n_heads = 12`, where a process has 3 heads, is the
    most common mistake: a module that reshapes by it does not fit its block.
    """
    # Never empty, as a hook of one of these modules calls this.
    modules = _modules_inner_first(error, parallel)
    paths = [parallel.names[module] for module in modules]
    innermost = paths[0] if paths[0] else "(the model)"
    lines = [f"{NOTE}{innermost}, a {type(modules[0]).__name__}"]

    with_rules = [path for path in paths if path in parallel.hooks]
    if with_rules:
        lines += _rule_lines(parallel.hooks[with_rules[0]])
    with_parameters = [path for path in paths if parallel.used_inside(path)]
    lines += _parameter_lines(parallel, with_parameters[0] if with_parameters else "")
    return "\n  ".join([*lines, *_whole_length_lines(modules, parallel)])


def _whole_length_lines(modules: Sequence[nn.Module], parallel: ParallelModel) -> list[str]:
    """Write a line for each module with attributes that are whole lengths of sharded dims.

    Args:
        modules: The modules, the outermost last.
        parallel: The state of the parallel model.
    """
    sharded_lengths = _sharded_lengths(parallel, parallel.names[modules[-1]])
    lines = []
    for module in modules:
        # An attribute that counts= has made local may equal the length of another dim by chance.
        made_local = {count.attribute for count in parallel.counts if count.module is module}
        attributes = _attributes_of_length(module, made_local, sharded_lengths)[:LISTED]
        if attributes:
            title = title_of(parallel.names[module])
            hint = "whole lengths of sharded dims: counts= makes them local"
            lines.append(f"{title} has {', '.join(attributes)}, {hint}")
    return lines


def _modules_inner_first(error: BaseException, parallel: ParallelModel) -> list[nn.Module]:
    """Return the modules of the model whose methods an error has come through, each once."""
    modules = []
    for frame, _ in traceback.walk_tb(error.__traceback__):  # outer frames first
        called = frame.f_locals.get("self")
        if isinstance(called, nn.Module) and called in parallel.names:
            modules.append(called)
    return list(dict.fromkeys(modules))[::-1]


def _sharded_lengths(parallel: ParallelModel, path: str) -> set[int]:
    """Return the global lengths of all sharded dims of parameters inside a module."""
    lengths = set()
    for sharding in parallel.used_inside(path).values():
        for length, dim in zip(sharding.shape, sharding.layout.dims, strict=True):
            if dim.axes:
                lengths.add(length)
    return lengths


def _attributes_of_length(
    module: nn.Module, excluded: Collection[str], lengths: Collection[int]
) -> list[str]:
    """Write the attributes of a module, and products of two, that equal one of the lengths.

    n_heads 12 and head_dim 64, lengths {12, 768} -> ["n_heads=12", "n_heads=12 * head_dim=64"].
    """
    if isinstance(module, nn.Linear | nn.Embedding):  # which do not read theirs
        return []
    integers = {}
    for name, value in vars(module).items():
        if type(value) is int and value > 1 and name not in excluded:
            integers[name] = value
    texts = {name: f"{name}={value}" for name, value in integers.items()}
    listed = [texts[name] for name, value in integers.items() if value in lengths]
    # A view may have the product of two lengths, as heads * head_dim.
    for factor, other_factor in itertools.combinations(integers, 2):
        if integers[factor] * integers[other_factor] in lengths:
            listed.append(f"{texts[factor]} * {texts[other_factor]}")
    return listed
