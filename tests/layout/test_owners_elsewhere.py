"""What tests of nvalchemi-toolkit and anemoi-core require, in this notation; no code is theirs.

nvalchemi-toolkit 0.2.0, test/distributed/_core: `test_halo_primitives_roundtrip`, `test_halo_autograd`,
`test_gather_primitives`, `test_particle_halo`, `test_per_system`, `test_distributed_all_reduce`,
`test_reshard`, `test_neighbor_p2p`, `test_graph_parallel`, `test_placement` and `test_topology`. Not here are
their geometry of boxes, since `xs.Needs` is given who reads what, and wrappers of functions.

anemoi-core: `test_communication_primitives.py`; its sums in wider dtypes are in
torch_bridge/test_comm_dtype.py, its memory formats in torch_bridge/redistribution/test_memory_format.py.

The last three tests are faults that these systems had: a field lost on its way to another process
(nvalchemi-toolkit 160), a particle outside its owner's box (148), and what is sent derived from what is
received (anemoi's halo.py).
"""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import xshard as xs
from tests import oracle
from xshard.errors import NotationError, ShapeError

HERE = "n/by(gp,cells) d"
WIDE = "n/by(gp,cells):reads(near) d"
GRIDS = {1: (1, 1, 1), 2: (1, 1, 2), 3: (1, 1, 3), 4: (1, 2, 2), 8: (2, 2, 2)}
Blocks = list[np.ndarray]


