"""Operations in letters, from shapes alone: what the tracers of torch and JAX have in common.

A bridge describes an operation with letters of its own (`a c, d c -> a d`); `Trace` gives them
names that hold in the whole step. Letters here: `r0`, `r1`, ... for dims of the result, `u0_1` for
dim 1 of operand 0 where it is no dim of the result.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from operator import mul
from typing import Any, NamedTuple

import numpy as np

from xshard.notation.parser import ARROW

FREE: Mapping[str, Any] = {"accesses": 0.0}  # compilers fuse it with the operation before or after
Shape = Sequence[int]
Shapes = Sequence[Shape]
Places = Sequence[Sequence[int | None]]  # for each dim of each operand, the result's dim, or None


class Factor(NamedTuple):
    """A part of a dim: `(8 512)` has the factors 8 and 512."""

    name: str
    length: int


class LetteredOp(NamedTuple):
    """An operation in letters, as `Trace.add` takes it.

    Args:
        arrays: The dims of each operand, then of the result.
        kind: Its class, one of `KINDS`.
        whole: Dims that no axis may shard.
        work: Fields of `Op` that say how much work it is: `flops`, `accesses`, `keeps`.
        lengths: The lengths of dims in parentheses, by name.
        links: How many operands, the last ones, are only there because the operation reads lengths
            from them.
    """

    arrays: Sequence[Sequence[str]]
    kind: str = "pointwise"
    whole: Collection[str] = ()
    work: Mapping[str, Any] = {}
    lengths: Mapping[str, int] = {}
    links: int = 0

    @property
    def text(self) -> str:
        """The dims of operands and result, as `Op` takes them."""
        *operands, result = [" ".join(dims) for dims in self.arrays]
        shown = [operand if operand else "()" for operand in operands]
        return f"{', '.join(shown)} {ARROW} {result}".strip()


def common_factors(before: Shape, after: Shape) -> tuple[list[list[Factor]], list[list[Factor]]]:
    """Split the dims of two shapes of one array into factors that both have.

    (64, 4096) and (8, 8, 32, 128) -> (8, 8), (32, 128) and 8, 8, 32, 128. A factor that both have
    has one name. A dim that ends inside a dim of the other shape is a factor of its own, and so is
    a dim of length 1.
    """
    # (64, 4096) -> 1, 64, 262144: where dims begin and end, in elements of the dims before.
    # A dim without rows counts as one row, as in `Trace`.
    ends_before = list(accumulate((max(n, 1) for n in before), mul, initial=1))
    ends_after = list(accumulate((max(n, 1) for n in after), mul, initial=1))
    cuts = sorted({*ends_before, *ends_after})
    return _split_dims(ends_before, cuts, "u0"), _split_dims(ends_after, cuts, "u1")


def _split_dims(ends: Sequence[int], cuts: Sequence[int], prefix: str) -> list[list[Factor]]:
    """Split each dim of a shape into factors, at the given cuts.

    Ends and cuts are products of the lengths of all dims before: the shape (64, 4096) has the ends
    [1, 64, 262144]. With the cuts [1, 8, 64, 2048, 262144] its dims are 8 x 8 and 32 x 128, with
    the names r1, r8 and r64, r2048, after the cut where each factor begins. So a factor has one
    name in all shapes that have it.

    A dim that the cuts do not divide evenly, or of length 1, is one factor: "u0_0" for prefix "u0".
    """
    factors = []
    for d, (low, high) in enumerate(pairwise(ends)):
        # Empty for a dim of length 1: it begins and ends at the same cut.
        spans = list(pairwise(cut for cut in cuts if low <= cut <= high))
        # From 64 to 2048 a factor has the length 32; from 64 to 96 there is no whole number.
        if not spans or any(end % start for start, end in spans):
            factors.append([Factor(f"{prefix}_{d}", high // low)])
        else:
            factors.append([Factor(f"r{start}", end // start) for start, end in spans])
    return factors


def split_words(text: str) -> frozenset[str]:
    """Split names of operations at white space."""
    return frozenset(text.split())


def grouped(names: Sequence[str]) -> str:
    """Write dims as one dim of an array, in parentheses if they are several: g, d -> `(g d)`."""
    return names[0] if len(names) == 1 else f"({' '.join(names)})"


def _joined(factors: Sequence[Factor]) -> str:
    """Write a dim by its factors."""
    return grouped([factor.name for factor in factors])


def dim_letters(n: int, prefix: str = "r") -> list[str]:
    """Name the dims of an array: r0, r1, ..."""
    return [f"{prefix}{i}" for i in range(n)]


def describe_by_places(
    shapes: Shapes,
    out: Shape,
    places: Places,
    kind: str = "linear",
    whole: Collection[str] = (),
    **work: Any,
) -> LetteredOp:
    """Describe an operation as an einsum-like text, by where its operands' dims are in the result.

    A bias of shape (8,) added to (4, 8) is `r0 r1, r1 -> r0 r1`: dim 0 of the bias is dim 1 of the
    result, so the places are [(0, 1), (1,)]. A dim of another length, or without a place, has a
    letter of its own: a column of shape (4, 1) with the places (0, 1) is `r0 u1_1`.

    Args:
        shapes: The shape of each operand.
        out: The shape of the result.
        places: For each dim of each operand the number of the result's dim, None if it has none.
        kind: The class of the operation, one of `KINDS`.
        whole: Letters of dims that no mesh axis may shard. A dim longer than 1 that the operation
            makes longer or shorter (slices, padding) is one of these, too, on both sides: blocks
            of both would not match.
        work: Fields of `Op` that say how much work it is: `flops`, `accesses`, `keeps`.
    """
    arrays = []
    whole_dims = {*whole}
    for operand, shape in enumerate(shapes):
        dims = []
        for d, (length, place) in enumerate(zip(shape, places[operand], strict=True)):
            if place is not None and length == out[place]:
                dims.append(f"r{place}")
                continue
            own_letter = f"u{operand}_{d}"
            dims.append(own_letter)
            # Length 1 at the place of a longer dim is a broadcast: the result's dim may be sharded.
            if place is not None and length > 1:
                whole_dims |= {f"r{place}", own_letter}
        arrays.append(dims)
    arrays.append(dim_letters(len(out)))
    return LetteredOp(arrays, kind, whole_dims, work)


def describe_aligned(
    shapes: Shapes, out: Shape, kind: str = "linear", whole: Collection[str] = (), **work: Any
) -> LetteredOp:
    """Describe an operation with broadcasting: the last dims of operands are the result's."""
    ndim = len(out)
    places = [range(ndim - len(shape), ndim) for shape in shapes]
    return describe_by_places(shapes, out, places, kind, whole, **work)


