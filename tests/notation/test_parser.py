"""Text <-> layouts, and the messages for malformed text. Long because one table has every message."""

import pickle
import re

import pytest
from hypothesis import given

import xshard as xs
from tests.strategies import written_layouts
from xshard import Layout
from xshard.errors import LinearityError, NotationError, ShapeError
from xshard.layout.layout import parse_expression


@given(written_layouts())
def test_layouts_print_and_parse_back(layout):
    text = str(layout)
    assert Layout.parse(text) == layout
    assert str(Layout.parse(text)) == text


@given(written_layouts())
def test_layouts_survive_pickling(layout):
    copy = pickle.loads(pickle.dumps(layout))
    assert copy == layout and hash(copy) == hash(layout)


@given(written_layouts())
def test_dual_swaps_sum_and_copy_and_nothing_else(layout):
    swap = {"sum": "copy", "mean": "copy", "copy": "sum"}
    assert dict(layout.dual.tags).keys() == {swap[kind] for kind, _ in layout.tags}
    for kind, axes in layout.tags:
        assert set(axes) <= set(layout.dual.tagged(swap[kind]))
    assert [dim.shards for dim in layout.dual.dims] == [dim.shards for dim in layout.dims]
    assert layout.dual.dual.dims == layout.tangent.dims
    if "constant(" not in str(layout):
        assert layout.tangent == layout


@pytest.mark.parametrize(
    ("sloppy", "canonical"),
    [
        ("  b   s/cp\tc ", "b s/cp c"),
        ("s/(cp) / block( dp )", "s/cp/dp"),
        ("s/block(a,b)", "s/(a,b)"),
        ("s/block(a,b,4,2)", "s/block(a,b,4,2)"),
        ("s/zigzag( a , b )/c", "s/zigzag(a,b)/c"),
        ("n|copy(d) sum(b) sum(a)", "n | sum(a,b) copy(d)"),
        ("| sum(a)", "() | sum(a)"),
        ("()", "()"),
        ("( )|mean(a)", "() | mean(a)"),
        ("... c/a", "... c/a"),
        ("h/a : halo( 1 , -2 , zero )", "h/a:halo(1,-2)"),
        ("h:halo(1,1,pole)", "h:halo(1,1,pole)"),
        ("h/a:window(p=1, s=1, k=3, d=1)", "h/a:window(k=3,p=1)"),
        ("h:window(k=3,s=2,edge)", "h:window(k=3,s=2,edge)"),
        ("h:window(k=3,p=[ 1,2 ],out=aligned, edge,none)", "h:window(k=3,p=[1,2],out=aligned,edge,none)"),
        ("h/a:halo([1,0],[ 0,-1 ], edge, edge)", "h/a:halo([1,0],[0,-1],edge)"),
        ("h:halo(1,1,constant( 1.50 ))", "h:halo(1,1,constant(1.5))"),
        ("h:halo(1,1,constant(-inf),constant(2e3))", "h:halo(1,1,constant(-inf),constant(2000))"),
        ("h:halo(1,1,constant(0))", "h:halo(1,1,constant)"),
        ("h:halo(1,1,pole( w , -1 ),pole(-1)) w", "h:halo(1,1,pole(w,-1),pole(-1)) w"),
        ("s/sizes( a , b , 3,0,3,2 )", "s/sizes(a,b,3,0,3,2)"),
        ("s/zigzag(a, 4,8,4)/cyclic( b, 2 )", "s/zigzag(a,4,8,4)/cyclic(b,2)"),
        ("s/intervals(a,[0,4 ,12,16],[ 4,12 ])", "s/intervals(a,[0,4,12,16],[4,12])"),
        ("h:fold( halo(1,1) ) w", "h:fold(halo(1,1)) w"),
    ],
)
def test_canonical_spelling(sloppy, canonical):
    assert str(Layout.parse(sloppy)) == canonical
    assert Layout.parse(sloppy) == Layout.parse(canonical)


@pytest.mark.parametrize(
    ("layout", "dual"),
    [
        ("n/dp d", "n/dp d"),
        ("n d | sum(a) copy(b)", "n d | sum(b) copy(a)"),
        ("n d | mean(a)", "n d | copy(a)"),
        ("h/a:halo(1,2,edge)", "h/a:fold(halo(1,2,edge))"),
        ("h/a:fold(window(k=3))", "h/a:window(k=3)"),
    ],
)
def test_dual(layout, dual):
    assert str(Layout.parse(layout).dual) == dual


def test_max_has_no_dual():
    with pytest.raises(LinearityError) as caught:
        _ = Layout.parse("n | max(a)").dual
    assert str(caught.value) == (
        "'n | max(a)' lacks a dual: max and min are not linear\n"
        "  their gradient goes to the winners; redistribute of either bridge computes it"
    )


def test_ellipsis_stands_for_the_missing_dims():
    assert str(Layout.parse("b/a ... c").resolved(4)) == "b/a _0 _1 c"
    assert Layout.parse("b/a ... c").resolved(2) == Layout.parse("b/a c")


