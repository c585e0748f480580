"""The named ops: results and refusals. Their gradients are in test_conventions."""

from __future__ import annotations

import inspect
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import assert_refused, failed_examples, in_ranks, numbers

N = 4
MESH = xs.Mesh(tp=N)


@in_ranks(4)
def test_all_to_all() -> None:
    rank = dist.get_rank()
    mesh = xs.Mesh(dp=2, cp=2)
    x = torch.from_numpy(numbers(8, 4))
    coords = mesh.coords(rank)
    # Over one axis; over both, in both orders; and from zigzag to plain.
    for axes, n in (("cp", 2), (("cp", "dp"), 4), (("dp", "cp"), 4)):
        index = mesh.index(rank, (axes,) if n == 2 else axes)
        y = xt.ops.all_to_all(x.chunk(n)[index], -1, 0, axes, mesh)
        assert torch.equal(y, x.chunk(n, 1)[index])
    chunks = x.chunk(8)
    zigzag = torch.cat([chunks[index], chunks[7 - index]])
    y = xt.ops.all_to_all(zigzag, 1, 0, ("dp", "cp"), mesh, concat_order="zigzag")
    assert torch.equal(y, x.chunk(4, 1)[index])
    assert torch.equal(xt.ops.all_to_all(y, 0, 1, ("dp", "cp"), mesh, split_order="zigzag"), zigzag)
    # Blocks of different sizes, where the global shape is told.
    x = x[:7, :3]
    blocks = x.split([4, 3])
    columns = x.split([2, 1], 1)
    y = xt.ops.all_to_all(blocks[coords[1]], 1, 0, "cp", mesh, shape=(7, 3))
    assert torch.equal(y, columns[coords[1]])


X = torch.ones(2, 4)
TURN = "n/tp d -> n d/tp"


