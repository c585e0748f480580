"""`verify`: the loss and every gradient of a parallel model, compared with a copy on one device.

Each process runs the copy on the whole batch, and cuts its block out of each whole gradient: these are the
expected arrays. Where one differs, both models run again, and `first_wrong` records the inputs and outputs
of modules.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Module

from torch_bridge.mesh.process_mesh import on_this_process_alone
from torch_bridge.models.names import is_inside
from torch_bridge.models.notes import described
from torch_bridge.models.own_attention import check_attention
from torch_bridge.models.parallel import ATTRIBUTE, ParallelModel, parallel_of
from torch_bridge.models.parameters import ParallelContext, ShardedParameter, TensorSlot, unsharded
from torch_bridge.models.uses import check_input_gradient
from torch_bridge.versions.modules import buffers_of, forward_hooks_of, uncompiled
from torch_bridge.versions.pytree import tree_leaves
from xshard import Layout, Sharding, XshardError, dtypes, tolerances
from xshard.errors import ShapeError, UnverifiedWarning, api_boundary, located
from xshard.rules import listed_names
from xshard.signatures import NonNegative

if TYPE_CHECKING:
    from torch_bridge.models.first_wrong import WrongTensor

Call = dict[Any, Any]  # arguments by position or name
Loss = Callable[[Any], Tensor] | None
# A context to run a model in, which may record.
Watcher = Callable[[Module], AbstractContextManager[Any]]


class Expected(NamedTuple):
    """An array as one device computes it.

    Attributes:
        kind: "output" or "gradient".
        name: For errors.
        sharding: How the parallel model has it.
        block: This process's block, cut out of the whole array.
        largest: The largest absolute value of the whole array.
    """

    kind: str
    name: str
    sharding: Sharding
    block: Tensor
    largest: float


class ComparedArray(NamedTuple):
    """An array as one device computes it, and this process's block as the parallel model computes it."""

    expected: Expected
    block: Tensor


# Runs the copy on one device, then the parallel model, each in the context of a watcher. Returns the loss,
# and then the gradients in the order of parameters.
RunBoth = Callable[[Watcher], list[ComparedArray]]


@api_boundary
def verify(
    model: Module,
    batch: Any,
    *,
    loss: Loss = None,
    tol: NonNegative | None = None,
    original: Module | None = None,
) -> None:
    """Check that loss and gradients of a parallel model are those of one device.

        xt.verify(model, batch)     # None, or EquivalenceError on all processes

    All processes of the mesh call it, each with the arguments of its own call of the model. Every process
    runs the model, and a copy without its rules on the whole batch, in which each mesh has this process
    alone. The copy takes the memory of the whole model and of its gradients. If they differ, both run once
    more, and the error names the first wrong output of a module with rules. The model stays as it is:
    `.grad`, buffers, and the state of random numbers are as before. A warning names parameters whose
    gradients are all zero, as behind a layer that begins at zero: nothing of them was compared.

    Args:
        model: A parallel model.
        batch: A mapping of keyword arguments, a tuple, or one argument. A tensor that arrives sharded is
            gathered by the rule for the input of the model; any other has to be the same on all processes.
        loss: A function of the model's result that returns the whole loss: on blocks it ends in a sum or a
            mean over the axes that shard them, by `redistribute`. Default: the result's `.loss`, or the
            scalar result.
        tol: Tolerance relative to the largest value of an array; None goes by dtype.
        original: The unmodified model, if you edited attributes, such as `num_heads`, before `parallelize`.
            Its values do not matter, and may be on the meta device.

    Raises:
        EquivalenceError: On all processes: the loss or a gradient differs.
        XshardError: Random numbers are drawn, as for dropout, or the call is inside `no_sync`.
        ReplicaError: A part of the batch differs between processes.

    Examples:
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
        ...             model,
        ...             x,
        ...             loss=lambda y: xt.redistribute(y.mean(), "() | sum(dp) -> ()", mesh),
        ...         )
        ...     except AssertionError as error:
        ...         return str(error).splitlines()[0]
        >>> xt.testing.run_ranks(2, trained)[0]
        '3 of 3 comparisons differ'
    """
    parallel = parallel_of(model)
    if parallel.has_unsummed_gradients or not parallel.gradients.syncs:
        raise XshardError("gradients are each process's share", hint="call it outside of no_sync")
    call = _call_of(batch)
    whole_call = _gather_call(call, parallel)
    source = _source_of(model, parallel, original)

    def run_both(watcher: Watcher) -> list[ComparedArray]:
        expected = _on_one_device(source, parallel, whole_call, loss, watcher)
        # After the copy, whose memory is free then; both begin with the same random numbers.
        with _restored_afterwards(model, parallel), _same_random_numbers(parallel):
            with watcher(model):
                value = _run(model, call, loss, parallel).detach()
            gradients = [_gradient(parameter.tensor) for parameter in parallel.trained_parameters]
        blocks = [value, *gradients]
        return [ComparedArray(*arrays) for arrays in zip(expected, blocks, strict=True)]

    compared = run_both(nullcontext)
    _compare(compared, parallel, tol, run_both)
    _warn_of_zeros(compared, parallel)
    parallel.is_verified = True


