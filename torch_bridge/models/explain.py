"""A parallel model as tables: where its parameters live, and the bytes that a step sends."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from torch_bridge.mesh.machine import machine
from torch_bridge.models.parallel import parallel_of
from xshard import dtypes, load_profile, planner
from xshard.formatting import align_columns, format_bytes
from xshard.layout import Mesh
from xshard.models import ActivationRule, rule_of, written


def explain(model: nn.Module) -> str:
    """Return a parallel model as tables: its parameters, and the bytes that a step receives.

    The bytes of the busiest process. Activations have theirs after the first forward pass.
    """
    parallel = parallel_of(model)
    axes = parallel.context.axes
    profile = machine(parallel.context.profile)
    parameters = list[Any]()
    moves = list[Any]()
    sums = []
    for name, use in parallel.uses.items():
        each = parallel.by_name[name]
        x = each.tensor
        sharding = each.sharding
        used = "as stored" if use.used == use.stored else written(use.used)
        over = (
            " ".join(axis for axis in axes.axes if axis in use.copied)
            if x.requires_grad
            else "frozen"
        )
        nbytes = sharding.max_local_size * x.element_size()
        parameters.append(
            (name, str(list(sharding.shape)), written(use.stored), used, over, nbytes)
        )
        if each.later and name == each.name and x.requires_grad:
            text = f"n | sum({','.join(axis for axis in axes.axes if axis in each.later)}) -> n"
            back = _received(rule_of(text, axes), axes, profile, (x.numel(),), x.dtype, False)[0]
            sums.append(("gradients, in buckets", text, 0, back))
    for hooks in parallel.hooks.values():
        for part in hooks.gathered:
            x = part.tensor
            rule = rule_of(part.move, axes)
            forward, back = _received(rule, axes, profile, part.shape, x.dtype, x.requires_grad)
            moves.append(
                (part.name, written(part.move), forward, back + (0 if part.keep else forward))
            )
    for name, hooks in parallel.hooks.items():
        for side, rules in (("input", hooks.inputs), ("output", hooks.outputs)):
            for one in (one for one in rules if one.rule.moves):
                received = (
                    _received(one.rule, axes, profile, *one.last) if one.last else (None, None)
                )
                moves.append((f"{name or 'the model'}, {side}", one.rule.text, *received))
        if each := hooks.experts:
            text = next(one.rule.text for one in hooks.inputs if one.rule.routed)
            moves.append(
                (f"{name or 'the model'}, this process", text, *(each.last or (None, None)))
            )
    moves += sums
    total = [sum(row[i] or 0 for row in moves) for i in (2, 3)]
    rows = [(*row[:-1], format_bytes(row[-1])) for row in _grouped(parameters)]
    lines = [(*row[:-2], *map(_bytes, row[-2:])) for row in _grouped(moves)]
    sizes = [(each.sharding, each.tensor.element_size()) for each in parallel.parameters]
    own = sum(n * sharding.max_local_size for sharding, n in sizes)
    whole = sum(n * math.prod(sharding.shape) for sharding, n in sizes)
    rows.append(("a process", *[""] * 5, f"{format_bytes(own)} of {format_bytes(whole)}"))
    stored = [("parameter", "", "shape", "stored", "used", "gradient summed over", "block"), *rows]
    sent = [("module", "", "moves", "forward", "backward"), *lines]
    sent.append(("a step", "", "", *map(format_bytes, total)))
    title = f"{type(model).__name__} on {axes}"
    return "\n".join([title, "", align_columns(stored), "", align_columns(sent)])


def _bytes(n: int | None) -> str:
    return "not called yet" if n is None else format_bytes(n)


def _received(
    rule: ActivationRule,
    axes: Mesh,
    profile: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    gradient: bool,
) -> tuple[int, int]:
    named = [axis for axis in axes.axes if axis in rule.axes]
    mesh = Mesh(dict(zip(named, axes.sizes_of(named), strict=True)))
    links = load_profile(profile).along(named, axes)
    plan = planner.plan(rule[:2], mesh, tuple(shape), dtypes.name_of(dtype), profile=links)
    return plan.bytes_received, plan.backward.bytes_received if gradient else 0


def _grouped(rows: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """One row for rows with names that differ only in numbers: their number comes second, bytes are added."""
    groups: dict[Any, list[tuple[Any, ...]]] = {}
    for row in rows:
        key = re.sub(r"\b\d+\b", "*", row[0]), *(x for x in row[1:] if isinstance(x, str))
        groups.setdefault(key, []).append(row)
    grouped = []
    for (name, *texts), members in groups.items():
        columns = zip(*([x for x in row if not isinstance(x, str)] for row in members), strict=True)
        first = (members[0][0], "") if len(members) == 1 else (name, f"x {len(members)}")
        grouped.append(
            (*first, *texts, *(None if None in column else sum(column) for column in columns))
        )
    return grouped
