"""The first module of a parallel model with a wrong output, by the tensors that go in and out of modules."""

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
    Pair,
    Wanted,
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

GRADIENT = "gradient of the output"  # a side


class Place(NamedTuple):
    """Where a tensor goes into a module, or comes out of it, or a gradient comes back.

    side: "input", "output" or `GRADIENT`. rule: the number of its rule on that side. call: how many
    came before it there.
    """

    module: str
    side: str
    rule: int
    call: int

    def __str__(self) -> str:
        return f"the {self.side} of {title_of(self.module)}"

    def is_around(self, other: Place) -> bool:
        """Return whether another tensor comes before this output: inside its module, or as its input."""
        if other.module == self.module:
            return other.side != self.side
        return is_inside(other.module, self.module)


class _SeenTensor(NamedTuple):
    """An input of a module before its rule, or an output after it.

    layout: its layout along the axes that the rule names, `named_axes`; others are as around the module.
    """

    value: Tensor
    layout: Layout
    named_axes: Collection[str]


Seen = dict[Place, _SeenTensor]  # of one forward pass, in its order


class WrongTensor(NamedTuple):
    """The first wrong tensor: where it is in a sentence, a text about it, and what may explain others."""

    place: str
    text: str
    cause: Cause | None = None


@dataclass(eq=False)
class _Watcher:
    """Hooks of one module that note what goes in and out.

    The watchers of all modules fill `seen` and `calls`: how many calls there were of a place, by the
    place of its first call.
    """

    hooks: ModuleHooks
    seen: Seen
    calls: Counter[Place]

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        for number, rule in enumerate(self.hooks.inputs):
            x = values.get(self.hooks.argument(rule.key, values))
            self._note("input", number, x, rule.rule.src, rule.rule.axes)

    def after_forward(self, module: nn.Module, args: Any, result: Any) -> None:
        rules = self.hooks.outputs
        results = self.hooks.results(result)  # one for each rule, or the first tensor
        if not rules:
            self._note("output", 0, results[0], self._default_layout(), ())
        for number, rule in enumerate(rules):
            self._note("output", number, results[number], rule.rule.dst, rule.rule.axes)

    def _default_layout(self) -> Layout:
        """Return the layout of an output without a rule: as the first input, with as many dims."""
        if self.hooks.inputs:
            first: TensorRule = self.hooks.inputs[0]
            return unsharded(first.rule.dst)
        return Layout("...")

    def _note(self, side: str, number: int, x: Any, layout: Layout, axes: Sequence[str]) -> None:
        """Note a tensor with its layout, if it is one. number: of its rule. axes: that the rule names."""
        if isinstance(x, Tensor):
            first_call = Place(self.hooks.name, side, number, call=0)
            place = first_call._replace(call=self.calls[first_call])
            self.calls[first_call] += 1
            # A clone, because the module may write to its input afterwards.
            self.seen[place] = _SeenTensor(x.detach().clone(), layout, axes)
            if side == "output" and x.requires_grad:
                x.register_hook(partial(self._note_gradient, place))

    def _note_gradient(self, output: Place, gradient: Tensor) -> None:
        """Note the gradient of an output, under the layout of that; a hook of the output."""
        seen = self.seen[output]._replace(value=gradient.detach().clone())
        self.seen[output._replace(side=GRADIENT)] = seen


@contextmanager
def watching(
    model: nn.Module, hooks: Mapping[str, ModuleHooks], runs: list[Seen]
) -> Iterator[None]:
    """Record, inside the `with`, the inputs and outputs of all modules that have layout rules.

    Args:
        model: A parallel model, or its copy on one device.
        hooks: The parallel model's hooks, by the name of the module.
        runs: The record is appended here: a dict {place: tensor}, filled in the order of the
            forward pass.
    """
    seen: Seen = {}
    calls: Counter[Place] = Counter()
    runs.append(seen)
    root = uncompiled(model)
    with ExitStack() as handles:
        for name, rules in hooks.items():
            module = root.get_submodule(name)
            watcher = _Watcher(rules, seen, calls)
            # The first hook on the way in and the last on the way out: it sees tensors as they are
            # outside of the module.
            before = module.register_forward_pre_hook(
                watcher.before_forward, prepend=True, with_kwargs=True
            )
            handles.enter_context(before)
            handles.enter_context(module.register_forward_hook(watcher.after_forward))
        yield


