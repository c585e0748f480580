"""Operations in letters, from shapes alone: what the tracers of torch and JAX have in common.

A *letter* stands for a dim within one operation: `a c, d c -> a d`. `Trace` replaces letters by
names that hold in the whole step. Letters here: `r0`, `r1`, ... for dims of the result, `u0_1` for
dim 1 of operand 0 where it is no dim of the result. A dim that no mesh axis may shard is *whole*.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from operator import mul
from typing import Any, NamedTuple

import numpy as np

from xshard.step.record.arrays import write_arrays

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
        n_length_operands: How many operands, the last ones, are only there because the operation
            reads lengths from them.
    """

    arrays: Sequence[Sequence[str]]
    kind: str = "pointwise"
    whole: Collection[str] = ()
    work: Mapping[str, Any] = {}
    lengths: Mapping[str, int] = {}
    n_length_operands: int = 0

    @property
    def text(self) -> str:
        """The dims of operands and result, as `Op` takes them."""
        return write_arrays([" ".join(dims) for dims in self.arrays])


def common_factors(before: Shape, after: Shape) -> tuple[list[list[Factor]], list[list[Factor]]]:
    """Split the dims of two shapes of one array into factors that both have.

    (64, 4096) and (8, 8, 32, 128) -> (8, 8), (32, 128) and 8, 8, 32, 128. A factor that both have
    has one name. A dim that ends inside a dim of the other shape is a factor of its own, and so is
    a dim of length 1.
    """
    ends_before = _ends_of_dims(before)
    ends_after = _ends_of_dims(after)
    cuts = sorted({*ends_before, *ends_after})
    return _split_dims(ends_before, cuts, "u0"), _split_dims(ends_after, cuts, "u1")


def _ends_of_dims(shape: Shape) -> list[int]:
    """Multiply the lengths of the first dims: (64, 4096) -> 1, 64, 262144.

    A dim without rows counts as one row, as in `Trace`.
    """
    lengths = [max(n, 1) for n in shape]
    return list(accumulate(lengths, mul, initial=1))


def _split_dims(ends: Sequence[int], cuts: Sequence[int], prefix: str) -> list[list[Factor]]:
    """Split each dim of a shape into factors, at the given cuts.

    Ends and cuts are products of lengths, as of `_ends_of_dims`: (64, 4096) has the ends
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


def merged_dim(names: Sequence[str]) -> str:
    """Write single dims as one dim of an array, in parentheses if several: g, d -> `(g d)`."""
    return names[0] if len(names) == 1 else f"({' '.join(names)})"


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
    numbers = np.atleast_1d(dims).tolist()  # `jnp.roll` gives a numpy.int64
    # torch allows dims 0 and -1 for a scalar, which has none: `max` avoids a division by 0.
    worked_along = {d % max(ndim, 1) for d in numbers}
    is_reduction = len(out) != ndim
    places: Sequence[int | None] = range(ndim)
    if is_reduction:
        places = _places_without(worked_along, ndim)
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
    whole.update(letter for letter in chain(*described.arrays) if letter.startswith("u"))
    if not is_reduction:
        whole.update(f"r{d}" for d in worked_along)
    return described._replace(whole=whole)


def _places_without(reduced_dims: Collection[int], ndim: int) -> list[int | None]:
    """Return the places of dims in a reduced array: of 3 dims, without dim 1 -> [0, None, 1]."""
    left = [d for d in range(ndim) if d not in reduced_dims]
    return [left.index(d) if d in left else None for d in range(ndim)]


def view(before: Shape, after: Shape) -> LetteredOp:
    """Describe a reshape; dims that no axis can shard are whole.

    >>> view((64, 4096), (8, 8, 32, 128)).text
    '(r1 r8) (r64 r2048) -> r1 r8 r64 r2048'
    >>> view((4, 6, 5), (4, 10, 3)).text, sorted(view((4, 6, 5), (4, 10, 3)).whole)
    ('r1 r4 u0_2 -> r1 u1_1 r40', ['r4', 'r40', 'u0_2', 'u1_1'])
    """
    factors_before, factors_after = common_factors(before, after)
    arrays = [_written_factors(factors_before), _written_factors(factors_after)]
    lengths_before = dict(chain(*factors_before))
    lengths_after = dict(chain(*factors_after))
    whole = lengths_before.keys() ^ lengths_after.keys()  # factors of one side only
    return LetteredOp(arrays, "linear", whole, FREE, lengths_before | lengths_after)


def _written_factors(factors_of_dims: Sequence[Sequence[Factor]]) -> list[str]:
    """Write each dim of an array by its factors: `(r1 r8)`, `r64`."""
    return [merged_dim([factor.name for factor in factors]) for factors in factors_of_dims]


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
    if not orders:
        orders = [range(len(out))] * 3
    operand_order, kernel_order, result_order = orders
    _, operand_channel_dim, *operand_spatial_dims = operand_order
    n_operand_channels = shapes[0][operand_channel_dim]
    kernel_channels = _kernel_channels(n_operand_channels, out[result_order[1]], groups)
    has_wide_groups = "i" in kernel_channels
    n_spatial = len(operand_spatial_dims)
    operand_spatial = dim_letters(n_spatial, "l")
    kernel_spatial = dim_letters(n_spatial, "k")
    result_spatial = dim_letters(n_spatial, "m")
    arrays = [
        _reordered(["b", "c", *operand_spatial], operand_order),
        _reordered([*kernel_channels, *kernel_spatial], kernel_order),
        _reordered(["b", kernel_channels[0], *result_spatial], result_order),
    ]
    whole = {*operand_spatial, *kernel_spatial, *result_spatial}
    if has_wide_groups:
        whole |= {"c", "o", "i"}
    # A convolution does 2 b o m k c operations (i in place of c with wide groups). The planner
    # multiplies `flops` by the lengths of all letters, so also by l, and by c beside i: divide
    # these out.
    factor_too_many = math.prod(shapes[0][dim] for dim in operand_spatial_dims)
    if has_wide_groups:
        factor_too_many *= n_operand_channels
    return LetteredOp(arrays, "contraction", whole, {"flops": 2.0 / factor_too_many})


def _kernel_channels(operand_channels: int, result_channels: int, groups: int) -> list[str]:
    """Name the dims of a kernel for the channels of a convolution's result and operand: o, c.

    "c one" if each channel is by itself, "o i" for groups of several, which have i of the operand's
    channels each.
    """
    if groups == 1:
        return ["o", "c"]
    is_depthwise = operand_channels == result_channels == groups
    return ["c", "one"] if is_depthwise else ["o", "i"]


def _reordered(letters: Sequence[str], order: Sequence[int]) -> list[str]:
    """Put each letter at its number in the array: b c l, order 0 2 1 -> b l c."""
    letter_of_dim = dict(zip(order, letters, strict=True))
    return [letter_of_dim[d] for d in range(len(letters))]
