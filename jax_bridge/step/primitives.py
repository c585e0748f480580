"""The primitives of JAX as operations of a step: the dims of operands and result, and the class.

They are described in *letters*, one for each dim, as einsum does; `Trace` replaces letters by names.
A primitive that is not here is *opaque*: each device computes all of it.

To add a primitive, add its name to one of the sets below, or a row to `TABLE`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from string import ascii_letters
from typing import Any

from xshard.step.record.letters import (
    FREE,
    LetteredOp,
    Shape,
    convolution,
    describe_aligned,
    describe_along,
    describe_by_places,
    split_words,
    view,
)

Params = Mapping[str, Any]  # the parameters of a primitive, by name
# Of parameters, the shapes of operands that are arrays, and the result's; None: no rule is known.
Describer = Callable[[Params, Sequence[Shape], Shape], LetteredOp | None]

# Primitives with a jaxpr inside, whose operations are recorded in their place.
INLINED = split_words(
    "jit pjit closed_call core_call checkpoint remat2 custom_jvp_call custom_vjp_call"
)
ELEMENTWISE = split_words("""
    abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil
    clamp conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1
    floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul name ne neg nextafter
    not optimization_barrier or population_count pow real reduce_precision rem round rsqrt select_n
    sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh xor""")
# They make numbers in place, so that each device makes its own.
SOURCES = split_words("""
    create_token empty iota random_bits random_fold_in random_seed random_split random_unwrap
    random_wrap rng_bit_generator threefry2x32""")
# Their gradients need the result, and not the operands.
GRADIENT_BY_RESULT = split_words("cbrt exp exp2 expm1 logistic rsqrt sqrt tanh")
# The result has the elements of the operand: nothing is computed.
COPIES = split_words(
    "convert_element_type copy copy_p name optimization_barrier sharding_constraint"
)
# Not primitives of JAX: what a scan does to its operands and results (`Tracer`).
SLICE = "slice of a scan"
STACK = "stack of a scan"


def describe_primitive(
    primitive: str, params: Params, shapes: Sequence[Shape | None], out: Shape
) -> LetteredOp:
    """Describe how the dims of a primitive's operands and result belong together, in letters.

        dot_general of [b, s, c] and [c, d]: "abc, cd -> abd", a contraction

    From this the planner knows which dims can be sharded. A primitive without a rule is "opaque":
    none of its dims can.

    Args:
        primitive: Its name.
        params: Its parameters.
        shapes: The shapes of its operands; None for a literal.
        out: The shape of its result.
    """
    array_shapes = [shape for shape in shapes if shape is not None]
    if primitive in SOURCES or not array_shapes:
        return describe_by_places([], out, [], "source")
    if primitive in TABLE:
        op = TABLE[primitive](params, array_shapes, out)
        if op is not None:
            return op
    if primitive in ELEMENTWISE:
        kind = "linear" if _is_linear(primitive, shapes) else "pointwise"
        return describe_aligned(array_shapes, out, kind, **_work(primitive, len(array_shapes)))
    # Nothing is known: no dim of an operand is at any place of the result.
    no_places = [[None] * len(shape) for shape in array_shapes]
    return describe_by_places(array_shapes, out, no_places, "opaque")


def _is_linear(primitive: str, shapes: Sequence[Shape | None]) -> bool:
    """Return whether an operation can run on addends of its operand before they are summed.

    f(a + b) = f(a) + f(b) holds for negation, for sums of arrays and for products with a literal
    number.

    Args:
        primitive: Its name.
        shapes: The shapes of its operands; None for a literal number, () for an array without dims.
    """
    if primitive in COPIES or primitive in ("neg", "real"):
        return True
    if primitive in ("add", "add_any", "sub"):
        # Added to every addend of x, a number would count several times in their sum.
        return None not in shapes and () not in shapes
    if primitive == "mul":
        return None in shapes
    return primitive == "div" and shapes[-1] is None


def _work(primitive: str, n_operands: int) -> Mapping[str, Any]:
    """Return what an elementwise operation costs, as keyword arguments of its description.

    `keeps` says which arrays must be saved for the gradient: operands have the numbers 0, 1, ...,
    the result the number `n_operands`. exp saves its result, a sum nothing; a copy costs nothing.
    Without `keeps` the rule of the operation's class holds: mostly that all operands are saved.
    """
    if primitive in GRADIENT_BY_RESULT:
        return {"keeps": (n_operands,)}
    if primitive in ("add", "sub", "select_n"):
        return {"keeps": ()}
    return FREE if primitive in COPIES else {}


# ---- rows of the table


def _product(params: Params, shapes: Sequence[Shape], out: Shape) -> LetteredOp:
    """Describe `dot_general` in letters: of [b, i, k] and [b, k, j], "abc, acf -> abf".

    Its result has the batch dims, then the other dims that are not summed, of the left operand
    and then of the right one.
    """
    (left_summed, right_summed), (left_batch, right_batch) = params["dimension_numbers"]
    n_left = len(shapes[0])
    n_right = len(shapes[1])
    # A letter for each dim; those of pairs, which are summed or are the batch, are one.
    left = list(ascii_letters[:n_left])
    right = list(ascii_letters[n_left : n_left + n_right])
    left_paired = (*left_summed, *left_batch)
    right_paired = (*right_summed, *right_batch)
    for i, j in zip(left_paired, right_paired, strict=True):
        right[j] = left[i]
    result = [left[i] for i in left_batch]
    result += [letter for i, letter in enumerate(left) if i not in left_paired]
    result += [letter for letter in right if letter not in left]
    return LetteredOp([left, right, result], "contraction")


def _convolution(params: Params, shapes: Sequence[Shape], out: Shape) -> LetteredOp | None:
    """Describe `conv_general_dilated` in letters: "b c l0, o c k0 -> b o m0"."""
    if params["batch_group_count"] != 1:
        return None
    return convolution(shapes, out, params["feature_group_count"], params["dimension_numbers"])


def _broadcast(params: Params, shapes: Sequence[Shape], out: Shape) -> LetteredOp:
    """Describe `broadcast_in_dim` in letters: of [4] to [2, 4], "r1 -> r0 r1"."""
    return describe_by_places(shapes, out, [params["broadcast_dimensions"]], **FREE)


def _transposition(params: Params, shapes: Sequence[Shape], out: Shape) -> LetteredOp:
    """Describe `transpose` in letters: with the permutation (1, 2, 0), "r2 r0 r1 -> r0 r1 r2"."""
    permutation = params["permutation"]  # dim i of the result is dim permutation[i] of the operand
    places = [permutation.index(d) for d in range(len(out))]
    return describe_by_places(shapes, out, [places], **FREE)


def _update(params: Params, shapes: Sequence[Shape], out: Shape) -> LetteredOp:
    """Describe `dynamic_update_slice`: dims that it updates a part of cannot be sharded."""
    array_and_update = shapes[:2]  # other operands are numbers: where the update begins
    partly_updated = [f"r{d}" for d, length in enumerate(shapes[1]) if length != out[d]]
    return describe_aligned(array_and_update, out, whole=partly_updated)


def _scan_slice(params: Params, shapes: Sequence[Shape], out: Shape) -> LetteredOp:
    """Describe what a round of a scan takes of an array [rounds, ...]: "u0_0 r0 -> r0"."""
    return describe_along(shapes, out, 0, "linear", **FREE)


def _scan_stack(params: Params, shapes: Sequence[Shape], out: Shape) -> LetteredOp:
    """Describe the results of all rounds of a scan as one array [rounds, ...]: "r1 -> r0 r1"."""
    return describe_by_places(shapes, out, [range(1, len(out))], whole=["r0"], **FREE)


def _gathered(params: Params, shapes: Sequence[Shape], out: Shape) -> LetteredOp:
    """Describe `gather` in letters: it takes windows of a table at the places that indices say.

    An embedding takes rows of a table [v, d] by indices [b, 1]: a result [b, d], "cb, ad -> ab".
    The letter c, for v, is not in the result: v may be sharded, since single rows of it are taken.
    A window that is longer than one row and shorter than the dim needs the dim whole on each
    device.
    """
    numbers = params["dimension_numbers"]
    window_sizes = params["slice_sizes"]  # along each dim of the table
    result = ascii_letters[: len(out)]
    new_letters = iter(ascii_letters[len(out) :])
    # Every dim of the result is either along a window, or one of the indices.
    window_letters = iter([result[i] for i in numbers.offset_dims])
    index_letters = [letter for i, letter in enumerate(result) if i not in numbers.offset_dims]
    index_batch_dims = numbers.start_indices_batching_dims
    index_dim_of_batch_dim = dict(zip(numbers.operand_batching_dims, index_batch_dims, strict=True))
    table = []
    whole = []  # letters of dims that no mesh axis may shard
    for d, length in enumerate(shapes[0]):
        if d in index_dim_of_batch_dim:  # the indices and the result have it, too
            table.append(index_letters[index_dim_of_batch_dim[d]])
            continue
        if d in numbers.collapsed_slice_dims:  # one row at a time: the result lacks the dim
            table.append(next(new_letters))
            continue
        letter = next(window_letters)  # the result has the dim
        if window_sizes[d] != length:  # a part of it, which is another dim than the table's
            whole.append(letter)
            letter = next(new_letters)
            whole.append(letter)
        table.append(letter)
    coordinates = next(new_letters)  # the last dim of the indices: where a window begins
    arrays = [table, [*index_letters, coordinates], result]
    return LetteredOp(arrays, "lookup", whole=[*whole, coordinates])


def _along(
    key: str,
    kind: str = "pointwise",
    operands: int | None = None,
    unchanged: Any = None,
    **options: Any,
) -> Describer:
    """Make the function that describes a primitive which works along some dims, as `sort`.

    These dims cannot be sharded, or, if they are summed, leave partial sums. Other dims can.

        reduce_sum with axes=(1,), of [b, s]: _along("axes") takes the dims (1,)
        pad with padding_config=((0, 0, 0), (1, 1, 0)): _along(..., unchanged=(0, 0, 0)) takes (1,)

    Args:
        key: The name of the parameter that lists the dims, or that says for each dim what happens
            along it; "" if only the shapes tell.
        kind: The class of the operation.
        operands: The number of operands to describe, the first ones; None for all. Those after them
            are numbers, as a padding value.
        unchanged: If the parameter has an entry per dim, the entry of a dim that stays as it is.
        **options: As of `xshard.step.record.letters.describe_along`.
    """

    def describe(params: Params, shapes: Sequence[Shape], out: Shape) -> LetteredOp:
        dims = params.get(key, ())
        if unchanged is not None:  # an entry per dim
            dims = [d for d, change in enumerate(dims) if change != unchanged]
        return describe_along(shapes[:operands], out, dims, kind, **options)

    return describe


def _rows(names: str, describe: Describer) -> dict[str, Describer]:
    """Make rows of the table for several primitives: "max min"."""
    return dict.fromkeys(names.split(), describe)


TABLE: Mapping[str, Describer] = {
    **_rows("expand_dims reshape squeeze", lambda _, shapes, out: view(shapes[0], out)),
    "dot_general": _product,
    "conv_general_dilated": _convolution,
    "gather": _gathered,
    "broadcast_in_dim": _broadcast,
    "transpose": _transposition,
    "reduce_sum": _along("axes", "linear", sums=True),
    # A maximum of maxima costs what a sum of sums does, and no other operation takes partial ones.
    **_rows("reduce_max reduce_min", _along("axes", "contraction", sums=True, flops=0.0)),
    **_rows("argmax argmin reduce_and reduce_or reduce_prod reduce_xor", _along("axes")),
    **_rows("cumlogsumexp cummax cummin cumprod cumsum top_k", _along("axis")),
    **_rows(
        "reduce_window_max reduce_window_min reduce_window_sum",
        _along("window_dimensions", unchanged=1),
    ),
    **_rows("slice dynamic_slice", _along("", "linear", 1)),
    "dynamic_update_slice": _update,
    "sort": _along("dimension"),
    "rev": _along("dimensions", "linear"),
    "concatenate": _along("dimension", "linear"),
    "split": _along("axis", "linear"),
    "pad": _along("padding_config", "linear", 1, unchanged=(0, 0, 0)),
    SLICE: _scan_slice,
    STACK: _scan_stack,
}
