"""The torch side of `xshard.testing` and `xshard calibrate`: user code runs in forked gloo ranks alone."""

from __future__ import annotations

import functools
import os
import pickle
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torch_bridge.autodiff.blocks import array_of, as_tensor, tensor_of
from torch_bridge.contractions.einsum import einsum
from torch_bridge.lower.rules import lower
from torch_bridge.mesh.process_mesh import process_mesh
from torch_bridge.redistribution import redistribute
from torch_bridge.testing.byte_counter import Meter
from torch_bridge.testing.launch import RankError, run_ranks
from xshard import ContractionPlan, Plan, replicas
from xshard.runtimes.processes import FunctionError
from xshard.steps.base import Block
from xshard.testing.functions import called, derivatives, draw, mapped, named_outputs, numbered
from xshard.testing.moves import Recorder, Seen, merged
from xshard.testing.plans import arrays_of
from xshard.testing.question import (
    OUTPUT,
    Answer,
    AnyPlan,
    Devices,
    Question,
    Slopes,
    StructureError,
    Update,
)

# The answer of one rank, with one block for each array, and bytes per collective, forward and backward.
RankAnswer = tuple[Answer, list[int], list[int]]


def preload(modules: Sequence[str], _timeout_s: float) -> None:
    """Import modules here, so that ranks are forked with them. Raises FunctionError."""
    for name in modules:
        try:
            import_module(name)
        except Exception as error:
            raise FunctionError(f"preload: {name!r} cannot be imported", hint=repr(error)) from None


def call_packed(n: int, packed: bytes, timeout_s: float) -> list[Any]:
    """The results of a packed function on `n` ranks, by rank. Raises FunctionError."""
    with _named():
        return run_ranks(n, _call, packed, timeout_s=timeout_s)


@contextmanager
def _named(what: str = "") -> Iterator[None]:
    """Errors of ranks are the function's."""
    try:
        yield
    except RankError as error:
        raise FunctionError(f"{what}{error.reason}", hint=error.hint) from None


def answers(questions: Sequence[Question], timeout_s: float) -> list[Answer]:
    """The answer to every question, on a rank per device. Raises FunctionError, RankError, StructureError."""
    if any(
        question.update is not None or not isinstance(question.function, bytes)
        for question in questions
    ):
        preload(["torch._dynamo"], timeout_s)  # optimisers and meters import it: 0.6 s in each rank
    where = f" on {questions[0].mesh}" if questions and questions[0].mesh.axes else ""
    is_plan = not (questions and isinstance(questions[0].function, bytes))
    with nullcontext() if is_plan else _named(f"the torch function failed{where}: "):
        return [merge_ranks(parts) for parts in by_rank(questions, answer_all, timeout_s=timeout_s)]


def seen(question: Question, timeout_s: float) -> list[Seen]:
    """The inputs of the redistributions of such a run, and the cotangents of their results."""
    with _named():
        return merged(run_ranks(question.mesh.n_devices, _seen, question, timeout_s=timeout_s))


def by_rank(
    items: Sequence[Any], function: Callable[..., list[Any]], *args: Any, timeout_s: float
) -> list[tuple[Any, ...]]:
    """For every item, by its `mesh`, the results of all ranks; `function` gets a world's items and `args`."""
    results: dict[int, tuple[Any, ...]] = {}
    for n in sorted({item.mesh.n_devices for item in items}):
        numbers = [i for i, item in enumerate(items) if item.mesh.n_devices == n]
        ranks = on_ranks(n, function, [items[i] for i in numbers], *args, timeout_s=timeout_s)
        results |= dict(zip(numbers, zip(*ranks, strict=True), strict=True))
    return [results[i] for i in range(len(items))]


def on_ranks(n: int, function: Callable[..., Any], *args: Any, timeout_s: float) -> list[Any]:
    """The results of a function, by rank: on new ranks, or on a launcher's ranks, which all call this."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return run_ranks(n, function, *args, timeout_s=timeout_s)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    results: list[Any] = [None] * n
    dist.all_gather_object(results, function(*args))
    return results


def merge_ranks(parts: Sequence[RankAnswer | StructureError]) -> Answer:
    """The answers of all ranks as one. Of every collective the busiest rank counts, as in a plan."""
    for part in parts:
        if isinstance(part, StructureError):
            raise part
    answers, forward, backward = zip(*parts, strict=True)  # type: ignore[misc]

    def by_device(kind: str) -> dict[Any, Devices] | None:
        every = [getattr(answer, kind) for answer in answers]
        return every[0] and {
            key: tuple(block for part in every for block in part[key]) for key in every[0]
        }

    kinds = ("outputs", "gradients", "updated", "cotangents")
    answer: Answer = replace(answers[0], **{kind: by_device(kind) for kind in kinds})
    if answer.seconds is None:
        return answer
    n_bytes = (sum(map(max, zip(*ranks, strict=True))) for ranks in (forward, backward))
    measured = dict(zip(("forward_bytes", "backward_bytes"), n_bytes, strict=True))
    return replace(answer, seconds=max(each.seconds for each in answers), **measured)


def answer_all(questions: Sequence[Question]) -> list[RankAnswer | StructureError]:
    """This rank's answers."""
    return [
        _answer(each) if isinstance(each.function, bytes) else _answer_plan(each)
        for each in questions
    ]


