"""`verify`: the loss and every gradient of a parallel model, compared with a copy on one device."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Module

from torch_bridge.mesh.process_mesh import alone
from torch_bridge.models.parallel import ATTRIBUTE, ParallelModel, described, parallel_of
from torch_bridge.models.parallelize import check_apart
from torch_bridge.models.parameters import ParallelContext, unsharded
from torch_bridge.redistribution import redistribute
from xshard import Layout, Sharding, XshardError, dtypes, tolerances
from xshard.errors import ShapeError, located

Call = dict[Any, Any]  # arguments by position or name
Loss = Callable[[Any], Tensor] | None
Watch = Callable[[Module], AbstractContextManager[Any]]
Run = Callable[[Watch], Any]


class Wanted(NamedTuple):
    """This process's block of an array on one device, and the largest value of the whole."""

    kind: str
    name: str
    sharding: Sharding
    block: Tensor
    largest: float


def verify(
    model: Module,
    batch: Any,
    *,
    loss: Loss = None,
    tol: float | None = None,
    original: Module | None = None,
) -> None:
    """Raise EquivalenceError, on all processes, unless loss and gradients are as on one device.

    All processes of the mesh call it, each with the arguments of its own call of the model. Every process
    runs the model, and a copy without its rules on the whole batch, in which each mesh has this process
    alone; the copy takes the memory of the whole model and of its gradients. If they differ, both run once
    more, and the error names the first wrong output of a module with rules. The model stays as it is:
    `.grad`, buffers, and the state of random numbers are as before.

    batch: a mapping of keyword arguments, a tuple, or one argument. A tensor that arrives sharded is gathered
    by the rule for the input of the model; any other has to be the same on all processes.
    loss: function of the model's result that returns the whole loss: on blocks it ends in a sum or a mean
    over the axes that shard them, by `redistribute`. Default: the result's `.loss`, or the scalar result.
    tol: tolerance relative to the largest value of an array; None goes by dtype.
    original: the model as it was before changes beside its rules, as to count its own heads. Its values do
    not matter, and may be on the meta device.
    Raises XshardError if random numbers are drawn, as for dropout; ReplicaError for a batch that differs.

    >>> import torch, torch_bridge as xt
    >>> from xshard import Mesh
    >>> def trained():
    ...     mesh, model = Mesh(dp=2), torch.nn.Linear(2, 1)
    ...     torch.nn.init.ones_(model.weight), torch.nn.init.ones_(model.bias)
    ...     xt.parallelize(model, {"**": "..."}, {"": "b i -> b/dp i"}, mesh)
    ...     x = torch.arange(8.0).view(4, 2)
    ...     xt.verify(
    ...         model, x, loss=lambda y: xt.redistribute(y.mean(), "() | mean(dp) -> ()", mesh)
    ...     )
    ...     try:
    ...         xt.verify(
    ...             model, x, loss=lambda y: xt.redistribute(y.mean(), "() | sum(dp) -> ()", mesh)
    ...         )
    ...     except AssertionError as error:
    ...         return str(error).splitlines()[0]
    >>> xt.testing.run_ranks(2, trained)[0]
    '3 of 3 comparisons differ'
    """
    parallel = parallel_of(model)
    if parallel.unsummed or not parallel.gradients.syncs:
        raise XshardError("gradients are each process's share", hint="call it outside of no_sync")
    arguments = batch if isinstance(batch, Mapping | tuple | list) else (batch,)
    call = dict(arguments if isinstance(arguments, Mapping) else enumerate(arguments))
    whole = _whole(call, parallel)
    sources = (original, parallel.original, getattr(model, "_orig_mod", model))
    source = next(module for module in sources if module is not None)

    def run(watch: Watch) -> tuple[list[Wanted], list[Tensor]]:
        wanted = _on_one_device(source, parallel, whole, loss, watch)
        with _unchanged(model, parallel), _same_random_numbers(parallel):
            with watch(model):
                value = _run(model, call, loss, parallel).detach()
            return wanted, [value, *(_gradient(each.tensor) for each in _with_gradients(parallel))]

    _compare(*run(nullcontext), parallel, tol, run)


