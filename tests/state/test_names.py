"""Names of arrays here and there: every element has one origin, and the inverse brings it back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xshard import XshardError
from xshard.errors import ShapeError
from xshard.state import Names, concat, rename, split, stack, unstack
from xshard.state.names import names_from_json, names_to_json


def arrays(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Arrays whose elements are all different."""
    found = {}
    start = 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        found[name.replace("__", ".")] = np.arange(start, start + size).reshape(shape)
        start += size
    return found


def check_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_dims_are_transposed_under_new_names() -> None:
    tree = arrays(l__0__q=(4, 2), l__0__k=(2, 3), l__1__q=(4, 2), l__1__k=(2, 3), norm=(5,))
    names = Names(
        rename("l.*.{q,k}", "layers_*.{query,key}.kernel", "o i -> i o"), rename("**", "**")
    )
    check_equal(
        names.apply(tree),
        {
            "layers_0.query.kernel": tree["l.0.q"].T,
            "layers_1.query.kernel": tree["l.1.q"].T,
            "layers_0.key.kernel": tree["l.0.k"].T,
            "layers_1.key.kernel": tree["l.1.k"].T,
            "norm": tree["norm"],
        },
    )


def test_fused_in_order() -> None:
    """q, k and v as flash attention has them; in groups of heads, as Megatron has; gate and up by turns."""
    tree = arrays(a__q=(8, 3), a__k=(4, 3), a__v=(4, 3))
    q, k, v = tree.values()
    plain = Names(concat(["*.q", "*.k", "*.v"], "*.qkv")).apply(tree)
    check_equal(plain, {"a.qkv": np.concatenate([q, k, v])})


def test_fused_in_groups_of_heads() -> None:
    tree = arrays(a__q=(8, 3), a__k=(4, 3), a__v=(4, 3))
    q, k, v = tree.values()
    grouped = Names(concat(["*.q", "*.k", "*.v"], "*.qkv", rows=(4, 2, 2))).apply(tree)
    groups = [part for g in range(2) for part in (q[4 * g :][:4], k[2 * g :][:2], v[2 * g :][:2])]
    check_equal(grouped, {"a.qkv": np.concatenate(groups)})


def test_fused_in_alternation() -> None:
    gate_up = arrays(gate=(3, 4), up=(3, 4))
    turns = Names(concat(["gate", "up"], "w", 1, rows=(1, 1), order="o i -> i o")).apply(gate_up)
    expected = np.stack([gate_up["gate"].T, gate_up["up"].T], axis=-1).reshape(4, 6)
    check_equal(turns, {"w": expected})


def test_stacked_by_number_not_by_letter() -> None:
    tree = arrays(**{f"e__{i}__w": (2, 3) for i in range(11)})
    for dim in range(3):
        found = Names(stack("e.*.w", "e.w", dim)).apply(dict(reversed(tree.items())))
        check_equal(found, {"e.w": np.stack(list(tree.values()), axis=dim)})
        check_equal(Names(unstack("e.w", "e.*.w", dim)).apply(found), tree)


@given(st.data())
def test_the_inverse_brings_every_element_back(data: st.DataObject) -> None:
    """And every element there has one origin: the sorted elements are the same."""
    order = data.draw(st.sampled_from([None, "a b -> b a"]))
    dim = data.draw(st.integers(0, 1))
    groups = data.draw(st.integers(1, 3))
    rows = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    in_turn = data.draw(st.booleans()) and len(rows) > 1 and min(rows) > 0
    cut = dim if order is None else 1 - dim
    shapes = [tuple(n * groups if d == cut else 2 for d in range(2)) for n in rows]
    tree = arrays(
        **{f"p{i}": shape for i, shape in enumerate(shapes)},
        **{f"s__{i}": (2, 2) for i in range(2)},
    )
    names = Names(
        concat(
            [f"p{i}" for i in range(len(rows))],
            "w",
            dim,
            rows=rows if in_turn else None,
            order=order,
        ),
        stack("s.*", "s", data.draw(st.integers(0, 2))),
    )
    there = names.apply(tree)
    flat = [np.sort(np.concatenate([x.ravel() for x in some.values()])) for some in (tree, there)]
    np.testing.assert_array_equal(*flat)
    check_equal(names.inverse.apply(there), tree)
    check_equal(names_from_json(names_to_json(names)).inverse.apply(there), tree)


