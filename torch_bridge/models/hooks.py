"""The hooks of a module that has rules: its inputs and outputs move, and its parameters are gathered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torch_bridge.models.gathered import GatheredParameter, KeptParameters, gather_all, regathered
from torch_bridge.models.parameters import ParallelContext
from torch_bridge.redistribution import redistribute
from xshard import XshardError
from xshard.errors import ShapeError, with_path
from xshard.models import ActivationRule, KnownDim, arriving_shape, known_inside

Key = str | int | None  # of an argument or of a part of a result; None: the first tensor


@dataclass(eq=False, repr=False)
class TensorRule:
    """A rule for one tensor. last: the shape, dtype and gradient that it last had, for `explain`."""

    key: Key
    rule: ActivationRule
    last: tuple[tuple[int, ...], torch.dtype, bool] | None = None
    seen: dict[Any, tuple[tuple[int, ...], tuple[KnownDim, ...]]] = field(default_factory=dict)

    def move(
        self, x: Tensor, context: ParallelContext, outside: tuple[KnownDim, ...], where: str
    ) -> tuple[Tensor, tuple[KnownDim, ...]]:
        """A block -> the block after its rule, and the dims known then. where: its name in errors."""
        rule = self.rule
        key = (x.shape, outside)
        is_compiled = torch.compiler.is_compiling()
        shape, known = (None, ()) if is_compiled else self.seen.get(key, (None, ()))
        is_new = not is_compiled and shape is None
        if is_new:
            shape = arriving_shape(
                rule, context.axes, context.processes.device, tuple(x.shape), outside
            )
        options: Any = {"shape": shape, "profile": context.profile}
        y = redistribute(x, rule.text, context.mesh, **options) if rule.moves else x
        if is_new and shape is not None:
            known = known_inside(rule, shape, y.shape, outside, where)
            self.seen[key] = (shape, known)
            self.last = (shape, x.dtype, x.requires_grad)
        return y, known


@dataclass(eq=False, repr=False)
class ModuleHooks:
    """The rules of one module. parent: the hooks of the nearest module around it with a rule for its input.
    varying: axes along which activations differ inside. gathers: the module gathers parameters inside it.
    kept: parameters for several passes. own: sharded dims of its parameters. experts: its own.
    """

    name: str
    arguments: list[str]
    context: ParallelContext
    parent: ModuleHooks | None
    inputs: Sequence[TensorRule]
    outputs: Sequence[TensorRule]
    varying: frozenset[str]
    gathers: bool
    gathered: list[GatheredParameter] = field(default_factory=list)
    kept: KeptParameters | None = None
    known: tuple[KnownDim, ...] = ()
    own: tuple[KnownDim, ...] = ()
    experts: Any = None
    _depth: int = 0
    _stored: Sequence[Tensor] = ()
    _saving: Any = None

    @property
    def sums(self) -> frozenset[str]:
        """Axes over which one of the outputs is a sum."""
        return frozenset(axis for each in self.outputs for axis in each.rule.src.tagged("sum"))

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = self.parent.known if self.parent is not None else ()
        values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        for rule in self.inputs:
            if (key := self.argument(rule.key, values)) is not None:
                values[key], known = self._moved(rule, values[key], known, "input")
                if rule.rule.routed:
                    self.experts.enter(key, values)
        self.known = known
        self._depth += 1
        if self.gathered and self._depth == 1:
            self._gather()
        return tuple(values[i] for i in range(len(args))), {name: values[name] for name in kwargs}

    def leave(self, module: nn.Module, args: Any, result: Any) -> Any:
        if self._depth == 1 and self._stored:
            for part, x in zip(self.gathered, self._stored, strict=True):
                part.put(x)
            self._stored = ()
            if self._saving is not None:
                self._saving = self._saving.__exit__(None, None, None)
        self._depth = max(self._depth - 1, 0)
        if self.experts is not None:
            result = self.experts.leave(result)
        if result is None:  # an error is on its way
            return None
        for rule in self.outputs:
            result = self._with_output(rule, result)
        return result

    def _gather(self) -> None:
        stored = [part.tensor for part in self.gathered]
        there = self.kept.used() if self.kept and not torch.compiler.is_compiling() else {}
        left = [part for part in self.gathered if part.name not in there]
        fresh = gather_all(left, self.context, [part.tensor for part in left])
        there |= zip((part.name for part in left), fresh, strict=True)
        used = [there[part.name] for part in self.gathered]
        rows = [each for each in zip(self.gathered, stored, used, strict=True) if not each[0].keep]
        is_saved = torch.is_grad_enabled() and any(x.requires_grad for _, x, _ in rows)
        if is_saved and not torch.compiler.is_compiling():
            parts, own, gathered = zip(*rows, strict=True)
            self._saving = regathered(own, gathered, partial(gather_all, parts, self.context))
            self._saving.__enter__()
        self._stored = stored
        for part, x in zip(self.gathered, used, strict=True):
            part.put(x)

    def _moved(self, rule: TensorRule, x: Any, known: tuple[KnownDim, ...], what: str) -> Any:
        where = f"{what} of {self.name or 'the model'}"
        try:
            if (
                what == "output" and not torch.compiler.is_compiling()
            ):  # parameters know how long dims are
                rows = dict(zip(rule.rule.src.resolved(x.ndim).names, x.shape, strict=True))
                known = (*(dim for dim in self.own if rows.get(dim.name) == dim.rows), *known)
            return rule.move(x, self.context, known, where)
        except XshardError as error:
            raise with_path(error, where) from error.__cause__

    def argument(self, key: Key, values: Mapping[Any, Any]) -> int | str | None:
        """The position or the name of the argument that a rule is for; None if it is not a tensor."""
        if key is None:
            if (first := _part(None, values)) is None:
                what = f"input of {self.name or 'the model'}: none of the arguments is a tensor"
                hint = 'rules for several, or for some that may be absent, go by name: {"labels": "b s"}'
                raise ShapeError(what, hint=hint)
            return first
        name = dict(enumerate(self.arguments)).get(key, "") if isinstance(key, int) else key
        i = name if name in values else key if isinstance(key, int) else self.arguments.index(key)
        return i if isinstance(values.get(i), Tensor) else None

    def results(self, result: Any) -> list[Any]:
        """The parts of a result that rules are for; without rules the first tensor."""
        parts = _parts_of(result) if isinstance(result, Tensor | Mapping | tuple | list) else {}
        return [
            parts.get(_part(key, parts)) for key in [each.key for each in self.outputs] or [None]
        ]

    def _with_output(self, rule: TensorRule, result: Any) -> Any:
        parts = _parts_of(result)
        kind = type(result)
        key = _part(rule.key, parts)
        if not isinstance(parts.get(key), Tensor):
            return result
        parts[key] = self._moved(rule, parts[key], self.known, "output")[0]
        if isinstance(result, Tensor):
            return parts[key]
        if isinstance(result, Mapping):
            result[key] = parts[key]  # type: ignore[index]
            return result
        return kind(*parts.values()) if hasattr(result, "_fields") else kind(parts.values())


def _parts_of(result: Any) -> dict[Any, Any]:
    """The parts of a module's result, by position or name; None is the key of a tensor by itself."""
    if isinstance(result, Tensor):
        return {None: result}
    return dict(result) if isinstance(result, Mapping) else dict(enumerate(result))


def _part(key: Key, parts: Mapping[Any, Any]) -> Any:
    """The key of the part that a rule is for; one without a key is for the first tensor, if there is any."""
    if key is not None and None not in parts:
        return key
    return next((key for key, x in parts.items() if isinstance(x, Tensor)), None)