def _warn_of_zeros(compared: Sequence[ComparedArray], parallel: ParallelModel) -> None:
    """Warn of gradients that are zero on one device: a wrong rule may have made the same zeros.

    Layers that begin at zero, as the second of LoRA's matrices, hide what is before them.
    """
    expected = [array.expected for array in compared]
    names = [x.name for x in expected if x.kind == "gradient" and x.largest == 0]
    if names and parallel.context.processes.device == 0:
        text = f"verify has seen zeros alone as gradients of {listed_names(names)}: "
        text += "a wrong rule for them, or around them, would not show.\n"
        text += "If parameters begin at zero, verify after some steps, or with other values in them"
        warnings.warn(text, UnverifiedWarning, stacklevel=2)


def _call_of(batch: Any) -> Call:
    """Return the arguments of a call by position or name."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, tuple | list):
        return dict(enumerate(batch))
    return {0: batch}


def _source_of(model: Module, parallel: ParallelModel, original: Module | None) -> Module:
    """Return the module to copy: what you pass, what the parallel model was made from, or itself."""
    if original is not None:
        return original
    if parallel.original is not None:
        return parallel.original
    return uncompiled(model)


def _gather_call(call: Call, parallel: ParallelModel) -> Call:
    """Return the whole arguments of a call, for the model on one device.

    Arguments that arrive sharded by a rule are gathered: [b/2, i] on each process of dp=2 -> [b, i].
    Others are whole already. All processes call it. Raises ReplicaError if their whole arguments
    differ.
    """
    context = parallel.context
    arrivals = parallel.arrivals(call)
    whole_call = dict(call)
    blocks = []
    for key, x in call.items():
        if not isinstance(x, Tensor):
            continue
        # A tensor without a rule is whole.
        layout, shape = arrivals.get(key, (Layout("..."), None))
        layout = layout.resolved(x.ndim)
        whole_layout = unsharded(layout)
        name = f"argument {key!r} of the batch"
        with located(name):
            whole = context.redistribute(x, layout, whole_layout, shape)
        whole_call[key] = whole
        blocks.append((name, whole, Sharding(whole_layout, context.axes, tuple(whole.shape))))
    context.compare(blocks)
    return whole_call


def _run(model: Module, call: Call, loss: Loss, parallel: ParallelModel | None = None) -> Tensor:
    """Run a model forward and backward, and return the loss; gradients are added to `.grad`.

    Args:
        model: A parallel model, or the copy on one device.
        call: The arguments: those by position have numbers for keys.
        loss: A function of the model's result; None takes the loss that the result itself has.
        parallel: The state of a parallel model, for a note on an error in `loss`; None for the
            copy.

    Raises:
        ShapeError: The loss is no scalar.
    """
    args = []
    kwargs = {}
    for key, x in call.items():
        if isinstance(key, str):
            kwargs[key] = x
        else:
            args.append(x)
    with torch.enable_grad():
        result: Any = model(*args, **kwargs)
        try:
            value = _default_loss(result) if loss is None else loss(result)
        except Exception as error:
            if parallel is not None and parallel.hooks:
                title = "in loss=, after the last parallel module"
                last_path = list(parallel.hooks)[-1]
                error.add_note(described(title, parallel, last_path))
            raise
    if not isinstance(value, Tensor) or value.ndim:
        description = f"a {type(value).__name__}"
        if isinstance(value, Tensor):
            description = f"shape {tuple(value.shape)}"
        reason = f"the loss is a scalar tensor, not {description}"
        raise ShapeError(reason, hint="loss=lambda result: ...")
    value.backward()
    return value


def _default_loss(result: Any) -> Any:
    """Return the loss in a result, as of transformers, or the result that is one; None without any."""
    return result if isinstance(result, Tensor) else getattr(result, "loss", None)


def _on_one_device(
    source: Module, parallel: ParallelModel, call: Call, loss: Loss, watcher: Watcher
) -> list[Expected]:
    """Run a copy of the model with whole tensors on this process alone, for the expected arrays.

    Returns the loss, and this process's block of each gradient, cut out of the whole ones. `source`
    stays as it is, and the copy is dropped.

    Args:
        source: The module to copy.
        parallel: The state of the parallel model.
        call: The whole arguments.
        loss: A function of the result; None takes the loss that is in it.
        watcher: Makes the context in which the copy runs.

    Raises:
        XshardError: The model draws random numbers.
    """
    context = parallel.context
    model, whole_tensors = _copy_whole(source, parallel)
    _use_precision(model, whole_tensors, parallel)
    # Inside, a loss function that redistributes does so on a mesh of one process: it sends nothing.
    with (
        on_this_process_alone(),
        _eager(),
        watcher(model),
        _whole_in_place(parallel, whole_tensors),
        _same_random_numbers(parallel) as has_drawn,
    ):
        try:
            value = _run(model, call, loss).detach()
        except Exception as error:
            note = "in the copy on one device; original= is the model before it was changed beside its rules"
            error.add_note(note)
            raise
        if has_drawn():
            reason = (
                "the model draws random numbers, which are others for blocks than for the whole"
            )
            raise XshardError(reason, hint="model.eval(), or a dropout of 0")

    # The loss comes first in the list, so that an error about several arrays begins with it.
    scalar = Sharding(Layout("()"), context.axes, ())
    expected_loss = Expected(
        kind="output", name="loss", sharding=scalar, block=value, largest=value.abs().item()
    )
    return [expected_loss, *_cut_gradients(whole_tensors, parallel)]


@contextmanager
def _whole_in_place(parallel: ParallelModel, whole_tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Let the parallel model have the whole tensors of the copy: `loss` may read its parameters.

    Raises XshardError if `loss` has read a block, as one that it took before `verify`.
    """
    blocks = {parameter: parameter.tensor for parameter in parallel.parameters}
    gradients = {parameter: block.grad for parameter, block in blocks.items()}
    has_read_block = None
    # The copy has no rules that could be checked.
    check_penalties = parallel.gradients.before_pass
    check_of_first = parallel.gradients.after_first
    parallel.gradients.before_pass = None
    parallel.gradients.after_first = None
    for parameter, block in blocks.items():
        block.grad = None
        for slot in parameter.slots:
            slot.set_tensor(whole_tensors[parameter.name])
    try:
        yield
    finally:
        parallel.gradients.before_pass = check_penalties
        parallel.gradients.after_first = check_of_first
        for parameter, block in blocks.items():
            if block.grad is not None:
                has_read_block = parameter.name
            block.grad = gradients[parameter]
            for slot in parameter.slots:
                slot.set_tensor(block)
    if has_read_block is not None:
        reason = f"loss= has kept the block of {has_read_block}, which one device does not have"
        raise XshardError(reason, hint="read model.parameters() inside of loss=")


