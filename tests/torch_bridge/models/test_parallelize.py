"""`parallelize` on small models: what stays as it was, what is summed when, and what is refused."""

from __future__ import annotations

import copy
import functools
import math
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import (
    SharedRanks,
    block_of_each,
    check_error,
    error_of,
    on_ranks,
    still_connected,
)
from torch_bridge.testing.byte_counter import Meter

MESH = xs.Mesh(dp=2, tp=2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Embeds tokens, and is tied: the head has the embedding's weight. The last parameter may be unused."""

    recompute: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight
        self.extra = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.full((6,), 2.0))

    def forward(self, ids: Tensor, extra: bool = False) -> Tensor:
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = (
                block(x)
                if self.recompute is None
                else checkpoint(block, x, use_reentrant=self.recompute)
            )
        y = self.head(x)
        return y + self.extra.sum() if extra else y


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


# Tensor and sequence parallel over tp, with a sequence of 7, the tied weight stored whole and used cut.
RULES: dict[str, Any] = {
    "parameters": {
        "**.up.weight": "o/tp i", "**.up.bias": "o/tp", "**.down.weight": "o i/tp",
        "**.down.bias": "o -> o | sum(tp)",
        "head.weight": "v c -> v/tp c", "**": "...",
    },
    "inputs": {
        "": "b s -> b/dp s",
        "blocks.0": "b s c -> b s/tp c",
        "blocks.1": "b s/tp c",
        "**.up": "b s/tp c -> b s c | copy(tp)",
        "head": "b s/tp c -> b s c | copy(tp)",
    },
    "outputs": {"**.down": "b s c | sum(tp) -> b s/tp c", "head": "b s v/tp -> b s v"},
}  # fmt: skip
GATHERED: dict[str, Any] = {
    "parameters": {"**": "o/(dp,tp) ... -> o ..."},
    "inputs": {"": "b s -> b/dp s", "blocks.*": "b/dp s c"},
}


def _ids() -> Tensor:
    return torch.arange(28).view(4, 7) * 5 % 12


def _weights() -> Tensor:
    return torch.arange(4 * 7 * 12.0, dtype=torch.float64).view(4, 7, 12).sin()


def _step(model: Any, **options: Any) -> Tensor:
    weights = xt.redistribute(_weights(), "b s v -> b/dp s v", MESH)
    loss = xt.redistribute((model(_ids(), **options) * weights).sum(), "() | sum(dp) -> ()", MESH)
    loss.backward()
    return loss


@functools.cache
def _on_one_device(**options: Any) -> tuple[dict[str, Tensor], Tensor]:
    """The gradients and the loss of one device."""
    model = net()
    loss = (model(_ids(), **options) * _weights()).sum()
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, loss


def largest_relative_error(model: nn.Module, times: float = 1, **options: Any) -> float:
    """The largest relative error of a gradient, which is to be `times` that of one device."""
    whole, _ = _on_one_device(**options)
    blocks = block_of_each(model, whole)
    own = dict(model.named_parameters())
    # A gathered parameter that no process used has zeros, any other keeps what it had.
    unused = [p.grad for n, p in own.items() if n not in whole]
    assert all(g is None or (not g.any() and g.shape[0] < 3) for g in unused)
    return max(
        ((own[n].grad - times * blocks[n]).norm() / g.norm()).item() for n, g in whole.items()
    )


def check_gradients(model: nn.Module, times: int = 1, **options: Any) -> None:
    """One more pass, after which gradients are `times` those of one device: once from zeros, else added."""
    if times == 1:
        model.zero_grad()
    _step(model, **options)
    assert largest_relative_error(model, times, **options) < 1e-12


on_four = SharedRanks(4)


