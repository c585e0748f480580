"""Whatever happens between and in passes, gradients are those of one device, and modules have their blocks."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils.checkpoint import checkpoint

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import SharedRanks, check_error
from torch_bridge.models.parallel import parallel_of

MESH = xs.Mesh(dp=2)
DP = {"parameters": {"**": "..."}}
ZERO = {"parameters": {"**.gain": "c/dp -> c", "**": "o/dp ... -> o ..."}}
RULES: list[dict[str, Any]] = [
    DP,
    ZERO,  # the model gathers all
    ZERO | {"gathers": "layers.*"},
    ZERO | {"gathers": "layers.*", "keep": True},
    {"parameters": {"layers.1.**": "...", "**.gain": "c/dp -> c", "**": "o/dp ... -> o ..."}},
    {"parameters": ZERO["parameters"], "gathers": "layers.0", "keep": "**.weight"},
]

on_two = SharedRanks(2)


class Layer(nn.Module):
    """A layer whose own function reads parameters; a part of it may be computed again."""

    again: str = ""
    error: BaseException | None = None

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(4))

    def inner(self, x: Tensor) -> Tensor:
        return self.up(x) * self.gain

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        if self.again.startswith("inside"):
            return x + checkpoint(self.inner, x, use_reentrant="reentrant" in self.again)
        return x + self.inner(x)


class Net(nn.Module):
    again: str = ""
    fails_at: int | None = None  # in the backward pass, before this layer
    error: type[BaseException] = RuntimeError

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            layer.again = self.again
            if self.fails_at == i:
                x.register_hook(self._fail)
            if self.again.startswith("layer"):
                x = checkpoint(layer, x, use_reentrant="reentrant" in self.again)
            else:
                x = layer(x)
        return x

    def _fail(self, _: Tensor) -> None:
        raise self.error("in the middle of a backward pass")


def _whole() -> Any:
    """A model of small integers, so that all sums are exact."""
    model = Net().double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator))
    return model


def _input() -> Tensor:
    x = torch.randint(-2, 3, (4, 4), generator=torch.Generator().manual_seed(1)).double()
    return x.requires_grad_()


def _pass(model: Any, again: str = "") -> None:
    model.again = again
    y = model(_input())
    (y * torch.arange(4.0)).sum().backward()


def _check(model: Any, one: Any, what: Any) -> None:
    """Gradients are those of one device, to the last bit, and modules have leaves: their blocks."""
    parallel = parallel_of(model)
    whole = dict(one.named_parameters())
    for name, x in model.named_parameters():
        parameter = parallel.by_name[name]
        assert x.is_leaf and x.shape == parameter.sharding.local_shape(dist.get_rank()), (what, name)
        right = whole[name].grad
        right = torch.zeros_like(whole[name]) if right is None else right
        found = torch.zeros_like(x) if x.grad is None else x.grad
        assert torch.equal(found, parameter.block_of(right, parallel.context)), (what, name)


MODES = ("", "", "layer", "layer reentrant", "inside", "inside reentrant")
EVENTS = ("pass", "no_sync", "no_sync", "fail", "fail forward", "zero", "scale", "copy", "freeze")


class Run:
    """The same events on a parallel model and on one device."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.one, self.model = _whole(), _whole()
        self.rules = self.random.choice(RULES)
        xt.parallelize(self.model, mesh=MESH, inputs={"": "b c -> b/dp c"}, **self.rules)
        self.events: list[str] = []

    def both(self) -> tuple[Any, Any]:
        return self.one, self.model

    def happen(self, event: str) -> None:
        detail = self.random.randrange(12)
        mode = self.random.choice(MODES)
        self.events.append(f"{event} {detail} {mode}")
        getattr(self, "on_" + event.replace(" ", "_"))(detail, mode)

    def on_pass(self, detail: int, mode: str) -> None:
        _pass(self.one)
        _pass(self.model, mode)
        _check(self.model, self.one, (self.rules, self.events))

    def on_no_sync(self, detail: int, mode: str) -> None:
        _pass(self.one)
        with xt.no_sync(self.model):
            _pass(self.model, mode)

    def on_fail(self, detail: int, mode: str) -> None:
        self.model.fails_at = detail % 3
        self.model.error = (RuntimeError, KeyboardInterrupt)[detail % 2]
        syncs = xt.no_sync(self.model) if detail < 6 else contextlib.nullcontext()
        try:
            with syncs:
                _pass(self.model, mode)
        except self.model.error:
            self.model.fails_at = None
        assert self.model.fails_at is None

    def on_fail_forward(self, detail: int, mode: str) -> None:
        error = (RuntimeError, KeyboardInterrupt)[detail % 2]
        layer = self.model.layers[detail % 3]
        layer.error = error("in the middle of a forward pass")
        try:
            _pass(self.model, mode)
        except error:
            layer.error = None
        assert layer.error is None
        parallel_of(self.model)  # any verb ends the pass, as the next pass does

    def on_zero(self, detail: int, mode: str) -> None:
        for model in self.both():
            model.zero_grad(set_to_none=detail % 2 == 0)

    def on_scale(self, detail: int, mode: str) -> None:
        for model in self.both():
            for x in model.parameters():
                if x.grad is not None and detail % 2:
                    x.grad = x.grad * 2
                elif x.grad is not None:
                    x.grad.mul_(2)

    def on_copy(self, detail: int, mode: str) -> None:
        self.one.zero_grad()  # a copy has no gradients
        if detail % 2:
            self.model = copy.deepcopy(self.model)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, about hooks that a pickle does not have
                self.model = pickle.loads(pickle.dumps(self.model))

    def on_freeze(self, detail: int, mode: str) -> None:
        for model in self.both():
            x = list(model.parameters())[detail % 9]
            x.requires_grad_(not x.requires_grad)


