"""Several redistributions together: what each is alone, with fewer collectives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_structure

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import SharedRanks, assert_refused, block_of, numbers
from torch_bridge.testing.byte_counter import Meter

MESH = xs.Mesh(a=2, b=2)


def move(x: Any, layouts: Any, mesh: Any = MESH, **options: Any) -> Callable[[], Any]:
    return partial(xt.redistribute, x, layouts, mesh, **options)


# Moves of every kind, each twice and at another size or order, some that travel through two collectives.
MOVES = [
    ("n/a d -> n d | copy(a)", (8, 8)),
    ("n d/a -> n d | copy(a)", (4, 8)),
    ("n d | sum(a) -> n/a d", (8, 4)),
    ("n d | sum(a) -> n d/a", (8, 8)),
    ("n d | sum(b) -> n d", (3, 5)),
    ("n | sum(b) -> n", (7,)),
    ("n/b d -> n d/b", (8, 8)),
    ("n/zigzag(b) d -> n d/b", (8, 4)),
    ("n/b d -> n/b:halo(1,1) d", (8, 8)),
    ("n/b d -> n/b:halo(2,1,periodic) d", (8, 3)),
    ("n/a/b d -> n/b/a d", (8, 8)),
    ("n/a d/b -> n/b d/a", (8, 8)),
    ("n d -> n/a d", (8, 8)),
    ("() | sum(a) -> ()", ()),
    ("n d | mean(a) -> n d", (2, 4)),
    ("n d | max(a) -> n d", (2, 4)),
    ("n/(a,b) d -> n d/(b,a)", (8, 8)),
    ("n/b d -> d/b n", (8, 8)),
    ("n/b d -> d n/b", (8, 3)),
]


on_four = SharedRanks(4)


@on_four
def test_results_are_those_alone() -> None:
    texts = [text for text, _ in MOVES]
    xs_ = [
        block_of(numbers(*n) % 9, text.partition(" ->")[0], MESH).requires_grad_()
        for text, n in MOVES
    ]
    for most in (None, 300, 1):
        alone = [xt.redistribute(x, text, MESH) for x, text in zip(xs_, texts, strict=True)]
        together = xt.redistribute(xs_, texts, MESH, bucket_bytes=most)
        assert all(map(torch.equal, together, alone))
        losses = (sum((y**2).sum() for y in ys) for ys in (together, alone))
        first, second = (torch.autograd.grad(loss, xs_, create_graph=True) for loss in losses)
        assert all(map(torch.equal, first, second))
        third, fourth = (
            torch.autograd.grad(sum((g**2).sum() for g in gs), xs_) for gs in (first, second)
        )
        assert all(map(torch.equal, third, fourth))
    together = xt.redistribute(xs_, texts, MESH)
    for y in together:
        y.add_(1)  # a tensor of its own
    assert all(torch.equal(a, b + 1) for a, b in zip(together, alone, strict=True))


@on_four
def test_tensors_of_a_kind_share_their_collectives() -> None:
    """6 tensors of 4 x 2..7 floats: 432 bytes, once each way instead of six times."""
    names = [f"layer{i}" for i in range(6)]
    model = {name: torch.ones(4, 2 + i, requires_grad=True) for i, name in enumerate(names)}
    with Meter() as forward:
        moved = xt.redistribute(model, "n/a d -> n d | copy(a)", MESH)
    assert list(moved) == names and all(
        moved[name].shape == (8, 2 + i) for i, name in enumerate(names)
    )
    with Meter() as backward:
        sum(y.sum() for y in moved.values()).backward()
    assert all(torch.equal(x.grad, torch.full_like(x, 2)) for x in model.values())
    with Meter() as bucketed:
        xt.redistribute(model, "n/a d -> n d | copy(a)", MESH, bucket_bytes=300)
    mixed = [torch.ones(4, 2), torch.ones(4, 2, dtype=torch.int64), torch.ones(4, 3)]
    with Meter() as by_dtype:
        ys = xt.redistribute(mixed, ["n/a d -> n d", "n/a d -> n d", "n/b d -> n d"], MESH)
    assert [y.dtype for y in ys] == [x.dtype for x in mixed]
    assert forward.received == backward.received == [432]
    assert sum(bucketed.received) == 432 and len(bucketed.received) == 2
    assert by_dtype.received == [32, 64, 48]


@on_four
def test_torch_func_goes_through() -> None:
    texts = ["n/a d -> n d | copy(a)", "n/b d -> n d/b"]
    values = [block_of(numbers(8, 4) % 5, text.partition(" ->")[0], MESH) for text in texts]

    def together(*blocks: Tensor) -> Tensor:
        return sum((y**2).sum() for y in xt.redistribute(blocks, texts, MESH))

    def alone(*blocks: Tensor) -> Tensor:
        return sum(
            (xt.redistribute(x, t, MESH) ** 2).sum() for x, t in zip(blocks, texts, strict=True)
        )

    for argnums in (0, 1, (0, 1)):
        both = (torch.func.grad(f, argnums)(*values) for f in (together, alone))
        assert all(map(torch.equal, *(g if isinstance(g, tuple) else (g,) for g in both)))
    tangents = [x + 1 for x in values]
    assert torch.equal(
        *(torch.func.jvp(f, tuple(values), tuple(tangents))[1] for f in (together, alone))
    )
    batch = [torch.stack([x, 2 * x], 1) for x in values]
    assert torch.equal(*(torch.func.vmap(f, in_dims=1)(*batch) for f in (together, alone)))
    in_dims = (1, None)
    assert torch.equal(
        *(torch.func.vmap(f, in_dims)(batch[0], values[1]) for f in (together, alone))
    )


@on_four
def test_uneven_blocks() -> None:
    rank = dist.get_rank()
    rows = [2, 2, 2, 1][rank]
    x = torch.arange(rows * 3.0).view(rows, 3)
    y = torch.arange(4.0).view(1, 4) + rank
    mesh = xs.Mesh(a=4)
    moved = xt.redistribute([x, y], "n/a d -> n d", mesh, shape=[(7, 3), None])
    assert torch.equal(moved[0], xt.redistribute(x, "n/a d -> n d", mesh, shape=(7, 3)))
    assert torch.equal(moved[1], xt.redistribute(y, "n/a d -> n d", mesh))


@on_four
def test_casts() -> None:
    y = torch.arange(4.0).view(1, 4) + dist.get_rank()
    mesh = xs.Mesh(a=4)
    narrow = xt.redistribute([y / 3], ["n/a d -> n d"], mesh, comm_dtype=torch.bfloat16)[0]
    assert torch.equal(
        narrow, xt.redistribute(y / 3, "n/a d -> n d", mesh, comm_dtype=torch.bfloat16)
    )


@on_four
def test_no_tensors() -> None:
    mesh = xs.Mesh(a=4)
    assert xt.redistribute([], [], mesh) == [] and xt.redistribute({}, {}, mesh) == {}


@on_four
def test_trees() -> None:
    x, y, z = (block_of(numbers(8, 4 + i), "n/a d", MESH) for i in range(3))
    tree = {"layers": [{"w": x, "b": (y, z)}, {"w": z}], "head": y}
    moved = xt.redistribute(tree, "n/a d -> n d", MESH)
    alone = [xt.redistribute(v, "n/a d -> n d", MESH) for v in (x, y, z, z, y)]
    same_structure = {"layers": [{"w": 0, "b": (1, 2)}, {"w": 3}], "head": 4}
    assert tree_structure(moved) == tree_structure(same_structure)
    assert all(map(torch.equal, tree_leaves(moved), alone))
    # One expression in the place of a branch is for all of it; so are shapes.
    turned = "n/a d -> n d/a"
    texts = {"layers": ["n/a d -> n d", {"w": turned}], "head": turned}
    moved = xt.redistribute(tree, texts, MESH, shape={"layers": None, "head": (8, 5)})
    assert torch.equal(moved["layers"][0]["b"][1], alone[2])
    assert torch.equal(moved["layers"][1]["w"], xt.redistribute(z, turned, MESH))
    assert torch.equal(moved["head"], xt.redistribute(y, turned, MESH, shape=(8, 5)))
    rules = xs.Rules({"layers.*.b.**": "n/a d -> n d", "**.w|head": turned})
    by_rules = xt.redistribute(tree, rules, MESH)
    assert torch.equal(by_rules["layers"][0]["b"][1], alone[2])
    assert torch.equal(by_rules["head"], xt.redistribute(y, turned, MESH))
    inner = {"layers": xs.Rules({"*.w": turned, "**": "n/a d -> n d"}), "head": turned}
    assert all(
        map(torch.equal, tree_leaves(xt.redistribute(tree, inner, MESH)), tree_leaves(by_rules))
    )
    assert torch.equal(xt.redistribute((x,), [("n/a d", "n d")], MESH)[0], alone[0])
    in_flight = xt.redistribute(x.requires_grad_(), "n/a d -> n d | copy(a)", MESH, async_op=True)
    (y,) = xt.redistribute([in_flight], "n d -> n/b d", MESH)
    assert y.shape == (4, 4) and torch.autograd.grad(y.sum(), x)[0].sum() == 16 * 2


@on_four
def test_dtensors_share_collectives() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    rows = [Shard(0), Replicate()]
    state: dict[str, Tensor] = {}
    for i, n in enumerate((6, 8, 7)):
        state[f"{i}.weight"] = distribute_tensor(torch.from_numpy(numbers(n, 4)), mesh, rows)
        state[f"{i}.bias"] = distribute_tensor(torch.arange(4.0).double() + i, mesh, rows)
    texts = {name: "n/a d -> n d/b" if x.ndim == 2 else "n/a -> n" for name, x in state.items()}
    state["steps"] = torch.tensor(3)
    texts["steps"] = "() -> ()"
    with Meter() as meter:
        together = xt.redistribute(state, texts, MESH)
    assert len(meter.received) == 2  # all-gathers, and an exchange of 7 rows
    for name, y in together.items():
        alone = xt.redistribute(state[name], texts[name], None if isinstance(y, DTensor) else MESH)
        assert type(y) is type(alone) and torch.equal(alone, y)
        if y.ndim == 2:
            assert y.placements == (Replicate(), Shard(1)) and y.shape == state[name].shape
            assert torch.equal(y.full_tensor(), state[name].full_tensor())

    largest = DTensor.from_local(
        torch.full((4,), mesh.get_rank()), mesh, [Partial("max"), Replicate()]
    )
    fraction = state["1.weight"] / 3
    narrowed = {"comm_dtype": torch.float32}
    for x, text, options in (
        (fraction, "n/a d -> n d", narrowed),
        (largest, "n | max(a) -> n", {}),
    ):
        y = xt.redistribute([x], text, **options)[0]
        assert y.dtype == x.dtype and torch.equal(y, xt.redistribute(x, text, **options))
    leaf = distribute_tensor(torch.ones(4, 4), mesh, rows).requires_grad_()
    texts = {"largest": "n | max(a) -> n", "leaf": "n/a d -> n d/b"}
    y = xt.redistribute({"largest": largest, "leaf": leaf}, texts)
    (y["leaf"] ** 2).sum().backward()
    assert torch.equal(leaf.grad.full_tensor(), torch.full((4, 4), 2.0))


@on_four
def test_checks_name_the_tensor() -> None:
    rank = dist.get_rank()
    x = torch.full((2,), float(rank), requires_grad=True)
    named = {"w": torch.ones(2), ("b" if rank else "v"): x}
    tree = {"w": torch.ones(2), "b": x}
    texts = {"w": "n/a -> n", "b": "n/a -> n" if rank else "n/b -> n"}
    whole = xt.redistribute(
        [x.detach().requires_grad_()], "n/(a,b) -> n", MESH, check_replicated=True
    )[0]
    disagree = "the ranks disagree about a redistribution:"
    differ = "differ along 'a', where one value is meant"
    wrong = move(tree, "n -> n/a", check_replicated=True)
    assert_refused(
        (move(named, "n/a -> n", debug=True), f"DesyncError: {disagree} tensors"),
        (move(tree, texts, debug=True), f"DesyncError: leaf 'b': {disagree} "),
        (wrong, f"ReplicaError: leaf 'b': blocks {differ}"),
        (lambda: (whole * rank).sum().backward(), f"ReplicaError: leaf '0': cotangents {differ}"),
    )
    y = xt.redistribute(tree, "n/(a,b) -> n", MESH, debug=True, check_replicated=True)
    assert y["b"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@on_four
def test_errors_say_which() -> None:
    x = torch.ones(4, 4)
    text = "n/a d -> n d"
    tree = {"w": x, "parts": [x, torch.ones(3)]}
    apart = "PlanError: tensors and layouts differ:"
    rules = xs.Rules({"w": text, "v": "n -> n"})
    odd = {"w": x, "r": 0.1}
    inner = {"w": text, "parts": [text]}
    odd_axis = "n/q d -> n d"
    assert_refused(
        (move(tree, text), "ShapeError: leaf 'parts.1': 'n/a d' has 2 dims, the array has 1"),
        (
            move(odd, text),
            "XshardError: leaf 'r' is 0.1, not a tensor\n  torch.as_tensor() makes one of it",
        ),
        (move(tree, {"w": text}), f"{apart} keys 'w', 'parts', and keys 'w'"),
        (
            move(tree, inner),
            "PlanError: tensors at 'parts' and layouts differ: 2 items, and 1 items",
        ),
        (
            move(tree, odd_axis, check_replicated=True),
            "NotationError: leaf 'w': unknown mesh axis 'q'",
        ),
        (move(tree, text, None), "MeshError: leaf 'w': a tensor needs a mesh"),
        (move([x], 8), "NotationError: leaf '0': 8 is no expression"),
        (move([x], {"w": text}), f"{apart} 1 items, and keys 'w'"),
        (move([x, x], [text]), f"{apart} 2 items, and 1 items"),
        (move({"w": x}, {"v": text}), f"{apart} keys 'w', and keys 'v'"),
        (
            move([x], text, shape=[(8, 4)] * 2),
            "PlanError: tensors and shapes differ: 1 items, and 2 items",
        ),
        (
            move(tree, rules),
            "XshardError: no rule for 2 of 3 names: parts.0, parts.1; rule 'v' fits no name",
        ),
    )