def _use_precision(model: Module, tensors: dict[str, Tensor], parallel: ParallelModel) -> None:
    """Let modules of the copy use parameters, take and return floats in the dtypes of `precision=`.

    Args:
        model: The copy.
        tensors: Its whole tensors by name, which get the gradients: modules use casts of them.
        parallel: The state of the parallel model.
    """
    for hooks in parallel.hooks.values():
        for gathered in hooks.parameters.parameters:
            with torch.enable_grad():
                used = tensors[gathered.parameter.name].to(gathered.dtypes().result)
            for slot in gathered.slots:
                module = model.get_submodule(parallel.names[slot.module])
                TensorSlot(module, slot.attribute).set_tensor(used)
        if hooks.precision is not None:
            module = model.get_submodule(hooks.name)
            module.register_forward_pre_hook(hooks.precision.before_forward, with_kwargs=True)
            module.register_forward_hook(hooks.precision.after_forward)


def _cut_gradients(tensors: dict[str, Tensor], parallel: ParallelModel) -> list[Expected]:
    """Cut this process's block out of each whole gradient, in the order of parameters.

    Under "o/tp i" on tp=2: a gradient [10, 6] -> its rows 0-4 or 5-9.

    Args:
        tensors: The whole tensors of the copy, by name. The dict is emptied on the way, so that
            each whole gradient is freed as soon as it is cut.
        parallel: The state of the parallel model.
    """
    expected = []
    for parameter in parallel.trained_parameters:
        whole = tensors.pop(parameter.name)
        gradient = _gradient(whole)
        block = parameter.block_of(gradient, parallel.context)
        largest = largest_value(gradient)
        expected.append(
            Expected(
                kind="gradient",
                name=parameter.name,
                sharding=parameter.sharding,
                block=block,
                largest=largest,
            )
        )
        whole.grad = None  # the copy of the model still has the parameter
    return expected


