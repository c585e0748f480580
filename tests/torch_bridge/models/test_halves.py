"""A batch in parts: values and gradients of the whole; one computes while another's activations travel."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import SharedRanks, check_error
from torch_bridge.autodiff import turns
from torch_bridge.lower import collectives
from torch_bridge.models.gathered import ParameterMoves
from torch_bridge.models.parallel import parallel_of

TP = xs.Mesh(tp=2)
WIDTH = 4
on_two = SharedRanks(2)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Block(nn.Module):
    """A layer whose activations are whole numbers: sums in any order have the same bits."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self, n: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(n))
        self.order = list(range(n))
        self.around: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        for i in self.order:
            x = self.around(self.blocks[i], x)
        return x


def whole_numbers(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for x in model.parameters():
            x.copy_(torch.randint(-1, 2, x.shape, generator=generator))
    return model.double()


def rows(n: int = 7, *shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 3, (n, *(shape or (WIDTH,))), generator=generator)
    return x.double().requires_grad_()


def tensor_parallel(model: nn.Module | None = None, **options: Any) -> Any:
    parameters = {"**.up.weight": "o/tp i", "**.down.weight": "o i/tp", "**": "..."}
    inputs = {"": "b c", "**.up": "b c -> b c | copy(tp)", "**.down": "b m/tp"}
    outputs = {"**.down": "b c | sum(tp) -> b c"}
    model = whole_numbers(Net() if model is None else model)
    return xt.parallelize(model, parameters, inputs, TP, outputs=outputs, **options)


def zero3(model: nn.Module | None = None, **options: Any) -> Any:
    """ZeRO-3 of layers whose activations move, too."""
    model = whole_numbers(Net() if model is None else model)
    inputs = {"": "b s/tp c", "blocks.*": "b s/tp c", "**.up": "b s/tp c -> b s c | copy(tp)"}
    outputs = {"**.up": "b s m -> b s/tp m"}
    parameters = {"**": "o/tp i -> o i"}
    return xt.parallelize(
        model, parameters, inputs, TP, outputs=outputs, gathers="blocks.*", **options
    )


def sequence_parallel(model: nn.Module | None = None) -> Any:
    parameters = {"**.up.weight": "o/tp i", "**.down.weight": "o i/tp", "**": "..."}
    inputs = {"": "b s/tp c", "blocks.*.mlp": "b s/tp c -> b s c | copy(tp)"}
    outputs = {"blocks.*.mlp": "b s c | sum(tp) -> b s/tp c"}
    model = whole_numbers(Net() if model is None else model)
    return xt.parallelize(model, parameters, inputs, TP, outputs=outputs)


class Found(NamedTuple):
    result: Tensor
    gradients: list[Tensor | None]


def step(model: Any, *args: Tensor, **kwargs: Any) -> Found:
    inputs = [x for x in args if x.requires_grad]
    for x in (*model.parameters(), *inputs):
        x.grad = None
    y = model(*args, **kwargs)
    weights = torch.arange(1, 1 + y.numel(), dtype=y.dtype).view(y.shape) % 7
    (y * weights).sum().backward()
    return Found(y.detach(), [x.grad for x in (*model.parameters(), *inputs)])


def assert_same(found: Found, expected: Found, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(found.result, expected.result, rtol=tolerance, atol=tolerance)
    for gradient, other in zip(found.gradients, expected.gradients, strict=True):
        torch.testing.assert_close(gradient, other, rtol=tolerance, atol=tolerance)


def check(
    model: Any, *args: Tensor, parts: int = 2, tolerance: float = 0.0, **options: Any
) -> None:
    """A step in parts is a step of the whole, also the second one."""
    whole = step(model, *args)
    xt.halves(model, parts, **options)
    for _ in range(2):
        assert_same(step(model, *args), whole, tolerance)
    assert_idle(model)


def assert_idle(model: nn.Module) -> None:
    """Modules have their blocks, and nothing is left of a pass."""
    assert all(x.is_leaf for x in model.parameters())
    assert not turns.RUNNING
    for hooks in parallel_of(model).hooks.values():
        assert not hooks.parameters._gathered_for_parts and not hooks.parameters._calls.value
        assert hooks.parameters._pass.value is None


@contextlib.contextmanager
def events_of_moves() -> Iterator[list[str]]:
    """Note "S" where a move starts, "W" where it is awaited."""
    events: list[str] = []
    begin = collectives.Collective.begin
    wait = collectives._UnderWay.__call__

    def begun(self: Any, messages: Tensor, shape: Any) -> Any:
        events.append("S")
        return begin(self, messages, shape)

    def awaited(self: Any) -> Tensor:
        events.append("W")
        return wait(self)

    with (
        mock.patch.object(collectives.Collective, "begin", begun),
        mock.patch.object(collectives._UnderWay, "__call__", awaited),
    ):
        yield events


@contextlib.contextmanager
def events_of(model: Any) -> Iterator[list[str]]:
    """u0A: `up` of block 0 computes part A; then d0A. "S" where a move starts, "W" where it is awaited."""
    handles = []
    with events_of_moves() as events:

        def noted(module: nn.Module, args: Any, *, name: str) -> None:
            part = turns.current_part()
            assert part is not None
            events.append(f"{name}{'AB'[part.turns.parts.index(part)]}")

        for i, block in enumerate(model.blocks):
            for module, name in ((block.mlp.up, f"u{i}"), (block.mlp.down, f"d{i}")):
                handles.append(module.register_forward_pre_hook(partial(noted, name=name)))
        yield events
    for handle in handles:
        handle.remove()


@contextlib.contextmanager
def moves_of_parameters() -> Iterator[list[str]]:
    """The gathers of parameters while they are made, forward or backward."""
    gathers: list[str] = []
    gather = ParameterMoves.gather

    def gathered(self: Any, parameters: Any, blocks: Any) -> Any:
        if parameters:
            gathers.append(parameters[0].name)
        return gather(self, parameters, blocks)

    with mock.patch.object(ParameterMoves, "gather", gathered):
        yield gathers


def events_of_step(model: nn.Module, x: Tensor) -> tuple[str, str]:
    """The events of a second step, forward and backward."""
    step(model, x)
    with events_of(model) as events:
        y = model(x)
        forward = " ".join(events)
        events.clear()
        y.sum().backward()
        return forward, " ".join(events)


# ---- equal to the whole


@on_two
def test_tensor_parallel_in_parts_is_exact() -> None:
    for n, parts in ((7, 2), (8, 2), (7, 3), (2, 2), (5, 4)):
        check(tensor_parallel(), rows(n), parts=parts)


@on_two
def test_parts_take_turns_forward_and_backward() -> None:
    forward, backward = events_of_step(xt.halves(tensor_parallel(Net(2))), rows())
    assert forward == "u0A d0A S u0B d0B S W W u1A d1A S u1B d1B S W W", forward
    assert backward == "S S W W S S W W", backward


@on_two
def test_gathers_and_sums_travel_beside_halves_of_modules() -> None:
    """A part is in the middle of a module while another awaits a sum, and starts a gather."""
    forward, backward = events_of_step(xt.halves(sequence_parallel(Net(2))), rows(4, 3, WIDTH))
    assert forward == "S W u0A S d0A S W u0B W S d0B S W u1A W S d1A S W u1B W d1B S W", forward
    assert backward == "S W S S W W S S W W S S W W S W", backward


@on_two
def test_sequence_parallel_in_parts_is_exact() -> None:
    for n, parts in ((7, 2), (5, 3)):
        check(sequence_parallel(), rows(n, 3, WIDTH), parts=parts)


@on_two
def test_sharded_parameters_are_gathered_once_for_all_parts() -> None:
    for options in ({}, {"prefetch": 1}, {"keep": True}, {"keep": "blocks.1.**"}):
        check(zero3(**options), rows(7, 3, WIDTH))
    model = zero3(prefetch=0)
    with moves_of_parameters() as whole:
        step(model, rows(7, 3, WIDTH))
    xt.halves(model)
    with moves_of_parameters() as in_parts:
        step(model, rows(7, 3, WIDTH))
    assert in_parts == whole and len(whole) == 6, (whole, in_parts)
    ahead = xt.halves(zero3())
    for _ in range(2):  # after two passes the order is known
        step(ahead, rows(7, 3, WIDTH))
    with moves_of_parameters() as late:
        step(ahead, rows(7, 3, WIDTH))
    assert late == [], late


@on_two
def test_modules_that_are_called_several_times_are_gathered_as_they_are_used() -> None:
    for order in ([0, 0, 1, 1], [0, 1, 0, 1], [1, 0, 0, 2, 1]):
        model = zero3()
        model.order = order
        check(model, rows(7, 3, WIDTH))


@on_two
def test_checkpoints_in_parts_are_exact() -> None:
    def around(block: nn.Module, x: Tensor, use_reentrant: bool = False) -> Tensor:
        return checkpoint(block, x, use_reentrant=use_reentrant)

    class Inside(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    for make, x in ((tensor_parallel, rows()), (zero3, rows(7, 3, WIDTH))):
        for use_reentrant in (False, True):
            model = make()
            model.around = lambda block, x, r=use_reentrant: around(block, x, r)
            check(model, x)
            only_some = make()
            only_some.around = lambda block, x, m=only_some: (
                around(block, x) if block is m.blocks[1] else block(x)
            )
            check(only_some, x)
        net = Net()
        net.blocks[1] = Inside()
        check(make(net), x)
        # Around the module that is in parts: what is computed again is in parts, too.
        outer = make()
        whole = step(outer, x)
        xt.halves(outer)
        again = step(Again(outer), x)
        assert_same(again, whole)


class Again(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.model, x, use_reentrant=False)


@on_two
def test_what_a_part_changes_for_its_thread_stays_with_it() -> None:
    """A part under `no_grad`, autocast or hooks of its own does not let others go on."""

    def recorded_later(block: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            first = block(x)
        return block(x) + first

    def under_autocast(block: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return block(x)

    def saved_otherwise(block: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: 2 * x, lambda x: x / 2):
            return block(x)

    for make, x in ((tensor_parallel, rows()), (zero3, rows(7, 3, WIDTH))):
        for around in (recorded_later, under_autocast, saved_otherwise):
            model = make()
            model.around = around
            check(model, x)


# ---- experts and attention


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, WIDTH, WIDTH))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        chosen_rows = x[:, None, None] @ self.weight[chosen]
        return (chosen_rows[:, :, 0] * weights[..., None]).sum(1)


class Routed(nn.Module):
    """A layer whose rows choose two of four experts, by their own values."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        first = (flat.detach().sum(-1) % 4).long()
        chosen = torch.stack([first, (first + 1) % 4], 1)
        return x + self.experts(flat, chosen, flat[:, :2] % 3).view(x.shape)


class Attends(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (2, -1)).chunk(3, -1)
        layout = "b s/cp h k"
        y = xt.nn.attention(q, k, v, layout, xs.Mesh(cp=2), causal=True, how=self.how)
        return x + y.flatten(2)


@on_two
def test_experts_in_parts_are_those_of_the_whole() -> None:
    net = Net()
    net.blocks = nn.ModuleList(Routed() for _ in range(3))
    inputs = {"": "b/ep s c", "**.experts": "t/ep c -> t/to(ep) c"}
    model = xt.parallelize(whole_numbers(net), {"**": "e/ep ..."}, inputs, xs.Mesh(ep=2))
    with mock.patch.object(
        turns.BatchPart, "pause", autospec=True, side_effect=turns.BatchPart.pause
    ) as pause:
        for parts in (2, 3):
            check(model, rows(5, 3, WIDTH, seed=dist.get_rank()), parts=parts)
            xt.halves(model, 1)
    assert pause.call_count == 2 * 5 * 3 * 2  # steps, parts, layers: for rows, and back


@on_two
def test_attention_over_processes_in_parts_is_that_of_the_whole() -> None:
    for how in ("gather", "ulysses", "ring"):
        net = Net(2)
        net.blocks = nn.ModuleList(Attends(how) for _ in range(2))
        model = whole_numbers(net)
        xt.parallelize(model, {"**": "o i"}, {"": "b s/cp c"}, xs.Mesh(cp=2))
        x = rows(5, 3, WIDTH, seed=dist.get_rank()).detach() / 8
        check(model, x.requires_grad_(), tolerance=1e-12)
        with events_of_moves() as events:
            model(x)
        # Blocks of a ring travel, and documents and heads of the others, while the other part computes.
        assert " ".join(events).startswith("S S W"), (how, events)


# ---- arguments and results


class Takes(nn.Module):
    """A body with arguments and results of several kinds, and a loss around it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()

    def forward(self, x: Tensor, labels: Tensor | None = None, **options: Any) -> Any:
        result = self.body(x, **options)
        if labels is None:
            return result
        return ((result["y"] - labels) ** 2).mean()


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net(2)
        self.norm = nn.Identity()
        self.returned: Callable[[Tensor], Any] = lambda y: {"y": y, "pair": (y[:, 0], None), "n": 3}

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        pair: Any = None,
        scale: float = 1.0,
    ) -> Any:
        y = self.norm(self.net(x)) * scale
        if mask is not None:
            y = y * mask
        if pair is not None:
            y = y + pair[0] * pair[1]
        return self.returned(y)


def taking(**options: Any) -> Any:
    return xt.halves(tensor_parallel(Takes()), **options)


@on_two
def test_arguments_and_results_are_split_and_joined() -> None:
    whole = tensor_parallel(Takes())
    x = rows()
    mask = rows(7, 7, WIDTH, seed=2)[0].detach()
    pair = (torch.ones(1, WIDTH, dtype=torch.float64), 2.0)
    dims = {"mask": 0, "pair": None}
    for module in ("", "body"):
        given = {"mask": mask, "pair": pair, "scale": 2.0}
        model = xt.halves(tensor_parallel(Takes()), module=module, dims={"x": 0, **dims})
        expected = whole(x, **given)
        found = model(x, **given)
        assert torch.equal(found["y"], expected["y"]) and found["n"] == 3
        assert torch.equal(found["pair"][0], expected["pair"][0]) and found["pair"][1] is None
    # A loss after the body is of the whole batch.
    labels = rows(7, seed=5).detach()
    assert torch.equal(model(x, labels=labels), whole(x, labels=labels))
    with torch.inference_mode():
        assert torch.equal(model(x)["y"], whole(x)["y"])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x)["y"], whole(x)["y"])


