"""What users write for numbers, shapes, bytes and names: taken, or refused in our own words."""

import doctest
import re

import numpy as np
import pytest

import xshard as xs
from xshard import arguments, ops
from xshard.arguments import parse_bytes
from xshard.errors import DtypeError, MeshError, NotationError, PlanError, ShapeError
from xshard.layout.layout import parse_expression

MESH = xs.Mesh(cp=4)
ASK = "b s/cp -> b/cp s", MESH, (8, 8)
ENDS = {"src_mesh": MESH, "dst_mesh": MESH, "shape": (8, 8)}


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("1024", 1024),
        ("512 B", 512),
        ("3MiB", 3 << 20),
        ("2GiB", 2 << 30),
        ("1.5KiB", 1536),
        ("0", 0),
    ],
)
def test_bytes_are_read(text, n):
    assert parse_bytes(text) == n


@pytest.mark.parametrize("text", ["", "2GB", "two", "-1", "1 2"])
def test_what_is_no_number_of_bytes(text):
    with pytest.raises(xs.XshardError, match="not a number of bytes"):
        parse_bytes(text)


def test_numbers_of_numpy_are_numbers():
    plan = xs.plan(*ASK)
    layout = xs.Layout.parse("b s/cp")
    eight = np.int64(8)
    assert xs.plan(["b s/cp", "b/cp s"], *ASK[1:]) == plan  # and a list is a pair
    assert xs.Mesh(cp=np.int32(4)) == MESH and type(xs.Mesh(cp=np.int32(4)).sizes[0]) is int
    assert xs.plan(*ASK[:2], (eight, 8)) is xs.plan(*ASK[:2], np.array([8, 8])) is plan
    assert xs.plan(*ASK[:2], (eight, eight)).to_json() == plan.to_json()
    assert layout.local_shape(MESH, np.array([8, 8]), np.int64(1)) == (8, 2)
    assert layout.positions(MESH, (eight, eight), np.int64(1), 1).tolist() == [2, 3]
    assert xs.Sharding("b s/cp", MESH, (eight, 8)) == xs.Sharding(layout, MESH, (8, 8))
    blocks = xs.reference.scatter(np.ones((8, 8)), layout, MESH)
    assert xs.reference.gather(blocks, layout, MESH, [eight, 8]).all()
    turned = xs.plan(ASK[0], **ENDS, dst_devices=(3, 2, 1, 0))
    assert xs.plan(ASK[0], **ENDS, dst_devices=np.array([3, 2, 1, 0])) is turned
    assert ops.halo("cp", np.int64(1), "zero") == ops.halo("cp", 1, "zero")
    assert ops.halo("cp", (1, np.array([2, 0])), "zero") == ops.halo("cp", (1, (2, 0)), "zero")
    assert ops.dims((2, 2), {np.int64(-1): "cp"}) == "d0 d1/cp"


def test_a_limit_in_any_form():
    limits = ["2GiB", 2**31, float(2**31), np.int64(2**31)]
    assert len({xs.plan(*ASK, memory_limit=limit) for limit in limits}) == 1
    assert xs.plan(*ASK, memory_limit="2GiB").memory_limit == 2**31


