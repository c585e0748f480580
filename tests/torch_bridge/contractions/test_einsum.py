"""Contractions of blocks: values, gradients and bytes of a table, and what torch does with them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves

import torch_bridge as xt
import xshard as xs
from tests import oracle
from tests.contractions.cases import CASES, spelled
from tests.torch_bridge.helpers import (
    SharedRanks,
    assert_refused,
    block_of,
    error_of,
    in_ranks,
    numbers,
    on_ranks,
)
from torch_bridge.lower.packed_collective import PackedCollective
from torch_bridge.mesh import desync
from torch_bridge.testing.byte_counter import Meter
from xshard.contractions.plan import ContractionPlan
from xshard.contractions.ring import rings


def dense(names: list[tuple[str, ...]], result: tuple[str, ...]) -> str:
    """The equation of torch's own einsum."""
    letters = {
        name: chr(97 + i) for i, name in enumerate(dict.fromkeys(n for dims in names for n in dims))
    }
    left = ",".join("".join(letters[name] for name in dims) for dims in names)
    return f"{left}->{''.join(letters[name] for name in result)}"


def _contracted(work: list[tuple[ContractionPlan, list[Any], Any]]) -> list[Any]:
    rank = dist.get_rank()
    found = []
    for plan, operands, cotangent in work:
        blocks = [torch.from_numpy(each[rank]).requires_grad_() for each in operands]
        with Meter() as forward:
            y = xt.einsum(plan, *blocks, mesh=plan.mesh)
        assert y.is_contiguous() and y.data_ptr() not in [x.data_ptr() for x in blocks if x.numel()]
        with Meter() as backward:
            gradients = torch.autograd.grad(y, blocks, torch.as_tensor(cotangent[rank]))
        found.append(
            (
                y.detach().numpy(),
                [g.numpy() for g in gradients],
                forward.received,
                backward.received,
            )
        )
    return found


def busiest(by_rank: list[list[int]]) -> int:
    """What the busiest rank receives, summed over collectives."""
    return sum(map(max, zip(*by_rank, strict=True)))


def in_rounds(plan: ContractionPlan) -> list[ContractionPlan]:
    """The plan with every ring that its parts may be computed in, one at a time."""
    return [
        replace(plan, parts=(*plan.parts[:i], replace(part, ring=ring), *plan.parts[i + 1 :]))
        for i, part in enumerate(plan.parts)
        for ring in rings(part)
    ]


@pytest.mark.parametrize("n", [4, 8])
def test_results_are_those_of_one_device(n: int) -> None:
    plans = [
        xs.plan(text, xs.Mesh(mesh), sizes=sizes, dtype="float64", profile="bandwidth")
        for _, mesh, sizes, text in CASES
        if xs.Mesh(mesh).n_devices == n
    ]
    plans += [ring for plan in plans for ring in in_rounds(plan)]
    kinds = {
        (ring.operand is None, ring.dim in part.result.src.names, ring.pieces)
        for plan in plans
        for part in plan.parts
        if (ring := part.ring)
    }
    assert {kind[:2] for kind in kinds} == {(False, False), (False, True), (True, True)}
    assert {pieces for *_, pieces in kinds} == {1, 2, 4}
    draw = np.random.default_rng(0)
    work = []
    for plan in plans:
        *operands, end = plan.arrays
        ends = [*operands, end.with_layout(end.layout.dual)]
        *operands, cotangent = (
            oracle.random_blocks(x.layout, x.mesh, x.shape, draw, unit=4) for x in ends
        )
        work.append((plan, operands, cotangent))
    ranks = on_ranks(n, _contracted, work)
    for at, (plan, operands, cotangent) in enumerate(work):
        *ends, end = [(array.layout, array.shape) for array in plan.arrays]
        _, _, lengths, case = next(each for each in CASES if each[-1] == plan.text)
        wholes = [
            torch.from_numpy(oracle.gather(each, layout, plan.mesh, shape)).requires_grad_()
            for each, (layout, shape) in zip(operands, ends, strict=True)
        ]
        names = [spelled(layout) for layout, _ in ends]
        apart = (
            x.reshape([lengths[n] for n in dims]) for x, dims in zip(wholes, names, strict=True)
        )
        expected = torch.einsum(dense(names, spelled(end[0])), *apart).reshape(end[1])
        pulled = oracle.gather(cotangent, end[0].dual, plan.mesh, end[1])
        gradients = torch.autograd.grad(expected, wholes, torch.as_tensor(pulled))
        blocks, found, forward, backward = zip(*(rank[at] for rank in ranks), strict=True)
        y = oracle.gather(list(blocks), end[0], plan.mesh, end[1])
        assert np.array_equal(y, expected.detach().numpy()), case
        for i, (layout, shape) in enumerate(ends):
            whole = oracle.gather([rank[i] for rank in found], layout.dual, plan.mesh, shape)
            whole *= plan.mesh.size(*layout.tagged("mean"))  # of a block, an n-th of an average
            assert np.array_equal(whole, gradients[i].numpy()), (case, i)
        assert busiest(forward) == plan.bytes_received, case
        assert busiest(backward) == plan.backward_bytes_received, case
        for part in plan.parts:
            if part.ring:
                assert len(forward[0]) >= part.ring.rounds - 1 <= len(backward[0]), case