@on_four
def test_a_step_is_that_of_one_device() -> None:
    gradients, want = _on_one_device()
    norm = torch.nn.utils.get_total_norm(gradients.values())
    received = []
    for rules in (RULES, GATHERED, GATHERED | {"keep": "**.up.*"}, GATHERED | {"keep": True}):
        model = net()
        before = dict(model.named_parameters())
        seen: list[tuple[int, ...]] = []
        up = model.blocks[0].up
        up.register_forward_hook(lambda m, args, y, seen=seen: seen.append(tuple(m.weight.shape)))
        assert (
            xt.parallelize(model, mesh=MESH, **rules) is model
            and model.head.weight is model.embed.weight
        )
        assert all(p is before[n] for n, p in model.named_parameters())
        loss = _step(model)
        assert abs(loss - want) < 1e-12 * abs(want) and largest_relative_error(model) < 1e-12
        assert seen == [(5, 6) if rules is RULES else (10, 6)]
        assert up.weight is before["blocks.0.up.weight"]

        check_gradients(model, 2)  # a second pass adds to what was summed
        model.zero_grad()
        with xt.no_sync(model):
            _step(model)
            if rules is RULES:
                check_error(lambda m=model: xt.grad_norm(m), "XshardError", "each process's share")
        check_gradients(model, 2)
        with xt.no_sync(model):  # all that was gathered goes with it, here and before
            _step(model)
        check_gradients(model)

        twin = copy.deepcopy(model)
        check_gradients(twin)
        assert twin.head.weight is twin.embed.weight is not model.embed.weight
        check_gradients(model, extra=True)

        check_gradients(model)
        assert math.isclose(xt.grad_norm(model), norm, rel_tol=1e-12)
        largest = max(g.abs().max() for g in gradients.values())
        assert math.isclose(xt.grad_norm(model, math.inf), largest, rel_tol=1e-12)
        assert math.isclose(xt.clip_grad_norm_(model, norm.item() / 2), norm, rel_tol=1e-12)
        assert math.isclose(xt.grad_norm(model), norm / 2, rel_tol=1e-6)
        xt.check_replicas(model)

        for model.recompute in (False, True):
            check_gradients(model)
        model.recompute = None
        with torch.no_grad():
            assert model(_ids()).shape == (2, 7, 12)
        with Meter() as meter:
            _step(model)
        received.append(sum(meter.received))
    assert received[1] > received[2] > received[3]  # what is kept is not gathered again
    if dist.get_rank() == 0:  # what is asked of no other process sends nothing
        assert str(model.embed.weight) and "Net" in repr(model)
    assert still_connected()


def _step_without_sync(model: Any) -> None:
    """One more pass inside `no_sync`."""
    with xt.no_sync(model):
        _step(model)


@on_four
def test_passes_without_sync_share_their_collectives() -> None:
    """Passes inside `no_sync` and the next one share one gather, and one sum of gradients."""
    model = xt.parallelize(net(), mesh=MESH, **GATHERED, keep=True)
    up = model.blocks[0].up.weight
    received = []
    for step in (
        _step,
        _step_without_sync,
        _step,
    ):  # the first ones compare replicas and plans, too
        step(model)
    for step in (_step, _step_without_sync, _step_without_sync, _step):
        with Meter() as meter:
            step(model)
        received.append(sum(meter.received))
    alone, first, second, last = received
    assert first - second == alone - last > 0  # gathered by the first one alone
    assert first - second >= 2 * sum(p.nbytes for b in model.blocks for p in b.parameters())
    assert largest_relative_error(model, 7) < 1e-12
    _step_without_sync(model)
    check_error(lambda: xt.grad_norm(model), "XshardError", "each process's share")
    with torch.no_grad():
        assert model(_ids()).shape == (2, 7, 12)  # without a gradient, nothing ends
        up.add_(0.0)  # as an optimiser does: gathered again, with the gradients so far
    check_gradients(model, 9)
    for to_none in (True, False):  # what is dropped in between does not come back
        _step_without_sync(model)
        model.zero_grad(to_none)
        check_gradients(model)
    for model.recompute in (False, True):
        model.zero_grad()
        _step_without_sync(model)
        check_gradients(model, 2)
    model.recompute = None
    _step_without_sync(model)
    check_gradients(copy.deepcopy(model))
    up.requires_grad_(False)
    model.zero_grad()
    _step_without_sync(model)
    _step(model)
    assert up.grad is None and model.blocks[1].up.weight.grad is not None
    up.requires_grad_(True)
    check_gradients(model)


