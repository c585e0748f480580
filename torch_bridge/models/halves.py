"""`halves`: a module computes its batch in parts, one while messages of another one travel.

A part is a slice of the batch (a microbatch) with the coroutine that computes it. This file splits arguments
and joins results; `autodiff.turns` says when a part lets others go on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from torch_bridge.autodiff.turns import Turns, current_part, let_others_compute, load_greenlet
from torch_bridge.mesh.desync import CallFacts, compare_ranks
from torch_bridge.models.hooks import ModuleHooks, passed_as
from torch_bridge.models.names import is_inside, is_part, title_of
from torch_bridge.models.parallel import ParallelModel, parallel_of
from torch_bridge.versions.functorch import has_functorch_transforms
from torch_bridge.versions.modules import forward_hooks_of, modules_by_name
from torch_bridge.versions.pytree import (
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
    tree_structure,
    tree_unflatten,
)
from xshard import XshardError
from xshard.errors import ShapeError, api_boundary, located
from xshard.notation.parser import ELLIPSIS
from xshard.signatures import Count, did_you_mean
from xshard.trees import leaf_name

Model = TypeVar("Model", bound=nn.Module)
Argument = str | int  # its name or position
BatchDims = Mapping[Argument, int | None]  # None: the argument has no such dim
Values = Mapping[Argument, Any]  # the arguments of a call, as they were passed

BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
INSTANCE_NORMS = nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d
# Types of values without rows of the batch: each part gets them as they are.
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


@api_boundary
def halves(
    model: Model, parts: Count = 2, *, module: str = "", dims: BatchDims | None = None
) -> Model:
    """Compute the batch of a parallel model in parts: one computes while another's activations travel.

        xt.halves(model)        # rows [b, ...] -> [b/2, ...] twice, in turn; the results are joined again

    Outputs and gradients are those of the whole batch. Each part runs the module's code in a coroutine of
    this thread, and lets the next one go on where it would wait: for moves of rules and of `redistribute`,
    and for rows of experts. The backward pass does the same. Parameters are gathered once for all parts, and
    their gradients are summed once.

    A part goes on by itself where it has changed what torch keeps for a thread: inside a checkpoint, a
    `no_grad` or an autocast of its own. A compiler sees the whole batch, and no parts. Dropout draws for each
    part in turn.

    Args:
        model: A model of `parallelize`.
        parts: How many; 1 is the whole batch again. They are as even as can be: 7 rows are 4 + 3.
        module: The name of the module inside that is computed in parts, as "model" where a loss follows it.
        dims: The dim of the batch in arguments without a rule, by name or position; None for an argument that
            all parts get as it is. In those with a rule it is the dim with the name of the first one.

    Returns:
        The model itself.

    Raises:
        XshardError: greenlet is not installed; there is no such module. In a forward pass: an argument may
            have rows of the batch or not; a result has none, as a loss has; batch statistics would be of a
            part.
        DesyncError: On all processes, if their calls differ.

    Examples:
        >>> import torch, torch_bridge as xt
        >>> from xshard import Mesh
        >>> def step():
        ...     model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
        ...     xt.parallelize(
        ...         model,
        ...         {"0.*": "o/tp ...", "1.weight": "o i/tp", "1.bias": "o -> o | sum(tp)"},
        ...         {"": "b i -> b i | copy(tp)"},
        ...         Mesh(tp=2),
        ...         outputs={"1": "b o | sum(tp) -> b o"},
        ...     )
        ...     whole = model(torch.ones(7, 4))
        ...     return torch.allclose(xt.halves(model)(torch.ones(7, 4)), whole)
        >>> xt.testing.run_ranks(2, step)
        [True, True]
    """
    parallel = parallel_of(model)
    prepared: list[BatchInParts] = []

    def facts() -> CallFacts:
        load_greenlet()
        prepared.append(_prepare(model, parallel, parts, module, dims))
        return CallFacts({"halves": str((parts, module, dims))}, peers=ranks)

    ranks = parallel.context.processes.ranks
    compare_ranks(ranks, "halves", facts)  # calls `facts` once
    (batch_in_parts,) = prepared
    for pause_module in batch_in_parts.pause_modules:
        if _pause not in forward_hooks_of(pause_module)[0].values():
            pause_module.register_forward_pre_hook(_pause)
    for name, hooks in parallel.hooks.items():
        if hooks in batch_in_parts.around or is_inside(name, module):
            hooks.batch_dim_in_parts = batch_in_parts.batch_name if parts > 1 else None
    vars(batch_in_parts.module).pop("forward", None)
    if parts > 1:
        vars(batch_in_parts.module)["forward"] = batch_in_parts
    elif batch_in_parts.whole_forward != batch_in_parts.module.forward:  # the user has replaced it
        vars(batch_in_parts.module)["forward"] = batch_in_parts.whole_forward
    return model


def _prepare(
    model: nn.Module, parallel: ParallelModel, parts: int, name: str, dims: BatchDims | None
) -> BatchInParts:
    """Check the arguments of `halves`; nothing changes."""
    modules = modules_by_name(model)
    if name not in modules:
        hint = f"{did_you_mean(name, modules)}names are as in named_modules()"
        raise XshardError(f"the model has no module {name!r}", hint=hint)
    module = modules[name]
    whole_forward = module.forward
    if isinstance(whole_forward, BatchInParts):
        whole_forward = whole_forward.whole_forward
    hooks_of_module = parallel.hooks.get(name)
    batch_in_parts = BatchInParts(
        name=name,
        module=module,
        whole_forward=whole_forward,
        n_parts=parts,
        hooks=hooks_of_module,
        around=[hooks for path, hooks in parallel.hooks.items() if is_part(name, path)],
        pause_modules=_pause_modules(modules, parallel, name),
        dims={} if dims is None else dims,
    )
    if not dims and (hooks_of_module is None or batch_in_parts.batch_name is None):
        reason = f"no rule says which dim of the input of {title_of(name)} is the batch"
        raise XshardError(reason, hint="dims={'x': 0} says it of the argument x")
    return batch_in_parts


def _pause_modules(
    modules: Mapping[str, nn.Module], parallel: ParallelModel, path: str
) -> list[nn.Module]:
    """Return the modules before which a part pauses, besides where it waits for messages.

    Each is a child in the middle of a module whose input and whose output both move, as by a gather and a
    reduction. At the pause another part awaits the reduction after such a module, and starts the gather
    before the next one. Without it only one of these two moves would hide behind this module.
    """
    pause_modules = []
    for name, hooks in parallel.hooks.items():
        inputs_move = any(rule.rule.moves for rule in hooks.inputs)
        outputs_move = any(rule.rule.moves for rule in hooks.outputs)
        if inputs_move and outputs_move and is_inside(name, path):
            middle = _middle_of(modules[name])
            if middle is not None:
                pause_modules.append(middle)
    return pause_modules


def _middle_of(module: nn.Module) -> nn.Module | None:
    """Return the child before which half of a module's parameters are used: of (up, down) it is down."""
    n_parameters = sum(x.numel() for x in module.parameters())
    middle = None
    smallest_imbalance = n_parameters
    n_before = 0
    for child in module.children():
        imbalance = abs(n_parameters - 2 * n_before)
        if imbalance < smallest_imbalance:
            smallest_imbalance = imbalance
            middle = child
        n_before += sum(x.numel() for x in child.parameters())
    return middle


