"""Owner maps and needs: values, their names in the notation, and every verb that takes `maps`."""

from __future__ import annotations

import gc
import pickle
import random
import re
import time
from pathlib import Path

import numpy as np
import pytest

import xshard as xs
from tests import oracle
from tests.fuzz import owner_steps
from tests.fuzz.chains import random_needs, random_owners
from tests.fuzz.run import fuzz
from xshard.errors import NotationError, ShapeError
from xshard.layout import runs
from xshard.notation import maps
from xshard.notation.parser import Dim

MESH = xs.Mesh(gp=2)
MAPS = {"cells": xs.Owners([1, 0, 1, 1]), "near": xs.Needs.of_rows([[3], []])}
WIDE = "n/by(gp,cells):reads(near) d"


def test_a_map_is_a_value():
    owners = xs.Owners([1, 0, 1, 1])
    other = xs.Owners.of_rows([[1], [0, 2, 3]])
    assert owners == other and hash(owners) == hash(other) and owners.digest == other.digest
    assert owners != xs.Owners.of_rows([[1], [3, 2, 0]]) != xs.Needs.of_rows([[1], [3, 2, 0]])
    assert xs.Owners([0, 0], parts=3).sizes == (2, 0, 0) != xs.Owners([0, 0]).sizes
    assert pickle.loads(pickle.dumps(owners)) == owners
    with pytest.raises(ValueError, match="read-only"):
        owners.rows[0] = 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: xs.Owners([0, -1]), "row 1 has part -1"),
        (lambda: xs.Owners([0, 3], parts=3), "a row has part 3, there are 3 parts"),
        (lambda: xs.Owners([0.5]), "is not a list of rows"),
        (lambda: xs.Owners.of_rows([[0, 1], [1]]), "3 rows in all parts, and row 1 is 2"),
        (lambda: xs.Owners.of_rows([[0], [2]]), "2 rows in all parts, and row 2 is out of range"),
        (lambda: xs.Needs.of_rows([[1], [2, 3, 2]]), "part 1 reads row 2 twice"),
        (lambda: xs.Needs.of_rows([[-1]]), "row -1 in a need"),
        (lambda: MAPS["cells"].moved([4], 0), "no row 4"),
        (lambda: MAPS["cells"].moved([3], 2), "no part 2"),
        (lambda: MAPS["cells"].moved([3, 3], 0), "a row moves twice"),
    ],
)
def test_maps_that_make_no_sense(wrong, message):
    with pytest.raises(ShapeError, match=re.escape(message)):
        wrong()


@pytest.mark.parametrize(
    ("text", "length", "message"),
    [
        ("n/by(gp,cells)", 5, "adds up to 4 rows, not 5"),
        ("n/by(dp,gp,cells)", 4, "has 2 parts, the mesh has 4"),
        ("n/dp/by(gp,cells)", 4, "adds up to 4 rows, not 2"),
        ("n/gp:reads(own)", 4, "part 0 reads row 1, which it owns"),
        ("n/gp:reads(near)", 3, "reads row 3 of 3"),
        ("n:reads(near)", 4, "is for 2 parts, not 1"),
        ("n/by(one,turned)", 2, "has one part, which must hold its rows in order"),
    ],
)
def test_maps_that_do_not_fit(text, length, message):
    maps = MAPS | {"turned": xs.Owners.of_rows([[1, 0]]), "own": xs.Needs.of_rows([[1], []])}
    layout = xs.Layout.parse(text, maps)
    with pytest.raises(ShapeError, match=re.escape(message)):
        xs.Sharding(layout, xs.Mesh(dp=2, gp=2, one=1), (length,))


