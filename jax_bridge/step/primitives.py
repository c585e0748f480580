"""The primitives of JAX as operations of a step: the dims of operands and result, and the class.

A text is in letters; `Trace` gives them names. A primitive that is not here is opaque.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from string import ascii_letters
from typing import Any

from xshard.step.record.letters import (
    FREE,
    Shape,
    Written,
    aligned,
    along,
    convolution,
    placed,
    view,
    words,
)

Row = Callable[
    [Mapping[str, Any], Sequence[Shape], Shape], Written | None
]  # None: no rule is known

INLINED = words("jit pjit closed_call core_call checkpoint remat2 custom_jvp_call custom_vjp_call")
ELEMENTWISE = words("""
    abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil
    clamp conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1
    floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul name ne neg nextafter
    not optimization_barrier or population_count pow real reduce_precision rem round rsqrt select_n
    sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh xor""")
SOURCES = words("""
    create_token empty iota random_bits random_fold_in random_seed random_split random_unwrap
    random_wrap rng_bit_generator threefry2x32""")
RESULTS = words("cbrt exp exp2 expm1 logistic rsqrt sqrt tanh")  # their gradients need them
COPIES = words("convert_element_type copy copy_p name optimization_barrier sharding_constraint")
SLICE = "slice of a scan"
STACK = "stack of a scan"


def written(
    primitive: str, params: Mapping[str, Any], shapes: Sequence[Shape | None], out: Shape
) -> Written:
    """A primitive with one result as an operation. shapes: the operands', None for a literal."""
    shown = [shape for shape in shapes if shape is not None]
    if primitive in SOURCES or not shown:
        return placed([], out, [], "source")
    if primitive in TABLE and (row := TABLE[primitive](params, shown, out)):
        return row
    if primitive not in ELEMENTWISE:
        return placed(shown, out, [[None] * len(shape) for shape in shown], "opaque")
    # Partial sums may pass sums of arrays, and products with numbers.
    sums = primitive in ("add", "add_any", "sub") and all(shapes)
    scaled = (primitive == "mul" and None in shapes) or (primitive == "div" and shapes[-1] is None)
    is_linear = primitive in COPIES | {"neg", "real"} or sums or scaled
    kind = "linear" if is_linear else "pointwise"
    work: Mapping[str, Any] = FREE if primitive in COPIES else {}
    if primitive in RESULTS or primitive in ("add", "sub", "select_n"):
        work = {"keeps": (len(shown),) if primitive in RESULTS else ()}
    return aligned(shown, out, kind, **work)


def _product(params: Mapping[str, Any], shapes: Sequence[Shape], out: Shape) -> Written:
    (left, right), (rows, columns) = params["dimension_numbers"]
    a = ascii_letters[: len(shapes[0])]
    b = list(ascii_letters[len(a) : len(a) + len(shapes[1])])
    for i, j in zip((*left, *rows), (*right, *columns), strict=True):
        b[j] = a[i]
    free = [x for i, x in enumerate(a) if i not in (*left, *rows)] + [x for x in b if x not in a]
    return Written([a, b, [*(a[i] for i in rows), *free]], "contraction")


def _gathered(params: Mapping[str, Any], shapes: Sequence[Shape], out: Shape) -> Written:
    """Rows by number; a dim of rows may be sharded if one row is taken at a time."""
    numbers = params["dimension_numbers"]
    sizes = params["slice_sizes"]
    result = ascii_letters[: len(out)]
    fresh = iter(ascii_letters[len(out) :])
    rows = [x for i, x in enumerate(result) if i not in numbers.offset_dims]
    windows = iter(x for i, x in enumerate(result) if i in numbers.offset_dims)
    whole = list[str]()
    table = ""
    batched = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    for d, n in enumerate(shapes[0]):
        if d in batched:
            table += rows[batched[d]]
        elif d in numbers.collapsed_slice_dims:
            table += next(fresh)
        else:
            window = next(windows)
            table += window if sizes[d] == n else next(fresh)
            whole += [] if sizes[d] == n else [window, table[-1]]
    index = next(fresh)
    return Written([table, [*rows, index], result], "lookup", [*whole, index])


def _along(key: str, kind: str = "pointwise", operands: int | None = None, **how: Any) -> Row:
    """Whole along the dims that a parameter names: as a number, as numbers, or by what happens along each."""

    def row(params: Mapping[str, Any], shapes: Sequence[Shape], out: Shape) -> Written:
        axes = params.get(key, ())
        if key in ("padding_config", "window_dimensions"):
            axes = [d for d, way in enumerate(axes) if way not in (1, (0, 0, 0))]
        return along(shapes[:operands], out, axes, kind, **how)

    return row


def _rows(names: str, row: Row) -> dict[str, Row]:
    return dict.fromkeys(names.split(), row)


TABLE: Mapping[str, Row] = {
    **_rows("expand_dims reshape squeeze", lambda _, s, out: view(s[0], out)),
    "dot_general": _product,
    "conv_general_dilated": lambda p, s, out: (
        convolution(s, out, p["feature_group_count"], p["dimension_numbers"])
        if p["batch_group_count"] == 1
        else None
    ),
    "gather": _gathered,
    "broadcast_in_dim": lambda p, s, out: placed(s, out, [p["broadcast_dimensions"]], **FREE),
    "transpose": lambda p, s, out: placed(
        s, out, [[*map(p["permutation"].index, range(len(out)))]], **FREE
    ),
    "reduce_sum": _along("axes", "linear", sums=True),
    # A maximum of maxima costs what a sum of sums does, and no other operation takes partial ones.
    **_rows("reduce_max reduce_min", _along("axes", "contraction", sums=True, flops=0.0)),
    **_rows("argmax argmin reduce_and reduce_or reduce_prod reduce_xor", _along("axes")),
    **_rows("cumlogsumexp cummax cummin cumprod cumsum top_k", _along("axis")),
    **_rows("reduce_window_max reduce_window_min reduce_window_sum", _along("window_dimensions")),
    **_rows("slice dynamic_slice", _along("", "linear", 1)),
    "dynamic_update_slice": lambda p, s, out: aligned(
        s[:2], out, whole=[f"r{d}" for d, n in enumerate(s[1]) if n != out[d]]
    ),
    "sort": _along("dimension"),
    "rev": _along("dimensions", "linear"),
    "concatenate": _along("dimension", "linear"),
    "split": _along("axis", "linear"),
    "pad": _along("padding_config", "linear", 1),
    SLICE: lambda _, s, out: along(s, out, 0, "linear", **FREE),
    STACK: lambda _, s, out: placed(s, out, [range(1, len(out))], whole=["r0"], **FREE),
}