TP = xs.Mesh(tp=2)
WIDE = xs.Mesh(tp=4)
LENGTHS = {"b": 8, "s": 4, "d": 4, "f": 8}
SCHEMES = (
    "b s d, d f -> b s f/tp",
    "b s d, d f/tp -> b s f/tp",
    "b/tp d, d/tp f -> b/tp f",
    "s/tp d ->",
)

RINGS = ("b/tp d, d/tp f -> b/tp f", "b f/tp, f/tp d -> b/tp d")


def _whole(plan: ContractionPlan, save: str, *wholes: Tensor) -> Tensor:
    """Whole arrays -> the whole result, on every rank alike: torch's own einsum, as a chain of moves."""
    ends = zip(wholes, plan.contraction.operands, plan.shapes, strict=True)
    blocks = [
        xt.redistribute(x, f"{' '.join(layout.names)} -> {layout}", WIDE, shape=s)
        for x, layout, s in ends
    ]
    y = xt.einsum(plan, *blocks, mesh=WIDE, save=save)
    result = plan.contraction.result
    return xt.redistribute(y, f"{result} -> {' '.join(result.names) or '()'}", WIDE)


def _derivatives(
    f: Callable[..., Tensor], xs_: tuple[Tensor, ...], tangents: tuple[Tensor, ...]
) -> list[Tensor]:
    """What torch's transformations make of a function, of the first and the second order."""
    every = tuple(range(len(xs_)))
    gradient = torch.func.grad(lambda *given: (f(*given) ** 2).sum(), every)
    leaves = [x.clone().requires_grad_() for x in xs_]
    first = torch.autograd.grad((f(*leaves) ** 2).sum(), leaves, create_graph=True)
    found = [
        torch.func.jvp(f, xs_, tangents),
        torch.func.vmap(f, in_dims=(1, *(None for _ in every[1:])))(
            torch.stack([xs_[0], tangents[0]], 1), *xs_[1:]
        ),
        torch.func.vmap(gradient)(*(torch.stack(pair) for pair in zip(xs_, tangents, strict=True))),
        torch.func.jvp(gradient, xs_, tangents),
        torch.autograd.grad(sum((g**2).sum() for g in first), leaves),
    ]
    return tree_leaves(found)


@in_ranks(4)
def test_derivatives_of_any_order() -> None:
    for text, overlap in [
        *((text, "never") for text in SCHEMES),
        *((text, "always") for text in RINGS),
    ]:
        sizes = {name: n for name, n in LENGTHS.items() if name in text}
        plan = xs.plan(
            text, WIDE, sizes=sizes, dtype="float64", profile="bandwidth", overlap=overlap
        )
        assert (plan.parts[0].ring is None) == (overlap == "never")
        draw = torch.Generator().manual_seed(0)
        xs_, tangents = (
            tuple(torch.randint(-3, 4, shape, generator=draw).double() for shape in plan.shapes)
            for _ in "xt"
        )
        names = [layout.names for layout in plan.contraction.operands]
        equation = dense(names, plan.contraction.result.names)
        expected = _derivatives(partial(torch.einsum, equation), xs_, tangents)
        for save in ("used", "given"):
            found = _derivatives(partial(_whole, plan, save), xs_, tangents)
            assert all(map(torch.equal, found, expected)) and len(found) == len(expected), (
                text,
                save,
            )


