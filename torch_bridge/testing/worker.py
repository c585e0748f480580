"""The torch side of `xshard.testing` and `xshard calibrate`.

User code runs in forked gloo ranks alone.
"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

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
from xshard.testing.functions import called, draw, mapped, measure_slopes, named_outputs, numbered
from xshard.testing.moves import Recorder, Seen, merged
from xshard.testing.plans import arrays_of
from xshard.testing.question import (
    OUTPUT,
    Answer,
    AnyPlan,
    Devices,
    Question,
    Result,
    Slopes,
    StructureError,
    Update,
)

K = TypeVar("K")
TARGET_S = 0.01  # seconds of calls between two looks at the clock, about
MOST_CALLS = 20
N_LAYERS = 4  # turns of a move and of computing that are timed together
N_SMALL_LAYERS = 128  # pairs of layers, whose calls by the host are timed


class RankAnswer(NamedTuple):
    """The answer of one rank, with one block for each array, and the bytes that it received.

    Attributes:
        answer: The results of this rank.
        forward_bytes: Bytes per collective, forward; empty if they were not measured.
        backward_bytes: Likewise in the backward pass.
    """

    answer: Answer
    forward_bytes: Sequence[int] = ()
    backward_bytes: Sequence[int] = ()


def preload(modules: Sequence[str], _timeout_s: float) -> None:
    """Import modules in this process, so that ranks are forked with them. Raises FunctionError."""
    for name in modules:
        try:
            import_module(name)
        except Exception as error:
            raise FunctionError(f"preload: {name!r} cannot be imported", hint=repr(error)) from None


def call_packed(n: int, packed: bytes, timeout_s: float) -> list[Any]:
    """Return the results of a packed function on `n` ranks, by rank. Raises FunctionError."""
    with _as_errors_of_function():
        return run_ranks(n, _call, packed, timeout_s=timeout_s)


@contextmanager
def _as_errors_of_function(place: str = "") -> Iterator[None]:
    """Raise errors of ranks as errors of the user's function.

    Args:
        place: The text with which they begin.
    """
    try:
        yield
    except RankError as error:
        raise FunctionError(f"{place}{error.reason}", hint=error.hint) from None


def answers(questions: Sequence[Question], timeout_s: float) -> list[Answer]:
    """Answer every question, on a rank per device.

    Raises FunctionError, RankError, StructureError.
    """
    if not questions:
        return []
    if any(_needs_dynamo(question) for question in questions):
        preload(["torch._dynamo"], timeout_s)  # optimisers and meters import it: 0.6 s in each rank
    mesh = questions[0].mesh
    on_mesh = f" on {mesh}" if mesh.axes else ""
    is_function = isinstance(questions[0].function, bytes)
    errors = _as_errors_of_function(f"the torch function failed{on_mesh}: ")
    with errors if is_function else nullcontext():
        return [
            merge_ranks(rank_answers)
            for rank_answers in by_rank(questions, answer_all, timeout_s=timeout_s)
        ]


def _needs_dynamo(question: Question) -> bool:
    """Return whether an answer runs an optimiser, or a plan, which is measured."""
    return question.update is not None or not isinstance(question.function, bytes)


def seen(question: Question, timeout_s: float) -> list[Seen]:
    """Return inputs of the redistributions of a function, and cotangents of their results."""
    with _as_errors_of_function():
        return merged(run_ranks(question.mesh.n_devices, _seen, question, timeout_s=timeout_s))


def by_rank(
    items: Sequence[Any], function: Callable[..., list[Any]], *args: Any, timeout_s: float
) -> list[tuple[Any, ...]]:
    """Run test items on as many ranks as each one's mesh has; return all ranks' results by item.

    Two items on meshes of 2 and 4 devices give a tuple of 2 results and one of 4.

    Args:
        items: Questions or plans, each with a `mesh`.
        function: Called on each rank with a list of items and `args`; returns a result per item.
        *args: Its further arguments.
        timeout_s: As of `run_ranks`.

    Returns:
        For each item, in order, the results by rank.
    """
    results: dict[int, tuple[Any, ...]] = {}
    # Items with equally many devices share processes: starting these takes longer than most items.
    for n_devices in sorted({item.mesh.n_devices for item in items}):
        item_indices = [i for i, item in enumerate(items) if item.mesh.n_devices == n_devices]
        items_of_size = [items[i] for i in item_indices]
        results_by_rank = on_ranks(n_devices, function, items_of_size, *args, timeout_s=timeout_s)
        results_by_item = zip(*results_by_rank, strict=True)
        results.update(zip(item_indices, results_by_item, strict=True))
    return [results[i] for i in range(len(items))]


def on_ranks(n: int, function: Callable[..., Any], *args: Any, timeout_s: float) -> list[Any]:
    """Run a function on new ranks, or on a launcher's, which all call this.

    Returns its results, by rank.
    """
    # A launcher such as torchrun has set it, and runs this function on every rank.
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return run_ranks(n, function, *args, timeout_s=timeout_s)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    results: list[Any] = [None] * n
    dist.all_gather_object(results, function(*args))
    return results


def merge_ranks(of_ranks: Sequence[RankAnswer | StructureError]) -> Answer:
    """Merge the test results of all ranks into one.

    Blocks are listed by device; seconds are those of the slowest rank; the bytes of a collective
    are the most on any rank, which is how plans count them.

    Args:
        of_ranks: For each rank its blocks of outputs and gradients, with seconds and the bytes of each
            collective where these were measured; or an error.

    Raises:
        StructureError: The error of the first rank that has returned one.
    """
    rank_answers: list[RankAnswer] = []
    for of_rank in of_ranks:
        if isinstance(of_rank, StructureError):
            raise of_rank
        rank_answers.append(of_rank)
    answers = [of_rank.answer for of_rank in rank_answers]
    merged_answer = answers[0]  # what is no array is as on rank 0
    for field_of_arrays in ("outputs", "gradients", "updated", "cotangents"):
        arrays = _by_device([getattr(answer, field_of_arrays) for answer in answers])
        merged_answer = replace(merged_answer, **{field_of_arrays: arrays})
    seconds = [answer.seconds for answer in answers if answer.seconds is not None]
    if not seconds:  # not measured
        return merged_answer
    return replace(
        merged_answer,
        seconds=max(seconds),
        forward_bytes=_busiest([of_rank.forward_bytes for of_rank in rank_answers]),
        backward_bytes=_busiest([of_rank.backward_bytes for of_rank in rank_answers]),
    )


def _by_device(arrays_of_ranks: Sequence[Any]) -> Any:
    """Join the blocks of each array, rank by rank; nothing, None or {}, stays so."""
    arrays_of_first: Mapping[Any, Devices] | None = arrays_of_ranks[0]
    if not arrays_of_first:
        return arrays_of_first
    joined: dict[Any, Devices] = dict.fromkeys(arrays_of_first, ())
    for arrays in arrays_of_ranks:
        for key in joined:
            joined[key] += arrays[key]
    return joined


def _busiest(bytes_of_ranks: Sequence[Sequence[int]]) -> int:
    """Add up the bytes of all collectives, for each those of the rank that received most."""
    return sum(map(max, zip(*bytes_of_ranks, strict=True)))


def answer_all(questions: Sequence[Question]) -> list[RankAnswer | StructureError]:
    """Return this rank's answers."""
    answers: list[RankAnswer | StructureError] = []
    for question in questions:
        is_plan = not isinstance(question.function, bytes)
        answers.append(_answer_plan(question) if is_plan else _answer(question))
    return answers