@pytest.mark.parametrize(
    ("text", "ndim", "message"),
    [
        (
            "b c",
            3,
            "'b c' has 2 dims, the array has 3\n"
            "  write one name per dim, or '...' for any number of unsharded dims",
        ),
        ("b ... c", 1, "'b ... c' needs at least 2 dims, the array has 1"),
    ],
)
def test_rank_errors(text, ndim, message):
    with pytest.raises(ShapeError) as caught:
        Layout.parse(text).resolved(ndim)
    assert str(caught.value) == message


ERRORS = """
NotationError: unexpected character '$' in
    'n/a $d'
         ^
---
NotationError: expected the end, found ')' in
    'n d ) e'
         ^
---
NotationError: an empty layout in
    ''
     ^
  a scalar is written ()
---
NotationError: dim 'n' is named twice in
    'b n/a n'
           ^
  a diagonal is taken before
---
NotationError: '...' stands for unsharded dims in
    '.../a'
        ^
  name the dim to shard or widen it
---
NotationError: '...' stands for unsharded dims in
    '...:halo(1,1)'
        ^
  name the dim to shard or widen it
---
NotationError: expected a name, found '|' in
    'n/ | sum(a)'
        ^
  a mesh axis follows '/', as in s/cp or s/zigzag(cp)
---
NotationError: unknown order 'zagzig' in
    's/zagzig(a)'
       ^^^^^^
  orders are: block, balanced, zigzag, cyclic, sizes, intervals
---
NotationError: expected ')', found 'b' in
    's/(a b)'
          ^
---
NotationError: expected a name, found ')' in
    's/(a,)'
          ^
---
NotationError: expected a name, found the end in
    'n |'
        ^
  tags are: sum, mean, max, min, copy
---
NotationError: unknown tag 'avg' in
    'n | avg(a)'
         ^^^
  did you mean 'mean'? tags are: sum, mean, max, min, copy
---
NotationError: expected '(', found the end in
    'n | sum'
            ^
---
NotationError: expected a name, found '2' in
    'n | sum(2)'
             ^
---
NotationError: mesh axis 'a' is used twice in
    'n/a d/b/a'
             ^
  an axis shards one dim or carries one tag
---
NotationError: mesh axis 'a' is used twice in
    'n/a | copy(b,a)'
                  ^
  an axis shards one dim or carries one tag
---
NotationError: max and sum in one layout in 'n | sum(a) max(b)'
  the result depends on their order: reduce one of them first
---
NotationError: unknown overlap 'hola' in
    'h/a:hola(1,1)'
         ^^^^
  overlaps are: halo, window, fold
---
NotationError: expected a name, found the end in
    'h/a:'
         ^
  overlaps are: halo, window, fold
---
NotationError: expected ',', found ')' in
    'h:halo(1)'
             ^
  as in halo(1,1)
---
NotationError: expected a whole number, found 'x' in
    'h:halo(x,1)'
            ^
---
NotationError: unknown boundary 'mirror' in
    'h:halo(1,1,mirror)'
                ^^^^^^
  did you mean 'reflect'? boundaries are: zero, constant, periodic, reflect, edge, none, pole
---
NotationError: a window needs its width k in
    'h:window(s=2)'
             ^
  as in window(k=3)
---
NotationError: unknown or repeated window option 'q' in
    'h:window(k=3,q=2)'
                  ^
  options are: k, s, d, p, out; each once
---
NotationError: unknown or repeated window option 'k' in
    'h:window(k=3,k=2)'
                  ^
  options are: k, s, d, p, out; each once
---
NotationError: window s=0 is too small in
    'h:window(k=3,s=0)'
                    ^
  k, s, d >= 1 and p >= 0
---
NotationError: expected a name, found '3' in
    'h:window(3)'
              ^
  as in window(k=3,s=2,p=1)
---
NotationError: unknown output rule 'even' in
    'h:window(k=3,out=even)'
                      ^^^^
  rules are: balanced, aligned
---
NotationError: window padding p has 3 numbers in
    'h:window(k=3,p=[1,2,3])'
                    ^
  as in p=1 or p=[1,2]
---
NotationError: window p=(1, -1) is negative in
    'h:window(k=3,p=[1,-1])'
                    ^
  k, s, d >= 1 and p >= 0
---
NotationError: 2 widths before and 1 after in
    'h/a:halo([1,1],[1])'
                    ^
  as many widths on both sides
---
NotationError: expected a number, found 'x' in
    'h:halo(1,1,constant(x))'
                         ^
  as in constant(1.5)
---
NotationError: edge takes no argument in
    'h:halo(1,1,edge(1))'
                     ^
  only constant(1.5) and pole(w,-1) do
---
NotationError: sign 2 of a pole in
    'h:halo(1,1,pole(w,2)) w'
                       ^
  rows from beyond a pole are kept (1) or negated (-1)
---
NotationError: no numbers in sizes in
    's/sizes(a)'
       ^^^^^
  sizes takes the rows of every part, 0 or more, as in sizes(cp,3,0,3,2)
---
NotationError: a number below 0: -1 in
    's/sizes(a,3,-1)'
                 ^^
  sizes takes the rows of every part, 0 or more, as in sizes(cp,3,0,3,2)
---
NotationError: expected a whole number, found 'b' in
    's/sizes(a,3,b)'
                 ^
---
NotationError: a fold of a fold in
    'h:fold(fold(halo(1,1)))'
       ^^^^
  fold(fold(x)) is x: write x
---
NotationError: expected '->', found '=' in
    'b s/cp =>'
            ^
  an expression reads: layout -> layout
---
NotationError: an empty layout in
    '-> n'
     ^^
  a scalar is written ()
---
NotationError: mesh axis 'a' is used twice in
    'n/a d -> n/a d/a'
                    ^
  an axis shards one dim or carries one tag
---
NotationError: dim names differ across the arrow in
    'b s c -> b q c'
                ^
  left: b s c   right: b q c   (the same names, in any order; einsum sums dims)
---
NotationError: dim names differ across the arrow in
    'b s -> s b c'
                ^
  left: b s   right: s b c   (the same names, in any order; einsum sums dims)
---
NotationError: a pole rolls the next dim, and the order of dims changes in
    'b/dp s -> s b/dp:halo(1,1,pole)'
                 ^^^^^^^^^^^^^^^^^^^
  name the dim, as in pole(w)
---
NotationError: unknown mesh axis 'cq' in
    'b s/cq -> b s'
         ^^
  the mesh has: dp=2, cp=4
---
NotationError: unknown mesh axis 'tp' in
    'b s/cp -> b s | sum(tp)'
                         ^^
  the mesh has: dp=2, cp=4
---
NotationError: 2 numbers in cyclic in
    's/cyclic(a,2,3)'
       ^^^^^^
  cyclic takes no number, or the rows dealt out together, 1 or more, as in cyclic(cp,16)
---
NotationError: 1 number in cyclic in
    's/cyclic(a,0)'
       ^^^^^^
  cyclic takes no number, or the rows dealt out together, 1 or more, as in cyclic(cp,16)
---
NotationError: 1 number in balanced in
    's/balanced(a,2)'
       ^^^^^^^^
  balanced takes no number, as in s/balanced(cp)
---
NotationError: '4' in intervals in
    's/intervals(a,4)'
                   ^
  intervals takes [start,stop,...] of every part, as in intervals(cp,[0,4,12,16],[4,12])
---
NotationError: '[4,4]' in zigzag in
    's/zigzag(a,[4,4])'
                ^
  zigzag takes no number, or the lengths of documents, as in zigzag(cp,4,8,4)
"""