def _kept(save: str, overlap: str = "never") -> tuple[int, list[int], list[int]]:
    """Bytes that autograd keeps beside the operands, and that arrive forward and backward, of ZeRO-3."""
    x = torch.ones(2, 3, requires_grad=True)
    w = torch.ones(4, 3, requires_grad=True)
    own = {t.untyped_storage().data_ptr() for t in (x, w)}
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own:
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), Meter() as forward:
        options = {"save": save, "overlap": overlap, "profile": "h100"}
        y = xt.einsum("b/tp f, d/tp f -> b/tp d", x, w, mesh=TP, **options)
    with Meter() as backward:
        y.sum().backward()
    assert (x.grad == 8).all() and (w.grad == 4).all()
    return sum(saved.values()), forward.received, backward.received


TEXT = "s/tp d, d f/tp -> s f/tp"
PARTS = {"s": 4, "d": 4, "f": 7}


class Product(NamedTuple):
    """Two matrices, their blocks here, and the block of their product."""

    x: np.ndarray
    w: np.ndarray
    rows: Tensor
    columns: Tensor
    expected: Tensor


def product_of_blocks() -> Product:
    x = numbers(4, 4) % 5
    w = numbers(4, 7) % 3
    rows = block_of(x, "s/tp d", TP)
    columns = block_of(w, "d f/tp", TP)
    return Product(x, w, rows, columns, block_of(x @ w, "s f/tp", TP))


on_two = SharedRanks(2)


@on_two
def test_what_is_kept_for_the_backward_pass() -> None:
    assert _kept("used") == (96, [48], [48]) and _kept("given") == (0, [48], [48, 48])
    assert _kept("used", "always") == (48, [48], [48]), (
        "in rounds a device's own part is the operand"
    )
    assert _kept("given", "always") == (0, [48], [48, 48])


@on_two
def test_a_product_of_blocks() -> None:
    given = product_of_blocks()
    y = xt.einsum(TEXT, given.rows, given.columns, mesh=TP, sizes=PARTS)
    assert torch.equal(y, given.expected)
    assert torch.equal(
        xt.einsum(TEXT, given.rows, given.columns, mesh=TP, shape=[(4, 4), (4, 7)]), given.expected
    )
    assert torch.equal(given.rows, block_of(given.x, "s/tp d", TP)), "operands are left as they are"


@on_two
def test_dims_that_no_cut_decides() -> None:
    given = product_of_blocks()
    # Permuted, left alone, of a length that another operand has whole.
    assert torch.equal(
        xt.einsum("s/tp d -> d s/tp", given.rows, mesh=TP), block_of(given.x.T, "d s/tp", TP)
    )
    same = xt.einsum("s/tp d -> s/tp d", given.rows, mesh=TP)
    assert torch.equal(same, given.rows) and same.data_ptr() != given.rows.data_ptr()
    rank = dist.get_rank()
    odd = xt.einsum("s d, d/tp f -> s f", torch.ones(2, 3), torch.ones(2 - rank, 5), mesh=TP)
    assert torch.equal(odd, torch.full((2, 5), 3.0))
    one = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "one"))
    apart = xt.einsum("s/one d, d f -> s f", torch.ones(1 + rank, 3), torch.ones(3, 2), mesh=one)
    assert apart.shape == (1 + rank, 2), "axes that an expression does not name are left alone"


