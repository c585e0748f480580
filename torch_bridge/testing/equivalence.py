"""The torch side of `xshard.testing`: functions of users on forked gloo ranks.

Runs in a process that has imported torch and done nothing else, so that it can be forked at any time;
what users send is unpacked by the ranks alone. Decides how blocks become leaves of autograd, and that ranks
agree on what they return before any of them sends a gradient.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_bridge.testing.arrays import block_of, tensor_of
from torch_bridge.testing.launch import RankError, run_ranks
from xshard.runtimes.processes import FunctionError
from xshard.steps.base import Block
from xshard.testing.task import Answer, Task, Update, called, draw, named_outputs
from xshard.testing.trees import StructureError, Tree, mapped, numbered


class Share(NamedTuple):
    """What one rank made of a task: one block where an answer has one per device."""

    outputs: dict[str, Block]
    gradients: dict[int, Block] | None
    updated: dict[int, Block]
    cotangents: dict[str, Block]
    tree: Tree = None


def call(n: int, packed: bytes, timeout_s: float) -> list[Any]:
    """The results of a packed function on `n` ranks, by rank. Raises FunctionError."""
    try:
        return run_ranks(n, _call, packed, timeout_s=timeout_s)
    except RankError as error:
        raise FunctionError(error.reason, hint=error.hint) from None


def run(task: Task, timeout_s: float) -> Answer:
    """The task on as many ranks as its mesh has devices. Raises FunctionError, StructureError."""
    try:
        shares = run_ranks(task.mesh.n_devices, _run, task, timeout_s=timeout_s)
    except RankError as error:
        where = f" on {task.mesh}" if task.mesh.axes else ""
        raise FunctionError(f"the torch function failed{where}: {error.reason}", hint=error.hint) from None
    for share in shares:
        if isinstance(share, StructureError):
            raise share
    return Answer(
        _by_device([share.outputs for share in shares]),
        None if shares[0].gradients is None else _by_device([share.gradients for share in shares]),
        _by_device([share.updated for share in shares]),
        _by_device([share.cotangents for share in shares]),
        shares[0].tree,
    )


def _call(packed: bytes) -> Any:
    function, arguments = pickle.loads(packed)
    return function(*arguments)


def _run(task: Task) -> Share | StructureError:
    rank = dist.get_rank()
    # A copy of its own: what the function writes to its arguments is not read from another's.
    inputs = [tensor_of(blocks[rank]).clone() for blocks in task.inputs]
    for i in task.differentiable:
        inputs[i].requires_grad_()
    function, _ = pickle.loads(task.function)
    try:
        arguments = mapped(lambda i: inputs[i], task.arguments)
        returned = called(function, arguments, task.mesh)
    except BaseException as error:
        error.add_note(f"on device {rank} of {task.mesh}: {task.mesh.place(rank)}")
        raise
    named: dict[str, Tensor] | StructureError
    try:
        named = _checked(named_outputs(returned, task.results, "torch"))
    except StructureError as error:
        named = error
    wrong = _agreed(named, task)
    if isinstance(wrong, StructureError):
        return wrong
    assert not isinstance(named, StructureError)
    outputs = {name: block_of(y.detach()) for name, y in named.items()}
    if wrong:
        return Share(outputs, None, {}, {})
    cotangents = _cotangents(named, task, rank)
    pulled = [name for name in cotangents if named[name].requires_grad]
    found = (
        torch.autograd.grad(
            [named[name] for name in pulled],
            [inputs[i] for i in task.differentiable],
            [tensor_of(cotangents[name]) for name in pulled],
            allow_unused=True,
            materialize_grads=True,
        )
        if pulled
        else [torch.zeros_like(inputs[i]) for i in task.differentiable]
    )
    gradients = dict(zip(task.differentiable, found, strict=True))
    updated = {} if task.update is None else _updated(task.update, inputs, gradients)
    return Share(
        outputs,
        {i: block_of(gradient) for i, gradient in gradients.items()},
        updated,
        {} if task.results else cotangents,
        numbered(returned),
    )


def _checked(outputs: dict[str, Any]) -> dict[str, Tensor]:
    for name, value in outputs.items():
        if not isinstance(value, Tensor):
            raise StructureError(f"{name} of the torch function is a {type(value).__name__}, not a tensor")
    return outputs


def _agreed(named: dict[str, Tensor] | StructureError, task: Task) -> bool | StructureError:
    """Whether a block of some rank does not take its cotangent, or what is wrong: the same on all ranks."""
    mine: bool | StructureError
    if isinstance(named, StructureError):
        mine = named
    else:
        mine = task.results is not None and any(
            result.cotangents is not None
            and tuple(named[name].shape) != result.cotangents[dist.get_rank()].shape
            for name, result in task.results.items()
        )
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    errors = [each for each in found if isinstance(each, StructureError)]
    return errors[0] if errors else any(found)


def _cotangents(outputs: dict[str, Tensor], task: Task, rank: int) -> dict[str, Block]:
    if task.results is None:
        kinds = {name: y.is_floating_point() or y.is_complex() for name, y in outputs.items()}
        return {
            name: draw(i, y.shape, block_of(y.detach()).dtype)
            for i, (name, y) in enumerate(outputs.items())
            if kinds[name]
        }
    return {
        name: result.cotangents[rank].astype(block_of(outputs[name].detach()).dtype)
        for name, result in task.results.items()
        if result.cotangents is not None
    }


def _updated(update: Update, inputs: Sequence[Tensor], gradients: dict[int, Tensor]) -> dict[int, Block]:
    """The values after one step of the optimiser that the user's function makes of them."""
    values = [inputs[i].detach().clone().requires_grad_() for i in update.arrays]
    for i, value in zip(update.arrays, values, strict=True):
        value.grad = gradients[i]
    make: Callable[[list[Tensor]], torch.optim.Optimizer] = pickle.loads(update.function)[0]
    make(values).step()
    return {i: block_of(value.detach()) for i, value in zip(update.arrays, values, strict=True)}


def _by_device(shares: Sequence[dict]) -> dict:
    return {key: tuple(share[key] for share in shares) for key in shares[0]}
