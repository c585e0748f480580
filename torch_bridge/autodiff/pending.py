"""Redistributions in flight: one function for autograd begins a plan, and another ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_bridge.autodiff.function import Redistribute
from torch_bridge.autodiff.turns import current_part, let_others_compute
from torch_bridge.errors import CollectiveError
from torch_bridge.lower.executable import BucketedExecutable, Executable
from torch_bridge.lower.transfer import TransferExecutable
from torch_bridge.mesh.desync import Compared
from torch_bridge.versions.pytree import tree_map
from xshard.errors import end_at_user


@dataclass(eq=False)
class InFlight:
    """One execution of a plan, or of several together, between its beginning and its end."""

    executable: Any  # one of `lower`, or another map that can `begin`
    finish: Callable[[], Any] | None = None  # ends it; None before it begins, and afterwards
    # Executions of its derivatives that one half has begun and the other has to end: "backward",
    # "tangent", or the size of a batch.
    derivatives: dict[str | int, InFlight] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Half:
    """One half of a plan, as a linear function for autograd.

    The first half (`begins`) maps blocks to an empty token, the second one the token to the results. The
    token is what ties them together in the graph: in the backward pass the second half comes first, and
    begins the plan of the adjoint, which the first half ends.
    """

    in_flight: InFlight
    begins: bool
    batch: tuple[int, ...] = ()  # lengths of dims that vmap added
    is_linear: bool = True

    def __call__(self, *blocks: Tensor) -> Any:
        if self.begins:
            self.in_flight.finish = self.in_flight.executable.begin(*blocks)
            return blocks[0].new_empty((*self.batch, 0))
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
        return self._of_derivative("backward", not self.begins, self.batch)

    @property
    def tangent(self) -> Half:
        return self._of_derivative("tangent", self.begins, self.batch)

    def batched(self, n: int) -> Half:
        return self._of_derivative(n, self.begins, (n, *self.batch))

    def _of_derivative(self, derivative: str | int, begins: bool, batch: tuple[int, ...]) -> Half:
        """Return a half of a derivative's plan; `derivative` is its key in `InFlight.derivatives`.

        The half that begins the plan is asked for first, and adds it there; the other one takes it out.
        """
        derivatives = self.in_flight.derivatives
        if not begins:
            return Half(derivatives.pop(derivative), begins, batch)
        executable = self.in_flight.executable
        if isinstance(derivative, int):
            derived_executable = executable.batched(derivative)
        else:
            derived_executable = getattr(executable, derivative)
        derivatives[derivative] = InFlight(derived_executable)
        return Half(derivatives[derivative], begins, batch)


def begin(executable: Any, *blocks: Tensor) -> Callable[[], Any]:
    """Start a move, differentiably, that goes on while you compute; return a function that ends it.

    All processes begin and end theirs in the same order. For autograd it is two functions, each a
    `Half`: blocks -> token begins it, token -> results ends it. The token is an empty tensor, which
    only links the two. In the backward pass they change roles.

    Args:
        executable: The move, ready to run: a linear map that can `begin`.
        *blocks: This process's block of each tensor that it moves.
    """
    in_flight = InFlight(executable)
    token = Redistribute.apply(Half(in_flight, begins=True), *blocks)

    def end() -> Any:
        try:
            let_others_compute()
        except BaseException:
            in_flight.finish = None  # what is dropped is awaited: nothing stays on the way
            raise
        return Redistribute.apply(Half(in_flight, begins=False), token)

    return end


def move_in_turn(executable: Any, *blocks: Tensor) -> Any:
    """Run a linear move, differentiably; in a part of a batch, others compute while it is under way."""
    if current_part() is None:
        return Redistribute.apply(executable, *blocks)
    return begin(executable, *blocks)()


if TYPE_CHECKING:
    # It may be used as a tensor; as one to Python, torch would read its memory at once.
    Waiting = Tensor
else:
    Waiting = object


class PendingTensor(Waiting):
    """The result of a redistribution in flight.

        y = xt.redistribute(x, "s/cp c -> s c", mesh, async_op=True)    # [s/4, c] -> [s, c], on its way
        z = 2 * y                                                       # waits

    Any use as a tensor waits for it, and `wait()` returns the tensor. Its shape, dtype and device are known
    at once.

    Args:
        result: The tensor, or a function that waits for it and returns it.
        shape: The shape of the result.
        like: A tensor with the dtype and the device of the result.

    Examples:
        >>> moved = PendingTensor(torch.ones(2), (2,), torch.empty(0))
        >>> (2 * moved).tolist()
        [2.0, 2.0]
    """

    def __init__(
        self, result: Tensor | Callable[[], Tensor], shape: Sequence[int], like: Tensor
    ) -> None:
        # The result; or what will give it; or the error that this has raised.
        self._result: Tensor | CollectiveError | Callable[[], Tensor] = result
        self._is_recording = torch.is_grad_enabled()
        self.shape = torch.Size(shape)
        self.dtype = like.dtype
        self.device = like.device

    @classmethod
    def begin(cls, block: Tensor, executable: Executable | TransferExecutable) -> PendingTensor:
        """Start a redistribution of one block; `wait` of the result ends it."""
        return cls(begin(executable, block), executable.shape, block)

    @classmethod
    def begin_together(
        cls, blocks: Sequence[Tensor], executable: BucketedExecutable
    ) -> list[PendingTensor]:
        """Start the redistribution of several blocks; the first `wait` of a result ends all."""
        # Its result is the list of all results: if its first `wait` raises, all tensors raise that error.
        joint = cls(begin(executable, *blocks), (), blocks[0])
        pending = []
        for i, block in enumerate(blocks):
            finish = partial(joint._wait_for, i)
            pending.append(cls(finish, executable.executables[i].shape, block))
        return pending

    def _wait_for(self, i: int) -> Tensor:
        result: Any = self.wait()
        return result[i]

    def wait(self) -> Tensor:
        """Wait for the result and return it, a plain tensor.

        Raises:
            CollectiveError: A collective failed. Each later use raises it again.
        """
        if isinstance(self._result, CollectiveError):
            raise self._result
        if not callable(self._result):
            return self._result
        # Autograd records both halves or neither: the second as the first was, even if `no_grad`
        # differs.
        with torch.set_grad_enabled(self._is_recording):
            try:
                self._result = self._result()
            except CollectiveError as error:
                self._result = error
                end_at_user(error)
                raise
        return self._result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wait(), name)

    def __repr__(self) -> str:  # type: ignore[override]  # a tensor may be given its text
        state = "arrived" if isinstance(self._result, Tensor) else "under way"
        return f"PendingTensor({state}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        args = tree_map(_wait_if_pending, tuple(args))
        kwargs = tree_map(_wait_if_pending, {} if kwargs is None else kwargs)
        return func(*args, **kwargs)


def compare_gradients_of(compared: Compared | None, result: Any, *blocks: Tensor) -> Any:
    """Return the result of a call, now or pending; its gradients are compared if the call was."""
    if compared is None:
        return result
    finish = result._result if isinstance(result, PendingTensor) else None
    if not callable(finish):  # it has arrived
        return compared.compare_gradients_of(result, *blocks)
    result._result = lambda: compared.compare_gradients_of(finish(), *blocks)
    return result


def _wait_if_pending(value: Any) -> Any:
    """Replace a tensor in flight by its result."""
    return value.wait() if isinstance(value, PendingTensor) else value


def _operator(name: str) -> Callable[..., Any]:
    """Make the method that waits for the result, and calls the tensor's method of this name."""

    def apply(self: PendingTensor, *operands: Any) -> Any:
        arrived = [_wait_if_pending(operand) for operand in operands]
        return getattr(self.wait(), name)(*arrived)

    return apply


# Python looks operators up on the class, not on the instance: `__getattr__` does not reach them.
_BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"]
_REFLECTED = [f"r{name}" for name in _BINARY]
_UNARY = ["neg", "pos", "abs", "invert", "bool", "int", "float", "complex", "index"]
_COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge"]
_CONTAINER = ["getitem", "setitem", "len", "iter", "contains", "array"]
_COPIED = ["reduce_ex"]  # by pickle and `torch.save`
for _name in _BINARY + _REFLECTED + _UNARY + _COMPARISONS + _CONTAINER + _COPIED:
    setattr(PendingTensor, f"__{_name}__", _operator(f"__{_name}__"))
# Python drops `__hash__` from a class that defines `__eq__`; tensors hash by identity.
PendingTensor.__hash__ = object.__hash__  # type: ignore[method-assign]