@on_two
def test_whole_numbers_are_added_in_their_dtype() -> None:
    given = product_of_blocks()
    counted = xt.einsum(TEXT, given.rows.long(), given.columns.long(), mesh=TP, sizes=PARTS)
    assert counted.dtype == torch.int64 and torch.equal(counted, given.expected.long())
    for kind in (torch.uint8, torch.int8, torch.int16, torch.int32):  # which torch sums into int64
        total = xt.einsum("s/tp d -> ()", given.rows.to(kind), mesh=TP, profile="h100")
        assert total.dtype == kind and total == int(given.x.sum())
        each = xt.einsum(
            "s/tp, s/tp d -> s/tp", given.rows[:, 0].to(kind), given.rows.to(kind), mesh=TP
        )
        assert each.dtype == kind and torch.equal(
            each, (given.rows[:, 0] * given.rows.sum(1)).to(kind)
        )


@on_two
def test_a_wide_dtype_on_the_way() -> None:
    given = product_of_blocks()
    for comm_dtype in (torch.float32, (None, torch.float32)):
        a, b = (t.bfloat16().requires_grad_() for t in (given.rows, given.columns))
        narrow = xt.einsum(
            TEXT, a, b, mesh=TP, sizes=PARTS, comm_dtype=comm_dtype, overlap="always"
        )
        narrow.sum().backward()
        assert narrow.dtype == a.grad.dtype == torch.bfloat16 and torch.equal(
            narrow.double(), given.expected
        )


@on_two
def test_autocast_narrows_operands() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        y = xt.einsum("s d, d f -> s f/tp", torch.ones(2, 2), torch.ones(2, 2), mesh=TP)
        assert y.dtype == torch.bfloat16


@on_two
def test_conjugate_views_are_resolved() -> None:
    z = torch.randn(
        2, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(dist.get_rank())
    ).conj()
    assert torch.equal(xt.einsum("s d -> s", z, mesh=TP), z.sum(1))


@on_two
def test_a_product_that_is_begun() -> None:
    given = product_of_blocks()
    halves = block_of(given.x, "s d/tp", TP), block_of(given.w, "d/tp f", TP)
    pending = xt.einsum("s d/tp, d/tp f -> s/tp f", *halves, mesh=TP, async_op=True)
    assert "under way" in repr(pending) and pending.shape == (2, 7)
    assert torch.equal(pending + 1, block_of(given.x @ given.w + 1, "s/tp f", TP))


@on_two
def test_a_result_may_be_written_to() -> None:
    for save in ("used", "given"):
        operands = torch.ones(4, 4, 4, requires_grad=True), torch.ones(4, 8, requires_grad=True)
        written = xt.einsum(SCHEMES[0], *operands, mesh=TP, save=save, profile="bandwidth")
        written += 1  # a tensor of its own
        assert (torch.autograd.grad(written.sum(), operands[1])[0] == 16).all()


@on_two
def test_names_that_dims_alone_decide() -> None:
    given = product_of_blocks()
    # Names that the arrays' dims alone decide: of '...', of the parts of a composed dim, of a diagonal.
    several = torch.stack([given.rows, 2 * given.rows])[:, None]
    each = xt.einsum(
        "... s/tp d, d f/tp -> ... f", several, given.columns, mesh=TP, shape=[(2, 1, 4, 4), (4, 7)]
    )
    total = torch.ones(4) @ given.x @ given.w
    assert torch.equal(each, torch.stack([total, 2 * total])[:, None])
    pending = xt.einsum(
        "... (h k)/tp, k f -> (h f)/tp",
        given.rows[0],
        given.columns[:2, :1],
        mesh=TP,
        async_op=True,
    )
    assert pending.shape == (2,) and torch.equal(
        pending.wait(), given.rows[0].view(2, 2) @ given.columns[:2, 0]
    )
    assert torch.equal(
        xt.einsum("s/tp s -> s/tp", given.rows, mesh=TP), block_of(given.x.diagonal(), "s/tp", TP)
    )
    assert given.rows.is_contiguous() and torch.equal(
        given.rows, block_of(given.x, "s/tp d", TP)
    ), "operands are left as they are"


