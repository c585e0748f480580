"""What rules say about gradients: axes along which activations vary, uses, and blocks that arrive."""

from __future__ import annotations

import pytest

from xshard import Layout, Mesh
from xshard.errors import NotationError, ShapeError
from xshard.models import (
    KnownDim,
    arriving_shape,
    axes_summed_after_all_uses,
    known_inside,
    rule_of,
    use_of,
    varying_axes,
)

MESH = Mesh(dp=2, tp=4)


@pytest.mark.parametrize(
    ("outside", "rules", "inside"),
    [
        ("", ["b s -> b/dp s"], "dp"),
        ("dp", ["b s c -> b s/tp c"], "dp tp"),
        ("dp tp", ["b s/tp c -> b s c"], "dp"),  # one value, which all use alike
        ("dp tp", ["b s/tp c -> b s c | copy(tp)"], "dp tp"),
        ("dp", ["b s c | sum(tp)"], "dp tp"),
        ("dp tp", ["b/(dp,tp) s c -> b/dp s c"], "dp"),
        ("dp", ["t c -> t c | copy(tp)", "t k"], "dp tp"),
        ("dp", [], "dp"),
    ],
)
def test_activations_vary_along_the_axes_of_the_right_side(
    outside: str, rules: list[str], inside: str
) -> None:
    found = varying_axes(outside.split(), [rule_of(text, MESH) for text in rules])
    assert found == set(inside.split())


@pytest.mark.parametrize(
    ("text", "inside", "copied", "later", "move"),
    [
        ("o i", "", "", "", None),
        ("o i", "dp", "dp", "dp", None),
        ("o/tp i", "dp tp", "dp", "dp", None),
        ("o/dp i -> o i", "dp", "dp", "", "o/dp i -> o i | copy(dp)"),
        ("o/dp i -> o i", "", "", "", "o/dp i -> o i"),
        ("o/dp i -> o i", "dp tp", "dp tp", "tp", "o/dp i -> o i | copy(dp)"),
        ("o/tp/dp i -> o/tp i", "dp tp", "dp", "", "o/tp/dp i -> o/tp i | copy(dp)"),
        ("o -> o | sum(tp)", "dp tp", "dp", "dp", "o -> o | sum(tp)"),
        ("o i -> o/tp i", "dp tp", "dp", "dp", "o i -> o/tp i"),
        (
            "o i -> o i | mean(tp)",
            "dp tp",
            "dp",
            "dp",
            None,
        ),  # equal along tp in spite of the rules around
        ("o/tp i -> o i | mean(tp)", "dp tp", "dp", "dp", "o/tp i -> o i"),
    ],
)
def test_parameters_are_used_as_copies_where_activations_vary(
    text: str, inside: str, copied: str, later: str, move: str | None
) -> None:
    use = use_of(text, 1 + ("i" in text), MESH, frozenset(inside.split()))
    assert use.summed_axes == set(copied.split()) and axes_summed_after_all_uses([use]) == set(
        later.split()
    )
    found = use.move(axes_summed_after_all_uses([use]))
    assert (found and f"{found[0]} -> {found[1]}") == move
    assert use.unsummed_axes == set(use.used.axes) - set(inside.split())


def test_uses_that_differ_sum_later_what_all_of_them_sum() -> None:
    embedding, head = (use_of("v c", 2, MESH, frozenset(axes)) for axes in (["dp"], ["dp", "tp"]))
    later = axes_summed_after_all_uses([embedding, head])
    assert later == {"dp"} and embedding.move(later) is None
    assert head.move(later) == (head.stored, Layout.parse("v c | copy(tp)"))


def test_lengths_are_known_from_outside() -> None:
    outside = known_inside(
        rule_of("b s -> b/dp s", MESH), (4, 10), (2, 10), (), "input of the model"
    )
    source = "'b s -> b/dp s' of the input of the model"
    assert outside == (
        KnownDim("b", frozenset({"dp"}), 4, 2, source),
        KnownDim("s", frozenset(), 10, 10, source),
    )
    enters = rule_of("b s c -> b s/tp c", MESH)
    assert arriving_shape(enters, MESH, 0, (2, 10, 6), outside) == (2, 10, 6)
    inside = known_inside(enters, (2, 10, 6), (2, 3, 6), outside, "input of mlp")
    leaves = rule_of("b s/tp c -> b s c | copy(tp)", MESH)
    for device, rows in ((0, 3), (3, 1)):  # uneven, and known all the same
        assert arriving_shape(leaves, MESH, device, (2, rows, 6), inside) == (2, 10, 6)
    both = rule_of("b/dp s/tp c -> b s c", MESH)
    assert arriving_shape(both, MESH, 0, (2, 3, 6), inside) == (4, 10, 6)
    again = known_inside(both, (4, 10, 6), (4, 10, 6), inside, "")
    assert {dim.name: (set(dim.axes), dim.local_length) for dim in again} == {
        "b": (set(), 4),
        "s": (set(), 10),
        "c": (set(), 6),
    }
    with pytest.raises(ShapeError, match=r"the block has shape \(2, 10, 6\), not \(2, 3, 6\)"):
        arriving_shape(leaves, MESH, 0, (2, 10, 6), inside)
    with pytest.raises(
        ShapeError,
        match=r"not 3 of 3 as by 'b s c -> b s/tp c' of the input of mlp: .* another dim",
    ):
        arriving_shape(rule_of("b s", MESH), MESH, 0, (2, 5), inside)
    unnamed = rule_of("... c -> ... c | copy(tp)", MESH)  # the dims of `...` are no other array's
    shapes = (3, 5, 6), (7, 6)
    three, two = (known_inside(unnamed, shape, shape, (), "") for shape in shapes)
    assert three == two


def test_parameters_are_kept_as_values() -> None:
    for text in ("o i | sum(tp)", "o i | copy(dp) -> o i", "o/tp:halo(1,1) i"):
        with pytest.raises(NotationError, match="a parameter is stored and used as values"):
            use_of(text, 2, MESH, frozenset())
    with pytest.raises(ShapeError, match="1 dims, the parameter has 2"):
        use_of("o", 2, MESH, frozenset())
    with pytest.raises(NotationError, match="unknown mesh axis 'cp'"):
        rule_of("b s/cp", MESH)
    with pytest.raises(NotationError, match="activations do not differ along 'dp'"):
        use_of("o -> o | copy(dp)", 1, MESH, frozenset({"tp"}))
