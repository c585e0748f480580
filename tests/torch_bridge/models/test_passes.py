"""Whatever happens in and between passes: gradients are those of one device, modules have their blocks."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import random
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.func import functional_call, jvp
from torch.nn.utils.parametrizations import weight_norm
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

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
_LOW = xt.Precision(param_dtype=torch.float64)


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
        assert x.is_leaf and x.shape == parameter.sharding.local_shape(dist.get_rank()), (
            what,
            name,
        )
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

    def error_of(self, event: str) -> str:
        try:
            self.happen(event)
        except xs.XshardError as error:
            return str(error)
        return ""

    def begin_anew(self) -> None:
        self.model.fails_at = None
        for layer in self.model.layers:
            layer.error = None
        for model in self.both():
            model.zero_grad()

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


def check_events(seed: int) -> int:
    """Let 9 random events happen -> how many were refused, after which a new step began."""
    run = Run(seed)
    refused = 0
    for event in [*run.random.choices(EVENTS, k=8), "pass"]:
        error = run.error_of(event)
        if error:
            # What cannot be known is refused, on all ranks alike, and a new step goes on.
            assert any(text in error for text in REFUSED), (run.rules, run.events, error)
            refused += 1
            run.begin_anew()
            run.happen("pass")
    return refused


@on_two
def test_random_events_leave_the_gradients_of_one_device() -> None:
    """60 runs of passes, failures by two kinds of exceptions, copies, and changed gradients."""
    refused = sum(map(check_events, range(60)))
    assert 0 < refused < 30, refused


class Stops(nn.Module):
    error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return x


@on_two
def test_what_an_interrupted_call_leaves_is_ended_by_the_next() -> None:
    """Hooks of autograd and function modes are gone, also if the next call is in a context of the user."""
    model = xt.parallelize(_whole(), mesh=MESH, inputs={"": "b c -> b/dp c"}, **RULES[2])
    domain: Any = xt.nn.domain_parallel(
        nn.Sequential(nn.Conv1d(3, 3, 3, padding=1), Stops()), "b c s/dp", MESH
    )
    block = torch.ones(2, 3, 2)
    model.layers[1].error = domain[1].error = KeyboardInterrupt()
    for call in (lambda: _pass(model), lambda: _pass(model, "layer"), lambda: domain(block)):
        with pytest.raises(KeyboardInterrupt):
            call()
    model.layers[1].error = domain[1].error = None
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x):
        _pass(model)
        with torch.device("cpu"):
            domain(block)
            assert len(function_modes()) == 1
    assert seen and not function_modes()
    seen.clear()
    _pass(_whole())
    assert not seen
    assert all(x.is_leaf for x in model.parameters())


@on_two
def test_every_form_of_checkpoints_runs_layers_twice() -> None:
    """Under each way to gather: gradients are right, and what a checkpoint drops is computed again."""
    save_matmuls = functools.partial(
        create_selective_checkpoint_contexts,
        [torch.ops.aten.mm.default, torch.ops.aten.addmm.default],
    )

    def wrapped(model: Any, reentrant: bool) -> None:
        kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=kind)
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=wrapper, check_fn=lambda x: isinstance(x, Layer)
        )

    def selective(model: Any, reentrant: bool) -> None:
        for layer in model.layers:
            inner = layer.inner
            layer.inner = lambda x, f=inner: checkpoint(
                f, x, use_reentrant=False, context_fn=save_matmuls
            )

    for rules in RULES:
        for form in (*MODES[2:], "wrapper", "wrapper reentrant", "selective"):
            one, model = _whole(), _whole()
            xt.parallelize(model, mesh=MESH, inputs={"": "b c -> b/dp c"}, **rules)
            n_calls = [0]
            for layer in model.layers:
                layer.up.register_forward_hook(lambda *_, n=n_calls: n.__setitem__(0, n[0] + 1))
            if form.startswith(("wrapper", "selective")):
                {"w": wrapped, "s": selective}[form[0]](model, "reentrant" in form)
            for _ in range(2):
                _pass(one)
                _pass(model, form)
            whole = {f"{name}": x for name, x in one.named_parameters()}
            parallel = parallel_of(model)
            for name, x in whole.items():
                parameter = parallel.by_name[name]
                right = parameter.block_of(x.grad, parallel.context)
                assert torch.equal(parameter.tensor.grad, right), (rules, form, name)
            assert n_calls[0] == 12, (rules, form, n_calls)


@on_two
def test_gathered_parameters_leave_with_their_module_in_the_backward_pass() -> None:
    """Each layer has them alone, though the program still holds what the model returned."""
    model = xt.parallelize(_whole(), mesh=MESH, inputs={"": "b c -> b/dp c"}, **RULES[2])
    n_rows = []

    def note(_: Tensor) -> None:
        n_rows.append([len(layer.up.weight) for layer in model.layers])

    for layer in model.layers:
        layer.up.register_forward_hook(lambda _, args, y: y.register_hook(note) and None)
    y = model(_input())
    y.sum().backward()
    assert n_rows == [[2, 2, 4], [2, 4, 2], [4, 2, 2]]
    assert [len(layer.up.weight) for layer in model.layers] == [2, 2, 2]


class Decomposes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.svd(x)[0]


@on_two
def test_copies_of_domain_parallel_models_know_their_modules() -> None:
    model = xt.nn.domain_parallel(nn.Sequential(nn.ReLU(), Decomposes()), "b c s/dp", MESH)
    for each in (model, copy.deepcopy(model)):
        check_error(lambda m=each: m(torch.ones(2, 3, 2)), "XshardError", "1: linalg_svd()")
    check_error(lambda: pickle.dumps(model), "XshardError", "cannot be pickled", "xt.save")


class Attends(nn.Module):
    """Reads a parameter of a module that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.mha(x[None], x[None], x[None])[0][0]


