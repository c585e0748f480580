"""Record one forward pass of a module, without data, operation by operation as a training step.

All tensors are on the meta device, where they have shapes only. Numbers that depend on no input and
no parameter have *values*, too: models ask for some of them, such as the length of a mask.

Where the code of a model reads a length from a tensor, as in `zeros(x.shape[0], 8)`, x becomes a
*length operand* of the operation: dim 0 of both arrays is then sharded together.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torch_bridge.step.classes import (
    DescribedCall,
    describe_attention,
    describe_bias,
    describe_call,
    empty_grouped_product,
)
from torch_bridge.versions.autograd import viewed_tensor
from torch_bridge.versions.modes import TorchDispatchMode, schema_of
from torch_bridge.versions.modules import buffers_of, modules_by_name, parameters_of
from torch_bridge.versions.pytree import tree_leaves, tree_map_only
from xshard.dtypes import name_of
from xshard.errors import PlanError
from xshard.step.record.letters import LetteredOp, dim_letters
from xshard.step.record.op import Op, renamed
from xshard.step.record.trace import Trace, input_name, unused_name
from xshard.step.record.training_step import TrainingStep

# Functions whose arguments are the lengths of their result.
SIZED = {"view", "reshape", "expand", "zeros", "ones", "full", "empty", "arange"}
MOST_VALUES = 2**20  # elements of results that have values: more would cost seconds and memory
NUMBERED = re.compile(r"(^|\.)\d+$")  # modules of a list, which may be repeated
# {array: {number of its dim whose length was read: letter of the result's dim with this length}}
ReadLengths = dict[str, dict[int, str]]


class Length(int):
    """A length that the code of a model has read from a shape.

    origins: (name of the array, number of its dim) that has this length; several for a product.
    """

    origins: tuple[tuple[str, int], ...]

    def __new__(cls, n: int, *origins: tuple[str, int]) -> Length:
        length = super().__new__(cls, n)
        length.origins = origins
        return length

    def __mul__(self, other: Any) -> int:
        n = int(self) * other
        return Length(n, *self.origins, *other.origins) if isinstance(other, Length) else n


class _OpenModule(NamedTuple):
    """A module whose forward pass runs.

    Attributes:
        path: Its name in the model.
        first: The first tensor among its arguments.
        outer_name: That array's name outside of the module.
        n_ops_before: The number of operations recorded before the module.
    """

    path: str
    first: Tensor | None
    outer_name: str | None
    n_ops_before: int


class StepRecorder(TorchDispatchMode):
    """While this mode is active, operations on tensors become operations of `trace`.

    Attributes:
        trace: The operations so far.
        names: The name of each array.
        values: The numbers of arrays that depend on no input, on the CPU.
        stated_lengths: The lengths that the running function of torch was called with.
        module_entered_by: Operations that stand for the argument of a module -> its path.
        module_left_by: Operations whose result a module returns -> its path.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace
        self.names: dict[Tensor | None, str] = {}
        self.values: dict[Tensor, Tensor] = {}
        self.stated_lengths: tuple[int, ...] = ()
        self.module_entered_by: dict[str, str] = {}
        self.module_left_by: dict[str, str] = {}
        self._constants: set[str] = set()  # operations that depend on no input and no parameter
        whole_model = _OpenModule(path="", first=None, outer_name=None, n_ops_before=0)
        self._open_modules = [whole_model]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Torch calls this for each operator of the forward pass: it runs without data, and is added
        # to the trace. Operations on few known numbers, as of `arange`, are also computed on the
        # CPU, as later code may read a number from them.
        kwargs = {} if kwargs is None else kwargs
        name = schema_of(func).name.partition("::")[2]
        if name == "_local_scalar_dense":  # `x.item()`
            return self._number(args[0])
        out = self._run_without_data(func, name, args, kwargs)
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        arguments = _arguments_by_name(func, args, kwargs)
        if self._has_values(arguments, results):
            self._compute_values(func, args, kwargs, results)
        is_in_place = name.endswith("_")
        for x in results:
            # Tensors are known by identity. Batch norms make empty tensors and drop them at once,
            # so that a later tensor may get the same one.
            if not x.numel():
                continue
            self._record_result(name.rstrip("_"), arguments, x, torch.Tag.pointwise in func.tags)
            whole = viewed_tensor(x)
            if is_in_place and whole is not None:
                # A slice of an array has been written to: later operations read the new array.
                described = describe_call("written", {"self": whole, "part": x}, whole)
                self.add("written", described, whole)
        return out

    def _run_without_data(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator on the meta device; raise PlanError if its result's shape depends on data."""
        # Tensors that the code makes on the CPU, as of a literal, go to the meta device, too.
        meta_args = tree_map_only(Tensor, _to_meta, args)
        run = empty_grouped_product if name == "_grouped_mm" else func
        try:
            return run(*meta_args, **_on_device(kwargs, "meta"))
        except NotImplementedError as error:
            raise self._data_error(f"calls '{name}'") from error

    def _compute_values(
        self, func: Any, args: Any, kwargs: dict[str, Any], results: Sequence[Tensor]
    ) -> None:
        """Run an operator on the values of its operands, to know those of its results."""
        # The stored tensors themselves, no copies: an operation in place must change them.
        values = tree_map_only(Tensor, self.values.__getitem__, args)
        computed = func(*values, **_on_device(kwargs, "cpu"))
        self.values |= zip(results, tree_leaves(computed), strict=True)

    def _number(self, x: Tensor) -> Any:
        """Return the number in a tensor of one element. Raises PlanError if it depends on data."""
        if x not in self.values:
            raise self._data_error("reads numbers from a tensor")
        return self.values[x].item()

    def _data_error(self, what: str) -> PlanError:
        """Return the error for a module whose operations differ from batch to batch."""
        path = self._open_modules[-1].path
        reader = path if path else "the model"
        hint = "operations have to be the same for all data: leave out a mask that they depend on"
        if "expert" in path:
            hint += "; experts of transformers are, with the config's _experts_implementation 'batched_mm'"
        return PlanError(f"{reader} {what}", hint=hint)

    def _has_values(self, arguments: Mapping[str, Any], results: Sequence[Tensor]) -> bool:
        """Return whether results are few numbers that depend on no input."""
        if sum(x.numel() for x in results) > MOST_VALUES:
            return False
        tensors = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
        return self.values.keys() >= set(tensors)

    def _record_result(
        self, name: str, args: Mapping[str, Any], out: Tensor, is_pointwise: bool
    ) -> None:
        """Record one result of an operation, and the bias that is added to it, if there is one."""
        # An operation with several results is several operations, one per result.
        described = describe_call(name, args, out, is_pointwise)
        result_dims = described.op.arrays[-1]
        read_lengths, unsharded = self._dims_of_stated_lengths(result_dims, out.shape)
        op = described.op._replace(whole={*described.op.whole, *unsharded})
        self.add(name, described._replace(op=op), out, read_lengths)
        if described.added is not None:
            self.add("bias", describe_bias(out, described.added, name == "convolution"), out)

    def _dims_of_stated_lengths(
        self, result_dims: Sequence[str], shape: torch.Size
    ) -> tuple[ReadLengths, Iterable[str]]:
        """Find which dims of a result have lengths that the model's code states.

        `y.reshape(x.shape[0], 4, -1)` states three lengths, `self.stated_lengths`:

        - dim 0 is as long as dim 0 of x, also on blocks: {"x": {0: "r0"}}.
        - dim 1 cannot be sharded, as the code says 4 on every device: "r1".
        - dim 2 follows from the others.

        Args:
            result_dims: The letter of each dim; "(a b)" for a dim that two were merged into.
            shape: The shape of the result.

        Returns:
            The lengths that were read from arrays, and the letters of dims that cannot be sharded.
        """
        read_lengths = ReadLengths()
        unsharded: list[str] = []
        if not _are_lengths_of(shape, self.stated_lengths):
            return read_lengths, unsharded
        for dim, length in zip(result_dims, self.stated_lengths, strict=True):
            letters = dim.strip("()").split()
            # The dims that this length was read from: two for a product, as of "(a b)".
            origins = length.origins if isinstance(length, Length) else ()
            if len(origins) == len(letters):
                for letter, (array, d) in zip(letters, origins, strict=True):
                    read_lengths.setdefault(array, {})[d] = letter
            elif length != -1:
                unsharded.extend(letters)
        return read_lengths, unsharded

    def add(
        self,
        kind: str,
        described: DescribedCall,
        out: Tensor,
        read_lengths: ReadLengths | None = None,
    ) -> None:
        """Add an operation to the recorded step, named after the module that runs.

        Args:
            kind: What it does: "mm" of the module "layers.0.mlp" is called "layers.0.mlp:mm".
            described: How it may be sharded.
            out: Its result, which is known by this name from now on.
            read_lengths: Further arrays of which it only reads lengths, as {"x": {0: "r0"}} for
                `zeros(x.shape[0], 8)`: dim 0 of the result, r0, is as long as dim 0 of x. They
                become operands, so that both dims are sharded together.
        """
        name = f"{self._open_modules[-1].path}:{kind}"
        # "up:mm_2" for the second one; an input or a parameter may have the name, too.
        name = unused_name(name, name, self.trace.shapes)
        operands = [self.name_of(x) for x in described.operands]
        op = described.op
        # Made of constants only, as `arange(8) + 1`: each device makes its own, nothing is moved. Its
        # work is that of the class "source" (accesses None).
        if self._constants.issuperset(operands):
            op = op._replace(kind="source", work={**op.work, "accesses": None})
            self._constants.add(name)

        if read_lengths:
            # An array that is an operand already has letters, which tie its dims to the result's.
            length_operands = [array for array in read_lengths if array not in operands]
            op = self._with_length_operands(op, length_operands, read_lengths)
            operands += length_operands
        self.trace.add(name, op, operands, out.shape)
        self.names[out] = name

    def _with_length_operands(
        self, op: LetteredOp, length_operands: Sequence[str], read_lengths: ReadLengths
    ) -> LetteredOp:
        """Add operands of which only lengths are read: `y = zeros(x.shape[0], 8)` takes x.

        `-> r0 r1` becomes `r0 w0_1 -> r0 r1`: dim 0 of x has the result's letter, its other dims
        have letters of their own.

        Args:
            op: The operation.
            length_operands: The names of these operands.
            read_lengths: Which of their dims are as long as which of the result, as of `add`.
        """
        *arrays, result_dims = op.arrays
        for i, array in enumerate(length_operands):
            dims = []
            for d in range(len(self.trace.shapes[array])):
                dims.append(read_lengths[array].get(d, f"w{i}_{d}"))
            arrays.append(dims)
        arrays.append(result_dims)
        return op._replace(arrays=arrays, n_length_operands=len(length_operands))

    def name_of(self, x: Tensor) -> str:
        """Return the name of an array; one that no operation has made is a constant."""
        if x not in self.names:
            self.add("constant", describe_call("arange", {}, x), x)
        return self.names[x]

    def enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note that a module begins; a hook before each module's `forward`.

        A plan may move a module's first tensor argument to another layout. So an operation "input"
        is recorded, which returns this tensor as it is: operations inside the module then take
        "input". This is left out for a tensor that is passed twice, as a plan moves one argument,
        and for the whole model (path ""), whose input no rule moves.
        """
        arguments = (*args, *kwargs.values())
        x = first_tensor(arguments)
        # `leave` gives x its name outside back, and finds the operations inside by their number.
        opened = _OpenModule(
            path=path, first=x, outer_name=self.names.get(x), n_ops_before=len(self.trace.ops)
        )
        self._open_modules.append(opened)
        if x is None or x not in self.names or not path:
            return
        if sum(y is x for y in arguments) == 1:
            # From here on `self.names[x]` is the name of this operation.
            self.add("input", describe_call("alias", {"self": x}, x), x)
            self.module_entered_by[self.names[x]] = path

    def leave(self, path: str, module: nn.Module, args: Any, result: Any) -> None:
        """End a module: the operation that made its result has the module's name."""
        opened = self._open_modules.pop()
        x = opened.first
        if opened.outer_name is not None and self.names[x] in self.module_entered_by:
            self.names[x] = opened.outer_name  # callers do not see the module's input operation
        name = self.names.get(first_tensor(result), "")
        made_inside = {op.name for op in self.trace.ops[opened.n_ops_before :]}
        if path and name in made_inside and name not in self.module_entered_by:
            self.module_left_by.setdefault(name, path)


class FunctionWatcher(TorchFunctionMode):
    """Watch functions before torch divides them into operations: attention, and stated lengths."""

    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Torch calls this for each of its functions. Attention is recorded here as one operation.
        # `x.shape[0]` and `x.size(0)` return integers that know which dim of which tensor they are,
        # so that a `reshape` to them keeps that dim sharded.
        kwargs = {} if kwargs is None else kwargs
        if func is F.scaled_dot_product_attention:
            described, out = describe_attention(*args, **kwargs)
            self.recorder.add("attention", described, out)
            return out
        name = getattr(func, "__name__", "")
        self.recorder.stated_lengths = ()
        if name.removeprefix("new_") in SIZED:
            self.recorder.stated_lengths = _whole_numbers(args)
        result = func(*args, **kwargs)
        # `x.shape` is a property, whose getter knows it by `__self__`; `x.size()` is a method.
        reads_shape = getattr(func, "__self__", None) is Tensor.shape or name == "size"
        if reads_shape and args[0] in self.recorder.names:
            x = args[0]
            dims = (*args[1:], *kwargs.values())
            return _with_origins(result, x, dims, self.recorder.names[x])
        return result


def _with_origins(shape: Any, x: Tensor, dims: Sequence[int], array: str) -> Any:
    """Return what the code of a model reads of a shape as lengths that know where they are from.

    Args:
        shape: All of the shape, or one length, of `dims[0]`.
        x: The tensor that has it.
        dims: The arguments of `x.size`.
        array: The name of `x`.
    """
    if isinstance(shape, int):  # x.size(1) or x.size(dim=1)
        return Length(shape, (array, dims[0] % x.ndim))
    return torch.Size([Length(n, (array, d)) for d, n in enumerate(shape)])


def record_step(model: nn.Module, batch: Any) -> tuple[TrainingStep, tuple[str, ...]]:
    """Record the operations of a model's training step, by running its forward pass without data.

    The model runs on the meta device, and is left as it is. A loss of its first result is added.
    Returns the step, and the names of parameters that it does not use.

    Args:
        model: The model.
        batch: Examples of the arguments of `forward`: a tensor, a tuple, or a dict by name; only
            their shapes and dtypes matter.

    Raises:
        PlanError: The batch or the result has no tensor, or code reads numbers from data, as
            `x.item()` does.
    """
    inputs = _inputs_by_name(model, batch)
    batch_length = _batch_length(inputs)
    modules_by_name(model)  # raises for a module inside itself
    names_of_parameters = _names_of_parameters(model)
    dtypes = [parameter.dtype for parameter in names_of_parameters]
    dtype = dtypes[0] if dtypes else torch.float32
    recorder = StepRecorder(Trace(batch_length, name_of(dtype)))
    # Parameters and buffers get meta tensors of their own, so that the model stays as it is.
    on_meta = {x: torch.empty_like(x, device="meta") for x in model.buffers()}
    for parameter, names in names_of_parameters.items():
        on_meta[parameter] = _add_parameter(recorder, parameter, names)
    _add_inputs(recorder, inputs)
    result = _run_model(model, on_meta, inputs, recorder)
    step = recorder.trace.step(_add_loss(recorder, result))

    unused: list[str] = []
    for names in names_of_parameters.values():
        if _name_of_tied(names) not in step.parameters:
            unused.extend(names)
    return _with_modules(step, recorder), tuple(unused)


def _batch_length(inputs: Mapping[str, Any]) -> int:
    """Return the length of the first dim of the first tensor; raise PlanError without one."""
    for name, x in inputs.items():
        if not isinstance(x, Tensor):
            continue
        if x.ndim:
            return x.shape[0]
        hint = "the first dim of the first tensor is the batch"
        raise PlanError(f"{name!r} of the batch has no dims", hint=hint)
    hint = 'as in {"input_ids": torch.zeros(16, 8192, dtype=torch.int64)}'
    raise PlanError("the batch lacks a tensor", hint=hint)


def _inputs_by_name(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Return the arguments of a forward pass, tensors on the meta device."""
    if not isinstance(batch, Mapping):
        values = batch if isinstance(batch, tuple) else (batch,)
        names = inspect.signature(model.forward).parameters
        batch = dict(zip(names, values, strict=False))
    return {name: _to_meta(x) if isinstance(x, Tensor) else x for name, x in batch.items()}


def _names_of_parameters(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return each parameter once, with all its names: tied ones have several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _name_of_tied(names: Sequence[str]) -> str:
    """Name a parameter that is recorded once under all its names: `head.weight|embedding.weight`."""
    return "|".join(names)


def _add_inputs(recorder: StepRecorder, inputs: Mapping[str, Any]) -> None:
    """Add the tensors among the arguments of a forward pass to the trace."""
    for name, x in inputs.items():
        if isinstance(x, Tensor):
            # A parameter of the model may be called like an argument.
            array = input_name(name, recorder.trace.shapes)
            recorder.names[x] = recorder.trace.input(array, x.shape)


def _add_parameter(recorder: StepRecorder, parameter: nn.Parameter, names: list[str]) -> Tensor:
    """Add a parameter to the trace, and return a tensor of its shape for the forward pass."""
    x = parameter.detach().to("meta")
    recorder.names[x] = recorder.trace.parameter(_name_of_tied(names), x.shape)
    if len(names) > 1:
        # A tied parameter is stored once and gathered once for all its uses.
        described = describe_call("alias", {"self": x}, x)
        share = described.op._replace(kind="share", work={})
        recorder.add("tied", described._replace(op=share), x)
    return x


def _run_model(
    model: nn.Module, on_meta: dict[Tensor, Tensor], inputs: dict[str, Any], recorder: StepRecorder
) -> Any:
    """Run a model's forward pass without data, recording its operations and its modules.

    Args:
        model: The model.
        on_meta: Meta tensors in place of its parameters and buffers.
        inputs: The arguments of `forward` by name.
        recorder: Records the operations.

    Returns:
        What the model returns.
    """
    with (
        torch.no_grad(),
        torch.device("meta"),
        _unchanged(model),
        FunctionWatcher(recorder),
        recorder,
    ):
        for path, module in model.named_modules():
            # A module that is used twice has one path, and its operations get numbers.
            module.register_forward_pre_hook(partial(recorder.enter, path), with_kwargs=True)
            module.register_forward_hook(partial(recorder.leave, path))
            for tensors in (parameters_of(module), buffers_of(module)):
                tensors.update({name: on_meta.get(x, x) for name, x in tensors.items()})
        try:
            return model(**inputs)
        except (NotImplementedError, RuntimeError, ValueError) as error:
            if "meta" not in str(error):
                raise  # a mistake of the model or of the batch
            hint = "another implementation may, as with attn_implementation='eager'"
            raise PlanError(f"it does not run without data: {error}", hint=hint) from error


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Let a `with` block change modules: their tensors, hooks and attributes are then as before.

    A forward pass may leave results in attributes, as tables of positions: here on the meta device.
    Random numbers go on as before, too.
    """
    attributes = {module: dict(vars(module)) for module in model.modules()}
    copies: dict[int, Any] = {}  # modules may share a dict
    for module, values in attributes.items():
        for name, value in values.items():
            if isinstance(value, dict | list | set):
                vars(module)[name] = copies.setdefault(id(value), copy.copy(value))
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        for module, values in attributes.items():
            vars(module).clear()
            vars(module).update(values)


def _add_loss(recorder: StepRecorder, result: Any) -> str:
    """End the recorded step with a loss of the first tensor of a result; return the loss's name.

    A result [b, c] gets the operation "r0 r1 -> " of class "loss". A scalar is a loss already.
    """
    trace = recorder.trace
    name = recorder.names.get(first_tensor(result), "")
    if name not in trace.shapes:
        hint = "a loss is of the first one"
        raise PlanError("forward returns no tensor that it has made", hint=hint)
    shape = trace.shapes[name]
    if not shape:  # the model returns its loss
        return name
    loss = LetteredOp([dim_letters(len(shape)), []], "loss")
    return trace.add(":loss", loss, (name,), ())


def first_tensor(values: Any) -> Tensor | None:
    """Return the first tensor of a module's arguments or result: the one that rules move."""
    if isinstance(values, Tensor):
        return values
    if isinstance(values, Mapping):
        values = values.values()
    if isinstance(values, Iterable):
        for x in values:
            if isinstance(x, Tensor):
                return x
    return None


def _with_modules(step: TrainingStep, recorder: StepRecorder) -> TrainingStep:
    """Mark the operations that begin and end modules, and name the last ones after their modules.

    An operation whose result module "layers.0" returns gets `leaves="layers.0"`, and is called
    "layers.0". The one that begins it gets `enters="layers.0"`. The beginning was recorded as an
    operation "input": it is merged into the operation that reads it, or dropped, except where a plan
    may have to move its tensor.
    """
    module_left_by = recorder.module_left_by
    ops = {op.name: op for op in step.ops}
    users = defaultdict[str, list[str]](list)  # names of operations by that of an operand
    for op in step.ops:
        if op.name in module_left_by:
            ops[op.name] = replace(op, leaves=module_left_by[op.name])
        for name in dict.fromkeys(op.operands):
            users[name].append(op.name)
    for name, path in recorder.module_entered_by.items():  # outer modules first
        if name in ops:
            _merge_input(ops, users, name, path, module_left_by)
    # A module that is called twice gives its name to the last of its results.
    results = {path: name for name, path in module_left_by.items() if name in ops}
    for path in {*step.inputs, *step.parameters, *ops}:  # arrays that are called like a module
        results.pop(path, None)
    new_names = {name: path for path, name in results.items()}
    return replace(step, ops=[renamed(op, new_names) for op in ops.values()])


def _merge_input(
    ops: dict[str, Op],
    users: dict[str, list[str]],
    name: str,
    path: str,
    module_left_by: Mapping[str, str],
) -> None:
    """Merge, keep or drop the operation "input" that marks where a module begins; change `ops`.

    A plan may move a tensor where a module begins, to the operation with `enters`:

    - One operation alone reads the input, as its first operand: it gets `enters`, "input" goes.
    - Otherwise "input" stays, with `enters`, if a move may pay: the tensor has users outside, too,
      or the module may be one of many equal layers.
    - Otherwise "input" goes, and the operations inside read the tensor itself.

    Args:
        ops: The operations by name.
        users: The names of the operations that use each array, by its name.
        name: The name of the operation "input".
        path: The module's path.
        module_left_by: Operations whose result a module returns -> its path.
    """
    (maker,) = ops[name].operands  # the operation that made the tensor
    users_inside = users[name]
    is_begun_by_user = len(users_inside) == 1 and ops[users_inside[0]].operands[0] == name
    if not is_begun_by_user:
        # Made by an operation that ends no module, it may be the residual sum between two layers.
        module_before = module_left_by.get(maker)
        follows_a_layer = module_before is None or NUMBERED.search(module_before)
        has_users_outside = len(users[maker]) > 1
        if follows_a_layer or NUMBERED.search(path) or has_users_outside:
            ops[name] = replace(ops[name], enters=path)
            return
    del ops[name]
    others = [user for user in users[maker] if user != name and user not in users_inside]
    users[maker] = [*others, *users_inside]
    for user in users_inside:
        merged = renamed(ops[user], {name: maker})
        # If an inner module begins with the same operation, its path comes later and replaces this.
        ops[user] = replace(merged, enters=path) if is_begun_by_user else merged


def _arguments_by_name(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of an operation of torch, defaults included."""
    schema = schema_of(func).arguments
    names = [argument.name for argument in schema]
    defaults = {x.name: x.default_value for x in schema if x.has_default_value()}
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def _are_lengths_of(shape: torch.Size, stated_lengths: Sequence[int]) -> bool:
    """Return whether stated lengths are those of a result, and not of one on the way to it."""
    if len(stated_lengths) != len(shape):
        return False
    pairs = zip(stated_lengths, shape, strict=True)
    return all(stated in (-1, length) for stated, length in pairs)


def _whole_numbers(args: Iterable[Any]) -> tuple[int, ...]:
    """Return the numbers among arguments and inside lists: (x, 2, [3, 4]) -> (2, 3, 4)."""
    values: list[Any] = []
    for argument in args:
        if isinstance(argument, tuple | list):
            values.extend(argument)
        else:
            values.append(argument)
    return tuple(x for x in values if isinstance(x, int))


def _to_meta(x: Tensor) -> Tensor:
    """Return a tensor of the same shape and dtype without data."""
    return x.to("meta")


def _on_device(kwargs: dict[str, Any], device: str) -> dict[str, Any]:
    """Return the arguments with another device, if they name one."""
    return {**kwargs, "device": device} if "device" in kwargs else kwargs
