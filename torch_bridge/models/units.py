"""A module that has rules: what happens on the way into it and out of it.

Decides which argument and which part of a result a rule is for, and that parameters of which a module needs
more than is stored are gathered for its forward pass alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_bridge.many import redistribute_many
from torch_bridge.models.parameters import Setting
from torch_bridge.redistribution import redistribute
from xshard import XshardError
from xshard.errors import ShapeError, with_path
from xshard.models import Known, Rule, arriving_shape, known_inside

Place = str | int | None  # of an argument or of a part of a result; None: of the first tensor


class Gathered(NamedTuple):
    """A parameter that modules use under another layout. places: modules, and its name in each."""

    name: str
    places: list[tuple[nn.Module, str]]
    move: str
    shape: tuple[int, ...]

    @property
    def tensor(self) -> Any:
        owner, attribute = self.places[0]
        return owner._parameters[attribute]

    def put(self, x: Any) -> None:
        for owner, attribute in self.places:
            owner._parameters[attribute] = x


class Placed:
    """A rule for one tensor, and what moved when it was last applied, for `explain`."""

    def __init__(self, place: Place, rule: Rule) -> None:
        self.place, self.rule = place, rule
        self.last: tuple[tuple[int, ...], torch.dtype, bool] | None = None
        self.seen: dict[Any, tuple[tuple[int, ...], tuple[Known, ...]]] = {}

    def move(
        self, x: Tensor, setting: Setting, outside: tuple[Known, ...]
    ) -> tuple[Tensor, tuple[Known, ...]]:
        """A block -> the block after its rule, and what is known of its dims then."""
        rule = self.rule
        if torch.compiler.is_compiling():
            return self._sent(x, setting, None), ()
        key = x.shape, outside
        found = self.seen.get(key)
        if found is None:
            local = tuple(x.shape)
            shape = arriving_shape(rule, setting.axes, setting.processes.device, local, outside)
            y = self._sent(x, setting, shape)
            self.seen[key] = shape, known_inside(rule, shape, y.shape, outside)
            self.last = shape, x.dtype, x.requires_grad
            return y, self.seen[key][1]
        return self._sent(x, setting, found[0]), found[1]

    def _sent(self, x: Tensor, setting: Setting, shape: tuple[int, ...] | None) -> Tensor:
        if not self.rule.moves:
            return x
        return redistribute(x, self.rule.text, setting.mesh, shape=shape, profile=setting.profile)


@dataclass(eq=False, repr=False)
class Unit:
    """The rules of one module. parent: the nearest around it that has a rule for its input.

    arguments: the names of its own. varying: the axes along which activations differ inside. gathers: whether
    it gathers parameters inside.
    """

    name: str
    arguments: list[str]
    setting: Setting
    parent: Unit | None
    inputs: Sequence[Placed]
    outputs: Sequence[Placed]
    varying: frozenset[str]
    gathers: bool
    gathered: list[Gathered] = field(default_factory=list)
    keep: bool = True
    known: tuple[Known, ...] = ()
    _depth: int = 0
    _own: Sequence[Tensor] = ()
    _hooks: Any = None

    def attach(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self.enter, with_kwargs=True)
        module.register_forward_hook(self.leave, always_call=True)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = self.parent.known if self.parent is not None else ()
        for placed in self.inputs:
            at = self.find(placed.place, args, kwargs)
            if at is None:
                continue
            x = args[at] if isinstance(at, int) else kwargs[at]
            x, known = self._moved(placed, x, known, "input")
            if isinstance(at, int):
                args = (*args[:at], x, *args[at + 1 :])
            else:
                kwargs = {**kwargs, at: x}
        self.known = known
        self._depth += 1
        if self.gathered and self._depth == 1:
            self._gather()
        return args, kwargs

    def leave(self, module: nn.Module, args: Any, result: Any) -> Any:
        if self._depth == 1 and self._own:
            for part, own in zip(self.gathered, self._own, strict=True):
                part.put(own)
            self._own = ()
            if self._hooks is not None:
                self._hooks.__exit__(None, None, None)
                self._hooks = None
        self._depth = max(self._depth - 1, 0)
        if result is None:  # an error is on its way
            return None
        for placed in self.outputs:
            result = self._with_output(placed, result)
        return result

    def _gather(self) -> None:
        own = [part.tensor for part in self.gathered]
        if torch.compiler.is_compiling():
            options: Any = {"profile": self.setting.profile, "comm_dtype": self.setting.comm_dtype}
            used = [
                redistribute(x, part.move, self.setting.mesh, shape=part.shape, **options)
                for x, part in zip(own, self.gathered, strict=True)
            ]
        else:
            used = gathered(own, self.gathered, self.setting)
            if not self.keep and torch.is_grad_enabled() and any(x.requires_grad for x in own):
                self._hooks = Again(own, used, self.gathered, self.setting).hooks()
                self._hooks.__enter__()
        self._own = own
        for part, x in zip(self.gathered, used, strict=True):
            part.put(x)

    def _moved(self, placed: Placed, x: Any, known: tuple[Known, ...], what: str) -> Any:
        try:
            return placed.move(x, self.setting, known)
        except XshardError as error:
            raise with_path(error, f"{what} of {self.name or 'the model'}") from error.__cause__

    def find(self, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str | None:
        """The argument that a rule is for: its position, its name, or None where it is no tensor."""
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        if place is None:
            for at, x in given.items():
                if isinstance(x, Tensor):
                    return at
            raise ShapeError(
                f"input of {self.name or 'the model'}: no argument is a tensor",
                hint='rules for several, or for some that may be absent, go by name: {"labels": "b s"}',
            )
        name = dict(enumerate(self.arguments)).get(place, "") if isinstance(place, int) else place
        at = name if name in kwargs else place if isinstance(place, int) else self.arguments.index(place)
        return at if isinstance(given.get(at), Tensor) else None

    def _with_output(self, placed: Placed, result: Any) -> Any:
        known = self.known if self.inputs else self.parent.known if self.parent is not None else ()
        if isinstance(result, Tensor):
            return self._moved(placed, result, known, "output")[0]
        named = isinstance(result, Mapping)
        parts = dict(result) if named else dict(enumerate(result))
        at = placed.place
        if at is None:
            at = next((key for key, x in parts.items() if isinstance(x, Tensor)), None)
        if at not in parts or not isinstance(parts[at], Tensor):
            return result
        x = self._moved(placed, parts[at], known, "output")[0]
        if named:
            result[at] = x
            return result
        parts[at] = x
        rebuilt = type(result)
        return rebuilt(*parts.values()) if hasattr(result, "_fields") else rebuilt(parts.values())


def gathered(own: Sequence[Tensor], parts: Sequence[Gathered], setting: Setting) -> list[Tensor]:
    """Parameters as they are used, together; differentiable."""
    moves, shapes = [part.move for part in parts], [part.shape for part in parts]
    options: Any = {"profile": setting.profile, "comm_dtype": setting.comm_dtype}
    return redistribute_many(list(own), moves, setting.mesh, shapes=shapes, **options)


class Again:
    """Gathered parameters that the backward pass gathers again: what autograd saves of them is which part.

    The second set lives as long as nodes of the graph that have not run.
    """

    def __init__(
        self, own: Sequence[Tensor], used: Sequence[Tensor], parts: Sequence[Gathered], setting: Setting
    ) -> None:
        self.own, self.parts, self.setting = own, parts, setting
        self.versions = [x._version for x in own]
        self.storages = {x.untyped_storage().data_ptr(): i for i, x in enumerate(used) if x.numel()}
        self.dtypes = [x.dtype for x in used]
        self.used: list[Tensor] | None = None

    def hooks(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, x: Tensor) -> Any:
        i = self.storages.get(x.untyped_storage().data_ptr()) if x.layout is torch.strided else None
        if i is None or x.dtype != self.dtypes[i]:
            return x
        return i, x.shape, x.stride(), x.storage_offset()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self.used is None:
            if self.versions != [x._version for x in self.own]:
                raise XshardError("a parameter was written to between its forward and its backward pass")
            with torch.no_grad():
                self.used = gathered(self.own, self.parts, self.setting)
        i, *view = packed
        return self.used[i].as_strided(*view)