def first_wrong(
    one_device_run: Seen, parallel_run: Seen, parallel: ParallelModel, tol: float
) -> WrongTensor | None:
    """Find the first input or output of a module that differs from one device's.

    Tensors inside a module whose output is right do not count. None if no tensor differs. All
    processes call it, and get the same answer.

    Args:
        one_device_run: What modules of the copy on one device got and returned, in order.
        parallel_run: The same of the parallel model: blocks of this process.
        parallel: The state of the parallel model.
        tol: The tolerance: see `verify`.
    """
    context = parallel.context
    pairs = _pairs(one_device_run, parallel_run, parallel)
    forward = {place: pair for place, pair in pairs.items() if place.side != GRADIENT}
    is_right = _compared_pairs(forward, tol, context)
    place = _first_wrong_place(is_right)
    if place is None:
        return None
    wanted, block = pairs[place]
    name = f"{wanted.name}, after {_last_right_before(place, is_right)}"
    mismatch = mismatch_of(wanted._replace(name=name), block, wanted.largest, tol, context)
    title = mismatch_text(mismatch).replace("\n", "\n  ")
    return WrongTensor(str(place), described(title, parallel, place.module))


def cause_in_loss(
    one_device_run: Seen, parallel_run: Seen, parallel: ParallelModel, tol: float
) -> Cause | None:
    """Find what a loss does wrong, by the first gradient that it sends back; None if that tells nothing.

    A mean over each process's own rows has gradients that are too large where rows are few. All
    processes call it, when all outputs are right.
    """
    pairs = _pairs(one_device_run, parallel_run, parallel)
    gradients = [place for place in pairs if place.side == GRADIENT]
    for place in gradients[:1]:  # it comes back first
        is_right = _compared_pairs({place: pairs[place]}, tol, parallel.context)
        if is_right.get(place, True):
            return None
        wanted, block = pairs[place]
        cause = mismatch_of(wanted, block, wanted.largest, tol, parallel.context).cause
        if cause is not None:
            return cause._replace(text=f"{place} is {cause.text}")
    return None


def _pairs(one_device_run: Seen, parallel_run: Seen, parallel: ParallelModel) -> dict[Place, Pair]:
    """Pair the tensors of both runs, by their place, in the order of the forward pass.

    Processes may call different modules. Left out are places that some process has not come to, and
    tensors that cannot be compared; the rest comes in the same order on all.
    """
    seen_by_process = _from_all_processes(set(parallel_run), parallel.context)
    places_on_all = set(one_device_run).intersection(*seen_by_process)
    pairs = {}
    for place, tensor in parallel_run.items():
        if place in places_on_all:
            pair = _pair(place, tensor, one_device_run[place].value, parallel)
            if pair is not None:
                pairs[place] = pair
    return pairs


def _compared_pairs(
    pairs: Mapping[Place, Pair], tol: float, context: ParallelContext
) -> dict[Place, bool]:
    """Tell for each place whether its tensor is right on all processes, in one collective.

    A tensor whose shape differs has another layout than was assumed for it. That proves nothing, and
    the place is left out of the result.
    """
    if not pairs:
        return {}
    flags = compare_on_all(list(pairs.values()), tol, context)
    is_right = {}
    for place, flag in zip(pairs, flags, strict=True):
        if flag != SHAPES_DIFFER:
            is_right[place] = flag == EQUAL
    return is_right


def _first_wrong_place(is_right: Mapping[Place, bool]) -> Place | None:
    """Return the first wrong tensor that does not lie inside a module whose output is right.

    A module may be called several times: its next output ends the call that the tensor is in.
    """
    first = None
    next_outputs: dict[str, Place] = {}  # by module
    for place in reversed(list(is_right)):
        if place.side == "output":
            next_outputs[place.module] = place
        around = [output for output in next_outputs.values() if output.is_around(place)]
        if not is_right[place] and not any(is_right[output] for output in around):
            first = place
    return first


