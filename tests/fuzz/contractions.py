"""Random contractions: one to four operands and their result, against numpy's einsum of whole arrays.

The result is compared, and every operand's gradient.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

import xshard as xs
from tests import oracle
from tests.fuzz.chains import LENGTHS, PROFILES, random_layout, random_mesh
from tests.fuzz.judge import Arrived, Blocks
from xshard.contractions.ring import OVERLAPS
from xshard.planner import plan_contraction

DTYPES = (*("float64",) * 5, "float32", "complex128", "int64", "int32")
MOST = 2**20  # products of one contraction


@dataclass(frozen=True)
class Contraction:
    """Operands, and last the result, under `layouts`.

    shape: the length of every dim, in the order of `names`. leaves: the operands that get a gradient, or
    none for all. save, overlap: as in `xt.einsum`. seed: draws the values.
    """

    mesh: xs.Mesh
    shape: tuple[int, ...]
    dtype: str
    layouts: tuple[xs.Layout, ...]
    profile: str = "h100"
    overlap: str = "never"
    save: str = "used"
    leaves: tuple[int, ...] = ()
    seed: int = 0
    there: None = None

    def __str__(self) -> str:
        options = f"{self.dtype}, {self.profile}, overlap {self.overlap}, save {self.save}, of {self.leaves}"
        return f"{self.text}   {self.sizes} on {self.mesh}, {options}"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted({name for layout in self.layouts for name in layout.names}))

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(self.names, self.shape, strict=True))

    @property
    def text(self) -> str:
        return f"{', '.join(map(str, self.layouts[:-1]))} -> {self.layouts[-1]}"

    def shape_of(self, layout: xs.Layout) -> tuple[int, ...]:
        return tuple(self.sizes[name] for name in layout.names)

    def shorter(self) -> Iterator[Contraction]:
        """Contractions of fewer operands."""
        for i in range(len(self.layouts) - 1 if len(self.layouts) > 2 else 0):
            fewer = replace(self, layouts=self.layouts[:i] + self.layouts[i + 1 :], leaves=())
            yield replace(fewer, shape=tuple(self.sizes[name] for name in fewer.names))


@dataclass(frozen=True)
class Product:
    """A contraction with its plan, the blocks of its operands, and cotangents if there are gradients."""

    chain: Contraction
    plan: xs.ContractionPlan
    blocks: list[Blocks]
    cotangents: Blocks | None

    moves = 1

    @property
    def plans(self) -> tuple[xs.Plan]:
        """The last move, which says where the blocks of the result are."""
        return (self.plan.result,)

    @property
    def world(self) -> int:
        return self.chain.mesh.n_devices

    @property
    def leaves(self) -> tuple[int, ...]:
        """The operands that get a gradient."""
        return self.chain.leaves or tuple(range(len(self.blocks))) if self.cotangents is not None else ()


def random_contraction(seed: object, devices: int | None = None, mesh: xs.Mesh | None = None) -> Contraction:
    """Any dims in any order under any linear layouts; means, which need large numbers, of two operands."""
    rng = random.Random(repr(seed))
    mesh = mesh or random_mesh(rng, devices if devices is not None else rng.choice((2, 3, 4, 4, 6, 8)))
    n = rng.choices((1, 2, 3, 4), (3, 10, 2, 1))[0]
    names = "ijklm"[: rng.randint(0, 5)]
    dims = [rng.sample(names, rng.randint(0, min(3, len(names)))) for _ in range(n)]
    used = sorted({name for some in dims for name in some})
    lengths = {name: rng.choice(LENGTHS[rng.random() < 0.8 :]) for name in used}
    while np.prod([*lengths.values()]) > (MOST if n < 3 else 5000):
        lengths[max(used, key=lengths.__getitem__)] //= 2
    kept = rng.sample(used, rng.randint(0, min(3, len(used))))
    dtype = rng.choice(DTYPES if n < 3 else DTYPES[:5])
    kinds = ("sum", "mean", "copy") if n < 3 and dtype == "float64" else ("sum", "copy")
    ends = [
        random_layout(rng, mesh, {name: lengths[name] for name in some}, kinds, (), False)
        for some in (*dims, kept)
    ]
    options = rng.choice(PROFILES), rng.choice(("never", *OVERLAPS)), rng.choice(("used", "given"))
    leaves = tuple(i for i in range(n) if rng.random() < 0.7)
    shape = tuple(lengths.values())
    return Contraction(mesh, shape, dtype, tuple(ends), *options, leaves, rng.randrange(10**9))


def planned(case: Contraction) -> Product:
    """The contraction, its plan, whole numbers for its operands, and cotangents where there are gradients."""
    has_gradients = case.dtype[0] != "i"
    options = case.profile, None, None, None, case.overlap
    plan = plan_contraction(case.text, case.mesh, tuple(case.sizes.items()), None, case.dtype, *options)
    if case.seed % 8 == 0:
        assert xs.ContractionPlan.from_json(plan.to_json()) == plan, "another plan in JSON"
    rng, (*operands, result) = np.random.default_rng(case.seed), case.layouts
    means = any(layout.tagged("mean") for layout in case.layouts)
    unit, within = case.mesh.n_devices if means else 1, (-2, 3) if case.dtype == "float32" else (-9, 10)

    def drawn(layout: xs.Layout) -> Blocks:
        shape = case.shape_of(layout)
        each = [oracle.random_blocks(layout, case.mesh, shape, rng, unit, within) for _ in "ri"]
        if case.dtype.startswith("complex"):
            return [x + 1j * y for x, y in zip(*each, strict=True)]
        return [block.astype(case.dtype) for block in each[0]]

    given = [drawn(layout) for layout in operands]
    return Product(case, plan, given, drawn(result.dual) if has_gradients else None)


def judge(product: Product, made: Arrived) -> None:
    """Raise AssertionError unless the result and all gradients are those of the whole arrays."""
    case, (*operands, result) = product.chain, product.chain.layouts
    arrays = [_whole(case, x, layout) for x, layout in zip(product.blocks, operands, strict=True)]
    names = [layout.names for layout in operands]
    _check(case, made.blocks[0], result, _einsum(case, arrays, names, result.names), "the result")
    assert len(made.gradients) == len(product.leaves)
    for i, gradient in zip(product.leaves, made.gradients, strict=True):
        assert product.cotangents is not None
        cotangent = _whole(case, product.cotangents, result.dual)
        others = [*arrays[:i], *arrays[i + 1 :], cotangent]
        left = [*names[:i], *names[i + 1 :], result.names]
        # A dim that the operand alone has: its gradient is repeated along it.
        ones = [(np.ones(case.sizes[name]), (name,)) for name in names[i]]
        expected = _einsum(case, [*others, *(x for x, _ in ones)], [*left, *(n for _, n in ones)], names[i])
        # Of every addend of a mean, which counts for an n-th.
        expected = expected * case.mesh.size(*result.tagged("mean"))
        expected = expected / case.mesh.size(*operands[i].tagged("mean"))
        _check(case, gradient, operands[i].dual, expected, f"the gradient of operand {i}")


def _einsum(
    case: Contraction, arrays: Sequence[np.ndarray], names: Sequence[Sequence[str]], result: Sequence[str]
) -> np.ndarray:
    number = {name: i for i, name in enumerate(case.names)}
    parts = [part for x, dims in zip(arrays, names, strict=True) for part in (x, [number[n] for n in dims])]
    return np.asarray(np.einsum(*parts, [number[n] for n in result]))


def _whole(case: Contraction, blocks: Blocks, layout: xs.Layout) -> np.ndarray:
    wide = np.complex128 if case.dtype.startswith("complex") else np.float64
    return oracle.gather([block.astype(wide) for block in blocks], layout, case.mesh, case.shape_of(layout))


def _check(case: Contraction, blocks: Blocks, layout: xs.Layout, expected: np.ndarray, what: str) -> None:
    for device, block in enumerate(blocks):
        want = oracle.local_shape(layout, case.mesh, case.shape_of(layout), device)
        assert (block.dtype, block.shape) == (case.dtype, want), f"{what}: {block.dtype}{block.shape}"
    assert np.array_equal(_whole(case, blocks, layout), expected), f"{what} is another array"
