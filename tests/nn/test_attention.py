"""Pieces of scores: every score that a mask keeps is in one piece, and pieces are full as they say."""

from __future__ import annotations

import numpy as np
import pytest

from tests.attention import MASKS, ORDERS, ROW, Case, Mask
from xshard import Layout, Mesh, Sharding
from xshard.errors import NotationError
from xshard.nn.attention import ALL, CAUSAL, Attention, attention, dim_order, run_starts, tiles


def given(case: Case, mask: Mask, how: str) -> Attention:
    names = dim_order(Layout.parse(case.layout), "s", "h")
    lengths = dict(zip(Layout.parse(case.layout).names, case.shape, strict=True))
    q = Sharding(
        Layout.parse(case.layout).in_order(names), case.mesh, tuple(lengths[n] for n in names)
    )
    k = Sharding(q.layout, case.mesh, (*q.shape[:-3], case.heads[1], *q.shape[-2:]))
    return attention(q, k, k, how=how, causal=mask.causal, window=mask.window, chunk=mask.chunk)


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("how", ["gather", "ring"])
def test_pieces_hold_all_scores_that_a_mask_keeps(name: str, how: str) -> None:
    for mask in MASKS:
        found = given(ORDERS[name], mask, how)
        for device in range(4):
            rows = found.query_rows(device)
            seen = []
            assert np.array_equal(
                rows, found.q.layout.positions(found.q.mesh, found.q.shape, -2, device)
            )
            for turn in found.rounds:
                keys = found.key_rows(device, turn)
                wanted = found.visible(rows[:, None], keys)
                mine = np.zeros((len(rows), len(keys)), bool)
                for tile in tiles(found, device, turn):
                    part = wanted[tile.q, tile.k]
                    if tile.kind == ALL:
                        assert part.all()
                    if tile.kind == CAUSAL:
                        n, m = part.shape
                        assert np.array_equal(part, np.tri(n, m, m - n, dtype=bool))
                    assert not mine[tile.q, tile.k].any()
                    mine[tile.q, tile.k] = part
                assert np.array_equal(mine, wanted)
                seen.append(wanted.sum(1))
            assert (np.sum(seen, 0) == found.visible(rows[:, None], np.arange(19)).sum(1)).all()


def test_grouped_heads_that_are_cut_by_numbers_have_no_layout() -> None:
    q, k = (Layout.parse(text) for text in ("h/sizes(cp,3,1,1,1) s k", "h s k"))
    found = attention(
        Sharding(q, ROW, (6, 4, 2)), *2 * (Sharding(k, ROW, (3, 4, 2)),), how="gather"
    )
    with pytest.raises(NotationError, match="heads in groups, sharded by numbers"):
        _ = found.keys


def test_blocks_are_divided_where_runs_start_on_all_devices() -> None:
    mesh = Mesh(cp=2)
    starts = {}
    for order in ("s/cyclic(cp,4)", "s/zigzag(cp)", "s/sizes(cp,9,7)"):
        q = Sharding(Layout.parse(f"h {order} k"), mesh, (2, 16, 4))
        starts[order] = run_starts(attention(q, q, q, how="gather", causal=True), q)
    # Rows 0-3 and 8-11, or 4-7 and 12-15: two runs of four rows on each device. In the other
    # orders devices have runs, or rows, of unlike numbers.
    assert starts == {"s/cyclic(cp,4)": (0, 4), "s/zigzag(cp)": (0,), "s/sizes(cp,9,7)": (0,)}


def test_a_ring_leaves_out_rounds_that_masks_hide() -> None:
    """Blocks go straight to the devices that use them: 16 rows on 4 devices, 4 rows each."""
    rounds = {
        ("s/cp", Mask(True)): (0, 1, 2, 3),
        ("s/cp", Mask(chunk=4)): (0,),
        ("s/cp", Mask(chunk=8)): (0, 1, 3),
        ("s/cp", Mask(True, chunk=8)): (0, 1),
        ("s/zigzag(cp)", Mask(True, chunk=2)): (0,),
        ("s/zigzag(cp)", Mask(True, 3)): (0, 1, 3),
        ("s/cyclic(cp)", Mask(True, chunk=3)): (0, 1, 2),
    }
    for (order, mask), wanted in rounds.items():
        found = given(Case(ROW, f"b {order} h k", (2, 2), length=16), mask, "ring")
        assert found.rounds == wanted, (order, mask)
        distances = [found.distance_after(turn) for turn in wanted]
        assert sum(distances) == 0 and np.cumsum([0, *distances[:-1]]).tolist() == [*wanted]