def _seen(question: Question) -> list[Seen]:
    """Return what redistributions of this rank are called with."""

    def copied(x: Tensor) -> Block:
        return array_of(x.detach().clone().contiguous())  # the function may write to x later

    recorder = Recorder(copied)
    with replicas.watch_checks(recorder):
        _answer(question)
    return recorder.seen


def _call(packed: bytes) -> Any:
    function, arguments = pickle.loads(packed)
    return function(*arguments)


def _answer_plan(question: Question) -> RankAnswer:
    """Run a plan forward and backward on this rank, and measure bytes and seconds.

    Args:
        question: The plan, the inputs of all devices, and the gradient (cotangent) to start from.

    Returns:
        This rank's blocks of output and gradients, the bytes that each collective receives, forward
        and backward, and the seconds of a second run.
    """
    rank = dist.get_rank()
    # Device i of the mesh is rank i.
    blocks = [tensor_of(array[rank]) for array in question.inputs]
    cotangent = tensor_of(question.cotangents[rank])
    # Forward and backward bytes apart, as a plan has them.
    with Meter() as forward:
        output, pull = _forward(question.plan, blocks)
    with Meter() as backward:
        gradients = pull(cotangent)
    # A second run is timed: in the first one ranks also connected, and compared their plans.
    dist.barrier()
    start_s = time.perf_counter()
    _, pull = _forward(question.plan, blocks)
    pull(cotangent)
    seconds = time.perf_counter() - start_s
    gradient_blocks = _blocks_of(dict(enumerate(gradients)))
    answer = Answer(
        outputs=_blocks_of({OUTPUT: output}), gradients=gradient_blocks, seconds=seconds
    )
    return RankAnswer(answer, forward.received, backward.received)


