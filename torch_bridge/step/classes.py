"""Describe operations of torch: the class of each, and its dims in letters.

`mm` is a contraction "a b, b c -> a c". A description depends on the name of an operation, its
arguments and shapes alone. A dim that occurs in several arrays has one *letter*; `r0 r1 ...` are the
dims of the result. A *trait*, such as "partial sums may pass", is known of an operation by its name.

To add an operation, write one function under `@describes`, or add its name to one of the sets of
traits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Size, Tensor

from torch_bridge.versions.pytree import tree_leaves
from xshard.step.record.letters import (
    FREE,
    LetteredOp,
    convolution,
    describe_aligned,
    describe_along,
    describe_by_places,
    dim_letters,
    split_words,
    view,
)

# Traits of operations that have no function of their own below.

# The result is a part of the operand or its copies: nothing is computed.
PARTS = split_words(
    "slice select split split_with_sizes unbind expand view_as_real view_as_complex"
)
# Partial sums may pass: f(a + b) = f(a) + f(b).
LINEAR = PARTS | split_words("add sub neg sum mean cat constant_pad_nd flip roll")
RANDOM = split_words("native_dropout bernoulli uniform normal")
# Not tagged as pointwise by torch, but the last dims of operands are those of the result, too.
ALIGNED = split_words(
    "native_layer_norm expand repeat constant_pad_nd copy tril triu fill zero floor_divide"
)
ALIGNED |= RANDOM | {"_prelu_kernel"}
# Their gradients need the result, and not the operands.
GRADIENT_BY_RESULT = split_words("_softmax _log_softmax exp reciprocal rsqrt sigmoid sqrt tanh")
# Every element has the same value: an axis may shard any dim. An `arange` differs along its dim.
UNIFORM = split_words("full zeros ones empty scalar_tensor")
# They mix as many last dims as the name says, in each channel alone: `avg_pool2d`.
WINDOWS = re.compile(r"(?:pool|upsample_[a-z]+|pad)(\d)d")


class DescribedCall(NamedTuple):
    """An operation of torch with its tensors, in letters.

    Attributes:
        operands: The tensors that it takes.
        op: The operation in letters.
        added: A tensor that it also adds to its result, a bias: that is recorded as another
            operation.
    """

    operands: Sequence[Tensor]
    op: LetteredOp
    added: Tensor | None = None


class TorchCall(NamedTuple):
    """An operation of torch as it ran, with one of its results.

    Args:
        name: Its name, such as "mm".
        args: All arguments by name.
        tensors: The arguments that are tensors with elements: its operands.
        out: The result.
        is_pointwise: Torch says that it works on each element alone.
    """

    name: str
    args: Mapping[str, Any]
    tensors: list[Tensor]
    out: Tensor
    is_pointwise: bool

    @property
    def first(self) -> Tensor:
        """The first operand, which for most operations is the array that they change."""
        return self.tensors[0] if self.tensors else self.out

    @property
    def shapes(self) -> list[Size]:
        """The shapes of the operands."""
        return [x.shape for x in self.tensors]

    @property
    def result_dims(self) -> list[str]:
        """The letters of the dims of the result."""
        return dim_letters(self.out.ndim)

    @property
    def has_number(self) -> bool:
        """Whether this is arithmetic between an array and a number, as in `x + 1`."""
        return self.name in ("add", "sub", "mul", "div") and len(self.tensors) == 1


Describer = Callable[[TorchCall], "DescribedCall | None"]
DESCRIPTIONS: dict[str, Describer] = {}


def describe_call(
    name: str, args: Mapping[str, Any], out: Tensor, is_pointwise: bool = False
) -> DescribedCall:
    """Describe how one recorded operation of torch may be sharded, for the search of layouts.

    The description is as in einsum: "mm" is "a b, b c -> a c", and mesh axes can shard each of a, b
    and c. An operation that is not known is "opaque": each device computes all of it.

    Args:
        name: The name of the operator, such as "mm".
        args: Its arguments by name.
        out: One of its results.
        is_pointwise: Whether torch says that it works on each element alone.
    """
    tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor) and x.numel()]
    call = TorchCall(name=name, args=args, tensors=tensors, out=out, is_pointwise=is_pointwise)
    # A function for this operator comes first; it may return None, to leave a call to the rules below.
    if name in DESCRIPTIONS:
        described = DESCRIPTIONS[name](call)
        if described is not None:
            return described
    # `x.new_zeros(x.shape)` is sharded like x; with any other shape it has nothing to do with x.
    is_new = name.startswith("new_")
    if name.endswith("_like") or (is_new and call.first.shape == out.shape):
        return _filled_like(call)
    if is_new or not tensors:
        return _made_in_place(call)
    return _by_traits(call)


def describes(names: str) -> Callable[[Describer], Describer]:
    """Register a function that describes some operations, "mm bmm"; None leaves a call to the traits."""

    def register(describe: Describer) -> Describer:
        DESCRIPTIONS.update(dict.fromkeys(names.split(), describe))
        return describe

    return register


MATRIX_PRODUCTS = {
    "mm": ("ab", "bc", "ac"),
    "addmm": ("ab", "bc", "ac"),
    "bmm": ("eab", "ebc", "eac"),
    "baddbmm": ("eab", "ebc", "eac"),
    "mv": ("ab", "b", "a"),
    "dot": ("a", "a", ""),
}


@describes(" ".join(MATRIX_PRODUCTS))
def _matrix_product(call: TorchCall) -> DescribedCall:
    """Describe a product of two arrays, to which `addmm` and `baddbmm` add a third one."""
    op = LetteredOp(MATRIX_PRODUCTS[call.name], "contraction")  # each character is a dim
    if "add" in call.name:  # addmm(bias, a, b)
        # The bias is broadcast, so that adding it is an operation with rules of its own.
        return DescribedCall(call.tensors[1:], op, added=call.first)
    return DescribedCall(call.tensors, op)


@describes("_grouped_mm")
def _grouped_product(call: TorchCall) -> DescribedCall | None:
    """Describe rows, sorted by expert, that are multiplied with the matrix of their expert.

    "t k, e k n, e -> t n". Where the rows of an expert end is known when they are there: neither rows
    nor experts can be sharded, but each matrix can.
    """
    rows = call.args["self"]
    matrices = call.args["mat2"]
    if (rows.ndim, matrices.ndim) != (2, 3):
        return None  # a product that a gradient needs
    # A row meets one of the matrices: the planner counts all letters.
    work = {"flops": 2.0 / len(matrices)}
    op = LetteredOp(["tk", "ekn", "e", "tn"], "contraction", whole="te", work=work)
    return DescribedCall([rows, matrices, call.args["offs"]], op)


@describes("histc")
def _histogram(call: TorchCall) -> DescribedCall:
    """Describe how many elements fall into each bin: it needs all elements."""
    dims = dim_letters(call.first.ndim)
    op = LetteredOp([dims, ["bins"]], "linear", whole=[*dims, "bins"])
    return DescribedCall(call.tensors, op)


def empty_grouped_product(rows: Tensor, matrices: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return an empty tensor in the place of a grouped product, which torch has on meta in bfloat16 only."""
    return rows.new_empty(*rows.shape[:-1], matrices.shape[-1])