@on_two
def test_what_cannot_be_split_or_joined_is_an_error_with_a_way_out() -> None:
    model = taking(module="body", dims={"x": 0})
    x = rows()
    square = torch.ones(7, 7)
    check_error(lambda: model(x, mask=square), "XshardError", "argument 'mask'", "dims={'mask': 0}")
    check_error(lambda: model(x, pair=object()), "XshardError", "argument 'pair' is a object")
    check_error(lambda: model(rows(1)), "ShapeError", "a batch of 1 in 2 parts")
    returned: list[tuple[Callable[[Tensor], Any], str, str]] = [
        (lambda y: {"loss": y.mean()}, "ShapeError", "loss: each part returns a number"),
        (lambda y: y.T, "ShapeError", "parts of 4, 3 rows return shapes (4, 4), (4, 3)"),
        (lambda y: object(), "ShapeError", "returns a object"),
        (lambda y: [y] * len(y), "ShapeError", "unlike trees"),
    ]
    for model.body.returned, kind, words in returned:
        check_error(lambda: model(x), kind, words)
    check_error(lambda: xt.halves(model, module="bdy"), "XshardError", "did you mean 'body'")
    check_error(lambda: xt.halves(model, module="body"), "XshardError", "dims={'x': 0}")
    check_error(lambda: xt.halves(Net()), "XshardError", "not parallel")
    parts = 2 + dist.get_rank()
    check_error(
        lambda: xt.halves(model, parts, module="body", dims={"x": 0}), "DesyncError", "halves"
    )
    both = taking(dims={"labels": 0, "x": 0})
    check_error(
        lambda: both(x, labels=rows(6)), "ShapeError", "unlike lengths", "argument 'labels' has 6"
    )
    normed = Takes()
    normed.body.norm = nn.BatchNorm1d(WIDTH).double()
    normed_model = xt.halves(tensor_parallel(normed), module="body", dims={"x": 0})
    check_error(lambda: normed_model(x), "XshardError", "body.norm", "its own statistics")
    whole = normed_model.eval()(x)["y"]
    assert torch.equal(xt.halves(normed_model, 1, module="body", dims={"x": 0})(x)["y"], whole)
    counted = Takes()
    counted.body.norm = nn.InstanceNorm1d(WIDTH, track_running_stats=True).double()
    counted_model = xt.halves(tensor_parallel(counted), module="body", dims={"x": 0})
    check_error(lambda: counted_model(x), "XshardError", "body.norm", "average its statistics once")
    with mock.patch.dict("sys.modules", {"greenlet": None}):
        check_error(lambda: xt.halves(model), "XshardError", "greenlet", "xshard[halves]")
    assert_idle(model)


