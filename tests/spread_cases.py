"""Random moves and contractions with units, `spread`, segments and several axes, with their own definition.

It knows nothing of the package: a layout is lists of units for every device, and a key that says which
devices hold the same block.
"""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

Sizes = dict[str, int]  # the size of each mesh axis
MESHES: list[Sizes] = [
    {"tp": 8},
    {"dp": 2, "tp": 4},
    {"tp": 9},
    {"a": 2, "b": 2, "c": 2},
    {"tp": 4},
    {"a": 3, "b": 4},
    {"a": 1, "tp": 4},
]
CALLS = [
    ("bh", "hk", "bk"),
    ("bh", "hk", "bhk"),
    ("bhk", "hkn", "bn"),
    ("hk", "h", "hk"),
    ("hk", "hk", ""),
]
ORDERS = [
    "block",
    "spread",
    "spread",
    "spread",
    "balanced",
    "zigzag",
    "cyclic",
    "sizes",
    "segments",
]


@dataclass
class Cut:
    axes: Sequence[str]
    order: str
    numbers: Sequence[int] = ()

    def __str__(self) -> str:
        word = "block" if self.order == "segments" else self.order
        return f"{word}({','.join([*self.axes, *map(str, self.numbers)])})"


@dataclass
class Cuts:
    """A dim: its name, rows, the rows of a unit (None: no composed dim), and its cuts."""

    name: str
    length: int
    unit: int | None
    cuts: list[Cut] = field(default_factory=list)

    def __str__(self) -> str:
        text = self.name if self.unit is None else f"({self.name} {self.unit})"
        return "/".join([text, *map(str, self.cuts)])


@dataclass
class Spec:
    """A layout: its dims, and its axes by tag."""

    dims: list[Cuts]
    tags: dict[str, list[str]]

    def __str__(self) -> str:
        tags = " ".join(f"{kind}({','.join(axes)})" for kind, axes in self.tags.items())
        return (" ".join(map(str, self.dims)) or "()") + (f" | {tags}" if tags else "")

    @property
    def dual(self) -> "Spec":
        other = {"sum": "copy", "copy": "sum"}
        return Spec(self.dims, {other[kind]: axes for kind, axes in self.tags.items()})