def describe_along(
    shapes: Shapes,
    out: Shape,
    dims: int | Shape,
    kind: str = "pointwise",
    *,
    sums: bool = False,
    **work: Any,
) -> LetteredOp:
    """Describe an operation that works along some dims, such as a softmax or a sum.

    Letters r0, r1, ... are dims of the result; u0_1 is dim 1 of operand 0 that is not in the result.
    A softmax along dim 1 is `r0 r1 -> r0 r1`: each element of its result needs a whole row, and no
    mesh axis may shard r1. A sum over dim 0 is `u0_0 r0 -> r0`. With `sums` an axis may shard u0_0,
    for partial results add up.

    Args:
        shapes: The shape of each operand.
        out: The shape of the result.
        dims: The numbers of the dims, which may be negative as in torch.
        kind: The class of the operation, one of `KINDS`.
        sums: The result is a sum over these dims, so that none of them needs to be whole.
        work: Fields of `Op` that say how much work it is: `flops`, `accesses`, `keeps`.
    """
    ndim = len(shapes[0])
    numbers = np.atleast_1d(
        dims
    ).tolist()  # one may be numpy's: `jnp.roll` cuts along a numpy.int64
    # torch allows dims 0 and -1 for a scalar, which has none: `max` avoids a division by 0.
    worked_along = {d % max(ndim, 1) for d in numbers}
    # For each dim of the first operand its number in the result, or None.
    places: list[int | None] = [*range(ndim)]
    if len(out) != ndim:  # a reduction: only the other dims are in the result
        other_dims = [d for d in range(ndim) if d not in worked_along]
        places = [other_dims.index(d) if d in other_dims else None for d in range(ndim)]
    # Other operands with as many dims as the first have the same places; those with another number
    # of dims, such as a seed or an index, share no dim with the result.
    all_places = []
    for shape in shapes:
        all_places.append(places if len(shape) == ndim else [None] * len(shape))
    described = describe_by_places(shapes, out, all_places, kind, **work)
    if sums:
        return described._replace(whole=())
    # Each element of the result needs all of a dim that is gone, or all of these dims.
    whole = {*described.whole}
    whole.update(dim for dim in chain(*described.arrays) if dim.startswith("u"))
    if len(out) == ndim:
        whole.update(f"r{d}" for d in worked_along)
    return described._replace(whole=whole)


