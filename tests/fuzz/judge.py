"""The blocks that chains start with, and their results against the definition (`tests/oracle.py`).

No plan takes part: a refusal too is compared with the rows that layouts hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

import xshard as xs
from tests import oracle, oracle_rows
from tests.fuzz.chains import MOVED, Chain
from xshard.dtypes import numpy_dtype
from xshard.notation.overlap import Fold, ends_of
from xshard.notation.parser import Dim

Blocks = list[np.ndarray]

SHORT = ("float16", "bfloat16")  # exact up to 256
WHOLE = math.lcm(*range(1, 17))  # a gradient that winners share stays whole


@dataclass(frozen=True)
class Trip:
    """A chain that can be planned, the blocks that it starts with, and cotangents of those that it ends with.

    No cotangents where no gradient is defined.
    """

    chain: Chain
    plans: tuple[xs.Plan, ...]
    blocks: Blocks
    cotangents: Blocks | None

    @property
    def moves(self) -> int:
        return len(self.plans)

    @property
    def world(self) -> int:
        return self.chain.world


@dataclass(frozen=True)
class Arrived:
    """The blocks after every move, or of a contraction's result, and the gradients that there are."""

    blocks: Sequence[Blocks]
    gradients: Sequence[Blocks] = ()


def trip(chain: Chain) -> Trip | None:
    """The chain as far as it can be planned; None if not one move can.

    Raises AssertionError for a plan that is refused without a reason, or does not keep what it says;
    XshardError for layouts that the shape cannot have.
    """
    wide = any(d.overlap for layout in chain.layouts for d in layout.dims)
    if chain.dtype in SHORT and (wide or any(layout.tagged("mean") for layout in chain.layouts)):
        chain = replace(chain, dtype="float32")
    for i, layout in enumerate(chain.layouts):
        xs.Sharding(layout, chain.mesh_at(i), chain.shape_at(i))
    plans: list[xs.Plan] = []
    for i in range(chain.moves):
        try:
            plans.append(_planned(chain, i))
        except xs.XshardError as error:
            if not _is_right(error, chain, i):
                raise AssertionError(f"{type(error).__name__}: {error}") from None
            break
    if not plans:
        return None
    chain = replace(chain, layouts=chain.layouts[: len(plans) + 1])
    rng, (first, last) = np.random.default_rng(chain.seed), (chain.layouts[0], chain.layouts[-1])
    unit = math.lcm(chain.mesh.n_devices, chain.mesh_at(chain.moves).n_devices)
    blocks = _drawn(chain, first, 0, rng, unit)
    has_winners = (
        chain.dtype == "float64"
        and chain.there is None
        and chain.layouts[1].is_linear
        and 0 not in chain.shape
    )
    cotangents = None
    if chain.dtype not in MOVED and (first.is_linear or has_winners):
        cotangents = _drawn(
            chain, last.dual, chain.moves, rng, unit * (1 if first.is_linear else WHOLE)
        )
    return Trip(chain, tuple(plans), blocks, cotangents)


def judge(trip: Trip, arrived: Arrived) -> None:
    """Raise AssertionError unless every move kept the array, and the gradient is right by definition."""
    chain = trip.chain
    here = trip.blocks
    for i, there in enumerate(arrived.blocks):
        _check_move(chain, i, here, list(there))
        here = list(there)
    assert len(arrived.gradients) == (trip.cotangents is not None)
    if trip.cotangents is None:
        return
    first = chain.layouts[0]
    gradient = _wide(arrived.gradients[0])
    if not first.is_linear:
        _check_winners(trip, gradient)
        return
    oracle.value(gradient, first.dual, chain.mesh, chain.shape)  # replicas agree
    there = _dot(chain, chain.moves, here, trip.cotangents)
    back = _dot(chain, 0, trip.blocks, gradient)
    assert there == back, f"<A x, y> is {there}, <x, A* y> is {back}"


