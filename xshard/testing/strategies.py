"""Random meshes, shapes and layouts for hypothesis.

Decides how large they are: small enough to check every device of every mesh.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from xshard.layout import Layout, Mesh
from xshard.notation.overlap import BOUNDARIES, OUTPUT_RULES, Boundary, Fold, Halo, Overlap, Window
from xshard.notation.parser import ELLIPSIS, ORDERS, Dim, Shard

NAMES = ("b", "s", "c")
# Uneven, empty and divisible lengths, small enough for 16 devices to be quick.
LENGTHS = st.sampled_from((0, 1, 3, 5, 8, 8, 12, 12))
LINEAR = ("sum", "mean", "copy")

Move = tuple[Mesh, tuple[int, ...], Layout, Layout]


@st.composite
def meshes(draw: st.DrawFn, max_devices: int = 16) -> Mesh:
    """One to three axes `x`, `y`, `z` of sizes 1 to 4.

    >>> from hypothesis import find
    >>> find(meshes(), lambda mesh: mesh.n_devices == 4)
    Mesh(x=4)
    """
    sizes: dict[str, int] = {}
    for name in ("x", "y", "z")[: draw(st.integers(1, 3))]:
        room = max_devices // max(1, Mesh(sizes).n_devices)
        sizes[name] = draw(st.integers(1, min(4, room)))
    return Mesh(sizes)


def shapes(max_dims: int = 3) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of at most so many dims; lengths may be 0, and need not divide."""
    return st.lists(LENGTHS, max_size=max_dims).map(tuple)


@st.composite
def layouts(
    draw: st.DrawFn,
    mesh: Mesh,
    n_dims: int,
    kinds: Sequence[str] = LINEAR,
    kept: Sequence[tuple[str, Sequence[str]]] = (),
) -> Layout:
    """Every axis cuts a dim, alone or in a group, carries a tag, or holds replicas.

    kinds: tags that any axis may carry. kept: (kind, axes): a tag that only these axes may carry.
    """
    axes = list(draw(st.permutations(mesh.axes)))
    shards: list[list[Shard]] = [[] for _ in range(n_dims)]
    tags: list[tuple[str, tuple[str, ...]]] = []
    roles = [*range(n_dims), *range(n_dims), *kinds, *(kind for kind, _ in kept), None]
    while axes:
        group = tuple(axes[: draw(st.sampled_from((1, 1, 1, 2)))])
        del axes[: len(group)]
        role = draw(st.sampled_from(roles))
        if isinstance(role, int):
            order = draw(st.sampled_from(("block", *ORDERS, "cyclic")))
            together = draw(st.sampled_from(((), (2,), (3,)))) if order == "cyclic" else ()
            shards[role].append(Shard(group, order, together))
        elif role is not None:
            allowed = dict(kept).get(role, group)
            tags.append((role, tuple(axis for axis in group if axis in allowed)))
    dims = tuple(Dim(name, tuple(cuts)) for name, cuts in zip(NAMES, shards, strict=False))
    return Layout(dims, tuple(tags))


@st.composite
def moves(draw: st.DrawFn, kinds: Sequence[str] = ("linear", "max", "min")) -> Move:
    """(mesh, shape, src, dst) with a redistribution from src to dst."""
    mesh, shape = draw(meshes()), draw(shapes())
    kind = draw(st.sampled_from(kinds))
    if kind == "linear":
        return mesh, shape, draw(layouts(mesh, len(shape))), draw(layouts(mesh, len(shape)))
    src = draw(layouts(mesh, len(shape), (kind, "copy")))
    return mesh, shape, src, draw(layouts(mesh, len(shape), ("copy",), [(kind, src.tagged(kind))]))


def any_boundary() -> st.SearchStrategy[Boundary]:
    """Rules for the rows beyond the ends of an array."""
    constants = st.floats(allow_nan=False, width=32).map(lambda value: Boundary("constant", value))
    return st.sampled_from(BOUNDARIES).map(Boundary) | constants


@st.composite
def any_overlap(draw: st.DrawFn, folded: bool = True) -> Overlap:
    """A halo or a window; folded: or the fold of one."""
    ends = draw(any_boundary()), draw(any_boundary())
    overlap: Halo | Window
    if draw(st.booleans()):
        overlap = Halo(draw(st.integers(-2, 9)), draw(st.integers(-2, 9)), *ends)
    else:
        k, s, d, p = (draw(st.integers(low, high)) for low, high in ((1, 5), (1, 4), (1, 3), (0, 4)))
        padding = draw(st.just(p) | st.tuples(st.just(p), st.integers(0, 3)))
        overlap = Window(k, s, d, padding, draw(st.sampled_from(("", *OUTPUT_RULES))), *ends)
    return Fold(overlap) if folded and draw(st.booleans()) else overlap


@st.composite
def written_layouts(draw: st.DrawFn) -> Layout:
    """Any layout of the grammar, overlaps and anonymous dims included."""
    layout = draw(layouts(draw(meshes()), draw(st.integers(0, 3))))
    dims = [Dim(dim.name, dim.shards, draw(st.none() | any_overlap())) for dim in layout.dims]
    if draw(st.booleans()):
        dims.insert(draw(st.integers(0, len(dims))), Dim(ELLIPSIS))
    return Layout(tuple(dims), layout.tags)
