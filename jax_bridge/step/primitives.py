"""The primitives of JAX as operations of a step: the dims of operands and result, and the class.

A text is in letters; `Trace` gives them names. A primitive that is not here is opaque.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from string import ascii_letters
from typing import Any, NamedTuple

from xshard.notation.parser import ARROW

Shape = Sequence[int]


class Written(NamedTuple):
    """An operation on the first operands, as many as the text has. whole: letters. work: as in `Op`."""

    text: str
    kind: str = "pointwise"
    whole: Sequence[str] = ()
    work: Mapping[str, Any] = {}


_INLINED = "jit pjit closed_call core_call checkpoint remat2 custom_jvp_call custom_vjp_call"
_ELEMENTWISE = """abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil
    clamp conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1
    floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul name ne neg nextafter
    not optimization_barrier or population_count pow real reduce_precision rem round rsqrt select_n
    sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh xor"""
_SOURCES = """create_token empty iota random_bits random_fold_in random_seed random_split random_unwrap
    random_wrap rng_bit_generator threefry2x32"""
INLINED, ELEMENTWISE, SOURCES = (frozenset(names.split()) for names in (_INLINED, _ELEMENTWISE, _SOURCES))
SLICE, STACK = "slice of a scan", "stack of a scan"
FREE = {"accesses": 0.0}  # compilers make it part of what is before or after it
_COPIES = (
    "bitcast_convert_type convert_element_type copy copy_p name optimization_barrier sharding_constraint"
)
COPIES = frozenset(_COPIES.split())


def written(primitive: str, params: Mapping[str, Any], shapes: Sequence[Shape | None], out: Shape) -> Written:
    """A primitive with one result as an operation. shapes: the operands', None for a literal."""
    shown = [shape for shape in shapes if shape is not None]
    if primitive in SOURCES or not shown:
        return Written(_text([], ascii_letters[: len(out)]), "source")
    if primitive in ELEMENTWISE:
        kind, work = _class(primitive, shapes), FREE if primitive in COPIES else {}
        return Written(_along(shown, out).text, kind, work=work)  # lengths differ only where one is 1
    if primitive in TABLE:
        return TABLE[primitive](params, shown, out)
    parts = iter(ascii_letters * 2)
    *sides, result = ("".join(next(parts) for _ in shape) for shape in (*shown, out))
    return Written(_text(sides, result), "opaque")


def _class(primitive: str, shapes: Sequence[Shape | None]) -> str:
    """`linear` for what partial sums may pass: sums of arrays, and products with numbers."""
    sums = primitive in ("add", "add_any", "sub") and all(shapes)
    scaled = (primitive == "mul" and None in shapes) or (primitive == "div" and shapes[-1] is None)
    return "linear" if primitive in COPIES | {"neg", "real"} or sums or scaled else "pointwise"


def _text(operands: Sequence[str], result: str) -> str:
    return f"{', '.join(' '.join(side) or '()' for side in operands)} {ARROW} {' '.join(result)}".strip()


def _along(shapes: Sequence[Shape], out: Shape, axes: Sequence[int] = (), kind: str = "linear") -> Written:
    """Operands with the dims of the result, whole along axes and where lengths differ."""
    fresh, result = iter(ascii_letters[len(out) :]), ascii_letters[: len(out)]
    sides = [
        "".join(x if n == m else next(fresh) for x, n, m in zip(result, s, out, strict=False)) for s in shapes
    ]
    differ = [pair for side in sides for pair in zip(side, result, strict=False) if pair[0] != pair[1]]
    return Written(_text(sides, result), kind, sorted({result[a] for a in axes}.union(*differ)))


def _reduced(params: Mapping[str, Any], shapes: Sequence[Shape], whole: bool, **how: Any) -> Written:
    """Dims that the result lacks."""
    letters = ascii_letters[: len(shapes[0])]
    rest = "".join(x for i, x in enumerate(letters) if i not in params["axes"])
    return Written(_text([letters], rest), whole=[x for x in letters if whole and x not in rest], **how)


def _broadcast(params: Mapping[str, Any], shapes: Sequence[Shape], out: Shape) -> Written:
    fresh, result = iter(ascii_letters[len(out) :]), ascii_letters[: len(out)]
    pairs = zip(shapes[0], params["broadcast_dimensions"], strict=True)
    operand = "".join(result[d] if n == out[d] else next(fresh) for n, d in pairs)
    return Written(_text([operand], result), "linear", work=FREE)


def _transposed(params: Mapping[str, Any], shapes: Sequence[Shape], out: Shape) -> Written:
    letters = ascii_letters[: len(out)]
    return Written(_text([letters], "".join(letters[d] for d in params["permutation"])), "linear", work=FREE)


def _product(params: Mapping[str, Any], shapes: Sequence[Shape], out: Shape) -> Written:
    (left, right), (rows, columns) = params["dimension_numbers"]
    a = ascii_letters[: len(shapes[0])]
    b = list(ascii_letters[len(a) : len(a) + len(shapes[1])])
    for i, j in zip((*left, *rows), (*right, *columns), strict=True):
        b[j] = a[i]
    free = [x for i, x in enumerate(a) if i not in (*left, *rows)] + [x for x in b if x not in a]
    return Written(_text([a, "".join(b)], "".join([*(a[i] for i in rows), *free])), "contraction")