@describes(
    "view _unsafe_view _reshape_alias unsqueeze squeeze alias detach clone _to_copy lift_fresh"
)
def _reshaping(call: TorchCall) -> DescribedCall:
    """Describe an operation that keeps the order of elements: [6, 4] -> [2, 3, 4]."""
    return DescribedCall([call.first], view(call.first.shape, call.out.shape))


@describes("permute")
def _permutation(call: TorchCall) -> DescribedCall:
    """Describe dims in another order: with dims (1, 2, 0), "r0 r1 r2 -> r1 r2 r0"."""
    return _reordering(call, call.args["dims"])


@describes("t transpose")
def _transposition(call: TorchCall) -> DescribedCall:
    """Describe two dims that change places; of `t` the only two."""
    ndim = call.first.ndim
    order = list(range(ndim))
    i = call.args.get("dim0", 0)  # `t` has no arguments
    j = call.args.get("dim1", -1)
    order[i] = j % ndim
    order[j] = i % ndim
    return _reordering(call, order)


def _reordering(call: TorchCall, order: Sequence[int]) -> DescribedCall:
    """Describe a result whose dim i is dim `order[i]` of the operand."""
    operand_dims = call.result_dims  # letters in the order of the operand, which has as many dims
    result_dims = [operand_dims[d] for d in order]
    op = LetteredOp([operand_dims, result_dims], "linear", work=FREE)
    return DescribedCall([call.first], op)