def _pause(module: nn.Module, args: Any) -> None:
    """Let another part go on: a pre-forward hook."""
    let_others_compute()


class _PartCall(NamedTuple):
    """The arguments with which one part calls the module."""

    args: list[Any]
    kwargs: dict[str, Any]


@dataclass(eq=False, repr=False)
class BatchInParts:
    """The `forward` of a module that computes its batch in parts.

    Attributes:
        name: The module's; "" is the model.
        module: The module.
        whole_forward: Its `forward` of the whole batch.
        n_parts: How many parts.
        hooks: The module's, if it has rules.
        around: The hooks of the modules around it, the outermost first, and its own.
        pause_modules: Modules before which parts pause: see `_pause_modules`.
        dims: The dims of the batch in arguments without a rule.
    """

    name: str
    module: nn.Module
    whole_forward: Callable[..., Any]
    n_parts: int
    hooks: ModuleHooks | None
    around: Sequence[ModuleHooks]
    pause_modules: Sequence[nn.Module]
    dims: BatchDims

    @property
    def __signature__(self) -> inspect.Signature:
        """The arguments, by which trainers choose the columns of a data set."""
        return inspect.signature(self.whole_forward)

    @property
    def batch_name(self) -> str | None:
        """The name of the batch's dim: the first of the module's rule, or of the nearest one around it."""
        for hooks in reversed(self.around):
            if hooks.inputs:
                names = hooks.inputs[0].rule.dst.names
                return names[0] if names and names[0] != ELLIPSIS else None
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module: split the arguments, compute the parts in turn, and join their results."""
        must_see_whole_batch = torch.compiler.is_compiling() or has_functorch_transforms()
        if must_see_whole_batch or current_part() is not None:
            return self.whole_forward(*args, **kwargs)
        self._check_statistics()
        sizes, calls_of_parts = self._split_call(args, kwargs)
        # A part has the same lengths of dims as the batch, but for the batch's dim.
        known_dims = [hooks.known_in_part for hooks in self.around]

        def compute(call: _PartCall) -> Any:
            for hooks, known_dims_of_module in zip(self.around, known_dims, strict=True):
                hooks.begin_part(known_dims_of_module)
            return self.whole_forward(*call.args, **call.kwargs)

        # With pauses in the middle of modules, each part is half a module behind the one before.
        lag = 1 if self.pause_modules else 0
        turns = Turns([partial(compute, call) for call in calls_of_parts], lag=lag)
        results = turns.run(self)
        with located(f"result of {title_of(self.name)}"):
            return _join_results(results, sizes)

    def _split_call(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[int], list[_PartCall]]:
        """Split the arguments of a call; return the rows of each part, and its arguments."""
        values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        with located(f"input of {title_of(self.name)}"):
            dims = self._dims_of(values)
            sizes = self._sizes(_rows_of(values, dims))
            _check_others(values, dims, sum(sizes))
        # For each argument a list: the value for each part.
        split = {key: _split(value, dims.get(key), sizes) for key, value in values.items()}
        calls_of_parts = []
        for i in range(self.n_parts):
            part_args = [split[position][i] for position in range(len(args))]
            part_kwargs = {name: split[name][i] for name in kwargs}
            calls_of_parts.append(_PartCall(part_args, part_kwargs))
        return sizes, calls_of_parts

    def _check_statistics(self) -> None:
        """Raise XshardError for a norm that uses or keeps statistics of the batch: they would be a part's."""
        for name, norm in self.module.named_modules(prefix=self.name):
            reason = ""
            if isinstance(norm, BATCH_NORMS) and (norm.training or norm.running_mean is None):
                reason = f"{name} would normalise each part of the batch by its own statistics"
            if isinstance(norm, INSTANCE_NORMS) and norm.training and norm.track_running_stats:
                reason = f"{name} would average its statistics once for each part of the batch"
            if reason:
                raise XshardError(reason, hint="halves(model, module=...) of a module without it")

    def _dims_of(self, values: Values) -> dict[Argument, int | None]:
        """Return the dim of the batch in each argument that has a rule or an entry in `dims`."""
        arguments = list(inspect.signature(self.whole_forward).parameters) if self.dims else []
        dims = {passed_as(key, values, arguments): dim for key, dim in self.dims.items()}
        if self.hooks is None:
            return dims
        for rule in self.hooks.inputs:
            key = self.hooks.argument(rule.key, values)
            if key is not None and key not in dims:
                names = rule.rule.dst.resolved(values[key].ndim).names
                dims[key] = names.index(self.batch_name) if self.batch_name in names else None
        return dims

    def _sizes(self, rows: int) -> list[int]:
        """Return the rows of each part, as even as can be: 7 in 2 parts are 4, 3."""
        if rows < self.n_parts:
            hint = "halves(model, 1) computes the whole batch at once"
            raise ShapeError(f"a batch of {rows} in {self.n_parts} parts", hint=hint)
        return [len(rows_of_part) for rows_of_part in torch.arange(rows).tensor_split(self.n_parts)]


