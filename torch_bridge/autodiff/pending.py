"""Redistributions in flight: one map for autograd begins a plan, and another ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from torch_bridge.autodiff.function import Redistribute
from torch_bridge.errors import CollectiveError
from torch_bridge.lower.executable import Executable
from torch_bridge.mesh.desync import Compared


@dataclass(eq=False)
class InFlight:
    """One execution of a plan."""

    executable: Executable
    finish: Callable[[], Tensor] | None = None  # ends it
    derivatives: dict[Any, InFlight] = field(default_factory=dict)  # executions of them, by kind


@dataclass(frozen=True, eq=False)
class Half:
    """One half of a plan: a block -> an empty tensor in its place (`begins`), or this one -> the result."""

    in_flight: InFlight
    begins: bool
    batch: tuple[int, ...] = ()
    is_linear: bool = True

    def __call__(self, block: Tensor) -> Tensor:
        if self.begins:
            self.in_flight.finish = self.in_flight.executable.begin(block)
            return block.new_empty((*self.batch, 0))
        finish = self.in_flight.finish
        self.in_flight.finish = None
        assert finish is not None, "a plan ends once"
        return finish()

    @property
    def sends_gradient(self) -> bool:
        """Whether the gradient begins to travel after this half."""
        return not self.begins and self.in_flight.executable.sends_gradient

    @property
    def backward(self) -> Half:
        return self._half("backward", lambda plan: plan.backward, not self.begins, self.batch)

    @property
    def tangent(self) -> Half:
        return self._half("tangent", lambda plan: plan.tangent, self.begins, self.batch)

    def batched(self, n: int) -> Half:
        return self._half(n, lambda plan: plan.batched(n), self.begins, (n, *self.batch))

    def _half(
        self,
        kind: Any,
        derive: Callable[[Executable], Executable],
        begins: bool,
        batch: tuple[int, ...],
    ) -> Half:
        """A half of a derivative: the one that begins it leaves its execution for the one that ends it."""
        derivatives = self.in_flight.derivatives
        if begins:
            derivatives[kind] = InFlight(derive(self.in_flight.executable))
        return Half(derivatives[kind] if begins else derivatives.pop(kind), begins, batch)


class PendingTensor:
    """The result of a redistribution in flight; any use as a tensor waits for it, and `wait()` returns the
    tensor. Its shape, dtype and device are known at once.
    """

    def __init__(
        self, result: Tensor | Callable[[], Tensor], shape: Sequence[int], like: Tensor
    ) -> None:
        self._result: Tensor | CollectiveError | Callable[[], Tensor] = result
        self._records = torch.is_grad_enabled()
        self.shape = torch.Size(shape)
        self.dtype = like.dtype
        self.device = like.device

    @classmethod
    def begin(cls, block: Tensor, executable: Executable) -> PendingTensor:
        """Begin to move a block; all processes begin and end theirs in the same order."""
        in_flight = InFlight(executable)
        token = Redistribute.apply(Half(in_flight, begins=True), block)
        return cls(
            lambda: Redistribute.apply(Half(in_flight, begins=False), token),
            executable.shape,
            block,
        )

    def wait(self) -> Tensor:
        """The result, a plain tensor. Raises CollectiveError."""
        if isinstance(self._result, CollectiveError):
            raise self._result
        if not isinstance(self._result, Tensor):
            with torch.set_grad_enabled(self._records):  # as it was begun
                try:
                    self._result = self._result()
                except CollectiveError as error:  # of every use, as there is no other result
                    self._result = error
                    raise
        return self._result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wait(), name)

    def __repr__(self) -> str:
        state = "arrived" if isinstance(self._result, Tensor) else "under way"
        return f"PendingTensor({state}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(_waited, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


def watched(compared: Compared | None, result: Any, *blocks: Tensor) -> Any:
    """The result of a call, now or pending; ranks that have compared the call compare its gradients, too."""
    if compared is None:
        return result
    arrives = result._result if isinstance(result, PendingTensor) else None
    if not callable(arrives):
        return compared.watched(result, *blocks)
    result._result = lambda: compared.watched(arrives(), *blocks)
    return result


def _waited(value: Any) -> Any:
    return value.wait() if isinstance(value, PendingTensor) else value


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: PendingTensor, *operands: Any) -> Any:
        return getattr(self.wait(), name)(*map(_waited, operands))

    return apply


# Python looks operators up on the class, not on the instance.
_BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"]
_OTHERS = [
    "neg",
    "pos",
    "abs",
    "invert",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "getitem",
    "setitem",
    "len",
]
_OTHERS += ["iter", "contains", "bool", "int", "float", "complex", "index", "array"]
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_OTHERS):
    setattr(PendingTensor, f"__{_name}__", _operator(f"__{_name}__"))
PendingTensor.__hash__ = object.__hash__  # type: ignore[method-assign]
