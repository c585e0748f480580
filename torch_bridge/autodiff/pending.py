"""Redistributions under way: begun now, ended when their result is first used.

Decides how a plan that is begun and ended in two places is two maps to autograd, so that its gradient is
begun and ended in two places too: what is computed in between, forward, has its own backward in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from torch_bridge.autodiff.function import Redistribute
from torch_bridge.lower.executable import Executable


@dataclass(eq=False)
class InFlight:
    """One execution of a plan. arrive: ends it. kin: the executions that are its derivatives."""

    executable: Executable
    arrive: Callable[[], Tensor] | None = None
    kin: dict[Any, InFlight] = field(default_factory=dict)

    def to(self, kind: Any, executable: Executable) -> InFlight:
        """A derivative, begun: the one that `kin[kind]` then is."""
        self.kin[kind] = InFlight(executable)
        return self.kin[kind]


@dataclass(frozen=True, eq=False)
class Start:
    """The first half of a plan: a block -> a tensor without elements, which stands for what is under way.

    batch: lengths of the dims that have been put in front of the block.
    """

    journey: InFlight
    batch: tuple[int, ...] = ()
    is_linear: bool = True

    def __call__(self, block: Tensor) -> Tensor:
        self.journey.arrive = self.journey.executable.begin(block)
        return block.new_empty((*self.batch, 0))

    @property
    def backward(self) -> Finish:
        return Finish(self.journey.kin.pop("backward"), self.batch)

    @property
    def tangent(self) -> Start:
        return Start(self.journey.to("tangent", self.journey.executable.tangent), self.batch)

    def batched(self, n: int) -> Start:
        return Start(self.journey.to(n, self.journey.executable.batched(n)), (n, *self.batch))


@dataclass(frozen=True, eq=False)
class Finish:
    """The second half: what stands for a block under way -> the result."""

    journey: InFlight
    batch: tuple[int, ...] = ()
    is_linear: bool = True

    def __call__(self, _: Tensor) -> Tensor:
        arrive, self.journey.arrive = self.journey.arrive, None
        assert arrive is not None, "a plan ends once"
        return arrive()

    @property
    def backward(self) -> Start:
        return Start(self.journey.to("backward", self.journey.executable.backward), self.batch)

    @property
    def tangent(self) -> Finish:
        return Finish(self.journey.kin.pop("tangent"), self.batch)

    def batched(self, n: int) -> Finish:
        return Finish(self.journey.kin.pop(n), (n, *self.batch))


class PendingTensor:
    """The result of a redistribution under way; waits for it when it is used.

    Any function of torch takes it for a tensor, and it has a tensor's methods and operators; `wait()` is the
    tensor itself. Its shape, dtype and device are known at once.
    """

    def __init__(self, result: Tensor | Callable[[], Tensor], shape: Sequence[int], like: Tensor) -> None:
        self._result, self._records = result, torch.is_grad_enabled()
        self.shape, self.dtype, self.device = torch.Size(shape), like.dtype, like.device

    @classmethod
    def begin(cls, block: Tensor, executable: Executable) -> PendingTensor:
        """A block sent off; all processes begin and end theirs in the same order."""
        journey = InFlight(executable)
        token = Redistribute.apply(Start(journey), block)
        return cls(lambda: Redistribute.apply(Finish(journey), token), executable.shape, block)

    def wait(self) -> Tensor:
        """The result, a plain tensor."""
        if not isinstance(self._result, Tensor):
            with torch.set_grad_enabled(self._records):  # as it was begun
                self._result = self._result()
        return self._result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wait(), name)

    def __repr__(self) -> str:
        state = "arrived" if isinstance(self._result, Tensor) else "under way"
        return f"PendingTensor({state}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        args, kwargs = tree_map(_waited, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)


def _waited(value: Any) -> Any:
    return value.wait() if isinstance(value, PendingTensor) else value


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: PendingTensor, *operands: Any) -> Any:
        return getattr(self.wait(), name)(*map(_waited, operands))

    return apply


# Python looks operators up on the class, not on the instance.
_BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"]
_OTHERS = ["neg", "pos", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge", "getitem", "setitem", "len"]
_OTHERS += ["iter", "contains", "bool", "int", "float", "complex", "index", "array"]
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_OTHERS):
    setattr(PendingTensor, f"__{_name}__", _operator(f"__{_name}__"))
PendingTensor.__hash__ = object.__hash__  # type: ignore[method-assign]