def _rows_of(values: Values, dims: BatchDims) -> int:
    """Count the rows of the batch. Raises ShapeError unless all arguments with a batch agree."""
    rows_by_title: dict[str, int] = {}
    for key, dim in dims.items():
        for x in tree_leaves(values.get(key)):
            if dim is None or not isinstance(x, Tensor):
                continue
            if not -x.ndim <= dim < x.ndim:
                reason = f"{_title(key)} of shape {tuple(x.shape)} has no dim {dim} for the batch"
                raise ShapeError(reason, hint="dims= gives the dim of the batch by argument")
            rows_by_title[_title(key)] = x.shape[dim]
    if not rows_by_title:
        raise ShapeError("no argument has rows of the batch", hint="dims={'x': 0} says which has")
    if len(set(rows_by_title.values())) > 1:
        texts = [f"{title} has {rows}" for title, rows in rows_by_title.items()]
        raise ShapeError("arguments have batches of unlike lengths", hint=", ".join(texts))
    return next(iter(rows_by_title.values()))


def _check_others(values: Values, dims: BatchDims, rows: int) -> None:
    """Raise XshardError for an argument that may have rows of the batch, where nothing says so."""
    for key, value in values.items():
        if key in dims:
            continue
        for x in tree_leaves(value):
            reason = f"{_title(key)} is a {type(x).__name__}, which may have rows of the batch"
            may_have_rows = not isinstance(x, _PLAIN)
            if isinstance(x, Tensor):
                shape = tuple(x.shape)
                reason = f"{_title(key)} of shape {shape} has no rule, with a batch of {rows}"
                may_have_rows = rows in shape
            if not may_have_rows:
                continue
            hint = (
                f"dims={{{key!r}: 0}} splits it, {{{key!r}: None}} gives it to each part as it is"
            )
            raise XshardError(reason, hint=hint)


