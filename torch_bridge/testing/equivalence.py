"""The torch side of `xshard.testing`: functions of users on forked gloo ranks.

Runs in a process that has imported torch and done nothing else, so that it can be forked at any time;
only ranks unpack what users send. Decides how blocks become leaves of autograd, and that ranks
agree on what they return before any of them sends a gradient.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torch_bridge.testing.arrays import array_of, tensor_of
from torch_bridge.testing.launch import RankError, run_ranks
from xshard import replicas
from xshard.runtimes.processes import FunctionError
from xshard.steps.base import Block
from xshard.testing.differences import Derivatives, derivatives
from xshard.testing.moves import Recorder, Seen, together
from xshard.testing.question import Answer, Question, Update, called, draw, named_outputs
from xshard.testing.trees import StructureError, Tree, mapped, numbered


class RankAnswer(NamedTuple):
    """The answer of one rank: one block where an `Answer` has one per device."""

    outputs: dict[str, Block]
    gradients: dict[int, Block] | None
    updated: dict[int, Block]
    cotangents: dict[str, Block]
    tree: Tree = None
    derivatives: Derivatives = {}  # noqa: RUF012


def preload(modules: Sequence[str], _timeout_s: float) -> None:
    """Import modules here, so that ranks are forked with them. Raises FunctionError."""
    for name in modules:
        try:
            import_module(name)
        except Exception as error:
            raise FunctionError(f"preload: {name!r} cannot be imported", hint=repr(error)) from None


def call_packed(n: int, packed: bytes, timeout_s: float) -> list[Any]:
    """The results of a packed function on `n` ranks, by rank. Raises FunctionError."""
    try:
        return run_ranks(n, _call, packed, timeout_s=timeout_s)
    except RankError as error:
        raise FunctionError(error.reason, hint=error.hint) from None


def answer(question: Question, timeout_s: float) -> Answer:
    """The function on as many ranks as its mesh has devices. Raises FunctionError, StructureError."""
    if question.update is not None:
        preload(["torch._dynamo"], timeout_s)  # every optimiser imports it: 0.6 s in each rank
    try:
        parts = run_ranks(question.mesh.n_devices, _answer, question, timeout_s=timeout_s)
    except RankError as error:
        where = f" on {question.mesh}" if question.mesh.axes else ""
        raise FunctionError(f"the torch function failed{where}: {error.reason}", hint=error.hint) from None
    for part in parts:
        if isinstance(part, StructureError):
            raise part
    return Answer(
        _by_device([part.outputs for part in parts]),
        None if parts[0].gradients is None else _by_device([part.gradients for part in parts]),
        _by_device([part.updated for part in parts]),
        _by_device([part.cotangents for part in parts]),
        parts[0].tree,
        parts[0].derivatives,
    )


def seen(question: Question, timeout_s: float) -> list[Seen]:
    """What the redistributions of such a run were given, and the cotangents of what they made."""
    try:
        return together(run_ranks(question.mesh.n_devices, _seen, question, timeout_s=timeout_s))
    except RankError as error:
        raise FunctionError(error.reason, hint=error.hint) from None


def _seen(question: Question) -> list[Seen]:
    # In this rank, which ends with its answer.
    replicas.WATCH = recorder = Recorder(lambda x: array_of(x.detach().clone().contiguous()))
    _answer(question)
    return recorder.seen


def _call(packed: bytes) -> Any:
    function, arguments = pickle.loads(packed)
    return function(*arguments)


def _answer(question: Question) -> RankAnswer | StructureError:
    rank = dist.get_rank()
    inputs, returned = _returned(question, [blocks[rank] for blocks in question.inputs])
    named: dict[str, Tensor] | StructureError
    try:
        named = _checked(named_outputs(returned, question.results, "torch"))
    except StructureError as error:
        named = error
    wrong = _agreed(named, question)
    if isinstance(wrong, StructureError):
        return wrong
    assert not isinstance(named, StructureError)
    outputs = {name: array_of(y.detach()) for name, y in named.items()}
    if wrong:
        return RankAnswer(outputs, None, {}, {})
    cotangents = _cotangents(named, question, rank)
    pulled = [name for name in cotangents if named[name].requires_grad]
    found = (
        torch.autograd.grad(
            [named[name] for name in pulled],
            [inputs[i] for i in question.differentiable],
            [tensor_of(cotangents[name]) for name in pulled],
            allow_unused=True,
            materialize_grads=True,
        )
        if pulled
        else [torch.zeros_like(inputs[i]) for i in question.differentiable]
    )
    gradients = dict(zip(question.differentiable, found, strict=True))
    updated = {} if question.update is None else _updated(question.update, inputs, gradients)
    return RankAnswer(
        outputs,
        {i: array_of(gradient) for i, gradient in gradients.items()},
        updated,
        {} if question.results else cotangents,
        numbered(returned),
        _derivatives(question, gradients, cotangents) if question.differences else {},
    )


def _returned(question: Question, blocks: Sequence[Block]) -> tuple[list[Tensor], Tree]:
    """Leaves of autograd with the values of the blocks, and what the function returns for them."""
    # Each rank has its own copy, which the function may write to.
    inputs = [tensor_of(block).clone() for block in blocks]
    for i in question.differentiable:
        inputs[i].requires_grad_()
    function, _ = pickle.loads(question.function)
    try:
        return inputs, called(function, mapped(inputs.__getitem__, question.arguments), question.mesh)
    except BaseException as error:
        rank = dist.get_rank()
        error.add_note(f"on device {rank} of {question.mesh}: {question.mesh.place(rank)}")
        raise


def _derivatives(
    question: Question, gradients: dict[int, Tensor], cotangents: dict[str, Block]
) -> Derivatives:
    def loss(blocks: Sequence[Block]) -> float:
        named = named_outputs(_returned(question, blocks)[1], None, "torch")
        return sum(float(np.vdot(c, array_of(named[name].detach())).real) for name, c in cotangents.items())

    values = {i: (array_of(gradient),) for i, gradient in gradients.items()}
    return derivatives(loss, [block for (block,) in question.inputs], values)


def _checked(outputs: dict[str, Any]) -> dict[str, Tensor]:
    for name, value in outputs.items():
        if not isinstance(value, Tensor):
            raise StructureError(f"{name} of the torch function is a {type(value).__name__}, not a tensor")
    return outputs


def _agreed(named: dict[str, Tensor] | StructureError, question: Question) -> bool | StructureError:
    """True if some rank has a block that its cotangent does not fit, or the error: the same on all ranks."""
    mine: bool | StructureError
    if isinstance(named, StructureError):
        mine = named
    else:
        mine = question.results is not None and any(
            result.cotangents is not None
            and tuple(named[name].shape) != result.cotangents[dist.get_rank()].shape
            for name, result in question.results.items()
        )
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    errors = [each for each in found if isinstance(each, StructureError)]
    return errors[0] if errors else any(found)


def _cotangents(outputs: dict[str, Tensor], question: Question, rank: int) -> dict[str, Block]:
    if question.results is None:
        kinds = {name: y.is_floating_point() or y.is_complex() for name, y in outputs.items()}
        return {
            name: draw(i, y.shape, array_of(y.detach()).dtype)
            for i, (name, y) in enumerate(outputs.items())
            if kinds[name]
        }
    return {
        name: result.cotangents[rank].astype(array_of(outputs[name].detach()).dtype)
        for name, result in question.results.items()
        if result.cotangents is not None
    }


def _updated(update: Update, inputs: Sequence[Tensor], gradients: dict[int, Tensor]) -> dict[int, Block]:
    """The values after one step of the user's optimiser."""
    values = [inputs[i].detach().clone().requires_grad_() for i in update.arrays]
    for i, value in zip(update.arrays, values, strict=True):
        value.grad = gradients[i]
    make: Callable[[list[Tensor]], torch.optim.Optimizer] = pickle.loads(update.function)[0]
    make(values).step()
    return {i: array_of(value.detach()) for i, value in zip(update.arrays, values, strict=True)}


def _by_device(parts: Sequence[dict]) -> dict:
    return {key: tuple(part[key] for part in parts) for key in parts[0]}