def _convolution(params: Mapping[str, Any], shapes: Sequence[Shape], out: Shape) -> Written:
    """Windows are whole; channels in groups too, but for one channel in each."""
    numbers, n = params["dimension_numbers"], len(out) - 2
    letters = iter(ascii_letters)
    batch, inner, outer, taken = (next(letters) for _ in range(4))
    image, window, result = ([next(letters) for _ in range(n)] for _ in range(3))
    whole, groups = [*image, *window, *result], params["feature_group_count"] * params["batch_group_count"]
    if groups == 1:
        taken = inner
    elif groups == shapes[0][numbers.lhs_spec[1]] == out[numbers.out_spec[1]]:
        outer = inner
    else:
        whole += [batch, inner, outer, taken]
    sides = (
        (numbers.lhs_spec, [batch, inner, *image]),
        (numbers.rhs_spec, [outer, taken, *window]),
        (numbers.out_spec, [batch, outer, *result]),
    )
    a, b, c = ("".join(dims[spec.index(d)] for d in range(n + 2)) for spec, dims in sides)
    flops = 2.0 / math.prod(shapes[0][d] for d in numbers.lhs_spec[2:])
    return Written(_text([a, b], c), "contraction", whole, {"flops": flops})


def _gathered(params: Mapping[str, Any], shapes: Sequence[Shape], out: Shape) -> Written:
    """Rows by number; a dim of rows may be sharded if one row is taken at a time."""
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    result, fresh = ascii_letters[: len(out)], iter(ascii_letters[len(out) :])
    rows = [x for i, x in enumerate(result) if i not in numbers.offset_dims]
    windows, whole, table = iter(x for i, x in enumerate(result) if i in numbers.offset_dims), list[str](), ""
    batched = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
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
    return Written(_text([table, "".join([*rows, index])], result), "lookup", [*whole, index])


def _of_scan(params: Mapping[str, Any], shapes: Sequence[Shape], out: Shape) -> Written:
    """One of stacked arrays, or all of them from one."""
    letters = ascii_letters[: max(len(shapes[0]), len(out))]
    before, after = (letters[len(letters) - len(shape) :] for shape in (shapes[0], out))
    once = 2.0 * math.prod(out) / (math.prod(out) + math.prod(shapes[0]))
    return Written(_text([before], after), "linear", letters[:1], {"accesses": once})


def _windows(params: Mapping[str, Any], shapes: Sequence[Shape], out: Shape) -> Written:
    return _along(shapes, out, [i for i, n in enumerate(params["window_dimensions"]) if n > 1], "pointwise")


def _cumulative(params: Mapping[str, Any], shapes: Sequence[Shape], out: Shape) -> Written:
    return _along(shapes, out, [params["axis"]], "pointwise")


Row = Callable[[Mapping[str, Any], Sequence[Shape], Shape], Written]
TABLE: Mapping[str, Row] = {
    "dot_general": _product,
    "conv_general_dilated": _convolution,
    "broadcast_in_dim": _broadcast,
    "transpose": _transposed,
    "gather": _gathered,
    "reduce_sum": lambda params, shapes, _: _reduced(params, shapes, False, kind="linear"),
    # a maximum of maxima costs what a sum of sums does, and no other operation takes them
    **dict.fromkeys(
        ("reduce_max", "reduce_min"),
        lambda params, shapes, _: _reduced(params, shapes, False, kind="contraction", work={"flops": 0.0}),
    ),
    **dict.fromkeys(
        ("argmax", "argmin", "reduce_and", "reduce_or", "reduce_prod", "reduce_xor"),
        lambda params, shapes, _: _reduced(params, shapes, True),
    ),
    **dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"), _cumulative),
    **dict.fromkeys(("reduce_window_max", "reduce_window_min", "reduce_window_sum"), _windows),
    "sort": lambda params, shapes, out: _along(shapes, out, [params["dimension"]], "pointwise"),
    "top_k": lambda params, shapes, out: _along(shapes, out, [len(out) - 1], "pointwise"),
    "rev": lambda params, shapes, out: _along(shapes, out, params["dimensions"]),
    "concatenate": lambda params, shapes, out: _along(shapes, out, [params["dimension"]]),
    "split": lambda params, shapes, out: _along(shapes, out, [params["axis"]]),
    **dict.fromkeys((SLICE, STACK), _of_scan),
    "slice": lambda _, shapes, out: _along(shapes, out),
    "dynamic_slice": lambda _, shapes, out: _along(shapes[:1], out),
    "dynamic_update_slice": lambda _, shapes, out: _along(shapes[:2], out),
    "pad": lambda params, shapes, out: _along(
        shapes[:1], out, [i for i, edges in enumerate(params["padding_config"]) if any(edges)]
    ),
}