def _title(key: Argument) -> str:
    return f"argument {key!r}"


def _split(value: Any, dim: int | None, sizes: Sequence[int]) -> list[Any]:
    """Split an argument -> what each part gets: rows of every tensor in a tree, [5, 3] -> [3, 3], [2, 3]."""
    if dim is None:
        return [value] * len(sizes)
    split = []
    start = 0
    for size in sizes:
        rows_of_part = partial(torch.narrow, dim=dim, start=start, length=size)
        split.append(tree_map_only(Tensor, rows_of_part, value))
        start += size
    return split


def _join_results(results: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join the results of all parts, each a tensor or a tree of them with the same branches."""
    structure = tree_structure(results[0])
    if any(tree_structure(result) != structure for result in results):
        raise ShapeError("parts return unlike trees", hint="the same branches for each batch")
    names = [leaf_name(path) for path, _ in tree_flatten_with_path(results[0])[0]]
    joined = []
    for name, leaves in zip(names, zip(*map(tree_leaves, results), strict=True), strict=True):
        with located(name):
            joined.append(_join(leaves, sizes))
    return tree_unflatten(joined, structure)


def _join(leaves: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join one leaf of the results of all parts: [3, ...], [2, ...] -> [5, ...]; a constant stays itself."""
    first_leaf = leaves[0]
    if not isinstance(first_leaf, Tensor):
        if isinstance(first_leaf, _PLAIN) and all(leaf == first_leaf for leaf in leaves):
            return first_leaf
        reason = f"each part returns a {type(first_leaf).__name__} of its own"
    elif not first_leaf.ndim:
        reason = "each part returns a number of its own, as a loss"
    elif [len(x) for x in leaves] != list(sizes):
        shapes = ", ".join(str(tuple(x.shape)) for x in leaves)
        reason = f"parts of {', '.join(map(str, sizes))} rows return shapes {shapes}"
    else:
        return torch.cat(list(leaves))
    hint = "results have rows of the batch first; compute others around halves(model, module=...)"
    raise ShapeError(reason, hint=hint)