def _blocks_of(tensors: Mapping[K, Tensor]) -> dict[K, Devices]:
    """Return tensors as arrays of an answer: of each the blocks of all devices, of which one is here."""
    return {key: (array_of(x.detach()),) for key, x in tensors.items()}


def _forward(
    plan: AnyPlan, blocks: list[Tensor]
) -> tuple[Tensor, Callable[[Tensor], Sequence[Tensor]]]:
    """Run a plan on this rank's blocks; return the output, and a function from it to gradients.

    That function, the pullback, takes the output's gradient and returns the inputs' gradients. It
    is autograd's; for integers, which autograd refuses, it runs the plan's own backward plan.
    """

    def run(*operands: Tensor) -> Tensor:
        if isinstance(plan, ContractionPlan):
            return as_tensor(einsum(plan, *operands, mesh=plan.mesh))
        return redistribute(operands[0], plan, plan.mesh)

    dtype = blocks[0].dtype
    has_autograd = dtype.is_floating_point or dtype.is_complex
    if isinstance(plan, Plan) and not has_autograd:
        backward = lower(plan.backward, process_mesh(plan.mesh), blocks[0].device)
        return run(*blocks), lambda cotangent: [backward(cotangent)]
    leaves = [x.clone().requires_grad_() for x in blocks]
    y = run(*leaves)
    return y.detach(), lambda cotangent: torch.autograd.grad(y, leaves, cotangent)


def _answer(question: Question) -> RankAnswer | StructureError:
    """Run a user's test function on this rank, with gradients and whatever else is asked for.

    Args:
        question: The pickled function, its inputs on all devices, and what is asked of it: results,
            updated parameters, numerical differences.

    Returns:
        This rank's answer; or the error of the first rank whose outputs are not as the question says.
        The answer lacks gradients if an output has not the shape of its cotangent. Either holds for
        all ranks if it holds for one.
    """
    rank = dist.get_rank()
    # Restart the generator, so that the result does not depend on what this process ran before. If
    # its state differs afterwards, the function draws random numbers, as dropout does.
    torch.manual_seed(torch.initial_seed())
    rng_state = torch.get_rng_state()
    inputs, returned = _call_function(question, [blocks[rank] for blocks in question.inputs])
    draws_random = not torch.equal(rng_state, torch.get_rng_state())
    agreed = _agree_on_outputs(returned, question, rank)
    if agreed.error is not None:
        return agreed.error
    answer = Answer(outputs=_blocks_of(agreed.outputs), gradients=None, draws=draws_random)
    if not agreed.shapes_are_of_cotangents:
        return RankAnswer(answer)
    answer = replace(answer, tree=numbered(returned))
    return RankAnswer(_with_gradients(answer, question, inputs, agreed.outputs))