REFUSED = (
    "was changed between passes inside no_sync",
    "was frozen between passes inside no_sync",
    "a backward pass failed after others inside",
)


@on_two
def test_random_events_leave_the_gradients_of_one_device() -> None:
    """60 runs of 9 events: passes, failures by two kinds of exceptions, copies, changed gradients."""
    refused = 0
    for seed in range(60):
        run = Run(seed)
        for event in [*run.random.choices(EVENTS, k=8), "pass"]:
            try:
                run.happen(event)
            except xs.XshardError as error:
                # What cannot be known is refused, on all ranks alike, and a new step goes on.
                assert any(text in str(error) for text in REFUSED), (run.rules, run.events, error)
                refused += 1
                run.model.fails_at = None
                for layer in run.model.layers:
                    layer.error = None
                for model in run.both():
                    model.zero_grad()
                run.happen("pass")
    assert 0 < refused < 30, refused


@on_two
def test_what_an_interrupted_call_leaves_is_ended_by_the_next() -> None:
    """Hooks of autograd and function modes are gone, and blocks are back, also inside contexts of others."""
    model = xt.parallelize(_whole(), mesh=MESH, inputs={"": "b c -> b/dp c"}, **RULES[2])
    layer = model.layers[1]
    domain = xt.nn.domain_parallel(
        nn.Sequential(nn.Conv1d(4, 4, 3, padding=1, dtype=torch.float64), Layer().double()),
        "b c/dp s",
        MESH,
    )
    layer.error = domain[1].error = KeyboardInterrupt()
    calls = [lambda: model(_input()), lambda: domain(torch.ones(2, 2, 4).double())]
    calls = calls[:1]
    for call in calls:
        for _ in range(2):
            try:
                call()
            except KeyboardInterrupt:
                continue
            raise AssertionError("not interrupted")
    layer.error = None
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x):
        _pass(model)
    assert seen and not function_modes()
    seen.clear()
    (torch.ones(2, requires_grad=True) ** 2).sum().backward()
    assert not seen
    _check(model, model, "blocks")
