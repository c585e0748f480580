"""Interval algebra against lists of single rows."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xshard as xs
from tests import oracle, oracle_rows
from tests.strategies import any_overlap, layouts, meshes
from xshard import Layout
from xshard.errors import ShapeError
from xshard.layout import pieces
from xshard.layout.partition import all_owned_rows, block_length, owned_rows
from xshard.layout.runs import FILL, as_index, common_segments, count_rows
from xshard.notation.parser import ORDERS, Dim, Shard

HALO_CASES = json.loads((Path(__file__).parents[1] / "data" / "halo.json").read_text())


def expanded(runs):
    """Runs -> list of row numbers; None for fill."""
    return [
        None if run.start == FILL else run.start + i * run.stride + j
        for run in runs
        for i in range(run.repeats)
        for j in range(run.length)
    ]


def held(text, length, mesh):
    """The rows of every device's block of a one-dim array."""
    sharding = xs.Sharding(Layout.parse(text), mesh, (length,))
    return [expanded(sharding.held(0, device)) for device in range(mesh.n_devices)]


@given(st.data(), meshes(), st.integers(0, 40))
def test_owned_rows_of_any_layout(data, mesh, length):
    layout = data.draw(layouts(mesh, 1))
    sharding = xs.Sharding(layout, mesh, (length,))
    for device in range(mesh.n_devices):
        rows = oracle.owned_rows(layout.dims[0], length, mesh, device)
        assert expanded(sharding.owned(0, device)) == rows
        assert (
            sharding.local_shape(device)
            == layout.local_shape(mesh, (length,), device)
            == (len(rows),)
        )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("inner", ORDERS)
def test_every_order_inside_every_other(order, inner):
    mesh = xs.Mesh(a=2, b=3)
    dim = Dim("n", (Shard(("a",), order), Shard(("b",), inner)))
    for length, device in itertools.product([0, 1, 5, 12, 13, 24, 37], range(6)):
        runs = owned_rows(dim, length, (2, 3), mesh.coords(device))
        rows = expanded(runs)
        assert rows == oracle.owned_rows(dim, length, mesh, device)
        assert count_rows(runs) == len(rows) and np.arange(length)[as_index(runs)].tolist() == rows


@given(st.data(), meshes(), st.integers(1, 40))
def test_normal_form_has_the_same_blocks(data, mesh, length):
    layout = data.draw(layouts(mesh, 1))
    dim = replace(layout.dims[0], overlap=data.draw(st.none() | any_overlap()))
    sharding = xs.Sharding(replace(layout, dims=(dim,)), mesh, (length,))
    plain = sharding.with_layout(sharding.normal_layout)
    for device in range(mesh.n_devices):
        assert expanded(plain.owned(0, device)) == expanded(sharding.owned(0, device))
        assert expanded(plain.held(0, device)) == expanded(sharding.held(0, device))
    assert plain.normal_layout == plain.layout
    assert sharding.means_the_same_as(plain)


@pytest.mark.parametrize("n", range(1, 9))
def test_contiguous_cuts_are_torch_chunk_at_every_level(n):
    import torch

    mesh = xs.Mesh(a=n, b=2)
    for length in range(1, 30):
        pieces = [piece.chunk(2) for piece in torch.arange(length).chunk(n)]
        expected = [[half.tolist() for half in piece] + [[]] * (2 - len(piece)) for piece in pieces]
        expected += [[[], []]] * (n - len(pieces))
        assert held("n/a/b", length, mesh) == [half for piece in expected for half in piece]


def test_nested_cuts_differ_from_grouped_ones_where_uneven():
    mesh = xs.Mesh(a=2, b=2)
    assert held("n/a/b", 5, mesh) == [[0, 1], [2], [3], [4]]
    assert held("n/(a,b)", 5, mesh) == [[0, 1], [2, 3], [4], []]
    assert held("n/(b,a)", 5, mesh) == [[0, 1], [4], [2, 3], []]
    assert held("n/b/a", 5, mesh) == [[0, 1], [3], [2], [4]]


@pytest.mark.parametrize(
    ("text", "length", "expected"),
    [
        # Rank-major, as in ring-flash-attention's varlen and TransformerEngine's THD.
        ("s/zigzag(a,4,8,4)", 16, [[0, 3, 4, 5, 10, 11, 12, 15], [1, 2, 6, 7, 8, 9, 13, 14]]),
        ("s/zigzag(a,3,5)", 8, [[0, 3, 4], [1, 2, 5, 6, 7]]),
        ("s/cyclic(a,3)", 14, [[0, 1, 2, 6, 7, 8, 12, 13], [3, 4, 5, 9, 10, 11]]),
        ("s/cyclic(a,4)", 3, [[0, 1, 2], []]),
        ("s/sizes(a,0,3)", 3, [[], [0, 1, 2]]),
        ("s/intervals(a,[4,6,0,2],[2,4,6,7])", 7, [[4, 5, 0, 1], [2, 3, 6]]),
    ],
)
def test_orders_that_are_written_in_numbers(text, length, expected):
    mesh = xs.Mesh(a=2)
    dim = Layout.parse(text).dims[0]
    assert held(text, length, mesh) == expected
    assert [oracle.owned_rows(dim, length, mesh, device) for device in (0, 1)] == expected


