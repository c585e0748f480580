"""Routes: rows, results and gradients against one device and against the definition in numpy, in integers."""

from __future__ import annotations

import functools
import math
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import vmap

import torch_bridge as xt
import xshard as xs
from tests import oracle_routes
from tests.torch_bridge.helpers import (
    SharedRanks,
    assert_refused,
    derivatives,
    still_connected,
)
from torch_bridge.testing.byte_counter import Meter
from xshard.routing import Groups

MESH = xs.Mesh(ep=4)
x64 = torch.float64


class Case:
    """Rows of 4 processes, their choices and weights, and a matrix per group: whole numbers, from a seed."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        rng = np.random.default_rng(seed)
        self.n_groups = draw.choice([4, 5, 8])
        self.groups: Any = draw.choice(
            [self.n_groups, [draw.randrange(4) for _ in range(self.n_groups)]]
        )
        self.k, self.capacity = draw.choice([1, 2, 3]), draw.choice([None, None, 1, 3])
        self.lengths = [draw.choice([0, 1, 5, 9]) for _ in range(4)]
        self.rows = [rng.integers(-4, 5, (n, 3)).astype(float) for n in self.lengths]
        kind = draw.choice(["any", "one", "never", "absent"])
        low, high = {
            "any": (0, self.n_groups),
            "one": (2, 3),
            "never": (1, self.n_groups),
            "absent": (-2, 4),
        }[kind]
        self.to = [rng.integers(low, high, (n, self.k)) for n in self.lengths]
        self.weights = [rng.integers(-2, 3, (n, self.k)).astype(float) for n in self.lengths]
        self.matrices = rng.integers(-2, 3, (self.n_groups, 3, 2)).astype(float)
        self.cotangents = [rng.integers(-2, 3, (n, 2)).astype(float) for n in self.lengths]
        self.parts = Groups.of(self.groups, 4)

    def kept(self) -> list[np.ndarray]:
        """The choices of which a copy is sent: `[row, choice]`, by process."""
        masks = []
        for to in self.to:
            sent = [0] * 4
            mask = np.zeros(to.shape, bool)
            for i, row in enumerate(to):
                for part in range(4):
                    here = [j for j, g in enumerate(row) if g >= 0 and self.parts.parts[g] == part]
                    fits = self.capacity is None or sent[part] < self.capacity
                    sent[part] += bool(here)
                    mask[i, here] = fits
            masks.append(mask)
        return masks

    def on_one_device(self, x: Tensor, w: Tensor, matrices: Tensor, rank: int) -> Tensor:
        """The results of a process's rows, and of nothing else: `[rows, 2]`."""
        to = torch.tensor(self.to[rank])
        kept = torch.tensor(self.kept()[rank])
        all_results = torch.einsum("tc,gcd->tgd", x, matrices)
        chosen = all_results.gather(1, to.clamp(min=0)[:, :, None].expand(-1, -1, 2))
        return (chosen * (w * kept)[:, :, None]).sum(1)

    def routed(self, x: Tensor, w: Tensor, matrices: Tensor, rank: int, **options: Any) -> Tensor:
        to = torch.tensor(self.to[rank])
        there = xt.route(x, to, "ep", MESH, groups=self.groups, capacity=self.capacity, **options)
        return there.back(self.product(there, matrices, rank), weights=w)

    def product(self, there: Any, matrices: Tensor, rank: int) -> Tensor:
        own = [g for g, part in enumerate(self.parts.parts) if part == rank]
        number = torch.arange(len(own)).repeat_interleave(there.sizes)
        used = torch.zeros(there.rows.shape[0], 3, 2, dtype=x64)
        used[: len(number)] = matrices[own][number]
        return torch.einsum("nc,ncd->nd", there.rows, used)