def _with_gradients(
    answer: Answer, question: Question, inputs: Sequence[Tensor], outputs: dict[str, Tensor]
) -> Answer:
    """Return an answer with the gradients of inputs, and whatever else the question asks about them.

    Args:
        answer: The answer so far, with the outputs.
        question: Has the cotangents; for a reference, which has none, they are drawn at random.
        inputs: The tensors that the function was given.
        outputs: The tensors that it returned, by name.
    """
    cotangents = _cotangents(outputs, question, dist.get_rank())
    gradients = _gradients(question, inputs, outputs, cotangents)
    blocks = _blocks_of(gradients)
    answer = replace(answer, gradients=blocks)
    if question.update is not None:
        answer = replace(answer, updated=_update_parameters(question.update, inputs, gradients))
    if not question.results:  # a reference says which cotangents it has drawn
        drawn: dict[str, Devices] = {name: (block,) for name, block in cotangents.items()}
        answer = replace(answer, cotangents=drawn)
    if question.differences:
        slopes = _derivatives(question, blocks, cotangents)
        answer = replace(answer, derivatives=slopes)
    return answer


def _call_function(question: Question, blocks: Sequence[Block]) -> tuple[list[Tensor], Any]:
    """Call the user's test function on this rank, with tensors made of the given numpy blocks.

    Returns these tensors, of which the differentiable ones require a gradient, and what the
    function returns. An error gets a note that says on which device it happened.
    """
    # Each rank has its own copy, which the function may write to.
    inputs = [tensor_of(block).clone() for block in blocks]
    for i in question.differentiable:
        inputs[i].requires_grad_()
    assert isinstance(question.function, bytes)
    # Unpickled anew for each call: the function may keep state, which the next call must not see.
    function, _ = pickle.loads(question.function)
    arguments = mapped(inputs.__getitem__, question.arguments)
    try:
        return inputs, called(function, arguments, question.mesh)
    except BaseException as error:
        rank = dist.get_rank()
        error.add_note(f"on device {rank} of {question.mesh}: {question.mesh.place(rank)}")
        raise


def _gradients(
    question: Question,
    inputs: Sequence[Tensor],
    outputs: Mapping[str, Tensor],
    cotangents: Mapping[str, Block],
) -> dict[int, Tensor]:
    """Compute the gradient of each differentiable input by autograd, by the input's number.

    Inputs that no output depends on get zeros, as in JAX.

    Args:
        question: Its field `differentiable` has the numbers of these inputs.
        inputs: The tensors that the function was given.
        outputs: The tensors that it returned, by name.
        cotangents: The gradients of outputs to start from, by name.
    """
    varied = [inputs[i] for i in question.differentiable]
    with_gradient = [name for name in cotangents if outputs[name].requires_grad]
    if not with_gradient:
        return dict(zip(question.differentiable, map(torch.zeros_like, varied), strict=True))
    gradients = torch.autograd.grad(
        [outputs[name] for name in with_gradient],
        varied,
        [tensor_of(cotangents[name]) for name in with_gradient],
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(question.differentiable, gradients, strict=True))