def test_one_part_is_the_whole_dim_in_order():
    assert held("s/intervals(a,[0,2,2,4])", 4, xs.Mesh(a=1)) == [[0, 1, 2, 3]]
    with pytest.raises(ShapeError, match="one part, which must hold its rows in order"):
        held("s/intervals(a,[2,4,0,2])", 4, xs.Mesh(a=1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s/zigzag(a,4,8)", "'zigzag(a,4,8)' adds up to 12 rows, not 16 in 's/zigzag(a,4,8)'"),
        ("s/sizes(a,4,8,4)", "3 sizes for 2 parts"),
        ("s/b/sizes(a,4,8)", "adds up to 12 rows, not 8"),
        ("s/intervals(a,[0,8],[8,12])", "does not hold each of the 16 rows once"),
        ("s/intervals(a,[0,9],[8,16])", "does not hold each of the 16 rows once"),
        ("s/intervals(a,[0,16])", "1 intervals for 2 parts"),
    ],
)
def test_numbers_that_do_not_fit(text, message):
    with pytest.raises(ShapeError, match=re.escape(message)):
        xs.Sharding(Layout.parse(text), xs.Mesh(a=2, b=2), (16,))


def test_orders_are_few_runs_however_long_the_dim():
    mesh = xs.Mesh(cp=64)
    for order, runs in (("zigzag", 2), ("cyclic", 1)):
        sharding = xs.Sharding(Layout.parse(f"s/{order}(cp)"), mesh, (2**40,))
        assert [len(sharding.owned(0, device)) for device in range(64)] == [runs] * 64
        assert sharding.max_local_shape == (2**34,)


@given(st.data(), st.integers(1, 6), st.sampled_from(("block", "balanced")), st.integers(1, 24))
def test_overlaps(data, n, order, length):
    """Halos and windows of every boundary, over several neighbours and both ends of the array."""
    dim = Dim("h", (Shard(("a",), order),), data.draw(any_overlap(folded=False)))
    expected = [oracle_rows.held_rows(dim, length, xs.Mesh(a=n), device) for device in range(n)]
    assert held(str(dim), length, xs.Mesh(a=n)) == expected


@given(any_overlap(folded=False), st.integers(1, 24))
def test_a_fold_spans_the_rows_of_its_overlap(overlap, length):
    mesh = xs.Mesh(a=3)
    assert held(f"h/a:fold({overlap})", length, mesh) == held(f"h/a:{overlap}", length, mesh)


def test_every_chunk_of_a_zigzag_has_its_own_halo():
    assert held("s/zigzag(a):halo(2,0)", 8, xs.Mesh(a=2)) == [
        [None, None, 0, 1, 4, 5, 6, 7],
        [0, 1, 2, 3, 2, 3, 4, 5],
    ]


def test_negative_widths_leave_rows_out():
    assert held("h/a:halo(-1,2)", 8, xs.Mesh(a=2)) == [[1, 2, 3, 4, 5], [5, 6, 7, None, None]]
    assert held("h/a:halo(-3,-3)", 8, xs.Mesh(a=2)) == [[], []]


WINDOWS = r"(?:conv|maxpool|avgpool) k=(.*) s=(.*) d=(.*) p=(.*)"


# run-empty-shard is cut 3, 0, 3, 2: no order has these parts.
@pytest.mark.parametrize(
    "case",
    [c for c in HALO_CASES if re.fullmatch(WINDOWS, c["op"]) and c["name"] != "run-empty-shard"],
    ids=lambda case: case["name"],
)
def test_windows_span_what_a_convolution_reads(case):
    """Input ranges from test suites of other libraries, which cut outputs into balanced parts."""
    options = [json.loads(text) for text in re.fullmatch(WINDOWS, case["op"]).groups()]
    boundary = {"zero": "zero", "circular": "periodic"}[case["boundary"]]
    parts = [case[key] for key in ("sharded_dims", "shard_sizes", "halo_before", "halo_after")]
    for d, *widths in zip(*parts, strict=True):
        k, s, dilation, p = (option[d - len(case["global_shape"])] for option in options)
        text = f"h/balanced(a):window(k={k},s={s},d={dilation},p={p},{boundary})"
        spans = held(text, case["global_shape"][d], xs.Mesh(a=len(widths[0])))
        assert [len(rows) for rows in spans] == np.sum(widths, 0).tolist()


