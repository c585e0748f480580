"""What devices get that each contract their own blocks, and that gradients are such contractions again."""

from __future__ import annotations

import random

import numpy as np
import pytest

import xshard as xs
from tests import oracle
from tests.messages import refused, rows
from xshard.contractions.types import local_type
from xshard.notation.parser import Dim, Shard

MESHES = (xs.Mesh(a=2), xs.Mesh(a=3, b=2), xs.Mesh(a=2, b=2, c=2))
LENGTHS = {"i": 4, "j": 5, "k": 6, "l": 1, "m": 3}
ORDERS = ("block", "block", "balanced", "zigzag", "cyclic")


def einsum(
    operands: list[tuple[tuple[str, ...], np.ndarray]], names: tuple[str, ...]
) -> np.ndarray:
    """numpy's own, over the names of dims."""
    left = ",".join("".join(dims) for dims, _ in operands)
    return np.einsum(f"{left}->{''.join(names)}", *(x for _, x in operands))


def locally(operands, names):
    """Layouts and blocks of the operands -> the block that every device gets."""
    each = zip(*(blocks for _, blocks in operands), strict=True)
    return [
        einsum([(x.names, b) for (x, _), b in zip(operands, own, strict=True)], names)
        for own in each
    ]


def drawn(rng: random.Random) -> tuple[xs.Mesh, list[xs.Layout], tuple[str, ...]]:
    """A contraction in which each axis plays one part of the table."""
    mesh = rng.choice(MESHES)
    names = rng.sample(list(LENGTHS), rng.randint(1, len(LENGTHS)))
    dims = [rng.sample(names, rng.randint(0, min(3, len(names)))) for _ in range(rng.randint(1, 3))]
    used = sorted({name for some in dims for name in some})
    result = tuple(rng.sample(used, rng.randint(0, len(used))))
    cuts: dict[str, tuple[Shard, ...]] = dict.fromkeys(used, ())
    tags: list[dict[str, tuple[str, ...]]] = [{} for _ in dims]

    def tag(i: int, kind: str, axis: str) -> None:
        tags[i][kind] = (*tags[i].get(kind, ()), axis)

    for axis in rng.sample(mesh.axes, len(mesh.axes)):
        part = rng.choice(
            ["cut", "cut", "cut", "sum", "copy", "none"] if used else ["sum", "copy", "none"]
        )
        owner = rng.randrange(len(dims))
        if part == "cut":
            name = rng.choice(used)
            cuts[name] += (Shard((axis,), rng.choice(ORDERS)),)
        for i, some in enumerate(dims):
            if part == "cut" and name not in some:
                tag(i, "copy", axis)
            elif part == "sum":
                tag(i, "sum" if i == owner else "copy", axis)
            elif part == "copy":
                tag(i, "copy", axis)
    layouts = [
        xs.Layout(tuple(Dim(name, cuts[name]) for name in some), tuple(t.items()))
        for some, t in zip(dims, tags, strict=True)
    ]
    return mesh, layouts, result


def shape_of(layout: xs.Layout) -> tuple[int, ...]:
    return tuple(LENGTHS[name] for name in layout.names)


def check(mesh: xs.Mesh, layouts: list[xs.Layout], names: tuple[str, ...], seed: int) -> None:
    """Values, types and dot products of a contraction, in whole numbers."""
    rng = np.random.default_rng(seed)
    found = local_type(layouts, names, "")
    operands = [(x, oracle.random_blocks(x, mesh, shape_of(x), rng)) for x in layouts]
    wholes = [(x.names, oracle.gather(blocks, x, mesh, shape_of(x))) for x, blocks in operands]
    result = locally(operands, names)
    assert np.array_equal(
        oracle.gather(result, found, mesh, shape_of(found)), einsum(wholes, names)
    )
    cotangent = oracle.random_blocks(found.dual, mesh, shape_of(found), rng)
    paired = oracle.paired(result, cotangent, found, mesh)
    for i, (layout, blocks) in enumerate(operands):
        others = [(found.dual, cotangent), *operands[:i], *operands[i + 1 :]]
        known = {name for other, _ in others for name in other.names}
        for (
            dim
        ) in layout.dims:  # a dim of its own: the gradient is repeated along it, as beside ones
            if dim.name not in known:
                rest = tuple(axis for axis in found.dual.axes if axis not in dim.axes)
                alone = xs.Layout((dim,), (("copy", rest),))
                others.append(
                    (alone, xs.reference.scatter(np.ones(LENGTHS[dim.name]), alone, mesh))
                )
        assert local_type([other for other, _ in others], layout.names, "") == layout.dual
        assert oracle.paired(blocks, locally(others, layout.names), layout, mesh) == paired


