"""Random contractions: one to four operands and their result, against numpy's einsum of whole arrays.

The result is compared, and every operand's gradient. Dims may be composed, and an operand's names repeat.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import xshard as xs
from tests import oracle
from tests.fuzz.chains import LENGTHS, PROFILES, random_layout, random_mesh
from tests.fuzz.judge import Arrived, Blocks
from xshard.contractions.expression import contraction
from xshard.contractions.ring import OVERLAPS
from xshard.contractions.shapes import shapes_of
from xshard.notation.parser import Dim
from xshard.planner import plan_contraction

DTYPES = (*("float64",) * 5, "float32", "complex128", "int64", "int32")
MOST = 2**20  # products of one contraction


@dataclass(frozen=True)
class Contraction:
    """Operands, and last the result, under `layouts`: a second dim of a name is `i'`, a composed one `(i j)`.

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
        return tuple(
            sorted({name for layout in self.layouts for name in _names(layout, once=True)})
        )

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(self.names, self.shape, strict=True))

    @property
    def text(self) -> str:
        *operands, result = (_as_written(layout) for layout in self.layouts)
        return f"{', '.join(operands)} -> {result}".replace("'", "")

    def shape_of(self, layout: xs.Layout) -> tuple[int, ...]:
        parts = [dim.parts or (dim.name.replace("'", ""),) for dim in layout.dims]
        return tuple(math.prod(self.sizes[name] for name in each) for each in parts)

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
        return (
            self.chain.leaves or tuple(range(len(self.blocks)))
            if self.cotangents is not None
            else ()
        )


def random_contraction(
    seed: object, devices: int | None = None, mesh: xs.Mesh | None = None
) -> Contraction:
    """Any dims in any order under any linear layouts; means, which need large numbers, of two operands."""
    rng = random.Random(repr(seed))
    mesh = mesh or random_mesh(
        rng, devices if devices is not None else rng.choice((2, 3, 4, 4, 6, 8))
    )
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
    if rng.random() < 0.3:
        ends = [_composed(rng, end, lengths) for end in ends]
        ends[:-1] = [_repeated(rng, end) if len(end.dims) < 3 else end for end in ends[:-1]]
    options = rng.choice(PROFILES), rng.choice(("never", *OVERLAPS)), rng.choice(("used", "given"))
    leaves = tuple(i for i in range(n) if rng.random() < 0.7)
    shape = tuple(lengths.values())
    return Contraction(mesh, shape, dtype, tuple(ends), *options, leaves, rng.randrange(10**9))


def _composed(rng: random.Random, layout: xs.Layout, lengths: dict[str, int]) -> xs.Layout:
    """The layout with two of its dims as one, if the second is whole."""
    for i, (first, second) in enumerate(itertools.pairwise(layout.dims)):
        if not second.shards and rng.random() < 0.8:
            parts = (first.name, second.name)
            one = replace(first, name="_".join(parts), parts=parts, unit=lengths[second.name])
            return replace(layout, dims=(*layout.dims[:i], one, *layout.dims[i + 2 :]))
    return layout


def _repeated(rng: random.Random, layout: xs.Layout) -> xs.Layout:
    """The layout with one more dim of one of its names, of which one is whole."""
    names = _names(layout, once=True)
    if not names or rng.random() < 0.3:
        return layout
    dims = list(layout.dims)
    name = rng.choice(names)
    dims.insert(rng.randint(0, len(dims)), Dim(f"{name}'"))
    return replace(layout, dims=tuple(dims))


def _as_written(layout: xs.Layout) -> str:
    """The text of a layout, with composed dims by names, whatever their lengths are."""
    dims = [replace(dim, unit=None) if dim.parts else dim for dim in layout.dims]
    return str(replace(layout, dims=tuple(dims)))


def _names(layout: xs.Layout, *, once: bool = False) -> tuple[str, ...]:
    """The names of all dims, in which that of a second one has an apostrophe; once: without those."""
    names = itertools.chain(*(dim.parts or (dim.name,) for dim in layout.dims))
    return tuple(name for name in names if not once or name[-1] != "'")


