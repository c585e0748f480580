"""Notes on errors inside a parallel model: the module, its rules and blocks, and what it counts by itself."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Collection, Mapping

from torch import nn

from torch_bridge.models.hooks import ModuleHooks
from xshard import Sharding
from xshard.models import written

NOTE = "in the parallel module "
LISTED = 8  # most parameters, and most attributes, in a note


def note_on(
    error: BaseException,
    names: Mapping[nn.Module, str],
    hooks: Mapping[str, ModuleHooks],
    used: Mapping[str, Sharding],
    process: int,
) -> str:
    """A note on an error in one of the modules. used: parameters by name, as modules use them."""
    called = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    modules = [*dict.fromkeys(x for x in called if isinstance(x, nn.Module) and x in names)][::-1]
    paths = [names[module] for module in modules]
    ruled = next((hooks[path] for path in paths if path in hooks), None)
    inside = [{s: used[s] for s in used if s.startswith(path and f"{path}.")} for path in paths]
    own = next((each for each in inside if each), {})
    lines = [f"{NOTE}{paths[0] or '(the model)'}, a {type(modules[0]).__name__}"]
    lines += described(ruled, own, process)
    dims = (zip(each.shape, each.layout.dims, strict=True) for each in inside[-1].values())
    sharded = {n for each in dims for n, dim in each if dim.axes}
    for path, module in zip(paths, modules, strict=True):
        if counted := ", ".join(_counted(module, sharded)[:LISTED]):
            hint = "whole lengths of sharded dims: counts= makes them local"
            lines.append(f"{path or 'the model'} has {counted}, {hint}")
    return "\n  ".join(lines)


def described(hooks: ModuleHooks | None, used: Mapping[str, Sharding], process: int) -> list[str]:
    """The rules of a module, and the layouts, blocks and whole shapes of some parameters."""
    sides = (("input", hooks.inputs), ("output", hooks.outputs)) if hooks else ()
    where = (hooks and hooks.name) or "the model"
    lines = [f"{side} of {where}: {each.rule.text}" for side, rules in sides for each in rules]
    for name, each in itertools.islice(used.items(), LISTED):
        block = each.local_shape(process)
        lines.append(f"{name}: {written(each.layout)}, block {block} of {each.shape}")
    return lines


def _counted(module: nn.Module, lengths: Collection[int]) -> list[str]:
    """The attributes of a module, and products of two, that are equal to one of the lengths."""
    if isinstance(module, nn.Linear | nn.Embedding):  # which do not read theirs
        return []
    numbers = [(name, n) for name, n in vars(module).items() if type(n) is int and n > 1]
    products = [(f"{a}={m} * {b}={n}", m * n) for (a, m), (b, n) in itertools.combinations(numbers, 2)]
    singles = [(f"{name}={n}", n) for name, n in numbers]
    return [text for text, n in (*singles, *products) if n in lengths]
