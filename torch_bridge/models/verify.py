"""`verify`: a parallel model means what it means on one device, in its loss and in every gradient.

Decides what runs on one device, a copy without rules, and what of both is compared. What a mismatch tells
is decided in `xshard.testing`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_bridge.mesh.process_mesh import alone
from torch_bridge.models.parallel import ATTRIBUTE, Parallel, parallel_of
from torch_bridge.models.parallelize import check_apart
from torch_bridge.models.parameters import uncut
from torch_bridge.redistribution import redistribute
from torch_bridge.testing.arrays import array_of
from xshard import Layout, Sharding, XshardError, dtypes
from xshard.errors import ShapeError, with_path

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Compared(NamedTuple):
    """This process's block of the loss, or of a gradient. largest: of the whole array that is wanted."""

    kind: str
    name: str
    sharding: Sharding
    want: Tensor
    largest: float


def verify(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    tol: float | None = None,
    original: nn.Module | None = None,
) -> None:
    """Raise EquivalenceError, on all processes, unless loss and gradients are those of one device.

    All processes of the mesh call it, with what each calls the model with. Every process then runs a copy of
    the model without its rules, on the whole batch, in which each mesh has this process alone; and the model.
    The copy takes the memory of the whole model, and of its gradients, on each process.
    Nothing of the model changes: `.grad`, buffers, and the state of random numbers are as before.

    batch: a mapping of keyword arguments, a tuple, or one argument. A tensor that arrives cut is gathered by
    the rule for the input of the model; any other has to be the same on all processes.
    loss: of what the model returns, the whole one: on blocks it ends in a sum or a mean over what cuts
    them, by `redistribute`. By default the result's `.loss`, or the result itself, a scalar.
    tol: relative to the largest value of an array; None goes by dtype.
    original: the model as it was before, where it has been changed beside its rules, as by counting heads
    of its own. Its values do not matter, and may be on the meta device.

    Raises XshardError where random numbers are drawn, as for dropout; ReplicaError for a batch that differs.

    >>> import torch, torch_bridge as xt
    >>> from xshard import Mesh
    >>> def trained():
    ...     mesh, model = Mesh(dp=2), torch.nn.Linear(2, 1)
    ...     torch.nn.init.ones_(model.weight), torch.nn.init.ones_(model.bias)
    ...     xt.parallelize(model, mesh, {"**": "..."}, {"": "b i -> b/dp i"})
    ...     x = torch.arange(8.0).view(4, 2)
    ...     xt.verify(model, x, loss=lambda y: xt.redistribute(y.mean(), "() | mean(dp) -> ()", mesh))
    ...     try:
    ...         xt.verify(model, x, loss=lambda y: xt.redistribute(y.mean(), "() | sum(dp) -> ()", mesh))
    ...     except AssertionError as error:
    ...         return str(error).splitlines()[0]
    >>> xt.testing.run_ranks(2, trained)[0]
    '3 of 3 comparisons differ'
    """
    parallel = parallel_of(model)
    if parallel.gradients.unsummed or not parallel.gradients.syncs:
        raise XshardError("gradients are each process's share", hint="call it outside of no_sync")
    call, loss = _call(batch), loss or _own_loss
    truth, wanted = _on_one_device(model, parallel, _whole(call, parallel), loss, original)
    with _unchanged(model, parallel), _same_random_numbers(parallel):
        found = [_run(model, call, loss).detach()]
        kept = _with_gradients(parallel)
        found += [torch.zeros_like(x) if x.grad is None else x.grad for x in (each.tensor for each in kept)]
    _compare([truth, *wanted], found, parallel, tol)


def _call(batch: Any) -> Call:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def _whole(call: Call, parallel: Parallel) -> Call:
    """What the model is called with on one device."""
    (args, kwargs), setting = call, parallel.setting
    layouts: dict[Any, Layout] = {}
    for unit in parallel.units:
        for placed in unit.inputs if not unit.name else ():
            layouts[unit.find(placed.place, args, kwargs)] = placed.rule.src
    found: dict[Any, Any] = {}
    for at, x in [*enumerate(args), *kwargs.items()]:
        found[at] = x
        if isinstance(x, Tensor):
            layout = layouts.get(at, Layout("...")).resolved(x.ndim)
            ends, name = (layout, uncut(layout)), f"argument {at!r} of the batch"
            try:
                whole = redistribute(x.detach(), ends, setting.mesh, profile=setting.profile)
            except XshardError as error:
                raise with_path(error, name) from error.__cause__
            setting.compare(whole, Sharding(ends[1], setting.axes, tuple(whole.shape)), name)
            found[at] = whole
    return tuple(found[i] for i in range(len(args))), {name: found[name] for name in kwargs}


def _own_loss(result: Any) -> Any:
    return result if isinstance(result, Tensor) else getattr(result, "loss", None)


def _run(model: nn.Module, call: Call, loss: Callable[[Any], Tensor]) -> Tensor:
    """The loss, after its backward pass."""
    with torch.enable_grad():
        value = loss(model(*call[0], **call[1]))
    if not isinstance(value, Tensor) or value.ndim:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ShapeError(f"the loss is a scalar tensor, not {found}", hint="loss=lambda result: ...")
    value.backward()
    return value