def check_case(seed: int) -> None:
    case = Case(seed)
    rank = dist.get_rank()
    arrived, dropped = oracle_routes.route(case.rows, case.to, case.parts, case.capacity)
    x, w, c = (torch.tensor(each[rank]) for each in (case.rows, case.weights, case.cotangents))
    there = xt.route(
        x, torch.tensor(case.to[rank]), "ep", MESH, groups=case.groups, capacity=case.capacity
    )
    assert np.array_equal(there.rows, arrived[rank].rows) and there.dropped == dropped[rank]
    assert (
        there.sizes.tolist() == arrived[rank].sizes.tolist()
        and len(there.copies) == arrived[rank].copies
    )
    home = oracle_routes.back([each.rows for each in arrived], arrived, case.lengths, case.weights)
    assert np.array_equal(there.back(there.rows, weights=w), home[rank])
    leaves = [
        [each.clone().requires_grad_() for each in (x, w, torch.tensor(case.matrices))]
        for _ in "ab"
    ]
    results = [
        f(*ls, rank) for f, ls in zip((case.routed, case.on_one_device), leaves, strict=True)
    ]
    assert torch.equal(*results)
    for y in results:
        (y * c).sum().backward()
    for name, one, many in zip(("x", "w", "matrices"), *leaves[::-1], strict=True):
        if name == "matrices":  # one device has the rows of one process, a process rows of all
            for each in (one, many):
                each.grad = torch.zeros_like(each) if each.grad is None else each.grad
                dist.all_reduce(each.grad)
        assert torch.equal(one.grad, many.grad), name


on_four = SharedRanks(4)


@on_four
def test_random_routes_are_as_on_one_device() -> None:
    for seed in range(100):
        try:
            check_case(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}, {vars(Case(seed))}")
            raise


@on_four
def test_derivatives_are_as_on_one_device() -> None:
    """Derivatives of two orders, in both modes and under vmap, as of the same on one device."""
    case = Case(14)
    rank = dist.get_rank()
    assert case.capacity == 3 and case.k > 1 and all(case.lengths)
    w = torch.tensor(case.weights[rank])
    matrices = torch.tensor(case.matrices)
    x = torch.tensor(case.rows[rank])
    factor = torch.tensor(case.cotangents[rank])
    made = [
        derivatives(lambda v, f=f: f(v, w, matrices, rank), x, factor)
        for f in (case.routed, case.on_one_device)
    ]
    assert all(map(torch.equal, *made))
    moved = functools.partial(case.routed, matrices=matrices, rank=rank)
    assert torch.equal(vmap(moved, (None, 0))(x, torch.stack([w, 2 * w]))[1], 2 * made[0][0])
    with torch.no_grad():
        assert torch.equal(torch.compile(moved, backend="eager")(x, w), made[0][0])


