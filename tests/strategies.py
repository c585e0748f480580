"""Random meshes, shapes and layouts for hypothesis: the fuzzer's, small enough to check every device."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from hypothesis import strategies as st

from tests.fuzz import chains
from xshard.layout import Layout, Mesh
from xshard.notation.overlap import BOUNDARIES, OUTPUT_RULES, Boundary, Fold, Halo, Overlap, Window
from xshard.notation.parser import ELLIPSIS, Dim

# Uneven, empty and divisible lengths, small enough for 16 devices to be quick.
LENGTHS = st.sampled_from((0, 1, 3, 5, 8, 8, 12, 12))
LINEAR = ("sum", "mean", "copy")
UNIT = (
    64 * 81 * 25
)  # divisible by every product of axis sizes up to 4, so that means stay whole numbers
seeds = st.integers(0, 99)
profiles = st.sampled_from(("h100", "bandwidth"))

Move = tuple[Mesh, tuple[int, ...], Layout, Layout]
T = TypeVar("T")


def drawn(draw: Callable[[random.Random], T]) -> st.SearchStrategy[T]:
    """Hypothesis draws a seed: one number instead of dozens for the choices of a layout."""
    return st.integers(0, 2**32).map(lambda seed: draw(random.Random(seed)))


def meshes(max_devices: int = 12) -> st.SearchStrategy[Mesh]:
    """One to three axes `x`, `y`, `z`, some of size 1."""
    return drawn(chains.random_mesh).filter(lambda mesh: mesh.n_devices <= max_devices)


def shapes(max_dims: int = 3) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of at most so many dims; lengths may be 0, and need not divide."""
    return st.lists(LENGTHS, max_size=max_dims).map(tuple)


def layouts(
    mesh: Mesh, n_dims: int, kinds: Sequence[str] = LINEAR, extremes: Sequence[str] = ()
) -> st.SearchStrategy[Layout]:
    """Every axis cuts a dim, alone or in a group, carries a tag, or holds replicas.

    kinds: tags that an axis may carry; max and min only the axes `extremes`.
    """
    lengths = dict.fromkeys(chains.NAMES[:n_dims])
    return drawn(
        lambda rng: chains.random_layout(rng, mesh, lengths, kinds, extremes, overlaps=False)
    )


@st.composite
def moves(draw: st.DrawFn, kinds: Sequence[str] = ("linear", "max", "min")) -> Move:
    """(mesh, shape, src, dst) with a redistribution from src to dst."""
    mesh = draw(meshes())
    shape = draw(shapes())
    kind = draw(st.sampled_from(kinds))
    if kind == "linear":
        return mesh, shape, draw(layouts(mesh, len(shape))), draw(layouts(mesh, len(shape)))
    src = draw(layouts(mesh, len(shape), (kind, "copy"), mesh.axes))
    return mesh, shape, src, draw(layouts(mesh, len(shape), ("copy", kind), src.tagged(kind)))


@st.composite
def any_overlap(draw: st.DrawFn, folded: bool = True) -> Overlap:
    """A halo or a window; folded: or the fold of one."""
    constants = st.floats(allow_nan=False, width=32).map(lambda value: Boundary("constant", value))
    boundary = st.sampled_from(BOUNDARIES).map(Boundary) | constants
    first = draw(boundary)
    last = draw(boundary)
    overlap: Halo | Window
    if draw(st.booleans()):
        overlap = Halo(draw(st.integers(-2, 9)), draw(st.integers(-2, 9)), first, last)
    else:
        k, s, d, p = (
            draw(st.integers(low, high)) for low, high in ((1, 5), (1, 4), (1, 3), (0, 4))
        )
        padding = draw(st.just(p) | st.tuples(st.just(p), st.integers(0, 3)))
        overlap = Window(k, s, d, padding, draw(st.sampled_from(("", *OUTPUT_RULES))), first, last)
    return Fold(overlap) if folded and draw(st.booleans()) else overlap


@st.composite
def written_layouts(draw: st.DrawFn) -> Layout:
    """Any layout of the grammar, overlaps and anonymous dims included."""
    layout = draw(layouts(draw(meshes()), draw(st.integers(0, 3))))
    dims = [Dim(dim.name, dim.shards, draw(st.none() | any_overlap())) for dim in layout.dims]
    if draw(st.booleans()):
        dims.insert(draw(st.integers(0, len(dims))), Dim(ELLIPSIS))
    return Layout(tuple(dims), layout.tags)
