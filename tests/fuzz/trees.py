"""Random trees of arrays that go to another mesh, by messages or by files: every bit of every block.

Arrays on the second mesh are those of the first as they are, turned, cast, side by side, stacked, or the
reverse; numpy computes them once more.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

import xshard as xs
from tests import oracle
from tests.fuzz.chains import random_layout, random_mesh
from tests.fuzz.judge import Blocks
from xshard.dtypes import numpy_dtype
from xshard.state import Names, concat, rename, split, stack, unstack

DTYPES = (
    "bool",
    "int8",
    "uint8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
)
DTYPES += ("float8_e4m3fn", "float8_e5m2", "complex64")  # which are not cast
LENGTHS = {False: (0, 1, 2, 3, 4, 5, 6, 8, 9, 12), True: (0, 4, 8, 8, 12, 16, 24)}


class Leaf(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: xs.Layout


@dataclass(frozen=True)
class Group:
    """The arrays `here` become the arrays `there`: parts one whole, or with `splits` the reverse.

    order: the order of dims in each part; parts then lie side by side along `dim`, in turns of `rows` if any,
    or are stacked there; dim None: one part is the whole.
    """

    here: tuple[Leaf, ...]
    there: tuple[Leaf, ...]
    order: tuple[int, ...]
    dim: int | None = None
    rows: tuple[int, ...] | None = None
    stacks: bool = False
    splits: bool = False

    @property
    def names(self) -> Names:
        """The same, as users write it."""
        parts, (whole, *_) = (self.there, self.here) if self.splits else (self.here, self.there)
        srcs = [leaf.name for leaf in parts]
        letters = "abc"[: len(self.order)]
        order = (
            f"{' '.join(letters)} -> {' '.join(letters[i] for i in self.order)}"
            if letters
            else None
        )
        if self.dim is None:
            return Names(rename(srcs[0], whole.name, order, dtype=whole.dtype))
        if self.stacks:
            every = f"{srcs[0].rpartition('.')[0]}.*"
            ends = (whole.name, every) if self.splits else (every, whole.name)
            return Names((unstack if self.splits else stack)(*ends, self.dim))
        options = {"rows": self.rows, "order": order}
        if self.splits:
            return Names(split(whole.name, srcs, self.dim, **options))
        return Names(concat(srcs, whole.name, self.dim, **options))

    def whole(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The array made of the parts."""
        turned = [x.transpose(self.order) for x in parts]
        if self.dim is None:
            return turned[0]
        if self.stacks:
            return np.stack(turned, self.dim)
        turns = turned[0].shape[self.dim] // self.rows[0] if self.rows else 1
        cut = [np.split(x, turns, self.dim) if turns else [x] for x in turned]
        return np.concatenate([x for turn in zip(*cut, strict=True) for x in turn], self.dim)


@dataclass(frozen=True)
class Tree:
    """Groups of arrays on `mesh`, wanted on `there`, by files or else by messages.

    devices: the numbers of both meshes. names_at: whether a save or a load is told the names. limit: bytes
    of a file, or of a bucket.
    """

    mesh: xs.Mesh
    there: xs.Mesh
    world: int
    devices: tuple[tuple[int, ...], tuple[int, ...]]
    groups: tuple[Group, ...]
    by_files: bool = False
    names_at: str = "save"
    limit: int = 2**20
    seed: int = 0
    layouts = shape = ()  # which are the leaves' own

    def __str__(self) -> str:
        ends = f"{self.mesh} {self.devices[0]} to {self.there} {self.devices[1]}, seed {self.seed}"
        way = f"by files, names at {self.names_at}" if self.by_files else "by messages"
        return "\n    ".join((f"{ends}, {way}, limit {self.limit}", *map(str, self.groups)))

    @property
    def names(self) -> Names:
        return Names(*(relation for group in self.groups for relation in group.names.relations))

    def leaves(self, end: int) -> dict[str, Leaf]:
        """The arrays here (0) or there (1)."""
        return {leaf.name: leaf for g in self.groups for leaf in (g.there if end else g.here)}

    def rules(self, end: int) -> dict[str, str]:
        return {name: str(leaf.layout) for name, leaf in self.leaves(end).items()}

    def shorter(self) -> Iterator[Tree]:
        """Trees of fewer groups, or with fewer cuts."""
        for i, group in enumerate(self.groups):
            if len(self.groups) > 1:
                yield replace(self, groups=self.groups[:i] + self.groups[i + 1 :])
            for end in ("here", "there"):
                for at, leaf in enumerate(leaves := getattr(group, end)):
                    if leaf.layout.axes:
                        plain = leaf._replace(layout=xs.Layout(" ".join(leaf.layout.names)))
                        less = replace(group, **{end: (*leaves[:at], plain, *leaves[at + 1 :])})
                        yield replace(self, groups=(*self.groups[:i], less, *self.groups[i + 1 :]))


@dataclass(frozen=True)
class Carried:
    """A tree: whole arrays here, the blocks of all of them, and the blocks that are wanted there."""

    chain: Tree
    whole: dict[str, np.ndarray]
    blocks: dict[str, Blocks]
    wanted: dict[str, Blocks]

    moves = 1
    cotangents = None

    @property
    def world(self) -> int:
        return self.chain.world