@pytest.mark.parametrize("part", range(2))
def test_the_type_is_closed_under_differentiation(part):
    rng = random.Random(part)
    for seed in range(250):
        check(*drawn(rng), seed)


FAMOUS = {
    "b s d | copy(tp), d f/tp -> b s f": "b s f/tp",  # Megatron's first layer
    "b s f/tp, f/tp d -> b s d": "b s d | sum(tp)",  # its second
    "b/dp s d, d f | copy(dp) -> b s f": "b/dp s f",
    "e/tp c d, e/tp d f -> e c f": "e/tp c f",  # experts
    "b/dp s/tp d, b/dp s/tp d -> ": "() | sum(dp,tp)",
    "b/dp s/tp d, b/dp s/tp d -> ()": "() | sum(dp,tp)",
    "n | mean(dp), n | copy(dp) -> n": "n | mean(dp)",
    "s h/tp k -> h k s": "h/tp k s",
    "n/zigzag(dp) d, n/zigzag(dp) e -> d e | sum(dp)": "d e | sum(dp)",
    "... d/tp, d/tp f -> ... f": "... f | sum(tp)",
    "b s (h k)/tp, b t (h k)/tp -> b h s t": "b h/tp s t",
    "b/tp s s | copy(dp) -> b": "b/tp | copy(dp)",
}


@pytest.mark.parametrize(("expression", "result"), FAMOUS.items())
def test_schemes(expression, result):
    assert str(xs.contractions.einsum_type(expression, xs.Mesh(dp=2, tp=4))) == result


REFUSED = """
b d, d f -> b «q»   NotationError: dim 'q' of the result is in no operand   the operands have: b, d, f
«h/tp:halo(1,1)» d, d f -> h f   NotationError: an overlap in a contraction
    trim halos first
i/dp b «i/tp» -> b   NotationError: two dims 'i' are sharded
    redistribute the array first, so that one of them is whole
b (d«/»tp f) -> b   NotationError: expected ')', found '/'
    a composed dim is names, then perhaps a number, and is sharded as a whole: (h d)/tp
b d -> b «b»   NotationError: dim 'b' is named twice   an einsum takes diagonals: i i -> i
«b | max(tp)», b -> b   NotationError: 'b | max(tp)' in a contraction
    max and min are not linear in each operand: reduce them first
b d, d/tp f/«tp» -> b f   NotationError: mesh axis 'tp' is used twice
    an axis shards one dim or carries one tag
b d, «,» d f -> b f   NotationError: an empty layout   a scalar is written ()
b d, d f«»   NotationError: expected '->', found the end   a contraction reads: layout, layout -> layout
b d, d f/«xp» -> b f   NotationError: unknown mesh axis 'xp'   the mesh has: dp=2, tp=4
«b s d», d f/tp -> b s f   PlanError: mesh axis 'tp' cuts 'f', which this operand lacks
    move it first: b s d -> b s d | copy(tp)
b d, «d/tp f» -> b f   PlanError: 'd' in one operand is 'd/tp' in another   move it first: d/tp f -> d f
b d | sum(tp), «d f | sum(tp)» -> b f   PlanError: mesh axis 'tp' holds addends of another operand
    move it first: d f | sum(tp) -> d f | copy(tp)
b d | copy(tp), «d f» -> b f   PlanError: mesh axis 'tp' holds copies of another operand, of this one replicas
    move it first: d f -> d f | copy(tp)
b/tp d, «d f/tp» -> b f   PlanError: mesh axis 'tp' cuts 'b' and 'f'   move it first: d f/tp -> d f | copy(tp)
b d/tp, d/tp f -> «b f/tp»   PlanError: the local contraction gives 'b f | sum(tp)'
    write that, or move it afterwards: b f | sum(tp) -> b f/tp
"""


@pytest.mark.parametrize(("text", "message"), rows(REFUSED))
def test_errors_say_which_move_makes_it_one(text, message):
    kind, _, message = message.partition(": ")
    with refused(getattr(xs.errors, kind), message):
        xs.contractions.einsum_type(text, xs.Mesh(dp=2, tp=4))