def view(before: Shape, after: Shape) -> LetteredOp:
    """Describe a reshape; dims that no axis can shard are whole.

    >>> view((64, 4096), (8, 8, 32, 128)).text
    '(r1 r8) (r64 r2048) -> r1 r8 r64 r2048'
    >>> view((4, 6, 5), (4, 10, 3)).text, sorted(view((4, 6, 5), (4, 10, 3)).whole)
    ('r1 r4 u0_2 -> r1 u1_1 r40', ['r4', 'r40', 'u0_2', 'u1_1'])
    """
    dims_before, dims_after = common_factors(before, after)
    arrays = [list(map(_joined, dims)) for dims in (dims_before, dims_after)]
    lengths_before = dict(chain(*dims_before))
    lengths_after = dict(chain(*dims_after))
    whole = lengths_before.keys() ^ lengths_after.keys()  # factors of one side only
    return LetteredOp(arrays, "linear", whole, FREE, lengths_before | lengths_after)


def convolution(
    shapes: Shapes, out: Shape, groups: int, orders: Sequence[Sequence[int]] = ()
) -> LetteredOp:
    """Describe a convolution as an einsum-like contraction: `b c l0, o c k0 -> b o m0`.

    Mesh axes may shard the batch b, the operand's channels c (results are partial sums) and the
    result's channels o. They may not shard spatial dims (l in the operand, k in the kernel, m in
    the result), where windows reach into neighbouring blocks, nor channels in groups of several.
    A depthwise convolution is `b c l0, c one k0 -> b c m0`: "one" is a dim of length 1.

    Args:
        shapes: The shapes of operand and kernel.
        out: The shape of the result.
        groups: In how many groups of channels it works; as many as channels: depthwise.
        orders: Which dims of each array are which, as JAX lets you choose. For operand, then kernel,
            then result: the numbers of the dims batch, channels, spatial; for the kernel, of the
            result's channels, the operand's channels, spatial. Operands [b, h, w, c] have
            (0, 3, 1, 2). Empty: 0, 1, 2, ... for all.
    """
    n_spatial = len(out) - 2  # beside batch and channels
    if not orders:
        orders = [range(n_spatial + 2)] * 3
    operand_order, _, result_order = orders
    operand_channels = shapes[0][operand_order[1]]
    result_channels = out[result_order[1]]
    is_depthwise = operand_channels == result_channels == groups  # each channel by itself
    has_wide_groups = groups > 1 and not is_depthwise
    if has_wide_groups:
        kernel_channels = ["o", "i"]  # i: the operand's channels in one group
    elif groups == 1:
        kernel_channels = ["o", "c"]
    else:
        kernel_channels = ["c", "one"]
    operand_spatial = dim_letters(n_spatial, "l")
    kernel_spatial = dim_letters(n_spatial, "k")
    result_spatial = dim_letters(n_spatial, "m")
    arrays_in_order = (
        ["b", "c", *operand_spatial],
        [*kernel_channels, *kernel_spatial],
        ["b", kernel_channels[0], *result_spatial],
    )
    arrays = list(map(_reordered, arrays_in_order, orders))
    whole = {*operand_spatial, *kernel_spatial, *result_spatial}
    if has_wide_groups:
        whole |= {"c", "o", "i"}
    # A convolution does 2 b o m k c operations (i in place of c with wide groups). The planner
    # multiplies `flops` by the lengths of all letters, so also by l, and by c beside i: divide
    # these out.
    uncounted = operand_order[1:] if has_wide_groups else operand_order[2:]
    n_uncounted = math.prod(shapes[0][d] for d in uncounted)
    return LetteredOp(arrays, "contraction", whole, {"flops": 2.0 / n_uncounted})


def _reordered(names: Sequence[str], numbers: Sequence[int]) -> list[str]:
    """Put each name of a dim at its number in the array: b c l, numbers 0 2 1 -> b l c."""
    name_of = dict(zip(numbers, names, strict=True))
    return [name_of[d] for d in range(len(names))]