def test_texts_with_digests_need_no_maps_while_the_map_lives():
    layout = xs.Layout.parse(WIDE, MAPS)
    assert re.fullmatch(r"n/by\(gp,cells@\w{16}\):reads\(near@\w{16}\) d", str(layout))
    assert xs.Layout.parse(str(layout)) == layout == pickle.loads(pickle.dumps(layout))
    assert layout == xs.Layout(
        f"n/by(gp,{layout.dims[0].shards[0].numbers[0]}):{layout.dims[0].overlap} d"
    )
    assert str(layout.dual) == f"{str(layout).replace(':', ':fold(').replace(' d', ') d')}"
    assert layout.dual.dual == layout == layout.tangent
    digest = xs.Owners([*b"rows of no other test, whose maps may live on in caches"]).digest
    with pytest.raises(
        NotationError, match=f"the map 'gone@{digest}' is not in this process in\n    'n/by"
    ):
        xs.Layout.parse(f"n/by(gp,gone@{digest})")


def test_every_verb_takes_maps():
    x = np.arange(8).reshape(4, 2)
    plan = xs.plan(f"n/by(gp,cells) d -> {WIDE}", MESH, x.shape, "int64", maps=MAPS)
    assert plan == xs.plan(("n/by(gp,cells) d", WIDE), MESH, x.shape, "int64", maps=MAPS)
    blocks = xs.reference.run(plan, xs.reference.scatter(x, "n/by(gp,cells) d", MESH, maps=MAPS))
    assert [b.tolist() for b in blocks] == [x[[1, 3]].tolist(), x[[0, 2, 3]].tolist()]
    assert np.array_equal(xs.reference.gather(blocks, WIDE, MESH, x.shape, maps=MAPS), x)
    pulled = xs.reference.run(plan.backward, [np.ones((2, 2), int), np.ones((3, 2), int)])
    assert [b[:, 0].tolist() for b in pulled] == [[1], [1, 1, 2]]
    assert (
        plan.bytes_received == plan.bytes_lower_bound == 16 and plan.backward.bytes_received == 16
    )
    rules = xs.Rules({"x": WIDE}, MAPS)
    assert xs.Layout.parse(rules.find("x")) == plan.dst
    product = xs.plan(
        "n/by(gp,cells) d, d f -> n/by(gp,cells) f", MESH, sizes={"n": 4, "d": 2, "f": 3}, maps=MAPS
    )
    assert product.bytes_received == 0
    for text, cls in ((plan.to_json(), xs.Plan), (product.to_json(), xs.ContractionPlan)):
        assert cls.from_json(text).to_json() == text and '"maps"' in text
        with pytest.raises(xs.errors.PlanError, match="differs from its digest"):
            cls.from_json(text.replace('"starts": [\n', '"starts": [\n0,\n', 1))


def test_a_plan_as_text_brings_its_maps_along():
    text = xs.plan("n/by(gp,m) -> n", MESH, (5,), maps={"m": xs.Owners([0, 1, 1, 0, 1])}).to_json()
    gc.collect()
    plan = xs.Plan.from_json(text)
    assert plan.source.owned(0, 0) == ((0, 1, 1, 0), (3, 1, 1, 0)) and plan.to_json() == text


def test_moved_rows_follow_those_that_stay():
    """A thousand random steps against lists: rows that stay keep their order, the others follow."""
    rng = random.Random(0)
    owners = random_owners(rng, 30, 4)
    lists = [owners.part(i).tolist() for i in range(4)]
    for _ in range(1000):
        rows = rng.sample(range(30), rng.randint(0, 6))
        to = [rng.randrange(4) for _ in rows]
        for row, part in zip(rows, to, strict=True):
            if row not in lists[part]:
                next(each for each in lists if row in each).remove(row)
                lists[part].append(row)
        owners = owners.moved(rows, to)
        assert [owners.part(i).tolist() for i in range(4)] == lists
        assert xs.Owners(owners.owner, 4).sizes == owners.sizes


def test_rows_that_move_are_neither_lost_nor_doubled(tmp_path: Path) -> None:
    """Migrated, born, dead, on more or fewer devices, saved and loaded; `tests.fuzz owner-steps` goes on."""
    taken = owner_steps.run(200, 1, tmp_path)
    assert set(taken) == set(owner_steps.ACTS) and not [*tmp_path.iterdir()]


