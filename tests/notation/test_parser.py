"""Text <-> layouts, and the messages for malformed text. Long because one table has every message."""

import pickle

import pytest
from hypothesis import given

import xshard as xs
from tests.messages import refused, rows, said
from tests.strategies import written_layouts
from xshard import Layout
from xshard.errors import LinearityError, NotationError, ShapeError
from xshard.plans.expression import sides


@given(written_layouts())
def test_layouts_survive_text(layout):
    """The dual swaps sum and copy and nothing else."""
    text = str(layout)
    copy = pickle.loads(pickle.dumps(layout))
    assert Layout.parse(text) == copy == layout and hash(copy) == hash(layout)
    assert str(Layout.parse(text)) == text


@given(written_layouts())
def test_the_dual_of_a_layout(layout):
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
        (
            "h:window(k=3,p=[ 1,2 ],out=aligned, edge,none)",
            "h:window(k=3,p=[1,2],out=aligned,edge,none)",
        ),
        ("h/a:halo([1,0],[ 0,-1 ], edge, edge)", "h/a:halo([1,0],[0,-1],edge)"),
        ("h:halo(1,1,constant( 1.50 ))", "h:halo(1,1,constant(1.5))"),
        ("h:halo(1,1,constant(-inf),constant(2e3))", "h:halo(1,1,constant(-inf),constant(2000))"),
        ("h:halo(1,1,constant(0))", "h:halo(1,1,constant)"),
        ("h:halo(1,1,pole( w , -1 ),pole(-1)) w", "h:halo(1,1,pole(w,-1),pole(-1)) w"),
        ("s/sizes( a , b , 3,0,3,2 )", "s/sizes(a,b,3,0,3,2)"),
        ("s/zigzag(a, 4,8,4)/cyclic( b, 2 )", "s/zigzag(a,4,8,4)/cyclic(b,2)"),
        ("s/intervals(a,[0,4 ,12,16],[ 4,12 ])", "s/intervals(a,[0,4,12,16],[4,12])"),
        ("s/intervals(a,[],[ ],[0,2])", "s/intervals(a,[],[],[0,2])"),
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
    message = "'n | max(a)' lacks a dual: max and min are not linear\n"
    message += "  their gradient goes to the winners; redistribute of either bridge computes it"
    with refused(LinearityError, message):
        _ = Layout.parse("n | max(a)").dual


def test_ellipsis_stands_for_the_missing_dims():
    assert str(Layout.parse("b/a ... c").resolved(4)) == "b/a _0 _1 c"
    assert Layout.parse("b/a ... c").resolved(2) == Layout.parse("b/a c")


def test_rank_errors():
    hint = "write one name per dim, or '...' for any number of unsharded dims"
    with refused(ShapeError, f"'b c' has 2 dims, the array has 3\n  {hint}"):
        Layout.parse("b c").resolved(3)
    hint = "'...' fits it; among rules that is one for its name, before this one"
    with refused(ShapeError, f"'b ... c' needs at least 2 dims, the array has 1\n  {hint}"):
        Layout.parse("b ... c").resolved(1)


