"""Parts of lowering: rules, packing, collectives, counting."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

import torch_bridge as xt
import xshard as xs
from tests.torch_bridge.helpers import in_ranks, on_ranks
from torch_bridge.lower.packed_collective import PackedCollective
from torch_bridge.lower.packing import Packing
from torch_bridge.lower.rules import RULES, lower
from torch_bridge.lower.subarray import MAX_SLICES, Fill, Subarray, subarray
from torch_bridge.mesh.process_mesh import ProcessMesh, process_mesh
from torch_bridge.testing.byte_counter import Meter
from xshard.layout.partition import cut_by_shards
from xshard.layout.runs import Run, as_index
from xshard.notation.parser import Shard
from xshard.plans.transfer import Transfer
from xshard.steps import Step

CPU = torch.device("cpu")
STEPS = {
    kind: step for kind, step in Step.registry.items() if step is not Transfer
}  # has a file of its own


def test_every_step_has_a_rule() -> None:
    assert {step.kind for step in RULES} == STEPS.keys(), (
        "torch_bridge/lower/rules.py has one for each"
    )


def _packing(
    shape: tuple[int, ...], dim: int, order: str, n: int, op: str | None = None
) -> Packing:
    parts = [cut_by_shards(shape[dim], (Shard(("a",), order),), (n,), (i,)) for i in range(n)]
    return Packing(shape, tuple(subarray(shape, {dim: part}, CPU) for part in parts), op=op)


def _index(m: Subarray, shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    rows = zip(m.rows, shape, strict=True)
    return np.ix_(*(range(n) if r is None else np.r_[as_index(r)] for r, n in rows))


@pytest.mark.parametrize("order", ["block", "balanced", "zigzag", "cyclic"])
@pytest.mark.parametrize(
    ("shape", "dim"), [((16,), 0), ((16, 3), 0), ((3, 16), 1), ((2, 16, 3), 1), ((2, 5), 1)]
)
def test_packing_is_undone(shape: tuple[int, ...], dim: int, order: str) -> None:
    packing = _packing(shape, dim, order, 4)
    block = torch.arange(np.prod(shape)).view(shape)
    packed = packing.pack(block).flatten()
    expected = [block.numpy()[_index(m, shape)].ravel() for m in packing.messages]
    assert packed.tolist() == np.concatenate(expected).tolist()
    assert torch.equal(packing.unpack(packed.clone().view(packing.arriving)), block)
    in_other_order = block.mT.contiguous().mT if block.ndim > 1 else block
    assert torch.equal(packing.pack(in_other_order).flatten(), packed)


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("where", ["message, fill", "fill, message", "message, message"])
def test_a_block_is_put_together_of_messages_fills_and_signs(
    where: str, sign: int, first: int
) -> None:
    """Rows 0:2 and 2:4 of a block [4, 3], brought in either order; only the first has a sign."""
    fills: list[Fill] = []
    messages = []
    expected = torch.zeros(4, 3)
    for start, kind in zip((first, 2 - first), where.split(", "), strict=True):
        value = start + 1.0
        rows = subarray((4, 3), {0: (Run(start, 2),)}, CPU)
        if kind == "fill":
            fills.append(Fill(rows, torch.tensor(value)))
        else:
            factor = 1 if messages else sign
            messages.append((replace(rows, sign=factor), torch.full((2, 3), value)))
            value *= factor
        expected[start : start + 2] = value
    subarrays = tuple(rows for rows, _ in messages)
    whole = Packing((4, 3), subarrays, fills=tuple(fills))
    assert torch.equal(whole.place(torch.empty(0), [part for _, part in messages]), expected)


def test_nothing_is_copied_that_lies_in_place() -> None:
    block = torch.arange(32.0).view(16, 2)
    leading = _packing((16, 2), 0, "block", 4)
    assert leading.pack(block).data_ptr() == block.data_ptr()
    assert leading.unpack(block).data_ptr() == block.data_ptr()
    assert (
        not _packing((16, 2), 1, "block", 2).is_flat
        and not _packing((16, 2), 0, "zigzag", 4).is_flat
    )
    behind_ones = _packing((1, 1, 8, 3), 2, "block", 4)
    assert behind_ones.is_flat


def test_messages_that_overlap_are_packed_although_their_sizes_add_up() -> None:
    """Two receivers may want the same rows: column 0, then row 1."""
    messages = (subarray((2, 2), {1: (Run(0, 1),)}, CPU), subarray((2, 2), {0: (Run(1, 1),)}, CPU))
    assert Packing((2, 2), messages).pack(torch.tensor([[1, 2], [3, 4]])).tolist() == [1, 3, 3, 4]


def test_many_rows_are_listed_once() -> None:
    """More intervals than slices are worth: rows listed along one dim, and along two."""
    scattered = tuple(Run(start, 2) for start in range(0, 5 * (MAX_SLICES + 4), 5))
    shape = (scattered[-1].start + 2,) * 2
    block = torch.arange(shape[0] * shape[1]).view(shape)
    for chosen in ({0: scattered}, {1: scattered}, {0: scattered, 1: scattered}):
        m = subarray(shape, chosen, CPU)
        assert len(m.boxes) == 1 and any(isinstance(i, torch.Tensor) for _, i in m.boxes[0].block)
        at = _index(m, shape)
        cells = block[at]
        expected = torch.zeros_like(block)
        expected[at] = cells
        assert torch.equal(m.read(block), cells)
        for n in (1, 2):
            placed = Packing(shape, (m,) * n, op="sum" if n > 1 else None).place(cells, [cells] * n)
            assert torch.equal(placed, n * expected)


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_only_messages_that_meet_combine(op: str) -> None:
    shape = (6, 4)
    top, rest = (subarray(shape, {0: (run,)}, CPU) for run in (Run(0, 2), Run(2, 3)))
    messages = (top, rest, top, rest, top)
    rng = random.Random(0)
    values = [torch.tensor([[rng.randint(-5, 5)] * 4] * m.shape[0]) for m in messages]
    out = Packing(shape, messages, op=op).place(values[0], values)
    reduce = {"sum": sum, "max": max, "min": min}[op]
    for part, start, stop in ((values[::2], 0, 2), (values[1::2], 2, 5)):
        assert out[start:stop].unique().tolist() == [reduce(int(v[0, 0]) for v in part)]
    assert out[5].tolist() == [0] * 4, "a row that nobody sends is zero, not a leftover"


@pytest.mark.parametrize("op", ["sum", "max", "min"])
@in_ranks(4)
def test_both_ways_to_reduce_scatter_agree(op: str) -> None:
    x = torch.arange(24.0).view(12, 2) * (1 - 2 * (dist.get_rank() % 2)) + dist.get_rank()
    plan = xs.plan(f"n d | {op}(a) -> n/a d", xs.Mesh(a=4), (12, 2))
    ours = ProcessMesh(**vars(process_mesh(plan.mesh)) | {"_groups": {}})
    native = process_mesh(plan.mesh)
    native.group(("a",)).__dict__["backends"] = "cpu:another"  # any but gloo: the backend's own
    both = [lower(plan, processes, CPU) for processes in (ours, native)]
    kinds = [move.collective.kind for executable in both for move in executable.moves]
    assert kinds == ["all_to_all", "reduce_scatter"]
    with Meter() as meter:
        assert torch.equal(*(executable(x) for executable in both))
    assert meter.received == [72, 72]


@in_ranks(4)
def test_addends_are_added_in_one_order() -> None:
    x = torch.tensor([1e8, 1.0, -1e8, 1.0][dist.get_rank()])  # with another order, another sum
    ends = "()", "() | copy(a)"
    sums = [
        float(xt.redistribute(x, f"() | sum(a) -> {e}", xs.Mesh(a=4), profile="gloo")) for e in ends
    ]
    assert sums == [1.0, 1.0]


@in_ranks(4)
def test_a_slice_is_copied_only_where_it_is_the_result() -> None:
    mesh = xs.Mesh(x=2, y=2)
    for text, kinds, is_copied in (
        ("n/y d -> n/x/y d", ["slice", "permute"], False),
        ("n d -> n/x d", ["slice"], True),
        ("n d -> n/x d | copy(y)", ["slice", "retag"], True),
    ):
        plan = xs.plan(text, mesh, (8, 4))
        assert [step.kind for step in plan.steps] == kinds
        executable = lower(plan, process_mesh(mesh), CPU)
        block = torch.ones(plan.source.local_shape(dist.get_rank()))
        part = executable.moves[0](block)
        result = executable(block)
        memory = [t.untyped_storage().data_ptr() for t in (block, part, result)]
        assert (memory[1] != memory[0]) is is_copied and memory[2] != memory[0], text
    dist.barrier()


@in_ranks(3)
def test_the_meter_counts_what_arrives() -> None:
    """Two of three equal pieces; 3 elements on rank 0 alone; and by convention 2 * 2/3 of an all-reduce."""
    x = torch.ones(6, dtype=torch.float64)
    with Meter() as meter:
        dist.all_to_all_single(torch.empty(6, dtype=torch.float64), x)
        sizes = [0, 1, 2] if dist.get_rank() == 0 else [0, 0, 0]
        sent = [[0, 0, 0], [1, 0, 0], [2, 0, 0]][dist.get_rank()]
        dist.all_to_all_single(torch.empty(sum(sizes)), torch.ones(sum(sent)), sizes, sent)
        dist.all_reduce(x)
        dist.barrier()
    assert meter.received == [32, 0 if dist.get_rank() else 12, 64]


def _split_sizes(plans: list[xs.Plan]) -> list[list[bool]]:
    """Whether this rank gives the sizes of its messages, by plan and all-to-all."""
    lowered = (lower(plan, process_mesh(plan.mesh), CPU).moves for plan in plans)
    return [
        [
            move.collective._splits != ([], [])
            for move in moves
            if isinstance(move, PackedCollective)
        ]
        for moves in lowered
    ]


def test_all_ranks_give_the_sizes_of_their_messages_or_none() -> None:
    """Also those that have no message, or whose messages happen to have one size."""
    square = xs.Mesh(a=2, b=2)
    texts = (
        "n/a d/b -> n/b d/a",
        "n/a/b d -> n d/a/b",
        "n/zigzag(a,b) d -> n/(a,b) d",
        "n/(a,b) -> n/(a,b):halo(1,0)",
    )
    plans = [xs.plan(text, square, (8, 8)[: 1 + (" d" in text)]) for text in texts]
    by_rank = on_ranks(4, _split_sizes, plans)
    assert by_rank[0][0] == [True] and by_rank[0][1] == [False] and by_rank == [by_rank[0]] * 4