@on_two
def test_tensors_without_values() -> None:
    given = product_of_blocks()
    assert (
        xt.einsum(TEXT, given.rows.to("meta"), given.columns.to("meta"), mesh=TP, sizes=PARTS).shape
        == given.expected.shape
    )
    with FakeTensorMode():
        a = torch.ones(2, 4, requires_grad=True)
        faked = xt.einsum(TEXT, a, torch.ones(4, 3), mesh=TP)
        faked.sum().backward()
        assert isinstance(faked, FakeTensor) and a.grad.shape == (2, 4)


@on_two
def test_dtensors_in_place_of_blocks() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x, w = (torch.from_numpy(numbers(4, 4) % k).requires_grad_() for k in (5, 3))
    rows, columns = (
        distribute_tensor(t.detach(), mesh, [Shard(d)]).requires_grad_()
        for d, t in enumerate((x, w))
    )
    for text, placement in (
        ("s/tp d, d f/tp -> s f/tp", Shard(1)),
        ("s/tp d, d f/tp -> s/tp f", Shard(0)),
        ("s/tp d, d f/tp -> s f | copy(tp)", Replicate()),
        ("s/tp d, d f/tp -> s f | sum(tp)", Partial()),
    ):
        y = xt.einsum(text, rows, columns, profile="bandwidth")
        assert y.placements == (placement,) and torch.equal(y.full_tensor(), x @ w)
        found = torch.autograd.grad((y.full_tensor() ** 2).sum(), (rows, columns))
        expected = torch.autograd.grad(((x @ w) ** 2).sum(), (x, w))
        assert [g.placements for g in found] == [rows.placements, columns.placements]
        assert all(torch.equal(g.full_tensor(), e) for g, e in zip(found, expected, strict=True)), (
            text
        )
    sizes = {"s": 2, "h": 2, "d": 4, "f": 1, "e": 4}
    y = xt.einsum("(s h)/tp d, e (d f)/tp -> e f (s h)/tp", rows, columns, sizes=sizes)
    assert y.placements == (Shard(2),) and torch.equal(y.full_tensor()[:, 0], w @ x.T)
    for text, second, options, part in (
        ("s/tp d, d/tp f -> s f", columns, {}, "placed as 'd f/tp' in"),
        ("s/tp d, d f/tp -> s f", w, {}, "not all operands are DTensors"),
        ("s/tp d, d f/tp -> s/zigzag(tp) f", columns, {}, "cannot hold 's/zigzag(tp)'"),
        ("s/tp d, d f/tp -> s f", columns, {"mesh": xs.Mesh(tp=2)}, "leave the mesh"),
    ):
        assert part in error_of(partial(xt.einsum, text, rows, second, **options))[1]


# The expression, with its dots written out, and dims whose lengths blocks do not say.
SAID_BY_SIZES = [
    ("... s/tp d, d f -> ... s/tp f", "a b s d, d f -> a b s f", "s"),
    ("... s/tp d, d f/tp -> ... s f/tp", "a s d, d f -> a s f", "sf"),
    ("a (h k)/tp, (h k)/tp f -> a f", "a (h k), (h k) f -> a f", "h"),
    ("... (h k)/tp, (h k)/tp d -> ... d", "a b (h k), (h k) d -> a b d", "k"),
    ("a (h k)/tp -> a h/tp k", "a (h k) -> a h k", "k"),
    ("... (h k)/tp, s/tp d -> ... h k s d", "a (h k), s d -> a h k s d", "sh"),
]