@describes("embedding")
def _embedding(call: TorchCall) -> DescribedCall:
    """Describe a table of rows, looked up by number: "rows, vocabulary width -> rows width"."""
    *row_dims, width = call.result_dims
    # The vocabulary is a dim of the table alone.
    arrays = [row_dims, ["v", width], call.result_dims]
    operands = [call.args["indices"], call.args["weight"]]
    return DescribedCall(operands, LetteredOp(arrays, "lookup"))


@describes("index")
def _indexing(call: TorchCall) -> DescribedCall:
    """Describe how indexing with tensors of integers, as in x[i, :, j], may be sharded.

    As in numpy, the dims of the index tensors, broadcast together, replace the indexed dims: in
    their place if they are neighbours, else in front. With x [8, 9, 5], i [3] and j [3]:

    - x[:, i] -> [8, 3, 5] is "r0 u1 r2, r1 -> r0 r1 r2".
    - x[i, :, j] -> [3, 9] is "u0 r1 u2, r0, r0 -> r0 r1".

    Letters r are dims of the result, u are dims of x that are indexed. No mesh axis may shard a u,
    as any of its rows may be asked for.
    """
    # None stands for a dim of x that is not indexed, ":".
    indices = enumerate(call.args["indices"])
    index_by_dim = {d: index for d, index in indices if index is not None}
    start = min(index_by_dim)
    are_neighbours = max(index_by_dim) - start < len(index_by_dim)
    if not are_neighbours:
        start = 0
    stop = start + max(index.ndim for index in index_by_dim.values())

    # In the result, dims `start` to `stop` come from the index tensors, and the others from x.
    result_dims = call.result_dims
    index_dims = result_dims[start:stop]
    index_shape = call.out.shape[start:stop]
    array_dims = [*result_dims[:start], *result_dims[stop:]]
    arrays = [array_dims]
    replaced_dims = []
    # Inserted in ascending order, each u comes to stand at its own number d among the dims of x.
    for d, index in index_by_dim.items():
        array_dims.insert(d, f"u{d}")
        replaced_dims.append(f"u{d}")
        arrays.append(_broadcast_dims(index.shape, index_dims, index_shape, f"v{d}_"))
    arrays.append(result_dims)
    operands = [call.args["self"], *index_by_dim.values()]
    return DescribedCall(operands, LetteredOp(arrays, "linear", whole=replaced_dims))


@describes("convolution")
def _convolution(call: TorchCall) -> DescribedCall | None:
    """Describe a convolution "b c l, o c k -> b o m" over any number of spatial dims."""
    is_transposed = call.args["transposed"]
    if is_transposed and call.args["groups"] > 1:
        return None  # its kernel has the groups in another dim
    order = list(range(call.out.ndim))
    kernel_order = order
    if is_transposed:
        kernel_order = [1, 0, *order[2:]]  # [in, out, ...] in place of [out, in, ...]
    orders = [order, kernel_order, order]
    op = convolution(call.shapes, call.out.shape, call.args["groups"], orders)
    return DescribedCall(call.tensors[:2], op, added=call.args.get("bias"))


