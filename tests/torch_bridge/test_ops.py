"""The named ops: results and refusals. Their gradients are in test_conventions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import error_of, failed_examples, numbers, on_ranks, still_connected

N = 4
MESH = xs.Mesh(tp=N)


def _all_to_all() -> None:
    rank = dist.get_rank()
    mesh = xs.Mesh(dp=2, cp=2)
    x = torch.from_numpy(numbers(8, 4))
    coords = mesh.coords(rank)
    # Over one axis; over both, in both orders; and from zigzag to plain.
    y = xt.ops.all_to_all(x.chunk(2)[coords[1]], -1, 0, "cp", mesh)
    assert torch.equal(y, x.chunk(2, 1)[coords[1]])
    for axes in (("dp", "cp"), ("cp", "dp")):
        index = mesh.index(rank, axes)
        y = xt.ops.all_to_all(x.chunk(4)[index], 1, 0, axes, mesh)
        assert torch.equal(y, x.chunk(4, 1)[index])
    chunks = x.chunk(8)
    index = mesh.index(rank, ("dp", "cp"))
    zigzag = torch.cat([chunks[index], chunks[7 - index]])
    y = xt.ops.all_to_all(zigzag, 1, 0, ("dp", "cp"), mesh, concat_order="zigzag")
    assert torch.equal(y, x.chunk(4, 1)[index])
    assert torch.equal(xt.ops.all_to_all(y, 0, 1, ("dp", "cp"), mesh, split_order="zigzag"), zigzag)
    # Blocks of different sizes, where the global shape is told.
    x = x[:7, :3]
    blocks, columns = x.split([4, 3]), x.split([2, 1], 1)
    y = xt.ops.all_to_all(blocks[coords[1]], 1, 0, "cp", mesh, shape=(7, 3))
    assert torch.equal(y, columns[coords[1]])


def test_all_to_all() -> None:
    on_ranks(4, _all_to_all)


def _float8_gradient() -> Tensor:
    x = torch.ones(2).to(torch.float8_e4m3fn)
    assert xt.redistribute(x, "n/tp -> n | copy(tp)", MESH).float().sum() == 8
    return xt.redistribute(x.requires_grad_(), "n/tp -> n | copy(tp)", MESH)


def _other_plan(expression: str, mesh: xs.Mesh, dtype: str) -> Tensor:
    return xt.redistribute(torch.ones(2, 4), xs.plan(expression, mesh, (8, 4), dtype), MESH)


X, TURN = torch.ones(2, 4), "n/tp d -> n d/tp"
REFUSED: dict[str, tuple[Callable[[], Any], str, tuple[str, ...]]] = {
    "unknown axis": (
        lambda: xt.redistribute(X, "b s/cq -> b s", MESH),
        "NotationError",
        ("unknown mesh axis 'cq' in\n    'b s/cq -> b s'\n         ^^\n", "the mesh has: tp=4"),
    ),
    "rank": (
        lambda: xt.redistribute(X, "n/tp -> n", MESH),
        "ShapeError",
        ("has 1 dims, the array has 2", "'n/tp -> n'", "one name per dim"),
    ),
    "local shape": (
        lambda: xt.redistribute(X, "n/tp d -> n d", MESH, shape=(8, 5)),
        "ShapeError",
        ("has shape (2, 4), not (2, 5) in\n    'n/tp d -> n d'", "under 'n/tp d'", "a (8, 5) array"),
    ),
    "no such even block": (
        lambda: xt.redistribute(torch.ones(3), "n/zigzag(tp) -> n", MESH),
        "ShapeError",
        ("has shape (3,), not (", "'n/zigzag(tp) -> n'", "pass shape= (the global shape)"),
    ),
    "dtype": (
        lambda: xt.redistribute(X.bool(), "n d | sum(tp) -> n d", MESH),
        "DtypeError",
        ("dtype bool lacks a sum", "cast to an integer"),
    ),
    "dtype that only moves": (
        lambda: xt.ops.all_reduce(X.to(torch.uint16), "tp", MESH, grad="sum"),
        "DtypeError",
        ("torch has no '", "' of uint16", "cast before the reduction"),
    ),
    "gradient that cannot be added": (_float8_gradient, "DtypeError", ("float8_e4m3fn cannot be reduced",)),
    "plan for another mesh": (
        lambda: _other_plan("n/tp d -> n d", xs.Mesh(tp=2), "float32"),
        "MeshError",
        ("the plan is for Mesh(tp=2), this is Mesh(tp=4)",),
    ),
    "plan for another dtype": (
        lambda: _other_plan("n/tp d -> n d", MESH, "float64"),
        "DtypeError",
        ("the plan is for float64, the block has float32",),
    ),
    "grad": (
        lambda: xt.ops.all_gather(X, 0, "tp", MESH, grad="mean"),  # type: ignore[arg-type]
        "XshardError",
        ("grad='mean'", '"replicated": they are equal'),
    ),
    "dim": (
        lambda: xt.ops.all_gather(X, 2, "tp", MESH, grad="sum"),
        "ShapeError",
        ("no dim 2 in a block of shape (2, 4)",),
    ),
    "numbers": (
        lambda: xt.redistribute([1.0], TURN, MESH),
        "XshardError",
        ("leaf '0' is 1.0, not a tensor\n  torch.as_tensor() makes one of it",),
    ),
    "array": (
        lambda: xt.ops.all_gather(X.numpy(), 0, "tp", MESH, grad="sum"),  # type: ignore[arg-type]
        "XshardError",
        ("x is a ndarray, not a tensor\n  torch.as_tensor() makes one of it",),
    ),
    "module": (
        lambda: xt.redistribute(torch.nn.ReLU(), TURN, MESH),
        "XshardError",
        ("x is ReLU(), not a tensor\n  pass dict(module.named_parameters())",),
    ),
    "expression before the tensor": (
        lambda: xt.redistribute(TURN, X, MESH),
        "XshardError",
        ("x is 'n/tp d -> n d/tp', not a tensor\n  the tensor comes first",),
    ),
    "mesh before the expression": (
        lambda: xt.redistribute(X, MESH, TURN),
        "NotationError",
        ('Mesh(tp=4) is no expression\n  "layout -> layout", a pair',),
    ),
    "mesh as text": (
        lambda: xt.redistribute(X, TURN, "tp=4"),
        "MeshError",
        ("'tp=4' is not a mesh", "the expression comes before it"),
    ),
    "mesh as a dict": (
        lambda: xt.redistribute(X, TURN, {"tp": 4}),
        "MeshError",
        ("{'tp': 4} is not a mesh",),
    ),
    "mesh before the axis": (
        lambda: xt.ops.copy_to(X, MESH, "tp"),  # type: ignore[arg-type]
        "MeshError",
        ("Mesh(tp=4) is not a mesh axis",),
    ),
    "three sides": (
        lambda: xt.redistribute(X, ("n d", "n d", "n d"), MESH),
        "NotationError",
        ("('n d', 'n d', 'n d') is no expression",),
    ),
    "shape that is a number": (
        lambda: xt.redistribute(X, TURN, MESH, shape=8),
        "ShapeError",
        ("the shape 8 is not a sequence of lengths\n  as in shape=(8,)",),
    ),
    "operation": (
        lambda: xt.ops.all_reduce(X, "tp", MESH, op="psum", grad="sum"),
        "NotationError",
        ("unknown tag 'psum'", "did you mean 'sum'? tags are:"),
    ),
    "operation of torch": (
        lambda: xt.ops.reduce_scatter(X, 0, "tp", MESH, op=dist.ReduceOp.AVG),  # type: ignore[arg-type]
        "XshardError",
        ("is not text\n  it is",),
    ),
    "width of a halo": (
        lambda: xt.ops.halo_exchange(X, 1.5, 0, "tp", MESH),  # type: ignore[arg-type]
        "ShapeError",
        ("a halo of width 1.5",),
    ),
    "tensor for placements": (
        lambda: xt.dtensor.redistribute(X, []),  # type: ignore[arg-type]
        "XshardError",
        (" is not a DTensor\n  redistribute(x, layouts, mesh) moves tensors",),
    ),
}
TAKEN: list[Callable[[], Any]] = [
    lambda: xt.redistribute(X, ["n/tp d", "n d/tp"], MESH),
    lambda: xt.redistribute(X, TURN, MESH, shape=np.array([8, 4])),
    lambda: xt.ops.all_to_all(X, np.int64(1), np.int64(0), "tp", MESH, shape=(np.int64(8), 4)),
    lambda: xt.redistribute(xt.redistribute(X, "n d -> n d", MESH, async_op=True), TURN, MESH),
]


def _refusals() -> list[tuple[str, str]]:
    found = [error_of(REFUSED[name][0]) for name in REFUSED]
    assert all(torch.equal(taken(), torch.ones(8, 1)) for taken in TAKEN)
    assert xt.ops.halo_exchange(X, np.int64(1), np.int64(0), "tp", MESH).shape == (4, 4)
    rows = xt.positions("n/tp", MESH, shape=np.array([8]), dim=np.int64(0))
    assert torch.equal(rows, torch.arange(2) + 2 * dist.get_rank())
    leaf = torch.ones(2, 4, requires_grad=True)  # a redistribution in flight has a gradient, too
    in_flight = xt.redistribute(leaf, "n/tp d -> n d | copy(tp)", MESH, async_op=True)
    loss = xt.redistribute(in_flight, "n d -> n/tp d", MESH).sum()
    assert torch.equal(torch.autograd.grad(loss, leaf)[0], 4 * leaf)
    assert still_connected()
    return found


@pytest.fixture(scope="module")
def refusals() -> list[dict[str, tuple[str, str]]]:
    return [dict(zip(REFUSED, found, strict=True)) for found in on_ranks(N, _refusals)]


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_every_rank_before_anything_is_sent(
    name: str, refusals: list[dict[str, tuple[str, str]]]
) -> None:
    _, kind, parts = REFUSED[name]
    for found in refusals:
        assert found[name][0] == kind
        for part in parts:
            assert part in found[name][1]


KINDS = {  # of the steps of a backward plan, by README's word for a gradient
    "reduce-scatter": "reduce_scatter",
    "slice": "slice",
    "all-gather": "all_gather",
    "all-reduce": "all_reduce",
    "the same": "retag",
    "its part": "embed",
    "all-to-all": "all_to_all",
    "rows go back": "exchange",
    "zeros for": "exchange",
}


def test_the_table_of_named_operations_says_what_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page has the expression that the operation writes, and the gradient of its backward plan."""
    monkeypatch.setattr("torch_bridge.ops.redistribute", lambda x, expression, mesh, **_: expression)
    values = {"x": X, "mesh": MESH, "axis": "tp", "dim": 0, "split_dim": 1, "concat_dim": 0, "width": 1}
    page = (Path(xt.__file__).parents[1] / "docs/operations.md").read_text()
    rows = re.findall(r"^\| `(\w+)`(?:, `grad=\"(\w+)\"`)? \| `(.+->.+)` \| (.+) \|$", page, re.M)
    for name, grad, expression, gradient in rows:
        operation = getattr(xt.ops, name)
        given = {k: v for k, v in values.items() if k in inspect.signature(operation).parameters}
        written = operation(**given, **({"grad": grad} if grad else {}))
        assert written.replace("d1", "d").replace("d0", "n") == expression.replace("\\", "")
        (step,) = xs.plan(written, MESH, (8, 4)).backward.steps
        (kind,) = [kind for words, kind in KINDS.items() if gradient.startswith(words)]
        assert step.kind == kind, name
    named = vars(xt.ops).items()
    assert {row[0] for row in rows} == {
        k for k, f in named if getattr(f, "__module__", "") == xt.ops.__name__ and k[0] != "_"
    }


def test_examples_of_the_docstrings() -> None:
    """In every module that has some; the drop-ins' examples are run beside JAX's."""
    package = Path(xt.__file__).parent
    files = [
        f for f in sorted(package.rglob("*.py")) if f.parent.name != "compat" and ">>> " in f.read_text()
    ]
    parts = [f.relative_to(package).with_suffix("").parts for f in files]
    modules = [".".join(("torch_bridge", *names)).removesuffix(".__init__") for names in parts]
    assert len(modules) >= 11
    assert failed_examples(modules) == {}