def test_caches_let_go_of_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty moves of a thousand rows: caches keep ten maps at most, and texts of dead ones are refused."""
    rng = np.random.default_rng(0)
    mesh = xs.Mesh(gp=8)
    n = 1000
    monkeypatch.setattr(maps, "MAX_NEW_ROWS", 10 * n)
    before = xs.Owners(rng.integers(0, 8, n))
    gc.collect()
    alive = len(maps._KNOWN)
    for _ in range(50):
        after = before.moved(rng.choice(n, n // 10, replace=False), rng.integers(0, 8, n // 10))
        both = {"before": before, "after": after}
        plan = xs.plan("n/by(gp,before) -> n/by(gp,after)", mesh, (n,), "int8", maps=both)
        lacks = np.bincount(after.owner[after.owner != before.owner])
        assert plan.bytes_received == plan.bytes_lower_bound == max(lacks)
        before = after
        text = str(plan.dst)
    del plan, both
    gc.collect()
    assert len(maps._KNOWN) <= alive + 12
    digest = after.digest
    assert xs.Layout.parse(text) == xs.Layout.parse("n/by(gp,after)", {"after": after})
    del before, after, lacks
    maps.empty_caches()
    gc.collect()
    with pytest.raises(NotationError, match=f"the map 'after@{digest}' is not in this process"):
        xs.Layout.parse(text)


def test_the_bytes_of_a_need_are_the_rows_that_parts_lack():
    """And of a migration, those whose owner changes; both ways, and never more."""
    rng = random.Random(1)
    for _ in range(60):
        rows = rng.randint(1, 24)
        mesh = xs.Mesh(gp=rng.choice((2, 3, 4)))
        before, after = (random_owners(rng, rows, mesh.n_devices) for _ in range(2))
        dim = Dim("n", xs.Layout.parse("n/by(gp,m)", {"m": before}).dims[0].shards)
        maps = {"a": before, "b": after, "near": random_needs(rng, dim, rows, mesh)}
        read = xs.plan("n/by(gp,a) -> n/by(gp,a):reads(near)", mesh, (rows,), "int8", maps=maps)
        moved = xs.plan("n/by(gp,a) -> n/by(gp,b)", mesh, (rows,), "int8", maps=maps)
        lacks = [
            {*after.part(i).tolist()} - {*before.part(i).tolist()} for i in range(mesh.n_devices)
        ]
        assert read.bytes_received == read.bytes_lower_bound == max(maps["near"].sizes)
        assert moved.bytes_received == moved.bytes_lower_bound == max(map(len, lacks))
        for plan in (read, moved):
            oracle.assert_right(plan, np.random.default_rng(rows))


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_edges_of_parts_against_sets(hops: int) -> None:
    """Directed edges, also to the same row and twice: every part has what its layers need, and no more."""
    rng = random.Random(hops)
    for _ in range(100):
        rows = rng.randint(1, 20)
        parts = rng.randint(1, 4)
        n = rng.randint(0, 40)
        owners = random_owners(rng, rows, parts)
        ends = [(rng.randrange(rows), rng.randrange(rows)) for _ in range(n)]
        needs, edges = xs.Needs.of_edges(owners, [a for a, _ in ends], [b for _, b in ends], hops)
        for part, (number, sender, receiver) in enumerate(edges):
            held = owners.part(part).tolist()
            expected = set()
            for _ in range(hops):
                inside = {*held}
                expected |= (into := {i for i, (_, b) in enumerate(ends) if b in inside})
                held += sorted({ends[i][0] for i in into} - inside)
            local = [*owners.part(part).tolist(), *needs.part(part).tolist()]
            assert local == held and number.tolist() == sorted(expected)
            assert [(local[a], local[b]) for a, b in zip(sender, receiver, strict=True)] == [
                ends[i] for i in number
            ]
        if hops == 1:
            assert len(xs.Owners.of_rows([each.number for each in edges]).rows) == n


def test_edges_that_make_no_sense() -> None:
    for ends, message in ((([4], [0]), "rows 4 to 4"), (([0], []), "1 senders, 0 receivers")):
        with pytest.raises(ShapeError, match=message):
            xs.Needs.of_edges(MAPS["cells"], *ends)


@pytest.mark.parametrize("runtime", ["numpy", "numpy-between", "numpy-trees"])
def test_rows_as_arrays_are_rows_as_runs(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random cases, in which nearly every list of rows is an array, as it is where rows are many."""
    monkeypatch.setattr(runs, "MAX_RUNS", 1)
    *_, report = fuzz(runtime, 3, 60)
    assert not report.failures, "\n".join(f"{seed}: {why}" for seed, why in report.failures.items())


