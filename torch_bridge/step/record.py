"""One forward pass of a module without data, recorded operation by operation as a step.

All tensors are on the meta device. Numbers that come from no input and no parameter have values, too:
models ask for some of them.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_bridge.step.classes import Call, attention_call, bias_call, call_of
from xshard.dtypes import name_of
from xshard.errors import PlanError
from xshard.step.record.letters import Written, letters
from xshard.step.record.op import Op, renamed
from xshard.step.record.trace import Trace
from xshard.step.record.training_step import TrainingStep

SIZED = {"view", "reshape", "expand", "zeros", "ones", "full", "empty", "arange"}
LARGEST = 2**20  # elements of numbers that have values
NUMBERED = re.compile(r"(^|\.)\d+$")  # modules that may be repeated
Links = dict[
    str, dict[int, str]
]  # arrays -> their dims -> letters of a result with the same lengths


class Length(int):
    """A length that the code has read, with the arrays and dims that have it: several if it is a product."""

    origins: tuple[tuple[str, int], ...]

    def __new__(cls, n: int, *origins: tuple[str, int]) -> Length:
        length = super().__new__(cls, n)
        length.origins = origins
        return length

    def __mul__(self, other: Any) -> int:
        n = int(self) * other
        return Length(n, *self.origins, *other.origins) if isinstance(other, Length) else n


class StepRecorder(TorchDispatchMode):
    """Operations of a module's forward pass -> `trace`."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace
        self.known = dict[Tensor | None, str]()  # the names of arrays
        self.values, self.constants = dict[Tensor, Tensor](), set[str]()
        self.counts, self.sizes = Counter[str](), tuple[Any, ...]()
        self.around = list[Any](
            [("", None, None, 0)]
        )  # path, first tensor, its name outside, operations
        self.entered, self.left = dict[str, str](), dict[str, str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema.arguments
        arguments = {each.name: each.default_value for each in schema if each.has_default_value()}
        kwargs = kwargs or {}
        arguments |= dict(zip((each.name for each in schema), args, strict=False)) | kwargs
        tensors = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
        name = func._schema.name.partition("::")[2]
        if name == "_local_scalar_dense":
            if args[0] not in self.values:
                hint = "operations have to be the same for all data: leave out a mask that they depend on"
                raise PlanError(
                    f"{self.around[-1][0] or 'the model'} reads numbers from a tensor", hint=hint
                )
            return self.values[args[0]].item()
        on = {
            key: {**kwargs, "device": key} if "device" in kwargs else kwargs
            for key in ("meta", "cpu")
        }
        out = func(*tree_map_only(Tensor, lambda x: x.to("meta"), args), **on["meta"])
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if all(x in self.values for x in tensors) and sum(x.numel() for x in results) <= LARGEST:
            computed = func(*tree_map_only(Tensor, self.values.__getitem__, args), **on["cpu"])
            self.values |= zip(results, tree_leaves(computed), strict=True)
        for x in filter(Tensor.numel, results):  # an empty one is in no operation
            self._record(name.rstrip("_"), arguments, x, torch.Tag.pointwise in func.tags)
            if name.endswith("_") and x._base is not None:  # a part of an array has been written
                self.add(
                    "written",
                    call_of("written", {"self": x._base, "part": x}, x._base, False),
                    x._base,
                )
        return out

    def _record(self, name: str, args: Mapping[str, Any], out: Tensor, is_pointwise: bool) -> None:
        call = call_of(name, args, out, is_pointwise)
        links = Links()
        whole = set[str]()
        dims = call.op.arrays[-1]
        sizes = self.sizes if len(self.sizes) == out.ndim else ()
        fits = all(
            n in (-1, m) for n, m in zip(sizes, out.shape, strict=False)
        )  # or on the way to them
        for dim, n in zip(dims, sizes if fits else (), strict=False):
            letters = dim.strip("()").split()
            origins = getattr(n, "origins", ())
            if len(origins) == len(letters):
                for letter, (array, d) in zip(letters, origins, strict=True):
                    links.setdefault(array, {})[d] = letter
            elif n != -1:  # a length that the code says is the whole's
                whole.update(letters)
        self.add(
            name, call._replace(op=call.op._replace(whole={*call.op.whole, *whole})), out, links
        )
        if call.added is not None:
            self.add("bias", bias_call(out, call.added, name == "convolution"), out)

    def add(self, name: str, call: Call, out: Tensor, links: Links | None = None) -> None:
        """An operation, by the name of its module and its own. links: arrays that it reads lengths from."""
        name = f"{self.around[-1][0]}:{name}"
        self.counts[name] += 1
        name += f"_{self.counts[name]}" * (self.counts[name] > 1)
        operands = [self.name_of(x) for x in call.operands]
        op = call.op
        is_constant = all(each in self.constants for each in operands)
        links = {array: dims for array, dims in (links or {}).items() if array not in operands}
        if is_constant:
            op = op._replace(kind="source", work={**op.work, "accesses": None})
            self.constants.add(name)
        for k, (array, dims) in enumerate(links.items()):
            beside = [dims.get(d, f"w{k}_{d}") for d in range(len(self.trace.shapes[array]))]
            op = op._replace(arrays=[*op.arrays[:-1], beside, op.arrays[-1]], links=k + 1)
        self.trace.add(name, op, [*operands, *links], out.shape)
        self.known[out] = name

    def name_of(self, x: Tensor) -> str:
        """The name of an array; one that nothing has made is constant."""
        if x not in self.known:
            self.add("constant", call_of("arange", {}, x, False), x)
        return self.known[x]

    def enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before a module: inside, its first tensor is the result of an operation of its own."""
        x = first_tensor([*args, *kwargs.values()])
        self.around.append((path, x, self.known.get(x), len(self.trace.ops)))
        same = sum(y is x for y in (*args, *kwargs.values()))  # a rule moves one argument
        if path and x is not None and x in self.known and same == 1:
            self.add("input", call_of("alias", {"self": x}, x, False), x)
            self.entered[self.known[x]] = path

    def leave(self, path: str, module: nn.Module, args: Any, result: Any) -> None:
        """After a module: its result has its name."""
        _, x, before, n = self.around.pop()
        if before is not None and self.known[x] in self.entered:
            self.known[x] = before
        name = self.known.get(first_tensor(result), "")
        if path and name in {op.name for op in self.trace.ops[n:]} - self.entered.keys():
            self.left.setdefault(name, path)


class Functions(TorchFunctionMode):
    """Functions before they become operations: lengths that callers say, and attention."""

    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            call, out = attention_call(*args, **(kwargs or {}))
            self.recorder.add("attention", call, out)
            return out
        name = getattr(func, "__name__", "")
        is_shape = getattr(func, "__self__", None) is Tensor.shape or name == "size"
        values = [x for each in args for x in (each if isinstance(each, tuple | list) else [each])]
        is_sized = name.removeprefix("new_") in SIZED
        self.recorder.sizes = tuple(x for x in values if is_sized and isinstance(x, int))
        result = func(*args, **(kwargs or {}))
        if not is_shape or args[0] not in self.recorder.known:
            return result
        array = self.recorder.known[args[0]]
        if isinstance(result, int):
            return Length(result, (array, args[1] % args[0].ndim))
        return torch.Size([Length(n, (array, d)) for d, n in enumerate(result)])


def first_tensor(values: Any) -> Tensor | None:
    """The first tensor of a module's arguments or of its result, for which a rule is."""
    parts = values.values() if isinstance(values, Mapping) else values
    each = [values] if isinstance(values, Tensor) else parts or ()
    return next((x for x in each if isinstance(x, Tensor)), None)


def recorded(model: nn.Module, batch: Any) -> tuple[TrainingStep, tuple[str, ...]]:
    """A training step of a module, with a loss of its first result, and the parameters that it lacks.

    batch: examples of the arguments of its forward pass: a tensor, a tuple, or a dict by name; only their
    shapes and dtypes matter.
    """
    arguments = list(inspect.signature(model.forward).parameters)
    values = batch if isinstance(batch, tuple) else (batch,)
    named = batch if isinstance(batch, Mapping) else dict(zip(arguments, values, strict=False))
    inputs = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in named.items()}
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    if not tensors:
        hint = 'as in {"input_ids": torch.zeros(16, 8192, dtype=torch.int64)}'
        raise PlanError("the batch lacks a tensor", hint=hint)
    tied: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.setdefault(parameter, []).append(name)
    dtype = next((x.dtype for x in tied), torch.float32)
    trace = Trace(next(iter(tensors.values())).shape[0], name_of(dtype))
    recorder = StepRecorder(trace)
    for name, x in tensors.items():
        recorder.known[x] = trace.input(name, x.shape)
    own = {name: torch.empty_like(x, device="meta") for name, x in model.named_buffers()}
    for parameter, names in tied.items():
        own[names[0]] = x = parameter.detach().to("meta")
        recorder.known[x] = trace.parameter("|".join(names), x.shape)
        if len(names) > 1:  # stored once, and used in one way
            same = call_of("alias", {"self": x}, x, False)
            recorder.add("tied", same._replace(op=same.op._replace(kind="share", work={})), x)
    with torch.no_grad(), torch.device("meta"), ExitStack() as stack:
        for path, module in model.named_modules():
            entering = module.register_forward_pre_hook(
                partial(recorder.enter, path), with_kwargs=True
            )
            stack.callback(entering.remove)
            stack.callback(module.register_forward_hook(partial(recorder.leave, path)).remove)
        stack.enter_context(Functions(recorder))
        stack.enter_context(recorder)
        result = torch.func.functional_call(model, own, (), inputs, tie_weights=True)
    name = recorder.known.get(first_tensor(result), "")
    if name not in trace.shapes:
        raise PlanError(
            "forward returns no tensor that it has made", hint="a loss is of the first one"
        )
    if shape := trace.shapes[name]:
        name = trace.add(":loss", Written([letters(len(shape)), []], "loss"), (name,), ())
    step = trace.step(name)
    unused = tuple(
        n for names in tied.values() for n in names if "|".join(names) not in step.parameters
    )
    return _with_modules(step, recorder), unused


def _with_modules(step: TrainingStep, recorder: StepRecorder) -> TrainingStep:
    """Operations by the names of modules that they leave, and the modules that they enter."""
    ops = {op.name: replace(op, leaves=recorder.left.get(op.name, "")) for op in step.ops}

    def users(name: str) -> list[Op]:
        return [op for op in ops.values() if name in op.operands]

    for name, path in [
        pair for pair in recorder.entered.items() if pair[0] in ops
    ]:  # outer modules first
        (origin,), after = ops[name].operands, users(name)
        is_begun = (
            len(after) == 1 and after[0].operands[0] == name
        )  # until a module inside says its own
        is_numbered = any(map(NUMBERED.search, (path, recorder.left.get(origin, "0"))))
        if not is_begun and (is_numbered or len(users(origin)) > 1):
            ops[name] = replace(ops[name], enters=path)
            continue
        del ops[name]
        for op in after:
            new = renamed(op, {name: origin})
            ops[op.name] = replace(new, enters=path) if is_begun else new
    last = {path: name for name, path in recorder.left.items() if name in ops}
    names = {name: path for path, name in last.items()}
    return replace(step, ops=[renamed(op, names) for op in ops.values()])
