"""The first module of a parallel model with a wrong output, by the tensors that go in and out of modules.

Both models, the parallel one and its copy on one device, record the tensors at the same probe points: inputs
and outputs of modules with rules, and the gradients of these outputs. Tensors at one point are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from torch_bridge.autodiff.blocks import array_of
from torch_bridge.models.hooks import ModuleHooks, TensorRule
from torch_bridge.models.names import is_inside, title_of
from torch_bridge.models.notes import described
from torch_bridge.models.parallel import ParallelModel
from torch_bridge.models.parameters import ParallelContext, unsharded
from torch_bridge.models.verify import (
    EQUAL,
    SHAPES_DIFFER,
    ComparedArray,
    Expected,
    compare_on_all,
    largest_value,
)
from torch_bridge.redistribution import redistribute
from torch_bridge.versions.modules import uncompiled
from xshard import Layout, Sharding, XshardError
from xshard.models import layout_inside, layout_text, with_outer_axes
from xshard.notation.parser import ELLIPSIS
from xshard.testing.diagnosis.causes import Cause
from xshard.testing.diagnosis.evidence import Case
from xshard.testing.mismatch import Mismatch, Subject, located, mismatch_text

GRADIENT = "gradient of the output"  # the role of a tensor


class ProbePoint(NamedTuple):
    """A point at which tensors are recorded: one input or output of one call of a module.

    Attributes:
        module: The name of the module.
        role: "input", "output" or `GRADIENT`.
        rule: The index of the rule for it, among those of inputs or of outputs.
        call: How many calls of the module came before.
    """

    module: str
    role: str
    rule: int
    call: int

    def __str__(self) -> str:
        return f"the {self.role} of {title_of(self.module)}"

    def is_around(self, point: ProbePoint) -> bool:
        """Return whether this output is computed from the tensor at a point, inside of its module."""
        if point.module == self.module:
            return point.role != self.role
        return is_inside(point.module, self.module)


class _RecordedTensor(NamedTuple):
    """An input of a module before its rule, or an output after it.

    Attributes:
        value: This process's block.
        layout: Its layout along the axes that the rule names.
        named_axes: These axes. Along others it is laid out as activations around the module.
    """

    value: Tensor
    layout: Layout
    named_axes: Collection[str]


Recording = dict[ProbePoint, _RecordedTensor]  # in the order of the pass


class WrongTensor(NamedTuple):
    """The first wrong tensor.

    Attributes:
        location: Its input or output of a module, for a sentence: "the output of 'up'".
        text: Lines about it and its module.
        cause: What may explain other wrong arrays.
    """

    location: str
    text: str
    cause: Cause | None = None


@dataclass(eq=False)
class _Recorder:
    """Hooks of one module that record its inputs and outputs.

    Attributes:
        hooks: The hooks of rules for the module.
        recording: Filled by the recorders of all modules.
        calls: How many calls there were so far, by the point of the first call; likewise.
    """

    hooks: ModuleHooks
    recording: Recording
    calls: Counter[ProbePoint]

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        for rule_index, rule in enumerate(self.hooks.inputs):
            x = values.get(self.hooks.argument(rule.key, values))
            self._record("input", rule_index, x, rule.rule.src, rule.rule.axes)

    def after_forward(self, module: nn.Module, args: Any, result: Any) -> None:
        rules = self.hooks.outputs
        results = self.hooks.results(result)  # one for each rule, or the first tensor
        if not rules:
            self._record("output", 0, results[0], self._default_layout(), ())
        for rule_index, rule in enumerate(rules):
            self._record("output", rule_index, results[rule_index], rule.rule.dst, rule.rule.axes)

    def _default_layout(self) -> Layout:
        """Return the layout of an output without a rule: as the first input, with as many dims."""
        if self.hooks.inputs:
            first_input: TensorRule = self.hooks.inputs[0]
            return unsharded(first_input.rule.dst)
        return Layout("...")

    def _record(
        self, role: str, rule_index: int, x: Any, layout: Layout, axes: Sequence[str]
    ) -> None:
        """Record a value with its layout, if it is a tensor; `axes` are those that its rule names."""
        if isinstance(x, Tensor):
            first_call = ProbePoint(self.hooks.name, role, rule_index, call=0)
            point = first_call._replace(call=self.calls[first_call])
            self.calls[first_call] += 1
            # A clone, because the module may write to its input afterwards.
            self.recording[point] = _RecordedTensor(x.detach().clone(), layout, axes)
            if role == "output" and x.requires_grad:
                x.register_hook(partial(self._record_gradient, point))

    def _record_gradient(self, output: ProbePoint, gradient: Tensor) -> None:
        """Record the gradient of an output under the layout of the output; a hook of the tensor."""
        recorded = self.recording[output]._replace(value=gradient.detach().clone())
        self.recording[output._replace(role=GRADIENT)] = recorded


@contextmanager
def recording_modules(
    model: nn.Module, hooks: Mapping[str, ModuleHooks], recordings: list[Recording]
) -> Iterator[None]:
    """Record, inside the `with`, the inputs and outputs of all modules that have layout rules.

    Args:
        model: A parallel model, or its copy on one device.
        hooks: The parallel model's hooks, by the name of the module.
        recordings: The recording of this model is appended to them.
    """
    recording: Recording = {}
    calls: Counter[ProbePoint] = Counter()
    recordings.append(recording)
    root = uncompiled(model)
    with ExitStack() as handles:
        for name, rules in hooks.items():
            module = root.get_submodule(name)
            recorder = _Recorder(rules, recording, calls)
            # The first hook on the way in and the last on the way out: it sees tensors as they are
            # outside of the module.
            pre_hook = module.register_forward_pre_hook(
                recorder.before_forward, prepend=True, with_kwargs=True
            )
            handles.enter_context(pre_hook)
            handles.enter_context(module.register_forward_hook(recorder.after_forward))
        yield


def first_wrong(
    one_device: Recording, parallel_recording: Recording, parallel: ParallelModel, tol: float
) -> WrongTensor | None:
    """Find the first input or output of a module that differs from one device's.

    Tensors inside a module whose output is right do not count. None if no tensor differs. All
    processes call it, and get the same answer.

    Args:
        one_device: The recording of the copy on one device.
        parallel_recording: That of the parallel model: blocks of this process.
        parallel: The state of the parallel model.
        tol: The tolerance: see `verify`.
    """
    context = parallel.context
    compared = _match_recordings(one_device, parallel_recording, parallel)
    activations = {point: array for point, array in compared.items() if point.role != GRADIENT}
    is_right = _right_points(activations, tol, context)
    point = _first_wrong_point(is_right)
    if point is None:
        return None
    expected, block = compared[point]
    name = f"{expected.name}, after {_last_right_before(point, is_right)}"
    mismatch = mismatch_of(expected._replace(name=name), block, expected.largest, tol, context)
    title = mismatch_text(mismatch).replace("\n", "\n  ")
    return WrongTensor(str(point), described(title, parallel, point.module))


def cause_in_loss(
    one_device: Recording, parallel_recording: Recording, parallel: ParallelModel, tol: float
) -> Cause | None:
    """Find what a loss does wrong, given that all outputs of the model are right.

    The gradient that the loss sends back to the last output is compared with one device's. A loss
    that is the mean over each process's own rows, say, sends too large gradients to a process with
    few rows. Returns None if that gradient is right or cannot be compared. All processes call it.

    Args:
        one_device: The recording of the copy on one device.
        parallel_recording: That of the parallel model: blocks of this process.
        parallel: The state of the parallel model.
        tol: The tolerance: see `verify`.
    """
    compared = _match_recordings(one_device, parallel_recording, parallel)
    gradient_points = [point for point in compared if point.role == GRADIENT]
    if not gradient_points:
        return None
    point = gradient_points[0]  # the loss sends it back first
    is_right = _right_points({point: compared[point]}, tol, parallel.context)
    was_comparable = point in is_right
    if not was_comparable or is_right[point]:
        return None
    expected, block = compared[point]
    cause = mismatch_of(expected, block, expected.largest, tol, parallel.context).cause
    return None if cause is None else cause._replace(text=f"{point} is {cause.text}")


def _match_recordings(
    one_device: Recording, parallel_recording: Recording, parallel: ParallelModel
) -> dict[ProbePoint, ComparedArray]:
    """Match the tensors of both recordings by their points, in the order of the forward pass.

    Processes may call different modules. Left out are points that some process has not reached, and
    tensors that cannot be compared; all others come in the same order on all processes.
    """
    points_of_processes = _from_all_processes(set(parallel_recording), parallel.context)
    common_points = set(one_device).intersection(*points_of_processes)
    compared = {}
    for point, tensor in parallel_recording.items():
        if point in common_points:
            array = _bring_to_one_form(point, tensor, one_device[point].value, parallel)
            if array is not None:
                compared[point] = array
    return compared


def _right_points(
    compared: Mapping[ProbePoint, ComparedArray], tol: float, context: ParallelContext
) -> dict[ProbePoint, bool]:
    """Tell for each point whether its tensor is right on all processes, in one collective.

    A tensor whose shape differs has another layout than was assumed for it. That proves nothing, and
    its point is left out of the result.
    """
    if not compared:
        return {}
    flags = compare_on_all(list(compared.values()), tol, context)
    is_right = {}
    for point, flag in zip(compared, flags, strict=True):
        if flag != SHAPES_DIFFER:
            is_right[point] = flag == EQUAL
    return is_right


def _first_wrong_point(is_right: Mapping[ProbePoint, bool]) -> ProbePoint | None:
    """Return the first wrong tensor that does not lie inside a module whose output is right.

    A module may be called several times: its next output ends the call that the tensor is in.
    """
    first_wrong_point = None
    next_outputs: dict[str, ProbePoint] = {}  # by module
    for point in reversed(list(is_right)):
        if point.role == "output":
            next_outputs[point.module] = point
        outputs_around = [output for output in next_outputs.values() if output.is_around(point)]
        if not is_right[point] and not any(is_right[output] for output in outputs_around):
            first_wrong_point = point
    return first_wrong_point


def _last_right_before(point: ProbePoint, is_right: Mapping[ProbePoint, bool]) -> str:
    """Describe the last right tensor before a wrong one."""
    points = list(is_right)
    right_points = [earlier for earlier in points[: points.index(point)] if is_right[earlier]]
    return f"{right_points[-1]}, which is right" if right_points else "none"


def _bring_to_one_form(
    point: ProbePoint, tensor: _RecordedTensor, whole: Tensor, parallel: ParallelModel
) -> ComparedArray | None:
    """Bring the tensors of both models at a point to one form: the block of this process.

    The tensor of one device is cut: a whole [8, 4] under "b/dp c" on dp=2 -> rows 0-3 or 4-7, beside
    this process's block [4, 4]. The tensor of the parallel model is summed if it is an addend, as
    under "b c | sum(tp)": one device has only the sum. Returns None if the layout does not fit the
    tensor: then the two cannot be compared.

    Args:
        point: The point.
        tensor: The tensor of the parallel model.
        whole: The tensor of one device.
        parallel: The state of the parallel model.
    """
    context = parallel.context
    x = tensor.value
    if len(tensor.layout.dims) != x.ndim and ELLIPSIS not in tensor.layout.names:
        return None  # an output without a rule: its layout was a guess
    # Along axes that the rule does not name, a tensor is sharded as activations are around it: an
    # input as in the module outside, an output as in this module.
    hooks = parallel.hooks[point.module]
    outer_layout = _layout_inside(hooks.parent if point.role == "input" else hooks)
    layout = with_outer_axes(tensor.layout.resolved(x.ndim), tensor.named_axes, outer_layout)
    if point.role == GRADIENT and layout.tags:
        return None  # gradients of addends and of copies are no parts of that of one device
    without_tags = Layout(layout.dims)
    try:
        block = context.redistribute(whole, unsharded(layout), without_tags, whole.shape)
    except XshardError:  # the layout does not fit: another guess that was wrong, and no mistake
        return None
    name = f"{point} as '{layout_text(layout)}'"
    sharding = Sharding(layout, context.axes, tuple(whole.shape))
    expected = Expected(
        kind="output", name=name, sharding=sharding, block=block, largest=largest_value(whole)
    )
    return ComparedArray(expected, _reduce_tags(x, layout, context))


def mismatch_of(
    expected: Expected, block: Tensor, largest: float, tol: float, context: ParallelContext
) -> Mismatch:
    """Report an array that is wrong on some process.

    Args:
        expected: The array as one device computes it.
        block: This process's block as the parallel model computes it.
        largest: The largest value of all arrays of its kind.
        tol: The tolerance.
        context: The mesh and options.
    """
    # The kit looks at numpy arrays of all processes together, and finds what kind of mistake it is.
    local_blocks = [array_of(x.cpu().contiguous()) for x in (block, expected.block)]
    blocks_of_processes = _from_all_processes(local_blocks, context)
    blocks, expected_blocks = zip(*blocks_of_processes, strict=True)
    case = Case(
        got=blocks, want=expected_blocks, sharding=expected.sharding, tolerance=tol, largest=largest
    )
    subject = Subject(
        kind=expected.kind,
        name=expected.name,
        runtime="torch",
        mesh=context.axes,
        against="one device",
    )
    return located(subject, case.settled())


def _from_all_processes(local_object: Any, context: ParallelContext) -> list[Any]:
    """Return the objects of all processes, in the order of devices."""
    gathered: list[Any] = [None] * context.axes.n_devices
    group = context.processes.group(context.axes.axes).process_group
    dist.all_gather_object(gathered, (context.processes.device, local_object), group)
    # The group is in the order of ranks, which a mesh may permute.
    return [x for _, x in sorted(gathered, key=itemgetter(0))]


def _layout_inside(hooks: ModuleHooks | None) -> Layout:
    """Return the named dims and the tags of activations inside a module, by all rules around them."""
    if hooks is None:
        return Layout("()")
    layout = _layout_inside(hooks.parent)
    for rule in hooks.inputs:
        layout = layout_inside(rule.rule, layout)
    return layout


def _reduce_tags(x: Tensor, layout: Layout, context: ParallelContext) -> Tensor:
    """Reduce a block as the tags of its layout say: "b c | sum(tp)" -> "b c"."""
    tags = tuple(tag for tag in layout.tags if tag[0] != "copy")
    if not tags:
        return x
    dims = unsharded(layout).dims  # blocks as they are: nothing is gathered
    return redistribute(x, (Layout(dims, tags), Layout(dims)), context.mesh)