@pytest.mark.parametrize("random_edges", [False, True])
def test_a_graph_is_planned_in_seconds(random_edges: bool) -> None:
    """A tenth of a million rows of a grid, numbered at random, in 16 squares; 10^6 in 64 take 0.5 s.

    And as many edges between any rows: 10^7 of 10^6 rows take 1.6 s.
    """
    began = time.process_time()
    side = 316
    rng = np.random.default_rng(0)
    x, y = np.divmod(np.arange(side**2), side)
    number = rng.permutation(side**2)
    owner = np.empty(side**2, np.int64)
    owner[number] = x * 4 // side * 4 + y * 4 // side
    ends = [
        (number[(x + a) % side * side + (y + b) % side], number)
        for a, b in ((0, 1), (1, 0), (0, -1), (-1, 0))
    ]
    owners = xs.Owners(owner)
    graph = list(map(np.concatenate, zip(*ends, strict=True)))
    if random_edges:
        graph = [rng.permutation(rows) for rows in graph]
    needs, _ = xs.Needs.of_edges(owners, *graph)
    maps = {"cells": owners, "near": needs}
    mesh = xs.Mesh(gp=16)
    plan = xs.plan(
        "n/by(gp,cells) d -> n/by(gp,cells):reads(near) d", mesh, (side**2, 8), maps=maps
    )
    assert plan.bytes_received == plan.bytes_lower_bound == max(needs.sizes) * 32
    returned = np.bincount(
        owners.owner[needs.rows]
    )  # each part gets a contribution of each reader of a row
    assert plan.backward.bytes_received == max(returned) * 32 >= plan.backward.bytes_lower_bound
    assert time.process_time() - began < 3


def test_whole_arrays_go_to_the_least_loaded_device() -> None:
    """The load is that of the rule by its definition, and each array is whole on one device."""
    rng = random.Random(0)
    mesh = xs.Mesh(dp=2, fsdp=4)
    shapes = {
        f"w{i}": tuple(rng.randint(1, 40) for _ in range(rng.randint(1, 4))) for i in range(60)
    }
    rules = xs.owned(shapes, mesh, "fsdp")
    loads = [0] * 4
    for size in sorted((np.prod(shape) for shape in shapes.values()), reverse=True):
        loads[loads.index(min(loads))] += size
    found = np.zeros(8, np.int64)
    for name, shape in shapes.items():
        sharding = xs.Sharding(xs.Layout.parse(rules.find(name)), mesh, shape)
        sizes = [np.prod(sharding.local_shape(device)) for device in range(8)]
        assert sorted(sizes)[-3:] == [0, np.prod(shape), np.prod(shape)]
        found += sizes
    assert sorted(found) == sorted(loads * 2)
    with pytest.raises(xs.errors.MeshError, match="unknown mesh axis 'tp'"):
        xs.owned(shapes, mesh, "tp")
    with pytest.raises(ShapeError, match="w is one number"):
        xs.owned({"w": ()}, mesh, "dp")
