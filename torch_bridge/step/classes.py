"""The class of each operation of torch, with the dims of its operands and its result in letters.

An operation is described by its name and by shapes alone: `mm` is "a b, b c -> a c", a contraction.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

from xshard.step.record.letters import (
    FREE,
    Written,
    aligned,
    along,
    convolution,
    letters,
    placed,
    view,
    words,
)

VIEWS = words(
    "view _unsafe_view _reshape_alias unsqueeze squeeze alias detach clone _to_copy lift_fresh"
)
PARTS = words("slice select split split_with_sizes unbind expand view_as_real view_as_complex")
LINEAR = PARTS | words("add sub neg sum mean cat constant_pad_nd flip roll")
RANDOM = words("native_dropout bernoulli uniform normal")
ALIGNED = words(
    "native_layer_norm expand repeat constant_pad_nd copy tril triu fill zero floor_divide"
)
ALIGNED |= RANDOM | {"_prelu_kernel"}
RESULTS = words(
    "_softmax _log_softmax exp reciprocal rsqrt sigmoid sqrt tanh"
)  # their gradients need them
UNIFORM = words("full zeros ones empty scalar_tensor")
WINDOWS = re.compile(
    r"(?:pool|upsample_[a-z]+|pad)(\d)d"
)  # over so many last dims, each channel alone
_MM = ("ab", "bc", "ac")
_BMM = ("eab", "ebc", "eac")
MATRICES = {"mm": _MM, "addmm": _MM, "bmm": _BMM, "baddbmm": _BMM}
MATRICES |= {"mv": ("ab", "b", "a"), "dot": ("a", "a", "")}


class Call(NamedTuple):
    """An operation on tensors, in letters. added: a tensor that is added to the result."""

    operands: Sequence[Tensor]
    op: Written
    added: Tensor | None = None


def call_of(name: str, args: Mapping[str, Any], out: Tensor, is_pointwise: bool) -> Call:
    """The call that gives one result of an operation; `opaque` if no class fits. args: by name."""
    tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor) and x.numel()]
    shapes = [x.shape for x in tensors]
    dims = letters(out.ndim)
    first = tensors[0] if tensors else out
    if name in MATRICES:
        bias = tensors.pop(0) if "add" in name else None
        return Call(tensors, Written(MATRICES[name], "contraction"), bias)
    if name in VIEWS:
        return Call([first], view(first.shape, out.shape))
    if name in ("t", "transpose", "permute"):
        order = [*args.get("dims", range(first.ndim))]
        if name != "permute":
            i = args.get("dim0", 0)
            j = args.get("dim1", -1)
            order[i], order[j] = order[j], order[i]
        return Call([first], Written([dims, [dims[d] for d in order]], "linear", work=FREE))
    if name == "embedding":
        return Call(
            [args["indices"], args["weight"]], Written([dims[:-1], ["v", dims[-1]], dims], "lookup")
        )
    if name == "index":
        return _indexed(args, out)
    if name == "convolution" and (args["groups"] == 1 or not args["transposed"]):
        order = [*range(out.ndim)]
        orders = [order, [1, 0, *order[2:]] if args["transposed"] else order, order]
        return Call(
            tensors[:2], convolution(shapes, out.shape, args["groups"], orders), args.get("bias")
        )
    if name == "nll_loss_forward":
        rows = letters(args["target"].ndim)
        return Call(
            tensors[:2], Written([[rows[0], "v", *rows[1:]][: first.ndim], rows, []], "loss")
        )
    if name == "native_group_norm" and out.shape == first.shape:  # groups of channels are whole
        return Call(
            tensors, placed(shapes, out.shape, [range(out.ndim), [1], [1]], "pointwise", dims[1:])
        )
    if name == "written" and first.stride() == tensors[1].stride():  # a slice of an array
        cut = {d for d, n, m in zip(dims, *shapes, strict=True) if n != m}
        return Call(tensors, aligned(shapes, out.shape, whole=cut))
    if name.endswith("_like") or (name.startswith("new_") and first.shape == out.shape):
        return Call([first], aligned([first.shape], out.shape, "pointwise", **FREE, keeps=()))
    if not tensors or name.startswith("new_"):
        return Call(
            (), Written([dims], "source", () if name.removeprefix("new_") in UNIFORM else dims)
        )
    if name == "stack":
        d = args["dim"] % out.ndim
        places = [*range(d), *range(d + 1, out.ndim)]
        return Call(tensors, placed(shapes, out.shape, [places] * len(tensors), whole=[dims[d]]))
    is_number = name in ("add", "sub", "mul", "div") and len(tensors) == 1
    kind = "linear" if name in LINEAR and not is_number else "pointwise"
    work = FREE if name in PARTS else {}
    work = {"keeps": ()} if is_number else {"keeps": (len(tensors),)} if name in RESULTS else work
    if "dim" in args or "dims" in args:
        every = [*range(first.ndim)]
        named = args.get("dim", args.get("dims"))
        if name == "_weight_norm_interface":  # a norm over all dims but this one
            named = [d for d in every if d != named % first.ndim]
        named = every if named is None or named == [] else named
        return Call(tensors, along(shapes, out.shape, named, kind, sums=name == "sum", **work))
    windows = WINDOWS.search(name)
    if is_pointwise or name in ALIGNED or windows:
        n_whole = 2 if name in ("tril", "triu") else len(args.get("normalized_shape", ()))
        n_whole = int(windows[1]) if windows else n_whole
        return Call(tensors, aligned(shapes, out.shape, kind, dims[out.ndim - n_whole :], **work))
    kind = kind if name in PARTS else "opaque"
    pairs = [*dims[first.ndim :], f"u0_{out.ndim}"]
    places = [[d if d < out.ndim else None for d in range(x.ndim)] for x in tensors]
    return Call(tensors, placed(shapes, out.shape, places, kind, pairs, **work))


def attention_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> tuple[Call, Tensor]:
    """Scaled dot product attention, and its result; few heads of keys and values serve several of queries."""
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    depths = (query.shape[-1], value.shape[-1])
    batch = letters(query.ndim - 2, "b")
    depth = "d" if depths[0] == depths[1] else "e"
    lengths = dict[str, int]()
    few = batch
    many = batch
    if query.shape[:-2] != key.shape[:-2]:
        few = [*batch[:-1], "g"]
        many = [*batch[:-1], "(g r)"]
        lengths = {"g": key.shape[-3], "r": query.shape[-3] // key.shape[-3]}
    operands = [query, key, value]
    arrays = [[*many, "s", "d"], [*few, "t", "d"], [*few, "t", depth]]
    if attn_mask is not None:
        operands.append(attn_mask)
        scores = [*zip([*many, "s", "t"], (*out.shape[:-1], key.shape[-2]), strict=True)][
            -attn_mask.ndim :
        ]
        same = [n == size for n, (_, size) in zip(attn_mask.shape, scores, strict=True)]
        arrays.append([d if same[i] else f"u{i}" for i, (d, _) in enumerate(scores)])
    whole = {"d", "t", depth, *("s" if is_causal else "")}
    flops = (1.0 if is_causal else 2.0) * sum(depths) / math.prod({*depths})
    arrays.append([*many, "s", depth])
    return Call(operands, Written(arrays, "attention", whole, {"flops": flops}, lengths)), out


def bias_call(out: Tensor, bias: Tensor, is_convolution: bool) -> Call:
    """A bias is added to the last dims of a result, or to the channels of a convolution."""
    places = [
        [*range(out.ndim)],
        [1] if is_convolution else [*range(out.ndim - bias.ndim, out.ndim)],
    ]
    return Call([out, bias], placed([out.shape, bias.shape], out.shape, places, **FREE))


def _indexed(args: Mapping[str, Any], out: Tensor) -> Call:
    """Rows of an array by arrays of numbers: the dims that these stand for are whole."""
    x = args["self"]
    by = {d: index for d, index in enumerate(args["indices"]) if index is not None}
    first = min(by)
    n = max(index.ndim for index in by.values())
    dims = letters(out.ndim)
    lead = first if max(by) - first < len(by) else 0
    rows = dims[lead : lead + n]
    rest = iter([*dims[:lead], *dims[lead + n :]])
    arrays = [[f"u{d}" if d in by else next(rest) for d in range(x.ndim)]]
    for d, index in by.items():
        pairs = zip(rows[n - index.ndim :], index.shape, strict=True)
        arrays.append([r if m == out.shape[int(r[1:])] else f"v{d}{r}" for r, m in pairs])
    return Call([x, *by.values()], Written([*arrays, dims], "linear", [f"u{d}" for d in by]))