def _whole(call: Call, parallel: ParallelModel) -> Call:
    """The arguments of the call on one device."""
    whole = dict(call)
    context = parallel.context
    arrivals = parallel.arrivals(call)
    blocks = list[tuple[str, Tensor, Sharding]]()
    for key, x in call.items():
        if isinstance(x, Tensor):
            layout, shape = arrivals.get(key, (Layout("..."), None))
            layout = layout.resolved(x.ndim)
            name = f"argument {key!r} of the batch"
            with located(name):
                whole[key] = x = context.moved(x, layout, unsharded(layout), shape)
            blocks.append((name, x, Sharding(unsharded(layout), context.axes, tuple(x.shape))))
    context.compare(blocks)
    return whole


def _run(model: Module, call: Call, loss: Loss, parallel: ParallelModel | None = None) -> Tensor:
    """The loss, after its backward pass."""
    with torch.enable_grad():
        named = {key: x for key, x in call.items() if isinstance(key, str)}
        result: Any = model(*(x for key, x in call.items() if key not in named), **named)
        own = result if isinstance(result, Tensor) else getattr(result, "loss", None)
        try:
            value: Any = own if loss is None else loss(result)
        except Exception as error:
            if parallel and parallel.hooks:
                title = "in loss=, after the last parallel module"
                error.add_note(described(title, parallel, [*parallel.hooks][-1]))
            raise
    if not isinstance(value, Tensor) or value.ndim:
        what = (
            f"shape {tuple(value.shape)}"
            if isinstance(value, Tensor)
            else f"a {type(value).__name__}"
        )
        raise ShapeError(f"the loss is a scalar tensor, not {what}", hint="loss=lambda result: ...")
    value.backward()
    return value


def _on_one_device(
    source: Module, parallel: ParallelModel, call: Call, loss: Loss, watch: Watch
) -> list[Wanted]:
    """The loss of a copy on one device, and this process's block of each of its gradients."""
    context = parallel.context
    copied, wholes = _copied(source, parallel)
    with alone(), _eager(), watch(copied), _same_random_numbers(parallel) as drawn:
        try:
            value = _run(copied, call, loss).detach()
        except Exception as error:
            note = "in the copy on one device; original= is the model before it was changed beside its rules"
            error.add_note(note)
            raise
        if drawn():
            what = "the model draws random numbers, which are others for blocks than for the whole"
            raise XshardError(what, hint="model.eval(), or a dropout of 0")
    wanted = [
        Wanted(
            "output", "loss", Sharding(Layout("()"), context.axes, ()), value, value.abs().item()
        )
    ]
    for each in _with_gradients(parallel):
        whole = wholes.pop(each.name)
        gradient = _gradient(whole)
        largest = gradient.abs().max().item() if gradient.numel() else 0.0
        wanted.append(
            Wanted("gradient", each.name, each.sharding, each.cut(gradient, context), largest)
        )
        whole.grad = None
    return wanted


def _eager() -> AbstractContextManager[Any]:
    return (
        torch.compiler.set_stance("force_eager")
        if "torch._dynamo" in sys.modules
        else nullcontext()
    )


def _with_gradients(parallel: ParallelModel) -> list[Any]:
    return [each for each in parallel.parameters if each.tensor.requires_grad]