def lattice(
    side: int, parts: int, reach: float, periodic: bool
) -> tuple[xs.Owners, np.ndarray, np.ndarray, np.ndarray]:
    """Points of a cube in boxes of equal size, and directed pairs that are at most `reach` spacings apart."""
    points = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), -1).reshape(-1, 3)
    owner = np.ravel_multi_index(tuple((points * GRIDS[parts] // side).T), GRIDS[parts])
    between = np.abs(points[:, None] - points)
    between = np.minimum(between, side - between) if periodic else between
    near = (between**2).sum(-1) <= reach**2
    return xs.Owners(owner, parts), near, *np.nonzero(near)


def plan_of(text: str, rows: int, maps: Mapping[str, Any], dtype: str = "int64") -> xs.Plan:
    return xs.plan(text, xs.Mesh(gp=len(maps["cells"].sizes)), (rows, 3), dtype, maps=maps)


def scattered(plan: xs.Plan, x: np.ndarray) -> Blocks:
    return xs.reference.scatter(x, plan.src, plan.mesh)


def whole(side: int) -> np.ndarray:
    return np.arange(side * 3).reshape(side, 3) + 1


# A cube's side, parts, the reach of a point in spacings, and whether the box is periodic.
CUBES = [
    *((4, 2, 2.5 / 1.5, periodic) for periodic in (False, True)),
    *((6, 2, 2.5 / 1.5, periodic) for periodic in (False, True)),
    (8, 4, 2.5 / 1.5, False),
    *((6, parts, 5.0 / 3.4, True) for parts in (2, 4, 8)),
    (6, 3, 5.0 / 3.4, False),
]


@pytest.mark.parametrize(("side", "parts", "reach", "periodic"), CUBES)
def test_halos_of_particles(side: int, parts: int, reach: float, periodic: bool) -> None:
    """Owned rows stay, others are their owners' values; the way back adds them; adjoint in integers."""
    cells, near, senders, receivers = lattice(side, parts, reach, periodic)
    needs, edges = xs.Needs.of_edges(cells, senders, receivers)
    x = whole(side**3)
    maps = {"cells": cells, "near": needs}
    there = plan_of(f"{HERE} -> {WIDE}", side**3, maps)
    blocks = xs.reference.run(there, scattered(there, x))
    readers = np.zeros(side**3, np.int64)
    for part, block in enumerate(blocks):
        own = cells.part(part)
        lacking = np.setdiff1d(np.flatnonzero(near[own].any(0)), own)
        assert np.array_equal(needs.part(part), lacking) and len(lacking)
        assert np.array_equal(block, x[[*own, *lacking]])
        number, sender, receiver = edges[part]
        assert np.array_equal(block[sender], x[senders[number]]) and receiver.max() < len(own)
        readers[lacking] += 1
    assert sum(cells.sizes) == side**3 == len(np.unique(cells.rows))
    zeroed = [
        np.where(np.arange(len(b))[:, None] < n, b, 0)
        for b, n in zip(blocks, cells.sizes, strict=True)
    ]
    for found, given in zip(
        xs.reference.run(there.backward, zeroed), scattered(there, x), strict=True
    ):
        assert np.array_equal(found, given)
    ones = xs.reference.run(there, scattered(there, np.ones_like(x)))
    for part, found in enumerate(xs.reference.run(there.backward, ones)):
        assert np.array_equal(found, np.repeat(1 + readers[cells.part(part), None], 3, axis=1))
    trimmed = plan_of(f"{WIDE} -> {HERE}", side**3, maps)
    assert trimmed.bytes_received == 0 and there.bytes_received == max(needs.sizes) * 24
    for found, given in zip(xs.reference.run(trimmed, blocks), scattered(there, x), strict=True):
        assert np.array_equal(found, given)
    for plan in (
        there,
        trimmed,
        plan_of("n/by(gp,cells):fold(reads(near)) d -> " + HERE, side**3, maps),
    ):
        oracle.assert_right(plan, np.random.default_rng(side))


OWNERS = {
    "one-part": [0] * 5,
    "two-parts": np.arange(6) // 3,
    "four-parts": np.arange(12) // 3,
    "round-robin": np.arange(9) % 3,
    "blocks": [0, 0, 0, 1, 1, 2, 2, 2],
    "part-without-rows": [0, 2, 0, 0, 2],
    "mixed": [0, 1, 0, 1, 0, 2, 2],
}


@pytest.mark.parametrize("owner", OWNERS.values(), ids=OWNERS)
def test_rows_by_global_number(owner: np.ndarray) -> None:
    """Every part asks for rows at random, also twice, and adds into others: gathers, scatters, gradients."""
    rng = np.random.default_rng(1)
    cells = xs.Owners(owner)
    rows = len(owner)
    parts = len(cells.sizes)
    for part in range(parts):  # rows of a part are in the order of the array
        assert np.array_equal(cells.part(part), np.flatnonzero(np.equal(owner, part)))
    asked = [rng.integers(0, rows, 6) for _ in range(parts)]
    needs = xs.Needs.of_rows([np.setdiff1d(a, cells.part(i)) for i, a in enumerate(asked)])
    held = [np.array([*cells.part(i), *needs.part(i)]) for i in range(parts)]
    local = [
        np.argsort(h)[np.searchsorted(np.sort(h), a)] for h, a in zip(held, asked, strict=True)
    ]
    maps = {"cells": cells, "near": needs}
    x = whole(rows)
    gather, scatter = (
        plan_of(text, rows, maps)
        for text in (f"{HERE} -> {WIDE}", f"n/by(gp,cells):fold(reads(near)) d -> {HERE}")
    )
    blocks = xs.reference.run(gather, scattered(gather, x))
    weights = [rng.integers(-9, 9, (6, 3)) for _ in range(parts)]
    expected = np.zeros_like(x)
    addends = [np.zeros_like(block) for block in blocks]
    for block, index, numbers, weight, addend in zip(
        blocks, local, asked, weights, addends, strict=True
    ):
        assert np.array_equal(block[index], x[numbers])
        np.add.at(expected, numbers, weight)
        np.add.at(addend, index, weight)
    # The gradient of all parts' own losses is the scatter of their weights.
    for plan in (gather.backward, scatter):
        found = xs.reference.run(plan, addends)
        assert all(np.array_equal(b, expected[cells.part(i)]) for i, b in enumerate(found))
        oracle.assert_right(plan, rng)


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_sums_over_parts(parts: int) -> None:
    """Sums of owned rows by system, the same everywhere; weights of a part's own loss; two sums in a row."""
    rng = np.random.default_rng(parts)
    mesh = xs.Mesh(gp=parts)
    systems = 3
    total = xs.plan("s d | sum(gp) -> s d | copy(gp)", mesh, (systems, 4), "int64")
    values = [rng.integers(-9, 9, (5 + part, 4)) for part in range(parts)]
    number = [rng.integers(0, systems, len(v)) for v in values]
    shares = [
        np.array([v[n == s].sum(0) for s in range(systems)])
        for v, n in zip(values, number, strict=True)
    ]
    before = pickle.loads(pickle.dumps(shares))
    found = xs.reference.run(total, shares)
    expected = sum(shares)
    assert all(np.array_equal(block, expected) for block in found)
    assert all(map(np.array_equal, shares, before)) and not any(
        map(np.shares_memory, shares, found)
    )
    differing = [np.full((systems, 4), rank) for rank in range(parts)]
    for pulled in xs.reference.run(total.backward, differing):
        assert np.array_equal(pulled, np.full((systems, 4), sum(range(parts))))
    twice = [
        2 * block for block in xs.reference.run(total.backward, [np.ones_like(expected)] * parts)
    ]
    assert all((block == 2 * parts**2).all() for block in xs.reference.run(total.backward, twice))
    oracle.assert_right(total, rng)


def moves() -> list[tuple[xs.Owners, np.ndarray, tuple[int, ...], str]]:
    """Owners, the parts where rows go, the shape, and the dtype."""
    home = np.arange(40) // 10
    ring = np.where(np.arange(40) % 10 < 7, home, (home + 1) % 4)
    uneven = np.repeat(np.arange(4), [20, 5, 5, 5])
    dealt = np.concatenate([np.arange(n) % 4 for n in (20, 5, 5, 5)])
    alone = [
        ((10, 3), "float32"),
        ((5,), "float32"),
        ((5,), "int64"),
        ((0, 3), "float32"),
        ((1, 3), "float64"),
    ]
    return [
        (xs.Owners(home), ring, (40, 3), "float32"),
        (xs.Owners(uneven), dealt, (35, 3), "float64"),
        (xs.Owners([], parts=4), np.array([], int), (0, 2), "float32"),
        *((xs.Owners(zeros, 1), zeros, s, t) for s, t in alone for zeros in [np.zeros(s[0], int)]),
    ]


@pytest.mark.parametrize(("before", "to", "shape", "dtype"), moves())
def test_rows_go_where_they_are_sent(
    before: xs.Owners, to: np.ndarray, shape: tuple[int, ...], dtype: str
) -> None:
    maps = {"cells": before, "after": before.moved(np.arange(shape[0]), to)}
    text = "n/by(gp,cells) ... -> n/by(gp,after) ..."
    plan = xs.plan(text, xs.Mesh(gp=len(before.sizes)), shape, dtype, maps=maps)
    x = np.random.default_rng(0).normal(size=shape).astype(dtype)
    for part, found in enumerate(xs.reference.run(plan, scattered(plan, x))):
        rows = maps["after"].part(part)
        assert (
            found.dtype == x.dtype and np.array_equal(found, x[rows]) and (to[rows] == part).all()
        )


@pytest.mark.parametrize("one_way", [False, True])
def test_only_neighbours_of_a_chain_send(one_way: bool) -> None:
    """In both directions, or from part 1 to part 2 alone."""
    cells = xs.Owners(np.repeat(np.arange(4), 9))
    reads: list[list[int]] = [[], [], [9, 10, 11], []]
    if not one_way:
        reads = [
            [9, 10, 11],
            [0, 1, 2, *range(18, 24)],
            [*range(9, 15), *range(27, 36)],
            [*range(18, 27)],
        ]
    plan = plan_of(f"{HERE} -> {WIDE}", 36, {"cells": cells, "near": xs.Needs.of_rows(reads)})
    x = whole(36)
    for part, found in enumerate(xs.reference.run(plan, scattered(plan, x))):
        assert np.array_equal(found, x[[*cells.part(part), *reads[part]]])
    assert plan.bytes_received == max(map(len, reads)) * 24
    oracle.assert_right(plan, np.random.default_rng(0))


# Lengths of two and three dims, even and not; the dims that are split, and from where a transpose comes.
SHARDED = [
    *(
        ("i j", text, shape)
        for text, shape in (("i/balanced(gp) j", (8, 8)), ("i/balanced(gp) j", (9, 8)))
    ),
    *(("i j", "i j/balanced(gp)", (8, length)) for length in (8, 9)),
    *(("i j k", f"i {cut}", (2, 9, 9)) for cut in ("j/balanced(gp) k", "j k/balanced(gp)")),
    *(
        ("i/balanced(gp) j", "i j/balanced(gp)", shape)
        for shape in itertools.product((8, 9), (8, 9))
    ),
    *(("i j k/balanced(gp)", "i j/balanced(gp) k", (2, 9, length)) for length in (8, 9)),
]


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize(("src", "dst", "shape"), SHARDED)
def test_every_move_is_as_elsewhere(src: str, dst: str, shape: tuple[int, ...], parts: int) -> None:
    x = np.arange(np.prod(shape)).reshape(shape)
    mesh = xs.Mesh(gp=parts)
    for ends in ((src, dst), (dst, src)):
        plan = xs.plan(ends, mesh, shape, "int64")
        cut = (
            next(d for d, name in enumerate(ends[1].split()) if "gp" in name)
            if "gp" in ends[1]
            else None
        )
        expected = [x] * parts if cut is None else np.array_split(x, parts, cut)
        assert all(map(np.array_equal, xs.reference.run(plan, scattered(plan, x)), expected))
        oracle.assert_right(plan, np.random.default_rng(parts))
    if "gp" not in src:  # slots in arrays of zeros; their sum is the whole
        plan = xs.plan(f"{dst} -> {src} | sum(gp)", mesh, shape, "int64")
        blocks = scattered(plan, x)
        found = xs.reference.run(plan, blocks)
        assert all(
            np.count_nonzero(f) == np.count_nonzero(b) for f, b in zip(found, blocks, strict=True)
        )
        assert np.array_equal(sum(found), x)


def test_lists_in_the_order_of_ranks() -> None:
    plan = xs.plan("src/gp dst i -> src dst/gp i", xs.Mesh(gp=4), (4, 4, 3), "int64")
    x = np.broadcast_to((np.arange(4)[:, None] * 10 + np.arange(4))[..., None], (4, 4, 3))
    for rank, found in enumerate(xs.reference.run(plan, scattered(plan, x))):
        assert found[:, 0, 0].tolist() == [src * 10 + rank for src in range(4)]


def test_what_others_refuse() -> None:
    mesh = xs.Mesh(gp=4)
    for text in ("i j k/gp -> i j k", "i j k -> i j k/gp", "i j k/gp -> i j k | sum(gp)"):
        with pytest.raises(ShapeError, match="3 dims"):
            xs.plan(text, mesh, (16, 16))
    with pytest.raises(ShapeError, match="5, 16"):
        xs.reference.gather([np.zeros((5, 16))] * 4, "i/gp j", mesh, (16, 16))
    with pytest.raises(NotationError, match="gp"):
        xs.plan("i j/gp -> i/gp j/gp", mesh, (16, 16))


def test_nothing_is_lost_in_a_file() -> None:
    """A plan that went through text sends the same, and its gradients have the same sums."""
    cells, _, senders, receivers = lattice(4, 4, 1, True)
    maps = {"cells": cells, "near": xs.Needs.of_edges(cells, senders, receivers)[0]}
    plan = plan_of(f"{HERE} -> {WIDE}", 64, maps)
    x = whole(64)
    blocks = scattered(plan, x)
    for copy in (xs.Plan.from_json(plan.to_json()), pickle.loads(pickle.dumps(plan))):
        assert copy == plan and copy.backward == plan.backward and hash(copy) == hash(plan)
        wide = xs.reference.run(copy, blocks)
        assert all(map(np.array_equal, wide, xs.reference.run(plan, blocks)))
        assert sum(b.sum() for b in xs.reference.run(copy.backward, wide)) == sum(
            b.sum() for b in wide
        )


def test_owners_that_lag_behind_places() -> None:
    """Points move 50 times, and owners follow seldom: each part has both ends of all edges into its rows."""
    rng = np.random.default_rng(0)
    draw = random.Random(0)
    place = rng.uniform(0, 10, 40)
    refused = 0
    cells = xs.Owners((place >= 5).astype(int), 2)
    for _ in range(50):
        place = (place + rng.normal(0, 0.3, 40)) % 10
        senders, receivers = np.nonzero(np.abs(place[:, None] - place) < 1)
        needs, edges = xs.Needs.of_edges(cells, senders, receivers)
        x = whole(40)
        maps = {"cells": cells, "near": needs}
        plan = plan_of(f"{HERE} -> {WIDE}", 40, maps)
        found = xs.reference.run(plan, scattered(plan, x))
        for block, (number, sender, receiver) in zip(found, edges, strict=True):
            assert np.array_equal(block[sender], x[senders[number]])
            assert np.array_equal(block[receiver], x[receivers[number]])
        assert sorted(np.concatenate([each.number for each in edges])) == [*range(len(senders))]
        late = np.flatnonzero(cells.owner != (place >= 5))
        if len(late) and draw.random() < 0.3:
            after = cells.moved(late, (place >= 5).astype(int)[late])
            if any(np.isin(needs.part(part), after.part(part)).any() for part in (0, 1)):
                refused += 1
                with pytest.raises(
                    ShapeError, match="which it owns"
                ):  # a need of the owners before
                    plan_of(f"{HERE} -> {WIDE}", 40, {"cells": after, "near": needs})
            cells = after
    assert refused > 3


@pytest.mark.parametrize("parts", [2, 4])
def test_graphs_that_are_not_symmetric(parts: int) -> None:
    """Rows are sent because an edge leaves them; a symmetric graph would let its receivers be sent."""
    rng = np.random.default_rng(parts)
    rows = 24
    cells = xs.Owners(np.arange(rows) * parts // rows)
    senders, receivers = rng.integers(0, rows, (2, 30))
    needs, edges = xs.Needs.of_edges(cells, senders, receivers)
    plan = plan_of(f"{HERE} -> {WIDE}", rows, {"cells": cells, "near": needs})
    x = whole(rows)
    crossing = cells.owner[senders] != cells.owner[receivers]
    backwards = [
        np.unique(receivers[crossing & (cells.owner[senders] == part)]) for part in range(parts)
    ]
    assert [b.tolist() for b in backwards] != [needs.part(part).tolist() for part in range(parts)]
    found = xs.reference.run(plan, scattered(plan, x))
    for part, (block, (number, sender, _)) in enumerate(zip(found, edges, strict=True)):
        assert np.array_equal(number, np.flatnonzero(cells.owner[receivers] == part))
        assert np.array_equal(block[sender], x[senders[number]])
    oracle.assert_right(plan, rng)