def _seen(question: Question) -> list[Seen]:
    with replicas.watched(
        Recorder(lambda x: array_of(x.detach().clone().contiguous()))
    ) as recorder:
        _answer(question)
    return recorder.seen


def _call(packed: bytes) -> Any:
    function, arguments = pickle.loads(packed)
    return function(*arguments)


def _answer_plan(question: Question) -> RankAnswer:
    """A plan on this rank's blocks, measured."""
    rank = dist.get_rank()
    cotangent, *blocks = (
        tensor_of(array[rank]) for array in (question.cotangents, *question.inputs)
    )
    with Meter() as forward:
        output, pull = _forward(question.plan, blocks)
    with Meter() as backward:
        gradients = pull(cotangent)
    dist.barrier()
    start = time.perf_counter()
    _forward(question.plan, blocks)[1](cotangent)
    seconds = time.perf_counter() - start
    pulled = {i: (array_of(gradient),) for i, gradient in enumerate(gradients)}
    return (
        Answer({OUTPUT: (array_of(output),)}, pulled, seconds=seconds),
        forward.received,
        backward.received,
    )


def _forward(
    plan: AnyPlan, blocks: list[Tensor]
) -> tuple[Tensor, Callable[[Tensor], Sequence[Tensor]]]:
    """The output, and its pullback: autograd, or the backward plan for dtypes without autograd."""

    def run(*operands: Tensor) -> Tensor:
        if isinstance(plan, ContractionPlan):
            return as_tensor(einsum(plan, *operands, mesh=plan.mesh))
        return redistribute(operands[0], plan, plan.mesh)

    if isinstance(plan, Plan) and not (
        blocks[0].dtype.is_floating_point or blocks[0].dtype.is_complex
    ):
        pull = lower(plan.backward, process_mesh(plan.mesh), blocks[0].device)
        return run(*blocks), lambda cotangent: [pull(cotangent)]
    leaves = [x.clone().requires_grad_() for x in blocks]
    y = run(*leaves)
    return y.detach(), lambda cotangent: torch.autograd.grad(y, leaves, cotangent)


def _answer(question: Question) -> RankAnswer | StructureError:
    """A user's function on this rank's blocks; an error on one rank is returned on all."""
    rank = dist.get_rank()
    state = torch.get_rng_state()
    inputs, returned = _returned(question, [blocks[rank] for blocks in question.inputs])
    draws = not torch.equal(state, torch.get_rng_state())
    named, verdict = _agreed(returned, question, rank)
    if isinstance(verdict, StructureError):
        return verdict
    outputs = {name: (array_of(y.detach()),) for name, y in named.items()}
    if verdict:
        return Answer(outputs, None, draws=draws), [], []
    cotangents = _cotangents(named, question, rank)
    varied = [inputs[i] for i in question.differentiable]
    pulled: Any = map(torch.zeros_like, varied)
    if used := [name for name in cotangents if named[name].requires_grad]:
        pairs = (
            [named[name] for name in used],
            varied,
            [tensor_of(cotangents[name]) for name in used],
        )
        pulled = torch.autograd.grad(*pairs, allow_unused=True, materialize_grads=True)
    gradients = dict(zip(question.differentiable, pulled, strict=True))
    arrays: dict[int, Devices] = {i: (array_of(gradient),) for i, gradient in gradients.items()}
    updated = {} if question.update is None else _updated(question.update, inputs, gradients)
    drawn = {} if question.results else {name: (block,) for name, block in cotangents.items()}
    slopes = _derivatives(question, arrays, cotangents) if question.differences else {}
    return Answer(outputs, arrays, updated, drawn, numbered(returned), slopes, draws=draws), [], []


def _returned(question: Question, blocks: Sequence[Block]) -> tuple[list[Tensor], Any]:
    """Leaves of autograd with the values of the blocks, and what the function returns for them."""
    # Each rank has its own copy, which the function may write to.
    inputs = [tensor_of(block).clone() for block in blocks]
    for i in question.differentiable:
        inputs[i].requires_grad_()
    assert isinstance(question.function, bytes)
    function, _ = pickle.loads(question.function)
    try:
        return inputs, called(
            function, mapped(inputs.__getitem__, question.arguments), question.mesh
        )
    except BaseException as error:
        rank = dist.get_rank()
        error.add_note(f"on device {rank} of {question.mesh}: {question.mesh.place(rank)}")
        raise


def _derivatives(
    question: Question, gradients: dict[int, Devices], cotangents: dict[str, Block]
) -> Slopes:
    def loss(blocks: Sequence[Block]) -> float:
        named = named_outputs(_returned(question, blocks)[1], None, "torch")
        return sum(
            float(np.vdot(c, array_of(named[name].detach())).real) for name, c in cotangents.items()
        )

    return derivatives(loss, [block for (block,) in question.inputs], gradients)


