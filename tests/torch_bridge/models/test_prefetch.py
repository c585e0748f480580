"""Parameters that travel before modules need them: values and gradients are those of waiting."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.utils.checkpoint import checkpoint

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import SharedRanks, check_error, on_ranks
from torch_bridge.lower import collectives
from torch_bridge.models.parallel import parallel_of
from xshard.schedule import Compute, Schedule

MESH = xs.Mesh(dp=2)
WIDTH = 4
on_two = SharedRanks(2)


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x))


class Frozen(Linear):
    """A layer some of whose parameters are not trained, as under LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, WIDTH)
        self.down.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.down(x)


class Normed(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + torch.softmax(q @ k.mT, -1) @ v


class Inside(Linear):
    """A layer of which a part is computed again."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Gated(Linear):
    """A layer that another one is inside of, which gathers for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Linear()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.sigmoid(self.inner(x))


LAYERS = [Linear, Frozen, Normed, Attends, Inside, Gated]


class Net(nn.Module):
    """Layers in any order, each in a way of its own."""

    def __init__(self, kind: Callable[[], nn.Module] = Linear, n_layers: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(kind() for _ in range(n_layers))
        self.order: Sequence[int] = range(n_layers)
        self.again = ""  # how layers are computed again
        self.before: dict[int, Callable[[], object]] = {}  # called before the layer of a turn
        self.without_gradient: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for turn, i in enumerate(self.order):
            if turn in self.before:
                self.before[turn]()
            layer = self.layers[i]
            if self.again:
                x = checkpoint(layer, x, use_reentrant=self.again == "reentrant")
            elif turn in self.without_gradient:
                with torch.no_grad():
                    x = x + layer(x)
            else:
                x = layer(x)
        return x


def made(kind: Callable[[], nn.Module] = Linear, n_layers: int = 4, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Net(kind, n_layers).double()
    rules = {"**": "o/dp ... -> o ..."}
    gathers = "layers.*|layers.*.inner" if kind is Gated else "layers.*"
    options = {"prefetch": 1} | options
    return xt.parallelize(model, rules, {"": "b/dp s c"}, MESH, gathers=gathers, **options)


def batch() -> Tensor:
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    return torch.randn(2, 3, WIDTH, dtype=torch.float64, generator=generator)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: x.grad for name, x in model.named_parameters()}


def same(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return torch.equal(found, expected)


def assert_alike(model: nn.Module, waiting: nn.Module, what: object) -> None:
    """Gradients have the same bits; modules have their blocks; nothing is on the way."""
    right = gradients(waiting)
    for name, found in gradients(model).items():
        assert same(found, right[name]), (what, name)
    assert all(x.is_leaf for x in model.parameters()), what
    prefetch = parallel_of(model).prefetch
    assert prefetch._expected is None and prefetch._call is None, what


# ---- values


def one_pass(model: Any, mode: str) -> Tensor:
    x = batch()
    model.again = mode if mode in ("reentrant", "again") else ""
    if mode in ("no_grad", "inference"):
        with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
            return model(x).clone()
    if mode == "reentrant":
        x.requires_grad_()
    y = torch.tanh(model(x))
    weights = torch.arange(1.0, 1 + WIDTH, dtype=torch.float64)
    if mode == "subset":
        (y * weights).sum().backward(inputs=[model.layers[model.order[-1]].up.weight])
    elif mode == "twice":
        (y * weights).sum().backward(retain_graph=True)
        (y * weights).sum().backward()
    else:
        (y * weights).sum().backward()
    return y.detach()


MODES = ("", "", "again", "reentrant", "no_grad", "inference", "no_sync", "subset", "twice")
PREFETCHES = (1, 1, 2, 3, None, "1 KiB", "128 B", "200 B")


def check_schedule(seed: int) -> None:
    draw = random.Random(seed)
    kind = LAYERS[seed % len(LAYERS)]
    options = {"keep": draw.choice([False, False, True, "layers.1.**"])}
    prefetch = draw.choice(PREFETCHES)
    model = made(kind, prefetch=prefetch, **options)
    waiting = made(kind, prefetch=0, **options)
    events: list[object] = [kind.__name__, prefetch, options]
    orders = [[0, 1, 2, 3], [0, 1, 2, 3], draw.sample(range(4), 4), [0, 2, 3], [1, 1, 0, 1]]
    for _ in range(3):
        mode = draw.choice(MODES)
        if kind is Attends and mode == "subset":
            mode = ""
        order = draw.choice(orders)
        without = set(draw.sample(range(2), draw.choice([0, 0, 0, 1])))
        events.append((mode, order, without))
        values = []
        for each in (model, waiting):
            each.order = order
            each.without_gradient = without if mode == "" else set()
            with xt.no_sync(each) if mode == "no_sync" else contextlib.nullcontext():
                values.append(one_pass(each, mode))
        assert torch.equal(*values), events
        if draw.random() < 0.5:
            one_pass(model, "")
            one_pass(waiting, "")
            assert_alike(model, waiting, events)
            for each in (model, waiting):
                for x in each.parameters():
                    if x.grad is not None:
                        with torch.no_grad():
                            x -= 0.01 * x.grad
                        x.grad = None


@on_two
def test_random_schedules_change_no_bit() -> None:
    for seed in range(60):
        check_schedule(seed)


@on_two
def test_what_is_frozen_or_trained_meanwhile_is_gathered_as_it_is_then() -> None:
    """As a discriminator is frozen while its generator trains."""
    models = [made(prefetch=prefetch) for prefetch in (2, 0)]
    for is_trained in (True, False, True, False, True):
        for model in models:

            def switch(*_: Any, model: Any = model, is_trained: bool = is_trained) -> None:
                model.layers[1].up.weight.requires_grad_(is_trained)

            handle = model.layers[0].register_forward_pre_hook(switch)
            one_pass(model, "")
            handle.remove()
        assert_alike(*models, is_trained)


@on_two
def test_moves_of_parameters_and_of_activations_mix() -> None:
    """Tensor parallel layers whose parameters are gathered over another axis."""
    for prefetch in (1, 0):
        torch.manual_seed(0)
        model = xt.parallelize(
            nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).double(),
            {"**.weight": "o/dp i -> o i", "**": "..."},
            {str(i): "b/dp i -> b i" for i in range(3)},
            MESH,
            outputs={str(i): "b o -> b/dp o" for i in range(3)},
            prefetch=prefetch,
        )
        found = []
        for _ in range(3):
            y = model(batch()[0, :2])
            y.square().sum().backward()
        found.append((y, *gradients(model).values()))
    assert all(map(same, found[0], found[-1]))


# ---- what travels when


@contextlib.contextmanager
def events_of_moves() -> Iterator[list[str]]:
    """S0, S1, ...: a move was started; W0: this one was awaited; "now": one ran at once."""
    events: list[str] = []
    begin = collectives.Collective.begin
    run = collectives.Collective.run
    wait = collectives._UnderWay.__call__
    numbers: dict[int, int] = {}

    def begun(self: Any, messages: Tensor, shape: Any) -> Any:
        move = begin(self, messages, shape)
        numbers[id(move)] = len(numbers)
        events.append(f"S{numbers[id(move)]}")
        return move

    def awaited(self: Any) -> Tensor:
        events.append(f"W{numbers.pop(id(self), '?')}")
        return wait(self)

    def now(self: Any, messages: Tensor, shape: Any) -> Tensor:
        events.append("now")
        return run(self, messages, shape)

    patch = mock.patch.object
    with (
        patch(collectives.Collective, "begin", begun),
        patch(collectives.Collective, "run", now),
        patch(collectives._UnderWay, "__call__", awaited),
    ):
        yield events


class Notes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, events: list[str], name: str) -> Tensor:
        ctx.note = (events, name)
        events.append(name)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        events, name = ctx.note
        events.append(f"{name}'")
        return gradient, None, None


def noted(model: Any, events: list[str]) -> None:
    for i, layer in enumerate(model.layers):
        layer.forward = lambda x, f=layer.forward, i=i: f(Notes.apply(x, events, f"L{i}"))


def without_numbers(events: list[str]) -> str:
    return " ".join(event if event[0] == "L" else event[0] for event in events)


@on_two
def test_moves_travel_beside_computing_forward_and_backward() -> None:
    with events_of_moves() as events:
        model = made(n_layers=3)
        noted(model, events)
        one_pass(model, "")
        events.clear()
        one_pass(model, "")
        # Forward: the model's own, and each layer's while the one before it computes. Backward, the
        # same for what is gathered again; a layer's gradients travel while the next one computes.
        forward = "S S W S W L0 S W L1 W L2"
        backward = "S S W L2' S S W L1' S W W L0' S W S W W"
        assert without_numbers(events) == f"{forward} {backward}"
        events.clear()
        with torch.no_grad():
            model(batch())
        assert without_numbers(events) == forward
        for prefetch, forward in ((0, "n n L0 n L1 n L2"), (None, "S S S S W W L0 W L1 W L2")):
            model = made(n_layers=3, prefetch=prefetch)
            noted(model, events)
            one_pass(model, "")
            events.clear()
            with torch.no_grad():
                model(batch())
            assert without_numbers(events) == forward


@on_two
def test_what_no_module_uses_is_dropped_at_the_end_of_the_pass() -> None:
    with events_of_moves() as events:
        model = made(n_layers=3)
        one_pass(model, "no_grad")
        model.order = [0, 1]
        events.clear()
        one_pass(model, "no_grad")
        assert without_numbers(events).count("S") == without_numbers(events).count("W") == 4
        events.clear()
        one_pass(model, "no_grad")
        assert without_numbers(events).count("S") == without_numbers(events).count("W") == 3


@on_two
def test_bytes_on_the_way_are_those_of_the_limit() -> None:
    """A layer has 20 numbers of 8 bytes."""
    for prefetch, n_ahead in (("159 B", 0), ("160 B", 1), ("330 B", 2)):
        with events_of_moves() as events:
            model = made(n_layers=4, prefetch=prefetch)
            noted(model, events)
            one_pass(model, "no_grad")
            events.clear()
            one_pass(model, "no_grad")
            assert without_numbers(events).split("L0")[0].count("S") == 2 + n_ahead


# ---- what models do


@on_two
def test_a_write_between_start_and_use_is_an_error() -> None:
    model = made()
    one_pass(model, "")

    def write() -> None:
        with torch.no_grad():
            parallel_of(model).by_name["layers.2.up.weight"].tensor.add_(10)

    model.before = {2: write}
    check_error(
        lambda: model(batch()), "XshardError", "layers.2.up.weight was written to in a pass",
        "prefetch=0",
    )  # fmt: skip
    model.before = {1: write}  # before it travels
    waiting = made(prefetch=0)
    with torch.no_grad():
        waiting.layers[2].up.weight.add_(20)
    assert torch.equal(model(batch()), waiting(batch()))


@on_two
def test_an_error_in_a_pass_leaves_nothing_on_the_way() -> None:
    model = made()
    waiting = made(prefetch=0)
    for each in (model, waiting):
        one_pass(each, "")

    def fail(*_: object) -> None:
        raise KeyboardInterrupt if interrupts else RuntimeError

    for interrupts in (False, True):
        with events_of_moves() as events:
            model.before = {2: fail}
            with pytest.raises(KeyboardInterrupt if interrupts else RuntimeError):
                model(batch())
            model.before = {}
            one_pass(model, "no_grad")  # it ends what was interrupted
            counts = [sum(event[0] == kind for event in events) for kind in "SW"]
            assert counts[0] == counts[1] > 0
            before = {name: x.clone() for name, x in gradients(model).items()}
            with pytest.raises(KeyboardInterrupt if interrupts else RuntimeError):
                _failing_backward(model, fail)
            one_pass(model, "no_grad")
            assert all(same(x, before[name]) for name, x in gradients(model).items())
            for each in (model, waiting):
                one_pass(each, "")
            assert_alike(model, waiting, interrupts)
        counts = [sum(event[0] == kind for event in events) for kind in "SW"]
        assert counts[0] == counts[1]


def _failing_backward(model: Any, fail: Callable[..., None]) -> None:
    layer = model.layers[1]
    handle = layer.register_forward_hook(lambda _, args, y: y.register_hook(fail) and None)
    try:
        y = model(batch())
    finally:
        handle.remove()
    y.sum().backward()


@on_two
def test_derivatives_of_all_kinds_are_those_of_waiting() -> None:
    found = []
    for prefetch in (2, 0):
        model = made(prefetch=prefetch)
        one_pass(model, "")
        model.zero_grad()
        weight = model.layers[1].up.weight
        (first,) = torch.autograd.grad(model(batch()).square().sum(), weight, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), weight)
        found.append((first, second))
    assert all(map(torch.equal, *found))