def chunk(units: list[int], n: int, i: int) -> list[int]:
    size = -(-len(units) // n)
    return units[min(i * size, len(units)) : min((i + 1) * size, len(units))]


def part(units: list[int], cut: Cut, n: int, i: int) -> list[int]:
    """The units of part i of n, of those that a block has."""
    if n == 1:
        return units
    if cut.order == "spread" and 0 < len(units) < n:  # shared
        return [units[i * len(units) // n]]
    if cut.order == "balanced":
        return [u for j, u in enumerate(units) if j in _balanced(len(units), n, i)]
    if cut.order == "zigzag":
        return chunk(units, 2 * n, i) + chunk(units, 2 * n, 2 * n - 1 - i)
    if cut.order == "cyclic":
        together = cut.numbers[0] if cut.numbers else 1
        return [u for j, u in enumerate(units) if j // together % n == i]
    if cut.order == "sizes":
        start = sum(cut.numbers[:i])
        return units[start : start + cut.numbers[i]]
    if cut.order == "segments":
        ends = list(itertools.accumulate(cut.numbers))
        segments = [units[end - size : end] for size, end in zip(cut.numbers, ends, strict=True)]
        return [u for segment in segments for u in chunk(segment, n, i)]
    return chunk(units, n, i)


def _balanced(length: int, n: int, i: int) -> range:
    rows, longer = divmod(length, n)
    start = i * rows + min(i, longer)
    return range(start, start + rows + (i < longer))


def blocks_of(spec: Spec, mesh: Sizes) -> list[tuple[list[list[int]], tuple[object, ...]]]:
    """For every device its rows of each dim, and a key that devices with one block have in common."""
    found = []
    for coords in itertools.product(*map(range, mesh.values())):
        at = dict(zip(mesh, coords, strict=True))
        rows = []
        key: list[object] = []
        for dim in spec.dims:
            unit = dim.unit or 1
            units = list(range(dim.length // unit))
            for cut in dim.cuts:
                n = math.prod(mesh[axis] for axis in cut.axes)
                i = 0
                for axis in cut.axes:
                    i = i * mesh[axis] + at[axis]
                is_shared = cut.order == "spread" and 0 < len(units) < n
                key.append(i * len(units) // n if is_shared else i)
                units = part(units, cut, n, i)
            rows.append([r for u in units for r in range(u * unit, (u + 1) * unit)])
        found.append((rows, tuple(key)))
    return found


def groups_of(spec: Spec, mesh: Sizes) -> list[tuple[object, ...]]:
    """For every device a key: devices with one key hold the addends of a block."""
    spread = {a for d in spec.dims for c in d.cuts if c.order == "spread" for a in c.axes}
    cutting = {a for d in spec.dims for c in d.cuts for a in c.axes} - spread
    apart = [a for a in mesh if a not in spec.tags.get("sum", ()) and a not in cutting]
    keys = []
    devices = itertools.product(*map(range, mesh.values()))
    for coords, (_, key) in zip(devices, blocks_of(spec, mesh), strict=True):
        at = dict(zip(mesh, coords, strict=True))
        keys.append((key, *(at[a] for a in apart)))
    return keys


def laid_out(
    spec: Spec, mesh: Sizes, whole: np.ndarray, rng: np.random.Generator
) -> list[np.ndarray]:
    """The block of every device; a sum gets random addends, replicas of one equal ones."""
    members: dict[object, list[int]] = {}
    for device, group in enumerate(groups_of(spec, mesh)):
        members.setdefault(group, []).append(device)
    blocks: list[np.ndarray] = [whole] * math.prod(mesh.values())
    addends: dict[object, list[np.ndarray]] = {}
    for devices in members.values():
        rows, key = blocks_of(spec, mesh)[devices[0]]
        block = whole[np.ix_(*rows)]
        if key not in addends:
            others = [rng.integers(-9, 10, block.shape) for _ in devices[1:]]
            addends[key] = [block - sum(others), *others]
        for device, addend in zip(devices, addends[key], strict=True):
            blocks[device] = np.array(addend)
    return blocks


def check(
    spec: Spec, mesh: Sizes, whole: np.ndarray, blocks: Sequence[np.ndarray], text: str
) -> None:
    """Every device has its rows; where the layout sums, its group has them together."""
    groups = groups_of(spec, mesh)
    totals: dict[object, np.ndarray] = {}
    for block, group in zip(blocks, groups, strict=True):
        totals[group] = totals.get(group, 0) + np.asarray(block)
    for device, (rows, _) in enumerate(blocks_of(spec, mesh)):
        right = whole[np.ix_(*rows)]
        assert blocks[device].shape == right.shape, (text, device)
        assert np.array_equal(totals[groups[device]], right), (text, device)


def is_valid(spec: Spec, mesh: Sizes) -> bool:
    """Whether all numbers fit, and the devices that share units are equal groups of the mesh."""
    for dim in spec.dims:
        lengths = {dim.length // (dim.unit or 1)}
        for cut in dim.cuts:
            n = math.prod(mesh[axis] for axis in cut.axes)
            if cut.order == "spread" and max(lengths) > 0 and min(lengths) < n:
                left = min(lengths)
                for size in (mesh[axis] for axis in cut.axes):
                    shared = math.gcd(left, size)
                    if shared not in (left, size):
                        return False
                    left //= shared
                if len(lengths) > 1 or left > 1:
                    return False
            if cut.order in ("segments", "sizes") and lengths != {sum(cut.numbers)}:
                return False
            lengths = {len(part([*range(k)], cut, n, i)) for k in lengths for i in range(n)}
    return True


def random_spec(
    rng: random.Random, mesh: Sizes, dims: Sequence[tuple[str, int, int | None]]
) -> Spec:
    while True:
        free = rng.sample(list(mesh), len(mesh))
        cut_dims = []
        for name, length, unit in dims:
            dim = Cuts(name, length, unit)
            left = length // (unit or 1)
            while free and rng.random() < 0.6:
                axes = [free.pop() for _ in range(1 if rng.random() < 0.7 else min(2, len(free)))]
                n = math.prod(mesh[axis] for axis in axes)
                cut = Cut(axes, rng.choice(ORDERS))
                if cut.order in ("sizes", "segments"):
                    n_numbers = n if cut.order == "sizes" else 2
                    ends = sorted(rng.randint(0, left) for _ in range(n_numbers - 1))
                    cut.numbers = [b - a for a, b in itertools.pairwise([0, *ends, left])]
                dim.cuts.append(cut)
                left = -(-left // n)
            cut_dims.append(dim)
        spread = [a for d in cut_dims for c in d.cuts if c.order == "spread" for a in c.axes]
        tags: dict[str, list[str]] = {}
        for axis in sorted(free + spread):
            kind = rng.choice(["", "", "copy", "sum"])
            if kind:
                tags.setdefault(kind, []).append(axis)
        spec = Spec(cut_dims, {kind: tags[kind] for kind in ("sum", "copy") if kind in tags})
        if is_valid(spec, mesh):
            return spec


@dataclass
class Move:
    """A move of integers, and the gradient that comes back."""

    mesh: Sizes
    src: Spec
    dst: Spec
    whole: np.ndarray
    moved: np.ndarray  # the dims in the destination's order
    cotangent: np.ndarray
    blocks: list[np.ndarray]
    cotangents: list[np.ndarray]

    @property
    def text(self) -> str:
        return f"{self.src} -> {self.dst}"

    def check(self, moved: Sequence[np.ndarray], gradients: Sequence[np.ndarray]) -> None:
        check(self.dst, self.mesh, self.moved, moved, self.text)
        order = [dim.name for dim in self.dst.dims]
        back = self.cotangent.transpose([order.index(dim.name) for dim in self.src.dims])
        check(self.src.dual, self.mesh, back, gradients, f"gradient of {self.text}")


def random_move(seed: object, n_devices: int | None = None) -> Move:
    rng = random.Random(f"spread {seed!r}")
    draw = np.random.default_rng(rng.randrange(2**32))
    meshes = [m for m in MESHES if n_devices in (None, math.prod(m.values()))]
    mesh = rng.choice(meshes)
    dims = []
    for name in rng.sample("hkn", rng.randint(1, 3)):
        unit = rng.choice([None, None, 1, 2, 3])
        dims.append((name, rng.choice([1, 2, 2, 3, 4, 4, 6, 8]) * (unit or 1), unit))
    src = random_spec(rng, mesh, dims)
    order = rng.sample(range(len(dims)), len(dims))
    dst = random_spec(rng, mesh, [dims[i] for i in order])
    whole = draw.integers(-50, 50, [length for _, length, _ in dims])
    moved = whole.transpose(order)
    cotangent = draw.integers(-50, 50, moved.shape)
    blocks = laid_out(src, mesh, whole, draw)
    cotangents = laid_out(dst.dual, mesh, cotangent, draw)
    return Move(mesh, src, dst, whole, moved, cotangent, blocks, cotangents)


@dataclass
class Product:
    """A contraction of two arrays of integers, and the gradients that come back."""

    mesh: Sizes
    specs: list[Spec]  # of both operands, and of the result
    arrays: list[np.ndarray]
    names: Sequence[str]
    sizes: dict[str, int]
    cotangent: np.ndarray
    blocks: list[list[np.ndarray]]
    cotangents: list[np.ndarray]

    @property
    def text(self) -> str:
        first, second, result = self.specs
        return f"{first}, {second} -> {result}"

    def check(self, result: Sequence[np.ndarray], *gradients: Sequence[np.ndarray]) -> None:
        a, b, c = self.names
        x, y = self.arrays
        right = [
            np.einsum(f"{c},{b}->{a}", self.cotangent, y),
            np.einsum(f"{c},{a}->{b}", self.cotangent, x),
            np.einsum(f"{a},{b}->{c}", x, y),
        ]
        specs = [self.specs[0].dual, self.specs[1].dual, self.specs[2]]
        for spec, whole, blocks in zip(specs, right, [*gradients, result], strict=True):
            check(spec, self.mesh, whole, blocks, self.text)


def random_product(seed: object, n_devices: int | None = None) -> Product:
    rng = random.Random(f"spread product {seed!r}")
    draw = np.random.default_rng(rng.randrange(2**32))
    mesh = rng.choice([m for m in MESHES if n_devices in (None, math.prod(m.values()))])
    names = rng.choice(CALLS)
    units = {name: rng.choice([1, 2, 2, 3, 4, 4, 6]) for name in "bhkn"}
    inner = {name: rng.choice([None, None, 2, 3]) for name in "bhkn"}
    sizes = {}
    for name in sorted({*"".join(names)}):
        sizes[name] = units[name]
        if inner[name]:
            sizes[f"{name}_{inner[name]}"] = inner[name]
    specs = []
    for array in names:
        dims = [(name, units[name] * (inner[name] or 1), inner[name]) for name in array]
        specs.append(random_spec(rng, mesh, dims))
    shapes = [[dim.length for dim in spec.dims] for spec in specs]
    arrays = [draw.integers(-4, 5, shape) for shape in shapes[:2]]
    cotangent = draw.integers(-4, 5, shapes[2])
    blocks = [laid_out(s, mesh, x, draw) for s, x in zip(specs[:2], arrays, strict=True)]
    cotangents = laid_out(specs[2].dual, mesh, cotangent, draw)
    return Product(mesh, specs, arrays, names, sizes, cotangent, blocks, cotangents)
