"""Torch's own code on the blocks of a parallel model: right, or refused by name on all ranks alike."""

from __future__ import annotations

import functools
import math
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
    parametrizations,
)
from torch.optim import Optimizer

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import SharedRanks, check_error, error_of, still_connected
from torch_bridge.models import block_guards

MESH = xs.Mesh(tp=2)
PAGE = Path(__file__).parents[3] / "docs/models.md"
PROGRAM = """
import torch
from torch.nn.utils import get_total_norm
from torch.optim import optimizer
def state():
    hooks = list(optimizer._global_optimizer_pre_hooks.values())
    return get_total_norm.__closure__[0].cell_contents, torch.amp.GradScaler._unscale_grads_, hooks
before = state()
import torch_bridge as xt
xt.parallelize, xt.clip_grad_norm_, xt.verify
print(state() == before)
"""
on_two = SharedRanks(2)


class Net(nn.Module):
    """Has parameters cut by rows, by columns, and whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8, bias=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def net(is_parallel: bool, mesh: xs.Mesh = MESH) -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    if is_parallel:
        xt.parallelize(
            model,
            {"norm.*": "n", "up.weight": "o/tp i", "up.bias": "o/tp", "down.weight": "o i/tp"},
            {"": "b c", "up": "b c -> b c | copy(tp)", "down": "b f/tp"},
            mesh,
            outputs={"down": "b c | sum(tp) -> b c"},
        )
    return model


def batch() -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).double()


def backward(model: nn.Module, target: float = 1.0) -> Tensor:
    loss = (model(batch()) - target).square().sum()
    loss.backward()
    return loss


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters by name, of a parallel model or of another."""
    if not hasattr(model, "_xshard_parallel"):
        return {name: x.detach().clone() for name, x in model.named_parameters()}
    state = xt.state_dict(model)
    return {
        name: x.full_tensor() if hasattr(x, "full_tensor") else x.clone()
        for name, x in state.items()
    }


def train(model: nn.Module, make: Callable[[Iterable[Any]], Optimizer], steps: int = 4) -> Any:
    optimizer = make(p for p in model.parameters() if p.requires_grad)

    def closure() -> Tensor:
        optimizer.zero_grad()
        return backward(model)

    for _ in range(steps):
        optimizer.step(closure)
    return whole(model)


def agrees(make: Callable[[Iterable[Any]], Optimizer]) -> bool:
    """Whether a parallel model is trained as on one device; False if the optimizer is refused."""
    alone = train(net(False), make)
    model = net(True)
    before = whole(model)
    try:
        after = train(model, make)
    except xs.XshardError:
        backward(model)  # what a closure had computed is as it was
        assert all(torch.equal(x, before[name]) for name, x in whole(model).items())
        return False
    for name, x in alone.items():
        torch.testing.assert_close(after[name], x)
    return True


# ---- others' optimizers