@in_ranks(N)
def test_what_is_refused_before_anything_is_sent() -> None:
    move = partial(xt.redistribute, X)
    plan = partial(xs.plan, "n/tp d -> n d", shape=(8, 4))
    ops = xt.ops
    float8 = X[0].to(torch.float8_e4m3fn)
    assert xt.redistribute(float8, "n/tp -> n | copy(tp)", MESH).float().sum() == 16
    assert_refused(
        (lambda: move("b s/cq -> b s", MESH),
            "NotationError: ...axis 'cq' in\n    'b s/cq -> b s'\n         ^^\n  the mesh has: tp=4"),
        (lambda: move("n/tp -> n", MESH),
            "ShapeError: ...has 1 dims, the array has 2...'n/tp -> n'...one name per dim"),
        (lambda: move("n/tp d -> n d", MESH, shape=(8, 5)),
            "ShapeError: ...(2, 4), not (2, 5) in\n    'n/tp d -> n d'...under 'n/tp d'...a (8, 5) array"),
        (lambda: xt.redistribute(torch.ones(3), "n/zigzag(tp) -> n", MESH),
            "ShapeError: ...has shape (3,), not (...'n/zigzag(tp) -> n'...pass shape= (the global shape)"),
        (lambda: xt.redistribute(X.bool(), "n d | sum(tp) -> n d", MESH),
            "DtypeError: ...dtype bool lacks a sum...cast to an integer"),
        (lambda: ops.all_reduce(X.to(torch.uint16), "tp", MESH, grad="sum"),
            "DtypeError: torch has no '...' of uint16...cast before the reduction"),
        (lambda: xt.redistribute(float8.requires_grad_(), "n/tp -> n | copy(tp)", MESH),
            "DtypeError: ...float8_e4m3fn cannot be reduced"),
        (lambda: move(plan(xs.Mesh(tp=2)), MESH),
            "MeshError: the plan is for Mesh(tp=2), this is Mesh(tp=4)"),
        (lambda: move(plan(MESH, dtype="float64"), MESH),
            "DtypeError: the block is float32, the plan is for float64"),
        (lambda: ops.all_gather(X, 0, "tp", MESH, grad="mean"),
            "XshardError: grad is 'mean', not Grad\n  all_gather takes Literal['sum', 'replicated']"),
        (lambda: ops.all_gather(X, 2, "tp", MESH, grad="sum"),
            "ShapeError: no dim 2 in a block of shape (2, 4)"),
        (lambda: xt.redistribute([1.0], TURN, MESH),
            "XshardError: leaf '0' is 1.0, not a tensor\n  torch.as_tensor() makes one of it"),
        (lambda: ops.all_gather(X.numpy(), 0, "tp", MESH, grad="sum"),
            "XshardError: x is a ndarray, not a tensor\n  torch.as_tensor() makes one of it"),
        (lambda: xt.redistribute(torch.nn.ReLU(), TURN, MESH),
            "XshardError: x is ReLU(), not a tensor\n  pass dict(module.named_parameters())"),
        (lambda: xt.redistribute(TURN, X, MESH),
            f"XshardError: x is '{TURN}', not a tensor\n  the tensor comes first"),
        (lambda: move(MESH, TURN),
            "NotationError: Mesh(tp=4) is no expression\n  \"layout -> layout\", a pair"),
        (lambda: move(TURN, "tp=4"), "MeshError: 'tp=4' is not a mesh...the expression comes before it"),
        (lambda: move(TURN, {"tp": 4}), "MeshError: {'tp': 4} is not a mesh"),
        (lambda: ops.copy_to(X, MESH, "tp"), "XshardError: axis is Mesh(tp=4), not Axes"),
        (lambda: move(("n d", "n d", "n d"), MESH), "NotationError: ('n d', 'n d', 'n d') is no expression"),
        (lambda: move(TURN, MESH, shape=8),
            "ShapeError: the shape 8 is not a sequence of lengths\n  as in shape=(8,)"),
        (lambda: ops.all_reduce(X, "tp", MESH, op="psum", grad="sum"),
            "XshardError: op is 'psum', not ReduceOp\n  did you mean 'sum'? all_reduce takes"),
        (lambda: ops.reduce_scatter(X, 0, "tp", MESH, op=dist.ReduceOp.AVG),
            "XshardError: op is ..., not ReduceOp\n  reduce_scatter takes Literal"),
        (lambda: ops.halo_exchange(X, 1.5, 0, "tp", MESH), "XshardError: width is 1.5, not HaloWidth"),
        (lambda: xt.dtensor.redistribute(X, []),
            "XshardError: ... is not a DTensor\n  redistribute(x, layouts, mesh) moves tensors"),
        is_alike=False,
    )  # fmt: skip
    for y in (
        move(["n/tp d", "n d/tp"], MESH),
        move(TURN, MESH, shape=np.array([8, 4])),
        ops.all_to_all(X, np.int64(1), np.int64(0), "tp", MESH, shape=(np.int64(8), 4)),
        xt.redistribute(move("n d -> n d", MESH, async_op=True), TURN, MESH),
    ):
        assert torch.equal(y, torch.ones(8, 1))
    assert ops.halo_exchange(X, np.int64(1), np.int64(0), "tp", MESH).shape == (4, 4)
    rows = xt.positions("n/tp", MESH, shape=np.array([8]), dim=np.int64(0))
    assert torch.equal(rows, torch.arange(2) + 2 * dist.get_rank())
    leaf = torch.ones(2, 4, requires_grad=True)  # a redistribution in flight has a gradient, too
    in_flight = xt.redistribute(leaf, "n/tp d -> n d | copy(tp)", MESH, async_op=True)
    loss = xt.redistribute(in_flight, "n d -> n/tp d", MESH).sum()
    assert torch.equal(torch.autograd.grad(loss, leaf)[0], 4 * leaf)


KINDS = {  # of the steps of a backward plan, by README's word for a gradient
    "reduce-scatter": "reduce_scatter", "slice": "slice", "all-gather": "all_gather", "the same": "retag",
    "all-reduce": "all_reduce", "its part": "embed", "all-to-all": "all_to_all", "rows go back": "exchange",
    "zeros for": "exchange",
}  # fmt: skip


def test_the_table_of_named_operations_says_what_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page has the expression that the operation writes, and the gradient of its backward plan."""
    monkeypatch.setattr(
        "torch_bridge.ops.redistribute", lambda x, expression, mesh, **_: expression
    )
    values = {
        "x": X,
        "mesh": MESH,
        "axis": "tp",
        "dim": 0,
        "split_dim": 1,
        "concat_dim": 0,
        "width": 1,
    }
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
    assert {row[0] for row in rows} == {*xt.ops.__all__}


def test_examples_of_the_docstrings() -> None:
    """In every module that has some; the drop-ins' examples are run beside JAX's."""
    package = Path(xt.__file__).parent
    files = [f.with_suffix("") for f in sorted(package.rglob("*.py")) if ">>> " in f.read_text()]
    parts = [f.relative_to(package.parent).parts for f in files if f.parent.name != "compat"]
    modules = [".".join(names).removesuffix(".__init__") for names in parts]
    assert len(modules) >= 11
    assert failed_examples(modules) == {}
