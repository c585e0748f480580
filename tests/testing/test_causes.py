"""Causes of plain arithmetic, made by hand; and that they stay silent where they should."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xshard as xs
from xshard import reference
from xshard.testing import CAUSES, Cause, likely_cause
from xshard.testing.diagnosis.evidence import Case
from xshard.testing.diagnosis.orders import stored_rows

MESH = xs.Mesh(a=2, b=2)


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def case(got, x: np.ndarray, layout: str, mesh: xs.Mesh = MESH, **more) -> Case:
    """The case of blocks `got(blocks)` in place of the blocks of `x`."""
    want = tuple(reference.scatter(x, layout, mesh))
    sharding = xs.Sharding(xs.Layout.parse(layout), mesh, x.shape)
    return Case(tuple(got(want)), want, sharding, 1e-6, **more)


def cause(*args, **more) -> Cause | None:
    return likely_cause(case(*args, **more))


def test_a_mean_in_place_of_a_sum() -> None:
    found = cause(lambda blocks: [b / 4 for b in blocks], values(8, 3), "n/a d")
    assert found.name == "averaged"
    assert "4 times too small, and 4 is the size of (a,b)" in found.text


def test_a_factor_of_two_axes_of_one_size_names_both() -> None:
    found = cause(lambda blocks: [2 * b for b in blocks], values(8, 3), "n/a d")
    assert "2 is the size of a or of b" in found.text


@pytest.mark.parametrize(("factor", "name"), [(-1.0, "scaled"), (0.7, "scaled"), (3.0, "summed")])
def test_other_factors(factor: float, name: str) -> None:
    assert cause(lambda blocks: [factor * b for b in blocks], values(8, 3), "n/a d").name == name


def test_blocks_on_other_devices() -> None:
    found = cause(lambda b: [b[0], b[2], b[1], b[3]], values(4, 4), "n/a d/b")
    assert found.name == "exchanged"
    assert "a=0,b=1 has the block of a=1,b=0; a=1,b=0 has the block of a=0,b=1" in found.text


def test_an_argument_left_out() -> None:
    bias = values(3, seed=1)
    found = cause(lambda blocks: [b - bias for b in blocks], values(8, 3), "n/a d", arguments={"bias": bias})
    assert found == Cause("counted argument", "bias is left out")


def test_a_sum_over_other_axes() -> None:
    addends = values(2, 2, 8, 3)  # [a, b, rows, columns]: rows are cut over b, and should be summed over a
    found = cause(
        lambda _: [addends[a].sum(0) for a in (0, 1) for _ in (0, 1)], addends.sum(0).reshape(16, 3), "n/b d"
    )
    assert found == Cause(
        "other axes", "summed over b in place of a: that adds what belongs to different devices"
    )


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ((3 / 2, 3 / 4), "means over each one's own count along a"),  # of 2 and 4 of 6 rows, and their mean
        ((3.0, 3 / 2), "means over each one's own count along a"),
        ((1 / 0.6, 1 / 0.8), "divided by the norm of each one's own part along a"),
        ((2.0, 3.0), "weights or statistics of their own"),
    ],
)
def test_a_factor_of_each_device(factors: tuple[float, float], words: str) -> None:
    each = [factors[d // 2] for d in range(4)]
    found = cause(lambda blocks: [f * b for f, b in zip(each, blocks, strict=True)], values(8, 3), "n/a d")
    assert found.name == "own factors" and words in found.text


def test_of_one_number_a_factor_says_nothing() -> None:
    assert cause(lambda blocks: [1.1 * b for b in blocks], values(), "()") is None


def test_rows_in_reverse() -> None:
    x = values(8, 3)
    found = cause(lambda _: reference.scatter(x[::-1], "n/a d", MESH), x, "n/a d")
    assert "reverse order" in found.text


def test_errors_at_the_ends_of_the_array_alone() -> None:
    x = values(16, 3)
    y = x.copy()
    y[0] += 1
    found = cause(lambda _: reference.scatter(y, "n/a d", MESH), x, "n/a d")
    assert found.name == "seam"
    assert "within 1 row of the ends of 'n'" in found.text


def test_seams_of_two_dims() -> None:
    x = values(16, 16)
    y = x.copy()
    y[7:9] += 1
    y[:, 6:10] += 1
    found = cause(lambda _: reference.scatter(y, "h/a w/b", MESH), x, "h/a w/b")
    assert "within 2 rows of the seams between blocks along 'h' or 'w'" in found.text


def test_seams_of_a_zigzag_are_where_its_blocks_end() -> None:
    x = values(16, 3)
    y = x.copy()
    y[[4, 12]] += 1
    found = cause(lambda _: reference.scatter(y, "s/zigzag(a) d", MESH), x, "s/zigzag(a) d")
    assert "within 1 row of the seams between blocks along 's', at the beginning of blocks" in found.text


def test_halo_rows_that_changed_places() -> None:
    def swapped(blocks):
        for block in blocks:
            again = block.copy()
            again[[0, -1]] = block[[-1, 0]]
            yield again

    found = cause(swapped, values(8, 3), "h/a:halo(1,1,periodic) d")
    assert "have changed places" in found.text


def test_positions_of_another_order_under_causal_attention() -> None:
    """A row attends to all before it: right are those before the first wrong position."""
    x = values(16, 3)
    y = x.copy()
    y[2:] += 1  # contiguous positions would be right in rows 10 and 11 too
    found = cause(lambda _: reference.scatter(y, "s/zigzag(a,b) d", MESH), x, "s/zigzag(a,b) d")
    assert found.name == "positions"
    assert "right in rows 0-1 of 's' alone" in found.text
    assert "are the index in the block or those of 's/(a,b)' in place of 's/zigzag(a,b)'" in found.text


def test_noise_has_no_cause() -> None:
    noise = [values(4, 3, seed=i) for i in range(1, 5)]
    x = values(8, 3)
    assert cause(lambda b: [x + y for x, y in zip(b, noise, strict=True)], x, "n/a d") is None


def test_right_blocks_have_none() -> None:
    found = case(lambda b: b, values(8, 4), "n/a d/b")
    assert not found.wrong_devices
    assert [name for name, find in CAUSES.items() if name not in ("scaled", "rounded") and find(found)] == []


@given(st.sampled_from(["block", "zigzag", "cyclic"]), st.sampled_from(["block", "zigzag", "cyclic"]))
def test_every_pair_of_orders_is_told_apart(meant: str, other: str) -> None:
    """Rows stored in one order, read in another: both are named, or stored alike."""
    texts = [f"s/{order}(a,b)" if order != "block" else "s/(a,b)" for order in (meant, other)]
    x = values(16, 2)
    dims = [xs.Layout.parse(text).dims[0] for text in texts]
    found = case(lambda _: reference.scatter(x, f"{texts[1]} d", MESH), x, f"{texts[0]} d")
    if (stored_rows(dims[0], 16, MESH) == stored_rows(dims[1], 16, MESH)).all():
        assert not found.wrong_devices
    else:
        text = likely_cause(found).text
        assert f"rows of 's' that are stored as '{texts[1]}' are taken for '{texts[0]}'" in text
