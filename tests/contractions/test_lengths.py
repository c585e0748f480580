"""Lengths by name, from shapes and from sizes: right where they are said, an error where they are not."""

from __future__ import annotations

import math
import random

import pytest

import xshard as xs
from xshard.contractions.expression import contraction
from xshard.contractions.shapes import shapes_of

NAMES = "abcde"
Dims = list[list[str]]  # the names of each dim of an operand: two and more are composed


def text_of(dims: Dims) -> str:
    return " ".join(names[0] if len(names) == 1 else f"({' '.join(names)})" for names in dims)


def said(operands: list[Dims], lengths: dict[str, int], sizes: dict[str, int]) -> set[str]:
    """The names whose length follows, dim after dim, as long as one is new."""
    known = set(sizes)
    found = None
    while known != found:
        found = set(known)
        for names in [names for dims in operands for names in dims]:
            rest = math.prod(lengths[name] for name in names if name in known)
            if len(set(names) - known) == 1 and rest:
                known |= set(names)
    return known


def test_all_lengths_that_sizes_and_shapes_say_are_found() -> None:
    n_found = 0
    for seed in range(600):
        pick = random.Random(seed)
        lengths = {name: pick.choice((1, 2, 3, 4, 5, 6, 0)) for name in NAMES}
        operands: list[Dims] = []
        for _ in range(pick.choice((1, 2, 3))):
            dims = [pick.choices(NAMES, k=pick.choice((1, 1, 2, 3))) for _ in range(3)]
            operands.append(dims[: pick.choice((1, 2, 3))])
        used = sorted({name for dims in operands for names in dims for name in names})
        sizes = {name: lengths[name] for name in used if pick.random() < 0.3}
        shapes = tuple(
            tuple(math.prod(lengths[n] for n in names) for names in dims) for dims in operands
        )
        call = contraction(f"{', '.join(map(text_of, operands))} -> {' '.join(used)}")
        if said(operands, lengths, sizes) < set(used):
            with pytest.raises(xs.errors.ShapeError, match="long, elsewhere"):
                shapes_of(call, tuple(sizes.items()), shapes)
            continue
        _, found = shapes_of(call, tuple(sizes.items()), shapes)
        assert found == tuple(
            tuple(lengths[n] for n in layout.names) for layout in call.operands
        ), call.text
        n_found += 1
        # One length that is another: an error, or lengths with which all of them agree.
        wrong = [list(shape) for shape in shapes]
        wrong[0][0] += 1
        try:
            _, other = shapes_of(call, tuple(sizes.items()), tuple(map(tuple, wrong)))
        except xs.errors.ShapeError:
            continue
        by_name = dict(zip(call.operands[0].names, other[0], strict=True))
        for dims, length in zip(operands[0], wrong[0], strict=True):
            assert math.prod(by_name[name] for name in dims) == length
    assert n_found > 200


def test_sizes_beside_shapes_in_plans() -> None:
    mesh = xs.Mesh(tp=2)
    shape = [(3, 5, 12), (12, 2)]
    plan = xs.plan("... (h k)/tp, (h k)/tp d -> ... d", mesh, shape=shape, sizes={"k": 3})
    assert plan.shapes == ((3, 5, 4, 3), (4, 3, 2))
    assert xs.plan("(h k)/tp -> h/tp k", mesh, shape=(12,), sizes={"h": 4}).shapes == ((4, 3),)
    for text, options, message in (
        (
            "... c/tp, c d -> ... d",
            {"sizes": {"c": 4, "d": 2, "...": 3}},
            "no length for dim '...'",
        ),
        ("b c/tp, c d -> b d", {"shape": [(3, 4), (4, 2)], "sizes": {"q": 4}}, "sizes has dim 'q'"),
        ("b c/tp, c d -> b d", {"shape": [(3, 4), (4, 2)], "sizes": {"c": 6}}, "elsewhere c=6"),
        ("b c/tp, c d -> b d", {"sizes": {}}, "no length for dim 'b'"),
    ):
        with pytest.raises(xs.errors.ShapeError, match=message.replace(".", r"\.")):
            xs.plan(text, mesh, **options)