def _agreed(
    returned: Any, question: Question, rank: int
) -> tuple[dict[str, Tensor], bool | StructureError]:
    """The outputs by name; on all ranks the error of one, or True if one has a block of another shape."""
    named: dict[str, Tensor] = {}
    mine: bool | StructureError = False
    try:
        named = named_outputs(returned, question.results, "torch")
        for name, y in named.items():
            if not isinstance(y, Tensor):
                raise StructureError(
                    f"{name} of the torch function is a {type(y).__name__}, not a tensor"
                )
            result = None if question.results is None else question.results[name]
            if result and result.cotangents and tuple(y.shape) != result.cotangents[rank].shape:
                mine = True
    except StructureError as error:
        mine = error
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return named, next(
        (each for each in everyone if isinstance(each, StructureError)), any(everyone)
    )


def _cotangents(outputs: dict[str, Tensor], question: Question, rank: int) -> dict[str, Block]:
    cotangents: dict[str, Block] = {}
    for i, (name, y) in enumerate(outputs.items()):
        result = (question.results or {}).get(name)
        dtype = array_of(y.detach()).dtype
        if question.results is None and (y.is_floating_point() or y.is_complex()):
            cotangents[name] = draw(i, y.shape, dtype)
        elif result and result.cotangents is not None:
            cotangents[name] = result.cotangents[rank].astype(dtype)
    return cotangents


def _updated(
    update: Update, inputs: Sequence[Tensor], gradients: dict[int, Tensor]
) -> dict[int, Devices]:
    """The values after one step of the user's optimiser."""
    values = [inputs[i].detach().clone().requires_grad_() for i in update.arrays]
    for i, value in zip(update.arrays, values, strict=True):
        value.grad = gradients[i]
    pickle.loads(update.function)[0](values).step()
    return {i: (array_of(value.detach()),) for i, value in zip(update.arrays, values, strict=True)}


TARGET_S = 0.01  # seconds of calls between two looks at the clock, about
MOST_CALLS = 20


def seconds_of_plans(plans: Sequence[AnyPlan], rounds: int, timeout_s: float) -> list[float]:
    """The median time of every plan over some rounds. timeout_s: see `run_ranks`. Raises RankError."""
    return list(map(_median, by_rank(plans, _time_all, rounds, timeout_s=timeout_s)))


def seconds_of_products(
    n_devices: int, rows: int, dtypes: Sequence[str], rounds: int, timeout_s: float
) -> list[float]:
    """The median time per dtype of a product of square matrices, on all devices at once."""
    ranks = on_ranks(n_devices, _multiply_all, rows, dtypes, rounds, timeout_s=timeout_s)
    return list(map(_median, zip(*ranks, strict=True)))


def _median(by_rank: Sequence[Sequence[float]]) -> float:
    """Seconds by rank, round by round -> their median; of a round the busiest rank counts, as in a plan."""
    return statistics.median(map(max, zip(*by_rank, strict=True)))


def _multiply_all(rows: int, dtypes: Sequence[str], rounds: int) -> list[list[float]]:
    """This rank's seconds per dtype, round by round."""
    seconds: dict[str, list[float]] = {dtype: [] for dtype in dtypes}
    for _ in range(1 + rounds):
        for dtype in dtypes:
            x = torch.ones(rows, rows, dtype=getattr(torch, dtype))
            dist.barrier()
            start = time.perf_counter()
            torch.mm(x, x)
            seconds[dtype].append(time.perf_counter() - start)
    return [times[1:] for times in seconds.values()]  # the first round warms up


def _time_all(plans: Sequence[AnyPlan], rounds: int) -> list[list[float]]:
    """This rank's seconds per call of every plan, round by round, so that a slow spell falls on all."""
    timers = [_PlanTimer(plan) for plan in plans]
    return list(
        map(list, zip(*([timer.seconds() for timer in timers] for _ in range(rounds)), strict=True))
    )


class _PlanTimer:
    """A plan, lowered and warmed up, and how often to call it between two looks at the clock."""

    def __init__(self, plan: AnyPlan) -> None:
        processes = process_mesh(plan.mesh)
        dtype = getattr(torch, plan.dtype)
        shapes = [source.local_shape(processes.device) for source in arrays_of(plan)[:-1]]
        self.blocks = [torch.ones(shape, dtype=dtype) for shape in shapes]
        self.run: Callable[..., Any]
        if isinstance(plan, Plan):
            self.run = lower(plan, processes, torch.device("cpu"))
        else:
            self.run = functools.partial(einsum, plan, mesh=plan.mesh)
        self.calls = 2
        self.seconds()  # the first calls make connections
        slowest = torch.tensor(self.seconds())
        dist.all_reduce(slowest, dist.ReduceOp.MAX)  # all ranks call equally often
        self.calls = int(min(MOST_CALLS, max(1.0, TARGET_S / slowest.item())))

    def seconds(self) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(self.calls):
            self.run(*self.blocks)
        return (time.perf_counter() - start) / self.calls