def _derivatives(
    question: Question, gradients: dict[int, Devices], cotangents: dict[str, Block]
) -> Slopes:
    """Check gradients numerically: compare them with differences of a loss between nearby inputs.

    The loss is the sum of all outputs times their cotangents, whose gradients `gradients` are.
    """

    def loss(blocks: Sequence[Block]) -> float:
        _, returned = _call_function(question, blocks)
        outputs = named_outputs(returned, None, "torch")
        total = 0.0
        for name, cotangent in cotangents.items():
            y = array_of(outputs[name].detach())
            total += float(np.vdot(cotangent, y).real)
        return total

    return measure_slopes(loss, [block for (block,) in question.inputs], gradients)


class _AgreedOutputs(NamedTuple):
    """The outputs of a function by name, and what all ranks have found about theirs.

    Attributes:
        outputs: The outputs by name.
        error: The error of the first rank that has one.
        shapes_are_of_cotangents: Whether all blocks have the shapes of the cotangents that the
            question gives.
    """

    outputs: dict[str, Tensor]
    error: StructureError | None
    shapes_are_of_cotangents: bool


def _agree_on_outputs(returned: Any, question: Question, rank: int) -> _AgreedOutputs:
    """Name the function's outputs, and find with all ranks whether they are as expected.

    Args:
        returned: What the function returned on this rank.
        question: Says which outputs there should be, and their cotangents.
        rank: This rank.

    Returns:
        This rank's outputs by name, and the verdict of all ranks on theirs.
    """
    outputs: dict[str, Tensor] = {}
    error: StructureError | None = None
    has_right_shapes = True
    try:
        outputs = named_outputs(returned, question.results, "torch")
        has_right_shapes = _have_shapes_of_cotangents(outputs, question, rank)
    except StructureError as raised:
        error = raised
    # All ranks need the same verdict: the gradients, which come next, may run collectives.
    verdicts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(verdicts, (error, has_right_shapes))
    errors = [rank_error for rank_error, _ in verdicts if rank_error is not None]
    return _AgreedOutputs(
        outputs,
        error=errors[0] if errors else None,
        shapes_are_of_cotangents=all(is_right for _, is_right in verdicts),
    )


def _have_shapes_of_cotangents(
    outputs: Mapping[str, Tensor], question: Question, rank: int
) -> bool:
    """Return whether outputs have the shapes of the cotangents that the question gives for them.

    Raises StructureError for an output that is no tensor.
    """
    all_equal = True
    for name, y in outputs.items():
        if not isinstance(y, Tensor):
            type_name = type(y).__name__
            raise StructureError(f"{name} of the torch function is a {type_name}, not a tensor")
        result = _result_of(question, name)
        if result is not None and result.cotangents:
            all_equal &= tuple(y.shape) == result.cotangents[rank].shape
    return all_equal


def _result_of(question: Question, name: str) -> Result | None:
    """Return what a question says of an output; None for a reference, of which it says nothing."""
    return None if question.results is None else question.results.get(name)


def _cotangents(outputs: dict[str, Tensor], question: Question, rank: int) -> dict[str, Block]:
    """Return the cotangents of outputs: the question's, or drawn for a reference."""
    cotangents: dict[str, Block] = {}
    for i, (name, y) in enumerate(outputs.items()):
        dtype = array_of(y.detach()).dtype
        result = _result_of(question, name)
        if question.results is None:
            if y.is_floating_point() or y.is_complex():
                cotangents[name] = draw(i, y.shape, dtype)
        elif result is not None and result.cotangents is not None:
            cotangents[name] = result.cotangents[rank].astype(dtype)
    return cotangents


def _update_parameters(
    update: Update, inputs: Sequence[Tensor], gradients: dict[int, Tensor]
) -> dict[int, Devices]:
    """Return the values after one step of the user's optimiser."""
    values = [inputs[i].detach().clone().requires_grad_() for i in update.arrays]
    for i, value in zip(update.arrays, values, strict=True):
        value.grad = gradients[i]
    make_optimiser, *_ = pickle.loads(update.function)
    make_optimiser(values).step()
    return _blocks_of(dict(zip(update.arrays, values, strict=True)))