@on_two
def test_copies_and_other_threads_are_right() -> None:
    model = made()
    waiting = made(prefetch=0)
    for each in (model, waiting):
        one_pass(each, "")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for each in (other, waiting):
            each.zero_grad()
            one_pass(each, "")
        one_pass(other, "")
        one_pass(waiting, "")
        assert_alike(other, waiting, "copy")
    results: list[Tensor] = []

    def use_a_layer() -> None:
        results.append(model.layers[3](batch()))

    def in_thread() -> None:
        thread = threading.Thread(target=use_a_layer)
        thread.start()
        thread.join()

    model.before = {1: in_thread}
    assert torch.equal(model(batch()), waiting(batch()))
    assert torch.equal(results[0], waiting.layers[3](batch()))
    assert len(parallel_of(model).prefetch.forward) == 5  # the pass went on in its order
    thread = threading.Thread(target=lambda: results.append(model(batch())))
    thread.start()
    thread.join()
    assert torch.equal(results[-1], waiting(batch()))


@on_two
def test_what_is_no_amount_is_refused() -> None:
    check_error(lambda: made(prefetch="two"), "XshardError", "two", "prefetch")
    check_error(lambda: made(prefetch=1.5), "PlanError", "prefetch is 1.5")
    check_error(lambda: made(prefetch=-1), "XshardError", "prefetch is -1")


