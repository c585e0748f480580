"""Parameters that travel before modules need them: values and gradients are those of waiting."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import os
import pathlib
import pickle
import random
import signal
import sys
import threading
import weakref
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
from torch_bridge.models.calls import is_running
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
        self.at_end: Callable[[], object] | None = None
        self.returns = True

    def forward(self, x: Tensor) -> Tensor | None:
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
        if self.at_end is not None:
            self.at_end()
        if self.returns:
            return x
        self.y = x
        return None


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


def warm(*models: Any) -> None:
    """Two passes in one order: the next one is prefetched."""
    for model in models:
        one_pass(model, "")
        one_pass(model, "")


MODES = ("", "", "again", "reentrant", "no_grad", "inference", "no_sync", "subset", "twice")
PREFETCHES = (1, 1, 2, 3, None, "1 KiB", "128 B", "200 B")
ORDERS = [[0, 1, 2], [0, 1, 2], [2, 0, 1], [0, 2], [1, 1, 0, 1]]
N_SCHEDULES = 60


class Pair:
    """A model that prefetches, and one that waits: they see the same passes."""

    def __init__(self, kind: type[nn.Module], keep: bool | str) -> None:
        self.kind = kind
        self.keep = keep
        self.model = made(kind, 3, keep=keep)
        self.waiting = made(kind, 3, keep=keep, prefetch=0)

    def check_schedule(self, seed: int) -> None:
        """Passes in an order that is the last one's, mostly, each in a mode of its own; then a step."""
        draw = random.Random(seed)
        parallel_of(self.model).prefetch.prefetch = draw.choice(PREFETCHES)
        events: list[object] = [seed, self.kind.__name__, self.keep]
        order = draw.choice(ORDERS)
        for _ in range(draw.choice([3, 3, 4])):
            mode = draw.choice(MODES)
            if self.kind is Attends and mode == "subset":
                mode = ""
            if draw.random() < 0.2:
                order = draw.choice(ORDERS)
            without = set(draw.sample(range(len(order) - 1), draw.choice([0, 0, 0, 1])))
            events.append((mode, order, without))
            self.pass_of_both(mode, order, without, events)
        self.pass_of_both("", order, set(), events)
        assert_alike(self.model, self.waiting, events)
        for each in (self.model, self.waiting):
            steps(each)

    def pass_of_both(self, mode: str, order: list[int], without: set[int], events: object) -> None:
        values = []
        for each in (self.model, self.waiting):
            each.order = order
            each.without_gradient = without if mode == "" else set()
            with xt.no_sync(each) if mode == "no_sync" else contextlib.nullcontext():
                values.append(one_pass(each, mode))
        assert torch.equal(*values), events


def steps(model: nn.Module) -> None:
    """A step of gradient descent."""
    with torch.no_grad():
        for x in model.parameters():
            if x.grad is not None:
                x -= 0.01 * x.grad
                x.grad = None


@on_two
def test_random_schedules_change_no_bit() -> None:
    seeds = iter(range(N_SCHEDULES))
    for kind in LAYERS:
        for keep in (False, True, "layers.1.**"):
            pair = Pair(kind, keep)
            for seed in itertools.islice(seeds, 3 if keep else 4):
                pair.check_schedule(seed)


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
        for _ in range(4):
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
        warm(model)
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
            warm(model)
            events.clear()
            with torch.no_grad():
                model(batch())
            assert without_numbers(events) == forward


def compiled() -> nn.Module:
    layer = Linear()
    layer.compile(fullgraph=True, backend="aot_eager")
    return layer


@on_two
def test_a_layer_that_is_compiled_by_itself_has_its_parameters_from_outside_its_graph() -> None:
    """They travel as without a compiler, also where a layer is compiled later, or computed again."""
    later = made(n_layers=3)
    for layer in later.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    before = made(compiled, n_layers=3)
    eager = made(n_layers=3)
    for mode in ("", "again", "no_grad"):
        expected = None
        for model in (eager, later, before):
            warm(model)
            model.zero_grad()
            with events_of_moves() as events:
                y = one_pass(model, mode)
            if expected is None:
                expected = (y, list(events))
            assert torch.equal(y, expected[0]) and events == expected[1], mode
            assert_alike(model, eager, mode)


@on_two
def test_what_no_module_uses_is_dropped_at_the_end_of_the_pass() -> None:
    with events_of_moves() as events:
        model = made(n_layers=3)
        warm(model)
        model.order = [0, 1]
        for starts in (4, 0, 3):  # ahead in vain; an order that is new; ahead
            events.clear()
            one_pass(model, "no_grad")
            assert (
                without_numbers(events).count("S") == without_numbers(events).count("W") == starts
            )