ERRORS = """
n/a «$»d   unexpected character '$'
n d «)» e   expected the end, found ')'
«»   an empty layout   a scalar is written ()
b n/a «n»   dim 'n' is named twice   an einsum takes diagonals: i i -> i
...«/»a   '...' stands for unsharded dims   name the dim to shard or widen it
...«:»halo(1,1)   '...' stands for unsharded dims   name the dim to shard or widen it
n/ «|» sum(a)   expected a name, found '|'   a mesh axis follows '/', as in s/cp or s/zigzag(cp)
s/«zagzig»(a)   unknown order 'zagzig'
    orders are: block, balanced, zigzag, cyclic, sizes, intervals, by, spread
s/(a «b»)   expected ')', found 'b'
s/(a,«)»   expected a name, found ')'
n |«»   expected a name, found the end   tags are: sum, mean, max, min, copy
n | «avg»(a)   unknown tag 'avg'   did you mean 'mean'? tags are: sum, mean, max, min, copy
n | sum«»   expected '(', found the end
n | sum(«2»)   expected a name, found '2'
n/a d/b/«a»   mesh axis 'a' is used twice   an axis shards one dim or carries one tag
n/a | copy(b,«a»)   mesh axis 'a' is used twice   an axis shards one dim or carries one tag
n | sum(a) max(b)   max and sum in one layout   the result depends on their order: reduce one of them first
h/a:«hola»(1,1)   unknown overlap 'hola'   overlaps are: halo, window, reads, fold
h/a:«»   expected a name, found the end   overlaps are: halo, window, reads, fold
h:halo(1«)»   expected ',', found ')'   as in halo(1,1)
h:halo(«x»,1)   expected a whole number, found 'x'
h:halo(1,1,«mirror»)   unknown boundary 'mirror'
    did you mean 'reflect'? boundaries are: zero, constant, periodic, reflect, edge, none, pole
h:window«(»s=2)   a window needs its width k   as in window(k=3)
h:window(k=3,«q»=2)   unknown or repeated window option 'q'   options are: k, s, d, p, out; each once
h:window(k=3,«k»=2)   unknown or repeated window option 'k'   options are: k, s, d, p, out; each once
h:window(k=3,s=«0»)   window s=0 is too small   k, s, d >= 1 and p >= 0
h:window(«3»)   expected a name, found '3'   as in window(k=3,s=2,p=1)
h:window(k=3,out=«even»)   unknown output rule 'even'   rules are: balanced, aligned
h:window(k=3,p=«[»1,2,3])   window padding p has 3 numbers   as in p=1 or p=[1,2]
h:window(k=3,p=«[»1,-1])   window p=(1, -1) is negative   k, s, d >= 1 and p >= 0
h/a:halo([1,1],«[»1])   2 widths before and 1 after   as many widths on both sides
h:halo(1,1,constant(«x»))   expected a number, found 'x'   as in constant(1.5)
h:halo(1,1,edge(«1»))   edge takes no argument   only constant(1.5) and pole(w,-1) do
h:halo(1,1,pole(w,«2»)) w   sign 2 of a pole   rows from beyond a pole are kept (1) or negated (-1)
s/«sizes»(a)   no numbers in sizes   sizes takes the rows of every part, 0 or more, as in sizes(cp,3,0,3,2)
s/sizes(a,3,«-1»)   a number below 0: -1
    sizes takes the rows of every part, 0 or more, as in sizes(cp,3,0,3,2)
s/sizes(a,3,«b»)   expected a whole number, found 'b'
h:«fold»(fold(halo(1,1)))   a fold of a fold   fold(fold(x)) is x: write x
b s/cp «=»>   expected '->', found '='   an expression reads: layout -> layout
«->» n   an empty layout   a scalar is written ()
n/a d -> n/a d/«a»   mesh axis 'a' is used twice   an axis shards one dim or carries one tag
b s c -> b «q» c   dim names differ across the arrow
    left: b s c   right: b q c   (the same names, in any order; einsum sums dims)
b s -> s b «c»   dim names differ across the arrow
    left: b s   right: s b c   (the same names, in any order; einsum sums dims)
b/dp s -> s «b/dp:halo(1,1,pole)»   a pole rolls the next dim, and the order of dims changes
    name the dim, as in pole(w)
b s/«cq» -> b s   unknown mesh axis 'cq'   the mesh has: dp=2, cp=4
b s/cp -> b s | sum(«tp»)   unknown mesh axis 'tp'   the mesh has: dp=2, cp=4
s/«cyclic»(a,2,3)   2 numbers in cyclic
    cyclic takes no number, or the rows dealt out together, 1 or more, as in cyclic(cp,16)
s/«cyclic»(a,0)   1 number in cyclic
    cyclic takes no number, or the rows dealt out together, 1 or more, as in cyclic(cp,16)
s/«balanced»(a,2)   1 number in balanced   balanced takes no number, as in s/balanced(cp)
s/zigzag(a,[«]»)   expected a whole number, found ']'
s/intervals(a,«4»)   '4' in intervals
    intervals takes [start,stop,...] of every part, as in intervals(cp,[0,4,12,16],[4,12])
s/zigzag(a,«[»4,4])   '[4,4]' in zigzag
    zigzag takes no number, or the lengths of documents, as in zigzag(cp,4,8,4)
n | «psum»(a) -> n   unknown tag 'psum'   did you mean 'sum'? tags are: sum, mean, max, min, copy
n | «meen»(a) -> n   unknown tag 'meen'   did you mean 'mean'? tags are: sum, mean, max, min, copy
n | «banana»(a) -> n   unknown tag 'banana'   tags are: sum, mean, max, min, copy
n/a «→» n   unexpected character '→'   did you mean '->'? an expression reads: layout -> layout
n/a «-»-> n   unexpected character '-'   did you mean '->'? an expression reads: layout -> layout
n/a«*»b -> n   unexpected character '*'   axes taken as one are listed, as in s/(dp,cp)
n/«striped»(a) -> n   unknown order 'striped'
    did you mean 'cyclic'? orders are: block, balanced, zigzag, cyclic, sizes, intervals, by, spread
n/«zig_zag»(a) -> n   unknown order 'zig_zag'
    did you mean 'zigzag'? orders are: block, balanced, zigzag, cyclic, sizes, intervals, by, spread
n/by(a,«cells») d -> n   no map 'cells'   pass maps={'cells': xs.Owners(...)}
n:reads(«near») -> n   no map 'near'   pass maps={'near': xs.Needs(...)}
n/by(a«)» -> n   expected ',', found ')'   by takes its axes and a map, as in by(gp,cells)
n/by(a,«[»1]) -> n   expected a name, found '['   the name of Owners in maps=
n/a:halo(1,1,«circular») -> n   unknown boundary 'circular'
    did you mean 'periodic'? boundaries are: zero, constant, periodic, reflect, edge, none, pole
"""