@on_four
def test_gradients_are_summed_in_buckets() -> None:
    model = xt.parallelize(
        net(), mesh=MESH, **RULES, bucket_bytes=600, comm_dtype=(None, torch.float32)
    )
    _step(model)
    assert 1e-12 < largest_relative_error(model) < 1e-5
    model.zero_grad()
    order: list[str] = []
    model.blocks[0].norm.weight.register_hook(lambda g: order.append(f"sent {len(meter.received)}"))
    with Meter() as meter:
        _step(model)
    assert len(meter.received) - 9 > 3 and order != [
        "sent 0"
    ]  # some left before the first block's gradient

    # Parameters of which a part of the processes has no gradient: zeros there, the sum on all.
    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.ones(2)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.a).sum() + (self.b.sum() if dist.get_rank() == 1 else 0)

    some = xt.parallelize(Some(), {"**": "..."}, {"": "n/dp"}, xs.Mesh(dp=4))
    for times in (1, 2):
        some(torch.full((2,), 1.0)).backward()
        assert (
            some.a.grad.tolist() == [4.0 * times] * 2 and some.b.grad.tolist() == [1.0 * times] * 2
        )
        assert some.c.grad is None


@on_four
def test_state_is_saved_whole() -> None:
    whole = net().state_dict()
    model = xt.parallelize(net(), mesh=MESH, **RULES)
    state = xt.state_dict(model)
    assert list(state) == list(whole) and isinstance(state["blocks.0.up.weight"], DTensor)
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save(state, checkpoint_id=folder[0])
    other = net()
    for p in other.parameters():
        p.data.zero_()
    xt.parallelize(other, mesh=MESH, **GATHERED)
    found = xt.state_dict(other)
    dcp.load(found, checkpoint_id=folder[0])  # under another layout
    xt.load_state_dict(other, found)
    check_gradients(other)
    for p in other.parameters():
        p.data.zero_()
    xt.load_state_dict(other, state)  # DTensors under other placements
    assert torch.equal(xt.state_dict(other)["embed.weight"].full_tensor(), whole["embed.weight"])
    zigzag = {"blocks.0.up.weight": "o i/zigzag(tp) -> o i", **RULES["parameters"]}
    odd = xt.parallelize(net(), mesh=MESH, **RULES | {"parameters": zigzag})
    assert torch.equal(xt.state_dict(odd)["blocks.0.up.weight"], whole["blocks.0.up.weight"])
    check_error(lambda: xt.load_state_dict(odd, {}), "XshardError", "in the model alone: extra")
    before = [x.clone() for x in odd.state_dict(keep_vars=True).values()]
    for last in (torch.ones(5), 3):
        wrong = {name: x + 1 for name, x in whole.items()} | {list(whole)[-1]: last}
        kind, text = error_of(lambda w=wrong: xt.load_state_dict(odd, w))
        assert kind in ("ShapeError", "XshardError") and list(whole)[-1] in text
    assert all(map(torch.equal, before, odd.state_dict(keep_vars=True).values()))

    def init(module: nn.Module) -> None:
        if isinstance(module, Net):
            module.extra.data.fill_(1.0)
            module.scale.fill_(2.0)
        else:
            module.reset_parameters()

    for how in (init, whole):
        with torch.device("meta"):
            model = net()
        torch.manual_seed(1)
        xt.parallelize(model, mesh=MESH, **RULES, init=how)
        assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cpu"}
        assert model.head.weight is model.embed.weight
        if how is init:
            assert (
                model.blocks[1].up.weight.shape == (5, 6)
                and model.blocks[1].norm.weight.eq(1).all()
            )
            xt.load_state_dict(model, whole)
        check_gradients(model)


class Scaled(nn.Embedding):
    """An embedding with code around torch's own."""

    def forward(self, ids: Tensor) -> Tensor:
        return 3 * super().forward(ids + 1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = Scaled(13, 6, padding_idx=4).double(), nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(ids)))