# ---- errors, copies, threads, compilers


class Stop(BaseException):
    pass


@on_two
def test_an_error_in_one_part_ends_the_others_and_the_next_step_is_right() -> None:
    for make, x in (
        (tensor_parallel, rows()),
        (sequence_parallel, rows(7, 3, WIDTH)),
        (zero3, rows(7, 3, WIDTH)),
        (partial(zero3, prefetch=1), rows(7, 3, WIDTH)),
    ):
        model = make()
        whole = step(model, x)
        xt.halves(model)
        step(model, x)
        for kind in (ValueError, Stop):
            for number in (0, 1):
                for fails in range(3):

                    def around(block: nn.Module, x: Tensor) -> Tensor:
                        part = turns.current_part()
                        assert part is not None
                        if block is model.blocks[fails] and part is part.turns.parts[number]:  # noqa: B023
                            raise kind("in one part")  # noqa: B023
                        return block(x)

                    model.around = around
                    with pytest.raises(kind, match="in one part"):
                        model(x)
                    assert_idle(model)
                    model.around = lambda block, x: block(x)
                    assert_same(step(model, x), whole)


@on_two
def test_parts_keep_no_memory_until_the_garbage_collector_comes() -> None:
    model = xt.halves(zero3(prefetch=1))
    kept: list[weakref.ref[Any]] = []

    def around(block: nn.Module, x: Tensor) -> Tensor:
        y = block(x)
        kept.extend([weakref.ref(turns.current_part()), weakref.ref(y)])
        return y

    step(model, rows(7, 3, WIDTH))
    model.around = around
    gc.disable()
    try:
        step(model, rows(7, 3, WIDTH))
        assert len(kept) == 12 and not any(ref() is not None for ref in kept)
    finally:
        gc.enable()