def _planned(chain: Chain, i: int) -> xs.Plan:
    options = {"shape": chain.shape_at(i), "dtype": chain.dtype, "profile": chain.profile}
    options |= {"expression": chain.layouts[i : i + 2], "mesh": chain.mesh}
    if chain.there is not None:
        options |= {
            "mesh": None,
            "src_mesh": chain.mesh,
            "dst_mesh": chain.there,
            "relabel": chain.relabel,
        }
        options |= {"src_devices": chain.numbers(0), "dst_devices": chain.numbers(1)}
    plan = xs.plan(**options)
    assert plan.bytes_received >= plan.bytes_lower_bound, f"move {i} is below the lower bound"
    if chain.seed % 8 == i:
        tight = xs.plan(**options, memory_limit=plan.peak_bytes)
        assert tight.peak_bytes <= plan.peak_bytes, f"move {i} holds more than its limit"
        assert xs.Plan.from_json(plan.to_json()) == plan, f"move {i} is another plan in JSON"
    return plan


def _drawn(chain: Chain, layout: xs.Layout, at: int, rng: np.random.Generator, unit: int) -> Blocks:
    """Small whole numbers in the chain's dtype, those that the layout lets be drawn."""
    mesh = chain.mesh_at(at)
    shape = chain.shape_at(at)
    low, high = (0, 2) if chain.dtype in ("bool", "uint8") else (-9, 10)
    if chain.dtype in (*SHORT, *MOVED):
        low = max(low, -2)
        high = min(high, 3)
        unit = 1
    drawn = oracle.random_blocks(layout, mesh, shape, rng, unit, (low, high))
    if chain.dtype.startswith("complex"):
        other = oracle.random_blocks(layout.tangent, mesh, shape, rng, unit, (low, high))
        drawn = [x + 1j * y for x, y in zip(drawn, other, strict=True)]
    return [block.astype(numpy_dtype(chain.dtype)) for block in drawn]


def _wide(blocks: Blocks) -> Blocks:
    """The same numbers in a dtype that is exact for all that is done to them here."""
    kind = blocks[0].dtype.kind
    wide = {"c": np.complex128, "b": np.int64, "i": np.int64, "u": np.int64}.get(kind, np.float64)
    return [block.astype(wide) for block in blocks]


def _check_move(chain: Chain, i: int, before: Blocks, after: Blocks) -> None:
    src = chain.layouts[i]
    dst = chain.layouts[i + 1]
    mesh = chain.mesh_at(i)
    there = chain.mesh_at(i + 1)
    assert len(after) == there.n_devices, f"move {i}: {len(after)} blocks"
    for device, block in enumerate(after):
        assert block.dtype == before[0].dtype, f"move {i}: {block.dtype}"
        want = oracle.local_shape(dst, there, chain.shape_at(i + 1), device)
        assert block.shape == want, f"move {i}: device {device} has {block.shape}, not {want}"
    order = [src.names.index(name) for name in dst.names]
    want, had = (
        x.transpose(order) for x in oracle.value(_wide(before), src, mesh, chain.shape_at(i))
    )
    got, has = oracle.value(_wide(after), dst, there, chain.shape_at(i + 1))
    told = had | oracle.known(src, mesh, chain.shape_at(i)).transpose(order)
    assert told[has].all(), f"move {i}: elements from nowhere"
    assert np.array_equal(got[has], want[has]), f"move {i}: another array"
    if not any(dim.overlap and not isinstance(dim.overlap, Fold) for dim in dst.dims):
        assert has[had].all(), f"move {i}: elements are lost"


def _dot(chain: Chain, i: int, xs_: Blocks, ys: Blocks) -> complex:
    """<x, y> of blocks under the i-th layout and its dual; rows that a boundary fills are no variables."""
    layout = chain.layouts[i]
    mesh = chain.mesh_at(i)
    total = 0j
    replicated = [axis for axis in mesh.axes if axis not in layout.axes]
    for device, (x, y) in enumerate(zip(_wide(xs_), _wide(ys), strict=True)):
        if mesh.index(device, replicated) == 0:
            inside = (
                oracle.elements(layout, mesh, chain.shape_at(i), device, False).number
                != oracle_rows.OUTSIDE
            )
            total += complex((x * y)[inside].sum())
    return total