# ---- ranks that differ


@on_two
def test_another_order_on_one_rank_is_told_before_anything_travels() -> None:
    """All layers have one shape: nothing else would tell."""
    model = made()
    model.order = [0, 1, 2, 3] if dist.get_rank() else [1, 0, 2, 3]
    model(batch())
    text = check_error(lambda: model(batch()), "DesyncError", "the order of modules in a pass")
    assert "layers.1" in text


def _skips() -> str:
    dist.barrier = lambda: None  # at their end ranks meet, and these cannot
    model = made()
    one_pass(model, "")
    c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
    if dist.get_rank():
        model.order = [0, 2, 3]
    try:
        one_pass(model, "")
        one_pass(model, "")
    except xs.XshardError as error:
        return type(error).__name__
    return "nothing"


def test_a_module_that_one_rank_skips_is_told_on_all_ranks() -> None:
    found = on_ranks(2, _skips)
    assert set(found) <= {"DesyncError", "CollectiveError"}, found


# ---- the schedule


@on_two
def test_the_schedule_that_runs_is_shown() -> None:
    model = made(n_layers=2)
    assert "computes" not in xt.explain(model)
    one_pass(model, "")
    schedule = parallel_of(model).prefetch.schedule()
    names = [step.name for step in schedule.steps if isinstance(step, Compute)]
    forward = ["the model", "layers.0", "layers.1"]
    assert names == [*forward, *(f"{name}, backward" for name in reversed(forward))]
    assert str(schedule) in xt.explain(model)
    assert Schedule.from_json(schedule.to_json()) == schedule
    with events_of_moves() as events:
        one_pass(model, "")
    starts = sum(event.startswith("S") for event in events)
    assert starts == sum(type(step).__name__ == "Start" for step in schedule.steps)
    model.order = [1, 1]
    one_pass(model, "")
    assert "layers.1 (2), backward" in xt.explain(model)