class Plain(Optimizer):
    """A base for optimizers of users."""

    def __init__(self, params: Any, lr: float = 0.01, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    def update(self, x: Tensor, group: dict[str, Any]) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for x in group["params"]:
                if x.grad is not None:
                    x.sub_(group["lr"] * self.update(x, group))


class Lion(Plain):
    def __init__(self, params: Any, lr: float, beta: float = 0.9) -> None:  # lr is required
        super().__init__(params, lr, beta=beta)

    def update(self, x: Tensor, group: dict[str, Any]) -> Tensor:
        m = self.state[x].setdefault("m", torch.zeros_like(x))
        sign = m.lerp(x.grad, 1 - group["beta"]).sign()
        m.lerp_(x.grad, 0.01)
        return sign + 0.1 * x


class Lamb(Plain):
    def update(self, x: Tensor, group: dict[str, Any]) -> Tensor:
        return x.grad * x.norm() / x.grad.norm()


class Centralised(Plain):
    def update(self, x: Tensor, group: dict[str, Any]) -> Tensor:
        return x.grad - x.grad.mean(0, keepdim=True)


class ClipsLarge(Plain):
    """Clips the norm of a gradient, if it is large."""

    def update(self, x: Tensor, group: dict[str, Any]) -> Tensor:
        return x.grad / x.grad.norm().clamp(min=5)


class BeginsLate(Plain):
    """Takes ten plain steps first, as some optimizers with preconditioners do."""

    def update(self, x: Tensor, group: dict[str, Any]) -> Tensor:
        self.state[x]["step"] = self.state[x].get("step", 0) + 1
        return x.grad if self.state[x]["step"] <= 10 else x.grad / x.grad.norm()


class Mixed(Plain):
    """Normalises the groups with a flag, as mixtures of Muon and Adam do."""

    def __init__(self, params: list[dict[str, Any]]) -> None:
        assert all(set(group) == {"params", "lr", "normalised"} for group in params)
        super().__init__(params)

    def update(self, x: Tensor, group: dict[str, Any]) -> Tensor:
        return x.grad / x.grad.norm() if group["normalised"] else x.grad


class LimitsAll(Plain):
    """Limits the norm of all gradients together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        parameters = [x for group in self.param_groups for x in group["params"]]
        norm = torch.stack([x.grad.norm() for x in parameters]).norm().clamp(min=1)
        for x in parameters:
            x.sub_(0.01 * x.grad / norm)


class NeedsModel(Plain):
    def __init__(self, params: Any, model: Any) -> None:
        super().__init__(params)

    def update(self, x: Tensor, group: dict[str, Any]) -> Tensor:
        return x.grad


class ClipsByAttribute(Plain):
    """Has an option that no group knows."""

    def __init__(self, params: Any, limit: float, is_clipping: bool) -> None:
        super().__init__(params)
        self.limit = limit
        self.is_clipping = is_clipping

    def update(self, x: Tensor, group: dict[str, Any]) -> Tensor:
        if not self.is_clipping:
            return x.grad
        return x.grad * (self.limit / x.grad.norm()).clamp(max=1)


class NormalisesVectors(Plain):
    """Reads across the elements of all but matrices."""

    def update(self, x: Tensor, group: dict[str, Any]) -> Tensor:
        return x.grad if x.ndim == 2 else x.grad / x.grad.norm()


class NormalisesMatrices(Plain):
    """Reads across the elements of matrices alone, as LARS with its usual exceptions."""

    def update(self, x: Tensor, group: dict[str, Any]) -> Tensor:
        return x.grad / x.grad.norm() if x.ndim == 2 else x.grad


class SendsItself(Lamb):
    handles_blocks = True


def torchs() -> list[type[Optimizer]]:
    """All optimizers that this release of torch has."""
    classes = [x for x in vars(torch.optim).values() if isinstance(x, type)]
    return [x for x in classes if issubclass(x, Optimizer) and x is not Optimizer]


def rows_of_page() -> dict[str, str]:
    """Each class of `torch.optim` -> what the page says of it."""
    found = re.findall(r"^\| (`torch.optim.+) \| (right|refused)", PAGE.read_text(), re.MULTILINE)
    return {
        name: verdict
        for names, verdict in found
        for name in re.findall(r"`(?:torch\.optim\.)?(\w+)`", names)
    }


def random_update(rng: random.Random, is_coupled: bool) -> Callable[..., Tensor]:
    """Return what an optimizer adds to x, from x, its gradient and an average of that."""
    elementwise: list[Callable[[Tensor], Tensor]] = [
        torch.sign, torch.tanh, torch.sin, lambda x: x / (x.abs() + 1e-3), lambda x: x.clamp(-1, 1),
        lambda x: x * x.abs().sqrt(), lambda x: torch.where(x > 0.3, x, -x / 2), torch.round,
    ]  # fmt: skip
    coupled: list[Callable[[Tensor], Tensor]] = [
        lambda x: x / (x.norm() + 1e-6), lambda x: x - x.mean(), lambda x: x / x.abs().amax(),
        lambda x: x / x.abs().amax(0), lambda x: x - x.mean(-1, keepdim=True), lambda x: x.cumsum(0) / 9,
        lambda x: torch.where(x.abs() >= x.abs().median(), x, 0), lambda x: x / x.norm().clamp(min=1),
        lambda x: x.flip(-1), lambda x: x.softmax(0), lambda x: x * x.numel() ** -0.5, lambda x: x / x.std(),
        lambda x: x * (x.mean().abs() + 0.5), lambda x: x.tanh() @ x.tanh().mT @ x / 99,
        lambda x: x - x.roll(1, 0), lambda x: x.sort(0).values,
    ]  # fmt: skip
    chain = [rng.choice(elementwise) for _ in range(rng.randint(0, 2))]
    if is_coupled:
        # After a sign, all maxima would be equal; before one, a scale would not show.
        chain = [*rng.choices([torch.asinh, torch.abs], k=rng.randint(0, 1)), rng.choice(coupled)]
    begins = rng.randint(0, 10)
    share = rng.random()
    decay = rng.choice([0, 0.1])

    def update(x: Tensor, m: Tensor, step: int) -> Tensor:
        u = share * x.grad + m + decay * x
        if step >= begins:
            for function in chain:
                u = function(u)
        return u

    return update


def random_optimizer(rng: random.Random, is_coupled: bool) -> Optimizer:
    update_of = random_update(rng, is_coupled)
    beta = rng.random()

    class Random(Plain):
        def update(self, x: Tensor, group: dict[str, Any]) -> Tensor:
            state = self.state[x]
            step = state["step"] = state.get("step", -1) + 1
            m = state.setdefault("m", torch.zeros_like(x)).lerp_(x.grad, 1 - beta)
            return update_of(x, m, step)

    return Random([nn.Parameter(torch.ones(2, 2))], lr=rng.choice([0.0, 1e-6, 0.1]))


# ---- the process


def test_the_import_changes_nothing_in_torch() -> None:
    command = [sys.executable, "-c", PROGRAM]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.strip() == "True"


@pytest.mark.parametrize("is_coupled", [False, True])
def test_a_trial_tells_whether_elements_go_their_own_way(is_coupled: bool) -> None:
    for seed in range(100):
        check_trial(seed, is_coupled)


def check_trial(seed: int, is_coupled: bool) -> None:
    """The trial finds a random optimizer out, if it reads across elements, and no other."""
    rng = random.Random(seed)
    optimizer = random_optimizer(rng, is_coupled)
    (group,) = optimizer.param_groups
    try:
        block_guards._check_step_on_blocks(optimizer, group, "w", rng.randint(2, 4))
        reason = ""
    except xs.XshardError as error:
        reason = str(error)
    assert ("not that on the whole" in reason) == is_coupled, (seed, reason)


def test_the_page_names_every_optimizer_of_torch() -> None:
    assert set(rows_of_page()) == {kind.__name__ for kind in torchs()}


# ---- on ranks


@on_two
def test_optimizers_of_torch_are_right_or_refused_as_the_page_says() -> None:
    for name, verdict in rows_of_page().items():
        kind = getattr(torch.optim, name)
        if name == "SparseAdam":
            continue  # needs sparse gradients
        make = kind
        if name == "Muon":
            make = lambda parameters: torch.optim.Muon(p for p in parameters if p.ndim == 2)  # noqa: E731
        assert agrees(make) == (verdict == "right"), name
    assert still_connected()


@on_two
def test_sparse_adam_is_right() -> None:
    results = []
    for is_parallel in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(6, 4, sparse=True))
        if is_parallel:
            out = {"0": "b s c/tp -> b s c"}
            xt.parallelize(model, {"0.weight": "v c/tp"}, {"": "b s"}, MESH, outputs=out)
        optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.tensor([[1, 5, 1]])).square().sum().backward()
            optimizer.step()
        results.append(whole(model)["0.weight"])
    torch.testing.assert_close(results[1], results[0])


@on_two
def test_optimizers_of_users_are_right_or_refused() -> None:
    flags: dict[str, Any] = {"lr": 0.01}
    assert agrees(lambda p: Lion(p, 0.01))
    assert agrees(lambda p: Mixed([{"params": list(p), "normalised": False, **flags}]))
    assert agrees(lambda p: torch.optim.Adam(p, fused=True, amsgrad=True, maximize=True))
    assert agrees(lambda p: ClipsByAttribute(p, 1e-3, False))
    assert not agrees(lambda p: ClipsByAttribute(p, 1e-3, True))
    assert not agrees(NormalisesVectors)
    assert agrees(lambda p: NormalisesMatrices(x for x in p if x.ndim == 1))
    for make in (Lamb, Centralised, ClipsLarge, BeginsLate, LimitsAll):
        assert not agrees(make), make
    assert not agrees(lambda p: Mixed([{"params": list(p), "normalised": True, **flags}]))
    model = net(True)
    backward(model)
    text = check_error(Lamb(model.parameters()).step, "XshardError", "Lamb would take the block of")
    assert "up.weight for the whole: its step on a block" in text
    assert "AdamW" in text and "Lamb.handles_blocks = True" in text
    SendsItself(model.parameters()).step()
    refused = NeedsModel(model.parameters(), model).step
    check_error(refused, "XshardError", "NeedsModel would take", "in a trial it raises TypeError(")
    # Rates that begin at 0 hide nothing, and names of parameters change nothing.
    named = torch.optim.Muon([(n, p) for n, p in model.named_parameters() if p.ndim == 2], lr=0.0)
    check_error(named.step, "XshardError", "Muon would take the block of up.weight")
    assert agrees(lambda p: torch.optim.RMSprop([("a", x) for x in p][:1], lr=0.0))


@on_two
def test_an_optimizer_is_asked_again_when_it_trains_more() -> None:
    model = net(True)
    backward(model)
    optimizer = Mixed([{"params": [model.norm.weight], "lr": 0.01, "normalised": True}])
    optimizer.step()  # whole parameters
    optimizer.add_param_group({"params": [model.up.bias], "lr": 0.01, "normalised": False})
    optimizer.step()  # blocks, which go right
    optimizer.add_param_group({"params": [model.up.weight], "lr": 0.01, "normalised": True})
    for _ in range(2):  # also after an error that was caught
        check_error(optimizer.step, "XshardError", "Mixed would take the block of up.weight")
    # Parameters may be trained later, as in a fine-tuning that begins with the last layers.
    tuned = net(True)
    tuned.up.requires_grad_(False)
    tuned.down.requires_grad_(False)
    backward(tuned)
    slow = torch.optim.Adafactor(tuned.parameters())
    slow.step()
    tuned.down.requires_grad_(True)
    check_error(slow.step, "XshardError", "Adafactor would take the block of down.weight")
    # An optimizer may be older than the blocks.
    later = net(False)
    older = torch.optim.Adafactor(later.parameters())
    backward(later)
    older.step()
    rules = {"norm.*": "n", "up.weight": "o/tp i", "up.bias": "o/tp", "down.weight": "o i/tp"}
    later.zero_grad()
    xt.parallelize(later, rules, {"": "b c"}, MESH)
    check_error(older.step, "XshardError", "Adafactor would take the block of up.weight")


@on_two
def test_whole_parameters_are_trained_by_all_optimizers() -> None:
    def data_parallel() -> nn.Module:
        torch.manual_seed(0)
        rules = {"": "b c -> b/dp c"}, xs.Mesh(dp=2)
        return xt.parallelize(Net(), {"**": "..."}, *rules, outputs={"": "b/dp c -> b c"})

    for make in (lambda p: torch.optim.LBFGS(p, 0.01, 3), torch.optim.Adafactor, Lamb):
        alone = train(net(False), make)
        # An axis of one process cuts nothing.
        for model in (data_parallel(), net(True, xs.Mesh(dp=2, tp=1))):
            after = train(model, make)
            for name, x in alone.items():
                torch.testing.assert_close(after[name], x)
            gradients = [p.grad for p in model.parameters()]
            torch.testing.assert_close(get_total_norm(gradients), xt.grad_norm(model))
    frozen = net(True).requires_grad_(False)
    frozen.norm.requires_grad_(True)
    backward(frozen)
    torch.optim.Adafactor(frozen.parameters()).step()
    torch.testing.assert_close(clip_grad_norm_(frozen.parameters(), 1e9), xt.grad_norm(frozen))


@on_two
def test_norms_of_blocks_are_refused() -> None:
    model = net(True)
    clip_grad_norm_(model.parameters(), 1.0)  # no gradients: the norm is 0
    backward(model)
    weight = model.down.weight
    before = weight.grad.clone()
    taken: list[Callable[[], Any]] = [
        lambda: get_total_norm([p.grad for p in model.parameters()]),
        lambda: get_total_norm(p.grad for p in model.parameters()),
        lambda: get_total_norm(tensors=[weight.grad.detach()], norm_type=math.inf, foreach=False),
        lambda: get_total_norm(weight.grad.data),
        lambda: get_total_norm([model.norm.weight, weight]),
        lambda: torch.nn.utils.get_total_norm([weight.grad]),
        lambda: clip_grad_norm_(model.parameters(), 1.0),
        lambda: clip_grad_norm_(parameters=[weight], max_norm=1.0),
        lambda: torch.nn.utils.clip_grad_norm_(weight, 1.0, error_if_nonfinite=True),
    ]
    for call in taken:
        words = ("get_total_norm would take the block of", "xt.clip_grad_norm_(model, max_norm)")
        check_error(call, "XshardError", *words)
    assert torch.equal(weight.grad, before)
    rest = [p.grad for p in model.norm.parameters()] + [torch.ones(3), torch.zeros(0)]
    expected = torch.cat([x.flatten() for x in rest]).norm()
    torch.testing.assert_close(get_total_norm(rest), expected)
    # What is given the norm of the whole, or looks at each element alone, is right.
    alone = net(False)
    backward(alone)
    total = clip_grad_norm_(alone.parameters(), 1.0)
    clip_grad_value_(alone.parameters(), 0.1)
    clip_grads_with_norm_(model.parameters(), 1.0, xt.grad_norm(model))
    clip_grad_value_(model.parameters(), 0.1)
    assert total > 1
    for trained in (model, alone):
        torch.optim.SGD(trained.parameters(), 1.0).step()
    for name, x in whole(alone).items():
        torch.testing.assert_close(whole(model)[name], x)


@on_two
def test_norms_of_complex_gradients_are_real() -> None:
    """In the widest dtype of all parameters, as torch's are."""

    def made(is_parallel: bool) -> nn.Module:
        model = nn.Identity()
        model.a = nn.Parameter(torch.arange(4.0) + 1j)
        model.b = nn.Parameter(torch.ones(4, dtype=torch.float64))
        if is_parallel:
            xt.parallelize(model, {"**": "n/tp"}, {"": "b"}, MESH)
        for x in model.parameters():
            x.grad = 2 * x.detach()
        return model

    alone, cut = made(False), made(True)
    for kind in (1.0, 2.0, math.inf):
        total = get_total_norm([x.grad for x in alone.parameters()], kind)
        torch.testing.assert_close(xt.grad_norm(cut, kind), total)
    expected = clip_grad_norm_(alone.parameters(), 0.5, math.inf)
    torch.testing.assert_close(xt.clip_grad_norm_(cut, 0.5, math.inf), expected)
    for x, y in zip(cut.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(x.grad, y.grad.chunk(2)[dist.get_rank()])


def scaled(is_parallel: bool, seed: int) -> tuple[list[float], list[bool], dict[str, Tensor]]:
    """Train by a `GradScaler`, with overflows at random places: scales, steps that were taken, values."""
    rng = random.Random(seed)
    model = net(is_parallel)
    names = [name for name, _ in model.named_parameters()]
    rng.shuffle(names)
    some = rng.randint(1, len(names) - 1)
    kinds: list[Any] = [
        torch.optim.SGD,
        functools.partial(torch.optim.AdamW, fused=rng.random() < 0.5),
    ]
    optimizers = []
    for part in (names[:some], names[some:]):
        optimizers.append(rng.choice(kinds)([model.get_parameter(name) for name in part], lr=0.01))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales, steps = [], []
    for _ in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale((model(batch()) - 1).square().sum()).backward()
        for _ in range(rng.choice([0, 0, 1, 2])):
            overflow(model, rng.choice(names), rng)
        clips = rng.random() < 0.5
        if clips:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            norm = (
                xt.clip_grad_norm_(model, 1.0)
                if is_parallel
                else clip_grad_norm_(model.parameters(), 1.0)
            )
            del norm
        for optimizer in optimizers:
            before = [x.clone() for x in optimizer.param_groups[0]["params"]]
            scaler.step(optimizer)
            after = optimizer.param_groups[0]["params"]
            changed = torch.tensor(
                any(not torch.equal(x, y) for x, y in zip(before, after, strict=True))
            )
            steps.append(bool(changed))
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, steps, whole(model)


def overflow(model: nn.Module, name: str, rng: random.Random) -> None:
    """Let one element of the whole gradient be no finite number; on the rank that has it."""
    shape = dict(Net().named_parameters())[name].shape
    mark = torch.zeros(math.prod(shape))
    mark[rng.randrange(len(mark))] = rng.choice([math.inf, -math.inf, math.nan])
    mark = mark.view(shape)
    gradient = model.get_parameter(name).grad
    for dim, (size, length) in enumerate(zip(shape, gradient.shape, strict=True)):
        if size != length:
            mark = mark.chunk(2, dim)[dist.get_rank()]
    gradient.add_(mark)


@on_two
def test_a_scaler_skips_steps_on_all_ranks_or_on_none() -> None:
    skipped = 0
    for seed in range(20):
        alone = scaled(False, seed)
        cut = scaled(True, seed)
        assert cut[:2] == alone[:2], seed
        skipped += alone[1].count(False)
        for name, x in alone[2].items():
            torch.testing.assert_close(cut[2][name], x, equal_nan=True)
    assert 20 < skipped < 180
    assert still_connected()


@on_two
def test_a_scaler_goes_on_where_a_rank_has_no_gradient() -> None:
    model = net(True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD([model.up.weight], 0.1)
    scaler.scale(backward(model) * 0)
    if dist.get_rank() == 0:
        model.up.weight.grad = None
    before = model.up.weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert torch.equal(model.up.weight, before) == (dist.get_rank() == 0)
    # Without blocks torch's own assertion stays.
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    kind, _ = error_of(lambda: scaler.step(optimizer))
    assert kind == "AssertionError"


@on_two
def test_averages_of_weights_are_right() -> None:
    averages = []
    for is_parallel in (False, True):
        model = net(is_parallel)
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(3):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            average.update_parameters(model)
        averages.append(whole(average.module))
    for name, x in averages[0].items():
        torch.testing.assert_close(averages[1][name], x)


PARAMETRIZATIONS: list[tuple[Any, dict[str, str], bool]] = [
    (parametrizations.weight_norm, {"**.original*": "o/tp i"}, True),
    (parametrizations.weight_norm, {"**.original0": "o i", "**": "o i/tp"}, False),
    (parametrizations.weight_norm, {"**.original0": "o/tp i", "**": "o i"}, False),
    (parametrizations.weight_norm, {"**.original0": "o i", "**": "o i/tp -> o i"}, True),
    (parametrizations.spectral_norm, {"**.original": "o/tp i"}, False),
    (parametrizations.spectral_norm, {"**.original": "o i/tp"}, False),
    (parametrizations.spectral_norm, {"**.original": "o/tp i -> o i"}, True),
    (parametrizations.orthogonal, {"**.original": "o/tp i", "**": "..."}, False),
    (parametrizations.orthogonal, {"**.original": "o i/tp -> o i", "**": "..."}, True),
]


@on_two
def test_weights_are_not_computed_from_blocks_that_are_too_small() -> None:
    x = torch.arange(8.0).view(2, 4)
    for wrap, rules, is_right in PARAMETRIZATIONS:
        torch.manual_seed(0)
        layer = wrap(nn.Linear(4, 4, bias=False)).eval()
        with torch.no_grad():
            alone = layer(x)
        is_cut = "->" not in str(rules)
        moves: dict[str, Any] = {"inputs": {"": "b c"}, "outputs": {}}
        if is_cut:
            moves = {"inputs": {"": "b c -> b c | copy(tp)"}, "outputs": {"": "b o/tp -> b o"}}
        if not is_right:
            before = layer.state_dict()
            refused = functools.partial(xt.parallelize, layer, rules, mesh=MESH, **moves)
            words = (
                "a parametrization would take the block of parametrizations.weight.original",
                "o/tp i -> o i",
            )
            check_error(refused, "XshardError", *words)
            assert all(torch.equal(y, before[name]) for name, y in layer.state_dict().items())
            continue
        xt.parallelize(layer, rules, mesh=MESH, **moves)
        torch.testing.assert_close(layer(x), alone)