def test_split_is_the_inverse_of_concat() -> None:
    tree = arrays(qkv=(8, 2))
    parts = Names(split("qkv", ["q", "k", "v"], rows=(4, 2, 2))).apply(tree)
    check_equal(parts, dict(zip("qkv", np.split(tree["qkv"], [4, 6]), strict=True)))
    halves = Names(split("qkv", ["gate", "up"])).apply(tree)
    check_equal(halves, dict(zip(["gate", "up"], np.split(tree["qkv"], 2), strict=True)))


def test_parts_of_unknown_rows_are_no_equal_parts() -> None:
    """The same text twice, with the same rows in all: which of the two a split means, nothing says."""
    names = Names(concat(["*.q", "*.k"], "*.qk"))
    for q, k in ((8, 2), (5, 5)):
        there = names.apply(arrays(a__q=(q,), a__k=(k,)))
        if q == 8:
            assert [len(x) for x in names.inverse.apply(there).values()] == [8, 2]
    for unknown in (names.inverse, Names(concat(["*.q", "*.k"], "*.qk")).inverse):
        with pytest.raises(
            ShapeError, match=r"\(10,\) does not say the rows of each part\n  give rows="
        ):
            unknown.resolve({"a.qk": (10,)})


def test_a_cast_is_part_of_the_mapping() -> None:
    names = Names(rename("w", "v", dtype="float16"))
    assert names.apply({"w": np.ones(2)})["v"].dtype == np.float16


def test_a_cast_has_no_inverse() -> None:
    names = Names(rename("w", "v", dtype="float16"))
    with pytest.raises(XshardError, match="a cast to float16 cannot be inverted"):
        _ = names.inverse


@pytest.mark.parametrize(
    ("names", "shapes", "reason"),
    [
        (
            Names(rename("a", "b"), rename("x.*", "y.*")),
            {"a": (2,)},
            r"'x.\* -> y.\*' fits no name",
        ),
        (
            Names(rename("a", "c"), rename("b", "c")),
            {"a": (2,), "b": (2,)},
            "c would have two origins",
        ),
        (Names(concat(["*.q", "*.k"], "*.qk")), {"l.q": (2,)}, "there is no l.k"),
        (Names(concat(["q", "q"], "qq")), {"q": (2,)}, "there is no q any more"),
        (
            Names(concat(["q", "k"], "qk")),
            {"q": (2, 3), "k": (2, 4)},
            "cannot be joined along dim 0",
        ),
        (Names(rename("w", "v", "o i -> i o")), {"w": (4,)}, "an order of 2 dims"),
        (Names(rename("w", "v", "o i -> i o")).inverse, {"v": (4, 2, 3)}, "an order of 2 dims"),
        (
            Names(unstack("w", "w.*", 3)),
            {"w": (4,)},
            r"w of shape \(4,\) cannot be split along dim 3",
        ),
        (Names(split("w", ["a", "b"], -1)), {"w": (4,)}, "cannot be split along dim -1"),
        (
            Names(rename("a.{q,kk}", "b.{q,kk}")),
            {"a.q": (2,), "a.k": (2,)},
            "'a.kk': did you mean 'k'",
        ),
    ],
)
def test_what_has_no_origin_or_two_is_named(names: Names, shapes: dict, reason: str) -> None:
    with pytest.raises(XshardError, match=reason):
        names.resolve(shapes)


def test_dtypes_that_would_be_mixed_are_an_error() -> None:
    with pytest.raises(ShapeError, match="q and k are bfloat16 and float32"):
        Names(concat(["q", "k"], "qk")).resolve(
            {"q": (2,), "k": (2,)}, {"q": "float32", "k": "bfloat16"}
        )


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: rename("a.*", "b"), "stars"),
        (lambda: rename("{a,b}", "{x,y,z}"), "stands for 2 names, '{x,y,z}' for 3"),
        (lambda: rename("a", "b", "o/tp i -> i o"), "has mesh axes"),
        (lambda: concat(["a", "b"], "c", rows=(1,)), "rows .1. for 2 arrays"),
        (lambda: stack("a.*", "b.*"), "stars"),
    ],
)
def test_relations_that_contradict_themselves(make, reason: str) -> None:
    with pytest.raises(XshardError, match=reason):
        Names(make())