@describes("nll_loss_forward")
def _nll_loss(call: TorchCall) -> DescribedCall:
    """Describe a loss of scores [rows, classes, ...] and targets [rows, ...]; one example has no rows."""
    rows = dim_letters(call.args["target"].ndim)
    scores = [*rows[:1], "v", *rows[1:]]  # v: the classes
    op = LetteredOp([scores, rows, []], "loss")
    return DescribedCall(call.tensors[:2], op)


@describes("native_group_norm")
def _group_norm(call: TorchCall) -> DescribedCall | None:
    """Describe a norm over groups of channels, "r0 r1 r2, r1, r1 -> r0 r1 r2"; only r0 can be sharded."""
    if call.out.shape != call.first.shape:
        return None  # the mean or the deviation of each group
    # Statistics are over all dims but the batch: only the batch can be sharded.
    places = [range(call.out.ndim), [1], [1]]  # scale and bias have the channels
    unsharded = call.result_dims[1:]
    op = describe_by_places(call.shapes, call.out.shape, places, "pointwise", whole=unsharded)
    return DescribedCall(call.tensors, op)


@describes("written")  # by `StepRecorder`: torch says `copy_` of a view
def _written_into(call: TorchCall) -> DescribedCall | None:
    """Describe an array after a write into a part of it, `y[:, i] = x` or `y[:, 2:5] = x`.

    Dims that the part lacks, or has less of, cannot be sharded. Strides tell which these are: if y
    is [4, 8] with strides (8, 1), then y[:, i] has the stride 8, which is of dim 0.
    """
    array, part = call.tensors
    strides = array.stride()
    places: Sequence[int] = range(array.ndim)
    if part.stride() != strides:
        # A dim of the part is the one of the array that has its stride.
        places = [strides.index(stride) for stride in part.stride() if stride in strides]
        if len(places) != part.ndim or places != sorted({*places}):
            return None  # the part may be transposed or have steps
    dims_without_part = {dim for d, dim in enumerate(call.result_dims) if d not in places}
    places_of_operands = [range(array.ndim), places]
    op = describe_by_places(
        call.shapes, call.out.shape, places_of_operands, "linear", whole=dims_without_part
    )
    return DescribedCall(call.tensors, op)


@describes("linalg_solve_triangular")
def _triangular_solution(call: TorchCall) -> DescribedCall | None:
    """Describe the solution x of a x = y, "e n m, e m k -> e n k": each column is by itself."""
    matrix, known = call.tensors
    if matrix.shape[:-2] != known.shape[:-2]:
        return None  # one is broadcast
    batch = call.result_dims[:-2]
    sides = (["n", "m"], ["m", "k"], ["n", "k"])
    if not call.args["left"]:  # x a = y
        sides = (["m", "n"], ["k", "m"], ["k", "n"])
    arrays = [[*batch, *dims] for dims in sides]
    # Half of a matrix is zeros. The gradient needs the solution, not y.
    work = {"flops": 1.0, "keeps": (0, 2)}
    return DescribedCall(call.tensors, LetteredOp(arrays, "contraction", whole="nm", work=work))


@describes("stack")
def _stack(call: TorchCall) -> DescribedCall:
    """Describe arrays stacked along a new dim, which cannot be sharded: each array is on all devices."""
    places = list(range(call.out.ndim))
    new_dim = places.pop(call.args["dim"])
    unsharded = [call.result_dims[new_dim]]
    places_of_operands = [places] * len(call.tensors)
    op = describe_by_places(call.shapes, call.out.shape, places_of_operands, whole=unsharded)
    return DescribedCall(call.tensors, op)


def _filled_like(call: TorchCall) -> DescribedCall:
    """Describe numbers with the shape of another array, which are sharded like it."""
    op = describe_aligned([call.first.shape], call.out.shape, "pointwise")
    return DescribedCall([call.first], op._replace(work={**FREE, "keeps": ()}))


