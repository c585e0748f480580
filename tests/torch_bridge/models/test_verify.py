"""`verify`: mistakes are found, and named, on all processes; nothing of the model changes."""

from __future__ import annotations

import functools
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import SharedRanks, error_of, still_connected
from tests.torch_bridge.models import test_parallelize as blocks
from torch_bridge.models.first_wrong import ProbePoint, _first_wrong_point
from xshard.testing import EquivalenceError

MESH = xs.Mesh(dp=2, tp=2)
RULES: dict[str, Any] = {
    "parameters": {
        "mlp.0.weight": "o/tp i",
        "mlp.0.bias": "o/tp",
        "mlp.2.weight": "o i/tp",
        "**": "...",
    },
    "inputs": {"": "b c -> b/dp c", "mlp": "b c -> b c | copy(tp)"},
    "outputs": {"mlp": "b c | sum(tp) -> b c"},
}


class Net(nn.Module):
    """Counts its calls in a buffer, and may be tied."""

    def __init__(self, dropout: float = 0) -> None:
        super().__init__()
        self.first = self.last = nn.Linear(6, 6)
        self.mlp = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6, bias=False))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        x = self.dropout(self.first(x))
        return self.last(x + self.mlp(x))


def _net(dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Net(**options).to(dtype)


def _parallel(**changed: Any) -> nn.Module:
    return xt.parallelize(_net(), mesh=MESH, **RULES | changed)


def _x() -> Tensor:
    return torch.arange(24.0, dtype=torch.float64).view(4, 6).sin()


def _mean(y: Tensor) -> Tensor:
    return xt.redistribute(y.square().mean(), "() | mean(dp) -> ()", MESH)


on_four = SharedRanks(4)


@on_four
def test_mistakes_are_named() -> None:
    def named(model: nn.Module, loss: Any = _mean, **options: Any) -> list[tuple[str, str, str]]:
        try:
            xt.verify(model, _x(), loss=loss, **options)
        except EquivalenceError as error:
            return [
                (m.subject.kind, m.subject.name, m.cause.name if m.cause else "")
                for m in error.mismatches
            ]
        return []

    def gradients(cause: str, first: int = 0, last: int = 5) -> list[tuple[str, str, str]]:
        names = ["first.weight", "first.bias", "mlp.0.weight", "mlp.0.bias", "mlp.2.weight"]
        return [("gradient", name, cause) for name in names[first:last]]

    assert named(_parallel()) == []
    model = _parallel()
    model.mlp[0].weight.register_hook(lambda g: g / 4)  # by the size of the world
    assert named(model) == gradients("averaged", 2, 3)
    summed = functools.partial(
        xt.redistribute, layouts="() | sum(dp) -> ()", mesh=MESH
    )  # a mean is meant
    found = named(_parallel(), lambda y: summed(y.square().mean()))
    assert found == [("output", "loss", "summed"), *gradients("summed")]
    _, text = error_of(
        lambda: xt.verify(_parallel(), _x(), loss=lambda y: summed(y.square().mean()))
    )
    assert (
        "first wrong: the loss, while outputs of modules with rules are right\n  input of the model"
        in text
    )
    found = named(_parallel(), lambda y: y.square().mean())  # that of each process
    assert found == [("output", "loss", "not averaged"), *gradients("summed")]
    _, text = error_of(lambda: xt.verify(_parallel(), _x()[:3], loss=_mean))  # 2 rows and 1
    cause = (
        "the gradient of the output of the model is right but for factors 0.75, 0.75, 1.5, 1.5 of"
    )
    assert f"likely cause: {cause} the devices: means over each one's own count along dp" in text
    model = _parallel()
    model.mlp.register_forward_hook(lambda module, args, y: y.detach())
    assert named(model, original=_net()) == gradients("module", 0, 2) + gradients("zero", 2)
    assert named(model) == []  # as on one device, where it is detached too
    for outputs in ({"mlp": "b c"}, None):
        assert named(_parallel(outputs=outputs)) == [
            ("output", "loss", "module"),
            *gradients("module"),
        ]
    *_, text = error_of(lambda: xt.verify(_parallel(outputs=None), _x(), loss=_mean))
    assert (
        "first wrong: the output of mlp as 'b/dp c | copy(tp)', after the input of mlp, which is"
        in text
    )
    assert (
        "the blocks along tp are addends" in text
        and "mlp.0.weight: o/tp i, block (5, 6) of (10, 6)" in text
    )


# Wrong rules, and words of the error: the module that is wrong, or that could not go on.
MUTATED: list[tuple[Any, str, str, str | None, str]] = [
    (_net, "outputs", "mlp", "b c | mean(tp) -> b c", "first wrong: the output of mlp as 'b/dp c', after"),
    (_net, "outputs", "mlp", "b c | max(tp) -> b c", "first wrong: the output of mlp as 'b/dp c', after"),
    (_net, "outputs", "mlp", "b c | sum(dp) -> b c", "output of mlp: the block has shape (2, 6), not (4, 6)"),
    (_net, "inputs", "mlp", "b c", "mlp.0.weight is sharded over 'tp', and its module's input"),
    (_net, "inputs", "", "b c", "first wrong: the gradient of mlp.2.weight, while outputs of"),
    (_net, "inputs", "", "b c -> b/dp c | copy(tp)", "first wrong: the gradient of first.bias, while"),
    (_net, "parameters", "mlp.0.weight", "...", "in the parallel module mlp.0, a Linear"),
    (_net, "parameters", "mlp.0.weight", "o i/tp", "in the parallel module mlp.0, a Linear"),
    (_net, "parameters", "mlp.0.bias", "...", "mlp.0.bias is whole along 'tp', which shards its module"),
    (_net, "parameters", "mlp.2.weight", "o/tp i", "in the parallel module mlp.2, a Linear"),
    (blocks.net, "outputs", "**.down", None, "in the parallel module blocks.0, a Block"),
    (blocks.net, "outputs", "**.down", "b s c -> b s/tp c", "first wrong: the output of blocks.0.down as"),
    (blocks.net, "outputs", "head", None, "in loss=, after the last parallel module\n  input of head:"),
    (blocks.net, "inputs", "blocks.1", None, "blocks.1.down.weight is sharded over 'tp'"),
    (blocks.net, "parameters", "head.weight", "...", "in loss=, after the last parallel module"),
]  # fmt: skip


class Keeps(Net):
    """Keeps what a loss or a user may ask for later."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.auxiliary = y.square().mean()
        self.kept = {"outputs": [y]}
        return y


@on_four
def test_a_model_may_keep_outputs() -> None:
    torch.manual_seed(0)
    model = xt.parallelize(Keeps().double(), mesh=MESH, **RULES)
    assert _verified(model) is None
    model(_x()).sum().backward()
    assert _verified(model) is None
    auxiliary = model.auxiliary
    message = _verified(model, loss=lambda y: y.square().mean())  # each process's own
    assert message is not None and "comparisons differ" in message
    assert model.auxiliary.grad_fn is not None and model.kept["outputs"][0].grad_fn is not None
    assert auxiliary.grad_fn is not None


def _verified(model: nn.Module, loss: Any = None) -> str | None:
    def whole(y: Tensor) -> Tensor:
        return xt.redistribute(y.square().mean(), "() | mean(dp) -> ()", MESH)

    try:
        xt.verify(model, _x(), loss=loss or whole)
    except EquivalenceError as error:
        return str(error)
    return None


@on_four
def test_no_wrong_rule_is_silent() -> None:
    """None is silent, and none ends in a text without a module's name."""

    def logits_loss(y: Tensor) -> Tensor:
        weights = xt.redistribute(blocks._weights(), "b s v -> b/dp s v", MESH)
        return xt.redistribute((y * weights).sum(), "() | sum(dp) -> ()", MESH)

    for make, kind, name, text, words in MUTATED:
        rules = {k: dict(each) for k, each in (RULES if make is _net else blocks.RULES).items()}
        rules[kind] |= {name: text}
        rules[kind] = {n: each for n, each in rules[kind].items() if each is not None}
        batch, loss = (_x(), _mean) if make is _net else (blocks._ids(), logits_loss)
        with pytest.raises(Exception) as caught:  # noqa: PT011
            xt.verify(xt.parallelize(make(), mesh=MESH, **rules), batch, loss=loss)
        found = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        assert words in found, (kind, name, text, found)


@on_four
def test_zeros_that_hide_a_wrong_rule_are_told() -> None:
    """A layer that begins at zero makes the same zeros with and without the sum of its results."""
    for changed in ({}, {"outputs": {}}):
        model = _parallel(**changed)
        nn.init.zeros_(model.mlp[2].weight)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            xt.verify(model, _x(), loss=_mean)
        texts = [str(x.message) for x in seen if x.category is xs.errors.UnverifiedWarning]
        assert len(texts) == (dist.get_rank() == 0)
        assert all("gradients of mlp.0.weight, mlp.0.bias: a wrong rule" in text for text in texts)
        nn.init.ones_(model.mlp[2].weight)
        with warnings.catch_warnings():
            warnings.simplefilter("error", xs.errors.UnverifiedWarning)
            assert (_verified(model) is None) == (not changed)


@on_four
def test_nothing_of_the_model_changes() -> None:
    model = _parallel()
    _mean(model(_x())).backward()
    gradients = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    calls = model.calls
    xt.verify(model, (_x(),), loss=_mean)
    xt.verify(model, {"x": _x()}, loss=_mean)
    for name, p in model.named_parameters():
        assert p.grad is gradients[name][0] and torch.equal(p.grad, gradients[name][1])
    assert torch.equal(torch.get_rng_state(), state) and model.calls is calls and calls == 1
    model.zero_grad()
    _mean(model(_x())).backward()
    assert all(torch.equal(p.grad, gradients[name][1]) for name, p in model.named_parameters())

    # A batch that arrives cut is gathered; gathered parameters, on the meta device before.
    rules = {"parameters": {"calls": "...", "**": "o/dp ... -> o ..."}, "inputs": {"": "b/dp c"}}
    cut = xt.parallelize(_net(torch.float32), mesh=MESH, **rules)
    block = xt.redistribute(_x().float(), "b c -> b/dp c", MESH)
    with torch.device("meta"):
        original = Net()
    xt.verify(cut, block, loss=_mean, original=original, tol=1e-5)
    assert original.mlp[0].weight.is_meta


@on_four
def test_what_is_refused() -> None:
    model = _parallel()

    def refused(model: nn.Module, x: Any = None, loss: Any = _mean, **options: Any) -> str:
        return error_of(lambda: xt.verify(model, _x() if x is None else x, loss=loss, **options))[1]

    random = xt.parallelize(_net(dropout=0.5), mesh=MESH, **RULES)
    assert "random numbers" in refused(random)
    xt.verify(random.eval(), _x(), loss=_mean)
    assert "differ along 'dp'" in refused(model, _x() + dist.get_rank() // 2)
    assert "a scalar tensor, not shape (4, 6)" in refused(model, loss=lambda y: y)
    assert "a scalar tensor, not a NoneType" in refused(model, loss=lambda y: None)
    assert "first.weight is in the parallel model" in refused(model, original=nn.Linear(2, 2))
    with xt.no_sync(model):
        assert "outside of no_sync" in refused(model)
    assert "not parallel" in refused(_net())
    xt.verify(model, _x(), loss=_mean)
    assert still_connected()


class Scaled(nn.Module):
    """Leaves its head and a temperature to the loss, as models with losses in chunks do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 6, bias=False)
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).tanh()


def _penalty(model: nn.Module) -> Tensor:
    return 0.1 * sum((x - 1).square().sum() for x in model.parameters())


@on_four
def test_penalties_count_once_or_are_refused() -> None:
    def judged(rules: dict[str, str], losses: dict[str, Any]) -> dict[str, str]:
        torch.manual_seed(0)
        model = xt.parallelize(Scaled().double(), rules, {"": "b c -> b/dp c"}, MESH)
        found = {}
        for name, loss in losses.items():
            try:
                xt.verify(model, _x(), loss=functools.partial(loss, model))
            except (xs.errors.PlanError, EquivalenceError) as error:
                found[name] = str(error)
            else:
                found[name] = "equal"
        return found

    def over_dp(loss: Tensor, kind: str = "mean") -> Tensor:
        return xt.redistribute(loss, f"() | {kind}(dp) -> ()", MESH)

    def beside(model: nn.Module, y: Tensor) -> Tensor:
        return over_dp(y.square().mean()) + _penalty(model)

    def inside(model: nn.Module, y: Tensor) -> Tensor:
        return over_dp(y.square().mean() + _penalty(model))

    def summed(model: nn.Module, y: Tensor) -> Tensor:
        return over_dp(y.square().mean()) + over_dp(_penalty(model), "sum")

    losses = {"beside": beside, "inside": inside, "summed": summed}
    times_2 = "would count 2 times, as it is summed over 'dp'"
    found = judged({"**": "..."}, losses)
    assert found.pop("inside") == "equal"
    assert all(times_2 in text and ".grad after backward" in text for text in found.values()), found

    rows = {"body.*": "o/dp ... -> o ...", "head.*": "o/dp i", "temperature": "..."}
    of_blocks = {}  # of the body alone, whose parameters are in shards
    for name in ("inside", "summed"):
        of_blocks[name] = functools.partial(lambda loss, m, y: loss(m.body, y), losses[name])
    found = judged(rows, of_blocks)
    assert found["summed"] == "equal"
    assert "would count 1/2, by the mean over 'dp' in 'o/dp" in found["inside"]

    # Of blocks, sums of elements are right, and what is computed of the block as a whole is refused.
    def of_body(penalty: Any) -> Any:
        return lambda m, y: over_dp(y.square().mean()) + penalty(m.body.weight, m.body.bias)

    zero = torch.zeros((), dtype=torch.float64)
    mse = nn.functional.mse_loss
    added = {
        "abs": lambda w, b: w.abs().sum() + 3 * b.sum() / 2,
        "square of a norm": lambda w, b: w.norm() ** 2 + torch.linalg.vector_norm(b).square(),
        "stack": lambda w, b: torch.stack([w.square().sum(), b.square().sum()]).mean(),
        "mse": lambda w, b: mse(w, zero.expand_as(w), reduction="sum"),
    }
    read = {
        "mean": lambda w, b: w.square().mean(),
        "norm": lambda w, b: w.norm(),
        "root": lambda w, b: (w.square().sum() + b.square().sum()).sqrt(),
        "mse": lambda w, b: mse(w, zero.expand_as(w)),
        "max": lambda w, b: w.abs().max(),
        "all": lambda w, b: torch.cat([w.flatten(), b]).mean(),
    }
    # Each process has its own addend of the value, whose gradients are right: verify would compare values.
    model = xt.parallelize(Scaled().double(), rows, {"": "b c -> b/dp c"}, MESH)
    whole = {name: x.full_tensor() for name, x in xt.state_dict(model).items() if "body" in name}
    for name, penalty in added.items():
        model.zero_grad()
        expected = {n: x.clone().requires_grad_() for n, x in whole.items()}
        penalty(expected["body.weight"], expected["body.bias"]).backward()
        (over_dp(0 * model(_x()).sum()) + penalty(model.body.weight, model.body.bias)).backward()
        for n, x in expected.items():
            right = torch.zeros_like(x) if x.grad is None else x.grad
            block = xt.redistribute(right, "o ... -> o/dp ...", MESH)
            torch.testing.assert_close(model.get_parameter(n).grad, block, msg=f"{name}: {n}")
    told = judged(rows, {name: of_body(penalty) for name, penalty in read.items()})
    assert all("block, where sums alone add up" in text for text in told.values()), told
    norm_of_whole = of_body(lambda w, b: over_dp(w.square().sum(), "sum").sqrt())
    assert judged(rows, {"norm": norm_of_whole}) == {"norm": "equal"}

    # A pass whose gradients get gradients is searched, and one of a model that two threads call.
    model = xt.parallelize(Scaled().double(), rows, {"": "b c -> b/dp c"}, MESH)
    for is_in_thread in (False, True):
        if is_in_thread:
            thread = threading.Thread(target=model, args=(_x(),))
            thread.start()
            thread.join()
        loss = inside(model.body, model(_x()))
        told = error_of(functools.partial(loss.backward, create_graph=not is_in_thread))[1]
        assert "would count 1/2, by the mean over 'dp'" in told, (is_in_thread, told)

    # Uses outside of modules that vary as activations do are summed as those inside.
    def of_logits(model: nn.Module, y: Tensor) -> Tensor:
        scores = nn.functional.linear(y, model.head.weight) * model.temperature.exp()
        return over_dp(scores.square().mean() + y.mean() / model.temperature)

    def with_gradient_penalty(model: nn.Module, y: Tensor) -> Tensor:
        [gradient] = torch.autograd.grad(y.sum(), y, create_graph=True)
        return over_dp(y.square().mean() + (gradient * y).mean())

    def of_direct_call(model: nn.Module, y: Tensor) -> Tensor:
        return over_dp((y.detach() + model.head(y)).square().mean())

    varying = {"logits": of_logits, "direct": of_direct_call, "gradient": with_gradient_penalty}
    assert set(judged({"**": "..."}, varying).values()) == {"equal"}

    # Those that meet the same values on all processes are not.
    def gathered(y: Tensor, dst: str = "b c") -> Tensor:
        return xt.redistribute(y, f"b/dp c -> {dst}", MESH)

    def similarity(y: Tensor, others: Tensor, temperature: Tensor) -> Tensor:
        return (torch.logsumexp(y @ others.mT * temperature.exp(), -1) - y.mean()).mean()

    whole_values = {
        "mean": lambda m, y: over_dp(y.square().mean()) * m.temperature,
        "sum": lambda m, y: m.temperature.exp() * over_dp(y.square().sum(), "sum") + 1,
        "weights": lambda m, y: sum(
            m.body.bias.softmax(0)[:2]
            * torch.stack([over_dp(y.mean()), over_dp(y.square().mean())])
        ),
        "gathered": lambda m, y: similarity(gathered(y), gathered(y), m.temperature),
    }
    told = judged({"**": "..."}, whole_values)
    times_2 = "were put together over 'dp': its gradient would count 2 times"
    assert all(times_2 in text and "* scale" in text for text in told.values()), told
    own_rows = {
        "before": lambda m, y: over_dp(y.square().mean() * m.temperature),
        "rows": lambda m, y: over_dp(similarity(y, gathered(y, "b c | copy(dp)"), m.temperature)),
    }
    assert set(judged({"**": "..."}, own_rows).values()) == {"equal"}

    # One device cannot know blocks that the loss has kept.
    model = xt.parallelize(_net(), mesh=MESH, **RULES)
    kept = list(model.parameters())
    text = error_of(lambda: xt.verify(model, _x(), loss=lambda y: _mean(y) + kept[0].sum()))[1]
    assert "loss= has kept the block of first.weight" in text
    assert all(x.grad is None and x is y for x, y in zip(model.parameters(), kept, strict=True))


def test_the_next_output_of_a_module_tells_whether_what_is_in_it_counts() -> None:
    def run(*rights: bool) -> dict[ProbePoint, bool]:
        """Two calls of a layer `a` with `a.up` inside: whether the input, `a.up` and the output are right."""
        sides = [("a", "input"), ("a.up", "output"), ("a", "output")]
        places = [ProbePoint(*side, 0, call) for call in range(2) for side in sides]
        return dict(zip(places, rights, strict=True))

    second_up = ProbePoint("a.up", "output", 0, 1)
    assert _first_wrong_point(run(True, True, True, True, True, True)) is None
    assert _first_wrong_point(run(False, False, True, True, True, True)) is None  # a guess is wrong
    assert _first_wrong_point(run(True, True, True, True, False, False)) == second_up
    assert _first_wrong_point(run(True, False, False, True, True, True)) == second_up._replace(
        call=0
    )