def _on_one_device(
    model: nn.Module,
    parallel: Parallel,
    call: Call,
    loss: Callable[[Any], Tensor],
    original: nn.Module | None,
) -> tuple[Compared, list[Compared]]:
    """The loss and the gradients that are wanted: of each gradient this process's block."""
    setting = parallel.setting
    copied, wholes = _copied(model, parallel, original)
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with alone(), eager, _same_random_numbers(parallel) as drawn:
        try:
            value = _run(copied, call, loss).detach()
        except Exception as error:
            error.add_note(
                "in the copy on one device; original= is the model before it was changed beside its rules"
            )
            raise
        if drawn():
            raise XshardError(
                "the model draws random numbers, which are others for blocks than for the whole",
                hint="model.eval(), or a dropout of 0",
            )
    truth = Compared("output", "loss", Sharding(Layout("()"), setting.axes, ()), value, value.abs().item())
    wanted = []
    for each in _with_gradients(parallel):
        whole = wholes.pop(each.name)
        gradient = torch.zeros_like(whole) if whole.grad is None else whole.grad
        largest = gradient.abs().max().item() if gradient.numel() else 0.0
        wanted.append(Compared("gradient", each.name, each.sharding, each.cut(gradient, setting), largest))
        whole.grad = None
    return truth, wanted


def _with_gradients(parallel: Parallel) -> list[Any]:
    return [each for each in parallel.kept if each.tensor.requires_grad]


def _copied(
    model: nn.Module, parallel: Parallel, original: nn.Module | None
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A copy without rules, and its parameters and buffers by name; what is not cut shares its memory."""
    setting, source = parallel.setting, getattr(model, "_orig_mod", model) if original is None else original
    own = {**dict(source.named_parameters(remove_duplicate=False)), **dict(source.named_buffers())}
    wholes: dict[str, Tensor] = {}
    memo: dict[int, Any] = {id(x): x for x in (parallel, *parallel.units)}
    for each in parallel.kept:
        x = whole = each.tensor.detach()
        if each.sharding.layout.axes:
            whole = setting.moved(x, each.sharding.layout, each.whole, each.sharding.shape)
        is_parameter = isinstance(each.tensor, nn.Parameter)
        wholes[each.name] = whole = (
            nn.Parameter(whole, each.tensor.requires_grad) if is_parameter else whole.clone()
        )
        for name in each.names:
            if name not in own:
                raise XshardError(f"{name} is in the parallel model, and not in original=")
            memo[id(own[name])] = whole
    copied: nn.Module = copy.deepcopy(source, memo)
    copied.__dict__.pop(ATTRIBUTE, None)
    for module in copied.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in [*hooks.items()]:
                owner, function = getattr(hook, "__self__", None), getattr(hook, "func", None)
                if function is check_apart or any(owner is x for x in (parallel, *parallel.units)):
                    del hooks[key]
    return copied, wholes


@contextmanager
def _unchanged(model: nn.Module, parallel: Parallel) -> Iterator[None]:
    """Gradients are None inside, and as before afterwards; so are buffers."""
    gradients = [(each.tensor, each.tensor.grad) for each in _with_gradients(parallel)]
    buffers = [
        (module._buffers, name, x, x.clone())
        for module in model.modules()
        for name, x in module._buffers.items()
        if x is not None
    ]
    compare, parallel.gradients.after_first = parallel.gradients.after_first, None
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
def _same_random_numbers(parallel: Parallel) -> Iterator[Callable[[], bool]]:
    """Afterwards random numbers go on as before. Yields whether some have been drawn."""
    devices = sorted({each.tensor.get_device() for each in parallel.kept if each.tensor.is_cuda})

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]

    with torch.random.fork_rng(devices):
        before = states()
        yield lambda: not all(map(torch.equal, before, states()))


@torch.no_grad()
def _compare(wanted: list[Compared], found: list[Tensor], parallel: Parallel, tol: float | None) -> None:
    """Raise EquivalenceError, on all processes, where blocks of some process differ."""
    from xshard.testing.mismatch import TOLERANCES, Subject, case_of, located  # slow: the kit
    from xshard.testing.report import EquivalenceError

    axes, processes = parallel.setting.axes, parallel.setting.processes
    if tol is None:
        tol = max(TOLERANCES[dtypes.name_of(x.dtype)] for x in found)
    most = {
        kind: max((w.largest for w in wanted if w.kind == kind), default=0.0)
        for kind in ("output", "gradient")
    }
    apart = [
        not torch.isclose(got.double(), w.want.double(), tol, tol * max(w.largest, most[w.kind] / 100)).all()
        for w, got in zip(wanted, found, strict=True)
    ]
    flags = torch.tensor(apart, dtype=torch.float32, device=found[0].device)
    flags = redistribute(flags, f"n | max({','.join(axes.axes)}) -> n", parallel.setting.mesh)
    wrong, group = [], processes.group(axes.axes)
    for i in flags.nonzero().flatten().tolist():
        w = wanted[i]
        answers: list[Any] = [None] * axes.n_devices
        own = [array_of(x.cpu().contiguous()) for x in (found[i], w.want)]
        dist.all_gather_object(answers, (processes.device, *own), group.process_group)
        got, want = zip(*(blocks for _, *blocks in sorted(answers, key=itemgetter(0))), strict=True)
        case = case_of(got, want, w.sharding, tol, most[w.kind], {})
        wrong.append(located(Subject(w.kind, w.name, "torch", axes, "one device"), case))
    if wrong:
        raise EquivalenceError(wrong, len(wanted))