def test_windows_hold_the_rows_that_torch_reads():
    """Convolving a block without padding gives the device's part of the whole convolution."""
    import torch

    x = torch.arange(1.0, 24.0)
    mesh = xs.Mesh(a=4)
    for k, s, d, p in [
        (3, 1, 1, 1),
        (3, 2, 1, 1),
        (2, 2, 1, 0),
        (5, 4, 1, 2),
        (3, 1, 4, 4),
        (4, 3, 2, 0),
    ]:
        weight = torch.arange(1.0, k + 1).reshape(1, 1, k)
        whole = torch.conv1d(x[None, None], weight, stride=s, dilation=d, padding=p).flatten()
        blocks = xs.reference.scatter(
            x.numpy(), f"h/balanced(a):window(k={k},s={s},d={d},p={p})", mesh
        )
        parts = [
            torch.conv1d(torch.tensor(b)[None, None], weight, stride=s, dilation=d) for b in blocks
        ]
        assert torch.equal(torch.cat(parts, -1).flatten(), whole)


@given(*[st.sampled_from(ORDERS)] * 2, st.integers(0, 40), st.integers(1, 5), st.integers(1, 5))
def test_common_finds_every_shared_row_once(src_order, dst_order, length, n_src, n_dst):
    for i in range(n_src):
        src = owned_rows(Dim("n", (Shard(("a",), src_order),)), length, (n_src,), (i,))
        have = {row: at for at, row in enumerate(expanded(src))}
        for j in range(n_dst):
            dst = owned_rows(Dim("n", (Shard(("a",), dst_order),)), length, (n_dst,), (j,))
            expected = [(have[row], at) for at, row in enumerate(expanded(dst)) if row in have]
            found = [
                (s.src + k, s.dst + k) for s in common_segments(src, dst) for k in range(s.length)
            ]
            assert found == expected


@given(st.data(), st.integers(0, 90), *[st.integers(1, 5)] * 2)
def test_one_period_counts_for_all(data, length, n_src, n_dst):
    """The rows that blocks of cyclic cuts share, counted in one period, against row by row."""

    def blocks(n):
        order, numbers = data.draw(
            st.sampled_from((("block", ()), ("zigzag", ()), ("cyclic", (1, 2, 3, 7))))
        )
        shard = Shard(("a",), order, (data.draw(st.sampled_from(numbers)),) if numbers else ())
        return all_owned_rows(Dim("n", (shard,)), length, (n,))

    src = blocks(n_src)
    dst = blocks(n_dst)
    every = [[len({*expanded(a)} & {*expanded(b)}) for a in src] for b in dst]
    expected = [(j, i, n) for j, row in enumerate(every) for i, n in enumerate(row) if n]
    for most in (pieces.MAX_COUNTED, -1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pieces, "MAX_COUNTED", most)
            assert list(zip(*map(list, pieces.shared_rows(src, dst)), strict=True)) == expected


@pytest.mark.parametrize(
    "order", [order for order in ORDERS if order not in ("sizes", "intervals")]
)
def test_the_longest_block_is_known_without_looking_at_blocks(order):
    for length, n, inner in itertools.product(range(13), (1, 2, 3, 4), (1, 2)):
        dim = Dim("n", (Shard(("a",), order), Shard(("b",))))
        lengths = [count_rows(runs) for runs in all_owned_rows(dim, length, (n, inner))]
        assert block_length(dim, length, (n, inner)) == (max(lengths), len(set(lengths)) == 1)


@pytest.mark.parametrize("boundary", ["periodic", "reflect", "edge", "pole"])
@pytest.mark.parametrize(
    "overlap", ["halo(1,0,{0})", "halo([0,0],[0,1],{0})", "window(k=3,p=1,{0})"]
)
def test_an_empty_dim_has_no_rows_to_copy(boundary, overlap):
    layout = Layout.parse("h/sp:" + overlap.format(boundary))
    with pytest.raises(ShapeError, match=f"dim 'h' lacks rows that '{boundary}' could copy"):
        xs.Sharding(layout, xs.Mesh(sp=2), (0,))
    assert xs.Sharding(layout, xs.Mesh(sp=2), (2,)).local_shape(0)
    for nothing in ("halo(0,0,periodic)", "halo(1,1)", "halo(-1,0,edge,none)"):
        assert held(f"h/sp:{nothing}", 0, xs.Mesh(sp=2)) == [[], []]
