"""Units that several ranks share, `h/spread(tp)`: moves, models of grouped queries, files and DTensors."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torch_bridge as xt
from tests.spread_cases import random_move, random_product
from tests.torch_bridge.helpers import SharedRanks, on_ranks
from torch_bridge.models.parallel import parallel_of
from xshard import Mesh
from xshard.errors import PlanError, ReplicaError, ShapeError

FOUR = Mesh(tp=4)
on_four = SharedRanks(4)


def of_all(x: Tensor) -> list[np.ndarray]:
    blocks: list[np.ndarray] = [np.empty(0)] * 4
    dist.all_gather_object(blocks, x.detach().numpy())
    return blocks


def own(blocks: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(blocks[dist.get_rank()]).double()


@on_four
def test_random_moves_and_contractions_are_right_with_their_gradients() -> None:
    for seed in range(6):
        move = random_move(seed, 4)
        x = own(move.blocks).requires_grad_()
        y = xt.redistribute(x, move.text, Mesh(move.mesh), shape=move.whole.shape)
        y.backward(own(move.cotangents))
        move.check(of_all(y), of_all(x.grad))
    for seed in range(2):
        product = random_product(seed, 4)
        operands = [own(blocks).requires_grad_() for blocks in product.blocks]
        y = xt.einsum(product.text, *operands, mesh=Mesh(product.mesh), sizes=product.sizes)
        y.backward(own(product.cotangents))
        product.check(of_all(y), *[of_all(x.grad) for x in operands])


class Attention(nn.Module):
    """Eight heads of queries, and fewer of keys and values."""

    def __init__(self, n_keys: int) -> None:
        super().__init__()
        self.heads = 8
        self.keys = n_keys
        self.q = nn.Linear(6, 8 * 3)
        self.k = nn.Linear(6, n_keys * 3)
        self.v = nn.Linear(6, n_keys * 3, bias=False)
        self.o = nn.Linear(8 * 3, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, 3)).transpose(1, 2)
        k = self.k(x).unflatten(-1, (self.keys, 3)).transpose(1, 2)
        v = self.v(x).unflatten(-1, (self.keys, 3)).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


def models(n_keys: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 6), Attention(n_keys)).double()
    model = nn.Sequential(nn.Linear(6, 6), Attention(n_keys)).double()
    model.load_state_dict(whole.state_dict())
    return whole, model


def rules(stored: str = "", batch: str = "b") -> dict[str, dict[str, str]]:
    """`stored`: the axis over which weights are stored and gathered for use, ZeRO-3."""

    def weight(cut: str) -> str:
        return f"{cut} i{stored} -> {cut} i" if stored else f"{cut} i"

    return {
        "parameters": {
            "1.q.weight": weight("(h 3)/tp"),
            "1.q.bias": "(h 3)/tp",
            "1.{k,v}.weight": weight("(g 3)/spread(tp)"),
            "1.k.bias": "(g 3)/spread(tp)",
            "1.o.weight": "o (h 3)/tp",
            "**": "...",
        },
        "inputs": {"": f"b s c -> {batch} s c", "1": f"{batch} s c -> {batch} s c | copy(tp)"},
        "outputs": {"1": f"{batch} s c | sum(tp) -> {batch} s c", "": f"{batch} s c -> b s c"},
        "counts": {"1.heads": "h/tp", "1.keys": "g/spread(tp)"},
    }


def trained(n_keys: int, mesh: Mesh, **options: str) -> tuple[nn.Module, nn.Module]:
    """The model on one device and the parallel one after a backward pass, which `verify` has compared."""
    whole, model = models(n_keys)
    x = torch.randn(4, 3, 6, dtype=torch.float64)
    xt.parallelize(model, mesh=mesh, **rules(**options))
    xt.verify(model, x, loss=lambda y: y.square().sum())
    whole(x).square().sum().backward()
    model(x).square().sum().backward()
    return whole, model


def check_gradients(whole: nn.Module, model: nn.Module) -> None:
    parallel = parallel_of(model)
    right = dict(whole.named_parameters())
    for name, parameter in parallel.by_name.items():
        block = parameter.block_of(right[name].grad, parallel.context)
        torch.testing.assert_close(parameter.tensor.grad, block, rtol=1e-10, atol=1e-12)


@on_four
def test_gradients_of_a_shared_head_are_summed_and_count_once_in_the_norm() -> None:
    for n_keys in (1, 2, 4):
        whole, model = trained(n_keys, FOUR)
        assert (model[1].heads, model[1].keys) == (2, 1)
        check_gradients(whole, model)
        for norm_type in (2.0, float("inf")):
            norm = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()], norm_type)
            torch.testing.assert_close(xt.grad_norm(model, norm_type), norm, rtol=1e-12, atol=0)
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.25)
        xt.clip_grad_norm_(model, 0.25)
        check_gradients(whole, model)


@on_four
def test_stored_over_another_axis_a_shared_head_is_gathered_and_summed_over_both() -> None:
    whole, model = trained(1, Mesh(dp=2, tp=2), stored="/dp", batch="b/dp")
    assert model[1].k.weight.shape == (3, 3)
    check_gradients(whole, model)
    norm = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()])
    torch.testing.assert_close(xt.grad_norm(model), norm, rtol=1e-12, atol=0)


@on_four
def test_replicas_of_a_shared_head_are_compared() -> None:
    _, model = trained(2, FOUR)
    xt.check_replicas(model)
    with torch.no_grad():
        if dist.get_rank() == 1:  # ranks 0 and 1 share the first head
            model[1].k.weight += 1
    with pytest.raises(
        ReplicaError,
        match=r"1\.k\.weight: blocks differ along 'tp', .*\n    '\(g 3\)/spread\(tp\) i'\n(.|\n)*ranks 0, 1",
    ):
        xt.check_replicas(model)
    block = torch.full((1, 2), float(dist.get_rank()))
    text = "h/spread(tp) d -> h d"
    with pytest.raises(ReplicaError, match="blocks differ along 'tp'"):
        xt.redistribute(block, text, FOUR, shape=(2, 2), check_replicated=True)
    with pytest.raises(ShapeError, match=r"under 'h/spread\(tp\) d' .* of Mesh\(tp=4\) of a"):
        xt.redistribute(block, text, FOUR, shape=(2, 3))


@on_four
def test_explain_counts_what_the_group_sends() -> None:
    _, model = trained(2, FOUR)
    rows = [line.split() for line in xt.explain(model).splitlines()]
    k = "1.k.weight [6, 6] (g 3)/spread(tp) i as stored tp_1 144 B"
    assert k.split() in rows
    # Two ranks share 18 + 18 + 3 elements of 8 bytes: each receives as much.
    assert [
        "gradients,",
        "in",
        "buckets",
        "x",
        "3",
        "n",
        "|",
        "sum(tp_1)",
        "->",
        "n",
        "0",
        "B",
        "312",
        "B",
    ] in rows


@on_four
def test_state_dicts_have_whole_tensors_in_place_of_shared_blocks() -> None:
    whole, model = trained(2, FOUR)
    state = xt.state_dict(model)
    assert type(state["1.k.weight"]) is Tensor
    for name in ("0.weight", "1.k.weight", "1.k.bias", "1.v.weight"):
        assert torch.equal(state[name], whole.state_dict()[name])
    with torch.no_grad():
        model[1].k.weight.zero_()
    xt.load_state_dict(model, state)
    rank = dist.get_rank()
    assert torch.equal(model[1].k.weight, whole[1].k.weight[rank // 2 * 3 :][:3])
    with pytest.raises(
        PlanError, match=r"a DTensor cannot hold 'h/spread\(tp\)'(.|\n)*devices share its units"
    ):
        xt.dtensor.to_placements("h/spread(tp) d", FOUR, (2, 4))


STORED = {"k": "(g 3)/spread(tp) i", "w": "o/tp i"}
SHAPES = {"k": (6, 2), "w": (12, 2)}


def blocks(layouts: dict[str, str], mesh: Mesh) -> dict[str, Tensor]:
    tree = {}
    for name, shape in SHAPES.items():
        whole = "(g 3) i" if name == "k" else "o i"
        x = torch.arange(shape[0] * 2.0).view(shape)
        tree[name] = xt.redistribute(x, f"{whole} -> {layouts[name]}", mesh, shape=shape)
    return tree


def save(folder: str) -> tuple[int, str]:
    """The bytes of both arrays in the files, and the error for replicas that differ."""
    xt.save(blocks(STORED, FOUR), f"{folder}/good", STORED, FOUR, shapes=SHAPES)
    tree = blocks(STORED, FOUR)
    if dist.get_rank() == 2:
        tree["k"] += 1
    with pytest.raises(ReplicaError) as caught:
        xt.save(tree, f"{folder}/bad", STORED, FOUR, shapes=SHAPES)
    return sum(file.stat().st_size for file in Path(folder, "good").glob("*.safetensors")), str(
        caught.value
    )


def load(folder: str, layouts: dict[str, str]) -> bool:
    mesh = Mesh(tp=dist.get_world_size())
    found = xt.load(f"{folder}/good", layouts, mesh)
    right = blocks(layouts, mesh)
    return all(torch.equal(found[name], right[name]) for name in right)


def test_files_have_each_shared_unit_once() -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = on_ranks(4, save, folder)
        assert saved[0][0] < 2 * 4 * (6 * 2 + 12 * 2) + 4096
        assert "leaf 'k': blocks differ along 'tp'" in saved[0][1] and "ranks 2, 3" in saved[0][1]
        assert on_ranks(2, load, folder, STORED) == [True] * 2
        assert on_ranks(3, load, folder, {"k": "(g 3)/tp i", "w": "o/tp i"}) == [True] * 3