def _eager() -> AbstractContextManager[Any]:
    """Return a context in which compiled functions run as written, if anything has been compiled."""
    if "torch._dynamo" in sys.modules:
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


def _gradient(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


def largest_value(x: Tensor) -> float:
    """Return the largest absolute value; 0 of an empty tensor."""
    return x.abs().max().item() if x.numel() else 0.0


def _copy_whole(source: Module, parallel: ParallelModel) -> tuple[Module, dict[str, Tensor]]:
    """Copy a parallel model as it would be on one device; return it with its tensors by name.

    The copy has whole tensors, whole counts (such as a number of heads), and none of our hooks.
    Sharded tensors are gathered, so that all processes call it. Replicated parameters are not
    copied: they share the model's memory.

    Args:
        source: The parallel model itself, or the model from which it was made.
        parallel: The state of the parallel model.
    """
    source_tensors: dict[str, Tensor] = dict(source.named_parameters(remove_duplicate=False))
    source_tensors.update(source.named_buffers(remove_duplicate=False))
    # `deepcopy` looks objects up here by their ids before it copies them: the state of the parallel
    # model is not copied, and whole tensors take the place of blocks.
    memo = _states_by_id(parallel)
    tensors = {}
    for parameter in parallel.parameters:
        whole = _whole_tensor(parameter, parallel.context)
        tensors[parameter.name] = whole
        for name in parameter.names:
            if name not in source_tensors:
                raise XshardError(f"{name} is in the parallel model, and missing in original=")
            memo[id(source_tensors[name])] = whole

    for module in source.modules():
        for x in tree_leaves(vars(module)):
            if isinstance(x, Tensor) and x.grad_fn is not None:
                # An attribute that a forward pass has set, as an auxiliary loss: `deepcopy` refuses it.
                memo[id(x)] = x.detach()
    model = copy.deepcopy(source, memo)  # notes in `memo` what became of each module
    model.__dict__.pop(ATTRIBUTE, None)
    for count in parallel.counts:
        # No copy of this module: the source is original=, whose attribute is whole already.
        if id(count.module) in memo:
            setattr(memo[id(count.module)], count.attribute, count.whole)
    _remove_hooks(model, parallel)
    return model, tensors


def _states_by_id(parallel: ParallelModel) -> dict[int, Any]:
    """Return the objects whose methods are the hooks of a parallel model, by their ids."""
    states = (parallel, parallel.penalties, *parallel.hooks.values())
    return {id(state): state for state in states}


def _whole_tensor(parameter: ShardedParameter, context: ParallelContext) -> Tensor:
    """Gather one tensor of the parallel model, or share a replicated one."""
    block = parameter.tensor
    whole = parameter.gathered(context)
    if isinstance(block, nn.Parameter):
        return nn.Parameter(whole, block.requires_grad)
    return whole.clone()  # a buffer is written to


def _remove_hooks(model: Module, parallel: ParallelModel) -> None:
    """Remove the hooks of rules from the copy of a parallel model."""
    states = _states_by_id(parallel)
    for module in model.modules():
        for hooks in forward_hooks_of(module):
            for key, hook in list(hooks.items()):
                is_method = id(getattr(hook, "__self__", None)) in states
                is_check = getattr(hook, "func", None) in (check_input_gradient, check_attention)
                if is_method or is_check:
                    del hooks[key]


@contextmanager
def _restored_afterwards(model: Module, parallel: ParallelModel) -> Iterator[None]:
    """Let a `with` block train the model; put back gradients and buffers as they were.

    Inside, all gradients begin as None, and the check of the model's first backward pass (of
    `parallelize`) is off: a pass inside does not count as the first.
    """
    gradients = {
        parameter.tensor: parameter.tensor.grad for parameter in parallel.trained_parameters
    }
    buffers = []
    for module in model.modules():
        for name, x in buffers_of(module).items():
            if x is not None:
                buffers.append((TensorSlot(module, name), x, x.clone()))
    check_of_first = parallel.gradients.after_first  # None once it is done
    parallel.gradients.after_first = None
    for x in gradients:
        x.grad = None
    try:
        yield
    finally:
        parallel.gradients.after_first = check_of_first
        for x, gradient in gradients.items():
            x.grad = gradient
        for slot, x, values in buffers:
            # The module may have replaced the buffer, or have written to it.
            slot.set_tensor(x.copy_(values))


@contextmanager
def _same_random_numbers(parallel: ParallelModel) -> Iterator[Callable[[], bool]]:
    """Restore the state of random numbers afterwards; yield a function that tells if some were drawn."""
    tensors = [parameter.tensor for parameter in parallel.parameters]
    devices = sorted({x.get_device() for x in tensors if x.is_cuda})

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]

    # The call of the model draws on devices that have parameters; others are left alone.
    with torch.random.fork_rng(devices):
        states_before = states()
        yield lambda: not all(map(torch.equal, states_before, states()))