@on_four
def test_known_sizes_take_one_collective() -> None:
    """Known numbers: one collective; padding and further copies count for nothing."""
    rank = dist.get_rank()
    matrices = torch.arange(24.0, dtype=x64).view(8, 3, 1)
    x = (torch.arange(24.0, dtype=x64) + rank).view(8, 3).requires_grad_()
    to = (torch.arange(8) * 3 + rank) % 8
    for sizes in (2, 5, 1):
        with Meter() as meter:
            there = xt.route(x, to, "ep", MESH, groups=8, sizes=sizes)
        assert len(meter.received) == 1 and len(there.rows) == 4 * sizes
        used = matrices[2 * rank : 2 * rank + 2][
            (torch.arange(len(there.rows)) >= there.sizes[0]).long()
        ]
        values = torch.einsum("nc,ncd->nd", there.rows, used)
        padding = torch.arange(len(values))[:, None] >= there.sizes.sum()
        w = torch.ones(8, dtype=x64, requires_grad=True)
        y = there.back(values.masked_fill(padding, math.nan), weights=w)
        first = torch.stack([(to[:i] // 2 == to[i] // 2).sum() < sizes for i in range(8)])
        assert there.dropped == 8 - first.sum() and torch.equal(
            y[:, 0], (x * matrices[to, :, 0]).sum(1) * first
        )
        gradient, of_weights = torch.autograd.grad(y.sum(), (x, w))
        assert torch.equal(of_weights, y[:, 0])
        assert torch.equal(gradient, matrices[to, :, 0] * first[:, None])


@on_four
def test_results_of_padding_count_for_nothing_whatever_the_shape_of_rows() -> None:
    """Several choices a row: what lies beside a copy's own results in the padding is not added."""
    to = torch.tensor([[0, 3], [4, 5], [7, 2]])
    w = torch.arange(1.0, 7.0).view(3, 2)
    for shape in ((), (2,), (2, 3)):
        x = torch.arange(3.0 * math.prod(shape)).view(3, *shape)
        there = xt.route(x, to, "ep", MESH, groups=8, sizes=4)
        values = there.rows.clone()
        values[there.sizes.sum() :] = math.nan
        expected = x * w.sum(1).view(3, *[1] * len(shape))
        assert torch.equal(there.back(values, weights=w), expected), shape


@on_four
def test_each_process_is_sent_one_copy_of_a_row() -> None:
    """What other processes send: one copy of a row to each process that it needs, forward and backward."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(dist.get_rank())
    to = torch.rand(40, 8, generator=generator).topk(4).indices
    x = torch.ones(40, 16, dtype=torch.float32, requires_grad=True)
    pairs = [torch.zeros(40, 4).scatter(1, t // 2, 1.0).bool() for t in _gathered(to)]
    came = sum(int(p[:, rank].sum()) for i, p in enumerate(pairs) if i != rank)
    left = int(pairs[rank].sum() - pairs[rank][:, rank].sum())
    with Meter() as forward:
        there = xt.route(x, to, "ep", MESH, groups=8)
        y = there.back(2 * there.rows)
    with Meter() as backward:
        y.sum().backward()
    assert (
        forward.received[1:] == [came * (16 * 4 + 4 * 4), left * 64]
        and forward.received[0] == 3 * 40
    )
    assert backward.received == [came * 64, left * 64]


def _gathered(x: Tensor) -> list[Tensor]:
    every = [torch.empty_like(x) for _ in range(4)]
    dist.all_gather(every, x)
    return every


@on_four
def test_a_route_follows_any_axes_of_the_mesh() -> None:
    """A part of a mesh, and two axes taken as one."""
    mesh = xs.Mesh(dp=2, ep=2)
    rank = dist.get_rank()
    x = torch.full((2, 1), float(rank))
    to = torch.tensor([1, 1])
    there = xt.route(x, to, "ep", mesh)
    assert there.rows.flatten().tolist() == ([] if rank % 2 == 0 else [rank - 1.0] * 2 + [rank] * 2)
    there = xt.route(x, 2 * to, ("dp", "ep"), mesh)
    assert (
        there.sizes.tolist() == [8 * (rank == 2)] and there.back(there.rows).tolist() == x.tolist()
    )


@on_four
def test_gradients_travel_from_where_no_rows_came() -> None:
    """Gradients travel also from where no rows came, and the result there depends on nothing."""
    x = torch.ones(2, 3, requires_grad=True)
    there = xt.route(x, torch.zeros(2, dtype=torch.long), "ep", MESH)
    y = there.back(2 * there.rows if dist.get_rank() == 0 else torch.zeros(0, 3))
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), 2.0))


@on_four
def test_what_is_refused() -> None:
    x = torch.ones(3, 2)
    to = torch.zeros(3, dtype=torch.long)
    rank = dist.get_rank()

    def route(x: Tensor = x, to: Tensor = to, **options: Any) -> Any:
        return xt.route(x, to, "ep", MESH, **options)

    assert_refused(
        (lambda: route(to=to + 4 * (rank == 2)), "ShapeError: rank 2 has a row for group 4...0 to 3"),
        (lambda: route(x[:, : 1 + rank // 3]), "ShapeError: rows of processes differ in their bytes"),
        (lambda: route(to=to[:2]), "ShapeError: to has shape (2,) for rows of shape (3, 2)"),
        (lambda: route(to=to.double()), "ShapeError: to has shape (3,), of numbers that are not whole"),
        (lambda: route(capacity=0), "ShapeError: capacity=0"),
        (lambda: route(groups=[0, 4]), "ShapeError: groups=[0, 4] along 4 parts"),
        (lambda: route().back(x[:1]), "ShapeError: results of shape (1, 2)"),
        (lambda: route().back(x.sum()), "ShapeError: results of shape ()"),
        (lambda: route(debug=True, groups=4 + rank // 3), "DesyncError: the ranks disagree...: options"),
        (lambda: route(to=to.to("meta")), "PlanError: to says where rows go by its values"),
        (lambda: vmap(lambda t: route(to=t).rows)(torch.stack([to, to])), "PlanError: to says where rows go"),
        (lambda: xt.route(x, to, "tp", MESH), "NotationError: unknown mesh axis 'tp'"),
        (lambda: xt.redistribute(x, "t/ep c -> t/to(ep) c", MESH), "NotationError: values say"),
        is_alike=False,
    )  # fmt: skip
    assert still_connected()