def seconds_of_plans(plans: Sequence[AnyPlan], rounds: int, timeout_s: float) -> list[float]:
    """Return the median time of every plan over some rounds. Raises RankError.

    Args:
        plans: The plans.
        rounds: How often each is timed.
        timeout_s: See `run_ranks`.
    """
    return [_median(ranks) for ranks in by_rank(plans, _time_all, rounds, timeout_s=timeout_s)]


def seconds_of_products(
    n_devices: int, rows: int, dtypes: Sequence[str], rounds: int, timeout_s: float
) -> list[float]:
    """Return the median time per dtype of a product of square matrices, on all devices at once."""
    ranks = on_ranks(n_devices, _multiply_all, rows, dtypes, rounds, timeout_s=timeout_s)
    by_dtype = zip(*ranks, strict=True)
    return [_median(seconds_of_ranks) for seconds_of_ranks in by_dtype]


def seconds_of_small_calls(n_devices: int, rounds: int, timeout_s: float) -> float:
    """Return the median seconds of an operation of small layers, on all devices at once."""
    return _median(on_ranks(n_devices, _time_small_layers, rounds, timeout_s=timeout_s))


def moves_beside_products(
    plans: Sequence[Plan], rows: int, rounds: int, timeout_s: float
) -> tuple[float, float]:
    """Measure moves between and beside products of square matrices that take about as long.

    Returns:
        Two numbers. The slowdown: seconds of a move between two products, over those of the move in a
        loop, 1 or more. The overlap: the share of the seconds of moves in which devices compute, if
        they start them ahead. Of a move and a product of 10 ms each it is 0 if both together take
        20 ms, and 1 if they take 10 ms.
    """
    moving_s = 0.0
    between_s = 0.0
    hidden_s = 0.0
    could_hide_s = 0.0
    for ranks in by_rank(plans, _time_beside_products, rows, rounds, timeout_s=timeout_s):
        loop_s, computing_s, in_turn_s, both_s = (_median(way) for way in zip(*ranks, strict=True))
        moving_s += loop_s
        between_s += in_turn_s - computing_s
        hidden_s += in_turn_s - both_s
        could_hide_s += max(0.0, min(in_turn_s - computing_s, computing_s))
    overlap = hidden_s / could_hide_s if could_hide_s else 0.0
    return max(1.0, between_s / moving_s), min(1.0, max(0.0, overlap))


def _median(seconds_of_ranks: Sequence[Sequence[float]]) -> float:
    """Return the median of seconds by rank and round.

    Of a round the busiest rank counts, as in a plan.
    """
    return statistics.median(map(max, zip(*seconds_of_ranks, strict=True)))


def _multiply_all(rows: int, dtypes: Sequence[str], rounds: int) -> list[list[float]]:
    """Return this rank's seconds per dtype, round by round."""
    seconds: dict[str, list[float]] = {dtype: [] for dtype in dtypes}
    for _ in range(1 + rounds):
        for dtype in dtypes:
            x = torch.ones(rows, rows, dtype=getattr(torch, dtype))
            seconds[dtype].append(_seconds_of(functools.partial(torch.mm, x, x)))
    return [times[1:] for times in seconds.values()]  # the first round warms up