def _largest_by_kind(compared: Sequence[ComparedArray]) -> dict[str, float]:
    """Return the largest value of all outputs, and that of all gradients."""
    largest: dict[str, float] = {}
    for expected, _ in compared:
        largest[expected.kind] = max(expected.largest, largest.get(expected.kind, 0.0))
    return largest


EQUAL = 0
VALUES_DIFFER = 1
SHAPES_DIFFER = 2


def compare_on_all(
    compared: Sequence[ComparedArray], tol: float, context: ParallelContext
) -> list[int]:
    """Compare blocks of arrays with the expected blocks, on all processes.

    Returns one flag per array: EQUAL, VALUES_DIFFER or SHAPES_DIFFER, the worst on any process. All
    processes call it, with blocks of the same arrays.

    Args:
        compared: The arrays.
        tol: The tolerance, relative to the largest value of an array.
        context: The mesh and options.
    """
    largest_by_kind = _largest_by_kind(compared)
    flags = []
    for expected, block in compared:
        # An array near zero is a sum in which large terms cancel, with the rounding errors of
        # these. So a difference is allowed of `tol` times the array's own largest value, or times
        # 1/100 of the largest value of all arrays of its kind (gradients, or outputs), whichever is
        # more.
        largest = max(expected.largest, largest_by_kind[expected.kind] / 100)
        flag = EQUAL
        if block.shape != expected.block.shape:
            flag = SHAPES_DIFFER
        elif not torch.allclose(block.double(), expected.block.double(), tol, tol * largest):
            flag = VALUES_DIFFER
        flags.append(float(flag))
    # The worst flag, so that all processes raise, and about the same arrays.
    local_flags = torch.tensor(flags, device=compared[0].block.device)
    worst_flags = context.all_reduce(local_flags, "max")
    return [int(flag) for flag in worst_flags.tolist()]