def _check_winners(trip: Trip, gradient: Blocks) -> None:
    """Of a max or min: every element's cotangent in equal shares to the addends that are it."""
    chain = trip.chain
    assert_equal = np.testing.assert_array_equal
    mesh = chain.mesh
    first = chain.layouts[0]
    last = chain.layouts[-1]
    order = [last.names.index(name) for name in first.names]
    asked = oracle.value(
        _wide(trip.cotangents or []), last.dual, mesh, chain.shape_at(chain.moves)
    )[0]
    best = oracle.value(trip.blocks, first, mesh, chain.shape)[0].ravel()
    reduced = first.tagged("max", "min")
    replicated = [axis for axis in mesh.axes if axis not in first.axes]
    got, won = np.zeros((2, mesh.size(*reduced), best.size))
    for device, (x, g) in enumerate(zip(trip.blocks, gradient, strict=True)):
        there = oracle.elements(first, mesh, chain.shape, device, False)
        addend = mesh.index(device, reduced)
        inside = there.number != oracle_rows.OUTSIDE
        at = there.number[inside]
        sign = there.sign[inside]
        if mesh.index(device, replicated) == 0:  # copies and rows that overlap share a gradient
            np.add.at(got[addend], at, g[inside] * sign)
        won[addend][at] = x[inside] * sign == best[at]
        assert not g[~inside].any()
    assert_equal(got, asked.transpose(order).ravel() / np.maximum(won.sum(axis=0), 1) * won)


def _is_right(error: xs.XshardError, chain: Chain, i: int) -> bool:
    """Whether a move has to be refused, and for this reason."""
    src, dst = chain.layouts[i : i + 2]
    lengths = dict(zip(src.names, chain.shape_at(i), strict=True))
    pairs = [(src.dim(name), dst.dim(name), lengths[name]) for name in src.names]

    def rows(dim: Dim, length: int, beyond: bool, at: int = i) -> set[int]:
        mesh = chain.mesh_at(at)
        found = [oracle_rows.places(dim, length, mesh, d) for d in range(mesh.n_devices)]
        return {
            int(row)
            for here in found
            for row, pole in zip(here.row, here.pole, strict=True)
            if row != oracle_rows.OUTSIDE and (beyond or not pole)
        }

    ends = [
        (layout, end)
        for layout in (src, dst)
        for dim in layout.dims
        if dim.overlap is not None
        for end in ends_of(dim.overlap)
    ]
    if "holds row" in error.reason:
        if any(
            end.kind == "pole" for layout, end in ends if layout == dst
        ):  # which may roll what is wanted
            return any(n > len(rows(a, n, False)) for a, _, n in pairs)
        return any(
            rows(b, n, not isinstance(b.overlap, Fold), i + 1) - rows(a, n, False)
            for a, b, n in pairs
        )
    if "is in no block" in error.reason:
        folds = [pair for pair in pairs if isinstance(pair[1].overlap, Fold)]
        rolled = any(end.kind == "pole" for _, end in ends)
        return rolled or any(rows(a, n, True) - rows(b, n, False, i + 1) for a, b, n in folds)
    if "whose sum is another number" in error.reason:
        return any(end.value and layout.tagged("sum", "mean") for layout, end in ends)
    if "overlaps move on one mesh" in error.reason:
        return chain.there is not None and (src.has_overlap or dst.has_overlap)
    if "contributions" in error.reason:
        return not src.is_linear and "fold" in str(src)
    if "corner" in error.reason:
        return src.names != dst.names and any(end.fill for _, end in ends)
    if "order of dims changes" in error.reason:
        return src.names != dst.names and any(end.kind == "pole" and not end.dim for _, end in ends)
    return isinstance(error, xs.errors.DtypeError) and chain.dtype not in (
        "float64",
        "float32",
        "complex64",
    )