@on_four
def test_a_sharded_vocabulary_may_be_tied() -> None:
    """Rows of an embedding are sharded, and the head that is tied to it; its logits are never gathered."""
    labels = (_ids() * 7 + 3) % 13
    alone = Tied()
    want = nn.functional.cross_entropy(alone(_ids()).flatten(0, 1), labels.flatten())
    want.backward()
    for cut in ("v/tp", "v/cyclic(tp,3)", "v/sizes(tp,0,13)"):
        inputs = {"": "b s -> b/dp s", "head": "b s c -> b s c | copy(tp)"}
        outputs = {"embed": "b s c | sum(tp) -> b s c", "head": f"b s {cut}"}
        model: Any = xt.parallelize(Tied(), {"**": f"{cut} c"}, inputs, MESH, outputs=outputs)

        def loss(logits: Tensor, cut: str = cut) -> Tensor:
            own = xt.redistribute(labels, "b s -> b/dp s", MESH)
            return xt.nn.cross_entropy(logits, own, f"b/dp s {cut}", MESH, shape=(4, 7, 13))

        assert isinstance(model.embed, Scaled) and torch.equal(
            model.embed(_ids()), alone.embed(_ids())
        )
        found = loss(model(_ids()))
        found.backward()
        gradient = block_of_each(model, {"embed.weight": alone.embed.weight.grad})["embed.weight"]
        assert abs(found - want) < 1e-12 and (model.embed.weight.grad - gradient).norm() < 1e-12
        if "sizes" not in cut:
            xt.verify(model, _ids(), loss=loss)