@on_two
def test_bytes_on_the_way_are_those_of_the_limit() -> None:
    """A layer has 20 numbers of 8 bytes."""
    for prefetch, n_ahead in (("159 B", 0), ("160 B", 1), ("330 B", 2)):
        with events_of_moves() as events:
            model = made(n_layers=4, prefetch=prefetch)
            noted(model, events)
            warm(model)
            events.clear()
            one_pass(model, "no_grad")
            assert without_numbers(events).split("L0")[0].count("S") == 2 + n_ahead


# ---- what models do


def multiply(x: Tensor) -> None:
    with torch.no_grad():
        x.mul_(3)


def multiply_by_data(x: Tensor) -> None:
    x.data.mul_(3)


def replace_data(x: Tensor) -> None:
    x.data = x.data * 3


class Single(nn.Module):
    """A layer with one parameter, whose block may travel as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x))


@on_two
def test_writes_between_start_and_use_are_seen_however_they_are_made() -> None:
    """Also by `.data`, which torch does not count, as momentum encoders and max-norm hooks do."""
    for kind, write in itertools.product(
        (Linear, Single), (multiply, multiply_by_data, replace_data)
    ):
        model, waiting = (made(kind, prefetch=prefetch) for prefetch in (1, 0))
        for each in (model, waiting):
            block = parallel_of(each).by_name["layers.2.up.weight"].tensor
            warm(each)
            each.before = {2: lambda block=block, write=write: write(block)}
        for _ in range(2):
            assert torch.equal(one_pass(model, ""), one_pass(waiting, "")), (kind, write)
            assert_alike(model, waiting, (kind, write))
        with events_of_moves() as events:
            model(batch())
        # The module that this concerns waits from now on; the others do not.
        assert events.count("now") == 1 and without_numbers(events).count("S") == 4


@on_two
def test_blocks_in_shared_memory_are_gathered_when_they_are_used() -> None:
    model, waiting = (made(prefetch=prefetch) for prefetch in (1, 0))
    for each in (model, waiting):
        each.layers.share_memory()
        for _ in range(4):
            one_pass(each, "")
    assert_alike(model, waiting, "shared")


@on_two
def test_an_error_in_a_pass_leaves_nothing_on_the_way() -> None:
    model = made()
    waiting = made(prefetch=0)
    warm(model, waiting)

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
            warm(model)
            before = {name: x.clone() for name, x in gradients(model).items()}
            with pytest.raises(KeyboardInterrupt if interrupts else RuntimeError):
                _failing_backward(model, fail)
            one_pass(model, "no_grad")
            assert all(same(x, before[name]) for name, x in gradients(model).items())
            for each in (model, waiting):
                each.zero_grad()
                one_pass(each, "")
            assert_alike(model, waiting, interrupts)
        counts = [sum(event[0] == kind for event in events) for kind in "SW"]
        assert counts[0] == counts[1]


@on_two
def test_an_interrupted_pass_is_over() -> None:
    """A layer that is called by itself afterwards gathers what there is then."""
    model, waiting = (made(prefetch=prefetch) for prefetch in (1, 0))
    warm(model)

    def interrupt() -> None:
        raise KeyboardInterrupt

    model.before = {2: interrupt}
    with pytest.raises(KeyboardInterrupt):
        model(batch())
    for each in (model, waiting):
        for x in each.parameters():
            x.data.mul_(2)
    assert torch.equal(model.layers[2](batch()), waiting.layers[2](batch()))
    xt.explain(model)
    assert parallel_of(model).prefetch._call is None


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
        warm(model)
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
    warm(model, waiting)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for each in (other, waiting):
            each.zero_grad()
            warm(each)
            one_pass(each, "")
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


class Thing:
    """An object that only a stack refers to."""


def test_to_ask_whether_a_call_runs_keeps_nothing_on_the_stack_alive() -> None:
    """What is on the way lives on stacks, and is awaited when it dies."""
    ended = (lambda: sys._getframe())()

    def asks() -> weakref.ref[Thing]:
        thing = Thing()
        assert not is_running(ended)
        return weakref.ref(thing)

    gc.disable()
    try:
        assert asks()() is None
    finally:
        gc.enable()


# ---- ranks that differ


@on_two
def test_another_order_on_one_rank_is_told_before_anything_travels() -> None:
    """All layers have one shape: nothing else would tell."""
    model = made()
    model.order = [0, 1, 2, 3] if dist.get_rank() else [1, 0, 2, 3]
    with torch.no_grad():
        model(batch())
        model(batch())
        text = check_error(lambda: model(batch()), "DesyncError", "the order of modules in a pass")
    assert "layers.1" in text


def passes_of_ranks(model: Any) -> list[Tensor]:
    """What ranks may do differently where all gather the same: here rank 0 fails in some passes."""
    found = []

    def fail() -> None:
        if dist.get_rank() == 0:
            raise ValueError

    for fails, order in [
        (1, [0, 1]),
        (0, [0, 1]),
        (0, [0, 1]),
        (1, [1, 0]),
        (0, [1, 0]),
        (0, [1, 0]),
    ]:
        model.order = order
        model.at_end = fail if fails else None
        with torch.no_grad(), contextlib.suppress(ValueError):
            found.append(model(batch()))
    model.at_end = None
    found.append(one_pass(model, ""))
    return found


@on_two
def test_a_pass_that_fails_on_one_rank_alone_leaves_the_orders_of_all_equal() -> None:
    models = [made(n_layers=2, prefetch=prefetch) for prefetch in (1, 0)]
    found = [passes_of_ranks(model) for model in models]
    assert all(map(torch.equal, *found))
    assert_alike(*models, "fails")


@on_two
def test_a_model_that_returns_nothing_on_one_rank_is_prefetched_as_any_other() -> None:
    models = [made(prefetch=prefetch) for prefetch in (1, 0)]
    for model in models:
        model.returns = dist.get_rank() == 0
        for _ in range(4):
            y = model(batch())
            if y is None:
                y = model.y
            y.square().sum().backward()
    assert_alike(*models, "None")


@on_two
def test_replicas_that_gather_nothing_together_may_run_any_passes() -> None:
    """On r=2, dp=1 rank 0 alone evaluates, in another order; then all train."""
    models = []
    for prefetch in (1, 0):
        torch.manual_seed(0)
        model = xt.parallelize(
            Net(Linear, 4).double(), {"**": "o/dp ... -> o ..."}, {"": "b/r/dp s c"},
            xs.Mesh(r=2, dp=1), gathers="layers.*", prefetch=prefetch,
        )  # fmt: skip
        models.append(model)
        for _ in range(3):
            one_pass(model, "")
            if dist.get_rank() == 0:
                model.order = [1, 0]
                one_pass(model, "no_grad")
                model.order = range(4)
    assert_alike(*models, "replicas")


def _faults(folder: str) -> None:
    """In a world that waits 2 s: a rank that skips a module, then one that is killed."""
    dist.barrier = lambda: None  # at their end ranks meet, and these cannot
    model = made()
    warm(model)
    c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
    found = ""
    if dist.get_rank():
        model.order = [0, 2, 3]
    try:
        one_pass(model, "")
        one_pass(model, "")
    except xs.XshardError as error:
        found = type(error).__name__
    (pathlib.Path(folder) / f"skips{dist.get_rank()}").write_text(found)


def _loses_a_peer(folder: str) -> None:
    """Rank 1 ends while what rank 0 uses next is on the way."""
    dist.barrier = lambda: None
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which the others are told to end by
    c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
    model = made()
    warm(model)
    if dist.get_rank():
        model.before = {2: lambda: os.kill(os.getpid(), signal.SIGKILL)}
    try:
        one_pass(model, "")
    except xs.XshardError as error:
        assert parallel_of(model).prefetch._expected is None
        (pathlib.Path(folder) / "lost").write_text(type(error).__name__)


def test_a_module_that_one_rank_skips_and_a_peer_that_ends_are_told(tmp_path: pathlib.Path) -> None:
    on_ranks(2, _faults, str(tmp_path), timeout_s=60)
    found = {(tmp_path / f"skips{rank}").read_text() for rank in range(2)}
    assert found <= {"DesyncError", "CollectiveError"}, found
    with pytest.raises(xt.testing.RankError, match=r"SIGKILL|failed"):
        on_ranks(2, _loses_a_peer, str(tmp_path), timeout_s=60)
    assert (tmp_path / "lost").read_text() == "CollectiveError"


# ---- the schedule


@on_two
def test_the_schedule_that_runs_is_shown() -> None:
    model = made(n_layers=2)
    explanation = xt.explain(model)
    assert "computes" not in explanation and "<svg" not in explanation._repr_html_()
    one_pass(model, "")
    schedule = parallel_of(model).prefetch.schedule()
    names = [step.name for step in schedule.steps if isinstance(step, Compute)]
    forward = ["the model", "layers.0", "layers.1"]
    assert names == [*forward, *(f"{name}, backward" for name in reversed(forward))]
    explanation = xt.explain(model)
    assert str(schedule) in explanation and explanation.schedule == schedule
    assert explanation._repr_html_().endswith(schedule._repr_html_())
    assert Schedule.from_json(schedule.to_json()) == schedule
    with events_of_moves() as events:
        one_pass(model, "")
        events.clear()
        one_pass(model, "")
    starts = sum(event.startswith("S") for event in events)
    assert starts == sum(type(step).__name__ == "Start" for step in schedule.steps)
    model.order = [1, 1]
    one_pass(model, "")
    assert "layers.1 (2), backward" in xt.explain(model)
