"""Notes on errors inside a parallel model: the module, its rules and blocks, and what it counts by itself."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from torch import nn

from torch_bridge.models.hooks import ModuleHooks
from xshard import Sharding
from xshard.models import written

if TYPE_CHECKING:
    from torch_bridge.models.parallel import ParallelModel

NOTE = "in the parallel module "
LISTED = 8  # most parameters, and most attributes, in a note


def note_on(error: BaseException, parallel: ParallelModel) -> str:
    """A note on an error in one of the modules."""
    names, used = parallel.names, parallel.used
    hooks = {each.name: each for each in parallel.hooks}
    called = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    modules = [*dict.fromkeys(x for x in called if isinstance(x, nn.Module) and x in names)][::-1]
    paths = [names[module] for module in modules]
    ruled = next((hooks[path] for path in paths if path in hooks), None)
    title = f"{NOTE}{paths[0] or '(the model)'}, a {type(modules[0]).__name__}"
    path = next((path for path in paths if _inside(path, used)), "")
    lines = [described(title, ruled, parallel, path)]
    dims = (zip(each.shape, each.layout.dims, strict=True) for _, each in _inside(paths[-1], used))
    sharded = {n for each in dims for n, dim in each if dim.axes}
    for path, module in zip(paths, modules, strict=True):
        if counted := ", ".join(_counted(module, sharded)[:LISTED]):
            hint = "whole lengths of sharded dims: counts= makes them local"
            lines.append(f"{path or 'the model'} has {counted}, {hint}")
    return "\n  ".join(lines)


def described(title: str, hooks: ModuleHooks | None, parallel: ParallelModel, path: str) -> str:
    """A title, the rules of a module, and layouts, blocks and whole shapes of parameters inside a path."""
    sides = (("input", hooks.inputs), ("output", hooks.outputs)) if hooks else ()
    where = (hooks and hooks.name) or "the model"
    texts = [(side, [each.rule.text for each in rules] or ["no rule"]) for side, rules in sides]
    lines = [title, *(f"{side} of {where}: {text}" for side, each in texts for text in each)]
    for name, each in _inside(path, parallel.used)[:LISTED]:
        block = each.local_shape(parallel.context.processes.device)
        lines.append(f"{name}: {written(each.layout)}, block {block} of {each.shape}")
    return "\n  ".join(lines)


def _inside(path: str, used: Mapping[str, Sharding]) -> list[tuple[str, Sharding]]:
    return [each for each in used.items() if each[0].startswith(path and f"{path}.")]


def _counted(module: nn.Module, lengths: Collection[int]) -> list[str]:
    """The attributes of a module, and products of two, that are equal to one of the lengths."""
    if isinstance(module, nn.Linear | nn.Embedding):  # which do not read theirs
        return []
    numbers = [(name, n) for name, n in vars(module).items() if type(n) is int and n > 1]
    products = [(f"{a}={m} * {b}={n}", m * n) for (a, m), (b, n) in itertools.combinations(numbers, 2)]
    singles = [(f"{name}={n}", n) for name, n in numbers]
    return [text for text, n in (*singles, *products) if n in lengths]