@on_two
def test_some_sizes_beside_dots_and_composed_dims() -> None:
    """What sizes lack, operands say: they hold a dim whole, or have equal blocks."""
    pick = random.Random(0)
    for text, written_out, given in SAID_BY_SIZES * 6:
        n = {name: pick.choice((1, 2, 3, 5)) for name in "abskdf"} | {"h": pick.choice((2, 4, 6))}
        left, result = written_out.split(" -> ")
        layouts, result_layout = text.split(" -> ")
        names = [tuple(re.findall(r"\w", part)) for part in left.split(", ")]
        whole = [numbers(*(n[name] for name in own)) % 5 for own in names]
        blocks = []
        for x, part, layout in zip(whole, left.split(", "), layouts.split(", "), strict=True):
            dims = re.findall(r"\(.*?\)|\w", part)
            shape = [
                np.prod([n[name] for name in re.findall(r"\w", dim)], dtype=int) for dim in dims
            ]
            blocks.append(block_of(x.reshape(shape), layout.replace("(h k)", "r"), TP))
        others = [name for name in n if name in text and pick.random() < 0.3]
        sizes = {name: n[name] for name in (*given, *others)}
        expected = torch.einsum(dense(names, tuple(result.split())), *map(torch.from_numpy, whole))
        y = xt.einsum(text, *blocks, mesh=TP, sizes=sizes)
        assert torch.equal(y, block_of(expected.numpy(), result_layout, TP)), (text, sizes)
    plan = xs.plan("a (h k)/tp -> a h/tp k", TP, shape=(1, 6), sizes={"h": 2}, dtype="float64")
    assert xt.einsum(plan, torch.ones(1, 3).double(), mesh=TP, sizes={"k": 3}).shape == (1, 1, 3)
    with pytest.raises(xs.errors.ShapeError, match="the plan is for shape"):
        xt.einsum(plan, torch.ones(1, 3).double(), mesh=TP, sizes={"h": 3})


@on_two
def test_errors_come_before_anything_is_sent() -> None:
    text = "s/tp d, d f/tp -> s f/tp"
    x = torch.ones(2, 4)
    w = torch.ones(4, 3)
    plan = xs.plan(text, TP, shape=[(4, 4), (4, 6)])
    nested = torch.nested.nested_tensor([w])
    call = partial(xt.einsum, text)
    hint = "einsum(expression, x, w, mesh=mesh), with one tensor per operand"
    first, second = (
        f" in\n    '{text}'\n{marks}\n  " for marks in (" " * 5 + "^" * 6, " " * 13 + "^" * 6)
    )
    d, f = (second.replace("^" * 6, marks) for marks in ("^", "  ^"))
    assert_refused(
        (lambda: call(x, mesh=TP), f"NotationError: 1 tensors for 2 operands in '{text}'\n  {hint}"),
        (lambda: call(x, w, TP), f"NotationError: 3 tensors for 2 operands in '{text}'\n  {hint}"),
        (lambda: call(x, w), f"MeshError: a tensor needs a mesh\n  {hint}"),
        (lambda: xt.einsum("s/q d, d f -> s f", x, w, mesh=TP),
            "NotationError: unknown mesh axis 'q' in\n    's/q d, d f -> s f'\n       ^\n  the mesh has: "
            "tp=2"),
        (lambda: call(x, w.double(), mesh=TP), "DtypeError: one operand is torch.float32, another torch.float"
            f"64{second}x.to(...): they are multiplied as they are"),
        (lambda: call(x, w.to("meta"), mesh=TP),
            f"MeshError: one operand is cpu, another meta{second}x.to(...): they are multiplied as they are"),
        (lambda: call(x, w.to_sparse(), mesh=TP), "ShapeError: the block or gradient is sparse "
            "(torch.sparse_coo)\n  x.to_dense(); a gradient is dense with embedding(sparse=False)"),
        (lambda: call(x[:, 0], w, mesh=TP),
            f"ShapeError: an array of 1 dims, (2,), for 's/tp d'{first}one dim per name"),
        (lambda: call(x, torch.ones(5, 3), mesh=TP),
            f"ShapeError: dim 'd' is 5 long, elsewhere d=4{d}a name stands for one length; sizes= says all "
            "of them"),
        (lambda: call(x, w, mesh=TP, sizes={"s": 4, "d": 4, "f": 4}),
            f"ShapeError: the block of operand 2 on rank {dist.get_rank()} has shape (4, 3), not (4, 2){f}"
            f"under 'd f/tp' that is the part of device {dist.get_rank()} of Mesh(tp=2) of a (4, 4) array"),
        (lambda: call(x.bool(), w.bool(), mesh=TP), "DtypeError: torch cannot multiply torch.bool: "
            f"\"bmm\" not implemented for 'Bool' in '{text}'\n  cast the operands first: x.to(...)"),
        (lambda: call(x, w, mesh=TP, save="all"),
            "PlanError: save is 'all'\n  \"used\": operands where they are contracted, or \"given\""),
        (lambda: call(x, w, mesh=TP, overlap="maybe"),
            "PlanError: no overlap 'maybe'\n  there are: never, auto, always"),
        (lambda: xt.einsum(plan, x.double(), w.double(), mesh=TP), "DtypeError: the operands are float64, "
            f"the plan is for float32 in '{text}'\n  pass the expression, or a plan made for them"),
        (lambda: call(x, w, mesh={"tp": 2}), "MeshError: {'tp': 2} is not a mesh\n  the mesh is a torch "
            "DeviceMesh or an xshard.Mesh; the expression comes before it"),
        (lambda: xt.einsum(x, w, text, mesh=TP), "NotationError: a contraction is text, not Tensor\n"
            "  it comes first: \"layout, layout -> layout\""),
        (lambda: call(x, "w", mesh=TP), f"XshardError: tensor 2 is 'w', not a tensor\n  {hint}"),
        (lambda: call(x, nested, mesh=TP),
            "ShapeError: the block or gradient is nested\n  x.to_padded_tensor(0.0)"),
        is_alike=False, is_whole=True,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:  # as XSHARD_DEBUG=1
        patch.setattr(desync, "ALWAYS", True)
        assert call(x, w, mesh=TP).shape == (4, 3)
        other = f"DesyncError: ...rank 1: '{text}', blocks [(2, 4), (4, 2)]"
        assert_refused((lambda: call(x, w[:, dist.get_rank() :], mesh=TP), other))
    y = call(x.clone().requires_grad_(), w, mesh=TP, profile="h100")
    sends: list[Callable[[], Any]] = [
        lambda: call(x, w, mesh=TP, profile="h100"),
        lambda: y.sum().backward(),
    ]
    steps = "all_gather s/tp', of 's/tp d", "reduce_scatter sum -> s/tp', of 's d | sum(tp)"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedCollective, "__call__", lambda *_: [][0])  # nobody sends
        for send, step in zip(sends, steps, strict=True):
            with pytest.raises(IndexError) as caught:
                send()
            [note] = caught.value.__notes__
            assert note.startswith(f"in step 1 of 1, '{step}") and note.endswith(
                f", for '{text}'"
            ), note