def _time_small_layers(rounds: int) -> list[float]:
    """Return this rank's seconds of an operation of small layers, round by round.

    Those of a round are the mean over many operations, forward and backward: ranks that share a core take
    turns meanwhile.
    """
    pairs = [(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(N_SMALL_LAYERS)]
    layers = torch.nn.Sequential(*itertools.chain.from_iterable(pairs))
    x = torch.ones(8, 8)
    # A product forward and two backward, and an activation forward and backward.
    n_operations = 5 * N_SMALL_LAYERS

    def step() -> None:
        layers(x).sum().backward()

    step()  # the first one takes longer
    return [_seconds_of(step) / n_operations for _ in range(rounds)]


def _time_beside_products(plans: Sequence[Plan], rows: int, rounds: int) -> list[list[list[float]]]:
    """Return for each plan this rank's seconds in the four ways of `_time_plan_beside_products`."""
    return [_time_plan_beside_products(plan, rows, rounds) for plan in plans]


def _time_plan_beside_products(plan: Plan, rows: int, rounds: int) -> list[list[float]]:
    """Return this rank's seconds in four ways, each a list by round.

    The plan alone, the products alone, both in turn, and the plan beside the products. Each is
    repeated without a barrier in between, as in a step: the ranks drift apart.
    """
    timer = _PlanTimer(plan)
    multiply = functools.partial(torch.mm, torch.ones(rows, rows), torch.ones(rows, rows))
    multiply()  # the first product takes longer
    n_needed = torch.tensor(timer.seconds() / _seconds_of(multiply))
    # All ranks multiply as often, so that none waits for another one.
    dist.all_reduce(n_needed, dist.ReduceOp.MAX)
    n_products = max(1, round(n_needed.item()))

    def move() -> None:
        timer.run(*timer.blocks)

    def compute() -> None:
        for _ in range(n_products):
            multiply()

    def take_turns() -> None:
        compute()
        move()

    def do_both() -> None:
        wait = timer.run.begin(*timer.blocks)
        compute()
        wait()

    functions = (move, compute, take_turns, do_both)
    in_rounds = [
        [_seconds_of(_repeated(function)) for function in functions] for _ in range(rounds)
    ]
    return [list(seconds) for seconds in zip(*in_rounds, strict=True)]


def _repeated(function: Callable[[], object]) -> Callable[[], None]:
    """Return a function that calls another one as often as a small model has layers."""

    def call_all() -> None:
        for _ in range(N_LAYERS):
            function()

    return call_all


def _seconds_of(function: Callable[[], object]) -> float:
    """Return the seconds of a call that all ranks begin together."""
    dist.barrier()
    start_s = time.perf_counter()
    function()
    return time.perf_counter() - start_s


def _time_all(plans: Sequence[AnyPlan], rounds: int) -> list[list[float]]:
    """Return this rank's seconds per call of every plan, round by round.

    All plans run in each round, so that a slow spell of the machine falls on all.
    """
    timers = [_PlanTimer(plan) for plan in plans]
    seconds: list[list[float]] = [[] for _ in plans]
    for _ in range(rounds):
        for timer, plan_seconds in zip(timers, seconds, strict=True):
            plan_seconds.append(timer.seconds())
    return seconds


class _PlanTimer:
    """A plan, lowered and warmed up, and how often to call it between two looks at the clock."""

    def __init__(self, plan: AnyPlan) -> None:
        processes = process_mesh(plan.mesh)
        # All inputs are ones: the time does not depend on values.
        dtype = getattr(torch, plan.dtype)
        # The last array is the result.
        shapes = [source.local_shape(processes.device) for source in arrays_of(plan)[:-1]]
        self.blocks = [torch.ones(shape, dtype=dtype) for shape in shapes]
        self.run: Any
        if isinstance(plan, Plan):
            self.run = lower(plan, processes, torch.device("cpu"))
        else:
            self.run = functools.partial(einsum, plan, mesh=plan.mesh)
        self.n_calls = 2
        self.seconds()  # the first calls make connections
        slowest = torch.tensor(self.seconds())
        # By the slowest rank, so that all ranks make equally many calls, which contain collectives.
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        # So many calls are timed together that they take about TARGET_S.
        self.n_calls = int(min(MOST_CALLS, max(1.0, TARGET_S / slowest.item())))

    def seconds(self) -> float:
        """Return the seconds of one call, on average over some, after a barrier."""
        return _seconds_of(self._call) / self.n_calls

    def _call(self) -> None:
        for _ in range(self.n_calls):
            self.run(*self.blocks)
