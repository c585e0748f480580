"""Every cause, made by hand of right blocks; and that they stay silent where they should."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
Blocks = Sequence[np.ndarray]


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def case(got: Callable[[np.ndarray, Blocks], Any], x: np.ndarray, layout: str, **more: Any) -> Case:
    """What `got` makes of an array and its blocks, in place of these: blocks, or a whole array."""
    want = tuple(reference.scatter(x, layout, MESH))
    made = got(x, want)
    made = reference.scatter(made, layout, MESH) if isinstance(made, np.ndarray) else made
    return Case(
        tuple(made), want, xs.Sharding(xs.Layout.parse(layout), MESH, x.shape), 1e-6, **more
    )


def cause(*args: Any, **more: Any) -> Cause | None:
    return likely_cause(case(*args, **more))


def times(*factors: float) -> Callable[[np.ndarray, Blocks], Blocks]:
    """A factor for each device along a."""
    return lambda _, blocks: [factors[d // 2] * block for d, block in enumerate(blocks)]


def plus(*rows: int) -> Callable[[np.ndarray, Blocks], np.ndarray]:
    """The array with 1 added to some rows."""
    return lambda x, _: x + np.isin(np.arange(len(x)), rows)[:, None]


def opposite(share: float) -> Callable[[np.ndarray, Blocks], Blocks]:
    """A share of every block, and noise that cancels out along b."""
    return lambda _, blocks: [
        share * block + (-1) ** d * values(*block.shape, seed=1) for d, block in enumerate(blocks)
    ]


def stored(layout: str) -> Callable[[np.ndarray, Blocks], Blocks]:
    return lambda x, _: reference.scatter(x, layout, MESH)


def with_ends(rows: Callable[[np.ndarray], list[int]]) -> Callable[[np.ndarray, Blocks], Blocks]:
    """Blocks with a halo of 1 that has other rows of a halo of 2."""

    def got(x: np.ndarray, _: Blocks) -> Blocks:
        wider = reference.scatter(x, "h/a:halo(2,2,periodic) d", MESH)
        return [
            block[[rows(block)[0], *range(2, len(block) - 2), rows(block)[1]]] for block in wider
        ]

    return got


class Row(NamedTuple):
    """The name of a cause, words of its sentence, and the blocks that show it."""

    cause: str
    words: str
    got: Callable[[np.ndarray, Blocks], Any]
    layout: str = "n/a d"
    shape: tuple[int, ...] = (8, 3)


# fmt: off
ROWS = {
    "zeros": Row("zero", "all zeros", times(0, 0)),
    "zeros but on the first": Row("only first", "the first device along b has the value",
        lambda _, blocks: [block * (d % 2 == 0) for d, block in enumerate(blocks)]),
    "addends": Row("not summed", "a sum over b is missing", opposite(0.5)),
    "norms of parts": Row("not summed", "norms of parts", times(0.6, 0.8), "()", ()),
    "no mean": Row("not averaged", "a mean over b is missing", opposite(1)),
    "a mean for a sum": Row("averaged", "4 times too small, and 4 is the size of (a,b)", times(1 / 4, 1 / 4)),
    "two axes of one size": Row("summed", "2 is the size of a or of b", times(2, 2)),
    "another whole factor": Row("summed", "counted 3 times", times(3, 3)),
    "a negative factor": Row("scaled", "-1 times", times(-1, -1)),
    "a factor": Row("scaled", "0.7 times", times(0.7, 0.7)),
    "means over 2 and 4 of 6 rows, and their mean": Row("own factors",
        "means over each one's own count along a", times(3 / 2, 3 / 4)),
    "means over 2 and 4 of 6 rows": Row("own factors", "means over each one's own count along a",
        times(3, 3 / 2)),
    "clipped by a part": Row("own factors", "divided by the norm of each one's own part along a",
        times(1 / 0.6, 1 / 0.8)),
    "factors of their own": Row("own factors", "weights or statistics of their own", times(2, 3)),
    "statistics of the own rows": Row("own statistics", "own part along a",
        lambda _, blocks: [(block - block.mean(0)) / block.std(0) for block in blocks]),
    "part of the first": Row("stale", "the block of the first device", lambda _, blocks: blocks[:1] * 4),
    "in reverse": Row("moved rows", "reverse order", lambda x, _: x[::-1]),
    "head and tail swapped": Row("moved rows", "head and tail swapped",
        lambda _, blocks: [np.roll(block, 2, 0) for block in blocks], "s/zigzag(a) d"),
    "reversed axis order": Row("moved rows", "'n/(b,a)'", stored("n/(b,a) d"), "n/(a,b) d", (16, 3)),
    "two rows exchanged": Row("moved rows", "in another order", lambda x, _: x[[1, 0, *range(2, 8)]]),
    "off by one": Row("moved rows", "off by 1", lambda x, _: np.concatenate([7 + x[:1], x[:-1]])),
    "blocks on other devices": Row("exchanged",
        "a=0,b=1 has the block of a=1,b=0; a=1,b=0 has the block of a=0,b=1",
        lambda _, blocks: [blocks[d] for d in (0, 2, 1, 3)], "n/a d/b", (4, 4)),
    "transposed": Row("transposed", "'n' and 'd'", lambda x, _: x.T, "n d", (4, 4)),
    "a halo of zeros": Row("halo rows", "nothing was exchanged",
        lambda _, blocks: [np.pad(block[1:-1], ((1, 1), (0, 0))) for block in blocks],
        "h/a:halo(1,1,periodic) d"),
    "a halo off by one": Row("halo rows", "off by 1", with_ends(lambda block: [0, -1]),
        "h/a:halo(1,1,periodic) d"),
    "halos that changed places": Row("halo rows", "have changed places", with_ends(lambda block: [-2, 1]),
        "h/a:halo(1,1,periodic) d"),
    "the ends of the array": Row("seam", "within 1 row of the ends of 'n'", plus(0), shape=(16, 3)),
    "the ends of blocks": Row("seam", "along 'n', at the end of blocks", plus(7), shape=(16, 3)),
    "seams of two dims": Row("seam", "within 2 rows of the seams between blocks along 'h' or 'w'",
        lambda x, _: x + np.logical_or.outer(abs(np.arange(16) - 7.5) < 1, abs(np.arange(16) - 7.5) < 2),
        "h/a w/b", (16, 16)),
    "where a zigzag's blocks end": Row("seam",
        "within 1 row of the seams between blocks along 's', at the beginning of blocks", plus(4, 12),
        "s/zigzag(a) d", (16, 3)),
    "rounded": Row("rounded", "rounding, as of bfloat16",
        lambda _, blocks: [block + 0.02 * values(*block.shape, seed=1) for block in blocks]),
    "local positions": Row("first only right", "right where a=0", plus(4, 5, 6, 7)),
    "one of four addends": Row("one addend", "one of 4 addends: what the other devices along (a,b)",
        lambda _, blocks: [x / 4 + 3**0.5 / 4 * values(8, 4, seed=1 + d) for d, x in enumerate(blocks)],
        "n/(a,b) d", (32, 4)),
}
# fmt: on
OTHERWISE = {"counted argument", "other axes", "positions"}  # see below


@pytest.mark.parametrize("name", ROWS)
def test_causes(name: str) -> None:
    row = ROWS[name]
    found = cause(row.got, values(*row.shape), row.layout)
    assert found is not None and (found.name, row.words in found.text) == (row.cause, True), found


def test_every_cause_has_a_row() -> None:
    assert {row.cause for row in ROWS.values()} == set(CAUSES) - OTHERWISE


def test_an_argument_left_out() -> None:
    bias = values(3, seed=1)
    found = cause(lambda x, _: x - bias, values(8, 3), "n/a d", arguments={"bias": bias})
    assert found == Cause("counted argument", "bias is left out")


def test_a_sum_over_other_axes() -> None:
    addends = values(
        2, 2, 8, 3
    )  # [a, b, rows, columns]: rows are cut over b, and should be summed over a
    found = cause(
        lambda *_: [addends[a].sum(0) for a in (0, 1) for _ in (0, 1)],
        addends.sum(0).reshape(16, 3),
        "n/b d",
    )
    assert found == Cause(
        "other axes", "summed over b in place of a: that adds what belongs to different devices"
    )


def test_of_one_number_a_factor_says_nothing() -> None:
    assert cause(times(1.1, 1.1), values(), "()") is None


def test_positions_of_another_order_under_causal_attention() -> None:
    """A row attends to all before it: right are those before the first wrong position."""
    later = plus(*range(2, 16))  # contiguous positions would be right in rows 10 and 11 too
    found = cause(later, values(16, 3), "s/zigzag(a,b) d")
    assert found.name == "positions"
    assert "right in rows 0-1 of 's' alone" in found.text
    assert (
        "are the index in the block or those of 's/(a,b)' in place of 's/zigzag(a,b)'" in found.text
    )


def test_noise_has_no_cause() -> None:
    found = cause(
        lambda _, blocks: [x + values(4, 3, seed=1 + d) for d, x in enumerate(blocks)],
        values(8, 3),
        "n/a d",
    )
    assert found is None


def test_right_blocks_have_none() -> None:
    found = case(lambda _, blocks: blocks, values(8, 4), "n/a d/b")
    assert not found.wrong_devices
    assert [
        name for name, find in CAUSES.items() if name not in ("scaled", "rounded") and find(found)
    ] == []


@given(
    st.sampled_from(["block", "zigzag", "cyclic"]), st.sampled_from(["block", "zigzag", "cyclic"])
)
def test_every_pair_of_orders_is_told_apart(meant: str, other: str) -> None:
    """Rows stored in one order, read in another: both are named, or stored alike."""
    texts = [f"s/{order}(a,b)" if order != "block" else "s/(a,b)" for order in (meant, other)]
    x = values(16, 2)
    dims = [xs.Layout.parse(text).dims[0] for text in texts]
    found = case(stored(f"{texts[1]} d"), x, f"{texts[0]} d")
    if (stored_rows(dims[0], 16, MESH) == stored_rows(dims[1], 16, MESH)).all():
        assert not found.wrong_devices
    else:
        text = likely_cause(found).text
        assert f"rows of 's' that are stored as '{texts[1]}' are taken for '{texts[0]}'" in text