def _made_in_place(call: TorchCall) -> DescribedCall:
    """Describe numbers that depend on no array: zeros, positions, masks."""
    op = LetteredOp([call.result_dims], "source", whole=call.result_dims)
    if call.name.removeprefix("new_") in UNIFORM:
        op = op._replace(whole=())
    return DescribedCall((), op)


def _by_traits(call: TorchCall) -> DescribedCall:
    """Describe how an operation that has no description of its own may be sharded.

    - With a `dim` argument, as `sum` and `softmax` have: along all other dims.
    - Elementwise, or known to keep each dim in its place: along all dims, except the last ones that
      it needs whole (`triu`: two).
    - Any other: by `_complex_view_or_opaque`.
    """
    # "linear" may be applied to each addend of a partial sum, "pointwise" may not.
    kind = "pointwise"
    # `x + 1` is not linear: where x is a sum of addends on several devices, each would add a 1.
    if call.name in LINEAR and not call.has_number:
        kind = "linear"
    shape = call.out.shape
    if "dim" in call.args or "dims" in call.args:
        is_sum = call.name == "sum"
        op = describe_along(call.shapes, shape, _worked_dims(call), kind, sums=is_sum)
    elif call.is_pointwise or call.name in ALIGNED or WINDOWS.search(call.name):
        first_unsharded = call.out.ndim - _n_unsharded_last_dims(call)
        op = describe_aligned(call.shapes, shape, kind, call.result_dims[first_unsharded:])
    else:
        op = _complex_view_or_opaque(call)
    return DescribedCall(call.tensors, op._replace(work=_work(call)))


def _work(call: TorchCall) -> Mapping[str, Any]:
    """Return fields of work that differ from those of the operation's class.

    `accesses`: how often arrays are read and written. `keeps`: the numbers of the operands that the
    gradient needs.
    """
    if call.has_number:
        return {"keeps": ()}  # the gradient of x * 2 needs no array
    if call.name in GRADIENT_BY_RESULT:
        return {"keeps": (len(call.tensors),)}  # the result comes after the operands
    if call.name in PARTS:
        return FREE  # the next operation reads the operand's memory
    return {}


def _worked_dims(call: TorchCall) -> int | Sequence[int]:
    """Return the dims of the first operand along which it works; all, if the call names none."""
    all_dims = range(call.first.ndim)
    named = call.args.get("dim", call.args.get("dims"))
    if call.name == "_weight_norm_interface":  # a norm over all dims but this one
        return [d for d in all_dims if d != named % call.first.ndim]
    if named is None or named == []:
        return all_dims
    dims: int | Sequence[int] = named
    return dims


def _n_unsharded_last_dims(call: TorchCall) -> int:
    """Return how many last dims of an operation cannot be sharded: windows, triangles, norms."""
    windows = WINDOWS.search(call.name)
    if windows is not None:
        return int(windows[1])
    if call.name in ("tril", "triu"):
        return 2
    return len(call.args.get("normalized_shape", ()))


def _complex_view_or_opaque(call: TorchCall) -> LetteredOp:
    """Describe `view_as_complex` and `view_as_real`; any other operation is "opaque", never sharded.

    The real array has one dim more, the last, for real and imaginary part: it cannot be sharded.
    [8, 4, 2] -> [8, 4] as complex is "r0 r1 u0_2 -> r0 r1"; back it is "r0 r1 -> r0 r1 r2".
    """
    kind = "linear" if call.name in PARTS else "opaque"
    out_ndim = call.out.ndim
    # For each dim of an operand its number in the result. None: the real array's last dim.
    places = []
    for x in call.tensors:
        places.append([d if d < out_ndim else None for d in range(x.ndim)])
    added_dims = call.result_dims[call.first.ndim :]
    # The dim of real and imaginary part is the result's last one, or the operand's: the text has at
    # most one of the two letters, and the other does no harm.
    unsharded = [*added_dims, f"u0_{out_ndim}"]
    return describe_by_places(call.shapes, call.out.shape, places, kind, unsharded)