@pytest.mark.parametrize(
    "message", ERRORS.strip("\n").split("\n---\n"), ids=lambda m: re.split(r" in\s", m)[0][15:]
)
def test_error_messages(message):
    """The text quoted in a message is parsed again and must raise the same message."""
    text = re.search(r" in\s+'(.*)'$", message, re.M)[1]
    is_expression = "->" in text or "=>" in text
    with pytest.raises(NotationError) as caught:
        xs.plan(text, xs.Mesh(dp=2, cp=4), (4, 4)) if is_expression else Layout.parse(text)
    assert f"NotationError: {caught.value}" == message


@pytest.mark.parametrize("parse", [Layout.parse, parse_expression])
def test_values_that_are_no_text(parse):
    with pytest.raises(NotationError, match="is text, not int"):
        parse(3)


def test_errors_survive_pickling():
    with pytest.raises(NotationError) as caught:
        Layout.parse("n/a/a")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy), copy.span) == (NotationError, str(caught.value), caught.value.span)


@pytest.mark.parametrize(
    ("expression", "shape", "part"),
    [
        ("n d/sizes(a,3,3) -> n d", (8, 8), "d/sizes(a,3,3)"),
        ("n/a d -> n d/sizes( a, 3,3,2 )", (8, 8), "d/sizes( a, 3,3,2 )"),
        ("h/a w -> h/a:halo([1,2,3],1) w", (8, 8), "h/a:halo([1,2,3],1)"),
        ("h/a w -> h/a:halo(1,1,pole) w", (8, 7), "h/a:halo(1,1,pole)"),
    ],
)
def test_what_does_not_fit_the_shape_is_marked_as_the_user_wrote_it(expression, shape, part):
    for made in (
        lambda: xs.plan(expression, xs.Mesh(a=2), shape),
        lambda: xs.plan(expression, src_mesh=xs.Mesh(a=2), dst_mesh=xs.Mesh(a=2), shape=shape),
    ):
        with pytest.raises(ShapeError) as caught:
            made()
        error = caught.value
        assert (error.text, error.span and expression[slice(*error.span)]) == (expression, part)