@pytest.mark.parametrize(("text", "message"), rows(ERRORS))
def test_error_messages(text, message):
    is_expression = any(arrow in text for arrow in ("->", "=>", "→"))
    with refused(NotationError, message):
        xs.plan(text, xs.Mesh(dp=2, cp=4), (4, 4)) if is_expression else Layout.parse(text)


def test_a_space_of_another_kind_is_marked_itself():
    """Such spaces come with texts that are pasted from pages."""
    with pytest.raises(NotationError) as caught:
        xs.plan("n/a\N{NO-BREAK SPACE}-> n", xs.Mesh(a=2), (4,))
    assert caught.value.span == (3, 4)
    assert caught.value.reason == "unexpected character '\\xa0'"
    assert caught.value.hint == "it looks like a space: write a plain one"


def test_a_move_sums_no_dims():
    hint = "left: b s c   right: c b   (the same names, in any order; einsum sums dims)"
    with refused(
        NotationError, said("b «s»/tp c -> c b", "dim names differ across the arrow", hint)
    ):
        sides("b s/tp c -> c b")


def test_errors_survive_pickling():
    with pytest.raises(NotationError) as caught:
        Layout.parse("n/a/a")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy), copy.span) == (
        NotationError,
        str(caught.value),
        caught.value.span,
    )


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
    mesh = xs.Mesh(a=2)
    for meshes in ({"mesh": mesh}, {"src_mesh": mesh, "dst_mesh": mesh}):
        with pytest.raises(ShapeError) as caught:
            xs.plan(expression, **meshes, shape=shape)
        error = caught.value
        assert (error.text, error.span and expression[slice(*error.span)]) == (expression, part)
