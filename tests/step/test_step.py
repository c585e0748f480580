"""Operations and training steps as values: what one axis may do, and what is refused."""

import pickle

import pytest

from xshard import Mesh, Op, TrainingStep
from xshard.contractions.types import einsum_type
from xshard.errors import NotationError, PlanError, ShapeError

UP = Op("up", "b s c, (g d) c -> b s (g d)", ("x", "up.weight"))


def a_step(**changes):
    ops = [UP, Op("loss", "b s (g d) ->", ("up",), kind="loss")]
    lengths = {"b": 8, "s": 16, "c": 32, "g": 4, "d": 8}
    return TrainingStep(
        **{
            "ops": ops,
            "lengths": lengths,
            "inputs": {"x": "b s c"},
            "parameters": {"up.weight": "(g d) c"},
        }
        | changes
    )


@pytest.mark.parametrize("rule", UP.axis_rules[:-1], ids=UP.text_of)
def test_rules_of_a_contraction_are_types_of_local_contractions(rule):
    operands, result = UP.text_of(rule).split("->")
    plain = f"{operands}-> {' '.join(UP.dims[-1])}"
    assert str(einsum_type(plain, Mesh(x=2))) == result.strip()


def test_rules_by_class():
    def texts(*args, **kwargs):
        op = Op("op", *args, **kwargs)
        return [op.text_of(rule) for rule in op.axis_rules]

    assert texts("b c, c -> b c", ("x", "w"), kind="pointwise", whole="c") == [
        "b/x c, c | copy(x) -> b/x c",
        "b c, c -> b c",
    ]
    assert texts("b c, b c -> b c", ("x", "y"), kind="linear")[2:] == [
        "b c | sum(x), b c | sum(x) -> b c | sum(x)",
        "b c, b c -> b c",
    ]
    assert texts("b c -> b c", ("x",), kind="opaque") == ["b c -> b c"]
    assert (
        texts("b, v c -> b c", ("i", "w"), kind="lookup")[-2]
        == "b | copy(x), v/x c -> b c | sum(x)"
    )
    own = "b s/x c -> e b n/x c"
    assert texts("b s c -> e b n c", ("x",), rules=((1, 2),)) == [own, "b s c -> e b n c"]


def test_a_step_survives_pickling():
    step = a_step()
    assert pickle.loads(pickle.dumps(step)) == step


def test_an_activation_of_several_operations_is_shared():
    ops = [
        Op("norm", "b s c -> b s c", ("x",), kind="pointwise", whole="c"),
        Op("q", "b s c, g c -> b s g", ("norm", "q.weight")),
        Op("k", "b s c, g c -> b s g", ("norm", "k.weight")),
        Op("loss", "b s g, b s g ->", ("q", "k"), kind="loss"),
    ]
    step = a_step(ops=ops, parameters={"q.weight": "g c", "k.weight": "g c"}).with_shares
    assert [op.name for op in step.ops] == ["norm", "norm (shared)", "q", "k", "loss"]
    assert step.by_name["k"].operands == ("norm (shared)", "k.weight")
    assert a_step().with_shares == a_step()


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Op("a", "b c", ("x",)), NotationError, "expected '->'"),
        (lambda: Op("a", "b (c -> b", ("x",)), NotationError, r"expected '\)'"),
        (lambda: Op("a", "b b -> b", ("x",)), NotationError, "'b b'1' in an operation"),
        (lambda: Op("a", "b/x -> b", ("x",)), NotationError, "'b/x' in an operation"),
        (lambda: Op("a", "b c -> b", ("x", "y")), NotationError, "1 operands and 2 names: x, y"),
        (
            lambda: Op("a", "b c -> b", ("x",), kind="contracton"),
            PlanError,
            "did you mean 'contraction'",
        ),
        (lambda: Op("a", "b c -> b", ("x",), whole="d"), NotationError, "no dim 'd'"),
        (
            lambda: a_step(lengths={"b": 8, "s": 16, "c": 32, "g": 4}),
            ShapeError,
            "dim 'd' lacks a length",
        ),
        (lambda: a_step(inputs={"y": "b s c"}), PlanError, "no array 'x'"),
        (lambda: a_step(inputs={"x": "b c"}), ShapeError, r"x is 'b c' \(8, 32\), used as 'b s c'"),
        (lambda: a_step(ops=[UP, UP]), PlanError, "another array of this name"),
        (
            lambda: a_step(inputs={"up.weight": "b s c"}),
            PlanError,
            "'up.weight' is an input and a parameter",
        ),
        (
            lambda: a_step(parameters={"up.weight": "(g d) c", "w": "c"}),
            PlanError,
            "no operation uses w",
        ),
    ],
)
def test_errors(make, error, words):
    with pytest.raises(error, match=words):
        make()
