"""Frames of transposed and dilated windows and of resampling, against torch on one device."""

import itertools

import numpy as np
import pytest

import xshard as xs
from xshard.nn.windows import (
    ShardedDim,
    TransposedWindow,
    pool_window,
    resampled_frame,
    taps,
    transposed_frame,
    window_frame,
)
from xshard.notation.overlap import Boundary, Window
from xshard.notation.parser import Dim, Shard


@pytest.mark.parametrize(
    ("length", "outputs"), [(17, 24), (24, 17), (5, 5), (3, 11), (8, 16), (1, 4)]
)
@pytest.mark.parametrize(
    ("mode", "corners"),
    [
        ("nearest", None),
        ("nearest-exact", None),
        *itertools.product(["linear", "cubic"], [False, True]),
    ],
)
def test_taps_interpolate_as_torch_does(mode, corners, length, outputs):
    import torch
    from torch.nn.functional import interpolate

    x = torch.from_numpy(np.random.default_rng(0).normal(size=length))
    found = taps(mode, length, outputs, align_corners=bool(corners))
    mine = (x.numpy()[found.inputs] * found.weights).sum(axis=1)
    if mode == "cubic":  # torch has cubic interpolation in two dims only
        whole = x[None, None, :, None].expand(1, 1, length, 2)
        theirs = interpolate(whole, (outputs, 2), mode="bicubic", align_corners=corners)[0, 0, :, 0]
    else:
        theirs = interpolate(x[None, None], outputs, mode=mode, align_corners=corners)[0, 0]
    assert np.abs(mine - theirs.numpy()).max() < 1e-14


def test_an_unknown_mode_is_refused():
    with pytest.raises(xs.XshardError, match="modes are: nearest"):
        taps("lanczos", 4, 8)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_resampled_blocks_hold_every_tap(mode):
    found = taps(mode, 17, 24)
    rows = ShardedDim(Dim("h", (Shard(("sp",), "balanced"),)), 17, (5,))
    shape = resampled_frame(rows, found)
    for ((first, rows, start, n),) in shape.runs:
        inputs = found.inputs[start : start + n]
        assert (inputs.min(), inputs.max() + 1) == (first, first + rows)
    assert [run.outputs for (run,) in shape.runs] == [5, 5, 5, 5, 4]


SHARDS = [
    (8, Shard(("sp",))),
    (7, Shard(("sp",), "balanced")),
    (7, Shard(("sp",), "sizes", (3, 0, 4))),
]


def check_rows(frame, length, needs, outputs, fill=None):
    """Blocks hold the rows from the first to the last that outputs need; without a fill, of the array."""
    assert frame.length == outputs
    made = [run.start + i for runs in frame.runs for run in runs for i in range(run.outputs)]
    assert made == list(range(outputs))
    mesh = xs.Mesh(sp=len(frame.runs))
    blocks = xs.reference.scatter(np.arange(length), str(frame.source), mesh)
    for block, runs in zip(blocks, frame.runs, strict=True):
        assert len(block) == sum(run.rows for run in runs)
        for first, n, start, count in runs:
            rows = [row for o in range(start, start + count) for row in needs(o)]
            rows = range(min(rows), max(rows) + 1) if rows else ()
            if fill is None:
                assert set(block) >= {row for row in rows if 0 <= row < length}
                assert block.tolist() == list(range(first, first + n))
            else:
                assert block.tolist() == [i if 0 <= i < length else fill for i in rows]


@pytest.mark.parametrize(
    ("k", "s", "d", "p", "extra"),
    [(4, 2, 1, 0, 0), (3, 2, 1, 1, 1), (3, 1, 1, 1, 0), (3, 3, 2, 2, 2), (2, 4, 1, 0, 0)],
)
@pytest.mark.parametrize(("length", "shard"), SHARDS)
def test_a_transposed_convolution_reads_what_its_outputs_need(k, s, d, p, extra, length, shard):
    n = len(shard.numbers) or 4
    rows = ShardedDim(Dim("h", (shard,)), length, (n,))
    frame = transposed_frame(rows, TransposedWindow(k, s, d, p, extra))

    def needs(o):
        return [i for i in range(length) for j in range(k) if i * s - p + d * j == o]

    check_rows(frame, length, needs, (length - 1) * s - 2 * p + d * (k - 1) + 1 + extra)
    if shard.numbers:  # an output belongs to the owner of its first input
        assert frame.runs[0][0].outputs == -(-3 * frame.length // 7)
    else:
        assert max(run.rows for runs in frame.runs for run in runs) < length  # no more than needed


@pytest.mark.parametrize("out", ["", "balanced", "aligned"])
@pytest.mark.parametrize(
    ("k", "s", "d", "base", "p"),
    [
        (3, 1, 1, 2, (1, 2)),
        (2, 3, 1, 1, (-2, 4)),
        (3, 2, 2, 3, (5, 0)),
        (4, 1, 1, 5, (-1, -3)),
        (1, 1, 1, 4, (0, 0)),
    ],
)
@pytest.mark.parametrize(("length", "shard"), SHARDS)
def test_a_window_over_dilated_rows_reads_what_it_covers(k, s, d, base, p, length, shard, out):
    fill = Boundary("constant", 77.0)
    window = Window(k, s, d, p, out, fill, fill)
    rows = ShardedDim(Dim("h", (shard,)), length, (len(shard.numbers) or 4,))
    frame = window_frame(rows, window, base)

    def needs(o):
        first, last = (o * s - p[0] + d * j for j in (0, k - 1))
        return range(-(-first // base), last // base + 1)

    check_rows(
        frame, length, needs, ((length - 1) * base + 1 + sum(p) - d * (k - 1) - 1) // s + 1, 77
    )


def test_parts_that_are_no_intervals_are_refused():
    rows = ShardedDim(Dim("h", (Shard(("sp",), "zigzag"),)), 8, (2,))
    with pytest.raises(xs.errors.ShapeError, match="are not intervals"):
        transposed_frame(rows, TransposedWindow(3))
    with pytest.raises(xs.errors.ShapeError, match="are not intervals"):
        window_frame(rows, Window(3, p=(1, 1)), 2)


@pytest.mark.parametrize("ceil", [False, True])
def test_pools_have_as_many_outputs_as_in_torch(ceil):
    import torch

    found = 0
    for length, k, s, p, d in itertools.product(
        range(1, 8), range(1, 5), range(1, 5), (0, 1, 2), (1, 2)
    ):
        if p > k // 2:
            continue
        x = torch.zeros(1, 1, length)
        try:
            outputs = torch.nn.functional.max_pool1d(x, k, s, p, d, ceil).shape[-1]
        except RuntimeError:  # torch refuses pools in which no window fits
            outputs = 0
        window = pool_window(length, Window(k, s, d, (p, p)), ceil=ceil)
        assert max(0, window.output_length(length)) == outputs, (length, k, s, p, d)
        found += outputs > 0
    assert found > 300