def planned(case: Contraction) -> Product:
    """The contraction, its plan, whole numbers for its operands, and cotangents where there are gradients."""
    has_gradients = case.dtype[0] != "i"
    call, shapes = shapes_of(contraction(case.text), tuple(case.sizes.items()), None)
    plan = plan_contraction(
        call, case.mesh, shapes, case.dtype, case.profile, None, None, None, case.overlap
    )
    if case.seed % 8 == 0:
        assert xs.ContractionPlan.from_json(plan.to_json()) == plan, "another plan in JSON"
    rng, (*operands, result) = np.random.default_rng(case.seed), case.layouts
    means = any(layout.tagged("mean") for layout in case.layouts)
    unit = case.mesh.n_devices if means else 1
    within = (-2, 3) if case.dtype == "float32" else (-9, 10)

    def drawn(layout: xs.Layout) -> Blocks:
        shape = case.shape_of(layout)
        each = [oracle.random_blocks(layout, case.mesh, shape, rng, unit, within) for _ in "ri"]
        if case.dtype.startswith("complex"):
            return [x + 1j * y for x, y in zip(*each, strict=True)]
        return [block.astype(case.dtype) for block in each[0]]

    given = [drawn(layout) for layout in operands]
    return Product(case, plan, given, drawn(result.dual) if has_gradients else None)


def judge(product: Product, arrived: Arrived) -> None:
    """Raise AssertionError unless the result and all gradients are those of the whole arrays."""
    case, (*operands, result) = product.chain, product.chain.layouts
    arrays = [_whole(case, x, layout) for x, layout in zip(product.blocks, operands, strict=True)]
    names = [_names(layout) for layout in operands]
    made = _einsum(case, arrays, names, _names(result))
    _check(case, arrived.blocks[0], result, made.reshape(case.shape_of(result)), "the result")
    assert len(arrived.gradients) == len(product.leaves)
    for i, gradient in zip(product.leaves, arrived.gradients, strict=True):
        assert product.cotangents is not None
        cotangent = _whole(case, product.cotangents, result.dual)
        others = [*arrays[:i], *arrays[i + 1 :], cotangent]
        left = [*names[:i], *names[i + 1 :], _names(result)]
        # A dim that the operand alone has: its gradient is repeated along it. Beside a diagonal it is zero.
        for name in names[i]:
            n = case.sizes[name.rstrip("'")]
            again = name[-1] == "'"
            others.append(np.eye(n) if again else np.ones(n))
            left.append((name, name[:-1]) if again else (name,))
        expected = _einsum(case, others, left, names[i], apart=names[i]).reshape(
            case.shape_of(operands[i])
        )
        # Of every addend of a mean, which counts for an n-th.
        expected = expected * case.mesh.size(*result.tagged("mean"))
        expected = expected / case.mesh.size(*operands[i].tagged("mean"))
        _check(case, gradient, operands[i].dual, expected, f"the gradient of operand {i}")


def _einsum(
    case: Contraction,
    arrays: Sequence[np.ndarray],
    names: Sequence[Sequence[str]],
    result: Sequence[str],
    apart: Sequence[str] = (),
) -> np.ndarray:
    """numpy's own, in which a second dim of a name is the first one's, unless it is `apart`."""
    number = {
        name: i
        for i, name in enumerate((*case.names, *(name for name in apart if name[-1] == "'")))
    }
    lengths = case.sizes
    arguments: list[Any] = []
    for x, dims in zip(arrays, names, strict=True):
        plain = [name.rstrip("'") for name in dims]
        arguments += [x.reshape([lengths[name] for name in plain])]
        arguments += [
            [
                number[n if n in number and n in apart else p]
                for n, p in zip(dims, plain, strict=True)
            ]
        ]
    return np.asarray(np.einsum(*arguments, [number[name] for name in result]))


def _whole(case: Contraction, blocks: Blocks, layout: xs.Layout) -> np.ndarray:
    wide = np.complex128 if case.dtype.startswith("complex") else np.float64
    return oracle.gather(
        [block.astype(wide) for block in blocks], layout, case.mesh, case.shape_of(layout)
    )


def _check(
    case: Contraction, blocks: Blocks, layout: xs.Layout, expected: np.ndarray, what: str
) -> None:
    for device, block in enumerate(blocks):
        want = oracle.local_shape(layout, case.mesh, case.shape_of(layout), device)
        assert (block.dtype, block.shape) == (case.dtype, want), (
            f"{what}: {block.dtype}{block.shape}"
        )
    assert np.array_equal(_whole(case, blocks, layout), expected), f"{what} is another array"