def random_tree(
    seed: object, devices: int | None = None, mesh: xs.Mesh | None = None, even: bool = False
) -> Tree:
    """even: all blocks of an array are as large, as JAX has them."""
    rng = random.Random(repr(seed))
    world = devices or 8
    meshes = [
        mesh or random_mesh(rng, rng.randint(2, world)),
        random_mesh(rng, rng.randint(2, world)),
    ]
    numbers = [tuple(rng.sample(range(world), each.n_devices)) for each in meshes]
    groups = tuple(_group(rng, f"g{i}", meshes, even) for i in range(rng.randint(1, 4)))
    options = rng.random() < 0.6, rng.choice(("save", "load")), rng.choice((1, 200, 2**20))
    return Tree(*meshes, world, (numbers[0], numbers[1]), groups, *options, rng.randrange(10**9))


def _group(rng: random.Random, name: str, meshes: Sequence[xs.Mesh], even: bool) -> Group:
    kind = rng.choice(("keep", "keep", "concat", "concat", "stack"))
    ndim = rng.randint(kind == "concat", 3)
    n = 1 if kind == "keep" else rng.randint(1, 3)
    order = tuple(range(ndim)) if kind == "stack" else tuple(rng.sample(range(ndim), ndim))
    turned = [[rng.choice(LENGTHS[even]) for _ in range(ndim)]] * n
    splits = n > 1 and rng.random() < 0.5
    dim = None
    rows = None
    if kind == "concat":
        dim = rng.randrange(ndim)
        turns = rng.choice((1, 2, 4) if even else (1, 2, 3))
        rows = tuple(rng.choice((1, 2, 4)) for _ in range(n))
        turned = [
            [*shape[:dim], turns * k, *shape[dim + 1 :]]
            for shape, k in zip(turned, rows, strict=True)
        ]
        rows = rows if splits or rng.random() < 0.6 else None
    whole = [*turned[0]]
    if kind == "stack":
        whole.insert(dim := rng.randrange(ndim + 1), n)
    elif kind == "concat":
        whole[dim] = sum(shape[dim] for shape in turned)
    src = dst = rng.choice(DTYPES)
    if kind == "keep" and src in DTYPES[:-3] and rng.random() < 0.3:
        dst = rng.choice(DTYPES[:-3])
    back = sorted(range(ndim), key=order.__getitem__)
    parts = [(f"{name}.{i}", tuple(shape[j] for j in back), src) for i, shape in enumerate(turned)]
    ends = [[(f"{name}.whole", tuple(whole), dst)], parts]

    def leaves(end: int) -> tuple[Leaf, ...]:
        made = ends[end if splits else 1 - end]
        return tuple(
            Leaf(*each, _layout(rng, meshes[end], each[1], "bscd" if end else "pqrt", even))
            for each in made
        )

    return Group(leaves(0), leaves(1), order, dim, rows, kind == "stack", splits)


def _layout(
    rng: random.Random, mesh: xs.Mesh, shape: tuple[int, ...], names: str, even: bool
) -> xs.Layout:
    lengths = dict(zip(names, shape, strict=False))
    for _ in range(9):
        made = random_layout(rng, mesh, lengths, (), (), False)
        if not even or xs.Sharding(made, mesh, shape).is_even:
            return made
    return xs.Layout(" ".join(lengths) or "()")


def carried(case: Tree) -> Carried:
    """Arrays of any bits; those that are cast are of zeros and ones."""
    rng = np.random.default_rng(case.seed)
    here: dict[str, np.ndarray] = {}
    there: dict[str, np.ndarray] = {}
    for group in case.groups:
        whole, *parts = group.there[0], *group.here
        if group.splits:
            whole, *parts = group.here[0], *group.there
        is_cast = parts[0].dtype != whole.dtype
        made = {leaf.name: _any(rng, leaf, is_cast) for leaf in parts}
        made[whole.name] = group.whole([made[leaf.name] for leaf in parts]).astype(
            numpy_dtype(whole.dtype)
        )
        here |= {leaf.name: made[leaf.name] for leaf in group.here}
        there |= {leaf.name: made[leaf.name] for leaf in group.there}
    ends = (case.mesh, here, case.leaves(0)), (case.there, there, case.leaves(1))
    return Carried(
        case,
        here,
        *(
            {n: _cut(x, leaves[n], mesh) for n, x in arrays.items()}
            for mesh, arrays, leaves in ends
        ),
    )


def _any(rng: np.random.Generator, leaf: Leaf, is_cast: bool) -> np.ndarray:
    kind = numpy_dtype(leaf.dtype)
    if is_cast or leaf.dtype == "bool":
        return rng.integers(0, 2, leaf.shape).astype(kind)
    return rng.integers(0, 256, (*leaf.shape, kind.itemsize), np.uint8).view(kind)[..., 0]


def _cut(x: np.ndarray, leaf: Leaf, mesh: xs.Mesh) -> Blocks:
    at = [
        oracle.block_index(leaf.layout, mesh, x.shape, device) for device in range(mesh.n_devices)
    ]
    return [np.ascontiguousarray(x[index]).reshape([i.size for i in index]) for index in at]


def judge(trip: Carried, found: dict[str, Blocks]) -> None:
    """Raise AssertionError unless every block there has the bits that it is to have."""
    assert found.keys() == trip.wanted.keys()
    for name, blocks in trip.wanted.items():
        for device, (want, got) in enumerate(zip(blocks, found[name], strict=True)):
            assert (got.dtype, got.shape) == (want.dtype, want.shape), (
                f"{name} on {device}: {got.dtype}{got.shape}"
            )
            assert got.tobytes() == want.tobytes(), f"{name} on {device} has other bits"
