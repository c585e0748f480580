"""What an expression and a block say about the whole array."""

from __future__ import annotations

import pytest

import xshard as xs
from xshard.layout.lengths import global_shape
from xshard.plans.expression import sides

MESH = xs.Mesh(dp=2, tp=2)


@pytest.mark.parametrize("device", range(4))
@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("n/sizes(dp,2,3) d", (5, 4)),
        ("n/sizes(dp,2,0) d/tp", (2, 4)),
        ("n/dp/sizes(tp,1,3) d", (8, 4)),
        ("n/sizes(dp,4,2)/tp d", (6, 4)),
        ("n/intervals(dp,[0,2,5,7],[2,5]) d", (7, 4)),
        ("n/zigzag(dp,5,4) d", (9, 4)),
        ("n/sizes(dp,2,3):halo(1,1,none) d", (5, 4)),
        ("n/sizes(dp,3,5):window(k=3,s=2) d", (8, 4)),
        ("n/cyclic(dp,2) d/tp:halo(1,1)", (8, 4)),
    ],
)
def test_a_block_of_any_device_gives_the_shape(layout: str, shape: tuple[int, ...], device: int) -> None:
    parsed = xs.Layout.parse(layout)
    local = parsed.local_shape(MESH, shape, device)
    assert global_shape(parsed, MESH, local, layout) == shape


def test_what_does_not_say_it() -> None:
    with pytest.raises(xs.errors.ShapeError, match="4 rows do not say how long dim 'h' is"):
        global_shape(xs.Layout.parse("h/tp:window(k=3)"), MESH, (4,), "h/tp:window(k=3)")


def test_both_sides_have_the_same_dims() -> None:
    """In any order; a sum over dims is another verb."""
    src, dst, _ = sides("n/dp d -> d n")
    assert (src.names, dst.names) == (("n", "d"), ("d", "n"))
    with pytest.raises(xs.errors.NotationError) as caught:
        sides("b s/tp c -> c b")
    assert str(caught.value).splitlines() == [
        "dim names differ across the arrow in",
        "    'b s/tp c -> c b'",
        "       ^",
        "  left: b s c   right: c b   (the same names, in any order; einsum sums dims)",
    ]
