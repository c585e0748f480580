"""A parallel model as tables: where its parameters live, and what a step sends.

Decides the rows; names that differ in numbers alone, as those of layers, share one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from torch_bridge.mesh.machine import machine
from torch_bridge.models.parallel import Parallel, parallel_of
from xshard import Layout, dtypes, load_profile, planner
from xshard.formatting import align_columns, format_bytes
from xshard.layout import Mesh
from xshard.models import Rule, rule_of

PARAMETERS = ("parameter", "", "shape", "stored", "used", "gradient summed over", "block")
MOVES = ("module", "", "moves", "forward", "backward")


def explain(model: nn.Module) -> str:
    """A parallel model as text: each parameter stored, used and summed, and the bytes that a step receives.

    Bytes are those of the busiest process. Activations have theirs after the first forward pass.
    """
    parallel = parallel_of(model)
    axes, profile = parallel.setting.axes, machine(parallel.setting.profile)
    kept = {name: each for each in parallel.kept for name in each.names}
    parameters, gathers, sums = [], [], []
    for name, use in parallel.uses.items():
        each = kept[name]
        x, shape = each.tensor, each.sharding.shape
        used = "as stored" if use.used == use.stored else _text(use.used)
        over = " ".join(a for a in axes.axes if a in use.copied) if x.requires_grad else "frozen"
        parameters.append(
            (
                name,
                str(list(shape)),
                _text(use.stored),
                used,
                over,
                each.sharding.max_local_size * x.element_size(),
            )
        )
        if each.later and name == each.name and x.requires_grad:
            text = f"n | sum({','.join(a for a in axes.axes if a in each.later)}) -> n"
            back = _received(rule_of(text, axes), axes, profile, (x.numel(),), x.dtype, False)[0]
            sums.append(("gradients, in buckets", text, 0, back))
    for unit in parallel.units:
        for part in unit.gathered:
            x, rule = part.tensor, rule_of(part.move, axes)
            forward, back = _received(rule, axes, profile, part.shape, x.dtype, x.requires_grad)
            gathers.append((part.name, _text(part.move), forward, back + (0 if unit.keep else forward)))
    moves = [*gathers, *_activations(parallel), *sums]
    total = [sum(row[i] or 0 for row in moves) for i in (2, 3)]
    rows = [(*row[:-1], format_bytes(row[-1])) for row in _grouped(parameters)]
    lines = [
        (*row[:-2], *("not called yet" if n is None else format_bytes(n) for n in row[-2:]))
        for row in _grouped(moves)
    ]
    lines.append(("a step", "", "", *map(format_bytes, total)))
    title = f"{type(model).__name__} on {axes}"
    return "\n".join([title, "", align_columns([PARAMETERS, *rows]), "", align_columns([MOVES, *lines])])


def _activations(parallel: Parallel) -> Iterable[tuple[Any, ...]]:
    setting = parallel.setting
    for unit in parallel.units:
        for what, each in (("input", unit.inputs), ("output", unit.outputs)):
            for placed in each:
                sent: tuple[Any, Any] = (None, None)
                if placed.last is not None:
                    sent = _received(placed.rule, setting.axes, machine(setting.profile), *placed.last)
                if placed.rule.moves:
                    yield (f"{unit.name or 'the model'}, {what}", placed.rule.text, *sent)


def _received(
    rule: Rule, axes: Mesh, profile: Any, shape: Sequence[int], dtype: torch.dtype, gradient: bool
) -> tuple[int, int]:
    """Bytes that a process receives forward and backward."""
    named = [axis for axis in axes.axes if axis in rule.axes]
    mesh = Mesh(dict(zip(named, axes.sizes_of(named), strict=True)))
    links = load_profile(profile).along(named, axes)
    plan = planner.plan(rule[:2], mesh, tuple(shape), dtypes.name_of(dtype), profile=links)
    return plan.bytes_received, plan.backward.bytes_received if gradient else 0


def _text(layout: Layout | str) -> str:
    """A layout with `...` for dims that have no name of their own."""
    return re.sub(r"\b_0( _\d+)*", "...", str(layout))


def _grouped(rows: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Rows whose names differ in numbers alone, as one: how many they are comes second; bytes are added."""
    found: dict[Any, list[tuple[Any, ...]]] = {}
    for row in rows:
        key = re.sub(r"\b\d+\b", "*", row[0]), *(x for x in row[1:] if isinstance(x, str))
        found.setdefault(key, []).append(row)
    grouped = []
    for (name, *texts), members in found.items():
        numbers = zip(*([x for x in row if not isinstance(x, str)] for row in members), strict=True)
        added = [None if None in column else sum(column) for column in numbers]
        alone = len(members) == 1
        grouped.append(
            (members[0][0] if alone else name, "" if alone else f"x {len(members)}", *texts, *added)
        )
    return grouped