class Heads(nn.Module):
    """Attention that counts its heads by itself, and a layer that is no `nn.Linear`."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.up = 4, 2, nn.Linear(6, 8)
        self.weight, self.bias = nn.Parameter(torch.ones(8, 6)), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).view(*x.shape[:-1], self.num_heads, self.head_dim)
        return torch.addmm(self.bias, heads.flatten(-2), self.weight)


def heads(bias: str = "o -> o | sum(tp)", **counts: str) -> Any:
    cut = {"up.*": "o/tp ...", "weight": "i/tp o", "bias": bias}
    torch.manual_seed(0)
    outputs = {"": "b c | sum(tp) -> b c"}
    return xt.parallelize(
        Heads(), cut, {"": "b c -> b c | copy(tp)"}, MESH, outputs=outputs, counts=counts
    )


@on_four
def test_each_process_counts_its_own_part() -> None:
    """Of 4 heads one process may have more than the other, as many as its parts of the weights hold."""
    x = torch.arange(18.0).view(3, 6) % 7
    for first, order in (
        (3, "sizes(tp,3,1)"),
        (1, "sizes(tp,1,3)"),
        (4, "sizes(tp,4,0)"),
        (2, "balanced(tp)"),
    ):
        parts = f"sizes(tp,{2 * first},{8 - 2 * first})"
        cut = {"up.*": f"o/{parts} ...", "weight": f"i/{parts} o", "bias": "o -> o | sum(tp)"}
        torch.manual_seed(0)
        model = xt.parallelize(
            Heads(), cut, {"": "b c -> b c | copy(tp)"}, MESH,
            outputs={"": "b c | sum(tp) -> b c"}, counts={"num_heads": f"h/{order}"},
        )  # fmt: skip
        assert model.num_heads == (first, 4 - first)[dist.get_rank() % 2]
        xt.verify(model, x, loss=lambda y: y.pow(2).sum())
    hint = "say what each process counts of 2, as in 'h/sizes(tp,2,1,1)'"
    assert hint in error_of(lambda: heads(head_dim="h/(dp,tp)"))[1]


@on_four
def test_errors_name_their_module() -> None:
    """Errors in a forward pass name their module, its rules and blocks, and what it counts by itself."""
    x = torch.ones(3, 6)
    model = heads()
    with pytest.raises(RuntimeError) as caught:
        model(x)
    assert caught.value.__notes__ == [
        "in the parallel module (the model), a Heads\n"
        "  input of the model: b c -> b c | copy(tp)\n"
        "  output of the model: b c | sum(tp) -> b c\n"
        "  weight: i/tp o, block (4, 6) of (8, 6)\n"
        "  bias: o | sum(tp), block (6,) of (6,)\n"
        "  up.weight: o/tp ..., block (4, 6) of (8, 6)\n"
        "  up.bias: o/tp, block (4,) of (8,)\n"
        "  the model has num_heads=4 * head_dim=2, whole lengths of sharded dims: counts= makes them local"
    ]
    with pytest.raises(RuntimeError) as caught:
        xt.parallelize(net(), mesh=MESH, **RULES).blocks[1](torch.ones(2, 7, 5).double())
    assert caught.value.__notes__[0].startswith(
        "in the parallel module blocks.1.norm, a LayerNorm\n  input of blocks.1: b s/tp c\n"
    )
    model = copy.deepcopy(heads(num_heads="h/tp"))
    torch.manual_seed(0)
    assert torch.allclose(model(x), Heads()(x)) and model.num_heads == 2
    other = heads(num_heads="h/tp")
    other.head_dim = 4  # times 2 heads, which are local already, it is as long as the weight
    with pytest.raises(RuntimeError) as caught:
        other(x)
    assert "counts=" not in caught.value.__notes__[0]
    xt.verify(model, x, loss=torch.sum)  # as the model was: with all heads
    xt.verify(model, x, loss=torch.sum, original=Heads())
    try:
        raise ValueError
    except ValueError as outside:
        model(x)
        notes = getattr(outside, "__notes__", None)
    assert notes is None
    with torch.inference_mode():
        model = xt.parallelize(net(), mesh=MESH, **RULES)
        assert model(_ids()).shape == (2, 7, 12)
    check_gradients(model)
    assert heads("o -> o | copy(tp)").bias.shape == (6,)  # meant


def _compiled() -> None:
    mesh = xs.Mesh(dp=1, tp=2)
    ids = torch.arange(16).view(2, 8) % 12
    alone = net()
    model = net()
    alone.blocks = alone.blocks[:1]
    model.blocks = model.blocks[:1]
    alone(ids).square().sum().backward()
    whole = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
    inputs = {name: text for name, text in RULES["inputs"].items() if name != "blocks.1"}
    stored = {"**.norm.*": "c/tp -> c"} | RULES["parameters"]
    xt.parallelize(model, stored, inputs, mesh, outputs=RULES["outputs"])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(ids).square().sum().backward()
    blocks = block_of_each(model, whole)
    assert all(
        (model.get_parameter(n).grad - g).norm() < 1e-12 * g.norm() for n, g in blocks.items()
    )
    xt.verify(compiled, ids, loss=lambda y: y.square().sum())


def test_compiled_in_one_graph() -> None:
    on_ranks(2, _compiled)


# What begins the texts of errors, in the order of `test_what_is_refused`.
REFUSED = [
    "XshardError: rule 'blocks.7' fits no module\n  the modules are: '', embed, blocks.0, ",
    "XshardError: rule 'blocks' fits no module",  # a list of modules is not called
    "NotationError: embed: unknown mesh axis 'cp' in\n    'b s/cp'\n         ^^\n",
    "PlanError: head.weight is embed.weight, stored as 'v/tp c', not '...'",
    "NotationError: head.weight: a parameter is stored and used as values, not as 'v c | sum(tp)'",
    "ShapeError: blocks.0.norm.weight: 2 dims, the parameter has 1 in 'o/tp i'",
    "PlanError: extra: no rule says how activations lie in 'the model'",
    "XshardError: no rule for 13 of 15 parameters: extra, embed.weight, ",
    "ShapeError: input of blocks.1: the block has shape (2, 4, 6), not (2, 7, 6) in 'b s c'\n  4 rows of "
    "'s', not 7 of 7 as by 'b s -> b/dp s' of the input of the model: it arrives under another",
    "ShapeError: input of embed: 'b s c' has 3 dims, the array has 2",
    "PlanError: blocks.0.up.weight is sharded over 'tp', and its module's input is equal along it",
    "ReplicaError: the gradient of blocks.1.norm.weight: blocks differ along 'tp', where one value is",
    "XshardError: blocks.1.up.weight differs between processes, before it is sharded",
    "XshardError: torch.autograd.grad would give each process its share of a parameter's gradient",
    "XshardError: a Net that is not parallel",
    "XshardError: blocks.0.up.weight is part of a graph that waits for its backward pass",
    "XshardError: the model is parallel already",
    "PlanError: bias is whole along 'tp', which shards its module: each process would add it in '...'",
    "PlanError: bias is whole along 'tp', which shards its module: each process would add it in 'o'\n  sh",
    "NotationError: extra: activations do not differ along 'tp', where the rule says that copies do in ",
    "PlanError: embed.weight: rows are sharded, so vectors are addends in 'v/tp c'\n  outputs={\"embed\": ",
    "PlanError: weight: the rows of an Embedding with max_norm are sharded in 'v/tp c'",
    "PlanError: weight: the rows of an EmbeddingBag with a lookup of its own are sharded in 'v/tp c'",
    "PlanError: 0.weight: scale_grad_by_freq counts ids, of which each process has its own along 'dp'\n"
    "  scale_grad_by_freq=False, or rules by which the embedding has all ids: inputs={'0': 'b/dp s -> ",
    "XshardError: weight is of a lazy module, and has no shape yet\n  call the model with a batch before ",
    "XshardError: 0.weight is a block already: weight of a parallel model\n  write all rules in one call",
    "XshardError: 1.weight has the memory of 0.weight, which cut ones would not share",
    "XshardError: state_dict() of a parallel model has blocks, as of weight\n  xt.state_dict(model) has ",
    "XshardError: state_dict() of a parallel model has blocks, as of weight",
    "XshardError: model is <generator",
    "XshardError: parallelize: unexpected argument 'params'\n  did you mean 'parameters'? parallelize(mod",
    "XshardError: parallelize: missing a required argument: 'inputs'\n  parallelize(model, parameters, inp",
    "NotationError: weight: a layout is text, not ['o', 'i']\n  'o/tp i' shards the first of two dims over ",
    "NotationError: weight: a layout is text, not Shard(dim=0)",
    "NotationError: the model: a layout is text, not 3",
    "XshardError: rule 'num_head' fits no integer attribute\n  'num_head': did you mean 'num_heads'?",
    "ShapeError: head_dim: 2 is not divisible by 4 in 'h/(dp,tp)'",
]


@on_four
def test_what_is_refused() -> None:
    def make(**changed: Any) -> Callable[[], Any]:
        """The first rule decides: those that change come first."""
        changed = {"parameters": {}, "inputs": {}, "outputs": {}} | changed
        rules = {kind: {**rules, **RULES[kind], **rules} for kind, rules in changed.items()}
        return lambda: xt.parallelize(net(), mesh=MESH, **rules)

    def run(**changed: Any) -> Callable[[], Any]:
        return lambda: make(**changed)()(_ids())

    def forgotten() -> None:
        rules = {k: dict(v) for k, v in RULES.items()}
        del rules["inputs"]["blocks.1"]  # its norm is taken to see whole sequences
        rules["inputs"]["blocks.1.down"] = "b s f | copy(tp)"
        _step(xt.parallelize(net(), mesh=MESH, **rules))

    def unsummed() -> None:
        model = make()()
        torch.autograd.grad(model(_ids()).sum(), [model.embed.weight])

    def graph_alive() -> None:
        model = net()
        y = model(_ids())
        xt.parallelize(model, mesh=MESH, **RULES)
        del y

    def differing() -> None:
        model = net()
        model.blocks[1].up.weight.data += dist.get_rank()
        xt.parallelize(model, mesh=MESH, **RULES)

    def frequencies(move: str) -> None:
        table = nn.Embedding(4, 2, scale_grad_by_freq=True)
        xt.parallelize(nn.Sequential(table), {"**": "..."}, {"": move}, MESH)

    def of_one_memory(rule: str) -> None:
        layers = nn.Sequential(linear(bias=False), linear(bias=False))
        layers[1].weight.data = layers[0].weight.data
        xt.parallelize(layers, {"**": rule}, {"": "b i -> b/dp i"}, MESH)

    def part_by_part(rules: dict[str, str]) -> None:
        layers = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(4, 2))
        nn.init.zeros_(layers[0].weight)  # sums of blocks are equal: their values do not tell
        xt.parallelize(layers[0], rules, {"": "b i"}, MESH)
        xt.parallelize(layers, {"**": "..."}, {"": "b i"}, MESH)

    linear = functools.partial(nn.Linear, 2, 2)
    part_by_part({"**": "..."})
    frequencies("b s")
    of_one_memory("...")
    one = functools.partial(xt.parallelize, mesh=MESH, inputs={"": "b i"})
    table = functools.partial(one, parameters={"weight": "v/tp c"})
    calls = [
        make(inputs={"blocks.7": "b s c"}),
        make(inputs={"blocks": "b s c"}),
        make(inputs={"embed": "b s/cp"}),
        make(parameters={"head.weight": "v/tp c"}),
        make(parameters={"head.weight": "v c | sum(tp)"}),
        make(parameters={"**.norm.*": "o/tp i"}),
        lambda: xt.parallelize(net(), {"**": "..."}, {"blocks.*": "b s c"}, MESH),
        lambda: xt.parallelize(net(), {"**.up.weight": "o i"}, {"": "b s"}, MESH),
        run(inputs={"blocks.1": "b s c"}),
        run(inputs={"embed": "b s c"}),
        run(inputs={"**.up": "b s/tp c -> b s c"}),
        forgotten,
        differing,
        unsummed,
        lambda: xt.grad_norm(net()),
        graph_alive,
        lambda: xt.parallelize(make()(), mesh=MESH, **RULES),
        lambda: one(linear(), {"weight": "o i/tp", "**": "..."}),
        lambda: heads("o"),
        make(parameters={"extra": "n -> n | copy(tp)"}),
        make(parameters={"embed.weight": "v/tp c", "head.weight": "v/tp c"}),
        lambda: table(nn.Embedding(4, 2, max_norm=1.0)),
        lambda: table(nn.EmbeddingBag(4, 2)),
        lambda: frequencies("b s -> b/dp s"),
        lambda: one(nn.LazyLinear(2), {"**": "..."}),
        lambda: part_by_part({"weight": "o/tp i"}),
        lambda: of_one_memory("o/dp i -> o i"),
        lambda: heads().state_dict(),
        lambda: heads().up.state_dict(),
        lambda: xt.clip_grad_norm_(heads().parameters(), 1.0),
        lambda: xt.parallelize(linear(), params={"**": "..."}, inputs={}, mesh=MESH),
        lambda: xt.parallelize(linear(), {"**": "..."}, mesh=MESH),
        lambda: one(linear(), {"**": ["o", "i"]}),
        lambda: one(linear(), {"**": Shard(0)}),
        lambda: xt.parallelize(linear(), {"**": "..."}, {"": 3}, MESH),
        lambda: heads(num_head="h/tp"),
        lambda: heads(head_dim="h/(dp,tp)"),
    ]
    for call, start in zip(calls, REFUSED, strict=True):
        kind, text = error_of(call)
        assert kind == start.split(":")[0]
        assert f"{kind}: {text}".startswith(start) or dist.get_rank(), (
            text
        )  # other ranks name their blocks
    assert still_connected()


def _rows_of_table(model: nn.Module) -> list[str]:
    """The lines of `explain`, without the blanks that pad them."""
    tables, _, _ = xt.explain(model).partition("\n\ncomputes")  # what follows is a schedule
    return [" ".join(line.split()) for line in tables.splitlines()]


@on_four
def test_a_batch_that_is_in_shards_already_is_found() -> None:
    """A rule that cuts what comes takes it for replicas: the first step compares some elements of them."""
    text = "b c -> b/dp c"

    def step(make: Callable[[int], Tensor]) -> str:
        """Return the error of a first step on x[row, column]: of `make(dp)`, the number of the process."""
        model = xt.parallelize(nn.Linear(6, 3), {"**": "..."}, {"": text}, MESH)
        x = make(dist.get_rank() // 2)
        if dist.get_rank() == 0:  # alone: what it looks at, or fails with, is no claim of the step
            with torch.no_grad():
                model(x + 1)
            with pytest.raises(RuntimeError):
                model(torch.ones(8, 5))
        loss = xt.redistribute(model(x).sum(), "() | sum(dp) -> ()", MESH)
        try:
            loss.backward()
        except xs.errors.ReplicaError as error:
            return str(error)
        # Only the first step compares.
        model(make(0) + dist.get_rank()).sum().backward()
        return ""

    whole = torch.arange(48.0).view(8, 6)
    assert step(lambda dp: whole) == ""
    assert step(lambda dp: whole * (1 + dp * 1e-6)) == ""  # as by another kernel
    for shards in (lambda dp: whole.chunk(2)[dp], lambda dp: whole[: 4 + 2 * dp]):
        error = step(shards)
        assert error.startswith(
            "input of the model: blocks differ along 'dp', where one value is meant"
        )
        assert f"'{text}'\n     ^^^" in error and "n/dp for parts of a dim n" in error
    # Columns that are the same on all processes do not hide the last one.
    last = torch.zeros(256, 6).index_fill(1, torch.tensor([5]), 1)
    assert "differ" in step(lambda dp: last * dp)


@on_four
def test_a_pass_that_learns_shapes_is_not_the_first() -> None:
    """A pipeline's stages first run on memory without values, for gradients of their inputs alone."""
    whole = torch.arange(48.0).view(8, 6)
    for batch, is_right in ((whole, True), (whole + dist.get_rank() // 2, False)):
        model = xt.parallelize(nn.Linear(6, 3), {"**": "..."}, {"": "b c -> b/dp c"}, MESH)
        garbage = torch.full((8, 6), float(dist.get_rank())).requires_grad_()
        torch.autograd.grad(model(garbage).sum(), garbage)
        loss = xt.redistribute(model(batch).sum(), "() | sum(dp) -> ()", MESH)
        if is_right:
            loss.backward()
        else:
            with pytest.raises(xs.errors.ReplicaError, match="input of the model: blocks differ"):
                loss.backward()


@on_four
def test_a_table_has_the_bytes_of_a_step_once_it_ran() -> None:
    model = xt.parallelize(net(), mesh=MESH, **RULES, profile="h100")
    before = _rows_of_table(model)
    _step(model)
    after = _rows_of_table(model)
    if dist.get_rank() > 0:  # blocks of other ranks have other sizes
        return
    assert before[0] == "Net on dp=2,tp=2"
    assert {
        "parameter shape stored used gradient summed over block",
        "blocks.*.norm.weight x 2 [6] ... as stored dp tp 96 B",
        "blocks.*.up.weight x 2 [10, 6] o/tp i as stored dp 480 B",
        "head.weight [12, 6] v c v/tp c dp 576 B",
    } <= set(before) & set(after)
    assert "head, output b s v/tp -> b s v not called yet not called yet" in before
    assert {
        "blocks.*.down, output x 2 b s c | sum(tp) -> b s/tp c 1.31 KiB 768 B",
        "head, output b s v/tp -> b s v 672 B 0 B",
        "gradients, in buckets x 4 n | sum(dp,tp) -> n 0 B 288 B",
        "a step 3.09 KiB 5.35 KiB",
    } <= set(after)


@on_four
def test_a_table_has_the_bytes_of_gathered_parameters() -> None:
    model = xt.parallelize(net(), mesh=MESH, **GATHERED, profile="h100")
    with Meter() as meter:
        model(_ids())
    received: list[Any] = [None] * 4
    dist.all_gather_object(received, sum(meter.received))
    table = _rows_of_table(model)
    if dist.get_rank() > 0:
        return
    # A tied parameter is gathered once; the outermost module keeps what it gathered.
    assert "embed.weight o/(dp,tp) ... -> o ... | copy(dp) 432 B 288 B" in table
    assert not any(line.startswith("head.weight o/") and "->" in line for line in table)
    assert (max(received), table[-1]) == (2712, "a step 2.65 KiB 4.82 KiB")