def _gradient(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


def _copied(source: Module, parallel: ParallelModel) -> tuple[Module, dict[str, Tensor]]:
    """A copy without rules, and its tensors by name; replicated parameters share the model's memory."""
    context = parallel.context
    own = {**dict(source.named_parameters(remove_duplicate=False)), **dict(source.named_buffers())}
    wholes: dict[str, Tensor] = {}
    ours = (parallel, *parallel.hooks.values())
    memo: dict[int, Any] = {id(x): x for x in ours}
    for each in parallel.parameters:
        block = each.tensor
        whole = each.gathered(context) if each.sharding.layout.axes else block.detach()
        whole = (
            nn.Parameter(whole, block.requires_grad)
            if isinstance(block, nn.Parameter)
            else whole.clone()
        )
        wholes[each.name] = whole
        if missing := [name for name in each.names if name not in own]:
            raise XshardError(f"{missing[0]} is in the parallel model, and missing in original=")
        memo |= {id(own[name]): whole for name in each.names}
    copied: Module = copy.deepcopy(source, memo)
    copied.__dict__.pop(ATTRIBUTE, None)
    for owner, attribute, count in parallel.counts:
        if id(owner) in memo:  # not in original=
            setattr(memo[id(owner)], attribute, count)
    for module in copied.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in [*hooks.items()]:
                bound = getattr(hook, "__self__", None)
                function = getattr(hook, "func", None)
                if function is check_apart or any(bound is x for x in ours):
                    del hooks[key]
    return copied, wholes


@contextmanager
def _unchanged(model: Module, parallel: ParallelModel) -> Iterator[None]:
    """Gradients are None inside, and as before afterwards; so are buffers."""
    gradients = [(each.tensor, each.tensor.grad) for each in _with_gradients(parallel)]
    every = (
        (own, name, x) for own in (m._buffers for m in model.modules()) for name, x in own.items()
    )
    buffers = [(own, name, x, x.clone()) for own, name, x in every if x is not None]
    compare = parallel.gradients.after_first
    parallel.gradients.after_first = None
    for x, _ in gradients:
        x.grad = None
    try:
        yield
    finally:
        parallel.gradients.after_first = compare
        for x, gradient in gradients:
            x.grad = gradient
        for own, name, x, before in buffers:
            own[name] = x.copy_(before)


@contextmanager
def _same_random_numbers(parallel: ParallelModel) -> Iterator[Callable[[], bool]]:
    """Afterwards random numbers go on as before. Yields whether some have been drawn."""
    devices = sorted(
        {each.tensor.get_device() for each in parallel.parameters if each.tensor.is_cuda}
    )

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]

    with torch.random.fork_rng(devices):
        before = states()
        yield lambda: not all(map(torch.equal, before, states()))


def largest_of(wanted: Sequence[Wanted]) -> dict[str, float]:
    """The largest value of each kind."""
    return {
        kind: max(w.largest for w in wanted if w.kind == kind) for kind in {w.kind for w in wanted}
    }


def differing(
    wanted: Sequence[Wanted], blocks: Sequence[Tensor], tol: float, context: ParallelContext
) -> list[int]:
    """1 for blocks that differ on some process, 2 if their shapes do, else 0."""
    flags = [2.0] * len(blocks)
    most = largest_of(wanted)
    for i, (w, x) in enumerate(zip(wanted, blocks, strict=True)):
        if x.shape == w.block.shape:
            slack = tol * max(w.largest, most[w.kind] / 100)
            flags[i] = float(not torch.isclose(x.double(), w.block.double(), tol, slack).all())
    text = f"n | max({','.join(context.axes.axes)}) -> n"
    flags = redistribute(torch.tensor(flags, device=blocks[0].device), text, context.mesh).tolist()
    return [int(n) for n in flags]


@torch.no_grad()
def _compare(
    wanted: list[Wanted], blocks: list[Tensor], parallel: ParallelModel, tol: float | None, run: Run
) -> None:
    """Raise EquivalenceError, on all processes, if blocks of some process differ. run: both runs again."""
    context = parallel.context
    most = largest_of(wanted)
    if tol is None:
        tol = tolerances.rounding(dtypes.name_of(x.dtype) for x in blocks)
    numbers = [i for i, differ in enumerate(differing(wanted, blocks, tol, context)) if differ]
    if not numbers:
        return
    from torch_bridge.models.first_wrong import first_wrong, mismatch_of, watching  # slow: the kit
    from xshard.testing.diagnosis.causes import Cause
    from xshard.testing.mismatch import EquivalenceError

    place = text = ""
    if parallel.hooks:
        runs: list[Any] = []
        with _eager(), torch.enable_grad():
            run(partial(watching, hooks=parallel.hooks, runs=runs))
        place, text = first_wrong(runs[0], runs[1], parallel, tol)
        if not place:
            name = wanted[
                numbers[-1] if numbers[0] else 0
            ].name  # the backward pass ends with the first
            of = "gradient of " if numbers[0] else ""
            place = text = f"the {of}{name}, while outputs of modules with rules are right"
            if inner := [path for path in parallel.hooks if name.startswith(path and f"{path}.")]:
                text = described(place, parallel, inner[-1])
    cause = Cause("module", f"wrong already: {place}") if place else None
    wrong = list[Any]()
    for i in numbers:
        each = mismatch_of(wanted[i], blocks[i], most[wanted[i].kind], tol, context)
        wrong.append(replace(each, cause=each.cause or cause, first="" if wrong else text))
    raise EquivalenceError(wrong, len(wanted))