def describe_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> tuple[DescribedCall, Tensor]:
    """Describe how scaled dot product attention may be sharded: along batch, heads, maybe queries.

    The arguments are those of torch's function. Queries, keys, values and result are
    "b0 b1 s d, b0 b1 t d, b0 b1 t d -> b0 b1 s d": s queries, t keys. In grouped-query attention
    each of g heads of keys serves r heads of queries, which are "(g r)": 8 heads of queries and 2
    of keys are g=2, r=4. Returns the description, and an empty tensor in the result's place.
    """
    key_dims = dim_letters(query.ndim - 2, "b")
    query_dims = key_dims
    lengths = {}
    if query.shape[:-2] != key.shape[:-2]:
        key_dims = [*key_dims[:-1], "g"]
        query_dims = [*query_dims[:-1], "(g r)"]
        n_key_heads = key.shape[-3]
        lengths = {"g": n_key_heads, "r": query.shape[-3] // n_key_heads}

    # One letter stands for one length: values may be wider than keys.
    depths = (query.shape[-1], value.shape[-1])
    value_depth = "d" if depths[0] == depths[1] else "e"
    operands = [query, key, value]
    score_dims = [*query_dims, "s", "t"]
    arrays = [[*query_dims, "s", "d"], [*key_dims, "t", "d"], [*key_dims, "t", value_depth]]
    if attn_mask is not None:
        operands.append(attn_mask)
        score_shape = (*query.shape[:-1], key.shape[-2])
        arrays.append(_broadcast_dims(attn_mask.shape, score_dims, score_shape, "u"))
    arrays.append([*query_dims, "s", value_depth])

    # Q K^T are 2 b s t d operations, and the product with V 2 b s t e. The planner multiplies `flops`
    # by the lengths of all letters, b s t d e: so `flops` are 2 (d + e) / (d e). If values are as
    # wide as keys, the letters are b s t d, and `flops` 2 (d + d) / d.
    flops = 2.0 * sum(depths) / math.prod(set(depths))
    # The softmax of a query needs all keys, and each of its scores the whole depth.
    unsharded = {"d", "t", value_depth}
    if is_causal:
        unsharded.add("s")  # blocks of queries see different numbers of keys
        flops /= 2  # only scores below the diagonal
    op = LetteredOp(arrays, "attention", whole=unsharded, work={"flops": flops}, lengths=lengths)
    result_shape = (*query.shape[:-1], value.shape[-1])
    return DescribedCall(operands, op), query.new_empty(result_shape)


def _broadcast_dims(
    shape: Size, dims: Sequence[str], lengths: Sequence[int], prefix: str
) -> list[str]:
    """Return the letters of an array that is broadcast to `dims`, which have the given lengths.

    [4, 1] broadcast to "r0 r1 r2" of lengths 2, 4, 8 is "r1 u2", for the prefix "u": last dims are
    aligned, and one of another length has a letter of its own.
    """
    first = len(dims) - len(shape)
    own_dims = []
    for d, length in enumerate(shape, first):
        own_dims.append(dims[d] if length == lengths[d] else f"{prefix}{d}")
    return own_dims


def describe_bias(out: Tensor, bias: Tensor, is_convolution: bool) -> DescribedCall:
    """Describe adding a bias to the last dims of a result, or to the channels of a convolution."""
    all_dims = list(range(out.ndim))
    bias_dims = all_dims[out.ndim - bias.ndim :]
    if is_convolution:
        bias_dims = [1]
    places = [all_dims, bias_dims]
    op = describe_by_places([out.shape, bias.shape], out.shape, places)
    return DescribedCall([out, bias], op._replace(work=FREE))