class Reads(nn.Module):
    """Reads a parameter of a module that it never calls, whose block fits as the whole would."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.up.weight.sum(0)


class ReadsTwice(nn.Module):
    """Calls a module, and reads its weight in a forward pass of its own: by name, or by a reference."""

    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4, dtype=torch.float64)
        self.kept = [] if by_name else [self.up.weight]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.kept[0] if self.kept else self.up.weight
        return self.up(x) * weight.sum(0)


class Clamps(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-1, 1)
        return super().forward(x)


def _replaces(model: Any) -> None:
    model.layers[0] = Layer().double()


def _skips(model: Any) -> None:
    model.layers[0] = nn.Identity()


def _adapts(model: Any) -> None:
    model.layers[0].extra = nn.Linear(4, 4)


@on_two
def test_what_rules_do_not_reach_is_refused_on_all_ranks() -> None:
    """Modules that are read and not called, parts that came later, writes to what is only gathered."""

    def step(model: Any, change: Any = None, **rules: Any) -> Any:
        zero = {"**": "o/dp ... -> o ..."}
        rules = {"parameters": zero, "inputs": {"": "b c -> b/dp c"}} | rules
        model = xt.parallelize(model, mesh=MESH, **rules)
        if change is not None:
            change(model)
        _pass(model)
        return model

    def refused(words: str, *args: Any, **rules: Any) -> None:
        check_error(lambda: step(*args, **rules), "XshardError", words)

    refused("up is never called", Reads(), gathers="up")
    rules = {"parameters": {"**": "..."}}
    inputs = {"": "b c -> b/dp c", "mha.out_proj": "... -> ... | copy(dp)"}
    refused("mha.out_proj is never called", Attends(), inputs=inputs, **rules)
    step(Attends(), **rules)
    refused("weight was written to in a forward pass", Clamps(4, 4, dtype=torch.float64))
    step(Clamps(4, 4, dtype=torch.float64), **rules)
    for more in ({}, rules):
        refused("layers.0.gain came into it", _whole(), _replaces, **more)
        refused("layers.0.extra.weight came into it", _whole(), _adapts, **more)
        refused("came into it", _whole(), lambda m: weight_norm(m.layers[0].up), **more)

    # A model that has lost a parameter is in nobody's way.
    lost = xt.parallelize(_whole(), {"**": "o/dp ... -> o ..."}, {"": "b c -> b/dp c"}, mesh=MESH)
    weight_norm(lost.layers[0].up)
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    torch.optim.AdamW(other.parameters()).step()
    refused("layers.0 has left it", _whole(), _skips, gathers="layers.*")

    def computed(model: Any) -> None:
        tensors = {name: x * 1 for name, x in model.named_parameters()}
        functional_call(model, tensors, (_input(),))

    refused("was computed, as for torch.func.functional_call", _whole(), computed, **rules)
    check_error(lambda: xt.grad_norm(_whole()), "XshardError", "not parallel")


@on_two
def test_blocks_that_are_read_for_gathered_parameters_are_refused() -> None:
    """A list keeps what was a parameter, another module reads it, the loss does: each gets a block."""
    zero, replicated = {"**": "o/dp ... -> o ..."}, {"**": "..."}

    def step(model: Any, loss: Any = lambda m, y: y.sum(), **rules: Any) -> Any:
        model = xt.parallelize(model, inputs={"": "b c -> b/dp c"}, mesh=MESH, **rules)
        loss(model, model(_input())).backward()
        return model

    def refused(*args: Any, **rules: Any) -> None:
        words = ("is read as it is stored, this process's block", "self.head.weight", 'gathers=""')
        check_error(lambda: step(*args, **rules), "PlanError", *words)

    for dtype in (torch.float64, torch.float32):
        refused(ReadsTwice(by_name=False).to(dtype), parameters=zero, precision=_LOW)
    refused(ReadsTwice(by_name=True), parameters=zero, gathers="up")
    step(ReadsTwice(by_name=True), parameters=zero)
    step(ReadsTwice(by_name=False), parameters=replicated)

    refused(_whole(), lambda m, y: (y @ m.layers[0].up.weight.T).sum(), parameters=zero)
    # Whose block is gathered by hand, and whose sum is whole, is right; and so is a sum of elements.
    whole = "o/dp i -> o i | copy(dp)"
    step(
        _whole(),
        lambda m, y: (y @ xt.redistribute(m.layers[0].up.weight, whole, MESH)).sum(),
        parameters=zero,
    )
    total = "() | sum(dp) -> () | copy(dp)"
    step(
        _whole(),
        lambda m, y: y.sum() * xt.redistribute(m.layers[0].up.weight.sum(), total, MESH),
        parameters=zero,
    )
    step(_whole(), lambda m, y: y.sum() + m.layers[0].up.weight.sum(), parameters=zero)


@on_two
def test_hooks_from_before_compute_weights_of_gathered_parameters() -> None:
    """As those of `torch.nn.utils.weight_norm` and of pruning do."""

    def made() -> Any:
        model = _whole()
        for layer in model.layers:
            weight = layer.up.weight
            del layer.up._parameters["weight"]
            layer.up.register_parameter("raw", nn.Parameter(weight.detach()))
            layer.up.register_forward_pre_hook(_set_weight)
        return model

    one = made()
    _pass(one)
    for gathers in ("", "layers.*", "layers.*.up|layers.*"):
        model = xt.parallelize(
            made(), mesh=MESH, inputs={"": "b c -> b/dp c"}, gathers=gathers, **ZERO
        )
        for _ in range(2):
            model.zero_grad()
            _pass(model)
            _check(model, one, gathers)
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model.layers[0](torch.ones(2, 3, dtype=torch.float64))
        model.zero_grad()
        _pass(model)
        _check(model, one, gathers)


def _set_weight(module: Any, args: Any) -> None:
    module.weight = module.raw * (1 + module.raw.sum(0))


@on_two
def test_gradients_from_before_are_cut_as_their_parameters_are() -> None:
    for rules in RULES:
        one, model = _whole(), _whole()
        _pass(one)
        _pass(model)
        xt.parallelize(model, mesh=MESH, inputs={"": "b c -> b/dp c"}, **rules)
        _check(model, one, rules)
        _pass(one)
        _pass(model)
        _check(model, one, rules)


@on_two
def test_converted_parts_and_functional_calls_have_the_gradients_of_one_device() -> None:
    for rules in RULES:
        one, model = _whole(), _whole()
        xt.parallelize(model, mesh=MESH, inputs={"": "b c -> b/dp c"}, **rules)
        _pass(one)
        _pass(model)
        for each in (one, model):
            each.zero_grad()
            each.layers[1].up.float()
            up = each.layers[1].up
            up.register_forward_pre_hook(lambda _, args: (args[0].float(),))
            up.register_forward_hook(lambda _, args, y: y.double())
            _pass(each)
        _check(model, one, rules)
        leaves = {name: x.detach().clone().requires_grad_() for name, x in model.named_parameters()}
        functional_call(model, leaves, (_input(),)).mul(torch.arange(4.0)).sum().backward()
        for name, x in model.named_parameters():
            assert torch.equal(x.grad, leaves[name].grad), (rules, name)
        _pass(model)
        _pass(one)
        _check(model, one, rules)


@on_two
def test_transforms_of_torch_func_reach_through_gathers() -> None:
    """`jvp` and `grad` for the input; `grad` for parameters is refused, or that of one device."""
    one = _whole()
    tangent = torch.ones_like(_input())
    expected = jvp(lambda x: (one(x) * torch.arange(4.0)).sum(), (_input(),), (tangent,))
    _pass(one)
    for rules in RULES:
        model = xt.parallelize(_whole(), mesh=MESH, inputs={"": "b c -> b/dp c"}, **rules)
        found = jvp(lambda x, model=model: _sum_over_all(model(x)), (_input(),), (tangent,))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(
            torch.func.grad(lambda x, model=model: _sum_over_all(model(x)))(_input()),
            torch.func.grad(lambda x: (one(x) * torch.arange(4.0)).sum())(_input()),
        )
    model = xt.parallelize(_whole(), mesh=MESH, inputs={"": "b c -> b/dp c"}, **RULES[2])
    blocks = {name: x.detach() for name, x in model.named_parameters()}
    _pass(model)
    x = _input()
    found_gradients = torch.func.grad(
        lambda blocks: _sum_over_all(functional_call(model, blocks, (x,)))
    )({name: x for name, x in blocks.items() if name.startswith("layers.")})
    for name, gradient in found_gradients.items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)


@on_two
def test_a_parameter_frozen_after_the_forward_pass_gets_no_gradient() -> None:
    """As the discriminator of a GAN, while the generator's gradients go through it."""
    for rules in RULES:
        one = _whole()
        model = xt.parallelize(_whole(), mesh=MESH, inputs={"": "b c -> b/dp c"}, **rules)
        for each, loss_of in (
            (one, lambda y: (y * torch.arange(4.0)).sum()),
            (model, _sum_over_all),
        ):
            _pass(each)
            loss = loss_of(each(_input().requires_grad_()))
            each.requires_grad_(False)
            loss.backward()
            each.requires_grad_(True)
        _check(model, one, rules)


def _sum_over_all(y: Tensor) -> Tensor:
    return xt.redistribute((y * torch.arange(4.0)).sum(), "() | sum(dp) -> ()", MESH)


@on_two
def test_a_model_that_trains_unverified_says_so_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for verified in (False, True):
            model = xt.parallelize(_whole(), mesh=MESH, inputs={"": "b c -> b/dp c"}, **DP)
            if verified:
                xt.verify(model, _input().detach(), loss=_sum_over_all)
            _pass(model)
            _pass(model)
    kinds = [each.category for each in caught]
    assert kinds.count(xs.errors.UnverifiedWarning) == (dist.get_rank() == 0)