@on_two
def test_copies_and_threads_compute_the_same() -> None:
    model = xt.halves(tensor_parallel())
    x = rows()
    whole = step(tensor_parallel(), x)
    assert_same(step(copy.deepcopy(model), x), whole)
    assert str(inspect.signature(model.forward)) == "(x: 'Tensor') -> 'Tensor'"
    model.around = lambda block, x: block(x)
    errors: list[Exception] = []

    def other_thread() -> None:
        try:
            model(x)
        except Exception as error:
            errors.append(error)

    def around(block: nn.Module, x: Tensor) -> Tensor:
        if not errors:
            thread = threading.Thread(target=other_thread)
            thread.start()
            thread.join()
        return block(x)

    model.around = around
    assert_same(step(model, x), whole)
    assert "another thread" in str(errors[0])
    assert_idle(model)
    with xt.no_sync(model):
        step(model, x)


@on_two
def test_compiled_models_and_layers_compute_the_same() -> None:
    whole = step(tensor_parallel(Net(1)), rows())
    compiled = torch.compile(xt.halves(tensor_parallel(Net(1))), backend="eager")
    assert_same(step(compiled, rows()), whole)
    layers = xt.halves(tensor_parallel(Net(1)))
    layers.blocks[0].mlp.compile(backend="eager")
    for _ in range(2):
        assert_same(step(layers, rows()), whole)