NO_MESH = " is not a mesh\n  write "
NO_SHAPE = " is not a sequence of lengths\n  as in shape="
NO_EXPRESSION = ' is no expression\n  "layout -> layout"'


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: xs.Mesh("dp=2,cp=4"), MeshError, f"'dp=2,cp=4'{NO_MESH}Mesh.parse('dp=2,cp=4')"),
        (lambda: xs.Mesh(8), MeshError, f"8{NO_MESH}Mesh(dp=2, cp=4)"),
        (lambda: xs.Mesh(cp=True), MeshError, "axis 'cp' has size True"),
        (lambda: xs.Mesh.parse(8), xs.XshardError, "text is 8, not str\n  parse takes str"),
        (lambda: xs.plan(ASK[0], "cp=4", (8, 8)), MeshError, f"'cp=4'{NO_MESH}Mesh.parse('cp=4')"),
        (lambda: xs.plan(ASK[0], {"cp": 4}, (8, 8)), MeshError, f"{NO_MESH}Mesh({{'cp': 4}})"),
        (lambda: xs.plan(ASK[0], (8, 8), MESH), MeshError, f"(8, 8){NO_MESH}"),
        (lambda: xs.plan(ASK[0], **ENDS | {"src_mesh": "cp=4"}), MeshError, NO_MESH),
        (lambda: xs.plan(MESH, *ASK[:1], (8, 8)), NotationError, f"Mesh(cp=4){NO_EXPRESSION}"),
        (lambda: xs.plan(None, *ASK[1:]), NotationError, f"None{NO_EXPRESSION}"),
        (lambda: xs.plan(("b s", "b s", "b s"), *ASK[1:]), NotationError, NO_EXPRESSION),
        (lambda: xs.plan(("b s", MESH), *ASK[1:]), NotationError, "a layout is text, not Mesh"),
        (lambda: xs.plan(*ASK[:2], 8), ShapeError, f"the shape 8{NO_SHAPE}(8,)"),
        (lambda: xs.plan(*ASK[:2], "8,8"), ShapeError, f"the shape '8,8'{NO_SHAPE}"),
        (lambda: xs.plan(*ASK[:2], (True, 8)), ShapeError, "has True, not a length >= 0"),
        (
            lambda: xs.plan(*ASK, memory_limit="2GB"),
            xs.XshardError,
            "'2GB' is not a number of bytes",
        ),
        (
            lambda: xs.plan(*ASK, memory_limit=1.5),
            PlanError,
            "memory_limit is 1.5\n  a number of bytes",
        ),
        (
            lambda: xs.plan(*ASK, profile="h10"),
            xs.XshardError,
            "\n  did you mean 'h100'? shipped are:",
        ),
        (
            lambda: xs.plan(*ASK, "bf16"),
            DtypeError,
            "dtype 'bf16'\n  did you mean 'bfloat16'? as in",
        ),
        (lambda: xs.plan(*ASK, "fp32"), DtypeError, "did you mean 'float32'?"),
        (lambda: xs.plan(*ASK, "f16"), DtypeError, "did you mean 'float16'?"),
        (
            lambda: xs.Layout(["b"]),
            NotationError,
            "['b'] is not a tuple of dims\n  write Layout('b s/cp')",
        ),
        (lambda: xs.Layout.parse(["b"]), NotationError, "a layout is text, not list"),
        (lambda: xs.Layout.parse(np.ones(99)), NotationError, "a layout is text, not ndarray"),
        (lambda: parse_expression(8), NotationError, "an expression is text, not int"),
        (lambda: xs.Sharding("b", "cp=4", (8,)), MeshError, f"'cp=4'{NO_MESH}"),
        (lambda: xs.Layout.parse("b").local_shape("cp=4", (8,), 0), MeshError, NO_MESH),
        (
            lambda: xs.Layout.parse("b").local_shape(MESH, 8, 0),
            xs.XshardError,
            "shape is 8, not Sequence[int]",
        ),
        (lambda: ops.halo("cp", (1, 2, 3), "zero"), ShapeError, "a halo of width (1, 2, 3)"),
        (lambda: ops.dims((2,), {"n": "cp"}), ShapeError, "no dim 'n' in a block of shape (2,)"),
        (lambda: ops.tag("sum", MESH), MeshError, "Mesh(cp=4) is not a mesh axis"),
        (
            lambda: xs.plan(ASK[0], **ENDS, dst_devices=4),
            xs.XshardError,
            "dst_devices is 4, not Sequence[int] | None",
        ),
    ],
)
def test_an_error_of_ours(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_the_examples_run():
    assert doctest.testmod(arguments).failed == 0 < doctest.testmod(arguments).attempted
