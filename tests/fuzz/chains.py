"""Random chains: an array goes from layout to layout, one to four times on one mesh, or once to another mesh.

Meshes, shapes, dtypes and the whole notation are drawn. A seed gives the same chain on every machine.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import xshard as xs
from xshard.errors import XshardError
from xshard.notation.maps import NamedMap
from xshard.notation.overlap import (
    BOUNDARIES,
    OUTPUT_RULES,
    Boundary,
    Fold,
    Halo,
    Overlap,
    Reads,
    Window,
    ends_of,
    unfolded,
)
from xshard.notation.parser import BY, INTERVALS, ORDERS, SEGMENTS, SIZES, Dim, Shard

NAMES = ("b", "s", "c", "d")
LENGTHS = (0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 9, 12, 16)
MAX_ELEMENTS = 1500
PROFILES = ("h100", "bandwidth", "h100:2", "gloo", "host", "tpu_v5e")
# Whole numbers are exact in all of these; the last ones can only be moved.
DTYPES = (
    *("float64",) * 5,
    *("float32",) * 3,
    "int64",
    "int32",
    "complex64",
    "float16",
    "bfloat16",
)
MOVED = ("bool", "uint8", "float8_e4m3fn")
STRIDES = ("plain", "plain", "turned", "every other", "one value")


@dataclass(frozen=True)
class Chain:
    """An array of `shape` on `mesh` that goes through `layouts`, planned for the machine `profile`.

    strides: how the first blocks lie in memory. seed: of their values. there: the mesh of the last layout, if
    it is another one. devices: all numbers of the world, of which either mesh has the first ones.
    """

    mesh: xs.Mesh
    shape: tuple[int, ...]
    dtype: str
    layouts: tuple[xs.Layout, ...]
    profile: str = "h100"
    strides: str = "plain"
    seed: int = 0
    there: xs.Mesh | None = None
    devices: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    relabel: bool = False

    def __str__(self) -> str:
        way = " -> ".join(map(str, self.layouts))
        to = ""
        if self.there is not None:
            to = f" {self.numbers(0)} to {self.there} {self.numbers(1)}{', relabelled' * self.relabel}"
        return f"{way}   {self.dtype}{list(self.shape)} on {self.mesh}{to}, {self.profile}, {self.strides}"

    @property
    def names(self) -> tuple[str, ...]:
        """The dims, in the order of `shape`."""
        return self.layouts[0].names

    @property
    def world(self) -> int:
        """How many devices there are."""
        return len(self.devices[0]) or self.mesh.n_devices

    def mesh_at(self, i: int) -> xs.Mesh:
        """The mesh of the i-th layout."""
        return self.mesh if self.there is None or i < self.moves else self.there

    def numbers(self, end: int) -> tuple[int, ...]:
        """The devices of the first mesh (0) or of the last one (1)."""
        return self.devices[end][: self.mesh_at(end * self.moves).n_devices]

    def shape_at(self, i: int) -> tuple[int, ...]:
        """The global shape under the i-th layout, which may have the dims in another order."""
        lengths = dict(zip(self.layouts[0].names, self.shape, strict=True))
        return tuple(lengths[name] for name in self.layouts[i].names)

    @property
    def moves(self) -> int:
        return len(self.layouts) - 1

    def shorter(self) -> Iterator[Chain]:
        """Chains of fewer moves."""
        if self.moves > 1:
            yield replace(self, layouts=self.layouts[:-1])
            yield replace(self, layouts=self.layouts[1:], shape=self.shape_at(1))
            for i in range(1, self.moves):
                yield replace(self, layouts=self.layouts[:i] + self.layouts[i + 1 :])


def random_chain(seed: object, devices: int | None = None, mesh: xs.Mesh | None = None) -> Chain:
    """The chain of a seed. devices: of its mesh; or the mesh itself; any with up to 12 by default."""
    rng = random.Random(repr(seed))
    mesh = mesh or random_mesh(rng, devices)
    names = NAMES[: rng.choice((0, 1, 1, 2, 2, 2, 3, 3, 4))]
    lengths = {name: rng.choice(LENGTHS) for name in names}
    while math.prod(lengths.values()) > MAX_ELEMENTS:
        lengths[max(names, key=lambda name: lengths[name])] //= 2
    lengths = _with_units(random.Random(f"units {seed!r}"), lengths)
    names = tuple(lengths)
    kind = rng.choice((*("linear",) * 6, "max", "min"))
    overlaps = rng.random() < 0.4
    layouts: list[xs.Layout] = []
    for _ in range(rng.choice((2, 2, 3, 4, 5))):
        before = layouts[-1].tagged(kind) if layouts else mesh.axes
        tags = ("sum", "mean", "copy") if kind == "linear" else ("copy", *([kind] * bool(before)))
        made = random_layout(rng, mesh, lengths, tags, before, overlaps)
        turned = made.in_order(rng.sample(names, len(names)))
        layouts.append(turned if rng.random() < 0.15 and _can_be(turned, mesh, lengths) else made)
    dtype = rng.choice(DTYPES)
    if kind != "linear" and dtype == "complex64":
        dtype = "float64"
    if not any(layout.tagged("sum", "mean") or "fold" in str(layout) for layout in layouts):
        dtype = rng.choice((dtype, dtype, dtype, *MOVED))
    shape = tuple(lengths[name] for name in layouts[0].names)
    options = rng.choice(PROFILES), rng.choice(STRIDES), rng.randrange(10**9)
    return Chain(mesh, shape, dtype, tuple(layouts), *options)


def _with_units(rng: random.Random, lengths: dict[str, int]) -> dict[str, int]:
    """Some dims become ones of units: s of 8 rows -> s_2, which layouts write `(s 2)`, or s_2."""
    named = {}
    for name, length in lengths.items():
        units = [unit for unit in range(1, length + 1) if length % unit == 0]
        is_composed = units and rng.random() < 0.25
        named[f"{name}_{rng.choice(units)}" if is_composed else name] = length
    return named


def random_crossing(seed: object, devices: int | None = None, _: object = None) -> Chain:
    """A chain of one move to another mesh: on the same devices, on some of them, or apart."""
    rng = random.Random(repr(seed))
    world = devices or 16
    sizes = [None if devices is None else rng.randint(1, devices) for _ in range(2)]
    chain = random_chain(f"{seed} here", sizes[0])
    there = random_mesh(rng, sizes[1])
    first = chain.layouts[0]
    if rng.random() < 0.95:
        first = replace(first, dims=tuple(replace(dim, overlap=None) for dim in first.dims))
    if rng.random() < 0.2:
        there = chain.mesh
    elif rng.random() < 0.5:
        there = xs.Mesh(dict(zip("uvw", there.sizes, strict=False)))
    tags = ("sum", "mean", "copy") if first.is_linear else ("copy",)
    last = random_layout(
        rng, there, dict(zip(first.names, chain.shape, strict=True)), tags, (), False
    )
    start = rng.choice((0, 0, rng.randrange(world), chain.mesh.n_devices))
    numbers = tuple(range(world)), tuple((start + i) % world for i in range(world))
    if rng.random() < 0.3:
        numbers = tuple(rng.sample(range(world), world)), tuple(rng.sample(range(world), world))
    made = replace(chain, layouts=(first, last), there=there, devices=numbers)
    same = sorted(made.numbers(0)) == sorted(made.numbers(1))
    return replace(made, relabel=same and rng.random() < 0.5)


def random_mesh(rng: random.Random, devices: int | None = None) -> xs.Mesh:
    """One to three axes, some of them of size 1."""
    sizes = []
    while len(sizes) < rng.choice((1, 2, 2, 3)):
        room = 12 // math.prod(sizes)
        sizes.append(min(room, rng.choice((1, 2, 2, 2, 3, 3, 4, 5))))
    if devices is not None:
        sizes = []
        left = devices
        while left > 1:
            sizes.append(rng.choice([n for n in range(2, left + 1) if left % n == 0]))
            left //= sizes[-1]
        if len(sizes) < 3 and rng.random() < 0.2:
            sizes.insert(rng.randrange(len(sizes) + 1), 1)
    return xs.Mesh(dict(zip("xyz", sizes, strict=False)))


def random_layout(
    rng: random.Random,
    mesh: xs.Mesh,
    lengths: Mapping[str, int | None],
    tags: Sequence[str],
    reduced: Sequence[str],
    overlaps: bool,
) -> xs.Layout:
    """Every axis cuts a dim, alone or in a group, carries a tag, or holds replicas.

    lengths: the length of every dim; None for blocks of any length. tags: kinds that axes may carry; max and
    min only the axes `reduced`. overlaps: dims may overlap.
    """
    axes = rng.sample(mesh.axes, len(mesh.axes))
    # By name, the rows of a unit; 1 for a dim whose shards count rows, as they may in a composed one.
    units = {name: int(name.partition("_")[2] or 1) for name in lengths}
    for name in lengths:
        if "_" in name and rng.random() < 0.3:
            units[name] = 0
    cuts: dict[str, list[Shard]] = {name: [] for name in lengths}
    tagged: list[tuple[str, tuple[str, ...]]] = []
    while axes:
        group = tuple(axes[: rng.choice((1, 1, 1, 2))])
        del axes[: len(group)]
        role = rng.choice((*lengths, *lengths, *tags, None))
        if role in cuts:
            length = lengths[role]
            n_units = None if length is None else length // max(units[role], 1)
            left = _rows_left(cuts[role], n_units, mesh)
            cuts[role].append(random_cut(rng, group, left, mesh.size(*group)))
        elif role is not None:
            own = (
                group
                if role in ("sum", "mean", "copy")
                else [axis for axis in group if axis in reduced]
            )
            tagged.append((role, tuple(own)))
    plain = xs.Layout(
        tuple(_dim(name, shards, units[name]) for name, shards in cuts.items()), tuple(tagged)
    )
    if not overlaps:
        return plain
    dims = tuple(
        _widened(dim, random_overlap(rng, dim, lengths, mesh)) if rng.random() < 0.5 else dim
        for dim in plain.dims
    )
    made = replace(plain, dims=dims)
    return made if _can_be(made, mesh, lengths) else plain


def _dim(name: str, shards: Sequence[Shard], unit: int) -> Dim:
    """A dim, composed if it has a unit in its name and its shards count them."""
    base, joint, number = name.partition("_")
    if not joint or not unit:
        return Dim(name, tuple(shards))
    return Dim(name, tuple(shards), parts=(base, number), unit=unit)


def _widened(dim: Dim, overlap: Overlap) -> Dim:
    """The dim with an overlap; its shards count rows if outputs of a window are cut like them."""
    if isinstance(unfolded(overlap), Window):
        return replace(dim, overlap=overlap, parts=(), unit=1)
    return replace(dim, overlap=overlap)


def random_cut(rng: random.Random, axes: tuple[str, ...], rows: int | None, parts: int) -> Shard:
    """A cut of so many rows, in any order; None: of blocks that differ in length."""
    order = rng.choice(("block", "block", *ORDERS))
    if rows is None or rng.random() < 0.7:
        return Shard(
            axes,
            order,
            (rng.choice((1, 2, 3, 5)),) if order == "cyclic" and rng.random() < 0.5 else (),
        )
    order = rng.choice((SIZES, INTERVALS, "zigzag", SEGMENTS, BY))
    if order == BY:
        return Shard(axes, order, (NamedMap("cells", random_owners(rng, rows, parts)),))
    if order != INTERVALS:
        return Shard(
            axes, order, _composed(rng, rows, parts if order == SIZES else rng.randint(1, 3))
        )
    ends = [0, *itertools.accumulate(_composed(rng, rows, parts + rng.randint(0, 3)))]
    pairs = [(a, b) for a, b in itertools.pairwise(ends) if a < b]
    mine: list[list[int]] = [[] for _ in range(parts)]
    for pair in pairs if parts == 1 else rng.sample(pairs, len(pairs)):
        rng.choice(mine).extend(pair)
    return Shard(axes, order, tuple(tuple(part) or (0, 0) for part in mine))


def random_owners(rng: random.Random, rows: int, parts: int) -> xs.Owners:
    """Every row with some part, in ascending or in any order; some parts have none."""
    used = rng.sample(range(parts), rng.randint(1, parts))
    owner = [rng.choice(used) for _ in range(rows)]
    if parts == 1 or rng.random() < 0.5:
        return xs.Owners(owner, parts)
    lists = [[row for row in range(rows) if owner[row] == part] for part in range(parts)]
    return xs.Owners.of_rows([rng.sample(rows, len(rows)) for rows in lists])


def random_needs(rng: random.Random, dim: Dim, length: int, mesh: xs.Mesh) -> xs.Needs:
    """For every part none, some or all of the rows that it does not own, in any order."""
    bare = xs.Layout((replace(dim, overlap=None),))
    lists = []
    for device in mesh.group(0, dim.axes):
        others = sorted({*range(length)} - {*bare.positions(mesh, (length,), 0, device).tolist()})
        lists.append(rng.sample(others, rng.choice((0, len(others), rng.randint(0, len(others))))))
    return xs.Needs.of_rows(lists)


def random_overlap(rng: random.Random, dim: Dim, lengths: dict[str, int], mesh: xs.Mesh) -> Overlap:
    """A halo, a window or what a map lists, or the fold of one, with any boundaries."""
    ends = random_boundary(rng, dim, lengths), random_boundary(rng, dim, lengths)
    if rng.random() < 0.5:
        ends = ends[0], ends[0]
    overlap: Halo | Window | Reads
    by_map = any(shard.order == BY for shard in dim.shards)
    if rng.random() < (0.8 if by_map else 0.15):
        overlap = Reads(NamedMap("near", random_needs(rng, dim, lengths[dim.name], mesh)))
    elif rng.random() < 0.65:
        n = mesh.size(*dim.axes)
        contiguous = all(shard.order in ("block", "balanced", SIZES) for shard in dim.shards)

        def width() -> int | tuple[int, ...]:
            if contiguous and rng.random() < 0.2:
                return tuple(rng.randint(0, 3) for _ in range(n))
            return rng.choice((-1, 0, 1, 1, 1, 2, 2, 3, 5, 9))

        overlap = Halo(width(), width(), *ends)
    else:
        k = rng.randint(1, 4)
        s = rng.randint(1, 3)
        d = rng.randint(1, 2)
        padding = rng.choice((0, 1, 2, (1, 0), (0, 2), (2, 1)))
        overlap = Window(k, s, d, padding, rng.choice(("", "", *OUTPUT_RULES)), *ends)
    return Fold(overlap) if rng.random() < 0.35 else overlap


def random_boundary(rng: random.Random, dim: Dim, lengths: dict[str, int]) -> Boundary:
    """A pole rolls the next dim, or one that it names."""
    kind = rng.choice(BOUNDARIES)
    if kind == "constant":
        return Boundary(kind, value=float(rng.choice((0, 0, 1, 2, -3))))
    if kind == "pole":
        others = [name for name in lengths if name != dim.name]
        return Boundary(kind, dim=rng.choice(("", *others)), sign=rng.choice((1, -1)))
    return Boundary(kind)


def _rows_left(shards: Sequence[Shard], length: int | None, mesh: xs.Mesh) -> int | None:
    """The rows of every block after some cuts; None if blocks differ, or may."""
    for shard in shards:
        n = mesh.size(*shard.axes)
        if length is None or shard.numbers or length % (2 * n):
            return None
        length //= n
    return length


def _composed(rng: random.Random, total: int, parts: int) -> tuple[int, ...]:
    """Numbers >= 0 that add up to `total`."""
    ends = sorted(rng.randint(0, total) for _ in range(parts - 1))
    return tuple(b - a for a, b in zip([0, *ends], [*ends, total], strict=True))


def _can_be(layout: xs.Layout, mesh: xs.Mesh, lengths: dict[str, int]) -> bool:
    """Whether no empty dim is copied, every pole can roll, and it is said what that means."""
    try:
        xs.Sharding(layout, mesh, tuple(lengths[name] for name in layout.names))
    except XshardError:
        return False
    return not _rolls_contributions(layout)


def _rolls_contributions(layout: xs.Layout) -> bool:
    """Whether a pole of copies rolls a dim of contributions, or the reverse: nobody says what it means."""
    folds = {
        dim.name: isinstance(dim.overlap, Fold) for dim in layout.dims if dim.overlap is not None
    }
    for dim, after in zip(layout.dims, (*layout.names[1:], ""), strict=False):
        for end in () if dim.overlap is None else ends_of(dim.overlap):
            if (
                end.kind == "pole"
                and folds.get(end.dim or after, folds[dim.name]) != folds[dim.name]
            ):
                return True
    return False