@in_ranks(2)
def test_compilers_record_them_as_one_graph() -> None:
    for text, shapes, save, overlap in (
        ("b s/tp d, d f/tp -> b s f/tp", [(2, 2, 4), (4, 3)], "given", "never"),
        ("b d, d f/tp -> b f", [(2, 8), (8, 1)], "used", "never"),
        ("b/tp d, d/tp f -> b/tp f", [(2, 4), (2, 3)], "used", "always"),
        ("... (b d)/tp b, d f -> ... (b f)/tp", [(1, 2, 6, 4), (3, 3)], "given", "never"),
    ):
        draw = torch.Generator().manual_seed(0)
        x, w = (
            torch.randint(-3, 4, shape, generator=draw).float().requires_grad_() for shape in shapes
        )

        def layer(
            x: Tensor, w: Tensor, text: str = text, save: str = save, overlap=overlap
        ) -> Tensor:
            return xt.einsum(text, x * 2, w, mesh=TP, save=save, overlap=overlap) + 1

        torch._dynamo.reset()
        backend = CompileCounterWithBackend("aot_eager")
        y = torch.compile(layer, backend=backend, fullgraph=True)(x, w)
        expected = layer(x, w)
        assert torch.equal(y, expected) and backend.frame_count == 1
        found, wanted = (
            torch.autograd.grad(out, (x, w), expected.detach()) for out in (y, expected)
        )
        assert all(map(torch.equal, found, wanted))
    wrong = torch.compile(lambda x: xt.einsum("s/q d -> s", x, mesh=TP), backend="aot_eager")
    assert "unknown mesh axis 'q'" in error_of(lambda: wrong(torch.ones(2, 2)))[1]