def _last_right_before(place: Place, is_right: Mapping[Place, bool]) -> str:
    """Describe the last right tensor before a wrong one."""
    places = list(is_right)
    earlier = [p for p in places[: places.index(place)] if is_right[p]]
    return f"{earlier[-1]}, which is right" if earlier else "none"


def _pair(place: Place, tensor: _SeenTensor, whole: Tensor, parallel: ParallelModel) -> Pair | None:
    """Bring a tensor of both runs to one form, to compare them: the block of this process.

    The tensor of one device is cut: a whole [8, 4] under "b/dp c" on dp=2 -> rows 0-3 or 4-7, beside
    this process's block [4, 4]. The tensor of the parallel run is summed if it is an addend, as
    under "b c | sum(tp)": one device has only the sum. Returns None if the layout does not fit the
    tensor: then the two cannot be compared.

    Args:
        place: Where the tensor goes into a module, or comes out of it.
        tensor: This process's block, and its layout.
        whole: The tensor of one device.
        parallel: The state of the parallel model.
    """
    context = parallel.context
    x = tensor.value
    if len(tensor.layout.dims) != x.ndim and ELLIPSIS not in tensor.layout.names:
        return None  # an output without a rule: its layout was a guess
    # Along axes that the rule does not name, a tensor is sharded as activations are around it: an
    # input as in the module outside, an output as in this module.
    hooks = parallel.hooks[place.module]
    outer_layout = _layout_inside(hooks.parent if place.side == "input" else hooks)
    layout = with_outer_axes(tensor.layout.resolved(x.ndim), tensor.named_axes, outer_layout)
    if place.side == GRADIENT and layout.tags:
        return None  # gradients of addends and of copies are no parts of that of one device
    without_tags = Layout(layout.dims)
    try:
        block = context.redistribute(whole, unsharded(layout), without_tags, whole.shape)
    except XshardError:  # the layout does not fit: another guess that was wrong, and no mistake
        return None
    name = f"{place} as '{layout_text(layout)}'"
    sharding = Sharding(layout, context.axes, tuple(whole.shape))
    wanted = Wanted("output", name, sharding, block, largest_value(whole))
    return Pair(wanted, _reduced(x, layout, context))


def mismatch_of(
    wanted: Wanted, block: Tensor, largest: float, tol: float, context: ParallelContext
) -> Mismatch:
    """Report an array that is wrong on some process. largest: the largest value of its kind."""
    # The kit looks at numpy arrays of all processes together, and finds what kind of mistake it is.
    blocks = [array_of(x.cpu().contiguous()) for x in (block, wanted.block)]
    found, expected = zip(*_from_all_processes(blocks, context), strict=True)
    case = Case(found, expected, wanted.sharding, tol, largest)
    subject = Subject(wanted.kind, wanted.name, "torch", context.axes, "one device")
    return located(subject, case.settled())


def _from_all_processes(own: Any, context: ParallelContext) -> list[Any]:
    """Return the objects of all processes, in the order of devices."""
    answers: list[Any] = [None] * context.axes.n_devices
    group = context.processes.group(context.axes.axes).process_group
    dist.all_gather_object(answers, (context.processes.device, own), group)
    # The group is in the order of ranks, which a mesh may permute.
    return [answer for _, answer in sorted(answers, key=itemgetter(0))]


def _layout_inside(hooks: ModuleHooks | None) -> Layout:
    """Return the named dims and the tags of activations inside a module, by all rules around them."""
    if hooks is None:
        return Layout("()")
    layout = _layout_inside(hooks.parent)
    for rule in hooks.inputs:
        layout = layout_inside(rule.rule, layout)
    return layout


def _reduced(x: Tensor, layout: Layout, context: ParallelContext) -> Tensor:
    """Add up the addends that a layout names, and so on for its other reductions."""
    tags = tuple(tag for tag in layout.tags if tag[0] != "copy")
    if not tags:
        return x
    dims = unsharded(layout).dims  # blocks as they are: nothing is gathered
    return redistribute(x, (Layout(dims, tags), Layout(dims)), context.mesh)