@torch.no_grad()
def _compare(
    compared: list[ComparedArray], parallel: ParallelModel, tol: float | None, run_both: RunBoth
) -> None:
    """Raise EquivalenceError on all processes if a block differs on any of them from one device's.

    The error names each wrong array, and the first wrong module, which is found by running both
    models again.

    Args:
        compared: The loss and the gradients.
        parallel: The state of the parallel model.
        tol: The tolerance; None goes by the lowest precision among the dtypes.
        run_both: Runs both models again, to find the first module that is wrong.
    """
    if tol is None:
        in_use = [block.dtype for _, block in compared]
        for hooks in parallel.hooks.values():
            for gathered in hooks.parameters.parameters:
                in_use += gathered.dtypes()
        tol = tolerances.rounding(map(dtypes.name_of, in_use))
    flags = compare_on_all(compared, tol, parallel.context)
    wrong_indices = [i for i, flag in enumerate(flags) if flag != EQUAL]
    if not wrong_indices:
        return
    first_wrong = None
    if parallel.hooks:
        first_wrong = _first_wrong(compared, wrong_indices, parallel, tol, run_both)
    raise _difference(compared, wrong_indices, first_wrong, tol, parallel.context)


def _difference(
    compared: Sequence[ComparedArray],
    wrong_indices: Sequence[int],
    first_wrong: WrongTensor | None,
    tol: float,
    context: ParallelContext,
) -> Exception:
    """Make the EquivalenceError that reports all wrong arrays. All processes call it.

    Args:
        compared: The loss and the gradients.
        wrong_indices: The indices of those that differ.
        first_wrong: The first wrong input or output of a module, or None. An array whose own values tell
            no cause is explained by it.
        tol: The tolerance.
        context: The mesh and options.
    """
    # Imported now, because they load `xshard.testing`, which is slow.
    from torch_bridge.models.first_wrong import mismatch_of
    from xshard.testing.diagnosis.causes import Cause
    from xshard.testing.mismatch import EquivalenceError

    largest_by_kind = _largest_by_kind(compared)
    mismatches = []
    for expected, block in [compared[i] for i in wrong_indices]:
        mismatch = mismatch_of(expected, block, largest_by_kind[expected.kind], tol, context)
        if first_wrong is not None and mismatch.cause is None:
            cause = first_wrong.cause
            if cause is None:
                cause = Cause("module", f"wrong already: {first_wrong.location}")
            mismatch = replace(mismatch, cause=cause)
        mismatches.append(mismatch)
    if first_wrong is not None:  # the long text about the module goes with the first array only
        mismatches[0] = replace(mismatches[0], first=first_wrong.text)
    return EquivalenceError(mismatches, len(compared))


def _first_wrong(
    compared: Sequence[ComparedArray],
    wrong_indices: Sequence[int],
    parallel: ParallelModel,
    tol: float,
    run_both: RunBoth,
) -> WrongTensor:
    """Run both models again, to find where the parallel one goes wrong first.

    That is the first input or output of a module that differs. If all of these are right, it is the
    loss, or else the wrong gradient that the backward pass computes first.

    Args:
        compared: The loss and then the gradients, in the order of parameters.
        wrong_indices: The indices of those that differ, ascending; 0 is the loss.
        parallel: The state of the parallel model.
        tol: The tolerance.
        run_both: Runs both models.
    """
    from torch_bridge.models.first_wrong import (
        WrongTensor,
        cause_in_loss,
        first_wrong,
        recording_modules,
    )

    # Each model appends its recording: first the copy on one device, then the parallel one.
    recordings: list[Any] = []
    with _eager(), torch.enable_grad():
        run_both(partial(recording_modules, hooks=parallel.hooks, recordings=recordings))
    one_device, parallel_recording = recordings
    wrong_tensor = first_wrong(one_device, parallel_recording, parallel, tol)
    if wrong_tensor is not None:
        return wrong_tensor

    # A backward pass begins with the last modules, so that the last wrong gradient came first.
    name = compared[wrong_indices[-1]].expected.name
    title = f"gradient of {name}"
    if wrong_indices[0] == 0:  # the loss: it is made before any gradient
        name = title = compared[0].expected.name
    location = f"the {title}, while outputs of modules with rules are right"
    paths_around = [path for path in parallel.hooks if is_inside(name, path)]  # outer ones first
    text = described(location, parallel, paths_around[-1]) if paths_around else location
    cause = cause_in_loss(one_device, parallel_recording, parallel, tol)
    return WrongTensor(location, text, cause)
