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
    products_before = list(accumulate(before, mul, initial=1))
    products_after = list(accumulate(after, mul, initial=1))
    every_product = {*products_before, *products_after}
    return (
        [_factors(d, 0, ends, every_product) for d, ends in enumerate(pairwise(products_before))],
        [_factors(d, 1, ends, every_product) for d, ends in enumerate(pairwise(products_after))],
    )


def _factors(d: int, side: int, ends: tuple[int, int], products: Collection[int]) -> list[Factor]:
    """Cut a dim at the ends of dims on both sides.

    ends: the products of lengths up to the beginning and to the end of the dim. They name a factor,
    too: `r64` begins where 64 elements of outer dims are.
    """
    low, high = ends
    # A dim of length 1 has no span between two different products.
    cuts = sorted(product for product in products if low <= product <= high)
    spans = list(pairwise(cuts))
    if not spans or any(end % start for start, end in spans):
        return [Factor(f"u{side}_{d}", high // low)]
    return [Factor(f"r{start}", end // start) for start, end in spans]


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
    """Describe an operation as an einsum-like text, by where each operand's dim is in the result.

    A dim that is one of the result has the result's letter; any other has a letter of its own.
    A bias of shape (8,) added to (4, 8), with the places [(0, 1), (1,)], is `r0 r1, r1 -> r0 r1`.
    A column of shape (4, 1) in place of the bias, with the places (0, 1), is broadcast:
    `r0 r1, r0 u1_1 -> r0 r1`.

    Args:
        shapes: The shape of each operand.
        out: The shape of the result.
        places: For each dim of each operand the number of the result's dim, None if it has none.
        kind: The class of the operation, one of `KINDS`.
        whole: Letters of dims that no mesh axis may shard. A dim longer than 1 that the operation
            makes longer or shorter (slices, padding) is one of these, too, on both sides: blocks
            of both would not match.
        work: As `Written.work`.
    """
    arrays = list[list[str]]()
    whole_dims = {*whole}
    for operand, shape in enumerate(shapes):
        dims = list[str]()
        for d, (length, place) in enumerate(zip(shape, places[operand], strict=True)):
            if place is not None and length == out[place]:
                dims.append(f"r{place}")
                continue
            unshared = f"u{operand}_{d}"  # no dim of the result
            dims.append(unshared)
            # Length 1 at the place of a longer dim is a broadcast: the result's dim may be sharded.
            if place is not None and length > 1:
                whole_dims |= {f"r{place}", unshared}
        arrays.append(dims)
    arrays.append(dim_letters(len(out)))
    # `whole` may have letters of dims that are not there, such as a reduced one.
    return LetteredOp(arrays, kind, whole_dims.intersection(chain(*arrays)), work)


def describe_aligned(
    shapes: Shapes, out: Shape, kind: str = "linear", whole: Collection[str] = (), **work: Any
) -> LetteredOp:
    """Describe an operation with broadcasting: the last dims of operands are the result's."""
    places = [range(len(out) - len(shape), len(out)) for shape in shapes]
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
    """Describe a softmax, sum or the like, which works along some dims, in einsum-like letters.

    A softmax along the last dim keeps it: `r0 r1 -> r0 r1` with r1 whole, for every element of the
    result needs all of it. A sum over dim 0 has no such dim in the result: `u0_0 r0 -> r0`. With
    `sums` a mesh axis may shard u0_0, for partial results add up. Other dims are the result's, in
    their order.

    Args:
        shapes: The shape of each operand.
        out: The shape of the result.
        dims: The numbers of the dims, which may be negative as in torch.
        kind: The class of the operation, one of `KINDS`.
        sums: The result is a sum over these dims, so that none of them needs to be whole.
        work: As `Written.work`.
    """
    ndim = len(shapes[0])
    # torch allows dims 0 and -1 for a scalar, which has none: `max` avoids a division by 0.
    numbers = [dims] if isinstance(dims, int) else dims
    worked_along = {d % max(ndim, 1) for d in numbers}
    has_them_in_result = len(out) == ndim  # as in a softmax; in a reduction they are gone
    next_place = iter(range(len(out)))
    # The result's dim for each dim of the first operand; None if it is gone.
    places = list[int | None]()
    for d in range(ndim):
        is_in_result = has_them_in_result or d not in worked_along
        places.append(next(next_place) if is_in_result else None)
    # Other operands with as many dims as the first have the same places; those with another number
    # of dims, such as a seed or an index, share no dim with the result.
    places_by_shape = [places if len(shape) == ndim else [None] * len(shape) for shape in shapes]
    # For a dim that is gone this is `rNone`, no letter of any array: `describe_by_places` leaves it
    # out.
    whole = {f"r{places[d]}" for d in worked_along}
    written = describe_by_places(shapes, out, places_by_shape, kind, whole, **work)
    if sums:
        return written._replace(whole=set())
    # Each element of the result needs all of a dim that is gone.
    not_in_result = {dim for dim in chain(*written.arrays) if dim.startswith("u")}
    return written._replace(whole={*written.whole, *not_in_result})


def view(before: Shape, after: Shape) -> LetteredOp:
    """Describe a reshape; dims that no axis can shard are whole.

    >>> view((64, 4096), (8, 8, 32, 128)).text
    '(r1 r8) (r64 r2048) -> r1 r8 r64 r2048'
    >>> view((4, 6, 5), (4, 10, 3)).text, sorted(view((4, 6, 5), (4, 10, 3)).whole)
    ('r1 r4 u0_2 -> r1 u1_1 r40', ['r4', 'r40', 'u0_2', 'u1_1'])
    """
    dims_before, dims_after = common_factors(before, after)
    arrays = [[_joined(dim) for dim in dims_before], [_joined(dim) for dim in dims_after]]
    lengths_before = dict(chain(*dims_before))
    lengths_after = dict(chain(*dims_after))
    whole = lengths_before.keys() ^ lengths_after.keys()  # factors of one side only
    return LetteredOp(arrays, "linear", whole, FREE, lengths_before | lengths_after)


def convolution(
    shapes: Shapes, out: Shape, groups: int, orders: Sequence[Sequence[int]] = ()
) -> LetteredOp:
    """Describe a convolution as an einsum-like contraction: `b c l0, o c k0 -> b o m0`.

    Mesh axes may shard the batch b, the operand's channels c (results are partial sums) and the
    result's channels o. Spatial dims (l in the operand, k in the kernel, m in the result) are
    whole: windows reach into neighbouring blocks. With groups of several channels all channels
    are whole, too.

    Args:
        shapes: The shapes of operand and kernel.
        out: The shape of the result.
        groups: In how many groups of channels it works; as many as channels: depthwise.
        orders: For operand, kernel and result the numbers of the dims batch, channels, and spatial
            dims; for the kernel the result's channels, the operand's, and spatial dims. JAX lets
            each array have its dims in an order of its own. None given: in this order.
    """
    n_spatial = len(out) - 2  # beside batch and channels
    if not orders:
        orders = [range(n_spatial + 2)] * 3
    operand_order = orders[0]
    channels = (shapes[0][operand_order[1]], out[orders[2][1]])  # the operand's, the result's
    has_wide_groups = groups > 1 and channels != (groups, groups)
    if has_wide_groups:
        kernel_channels = ["o", "i"]  # i: the operand's channels in one group
    elif groups == 1:
        kernel_channels = ["o", "c"]
    else:  # depthwise: each channel by itself
        kernel_channels = ["c", "one"]
    operand_spatial, kernel_spatial, result_spatial = [dim_letters(n_spatial, s) for s in "lkm"]
    arrays_in_order = [
        ["b", "c", *operand_spatial],
        [*kernel_channels, *kernel_spatial],
        ["b", kernel_channels[0], *result_spatial],
    ]
    arrays = list(map(_reordered, arrays_in_order, orders))
    whole = {*operand_spatial, *kernel_spatial, *result_spatial}
    if has_wide_groups:
        whole |= {"c", "o", "i"}
    # Work is 2 operations per element of b, o, m, k and the summed channels. `flops` are per
    # element of the space of all dims, which has l, too, and c beside i: divide these out.
    uncounted = operand_order[1:] if has_wide_groups else operand_order[2:]
    flops = 2.0 / math.prod(shapes[0][d] for d in uncounted)
    return LetteredOp(arrays, "contraction", whole, {"flops": flops})


def _reordered(names: Sequence[str], numbers: Sequence[int]) -> list[str]:
    """Put each name of a dim at its number in the array: b c l, numbers 0 2 1 -> b l c."""
    name_of = dict(zip(numbers, names, strict=True))
    return [name_of[d] for d in range(len(names))]
