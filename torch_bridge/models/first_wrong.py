"""The first module of a parallel model with a wrong output, by the tensors that go in and out of modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from torch_bridge.autodiff.blocks import array_of
from torch_bridge.models.hooks import ModuleHooks
from torch_bridge.models.parallel import ParallelModel, described
from torch_bridge.models.parameters import ParallelContext, unsharded
from torch_bridge.models.verify import Wanted, differing
from torch_bridge.redistribution import redistribute
from xshard import Layout, Sharding, XshardError
from xshard.models import inside, placed, written
from xshard.notation.parser import ELLIPSIS
from xshard.testing.diagnosis.evidence import Case
from xshard.testing.mismatch import Mismatch, Subject, located, mismatch_text


class Place(NamedTuple):
    """The place of a tensor: its module, "input" or "output", the number of its rule, and of the call."""

    module: str
    side: str
    rule: int
    call: int

    def __str__(self) -> str:
        return f"the {self.side} of {self.module or 'the model'}"

    def is_around(self, other: Place) -> bool:
        is_within = other.module.startswith(f"{self.module}." if self.module else "")
        return is_within and (other.module != self.module or other.side != self.side)


# An input of a module before its rule, or an output after it; its layout, along the axes that the rule names.
Seen = dict[Place, tuple[Tensor, Layout, Collection[str]]]


@contextmanager
def watching(
    model: nn.Module, hooks: Mapping[str, ModuleHooks], runs: list[Seen]
) -> Iterator[None]:
    """Add a run: the tensors that go in and out of modules with rules, in the order of the forward pass."""
    seen = Seen()
    calls = Counter[Any]()
    runs.append(seen)

    def see(own: ModuleHooks, side: str, tensors: Sequence[Any]) -> None:
        # An output without a rule lies as the first input with as many dims.
        default = [(unsharded(each.rule.dst), ()) for each in own.inputs[:1]] or [
            (Layout("..."), ())
        ]
        rules = [each.rule for each in (own.inputs if side == "input" else own.outputs)]
        ways = [(each.src if side == "input" else each.dst, each.axes) for each in rules] or default
        for number, (x, way) in enumerate(zip(tensors, ways, strict=False)):
            if isinstance(x, Tensor):
                key = own.name, side, number
                seen[Place(*key, calls[key])] = x.detach().clone(), *way
                calls[key] += 1

    def enter(own: ModuleHooks, module: nn.Module, args: Any, kwargs: Any) -> None:
        values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        see(own, "input", [values.get(own.argument(each.key, values)) for each in own.inputs])

    def leave(own: ModuleHooks, module: nn.Module, args: Any, result: Any) -> None:
        see(own, "output", own.results(result))

    with ExitStack() as handles:
        for name, own in hooks.items():
            module = getattr(model, "_orig_mod", model).get_submodule(name)
            before = partial(enter, own)
            after = partial(leave, own)
            handles.enter_context(
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            )
            handles.enter_context(module.register_forward_hook(after))
        yield


def first_wrong(one: Seen, many: Seen, parallel: ParallelModel, tol: float) -> tuple[str, str]:
    """The first wrong tensor of a parallel run against one device's, and a text about it; "" if none is.
    Tensors inside a module do not count if its output is right. All processes call it.
    """
    context = parallel.context
    called = _answers(set(many), parallel.context)
    pairs: dict[Place, tuple[Wanted, Tensor]] = {}
    for place, (x, layout, named) in many.items():
        has_dims = len(layout.dims) == x.ndim or ELLIPSIS in layout.names
        if not has_dims or place not in one or not all(place in each for each in called):
            continue
        own = parallel.hooks[place.module]
        whole = one[place][0]
        layout = placed(
            layout.resolved(x.ndim), named, _inside(own.parent if place.side == "input" else own)
        )
        try:
            block = context.moved(whole, unsharded(layout), Layout(layout.dims), whole.shape)
        except XshardError:  # the layout does not fit
            continue
        largest = whole.abs().max().item() if whole.numel() else 0.0
        name = f"{place} as '{written(layout)}'"
        sharding = Sharding(layout, context.axes, tuple(whole.shape))
        pairs[place] = (
            Wanted("output", name, sharding, block, largest),
            _reduced(x, layout, context),
        )
    wanted, blocks = zip(*pairs.values(), strict=True) if pairs else ((), ())
    flags = differing(wanted, blocks, tol, context) if pairs else []
    right = {place: not n for place, n in zip(pairs, flags, strict=True) if n < 2}
    leaving = [place for place in right if place.side == "output" and right[place]]
    wrong = [p for p in right if not right[p] and not any(each.is_around(p) for each in leaving)]
    if not wrong:
        return "", ""
    place, (w, block) = wrong[0], pairs[wrong[0]]
    before = [each for each in [*right][: [*right].index(place)] if right[each]]
    w = w._replace(
        name=f"{w.name}, after " + (f"{before[-1]}, which is right" if before else "none")
    )
    text = mismatch_text(mismatch_of(w, block, w.largest, tol, context)).replace("\n", "\n  ")
    return str(place), described(text, parallel, place.module)


def mismatch_of(
    w: Wanted, block: Tensor, largest: float, tol: float, context: ParallelContext
) -> Mismatch:
    """The report of an array that is wrong on some process. largest: the largest value of its kind."""
    pair = [array_of(x.cpu().contiguous()) for x in (block, w.block)]
    got, want = zip(*_answers(pair, context), strict=True)
    case = Case.of(got, want, w.sharding, tol, largest, {})
    return located(Subject(w.kind, w.name, "torch", context.axes, "one device"), case)


def _answers(own: Any, context: ParallelContext) -> list[Any]:
    """The objects of all processes, by devices."""
    answers: list[Any] = [None] * context.axes.n_devices
    group = context.processes.group(context.axes.axes).process_group
    dist.all_gather_object(answers, (context.processes.device, own), group)
    return [answer for _, answer in sorted(answers, key=itemgetter(0))]


def _inside(hooks: ModuleHooks | None) -> Layout:
    """The dims and tags of activations inside a module."""
    layout = Layout("()") if hooks is None else _inside(hooks.parent)
    for each in hooks.inputs if hooks else ():
        layout = inside(each.rule, layout)
    return layout


def _reduced(x: Tensor, layout: Layout, context: ParallelContext) -> Tensor:
    """A block after the reductions that its layout names."""
    dims = unsharded(layout).dims
    tags = tuple(tag for tag in layout.tags if tag[0] != "copy")
    return redistribute(x, (Layout(dims, tags), Layout(dims)), context.mesh) if tags else x
